"""The clients' gradients: one client at a time through autograd, or a chunk of clients through vmap."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sordino.dpsgd import ClippedGradient
from sordino.dpsgd.batch_independence import has_mixing_layer
from sordino.dpsgd.state_guard import StateGuard
from sordino.engines.dense_clients import Copies
from sordino.engines.winograd import accelerate
from sordino.layout import Layout
from sordino.parts.clipping import FEW, factors, row_norms
from sordino.parts.gradients import Ball, Batch, Moreau
from sordino.parts.losses import Loss
from sordino.rng import forked_rng
from sordino.task import Task

MADE_UP = 13  # records: few, and unlike the length of anything else
RECORD_ENTRIES = 1 << 23  # numbers in the rows of one piece of a batch, where every record has a row of its own


class OneClient:
    """One client at a time: the module's tensors are views of one flat row, and so are its gradients.

    With `any_order`, convolutions lie channels last in the row: how a CPU convolves fastest.
    """

    def __init__(
        self, task: Task, winograd: bool = True, coins: np.random.Generator | None = None, any_order: bool = True
    ) -> None:
        self.layout, self.program = task.layout, task.program
        self.model, self.losses = self.program.running().train(), self.program.losses
        self.row = torch.empty(1, self.layout.size, device=task.device)
        self.slope = torch.zeros(1, self.layout.size, device=task.device)
        self.any_order = any_order
        self.layout.bind(self.model, self.row[0], self.slope[0], channels_last=any_order)
        self.winograd = accelerate(self.model) if winograd else 0
        self.records: RecordSums | None = None
        self.fast = ClippedGradient(self.model, self.losses, coins) if one_pass(task) else None
        self.compared = self.program.trusted  # whether the fast sum was compared with `RecordSums` on made-up records
        self.state = watched(self.model, self.layout.tensors(self.model))

    @property
    def trainable(self) -> int:
        return self.layout.trainable

    def place(self, start: Tensor, clients: int) -> Tensor:
        """The row [1, d], set to `start`: what is not in it stays as it was, or `untouched` refuses."""
        self.row[0].copy_(start)
        return self.row

    def untouched(self) -> None:
        """Nothing of this client is left where the next could see it; what is in the row is its message."""
        self.state.check(full=True)
        if self.records is not None:
            self.records.state.check(full=True)

    def inward(self, start: Tensor) -> Tensor:
        """Convolutions channels last, where their order is nothing to anybody."""
        return self.layout.channels_last(start[None])[0] if self.any_order else start

    def outward(self, rows: Tensor) -> Tensor:
        return self.layout.channels_first(rows) if self.any_order else rows

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """Plain steps with fresh gradients: none is zeroed first, or added to."""
        w, tensors = self.place(start, clients), [p for p in self.model.parameters() if p.requires_grad]
        for batch in batches:
            slopes = torch.autograd.grad(self._loss(batch), tensors, allow_unused=True)
            moved = [(p, slope) for p, slope in zip(tensors, slopes, strict=True) if slope is not None]
            with torch.no_grad():
                if decay:
                    w[:, : self.trainable].mul_(1 - lr * decay)
                torch._foreach_add_([p for p, _ in moved], [slope for _, slope in moved], alpha=-lr)
        return w

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradient [1, d] of the mean loss of the batch at w [1, d]."""
        if w is not self.row:
            kept = self.row.clone()
            self.row.copy_(w)
            slope = self._backward(batch)
            self.row[0, : self.trainable].copy_(kept[0, : self.trainable])
            return slope
        return self._backward(batch)

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        """Sum [1, d] of every record's gradient at w [1, d], each pulled into the ball."""
        x, y = batch.x[0], batch.y[0]
        if batch.mask is not None:
            x, y = x[batch.mask[0]], y[batch.mask[0]]
        if ball.norm == 2 and ball.envelope is None and math.isfinite(ball.clip_norm):
            fast = self._compared()
            if fast is not None:
                return self._in_one_pass(fast, w, x, y, ball.clip_norm)
        return self.inward(self._records().sum(self.outward(w)[0], x, y, ball))[None]

    def _records(self) -> RecordSums:
        if self.records is None:
            self.program.check("record")
            self.records = RecordSums(self.program.running().train(), self.losses, self.layout)
        return self.records

    def _compared(self) -> ClippedGradient | None:
        """The sum in one pass, where it is that of `RecordSums` on made-up records; else none.

        By the graph, records keep apart whatever they hold: that the layers' rules find them is then a matter of
        shapes. Weights are shaken, lest a zero hides something. Where coins decide, records are looked at instead.
        """
        if self.compared or self.fast is None:
            return self.fast
        self.compared, (x, y), kept = True, self.program.sample(MADE_UP), self.row.clone()
        with forked_rng(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap says where it is slow: this is one batch
            self.row.add_(torch.arange(self.layout.size).sin().to(self.row), alpha=0.1)
            slow = self._by_vmap(x, y)
            if slow is not None:
                self.fast.proved = True
                found = self.outward(self._in_one_pass(self.fast, self.row, x, y, 1.0))[0]
                self.fast = self.fast if torch.allclose(found, slow, rtol=1e-3, atol=1e-4) else None
            self.row.copy_(kept)
        return self.fast

    def _by_vmap(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The sum of clipped gradients where the row is now; None where coins decide it, or vmap cannot run it."""
        try:
            slow = [self._records().sum(self.outward(self.row)[0], x, y, Ball(1.0)) for _ in range(2)]
        except (RuntimeError, NotImplementedError):
            return None
        return slow[0].to(self.row.dtype) if torch.equal(slow[0], slow[1]) else None

    def _in_one_pass(self, fast: ClippedGradient, w: Tensor, x: Tensor, y: Tensor, clip_norm: float) -> Tensor:
        """The same sum from one backward pass, in the objective's own order of coordinates."""
        kept = None if w is self.row else self.row.clone()
        if kept is not None:
            self.row.copy_(w)
        try:
            total = fast.sum(x, y, clip_norm).total
        finally:
            if kept is not None:
                self.row.copy_(kept)
        return self.inward(torch.cat([total[slot.name].reshape(-1) for slot in self.layout.slots]))[None]

    def _backward(self, batch: Batch) -> Tensor:
        self.slope.zero_()
        self._loss(batch).backward()  # type: ignore[no-untyped-call]
        return self.slope

    def _loss(self, batch: Batch) -> Tensor:
        """The mean loss of the client's batch."""
        x, y = batch.x[0], batch.y[0]
        if batch.mask is not None:
            x, y = x[batch.mask[0]], y[batch.mask[0]]
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)  # convolutions and pools are far faster so on a CPU
        return self.losses(self.model(x), y).mean()


def watched(model: nn.Module, rows: Iterable[Tensor] = ()) -> StateGuard:
    """The module as it is before its first client; the tensors of `rows` move with every client."""
    fix = "keep what a client needs in parameters or float buffers: they begin anew for each and are clipped and noised"
    return StateGuard(model, list(rows), "while a client trained, so that the next would see it", fix)


class ManyClients(Copies):
    """A chunk of clients at once: vmap of the gradient over rows of parameters."""

    def __init__(self, task: Task) -> None:
        self.layout, self.program = task.layout, task.program
        self.model, losses = self.program.running().train(), self.program.losses

        def mean_loss(named: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            values = losses(functional_call(self.model, named, (x,)), y)
            return (values * mask).sum() / mask.sum().clamp(min=1)

        self.slopes = vmap(grad(mean_loss))
        self.records = RecordSums(self.model, losses, task.layout)

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        """Sums [m, d] of every record's gradient, each pulled into the ball: client by client."""
        self.program.check("record")
        masks = batch.mask if batch.mask is not None else [None] * len(w)
        each = [
            self.records.sum(row, x if keep is None else x[keep], y if keep is None else y[keep], ball)
            for row, x, y, keep in zip(w, batch.x, batch.y, masks, strict=True)
        ]
        return torch.stack(each)

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        return None

    def untouched(self) -> None:
        """Nothing of these clients is left where the next chunk could see it."""
        self.records.state.check(full=True)

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradients [m, d] of each client's mean loss at its own row of w [m, d]."""
        mask = batch.mask if batch.mask is not None else w.new_ones(batch.y.shape[:2])
        named = self.slopes(self.layout.views(w), batch.x, batch.y, mask.to(w.dtype))
        return torch.cat([named[slot.name].reshape(len(w), -1) for slot in self.layout.slots], dim=1)


class RecordSums:
    """Every record's gradient through vmap, a few records at a time; what no faster rule covers."""

    def __init__(self, model: nn.Module, losses: Loss, layout: Layout) -> None:
        self.layout, self.width = layout, max(1, RECORD_ENTRIES // layout.size)

        def record_loss(named: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return losses(functional_call(model, named, (x[None],)), y[None])[0]

        self.slopes = vmap(grad(record_loss), in_dims=(None, 0, 0), randomness="different")
        self.own = vmap(grad(record_loss), in_dims=(0, 0, 0), randomness="different")
        self.state = watched(model)

    def sum(self, w: Tensor, x: Tensor, y: Tensor, ball: Ball) -> Tensor:
        """Sum [d] of gradients at w of records x, y [b, ...], each pulled into the ball; of many in float64."""
        total = torch.zeros_like(w, dtype=torch.float64)
        for some, labels in zip(torch.split(x, self.width), torch.split(y, self.width), strict=True):
            if len(some):
                if ball.envelope is None:
                    rows = self._flat(self.slopes(self.layout.views(w), some, labels), len(some))
                else:
                    rows = ball.envelope.beta * (w - self._prox(w, some, labels, ball.envelope))
                scale = factors(row_norms(rows, ball.norm), ball.clip_norm)
                total += (rows * scale.to(rows.dtype)[:, None]).nan_to_num(0.0, 0.0, 0.0).sum(0, dtype=torch.float64)
        return total if len(x) > FEW else total.to(w.dtype)

    def _prox(self, w: Tensor, x: Tensor, y: Tensor, envelope: Moreau) -> Tensor:
        """argmin_v f(v) + beta / 2 ||w - v||^2 of every record: subgradient method with steps 2 / (beta (k + 2)).

        The weighted mean of the iterates, weights k + 1 (Lacoste-Julien, Schmidt, Bach 2012).
        """
        v, mean = w.repeat(len(x), 1), w.repeat(len(x), 1)
        for k in range(envelope.steps):
            slope = self._flat(self.own(self.layout.views(v), x, y), len(x)) + envelope.beta * (v - w)
            mean = mean + (v - mean) * (2 / (k + 2))
            v = v - slope * (2 / (envelope.beta * (k + 2)))
        return mean

    def _flat(self, named: dict[str, Tensor], count: int) -> Tensor:
        return torch.cat([named[slot.name].reshape(count, -1) for slot in self.layout.slots], dim=1)


def one_pass(task: Task) -> bool:
    """Whether clipped gradients may come from one backward pass: all is trained, and no record reaches another."""
    whole = task.layout.trainable == task.layout.size and not has_mixing_layer(task.model)
    return whole and (task.program.trusted or task.program.apart)
