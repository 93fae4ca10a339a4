"""What is released once, before the first round, so that columns can be scaled and imputed without reading them freely.

Ranges and means that are taken from private rows are a release like any other. Here they are read off one noised
histogram per column, over a public grid: a message in the L1 unit ball, Laplace noise, one entry of the cost.
Whatever is read off the noised histogram (quantiles, a mean, a median) is post-processing and costs nothing more.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.bounds import Unit
from sordino.accounting.events import Event, Relation, sensitivity
from sordino.codec import Part
from sordino.errors import PlanError, brief_repr
from sordino.parts.mechanisms import Laplace
from sordino.parts.schedules import positive

Values = NDArray[np.float64]
MOST_BINS = 4096
STEEP = 1e4  # of a log grid: its last bin is about so many times as wide as its first


class Preparation(Part):
    """One release of one column before the first round."""

    column: str
    epsilon: float

    @abstractmethod
    def message(self, shares: Values, unit: Unit) -> Values:
        """What the values of one client, or of one silo's records, come to: a unit moves it by at most 1 in L1."""

    @abstractmethod
    def noise(self, relation: Relation) -> Laplace:
        """What is added to a message so that the release costs `epsilon` when neighbours differ by `relation`."""

    def event(self, relation: Relation) -> Event:
        """What the release costs; `relation` is that of the cost's first line, by which its noise is sized."""
        return self.noise(relation).event()


@dataclass(frozen=True)
class Histogram(Preparation, kind="histogram"):
    """h_b = sum over units of their share in bin b, + Laplace(sensitivity / epsilon) per bin.

    A value v in [low, high] is held as its share (v - low) / (high - low) of that public range; what lies outside is
    clamped, a missing value (a share below 0) is in no bin. One record is in one bin, so ||h||_1 moves by 1, or by 2
    where it is replaced; of a client the histogram of all its values is divided by their number, so it weighs 1 too.
    Guarantee: pure epsilon (Dwork, McSherry, Nissim, Smith 2006, Theorem 1).
    """

    column: str
    epsilon: float
    low: float
    high: float
    bins: int = 64
    grid: Literal["even", "log"] = "even"

    def __post_init__(self) -> None:
        if not positive(self.epsilon):
            needed = "a positive number"
            raise PlanError("preparation", f"epsilon {brief_repr(self.epsilon)} for {self.column!r}", needed)
        if not -1e300 < self.low < self.high < 1e300:
            found = f"the range from {brief_repr(self.low)} to {brief_repr(self.high)} for {self.column!r}"
            raise PlanError("preparation", found, "two public numbers, low < high, that all values may lie between")
        if not 2 <= self.bins <= MOST_BINS:
            found = f"{brief_repr(self.bins)} bins for {self.column!r}"
            raise PlanError("preparation", found, f"from 2 to {MOST_BINS}")

    @property
    def edges(self) -> Values:
        """Public bounds of the bins as shares of the range, [bins + 1]; on a log grid narrow near `low`."""
        even = np.linspace(0.0, 1.0, self.bins + 1)
        return even if self.grid == "even" else np.expm1(even * math.log1p(STEEP)) / STEEP

    def noise(self, relation: Relation) -> Laplace:
        return Laplace(sensitivity(relation) / self.epsilon)

    def message(self, shares: Values, unit: Unit) -> Values:
        """[bins]: counts of one silo's records, each 1; of a client, parts of one."""
        present = np.clip(shares[shares >= 0], 0.0, 1.0)
        place = np.searchsorted(self.edges[1:-1], present, side="right")
        counts = np.bincount(place, minlength=self.bins).astype(np.float64)
        return counts / max(len(present), 1) if unit == "client" else counts

    # ---- what can be read off the noised sum, at no cost -------------------------------------------------------------

    def cumulated(self, total: Values) -> Values:
        """The nearest that grows to the noised cumulated counts, from 0 to 1: [bins + 1]."""
        from scipy.optimize import isotonic_regression

        grown = np.maximum(isotonic_regression(np.cumsum(total)).x, 0.0)
        return np.concatenate([[0.0], grown / grown[-1]]) if grown[-1] > 0 else self.edges

    def quantile(self, total: Values, level: float) -> float:
        """Where the cumulated counts reach `level`: a share of the range, between two edges of a bin."""
        below, edges = self.cumulated(total), self.edges
        place = min(max(int(np.searchsorted(below, level, side="left")), 1), self.bins)
        rise = below[place] - below[place - 1]
        inside = (level - below[place - 1]) / rise if rise > 0 else 1.0
        return float(edges[place - 1] + np.clip(inside, 0.0, 1.0) * (edges[place] - edges[place - 1]))

    def mean(self, total: Values) -> float:
        """The mean of the middles of the bins under what `cumulated` says: a share of the range."""
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        return float(np.diff(self.cumulated(total)) @ middles)

    def span(self, total: Values, levels: tuple[float, float]) -> tuple[float, float]:
        """Two quantiles, at least a bin apart: a range of shares that can be scaled by."""
        low, high = (self.quantile(total, level) for level in levels)
        place = min(int(np.searchsorted(self.edges, low, side="right")), self.bins)
        return (low, high) if high > low + 1e-9 else (float(self.edges[place - 1]), float(self.edges[place]))

    def value(self, share: float) -> float:
        """A share of the range in the column's own unit."""
        return self.low + share * (self.high - self.low)
