"""Charging a run to the ledger of its data set. Called by `execute`, `train`, sweeps and tuning.

A run is charged whole before its first round, so of two that compete for the last of a budget one is admitted. The
charge is the planned cost, as the certificate will show it. A run that stops early gets nothing back: its models were
seen. A run that is continued is not charged twice; rounds that are run again after a kill are charged before they run.
What all runs on the data set have cost is written at the end, in ledger.json.

Every release is noted in the ledger, with the head of the run folder's charge log, before its noise is drawn. So a copy
of a folder, or an older one that was put back, is charged for the rounds that it releases beside those released
already; and a ledger that lacks releases which the folder has charged is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.accounting.composition import Line, repeated_rounds
from sordino.certificate.facts import Facts, run_cost
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import CertificateError, ConfigError, StorageError, UserError
from sordino.ledger.journal import RESTORES
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Item, Statement
from sordino.runs.charge_log import ChargeLog

NAME = "ledger.json"


def ledger_request(config: Config, facts: Facts) -> Request:
    """Return the first line of a run's cost as a request to the ledger, by silo name where silos have names.

    Random cohorts are charged averaged over their random draws, before the run and after it: composed with other runs,
    whose draws are independent, that is true whatever was drawn.
    """
    if config.plan.clients.random:
        facts = replace(facts, max_participations=None, per_client=(), stopped=False)
    cost = run_cost(config.plan, facts)
    lines, best = cost.of("models"), config.privacy.selected
    payer = config.plan.hash if best is None else codec.digest(best)
    return Request(cost.unit, lines[0].relation, _items(lines, config.task.silos), payer)


def _items(lines: tuple[Line, ...], names: tuple[str, ...]) -> tuple[Item, ...]:
    """Return a cost's events by silo; silos without names cannot be known again in another run, so must be alike."""
    if names:
        pairs = [(line, name) for line in lines for k, name in enumerate(names) if not line.silos or k in line.silos]
        return tuple(Item(event, count, silo=name) for line, name in pairs for event, count in line.entries if count)
    if len({tuple(event for event, _ in line.entries) for line in lines}) > 1:
        found = "a ledger, and silos that differ in their noise or size and have no names"
        raise ConfigError(found, "names, by which a silo is known in the next run", "set [task] silos")
    most = max(lines, key=lambda line: [count for _, count in line.entries])
    return tuple(Item(event, count) for event, count in most.entries if count)


def planned_facts(config: Config, charged: Sequence[int] = (), t: int = 0, prepared: int = 1) -> Facts:
    """Return what a certificate will rest on if the run goes on from round t to its end, after `charged` rounds."""
    rounds = [*charged, *range(t, config.plan.rounds)]
    again = repeated_rounds(rounds)
    spent: dict[str, Any] = {"repeats": len(again), "repeated": again, "prepared": prepared}
    return Facts(config.delta, config.privacy.noise, len(rounds), **spent, **config.facts)


def _payer(config: Config, run: str) -> str:
    """Return the id that is charged: the run's, or that of the tuning which is charged once for all its trials."""
    best = config.privacy.selected
    return run if best is None else best.id


@contextmanager
def _ledger(config: Config) -> Iterator[tuple[Ledger, str] | None]:
    """Open the ledger that a configuration names, with the name of the data set; None if it names none."""
    file, name = config.privacy.ledger, config.privacy.dataset
    if file is None or name is None:
        yield None
        return
    with Ledger.open(Path(file)) as ledger:
        yield ledger, name


def check_affordable(config: Config, together: Request | None = None) -> None:
    """Refuse a run, or many runs `together`, whose cost exceeds the data set's budget, before anything is written.

    One trial of a tuning is not refused here: all its trials were charged before the first.
    """
    if together is None and config.privacy.selected is not None:
        return
    with _ledger(config) as opened:
        if opened is not None:
            opened[0].consider(opened[1], together or ledger_request(config, planned_facts(config)))


def admit_whole(config: Config, run: str) -> None:
    """Charge a run that no folder can continue, or all trials of a tuning, before the first round."""
    with _ledger(config) as opened:
        if opened is not None:
            request = ledger_request(config, planned_facts(config))
            opened[0].admit(_payer(config, run), opened[1], request, whole=True)


@dataclass
class Admission:
    """An admitted run: every release is noted in the ledger before its noise is drawn."""

    ledger: Ledger
    run: str
    released: int  # releases of this run that the ledger knows of
    elsewhere: int = 0  # those of them from other copies of the folder

    def note(self, number: int, head: str) -> None:
        """Note that round `number` (from 1) is about to be released; `head` is the charge log's, with its charge."""
        self.ledger.note_release(self.run, number, head, self.released)
        self.released += 1


@contextmanager
def admit(config: Config, run: str, log: ChargeLog, t: int, *, prepares: bool) -> Iterator[Admission | None]:
    """Charge the rounds of a run from round t, beside all that was released of it, before any of them is run."""
    with _ledger(config) as opened:
        if opened is None:
            yield None
            return
        ledger, name = opened
        if config.privacy.selected is not None:  # the tuning was charged for all its trials, before the first
            request = ledger_request(config, planned_facts(config, log.rounds, t, log.prepared + prepares))
            ledger.admit(_payer(config, run), name, request, whole=True)
            yield None
            return
        noted, from_first = ledger.released(run)
        left, missing = Counter(one.head for one in noted), []  # charged rounds that the ledger does not know of
        for charge, head in zip(log.charges, log.heads[1:], strict=True):
            missing += [charge.round] * (left[head] <= 0)
            left[head] -= 1
        if from_first and len(missing) > 1:  # a kill leaves one at most
            found = f"the ledger {ledger.path}, which lacks {len(missing)} releases that the run {run} has charged"
            raise StorageError(found, "a ledger that is as new as the run folder", RESTORES)
        numbers = [one.round for one in noted] + missing
        rounds, prepared = [number - 1 for number in numbers if number], numbers.count(0) + prepares
        chain = log.heads[-1] if from_first or not log.charges else ""  # else it began before releases were noted
        request = ledger_request(config, planned_facts(config, rounds, t, prepared))
        ledger.admit(run, name, request, whole=True, chain=chain, released=len(noted))
        yield Admission(ledger, run, len(noted), elsewhere=len(numbers) - len(log.charges))


def final_statement(config: Config, run: str, facts: Facts) -> Statement | None:
    """Charge what a run has cost beyond its plan; return what the data set has spent, None if no ledger is named."""
    with _ledger(config) as opened:
        if opened is None:
            return None
        payer = _payer(config, run)
        opened[0].charge_at_least(payer, ledger_request(config, facts).items)
        return opened[0].statement(run=payer)


def read_statement(path: Path, config: Config, facts: Facts) -> Statement | None:
    """Read ledger.json, None if there is none; refuse another data set's, and one with less than this run costs."""
    file, named = path / NAME, config.privacy.ledger is not None
    if not named or not file.exists():
        if file.exists() or (named and (path / "certificate.json").exists()):
            what = "not asked for by" if file.exists() else "missing beside"
            raise CertificateError(NAME, f"{NAME} is {what} plan.toml")
        return None
    try:
        found: Statement = codec.read(Statement, json.loads(durable_files.read(file)), NAME)
    except (ValueError, TypeError, RecursionError, UserError) as error:
        raise CertificateError(NAME, f"{NAME} cannot be read ({str(error)[:200]})") from None
    need, name = ledger_request(config, replace(facts, ledger=None)), config.privacy.dataset
    if found.dataset != name or found.limit.mismatch(need.unit, need.relation) is not None:
        raise CertificateError(NAME, f"{NAME} is of another data set than {name!r}, unit or relation")
    if not found.covers(need.items):
        raise CertificateError(NAME, f"{NAME} holds less than this run costs")
    return found
