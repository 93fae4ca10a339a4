"""Objectives, which compute the clients' gradients, and the table `PATHS` that selects one. Used by inprocess.py.

The first row of `PATHS` whose condition holds is used. Conditions use public numbers only (the plan, the shapes of
model and records), because the choice is written to `engine.jsonl` and the number of a client's records is private.
Speed-ups are ratios of CPU seconds on one AVX2 core (interleaved, least of several), on models not used for tuning:
linear 617 x 26; MLPs of widths 93-41-7, 617-51-26 and 617-203-97-26; CNNs with odd numbers of channels. A method with a
speed-up below 1.2 is not included. `python benchmarks/own/paths.py` measures all speed-ups again.
Two more methods are used where they apply: compiled loops (`LinearClients`, for float32 records on a CPU and a shipped
loss) are 1.36 times as fast; one backward pass for all records (`OneClient`, for an L2 clip and a model without a layer
that mixes records) is 3.3 times as fast on the MNIST CNN.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sordino.dpsgd import ClippedGradient
from sordino.dpsgd.batch_independence import has_mixing_layer
from sordino.dpsgd.state_guard import StateGuard
from sordino.engines.dense_clients import Copies, DenseClients, LinearClients, has_written_gradient
from sordino.layout import Layout
from sordino.parts.clipping import FEW, factors, row_norms
from sordino.parts.gradients import Ball, Batch, Moreau, Objective
from sordino.parts.losses import Loss
from sordino.plan import Plan
from sordino.rng import Streams, forked_rng
from sordino.task import Task

MADE_UP = 13  # synthetic records for a comparison; few, and an unlikely size of any other dimension
RECORD_ENTRIES = 1 << 23  # numbers in the per-record gradients that are formed at once


class OneClient:
    """Gradients of one client at a time by autograd; the module's parameters and gradients are views of flat rows.

    With `any_order`, convolution weights are stored channels last in the row, which is fastest on a CPU.
    """

    def __init__(self, task: Task, rng: np.random.Generator | None = None, any_order: bool = True) -> None:
        self.layout, self.program = task.layout, task.program
        self.model, self.losses = self.program.training_model().train(), self.program.losses
        self.row = torch.empty(1, self.layout.size, device=task.device)
        self.slope = torch.zeros(1, self.layout.size, device=task.device)
        self.any_order = any_order
        self.layout.bind(self.model, self.row[0], self.slope[0], channels_last=any_order)
        self.records: RecordSums | None = None
        whole = self.layout.trainable == self.layout.size and not has_mixing_layer(task.model)
        one_pass = whole and (self.program.trusted or self.program.records_independent)
        self.fast = ClippedGradient(self.model, self.losses, rng) if one_pass else None
        self.compared = self.program.trusted  # whether `fast` was compared with `RecordSums` on synthetic records
        self.state = state_guard(self.model, self.layout.tensors(self.model))

    @property
    def trainable(self) -> int:
        return self.layout.trainable

    def place(self, start: Tensor, clients: int) -> Tensor:
        self.row[0].copy_(start)
        return self.row

    def untouched(self) -> None:
        """Refuse a module that stored this client's data outside its parameters: the next client could read it."""
        self.state.check(full=True)
        if self.records is not None:
            self.records.state.check(full=True)

    def inward(self, start: Tensor) -> Tensor:
        return self.layout.channels_last(start[None])[0] if self.any_order else start

    def outward(self, rows: Tensor) -> Tensor:
        return self.layout.channels_first(rows) if self.any_order else rows

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """Run SGD on the module's parameters, w <- (1 - lr decay) w - lr gradient, one step per batch."""
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
        """Return the gradient [1, d] of the batch's mean loss at parameters w [1, d]."""
        before = None if w is self.row else self.row.clone()
        if before is not None:
            self.row.copy_(w)
        self.slope.zero_()
        self._loss(batch).backward()  # type: ignore[no-untyped-call]
        if before is not None:
            self.row[0, : self.trainable].copy_(before[0, : self.trainable])
        return self.slope

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        """Return the sum [1, d] of clipped per-record gradients at parameters w [1, d]."""
        x, y = _real_records(batch)
        if ball.norm == 2 and ball.envelope is None and math.isfinite(ball.clip_norm):
            fast = self._compared()
            if fast is not None:
                return self._in_one_pass(fast, w, x, y, ball.clip_norm)
        return self.inward(self._record_sums(w, x, y, ball))[None]

    def _record_sums(self, w: Tensor, x: Tensor, y: Tensor, ball: Ball) -> Tensor:
        if self.records is None:
            self.program.check("record")
            self.records = RecordSums(self.program.training_model().train(), self.losses, self.layout)
        return self.records.sum(self.outward(w)[0], x, y, ball)

    def _compared(self) -> ClippedGradient | None:
        """Return the one-pass method (`ClippedGradient`) if it equals `RecordSums` on synthetic records, else None.

        The captured graph proves that records are independent; whether the layers' rules separate them depends only on
        shapes. Weights are perturbed so that no zero weight hides a difference. If the forward pass is random, or vmap
        cannot run it, `ClippedGradient` checks the independence of real records instead.
        """
        if self.compared or self.fast is None:
            return self.fast
        self.compared, (x, y), before = True, self.program.sample(MADE_UP), self.row.clone()
        with forked_rng(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap warns where it is slow: this is one batch
            self.row.add_(torch.arange(self.layout.size).sin().to(self.row), alpha=0.1)
            try:
                one, other = (self._record_sums(self.row, x, y, Ball(1.0)) for _ in range(2))
            except (RuntimeError, NotImplementedError):
                one, other = torch.empty(0), torch.empty(1)
            if torch.equal(one, other):
                self.fast.proved = True
                found = self.outward(self._in_one_pass(self.fast, self.row, x, y, 1.0))[0]
                self.fast = self.fast if torch.allclose(found, one.to(found.dtype), rtol=1e-3, atol=1e-4) else None
            self.row.copy_(before)
        return self.fast

    def _in_one_pass(self, fast: ClippedGradient, w: Tensor, x: Tensor, y: Tensor, clip_norm: float) -> Tensor:
        before = None if w is self.row else self.row.clone()
        if before is not None:
            self.row.copy_(w)
        try:
            total = fast.sum(x, y, clip_norm).total
        finally:
            if before is not None:
                self.row.copy_(before)
        return self.inward(torch.cat([total[slot.name].reshape(-1) for slot in self.layout.slots]))[None]

    def _loss(self, batch: Batch) -> Tensor:
        x, y = _real_records(batch)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)  # convolutions and pools are far faster so on a CPU
        return self.losses(self.model(x), y).mean()


def _real_records(batch: Batch) -> tuple[Tensor, Tensor]:
    x, y = batch.x[0], batch.y[0]
    return (x, y) if batch.mask is None else (x[batch.mask[0]], y[batch.mask[0]])


def state_guard(model: nn.Module, rows: Iterable[Tensor] = ()) -> StateGuard:
    """Return a guard that detects changes of the module's state other than of the tensors in `rows`."""
    fix = "use parameters or float buffers, which are reset for every client, and whose change is clipped and noised"
    return StateGuard(model, list(rows), "while a client trained, so that the next client would see it", fix)


class ManyClients(Copies):
    """Gradients of several clients at once, by vmap of the gradient over one parameter vector per client."""

    def __init__(self, task: Task) -> None:
        self.layout, self.program = task.layout, task.program
        self.model, losses = self.program.training_model().train(), self.program.losses

        def mean_loss(named: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            values = losses(functional_call(self.model, named, (x,)), y)
            return (values * mask).sum() / mask.sum().clamp(min=1)

        self.slopes = vmap(grad(mean_loss))
        self.records = RecordSums(self.model, losses, task.layout)

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        """Return each client's sum of clipped per-record gradients, at that client's parameters in `w`."""
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
        """Refuse a module that stored data of these clients, where later clients could read the data."""
        self.records.state.check(full=True)

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of each client's mean loss, at that client's parameters in `w`."""
        mask = batch.mask if batch.mask is not None else w.new_ones(batch.y.shape[:2])
        return self.layout.rows(self.slopes(self.layout.views(w), batch.x, batch.y, mask.to(w.dtype)), len(w))


class RecordSums:
    """Sums of clipped per-record gradients by vmap, a few records at a time, for models without a faster method."""

    def __init__(self, model: nn.Module, losses: Loss, layout: Layout) -> None:
        self.layout, self.width = layout, max(1, RECORD_ENTRIES // layout.size)

        def record_loss(named: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return losses(functional_call(model, named, (x[None],)), y[None])[0]

        self.slopes = vmap(grad(record_loss), in_dims=(None, 0, 0), randomness="different")
        self.own_slopes = vmap(grad(record_loss), in_dims=(0, 0, 0), randomness="different")
        self.state = state_guard(model)

    def sum(self, w: Tensor, x: Tensor, y: Tensor, ball: Ball) -> Tensor:
        """Return the sum [d] of the clipped gradients of records `x` with targets `y`, at parameters w [d]."""
        total = torch.zeros_like(w, dtype=torch.float64)
        for some, labels in zip(torch.split(x, self.width), torch.split(y, self.width), strict=True):
            if len(some):
                if ball.envelope is None:
                    rows = self.layout.rows(self.slopes(self.layout.views(w), some, labels), len(some))
                else:
                    rows = ball.envelope.beta * (w - self._prox(w, some, labels, ball.envelope))
                scale = factors(row_norms(rows, ball.norm), ball.clip_norm)
                total += (rows * scale.to(rows.dtype)[:, None]).nan_to_num(0.0, 0.0, 0.0).sum(0, dtype=torch.float64)
        return total if len(x) > FEW else total.to(w.dtype)

    def _prox(self, w: Tensor, x: Tensor, y: Tensor, envelope: Moreau) -> Tensor:
        """Return each record's proximal point argmin_v f(v) + beta/2 ||w - v||^2, where f is the record's loss.

        Gradient step k has size 2/(beta (k + 2)); the result is the mean of the iterates with weights k + 1
        (Lacoste-Julien, Schmidt, Bach 2012).
        """
        v, mean = w.repeat(len(x), 1), w.repeat(len(x), 1)
        for k in range(envelope.steps):
            own = self.own_slopes(self.layout.views(v), x, y)
            slope = self.layout.rows(own, len(x)) + envelope.beta * (v - w)
            mean = mean + (v - mean) * (2 / (k + 2))
            v = v - slope * (2 / (envelope.beta * (k + 2)))
        return mean


# ---- the choice of a path -------------------------------------------------------------------------------------------

Path = Literal["batched", "sequential"]  # a chunk of clients at once, or one at a time
BATCH_BELOW = {"cpu": 2e7}  # FLOP per local step: below, one bmm over many clients beats one client at a time
GUESS = 2e9  # the same limit for devices without an entry: a guess until `make bench-gpu` has measured it there
NOMINAL = 32  # batch size assumed for this limit where the plan sets none


@dataclass(frozen=True)
class ExecutionPath:
    """Row of `PATHS`: a method to compute clients' gradients, and the condition `when` for its use.

    If the user selects `path` and `always` is set, the condition is ignored.
    """

    path: Path
    when: Callable[[Plan, Task], bool]
    make: Callable[[Task, Plan, Streams], Objective]
    always: bool = False


def choose_path(plan: Plan, task: Task, path: Path | None = None) -> ExecutionPath:
    """Return the first row of `PATHS` whose condition holds; with `path`, among the rows of that name."""
    fitting = (row for row in PATHS if path in (None, row.path))
    return next(row for row in fitting if (path is not None and row.always) or row.when(plan, task))


def _is_small(plan: Plan, task: Task) -> bool:
    flops = step_flops(task, getattr(plan.local, "batch", None) or NOMINAL)
    return flops < BATCH_BELOW.get(task.device.type, GUESS) and can_batch(task)


PATHS = (
    # One Linear layer: 2.4 times as fast as vmap; with every record clipped 17
    ExecutionPath(
        "batched",
        lambda plan, task: (
            has_written_gradient(task, single=True) and (not plan.local.needs_envelope or task.losses.has_envelope)
        ),
        lambda task, *_: LinearClients(task),
    ),
    # Linear layers and activations: 0.9 to 2.4 times as fast as vmap; with every record clipped 16 to 21
    ExecutionPath(
        "batched",
        lambda plan, task: has_written_gradient(task, single=False) and not plan.local.needs_envelope,
        lambda task, *_: DenseClients(task),
    ),
    # vmap: 1.6 to 8.5 times as fast as one client at a time; equally fast near 20 MFLOP a step, slower above 50
    ExecutionPath("batched", _is_small, lambda task, *_: ManyClients(task), always=True),
    # One client at a time: whatever torch can run (recurrence, buffers, dropout, large convolutions)
    ExecutionPath(
        "sequential",
        lambda plan, task: True,
        lambda task, plan, streams: OneClient(task, streams.at(0, "mixing"), plan.local.any_order),
        always=True,
    ),
)


def can_batch(task: Task) -> bool:
    """Return whether vmap can run this model, so that several clients can be computed at once.

    A model with float buffers, randomness or an operation without a batching rule cannot. Records must not influence
    each other, because clients with fewer records are padded with masked records.
    """
    layout = task.layout
    if layout.trainable < layout.size or any(isinstance(part, nn.RNNBase) for part in task.model.modules()):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # vmap warns where it would loop slowly
            many, (x, y) = ManyClients(task), task.program.sample(2)  # two clients with synthetic records
            y = y if y.is_floating_point() else torch.zeros_like(y)
            start = many.place(layout.flatten(task.model), 2)
            many.gradient(start, Batch(torch.stack([x, x]), torch.stack([y, y])))
    except (RuntimeError, ValueError, NotImplementedError, UserWarning):
        return False
    return task.program.records_independent


def step_flops(task: Task, batch: int) -> float:
    """Return the floating-point operations of one local step (forward and backward) on `batch` records."""
    model, total = task.program.training_model().train(), 0.0

    def count(module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal total
        first: Tensor = output[0] if isinstance(output, tuple) else output
        weights = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        uses = 1.0  # of each weight: per pixel in a convolution, per step in a recurrence
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            uses = first.numel() / module.out_channels
        elif isinstance(module, nn.Linear | nn.RNNBase):
            uses = first.numel() / first.shape[-1]
        total += 2.0 * weights * uses

    for module in model.modules():
        module.register_forward_hook(count)
    with torch.no_grad(), forked_rng():
        model(task.program.sample(2)[0])
    return 3.0 * batch * total / 2
