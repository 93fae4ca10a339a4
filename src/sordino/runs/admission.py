"""Charging a run to the ledger of its data set. Called by `execute`, `train`, sweeps and tuning.

A run is charged whole before its first round, so of two that compete for the last of a budget one is admitted. The
charge is the planned cost, as the certificate will show it. A run that stops early gets nothing back: somebody has seen
its models. A run that is continued is not charged twice; rounds that are run again after a kill are charged before
they run. What all runs on the data set have cost is written at the end, in ledger.json.

Run folder and ledger know each other: every release is noted in the ledger, with the head of the folder's charge log,
before its noise is drawn. So a copy of a folder, or an older one that was put back, is charged for the rounds that it
releases beside those released already; and a ledger that lacks releases which the folder has charged is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino import codec
from sordino.accounting.composition import Line, repeated_rounds
from sordino.certificate.facts import Facts, run_cost
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import CertificateError, ConfigError, StorageError, UserError
from sordino.ledger.entries import RoundEntry
from sordino.ledger.journal import RESTORES
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Item, Standing
from sordino.runs.charge_log import ChargeLog

if TYPE_CHECKING:
    from sordino.runs.folder import RunFolder

NAME = "ledger.json"


def ledger_request(config: Config, facts: Facts) -> Request:
    """The first line of the cost, in the ledger's terms: by name where silos have names.

    Random cohorts are charged averaged over their coins, before the run and after it: composed with other runs, whose
    coins are their own, that is true whatever was drawn.
    """
    if config.plan.clients.random:
        facts = replace(facts, max_participations=None, per_client=(), stopped=False)
    cost = run_cost(config.plan, facts)
    lines, best = cost.of("models"), config.privacy.selected
    whose = config.plan.hash if best is None else codec.digest(best)
    return Request(cost.unit, lines[0].relation, _items(lines, config.task.silos), whose)


def _payer(config: Config, run: str) -> str:
    """Who is charged for a run: itself, or, of many trials, their tuning, which is charged once, before the first."""
    best = config.privacy.selected
    return run if best is None else best.id


def _items(lines: tuple[Line, ...], names: tuple[str, ...]) -> tuple[Item, ...]:
    """Silos by name; without names nobody knows whose records they were in another run, so they must be alike."""
    if names:
        whose = [(line, name) for line in lines for k, name in enumerate(names) if not line.silos or k in line.silos]
        return tuple(Item(event, count, silo=name) for line, name in whose for event, count in line.entries if count)
    if len({tuple(event for event, _ in line.entries) for line in lines}) > 1:
        found = "a ledger, and silos that differ in their noise or size and have no names"
        raise ConfigError(found, "names, by which a silo is known in the next run", "set [task] silos")
    most = max(lines, key=lambda line: [count for _, count in line.entries])
    return tuple(Item(event, count) for event, count in most.entries if count)


def _planned_request(config: Config, charged: Sequence[int] = (), t: int = 0, prepared: int = 1) -> Request:
    """What the run will have cost if it goes on from round t to its end, with so many preparations in all."""
    return ledger_request(config, planned_facts(config, charged, t, prepared))


def planned_facts(config: Config, charged: Sequence[int] = (), t: int = 0, prepared: int = 1) -> Facts:
    """What a certificate will rest on if the run goes on from round t to its end."""
    rounds = [*charged, *range(t, config.plan.rounds)]
    again = repeated_rounds(rounds)
    spent: dict[str, Any] = {"repeats": len(again), "repeated": again, "prepared": prepared}
    return Facts(config.delta, config.privacy.noise, len(rounds), **spent, **config.facts)


def _named(config: Config) -> tuple[Path, str] | None:
    file, name = config.privacy.ledger, config.privacy.dataset
    return None if file is None or name is None else (Path(file), name)


def check_all_affordable(config: Config, all_of_them: Request) -> None:
    """Refuse many runs on one data set whose cost together exceeds its budget."""
    named = _named(config)
    if named is not None:
        with Ledger.open(named[0]) as ledger:
            ledger.consider(named[1], all_of_them)


def check_affordable(config: Config) -> None:
    """Refuse a run beyond its data set's budget, before anything is written; a trial was charged with the others."""
    named = _named(config)
    if named is not None and config.privacy.selected is None:
        with Ledger.open(named[0]) as ledger:
            ledger.consider(named[1], _planned_request(config))


def admit_whole(config: Config, run: str) -> None:
    """Pay for a run that no folder can continue, or for all trials of a tuning, before the first round."""
    named = _named(config)
    if named is not None:
        with Ledger.open(named[0]) as ledger:
            ledger.admit(_payer(config, run), named[1], _planned_request(config), whole=True)


@dataclass
class Admission:
    """An admitted run: every release is noted in the ledger before its noise is drawn."""

    ledger: Ledger
    run: str
    released: int  # releases of this run that the ledger knows of
    elsewhere: int = 0  # of those, from other copies of the folder

    def note(self, number: int, head: str) -> None:
        """Round `number` (from 1) is about to be released; `head` is the chain's, with its charge."""
        self.ledger.note_release(self.run, number, head, self.released)
        self.released += 1


@contextmanager
def admit(config: Config, run: str, log: ChargeLog, t: int, *, prepares: bool) -> Iterator[Admission | None]:
    """Charge what is left of a run, from round t, beside all that was released of it, before any of it is run."""
    named = _named(config)
    if named is None:
        yield None
        return
    with Ledger.open(named[0]) as ledger:
        if config.privacy.selected is None:
            yield _admission(config, ledger, named[1], run, log, t, prepares)
        else:  # the tuning was charged for all its trials, before the first
            asked = _planned_request(config, log.rounds, t, log.prepared + prepares)
            ledger.admit(_payer(config, run), named[1], asked, whole=True)
            yield None


def _admission(
    config: Config, ledger: Ledger, name: str, run: str, log: ChargeLog, t: int, prepares: bool
) -> Admission:
    noted, from_first = ledger.released(run)
    missing = _not_noted(log, noted)
    if from_first and len(missing) > 1:  # a kill leaves one at most
        found = f"the ledger {ledger.path}, which lacks {len(missing)} releases that the run {run} has charged"
        raise StorageError(found, "a ledger that is as new as the run folder", RESTORES)
    numbers = [one.round for one in noted] + missing
    rounds, prepared = [number - 1 for number in numbers if number], numbers.count(0) + prepares
    head = log.head if from_first or not log.charges else ""  # else it began before releases were noted
    asked = _planned_request(config, rounds, t, prepared)
    ledger.admit(run, name, asked, whole=True, chain=head, released=len(noted))
    return Admission(ledger, run, len(noted), elsewhere=len(numbers) - len(log.charges))


def _not_noted(log: ChargeLog, noted: list[RoundEntry]) -> list[int]:
    """Rounds, from 1, that the chain has charged and the ledger does not know of."""
    left, found = Counter(one.head for one in noted), []
    for charge, head in zip(log.charges, log.heads, strict=True):
        if left[head] > 0:
            left[head] -= 1
        else:
            found.append(charge.round)
    return found


def write_standing(folder: RunFolder) -> None:
    """Note what the data set has spent, once; if the run has cost more than was planned, that is written down too."""
    held = folder.contents()
    if (folder.path / NAME).exists() or _named(held.config) is None:
        return
    found = final_standing(held.config, held.header.run, folder.facts(held))
    durable_files.write(folder.path / NAME, (json.dumps(codec.dump(found), indent=1) + "\n").encode())


def final_standing(config: Config, run: str, facts: Facts) -> Standing | None:
    """What the data set has spent, this run's whole cost among it; None where no ledger is named."""
    named = _named(config)
    if named is None:
        return None
    with Ledger.open(named[0]) as ledger:
        payer = _payer(config, run)
        ledger.charge_at_least(payer, ledger_request(config, facts).items)
        return ledger.standing(payer)


def read_standing(path: Path, config: Config, facts: Facts) -> Standing | None:
    """What ledger.json says, if it is of this data set and pays for this run; nothing before it is written."""
    file, named = path / NAME, _named(config)
    if named is None or not file.exists():
        if file.exists() or (named is not None and (path / "certificate.json").exists()):
            what = "not asked for by" if file.exists() else "missing beside"
            raise CertificateError(NAME, f"{NAME} is {what} plan.toml")
        return None
    try:
        found: Standing = codec.read(Standing, json.loads(durable_files.read(file)), NAME)
    except (ValueError, TypeError, RecursionError, UserError) as error:
        raise CertificateError(NAME, f"{NAME} cannot be read ({str(error)[:200]})") from None
    need = ledger_request(config, replace(facts, ledger=None))
    if found.dataset != named[1] or found.limit.mismatch(need.unit, need.relation) is not None:
        raise CertificateError(NAME, f"{NAME} is of another data set than {named[1]!r}, unit or relation")
    if not found.covers(need.items):
        raise CertificateError(NAME, f"{NAME} holds less than this run costs")
    return found
