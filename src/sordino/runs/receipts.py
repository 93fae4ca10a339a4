"""receipts.jsonl: what became of every charge of a deployed run, from the silos themselves.

One line after each round: who refused (no message left), and how often each silo says that this run was charged to its
data. Only where who is asked is public or seen by design: of a secret cohort nothing is written.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from sordino.codec import durable_files
from sordino.engines.base import Receipt
from sordino.errors import CertificateError
from sordino.ledger.budget import Filter
from sordino.ledger.charges import ClientCharges
from sordino.loop import RoundReceipts
from sordino.outcome import replay_charges
from sordino.plan import Plan
from sordino.runs.charge_log import ChargeLog

NAME = "receipts.jsonl"


def line(note: RoundReceipts) -> bytes:
    """The one way to write it."""
    paid = [[receipt.client, receipt.charges] for receipt in note.receipts]
    return json.dumps({"after": note.after, "refused": list(note.refused), "paid": paid}).encode()


def read(folder: Path) -> bytes | None:
    """The file's bytes; None where no silo has ever said anything."""
    return durable_files.read(folder / NAME) if (folder / NAME).exists() else None


def whole(data: bytes) -> bytes:
    """Without half a line, which a kill leaves."""
    return data[: data.rfind(b"\n") + 1]


def parse(data: bytes, plan: Plan, charges: int) -> tuple[RoundReceipts, ...]:
    """The notes of a file, every number checked, or `CertificateError`."""
    found = tuple(_read(one, number) for number, one in enumerate(whole(data).split(b"\n")[:-1], start=1))
    if found and not plan.cohort_is_public:
        raise CertificateError(NAME, f"{NAME} names clients of a cohort that is secret")
    last = 0
    for number, note in enumerate(found, start=1):
        people = [*note.refused, *(receipt.client for receipt in note.receipts)]
        known = all(0 <= client < plan.clients.population for client in people) and len(set(people)) == len(people)
        if not known or not last <= note.after <= charges:
            raise _wrong(number, "names a client twice, or one that is none, or does not follow the charges")
        last = note.after
    return found


def last(path: Path, plan: Plan, found: ChargeLog) -> dict[int, int]:
    """By client, the most charges of this run that it has ever told of."""
    most: Counter[int] = Counter()
    for note in parse(read(path) or b"", plan, len(found.charges)):
        most |= Counter({receipt.client: receipt.charges for receipt in note.receipts})
    return dict(most)


def filter_after_charges(path: Path, plan: Plan, budget: Filter, found: ChargeLog, deployed: bool = False) -> Filter:
    """A budget with what the charges of a folder have taken from it, and what silos have said of them."""
    notes = parse(read(path) or b"", plan, len(found.charges))
    budget = replace(budget, elsewhere=ClientCharges.of(plan)) if deployed or notes else budget
    replay_charges(plan, found.rounds, found.cohorts(plan), notes, budget)
    return budget


def _read(data: bytes, number: int) -> RoundReceipts:
    try:
        table: dict[str, Any] = json.loads(data)
        paid = tuple(Receipt(client, charges) for client, charges in table["paid"])
        found = RoundReceipts(table["after"], tuple(table["refused"]), paid)
        numbers = [found.after, *found.refused, *(n for one in paid for n in (one.client, one.charges))]
        if all(type(n) is int and n >= 0 for n in numbers) and line(found) == data:
            return found
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise _wrong(number, "is not a receipt as this program writes one")


def _wrong(number: int, what: str) -> CertificateError:
    return CertificateError(NAME, f"{NAME} line {number} {what}")
