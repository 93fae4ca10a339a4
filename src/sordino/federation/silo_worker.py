"""`sordino silo serve DIR`: a silo's post. It takes its node's tasks itself, and no code that a run ships is run here.

DIR/silo.toml     this silo's name, where its node is, and its data
DIR/fed.toml      the federation's file: which model, how many silos
DIR/policy.toml   what its data may be used for        DIR/ledger.db   what they have spent
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sordino import codec
from sordino.config import Config, FederationSpec
from sordino.data.datasets import Dataset, load
from sordino.data.initial_weights import load_initial
from sordino.errors import ConfigError, SordinoError, shorten
from sordino.federation.flower_api import Node, NodeTask, flower
from sordino.models import build_seeded
from sordino.parts.losses import CrossEntropy, Loss, Mse
from sordino.task import PublicSource, Task

PULSE = 0.5  # seconds between two looks for a task
IDLE = 0.5  # where the node does not answer


@dataclass(frozen=True)
class SiloSpec:
    """silo.toml. `group` is the natural silo of the data set that is this one; without it, all of its rows are.

    `simulated`: this silo's rows are cut out of the federation's own data set, as a simulation cuts them.
    """

    name: str
    dataset: str
    node: str = "127.0.0.1:9094"
    secret: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    simulated: bool = False
    policy: str = "policy.toml"
    ledger: str = "ledger.db"

    @classmethod
    def read(cls, folder: Path) -> SiloSpec:
        """The file of a folder, or one sentence."""
        file = folder / "silo.toml"
        try:
            table = tomllib.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}, which cannot be read ({error})", "a silo's folder", NEW) from None
        found: SiloSpec = codec.read(cls, table, "silo.toml")
        return found


NEW = "sordino federation new makes one"


def model_of(config: Config, inputs: tuple[int, ...], classes: int) -> torch.nn.Module:
    """The federation's model, the same on every machine."""
    return build_seeded(config.task.model, inputs, classes or 1, config.run.seed)


def loss_of(config: Config, classes: int) -> Loss:
    """The file's, or the usual one for classes or for a number."""
    return config.task.loss or (CrossEntropy() if classes else Mse())


def server_task(config: Config) -> Task:
    """What the server holds: the model, and public rows; without `inputs`, those of the data set it has here."""
    spec = config.federation
    if spec is None or not spec.inputs:
        return config.build().as_server()
    test = None if spec.test is None else load_public_rows(Path(spec.test))
    model = model_of(config, spec.inputs, spec.classes)
    model, init = (model, None) if config.task.init is None else load_initial(model, config.task.init)
    loss, word = loss_of(config, spec.classes), config.task.own_code
    made = Task.server(model, len(spec.silos), test, loss, own_code=word)
    return replace(made, init=init, metrics=config.run.metrics, source=_public_source(config, spec))


def _public_source(config: Config, spec: FederationSpec) -> PublicSource:
    """The server's public rows are those of [federation] test; [task] names the silos' private rows, and no public one.

    What [task] declares of columns (ranges, categories) is public all the same: the file goes to everybody.
    """
    values = config.task.source(labels=False).values
    return PublicSource(f"rows of {Path(spec.test or '').name}", "the configuration: [federation] test", values)


def load_public_rows(file: Path) -> tuple[Any, Any]:
    """x and y of an .npz file."""
    try:
        with np.load(file, allow_pickle=False) as held:
            return held["x"], held["y"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}, which cannot be read ({error})", "an .npz file of public rows x and y") from None


def silo_task(config: Config, spec: SiloSpec) -> Task:
    """What this silo holds: the model, and its own rows."""
    if config.federation is None or spec.name not in config.federation.silos:
        known = [] if config.federation is None else list(config.federation.silos)
        raise ConfigError(f"silo {spec.name!r}", "a silo of fed.toml", codec.nearest(spec.name, known))
    if spec.simulated:
        return config.build().as_silo(config.federation.silos.index(spec.name))
    x, y, classes = own_rows(load(spec.dataset, **spec.options), spec)
    names = config.federation.silos
    model = model_of(config, config.federation.inputs or x.shape[1:], classes)
    loss, own = loss_of(config, classes), (torch.from_numpy(x), torch.from_numpy(y))
    return Task.silo(model, names.index(spec.name), len(names), own, loss, own_code=config.task.own_code)


def own_rows(data: Dataset, spec: SiloSpec) -> tuple[Any, Any, int]:
    """The rows of a data set that are this silo's."""
    if not spec.group:
        return data.x, data.y, data.classes or 0
    if data.groups is None or spec.group not in data.names:
        found, known = f"group = {spec.group!r} in silo.toml", list(data.names or ())
        raise ConfigError(found, f"a natural silo of {spec.dataset}", codec.nearest(spec.group, known))
    mine = data.groups == np.unique(data.groups)[list(data.names).index(spec.group)]
    return data.x[mine], data.y[mine], data.classes or 0


def serve(node: Node, reply: Callable[[bytes], bytes], say: Callable[[str], None], pulse: float = PULSE) -> None:
    """Take tasks and answer them, for ever; one that cannot be read gets an error, and a dead node is waited for."""
    f, take = flower(), node.poller()
    while True:
        try:
            task = take()
            if task is not None:
                answer_task(task, reply, say)
        except f.HTTPError as error:
            say(f"the node at {node.address} does not answer ({shorten(str(error)) or type(error).__name__})")
            time.sleep(IDLE)
            continue
        if task is None:
            time.sleep(pulse)


def answer_task(task: NodeTask, reply: Callable[[bytes], bytes], say: Callable[[str], None]) -> None:
    """One task: bytes in, bytes out. Whatever is wrong with it is one line here, and an error there."""
    with task.heartbeat():
        try:
            if task.data is None:
                raise ConfigError("a task that is not Sordino's", "a job of a sordino server")
            made = reply(task.data)
        except SordinoError as error:
            say(f"refused: {error}")
            task.refuse(str(error))
        else:
            task.reply(made)


@dataclass
class StatusPrinter:
    """Lines on standard output, or JSON objects; the same line twice in a row is said once."""

    as_json: bool = False
    last: str = ""

    def __call__(self, line: str) -> None:
        if line != self.last:
            print(json.dumps({"said": line}) if self.as_json else line, file=sys.stdout, flush=True)
        self.last = line
