"""What a private loop is: one frozen value that is run, billed, saved and compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from sordino import codec
from sordino.errors import ConfigError
from sordino.parts.mechanisms import Gaussian
from sordino.parts.postprocess import LaplacianSmoothing
from sordino.parts.records import PoissonRecords
from sordino.privacy import calibrate
from sordino.privacy.bill import Line
from sordino.privacy.certificate import check_delta, default_delta
from sordino.rng import Mode

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`steps` times  g = A^-1 (sum_j g_j min(1, clip / ||g_j||) + N(0, (z clip)^2)) / batch,  A = I + smoothing * L.

    z -> mechanism.multiplier, batch -> records.batch: the expected size of a Poisson batch, a constant.
    """

    records: PoissonRecords
    steps: int
    clip: float
    mechanism: Gaussian
    smoothing: LaplacianSmoothing
    delta: float
    noise: Mode
    seed: int
    reduction: Reduction
    epsilon: float | None = None  # the target, where the multiplier was solved for

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip = {self.clip}", "a positive finite number", "1.0 is a good start")

    def line(self, steps: int) -> Line:
        """What so many steps cost one who sees every model: the sampler's own event of the mechanism's own noise."""
        event = self.records.amplify(self.mechanism.event(), 0)
        return Line("models", self.records.relation, ((event, steps),))

    @property
    def per_epoch(self) -> int:
        """Steps in which every record is read once on average."""
        return steps_per_epoch(self.records)

    def most(self) -> float:
        """The most steps that the target allows; any number where there is none."""
        if self.epsilon is None:
            return math.inf
        return max(self.steps, calibrate.rounds(self.line, self.epsilon, self.delta))


def steps_per_epoch(records: PoissonRecords) -> int:
    """round(1 / rate)."""
    return max(1, round(1 / records.rate(0)))


def planned(
    *, epochs: int, epsilon: float | None, multiplier: float | None, records: PoissonRecords, **others: Any
) -> Settings:
    """The settings, with the smallest multiplier that costs `epsilon` unless one is given."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ConfigError(f"epochs = {epochs}", "a whole number of at least 1")
    if (epsilon is None) == (multiplier is None):
        raise ConfigError(f"epsilon = {epsilon} and multiplier = {multiplier}", "exactly one of them")
    steps = epochs * steps_per_epoch(records)
    noise = Gaussian(1.0 if multiplier is None else multiplier)
    bare = Settings(records=records, steps=steps, epsilon=epsilon, mechanism=noise, **others)
    if epsilon is None:
        return bare
    return replace(bare, mechanism=Gaussian(_solved(bare, epsilon)))


def _solved(bare: Settings, epsilon: float) -> float:
    def line_of(z: float) -> Line:
        return replace(bare, mechanism=Gaussian(z)).line(bare.steps)

    return calibrate.multiplier(line_of, epsilon, bare.delta)


def checked_delta(delta: float | None, population: int, allow_large: bool) -> float:
    """delta, by default population^-1.1; a larger one only if asked for."""
    limit = default_delta(population)
    found = limit if delta is None else delta
    check_delta(found, population, override=True)
    if found > limit * (1 + 1e-9) and not allow_large:
        fix = "lower it, or pass allow_large_delta=True"
        raise ConfigError(f"delta = {found}", f"at most records^-1.1 = {limit:.3g}", fix)
    return found


def differing(ours: Settings, stored: Any) -> str:
    """The first setting in which a stored run differs from this one; empty if none does."""
    mine, other = codec.dump(ours), stored if isinstance(stored, dict) else {}
    for name in [*mine, *(name for name in other if name not in mine)]:
        if mine.get(name) != other.get(name):
            return f"{name} = {other.get(name)} where this run has {mine.get(name)}"
    return ""
