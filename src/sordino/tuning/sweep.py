"""Sweeps (`sordino sweep`): every run in its own folder, then one table, figure and certificate for all runs.

sweep.json          search space and configuration, written before the first run; a sweep is resumed with the same
runs/NAME/          folder of one run, as `sordino run` writes it
table.csv           one line per run                table.txt, .tex   one line per setting, with intervals
sweep.svg, .png     figure                          best.toml         configuration file of the best setting
certificate.json    privacy cost of publishing the table: all runs composed, or who declared the data public

    epsilon(table) = epsilon( all events of all runs ),   never a sum of epsilons

The settings are fixed before the first run (a grid, or draws from a public seed), so none depends on the result of an
earlier run, as composition requires. A run that diverged or was stopped is charged as planned.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from sordino import codec
from sordino.accounting.composition import ADVERSARIES, Cost, Line
from sordino.accounting.events import Event
from sordino.certificate.build import WHO, headline
from sordino.certificate.certificate_file import compare_text, parse, text_of
from sordino.certificate.facts import run_cost
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import BudgetError, CertificateError, ConfigError, DivergedError, SordinoError, UserError
from sordino.outcome import load_weights
from sordino.report import text_table
from sordino.report.text_table import Estimate, Row
from sordino.runs import admission
from sordino.runs.execution import execute, with_released_columns
from sordino.runs.folder import RunFolder
from sordino.task import Task
from sordino.tuning import sweep_report
from sordino.tuning.search_space import RUNS, Sweep, SweepRun
from sordino.version import __version__

FORMAT = "sordino sweep 1"
HEADER, CERTIFICATE = "sweep.json", "certificate.json"
SHARED = (
    "runs of one seed share their random draws, as the noise is simulated: the epsilon is that of runs with "
    'independent draws, as with noise = "secure"'
)
FIXED = "the settings were fixed before the first run, and every run is in the table"
ALIKE = "runs with the same unit and the same neighbouring relation"
Progress = Callable[[float, float, str], None]  # work done, work in all, what was done last
Failure = tuple[type[SordinoError], str]  # class and sentence of an error


@dataclass(frozen=True)
class SweepFolder:
    """Sweep with its output folder: checks before the first run, table and certificate after the last."""

    sweep: Sweep
    out: Path

    @cached_property
    def runs(self) -> list[SweepRun]:
        return self.sweep.runs(self.out)

    @cached_property
    def configs(self) -> list[Config]:
        return [run.config for run in self.runs]

    @property
    def charged(self) -> bool:
        """Whether reading the table has a privacy cost."""
        return self.sweep.data[0] == "private"

    # ---- before the first run
    def check(self) -> None:
        """Refuse runs that could not be certified together, before anything is written."""
        for config in self.configs:
            config.check_alone()
            config.check_task()
            config.check_budget()
        reporting = self.sweep.config(self.runs[0].changes, validation=False).build()
        if reporting.test is None:
            found = "no public test rows other than the validation file"
            needed = "public rows on which the metric of the best setting is reported"
            raise ConfigError(found, needed, "name a file of such rows with test = ... under [task]")
        if self.charged:
            check_alike(self.configs)
            self.cost()

    def cost(self, costs: Sequence[Cost] = ()) -> dict[str, Any]:
        """Return the composed privacy cost of all runs, as certificate fields; `costs` replace the planned costs."""
        first = self.configs[0]
        planned = [run_cost(config.plan, admission.planned_facts(config)) for config in self.configs]
        whole = compose_costs(costs or planned, first.plan.clients.population)
        lines = {who: headline(whole.of(who), first.delta, first.deltas) for who in ADVERSARIES}
        main = lines["models"]
        adversaries = [{"adversary": who, "description": WHO[who], **line} for who, line in lines.items()]
        found = {"epsilon": main["epsilon"], "delta": main["delta"], "unit": whole.unit, "relation": main["relation"]}
        return {**found, "adversaries": adversaries}

    def begin(self, resume: bool) -> None:
        """Create the output folder with sweep.json; refuse a sweep whose runs together exceed the ledger's budget."""
        asked = {"spec": codec.dump(self.sweep.spec), "run": self.sweep.table}
        header = (json.dumps({"format": FORMAT, "sordino": __version__, **asked}, indent=1) + "\n").encode()
        if resume and self.out.exists():
            if not (self.out / HEADER).is_file() or durable_files.read(self.out / HEADER) != header:
                found = f"{self.out}, which holds the sweep of another file"
                raise ConfigError(found, "the file that the sweep was started with", "choose another --out")
            return
        if self.out.exists():
            raise ConfigError(f"{self.out}, which exists", "a new folder", "choose another --out, or add --resume")
        if self.charged and self.configs[0].privacy.ledger is not None:
            each = [admission.ledger_request(config, admission.planned_facts(config)) for config in self.configs]
            whole = replace(each[0], items=tuple(item for one in each for item in one.items), plan="")
            admission.check_affordable(self.configs[0], whole)
        (self.out / RUNS).mkdir(parents=True)
        durable_files.write(self.out / HEADER, header)

    # ---- after the last run
    @cached_property
    def histories(self) -> dict[Path, list[dict[str, Any]]]:
        """Metrics by round of every run that did not diverge, by the run's folder."""
        finished = [run for run in self.runs if not run.diverged]
        return {run.folder: RunFolder.open(run.folder, run.config).history() for run in finished}

    @cached_property
    def metric(self) -> str:
        """Name of the metric that chooses the best setting."""
        reported = {name: 0 for history in self.histories.values() for line in history for name in line}
        names = [name for name in reported if name != "round" and "private" not in name and name != "void"]
        return text_table.choose_metric(self.sweep.spec.metric, names)

    @cached_property
    def rows(self) -> list[Row]:
        """Rows of the sweep's table, one for every setting."""
        found = []
        for number, each in groupby(self.runs, key=lambda run: run.number):
            runs = list(each)
            lines = [[line for line in self.histories.get(run.folder, []) if self.metric in line] for run in runs]
            curves = tuple(tuple((int(line["round"]), float(line[self.metric])) for line in own) for own in lines)
            values = tuple(curve[-1][1] if curve else math.nan for curve in curves)
            config, seeds = runs[0].config, tuple(run.seed for run in runs)
            line = run_cost(config.plan, admission.planned_facts(config)).of("models")
            cost = headline(line, config.delta, config.deltas)
            found.append(Row(number, runs[0].changes, seeds, values, cost["epsilon"], cost["relation"], curves))
        return found

    @cached_property
    def best(self) -> Row:
        return text_table.best_of(self.rows, self.metric)

    @cached_property
    def rows_used(self) -> dict[str, str]:
        """Descriptions of the public rows that selected the best setting, and of those on which it is reported."""
        run, found = self.runs[0], {}
        for name, choosing in (("chosen_by", True), ("reported_on", False)):
            task = self.sweep.config(run.changes, run.seed, validation=choosing).build()
            public = [one for one in task.declared_public if "rows" in one.what]
            found[name] = " and ".join(f"{one.rows} {one.what} (declared public by {one.by})" for one in public)
        return found

    def certificate(self) -> dict[str, Any]:
        """Return the certificate on reading the table, computed from the runs' folders, which are certified first."""
        certified = [_certified(run) for run in self.runs]
        data, by = self.sweep.data
        nothing: dict[str, Any] = {"epsilon": None, "delta": None, "unit": None, "relation": None, "adversaries": []}
        cost = self.cost([cost for cost, _ in certified]) if self.charged else nothing
        noise = self.configs[0].privacy.noise
        shared = [SHARED] if noise == "simulation" and self.charged else []
        found = {"format": FORMAT, "data": data, "declared_by": by, "charged": self.charged, **cost, "noise": noise}
        found |= {**self.rows_used, "metric": self.metric, "runs": [entry for _, entry in certified]}
        found |= {"assumptions": [FIXED, *shared]}
        found |= {"not_covered": ["other releases of the same data", "settings chosen in any other way"]}
        return {**found, "sordino": __version__}

    def finish(self) -> dict[str, Any]:
        """Write table, figure, best setting and certificate; return their content for --json.

        The metric of the best setting is reported on public rows that did not select it.
        """
        made, metric = self.certificate(), self.metric
        reported = []
        for run in self.runs:
            if run.number == self.best.number:
                task = self.sweep.config(run.changes, run.seed, validation=False).build()
                reported.append(evaluate(task, run.folder)[metric])
        report, guarantee, better = Estimate.of(reported), sweep_report.guarantee(made), text_table.better(metric)
        best = self.sweep.config(dict(self.best.settings), validation=False)
        best = replace(best, task=replace(best.task, half=None))
        seeds = text_table.seeds_text(self.best.seeds)
        heading = f"{metric} ({better} is better), {seeds}; chosen by {made['chosen_by']}"
        table = text_table.settings_table(self.rows, metric, f"{heading}. {guarantee}.")
        best_line = f"best: {metric} {report.text()} on {made['reported_on']}, which were not used to select"
        files = f"files: {self.out}/{{table.csv, table.tex, sweep.svg, best.toml, {CERTIFICATE}}}"
        for name, content in (
            (CERTIFICATE, text_of(made)),
            ("table.csv", text_table.to_csv(self.rows, metric)),
            ("table.txt", "\n".join([heading, table.text(), best_line, guarantee, files]) + "\n"),
            ("table.tex", table.latex("tab:sweep") + "\n"),
            ("best.toml", codec.to_toml(best)),
        ):
            durable_files.write(self.out / name, content.encode())
        sweep_report.draw(self.rows, metric, made["chosen_by"], self.out / "sweep")
        found = {"out": str(self.out), "metric": metric, "better": better, "best": self.best.settings}
        found["reported"] = {metric: report.mean, "half_width": report.half_width, "rows": made["reported_on"]}
        return {**found, "table": text_table.entries(self.rows, metric), "certificate": made}


def sweep(
    asked: Sweep, out: Path, *, workers: int, resume: bool, own: Sequence[Path], progress: Progress
) -> dict[str, Any]:
    """Execute every unfinished run of a sweep in `workers` processes, then write table and certificate."""
    if workers < 1:
        raise ConfigError(f"--workers {workers}", "at least 1 process", "remove --workers to use 1")
    folder = SweepFolder(asked, out)
    folder.check()
    folder.begin(resume)
    left = [run for run in folder.runs if not run.done]
    results = _in_processes(left, workers, own) if workers > 1 and len(left) > 1 else ((r, _execute(r)) for r in left)
    for done, (run, failure) in enumerate(results, start=1):
        if failure is not None:
            text = f"run {run.folder.name}: {failure[1].removeprefix('found ')}"
            if issubclass(failure[0], UserError):
                raise ConfigError(text)
            raise BudgetError(text) if issubclass(failure[0], BudgetError) else CertificateError("run", text)
        progress(done, len(left), f"{run.folder.name} ({run.text})" + " diverged" * run.diverged)
    return folder.finish()


def forecast(asked: Sweep) -> tuple[dict[str, Any], str]:
    """Return the runs of a sweep and the privacy cost of reading its table, as JSON data and as text.

    Of the data only sizes and partition are read.
    """
    folder = SweepFolder(asked, Path())
    folder.check()
    runs = []
    for run in folder.runs:
        noise = getattr(getattr(run.config.plan.release, "mechanism", None), "noise_multiplier", None)
        runs.append(run.text + ("" if noise is None else f": noise multiplier {noise:.4g}"))
    cost = folder.cost() if folder.charged else {"epsilon": None}
    found = {"runs": runs, "data": asked.data[0], "declared_by": asked.data[1], **cost}
    rows = [f"{name}: {rows}" for name, rows in folder.rows_used.items()]
    return found, "\n".join([*runs, sweep_report.guarantee({**found, "charged": folder.charged}), *rows])


def open_folder(out: Path) -> SweepFolder:
    """Return the sweep whose output is in a folder, read from sweep.json."""
    try:
        data = json.loads(durable_files.read(out / HEADER))
        return SweepFolder(Sweep.of({**data["run"], "sweep": data["spec"]}), out)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"{HEADER} is not a sweep that `sordino sweep` has written ({error})"
        raise CertificateError(HEADER, f"{found}; restore the file, or sweep again") from None


def certify(out: Path) -> dict[str, Any]:
    """Return the stored certificate of a sweep if the runs' folders give the same; else raise `CertificateError`."""
    found = open_folder(out)
    if not (out / CERTIFICATE).is_file():
        raise ConfigError(f"no {CERTIFICATE} in {out}", "a finished sweep", "run `sordino sweep --resume` to finish it")
    stored = durable_files.read(out / CERTIFICATE)
    try:
        read = parse(stored)
    except ValueError as error:
        raise CertificateError(CERTIFICATE, f"{CERTIFICATE} is not a certificate ({error}); restore the file") from None
    computed: dict[str, Any] = json.loads(json.dumps(found.certificate()))
    compare_text(read, stored.decode(), computed)
    return computed


def _certified(run: SweepRun) -> tuple[Cost, dict[str, Any]]:
    """Certify a run; return its privacy cost, and the hash of its certificate, or of its charges if it diverged."""
    folder = RunFolder.open(run.folder)
    if not run.diverged:
        folder.certify()
    held = folder.contents()
    if codec.digest(run.config) != held.header.config:
        raise CertificateError("runs", f"{run.folder.name} has another configuration than {HEADER}; sweep again")
    name = "charges.jsonl" if run.diverged else CERTIFICATE
    bound = {f"{Path(name).stem}_sha256": hashlib.sha256(durable_files.read(run.folder / name)).hexdigest()}
    entry = {"run": f"{RUNS}/{run.folder.name}", "diverged": run.diverged, "config_sha256": held.header.config}
    return run_cost(held.config.plan, folder.facts(held)), {**entry, **bound}


def evaluate(task: Task, folder: Path) -> dict[str, float]:
    """Evaluate the model in a run's folder on a task's test rows, with columns scaled as in the run."""
    task = with_released_columns(task, folder)
    load_weights(task.model, load_file(folder / "model.safetensors"))
    return task.evaluate(task.layout.flatten(task.model))


def is_sweep(target: Path) -> bool:
    return (target / HEADER).is_file()


def with_runs(targets: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Replace every sweep among the folders by its runs; also return a note on each sweep's certified privacy cost."""
    runs, notes = [], []
    for target in targets:
        if is_sweep(target):
            made = certify(target)
            runs += [run.folder for run in open_folder(target).runs if not run.diverged]
            notes.append(f"{target.name}: {sweep_report.guarantee_and_diverged(made)}")
        else:
            runs.append(target)
    return runs, notes


# ---- composition of all runs
def compose_costs(costs: Sequence[Cost], population: int) -> Cost:
    """Compose the events of all runs, per adversary and per silo; refuse runs of different units or relations."""
    units, fix = sorted({cost.unit for cost in costs}), "write them into two sweep files"
    if len(units) > 1:
        raise ConfigError(f"runs that protect one {units[0]} and runs that protect one {units[1]}", ALIKE, fix)
    found: list[Line] = []
    for who in ADVERSARIES:
        each = [cost.of(who) for cost in costs]
        relations = sorted({line.relation for lines in each for line in lines})
        if len(relations) > 1:
            wrong = f"runs with relations {' and '.join(relations)} against an adversary who {WHO[who]}"
            raise ConfigError(wrong, f"{ALIKE}: no relation follows from another", fix)
        differ = any(line.silos for lines in each for line in lines)
        kinds: dict[frozenset[tuple[Event, int]], list[int]] = {}  # events of a silo -> the silos that have these
        for silo in range(population if differ else 1):
            whole: Counter[Event] = Counter()
            for lines in each:
                own = next(line for line in lines if not line.silos or silo in line.silos)
                for event, count in own.entries:
                    whole[event] += count
            kinds.setdefault(frozenset(whole.items()), []).append(silo)
        for kind, silos in kinds.items():
            entries = tuple(sorted(kind, key=repr))
            found.append(Line(who, relations[0], entries, tuple(silos) if len(kinds) > 1 else ()))
    return Cost(costs[0].unit, tuple(found))


def check_alike(configs: Sequence[Config]) -> None:
    """Refuse runs that cannot be composed: with different data, deltas, clients, ledgers or noise modes.

    A cost per client has a meaning only if every client has the same records in every run.
    """

    def data(config: Config) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        options = {name: value for name, value in config.task.options.items() if name != "test"}
        return config.task.dataset, options, config.task.silos

    first = configs[0]
    for one in configs[1:]:
        for what, ours, theirs in (
            ("data sets", data(first), data(one)),
            ("deltas", (first.delta, first.deltas), (one.delta, one.deltas)),
            ("numbers of clients", first.plan.clients.population, one.plan.clients.population),
            ("ledgers", (first.privacy.ledger, first.privacy.dataset), (one.privacy.ledger, one.privacy.dataset)),
            ("noise modes", first.privacy.noise, one.privacy.noise),
        ):
            if ours != theirs:
                found = f"runs of different {what} ({ours} and {theirs}) on private data"
                raise ConfigError(found, f"the same {what} in all runs of a sweep", "write them into two sweep files")
    different = {(codec.to_json(c.task), c.plan.clients.population, c.run.seed): c for c in configs}
    clients, *others = [config.build().clients for config in different.values()]
    for own in others:
        if not (np.array_equal(clients.index, own.index) and np.array_equal(clients.offsets, own.offsets)):
            fix = 'vary neither run.seed nor the partition, or declare data = "public" if the data are public'
            found = "private data that some runs partition into other clients"
            raise ConfigError(found, "the same clients in every run, so that their events compose", fix)


# ---- execution of the runs
def _in_processes(
    runs: Sequence[SweepRun], workers: int, own: Sequence[Path]
) -> Iterator[tuple[SweepRun, Failure | None]]:
    """Execute runs in a pool of processes that end with this process; yield each run with its error, if any."""
    before, spawn = set(multiprocessing.active_children()), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(runs)), spawn, initializer=_start_worker, initargs=(tuple(own),))
    try:
        jobs = {pool.submit(_execute, run): run for run in runs}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise


def _start_worker(own: tuple[Path, ...]) -> None:
    """Initialise a process of the pool: it loads the user's parts, ignores interrupts, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codec.load_plugins()
    for file in own:
        codec.load_parts_file(file)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _execute(run: SweepRun) -> Failure | None:
    """Execute or resume one run and return its error; a diverged run is recorded beside the folder, not an error."""
    torch.set_num_threads(1)
    try:
        execute(run.config, run.folder, resume=True)
    except DivergedError as error:
        run.diverged_file.write_text(f"{error}\n", encoding="utf-8")
    except SordinoError as error:
        if not isinstance(error, BudgetError) or not (run.folder / CERTIFICATE).is_file():  # a budget may end a run
            return next(kind for kind in (UserError, BudgetError, SordinoError) if isinstance(error, kind)), str(error)
    return None
