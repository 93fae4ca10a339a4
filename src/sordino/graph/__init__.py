"""Graphs of a user's module or loss, captured on synthetic records, and proofs that they keep records independent.

captured  has the data type of a captured graph
capture   makes graphs of a module's forward by torch.fx or torch.export, one for each kind of arguments; these graphs
          run on private records in place of the user's Python code
rules     states for each ATen operation along which dimension the records of a batch lie in its output
flow      proves that the output for a record depends on that record alone

A grade states the result of this check in certificates and policies:

by construction          no record influences another, proved by the operations (`flow`)
per record (vmap)        the graph has no state and no branch on data; it runs for each record separately
own code, trusted        no graph: the user's Python code runs on the records, and the user vouches for it
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from sordino import lazy

if TYPE_CHECKING:
    from sordino.graph.capture import Traced as Traced
    from sordino.graph.capture import Tracing as Tracing
    from sordino.graph.captured import Captured as Captured
    from sordino.graph.captured import UntraceableError as UntraceableError
    from sordino.graph.flow import Layout as Layout
    from sordino.graph.flow import dependence as dependence

__all__, __getattr__ = lazy.exports(__name__, __file__)
__all__ += ["BY_CONSTRUCTION", "GRADES", "PER_RECORD", "TRUSTED", "Grade", "weakest"]

Grade = Literal["by construction", "per record (vmap)", "own code, trusted"]
BY_CONSTRUCTION: Grade = "by construction"
PER_RECORD: Grade = "per record (vmap)"
TRUSTED: Grade = "own code, trusted"
GRADES: tuple[Grade, ...] = (BY_CONSTRUCTION, PER_RECORD, TRUSTED)


def weakest(grades: Sequence[Grade]) -> Grade:
    """Return the weakest of several grades of record independence; "by construction" if there are none."""
    return max(grades, key=GRADES.index, default=BY_CONSTRUCTION)
