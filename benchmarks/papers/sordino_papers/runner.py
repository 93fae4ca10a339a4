"""Run cells, keep results, render the page: ours beside theirs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from sordino.codec import nearest
from sordino.data.task import Records, evaluate
from sordino.errors import ConfigError
from sordino.privacy.certificate import headline
from sordino.rng import Seeded
from sordino.run import Round, run
from sordino.training import final_model
from sordino_papers.cells import Cell, Job, index
from sordino_papers.studies import Study
from sordino_papers.tables import STUDIES, TABLES

Result = dict[str, Any]


def chosen(name: str) -> tuple[Cell, ...]:
    """The cells of an id: one, or a whole table."""
    known = index(TABLES)
    if name not in known:
        ids = [*known, *(one.id for one in STUDIES)]
        raise ConfigError(f"id {name!r}", "an id of 'sordino papers list'", nearest(name, ids))
    return known[name]


def one_seed(name: str, seed: int) -> Result:
    """One run of one cell."""
    (cell,) = chosen(name)
    job, began = cell.build(seed), time.perf_counter()
    every = 1 if job.validation is not None else job.plan.rounds
    rounds = run(job.plan, job.task, streams=Seeded(seed), eval_every=job.plan.rounds)
    picked = _paper_protocol(job) if every == 1 else None
    last: Round | None = None
    for last in rounds:
        if picked is not None:
            picked(last)
    assert last is not None
    figures = dict(last.metrics)
    clients = job.plan.unit == "client"
    norms = last.diagnostics.get("update_norm_p50") if clients else None  # the median: a few clients diverge
    protocol = picked.best if picked is not None else None
    return {"seed": seed, **figures, "update_norm": norms, "protocol": protocol, "seconds": time.perf_counter() - began}


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


def summary(cell: Cell, runs: list[Result]) -> Result:
    """Mean and spread over seeds, beside what was published; epsilon as claimed and as it is."""
    job = cell.build(0)
    line = headline(job.plan.bill().of("models"), job.delta)
    values = [100 * result["accuracy"] for result in runs]
    norms = [result["update_norm"] for result in runs if result["update_norm"] is not None]
    protocol = [100 * result["protocol"] for result in runs if result["protocol"] is not None]
    return {
        "id": cell.id,
        "title": cell.title,
        "published": cell.published,
        "ours": round(mean(values), 2),
        "spread": round(stdev(values), 2) if len(values) > 1 else None,
        "values": [round(value, 2) for value in values],
        "paper_protocol": round(mean(protocol), 2) if protocol else None,
        "update_norm": round(mean(norms), 4) if norms else None,
        "epsilon_claimed": cell.claimed,
        "epsilon": line["epsilon"],
        "delta": job.delta,
        "relation": line["relation"],
        "seeds": len(values),
        "seconds": round(sum(result["seconds"] for result in runs), 1),
    }


def _quiet() -> None:
    torch.set_num_threads(1)


def run_cells(name: str, seeds: int | None, workers: int, tell: Callable[[Result], None]) -> list[Result]:
    """All cells of an id, seeds side by side; results in the order of the table."""
    cells = chosen(name)
    return list(_results(cells, seeds, workers, tell))


def _results(
    cells: tuple[Cell, ...], seeds: int | None, workers: int, tell: Callable[[Result], None]
) -> Iterator[Result]:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        jobs = {c.id: [pool.submit(one_seed, c.id, s) for s in range(seeds or c.seeds)] for c in cells}
        for cell in cells:
            found = summary(cell, [job.result() for job in jobs[cell.id]])
            tell(found)
            yield found


def study(name: str) -> Study | None:
    """The study of this id, if it is one."""
    return next((one for one in STUDIES if one.id == name), None)


def run_study(one: Study, repeats: int | None, workers: int) -> Result:
    """Measure, judge, and say how long it took."""
    began = time.perf_counter()
    rows = one.rows(repeats or one.repeats, workers)
    seconds = round(time.perf_counter() - began, 1)
    return {"id": one.id, "title": one.title, "rows": rows, "claims": one.claims(rows), "seconds": seconds}


def store(found: list[Result], folder: Path) -> None:
    """One JSON file per cell."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in found:
        (folder / f"{result['id']}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def stored(folder: Path) -> dict[str, Result]:
    """All results kept so far, by id."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
