"""What an engine is: it runs the clients of one round and hands back one sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from sordino import codec
from sordino.layout import Layout
from sordino.parts.encoding import Public
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task


@codec.hides_values
@dataclass(frozen=True)
class ClientJob:
    """One round's work: every client of `cohort` starts at `start`."""

    public: Public
    start: Tensor  # [d]
    cohort: Cohort


@dataclass(frozen=True)
class Receipt:
    """What a silo says that it has paid: how often this run was charged to its data so far."""

    client: int
    charges: int


@codec.hides_values
@dataclass(frozen=True)
class Collected:
    """The sum of the encoded messages, and how many came. `diagnostics` are for simulation: not private."""

    total: Tensor  # [d'], float64
    received: int
    diagnostics: dict[str, float] = field(default_factory=dict)
    secret_state: dict[str, Tensor] = field(
        default_factory=dict
    )  # what clients remember: for the checkpoint, never released
    noised: bool = False  # every client has noised its own message: the sum of it is in the total
    deployed: bool = False  # clients are elsewhere: nothing of a single round is looked at but what is released
    reported: Cohort | None = None  # who is in the total; None: the whole cohort
    refused: Mapping[int, str] = field(default_factory=dict)  # who said no, and why: no message left
    receipts: tuple[Receipt, ...] = ()

    def came(self, cohort: Cohort) -> Cohort:
        """Who of the cohort is in the total."""
        return cohort if self.reported is None else self.reported


class Worker(Protocol):
    """An engine made ready for one plan and one task."""

    def collect(self, job: ClientJob) -> Collected: ...
    def public_update(self, start: Tensor, t: int) -> Tensor: ...
    @property
    def header(self) -> dict[str, str | int]: ...


@runtime_checkable
class Leads(Protocol):
    """A worker with others behind it: they share the evaluation too, and are let go when the run is over."""

    def evaluate(self, vector: Tensor) -> dict[str, float]: ...
    def dismiss(self) -> None: ...


@runtime_checkable
class Remembers(Protocol):
    """A worker whose clients remember their own rounds; `recall` gives them back what a checkpoint has kept."""

    def recall(self, secret: Mapping[str, Tensor]) -> None: ...


@runtime_checkable
class Deployed(Protocol):
    """An engine whose clients are elsewhere: they are told in the name of which run they are asked.

    And how often each has said that this run was charged to it: a silo whose ledger has fewer charges than that has
    an older ledger.
    """

    def of_run(self, run: str, paid: Mapping[int, int]) -> Engine: ...


class Engine(Protocol):
    """Where clients run. `offers` is what it can do: "secure_sum", "shuffler", "client_state", "preparation"."""

    @property
    def offers(self) -> frozenset[str]: ...
    def prepare(self, plan: Plan, task: Task, streams: Streams) -> Worker: ...


def chunks(cohort: Cohort, size: int) -> Iterator[Cohort]:
    """The cohort in pieces of at most `size`."""
    for first in range(0, len(cohort), size):
        yield cohort[first : first + size]


class Copies:
    """Part of an objective: every client's row [d] begins as a copy of the start, in the layout's order."""

    layout: Layout

    @property
    def trainable(self) -> int:
        return self.layout.trainable

    def place(self, start: Tensor, clients: int) -> Tensor:
        """Rows [m, d], each a copy of `start`."""
        return start.repeat(clients, 1)

    def inward(self, start: Tensor) -> Tensor:
        return start

    def outward(self, rows: Tensor) -> Tensor:
        return rows

    def untouched(self) -> None:
        """The gradient is written out: no module runs, and none keeps anything."""
