"""SCAFFOLD under client-level privacy: control variates against the drift of unlike clients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import PlanError, shown
from sordino.parts.bounds import Bound, Spent
from sordino.parts.encode import Public
from sordino.parts.gradients import Anchor, Gradient, Plain
from sordino.parts.local import LocalSgd, LocalSolver, Work
from sordino.parts.norms import row_norms
from sordino.parts.numbers import positive
from sordino.parts.schedules import Schedule, paces, span_of_steps, travelled

CONTROL = "control"


@dataclass(frozen=True)
class Scaffold(LocalSolver, kind="scaffold"):
    """`steps` times  w <- w - lr_t (grad f(w; batch) - c_i + c);   c_i' = c_i - c + (w_t - w) / (steps lr_t).

    Karimireddy et al. 2020, option II. c_i is the client's own memory; c, the server's, is read off releases:

        message = (w_t - w,  steps lr_t (c_i - c_i'))      2 d numbers in the unit of a model, clipped and noised as one
        c <- c - rate * (second half of the decoded mean) / (steps lr_t),     rate = expected / population

    The message is pulled into the plan's clip radius here, so that c_i moves by what is sent and c keeps up with them:
    else clipped controls fall behind the clients' own, and the difference stops every step.
    Bound: none; only Clip gives one, over both halves together. c_i depends on this client's data and on what was
    released, so to whoever sees the releases a client is in as many of them as rounds: the bill is that of the Clip.
    """

    lr: float | Schedule
    steps: int
    batch: int | None = None
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        self._plain()

    def lasts(self, rounds: int) -> None:
        if not positive(*span_of_steps(self.lr, rounds, self.steps)):
            needed = "a step above 0 in every round: controls are divided by it"
            raise PlanError("local work", f"lr = {shown(self.lr)}", needed)

    def _plain(self) -> LocalSgd:
        """Plain local SGD with these numbers: draws the same batches, refuses the same mistakes."""
        return LocalSgd(lr=self.lr, steps=self.steps, batch=self.batch, gradient=self.gradient)

    @property
    def projects(self) -> bool:
        return False

    def bound(self) -> Bound | Spent:
        return Bound(unit="client")

    def indices(self, size: int, rng: np.random.Generator, t: int = 0, client: int = 0) -> NDArray[np.int64]:
        return self._plain().indices(size, rng, t, client)

    def length(self, size: int) -> int:
        return 2 * size

    def keeps(self, size: int) -> int:
        return size

    def solve(self, work: Work) -> Tensor:
        objective, start, public, m = work.objective, work.start, work.public, work.m
        anchor, w = Anchor(start, public.radius), objective.place(start, m)
        way = travelled(self.lr, public.t, self.steps)
        own = torch.zeros_like(w) if work.kept is None else work.kept
        control, taken = public.shared.get(CONTROL, torch.zeros_like(start)), w.new_zeros(m, 1)
        for lr, batch in zip(paces(self.lr, public.t, self.steps), work.batches, strict=False):
            active = w.new_ones(m, 1) if batch.active is None else batch.active[:, None]
            w.sub_((self.gradient.at(objective, w, batch, anchor) - own + control) * active, alpha=lr)
            taken += active
        moved = start - w
        drift = torch.where(taken > 0, way * control - moved, torch.zeros_like(moved))
        message = torch.cat([moved, drift], 1)
        message *= (public.radius / row_norms(message)).clamp(max=1.0).to(message.dtype)[:, None]
        own.sub_(message[:, len(start) :], alpha=1 / way)
        return message

    def split(self, mean: Tensor, public: Public, rate: float) -> tuple[Tensor, dict[str, Tensor]]:
        update, drift = mean.chunk(2)
        control = public.shared.get(CONTROL, torch.zeros_like(update))
        return update, {CONTROL: control - rate / travelled(self.lr, public.t, self.steps) * drift}
