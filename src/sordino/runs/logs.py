"""Files that only grow, and how much of them is bound by a checkpoint or a certificate.

How a run ended before its last round: a budget refused the next cohort, or else it did not end but was stopped.

refused.json is the charge that was not made: round, cohort, configuration, head of the chain. It is believed only if
the charges leave that cohort no room in the budget, which is counted again. A run that a budget has ended is over:
whoever could go on with other coins after a look at the model would choose its length by the data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import BudgetError, CertificateError
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.runs import charge_log, receipts
from sordino.runs.charge_log import ChargeLog


@dataclass(frozen=True)
class PrefixHash:
    """The first `size` bytes of a file have this sha256."""

    size: int = 0
    sha256: str = hashlib.sha256().hexdigest()

    @classmethod
    def of(cls, data: bytes) -> PrefixHash:
        return cls(len(data), hashlib.sha256(data).hexdigest())

    def check(self, data: bytes, name: str) -> bytes:
        """The bytes that are bound; what follows them was written after the checkpoint and is to be written again."""
        if PrefixHash.of(data[: self.size]) != self:
            raise CertificateError(name, f"{name} is not what the checkpoint was written after")
        return data[: self.size]


class GrowingFile:
    """A file of lines that grows: its size and hash are known without reading it again."""

    def __init__(self, file: Path, data: bytes = b"") -> None:
        self.file, self.size, self._sha = file, len(data), hashlib.sha256(data)

    def append(self, line: bytes) -> None:
        """One more line, on disk when this returns."""
        durable_files.append(self.file, line + b"\n", self.size)
        self.size += len(line) + 1
        self._sha.update(line + b"\n")

    @property
    def mark(self) -> PrefixHash:
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


NAME = "refused.json"


def write_refusal(path: Path, plan: Plan, refused: tuple[int, Cohort], config: str, head: str) -> None:
    """Write down which cohort was refused, after the chain's head; the cohort only where it is seen by design."""
    t, cohort = refused
    line = charge_log.next_charge(t, cohort if charge_log.cohort_is_visible(plan) else None, config, head).line()
    durable_files.write(path / NAME, line + b"\n")


def read_refusal(path: Path, held: ChargeLog, config: Config, digest: str) -> BudgetError | None:
    """Why the run is over, if a budget ended it; `CertificateError` if the file says so and the budget does not."""
    if not (path / NAME).exists():
        return None
    whole = b"".join(charge.line() + b"\n" for charge in held.charges) + durable_files.read(path / NAME)
    found, budget = charge_log.parse(whole, held.root, digest, config.plan), config.budget
    if budget is None or found.torn or len(found.charges) != len(held.charges) + 1:
        raise CertificateError(NAME, f"{NAME} does not follow the last charge under a budget")
    t, cohort = found.rounds[-1], found.cohorts(config.plan)[-1]
    try:
        receipts.filter_after_charges(path, config.plan, budget, held).check(cohort, t)
    except BudgetError as error:
        return error
    raise CertificateError(NAME, f"{NAME} names a round that every budget in it would have paid for")
