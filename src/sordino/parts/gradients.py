"""Gradient oracles, which compute the direction of a local step. Local solvers call `Gradient.at`."""

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
from sordino.layout import Layout
from sordino.parts.schedules import MOST, natural, positive, require_values


@codec.hides_values
@dataclass(frozen=True)
class Batch:
    """One minibatch for each of m clients, padded; `mask` marks real records, `active` the clients with steps left."""

    x: Tensor  # [m, b, ...]
    y: Tensor  # [m, b, ...]
    mask: Tensor | None = None  # [m, b], None: all real
    active: Tensor | None = None  # [m], None: all active
    sizes: Tensor | None = None  # [m, b], norms of (x, 1) where they were computed before


@codec.hides_values
@dataclass(frozen=True)
class Anchor:
    """Reference values of local regularisers: the public model at the start of the round, and the clip norm."""

    start: Tensor  # [d]
    clip_norm: float = math.inf


@dataclass(frozen=True)
class Ball:
    """Norm ball to which record gradients are clipped; with `envelope`, gradients are those of the Moreau envelope."""

    clip_norm: float = math.inf
    norm: Norm = 2
    envelope: Moreau | None = None


class Objective(Protocol):
    """Interface to an engine's losses and gradients of m clients, each at its own parameters.

    Rows w [m, d] hold the tensors of `layout` one after the other, each in row-major order; `layout.views(w)` returns
    them by name. An objective may use another order of coordinates, which `inward` and `outward` convert, only if every
    part treats all coordinates alike (`LocalSolver.any_order`).
    """

    @property
    def layout(self) -> Layout: ...
    @property
    def trainable(self) -> int: ...
    def place(self, start: Tensor, clients: int) -> Tensor: ...
    def gradient(self, w: Tensor, batch: Batch) -> Tensor: ...
    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """Return the parameters [m, d] after plain SGD over `batches`; None if single steps are as fast."""

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor: ...  # [m, d], sum over records of g_j in the ball
    def inward(self, start: Tensor) -> Tensor: ...  # [d], in the objective's own order of coordinates
    def outward(self, rows: Tensor) -> Tensor: ...  # [m, d], back in the layout's order
    def untouched(self) -> None: ...  # raise an error if the module stored a value computed from its clients


class Gradient(Part):
    """Base class of gradient oracles, which compute the direction of a local step."""

    @abstractmethod
    @returns(lambda found, part, objective, w, *_: tensor(found, tuple(w.shape), w))
    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        """Return the direction [m, d] at w [m, d] for one minibatch per client; the next call may overwrite the result.

        Coordinates are in the order of `objective.layout`.
        """


def _check_at_least_0(**value: float) -> None:
    require_values(natural(*value.values()), "gradient", "a finite number of at least 0", **value)


@dataclass(frozen=True)
class Plain(Gradient, kind="plain"):
    """Plain gradient of a minibatch's mean loss f at the model w."""

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        return objective.gradient(w, batch)


@dataclass(frozen=True)
class Sam(Gradient, kind="sam"):
    """Sharpness-aware gradient (SAM) grad f(w + rho * e), e = g / ||g||, g = grad f(w) (Foret et al. 2021).

    f is the loss of a minibatch. With `adaptive`, e = T^2 g / ||T g||, T = |w| + 0.01 (ASAM, Kwon et al. 2021).
    """

    rho: float
    adaptive: bool = False

    def __post_init__(self) -> None:
        _check_at_least_0(rho=self.rho)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        slope = objective.gradient(w, batch)
        return objective.gradient(w + self.ascent(w, slope), batch) if self.rho else slope

    def ascent(self, w: Tensor, slope: Tensor) -> Tensor:
        """Return rho * e, the ascent step at w [m, d] for the gradient `slope` [m, d]."""
        if not self.adaptive:
            return slope * (self.rho / _lengths(slope))
        scale = w.abs() + 0.01
        return scale.square() * slope * (self.rho / _lengths(scale * slope))


@dataclass(frozen=True)
class Blur(Gradient, kind="blur"):
    """BLUR: gradient of f(w) + strength / 2 * max(0, ||w - w_t||^2 - C^2), a penalty on updates above the clip norm C.

    w_t is the model at the start of the round, and `gradient` computes the gradient of the loss f.
    """

    strength: float
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        _check_at_least_0(strength=self.strength)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        slope = self.gradient.at(objective, w, batch, anchor)
        offset = w - anchor.start
        return slope + self.strength * offset * (_lengths(offset) > anchor.clip_norm)


@dataclass(frozen=True)
class Proximal(Gradient, kind="proximal"):
    """FedProx: gradient of f(w) + strength / 2 * ||w - w_t||^2 for loss f and initial model w_t (Li et al. 2020)."""

    strength: float
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        _check_at_least_0(strength=self.strength)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        return self.gradient.at(objective, w, batch, anchor) + self.strength * (w - anchor.start)


@dataclass(frozen=True)
class Bounded(Gradient, kind="bounded"):
    """Clipped gradient g * min(1, clip_norm / ||g||) of a whole minibatch, which gives no bound per record."""

    clip_norm: float
    norm: Norm = 2
    gradient: Gradient = field(default_factory=Plain)

    def __post_init__(self) -> None:
        require_values(positive(self.clip_norm), "gradient", "a positive finite number", clip_norm=self.clip_norm)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        slope = self.gradient.at(objective, w, batch, anchor)
        lengths: Tensor = torch.linalg.vector_norm(slope, ord=self.norm, dim=-1, keepdim=True)
        return slope * (self.clip_norm / lengths.clamp(min=1e-30)).clamp(max=1.0)


@dataclass(frozen=True)
class Moreau(Gradient, kind="moreau"):
    """Gradient of the Moreau envelope f_beta(w) = min_v f(v) + beta / 2 ||w - v||^2 of each record's loss f.

    It is beta (w - prox(w)), prox(w) the minimiser v. f_beta is beta-smooth and within L^2 / (2 beta) of an L-Lipschitz
    f (Nesterov smoothing). It has a closed form for absolute, hinge and quantile losses of a linear model;
    otherwise `steps` subgradient steps solve the strongly convex inner problem, with ||v - prox||^2 <= 4 G^2 /
    (beta^2 (steps + 1)), G the largest gradient norm in these steps.
    """

    beta: float
    steps: int = 200

    def __post_init__(self) -> None:
        fits, needed = positive(self.beta) and 1 <= self.steps <= MOST, f"beta above 0, and from 1 to {MOST:,} steps"
        require_values(fits, "gradient", needed, beta=self.beta, steps=self.steps)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        count = w.new_full((len(w), 1), batch.y.shape[1]) if batch.mask is None else batch.mask.sum(1, keepdim=True)
        return (objective.clipped(w, batch, Ball(envelope=self)) / count.clamp(min=1)).to(w.dtype)


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return lengths.clamp(min=1e-12)
