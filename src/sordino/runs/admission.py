"""Charging of a run to the ledger of its data set. Called by `execute`, `train`, sweeps and tuning.

A run is charged for all its rounds before the first one, so that of two runs that compete for the rest of a budget only
one is admitted. The charge is the planned cost, as on the certificate. A run that stops early gets no refund, since its
models were seen. A resumed run is not charged twice; rounds that are repeated after a kill are charged before they run.
At the end ledger.json states the cost of all runs on the data set.

Each release is recorded in the ledger, with the last hash of the run folder's charge log, before its noise is drawn. So
a copy of a folder, or an older folder that was restored, is charged for the rounds that it releases in addition, and a
ledger that lacks recorded releases of the folder is refused.
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
from sordino.runs.charge_log import RESTORE, ChargeLog

NAME = "ledger.json"


def ledger_request(config: Config, facts: Facts) -> Request:
    """Return a run's cost as a request to the ledger, by silo if silos have names.

    The adversary sees models. For random cohorts the cost is that of the sampling distribution, also after the run, so
    that it composes with other runs, whose sampling is independent.
    """
    if config.plan.clients.random:
        facts = replace(facts, max_participations=None, per_client=(), stopped=False)
    cost = run_cost(config.plan, facts)
    lines, best = cost.of("models"), config.privacy.selected
    payer = config.plan.hash if best is None else codec.digest(best)
    return Request(cost.unit, lines[0].relation, _items(lines, config.task.silos), payer)


def _items(lines: tuple[Line, ...], names: tuple[str, ...]) -> tuple[Item, ...]:
    if names:
        pairs = [(line, name) for line in lines for k, name in enumerate(names) if not line.silos or k in line.silos]
        return tuple(Item(event, count, silo=name) for line, name in pairs for event, count in line.entries if count)
    if len({tuple(event for event, _ in line.entries) for line in lines}) > 1:
        found = "a ledger, and silos without names that differ in noise or size"
        raise ConfigError(found, "a name for each silo in the ledger", "set silos in [task]")
    most = max(lines, key=lambda line: [count for _, count in line.entries])
    return tuple(Item(event, count) for event, count in most.entries if count)


def planned_facts(config: Config, charged: Sequence[int] = (), t: int = 0, prepared: int = 1) -> Facts:
    """Return the certificate's facts of a run that has `charged` these rounds and will run from round t to its end."""
    rounds = [*charged, *range(t, config.plan.rounds)]
    again = repeated_rounds(rounds)
    spent: dict[str, Any] = {"repeats": len(again), "repeated": again, "prepared": prepared}
    return Facts(config.delta, config.privacy.noise, len(rounds), **spent, **config.facts)


def _payer(config: Config, run: str) -> str:
    """Return the id that the ledger charges: the run's, or that of the private tuning that the run is a trial of."""
    best = config.privacy.selected
    return run if best is None else best.id


@contextmanager
def _ledger(config: Config) -> Iterator[tuple[Ledger, str] | None]:
    file, name = config.privacy.ledger, config.privacy.dataset
    if file is None or name is None:
        yield None
        return
    with Ledger.open(Path(file)) as ledger:
        yield ledger, name


def check_affordable(config: Config, together: Request | None = None) -> None:
    """Refuse a run, or the joint request `together` of several runs, that exceeds the data set's remaining budget.

    Nothing is charged. A trial of a private tuning is not checked, since all trials were charged before the first.
    """
    if together is None and config.privacy.selected is not None:
        return
    with _ledger(config) as opened:
        if opened is not None:
            opened[0].consider(opened[1], together or ledger_request(config, planned_facts(config)))


def admit_whole(config: Config, run: str) -> None:
    """Charge a run that cannot be resumed, or all trials of a private tuning, before the first round."""
    with _ledger(config) as opened:
        if opened is not None:
            request = ledger_request(config, planned_facts(config))
            opened[0].admit(_payer(config, run), opened[1], request, whole=True)


@dataclass
class Admission:
    """Run that the ledger of its data set has charged; each of its releases is recorded in the ledger."""

    ledger: Ledger
    run: str
    released: int  # number of this run's releases in the ledger
    elsewhere: int = 0  # number of releases by other copies of the run's folder

    def note(self, number: int, head: str) -> None:
        """Record the release of round `number` (from 1), with `head`, the last hash of the charge log."""
        self.ledger.note_release(self.run, number, head, self.released)
        self.released += 1


@contextmanager
def admit(config: Config, run: str, log: ChargeLog, t: int, *, prepares: bool) -> Iterator[Admission | None]:
    """Charge the ledger for all earlier releases of a run and for its rounds from round t, before these run."""
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
        left, missing = Counter(one.head for one in noted), []  # charged rounds that are not in the ledger
        for charge, head in zip(log.charges, log.heads[1:], strict=True):
            missing += [charge.round] * (left[head] <= 0)
            left[head] -= 1
        if from_first and len(missing) > 1:  # a kill leaves one at most
            found = f"the ledger {ledger.path}, which lacks {len(missing)} releases that the run {run} has charged"
            raise StorageError(found, "a ledger that is as new as the run folder", RESTORES)
        numbers = [one.round for one in noted] + missing
        rounds, prepared = [number - 1 for number in numbers if number], numbers.count(0) + prepares
        chain = log.heads[-1] if from_first or not log.charges else ""  # else it began before releases were recorded
        request = ledger_request(config, planned_facts(config, rounds, t, prepared))
        ledger.admit(run, name, request, whole=True, chain=chain, released=len(noted))
        yield Admission(ledger, run, len(noted), elsewhere=len(numbers) - len(log.charges))


def final_statement(config: Config, run: str, facts: Facts) -> Statement | None:
    """Charge a finished run for cost beyond its plan; return the ledger's statement on the data set, or None."""
    with _ledger(config) as opened:
        if opened is None:
            return None
        payer = _payer(config, run)
        opened[0].charge_at_least(payer, ledger_request(config, facts).items)
        return opened[0].statement(run=payer)


def read_statement(path: Path, config: Config, facts: Facts) -> Statement | None:
    """Read ledger.json of a run folder; None if the run has no ledger.

    A statement on another data set, or with charges below this run's cost, is refused.
    """
    file, named = path / NAME, config.privacy.ledger is not None
    if not named or not file.exists():
        if file.exists() or (named and (path / "certificate.json").exists()):
            what = "present, but plan.toml has no ledger" if file.exists() else "missing, but plan.toml has a ledger"
            raise CertificateError(NAME, f"{NAME} is {what}{RESTORE}")
        return None
    try:
        found: Statement = codec.read(Statement, json.loads(durable_files.read(file)), NAME)
    except (ValueError, TypeError, RecursionError, UserError) as error:
        raise CertificateError(NAME, f"{NAME} cannot be read ({str(error)[:200]}){RESTORE}") from None
    need, name = ledger_request(config, replace(facts, ledger=None)), config.privacy.dataset
    if found.dataset != name or found.limit.mismatch(need.unit, need.relation) is not None:
        what = f"{NAME} is of another data set than {name!r}, or of another unit or relation"
        raise CertificateError(NAME, what + RESTORE)
    if not found.covers(need.items):
        raise CertificateError(NAME, f"{NAME} has smaller charges than this run's cost{RESTORE}")
    return found
