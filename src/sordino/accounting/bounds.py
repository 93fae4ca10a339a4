"""Norm bounds on a client's message before noise, from which its sensitivity follows; local solvers and encode steps
set them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sordino.accounting.events import Event

Unit = Literal["client", "record"]
Protected = Literal["client", "record", "user"]  # of a guarantee: all records of one user count as one record
Norm = Literal[1, 2]


@dataclass(frozen=True)
class Bound:
    """Bound on a message before noise: its sensitivity is 1 in `norm` if `finite`, else unbounded.

    unit "client": ||x|| <= 1, so a client can be added, removed or zeroed (sensitivity 1) or replaced (sensitivity 2).
    unit "record": ||x - x'|| <= 1 when one record of the client is added or removed.
    """

    unit: Unit
    norm: Norm = 2
    finite: bool = False


@dataclass(frozen=True)
class AlreadyPrivate:
    """Privacy of a message that its client has already noised: `count` times `event` per round; needs release
    `Forward`.
    """

    event: Event
    unit: Unit = "record"
    count: int = 1
