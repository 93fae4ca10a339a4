"""Local solvers whose privacy unit is a client (local SGD, SCAFFOLD), and `LocalSolver`, the base of all local solvers.

An engine calls `solve` with the work of m clients at once; each message is one row.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import AlreadyPrivate, Bound
from sordino.accounting.events import Event
from sordino.codec import Part
from sordino.codec.boundary import array, number, of_type, returns, tensor, tensors
from sordino.errors import PlanError, brief_repr
from sordino.layout import Layout
from sordino.parts import schedules
from sordino.parts.clipping import row_norms
from sordino.parts.encoding import Public
from sordino.parts.gradients import Anchor, Batch, Gradient, Moreau, Objective, Plain
from sordino.parts.mechanisms import Mechanism
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.schedules import MOST, Schedule, require, require_values

CONTROL = "control"  # name of SCAFFOLD's control variates in client states and broadcasts


@dataclass(frozen=True)
class NoiseStream:
    """Random generator of one client's noise; `solver` is the client's own solver, if clients have different ones."""

    client: int
    rng: np.random.Generator
    solver: LocalSolver | None = None


@codec.hides_values
@dataclass(frozen=True)
class Work:
    """Input of a local solver for m clients: the common model `start`, and the batches of records to read."""

    objective: Objective
    start: Tensor  # [d]
    batches: Iterable[Batch]
    m: int
    public: Public
    noise_streams: Sequence[NoiseStream] = ()  # one per client, where clients add noise
    state: dict[str, Tensor] = field(default_factory=dict)  # [m, *shape] by name: `solve` updates it in place


def _update_and_broadcast(found: object, *_: object) -> str:
    pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and not tensors(found[1])
    return "" if pair else "a tensor, and a dict of tensors"


class LocalSolver(Part):
    """Base class of local training: it makes a message (model before minus after) from a client's records."""

    noise_multipliers: tuple[float, ...] = ()  # one per client, where clients differ
    clip_norms: tuple[float | Schedule, ...] = ()  # clip norms that the solver applies to single records
    reads: RecordSampler | None = None  # how records are drawn, where the privacy unit is a record
    clip_scope: str = "one norm over the gradient of each single record"  # what `clip_norms` bound, for certificates
    adaptive: Schedule | None = None  # a clip norm of single records that is read off releases
    needs_loop: bool = False  # True: only a loop of PyTorch (`make_private`) runs it, no engine
    project: bool = False  # True: `solve` projects on the ball of the plan's clip norm, so the plan needs a Clip step

    @returns(of_type(Bound, AlreadyPrivate))
    def bound(self) -> Bound | AlreadyPrivate:
        """Return the norm bound of the message; by default none, so that the plan needs a Clip step."""
        return Bound(unit="client")

    @abstractmethod
    @returns(lambda found, part, size, *_, **__: array(found, (None, None), "i", -1, max(size, 1)))
    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        """Return which of a client's `size` records each step of round t reads: [steps, b], padded with -1."""

    @abstractmethod
    @returns(lambda found, part, work: tensor(found, (work.m, part.length(len(work.start))), work.start))
    def solve(self, work: Work) -> Tensor:
        """Return the messages [m, length] of m clients: model before minus after, and what else the solver sends."""

    @property
    def any_order(self) -> bool:
        """Whether solver and gradient treat all coordinates alike, as those of this package do."""
        part: Part | None = self
        while part is not None and type(part).__module__.startswith("sordino."):
            part = getattr(part, "gradient", None)
        return part is None

    @property
    def needs_envelope(self) -> bool:
        """Whether this solver computes gradients of the Moreau envelope of the loss."""
        part: Part | None = self
        while part is not None and not isinstance(part, Moreau):
            part = getattr(part, "gradient", None)
        return part is not None

    def length(self, size: int) -> int:
        """Return the length of a message for a model of `size` parameters."""
        return size

    @returns(lambda found, *_: tensors(found))
    def client_state(self, start: Tensor) -> dict[str, Tensor]:
        """Return the initial state, by name, that a client stores between its rounds; {} if it stores none.

        `start` [d] is the public model of the client's first round. `solve` reads and updates the states of a round's
        clients in `Work.state`. A tensor of d numbers is in the order of the model's coordinates. A state never leaves
        its client: it is in no message and in no release.
        """
        return {}

    def personal_model(self, model: Tensor, state: Mapping[str, Tensor], layout: Layout) -> Tensor | None:
        """Return a client's personal model [d] from the public `model` [d] and the client's `state`; None: it has none.

        All tensors may differ from the public model (Ditto), or a few (`layout.views`, such as a head). Simulations
        evaluate personal models on the client's own rows (`personal_accuracy` in the diagnostics, not private).
        """
        return None

    def records_read(self, size: int) -> int:
        """Return how many records a client with `size` records reads in one round, as a measure of its work."""
        return size

    @returns(_update_and_broadcast)
    def split(self, mean: Tensor, public: Public, rate: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the two parts of the decoded mean: the update [d], and the vectors broadcast in the next round.

        `rate` is the expected share of the population in a round. Both results are post-processing of a release.
        """
        return mean, {}

    def for_one_record(self) -> LocalSolver:
        """Return the same solver without noise for clients of one record, which `sordino audit` plants as canaries."""
        return self

    def check_rounds(self, rounds: int) -> None:
        """Raise an error if a setting, such as a schedule, is invalid in one of `rounds` rounds."""

    def check_population(self, population: int) -> None:
        """Raise an error if settings per client do not fit the number of clients."""

    def own_event(self, client: int) -> Event:
        """Return the privacy event of one local step, for a solver that noises its own steps (`AlreadyPrivate`)."""
        raise NotImplementedError(f"{self.kind} adds no noise of its own")

    def own_noise(self, t: int, client: int) -> Mechanism | None:
        """Return the total noise that the solver adds to one message of round t; None if it is not stated."""
        return None

    def message_sensitivity(self, t: int) -> float | None:
        """Return the largest change of a message of round t by one record or client; None if it is not stated."""
        return None if isinstance(self.bound(), AlreadyPrivate) else 1.0

    def with_noise_multiplier(self, noise_multiplier: float) -> LocalSolver:
        """Return the same solver with another noise multiplier for all clients, if it adds noise."""
        raise NotImplementedError(f"{self.kind} adds no noise of its own")

    def with_noise_multipliers(self, noise_multipliers: tuple[float, ...]) -> LocalSolver:
        """Return the same solver with one noise multiplier per client, if it adds noise."""
        raise NotImplementedError(f"{self.kind} adds no noise of its own")

    @returns(lambda found, *_: number(found, 0.0, above=True))
    def unit(self, public: Public) -> float:
        """Return the factor by which the server multiplies the noised mean, to undo the scaling of messages."""
        return 1.0


@dataclass(frozen=True)
class LocalSgd(LocalSolver, kind="local_sgd"):
    """Local SGD: w <- w - lr * v, v <- momentum * v + grad f(w; batch) + weight_decay * w; the message is w_t - w.

    w_t is the public model of round t. A client runs `epochs` over its data or `steps` minibatches; batch = None is the
    full batch. With `project`, w - w_t is projected on the ball of the plan's clip norm after EVERY step (DP-Fed-LS,
    Algorithm 1). lr may change with the round, or with the local step (`PerStep`). The message has no norm bound: the
    plan needs a Clip.
    """

    lr: float | Schedule
    epochs: int | None = None
    steps: int | None = None
    batch: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    project: bool = False
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        work, rule = {"epochs": self.epochs, "steps": self.steps}, "local work"
        fits = (self.epochs is None) != (self.steps is None)
        require_values(fits, rule, "either epochs or steps", "set one of the two", **work)
        require_values(schedules.finite(self.lr), rule, "a number in the range of float32", lr=self.lr)
        fits, needed = 0 <= self.momentum < 1 and schedules.natural(self.weight_decay), "0 <= momentum < 1, decay >= 0"
        require_values(fits, rule, needed, momentum=self.momentum, weight_decay=self.weight_decay)
        count = self.steps if self.epochs is None else self.epochs
        fits = 1 <= (count or 0) <= MOST and (self.batch is None or self.batch >= 1)
        needed = f"numbers of at least 1, and at most {MOST:,} epochs or steps"
        require_values(fits, rule, needed, "change the number that is out of range", **work, batch=self.batch)
        if self.steps is None and isinstance(self.lr, Schedule) and self.lr.per_step:
            found = f"a PerStep lr with epochs = {self.epochs}: the steps would depend on a client's number of records"
            needed = "the same number of steps for all clients"
            raise PlanError("local work", found, needed, "set steps, and drop epochs")

    def check_rounds(self, rounds: int) -> None:
        if isinstance(self.lr, Schedule) and self.lr.per_step:  # the plan checks all other schedules
            found = f"lr = {brief_repr(self.lr)} over {rounds} rounds"
            fits = schedules.finite(*self.lr.span(rounds * (self.steps or 1)))
            require(fits, "schedule", found, "numbers in the range of float32 in every local step", "change lr")

    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        """Return the batches [steps, b] of a fresh permutation per epoch; the last of an epoch is padded with -1."""
        if size == 0:
            return np.empty((0, 1), dtype=np.int64)
        width = min(self.batch or size, size)
        per_epoch = math.ceil(size / width)
        epochs = self.epochs if self.epochs is not None else math.ceil((self.steps or 0) / per_epoch)
        order = np.full((epochs, per_epoch * width), -1, dtype=np.int64)
        order[:, :size] = rng.permuted(np.tile(np.arange(size), (epochs, 1)), axis=1)
        return order.reshape(-1, width)[: self.steps]

    def records_read(self, size: int) -> int:
        return size * self.epochs if self.epochs else min(size, self.batch or size) * (self.steps or 1)

    def solve(self, work: Work) -> Tensor:
        objective, start, public = work.objective, work.start, work.public
        varied = isinstance(self.lr, Schedule) and self.lr.per_step
        lr, anchor = schedules.at(self.lr, public.t), Anchor(start, public.clip_norm)
        if type(self.gradient) is Plain and not (self.momentum or self.project or varied):
            descended = objective.descend(start, work.batches, work.m, lr, self.weight_decay)
            if descended is not None:
                return start - descended
        w, n = objective.place(start, work.m), objective.trainable
        velocity = torch.zeros_like(w) if self.momentum else None
        lrs = schedules.step_values(self.lr, public.t, self.steps or 0) if varied else ()
        for j, batch in enumerate(work.batches):
            direction = self.gradient.at(objective, w, batch, anchor)
            if self.weight_decay:
                direction[:, :n].add_(w[:, :n], alpha=self.weight_decay)
            if velocity is not None:
                direction = velocity.mul_(self.momentum).add_(direction)
            direction = direction if batch.active is None else direction * batch.active[:, None]
            w.add_(direction, alpha=-(lrs[j] if varied else lr))
            if self.project and math.isfinite(public.clip_norm):
                project_(w, start, public.clip_norm)
        return start - w


def project_(w: Tensor, start: Tensor, clip_norm: float) -> None:
    """Project each row w on the clip ball around s = `start` in place: w <- s + (w - s) min(1, clip_norm/||w - s||)."""
    offset = w - start
    norms = torch.linalg.vector_norm(offset, dim=-1, keepdim=True)
    torch.addcmul(start.expand_as(w), offset, (clip_norm / norms).clamp(max=1.0), out=w)


@dataclass(frozen=True)
class Scaffold(LocalSolver, kind="scaffold"):
    """SCAFFOLD: `steps` times w <- w - lr_t (grad f(w; batch) - c_i + c); c_i' = c_i - c + (w_t - w) / (steps lr_t).

    Karimireddy et al. 2020, option II. w_t is the public model of round t and c_i the control variate of client i; the
    server's c is computed from releases:

        message = (w_t - w,  steps lr_t (c_i - c_i'))      2 d numbers in the unit of a model, clipped and noised as one
        c <- c - rate * (second half of the decoded mean) / (steps lr_t),     rate = expected / population

    The message is scaled into the plan's clip norm here, so that c_i changes by exactly what is sent; otherwise c would
    fall behind the clients' c_i, and the difference would stall training.
    The message has no norm bound: the plan needs a Clip, over both halves together. c_i depends on this client's data
    and on releases only, so a client is in one release per round of its own, and costs the same as with local SGD.
    """

    lr: float | Schedule
    steps: int
    batch: int | None = None
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        self._plain()

    def check_rounds(self, rounds: int) -> None:
        fits = schedules.positive(*schedules.span_of_steps(self.lr, rounds, self.steps))
        require_values(fits, "local work", "a positive lr in every round, by which controls are divided", lr=self.lr)

    def _plain(self) -> LocalSgd:
        return LocalSgd(lr=self.lr, steps=self.steps, batch=self.batch, gradient=self.gradient)

    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        return self._plain().indices(size, rng, t, client)

    def length(self, size: int) -> int:
        return 2 * size

    def client_state(self, start: Tensor) -> dict[str, Tensor]:
        return {CONTROL: torch.zeros_like(start)}

    def records_read(self, size: int) -> int:
        return self._plain().records_read(size)

    def solve(self, work: Work) -> Tensor:
        objective, start, public, m = work.objective, work.start, work.public, work.m
        anchor, w = Anchor(start, public.clip_norm), objective.place(start, m)
        way = schedules.travelled(self.lr, public.t, self.steps)
        lrs = schedules.step_values(self.lr, public.t, self.steps)
        own = work.state[CONTROL]
        control, taken = public.broadcast.get(CONTROL, torch.zeros_like(start)), w.new_zeros(m, 1)
        for lr, batch in zip(lrs, work.batches, strict=False):
            active = w.new_ones(m, 1) if batch.active is None else batch.active[:, None]
            w.sub_((self.gradient.at(objective, w, batch, anchor) - own + control) * active, alpha=lr)
            taken += active
        moved = start - w
        drift = torch.where(taken > 0, way * control - moved, torch.zeros_like(moved))
        message = torch.cat([moved, drift], 1)
        message *= (public.clip_norm / row_norms(message)).clamp(max=1.0).to(message.dtype)[:, None]
        own.sub_(message[:, len(start) :], alpha=1 / way)
        return message

    def split(self, mean: Tensor, public: Public, rate: float) -> tuple[Tensor, dict[str, Tensor]]:
        update, drift = mean.chunk(2)
        control = public.broadcast.get(CONTROL, torch.zeros_like(update))
        return update, {CONTROL: control - rate / schedules.travelled(self.lr, public.t, self.steps) * drift}
