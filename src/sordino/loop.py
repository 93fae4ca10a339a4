"""The round loop: draw a cohort, charge, collect, noise, decode, step. `train` and `sordino run` call it.

A round is charged before its noise is drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sordino import codec
from sordino.data.clients import Records
from sordino.engines.base import CPU, ClientJob, Collected, Engine, Receipt, Worker
from sordino.engines.checks import BEFORE, check_gradients, check_prepared, check_records, prepare_columns
from sordino.engines.inprocess import InProcess, public_update, states_by_client
from sordino.errors import ConfigError, DataError, DivergedError, EngineError, QuorumError
from sordino.layout import Layout
from sordino.ledger.budget import Filter
from sordino.parts.encoding import Noised, NoiseStd, Public
from sordino.parts.record_samplers import PassKey, PassStreams
from sordino.parts.releases import on_grid
from sordino.parts.samplers import Cohort, PassDraws, separation_guard
from sordino.plan import BROADCAST, NOISE, PASS_KEY, Plan, State
from sordino.rng import Mode, Seeded, Streams
from sordino.task import Task, evaluate


class Charges(Protocol):
    """Log of privacy charges: each round (preparations: t = `BEFORE`) is recorded before anything of it is released."""

    def charge(self, t: int, cohort: Cohort | None) -> None: ...


@runtime_checkable
class ReceiptLog(Protocol):
    """Log that also records which silos, on other machines, refused a round and which receipts they gave."""

    def settle(self, refused: tuple[int, ...], receipts: tuple[Receipt, ...]) -> None: ...


@dataclass(frozen=True)
class RoundReceipts:
    """Refusals of silos and receipts for their privacy charges in one round.

    `after` is the number of rounds that were charged when the silos answered.
    """

    after: int
    refused: tuple[int, ...] = ()
    receipts: tuple[Receipt, ...] = ()


@codec.hides_values
@dataclass
class Tally:
    """Log of privacy charges in memory: the charged rounds and, if cohorts are public or released, their cohorts."""

    rounds: list[int] = field(default_factory=list)
    prepared: int = 0  # number of releases of the plan's preparations
    cohorts: list[Cohort] = field(default_factory=list)
    settled: list[RoundReceipts] = field(default_factory=list)

    def settle(self, refused: tuple[int, ...], receipts: tuple[Receipt, ...]) -> None:
        self.settled.append(RoundReceipts(len(self.rounds), refused, receipts))

    def charge(self, t: int, cohort: Cohort | None) -> None:
        if t == BEFORE:
            self.prepared += 1
            return
        self.rounds.append(t)
        if cohort is not None:
            self.cohorts.append(cohort)


@codec.hides_values
@dataclass(frozen=True)
class Round:
    """Result of one round. `diagnostics` are computed from private data without noise: for simulations only."""

    t: int
    state: State
    metrics: dict[str, float]
    diagnostics: dict[str, float]
    seconds: float = 0.0
    void: bool = False


def check(plan: Plan, task: Task, engine: Engine) -> None:
    """Raise an error for a plan, task and engine whose run could not be certified."""
    check_population(plan, task.clients.population)
    check_needs(plan, task.public is not None, engine)
    check_prepared(plan, task)
    check_records(plan, task)


def check_train_metrics(asked: bool | None, mode: Mode) -> None:
    """Raise an error for metrics of the clients' own records, which are not private, in a run for release."""
    if asked and mode != "simulation":
        found = f"train_metrics = true in a run whose noise is {mode}"
        needed = "metrics of public records only: metrics of the clients' own records are not private"
        raise ConfigError(found, needed, 'drop train_metrics, or set noise = "simulation" under [privacy]')


def check_population(plan: Plan, population: int) -> None:
    """Raise an error if the data has another number of clients than the plan."""
    if plan.clients.population != population:
        found = f"a plan for {plan.clients.population} clients and data of {population} clients"
        raise DataError(found, "the same population in both", f"set population = {population} in the plan's clients")


def check_needs(plan: Plan, public: bool, engine: Engine) -> None:
    """Raise an error, before data is read, if the plan needs more than the engine and the public data offer."""
    if plan.release.correlated:
        plan.check_fitted()
    if plan.mask is not None and plan.mask.source.needs_public_data and not public:
        found = "a mask that is computed from public records, and a task without public records"
        raise DataError(found, "a task with public records", "pass public=records to the task")
    if plan.clients.pass_rounds > 1 and engine.deployed:
        found = f"{plan.clients.kind!r} where clients are on other machines, which shows who is asked in which round"
        raise EngineError(found, "a cohort that stays secret", "run it in one process, or sample with poisson")
    if plan.local.reads is not None and plan.local.reads.pass_rounds > 1 and not isinstance(engine, InProcess):
        found = f"record sampler {plan.local.reads.kind!r} on an engine of several processes"
        raise EngineError(found, "one process that draws each pass", "run it in one process, or use poisson_records")
    missing = plan.needs - engine.offers
    if missing:
        asking = [part for part in (plan.release, plan.server) if missing & part.needs]
        who = next(iter([*asking, *(plan.prepare if "preparation" in missing else ())]), plan.local)
        found = f"{who.kind!r} on an engine without {', '.join(sorted(missing))}"
        fix = "run it in one process (no --workers, no network)"
        fix = f"{fix}, or declare ranges" if "preparation" in missing else fix
        raise EngineError(found, "an engine with these features", fix)


def run(
    plan: Plan, task: Task, *, engine: Engine | None = None, streams: Streams | None = None,
    charges: Charges | None = None, state: State | None = None, budget: Filter | None = None, eval_every: int = 1,
    train_metrics: bool = False, announce: Callable[[dict[str, str | int]], None] | None = None, checked: bool = False,
) -> Generator[Round, None, None]:  # fmt: skip
    """Run the plan from `state` to its last round; yield the result of every round.

    `announce` receives the engine's header (path, device, clients at once) before the first round.
    `train_metrics` adds metrics of the clients' own records to the diagnostics: they are NOT private, so a run whose
    noise is for release refuses them. Under correlated noise, a client that is drawn again before the minimum
    separation is left out (`parts.separation`). `checked`: the caller has already called `check` on the same values.
    With a `budget`, a round that would exceed some client's budget raises `BudgetError` before it begins.
    """
    engine, streams, charges = engine or InProcess(), streams or Seeded(0), charges or Tally()
    if not checked:
        check(plan, task, engine)
        check_train_metrics(train_metrics, streams.mode)
    check_gradients(task)
    if train_metrics and task.clients.here is not None:
        found = "train_metrics = true where the clients' records are on other machines"
        raise ConfigError(found, "a simulation, which holds all records", "drop train_metrics")
    state = state or State.initial(plan, task.layout.flatten(task.model))
    if plan.prepare:
        task, state = prepare_columns(plan, task, streams, charges.charge, state)
    by_pass = any(part.pass_rounds > 1 for part in (plan.clients, plan.local.reads) if part is not None)
    passes, given, layout = _passes(plan, streams, state) if by_pass else None, task, task.layout
    worker = engine.prepare(plan, task, passes if isinstance(passes, PassStreams) else streams)
    task = worker.device_task or task
    state = state if worker.device_task is None or task.device == CPU else state.on(task.device)
    if state.secret_state:
        worker.load_client_state(state.secret_state)
    guard = separation_guard(plan.clients, plan.rounds, streams, state.t) if plan.release.correlated else None
    try:
        for t in range(state.t, plan.rounds):
            began = time.perf_counter()
            cohort = passes.draw(t) if isinstance(passes, PassDraws) else plan.clients.draw(t, streams.at(t, "cohort"))
            cohort = cohort if guard is None else guard.admit(t, cohort)
            if budget is not None:
                budget.charge(cohort, t)
            if announce is not None:
                announce(worker.header)
                announce = None
            state, collected = one_round(plan, task, worker, streams, charges, state, cohort)
            state = state if passes is None else _with_pass_key(state, passes.key_after(t))
            if budget is not None:
                budget.add_receipts(collected.refused, [(one.client, one.charges) for one in collected.receipts], t)
            check_finite(state)
            due, result = t + 1 == plan.rounds or (t + 1) % eval_every == 0, plan.server.result(state.memory)
            metrics = worker.evaluate(result) if due else {}
            metrics = task.evaluate(result) if metrics is None else metrics
            own = task.evaluate_clients(result) if due and train_metrics else {}
            if due and streams.mode == "simulation" and (train_metrics or task.client_test is not None):
                own |= personal_metrics(plan, task, state, result, train_metrics)
            seconds, void = time.perf_counter() - began, not plan.release.accepts(collected.received)
            yield Round(t, state, metrics, {**collected.diagnostics, **own}, seconds, void)
            check_layout(given, layout)
    finally:
        worker.close()


def _passes(plan: Plan, streams: Streams, state: State) -> PassDraws | PassStreams | None:
    """Return the pass state of a client or record sampler that draws once for several rounds.

    None for records in a simulation, whose streams open again.
    """
    held, reads = state.secret_state.get(PASS_KEY), plan.local.reads
    key = None if held is None else tuple(held.tolist())
    if reads is None or plan.clients.pass_rounds > 1:
        return PassDraws(plan.clients, streams, key)
    return PassStreams(reads, streams, key) if streams.mode == "secure" else None


def _with_pass_key(state: State, key: PassKey) -> State:
    rest = {name: held for name, held in state.secret_state.items() if name != PASS_KEY}
    return replace(state, secret_state=rest if key is None else rest | {PASS_KEY: torch.tensor(key)})


def read_together(numbers: Sequence[Tensor]) -> list[float]:
    """Return the values of one-number tensors by a single transfer, since each transfer waits for the accelerator."""
    device = next((one.device for one in numbers if one.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([one.to(device, torch.float64) for one in numbers]).tolist() if numbers else []


def check_layout(task: Task, layout: Layout) -> None:
    """Raise an error if the model's set of trained tensors was changed since the run began."""
    if task.layout != layout:
        found = "a model whose requires_grad, or whose tensors, were changed between two rounds"
        fix = "restore requires_grad and resume; to train other tensors, start a run with init= the weights of this run"
        raise DataError(found, "the same trained tensors for a whole run", fix)


def check_finite(state: State) -> None:
    """Raise `DivergedError` if the server's state holds NaN or infinity, before it is written to a checkpoint."""
    floats = {name: held for name, held in state.memory.items() if held.is_floating_point()}
    for name, total in zip(floats, read_together([held.sum() for held in floats.values()]), strict=True):
        if not math.isfinite(total) and not bool(floats[name].isfinite().all()):
            raise DivergedError(
                f"round {state.t} left NaN or infinity in the server's {name}; the round stays charged, and the "
                f"checkpoint holds the state of round {state.t - 1}; lower the server's step, the clip norm or the lr"
            )


def one_round(
    plan: Plan, task: Task, worker: Worker, streams: Streams, charges: Charges, state: State, cohort: Cohort
) -> tuple[State, Collected]:
    """Run one round (charge, collect, add noise, step); return the next state, and the sum before the noise."""
    t, release = state.t, plan.release
    seen = cohort if release.sees_cohort else None
    if release.local:
        charges.charge(t, seen)
    start = plan.server.query(state.memory)
    public = plan.public(t, len(start), state.public_state, lambda: public_update(plan, task, streams, start, t))
    public = public.on(start.device)
    try:
        collected = worker.collect(ClientJob(public, start, cohort)).on(start.device)
    except QuorumError as error:  # messages may have left their clients: their receipts are recorded
        _settle(plan, charges, error.collected, charged=release.local)
        raise
    collected.check(plan, len(start), cohort)
    missing, diagnostics = len(cohort) - collected.received, dict(collected.diagnostics)
    if missing and not collected.deployed:
        diagnostics["missing_clients"] = float(missing)
    if not release.local:
        charges.charge(t, seen)
    _settle(plan, charges, collected, charged=True)
    after, encoded = advanced(plan, task.layout, streams, state, public, collected, cohort)
    if collected.client_state:
        after = replace(after, secret_state=after.secret_state | collected.client_state)
    if encoded is not None and not collected.deployed and not collected.noised:
        clean = collected.total / release.denominator(plan.clients.expected, collected.received)
        diagnostics |= release_figures(clean, encoded)
    return after, replace(collected, diagnostics=diagnostics)


def _settle(plan: Plan, charges: Charges, collected: Collected, *, charged: bool) -> None:
    if collected.deployed and plan.cohort_is_public and isinstance(charges, ReceiptLog):
        charges.settle(tuple(sorted(collected.refused)) if charged else (), collected.receipts)  # refusal: no charge


def advanced(
    plan: Plan, layout: Layout, streams: Streams, state: State, public: Public, collected: Collected, cohort: Cohort
) -> tuple[State, Tensor | None]:
    """Add noise, decode, post-process and step; return the next state and the noised mean before decoding.

    If too few clients answered, there is no release: the second value is None.
    """
    t = state.t
    if not plan.release.accepts(collected.received):
        return replace(state, t=t + 1), None
    encoded, noise = noised_mean(plan, collected, cohort, streams, t, state.noise)
    mean, broadcast = plan.split(plan.decode(encoded, public), public)
    if plan.postprocess:
        std = mean_std(plan, collected.participants(cohort), collected.received, public)
        std = std[: len(mean)] if isinstance(std, Tensor) else std
        mean = plan.refine(mean, Noised(layout, std, t, plan.signal_norm(public)))
    learned = state.public_state | plan.learn(encoded, mean, public, state)
    learned |= {f"{BROADCAST}{name}": held for name, held in broadcast.items()}
    secret = state.secret_state | {f"{NOISE}{name}": held for name, held in noise.items()}
    return State(t + 1, plan.server.step(state.memory, mean, t), learned, secret), encoded


def noised_mean(
    plan: Plan, collected: Collected, cohort: Cohort, streams: Streams, t: int, memory: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the noised mean before decoding, and the noise state for later rounds."""
    total, noise = noised_sum(plan, collected, cohort, streams, t, memory)
    return (total / plan.release.denominator(plan.clients.expected, collected.received)).to(torch.float32), noise


def noised_sum(
    plan: Plan, collected: Collected, cohort: Cohort, streams: Streams, t: int, memory: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the noised sum, rounded to a public grid in secure mode, and the noise state for later rounds."""
    release, came = plan.release, collected.participants(cohort)
    silent = came[:0] if collected.noised else came  # clients whose noise is still to be drawn
    total, noise = release.noised(collected.total, silent, partial(streams.at, t), memory)
    return (on_grid(total, release.noise_std(came, t)) if streams.mode == "secure" else total), noise


def mean_std(plan: Plan, cohort: Cohort, received: int, public: Public) -> NoiseStd:
    """Return the noise's standard deviation in each coordinate of the decoded mean, computed from public values."""
    std: NoiseStd = plan.release.noise_std(cohort, public.t) / plan.release.denominator(plan.clients.expected, received)
    for step in reversed(plan.encode):
        std = step.decoded_noise_std(std, public)
    return std * plan.local.unit(public)


# ---- diagnostics: NOT private, for simulation ------------------------------------------------------------------------


def personal_metrics(plan: Plan, task: Task, state: State, model: Tensor, train: bool) -> dict[str, float]:
    """Return metrics of personal models, each on its own client's rows, averaged over clients. NOT private.

    personal_accuracy, personal_loss, ... on the rows of `Task.client_test`; with `train`, personal_train_accuracy, ...
    on the clients' own training rows. Empty where the local solver has no `personal_model`.
    """
    sums: dict[str, list[float]] = {}
    for client, own in states_by_client(state.secret_state).items():
        own = {name: value.to(model.device) for name, value in own.items()}
        personal = plan.local.personal_model(model, own, task.layout)
        if personal is None:
            return {}
        module = task.at(personal)
        for name, held in (("personal", task.client_test), ("personal_train", task.clients if train else None)):
            if held is not None and held.size(client):
                rows = torch.from_numpy(held.rows(client)).to(held.records.x.device)
                found = evaluate(module, Records(held.records.x[rows], held.records.y[rows]), task.program.losses)
                for figure in found.keys() & {"accuracy", "rmse", "loss"}:
                    sums.setdefault(f"{name}_{figure}", []).append(found[figure])
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}


def release_figures(clean: Tensor, noised: Tensor) -> dict[str, float]:
    """Return the signal-to-noise ratio of a round's mean, and its cosine with the noised mean. NOT private."""
    figures = [(noised.double() - clean).norm(), clean.norm(), noised.norm(), clean @ noised.double()]
    noise, signal, length, product = read_together(figures)
    if not (signal and length):
        return {}
    cosine = product / (signal * length)
    return {"cosine": cosine} | ({"signal_to_noise": signal / noise} if noise > 1e-6 * signal else {})
