"""receipts.jsonl and refused.json: what silos and budgets say of a run's charges. Called by writer and reader.

receipts.jsonl has one line after each round of a deployed run: who refused (no message left), and how often each silo
says that this run was charged to its data. It is written only where the cohort is public or visible by design.

refused.json is the charge that a budget did not allow: round, cohort, configuration, head of the charge log. It is
accepted only if the budget, counted again from the charges, has no room for that cohort. A run that a budget has ended
is over: continuing it with other random cohorts after a look at the model would choose its length by the data.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from sordino.codec import durable_files
from sordino.config import Config
from sordino.engines.base import Receipt
from sordino.errors import BudgetError, CertificateError
from sordino.ledger.budget import Filter
from sordino.ledger.charges import ClientCharges
from sordino.loop import RoundReceipts
from sordino.outcome import replay_charges
from sordino.plan import Plan
from sordino.runs import charge_log
from sordino.runs.charge_log import ChargeLog

NAME, REFUSED = "receipts.jsonl", "refused.json"


def line(note: RoundReceipts) -> bytes:
    """A round's receipts as their line of the file: there is one way to write it."""
    paid = [[receipt.client, receipt.charges] for receipt in note.receipts]
    return json.dumps({"after": note.after, "refused": list(note.refused), "paid": paid}).encode()


def read(folder: Path) -> bytes | None:
    """The file's bytes; None where no silo has ever sent a receipt."""
    return durable_files.read(folder / NAME) if (folder / NAME).exists() else None


def whole(data: bytes) -> bytes:
    """Without half a line, which a kill leaves."""
    return data[: data.rfind(b"\n") + 1]


def parse(data: bytes, plan: Plan, charges: int) -> tuple[RoundReceipts, ...]:
    """The receipts of a file, every number checked, or `CertificateError`."""
    found = tuple(_read(one, number) for number, one in enumerate(whole(data).split(b"\n")[:-1], start=1))
    if found and not plan.cohort_is_public:
        raise CertificateError(NAME, f"{NAME} names clients of a cohort that is secret")
    last = 0
    for number, note in enumerate(found, start=1):
        people = [*note.refused, *(receipt.client for receipt in note.receipts)]
        known = all(0 <= client < plan.clients.population for client in people) and len(set(people)) == len(people)
        if not known or not last <= note.after <= charges:
            raise _invalid(number, "names a client twice, or one that is none, or does not follow the charges")
        last = note.after
    return found


def last_counts(path: Path, plan: Plan, log: ChargeLog) -> dict[int, int]:
    """By client, the most charges of this run that any of its receipts states."""
    most: Counter[int] = Counter()
    for note in parse(read(path) or b"", plan, len(log.charges)):
        most |= Counter({receipt.client: receipt.charges for receipt in note.receipts})
    return dict(most)


def filter_after_charges(path: Path, plan: Plan, budget: Filter, log: ChargeLog, deployed: bool = False) -> Filter:
    """A budget after the charges of a folder, as corrected by the silos' receipts."""
    notes = parse(read(path) or b"", plan, len(log.charges))
    budget = replace(budget, elsewhere=ClientCharges.of(plan)) if deployed or notes else budget
    replay_charges(plan, log.rounds, log.cohorts(plan), notes, budget)
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
    raise _invalid(number, "is not a receipt as this program writes one")


def _invalid(number: int, what: str) -> CertificateError:
    return CertificateError(NAME, f"{NAME} line {number} {what}")


# ---- a budget that ended the run ------------------------------------------------------------------------------------


def write_refusal(path: Path, plan: Plan, refused: tuple[int, Any], config: str, head: str) -> None:
    """Write which (round, cohort) was refused after the log's head; the cohort only where it is visible by design."""
    t, cohort = refused
    text = charge_log.next_charge(t, cohort if charge_log.cohort_is_visible(plan) else None, config, head).line()
    durable_files.write(path / REFUSED, text + b"\n")


def read_refusal(path: Path, log: ChargeLog, config: Config, digest: str) -> BudgetError | None:
    """Why the run is over, if a budget ended it; `CertificateError` if the file says so and the budget does not."""
    if not (path / REFUSED).exists():
        return None
    lines = b"".join(charge.line() + b"\n" for charge in log.charges) + durable_files.read(path / REFUSED)
    found, budget = charge_log.parse(lines, log.root, digest, config.plan), config.budget
    if budget is None or found.torn or len(found.charges) != len(log.charges) + 1:
        raise CertificateError(REFUSED, f"{REFUSED} does not follow the last charge under a budget")
    t, cohort = found.rounds[-1], found.cohorts(config.plan)[-1]
    try:
        filter_after_charges(path, config.plan, budget, log).check(cohort, t)
    except BudgetError as error:
        return error
    raise CertificateError(REFUSED, f"{REFUSED} names a round that every budget in it would have paid for")
