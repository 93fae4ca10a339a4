"""A user's module or loss as a graph of torch operations: captured on synthetic records, and read for independence.

captured  a graph as a value; capture and export_capture make one of a module's forward, by torch.fx or torch.export:
          no Python of the user's runs on private records any more
rules     (and operation_table) for each ATen operation, along which dimension the records of a batch lie in its output
flow      reads a captured graph: does the output for a record depend on that record alone?
tracing   the graphs of one module, one for each kind of arguments, and its grade
grades    what is proved of the code that ran: the words that certificates and policies use
"""

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.graph.captured import Captured as Captured
    from sordino.graph.captured import UntraceableError as UntraceableError
    from sordino.graph.flow import Layout as Layout
    from sordino.graph.flow import dependence as dependence
    from sordino.graph.grades import BY_CONSTRUCTION as BY_CONSTRUCTION
    from sordino.graph.grades import GRADES as GRADES
    from sordino.graph.grades import PER_RECORD as PER_RECORD
    from sordino.graph.grades import TRUSTED as TRUSTED
    from sordino.graph.grades import Grade as Grade
    from sordino.graph.grades import weakest as weakest
    from sordino.graph.tracing import Traced as Traced
    from sordino.graph.tracing import Tracing as Tracing

__all__, __getattr__ = lazy.exports(__name__, __file__)
