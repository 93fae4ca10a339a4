"""Losses of one record, with slope and Moreau envelope where these have a closed form. Tasks and engines call them.

The loss of a record with several scores is the mean over its scores; z is a score, y its target.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sordino import codec
from sordino.codec import Foreign, Part, read
from sordino.errors import ConfigError, brief_repr

LossFunction = Callable[[Tensor, Tensor], Tensor]  # (outputs [b, ...], targets [b]) -> one value per record [b]
Targets = Literal["class", "token", "side", "number"]  # a class per record or per token, 0 or 1 or a number per score
IGNORED = -100  # the label of a token that costs nothing, as torch's cross-entropy has it


class Loss(Part):
    """Base class of losses per record: `value` is required, and `slope` makes linear and dense models faster."""

    convex: ClassVar[bool] = False  # in the scores
    smooth: ClassVar[bool] = False  # its slope is Lipschitz in the scores
    targets: ClassVar[Targets] = "number"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.value(outputs, targets)

    @abstractmethod
    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per record [b] of outputs [b, ...]; it may depend on no other record."""

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of `value` in the scores [..., o], in their shape; targets are [...] or [..., o]."""
        raise NotImplementedError

    def envelope(self, scores: Tensor, targets: Tensor, pace: Tensor) -> Tensor:
        """Return the derivative of the Moreau envelope f_beta in the scores z of a linear model with weights w.

        `pace` is beta / ||(x, 1)||^2 for input x. Since prox(w) = w - t x, the gradient beta (w - prox(w)) is beta t x
        with beta t = clamp(pace * (distance of z to the kink), lowest slope, highest slope): for |z - y| this is the
        derivative of Huber's loss. For one score, prox(z) = z - envelope / pace.
        """
        raise NotImplementedError

    @property
    def has_slope(self) -> bool:
        return type(self).slope is not Loss.slope

    @property
    def has_envelope(self) -> bool:
        return type(self).envelope is not Loss.envelope


@dataclass(frozen=True)
class CrossEntropy(Loss, kind="cross_entropy"):
    """Cross-entropy log sum exp z - z_y of scores z, one per class, for the class label y."""

    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = True
    targets: ClassVar[Targets] = "class"

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        residual = torch.softmax(scores, -1)
        return residual.scatter_add_(-1, targets[..., None], residual.new_full((*targets.shape, 1), -1.0))


@dataclass(frozen=True)
class Tokens(Loss, kind="tokens"):
    """Cross-entropy of text: the mean of log sum exp z - z_y over a record's tokens with scores z and label y.

    Tokens with label -100 are omitted."""

    targets: ClassVar[Targets] = "token"

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[:-1] != targets.shape or targets.dim() < 2:
            raise ValueError("loss tokens needs scores [b, tokens, classes] and labels [b, tokens]")
        each = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
        counted = (targets != IGNORED).flatten(1).sum(1)
        return each.view(len(targets), -1).sum(1) / counted.clamp(min=1)


@dataclass(frozen=True)
class Mse(Loss, kind="mse"):
    """Squared error (z - y)^2 of score z for a real target y."""

    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = True

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _mean(F.mse_loss(outputs, _like(targets, outputs), reduction="none"))

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        return (scores - _like(targets, scores)) * (2 / scores.shape[-1])


@dataclass(frozen=True)
class Logistic(Loss, kind="logistic"):
    """Logistic loss log(1 + exp z) - y z of one score z for a label y of 0 or 1."""

    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = True
    targets: ClassVar[Targets] = "side"

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _mean(F.binary_cross_entropy_with_logits(outputs, _like(targets, outputs), reduction="none"))

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        return (torch.sigmoid(scores) - _like(targets, scores)) / scores.shape[-1]


@dataclass(frozen=True)
class Absolute(Loss, kind="absolute"):
    """Absolute error |z - y| of score z for a real target y."""

    convex: ClassVar[bool] = True

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _mean(F.l1_loss(outputs, _like(targets, outputs), reduction="none"))

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        return torch.sign(scores - _like(targets, scores)) / scores.shape[-1]

    def envelope(self, scores: Tensor, targets: Tensor, pace: Tensor) -> Tensor:
        share = 1 / scores.shape[-1]
        return (pace * (scores - _like(targets, scores))).clamp(-share, share)


@dataclass(frozen=True)
class Hinge(Loss, kind="hinge"):
    """Hinge loss max(0, 1 - s z) of one score z, with s = 1 or -1 for labels 1 and 0."""

    convex: ClassVar[bool] = True
    targets: ClassVar[Targets] = "side"

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _mean((1 - (2 * _like(targets, outputs) - 1) * outputs).clamp(min=0))

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        side = 2 * _like(targets, scores) - 1
        return torch.where(side * scores < 1, -side, torch.zeros_like(side)) / scores.shape[-1]

    def envelope(self, scores: Tensor, targets: Tensor, pace: Tensor) -> Tensor:
        side = 2 * _like(targets, scores) - 1
        return -side * (pace * (1 - side * scores)).clamp(0.0, 1 / scores.shape[-1])


@dataclass(frozen=True)
class Quantile(Loss, kind="quantile"):
    """Quantile (pinball) loss max(tau (y - z), (tau - 1) (y - z)) of score z for a real target y."""

    tau: float
    convex: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            found = f"tau = {brief_repr(self.tau)} of a quantile loss"
            raise ConfigError(found, "a number in (0, 1)", "set tau = 0.5 for the median")

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        below = _like(targets, outputs) - outputs
        return _mean(torch.maximum(self.tau * below, (self.tau - 1) * below))

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        over = scores - _like(targets, scores)
        sides = torch.where(over > 0, 1 - self.tau, torch.where(over < 0, -self.tau, 0.0))
        return sides.to(scores.dtype) / scores.shape[-1]

    def envelope(self, scores: Tensor, targets: Tensor, pace: Tensor) -> Tensor:
        share = 1 / scores.shape[-1]
        return (pace * (scores - _like(targets, scores))).clamp(-self.tau * share, (1 - self.tau) * share)


@dataclass(frozen=True)
class Own(Loss, kind="own"):
    """User-defined loss, registered by `sordino.add_loss(name)`: (outputs, targets) -> one value per record."""

    name: str

    def __post_init__(self) -> None:
        codec.find_function("loss", self.name)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = codec.find_function("loss", self.name)(outputs, targets)
        return found

    def rests_on(self) -> tuple[Foreign, ...]:
        return (codec.function_origin("loss", self.name),)


def add_loss(name: str) -> Callable[[LossFunction], LossFunction]:
    """Register a loss function of (outputs, targets), for TOML files: loss = { kind = "own", name = ... }."""
    return codec.register_function("loss", name)


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """Loss function passed from Python; autograd computes its derivative, and no TOML file can describe it."""

    function: LossFunction

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets)


OURS: tuple[type[Loss], ...] = (CrossEntropy, Mse, Logistic, Absolute, Hinge, Quantile)
CODES = {loss: code for code, loss in enumerate(OURS)}  # as machine code knows them: kernels/linear.py


def loss_of(given: str | Loss | LossFunction) -> Loss:
    """Return a `Loss` from its kind (a string), a `Loss` or a function."""
    if isinstance(given, str):
        found: Loss = read(Loss, given, "loss")
        return found
    if not callable(given):
        needed = "a kind of loss, a Loss, or a function"
        raise ConfigError(f"loss {brief_repr(given)}", needed, 'set loss = "mse", for example')
    return given if isinstance(given, Loss) else FunctionLoss(given)


def is_record_wise(loss: Loss) -> bool:
    """Return whether a loss is one of this file, in which a record's loss depends on no other record."""
    return type(loss) in CODES or type(loss) is Tokens


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _like(targets: Tensor, scores: Tensor) -> Tensor:
    return targets.to(scores.dtype).reshape(scores.shape)
