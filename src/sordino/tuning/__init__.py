"""Hyperparameter search (`sordino tune`) on public or synthetic data, or privately, and sweeps (`sordino sweep`)."""

from sordino.tuning.tune import Tuned, tune

__all__ = ["Tuned", "tune"]
