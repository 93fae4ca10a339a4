"""Local solvers with record-level privacy, in which a silo clips the gradient of every record. Engines call `solve`."""

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
from sordino.errors import brief_repr
from sordino.parts.encoding import Adaptive, ClipNorms, Public
from sordino.parts.gradients import Ball, Gradient, Moreau, Plain
from sordino.parts.local_solvers import LocalSolver, NoiseStream, Work
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllRecords, RecordSampler, batches
from sordino.parts.releases import on_grid_rows
from sordino.parts.schedules import (
    MOST,
    Schedule,
    at,
    finite,
    require,
    require_values,
    span_of_steps,
    step_values,
    travelled,
)

NOISE_BLOCK = 1 << 22  # numbers of noise that are drawn at once


class _RecordSolver(LocalSolver):
    records: RecordSampler
    clip_norm: float | Schedule
    gradient: Gradient
    norm: Norm = 2
    steps: int = 1  # local steps of a round

    def __post_init__(self) -> None:
        fits = isinstance(self.clip_norm, Schedule) or 0 < self.clip_norm < math.inf
        needed = "a positive finite clip norm for every record's gradient"
        require_values(fits, "clip", needed, clip_norm=self.clip_norm)
        found = "a clip norm per layer, or an adaptive one, for " + (self.kind if self.norm == 2 else "L1 norms")
        fits = not self.needs_loop or (isinstance(self, BatchGradient) and self.norm == 2)
        require(fits, "clip", found, "a clip norm that is fixed before the run", "set clip_norm to a number")
        found = f"gradient {self.gradient.kind!r}, which mixes the records of a batch"
        fits = isinstance(self.gradient, Plain | Moreau)
        require(fits, "records", found, "a gradient that is a sum over records", "use gradient plain or moreau")

    @property
    def clip_scope(self) -> str:  # type: ignore[override]
        if isinstance(self.clip_norm, ClipNorms):
            return f"one norm for each group of parameters, over the gradient of each single record: {self.clip_norm}"
        if isinstance(self.clip_norm, Adaptive):
            more = "the clip norm follows a quantile of the norms, by one more coordinate of the same noised message"
            return f"{LocalSolver.clip_scope}; {more}"
        return LocalSolver.clip_scope

    @property
    def adaptive(self) -> Adaptive | None:  # type: ignore[override]
        return self.clip_norm if isinstance(self.clip_norm, Adaptive) else None

    @property
    def needs_loop(self) -> bool:  # type: ignore[override]
        return isinstance(self.clip_norm, Adaptive | ClipNorms)

    @property
    def clip_norms(self) -> tuple[float | Schedule, ...]:  # type: ignore[override]
        return (self.clip_norm,)

    @property
    def reads(self) -> RecordSampler | None:  # type: ignore[override]
        return self.records

    @property
    def batch(self) -> int:
        """Number of records per step, rounded up."""
        return math.ceil(self.records.count)

    def records_read(self, size: int) -> int:
        return (size if isinstance(self.records, AllRecords) else min(size, self.batch)) * self.steps

    def ball(self, t: int) -> Ball:
        """Return the ball that every record's gradient is clipped to in round t."""
        envelope = self.gradient if isinstance(self.gradient, Moreau) else None
        return Ball(at(self.clip_norm, t), self.norm, envelope)

    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        return batches(self.records, t, client, size, rng, self.steps)


@dataclass(frozen=True)
class BatchGradient(_RecordSolver, kind="batch_gradient"):
    """Sum of clipped record gradients g_j of one batch: message = sum_j g_j min(1, C / ||g_j||) / C.

    C is `clip_norm`. The server multiplies the noised sum by the constant C / batch. In `make_private` the clip norm
    may be one for each layer (`ClipNorms`), or follow a quantile of the norms (`Adaptive`). Guarantee: adding or
    removing one record changes the message by at most 1, replacing one by at most 2.
    """

    records: RecordSampler
    clip_norm: float | Schedule
    norm: Norm = 2
    gradient: Gradient = field(default_factory=Plain)

    def bound(self) -> Bound | AlreadyPrivate:
        return Bound(unit="record", norm=self.norm, finite=True)

    def for_one_record(self) -> LocalSolver:
        return replace(self, records=AllRecords((1,)))

    def length(self, size: int) -> int:
        return size + isinstance(self.clip_norm, Adaptive)

    def unit(self, public: Public) -> float:
        if isinstance(self.clip_norm, Adaptive):
            return public.clip_norm / (self.clip_norm.update_norm * self.records.count)
        return at(self.clip_norm, public.t) / self.records.count

    def solve(self, work: Work) -> Tensor:
        (batch,) = work.batches
        ball = self.ball(work.public.t)
        return work.objective.clipped(work.objective.place(work.start, work.m), batch, ball) / ball.clip_norm


@dataclass(frozen=True)
class NoisyLocalSgd(_RecordSolver, kind="noisy_local_sgd"):
    """Local DP-SGD: `steps` times w <- w - lr / batch * (sum_j clip(g_j) + N(0, (z C)^2 I)); the message is w_t - w.

    w_t is the public model of round t, g_j the gradient of record j, C the clip norm and z the noise multiplier. Every
    local step adds noise, so the message needs no further noise, and the release must be `Forward`. Guarantee: each
    step is one release of a batch of the silo's records; a round costs `steps` of them.
    """

    records: RecordSampler
    clip_norm: float | Schedule
    noise_multiplier: float
    lr: float | Schedule
    steps: int
    noise_multipliers: tuple[float, ...] = ()
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        super().__post_init__()
        for noise_multiplier in (self.noise_multiplier, *self.noise_multipliers):
            Gaussian(noise_multiplier)
        fits, needed = 1 <= self.steps <= MOST and finite(self.lr), f"from 1 to {MOST:,} steps, and a finite lr"
        require_values(fits, "local work", needed, steps=self.steps, lr=self.lr)

    def check_rounds(self, rounds: int) -> None:
        found = f"lr = {brief_repr(self.lr)} over {rounds} rounds"
        fits = finite(*span_of_steps(self.lr, rounds, self.steps))
        require(fits, "schedule", found, "numbers in the range of float32 in every local step", "change lr")

    def check_population(self, population: int) -> None:
        found = f"{len(self.noise_multipliers)} noise multipliers for {population} silos"
        fits = len(self.noise_multipliers) in (0, population)
        require(fits, "local noise", found, "one noise multiplier per silo", "give each silo one, or drop them")

    def noise(self, silo: int) -> Gaussian:
        """Return the mechanism whose noise one silo adds in each local step."""
        return Gaussian(self.noise_multipliers[silo] if self.noise_multipliers else self.noise_multiplier)

    def own_event(self, client: int) -> Event:
        return self.noise(client).event()

    def own_noise(self, t: int, client: int) -> Gaussian:
        pace = math.hypot(*step_values(self.lr, t, self.steps)) * at(self.clip_norm, t) / self.records.count
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

    def solve(self, work: Work) -> Tensor:
        objective, streams, t = work.objective, work.noise_streams, work.public.t
        w, ball = objective.place(work.start, work.m), self.ball(t)
        own = [each.solver if isinstance(each.solver, NoisyLocalSgd) else self for each in streams]
        noises = [solver.noise(each.client) for solver, each in zip(own, streams, strict=True)]
        scales = w.new_tensor([noise.std for noise in noises], dtype=torch.float64)[:, None]
        lrs = [[lr * ball.clip_norm / each.records.count for lr in step_values(each.lr, t, self.steps)] for each in own]
        moves = w.new_tensor(lrs).T[:, :, None]  # [steps, m, 1]
        for move, batch, noise in zip(moves, work.batches, self._noise(w.shape[1], noises, streams), strict=True):
            noised = objective.clipped(w, batch, ball).double() / ball.clip_norm + noise.to(w.device)
            w.sub_(on_grid_rows(noised, scales).to(w.dtype).mul_(move))
        return work.start - w

    def _noise(self, size: int, noises: Sequence[Gaussian], streams: Sequence[NoiseStream]) -> Iterator[Tensor]:
        """Yield the noise [m, d] of all silos step by step; one draw covers as many steps as `NOISE_BLOCK` holds."""
        block = max(1, min(self.steps, NOISE_BLOCK // (size * max(len(streams), 1))))
        for first in range(0, self.steps, block):
            count = min(block, self.steps - first)
            drawn = [noise.sample(count * size, own.rng) for noise, own in zip(noises, streams, strict=True)]
            yield from torch.from_numpy(np.stack([rows.reshape(count, size) for rows in drawn], 1))
