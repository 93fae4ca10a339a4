"""Files charges.jsonl, receipts.jsonl and refused.json of a run folder. Called by the folder's writer and reader.

charges.jsonl has one line per release (k = 1, 2, ...), bound to the configuration and to the line before it:

    head_0 = sha256(run.json)        line_k = {round, cohort?, config, before: head_k-1}        head_k = sha256(line_k)

A line that is changed, added, dropped, doubled or moved breaks the hash chain, and so does a change of plan or noise
mode after the first charge. Whoever rewrites all files of a folder can make them agree: only a signature prevents that.

receipts.jsonl has one line for each round of a deployed run: which clients refused, and how many charges by this run
each silo reports. The file is written only if cohorts are public or visible.

refused.json is the charge that a budget refused: round, cohort, configuration and last hash of the charge log. It is
accepted only if the budget, recomputed from the charges, refuses that cohort. A run that a budget has ended cannot
continue: if other random cohorts were drawn after the model was seen, the number of rounds would depend on the data.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sordino.codec import durable_files
from sordino.config import Config
from sordino.engines.base import Receipt
from sordino.errors import BudgetError, CertificateError
from sordino.ledger.budget import ClientCharges, Filter
from sordino.loop import RoundReceipts
from sordino.outcome import replay_charges
from sordino.parts.samplers import NO_RANDOMNESS, Cohort
from sordino.plan import Plan

CHARGES, RECEIPTS, REFUSED = "charges.jsonl", "receipts.jsonl", "refused.json"
RESTORE = "; fix: restore the unchanged folder of the run"
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # what a damaged line raises


@dataclass(frozen=True)
class Charge:
    """Charge of one release, written before its noise is drawn; `cohort` is None unless the release reveals it."""

    round: int  # from 1; 0: the plan's preparations, released before the first round
    cohort: tuple[int, ...] | None
    config: str  # sha256 of the configuration
    before: str  # sha256 of the line before

    def line(self) -> bytes:
        """Return the charge as a line of charges.jsonl; `parse_charges` refuses a line with any other bytes."""
        seen = {} if self.cohort is None else {"cohort": list(self.cohort)}
        return json.dumps({"round": self.round, **seen, "config": self.config, "before": self.before}).encode()


@dataclass(frozen=True)
class ChargeLog:
    """All charges of a run in their order; `heads` has the hash of run.json, then the hash of each line."""

    heads: tuple[str, ...]
    charges: tuple[Charge, ...] = ()
    size: int = 0  # bytes of whole lines
    torn: bool = False  # the last line has no end: a kill while it was written, before its noise was drawn

    @property
    def rounds(self) -> list[int]:
        """Charged rounds, counted from 0; a repeated round is listed twice."""
        return [charge.round - 1 for charge in self.charges if charge.round]

    @property
    def prepared(self) -> int:
        """Number of charges for the histograms that are released before round 1."""
        return sum(charge.round == 0 for charge in self.charges)

    def cohorts(self, plan: Plan) -> list[Cohort]:
        """Return the cohort of each charged round; empty if cohorts are secret."""
        if not plan.clients.random:
            return [plan.clients.draw(t, NO_RANDOMNESS) for t in self.rounds]
        return [np.asarray(charge.cohort, dtype=np.int64) for charge in self.charges if charge.cohort is not None]


def parse_charges(data: bytes, root: str, config: str, plan: Plan) -> ChargeLog:
    """Parse charges.jsonl; raise `CertificateError` if a link of the hash chain, a round or a cohort is wrong."""
    size = data.rfind(b"\n") + 1
    charges: list[Charge] = []
    heads = [root]
    for number, line in enumerate(data[:size].split(b"\n")[:-1], start=1):
        charge, wrong = _read_charge(line), ""
        if charge is None:
            wrong = "is not a charge in the format of this program"
        elif charge.before != heads[-1]:
            wrong = "does not follow the one before it: lines were changed, dropped or moved"
        elif charge.config != config:
            wrong = "was charged under another configuration than plan.toml's"
        else:
            wrong = _wrong_round(charge.round, charges[-1].round if charges else None, plan)
            wrong = wrong or _wrong_cohort(charge, plan)
        if charge is None or wrong:
            raise CertificateError(CHARGES, f"{CHARGES} line {number} {wrong}{RESTORE}")
        charges.append(charge)
        heads.append(hashlib.sha256(line).hexdigest())
    return ChargeLog(tuple(heads), tuple(charges), size, size < len(data))


def _read_charge(line: bytes) -> Charge | None:
    try:
        table: dict[str, Any] = json.loads(line)
        cohort = table.get("cohort")
        found = Charge(table["round"], None if cohort is None else tuple(cohort), table["config"], table["before"])
        plain = type(found.round) is int and all(type(client) is int for client in found.cohort or ())
        return found if plain and found.line() == line else None
    except _UNREADABLE:
        return None


def _wrong_round(found: int, before: int | None, plan: Plan) -> str:
    """Return why round `found` cannot follow round `before`; empty if it can.

    Rounds count up from 1 (0: histograms that are released before round 1). After a kill the last round is repeated or,
    from an older checkpoint, the round before it.
    """
    first = 0 if plan.prepare else 1
    allowed = (first,) if before is None else (before - 1, before, before + 1)
    if found in allowed and first <= found <= plan.rounds and not (found == 0 and before):
        return ""
    last = "nothing" if before is None else before
    return f"charges round {found}, which cannot follow {last} in {plan.rounds} rounds"


def _wrong_cohort(charge: Charge, plan: Plan) -> str:
    if (charge.cohort is not None) != (cohort_is_visible(plan) and charge.round > 0):
        return "has a cohort that is secret, or lacks one that is visible"
    if charge.cohort is None:
        return ""
    population = plan.clients.population
    if not all(0 <= client < population for client in charge.cohort) or len(set(charge.cohort)) != len(charge.cohort):
        return f"has a client twice, or one outside the {population} clients"
    fixed = None if plan.clients.random else tuple(plan.clients.draw(charge.round - 1, NO_RANDOMNESS).tolist())
    return "" if fixed in (None, charge.cohort) else "has another cohort than the plan's"


def cohort_is_visible(plan: Plan) -> bool:
    """Return whether the release reveals the cohort by design, so that charges.jsonl may have it."""
    return bool({"cohort", "messages"} & plan.release.sees)


def next_charge(t: int, cohort: Cohort | None, config: str, before: str) -> bytes:
    """Return the line of charges.jsonl for round t (from 0); `before` is the hash of the line before it."""
    return Charge(t + 1, None if cohort is None else tuple(cohort.tolist()), config, before).line()


def check_second_copy(data: bytes, log: ChargeLog, *, at_rest: bool) -> None:
    """Refuse a charge log that lacks a charge whose hash is in `data`, the content of checkpoint/charged.

    That file is a second copy of all hashes. A kill between the two writes leaves at most one charge without its whole
    hash in the copy; a finished run (`at_rest`) has none.
    """
    *whole, rest = data.decode("ascii", "replace").split("\n")
    heads = log.heads[1:]
    ahead = len(heads) - len(whole)
    if tuple(whole) != heads[: len(whole)] or ahead < 0:
        what = f"{CHARGES} lacks a charge that checkpoint/charged has: it was cut or replaced"
        raise CertificateError(CHARGES, what + RESTORE)
    following = heads[len(whole)] if ahead else ""
    if ahead > (0 if at_rest else 1) or not following.startswith(rest):
        what = f"checkpoint/charged does not have the hashes of {CHARGES}"
        raise CertificateError("checkpoint/charged", what + RESTORE)


@dataclass(frozen=True)
class PrefixHash:
    """Length and SHA-256 of the first bytes of a file, stored in a checkpoint or a certificate."""

    size: int = 0
    sha256: str = hashlib.sha256().hexdigest()

    @classmethod
    def of(cls, data: bytes) -> PrefixHash:
        return cls(len(data), hashlib.sha256(data).hexdigest())


def read_lines(data: bytes, name: str) -> list[dict[str, Any]]:
    """Parse a jsonl file; raise `CertificateError` if a line is not a whole JSON object."""
    try:
        found = [json.loads(line) for line in data.decode().splitlines()]
    except (ValueError, RecursionError) as error:
        raise CertificateError(name, f"{name} has a line that is not JSON ({error}){RESTORE}") from None
    if not all(isinstance(entry, dict) for entry in found) or (data and not data.endswith(b"\n")):
        raise CertificateError(name, f"{name} has an incomplete line{RESTORE}")
    return found


# ---- receipts of silos
def receipt_line(note: RoundReceipts) -> bytes:
    """Return the silos' receipts of one round as a line of receipts.jsonl."""
    paid = [[receipt.client, receipt.charges] for receipt in note.receipts]
    return json.dumps({"after": note.after, "refused": list(note.refused), "paid": paid}).encode()


def read_receipts(folder: Path) -> bytes | None:
    """Return the bytes of receipts.jsonl; None if the folder does not have it."""
    return durable_files.read(folder / RECEIPTS) if (folder / RECEIPTS).exists() else None


def whole_lines(data: bytes) -> bytes:
    """Return data without an incomplete last line, which a kill leaves."""
    return data[: data.rfind(b"\n") + 1]


def parse_receipts(folder: Path, plan: Plan, charges: int) -> tuple[RoundReceipts, ...]:
    """Parse receipts.jsonl of a folder with `charges` charges; raise `CertificateError` if a number is wrong."""
    found: list[RoundReceipts] = []
    lines = whole_lines(read_receipts(folder) or b"").split(b"\n")[:-1]
    if lines and not plan.cohort_is_public:
        raise CertificateError(RECEIPTS, f"{RECEIPTS} names clients of a secret cohort{RESTORE}")
    for number, line in enumerate(lines, start=1):
        note = _read_receipt(line)
        if note is None:
            what = f"{RECEIPTS} line {number} is not a receipt in the format of this program"
            raise CertificateError(RECEIPTS, what + RESTORE)
        people = [*note.refused, *(receipt.client for receipt in note.receipts)]
        known = all(0 <= client < plan.clients.population for client in people) and len(set(people)) == len(people)
        if not known or not (found[-1].after if found else 0) <= note.after <= charges:
            what = "has a client twice, or an unknown client, or does not follow the charges"
            raise CertificateError(RECEIPTS, f"{RECEIPTS} line {number} {what}{RESTORE}")
        found.append(note)
    return tuple(found)


def _read_receipt(data: bytes) -> RoundReceipts | None:
    try:
        table: dict[str, Any] = json.loads(data)
        paid = tuple(Receipt(client, charges) for client, charges in table["paid"])
        found = RoundReceipts(table["after"], tuple(table["refused"]), paid)
        numbers = [found.after, *found.refused, *(n for one in paid for n in (one.client, one.charges))]
        plain = all(type(n) is int and n >= 0 for n in numbers)
        return found if plain and receipt_line(found) == data else None
    except _UNREADABLE:
        return None


def last_counts(path: Path, plan: Plan, log: ChargeLog) -> dict[int, int]:
    """Return, for each client, the largest number of charges by this run that its receipts report."""
    most: Counter[int] = Counter()
    for note in parse_receipts(path, plan, len(log.charges)):
        most |= Counter({receipt.client: receipt.charges for receipt in note.receipts})
    return dict(most)


def filter_after_charges(path: Path, plan: Plan, budget: Filter, log: ChargeLog, deployed: bool = False) -> Filter:
    """Return the clients' budgets after all charges of a run folder, corrected by the silos' receipts."""
    notes = parse_receipts(path, plan, len(log.charges))
    budget = replace(budget, elsewhere=ClientCharges.of(plan)) if deployed or notes else budget
    replay_charges(plan, log.rounds, log.cohorts(plan), notes, budget)
    return budget


# ---- a budget that ended the run
def read_refusal(path: Path, log: ChargeLog, config: Config, digest: str) -> BudgetError | None:
    """Return the budget's refusal that ended the run, from refused.json; None if there is no such file.

    Raises `CertificateError` if the budget, recomputed from the charges, allows the round.
    """
    if not (path / REFUSED).exists():
        return None
    lines = b"".join(charge.line() + b"\n" for charge in log.charges) + durable_files.read(path / REFUSED)
    found, budget = parse_charges(lines, log.heads[0], digest, config.plan), config.budget
    if budget is None or found.torn or len(found.charges) != len(log.charges) + 1:
        raise CertificateError(REFUSED, f"{REFUSED} does not follow the last charge under a budget{RESTORE}")
    t, cohort = found.rounds[-1], found.cohorts(config.plan)[-1]
    try:
        filter_after_charges(path, config.plan, budget, log).check(cohort, t)
    except BudgetError as error:
        return error
    raise CertificateError(REFUSED, f"{REFUSED} has a round that the budgets of its whole cohort allow{RESTORE}")
