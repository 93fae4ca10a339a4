"""A silo's process, `sordino silo serve DIR`: its data, and the loop that answers its Flower node's tasks.

The process takes tasks from its node itself; no code that a run ships is executed. Called by `silo_service` and `app`.

DIR/silo.toml     this silo's name, where its node is, and its data
DIR/fed.toml      the federation's file: which model, how many silos
DIR/policy.toml   what its data may be used for        DIR/ledger.db   what was charged to them
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sordino import codec
from sordino.config import Config
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
    """Contents of silo.toml: the silo's name, node and data.

    `group` selects one natural client of the data set; without it all rows are this silo's. With `simulated` the rows
    are cut out of the federation's own data set, as a simulation cuts them.
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
        """Read the silo.toml of a folder."""
        table = codec.read_toml(folder / "silo.toml", "sordino federation new makes one")
        found: SiloSpec = codec.read(cls, table, "silo.toml")
        return found


def model_of(config: Config, inputs: tuple[int, ...], classes: int) -> torch.nn.Module:
    """The federation's model with its seeded first weights, equal on every machine."""
    return build_seeded(config.task.model, inputs, classes or 1, config.run.seed)


def loss_of(config: Config, classes: int) -> Loss:
    """The loss of the file; by default cross entropy for classes, squared error for a number."""
    return config.task.loss or (CrossEntropy() if classes else Mse())


def server_task(config: Config) -> Task:
    """The server's task: model and public rows; without [federation] inputs, those of its own data set."""
    spec = config.federation
    if spec is None or not spec.inputs:
        return config.build().as_server()
    test = None if spec.test is None else load_public_rows(Path(spec.test))
    model = model_of(config, spec.inputs, spec.classes)
    model, init = (model, None) if config.task.init is None else load_initial(model, config.task.init)
    loss, word = loss_of(config, spec.classes), config.task.own_code
    made = Task.server(model, len(spec.silos), test, loss, own_code=word)
    # [task] names the silos' private rows; what it declares of columns (ranges, categories) is public all the same
    values = config.task.source(labels=False).values
    source = PublicSource(f"rows of {Path(spec.test or '').name}", "the configuration: [federation] test", values)
    return replace(made, init=init, metrics=config.run.metrics, source=source)


def load_public_rows(file: Path) -> tuple[Any, Any]:
    """Public rows x and y of an .npz file."""
    try:
        with np.load(file, allow_pickle=False) as held:
            return held["x"], held["y"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}, which cannot be read ({error})", "an .npz file of public rows x and y") from None


def silo_task(config: Config, spec: SiloSpec) -> Task:
    """A silo's task: the model and its own rows."""
    if config.federation is None or spec.name not in config.federation.silos:
        known = [] if config.federation is None else list(config.federation.silos)
        raise ConfigError(f"silo {spec.name!r}", "a silo of fed.toml", codec.nearest(spec.name, known))
    if spec.simulated:
        return config.build().as_silo(config.federation.silos.index(spec.name))
    x, y, classes = own_rows(load(spec.dataset, **spec.options), spec)
    names = config.federation.silos
    model = model_of(config, config.federation.inputs or x.shape[1:], classes)
    loss, word = loss_of(config, classes), config.task.own_code
    return Task.silo(model, names.index(spec.name), len(names), (x, y), loss, own_code=word)


def own_rows(data: Dataset, spec: SiloSpec) -> tuple[Any, Any, int]:
    """x, y and number of classes of a silo's rows in a data set."""
    if not spec.group:
        return data.x, data.y, data.classes or 0
    if data.groups is None or spec.group not in data.names:
        found, known = f"group = {spec.group!r} in silo.toml", list(data.names or ())
        raise ConfigError(found, f"a natural silo of {spec.dataset}", codec.nearest(spec.group, known))
    mine = data.groups == np.unique(data.groups)[list(data.names).index(spec.group)]
    return data.x[mine], data.y[mine], data.classes or 0


def serve(node: Node, reply: Callable[[bytes], bytes], log: Callable[[str], None], pulse: float = PULSE) -> None:
    """Answer the node's tasks until the process ends; while the node does not respond, wait for it."""
    f, take = flower(), node.poller()
    while True:
        try:
            task = take()
            if task is not None:
                answer_task(task, reply, log)
        except f.HTTPError as error:
            log(f"the node at {node.address} does not answer ({shorten(str(error)) or type(error).__name__})")
            time.sleep(IDLE)
            continue
        if task is None:
            time.sleep(pulse)


def answer_task(task: NodeTask, reply: Callable[[bytes], bytes], log: Callable[[str], None]) -> None:
    """Answer one task; a refusal is logged here and sent to the server as an error."""
    with task.heartbeat():
        try:
            if task.data is None:
                raise ConfigError("a task that is not Sordino's", "a job of a sordino server")
            made = reply(task.data)
        except SordinoError as error:
            log(f"refused: {error}")
            task.refuse(str(error))
        else:
            task.reply(made)


@dataclass
class StatusPrinter:
    """Prints status lines, or JSON objects; a line equal to the one before is not repeated."""

    as_json: bool = False
    last: str = ""

    def __call__(self, line: str) -> None:
        if line != self.last:
            print(json.dumps({"status": line}) if self.as_json else line, file=sys.stdout, flush=True)
        self.last = line
