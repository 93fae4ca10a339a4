"""Exact clipped gradient of a batch, for any module and any loss with one value per record; the engines' DP-SGD path.

total = sum_j g_j min(1, C / ||g_j||),    g_j = d loss_j / d w,    C the clip norm      (one backward pass, no noise)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino.accounting.bounds import Norm
from sordino.dpsgd.batch_independence import BatchPass, IndependenceChecks, mixing_error
from sordino.dpsgd.clipped_sum import Clipped, Recorder
from sordino.dpsgd.tape import UnrecordableError
from sordino.errors import DataError

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
        if mask is not None:
            return self._masked(inputs, y, clip_norm, mask.bool(), norm)
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

    def _masked(self, inputs: tuple[Tensor, ...], y: Tensor, clip_norm: float, mask: Tensor, norm: Norm) -> Clipped:
        """Masked records are left out of the forward pass; their norms and losses read zero."""
        part = self.sum(tuple(item[mask] for item in inputs), y[mask], clip_norm, norm=norm)
        norms, losses = part.norms.new_zeros(len(y)), part.losses.new_zeros(len(y))
        norms[mask], losses[mask] = part.norms, part.losses
        return Clipped(part.total, norms, losses)

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
