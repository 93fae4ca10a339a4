"""A user's module or loss as a graph of torch operations: captured on synthetic records, and read for independence.

captured  a graph as a value; capture makes one of a module's forward, by torch.fx or torch.export: no Python of the
          user's runs on private records any more
rules     (and operation_table) for each ATen operation, along which dimension the records of a batch lie in its output
flow      reads a captured graph: does the output for a record depend on that record alone?
tracing   the graphs of one module, one for each kind of arguments, and its grade

Grades say what is proved of the code that runs on private records; certificates and policies use the same words:

by construction          no record reaches another: read off the operations (`flow`)
per record (vmap)        the graph has no state and no branch on data; it is run for each record by itself
own code, trusted        no graph: the user's Python runs on the records, and the user vouches for it
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from sordino import lazy

if TYPE_CHECKING:
    from sordino.graph.captured import Captured as Captured
    from sordino.graph.captured import UntraceableError as UntraceableError
    from sordino.graph.flow import Layout as Layout
    from sordino.graph.flow import dependence as dependence
    from sordino.graph.tracing import Traced as Traced
    from sordino.graph.tracing import Tracing as Tracing

__all__, __getattr__ = lazy.exports(__name__, __file__)
__all__ += ["BY_CONSTRUCTION", "GRADES", "PER_RECORD", "TRUSTED", "Grade", "weakest"]

Grade = Literal["by construction", "per record (vmap)", "own code, trusted"]
BY_CONSTRUCTION: Grade = "by construction"
PER_RECORD: Grade = "per record (vmap)"
TRUSTED: Grade = "own code, trusted"
GRADES: tuple[Grade, ...] = (BY_CONSTRUCTION, PER_RECORD, TRUSTED)


def weakest(grades: Sequence[Grade]) -> Grade:
    """The grade of what is made of several pieces of code."""
    return max(grades, key=GRADES.index, default=BY_CONSTRUCTION)
