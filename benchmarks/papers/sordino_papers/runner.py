"""Run cells and studies: seeds side by side, those that are kept already not again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Protocol

from sordino.certificate.build import headline
from sordino.codec import nearest
from sordino.data.clients import Records
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError
from sordino.loop import Round, run
from sordino.outcome import final_model
from sordino.rng import Seeded
from sordino.task import evaluate
from sordino_papers import kept
from sordino_papers.cells import Cell, Job, Result, Table, index
from sordino_papers.studies import Study, instructions, processes
from sordino_papers.tables import STUDIES, TABLES

DIGITS = 6  # of a percentage; 10,000 test images need two


def chosen(name: str) -> tuple[Cell, ...]:
    """The cells of an id: one, or a whole table."""
    known = index(TABLES)
    if name not in known:
        ids = [*known, *(one.id for one in STUDIES)]
        raise ConfigError(f"id {name!r}", "an id of 'sordino papers list', or all", nearest(name, ids))
    return known[name]


def wanted(name: str, full: bool = False) -> tuple[tuple[Table, ...], tuple[Study, ...]]:
    """The tables (a cell: its table with that cell only) and studies of an id; `all` is what two cores can run."""
    if name == "all":
        return tuple(table for table in TABLES if not table.full), STUDIES
    one = study(name)
    if one is not None:
        return (), (one,)
    cells = chosen(name)
    (table,) = [table for table in TABLES if cells[0] in table.cells]
    if table.full and not full:
        found = f"{name} without --full"
        raise ConfigError(found, f"--full: it takes about {table.hours} (an estimate)", "see 'sordino papers list'")
    return (replace(table, cells=cells),), ()


# ---- one run ---------------------------------------------------------------------------------------------------------


def one_seed(name: str, seed: int, device: str = "cpu") -> Result:
    """One run of one cell: its accuracy, and every figure that is kept beside it."""
    (cell,) = chosen(name)
    job, began = cell.build(seed), time.perf_counter()
    picked = _paper_protocol(job) if job.validation is not None else None
    last: Round | None = None
    how: Any = {"engine": InProcess(device=device), "eval_every": job.plan.rounds, "train_metrics": job.train}
    for last in run(job.plan, job.task, streams=Seeded(seed), **how):
        if picked is not None:
            picked(last)
    assert last is not None
    figures = _figures(job, last) | ({"protocol": 100 * picked.best} if picked is not None else {})
    figures["seconds"] = round(time.perf_counter() - began, 2)
    return {"seed": seed, "accuracy": last.metrics["accuracy"], "figures": figures, "code": made()}


def made() -> str:
    """What a run's digits hang on: the code, and the instruction set."""
    return f"{kept.code()}, {instructions()}"


def _figures(job: Job, last: Round) -> dict[str, float | None]:
    """The other metrics of the last round, the median norm of its updates, and what the job itself reads off it."""
    figures: dict[str, float | None] = {name: one for name, one in last.metrics.items() if name != "accuracy"}
    figures |= {name: one for name, one in last.diagnostics.items() if name.startswith("train_")}
    if job.plan.unit == "client":
        figures["update_norm"] = last.diagnostics.get("update_norm_p50")  # the median: a few clients diverge
    return figures | dict(job.figures(last) if job.figures is not None else {})


class _paper_protocol:  # noqa: N801
    """Paper 000's way: the first 1,010 test images at the round with the best validation accuracy."""

    def __init__(self, job: Job) -> None:
        assert job.validation is not None
        assert job.task.test is not None
        self.job, self.top, self.best = job, -1.0, 0.0
        self.first = Records(job.task.test.x[:1010], job.task.test.y[:1010])

    def __call__(self, done: Round) -> None:
        model = final_model(self.job.plan, self.job.task, done.state)
        assert self.job.validation is not None
        score = evaluate(model, self.job.validation, self.job.task.losses)["accuracy"]
        if score > self.top:
            self.top, self.best = score, evaluate(model, self.first, self.job.task.losses)["accuracy"]


# ---- all seeds of a cell ---------------------------------------------------------------------------------------------


def known(cell: Cell) -> Result:
    """What is known of a cell before it runs: the hash of its settings, its delta, and the epsilon of its bill."""
    job = cell.build(0)
    line = headline(job.plan.cost().of("models"), job.delta)
    return {
        "settings": job.settings,
        "delta": job.delta,
        "epsilon": line["epsilon"],
        "relation": line["relation"],
        "epsilon_claimed": cell.claimed,
        "published": cell.published,
    }


def summary(cell: Cell, runs: list[Result], facts: Result | None = None) -> Result:
    """Mean and spread over seeds, beside what was published; epsilon as claimed and as it is; figures seed by seed."""
    values = [100 * result["accuracy"] for result in runs]
    names = dict.fromkeys(name for result in runs for name in result["figures"])
    figures = {name: [_short(result["figures"].get(name)) for result in runs] for name in names}
    return {
        "id": cell.id,
        "title": cell.title,
        "ours": round(mean(values), 2),
        "spread": round(stdev(values), 2) if len(values) > 1 else None,
        "seeds": len(values),
        "values": [round(value, DIGITS) for value in values],
        "figures": figures,
        **(facts or known(cell)),
        "code": [result["code"] for result in runs],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")


@dataclass
class Ask:
    """What is wanted of a run of cells: how many seeds, where, and what is kept already."""

    seeds: int | None = None
    workers: int = 2
    folder: Path | None = None  # where results are kept
    again: bool = False  # run seeds anew that are kept
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)  # what there is to say, a sentence each

    def have(self, cell: Cell, settings: str) -> list[Result]:
        """The seeds that need not be run."""
        old = kept.recalled(self.folder, cell.id) if self.folder is not None and not self.again else None
        if old is None:
            return []
        notice = kept.stale(old, settings, self.device)
        if notice is not None:
            self.notes.append(notice)
            return []
        return kept.seed_by_seed(old)


class Pool(Protocol):
    """Whoever runs a seed for us."""

    def submit(self, work: Callable[..., Result], name: str, seed: int, device: str, /) -> Future[Result]: ...


def run_cells(cells: tuple[Cell, ...], ask: Ask, pool: Pool | None = None) -> Iterator[Result]:
    """All cells, seeds side by side; results in the order of the table."""
    with processes(ask.workers) if pool is None else nullcontext(pool) as hands:
        for cell, facts, runs, jobs in [_begun(hands, cell, ask) for cell in cells]:
            yield summary(cell, [*runs, *(job.result() for job in jobs)], facts)


def _begun(pool: Pool, cell: Cell, ask: Ask) -> tuple[Cell, Result, list[Result], list[Future[Result]]]:
    """A cell with what is known of it, its runs that are there already, and those that are on their way."""
    facts = known(cell) | {"device": ask.device}
    runs = ask.have(cell, facts["settings"])
    missing = range(len(runs), ask.seeds or cell.seeds)
    return cell, facts, runs, [pool.submit(one_seed, cell.id, seed, ask.device) for seed in missing]


# ---- studies ---------------------------------------------------------------------------------------------------------


def study(name: str) -> Study | None:
    """The study of this id, if it is one."""
    return next((one for one in STUDIES if one.id == name), None)


def run_study(one: Study, repeats: int | None, workers: int) -> Result:
    """Measure, and say how long it took: by the clock, and in seconds of one core, which other work does not change."""
    began, worked, count = time.perf_counter(), sum(os.times()[:4]), repeats or one.repeats
    rows = one.rows(count, workers)
    took = {"seconds": time.perf_counter() - began, "core_seconds": sum(os.times()[:4]) - worked}  # children included
    took = {name: round(value, 1) for name, value in took.items()}
    return {"id": one.id, "title": one.title, "repeats": count, "rows": rows, **took, "code": made()}
