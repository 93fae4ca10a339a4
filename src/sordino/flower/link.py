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
LEAST = 3.0  # seconds: nobody is asked who could not answer in time


@dataclass(frozen=True)
class Link:
    """The silos of a federation, each behind the one node that is registered under its name."""

    grid: Any
    silos: Sequence[str]  # in the plan's order

    offers: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str] = "flower"

    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterator[tuple[int, bytes]]:
        """Send each silo its job; the replies that came within so many seconds. Silence is no error."""
        try:
            yield from self.carry({silo: job.to_bytes() for silo, job in jobs.items()}, time.time() + timeout)
        except internals.flower().HTTPError as error:
            raise EngineError(f"a SuperLink that does not answer ({error})", "", "start it, and resume") from None

    def carry(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]:
        """The same for bytes of any kind, until `deadline` (seconds since 1970)."""
        waiting, sent = dict(bodies), dict[str, int]()
        while (waiting or sent) and time.time() < deadline:
            sent |= self._send(waiting, deadline)
            for message in self.grid.pull_messages(list(sent)) if sent else ():
                silo = sent.pop(str(message.metadata.reply_to_message_id), None)
                data = internals.unpacked(message)
                if silo is not None and data is not None:
                    yield silo, data
            time.sleep(PULSE if waiting or sent else 0.0)

    def _send(self, waiting: dict[int, bytes], deadline: float) -> dict[str, int]:
        """Messages to those of the waiting that are online: nobody waits for a silo that is not."""
        ttl = deadline - time.time()
        there = self.nodes() if waiting and ttl > LEAST else {}
        now = [silo for silo in list(waiting) if silo in there]
        messages = [internals.question(waiting.pop(silo), there[silo], str(silo), ttl) for silo in now]
        numbers = self.grid.push_messages(messages) if messages else ()
        return {str(number): silo for number, silo in zip(numbers, now, strict=False)}

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
