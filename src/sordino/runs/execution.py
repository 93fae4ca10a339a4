"""Run a configuration into a folder, or continue the run that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sordino import codec
from sordino.config import Config
from sordino.data.task import Task
from sordino.engines.base import Engine
from sordino.engines.distributed import Distributed
from sordino.engines.inprocess import InProcess, known_device
from sordino.engines.ranks import local_rank
from sordino.errors import BudgetError, ConfigError
from sordino.plan import State
from sordino.privacy.certificate import Declared, Facts, priced
from sordino.rng import Mode, streams
from sordino.run import Round, check, run
from sordino.runs.folder import RunFolder
from sordino.training import DIAGNOSTIC, entry, final_model, model_bytes

OnRound = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Executed:
    """What a finished run shows."""

    path: Path
    history: list[dict[str, Any]]
    certificate: dict[str, Any]


def execute(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    engine: Engine | None = None,
    on_round: OnRound | None = None,
) -> Executed:
    """Every mistake is found before the first byte is written. A rank other than 0 serves, and never returns."""
    engine = engine or InProcess()
    task = config.build()
    check(config.plan, task, engine)
    if isinstance(engine, Distributed) and not engine.leads:
        engine.prepare(config.plan, task, streams(config.privacy.noise, config.run.seed))
    config.check_budget()
    priced(config.plan, Facts(config.delta, config.privacy.noise, config.plan.rounds, deltas=config.deltas))
    public = config.task.declared(task)
    folder = _continued(config, path, public) if resume and path.exists() else RunFolder.create(path, config, public)
    with folder.locked():
        return _rounds(config, task, folder, engine, on_round or (lambda line: None))


def _continued(config: Config, path: Path, public: tuple[Declared, ...]) -> RunFolder:
    folder = RunFolder.open(path)
    if codec.digest(folder.config()) != codec.digest(config):
        raise ConfigError(
            f"a configuration that is not the one {path} was started with",
            "the same one",
            f"resume with {path / 'plan.toml'}, or start anew in another --out",
        )
    if folder.public() != public:
        found = f"other public test rows than the run in {path} was started with"
        raise ConfigError(found, "the same data", "restore the data, or start anew in another --out")
    return folder


def _rounds(config: Config, task: Task, folder: RunFolder, engine: Engine, show: OnRound) -> Executed:
    plan, state = config.plan, folder.state() or State.initial(config.plan, task.layout.flatten(task.model))
    folder.rewind(state.t)
    refused: BudgetError | None = None
    try:
        for done in _remaining(config, task, folder, engine, state):
            state = done.state
            _keep(folder, done, show, config.privacy.noise)
    except BudgetError as error:
        refused = error
    made = folder.finish(model_bytes(final_model(plan, task, state)))
    if refused is not None:
        raise BudgetError(f"stopped after round {state.t}: {refused}; model and certificate are in {folder.path}")
    return Executed(folder.path, folder.history(), made)


def _remaining(config: Config, task: Task, folder: RunFolder, engine: Engine, state: State) -> Iterator[Round]:
    """The rounds that are left; what earlier rounds spent of a client's budget stays spent."""
    budget = config.budget
    if budget is not None:
        for t, cohort in zip(folder.rounds(), folder.cohorts(), strict=True):
            budget.count(cohort, t)
    source = streams(config.privacy.noise, config.run.seed)
    every = config.run.eval_every
    return run(
        config.plan, task, engine=engine, streams=source, charges=folder, state=state, budget=budget, eval_every=every,
        announce=partial(folder.announce, state.t),
    )  # fmt: skip


def _keep(folder: RunFolder, done: Round, show: OnRound, noise: Mode) -> None:
    """History, then the checkpoint: a kill between them costs a line that `rewind` drops.

    Diagnostics of a run for release are shown to whoever runs it and never written (PRIVACY rule 11).
    """
    line = entry(done)
    folder.record({name: value for name, value in line.items() if noise == "simulation" or name != DIAGNOSTIC})
    folder.save(done.state)
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
