"""The clipped sum of per-record gradients, sum_j g_j min(1, radius / ||g_j||), from pieces.

One norm over all parameters. The fast norms decide for almost every record; a record whose fast norm cannot be trusted
(huge, not finite, or cancelled in float32 by more than the slack) is materialised and measured again on its own.
A record whose gradient is not finite counts as zero; its norm stays visible as inf or nan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sordino import codec
from sordino.errors import ConfigError
from sordino.parts.bounds import Norm
from sordino.parts.clipping import FEW, factors
from sordino.parts.norms import SLACK, row_norms
from sordino.per_record.pieces import ROOM, Piece, sums_in, wide

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
