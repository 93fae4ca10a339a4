"""Run a configuration into a folder, or continue the run that is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import codec
from sordino.certificate import signature
from sordino.certificate.earlier_runs import cost_of, of_certificate
from sordino.codec import durable_files
from sordino.codec.durable_files import SAFE
from sordino.config import Config
from sordino.data import lineage
from sordino.data.named_fields import unwrapped_model
from sordino.engines.base import Deployed, Engine
from sordino.engines.distributed import Distributed
from sordino.engines.group import local_rank
from sordino.engines.inprocess import InProcess, known_device
from sordino.engines.prepare import known, said, scaled
from sordino.errors import BudgetError, ConfigError, StorageError
from sordino.loop import check
from sordino.outcome import declared_public, final_model, model_bytes
from sordino.plan import State
from sordino.runs import admission, receipts
from sordino.runs.fingerprint import Fingerprint
from sordino.runs.folder import PREPARED, RunFolder
from sordino.runs.resume import Resumed
from sordino.runs.resume import resume as resumed
from sordino.runs.rounds import OnRound, RunStart, check_run, run_rounds, single_class_note
from sordino.runs.writer import create_folder
from sordino.task import Task

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@codec.hides_values
@dataclass(frozen=True)
class Executed:
    """What a finished run shows; `notes` are what its owner should know of it. The model, where it is here."""

    path: Path
    history: list[dict[str, Any]]
    certificate: dict[str, Any]
    notes: tuple[str, ...] = ()
    model: nn.Module | None = None


def execute(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    engine: Engine | None = None,
    on_round: OnRound | None = None,
    sign: Path | None = None,
    task: Task | None = None,
    tried: bool = False,
) -> Executed:
    """Every mistake is found before the first byte is written. A rank other than 0 serves, and never returns.

    `task` stands in for the data that the file names, where they are not here: a server's holds no record.
    `tried`: the tuning that the file names runs it, and has paid for it; by itself such a file is not run.
    """
    if not tried:
        config.check_alone()
    engine = engine or InProcess()
    notes = () if task is not None else config.look()
    task = task or config.build()
    if isinstance(engine, Distributed) and not engine.leads:
        check(config.plan, task, engine)
        engine.prepare(config.plan, task, config.streams)
    check_run(config, task, engine)
    key = None if sign is None else signature.private_key(sign)
    there = resume and path.exists()
    if not there:
        admission.check_affordable(config)
    folder = (
        RunFolder.open(path, config)
        if there
        else create_folder(path, config, Fingerprint.of(task), declared_public(task), earlier=earlier_runs(task))
    )
    with folder.locked(), _enough_memory():
        start = resumed(folder, config, task)
        held, again = start.held, start.state is None or not known(start.state)
        t = 0 if start.state is None else start.state.t
        finish = partial(start.book.finish, sign=None if key is None else partial(signature.sign, key=key))
        with admission.admit(config, held.header.run, held.chain, t, prepares=again) as admitted:
            start.book.admission = admitted
            done = _finished(config, task, start, engine, on_round, finish)
        return replace(done, notes=(*notes, *_elsewhere(admitted), *done.notes))


def _elsewhere(admitted: admission.Admission | None) -> tuple[str, ...]:
    """What other copies of the run's folder have released: paid for too, and not on this folder's certificate."""
    if admitted is None or not admitted.elsewhere:
        return ()
    return (f"{admitted.elsewhere} releases of this run came from another copy of its folder; the ledger has both",)


def _finished(
    config: Config,
    task: Task,
    start: Resumed,
    engine: Engine,
    show: OnRound | None,
    finish: Callable[[bytes], dict[str, Any]],
) -> Executed:
    """What is left of the run, then model and certificate."""
    folder, budget = start.book.folder, config.budget
    if budget is not None:  # what earlier rounds spent of a client's budget stays spent
        budget = receipts.filter_after_charges(
            folder.path, config.plan, budget, start.held.chain, isinstance(engine, Deployed)
        )
    if isinstance(engine, Deployed):
        engine = engine.of_run(start.held.header.run, receipts.last(folder.path, config.plan, start.held.chain))
    begun = RunStart(start.book, start.state, tuple(folder.history()), budget, start.refused)
    state, refused = run_rounds(config, task, begun, engine, show)
    model = final_model(config.plan, task, state)
    before = start.held.header.earlier
    attach_lineage(model, config, before)
    write_preparations(folder.path, config, task, state)
    made = finish(model_bytes(model))
    register_lineage(model, task, (*before, of_certificate(made, start.held.header.run, lineage.IN_PROCESS)))
    if refused is not None:
        raise BudgetError(f"stopped after round {state.t}: {refused}; model and certificate are in {folder.path}")
    history = folder.history()
    return Executed(folder.path, history, made, (*start.notes, *single_class_note(history)), model)


def records_here(task: Task) -> tuple[Tensor, ...]:
    """The clients' records by which a task's data are known again; nothing where they are elsewhere."""
    return () if task.clients.here is not None else (task.clients.records.x, task.clients.records.y)


def earlier_runs(task: Task) -> lineage.Runs:
    """The runs that the weights of a task come from, by its module or its file."""
    return lineage.runs_of_model(task.model, records_here(task), () if task.init is None else task.init.earlier)


def attach_lineage(model: nn.Module, config: Config, before: lineage.Runs) -> None:
    """Let a run's model, and its file, say where it comes from: this run as planned, after those before it."""
    plan = config.plan
    planned = cost_of(plan.forecast, config.delta, f"plan {plan.hash[:16]}", lineage.IN_FILE)
    lineage.attach_lineage(model, (*before, planned), lineage.lineage_note(planned, before))


def register_lineage(model: nn.Module, task: Task, runs: lineage.Runs) -> None:
    """A run is over: its model carries what it has cost, and is known again in this process."""
    lineage.attach_lineage(model, runs, lineage.file_metadata(model)[lineage.FILE_KEY])
    lineage.register_run(model, lineage.tensor_hashes(unwrapped_model(task.model)), runs, records_here(task))


def write_preparations(path: Path, config: Config, task: Task, state: State) -> None:
    """What was released of columns before the first round: with it new rows are prepared as the model's were."""
    if config.plan.prepare:
        durable_files.write(path / PREPARED, json.dumps(said(task, state), indent=1).encode() + b"\n")


def with_released_columns(task: Task, folder: Path) -> Task:
    """The task as a run's rounds saw it: columns scaled by what the run has released of them."""
    if not task.waiting:
        return task
    told = json.loads(durable_files.read(folder / PREPARED))
    return scaled(task, {name: np.asarray(one["noised_histogram"]) for name, one in told.items()})


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Memory that runs out is a sentence: the folder is as after a kill."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in _NO_MEMORY):
            raise
        found = f"no memory left ({str(error).splitlines()[0] if str(error) else 'MemoryError'})"
        fix = f"free some, or use a smaller model or cohort, and add --resume: {SAFE}"
        raise StorageError(found, "room for the clients that are computed at once", fix) from None


def named_engine(name: str, threads: int, timeout: float = 3600.0, device: str = "cpu") -> Engine:
    """An engine by its name on the command line; one thread unless told otherwise (two that fight are far slower)."""
    known = ["inprocess", "distributed"]
    if name not in known:
        raise ConfigError(f"--engine {name}", "a known engine", codec.nearest(name, known))
    if threads < 1:
        raise ConfigError(f"--threads {threads}", "at least 1")
    if not timeout > 0:
        raise ConfigError(f"--timeout {timeout:g}", "seconds above 0")
    torch.set_num_threads(threads)
    known_device(device)
    if name == "inprocess":
        return InProcess(device=device)
    own = f"cuda:{local_rank()}" if device == "cuda" else device  # each process its own
    return Distributed(InProcess(device=own), threads, timeout)
