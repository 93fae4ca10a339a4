"""Checks of a task: record-level units, layers and gradients before round 1 (loop.py, silos), leaks in every round.

Gradients are checked on a made-up record, which reveals nobody's data: noise moves every weight that is sent, so a
parameter that is not part of the forward pass would look trained from outside.

`LeakCheck` (engines/inprocess.py, every round) finds what stays of a client in model or loss code. `dpsgd.state_guard`
compares what a module holds. Memory may be elsewhere: in a loss, a class, a closure, a list of the script. If it
changes an answer, it carries one client's data into the next one's message past clip and noise. So a copy of the model
at its first weights answers for a made-up record twice a round, before anything of the round is released.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino.accounting.bounds import Bound
from sordino.data.clients import NamedFieldsModel
from sordino.dpsgd.batch_independence import FEW, SAME, BatchPass, IndependenceChecks, frozen_rng, relative_distance
from sordino.dpsgd.pieces import UnrecordableError
from sordino.errors import DataError, PlanError
from sordino.layout import Layout, copied
from sordino.parts.encoding import Public
from sordino.parts.gradients import Ball, Batch
from sordino.parts.local_solvers import LocalSolver
from sordino.parts.record_samplers import RecordSampler
from sordino.plan import Plan
from sordino.rng import Seeded, forked_rng, global_coins, standing_at
from sordino.task import Task

SILENT = 10.0  # a median gradient so many clip norms long: the clip would replace the loss without a word


def check_records(plan: Plan, task: Task) -> None:
    """Refuse data, and code, under which a client's or a record's bound, or its cost, would not be true."""
    if plan.local.reads is None:
        return task.check_code(plan.unit)
    _check_sizes(plan.local.reads, task)
    check_layers(task.model)
    task.check_code(plan.unit)
    _check_apart(task)
    if isinstance(plan.bound, Bound):
        _check_range(plan.local, plan.local.reads, task)


def _check_sizes(reads: RecordSampler, task: Task) -> None:
    here = task.clients.held
    held, declared = (np.diff(task.clients.offsets)[here], np.asarray([reads.size(int(silo)) for silo in here]))
    wrong = np.flatnonzero(held != declared) if reads.fixed else np.flatnonzero(held == 0)
    if len(wrong):
        first = int(wrong[0])
        who = task.clients.name(int(here[first]))
        found = f"silo {who} with {held[first]} records where the plan declares {declared[first]}"
        pairs = (f"{name} = {size}" for name, size in zip(task.clients.names, held.tolist(), strict=False))
        sizes = f"{{ {', '.join(pairs)} }}" if task.clients.names else str(held.tolist())
        fix = f"set sizes = {sizes} in [recipe], or in its records, if they may be public"
        if task.clients.here is not None:
            fix = "declare this silo's own size in the plan's records, if it may be public"
        raise DataError(found, "the declared sizes", fix)


def check_layers(model: nn.Module) -> None:
    """A layer that mixes the records of a batch, or remembers them, has no gradient per record."""
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            found = f"{type(part).__name__} at {name!r}, which mixes the records of a batch"
            raise PlanError("records", found, "a model without it where one record is the unit", "use GroupNorm")
    buffers = [slot.name for slot in Layout.of(model).slots if not slot.trainable]
    if buffers:
        raise PlanError("records", f"a buffer {buffers[0]!r} that would be trained", "a model without float buffers")


def _check_apart(task: Task) -> None:
    """Code that is trusted is looked at: what it says of a record may not depend on the others; on a copy."""
    count = min(len(task.clients.index), FEW)
    if not task.program.trusted or count < 2:
        return
    rows = torch.from_numpy(np.asarray(task.clients.index[:count]))
    x, y = (side[rows].to(task.device) for side in (task.clients.records.x, task.clients.records.y))
    model = copy.deepcopy(task.model).train()
    look = IndependenceChecks(
        model, lambda own: lambda pair: task.losses(own(pair[0]), pair[1]), Seeded(0).at(0, "mixing")
    )
    with suppress(UnrecordableError):  # coins that are not torch's: the engine runs it record by record
        look.start(BatchPass(look.of(model), (x, y), count))


def _check_range(local: LocalSolver, reads: RecordSampler, task: Task) -> None:
    """Refuse public targets so far off that the clip makes all gradients alike."""
    from sordino.engines.objectives import ManyClients
    from sordino.engines.paths import can_batch

    if task.test is None or not task.test.y.is_floating_point() or not can_batch(task):
        return
    x, y = task.test.x[:64], task.test.y[:64]
    start, clip_norm = task.layout.flatten(task.model), Public(t=0)
    many = ManyClients(task)
    each = Batch(x[:, None], y[:, None])  # every record a client of its own
    norms = many.clipped(many.place(start, len(x)), each, Ball()).norm(dim=1)
    median, reach = float(norms.median()), local.unit(clip_norm) * reads.count
    if median > SILENT * reach:
        spread = float(torch.quantile(y.float(), 0.95) - torch.quantile(y.float(), 0.05))
        long = f"the median gradient is {median / reach:.0f} clip norms long"
        needed = f"most gradients within {SILENT:g} clip norms, else the clip silently replaces the loss"
        fix = f"scale the target to a public range, or raise clip norm towards {median:.2g}"
        raise DataError(f"public targets that spread over {spread:.3g}: {long}", needed, fix)


_LOG = logging.getLogger("sordino")
_FIX = "check the names of the adapters' target modules, and that nothing on the way is detached or under no_grad"


def check_gradients(task: Task) -> None:
    """Refuse a partly frozen model whose loss depends on nothing that is trained; say which tensors it leaves out."""
    fixed = any(not parameter.requires_grad for parameter in task.model.parameters())
    lost, count = _unreached(task) if fixed or isinstance(task.model, NamedFieldsModel) else ([], 1)
    if len(lost) == count:
        found = f"a model whose loss depends on none of its {count} tensors with requires_grad (first: {lost[0]!r})"
        raise DataError(found, "trained parameters that are part of the forward pass", _FIX)
    if lost:
        _LOG.warning(
            "The loss depends on %d of %d trained tensors only; the others (first: %s) would get noise and nothing "
            "else: freeze them with requires_grad_(False).", count - len(lost), count, lost[0],
        )  # fmt: skip


def _unreached(task: Task) -> tuple[list[str], int]:
    """Names of the trained tensors that the loss of a made-up record does not depend on, and how many are trained."""
    model = copied(task.model).eval()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sides = (task.clients.records.x, task.clients.records.y)
    x, y = (torch.ones((2, *side.shape[1:]), dtype=side.dtype, device=task.device) for side in sides)
    try:
        with torch.enable_grad(), forked_rng():
            total: Any = task.losses(model(x), y * 0).sum()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return [], len(named)  # it cannot be asked with made-up records
    if not total.requires_grad:
        return list(named), len(named)
    slopes = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return [name for name, slope in zip(named, slopes, strict=True) if slope is None], len(named)


MACHINES = 1e-3  # relative: the same pass on another machine, or with another version of torch


_STATELESS = (
    "keep what is counted, averaged or scheduled out of model and loss (a graph stays as it was captured), and take "
    "random numbers from torch"
)


class LeakCheck:
    """Model and loss of a task as they were before the first client."""

    def __init__(self, task: Task) -> None:
        own = copied(task.model, [p for p in task.model.parameters() if not p.requires_grad])  # shares what is frozen
        self.model, self.losses, self.coins = own.train(), task.losses, global_coins()
        self.trusted = task.program.trusted
        self.buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # they begin anew for every client
        x, y = task.clients.records.x, task.clients.records.y
        self.x = torch.ones((2, *x.shape[1:]), dtype=x.dtype, device=task.device)  # nobody's records
        self.y = torch.zeros((2, *y.shape[1:]), dtype=y.dtype, device=task.device)
        self.said: list[Tensor] = []

    def at(self, vector: Tensor) -> list[Tensor]:
        """What is said with these weights."""
        Layout.of(self.model).load(self.model, vector)
        return self._answer()

    def before(self) -> None:
        """Before the clients of a round. A schedule may have changed trusted code; a graph is as it was captured."""
        if self.trusted or not self.said:
            self.said = self._answer()
        else:
            self._check()

    def after(self) -> None:
        """After them: what trusted code says may not have changed."""
        if self.trusted:
            self._check()

    def _check(self) -> None:
        """Refuse an answer that is not what it was; a graph goes on where the code it was captured of fails."""
        now = self._answer()
        if self.said and (now or self.trusted) and not relative_distance(self.said, now) <= SAME:
            found = "a model or a loss that says something else of a made-up record than before"
            needed = "one that remembers nothing of the records it saw: the next client would be told, without noise"
            raise PlanError("state", found, needed, _STATELESS)

    def _answer(self) -> list[Tensor]:
        """Scores and loss of the made-up records; nothing where it cannot be asked, or cannot be asked any more."""
        for buffer, first in self.buffers:
            buffer.data.copy_(first)
        try:
            with frozen_rng(), standing_at(self.coins), torch.no_grad():
                scores = self.model(self.x)
                return [scores.clone(), self.losses(scores, self.y).clone()]
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return []


def model_answers(task: Task) -> tuple[float, ...]:
    """What module and loss say of made-up records at public weights: by it those of a script are known again."""
    said = LeakCheck(task).at(torch.linspace(-0.1, 0.1, task.layout.size, device=task.device))
    return tuple(value for part in said for value in part.double().flatten()[:16].tolist())


def same_answers(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether it is what was said before, on whatever machine; who said nothing then is not asked now."""
    return not one or relative_distance([torch.tensor(one)], [torch.tensor(other)]) <= MACHINES


def leak_check_of(task: Task) -> LeakCheck | None:
    """None where there is nobody to ask: torch's layers and Sordino's losses are no code of the user's own."""
    return None if task.program.plain and task.program.plain_loss else LeakCheck(task)
