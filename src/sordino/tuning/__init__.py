"""`sordino tune`: local steps, rounds, batch and step size for a budget, found without touching private data."""

from sordino.tuning.tune import Tuned, tune

__all__ = ["Tuned", "tune"]
