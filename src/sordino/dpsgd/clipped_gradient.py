"""The clipped sum of per-record gradients, sum_j g_j min(1, radius / ||g_j||), from pieces.

One norm over all parameters. The fast norms decide for almost every record; a record whose fast norm cannot be trusted
(huge, not finite, or cancelled in float32 by more than the slack) is materialised and measured again on its own.
A record whose gradient is not finite counts as zero; its norm stays visible as inf or nan.

The exact clipped gradient of a batch, for any module and any loss that gives one value per record.

total = sum_j g_j min(1, radius / ||g_j||),    g_j = d loss_j / d w      (one backward pass; nothing draws noise)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import codec
from sordino.accounting.bounds import Norm
from sordino.dpsgd.batch_independence import Company, Lookout, refused
from sordino.dpsgd.pieces import ROOM, Piece, sums_in, wide
from sordino.dpsgd.tape import Recorder, UnrecordableError
from sordino.errors import ConfigError, DataError
from sordino.parts.clipping import FEW, SLACK, factors, row_norms

_TINY, _HUGE = 1e-12, 1e15  # outside, squares of float32 lose digits

Pieces = Mapping[nn.Parameter, Piece]


@codec.hides_values
@dataclass(frozen=True)
class Clipped:
    """What one batch gives: `total` by parameter name, and per record the norm before the clip and the loss."""

    total: dict[str, Tensor]
    norms: Tensor  # [b], float64; zero where masked
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))  # [b]; empty from a Recorder


def clipped_sum(
    pieces: Pieces,
    named: Mapping[str, nn.Parameter],
    batch: int,
    radius: float,
    scale: float = 1.0,
    norm: Norm = 2,
    mask: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """sum_j scale g_j min(1, radius / ||scale g_j||) by name, of many in float64, and the norms ||scale g_j|| [b]."""
    if not radius > 0:
        raise ConfigError(f"radius {radius}", "a positive number", "use a radius near the typical gradient norm")
    if not batch:
        return {name: torch.zeros_like(p) for name, p in named.items()}, torch.zeros(0, dtype=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        norms, sound = _fast_norms(pieces, batch, radius / scale)
        sound = sound if norm == 2 else torch.zeros_like(sound)
        chosen = sound if mask is None else sound & mask.bool()
        total = _weighted(pieces, named, factors(norms, radius / scale).mul_(scale), chosen)
        if batch > FEW:
            total = {name: part.double() for name, part in total.items()}
        if not bool(sound.all()):
            doubtful = ~sound if mask is None else ~sound & mask.bool()
            _add_carefully(total, norms, pieces, named, doubtful.nonzero()[:, 0], radius, scale, norm)
    norms = norms if scale == 1 else norms * scale
    return total, norms if mask is None else norms.masked_fill(~mask.bool(), 0.0)


def _fast_norms(pieces: Pieces, batch: int, radius: float) -> tuple[Tensor, Tensor]:
    """||g_j|| [b], and which of them can be trusted."""
    squares = torch.zeros(batch, dtype=torch.float64)
    for piece in pieces.values():
        squares += piece.squares()
    doubts = [piece.doubt() for piece in pieces.values()]
    norms = squares.sqrt()
    sound = norms < _HUGE  # false for nan
    if any(isinstance(doubt, Tensor) for doubt in doubts):
        doubt = sum(doubts)
        sound &= (doubt <= SLACK * squares) | (squares + doubt < radius**2)
    if radius < 1e6 * _TINY:
        sound &= norms > _TINY
    return norms, sound


def _weighted(pieces: Pieces, named: Mapping[str, nn.Parameter], factors: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """sum over the chosen records; the others are left out, as 0 * inf is not 0."""
    index = None if bool(chosen.all()) else chosen.nonzero()[:, 0]
    weights = factors if index is None else factors[index]
    in_kind = {kind: weights.to(kind) for kind in {sums_in(parameter) for parameter in named.values()}}
    total: dict[str, Tensor] = {}
    for name, parameter in named.items():
        piece = pieces.get(parameter)
        if piece is None or not len(weights):
            total[name] = wide(torch.zeros_like(parameter))
        else:
            total[name] = (piece if index is None else piece.at(index)).weighted(in_kind[sums_in(parameter)])
    return total


def _add_carefully(
    total: dict[str, Tensor],
    norms: Tensor,
    pieces: Pieces,
    named: Mapping[str, nn.Parameter],
    index: Tensor,
    radius: float,
    scale: float,
    norm: Norm,
) -> None:
    """Materialise these records a few at a time, measure them in float64, and add them clipped."""
    used = {name: pieces[parameter] for name, parameter in named.items() if parameter in pieces}
    sizes = [named[name].numel() for name in used]
    for some in torch.split(index, max(1, ROOM // (4 * max(1, sum(sizes))))) if used and len(index) else ():
        rows = torch.cat([piece.at(some).rows().reshape(len(some), -1) for piece in used.values()], 1)
        norms[some] = row_norms(rows, norm)
        kept = norms[some].isfinite()
        clipped = factors(norms[some][kept], radius / scale) * scale @ rows[kept].double()
        for name, part in zip(used, torch.split(clipped, sizes), strict=True):
            total[name] += part.view_as(total[name]).to(total[name].dtype)


Losses = Callable[[Any, Tensor], Tensor]  # (outputs, targets) -> one loss per record [b]


class ClippedGradient:
    """Clipped sums of a model's per-record gradients.

    Layers go by their own rules where the records can be told apart in every layer; a model that uses a parameter
    outside its layer, or a layer without records, is run whole, each record with its own copy of the parameters.
    A model or a loss that mixes records is refused: at the first batch, or in a later one that `coins` choose.
    `proved` says that no record can reach another in model and loss, by their operations: then no look is needed.
    """

    def __init__(
        self, model: nn.Module, losses: Losses, coins: np.random.Generator | None = None, proved: bool = False
    ) -> None:
        self.model = model
        self.losses = losses
        self.lookout, self.proved = Lookout(model, self._passing, coins), proved
        self.asked = False  # whether the next batch is looked at, whatever the coins say
        self.recorder = Recorder(model, verify=False)
        self.whole = False
        self.trusted = False  # whether a batch has shown that the records are kept apart
        self.channels_last = True  # until a model turns out to need the usual order

    def sum(self, x: Any, y: Tensor, radius: float, mask: Tensor | None = None, norm: Norm = 2) -> Clipped:
        """The clipped sum over the records of x (a tensor, or a tuple of the model's inputs) that `mask` keeps."""
        inputs = x if isinstance(x, tuple) else (x,)
        if mask is not None:
            return self._kept(inputs, y, radius, mask.bool(), norm)
        self._follow()
        if not len(y):
            return self._nothing(y)
        try:
            self._look(inputs, y)
            return self._recorded(inputs, y, radius, norm)
        except UnrecordableError:
            return self._run_whole(inputs, y, radius, norm)

    def _kept(self, inputs: tuple[Tensor, ...], y: Tensor, radius: float, mask: Tensor, norm: Norm) -> Clipped:
        """Masked records are left out of the forward pass; their norms and losses read zero."""
        part = self.sum(tuple(item[mask] for item in inputs), y[mask], radius, norm=norm)
        norms, losses = part.norms.new_zeros(len(y)), part.losses.new_zeros(len(y))
        norms[mask], losses[mask] = part.norms, part.losses
        return Clipped(part.total, norms, losses)

    def _follow(self) -> None:
        """Look again at a model whose parameters were frozen or unfrozen."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if named.keys() != self.recorder.named.keys() or any(p is not named[n] for n, p in self.recorder.named.items()):
            self._restart()

    def _restart(self) -> None:
        self.recorder, self.trusted = Recorder(self.model, self.whole, verify=False), False

    def _nothing(self, y: Tensor) -> Clipped:
        total = {name: torch.zeros_like(p) for name, p in self.recorder.named.items()}
        return Clipped(total, torch.zeros(0, dtype=torch.float64), torch.zeros(0))

    def _recorded(self, inputs: tuple[Tensor, ...], y: Tensor, radius: float, norm: Norm) -> Clipped:
        with torch.enable_grad(), self.recorder as recorder:
            losses = self._verified(inputs, y)
            wanted = [recorder.tape.anchor, *recorder.named.values()]
            slopes = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
            if any(slope is not None for slope in slopes[1:]):
                raise UnrecordableError("a parameter used outside the layer that owns it")
            clipped = recorder.clipped_sum(radius, norm=norm)
        return Clipped(clipped.total, clipped.norms, losses.detach())

    def _verified(self, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """The losses; on the first batch of two or more, the first and the last must depend on no other record."""
        losses = self._arranged(inputs, y)
        if not self.trusted:
            self.recorder.verify(losses[0], losses[-1])
            self.trusted = len(losses) > 1 and bool(losses.isfinite().all())
        return losses

    def _look(self, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        """At the first batch, and in some after it, a record alone is compared with the record in company."""
        chosen = self.lookout.wants(len(y), max(len(y), 1)) or self.asked
        if self.whole or self.proved or len(y) < 2:
            return
        if not self.trusted:
            self.lookout.start(self._company(inputs, y))
        elif chosen:
            self.asked = False
            self.lookout.again(self._company(inputs, y))

    def _company(self, inputs: tuple[Tensor, ...], y: Tensor) -> Company:
        return Company(
            lambda pair: self._arranged(*pair), (inputs, y), len(y), self.recorder.tape, lambda: self.recorder
        )

    def _passing(self, model: nn.Module) -> Callable[[Any], Tensor]:
        """The losses of the model, or of a copy of it."""
        return lambda pair: self.losses(model(*pair[0]), pair[1])

    def _arranged(self, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """The losses, images channels last unless the model's own `view` calls cannot read them so."""
        self.recorder.tape.channels_last = self.channels_last
        try:
            return self._losses(inputs, y)
        except RuntimeError as error:
            if not self.channels_last or "view" not in str(error):
                raise
        self.channels_last = self.recorder.tape.channels_last = False
        self.recorder.clear()
        return self._losses(inputs, y)

    def _losses(self, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        losses = self.losses(self.model(*inputs), y)
        if losses.shape != (len(y),):
            raise DataError(
                f"a loss of shape {list(losses.shape)} for {len(y)} records", "one value per record", 'reduction="none"'
            )
        return losses

    def _run_whole(self, inputs: tuple[Tensor, ...], y: Tensor, radius: float, norm: Norm) -> Clipped:
        """From now on each record has its own copy of all parameters; a model that mixes records is refused."""
        if self.whole:
            raise refused()
        if len(y) > 1 and not self.proved:
            self.lookout.start(Company(self._passing(self.model), (inputs, y), len(y)))
        self.whole = True
        self._restart()
        return self._recorded(inputs, y, radius, norm)
