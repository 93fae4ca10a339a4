"""Local solvers where the client is the unit: local SGD and SCAFFOLD, and the base of all local solvers.

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
from sordino.parts.clipping import row_norms
from sordino.parts.encoding import Public
from sordino.parts.gradients import Anchor, Batch, Gradient, Objective, Plain, is_own
from sordino.parts.mechanisms import Mechanism
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.schedules import (
    MOST,
    Schedule,
    at,
    changes_inside,
    finite,
    natural,
    paces,
    positive,
    span_of_steps,
    travelled,
)


@dataclass(frozen=True)
class Coins:
    """One client's own randomness, for noise that it adds itself; `solver` is its own where rows of a grid differ."""

    client: int
    rng: np.random.Generator
    solver: LocalSolver | None = None


@codec.hides_values
@dataclass(frozen=True)
class Work:
    """What m clients are given: all start at `start`, and read their records batch after batch."""

    objective: Objective
    start: Tensor  # [d]
    batches: Iterable[Batch]
    m: int
    public: Public
    coins: Sequence[Coins] = ()  # for noise of their own
    state: dict[str, Tensor] = field(default_factory=dict)  # [m, *shape] by name: what solve leaves here is kept


def _update_and_shared(found: object) -> str:
    pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and not tensors(found[1])
    return "" if pair else "a tensor, and a dict of tensors"


class LocalSolver(Part):
    """A client's local training: from the public model and its own records to a message, start minus end."""

    @property
    @abstractmethod
    def projects(self) -> bool:
        """Whether it needs the plan's clip norm."""

    @abstractmethod
    @returns(of_type(Bound, AlreadyPrivate))
    def bound(self) -> Bound | AlreadyPrivate:
        """What is known of the message."""

    @abstractmethod
    @returns(lambda found, part, size, *_, **__: array(found, (None, None), "i", -1, max(size, 1)))
    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        """Which of a client's `size` records each step of round t reads: [steps, b], padded with -1."""

    @abstractmethod
    @returns(lambda found, part, work: tensor(found, (work.m, part.length(len(work.start))), work.start))
    def solve(self, work: Work) -> Tensor:
        """The messages [m, length] of the clients at work: start minus end, and what else the solver sends."""

    noise_multipliers: tuple[float, ...] = ()  # one for each client, where they differ

    @property
    def any_order(self) -> bool:
        """Whether it treats all coordinates alike, and its gradient too; a solver from elsewhere has the layout's."""
        gradient = getattr(self, "gradient", None)
        return is_own(self) and (gradient is None or gradient.any_order)

    @property
    def clip_norms(self) -> tuple[float | Schedule, ...]:
        """Clip norms that the solver itself applies, to single records: each must be positive in every round."""
        return ()

    @property
    def reads(self) -> RecordSampler | None:
        """How records are drawn, where one record is the unit; None where the client is."""
        return None

    def length(self, size: int) -> int:
        """Numbers in a message of a model with `size` of them."""
        return size

    @returns(lambda found, *_: tensors(found))
    def client_state(self, start: Tensor) -> dict[str, Tensor]:
        """Initial values, by name, of the state that a client keeps between its rounds; {}: it keeps none.

        `start` [d] is the public model of the client's first round. `Work.state` holds the states of the clients at
        work, and what `solve` leaves there is handed to it in the client's next round. A tensor of d numbers is in the
        order of the model's coordinates. A state never leaves its client: it is in no message and in no release.
        """
        return {}

    def personal_model(self, model: Tensor, state: Mapping[str, Tensor], layout: Layout) -> Tensor | None:
        """A client's own model [d], from the public `model` [d] and the client's `state`; None: it has none.

        A whole model (Ditto) or single tensors of it (`layout.views`: a head). Simulations evaluate it on the
        client's own rows, `personal_accuracy` among the diagnostics, which are not private.
        """
        return None

    def records_read(self, size: int) -> int:
        """Records that a client of `size` records reads in one round: work is shared out by it."""
        return size

    @property
    def needs_envelope(self) -> bool:
        """Whether its gradient is that of the loss' Moreau envelope."""
        gradient = getattr(self, "gradient", None)
        return gradient is not None and gradient.needs_envelope

    @returns(lambda found, *_: _update_and_shared(found))
    def split(self, mean: Tensor, public: Public, rate: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The decoded mean as the update [d], and what clients are told of it in the next round (`Public.broadcast`).

        `rate` is the share of the population that a round expects. All of it is read off a release: post-processing.
        """
        return mean, {}

    def for_one_record(self) -> LocalSolver:
        """The same message without noise, of a client that holds one record; for `sordino audit --canaries`."""
        return self

    def check_rounds(self, rounds: int) -> None:
        """Refuse numbers that this solver cannot work with in every one of so many rounds."""

    def check_population(self, population: int) -> None:
        """Refuse a population that this solver cannot work with."""

    def own_event(self, client: int) -> Event:
        """One local step, where the solver adds noise of its own (`AlreadyPrivate`)."""
        raise NotImplementedError(f"{self.kind} adds no noise of its own")

    def own_noise(self, t: int, client: int) -> Mechanism | None:
        """All noise that the solver adds to one message of round t (`AlreadyPrivate`); None: not stated."""
        return None

    def message_sensitivity(self, t: int) -> float | None:
        """Sensitivity of a message of round t where its bound is 1; None: not stated (`AlreadyPrivate`)."""
        return None if isinstance(self.bound(), AlreadyPrivate) else 1.0

    def with_noise_multiplier(self, noise_multiplier: float) -> LocalSolver:
        """The same solver with another noise multiplier of its own noise (`AlreadyPrivate`), the same for all."""
        raise NotImplementedError(f"{self.kind} adds no noise of its own")

    def with_noise_multipliers(self, noise_multipliers: tuple[float, ...]) -> LocalSolver:
        """The same solver with a noise multiplier for every client."""
        raise NotImplementedError(f"{self.kind} adds no noise of its own")

    @returns(lambda found, *_: number(found, 0.0, above=True))
    def unit(self, public: Public) -> float:
        """What one unit of the message stands for: `decode` multiplies the noised mean by it."""
        return 1.0


@dataclass(frozen=True)
class LocalSgd(LocalSolver, kind="local_sgd"):
    """w <- w - lr * v,  v <- momentum * v + grad f(w; batch) + weight_decay * w;  message = w_t - w.

    Either `epochs` over the client's data or `steps` minibatches; batch = None is the full batch. With `project`,
    w - w_t is pulled back into the ball of the plan's clip norm after EVERY step (paper 000, Algorithm 1). lr is that
    of the round, or of the step of the whole run (`PerStep`).
    Bound: none; only Clip gives one.
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
        if (self.epochs is None) == (self.steps is None):
            raise PlanError("local work", f"epochs = {self.epochs} and steps = {self.steps}", "exactly one of them")
        if not finite(self.lr):
            raise PlanError("local work", f"lr = {brief_repr(self.lr)}", "a finite number that float32 holds")
        if not (0 <= self.momentum < 1 and natural(self.weight_decay)):
            found = f"momentum = {self.momentum}, weight_decay = {self.weight_decay}"
            raise PlanError("local work", found, "momentum in [0, 1) and weight_decay of at least 0")
        most = self.steps if self.epochs is None else self.epochs
        if not 1 <= (most or 0) <= MOST or (self.batch is not None and self.batch < 1):
            given = {"epochs": self.epochs, "steps": self.steps, "batch": self.batch}
            found = ", ".join(f"{name} = {brief_repr(value)}" for name, value in given.items())
            raise PlanError("local work", found, f"numbers of at least 1, and at most {MOST:,} epochs or steps")
        if changes_inside(self.lr) and self.steps is None:
            found = f"lr over local steps with epochs = {self.epochs}, whose steps depend on how much a client holds"
            raise PlanError("local work", found, "the same number of steps for all", "set steps, and drop epochs")

    def check_rounds(self, rounds: int) -> None:
        if not finite(*span_of_steps(self.lr, rounds, self.steps or 1)):
            needed = "finite numbers that float32 holds in every local step"
            raise PlanError("schedule", f"lr = {brief_repr(self.lr)} over {rounds} rounds", needed)

    @property
    def projects(self) -> bool:
        return self.project

    def bound(self) -> Bound | AlreadyPrivate:
        return Bound(unit="client")

    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        """Epochs of fresh permutations, cut into batches; the last batch of an epoch may be short."""
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
        varied = changes_inside(self.lr)
        lr, anchor = at(self.lr, public.t), Anchor(start, public.clip_norm)
        if type(self.gradient) is Plain and not (self.momentum or self.project or varied):
            descended = objective.descend(start, work.batches, work.m, lr, self.weight_decay)
            if descended is not None:
                return start - descended
        w = objective.place(start, work.m)
        velocity = torch.zeros_like(w) if self.momentum else None
        each = paces(self.lr, public.t, self.steps or 0) if varied else ()
        for j, batch in enumerate(work.batches):
            lr = each[j] if varied else lr
            direction = self._direction(objective, w, batch, velocity, anchor)
            w.add_(direction if batch.active is None else direction * batch.active[:, None], alpha=-lr)
            if self.project and math.isfinite(public.clip_norm):
                project_(w, start, public.clip_norm)
        return start - w

    def _direction(
        self, objective: Objective, w: Tensor, batch: Batch, velocity: Tensor | None, anchor: Anchor
    ) -> Tensor:
        slope = self.gradient.at(objective, w, batch, anchor)
        if self.weight_decay:
            n = objective.trainable
            slope[:, :n].add_(w[:, :n], alpha=self.weight_decay)
        return slope if velocity is None else velocity.mul_(self.momentum).add_(slope)


def project_(w: Tensor, start: Tensor, clip_norm: float) -> None:
    """w <- w_t + (w - w_t) * min(1, clip norm / ||w - w_t||), row by row, in place."""
    offset = w - start
    norms = torch.linalg.vector_norm(offset, dim=-1, keepdim=True)
    factors = (clip_norm / norms).clamp(max=1.0)
    torch.addcmul(start.expand_as(w), offset, factors, out=w)


CONTROL = "control"


@dataclass(frozen=True)
class Scaffold(LocalSolver, kind="scaffold"):
    """`steps` times  w <- w - lr_t (grad f(w; batch) - c_i + c);   c_i' = c_i - c + (w_t - w) / (steps lr_t).

    Karimireddy et al. 2020, option II. c_i is the client's own memory; c, the server's, is read off releases:

        message = (w_t - w,  steps lr_t (c_i - c_i'))      2 d numbers in the unit of a model, clipped and noised as one
        c <- c - rate * (second half of the decoded mean) / (steps lr_t),     rate = expected / population

    The message is pulled into the plan's clip norm here, so that c_i moves by what is sent and c keeps up with them:
    else clipped controls fall behind the clients' own, and the difference stops every step.
    Bound: none; only Clip gives one, over both halves together. c_i depends on this client's data and on what was
    released, so to whoever sees the releases a client is in as many of them as rounds: the cost is that of the Clip.
    """

    lr: float | Schedule
    steps: int
    batch: int | None = None
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        self._plain()

    def check_rounds(self, rounds: int) -> None:
        if not positive(*span_of_steps(self.lr, rounds, self.steps)):
            needed = "a step above 0 in every round: controls are divided by it"
            raise PlanError("local work", f"lr = {brief_repr(self.lr)}", needed)

    def _plain(self) -> LocalSgd:
        """Plain local SGD with these numbers: draws the same batches, refuses the same mistakes."""
        return LocalSgd(lr=self.lr, steps=self.steps, batch=self.batch, gradient=self.gradient)

    @property
    def projects(self) -> bool:
        return False

    def bound(self) -> Bound | AlreadyPrivate:
        return Bound(unit="client")

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
        way = travelled(self.lr, public.t, self.steps)
        own = work.state[CONTROL]
        control, taken = public.broadcast.get(CONTROL, torch.zeros_like(start)), w.new_zeros(m, 1)
        for lr, batch in zip(paces(self.lr, public.t, self.steps), work.batches, strict=False):
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
        return update, {CONTROL: control - rate / travelled(self.lr, public.t, self.steps) * drift}
