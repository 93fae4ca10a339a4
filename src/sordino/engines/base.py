"""The bases of engines: `Engine`, `Worker` and what passes between them and the loop. Called by loop.py.

A new engine is a class with `prepare`, whose worker is a class with `collect`; everything else has a default:

    class Mine(so.engines.Engine):
        offers = frozenset({"secure_sum"})
        def prepare(self, plan, task, streams): return MyWorker(plan, task, streams)

    class MyWorker(so.engines.Worker):
        def collect(self, job): return so.engines.Collected(total, received=len(job.cohort))

`so.engines.InProcess().prepare(plan, task, streams)` is a worker that computes any part of a cohort by the plan's own
local solver and encode steps. `so.engines.add("mine", Mine)` in a `--with` file, or an entry point of the group
"sordino.engines", makes it `sordino run --engine mine` and `so.train(engine="mine")`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import Bound
from sordino.errors import EngineError
from sordino.parts.encoding import Public
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task


@codec.hides_values
@dataclass(frozen=True)
class ClientJob:
    """The local work of one round: every client of `cohort` starts at the public model `start`."""

    public: Public
    start: Tensor  # [d]
    cohort: Cohort


@dataclass(frozen=True)
class Receipt:
    """A silo's confirmation of its ledger: how often this run has been charged to its data so far."""

    client: int
    charges: int


@codec.hides_values
@dataclass(frozen=True)
class Collected:
    """The sum of a round's encoded messages, and how many are in it. `diagnostics` are NOT private: simulation only."""

    total: Tensor  # [d'], float64
    received: int
    diagnostics: dict[str, float] = field(default_factory=dict)
    client_state: dict[str, Tensor] = field(default_factory=dict)  # all clients' states: for the checkpoint only
    noised: bool = False  # every client has noised its own message: that noise is in the total
    deployed: bool = False  # clients are elsewhere: only released figures of a round are computed
    reported: Cohort | None = None  # who is in the total; None: the whole cohort
    refused: Mapping[int, str] = field(default_factory=dict)  # who refused, and why: no message left those clients
    receipts: tuple[Receipt, ...] = ()

    def participants(self, cohort: Cohort) -> Cohort:
        """Who of the cohort is in the total."""
        return cohort if self.reported is None else self.reported

    def check(self, plan: Plan, size: int, cohort: Cohort) -> None:
        """Refuse a sum that the cohort's messages cannot have, as far as the sum itself shows it."""
        needed = "every client of the cohort at most once, and no other"
        who = self.participants(cohort)
        if len(np.unique(who)) != len(who) or not np.isin(who, cohort).all():
            raise EngineError("an engine that reports a client twice, or one that was not asked", needed)
        if self.received > len(who) or (self.reported is not None and self.received != len(who)):
            raise EngineError(f"an engine that received {self.received} messages of {len(who)} clients", needed)
        if tuple(self.total.shape) != (plan.length(size),):
            raise EngineError(f"a sum of shape {tuple(self.total.shape)}", f"({plan.length(size)},): one message's")
        bound = plan.bound
        if self.noised or not isinstance(bound, Bound) or not bound.finite or bound.unit != "client":
            return
        length = float(self.total.double().norm(p=bound.norm))
        if length > self.received * (1 + 1e-5):
            found = f"a sum of norm {length:.6g} of {self.received} messages, each of norm at most 1"
            raise EngineError(found, needed, "correct the engine: such a sum is not covered by the plan's noise")


class Worker(ABC):
    """An engine made ready for one plan and one task. Only `collect` must be written."""

    @abstractmethod
    def collect(self, job: ClientJob) -> Collected:
        """The sum over the job's cohort of each client's encoded message."""

    @property
    def header(self) -> dict[str, str | int]:
        """How the clients are computed: written beside the run's history, never on the certificate."""
        return {"engine": type(self).__name__.lower()}

    def load_client_state(self, stored: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take back the `Collected.client_state` of a checkpoint; an engine that offers "client_state" does."""

    def evaluate(self, model: Tensor) -> dict[str, float] | None:
        """Figures of the test records; None: the loop evaluates the task itself."""
        return None

    def close(self) -> None:  # noqa: B027
        """The run is over, or has failed: release processes and connections."""


class Engine(ABC):
    """Where clients run. Only `prepare` must be written.

    `offers` is what the engine can do beside a sum: "secure_sum" and "shuffler" (nobody sees a single message),
    "client_state" (clients keep a state between rounds), "preparation" (columns are scaled before round 1). A plan that
    needs more is refused before anything is computed.
    """

    deployed: ClassVar[bool] = False  # clients are elsewhere and keep ledgers of their own

    @property
    def offers(self) -> frozenset[str]:
        return frozenset()

    @abstractmethod
    def prepare(self, plan: Plan, task: Task, streams: Streams) -> Worker:
        """The worker of one run. `streams.at(t, purpose, client)` are its random numbers."""

    @property
    def leads(self) -> bool:
        """Whether this process runs the loop and writes; False in the other ranks of a distributed run."""
        return True

    def for_run(self, run: str, charges: Mapping[int, int]) -> Engine:
        """The engine in the name of a run; `charges` are the clients' last receipts (deployed engines)."""
        return self
