"""Many runs of one linear task at once: a sweep over step sizes, budgets and seeds as one batched computation.

Every run keeps its own coins, cohorts, batches and noise: run g of a grid is, to rounding, `run(plans[g], task,
streams=Seeded(seeds[g]))`. What is shared is the arithmetic: the clients of all runs are rows of one batched product.
With `exact=False` a run draws all its batches from one stream of its own, not from one for each silo and round: the
same run in law, with other coins, and several times as fast.
For experiments: a grid keeps no charges and makes no certificate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import codec
from sordino.accounting.bounds import Norm
from sordino.data.clients import Records
from sordino.engines.base import Collected
from sordino.engines.batches import gather
from sordino.engines.dense_clients import LinearClients, finite, sum_of_outer
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.errors import PlanError
from sordino.loop import advanced, check, noised_sum
from sordino.parts.clipping import FEW, FEW_DIGITS, SLACK, factors, lengths, pull, row_norms
from sordino.parts.encoding import Adaptive, Clip, Public, finite_rows
from sordino.parts.gradients import Ball, Batch, Plain
from sordino.parts.local_solvers import LocalSgd, Work
from sordino.parts.record_samplers import AllRecords, FixedRecords, subsets
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.samplers import Cohort
from sordino.plan import Plan, State
from sordino.rng import Seeded
from sordino.task import Task

UNUSED = Seeded(0).at(0, "unused")  # for samplers that draw nothing
Rows = NDArray[np.int64]
GATHERED = 1 << 24  # numbers of gathered records that one piece of the grid may hold


class StackedClients(LinearClients):
    """Rows that already stand at starts of their own; the norms of all records are taken once."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.records, self.norms = task.clients.records.x, dict[Norm, Tensor]()
        self.flat: Tensor | None = None

    def known(self, norm: Norm) -> Tensor:
        """||(x, 1)|| of every record of the table."""
        if norm not in self.norms:
            self.norms[norm] = self.stages[0].sizes(self.records.flatten(1), norm)
        return self.norms[norm]

    def pulled(self, w: Tensor, rows: Rows, records: Records, sizes: Tensor, ball: Ball, order: Rows) -> Tensor:
        """`clipped` of the table's `rows` [m, b] in compiled loops, in this `order`; `sizes` [n] are ||(x, 1)||."""
        from sordino_papers import grid_kernel as kernel

        if self.flat is None:  # every record filled up with zeros to a multiple of 8
            self.flat = nn.functional.pad(records.x.flatten(1), (0, -self.stages[0].inputs % 8)).flatten()
        y = self.table(records, rows)[1]
        edge, out = self.stages[0].outputs * self.stages[0].inputs, torch.zeros_like(w)
        weight = w[:, :edge].contiguous().view(len(w), self.stages[0].outputs, -1)
        bias = w[:, edge:].contiguous() if self.stages[0].bias is not None else w.new_zeros(weight.shape[:2])
        limits = (ball.clip_norm * (1 - SLACK), ball.norm, FEW_DIGITS)
        at = self.flat.numpy(), y, rows, weight.numpy(), bias.numpy(), sizes.numpy()
        kernel.clipped(*at, self.code, limits, out.numpy(), order)
        return out

    def shared(self, w: Tensor, x: Tensor, y: Tensor, ball: Ball) -> Tensor:
        """`clipped` where all rows of w [g, d] read the same records x [n, ...], y [n, ...]: one product for all."""
        stage = self.stages[0]
        g, edge, x = len(w), stage.outputs * stage.inputs, x.reshape(len(x), stage.inputs)
        scores = (x @ w[:, :edge].reshape(g * stage.outputs, stage.inputs).T).view(len(x), g, stage.outputs)
        if stage.bias is not None:
            scores += w[:, edge:]
        residual = self.slopes_at(scores, y[:, None].expand(len(x), g, *y.shape[1:]), x[:, None], ball)
        sizes = stage.sizes(x, ball.norm)
        residual = pull(residual, factors(lengths(residual, ball.norm) * sizes[:, None], ball.clip_norm, None))
        weights = sum_of_outer(residual.view(1, len(x), -1), finite(x, sizes)[None]).view(g, edge).double()
        biased = stage.bias is not None
        return torch.cat([weights, residual.sum(0, dtype=torch.float64)], 1) if biased else weights

    def place(self, start: Tensor, clients: int) -> Tensor:
        return start.clone()

    def messages(self, local: BatchGradient, t: int, start: Tensor, rows: Rows, owners: Rows, task: Task) -> Tensor:
        """What silos `owners` [m] at starts of their own [m, d] send of the records in `rows` [m, b]."""
        ball, sizes = local.ball(t), self.known(local.norm)
        if self.kernel and ball.envelope is None and rows.shape[1] <= FEW:
            order = np.argsort(owners, kind="stable")
            return self.pulled(start, rows, task.clients.records, sizes, ball, order).div_(ball.clip_norm)
        where, records = torch.from_numpy(rows), task.clients.records
        batch = Batch(gather(records.x, where), gather(records.y, where), sizes=gather(sizes, where))
        return self.clipped(start, batch, ball) / ball.clip_norm


@codec.hides_values
@dataclass
class _Run:
    """One run of the grid, between rounds."""

    plan: Plan
    streams: Seeded
    state: State

    @cached_property
    def batches(self) -> np.random.Generator:
        """Where all its silos' batches come from, round after round, if not each from its own stream."""
        return self.streams.at(0, "batches")

    def cohort(self) -> Cohort:
        """Who takes part now; no stream is opened for a sampler without coins."""
        coins = self.streams.at(self.state.t, "cohort") if self.plan.clients.random else UNUSED
        return self.plan.clients.draw(self.state.t, coins)


def run_grid(plans: Sequence[Plan], task: Task, seeds: Sequence[int], *, exact: bool = True) -> Tensor:
    """The results [G, d] of all plans, each with its own seed.

    Plans may differ in samplers, noise, servers and post-processing, and in step sizes and clip norms of their local
    work and clips; rounds, batches and the kinds of their parts are the same in all.
    """
    if not plans:
        return torch.empty(0, task.layout.size)
    _check(plans, task)
    worker = InProcess(path="batched").prepare(plans[0], task, Seeded(0))
    worker.objective = StackedClients(task)
    start = task.layout.flatten(task.model)
    runs = [_Run(p, Seeded(seed), State.initial(p, start)) for p, seed in zip(plans, seeds, strict=True)]
    for piece in _pieces(runs, task):
        for _ in range(plans[0].rounds):
            _round(piece, task, worker, exact)
    return torch.stack([one.plan.server.result(one.state.memory) for one in runs])


def _check(plans: Sequence[Plan], task: Task) -> None:
    first = plans[0]
    for plan in plans:
        if (plan.rounds, _steps(plan), _work(plan)) != (first.rounds, _steps(first), _work(first)):
            needed = "the same rounds, local solver and encode steps, but for step sizes and clip norms"
            raise PlanError("grid", "plans with different local work", needed)
        if plan.clients.population != task.clients.population:
            found = f"a plan for {plan.clients.population} clients and data of {task.clients.population}"
            raise PlanError("grid", found, "the same population in all")
        if plan.keeps_client_state or plan.release.init(1):
            raise PlanError("grid", "a plan whose clients or whose noise remember", "plans without a memory")
        if plan.mask is not None or any(step.needs_slopes or step.needs_tensors for step in plan.encode):
            raise PlanError("grid", "a plan whose steps look at the model", "plans without masks")
    check(first, task, InProcess())
    if not isinstance(InProcess(path="batched").prepare(first, task, Seeded(0)).objective, LinearClients):
        raise PlanError("grid", "a model that is not linear", "a linear model under a known loss")


FREE = ("lr", "noise_multiplier", "clip_norm")  # numbers of a local solver that plans of one grid may differ in


def _work(plan: Plan, free: tuple[str, ...] = FREE) -> object:
    """The local solver, but for such numbers."""
    names = {one.name for one in fields(plan.local)}  # type: ignore[arg-type]
    given: dict[str, object] = {name: 1.0 for name in free if name in names}
    own = {"noise_multipliers": ()} if "noise_multipliers" in names else {}
    return replace(plan.local, **given, **own)  # type: ignore[type-var]


def _steps(plan: Plan) -> tuple[object, ...]:
    """The encode steps, but for clip norms that no release has a say in."""
    return tuple(
        replace(step, clip_norm=1.0) if isinstance(step, Clip) and not isinstance(step.clip_norm, Adaptive) else step
        for step in plan.encode
    )


def _together_with(plan: Plan) -> object:
    """What plans must share for their clients to be rows of one product: of plain steps also their size."""
    local = plan.local
    if not isinstance(local, LocalSgd):
        return _work(plan, ("lr", "noise_multiplier"))
    looks = local.project or not isinstance(local.gradient, Plain)  # it may look at the clip norm of the clip
    return local, plan.encode if looks else ()


def _pieces(runs: list[_Run], task: Task) -> Iterator[list[_Run]]:
    """Runs in groups that share local work and whose batches fit in memory."""
    groups: dict[object, list[_Run]] = {}
    for one in runs:
        groups.setdefault(_together_with(one.plan), []).append(one)
    for group in groups.values():
        plan = group[0].plan
        batch = getattr(plan.local, "batch", None) or int(np.diff(task.clients.offsets).max())
        shared = isinstance(plan.local, BatchGradient) and isinstance(plan.local.records, AllRecords)
        row = (1 if shared else task.clients.records.x[0].numel()) * batch * max(1, round(plan.clients.expected))
        width = max(1, GATHERED // row)
        yield from (group[i : i + width] for i in range(0, len(group), width))


def _round(runs: list[_Run], task: Task, worker: InProcessWorker, exact: bool) -> None:
    """One round of every run of a piece."""
    cohorts = [one.cohort() for one in runs]
    rows = _messages(runs, cohorts, task, worker, exact)
    publics = [one.plan.public(one.state.t, rows.shape[1], one.state.public_state) for one in runs]
    sums, layout = _sums(runs, cohorts, publics, finite_rows(rows, row_norms(rows))), task.layout
    collected = [Collected(total, len(cohort)) for total, cohort in zip(sums, cohorts, strict=True)]
    if all(_plain(one.plan, came.received) for one, came in zip(runs, collected, strict=True)):
        return _step_together(runs, cohorts, publics, collected)
    for one, cohort, public, came in zip(runs, cohorts, publics, collected, strict=True):
        one.state = advanced(one.plan, layout, one.streams, one.state, public, came, cohort)[0]
    return None


def _plain(plan: Plan, received: int) -> bool:
    """Whether the way from the noised mean to the next model goes coordinate by coordinate: rows may go together."""
    return plan.server.by_coordinate and not plan.encode and not plan.postprocess and plan.release.accepts(received)


def _step_together(runs: list[_Run], cohorts: list[Cohort], publics: list[Public], collected: list[Collected]) -> None:
    """`advanced`, each run with its own noise; what follows in one go for all runs with the same server."""
    t = runs[0].state.t
    everything = list(zip(runs, collected, cohorts, strict=True))
    noised = [noised_sum(one.plan, came, cohort, one.streams, t, {})[0] for one, came, cohort in everything]
    counts = [one.plan.release.denominator(one.plan.clients.expected, came.received) for one, came, _ in everything]
    means = (torch.stack(noised) / torch.tensor(counts, dtype=torch.float64)[:, None]).to(torch.float32)
    means = runs[0].plan.decode(means, publics[0])
    servers = [one.plan.server for one in runs]
    for server in set(servers):
        own = [i for i, other in enumerate(servers) if other == server]
        before = [runs[i].state.memory for i in own]
        stacked = {name: torch.stack([memory[name] for memory in before]) for name in before[0]}
        after = server.step(stacked, means[own], t)
        for row, i in enumerate(own):
            runs[i].state = State(t + 1, {name: rows[row] for name, rows in after.items()}, runs[i].state.public_state)


def _sums(runs: list[_Run], cohorts: list[Cohort], publics: list[Public], rows: Tensor) -> list[Tensor]:
    """Every run's sum of encoded messages, in float64."""
    parts = list(torch.split(rows, [len(cohort) for cohort in cohorts]))
    for k in range(len(runs[0].plan.encode)):
        steps = [one.plan.encode[k] for one in runs]
        parts = [step.encode(part, public) for step, part, public in zip(steps, parts, publics, strict=True)]
    if len({len(part) for part in parts}) == 1:
        return list(torch.stack(parts).sum(1, dtype=torch.float64))
    return [part.sum(0, dtype=torch.float64) for part in parts]


def _messages(runs: list[_Run], cohorts: list[Cohort], task: Task, worker: InProcessWorker, exact: bool) -> Tensor:
    """What all clients of all runs send in this round: [sum of cohorts, d]."""
    local, t = runs[0].plan.local, runs[0].state.t
    count = sum(len(cohort) for cohort in cohorts)
    if not count:
        return torch.empty(0, task.layout.size)
    start = _starts(runs, cohorts)
    if isinstance(local, BatchGradient) and isinstance(local.records, AllRecords):
        return _whole(local, t, start, np.concatenate(cohorts), task, worker)
    if not exact and isinstance(local, BatchGradient) and isinstance(local.records, FixedRecords):
        assert isinstance(worker.objective, StackedClients)
        silos = np.concatenate(cohorts)
        rows = _together(local.records, silos, runs, cohorts, task)
        return worker.objective.messages(local, t, start, rows, silos, task)
    owners = [(one, int(c)) for one, cohort in zip(runs, cohorts, strict=True) for c in cohort]
    drawn = [local.indices(task.clients.size(c), one.streams.at(t, "batches", c), t, c) for one, c in owners]
    coins = worker.noise_streams([(one.plan, one.streams, c) for one, c in owners], t)
    batches = worker.reader.batches(np.asarray([c for _, c in owners]), drawn)
    return local.solve(Work(worker.objective, start, batches, len(owners), runs[0].plan.public(t), coins))


def _together(records: FixedRecords, owners: Rows, runs: list[_Run], cohorts: list[Cohort], task: Task) -> Rows:
    """Rows of the table [sum of cohorts, batch] for every silo of every run: each set of its records equally likely."""
    table, firsts = task.clients, task.clients.offsets[owners]
    sizes = np.split(table.offsets[owners + 1] - firsts, np.cumsum([len(cohort) for cohort in cohorts])[:-1])
    picks = subsets(sizes, records.batch, [one.batches for one in runs])
    rows: Rows = table.index[firsts[:, None] + picks]
    return rows


def _starts(runs: list[_Run], cohorts: list[Cohort]) -> Tensor:
    """Where every client of every run starts: [sum of cohorts, d]."""
    starts = torch.stack([one.plan.server.query(one.state.memory) for one in runs])
    return starts.repeat_interleave(torch.tensor([len(cohort) for cohort in cohorts]), 0)


def _whole(local: BatchGradient, t: int, start: Tensor, owners: Cohort, task: Task, worker: InProcessWorker) -> Tensor:
    """Messages where every silo reads all its records: the same records for all runs, so nothing is gathered."""
    rows, records = torch.empty_like(start, dtype=torch.float64), task.clients.records
    objective = worker.objective
    assert isinstance(objective, StackedClients)
    ball = local.ball(t)
    for silo in np.unique(owners):
        mine, own = torch.from_numpy(np.flatnonzero(owners == silo)), torch.from_numpy(task.clients.rows(int(silo)))
        rows[mine] = objective.shared(start[mine], records.x[own], records.y[own], ball) / ball.clip_norm
    return rows
