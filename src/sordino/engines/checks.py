"""Checks of a task before round 1 and in every round, and the column histograms that are released before round 1.

Called by loop.py, engines/inprocess.py, runs/ and federation/. `check_gradients` uses a synthetic record: noise changes
every weight that is sent, so a parameter outside the forward pass would look trained.

`LeakCheck` detects client data stored by model or loss code, which would enter the next client's message without clip
or noise. `dpsgd.state_guard` compares the state of a module only, but data may also be stored in a loss, a class, a
closure or a list of the script. So a copy of the model at its initial weights is evaluated on synthetic records before
and after the clients of every round.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino.accounting.bounds import Bound
from sordino.accounting.composition import has_curator
from sordino.data.clients import NamedFieldsModel, Records
from sordino.data.tables import scale_columns
from sordino.dpsgd.batch_independence import FEW, SAME, BatchPass, IndependenceChecks, frozen_rng, relative_distance
from sordino.dpsgd.pieces import UnrecordableError
from sordino.engines.objectives import ManyClients, can_batch
from sordino.errors import DataError, PlanError
from sordino.layout import Layout, copied
from sordino.parts.encoding import Public
from sordino.parts.gradients import Ball, Batch
from sordino.parts.local_solvers import LocalSolver
from sordino.parts.mechanisms import Preparation, Values
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.releases import on_grid
from sordino.plan import PREPARED, Plan, State
from sordino.rng import Seeded, Streams, at_global_rng_state, forked_rng, global_rng_state
from sordino.task import Task

_LOG = logging.getLogger("sordino")
SILENT = 10.0  # largest accepted median gradient norm, in clip norms
MACHINES = 1e-3  # relative difference of one forward pass between machines or versions of torch
BEFORE = -1  # round number under which the releases before round 1 are charged


def check_records(plan: Plan, task: Task) -> None:
    """Refuse data or code for which the plan's sensitivity bound or privacy cost would not hold."""
    reads = plan.local.reads
    if reads is not None:
        _check_sizes(reads, task)
        check_layers(task.model)
    if task.knows_shapes:
        task.program.check(plan.unit)
    if reads is not None:
        _check_trusted_code(task)
        if isinstance(plan.bound, Bound):
            _check_range(plan.local, reads, task)


def _check_sizes(reads: RecordSampler, task: Task) -> None:
    here = task.clients.held
    held, declared = np.diff(task.clients.offsets)[here], np.asarray([reads.size(int(silo)) for silo in here])
    wrong = np.flatnonzero(held != declared) if reads.fixed else np.flatnonzero(held == 0)
    if len(wrong):
        first = int(wrong[0])
        who = task.clients.name(int(here[first]))
        found = f"silo {who} with {held[first]} records, while the plan declares {declared[first]}"
        pairs = (f"{name} = {size}" for name, size in zip(task.clients.names, held.tolist(), strict=False))
        sizes = f"{{ {', '.join(pairs)} }}" if task.clients.names else str(held.tolist())
        fix = f"set sizes = {sizes} in [recipe], or in the plan's record sampler, if the numbers may be public"
        if task.clients.here is not None:
            fix = "declare this silo's number of records in the plan's record sampler, if the number may be public"
        raise DataError(found, "as many records in every silo as the plan declares", fix)


def check_layers(model: nn.Module) -> None:
    """Refuse layers without a per-record gradient: layers that mix the records of a batch, and float buffers."""
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            found = f"layer {name!r} of type {type(part).__name__}, which mixes the records of a batch"
            raise PlanError("records", found, "no such layer where the unit of privacy is one record", "use GroupNorm")
    buffers = [slot.name for slot in Layout.of(model).slots if not slot.trainable]
    if buffers:
        found, needed = f"a float buffer {buffers[0]!r} that clients would change", "a model without such buffers"
        raise PlanError("records", found, needed, "register it as a parameter or with persistent=False")


def _check_trusted_code(task: Task) -> None:
    """Refuse user code without a captured graph if, in trials, other records change the loss of a record."""
    count = min(len(task.clients.index), FEW)
    if not task.program.trusted or count < 2:
        return
    rows = torch.from_numpy(np.asarray(task.clients.index[:count]))
    x, y = (side[rows].to(task.device) for side in (task.clients.records.x, task.clients.records.y))
    model = copy.deepcopy(task.model).train()
    checks = IndependenceChecks(
        model, lambda own: lambda pair: task.losses(own(pair[0]), pair[1]), Seeded(0).at(0, "mixing")
    )
    with suppress(UnrecordableError):  # random numbers that are not torch's: the engine runs it record by record
        checks.start(BatchPass(checks.of(model), (x, y), count))


def _check_range(local: LocalSolver, reads: RecordSampler, task: Task) -> None:
    """Refuse public regression targets so large that clipping would shrink almost every gradient to the clip norm."""
    if task.test is None or not task.test.y.is_floating_point() or not can_batch(task):
        return
    x, y = task.test.x[:64], task.test.y[:64]
    many, start = ManyClients(task), task.layout.flatten(task.model)
    each = Batch(x[:, None], y[:, None])  # one record per client
    norms = many.clipped(many.place(start, len(x)), each, Ball()).norm(dim=1)
    median, reach = float(norms.median()), local.unit(Public(t=0)) * reads.count
    if median > SILENT * reach:
        spread = float(torch.quantile(y.float(), 0.95) - torch.quantile(y.float(), 0.05))
        found = f"public targets of range {spread:.3g}, and a median gradient norm of {median / reach:.0f} clip norms"
        needed = f"a median gradient norm below {SILENT:g} clip norms: otherwise clipping changes almost every gradient"
        fix = f"scale the target to a public range, or raise the clip norm towards {median:.2g}"
        raise DataError(found, needed, fix)


def check_gradients(task: Task) -> None:
    """Refuse a partly frozen model whose loss depends on no trained tensor; warn where some have no influence."""
    fixed = any(not parameter.requires_grad for parameter in task.model.parameters())
    lost, count = _unreached(task) if fixed or isinstance(task.model, NamedFieldsModel) else ([], 1)
    if len(lost) == count:
        found = f"a model whose loss depends on none of its {count} tensors with requires_grad (first: {lost[0]!r})"
        fix = "check the names of the adapters' target modules; use neither detach() nor no_grad in the forward pass"
        raise DataError(found, "trained parameters that are part of the forward pass", fix)
    if lost:
        _LOG.warning(
            "The loss depends on %d of %d trained tensors only; the others (first: %s) would get noise and nothing "
            "else: freeze them with requires_grad_(False).", count - len(lost), count, lost[0],
        )  # fmt: skip


def _unreached(task: Task) -> tuple[list[str], int]:
    """Return the names of trained tensors that do not influence the loss of synthetic records, and how many all are."""
    model = copied(task.model).eval()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sides = (task.clients.records.x, task.clients.records.y)
    x, y = (torch.ones((2, *side.shape[1:]), dtype=side.dtype, device=task.device) for side in sides)
    try:
        with torch.enable_grad(), forked_rng():
            total: Any = task.losses(model(x), y * 0).sum()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return [], len(named)  # the model cannot run on synthetic records
    if not total.requires_grad:
        return list(named), len(named)
    slopes = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return [name for name, slope in zip(named, slopes, strict=True) if slope is None], len(named)


# ---- leaks from one client to the next ------------------------------------------------------------------------------


class LeakCheck:
    """Check that model and loss code store no client data: outputs for synthetic records must stay the same."""

    def __init__(self, task: Task) -> None:
        own = copied(task.model, [p for p in task.model.parameters() if not p.requires_grad])  # shares what is frozen
        self.model, self.losses, self.trusted = own.train(), task.losses, task.program.trusted
        # Layers of torch draw from torch's generator alone: where it does not move, nothing has to be frozen
        plain = task.program.plain and task.program.plain_loss and task.device.type == "cpu"
        self.freeze: tuple[bool, ...] = (False, True) if plain else (True,)
        self.rng_state = None if plain else global_rng_state()
        self.buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # restored for every client
        x, y = task.clients.records.x, task.clients.records.y
        self.x = torch.ones((2, *x.shape[1:]), dtype=x.dtype, device=task.device)  # synthetic records
        self.y = torch.zeros((2, *y.shape[1:]), dtype=y.dtype, device=task.device)
        self.reference: list[Tensor] = []

    def before(self) -> None:
        """Check the outputs before a round's clients train; outputs of user code without a graph are only stored."""
        if self.trusted or not self.reference:
            self.reference = self.outputs()
        else:
            self._check()

    def after(self) -> None:
        """Check after a round's clients trained that user code without a graph gives the same outputs as before."""
        if self.trusted:
            self._check()

    def _check(self) -> None:
        now = self.outputs()  # empty if the code raises: then its captured graph decides
        if self.reference and (now or self.trusted) and not relative_distance(self.reference, now) <= SAME:
            found = "a model or a loss whose output for a synthetic record has changed since the first round"
            needed = "code that stores no records: stored records would enter the next client's message without noise"
            fix = "remove counters, running averages and schedules from model and loss; draw random numbers with torch"
            raise PlanError("state", found, needed, fix)

    def outputs(self) -> list[Tensor]:
        """Return scores and loss of the synthetic records; an empty list where the model cannot run on such records."""
        found: list[Tensor] = []
        for freeze in self.freeze:
            for buffer, first in self.buffers:
                buffer.data.copy_(first)
            try:
                with ExitStack() as held, torch.random.fork_rng(devices=[]):
                    if freeze:
                        held.enter_context(frozen_rng())
                    if self.rng_state is not None:
                        held.enter_context(at_global_rng_state(self.rng_state))
                    held.enter_context(torch.no_grad())
                    before, scores = torch.get_rng_state(), self.model(self.x)
                    found = [scores.clone(), self.losses.value(scores, self.y).clone()]
                    if torch.equal(before, torch.get_rng_state()):
                        break  # nothing random was drawn
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
                return []
        return found


def model_answers(task: Task) -> tuple[float, ...]:
    """Return a fingerprint of model and loss: their outputs for synthetic records at fixed public weights."""
    check = LeakCheck(task)
    task.layout.load(check.model, torch.linspace(-0.1, 0.1, task.layout.size, device=task.device))
    return tuple(value for part in check.outputs() for value in part.double().flatten()[:16].tolist())


def same_answers(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two fingerprints agree up to float rounding; an empty first fingerprint agrees with any."""
    return not one or relative_distance([torch.tensor(one)], [torch.tensor(other)]) <= MACHINES


# ---- column histograms ----------------------------------------------------------------------------------------------
# charge  ->  messages + noise (with a trusted curator: sum + noise)  ->  State.public_state  ->  scaled records


def check_prepared(plan: Plan, task: Task) -> None:
    """Refuse a task whose columns need other histogram releases than the plan's cost includes."""
    asked = {one.release.column: one.release for one in task.waiting}
    accounted = {part.column: part for part in plan.prepare}
    if asked == accounted:
        return
    wrong = sorted(name for name in {*asked, *accounted} if asked.get(name) != accounted.get(name))[0]
    other = "the plan does not charge" if wrong not in accounted else "the task does not need, or needs in another form"
    needed, fix = "the same column histograms in plan and task", "build both from one configuration file"
    raise DataError(f"column {wrong!r}, whose histogram {other}", needed, fix)


def prepare_columns(
    plan: Plan, task: Task, streams: Streams, charge: Callable[[int, None], None], state: State
) -> tuple[Task, State]:
    """Scale the task's columns by noised histograms; charge and release the histograms first if `state` has none."""
    if not plan.prepare:
        return task, state
    if not released_histograms(state):
        charge(BEFORE, None)
        found, clients, x = {}, task.clients, task.clients.records.x
        for part in plan.prepare:
            place = next(one.place for one in task.waiting if one.release.column == part.column)
            column = x[:, place].double().numpy()
            held = (column[clients.rows(k)] for k in range(clients.population))
            found[f"{PREPARED}{part.column}"] = noised_histogram(plan, part, held, streams)
        state = replace(state, public_state=state.public_state | found)
    return scaled(task, released_histograms(state)), state


def released_histograms(state: State) -> dict[str, Values]:
    """Return the noised histograms stored in a run's state, by column."""
    stored = state.public_state.items()
    return {name.removeprefix(PREPARED): t.double().numpy() for name, t in stored if name.startswith(PREPARED)}


def noised_histogram(plan: Plan, part: Preparation, held: Iterable[Values], streams: Streams) -> Tensor:
    """Return the noised sum of all clients' histograms.

    With a trusted curator one noise is added to the sum; otherwise every client adds noise to its own histogram.
    """
    noise, trusted = part.noise(plan.forecast.lines[0].relation), has_curator(plan.unit, plan.release)

    def noised(message: Values, client: int) -> Tensor:
        rng = streams.at(0, f"prepare {part.column}", client)
        sum_of_both = torch.from_numpy(message + noise.sample(len(message), rng))
        return on_grid(sum_of_both, noise.std) if streams.mode == "secure" else sum_of_both

    total: Any = 0.0
    for client, shares in enumerate(held):
        message = part.message(shares, plan.unit)
        total = total + (message if trusted else noised(message, client))
    return noised(np.asarray(total), -1) if trusted else torch.as_tensor(total)


def scaled(task: Task, found: Mapping[str, Values]) -> Task:
    """Return the task with the columns of training and test records scaled by released histograms."""

    def scale(records: Records) -> Records:
        return replace(records, x=torch.from_numpy(scale_columns(records.x.numpy(), task.waiting, found)))

    clients = replace(task.clients, records=scale(task.clients.records))
    return replace(task, clients=clients, test=None if task.test is None else scale(task.test), waiting=())


def column_scales(task: Task, state: State) -> dict[str, Any]:
    """Return the constants by which every column is scaled, computed from its released histogram.

    New records must be scaled by the same constants before the trained model is used on them.
    """
    found = released_histograms(state)
    totals = {one.release.column: (one, found[one.release.column]) for one in task.waiting}
    return {name: {**one.read(total), "noised_histogram": total.tolist()} for name, (one, total) in totals.items()}
