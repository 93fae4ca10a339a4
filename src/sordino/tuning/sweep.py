"""`sordino sweep`: every run in its own folder, then one table, one picture and one certificate for all of them.

sweep.json          the sweep that was asked for, written before the first run: a sweep is resumed with the same file
runs/NAME/          one run each, as `sordino run` writes it
table.csv           one line per run                table.txt, .tex   one per setting, with intervals
sweep.svg, .png     the picture                     best.toml         the file of the best setting
certificate.json    the privacy cost of reading the table: all runs composed, or who declared the data public
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sordino import codec
from sordino.accounting.composition import Cost
from sordino.accounting.rounding import upto
from sordino.certificate.build import headline
from sordino.certificate.certificate_file import compare_text, parse, text_of
from sordino.certificate.explain import sentence
from sordino.certificate.facts import run_cost
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import CertificateError, ConfigError
from sordino.outcome import declared_public, load_weights
from sordino.report import aggregate
from sordino.report.aggregate import Estimate, Row
from sordino.runs import admission
from sordino.runs.execution import with_released_columns
from sordino.runs.folder import RunFolder
from sordino.task import Task
from sordino.tuning import picture, sweep_cost
from sordino.tuning.run_pool import RUNS, Progress, StoredRun, run_all
from sordino.tuning.search_space import Sweep
from sordino.version import __version__

FORMAT = "sordino sweep 1"
HEADER, CERTIFICATE = "sweep.json", "certificate.json"
SHARED = (
    "runs of one seed share their random draws, as the noise is simulated: the epsilon is that of runs which draw "
    'their own, as they do with noise = "secure"'
)
FIXED = "the settings were fixed before the first run, and every run is in the table"


@dataclass(frozen=True)
class SweepFolder:
    """A sweep and its folder."""

    sweep: Sweep
    out: Path

    @cached_property
    def stored(self) -> list[StoredRun]:
        """Every run and its folder."""
        return [StoredRun(run, self.out / RUNS / run.name) for run in self.sweep.runs()]

    @cached_property
    def configs(self) -> list[Config]:
        """The file of every run."""
        return [one.run.config for one in self.stored]

    @property
    def charged(self) -> bool:
        """Whether reading the table has a privacy cost."""
        return self.sweep.data[0] == "private"

    # ---- before the first run ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse, before anything is written, what no certificate could be made of."""
        for config in self.configs:
            config.check_alone()
            config.check_task()
            config.check_budget()
        reporting = self.sweep.config(self.stored[0].run.changes, validation=False).build()
        if reporting.test is None:
            raise ConfigError("no public rows that report", "a test file beside the validation file", "name test = ...")
        if self.charged:
            sweep_cost.check_alike(self.configs)
            tasks = {(codec.to_json(c.task), c.plan.clients.population, c.run.seed): c for c in self.configs}
            sweep_cost.check_same_clients([config.build() for config in tasks.values()])
            self.cost()

    def cost(self, costs: Sequence[Cost] = ()) -> dict[str, Any]:
        """The composition of all runs: as planned, or as they ran."""
        planned = [run_cost(config.plan, admission.planned_facts(config)) for config in self.configs]
        whole = sweep_cost.composed(costs or planned, self.configs[0].plan.clients.population)
        return sweep_cost.statement(whole, self.configs[0])

    def begin(self, resume: bool) -> None:
        """Create the folder with sweep.json in it; a ledger must have the budget for all runs together."""
        asked = {"spec": codec.dump(self.sweep.spec), "run": self.sweep.table}
        header = (json.dumps({"format": FORMAT, "sordino": __version__, **asked}, indent=1) + "\n").encode()
        if resume and self.out.exists():
            if not (self.out / HEADER).is_file() or durable_files.read(self.out / HEADER) != header:
                found = f"a sweep in {self.out} that asks for something else"
                raise ConfigError(found, "the same file as before", "choose another --out")
            return
        if self.out.exists():
            raise ConfigError(f"{self.out}, which exists", "a new folder", "choose another --out, or add --resume")
        if self.charged and self.configs[0].privacy.ledger is not None:
            admission.check_affordable(self.configs[0], sweep_cost.charges(self.configs))
        (self.out / RUNS).mkdir(parents=True)
        durable_files.write(self.out / HEADER, header)

    # ---- after the last run ------------------------------------------------------------------------------------------

    @cached_property
    def histories(self) -> dict[str, list[dict[str, Any]]]:
        """The history of every run that did not diverge, by its name."""
        finished = [one for one in self.stored if not one.diverged]
        return {one.run.name: RunFolder.open(one.folder, one.run.config).history() for one in finished}

    @cached_property
    def metric(self) -> str:
        """The metric that chooses."""
        known = {name: 0 for history in self.histories.values() for line in history for name in line}
        names = [name for name in known if name != "round" and "private" not in name and name != "void"]
        return aggregate.choose_metric(self.sweep.spec.metric, names)

    @cached_property
    def rows(self) -> list[Row]:
        """The table: a row for every setting."""
        return [self._row(list(each)) for _, each in groupby(self.stored, key=lambda one: one.run.number)]

    def _row(self, each: Sequence[StoredRun]) -> Row:
        first = each[0].run
        lines = [self.histories.get(one.run.name, []) for one in each]
        known = [[line for line in one if self.metric in line] for one in lines]
        curves = tuple(tuple((int(line["round"]), float(line[self.metric])) for line in one) for one in known)
        values = tuple(curve[-1][1] if curve else math.nan for curve in curves)
        line = run_cost(first.config.plan, admission.planned_facts(first.config)).of("models")
        cost = headline(line, first.config.delta, first.config.deltas)
        seeds = tuple(one.run.seed for one in each)
        return Row(first.number, first.changes, seeds, values, cost["epsilon"], cost["relation"], curves)

    @cached_property
    def best(self) -> Row:
        return aggregate.best_of(self.rows, self.metric)

    def reported(self) -> Estimate:
        """The best setting on the rows that had no part in choosing it."""
        stored = [one for one in self.stored if one.run.number == self.best.number]
        tasks = [self.sweep.config(one.run.changes, one.run.seed, validation=False).build() for one in stored]
        return Estimate.of([evaluate(t, one.folder)[self.metric] for t, one in zip(tasks, stored, strict=True)])

    @cached_property
    def rows_used(self) -> dict[str, str]:
        """Which test rows chose, and which report."""
        run, found = self.stored[0].run, {}
        for name, choosing in (("chosen_by", True), ("reported_on", False)):
            task = self.sweep.config(run.changes, run.seed, validation=choosing).build()
            public = [one for one in declared_public(task) if "rows" in one.what]
            found[name] = " and ".join(f"{one.rows} {one.what} (declared public by {one.by})" for one in public)
        return found

    # ---- the certificate ---------------------------------------------------------------------------------------------

    def certificate(self) -> dict[str, Any]:
        """The privacy cost of reading the table, from the folders of the runs, each of which is certified."""
        kept = [_certified(one) for one in self.stored]
        data, by = self.sweep.data
        nothing: dict[str, Any] = {"epsilon": None, "delta": None, "unit": None, "relation": None, "adversaries": []}
        cost = self.cost([cost for cost, _ in kept]) if self.charged else nothing
        config = self.configs[0]
        shared = [SHARED] if config.privacy.noise == "simulation" and self.charged else []
        return {
            "format": FORMAT,
            "data": data,
            "declared_by": by,
            "charged": self.charged,
            **cost,
            "noise": config.privacy.noise,
            **self.rows_used,
            "metric": self.metric,
            "runs": [entry for _, entry in kept],
            "assumptions": [FIXED, *shared],
            "not_covered": ["other releases of the same data", "settings chosen in any other way"],
            "sordino": __version__,
        }

    def finish(self) -> dict[str, Any]:
        """Write table, picture, best setting and certificate; their content as plain data."""
        made, report = self.certificate(), self.reported()
        found = {
            "out": str(self.out),
            "metric": self.metric,
            "better": aggregate.better(self.metric),
            "best": self.best.settings,
            "reported": {self.metric: report.mean, "half_width": report.half_width, "rows": made["reported_on"]},
            "table": aggregate.entries(self.rows, self.metric),
            "certificate": made,
        }
        best = self.sweep.config(dict(self.best.settings), validation=False)
        best = replace(best, task=replace(best.task, half=None))
        seeds = aggregate.seeds_text(self.best.seeds)
        heading = f"{self.metric} ({found['better']} is better), {seeds}; chosen by {made['chosen_by']}"
        table = aggregate.table(self.rows, self.metric, f"{heading}. {guarantee(made)}.")
        worth = f"best: {self.metric} {report.text()} on {made['reported_on']}, which had no part in choosing"
        files = f"files: {self.out}/{{table.csv, table.tex, sweep.svg, best.toml, {CERTIFICATE}}}"
        text = "\n".join([heading, table.text(), worth, guarantee(made), files])
        for name, content in (
            (CERTIFICATE, text_of(made)),
            ("table.csv", aggregate.to_csv(self.rows, self.metric)),
            ("table.txt", text + "\n"),
            ("table.tex", table.latex("tab:sweep") + "\n"),
            ("best.toml", codec.to_toml(best)),
        ):
            durable_files.write(self.out / name, content.encode())
        picture.draw(self.rows, self.metric, made["chosen_by"], self.out / "sweep")
        return found


def sweep(
    asked: Sweep, out: Path, *, workers: int, resume: bool, own: Sequence[Path], progress: Progress
) -> dict[str, Any]:
    """Execute every run that is missing, then write the table."""
    if workers < 1:
        raise ConfigError(f"--workers {workers}", "at least 1")
    folder = SweepFolder(asked, out)
    folder.check()
    folder.begin(resume)
    run_all(folder.stored, workers, own, progress)
    return folder.finish()


def open_folder(out: Path) -> SweepFolder:
    """The sweep in a folder, as sweep.json says it."""
    try:
        data = json.loads(durable_files.read(out / HEADER))
        return SweepFolder(Sweep.of({**data["run"], "sweep": data["spec"]}), out)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CertificateError(HEADER, f"{HEADER} is not a sweep as this program writes one ({error})") from None


def certify(out: Path) -> dict[str, Any]:
    """The stored certificate, if the folders of the runs give it again."""
    found = open_folder(out)
    if not (out / CERTIFICATE).is_file():
        raise ConfigError(f"no {CERTIFICATE} in {out}", "a finished sweep", "finish it: sordino sweep --resume")
    stored = durable_files.read(out / CERTIFICATE)
    try:
        read = parse(stored)
    except ValueError as error:
        raise CertificateError(CERTIFICATE, f"{CERTIFICATE} is not a certificate ({error})") from None
    computed: dict[str, Any] = json.loads(json.dumps(found.certificate()))
    compare_text(read, stored.decode(), computed)
    return computed


def evaluate(task: Task, folder: Path) -> dict[str, float]:
    """A run's model on a task's test rows, prepared as those of the run were."""
    task = with_released_columns(task, folder)
    load_weights(task.model, load_file(folder / "model.safetensors"))
    return task.evaluate(task.layout.flatten(task.model))


def _certified(one: StoredRun) -> tuple[Cost, dict[str, Any]]:
    """The cost of a run, and the hash of its certificate, computed again, or of its charges if it diverged."""
    folder = RunFolder.open(one.folder)
    if not one.diverged:
        folder.certify()
    held = folder.contents()
    if codec.digest(one.run.config) != held.header.config:
        raise CertificateError("runs", f"{one.folder.name} is not the run that {HEADER} asks for")
    name = "charges.jsonl" if one.diverged else CERTIFICATE
    bound = {f"{Path(name).stem}_sha256": hashlib.sha256(durable_files.read(one.folder / name)).hexdigest()}
    entry = {"run": f"{RUNS}/{one.folder.name}", "diverged": one.diverged, "config_sha256": held.header.config}
    return run_cost(held.config.plan, folder.facts(held)), {**entry, **bound}


def guarantee(made: dict[str, Any]) -> str:
    """The privacy cost of reading the table, in a sentence."""
    runs = f"{len(made['runs'])} runs"
    if not made["charged"]:
        return f"{runs} on {made['data']} data ({made['declared_by']}): reading the table costs no privacy"
    if made["epsilon"] is None:
        return f"{runs} on private data: no guarantee"
    return (
        f"reading the table of {runs} on private data costs epsilon {upto(made['epsilon'], 4)}, "
        f"delta {upto(made['delta'])}, unit {made['unit']}, relation {made['relation']}: all their events composed"
    )


def forecast(asked: Sweep) -> tuple[dict[str, Any], str]:
    """What would run, and what reading its table would cost; touches only public rows' number and the partition."""
    folder = SweepFolder(asked, Path())
    folder.check()
    data, by = asked.data
    runs = []
    for run in (one.run for one in folder.stored):
        noise = getattr(getattr(run.config.plan.release, "mechanism", None), "noise_multiplier", None)
        runs.append(run.text + ("" if noise is None else f": noise multiplier {noise:.4g}"))
    cost = folder.cost() if folder.charged else {"epsilon": None}
    found = {"runs": runs, "data": data, "declared_by": by, **cost}
    rows = [f"{name}: {rows}" for name, rows in folder.rows_used.items()]
    return found, "\n".join([*runs, guarantee({**found, "charged": folder.charged}), *rows])


# ---- for compare, report and explain ---------------------------------------------------------------------------------


def is_sweep(target: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (target / HEADER).is_file()


def with_runs(targets: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Every sweep replaced by the runs in it; and of each, certified, what reading the whole of it costs."""
    runs, notes = [], []
    for target in targets:
        if not is_sweep(target):
            runs.append(target)
            continue
        made, stored = certify(target), open_folder(target).stored
        runs += [one.folder for one in stored if not one.diverged]
        notes.append(f"{target.name}: {_cost(made)}")
    return runs, notes


def _cost(made: dict[str, Any]) -> str:
    """The whole sweep in one sentence; the epsilon of a run is not that of the table it was read in."""
    lost = sum(run["diverged"] for run in made["runs"])
    left = "" if not lost else f"; {lost} of them diverged and are not shown"
    return guarantee(made) + left


def explain(target: Path) -> dict[str, Any]:
    """A sweep's certificate in sentences."""
    made = certify(target)
    rows = f"on {made['chosen_by']}, reported on {made['reported_on']}"
    against = []
    for line in made["adversaries"]:
        found = f"all runs together, epsilon {upto(line['epsilon'])} at delta {upto(line['delta'])}"
        words = "nothing is guaranteed" if line["epsilon"] is None else found
        against.append(sentence(f"{line['adversary']}: {words}"))
    return {
        "cost": sentence(_cost(made)),
        "against": against,
        "chosen": sentence(f"the best setting was chosen by {made['metric']} {rows}"),
        "assumed": [sentence(text) for text in made["assumptions"]],
        "not_covered": [sentence(text) for text in made["not_covered"]],
    }


def text(found: dict[str, Any]) -> str:
    """The same as text."""
    listed = {"Against one who sees": "against", "Assumed": "assumed", "Not covered": "not_covered"}
    lists = {title: "\n".join(f"- {text}" for text in found[key]) for title, key in listed.items()}
    blocks = [f"{title}:\n{lines}" for title, lines in lists.items() if lines]
    return "\n\n".join([found["cost"], found["chosen"], *blocks])
