"""Clipped sum of per-record gradients, sum_j g_j min(1, C / ||g_j||): of recorded pieces, of passes, of any module.

One norm over all parameters. Fast norms decide for almost every record; a record whose fast norm cannot be trusted
(huge, not finite, or cancelled in float32 by more than the slack) is materialised and measured again on its own.
A record whose gradient is not finite counts as zero; its norm stays visible as inf or nan.

    with Recorder(model) as recorder:
        losses(model(x), y).mean().backward()
        clipped = recorder.clipped_sum(clip_norm=1.0, scale=len(x))        # scale undoes the mean

`ClippedGradient` is the engines' DP-SGD path: any module, any loss with one value per record, one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from sordino import codec
from sordino.accounting.bounds import Norm
from sordino.dpsgd.batch_independence import BatchPass, IndependenceChecks, mixing_error, refuse_mixing
from sordino.dpsgd.pieces import ROOM, Piece, sums_in, wide
from sordino.dpsgd.rule_table import run_by_rules, sites
from sordino.dpsgd.tape import Tape, UnrecordableError, first_length
from sordino.errors import ConfigError, DataError, PlanError
from sordino.kernels import tune_allocator
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
        fix = "use a clip norm near the typical gradient norm"
        raise ConfigError(f"clip_norm {clip_norm}", "a positive number", fix)
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
        tune_allocator()
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
        if torch.is_grad_enabled():
            self.tape.begin(first_length(args, kwargs))

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
            found = f"parameter '{min(self.outside)}' used outside the layer that owns it, or unfrozen after the start"
            fix = "call the layer itself, or pass whole=True to run the model record by record"
            raise PlanError("per-record", found, "every use inside a recorded layer", fix)
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


Losses = Callable[[Any, Tensor], Tensor]  # (outputs, targets) -> one loss per record [b]


class ClippedGradient:
    """Clipped sums of a model's per-record gradients.

    Layers go by their own rules where the records can be told apart in every layer; a model that uses a parameter
    outside its layer, or a layer without records, is run whole, each record with its own copy of the parameters.
    A model or a loss that mixes records is refused: at the first batch, or in a later one chosen at random by `rng`.
    `proved` says that no record can reach another in model and loss, by their operations: then no check is needed.
    """

    def __init__(
        self, model: nn.Module, losses: Losses, rng: np.random.Generator | None = None, proved: bool = False
    ) -> None:
        self.model = model
        self.losses = losses
        self.checks, self.proved = IndependenceChecks(model, self._passing, rng), proved
        self.asked = False  # whether the next batch is checked, whatever the random numbers say
        self.recorder = Recorder(model, verify=False)
        self.whole = False
        self.trusted = False  # whether a batch has shown that the records are kept apart
        self.recheck = False  # whether the gradients of the next pass are checked again
        self.channels_last = True  # until a model turns out to need the usual order

    def sum(self, x: Any, y: Tensor, clip_norm: float, mask: Tensor | None = None, norm: Norm = 2) -> Clipped:
        """The clipped sum over the records of x (a tensor, or a tuple of the model's inputs) that `mask` keeps."""
        inputs = x if isinstance(x, tuple) else (x,)
        if mask is not None:  # masked records are left out of the forward pass; their norms and losses read zero
            kept = mask.bool()
            part = self.sum(tuple(item[kept] for item in inputs), y[kept], clip_norm, norm=norm)
            norms, losses = part.norms.new_zeros(len(y)), part.losses.new_zeros(len(y))
            norms[kept], losses[kept] = part.norms, part.losses
            return Clipped(part.total, norms, losses)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if named.keys() != self.recorder.named.keys() or any(p is not named[n] for n, p in self.recorder.named.items()):
            self._restart()  # parameters were frozen or unfrozen
        if not len(y):
            total = {name: torch.zeros_like(p) for name, p in named.items()}
            return Clipped(total, torch.zeros(0, dtype=torch.float64), torch.zeros(0))
        try:
            self._check(inputs, y)
            return self._recorded(inputs, y, clip_norm, norm)
        except UnrecordableError:
            return self._run_whole(inputs, y, clip_norm, norm)

    def _restart(self) -> None:
        self.recorder, self.trusted = Recorder(self.model, self.whole, verify=False), False

    def _recorded(self, inputs: tuple[Tensor, ...], y: Tensor, clip_norm: float, norm: Norm) -> Clipped:
        with torch.enable_grad(), self.recorder as recorder:
            losses = self._verified(inputs, y)
            wanted = [recorder.tape.anchor, *recorder.named.values()]
            slopes = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
            if any(slope is not None for slope in slopes[1:]):
                raise UnrecordableError("a parameter used outside the layer that owns it")
            clipped = recorder.clipped_sum(clip_norm, norm=norm)
        return Clipped(clipped.total, clipped.norms, losses.detach())

    def _verified(self, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """The losses; on the first batch of two or more, the first and the last must depend on no other record."""
        losses = self._arranged(inputs, y)
        if not self.trusted or self.recheck:
            try:
                self.recorder.tape.check_slices([losses], (0, len(losses) - 1))
            except UnrecordableError:
                if self.recheck:  # steps have been taken
                    raise mixing_error() from None
                raise
            self.trusted, self.recheck = self.trusted or (len(y) > 1 and bool(losses.isfinite().all())), False
        return losses

    def _check(self, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        """At the first batch, and in some after it, a record alone is compared with the record among others."""
        due = self.checks.due(len(y), max(len(y), 1)) or self.asked
        if self.whole or self.proved or len(y) < 2:
            return
        batch = BatchPass(self._recorded_losses, (inputs, y), len(y))
        if not self.trusted:
            self.checks.start(batch)
        elif due:
            self.asked, self.recheck = False, self.checks.again(batch)

    def _recorded_losses(self, pair: Any) -> Tensor:
        with self.recorder:
            return self._arranged(*pair)

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
            found = f"a loss of shape {list(losses.shape)} for {len(y)} records"
            raise DataError(found, "one value per record", 'reduction="none"')
        return losses

    def _run_whole(self, inputs: tuple[Tensor, ...], y: Tensor, clip_norm: float, norm: Norm) -> Clipped:
        """From now on each record has its own copy of all parameters; a model that mixes records is refused."""
        if self.whole:
            raise mixing_error()
        if len(y) > 1 and not self.proved:
            self.checks.start(BatchPass(self._passing(self.model), (inputs, y), len(y)))
        self.whole = True
        self._restart()
        return self._recorded(inputs, y, clip_norm, norm)
