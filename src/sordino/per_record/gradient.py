"""The exact clipped gradient of a batch, for any module and any loss that gives one value per record.

total = sum_j g_j min(1, radius / ||g_j||),    g_j = d loss_j / d w      (one backward pass; nothing draws noise)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import DataError, PlanError
from sordino.per_record.clip import Clipped
from sordino.per_record.record import Recorder
from sordino.per_record.tape import UnrecordableError
from sordino.privacy.bounds import Norm

Losses = Callable[[Any, Tensor], Tensor]  # (outputs, targets) -> one loss per record [b]


class ClippedGradient:
    """Clipped sums of a model's per-record gradients.

    Layers go by their own rules where the records can be told apart in every layer; a model that uses a parameter
    outside its layer, or a layer without records, is run whole, each record with its own copy of the parameters.
    """

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        self.model = model
        self.losses = losses
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
        """The losses; on the first batch of two or more, the first must depend on no other record."""
        losses = self._arranged(inputs, y)
        if not self.trusted:
            self.recorder.verify(losses[0])
            self.trusted = len(losses) > 1 and bool(losses.isfinite().all())
        return losses

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
        if self.whole or self._mixes(inputs, y):
            raise PlanError(
                "mixing",
                "a model whose loss for one record depends on the other records of the batch",
                "layers that keep the records of a batch apart",
                "normalise within a record, as nn.GroupNorm and nn.LayerNorm do",
            )
        self.whole = True
        self._restart()
        return self._recorded(inputs, y, radius, norm)

    @torch.no_grad()
    def _mixes(self, inputs: tuple[Tensor, ...], y: Tensor) -> bool:
        """Whether the first record's loss changes when it is alone."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        together, alone = self._losses(inputs, y)[:1], self._losses(tuple(item[:1] for item in inputs), y[:1])
        for module in training:
            module.training = True
        return not torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True)
