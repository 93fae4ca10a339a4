"""Local solvers where the record is the unit: gradients clipped record by record, in a silo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.accounting.bounds import AlreadyPrivate, Bound, Norm
from sordino.accounting.events import Event
from sordino.errors import PlanError, brief_repr
from sordino.parts.encoding import Adaptive, Public
from sordino.parts.gradients import Ball, Gradient, Moreau, Plain
from sordino.parts.local_solvers import Coins, LocalSolver, Work
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllRecords, RecordSampler, batches
from sordino.parts.releases import on_grid_rows
from sordino.parts.schedules import MOST, Schedule, at, finite, paces, span_of_steps, travelled

NOISE_BLOCK = 1 << 22  # numbers of noise that are drawn at once


def _check(clip_norm: float | Schedule, gradient: Gradient) -> None:
    if not isinstance(clip_norm, Schedule) and not 0 < clip_norm < math.inf:
        raise PlanError("clip", f"clip_norm = {clip_norm}", "a positive finite clip norm for every record's gradient")
    if isinstance(clip_norm, Adaptive):
        found = "an adaptive clip norm, which follows the norms of whole updates"
        raise PlanError("clip", found, "a number, or a schedule that is fixed before the run")
    if not isinstance(gradient, Plain | Moreau):
        found = f"gradient {gradient.kind!r}, which mixes the records of a batch"
        raise PlanError("records", found, "plain or moreau, whose gradient is a sum over records")


def _ball(clip_norm: float | Schedule, norm: Norm, gradient: Gradient, t: int) -> Ball:
    return Ball(at(clip_norm, t), norm, gradient if isinstance(gradient, Moreau) else None)


class _Reads:
    """What solvers of unit record share: they read records, and project on nothing."""

    records: RecordSampler
    clip_norm: float | Schedule

    @property
    def clip_norms(self) -> tuple[float | Schedule, ...]:
        return (self.clip_norm,)

    @property
    def projects(self) -> bool:
        return False

    @property
    def reads(self) -> RecordSampler | None:
        return self.records

    def records_read(self, size: int) -> int:
        each = size if isinstance(self.records, AllRecords) else min(size, self.batch)
        return each * getattr(self, "steps", 1)

    @property
    def batch(self) -> int:
        """Records per step, for the engine's rule."""
        return math.ceil(self.records.count)


@dataclass(frozen=True)
class BatchGradient(_Reads, LocalSolver, kind="batch_gradient"):
    """message = 1 / clip norm * sum over the batch of g_j min(1, clip norm / ||g_j||),  g_j = grad f(w; record j).

    One gradient per round; the server steps after multiplying the noised mean by the constant clip norm / batch.
    Guarantee: adding or removing one record moves the message by at most 1, replacing one by at most 2.
    """

    records: RecordSampler
    clip_norm: float | Schedule
    norm: Norm = 2
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        _check(self.clip_norm, self.gradient)

    def bound(self) -> Bound | AlreadyPrivate:
        return Bound(unit="record", norm=self.norm, finite=True)

    def for_one_record(self) -> LocalSolver:
        return replace(self, records=AllRecords((1,)))

    def ball(self, t: int) -> Ball:
        """Where every record's gradient is pulled to in round t."""
        return _ball(self.clip_norm, self.norm, self.gradient, t)

    def unit(self, public: Public) -> float:
        return at(self.clip_norm, public.t) / self.records.count

    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        return batches(self.records, t, client, size, rng, 1)

    def solve(self, work: Work) -> Tensor:
        (batch,) = work.batches
        ball = self.ball(work.public.t)
        return work.objective.clipped(work.objective.place(work.start, work.m), batch, ball) / ball.clip_norm


@dataclass(frozen=True)
class NoisyLocalSgd(_Reads, LocalSolver, kind="noisy_local_sgd"):
    """`steps` times  w <- w - lr_t / batch * (sum_j clip(g_j) + N(0, (z * clip norm)^2));  message = w_t - w.

    z is the noise multiplier.

    Noise in every local step (paper 001's baseline): the message is private already, so only `Forward` may carry it.
    Guarantee: each step is one release of a batch of the silo's records; a round costs `steps` of them.
    """

    records: RecordSampler
    clip_norm: float | Schedule
    noise_multiplier: float
    lr: float | Schedule
    steps: int
    noise_multipliers: tuple[float, ...] = ()
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        _check(self.clip_norm, self.gradient)
        for noise_multiplier in (self.noise_multiplier, *self.noise_multipliers):
            Gaussian(noise_multiplier)
        if not (1 <= self.steps <= MOST and finite(self.lr)):
            found = f"steps = {brief_repr(self.steps)}, lr = {brief_repr(self.lr)}"
            raise PlanError("local work", found, f"from 1 to {MOST:,} steps, and a finite lr")

    def check_rounds(self, rounds: int) -> None:
        if not finite(*span_of_steps(self.lr, rounds, self.steps)):
            needed = "finite numbers that float32 holds in every local step"
            raise PlanError("schedule", f"lr = {brief_repr(self.lr)} over {rounds} rounds", needed)

    def check_population(self, population: int) -> None:
        if self.noise_multipliers and len(self.noise_multipliers) != population:
            found = f"{len(self.noise_multipliers)} noise multipliers for {population} silos"
            raise PlanError("local noise", found, "one noise multiplier per silo")

    def noise(self, silo: int) -> Gaussian:
        """What one silo adds in each step."""
        return Gaussian(self.noise_multipliers[silo] if self.noise_multipliers else self.noise_multiplier)

    def own_event(self, client: int) -> Event:
        return self.noise(client).event()

    def own_noise(self, t: int, client: int) -> Gaussian:
        pace = math.hypot(*paces(self.lr, t, self.steps)) * at(self.clip_norm, t) / self.records.count
        return Gaussian(pace * self.noise(client).std)

    def message_sensitivity(self, t: int) -> float:
        return travelled(self.lr, t, self.steps) * at(self.clip_norm, t) / self.records.count

    def for_one_record(self) -> LocalSolver:
        return BatchGradient(AllRecords((1,)), self.clip_norm, gradient=self.gradient)

    def with_noise_multiplier(self, noise_multiplier: float) -> LocalSolver:
        return replace(self, noise_multiplier=noise_multiplier, noise_multipliers=())

    def with_noise_multipliers(self, noise_multipliers: tuple[float, ...]) -> LocalSolver:
        return replace(self, noise_multipliers=noise_multipliers)

    def bound(self) -> Bound | AlreadyPrivate:
        least = min(self.noise_multipliers or (self.noise_multiplier,))
        return AlreadyPrivate(Gaussian(least).event(), "record", self.steps)

    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        return batches(self.records, t, client, size, rng, self.steps)

    def solve(self, work: Work) -> Tensor:
        objective, coins, t = work.objective, work.coins, work.public.t
        w, ball = objective.place(work.start, work.m), _ball(self.clip_norm, 2, self.gradient, t)
        own = [each.solver if isinstance(each.solver, NoisyLocalSgd) else self for each in coins]
        noises = [solver.noise(each.client) for solver, each in zip(own, coins, strict=True)]
        scales = w.new_tensor([noise.std for noise in noises], dtype=torch.float64)[:, None]
        lrs = [[lr * ball.clip_norm / each.records.count for lr in paces(each.lr, t, self.steps)] for each in own]
        moves = w.new_tensor(lrs).T[:, :, None]  # [steps, m, 1]
        for move, batch, noise in zip(moves, work.batches, self._noise(w.shape[1], noises, coins), strict=True):
            noised = objective.clipped(w, batch, ball).double() / ball.clip_norm + noise.to(w.device)
            w.sub_(on_grid_rows(noised, scales).to(w.dtype).mul_(move))
        return work.start - w

    def _noise(self, size: int, noises: Sequence[Gaussian], coins: Sequence[Coins]) -> Iterator[Tensor]:
        """Every silo's own noise [m, d], step by step; many steps in one draw where that fits in memory."""
        block = max(1, min(self.steps, NOISE_BLOCK // (size * max(len(coins), 1))))
        for first in range(0, self.steps, block):
            count = min(block, self.steps - first)
            drawn = [noise.sample(count * size, own.rng) for noise, own in zip(noises, coins, strict=True)]
            yield from torch.from_numpy(np.stack([rows.reshape(count, size) for rows in drawn], 1))
