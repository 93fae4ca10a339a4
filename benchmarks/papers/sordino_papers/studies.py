"""Studies: curves rather than cells. A study returns rows, a plot of them, and the claims they settle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

import torch

from sordino_papers.verdicts import fact

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """`rows(repeats, workers)` measures; `claims(rows)` judges; `draw(rows, path)` plots.

    Claims are rows of `verdicts`; they are made from the kept rows whenever they are shown, and never kept. `chosen`
    says which data chose which hyper-parameter. `quick()` computes one cheap row again, with the keys of a kept one and
    `measure` as its number (seed 0 alone, or several seeds `gathered`): `papers run all --quick` compares the two.
    """

    id: str
    title: str
    about: str
    rows: Callable[[int, int], list[Row]]
    claims: Callable[[list[Row]], list[Row]]
    draw: Callable[[list[Row], Path], None]
    repeats: int = 5
    chosen: str = ""
    quick: Callable[[], Row] | None = None
    measure: str = ""


def claim(text: str, measured: str, holds: bool) -> Row:
    """A sentence of the paper, what we saw, and whether it held."""
    return fact(text, measured, bool(holds))


INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def processes(workers: int) -> ProcessPoolExecutor:
    """Processes of one thread and one instruction set each, so that a net's figures come out again on other machines.

    A processor with wider vectors adds in another order: 000-small's cells moved by up to 1.3 points between AVX2 and
    AVX-512. Variables that are set already stay; a processor without AVX2 takes what it has.
    """
    for name, value in INSTRUCTIONS.items():
        os.environ.setdefault(name, value)  # read by torch when a new process begins
    return ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


def instructions() -> str:
    """What torch computes with in `processes`, or here before there were any."""
    return os.environ.get("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability()).upper()


def as_they_come(work: Callable[..., T], jobs: Sequence[tuple[Any, ...]], workers: int) -> Iterator[T]:
    """work(*job) for all jobs in `processes`; results in order, each once it is there."""
    with processes(workers) as pool:
        for done in [pool.submit(work, *job) for job in jobs]:
            yield done.result()


def side_by_side(work: Callable[..., T], jobs: Sequence[tuple[Any, ...]], workers: int) -> list[T]:
    """All results of `as_they_come`."""
    return list(as_they_come(work, jobs, workers))


def gathered(rows: Sequence[Row], keys: Sequence[str], value: str) -> list[Row]:
    """Mean and spread of `value` over rows that agree in `keys`, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(float(row[value]))
    return [
        {
            **dict(zip(keys, group, strict=True)),
            value: float(f"{mean(values):.6g}"),
            "spread": float(f"{stdev(values):.3g}") if len(values) > 1 else None,
            "repeats": len(values),
            "values": [float(f"{one:.6g}") for one in values],  # in the order of seeds, for paired verdicts
        }
        for group, values in groups.items()
    ]


def picked(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Rows whose entries are as wanted."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def value(rows: Sequence[Row], name: str, **wanted: Any) -> float:
    """The entry of the one row that is as wanted."""
    (row,) = picked(rows, **wanted)
    return float(row[name])
