"""The charges of a run: one line per release, each bound to the configuration and to the line before.

    head_0 = sha256(run.json)        line_k = {round, cohort?, config, before: head_k-1}        head_k = sha256(line_k)

So a line that is changed, added, dropped, doubled or moved, and a plan or a noise mode that is changed after the first
charge, break the chain. Who rewrites every file of a folder can make them agree: only a signature binds him.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from sordino.errors import CertificateError
from sordino.parts.samplers import NO_COINS, Cohort
from sordino.plan import Plan

NAME = "charges.jsonl"


def digest(data: bytes) -> str:
    """sha256."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Charge:
    """One release; `cohort` only where the release shows it anyway."""

    round: int  # from 1; 0: what the plan releases of columns before the first round
    cohort: tuple[int, ...] | None
    config: str
    before: str

    def line(self) -> bytes:
        """The one way to write it."""
        seen = {} if self.cohort is None else {"cohort": list(self.cohort)}
        return json.dumps({"round": self.round, **seen, "config": self.config, "before": self.before}).encode()


@dataclass(frozen=True)
class ChargeLog:
    """Charges in their order, and the head after each of them."""

    root: str
    charges: tuple[Charge, ...] = ()
    heads: tuple[str, ...] = ()
    size: int = 0  # bytes of whole lines
    torn: bool = False  # bytes of a last line without an end: a kill while it was written, before its noise

    @property
    def head(self) -> str:
        return self.heads[-1] if self.heads else self.root

    @property
    def rounds(self) -> list[int]:
        """Which rounds were charged, counted from 0; one that was run again stands twice."""
        return [charge.round - 1 for charge in self.charges if charge.round]

    @property
    def prepared(self) -> int:
        """How often the plan's preparations were charged."""
        return sum(charge.round == 0 for charge in self.charges)

    def cohorts(self, plan: Plan) -> list[Cohort]:
        """Who took part in each charged round, where that is seen by design or public anyway; else nothing."""
        if not plan.clients.random:
            return [plan.clients.draw(t, NO_COINS) for t in self.rounds]
        return [np.asarray(charge.cohort, dtype=np.int64) for charge in self.charges if charge.cohort is not None]


def parse(data: bytes, root: str, config: str, plan: Plan) -> ChargeLog:
    """The chain in a file, every link and every number checked, or `CertificateError`."""
    size = data.rfind(b"\n") + 1
    charges: list[Charge] = []
    heads: list[str] = []
    for number, line in enumerate(data[:size].split(b"\n")[:-1], start=1):
        charge = _read(line, number)
        _check_link(charge, number, heads[-1] if heads else root, config)
        _check_round(charge.round, number, charges[-1].round if charges else None, plan)
        _check_cohort(charge, number, plan)
        charges.append(charge)
        heads.append(digest(line))
    return ChargeLog(root, tuple(charges), tuple(heads), size, size < len(data))


def _wrong(number: int, what: str) -> CertificateError:
    return CertificateError(NAME, f"{NAME} line {number} {what}")


def _read(line: bytes, number: int) -> Charge:
    try:
        table: dict[str, Any] = json.loads(line)
        cohort = table.get("cohort")
        members = None if cohort is None else tuple(cohort)
        found = Charge(table["round"], members, table["config"], table["before"])
        plain = type(found.round) is int and all(type(client) is int for client in found.cohort or ())
        if plain and found.line() == line:
            return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise _wrong(number, "is not a charge as this program writes one")


def _check_link(charge: Charge, number: int, before: str, config: str) -> None:
    if charge.before != before:
        raise _wrong(number, "does not follow the one before it: lines were changed, dropped or moved")
    if charge.config != config:
        raise _wrong(number, "was charged under another configuration than plan.toml's")


def _check_round(found: int, number: int, before: int | None, plan: Plan) -> None:
    """From 1 up; after a kill the same round again, or with the checkpoint before the last the one before it.

    A plan with preparations begins at 0: they were charged, and kept, before round 1.
    """
    first = 0 if plan.prepare else 1
    allowed = (first,) if before is None else (before - 1, before, before + 1)
    if found not in allowed or not first <= found <= plan.rounds or (found == 0 and before):
        what = f"charges round {found}, which cannot follow {'nothing' if before is None else before}"
        raise _wrong(number, f"{what} in {plan.rounds} rounds")


def _check_cohort(charge: Charge, number: int, plan: Plan) -> None:
    if (charge.cohort is not None) != (cohort_is_visible(plan) and charge.round > 0):
        raise _wrong(number, "holds a cohort that is not seen, or hides one that is")
    if charge.cohort is None:
        return
    population = plan.clients.population
    if not all(0 <= client < population for client in charge.cohort) or len(set(charge.cohort)) != len(charge.cohort):
        raise _wrong(number, f"holds a cohort that is not of {population} clients, each at most once")
    if not plan.clients.random and charge.cohort != tuple(plan.clients.draw(charge.round - 1, NO_COINS).tolist()):
        raise _wrong(number, "holds another cohort than the plan's")


def cohort_is_visible(plan: Plan) -> bool:
    """Whether who took part is seen by design, and so may be written down."""
    return bool({"cohort", "messages"} & plan.release.sees)


def next_charge(t: int, cohort: Cohort | None, config: str, before: str) -> Charge:
    """The charge of round t (from 0) after the head `before`."""
    return Charge(t + 1, None if cohort is None else tuple(cohort.tolist()), config, before)


def check_second_copy(data: bytes, chain: ChargeLog, *, at_rest: bool) -> None:
    """Every charge is noted a second time before its noise: one that was taken from the chain is missed.

    A kill between the two leaves at most one charge that is not noted, or half noted; at rest there is none.
    """
    *whole, rest = data.decode("ascii", "replace").split("\n")
    ahead = len(chain.heads) - len(whole)
    if tuple(whole) != chain.heads[: len(whole)] or ahead < 0:
        raise CertificateError(NAME, f"{NAME} lacks a charge that checkpoint/charged holds: it was cut or replaced")
    following = chain.heads[len(whole)] if ahead else ""
    if ahead > (0 if at_rest else 1) or not following.startswith(rest):
        raise CertificateError("checkpoint/charged", f"checkpoint/charged is not the note of what stands in {NAME}")
