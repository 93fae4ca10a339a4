"""Four hospitals, each with a file of its own, and a public test file: heart disease, or rows of the same shape."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tomli_w
import torch

from sordino.config import Config, load_config
from sordino.data.clients import Clients
from sordino.data.datasets import load
from sordino.federation import keys
from sordino.federation.local_federation import LocalFederation
from sordino.federation.new_federation import new_federation
from sordino.task import Task

SILOS = ("cleveland", "hungarian", "switzerland", "va")
SIZES = (243, 236, 99, 160)
INPUTS = 22
PLAN = """
[plan]
rounds = {rounds}
clients = {clients}
local = {{ kind = "local_sgd", lr = 0.5, epochs = 1, batch = 20 }}
encode = [{{ kind = "clip", clip_norm = 1.0 }}]
release = {release}
server = {{ kind = "sgd" }}
"""
EVERYONE = '{ kind = "everyone", population = 4 }'
POISSON = '{ kind = "poisson", population = 4, rate = 0.75 }'
RELEASES = {
    "no_noise": (EVERYONE, '{ kind = "no_noise" }'),
    "central_noise": (POISSON, '{ kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }'),
    "local_noise": (EVERYONE, '{ kind = "local_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }'),
    "noise_shares": (EVERYONE, '{ kind = "noise_shares", noise_multiplier = 2.0, at_least = 3 }'),
}
RECIPE = """
[recipe]
name = "silo"
rounds = {rounds}
sizes = {{ cleveland = 243, hungarian = 236, switzerland = 99, va = 160 }}

[privacy]
delta = 1e-3
noise = "{noise}"
silos.cleveland = {{ epsilon = 1.0 }}
silos.hungarian = {{ epsilon = 2.0 }}
silos.switzerland = {{ epsilon = 4.0 }}
silos.va = {{ epsilon = 8.0 }}
"""

UNBUDGETED = """
[recipe]
name = "silo"
rounds = {rounds}
sizes = {{ cleveland = 243, hungarian = 236, switzerland = 99, va = 160 }}
epsilons = {{ cleveland = 1.0, hungarian = 2.0, switzerland = 4.0, va = 8.0 }}

[privacy]
delta = 1e-3
noise = "secure"
"""


def real() -> bool:
    """Whether the hospitals' own tables are here."""
    return (Path(os.environ.get("SORDINO_DATA", "")) / "heart_disease").is_dir() and "SORDINO_DATA" in os.environ


def rows() -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
    """x and y of every hospital, and of the public test."""
    if real():
        data = load("heart_disease")
        assert data.groups is not None
        own = [(data.x[data.groups == i], data.y[data.groups == i]) for i in range(4)]
        return own, (data.test_x, data.test_y)
    rng, truth = np.random.default_rng(0), np.random.default_rng(1).standard_normal(INPUTS)
    made = []
    for size in (*SIZES, 182):
        x = rng.uniform(-1, 1, (size, INPUTS)).astype(np.float32)
        made.append((x, (x @ truth + rng.logistic(size=size) / 3 > 0).astype(np.int64)))
    return made[:4], made[4]


def write_rows(folder: Path) -> None:
    """NAME.npz and home/NAME, the key, for every hospital, and test.npz."""
    (folder / "home").mkdir(exist_ok=True)
    for name in SILOS:
        keys.write_node_key(folder / "home" / name)
    own, test = rows()
    for name, (x, y) in zip((*SILOS, "test"), (*own, test), strict=True):
        np.savez(folder / f"{name}.npz", x=x, y=y)


def file_of(folder: Path, name: str, text: str, **federation: Any) -> Path:
    """folder/NAME.toml: the plan, with data that no server and no other silo can read."""
    federation = {f"keys.{silo}": keys.public_text(folder / "home" / f"{silo}.pub") for silo in SILOS} | federation
    given = "".join(f"{key} = {json.dumps(value)}\n" for key, value in federation.items())
    head = f'[task]\ndataset = "npz"\noptions = {{ path = "{folder}/NAME.npz", classes = 2 }}\n'
    tail = f"\n[federation]\nsilos = {json.dumps(SILOS)}\ninputs = [{INPUTS}]\nclasses = 2\n"
    file = folder / f"{name}.toml"
    file.write_text(f'{head}{text}{tail}test = "{folder}/test.npz"\n{given}')
    return file


def planned(kind: str, rounds: int, noise: str = "simulation") -> str:
    """A client-level plan with this release."""
    clients, release = RELEASES[kind]
    privacy = f'\n[privacy]\ndelta = 0.01\nallow_large_delta = true\nnoise = "{noise}"\n'
    return PLAN.format(rounds=rounds, clients=clients, release=release) + privacy


def make(folder: Path, file: Path) -> Path:
    """The federation's folder; every silo is pointed at its own rows."""
    new_federation(folder, file)
    for name in SILOS:
        spec = folder / "silos" / name / "silo.toml"
        spec.write_text(spec.read_text().replace("NAME.npz", f"{name}.npz").replace('"node"', '""'))
    return folder


def allow(folder: Path, name: str, **changes: Any) -> None:
    """Other words in a silo's policy."""
    policy = folder / "silos" / name / "policy.toml"
    policy.write_text(tomli_w.dumps({**tomllib.loads(policy.read_text()), **changes}))


def whole(config: Config) -> Task:
    """All of it in one process, as a simulation has it."""
    assert config.federation is not None
    own, test = rows()
    pairs = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in own]
    model, loss, _ = config.model_and_loss(*config.record)
    given = Task.of(model, pairs, tuple(torch.from_numpy(side) for side in test), loss)
    assert isinstance(given.clients, Clients)
    return given


def leave(federation: LocalFederation, name: str) -> None:
    """Terminate a silo's node: it deregisters, and its key is free at once."""
    federation.running[f"node.{name}"].terminate()
    federation.running[f"node.{name}"].wait(180)
    federation.kill(f"node.{name}")


def finished(federation: LocalFederation, out: Path, seconds: float = 600.0) -> dict[str, Any]:
    """The certificate, once it is there."""
    until = time.monotonic() + seconds
    while not (out / "certificate.json").exists():
        log = out.with_name(f"{out.name}.log")
        said = log.read_text() if log.exists() else ""
        assert "sordino: found" not in said, said
        assert time.monotonic() < until, (said, federation.log_tail("superlink"))
        time.sleep(0.2)
    found: dict[str, Any] = json.loads((out / "certificate.json").read_text())
    return found


def parameters(out: Path) -> torch.Tensor:
    """The model of a run, flat."""
    return flat(safetensors.torch.load_file(out / "model.safetensors"))


def flat(held: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other, by their names."""
    return torch.cat([held[name].reshape(-1) for name in sorted(held)])


def config_of(folder: Path, name: str) -> Config:
    return load_config(folder / f"{name}.toml")


def until(what: str, done: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait for something that must come about; how long it takes is nobody's promise."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.2)
