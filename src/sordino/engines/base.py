"""Base classes of engines (`Engine`, `Worker`), the values they exchange with loop.py, and a registry of engine names.

A new engine is a class with `prepare`, whose worker is a class with `collect`; everything else has a default:

    class Mine(so.engines.Engine):
        offers = frozenset({"secure_sum"})
        def prepare(self, plan, task, streams): return MyWorker(plan, task, streams)

    class MyWorker(so.engines.Worker):
        def collect(self, job): return so.engines.Collected(total, received=len(job.cohort))

`so.engines.InProcess().prepare(plan, task, streams)` is a worker that computes any part of a cohort by the plan's own
local solver and encode steps. An engine that is registered under the name "mine" is selected by
`sordino run --engine mine` and `so.train(engine="mine")`:

    so.engines.add("mine", Mine)                       # in a script, or in a file that --with names
    [project.entry-points."sordino.engines"]
    mine = "my_package:Mine"                           # in an installed package

`add` takes a class, or a function that returns the engine. The class or function may have parameters `device`,
`threads` and `timeout`; where it lacks one, a run that sets the option of that name is refused.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import Bound
from sordino.errors import ConfigError, EngineError
from sordino.parts.encoding import Public
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task
from sordino.version import local_rank

CPU = torch.device("cpu")


@codec.hides_values
@dataclass(frozen=True)
class ClientJob:
    """One round's work for an engine: every client of `cohort` trains from the public model `start`."""

    public: Public
    start: Tensor  # [d]
    cohort: Cohort


@dataclass(frozen=True)
class Receipt:
    """A silo's report of how many times this run has been charged to its privacy ledger so far."""

    client: int
    charges: int


@codec.hides_values
@dataclass(frozen=True)
class Collected:
    """Result of one round: sum and number of the clients' encoded messages; `diagnostics` are NOT private."""

    total: Tensor  # [d'], float64
    received: int
    diagnostics: dict[str, float] = field(default_factory=dict)
    client_state: dict[str, Tensor] = field(default_factory=dict)  # all clients' states: for the checkpoint only
    noised: bool = False  # every client added noise to its own message: the total has all noise of the round
    deployed: bool = False  # clients are on other machines: only released figures of a round are computed
    reported: Cohort | None = None  # clients in the total; None: the whole cohort
    refused: Mapping[int, str] = field(default_factory=dict)  # reasons of clients that sent no message
    receipts: tuple[Receipt, ...] = ()

    def on(self, device: torch.device) -> Collected:
        """Return a copy of the round's result with its sum of messages on `device`; clients' states stay on the CPU."""
        return replace(self, total=self.total.to(device))

    def participants(self, cohort: Cohort) -> Cohort:
        return cohort if self.reported is None else self.reported

    def check(self, plan: Plan, size: int, cohort: Cohort) -> None:
        """Refuse an impossible sum: unknown clients, a wrong shape, or a norm above the number of messages."""
        needed, fix = "messages of clients in the cohort, at most one per client", "correct the engine's `collect`"
        who = self.participants(cohort)
        if len(np.unique(who)) != len(who) or not np.isin(who, cohort).all():
            raise EngineError("an engine that reports a client twice, or a client outside the cohort", needed, fix)
        if self.received > len(who) or (self.reported is not None and self.received != len(who)):
            raise EngineError(f"an engine that reports {self.received} messages of {len(who)} clients", needed, fix)
        if tuple(self.total.shape) != (plan.length(size),):
            found = f"an engine that returns a sum of shape {tuple(self.total.shape)}"
            raise EngineError(found, f"the shape of one message, ({plan.length(size)},)", fix)
        bound = plan.bound
        if self.noised or not isinstance(bound, Bound) or not bound.finite or bound.unit != "client":
            return
        length = float(self.total.double().norm(p=bound.norm))
        if length > self.received * (1 + 1e-5):
            found = f"an engine that returns a sum of norm {length:.6g} of {self.received} messages"
            raise EngineError(found, "clipped messages of norm at most 1: the plan's noise covers no more", fix)


class Worker(ABC):
    """Base class of workers, which run the clients of one plan on one task; made by an `Engine`.

    A subclass must define `collect` only.
    """

    device_task: Task | None = None  # the task on the worker's device, where the loop keeps the server's state too

    @abstractmethod
    def collect(self, job: ClientJob) -> Collected:
        """Return the sum over the job's cohort of each client's encoded message."""

    @property
    def header(self) -> dict[str, str | int]:
        """Description of how clients are computed (device, threads, path), written to engine.jsonl only."""
        return {"engine": type(self).__name__.lower()}

    def load_client_state(self, stored: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore the clients' states of a checkpoint; called for engines that offer "client_state"."""

    def evaluate(self, model: Tensor) -> dict[str, float] | None:
        """Return metrics on the test records, or None to let the training loop evaluate the model itself."""
        return None

    def close(self) -> None:  # noqa: B027
        """Release processes and connections; called when the run is over or has failed."""


class Engine(ABC):
    """Base of engines, which run the clients of each round. A subclass must define only `prepare`.

    `offers` lists the engine's features beside a sum: "secure_sum" and "shuffler" (nobody sees a single message),
    "client_state" (clients keep a state between rounds), "preparation" (columns are scaled before round 1). A plan that
    needs more is refused before anything is computed.
    """

    deployed: ClassVar[bool] = False  # clients are on other machines, with their own ledgers

    @property
    def offers(self) -> frozenset[str]:
        return frozenset()

    @abstractmethod
    def prepare(self, plan: Plan, task: Task, streams: Streams) -> Worker:
        """Return the worker of one run; it draws its random numbers from `streams.at(t, purpose, client)`."""

    @property
    def leads(self) -> bool:
        """Whether this process runs the training loop and writes files; False in ranks other than 0."""
        return True

    def for_run(self, run: str, charges: Mapping[int, int]) -> Engine:
        """Return a copy of the engine for one run id; `charges` are the silos' last reported charges."""
        return self


# ---- engines by name ------------------------------------------------------------------------------------------------

GROUP = "sordino.engines"
DEFAULTS: dict[str, Any] = {"device": "cpu", "threads": 1, "timeout": 3600.0}
Make = Callable[..., Engine]


def _inprocess(device: str, threads: int) -> Engine:
    from sordino.engines.inprocess import InProcess

    return InProcess(device=device)


def _distributed(device: str, threads: int, timeout: float) -> Engine:
    from sordino.engines.distributed import Distributed
    from sordino.engines.inprocess import InProcess

    return Distributed(InProcess(device=device), threads, timeout)


SHIPPED: dict[str, Make] = {"inprocess": _inprocess, "distributed": _distributed}
_ADDED: dict[str, Make] = {}


def add(name: str, make: Make) -> None:
    """Register an engine under a name; refuse a name that another engine has."""
    if name in (*SHIPPED, "flower") or _ADDED.get(name, make).__qualname__ != make.__qualname__:
        found = f"a second engine with the name {name!r}"
        raise ConfigError(found, "a name that no other engine has", "register the new engine under another name")
    _ADDED[name] = make


def engine_named(name: str, **options: Any) -> Engine:
    """Return the engine registered under a name, built with the options `device`, `threads` and `timeout`."""
    points = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    known = [*SHIPPED, *_ADDED, *(other for other in points if other not in _ADDED)]
    if name not in known:
        how = f'call sordino.engines.add("{name}", ...) in a file that --with names, or add an entry point of {GROUP}'
        fix = f"{codec.nearest(name, [*known, 'flower'])} For an engine of your own {how}"
        raise ConfigError(f"--engine {name}", f"one of {', '.join([*known, 'flower'])}", fix)
    if "threads" in options:  # one unless asked for: two that share a core are far slower
        torch.set_num_threads(max(1, options["threads"]))
    options = {**DEFAULTS, **options}
    if options["threads"] < 1:
        raise ConfigError(f"--threads {options['threads']}", "at least 1 thread", "remove --threads to use 1")
    if not options["timeout"] > 0:
        fix = "remove --timeout to wait an hour"
        raise ConfigError(f"--timeout {options['timeout']:g}", "a number of seconds above 0", fix)
    device_of(options["device"])
    make = SHIPPED.get(name) or _ADDED.get(name) or points[name].load()
    takes = inspect.signature(make).parameters
    refused = next((key for key, value in options.items() if value != DEFAULTS[key] and key not in takes), None)
    if refused is not None and name not in SHIPPED:
        needed = "an option that this engine supports"
        raise ConfigError(f"--{refused} with --engine {name}", needed, f"remove --{refused}")
    made: Any = make(**{key: value for key, value in options.items() if key in takes})
    if not isinstance(made, Engine):
        found = f"--engine {name}, which makes a {type(made).__name__}"
        raise ConfigError(found, "an engine", "derive its class from sordino.engines.Engine")
    return made


def device_of(name: str) -> torch.device:
    """Return the torch device of this name; "auto" is the accelerator that torch finds, else the CPU.

    Under torchrun a name without a number, such as "cuda", is the device of this process's local rank. A device that
    torch cannot use on this machine is refused, and so is one without float64 (MPS), because sums and noise need it.
    """
    try:
        device = torch.device(_accelerator() if name == "auto" else name)
        if device.type != "cpu" and device.index is None and "LOCAL_RANK" in os.environ:
            device = torch.device(device.type, local_rank())
        return torch.empty(0, dtype=torch.float64, device=device).device
    except TypeError:
        found = f"device {name!r}, which has no float64"
        needed = "a device with float64, in which sums of messages and their noise are computed"
        raise ConfigError(found, needed, 'set device = "cpu"') from None
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = f"device {name!r} ({str(error).splitlines()[0]})"
        fix = "leave the device out to use the CPU; under torchrun every process needs a device of its own"
        raise ConfigError(found, "a device that torch can use on this machine", fix) from None


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None or found.type == "mps" else found.type
