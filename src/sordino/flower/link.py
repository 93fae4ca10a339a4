"""Jobs to silos and replies from them, as messages through a SuperLink: bytes in, bytes out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sordino.engines.jobs import Job
from sordino.errors import EngineError
from sordino.flower import internals

PULSE = 0.5  # seconds between two looks for replies


@dataclass(frozen=True)
class Link:
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
        there = self.wait_for(set(bodies), deadline)
        asked = [silo for silo in bodies if silo in there]
        ttl = max(1.0, deadline - time.time())
        messages = [internals.question(bodies[silo], there[silo], str(silo), ttl) for silo in asked]
        sent = {str(number): silo for number, silo in zip(self.grid.push_messages(messages), asked, strict=False)}
        while sent and time.time() < deadline:
            for message in self.grid.pull_messages(list(sent)):
                silo = sent.pop(str(message.metadata.reply_to_message_id), None)
                data = internals.unpacked(message)
                if silo is not None and data is not None:
                    yield silo, data
            time.sleep(PULSE if sent else 0.0)

    def wait_for(self, wanted: set[int], deadline: float) -> dict[int, int]:
        """The node of every silo that is online; waits for those that are wanted, and no longer than the deadline."""
        while True:
            there = self.nodes()
            if wanted <= set(there) or time.time() + PULSE > deadline:
                return there
            time.sleep(PULSE)

    def nodes(self) -> dict[int, int]:
        """Silo to node, by the names under which keys were registered; strangers are not asked."""
        found: dict[int, int] = {}
        for node, name, _key in internals.nodes(self.grid):
            if name not in self.silos:
                continue
            silo = list(self.silos).index(name)
            if silo in found:
                raise EngineError(f"two nodes for the silo {name!r}", "one", "flwr supernode unregister the other")
            found[silo] = node
        return found
