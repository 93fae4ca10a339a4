"""A run that pays from a ledger: charged whole before its first round, so that of two who race one gets the last.

What is charged is the bill that the certificate will show, as planned. A run that stops early gets nothing back:
whoever stopped it has seen its models. One that is continued pays nothing twice; if rounds are run again after a kill,
it pays for them before they are. What the data set has spent in all is noted at the end, in ledger.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino import codec
from sordino.config import Config
from sordino.errors import CertificateError, ConfigError, UserError
from sordino.privacy.bill import Line, repeated_rounds
from sordino.privacy.facts import Facts, billed
from sordino.privacy.ledger import Asked, Ledger
from sordino.privacy.spending import Item, Standing
from sordino.runs import files

if TYPE_CHECKING:
    from sordino.runs.folder import RunFolder

NAME = "ledger.json"


def asked(config: Config, facts: Facts) -> Asked:
    """The first line of the bill, in the ledger's terms: by name where silos have names."""
    bill = billed(config.plan, facts)
    lines, best = bill.of("models"), config.privacy.selected
    whose = config.plan.hash if best is None else codec.digest(best)
    return Asked(bill.unit, lines[0].relation, _items(lines, config.task.silos), whose)


def _payer(config: Config, run: str) -> str:
    """Who pays for a run: itself, or, of many tries, the tuning that they belong to; it pays once, before the first."""
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


def _planned(config: Config, charged: Sequence[int] = (), t: int = 0, prepared: int = 1) -> Asked:
    """What the run will have cost if it goes on from round t to its end, with so many preparations in all."""
    return asked(config, planned_facts(config, charged, t, prepared))


def planned_facts(config: Config, charged: Sequence[int] = (), t: int = 0, prepared: int = 1) -> Facts:
    """What a certificate will rest on if the run goes on from round t to its end."""
    rounds = [*charged, *range(t, config.plan.rounds)]
    again = repeated_rounds(rounds)
    spent: dict[str, Any] = {"repeats": len(again), "repeated": again, "prepared": prepared}
    return Facts(config.delta, config.privacy.noise, len(rounds), **spent, **config.facts)


def _named(config: Config) -> tuple[Path, str] | None:
    file, name = config.privacy.ledger, config.privacy.dataset
    return None if file is None or name is None else (Path(file), name)


def consider_all(config: Config, all_of_them: Asked) -> None:
    """Refuse many runs on the data set of this one that it cannot pay for together."""
    named = _named(config)
    if named is not None:
        with Ledger.open(named[0]) as ledger:
            ledger.consider(named[1], all_of_them)


def consider(config: Config) -> None:
    """Refuse a run that its data set cannot pay for, before anything is written; a try was paid for with the others."""
    named = _named(config)
    if named is not None and config.privacy.selected is None:
        with Ledger.open(named[0]) as ledger:
            ledger.consider(named[1], _planned(config))


def admit(config: Config, run: str, charged: Sequence[int], t: int, prepared: int = 1) -> None:
    """Pay for the whole run, or for what it must run again, before any of it is run."""
    named = _named(config)
    if named is not None:
        with Ledger.open(named[0]) as ledger:
            ledger.admit(_payer(config, run), named[1], _planned(config, charged, t, prepared), whole=True)


def settle(folder: RunFolder) -> None:
    """Note what the data set has spent, once; if the run has cost more than was planned, that is written down too."""
    held = folder.contents()
    if (folder.path / NAME).exists() or _named(held.config) is None:
        return
    found = settled(held.config, held.header.run, folder.facts(held))
    files.write(folder.path / NAME, (json.dumps(codec.dump(found), indent=1) + "\n").encode())


def settled(config: Config, run: str, facts: Facts) -> Standing | None:
    """What the data set has spent, this run's whole cost among it; None where no ledger is named."""
    named = _named(config)
    if named is None:
        return None
    with Ledger.open(named[0]) as ledger:
        payer = _payer(config, run)
        ledger.settle(payer, asked(config, facts).items)
        return ledger.standing(payer)


def standing(path: Path, config: Config, facts: Facts) -> Standing | None:
    """What ledger.json says, if it is of this data set and pays for this run; nothing before it is written."""
    file, named = path / NAME, _named(config)
    if named is None or not file.exists():
        if file.exists() or (named is not None and (path / "certificate.json").exists()):
            raise CertificateError(
                NAME, f"{NAME} is {'not asked for by' if file.exists() else 'missing beside'} plan.toml"
            )
        return None
    try:
        found: Standing = codec.read(Standing, json.loads(files.read(file)), NAME)
    except (ValueError, TypeError, RecursionError, UserError) as error:
        raise CertificateError(NAME, f"{NAME} cannot be read ({str(error)[:200]})") from None
    need = asked(config, replace(facts, ledger=None))
    if found.dataset != named[1] or found.limit.prices(need.unit, need.relation) is not None:
        raise CertificateError(NAME, f"{NAME} is of another data set than {named[1]!r}, unit or relation")
    if not found.covers(need.items):
        raise CertificateError(NAME, f"{NAME} holds less than this run was billed")
    return found
