"""Run a configuration into a folder, or continue the run that is there. Called by `sordino run` and `train`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from sordino import codec
from sordino.certificate import certificate_file
from sordino.certificate.earlier_runs import cost_of, of_certificate
from sordino.codec import durable_files
from sordino.codec.durable_files import SAFE
from sordino.config import Config
from sordino.data import lineage
from sordino.data.clients import unwrapped_model
from sordino.engines.base import Engine
from sordino.engines.inprocess import InProcess
from sordino.engines.prepare import known, said, scaled
from sordino.errors import BudgetError, StorageError
from sordino.loop import check
from sordino.models import InMemoryModel
from sordino.outcome import final_model, model_bytes
from sordino.plan import State
from sordino.runs import admission, receipts
from sordino.runs.folder import PREPARED
from sordino.runs.resume import resumed
from sordino.runs.rounds import OnRound, RunStart, check_run, run_rounds, single_class_note
from sordino.runs.writer import RunWriter, created
from sordino.task import Task

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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
    notes = () if task is not None or isinstance(config.task.model, InMemoryModel) else config.look()
    task = task or config.build()
    if not engine.leads:
        check(config.plan, task, engine)
        engine.prepare(config.plan, task, config.streams)
    check_run(config, task, engine)
    key = None if sign is None else certificate_file.private_key(sign)
    with ExitStack() as held:
        if resume and path.exists():
            writer, start = held.enter_context(resumed(path, config, task))
        else:
            if config.privacy.ledger is not None:
                admission.check_affordable(config)
            writer = held.enter_context(created(path, config, task, earlier_runs(task)))
            start = RunStart(writer)
        held.enter_context(_enough_memory())
        if config.privacy.ledger is not None:
            prepares = start.state is None or not known(start.state)
            t = 0 if start.state is None else start.state.t
            admitted = admission.admit(config, writer.header.run, writer.log, t, prepares=prepares)
            writer.admission = held.enter_context(admitted)
        done = _run_to_end(config, task, writer, start, engine, on_round, key)
        if writer.admission is not None and writer.admission.elsewhere:
            count = writer.admission.elsewhere
            notes += (f"{count} releases of this run came from another copy of its folder; the ledger has both",)
        return replace(done, notes=(*notes, *done.notes))


def _run_to_end(
    config: Config,
    task: Task,
    writer: RunWriter,
    start: RunStart,
    engine: Engine,
    show: OnRound | None,
    key: Ed25519PrivateKey | None,
) -> Executed:
    folder, plan, budget = writer.folder, config.plan, config.budget
    if budget is not None:  # what earlier rounds took of a client's budget stays taken
        budget = receipts.filter_after_charges(folder.path, plan, budget, writer.log, engine.deployed)
    if engine.deployed:
        engine = engine.for_run(writer.header.run, receipts.last_counts(folder.path, plan, writer.log))
    state, refused = run_rounds(config, task, replace(start, budget=budget), engine, show)
    model, before = final_model(plan, task, state), writer.header.earlier
    attach_lineage(model, config, before)
    if plan.prepare:
        write_preparations(folder.path, task, state)
    made = writer.finish(model_bytes(model), None if key is None else partial(certificate_file.sign, key=key))
    register_lineage(model, task, (*before, of_certificate(made, writer.header.run, lineage.IN_PROCESS)))
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


def write_preparations(path: Path, task: Task, state: State) -> None:
    """The noised histograms of columns, released before round 1: new rows are scaled by them as the model's were."""
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
