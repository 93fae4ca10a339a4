"""Clipped sum of per-record gradients, sum_j g_j min(1, C / ||g_j||), and the recorder of ordinary backward passes.

One norm over all parameters. Fast norms decide for almost every record; a record whose fast norm cannot be trusted
(huge, not finite, or cancelled in float32 by more than the slack) is materialised and measured again on its own.
A record whose gradient is not finite counts as zero; its norm stays visible as inf or nan.

    with Recorder(model) as recorder:
        losses(model(x), y).mean().backward()
        clipped = recorder.clipped_sum(clip_norm=1.0, scale=len(x))        # scale undoes the mean
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from sordino import codec
from sordino.accounting.bounds import Norm
from sordino.dpsgd.mixing_layers import refuse_mixing
from sordino.dpsgd.pieces import ROOM, Piece, sums_in, wide
from sordino.dpsgd.rule_table import run_by_rules, sites
from sordino.dpsgd.tape import Tape
from sordino.errors import ConfigError, PlanError
from sordino.kernels.allocator import tune
from sordino.parts.clipping import FEW, SLACK, factors, row_norms

_TINY, _HUGE = 1e-12, 1e15  # outside, squares of float32 lose digits

Pieces = Mapping[nn.Parameter, Piece]


@codec.hides_values
@dataclass(frozen=True)
class Clipped:
    """Clipped sum of one batch by parameter name, and of each record its norm before the clip and its loss."""

    total: dict[str, Tensor]
    norms: Tensor  # [b], float64; zero where masked
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))  # [b]; empty from a Recorder


def clipped_sum(
    pieces: Pieces,
    named: Mapping[str, nn.Parameter],
    batch: int,
    clip_norm: float,
    scale: float = 1.0,
    norm: Norm = 2,
    mask: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """sum_j scale g_j min(1, C / ||scale g_j||) by name, of many in float64, and the norms ||scale g_j|| [b]."""
    if not clip_norm > 0:
        raise ConfigError(
            f"clip_norm {clip_norm}", "a positive number", "use a clip norm near the typical gradient norm"
        )
    if not batch:
        return {name: torch.zeros_like(p) for name, p in named.items()}, torch.zeros(0, dtype=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        norms, sound = _fast_norms(pieces, batch, clip_norm / scale)
        sound = sound if norm == 2 else torch.zeros_like(sound)
        chosen = sound if mask is None else sound & mask.bool()
        total = _weighted(pieces, named, factors(norms, clip_norm / scale).mul_(scale), chosen)
        if batch > FEW:
            total = {name: part.double() for name, part in total.items()}
        if not bool(sound.all()):
            doubtful = ~sound if mask is None else ~sound & mask.bool()
            _add_carefully(total, norms, pieces, named, doubtful.nonzero()[:, 0], clip_norm, scale, norm)
    norms = norms if scale == 1 else norms * scale
    return total, norms if mask is None else norms.masked_fill(~mask.bool(), 0.0)


def _fast_norms(pieces: Pieces, batch: int, clip_norm: float) -> tuple[Tensor, Tensor]:
    """||g_j|| [b], and which of them can be trusted."""
    squares = torch.zeros(batch, dtype=torch.float64)
    for piece in pieces.values():
        squares += piece.squares()
    doubts = [piece.doubt() for piece in pieces.values()]
    norms = squares.sqrt()
    sound = norms < _HUGE  # false for nan
    if any(isinstance(doubt, Tensor) for doubt in doubts):
        doubt = sum(doubts)
        sound &= (doubt <= SLACK * squares) | (squares + doubt < clip_norm**2)
    if clip_norm < 1e6 * _TINY:
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
    clip_norm: float,
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
        clipped = factors(norms[some][kept], clip_norm / scale) * scale @ rows[kept].double()
        for name, part in zip(used, torch.split(clipped, sizes), strict=True):
            total[name] += part.view_as(total[name]).to(total[name].dtype)


class Recorder:
    """Recorder of a model's per-record gradients; while attached, backward passes write no `.grad` of its parameters.

    The first batch of two or more is checked: in every layer, a record's gradient must touch that record alone.
    Every forward since the last `clipped_sum` is a use by the same records, so one batch at a time.
    """

    def __init__(self, model: nn.Module, whole: bool = False, verify: bool = True, channels_last: bool = False) -> None:
        refuse_mixing(model)
        tune()
        self.model = model
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.tape = Tape()
        self.tape.channels_last = channels_last  # faster, unless the model has a `view` that cannot read it
        self.sites = sites(model, whole)
        self.outside: set[str] = set()
        self.idle: list[str] = []  # trained parameters that the last batch's loss did not depend on
        self.attached = ExitStack()
        self.trusted = not verify  # whether a batch has shown that every layer keeps the records apart

    def __enter__(self) -> Recorder:
        """Run every site by its rule."""
        self.attached.enter_context(run_by_rules(self.tape, self.sites))
        handles = [self.model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)]
        handles += [self.model.register_forward_hook(self._verify)]
        handles += [note_gradient(p, self.outside, name) for name, p in self.named.items()]
        for handle in handles:
            self.attached.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the model as it was."""
        self.attached.close()
        self.clear()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        first = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()), None)
        self.tape.begin(0 if first is None else len(first))

    def _verify(self, module: nn.Module, args: Any, output: Any) -> None:
        """On the first batch of two or more: the first and last record's output must depend on no other record."""
        batch = self.tape.batch
        if self.trusted or batch < 2 or not torch.is_grad_enabled():
            return
        leaves = [y for y in tree_flatten(output)[0] if isinstance(y, Tensor) and y.requires_grad and y.dim()]
        outputs = [y for y in leaves if len(y) == batch]
        if outputs:
            self.tape.check_slices(outputs, (0, batch - 1))
            self.trusted = all(bool(y.isfinite().all()) for y in leaves)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.tape.clear()
        self.outside.clear()

    def clipped_sum(self, clip_norm: float, scale: float = 1.0, norm: Norm = 2, mask: Tensor | None = None) -> Clipped:
        """sum_j scale g_j min(1, C / ||scale g_j||) after the backward pass; `scale` is b for a mean, 1 for a sum."""
        if self.outside and self.tape.batch:
            raise PlanError(
                "per-record",
                f"parameter '{min(self.outside)}' used outside the layer that owns it, or unfrozen after the start",
                "every use inside a recorded layer",
                "call the layer itself, or pass whole=True to run the model record by record",
            )
        pieces = self.tape.pieces() if self.tape.batch else {}
        self.idle = [name for name, p in self.named.items() if p not in pieces and p.requires_grad]
        total, norms = clipped_sum(pieces, self.named, self.tape.batch, clip_norm, scale, norm, mask)
        self.clear()
        return Clipped(total, norms)


def note_gradient(parameter: nn.Parameter, outside: set[str], name: str) -> RemovableHandle:
    """Note a gradient that autograd computes for a parameter itself: it comes from a use that no site recorded."""

    def note(slope: Tensor) -> None:
        outside.add(name)

    handle: RemovableHandle = parameter.register_hook(note)  # type: ignore[no-untyped-call]
    return handle
