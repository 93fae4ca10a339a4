"""Settings of a private loop: its Plan, which is run and whose cost is certified, delta, noise mode and seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import SGD, Optimizer

from sordino import codec
from sordino.accounting import calibration
from sordino.accounting.calibration import calibrate, noisier
from sordino.accounting.composition import Participation
from sordino.accounting.delta import check_delta, default_delta, largest_delta
from sordino.accounting.rounding import atleast
from sordino.errors import ConfigError, brief_repr
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import PoissonRecords, RecordsInTurn
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import CentralNoise
from sordino.parts.server_optimizers import TorchOptimizer
from sordino.parts.strategies import Strategy
from sordino.plan import Plan
from sordino.recipes.record_level import alone
from sordino.rng import Mode

Reduction = Literal["mean", "sum"]
Batches = PoissonRecords | RecordsInTurn


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`plan`:  g = A^-1 (sum_j g_j min(1, C / ||g_j||) + N(0, (z C)^2)) / batch,  a round is a step.

    `epsilon` is the target, where the noise multiplier z was solved for. Under correlated noise row t of C^-1 Z takes
    the place of N, and the batches come in one fixed order.
    """

    plan: Plan
    delta: float
    noise: Mode
    seed: int
    reduction: Reduction
    epsilon: float | None = None

    @property
    def steps(self) -> int:
        """Planned steps."""
        return self.plan.rounds

    @property
    def records(self) -> Batches:
        """Sampler of the records that a step reads."""
        assert isinstance(self.plan.local.reads, Batches)
        return self.plan.local.reads

    @property
    def clip_norm(self) -> float:
        """The clip norm of one record's gradient."""
        assert isinstance(self.plan.local, BatchGradient)
        assert isinstance(self.plan.local.clip_norm, float)
        return self.plan.local.clip_norm

    @property
    def per_epoch(self) -> int:
        """Steps in which every record is read once: on average, or exactly."""
        return steps_per_epoch(self.records)

    def max_steps(self) -> float:
        """The most steps that the target epsilon allows; the planned ones under correlated noise."""
        if self.plan.release.correlated:
            return self.steps
        if self.epsilon is None:
            return math.inf
        found = calibration.rounds(
            lambda n: self.plan.cost(Participation(n, n)).line("models"), self.epsilon, self.delta
        )
        return max(self.steps, found)


def batches(batch: int, size: int, strategy: Strategy | None) -> Batches:
    """Poisson batches; under correlated noise one shuffled order, cut into batches that come again in every epoch."""
    return PoissonRecords(float(batch), (size,)) if strategy is None else RecordsInTurn(batch, (size,))


def steps_per_epoch(records: Batches) -> int:
    """round(1 / rate), or the whole batches of the order."""
    if isinstance(records, RecordsInTurn):
        return records.size(0) // records.batch
    return max(1, round(1 / records.rate(0)))


def loop_plan(
    *,
    epochs: int,
    records: Batches,
    clip_norm: float,
    smoothing: float,
    optimizer: Optimizer,
    strategy: Strategy | None = None,
) -> Plan:
    """DP-SGD and its kin (recipes/record_level.py) with noise of noise multiplier 1.

    The server is an optimizer of PyTorch: it works on what is noised already, so the plan only names it. Bands are
    found for the momentum that it begins with.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ConfigError(f"epochs = {epochs}", "a whole number of at least 1")
    if not 0 < clip_norm < math.inf:
        raise ConfigError(f"clip_norm = {clip_norm}", "a positive finite number", "1.0 is a good start")
    first, noise = optimizer.param_groups[0], Gaussian(1.0)
    momentum = first["momentum"] if isinstance(optimizer, SGD) and strategy is not None else None
    return alone(
        TorchOptimizer(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", momentum),
        rounds=epochs * steps_per_epoch(records),
        records=records,
        clip_norm=clip_norm,
        release=CentralNoise(noise) if strategy is None else CorrelatedNoise(noise, strategy),
        denoiser=LaplacianSmoothing(smoothing) if smoothing else None,
    )


def calibrate_noise(plan: Plan, epsilon: float | None, noise_multiplier: float | None, delta: float) -> Plan:
    """The plan with the smallest noise multiplier that costs `epsilon`, or with the one that is given."""
    if epsilon is not None and noise_multiplier is None:
        return calibrate(plan, epsilon=epsilon, delta=delta)
    if noise_multiplier is not None and epsilon is None:
        return noisier(plan, noise_multiplier)
    raise ConfigError(f"epsilon = {epsilon} and noise_multiplier = {noise_multiplier}", "exactly one of them")


def checked_delta(delta: float | None, population: int, allow_large: bool) -> float:
    """delta, by default population^-1.1 and at most 1e-3; one above population^-1.1 only if asked for."""
    limit = largest_delta(population)
    found = default_delta(population) if delta is None else delta
    check_delta(found, population, override=True)
    if found > limit * (1 + 1e-9) and not allow_large:
        fix = "lower it, or pass allow_large_delta=True"
        raise ConfigError(f"delta = {found}", f"at most records^-1.1 = {atleast(limit)}", fix)
    return found


def first_difference(ours: Settings, stored: Any) -> str:
    """The first setting in which a stored run differs from this one; empty if none does."""
    mine, other = dict(_leaves(codec.dump(ours))), dict(_leaves(stored))
    for name in [*mine, *(name for name in other if name not in mine)]:
        if _text(mine.get(name)) != _text(other.get(name)):
            return f"{name} = {brief_repr(other.get(name))} where this run has {brief_repr(mine.get(name))}"
    return ""


def _text(value: Any) -> str:
    """Two plain values are the same if their texts are: 1, 1.0 and true are three; of a stranger's type, its name."""
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)


def _leaves(table: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a table, by the path to it."""
    if not isinstance(table, dict):
        yield where, table
        return
    for name, item in table.items():
        yield from _leaves(item, f"{where}.{name}" if where else name)
