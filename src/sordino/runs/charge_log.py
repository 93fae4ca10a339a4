"""charges.jsonl and the other files of a run that only grow. Called by the run's writer and reader.

One line per release, each bound to the configuration and to the line before:

    head_0 = sha256(run.json)        line_k = {round, cohort?, config, before: head_k-1}        head_k = sha256(line_k)

A line that is changed, added, dropped, doubled or moved breaks the hash chain, and so does a plan or a noise mode that
is changed after the first charge. Somebody who rewrites every file of a folder can make them agree: only a signature
prevents that.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sordino.codec import durable_files
from sordino.errors import CertificateError
from sordino.parts.samplers import NO_RANDOMNESS, Cohort
from sordino.plan import Plan

NAME = "charges.jsonl"


def digest(data: bytes) -> str:
    """sha256."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Charge:
    """One release, written before its noise is drawn; `cohort` only where the release shows it anyway."""

    round: int  # from 1; 0: the plan's preparations, released before the first round
    cohort: tuple[int, ...] | None
    config: str  # sha256 of the configuration
    before: str  # sha256 of the line before

    def line(self) -> bytes:
        """The charge as its line of the file: there is one way to write it."""
        seen = {} if self.cohort is None else {"cohort": list(self.cohort)}
        return json.dumps({"round": self.round, **seen, "config": self.config, "before": self.before}).encode()


@dataclass(frozen=True)
class ChargeLog:
    """All charges of a run in their order, with the hash of each line."""

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
        """The charged rounds, counted from 0; a round that was run again stands twice."""
        return [charge.round - 1 for charge in self.charges if charge.round]

    @property
    def prepared(self) -> int:
        """How often the plan's preparations were charged."""
        return sum(charge.round == 0 for charge in self.charges)

    def cohorts(self, plan: Plan) -> list[Cohort]:
        """The cohort of each charged round, where it is public or visible by design; else nothing."""
        if not plan.clients.random:
            return [plan.clients.draw(t, NO_RANDOMNESS) for t in self.rounds]
        return [np.asarray(charge.cohort, dtype=np.int64) for charge in self.charges if charge.cohort is not None]


def parse(data: bytes, root: str, config: str, plan: Plan) -> ChargeLog:
    """The charges of a file, with every link and every number checked, or `CertificateError`."""
    size = data.rfind(b"\n") + 1
    charges: list[Charge] = []
    heads: list[str] = []
    for number, line in enumerate(data[:size].split(b"\n")[:-1], start=1):
        charge = _read(line, number)
        if charge.before != (heads[-1] if heads else root):
            raise _invalid(number, "does not follow the one before it: lines were changed, dropped or moved")
        if charge.config != config:
            raise _invalid(number, "was charged under another configuration than plan.toml's")
        _check_round(charge.round, number, charges[-1].round if charges else None, plan)
        _check_cohort(charge, number, plan)
        charges.append(charge)
        heads.append(digest(line))
    return ChargeLog(root, tuple(charges), tuple(heads), size, size < len(data))


def _invalid(number: int, what: str) -> CertificateError:
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
    raise _invalid(number, "is not a charge as this program writes one")


def _check_round(found: int, number: int, before: int | None, plan: Plan) -> None:
    """Rounds count up from 1; after a kill the same round again, or, from the older checkpoint, the one before it.

    A plan with preparations begins at 0: they are charged before round 1.
    """
    first = 0 if plan.prepare else 1
    allowed = (first,) if before is None else (before - 1, before, before + 1)
    if found not in allowed or not first <= found <= plan.rounds or (found == 0 and before):
        what = f"charges round {found}, which cannot follow {'nothing' if before is None else before}"
        raise _invalid(number, f"{what} in {plan.rounds} rounds")


def _check_cohort(charge: Charge, number: int, plan: Plan) -> None:
    if (charge.cohort is not None) != (cohort_is_visible(plan) and charge.round > 0):
        raise _invalid(number, "holds a cohort that is not seen, or hides one that is")
    if charge.cohort is None:
        return
    population = plan.clients.population
    if not all(0 <= client < population for client in charge.cohort) or len(set(charge.cohort)) != len(charge.cohort):
        raise _invalid(number, f"holds a cohort that is not of {population} clients, each at most once")
    if not plan.clients.random and charge.cohort != tuple(plan.clients.draw(charge.round - 1, NO_RANDOMNESS).tolist()):
        raise _invalid(number, "holds another cohort than the plan's")


def cohort_is_visible(plan: Plan) -> bool:
    """Whether the release shows who took part by design, so that it may be written down."""
    return bool({"cohort", "messages"} & plan.release.sees)


def next_charge(t: int, cohort: Cohort | None, config: str, before: str) -> Charge:
    """The charge of round t (from 0) after the head `before`."""
    return Charge(t + 1, None if cohort is None else tuple(cohort.tolist()), config, before)


def check_second_copy(data: bytes, log: ChargeLog, *, at_rest: bool) -> None:
    """checkpoint/charged holds the hash of every charge a second time, so a charge that was removed is noticed.

    A kill between the two writes leaves at most one charge that is not in the copy, or half of it; at rest, none.
    """
    *whole, rest = data.decode("ascii", "replace").split("\n")
    ahead = len(log.heads) - len(whole)
    if tuple(whole) != log.heads[: len(whole)] or ahead < 0:
        raise CertificateError(NAME, f"{NAME} lacks a charge that checkpoint/charged holds: it was cut or replaced")
    following = log.heads[len(whole)] if ahead else ""
    if ahead > (0 if at_rest else 1) or not following.startswith(rest):
        raise CertificateError("checkpoint/charged", f"checkpoint/charged is not the note of what stands in {NAME}")


# ---- files that only grow -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefixHash:
    """Length and sha256 of the first `size` bytes of a file, as a checkpoint or a certificate binds them."""

    size: int = 0
    sha256: str = hashlib.sha256().hexdigest()

    @classmethod
    def of(cls, data: bytes) -> PrefixHash:
        return cls(len(data), digest(data))

    def check(self, data: bytes, name: str) -> bytes:
        """The bytes that are bound; what follows them was written after the checkpoint and is to be written again."""
        if PrefixHash.of(data[: self.size]) != self:
            raise CertificateError(name, f"{name} is not what the checkpoint was written after")
        return data[: self.size]


class GrowingFile:
    """A file of lines to append to; its size and hash are known without reading it again."""

    def __init__(self, file: Path, data: bytes = b"") -> None:
        self.file, self.size, self._sha = file, len(data), hashlib.sha256(data)

    def append(self, line: bytes) -> None:
        """One more line, on disk when this returns."""
        durable_files.append(self.file, line + b"\n", self.size)
        self.size += len(line) + 1
        self._sha.update(line + b"\n")

    @property
    def prefix(self) -> PrefixHash:
        return PrefixHash(self.size, self._sha.hexdigest())


def read_lines(data: bytes, name: str) -> list[dict[str, Any]]:
    """The lines of a jsonl file, every one of them an object."""
    try:
        found = [json.loads(line) for line in data.decode().splitlines()]
    except (ValueError, RecursionError) as error:
        raise CertificateError(name, f"{name} holds a line that is not JSON ({error})") from None
    if not all(isinstance(entry, dict) for entry in found) or (data and not data.endswith(b"\n")):
        raise CertificateError(name, f"{name} holds a line that is not whole")
    return found
