"""Jobs to silos and replies from them, as messages through a SuperLink: bytes in, bytes out."""

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

PULSE = 1.0  # seconds between two looks for replies
LOOK = 3.0  # between two looks for who is online
LEAST = 3.0  # nobody is asked who could not answer in time


@codec.hides_values
@dataclass
class PendingMessages:
    """What is under way to whom. A node that was started anew has forgotten what it was asked: it is asked again."""

    bodies: Mapping[int, bytes]
    waiting: set[int]
    sent: dict[str, tuple[int, OnlineNode]] = field(default_factory=dict)  # by the number of the message
    looked: float = -LOOK

    @property
    def open(self) -> bool:
        return bool(self.waiting or self.sent)

    def see(self, there: Mapping[int, OnlineNode]) -> list[int]:
        """Who is to be asked now, of those that are online."""
        for number, (silo, node) in list(self.sent.items()):
            if silo in there and there[silo] != node:
                del self.sent[number]
                self.waiting.add(silo)
        return sorted(silo for silo in self.waiting if silo in there)

    def take(self, message: Any) -> tuple[int, bytes] | None:
        """Whose answer a message is, and what it says; one that was lost on its way is waited for again."""
        silo, _ = self.sent.pop(str(message.metadata.reply_to_message_id), (None, None))
        if silo is not None and flower_api.node_failed(message):
            self.waiting.add(silo)
        data = flower_api.unpack(message)
        return None if silo is None or data is None else (silo, data)


@dataclass(frozen=True)
class FlowerTransport:
    """The silos of a federation, each behind the one node that is registered under its name."""

    grid: Any
    silos: Sequence[str]  # in the plan's order

    offers: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str] = "flower"

    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterator[tuple[int, bytes]]:
        """Send each silo its job; the replies that came within so many seconds. Silence is no error."""
        yield from self.carry({silo: job.to_bytes() for silo, job in jobs.items()}, time.time() + timeout)

    def carry(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]:
        """The same for bytes of any kind, until `deadline` (seconds since 1970)."""
        post = PendingMessages(bodies, set(bodies))
        try:
            while post.open and time.time() < deadline:
                self._send(post, deadline)
                for message in self.grid.pull_messages(list(post.sent)) if post.sent else ():
                    answer = post.take(message)
                    if answer is not None:
                        yield answer
                time.sleep(PULSE if post.open else 0.0)
        except flower_api.flower().HTTPError as error:
            raise EngineError(f"a SuperLink that does not answer ({error})", "", "start it, and resume") from None

    def _send(self, post: PendingMessages, deadline: float) -> None:
        """Messages to those of the waiting that are online: nobody waits for a silo that is not."""
        ttl, now = deadline - time.time(), time.monotonic()
        if ttl < LEAST or now < post.looked + LOOK:
            return
        there, post.looked = self.nodes(), now
        asked = post.see(there)
        messages = [flower_api.train_message(post.bodies[silo], there[silo].number, str(silo), ttl) for silo in asked]
        for number, silo in zip(self.grid.push_messages(messages) if messages else (), asked, strict=False):
            post.sent[str(number)] = silo, there[silo]
            post.waiting.discard(silo)

    def nodes(self) -> dict[int, OnlineNode]:
        """Silo to node, by the names under which keys were registered; strangers are not asked."""
        found: dict[int, OnlineNode] = {}
        for node in flower_api.nodes(self.grid):
            if node.name not in self.silos:
                continue
            silo = list(self.silos).index(node.name)
            if silo in found:
                raise EngineError(f"two nodes for the silo {node.name!r}", "one", "flwr supernode unregister the other")
            found[silo] = node
        return found
