"""Transport of jobs and replies between server and silos through a Flower SuperLink. Called by `engines.remote`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sordino import codec
from sordino.engines.jobs import Job
from sordino.errors import EngineError
from sordino.federation import flower_api
from sordino.federation.flower_api import OnlineNode

PULSE = 1.0  # seconds between two polls for replies
ONLINE_PULSE = 3.0  # seconds between two polls for online nodes
LEAST = 3.0  # seconds before the deadline after which nothing is sent


@codec.hides_values
@dataclass
class PendingMessages:
    """Messages without an answer yet. A node that was restarted has lost its message: it is sent again."""

    bodies: Mapping[int, bytes]
    waiting: set[int]
    sent: dict[str, tuple[int, OnlineNode]] = field(default_factory=dict)  # by the number of the message
    last_poll: float = -ONLINE_PULSE

    @property
    def open(self) -> bool:
        return bool(self.waiting or self.sent)

    def due(self, there: Mapping[int, OnlineNode]) -> list[int]:
        """The silos, among those online, that a message must be sent to now."""
        for number, (silo, node) in list(self.sent.items()):
            if silo in there and there[silo] != node:
                del self.sent[number]
                self.waiting.add(silo)
        return sorted(silo for silo in self.waiting if silo in there)

    def take(self, message: Any) -> tuple[int, bytes] | None:
        """Silo and bytes of an answer; where Flower reports a failed node, the silo waits for a new message."""
        silo, _ = self.sent.pop(str(message.metadata.reply_to_message_id), (None, None))
        if silo is not None and flower_api.node_failed(message):
            self.waiting.add(silo)
        data = flower_api.unpack(message)
        return None if silo is None or data is None else (silo, data)


@dataclass(frozen=True)
class FlowerTransport:
    """Transport over Flower: every silo is the one node registered under its name."""

    grid: Any
    silos: Sequence[str]  # in the plan's order

    offers: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str] = "flower"

    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterator[tuple[int, bytes]]:
        """Send each silo its job; yield the replies that arrive within the timeout. A missing reply is no error."""
        yield from self.exchange({silo: job.to_bytes() for silo, job in jobs.items()}, time.time() + timeout)

    def exchange(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]:
        """Send bytes to silos and yield their answers until `deadline` (seconds since 1970)."""
        pending = PendingMessages(bodies, set(bodies))
        try:
            while pending.open and time.time() < deadline:
                self._send(pending, deadline)
                for message in self.grid.pull_messages(list(pending.sent)) if pending.sent else ():
                    answer = pending.take(message)
                    if answer is not None:
                        yield answer
                time.sleep(PULSE if pending.open else 0.0)
        except flower_api.flower().HTTPError as error:
            raise EngineError(f"a SuperLink that does not answer ({error})", "", "start it, and resume") from None

    def _send(self, pending: PendingMessages, deadline: float) -> None:
        """Send what is due to the silos that are online."""
        ttl, now = deadline - time.time(), time.monotonic()
        if ttl < LEAST or now < pending.last_poll + ONLINE_PULSE:
            return
        there, pending.last_poll = self.nodes(), now
        asked = pending.due(there)
        messages = [
            flower_api.train_message(pending.bodies[silo], there[silo].number, str(silo), ttl) for silo in asked
        ]
        for number, silo in zip(self.grid.push_messages(messages) if messages else (), asked, strict=False):
            pending.sent[str(number)] = silo, there[silo]
            pending.waiting.discard(silo)

    def nodes(self) -> dict[int, OnlineNode]:
        """Online nodes by silo number; nodes under other names are ignored."""
        found: dict[int, OnlineNode] = {}
        for node in flower_api.nodes(self.grid):
            if node.name not in self.silos:
                continue
            silo = list(self.silos).index(node.name)
            if silo in found:
                raise EngineError(f"two nodes for the silo {node.name!r}", "one", "flwr supernode unregister the other")
            found[silo] = node
        return found
