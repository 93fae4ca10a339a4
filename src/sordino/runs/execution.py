"""Run a configuration into a folder, or continue the run that is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sordino import codec
from sordino.config import Config
from sordino.data.task import Task
from sordino.engines.base import Deployed, Engine
from sordino.engines.distributed import Distributed
from sordino.engines.inprocess import InProcess, known_device
from sordino.engines.preparing import begin, known, said
from sordino.engines.ranks import local_rank
from sordino.errors import BudgetError, CertificateError, ConfigError, StorageError
from sordino.plan import State
from sordino.privacy.certificate import priced
from sordino.rng import Mode
from sordino.run import Round, check, run
from sordino.runs import ending, files, purse, receipts, signature
from sordino.runs.book import Book, create
from sordino.runs.files import SAFE
from sordino.runs.fingerprint import Fingerprint
from sordino.runs.folder import PREPARED, RunFolder
from sordino.runs.resume import Resumed
from sordino.runs.resume import resume as resumed
from sordino.training import DIAGNOSTIC, entry, final_model, model_bytes

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
OnRound = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Executed:
    """What a finished run shows; `notes` are what its owner should know of the data, and of how it was continued."""

    path: Path
    history: list[dict[str, Any]]
    certificate: dict[str, Any]
    notes: tuple[str, ...] = ()


def execute(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    engine: Engine | None = None,
    on_round: OnRound | None = None,
    sign: Path | None = None,
    task: Task | None = None,
) -> Executed:
    """Every mistake is found before the first byte is written. A rank other than 0 serves, and never returns.

    `task` stands in for the data that the file names, where they are not here: a server's holds no record.
    """
    engine = engine or InProcess()
    notes = () if task is not None else config.look()
    task = task or config.build()
    check(config.plan, task, engine)
    if isinstance(engine, Distributed) and not engine.leads:
        engine.prepare(config.plan, task, config.streams)
    config.check_budget()
    priced(config.plan, config.delta, config.deltas)
    key = None if sign is None else signature.private_key(sign)
    there = resume and path.exists()
    if not there:
        purse.consider(config)
    folder = (
        RunFolder.open(path, config)
        if there
        else create(path, config, Fingerprint.of(task), config.task.declared(task))
    )
    with folder.locked(), _enough_memory():
        start = resumed(folder, config, task)
        held, again = start.held, start.state is None or not known(start.state)
        prepared = held.chain.prepared + again
        purse.admit(config, held.header.run, held.chain.rounds, 0 if start.state is None else start.state.t, prepared)
        finish = partial(start.book.finish, sign=None if key is None else partial(signature.sign, key=key))
        done = _rounds(config, task, start, engine, on_round or (lambda line: None), finish)
        return replace(done, notes=(*notes, *done.notes))


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


def _rounds(
    config: Config, task: Task, start: Resumed, engine: Engine, show: OnRound, finish: Callable[[bytes], dict[str, Any]]
) -> Executed:
    plan, book = config.plan, start.book
    engine = engine.of_run(start.held.header.run) if isinstance(engine, Deployed) else engine
    first = State.initial(plan, task.layout.flatten(task.model))
    state = _prepared(config, task, book, _fitting(start.state, first))
    refused = start.refused
    try:
        for done in () if refused else _remaining(config, task, start, engine, state):
            state = done.state
            _keep(book, done, show, config.privacy.noise)
    except BudgetError as error:
        refused = error
        ending.note(book.folder.path, plan, error.refused, book.config, book.head)
    if plan.prepare:
        files.write(book.folder.path / PREPARED, json.dumps(said(task, state), indent=1).encode() + b"\n")
    made = finish(model_bytes(final_model(plan, task, state)))
    path = book.folder.path
    if refused is not None:
        raise BudgetError(f"stopped after round {state.t}: {refused}; model and certificate are in {path}")
    return Executed(path, book.folder.history(), made, start.notes)


def _prepared(config: Config, task: Task, book: Book, state: State) -> State:
    """Preparations are charged, released and kept before the first round: a run that is continued reads them."""
    if not config.plan.prepare or known(state):
        return state
    if config.budgeted and book.charged:
        found = "preparations that a kill has lost after they were charged, and a budget that paid for them once"
        raise ConfigError(found, "all of them", "start anew in another --out: what was charged stays spent")
    state = begin(config.plan, task, config.streams, book.charge, state)[1]
    book.save(state)
    return state


def _fitting(found: State | None, first: State) -> State:
    """The checkpoint's state, if this plan's server and release can have written it."""
    if found is None:
        return first
    for who, kept, wanted in (("server", found.memory, first.memory), ("release", found.noise, first.noise)):
        shapes = [{name: (held.shape, held.dtype) for name, held in memory.items()} for memory in (kept, wanted)]
        if shapes[0] != shapes[1]:
            raise CertificateError("checkpoint", f"the checkpoint does not hold what this plan's {who} remembers")
    return found


def _remaining(config: Config, task: Task, start: Resumed, engine: Engine, state: State) -> Iterator[Round]:
    """The rounds that are left; what earlier rounds spent of a client's budget stays spent."""
    budget = config.budget
    if budget is not None:
        path, elsewhere = start.book.folder.path, isinstance(engine, Deployed)
        budget = receipts.counted(path, config.plan, budget, start.held.chain, elsewhere)
    source = config.streams
    every = config.run.eval_every
    return run(
        config.plan, task, engine=engine, streams=source, charges=start.book, state=state, budget=budget,
        eval_every=every, train_metrics=bool(config.run.train_metrics), announce=partial(start.book.announce, state.t),
    )  # fmt: skip


def _keep(book: Book, done: Round, show: OnRound, noise: Mode) -> None:
    """History, then the checkpoint: a kill between them costs a line that `resume` drops.

    Diagnostics of a run for release are shown to whoever runs it and never written (PRIVACY rule 11).
    """
    line = entry(done)
    book.record({name: value for name, value in line.items() if noise == "simulation" or name != DIAGNOSTIC})
    book.save(done.state)
    show(line)


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
