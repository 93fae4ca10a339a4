"""Run a configuration into a folder, or continue the run that is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sordino import codec
from sordino.config import Config
from sordino.data.task import Task
from sordino.engines.base import Engine
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError
from sordino.folder import RunFolder
from sordino.plan import State
from sordino.rng import streams
from sordino.run import check, run
from sordino.training import entry, final_model, model_bytes


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
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Executed:
    """Every mistake is found before the first byte is written."""
    engine = engine or InProcess()
    task = config.build()
    check(config.plan, task, engine)
    folder = _continued(config, path) if resume and path.exists() else RunFolder.create(path, config)
    with folder.locked():
        return _rounds(config, task, folder, engine, on_round or (lambda line: None))


def _continued(config: Config, path: Path) -> RunFolder:
    folder = RunFolder.open(path)
    if codec.digest(folder.config()) != codec.digest(config):
        raise ConfigError(
            f"a configuration that is not the one {path} was started with",
            "the same one",
            f"resume with {path / 'plan.toml'}, or start anew in another --out",
        )
    return folder


def _rounds(
    config: Config, task: Task, folder: RunFolder, engine: Engine, show: Callable[[dict[str, Any]], None]
) -> Executed:
    plan = config.plan
    state = folder.state() or State.initial(plan, task.layout.flatten(task.model))
    folder.rewind(state.t)
    source, clock = streams(config.privacy.noise, config.run.seed), time.perf_counter()
    for done in run(
        plan, task, engine=engine, streams=source, charges=folder, state=state, eval_every=config.run.eval_every
    ):
        state, now = done.state, time.perf_counter()
        line = {**entry(done), "seconds": round(now - clock, 4)}
        folder.record(line)
        folder.save(state)
        show(line)
        clock = time.perf_counter()
    made = folder.finish(model_bytes(final_model(plan, task, state)))
    return Executed(folder.path, folder.history(), made)


def named_engine(name: str, threads: int) -> Engine:
    """An engine by its name on the command line; one thread unless told otherwise (two that fight are far slower)."""
    if name != "inprocess":
        raise ConfigError(f"--engine {name}", "a known engine", codec.nearest(name, ["inprocess"]))
    if threads < 1:
        raise ConfigError(f"--threads {threads}", "at least 1")
    torch.set_num_threads(threads)
    return InProcess()
