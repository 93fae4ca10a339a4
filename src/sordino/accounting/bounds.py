"""Norm bounds on a client's message before noise, which give its sensitivity. Set by solvers and encode steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sordino.accounting.events import Event

Unit = Literal["client", "record"]
Protected = Literal["client", "record", "user"]  # of a guarantee: all records of one user count as one record
Norm = Literal[1, 2]


@dataclass(frozen=True)
class Bound:
    """Bound on a message x before noise, in the norm `norm`; not `finite` means that there is no bound.

    unit "client": ||x|| <= 1, so the sensitivity is 1 if a client is added, removed or zeroed, and 2 if it is replaced.
    unit "record": ||x - x'|| <= 1 for the messages x, x' of two data sets that differ by one added or removed record.
    """

    unit: Unit
    norm: Norm = 2
    finite: bool = False


@dataclass(frozen=True)
class AlreadyPrivate:
    """Cost of a message to which its client has already added noise: `count` times `event` in each round.

    Such a message needs the release `Forward`, which adds no noise.
    """

    event: Event
    unit: Unit = "record"
    count: int = 1
