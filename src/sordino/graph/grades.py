"""Grades of the code that runs on private records: what is proved of it. Read by tracing, certificates and policies.

by construction          no record reaches another: read off the operations (`flow`)
per record (vmap)        the graph has no state and no branch on data; it is run for each record by itself
own code, trusted        no graph: the user's Python runs on the records, and the user vouches for it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Grade = Literal["by construction", "per record (vmap)", "own code, trusted"]
BY_CONSTRUCTION: Grade = "by construction"
PER_RECORD: Grade = "per record (vmap)"
TRUSTED: Grade = "own code, trusted"
GRADES: tuple[Grade, ...] = (BY_CONSTRUCTION, PER_RECORD, TRUSTED)


def weakest(grades: Sequence[Grade]) -> Grade:
    """The grade of what is made of several pieces of code."""
    return max(grades, key=GRADES.index, default=BY_CONSTRUCTION)
