"""Clipped sum of per-record gradients, sum_j g_j min(1, C / ||g_j||), from recorded layers or for any module.

g_j is the gradient of record j and C the clip norm. The norm is over all parameters, or over each `ClipGroup` of them.
Fast norms are used for almost every record; if the fast norm of a record is not precise enough (huge, not finite, or
with float32 cancellation above the slack), its gradient is computed in full. A record with NaN or infinity in its
gradient counts as zero in all groups; its norm is reported as inf or nan. Called by dpsgd/optimizer.py and recording.py
(`clipped_sum`, `CheckedForward`), and by engines/objectives.py: `ClippedGradient` takes any module and any loss with
one value per record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from sordino import codec
from sordino.accounting.bounds import Norm
from sordino.dpsgd.batch_independence import BatchPass, IndependenceChecks, mixing_error, refuse_mixing, trained_outputs
from sordino.dpsgd.pieces import ROOM, Piece, Tape, UnrecordableError, ieee_products, sums_in, wide
from sordino.dpsgd.rule_table import run_by_rules, sites
from sordino.errors import ConfigError, DataError, PlanError
from sordino.parts.clipping import FEW, SLACK, factors, row_norms
from sordino.rng import forked_rng
from sordino.version import tune_allocator

_TINY, _HUGE = 1e-12, 1e15  # outside of this range, squares of float32 lose digits
ARRANGEMENTS = ((True, False), (False, False), (False, True))  # (channels last, record by record), the fastest first

Pieces = Mapping[nn.Parameter, Piece]


@codec.hides_values
@dataclass(frozen=True)
class Clipped:
    """Clipped gradient sum of one batch by parameter name, with each record's loss and unclipped gradient norm."""

    total: dict[str, Tensor]
    norms: Tensor  # [b], float64; zero where masked
    losses: Tensor  # [b]


@dataclass(frozen=True)
class ClipGroup:
    """Group of trained parameters that are clipped together: a record's gradient over them has norm <= `clip_norm`.

    Guarantee: over disjoint groups with clip norms C_l a record's clipped gradient has norm <= sqrt(sum_l C_l^2).
    """

    clip_norm: float
    names: tuple[str, ...]


def clipped_sum(
    pieces: Pieces,
    named: Mapping[str, nn.Parameter],
    batch: int,
    groups: Sequence[ClipGroup],
    scale: float = 1.0,
    norm: Norm = 2,
) -> tuple[dict[str, Tensor], Tensor, bool]:
    """Return the clipped gradient sum by parameter name, all norms [groups, b], and whether all norms are finite.

    The sum is sum_j scale g_j min(1, C / ||scale g_j||), where g_j is the gradient of record j over the parameters of
    one group, and C that group's clip norm. `scale` undoes a mean: it is b for a loss that is a mean over b records, 1
    for a sum. Sums of many records are in float64.
    """
    for group in groups:
        if not group.clip_norm > 0:
            fix = "use a clip norm near the typical gradient norm"
            raise ConfigError(f"clip_norm = {group.clip_norm}", "a positive number", fix)
    device = next((p.device for p in named.values()), torch.device("cpu"))
    norms = torch.zeros(len(groups), batch, dtype=torch.float64, device=device)
    if not batch:
        return {name: torch.zeros_like(p) for name, p in named.items()}, norms, True
    finite, total = True, dict[str, Tensor]()
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        owned = [{name: named[name] for name in group.names} for group in groups]
        masks = [
            _fast_norms([pieces[p] for p in own.values() if p in pieces], row, group.clip_norm / scale)
            for group, own, row in zip(groups, owned, norms, strict=True)
        ]
        sound = masks[0] if len(masks) == 1 else torch.stack(masks).all(0)
        sound = sound if norm == 2 else torch.zeros_like(sound)
        index = None if bool(sound.all()) else sound.nonzero()[:, 0]  # one value read from the device
        for group, own, row in zip(groups, owned, norms, strict=True):
            total |= _weighted(pieces, own, factors(row, group.clip_norm / scale).mul_(scale), index)
        if batch > FEW:
            total = {name: part.double() for name, part in total.items()}
        if index is not None:
            clips = [(group.clip_norm, own) for group, own in zip(groups, owned, strict=True)]
            _add_carefully(total, norms, pieces, clips, (~sound).nonzero()[:, 0], scale, norm)
            finite = bool(norms.isfinite().all())
    return total, norms if scale == 1 else norms * scale, finite


def _fast_norms(pieces: Sequence[Piece], norms: Tensor, clip_norm: float) -> Tensor:
    """Write the records' gradient norms into `norms`, which holds zeros; return which of them are precise enough."""
    squares = norms
    for piece in pieces:
        squares += piece.squares()
    doubts = [piece.doubt() for piece in pieces]
    before = squares.clone() if any(isinstance(doubt, Tensor) for doubt in doubts) else squares
    norms = squares.sqrt_()
    sound = norms < _HUGE  # false for nan
    if before is not squares:
        doubt = sum(doubts)
        sound &= (doubt <= SLACK * before) | (before + doubt < clip_norm**2)
    if clip_norm < 1e6 * _TINY:
        sound &= norms > _TINY
    return sound


def _weighted(
    pieces: Pieces, named: Mapping[str, nn.Parameter], factors: Tensor, index: Tensor | None
) -> dict[str, Tensor]:
    """Return the gradient sum weighted by `factors` over the records at `index`, or over all if it is None.

    Other records are left out rather than weighted by 0, because 0 * inf is not 0.
    """
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
    clips: Sequence[tuple[float, Mapping[str, nn.Parameter]]],
    index: Tensor,
    scale: float,
    norm: Norm,
) -> None:
    """Add the clipped gradients of the records at `index` to `total`, from full gradients with norms in float64.

    `clips` has the clip norm and the parameters of each group. A record counts as zero in all groups if its gradient
    has NaN or infinity in one.
    """
    used = [{name: pieces[p] for name, p in own.items() if p in pieces} for _, own in clips]
    sizes = [[own[name].numel() for name in part] for (_, own), part in zip(clips, used, strict=True)]
    count = sum(map(sum, sizes))
    for some in torch.split(index, max(1, ROOM // (4 * max(1, count)))) if count and len(index) else ():
        rows = [
            torch.cat([piece.at(some).rows().reshape(len(some), -1) for piece in part.values()], 1) if part else None
            for part in used
        ]
        for k, found in enumerate(rows):
            norms[k, some] = 0.0 if found is None else row_norms(found, norm)
        finite = norms[:, some].isfinite().all(0)
        for k, found in enumerate(rows):
            if found is None:
                continue
            clipped = factors(norms[k, some][finite], clips[k][0] / scale) * scale @ found[finite].double()
            for name, part in zip(used[k], torch.split(clipped, sizes[k]), strict=True):
                total[name] += part.view_as(total[name]).to(total[name].dtype)


class CheckedForward:
    """Recorded forward pass of code without a graph, by layer rules or, if these do not apply, record by record.

    `plain` maps the inputs of a batch to outputs with one slice per record, by `model`; `of(copy)` does so by a copy of
    the model. Independence of records is tested at the first batch and at later ones that `rng` chooses
    (dpsgd/batch_independence.py). With `proved`, independence follows from the operations of model and loss, and only
    the layer rules are tested. `expected` is the public expected size of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        plain: Callable[[Any], Any],
        of: Callable[[nn.Module], Callable[[Any], Any]],
        rng: np.random.Generator | None,
        expected: float | None = None,
        proved: bool = False,
    ) -> None:
        self.model, self.plain, self.expected, self.proved = model, plain, expected, proved
        self.tape = Tape(next((p.device for p in model.parameters()), None))
        self.checks = IndependenceChecks(model, lambda own: self._called(plain) if own is model else of(own), rng)
        self.call: Callable[[Any], Any] | None = None  # the model with its hooks, if its forward is replaced
        self.probe: Callable[[Any], Any] | None = None  # function that runs inside `call` during a test
        self.asked = False  # whether the next batch is tested in any case
        self.last: tuple[BatchPass, bool] | None = None  # last pass that was not tested, and whether it was training
        self.error: PlanError | None = None
        self.restart()

    def restart(self, whole: bool = False) -> None:
        """Select the layer rules again, after parameters were frozen or unfrozen, or to run record by record."""
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.whole = whole  # whether each record has its own copy of all parameters
        self.by_layers, self.by_record = sites(self.model), sites(self.model, whole=True)
        self.arranged = False  # whether the rules have separated the records of a batch in a test

    def run(self, inputs: Any) -> Any:
        with run_by_rules(self.tape, self.by_record if self.whole else self.by_layers):
            return self.plain(inputs)

    def prepare(self, inputs: Any, size: int, records: Sequence[bool] | None = None) -> None:
        """Select at the first batch how the model is run; test the independence of records at some later batches."""
        if self.error is not None:
            raise self.error
        due = self.checks.due(size, max(size, 1) if self.expected is None else self.expected) or self.asked
        batch = BatchPass(self._called(self.run), inputs, size, records=records)
        if not self.arranged:
            self._arrange(batch)
        elif size > 1 and not self.whole and not self.proved:
            self.last = batch, self.model.training
            if due:
                self.asked = False
                self.check_last()

    def check_last(self) -> None:
        """Test the independence of records in the last batch, unless it was tested already."""
        if self.last is None:
            return
        (batch, training), self.last = self.last, None
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train(training) if training != self.model.training else None
        try:
            if self.checks.again(batch):
                self._check_slices(batch)
        except PlanError as error:
            self.error = mixing_error() if isinstance(error, UnrecordableError) else error
            raise self.error from None
        finally:
            for module, mode in modes:
                module.training = mode

    def _called(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that calls `run` with the model's hooks, recorded on a separate tape."""

        def forward(inputs: Any) -> Any:
            tape, self.probe = self.tape, run
            calls, batch, merge, tape.calls, tape.merge = tape.calls, tape.batch, tape.merge, [], None
            tape.batch = next((len(x) for x in tree_flatten(inputs)[0] if isinstance(x, Tensor) and x.dim()), 0)
            try:
                return run(inputs) if self.call is None else self.call(inputs)
            finally:
                self.probe, tape.calls, tape.batch, tape.merge = None, calls, batch, merge

        return forward

    def _arrange(self, batch: BatchPass) -> None:
        """Select the first of `ARRANGEMENTS` in which each record's gradient reaches only its own slices."""
        failure: Exception | None = None
        for channels_last, whole in ARRANGEMENTS:
            self.tape.channels_last, self.whole = channels_last, whole
            try:
                finite = self._check_slices(batch)
                if batch.size > 1 and not self.proved:
                    self.checks.start(replace(batch, forward=self._called(self.plain)) if whole else batch)
                self.arranged = finite and batch.size > 1
                return
            except UnrecordableError as error:
                failure = error
            except RuntimeError as error:
                if not channels_last or "view" not in str(error):
                    raise
        assert failure is not None
        raise failure

    def _check_slices(self, batch: BatchPass) -> bool:
        """Refuse layers that pass one record's gradient to other records; return whether the output is finite."""
        tape, size = self.tape, batch.size
        calls, before, tape.calls, tape.batch = tape.calls, tape.batch, [], size
        try:
            with forked_rng(), torch.enable_grad():
                leaves = trained_outputs(self.run(batch.inputs), size, needed=size > 1)
                tape.check_slices(leaves, sorted({0, size - 1}) if leaves else (), list(self.named.values()))
            return all(bool(y.isfinite().all()) for y in leaves)
        finally:
            tape.calls, tape.batch = calls, before


class ClippedGradient(CheckedForward):
    """Clipped sums of a model's per-record gradients, for a loss (outputs, targets) -> one value per record.

    A model or a loss that mixes records is refused: at the first batch, or in a later one chosen at random by `rng`.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Any, Tensor], Tensor],
        rng: np.random.Generator | None = None,
        proved: bool = False,
    ) -> None:
        refuse_mixing(model)
        tune_allocator()
        self.losses = losses
        super().__init__(
            model, self._losses, lambda own: lambda pair: losses(own(*pair[0]), pair[1]), rng, None, proved
        )

    def sum(self, x: Any, y: Tensor, clip_norm: float, mask: Tensor | None = None, norm: Norm = 2) -> Clipped:
        """Return the clipped gradient sum over the records of x, a tensor or tuple of inputs, where `mask` is True."""
        inputs = x if isinstance(x, tuple) else (x,)
        if mask is not None:  # other records are left out of the forward pass; their norms and losses are zero
            own = mask.bool()
            part = self.sum(tuple(item[own] for item in inputs), y[own], clip_norm, norm=norm)
            norms, losses = part.norms.new_zeros(len(y)), part.losses.new_zeros(len(y))
            norms[own], losses[own] = part.norms, part.losses
            return Clipped(part.total, norms, losses)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if named.keys() != self.named.keys() or any(p is not named[name] for name, p in self.named.items()):
            self.restart(self.whole)  # parameters were frozen or unfrozen
        if not len(y):
            total, norms, _ = clipped_sum({}, named, 0, [ClipGroup(clip_norm, tuple(named))])
            return Clipped(total, norms[0], torch.zeros(0))
        try:
            self.prepare((inputs, y), len(y))
            return self._clipped((inputs, y), clip_norm, norm)
        except UnrecordableError:  # a later batch, in which the rules do not separate the records
            if self.whole:
                raise mixing_error() from None
        if len(y) > 1 and not self.proved:
            self.checks.start(BatchPass(self.plain, (inputs, y), len(y)))
        self.restart(whole=True)
        self.arranged = len(y) > 1
        return self._clipped((inputs, y), clip_norm, norm)

    def _clipped(self, pair: Any, clip_norm: float, norm: Norm) -> Clipped:
        tape, size = self.tape, len(pair[1])
        tape.calls, tape.batch = [], size
        try:
            with torch.enable_grad():
                losses = self.run(pair)
                wanted = [tape.anchor, *self.named.values()]
                slopes = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
            if any(slope is not None for slope in slopes[1:]):
                raise UnrecordableError("a parameter used outside the layer that owns it")
            with ieee_products():
                whole = [ClipGroup(clip_norm, tuple(self.named))]
                total, norms, _ = clipped_sum(tape.pieces(), self.named, size, whole, norm=norm)
            return Clipped(total, norms[0], losses.detach())
        finally:
            tape.clear()

    def _losses(self, pair: Any) -> Tensor:
        losses, size = self.losses(self.model(*pair[0]), pair[1]), len(pair[1])
        if losses.shape != (size,):
            found = f"a loss of shape {list(losses.shape)} for {size} records"
            raise DataError(found, "one value per record", 'set reduction="none" in the loss')
        return losses
