"""Admission of a run to the ledger of its data set, which charges it. Called by `execute`, `train`, sweeps and tuning.

A run is charged for all its rounds before the first one, so of two runs that compete for the rest of a budget only one
is admitted. The charge is the planned cost, as on the certificate. A run that stops early gets no refund, since its
models were seen. A resumed run is not charged twice; rounds that are repeated after a kill are charged before they run.
At the end ledger.json states the cost of all runs on the data set.

Every release is recorded in the ledger, with the head of the run folder's charge log, before its noise is drawn. So a
copy of a folder, or an older folder that was put back, is charged for the rounds that it releases in addition; and a
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
from sordino.runs.charge_log import ChargeLog

NAME = "ledger.json"


def ledger_request(config: Config, facts: Facts) -> Request:
    """Return a run's cost, against the adversary who sees models, as a request to the ledger; per silo if silos have
    names.

    The cost of random cohorts is that of the sampling distribution, also after the run: composed with other runs, whose
    sampling is independent, it holds whatever cohorts were drawn.
    """
    if config.plan.clients.random:
        facts = replace(facts, max_participations=None, per_client=(), stopped=False)
    cost = run_cost(config.plan, facts)
    lines, best = cost.of("models"), config.privacy.selected
    payer = config.plan.hash if best is None else codec.digest(best)
    return Request(cost.unit, lines[0].relation, _items(lines, config.task.silos), payer)


def _items(lines: tuple[Line, ...], names: tuple[str, ...]) -> tuple[Item, ...]:
    """Return the events of a cost by silo name; silos without names must have the same events."""
    if names:
        pairs = [(line, name) for line in lines for k, name in enumerate(names) if not line.silos or k in line.silos]
        return tuple(Item(event, count, silo=name) for line, name in pairs for event, count in line.entries if count)
    if len({tuple(event for event, _ in line.entries) for line in lines}) > 1:
        found = "a ledger with unnamed silos that differ in noise or size"
        raise ConfigError(found, "names, by which the ledger recognises silos", "set [task] silos")
    most = max(lines, key=lambda line: [count for _, count in line.entries])
    return tuple(Item(event, count) for event, count in most.entries if count)


def planned_facts(config: Config, charged: Sequence[int] = (), t: int = 0, prepared: int = 1) -> Facts:
    """Return the facts of the certificate if the run continues from round t to its end, after `charged` rounds."""
    rounds = [*charged, *range(t, config.plan.rounds)]
    again = repeated_rounds(rounds)
    spent: dict[str, Any] = {"repeats": len(again), "repeated": again, "prepared": prepared}
    return Facts(config.delta, config.privacy.noise, len(rounds), **spent, **config.facts)


def _payer(config: Config, run: str) -> str:
    """Return the id that is charged: the run's own, or that of the private tuning which pays for all its trials."""
    best = config.privacy.selected
    return run if best is None else best.id


@contextmanager
def _ledger(config: Config) -> Iterator[tuple[Ledger, str] | None]:
    """Open the ledger that a configuration names; yield it with the data set's name, or None without a ledger."""
    file, name = config.privacy.ledger, config.privacy.dataset
    if file is None or name is None:
        yield None
        return
    with Ledger.open(Path(file)) as ledger:
        yield ledger, name


def check_affordable(config: Config, together: Request | None = None) -> None:
    """Refuse a run, or all runs `together`, whose cost exceeds the data set's remaining budget; charge nothing.

    A trial of a private tuning is not checked: all trials were charged before the first.
    """
    if together is None and config.privacy.selected is not None:
        return
    with _ledger(config) as opened:
        if opened is not None:
            opened[0].consider(opened[1], together or ledger_request(config, planned_facts(config)))


def admit_whole(config: Config, run: str) -> None:
    """Charge, before the first round, a run that cannot be resumed, or all trials of a private tuning."""
    with _ledger(config) as opened:
        if opened is not None:
            request = ledger_request(config, planned_facts(config))
            opened[0].admit(_payer(config, run), opened[1], request, whole=True)


@dataclass
class Admission:
    """A run that its data set's ledger has admitted; records every release in the ledger."""

    ledger: Ledger
    run: str
    released: int  # releases of this run in the ledger
    elsewhere: int = 0  # releases from other copies of the folder

    def note(self, number: int, head: str) -> None:
        """Record the release of round `number` (from 1) before its noise is drawn; `head` is the last hash of the
        charge log.
        """
        self.ledger.note_release(self.run, number, head, self.released)
        self.released += 1


@contextmanager
def admit(config: Config, run: str, log: ChargeLog, t: int, *, prepares: bool) -> Iterator[Admission | None]:
    """Charge the rounds of a run from round t and all its earlier releases, before any of the rounds runs."""
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
    """Charge the cost of a finished run beyond its plan; return the data set's statement, None without a ledger."""
    with _ledger(config) as opened:
        if opened is None:
            return None
        payer = _payer(config, run)
        opened[0].charge_at_least(payer, ledger_request(config, facts).items)
        return opened[0].statement(run=payer)


def read_statement(path: Path, config: Config, facts: Facts) -> Statement | None:
    """Read ledger.json, None without one; refuse that of another data set, or with charges below this run's cost."""
    file, named = path / NAME, config.privacy.ledger is not None
    if not named or not file.exists():
        if file.exists() or (named and (path / "certificate.json").exists()):
            what = "present without a ledger in" if file.exists() else "missing beside"
            raise CertificateError(NAME, f"{NAME} is {what} plan.toml")
        return None
    try:
        found: Statement = codec.read(Statement, json.loads(durable_files.read(file)), NAME)
    except (ValueError, TypeError, RecursionError, UserError) as error:
        raise CertificateError(NAME, f"{NAME} cannot be read ({str(error)[:200]})") from None
    need, name = ledger_request(config, replace(facts, ledger=None)), config.privacy.dataset
    if found.dataset != name or found.limit.mismatch(need.unit, need.relation) is not None:
        raise CertificateError(NAME, f"{NAME} is of another data set than {name!r}, or of another unit or relation")
    if not found.covers(need.items):
        raise CertificateError(NAME, f"{NAME} has smaller charges than this run's cost")
    return found
