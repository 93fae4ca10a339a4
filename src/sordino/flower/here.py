"""`sordino run fed.toml --engine flower`: the plan over Flower on this machine, every silo a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from sordino import codec
from sordino.config import Config, FederationSpec
from sordino.errors import ConfigError, EngineError
from sordino.flower.internals import flower
from sordino.flower.loopback import Loopback
from sordino.flower.new import write_federation
from sordino.flower.post import SiloSpec
from sordino.runs.execution import Executed
from sordino.runs.folder import RunFolder

LOADING = 300.0  # seconds that all processes may take to come up and to load
PULSE = 0.2
OnRound = Callable[[dict[str, Any]], None]


def federated(config: Config) -> Config:
    """The file with a federation: its own, or one whose silos are the plan's clients."""
    if config.federation is not None:
        return config
    names = config.task.silos or tuple(f"silo{i}" for i in range(config.plan.clients.population))
    return replace(config, federation=FederationSpec(silos=names))


def home_of(out: Path) -> Path:
    """Where silos keep their ledgers, and the federation its keys and logs: beside the run's folder."""
    return out.absolute().with_name(f"{out.name}-federation")


def run_here(config: Config, out: Path, *, resume: bool = False, on_round: OnRound | None = None) -> Executed:
    """Build the federation's folder, bring it to life, hand in the app, and wait for the certificate."""
    flower()
    config, out = federated(config), out.absolute()
    assert config.federation is not None
    home = home_of(out)
    if not resume and (out.exists() or home.exists()):
        there = out if out.exists() else home
        raise ConfigError(f"{there}, which exists", "a new folder", "choose another --out, or add --resume")
    if not home.exists():
        make(config, home)
    with Loopback(home / "app", config.federation.silos, home) as federation:
        federation.up()
        federation.submit(out, resume=resume and out.exists())
        wait(federation, out, config, on_round or (lambda line: None))
    folder = RunFolder.open(out)
    return Executed(out, folder.history(), json.loads((out / "certificate.json").read_text()))


def make(config: Config, home: Path) -> None:
    """The folder of `sordino federation new`, whose silos cut their rows out of the file's own data set."""
    write_federation(home / "app", config, codec.to_toml(config))
    for name in config.federation.silos if config.federation else ():
        file = home / "app" / "silos" / name / "silo.toml"
        spec = SiloSpec.read(file.parent)
        file.write_text(tomli_w.dumps(codec.dump(replace(spec, simulated=True, group="", secret=""))))


def wait(federation: Loopback, out: Path, config: Config, show: OnRound) -> None:
    """Until the certificate is there; a sentence of the server's, or a silence that is too long, is an error."""
    assert config.federation is not None
    spec, log, shown = config.federation, out.with_name(f"{out.name}.log"), 0
    began = log.stat().st_size if log.exists() else 0
    until = time.monotonic() + LOADING + spec.tries * spec.timeout
    while not (out / "certificate.json").exists():
        federation.check()
        said = log.read_text("utf-8")[began:].splitlines() if log.exists() else []
        wrong = next((line for line in said if line.startswith("sordino: ") and "certificate.json" not in line), None)
        if wrong is not None:
            raise EngineError(f"a run that stopped: {wrong.removeprefix('sordino: ')}")
        lines = history(out)
        for line in lines[shown:]:
            show(line)
        if len(lines) > shown:
            shown, until = len(lines), time.monotonic() + LOADING + spec.tries * spec.timeout
        if time.monotonic() > until:
            raise EngineError(f"a run that says nothing ({federation.last_words('superlink')})", "add --resume")
        time.sleep(PULSE)
    for line in history(out)[shown:]:
        show(line)


def history(out: Path) -> list[dict[str, Any]]:
    """The whole lines of a history that is being written."""
    file = out / "history.jsonl"
    text = file.read_text("utf-8") if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
