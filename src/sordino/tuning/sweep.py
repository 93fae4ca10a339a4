"""`sordino sweep`: every cell a run in its own folder, then one table, one picture and one certificate for all.

sweep.json          what was asked, written before the first cell: a sweep that goes on must ask the same
cells/NAME/         one run each, as `sordino run` writes it
table.csv           one line per run                table.txt   one per setting, with intervals
sweep.svg, .png     the picture                     best.toml   the file of the winner
certificate.json    what looking at the table costs: all bills composed, or whose word says that it is free
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sordino import codec
from sordino.accounting.composition import Cost
from sordino.accounting.rounding import upto
from sordino.certificate.build import headline
from sordino.certificate.facts import run_cost
from sordino.certificate.schema import compare_text, parse, text_of
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import CertificateError, ConfigError
from sordino.outcome import declared_public, load_weights
from sordino.runs import admission
from sordino.runs.execution import with_released_columns
from sordino.runs.folder import RunFolder
from sordino.task import Task
from sordino.tuning import picture, sweep_cost, table
from sordino.tuning.cells import CELLS, Place, Told, run_all
from sordino.tuning.spec import Sweep
from sordino.tuning.table import Estimate, Row
from sordino.version import __version__

FORMAT = "sordino sweep 1"
HEADER, CERTIFICATE = "sweep.json", "certificate.json"
SHARED = (
    "cells of one seed share their coins, as the noise is simulated: the figure is that of cells which draw their own, "
    'as they do with noise = "secure"'
)
FIXED = "what is tried was fixed before the first cell ran, and every cell is in the table"


@dataclass(frozen=True)
class Swept:
    """A sweep and its folder."""

    asked: Sweep
    out: Path

    @cached_property
    def places(self) -> list[Place]:
        """Every cell and where it is."""
        return [Place.of(cell, self.out) for cell in self.asked.cells()]

    @cached_property
    def configs(self) -> list[Config]:
        """The file of every cell."""
        return [place.cell.config for place in self.places]

    @property
    def billed(self) -> bool:
        """Whether looking at the table costs anything."""
        return self.asked.data[0] == "private"

    # ---- before the first cell ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse, before anything is written, what no certificate could be made of."""
        for config in self.configs:
            config.check_alone()
            config.check_task()
            config.check_budget()
        reporting = self.asked.config(self.places[0].cell.changes, judged=False).build()
        if reporting.test is None:
            raise ConfigError("no public rows that report", "a test file beside the validation file", "name test = ...")
        if self.billed:
            sweep_cost.check_alike(self.configs)
            sweep_cost.check_same_cut(self._tasks())
            self.cost()

    def _tasks(self) -> list[Task]:
        """The data of all cells, different ones once."""
        found = {(codec.to_json(c.task), c.plan.clients.population, c.run.seed): c for c in self.configs}
        return [config.build() for config in found.values()]

    def cost(self, costs: Sequence[Cost] = ()) -> dict[str, Any]:
        """The composition of all bills: as planned, or as they ran."""
        planned = [run_cost(config.plan, admission.planned_facts(config)) for config in self.configs]
        whole = sweep_cost.composed(costs or planned, self.configs[0].plan.clients.population)
        return sweep_cost.priced(whole, self.configs[0])

    def begin(self, resume: bool) -> None:
        """The folder, with what is asked in it; a ledger must be able to pay for all cells together."""
        said = self._header()
        if resume and self.out.exists():
            if not (self.out / HEADER).is_file() or durable_files.read(self.out / HEADER) != said:
                found = f"a sweep in {self.out} that asks for something else"
                raise ConfigError(found, "the same file as before", "choose another --out")
            return
        if self.out.exists():
            raise ConfigError(f"{self.out}, which exists", "a new folder", "choose another --out, or add --resume")
        if self.billed and self.configs[0].privacy.ledger is not None:
            admission.check_all_affordable(self.configs[0], sweep_cost.asked(self.configs))
        (self.out / CELLS).mkdir(parents=True)
        durable_files.write(self.out / HEADER, said)

    def _header(self) -> bytes:
        asked = {"spec": codec.dump(self.asked.spec), "run": self.asked.table}
        return (json.dumps({"format": FORMAT, "sordino": __version__, **asked}, indent=1) + "\n").encode()

    # ---- after the last ----------------------------------------------------------------------------------------------

    @cached_property
    def metric(self) -> str:
        """The figure that chooses."""
        known = {name: 0 for place in self.places if not place.diverged for line in _history(place) for name in line}
        figures = [name for name in known if name != "round" and "private" not in name and name != "void"]
        return table.chosen_metric(self.asked.spec.metric, figures)

    @cached_property
    def rows(self) -> list[Row]:
        """The table."""
        found: dict[int, list[Place]] = {}
        for place in self.places:
            found.setdefault(place.cell.number, []).append(place)
        return [self._row(each) for each in found.values()]

    def _row(self, each: Sequence[Place]) -> Row:
        values = tuple(_figure(place, self.metric) for place in each)
        first = each[0].cell
        line = run_cost(first.config.plan, admission.planned_facts(first.config)).of("models")
        spent = headline(line, first.config.delta, first.config.deltas)["epsilon"]
        return Row(first.number, first.changes, tuple(place.cell.seed for place in each), values, spent)

    @cached_property
    def best(self) -> Row:
        return table.best_of(self.rows, self.metric)

    def reported(self) -> Estimate:
        """The winner on the rows that had no part in choosing it."""
        places = [place for place in self.places if place.cell.number == self.best.number]
        return Estimate.of([self._on_test(place)[self.metric] for place in places])

    def _on_test(self, place: Place) -> dict[str, float]:
        task = self.asked.config(place.cell.changes, place.cell.seed, judged=False).build()
        return judged(task, place.folder)

    @cached_property
    def rows_used(self) -> dict[str, str]:
        """Which rows chose, and which report."""
        cell = self.places[0].cell
        found = {}
        for name, choosing in (("chosen_by", True), ("reported_on", False)):
            config = self.asked.config(cell.changes, cell.seed, judged=choosing)
            found[name] = " and ".join(
                f"{one.rows} {one.what} (declared public by {one.by})"
                for one in declared_public(config.build())
                if "rows" in one.what
            )
        return found

    # ---- the certificate ---------------------------------------------------------------------------------------------

    def certificate(self) -> dict[str, Any]:
        """What looking at the table costs, from what is in the folders of the cells, each of which is certified."""
        kept = [_kept(place) for place in self.places]
        whose, by = self.asked.data
        nothing: dict[str, Any] = {"epsilon": None, "delta": None, "unit": None, "relation": None, "adversaries": []}
        cost = self.cost([cost for cost, _ in kept]) if self.billed else nothing
        config = self.configs[0]
        shared = [SHARED] if config.privacy.noise == "simulation" and self.billed else []
        return {
            "format": FORMAT,
            "data": whose,
            "declared_by": by,
            "billed": self.billed,
            **cost,
            "noise": config.privacy.noise,
            **self.rows_used,
            "metric": self.metric,
            "cells": [entry for _, entry in kept],
            "assumptions": [FIXED, *shared],
            "not_covered": ["other releases of the same data", "settings chosen in any other way"],
            "sordino": __version__,
        }

    def finish(self) -> dict[str, Any]:
        """Table, picture, winner and certificate; what they say, as plain data."""
        made, report = self.certificate(), self.reported()
        told = {
            "out": str(self.out),
            "metric": self.metric,
            "better": table.better(self.metric),
            "best": self.best.changes,
            "reported": {self.metric: report.mean, "spread": report.spread, "rows": made["reported_on"]},
            "table": table.entries(self.rows, self.metric),
            "certificate": made,
        }
        winner = self.asked.config(self.best.changes, judged=False)
        winner = replace(winner, task=replace(winner.task, half=None))
        durable_files.write(self.out / CERTIFICATE, text_of(made).encode())
        durable_files.write(self.out / "table.csv", table.to_csv(self.rows, self.metric).encode())
        durable_files.write(self.out / "table.txt", (text(told, self) + "\n").encode())
        durable_files.write(self.out / "best.toml", codec.to_toml(winner).encode())
        picture.draw(self.rows, self.metric, made["chosen_by"], self.out / "sweep")
        return told


def sweep(asked: Sweep, out: Path, *, workers: int, resume: bool, own: Sequence[Path], told: Told) -> dict[str, Any]:
    """Run every cell that is missing, then tell."""
    if workers < 1:
        raise ConfigError(f"--workers {workers}", "at least 1")
    found = Swept(asked, out)
    found.check()
    found.begin(resume)
    run_all(found.places, workers, own, told)
    return found.finish()


def opened(out: Path) -> Swept:
    """The sweep in a folder, as sweep.json asks for it."""
    try:
        data = json.loads(durable_files.read(out / HEADER))
        spec: Any = data["spec"]
        found = Swept(Sweep.of({**data["run"], "sweep": spec}), out)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CertificateError(HEADER, f"{HEADER} is not a sweep as this program writes one ({error})") from None
    return found


def certify(out: Path) -> dict[str, Any]:
    """The stored certificate, if the folders of the cells give it again."""
    found = opened(out)
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


def judged(task: Task, folder: Path) -> dict[str, float]:
    """A run's model on a task's test rows, prepared as those of the run were."""
    task = with_released_columns(task, folder)
    load_weights(task.model, load_file(folder / "model.safetensors"))
    return task.evaluate(task.layout.flatten(task.model))


def _history(place: Place) -> list[dict[str, Any]]:
    return RunFolder.open(place.folder, place.cell.config).history()


def _figure(place: Place, metric: str) -> float:
    """The last figure of a run; NaN if it diverged."""
    if place.diverged:
        return math.nan
    return float(next(line[metric] for line in reversed(_history(place)) if metric in line))


def _kept(place: Place) -> tuple[Cost, dict[str, Any]]:
    """What a cell costs, and what binds it: its certificate, which is computed again; its charges if it diverged."""
    folder = RunFolder.open(place.folder)
    if not place.diverged:
        folder.certify()
    held = folder.contents()
    if codec.digest(place.cell.config) != held.header.config:
        raise CertificateError("cells", f"{place.folder.name} is not the run that {HEADER} asks for")
    name = "charges.jsonl" if place.diverged else CERTIFICATE
    bound = {f"{Path(name).stem}_sha256": hashlib.sha256(durable_files.read(place.folder / name)).hexdigest()}
    entry = {"cell": f"{CELLS}/{place.folder.name}", "diverged": place.diverged, "config_sha256": held.header.config}
    return run_cost(held.config.plan, folder.facts(held)), {**entry, **bound}


def guarantee(made: dict[str, Any]) -> str:
    """What a look at the table costs, in a sentence."""
    cells = f"{len(made['cells'])} runs"
    if not made["billed"]:
        return f"{cells} on {made['data']} data ({made['declared_by']}): a look at the table costs nothing"
    if made["epsilon"] is None:
        return f"{cells} on private data: no guarantee"
    return (
        f"a look at the table of {cells} on private data costs epsilon {upto(made['epsilon'], 4)}, "
        f"delta {upto(made['delta'])}, unit {made['unit']}, relation {made['relation']}: all their events composed"
    )


def text(told: dict[str, Any], found: Swept) -> str:
    """The table, which rows chose, what the winner is worth, and what the look costs."""
    made, report = told["certificate"], told["reported"]
    worth = Estimate(report[found.metric], report["spread"]).words
    seeds = table.seeds_words(found.best.seeds)
    lines = [f"{found.metric} ({told['better']} is better), {seeds}; chosen by {made['chosen_by']}"]
    lines += table.to_text(found.rows, found.metric)
    lines.append(f"best: {found.metric} {worth} on {made['reported_on']}, which had no part in choosing")
    return "\n".join(
        [*lines, guarantee(made), f"files: {found.out}/{{table.csv, sweep.svg, best.toml, {CERTIFICATE}}}"]
    )


def forecast(asked: Sweep) -> tuple[dict[str, Any], str]:
    """What would run, and what a look at its table would cost; touches only public rows' number and the cut."""
    found = Swept(asked, Path())
    found.check()
    whose, by = asked.data
    cost = found.cost() if found.billed else {"epsilon": None}
    told = {"cells": [place.cell.words for place in found.places], "data": whose, "declared_by": by, **cost}
    made = {**told, "billed": found.billed}
    return told, "\n".join([*told["cells"], guarantee(made), *(f"{n}: {rows}" for n, rows in found.rows_used.items())])
