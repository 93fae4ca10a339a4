"""A transport in memory: silos behind it with their own tasks, and a list of what goes wrong, when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sordino.engines.messages import Job
from sordino.engines.remote import Silo
from sordino.task import Task

Fault = Callable[[int, Job, bytes], list[bytes]]  # (which ask, job, reply) -> what arrives


@dataclass
class Wires:
    """Every job and reply as bytes; `faults` may lose, change or double a reply."""

    silos: dict[int, Silo]
    faults: list[Fault] = field(default_factory=list)
    offers: frozenset[str] = frozenset({"secure_sum", "shuffler"})
    name: str = "wires"
    asks: int = 0
    heard: list[tuple[int, int, bytes]] = field(default_factory=list)  # ask, client, reply

    @classmethod
    def of(cls, task: Task, *faults: Fault) -> Wires:
        return cls({client: Silo(task.as_silo(client)) for client in range(task.clients.population)}, list(faults))

    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterator[tuple[int, bytes]]:
        self.asks += 1
        for client, job in reversed(list(jobs.items())):  # in an order of the network's own
            made = self.silos[client].reply(job.to_bytes())
            self.heard.append((self.asks, client, made))
            arrived = [made]
            for fault in self.faults:
                arrived = [other for body in arrived for other in fault(self.asks, job, body)]
            yield from ((client, body) for body in arrived)


def lost(*clients: int, asks: tuple[int, ...] = ()) -> Fault:
    """Replies of these clients do not arrive: ever, or in these asks."""

    def fault(ask: int, job: Job, body: bytes) -> list[bytes]:
        return [] if job.client in clients and (not asks or ask in asks) and not job.admission else [body]

    return fault


def instead(client: int, change: Callable[[bytes], list[bytes]]) -> Fault:
    """What arrives of a client's rows is something else."""

    def fault(ask: int, job: Job, body: bytes) -> list[bytes]:
        return change(body) if job.client == client and not job.admission else [body]

    return fault
