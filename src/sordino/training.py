"""`train`, which runs a plan on a task in one call, and its `Result`: model, history and certificate.

    train(plan, task)                                in memory
    train(plan, task, out="runs/a")                  into a folder: every round is charged and stored on disk
    train(plan, task, out="runs/a", resume=True)     continues after a kill; a finished run is only read

A task built in Python has the same loop, charges and certificate as one from a file. A run folder does not store the
task's data and module, but compares their fingerprints.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from sordino import codec, outcome
from sordino.certificate import explain as explaining
from sordino.certificate.build import certificate
from sordino.certificate.facts import EarlierRun, Facts, OwnCode
from sordino.config import Config, PrivacySpec, RunSpec, TaskSpec
from sordino.config.sections import EarlyStopping
from sordino.data import lineage
from sordino.data.metrics import FunctionMetric as GivenMetric
from sordino.data.metrics import MetricFunction, metrics_of
from sordino.dpsgd.account import ledger_path
from sordino.engines.base import Engine, engine_named
from sordino.engines.checks import BEFORE, released_histograms, scaled
from sordino.errors import ConfigError
from sordino.ledger.ledger import Ledger
from sordino.models import InMemoryModel
from sordino.models.nets import NAME, has_written_form
from sordino.plan import Plan, State
from sordino.report.text_table import History
from sordino.rng import Mode
from sordino.runs import admission, execution
from sordino.runs.folder import AUDIT, MEMORY, RunFolder, subject
from sordino.runs.rounds import InMemoryRun, OnRound, RunStart, bar_where_seen, check_run, run_rounds, single_class_note
from sordino.runs.writer import RunWriter, created
from sordino.task import Task
from sordino.version import versions

if TYPE_CHECKING:
    from sordino.report.comparison import Subject


@codec.hides_values
@dataclass(frozen=True)
class Result:
    """Result of `train`: the model of the last round, a history with one row per round, and the certificate."""

    model: nn.Module
    history: History  # a row per round; to_pandas()
    certificate: dict[str, Any]
    notes: tuple[str, ...] = ()  # remarks for the user
    path: Path | None = None  # folder of the run; None for a run in memory
    config: Config | None = field(default=None, repr=False)
    facts: Facts | None = field(default=None, repr=False)
    task: Task | None = field(default=None, repr=False)
    in_memory: tuple[InMemoryRun, State] | None = field(default=None, repr=False)  # charges and last state

    def described_fields(self) -> dict[str, str]:
        """Return the fields of the repr: privacy cost, number of rounds and path, but no metric."""
        made = self.certificate
        cost = {name: str(made.get(name)) for name in ("epsilon", "delta", "unit", "relation")}
        noise = {"noise": str(made["noise"]["mode"])} if "noise" in made else {}
        rounds = {"rounds": str(len(self.history)), "model": type(self.model).__name__}
        return {**cost, **noise, **rounds, **({} if self.path is None else {"path": repr(str(self.path))})}

    def plot(self) -> Any:
        """Return a matplotlib figure of every metric and of the spent epsilon, by round."""
        from matplotlib import pyplot  # noqa: F401  (notebooks show figures once it is imported)

        from sordino.report import charts
        from sordino.report.data import report_data
        from sordino.report.figures import chart_figure

        found = report_data([self._subject()])
        cost = charts.epsilons(found["runs"][0], 0)
        drawn = [*charts.metrics(found), *([] if cost is None else [cost])]
        if not drawn:
            raise ConfigError("a result without metrics and epsilon", "metrics or an epsilon to plot", "pass test data")
        return chart_figure(*drawn)

    def report(self, path: str | Path) -> Path:
        """Write a report of this run as one HTML file, as `sordino report` does, and return its path."""
        from sordino.report.data import report_data
        from sordino.report.page import write_page

        write_page(Path(path), report_data([self._subject()]))
        return Path(path)

    def _subject(self) -> Subject:
        from sordino.report.comparison import Subject

        if self.path is not None:
            return subject(self.path, self.path.name)
        (notes, _), (plan, facts) = self._run_in_memory(), self._plan_and_facts()
        return Subject(
            "run", self.certificate, plan, facts, history=notes.history, rounds=[*notes.rounds],
            cohorts=[*notes.cohorts], settings=codec.dump(self.config),
        )  # fmt: skip

    def explain(self) -> str:
        """Return the certificate in plain sentences, as `sordino explain` prints it."""
        plan, facts = self._plan_and_facts()
        return explaining.page(explaining.explain(self.certificate, explaining.ceilings(plan, facts)))

    def audit(self, layer: Literal["membership", "canaries", "mechanism"] = "membership") -> dict[str, Any]:
        """Return lower bounds on epsilon by attacks, with the certified bound, as `sordino audit --json` prints them.

        `membership` attacks the model by the losses of its records; `canaries` trains again with planted records;
        `mechanism` attacks a round of the plan and needs no data.
        """
        from sordino.audit import summary as auditing

        plan, facts = self._plan_and_facts()
        if layer == "mechanism":
            return auditing.mechanism_layer(plan, facts.delta)
        task = self.task
        if task is None:
            raise ConfigError("a result without its task", "the task that was trained", "train with resume=True")
        if task.waiting and self.path:  # columns are scaled by released histograms
            task = execution.with_released_columns(task, self.path)
        elif task.waiting:
            task = scaled(task, released_histograms(self._run_in_memory()[1]))
        if layer == "canaries":
            return auditing.canary_layer(replace(plan, prepare=()), task, facts.delta)
        held = copy.deepcopy(task.model)
        outcome.load_weights(held, self.model.state_dict())
        return auditing.membership_layer(replace(task, model=held), plan, facts)

    def save(self, path: str | Path) -> Path:
        """Write the run to a new folder for `sordino certify` and `explain`, without checkpoint and audits."""
        made = Path(path)
        if self.path is None:
            notes, state = self._run_in_memory()
            assert self.config is not None
            assert self.task is not None
            assert self.facts is not None
            with created(made, self.config, self.task, self.facts.earlier, notes.run) as writer:
                _replay(writer, notes, self.config.privacy.noise)
                writer.save(state)
                if self.config.plan.prepare:
                    execution.write_preparations(made, self.task, state)
                RunFolder(made, self.config).finish(outcome.model_bytes(self.model))
            shutil.rmtree(made / "checkpoint")
        elif made.exists():
            raise ConfigError(f"{made}, which exists", "a new folder", "choose another path")
        else:
            shutil.copytree(self.path, made, ignore=shutil.ignore_patterns("checkpoint", "*.partial", AUDIT))
        return made

    def _run_in_memory(self) -> tuple[InMemoryRun, State]:
        if self.in_memory is None or self.config is None or self.task is None:
            found = "a result without the charges of its run"
            raise ConfigError(found, "a result that train() returned", "train again")
        return self.in_memory

    def _plan_and_facts(self) -> tuple[Plan, Facts]:
        if self.config is None or self.facts is None:
            raise ConfigError("a result without its plan", "a result that train() returned", "train again")
        return self.config.plan, self.facts


def _replay(writer: RunWriter, notes: InMemoryRun, noise: Mode) -> None:
    cohorts, settled = iter(notes.cohorts), list(notes.settled)
    for _ in range(notes.prepared):
        writer.charge(BEFORE, None)
    for charged, t in enumerate(notes.rounds, start=1):
        writer.charge(t, next(cohorts, None))
        while settled and settled[0].after == charged:
            note = settled.pop(0)
            writer.settle(note.refused, note.receipts)
    for rounds, header in notes.engine:
        writer.announce(rounds, {**header, "kept": MEMORY})
    for line in notes.history:
        writer.record(line, noise)


def train(
    plan: Plan, task: Task, *, delta: float | None = None, deltas: Sequence[float] = (),
    allow_large_delta: bool = False, seed: int = 0, noise: Mode = "simulation", engine: Engine | str | None = None,
    device: str = "cpu", eval_every: int = 1, train_metrics: bool = False,
    metrics: Mapping[str, MetricFunction] | Iterable[Any] | None = None, stop: EarlyStopping | None = None,
    on_round: OnRound | None = None, out: str | Path | None = None, resume: bool = False,
    ledger: Ledger | str | Path | None = None, dataset: str | None = None, progress: bool = True,
) -> Result:  # fmt: skip
    """Train by a plan: run all its rounds. `delta` defaults to min(N^-1.1, 1e-3) for N clients, or N records of a silo.

    With `out` the run is stored in a folder as by `sordino run`, and `resume=True` continues a run in that folder.
    `metrics` of the test rows are names or {name: function of (outputs, targets)}; `train_metrics` adds train_loss,
    train_accuracy, ... to the diagnostics. `stop` ends the run early by metrics on public rows: this saves time, but no
    privacy, since all planned rounds are accounted. `on_round` is called with every line of the history. `ledger` is a
    file to which all runs on the same data are charged: the whole run before its first round, or the run is refused;
    `dataset` is the name of the data in the ledger. Clients and the server's state are on `device`; "auto" is the
    accelerator that torch finds, else the CPU. A progress bar is shown in terminals and notebooks if `progress`.
    """
    if resume and out is None:
        raise ConfigError("resume=True without out", "the folder of the run that is continued", 'add out="runs/a"')
    if metrics is not None:
        task = replace(task, metrics=(*task.metrics, *metrics_of(metrics)))
    asked = RunSpec(seed=seed, eval_every=eval_every, train_metrics=train_metrics or None, stop=stop)
    file, name = ledger_path(ledger, dataset) or (None, None)
    privacy = PrivacySpec(
        delta=delta, deltas=tuple(deltas), allow_large_delta=allow_large_delta, noise=noise,
        ledger=None if file is None else str(file), dataset=name,
    )  # fmt: skip
    config = config_of(plan, task, privacy, asked)
    if engine is None or isinstance(engine, str):
        engine = engine_named(engine or "inprocess", device=device)
    elif device != "cpu":
        fix = "pass the device to the engine"
        raise ConfigError(f"device = {device!r} together with an engine", "either a device or an engine", fix)
    with bar_where_seen(plan.rounds, progress) as bar:

        def show(line: dict[str, Any]) -> None:
            bar(line)
            if on_round is not None:
                on_round(line)

        if out is None:
            return _in_memory(config, task, engine, show)
        done = execution.execute(config, Path(out), resume=resume, engine=engine, on_round=show, task=task)
    folder = RunFolder.open(done.path)
    held, rows = folder.contents(), History.of(done.history)
    assert done.model is not None
    return Result(done.model, rows, done.certificate, done.notes, done.path, held.config, folder.facts(held), task)


def config_of(plan: Plan, task: Task, privacy: PrivacySpec, asked: RunSpec) -> Config:
    """Return the configuration of a run started in Python, with hashes in place of its data and modules."""
    loss = task.losses if has_written_form(task.losses) else None
    own = tuple(one for one in task.metrics if not isinstance(one, GivenMetric))
    spec = TaskSpec(dataset=NAME, model=InMemoryModel.of(task), loss=loss, own_code=task.own_code)
    return Config(task=spec, plan=plan, privacy=privacy, run=replace(asked, metrics=own))


def _in_memory(config: Config, task: Task, engine: Engine, show: OnRound | None) -> Result:
    check_run(config, task, engine)
    plan, notes, stop = config.plan, InMemoryRun(), config.run.stop
    before = execution.earlier_runs(task)
    admission.admit_whole(config, notes.run)
    state, _ = run_rounds(config, task, RunStart(notes), engine, show)
    outcome.warn_if_no_update(notes.history)
    model = outcome.final_model(plan, task, state)
    execution.attach_lineage(model, config, before)
    early = stop.words if stop is not None and len(set(notes.rounds)) < plan.rounds else ""
    known = Facts(config.delta, config.privacy.noise, 0, model=outcome.model_digest(model), early=early, **config.facts)
    known = replace(known, public=task.declared_public, environment=(versions(),), in_memory=True)
    known = replace(known, utility=outcome.last_figures(notes.history), prepared=notes.prepared, earlier=before)
    known = replace(known, own_code=OwnCode.of_headers([header for _, header in notes.engine]))
    facts = outcome.facts_of_charges(plan, notes.rounds, notes.cohorts, known, notes.settled)
    facts = replace(facts, ledger=admission.final_statement(config, notes.run, facts))
    made = certificate(plan, facts)
    execution.register_lineage(model, task, (*before, EarlierRun.of_certificate(made, notes.run, lineage.IN_PROCESS)))
    words, rows = single_class_note(notes.history), History.of(notes.history)
    return Result(model, rows, made, words, None, config, facts, task, (notes, state))
