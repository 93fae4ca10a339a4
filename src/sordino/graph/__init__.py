"""A user's module or loss as a graph of torch operations: captured on made-up records, and read for independence.

capture   the graph of a module's forward: no Python of the user's runs on private records any more
rules     for each ATen operation, along which dimension the records of a batch lie in its output
flow      reads a captured graph: does the output for a record depend on that record alone?
tracing   the graphs of one module, one for each kind of arguments, and its grade
"""

from sordino.graph.capture import Captured, UntraceableError, capture
from sordino.graph.flow import Layout, dependence
from sordino.graph.tracing import BY_CONSTRUCTION, GRADES, PER_RECORD, TRUSTED, Grade, Traced, Tracing, weakest

__all__ = [
    "BY_CONSTRUCTION",
    "GRADES",
    "PER_RECORD",
    "TRUSTED",
    "Captured",
    "Grade",
    "Layout",
    "Traced",
    "Tracing",
    "UntraceableError",
    "capture",
    "dependence",
    "weakest",
]
