"""Gradient oracles: which direction a local step follows. Local solvers call `Gradient.at`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import Norm
from sordino.codec import Part
from sordino.codec.boundary import returns, tensor
from sordino.errors import brief_repr
from sordino.layout import Layout
from sordino.parts.schedules import MOST, natural, positive, require


@codec.hides_values
@dataclass(frozen=True)
class Batch:
    """One minibatch of each of m clients; `mask` marks real records, `active` the clients with steps left."""

    x: Tensor  # [m, b, ...]
    y: Tensor  # [m, b, ...]
    mask: Tensor | None = None  # [m, b], None: all real
    active: Tensor | None = None  # [m], None: all active
    sizes: Tensor | None = None  # [m, b], norms of (x, 1) where they were computed before


@codec.hides_values
@dataclass(frozen=True)
class Anchor:
    """Reference point of regularisers: the public model at the start of the round, and the clip norm."""

    start: Tensor  # [d]
    clip_norm: float = math.inf


@dataclass(frozen=True)
class Ball:
    """The ball of clipped record gradients, ||g_j|| <= clip norm; `envelope` smooths the loss first."""

    clip_norm: float = math.inf
    norm: Norm = 2
    envelope: Moreau | None = None


class Objective(Protocol):
    """The clients' losses at their own parameters, as an engine computes them.

    Rows [m, d] hold the tensors of `layout` one after the other, each in row-major order: `layout.views(w)` are those
    tensors by name, [m, *shape]. Only where every part treats coordinates alike (`any_order`) may an objective use
    another order, which `inward` and `outward` translate.
    """

    @property
    def layout(self) -> Layout: ...
    @property
    def trainable(self) -> int: ...
    def place(self, start: Tensor, clients: int) -> Tensor: ...
    def gradient(self, w: Tensor, batch: Batch) -> Tensor: ...
    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """Return the parameters [m, d] after plain steps over `batches`; None if single steps are as fast."""

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor: ...  # [m, d], sum over records of g_j in the ball
    def inward(self, start: Tensor) -> Tensor: ...  # [d], in the objective's own order of coordinates
    def outward(self, rows: Tensor) -> Tensor: ...  # [m, d], back in the layout's order
    def untouched(self) -> None: ...  # refuse a module that stored something of its clients


class Gradient(Part):
    """A gradient oracle: the direction of a local step."""

    @abstractmethod
    @returns(lambda found, part, objective, w, *_: tensor(found, tuple(w.shape), w))
    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        """Return the direction at w [m, d] for one minibatch per client; the next call may overwrite it.

        Coordinates are in the order of `objective.layout`, on every path of every engine.
        """


def _check_at_least_0(name: str, value: float) -> None:
    require(natural(value), "gradient", f"{name} = {value}", "a finite number of at least 0")


@dataclass(frozen=True)
class Plain(Gradient, kind="plain"):
    """grad f(w)."""

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        return objective.gradient(w, batch)


@dataclass(frozen=True)
class Sam(Gradient, kind="sam"):
    """grad f(w + rho * e), e = g / ||g||, g = grad f(w): sharpness-aware (Foret et al. 2021; paper 003).

    With `adaptive`, e = T^2 g / ||T g||, T = |w| + 0.01 (ASAM, Kwon et al. 2021).
    """

    rho: float
    adaptive: bool = False

    def __post_init__(self) -> None:
        _check_at_least_0("rho", self.rho)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        slope = objective.gradient(w, batch)
        return objective.gradient(w + self.ascent(w, slope), batch) if self.rho else slope

    def ascent(self, w: Tensor, slope: Tensor) -> Tensor:
        """Return rho * e, the step to the point of largest loss nearby."""
        if not self.adaptive:
            return slope * (self.rho / _lengths(slope))
        scale = w.abs() + 0.01
        return scale.square() * slope * (self.rho / _lengths(scale * slope))


@dataclass(frozen=True)
class Blur(Gradient, kind="blur"):
    """grad of f(w) + strength / 2 * max(0, ||w - w_t||^2 - clip norm^2): BLUR, a pull back into the clip ball.

    `gradient` is the oracle that it is added to.
    """

    strength: float
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        _check_at_least_0("strength", self.strength)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        slope = self.gradient.at(objective, w, batch, anchor)
        offset = w - anchor.start
        return slope + self.strength * offset * (_lengths(offset) > anchor.clip_norm)


@dataclass(frozen=True)
class Proximal(Gradient, kind="proximal"):
    """grad of f(w) + strength / 2 * ||w - w_t||^2: FedProx (Li et al. 2020), a pull to where the round began."""

    strength: float
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        _check_at_least_0("strength", self.strength)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        return self.gradient.at(objective, w, batch, anchor) + self.strength * (w - anchor.start)


@dataclass(frozen=True)
class Bounded(Gradient, kind="bounded"):
    """g * min(1, clip norm / ||g||): the client's whole gradient in a ball (paper 002). Bounds no single record."""

    clip_norm: float
    norm: Norm = 2
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        require(positive(self.clip_norm), "gradient", f"clip_norm = {self.clip_norm}", "a positive finite number")

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        slope = self.gradient.at(objective, w, batch, anchor)
        lengths: Tensor = torch.linalg.vector_norm(slope, ord=self.norm, dim=-1, keepdim=True)
        return slope * (self.clip_norm / lengths.clamp(min=1e-30)).clamp(max=1.0)


@dataclass(frozen=True)
class Moreau(Gradient, kind="moreau"):
    """beta (w - prox(w)): the gradient of  f_beta(w) = min_v f(v) + beta / 2 ||w - v||^2,  record by record.

    f_beta is beta-smooth and within L^2 / (2 beta) of an L-Lipschitz f (Nesterov smoothing, paper 001). Closed form for
    absolute, hinge and quantile losses of a linear model; else `steps` of the subgradient method for the strongly
    convex inner problem, after which ||v - prox||^2 <= 4 G^2 / (beta^2 (steps + 1)), G the largest slope met.
    """

    beta: float
    steps: int = 200

    def __post_init__(self) -> None:
        found = f"beta = {brief_repr(self.beta)}, steps = {brief_repr(self.steps)}"
        fits = positive(self.beta) and 1 <= self.steps <= MOST
        require(fits, "gradient", found, f"beta above 0, and from 1 to {MOST:,} steps")

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        count = w.new_full((len(w), 1), batch.y.shape[1]) if batch.mask is None else batch.mask.sum(1, keepdim=True)
        return (objective.clipped(w, batch, Ball(envelope=self)) / count.clamp(min=1)).to(w.dtype)


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return lengths.clamp(min=1e-12)
