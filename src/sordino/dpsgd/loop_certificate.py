"""A loop's certificate on disk: certificate, plan and facts in one file, from which the certificate follows.

What `certify` proves of it: the numbers are those of the plan and the counts in this very file. What it cannot prove is
that the loop took no other step, for a loop keeps no chain of charges as the folder of a run does; a signature says who
vouches for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.certificate.build import certificate
from sordino.certificate.certificate_file import compare_text, parse, text_of
from sordino.certificate.facts import Facts, run_cost
from sordino.errors import CertificateError, ConfigError, UserError
from sordino.ledger.totals import Item
from sordino.plan import Plan

LARGEST = 4 << 20  # bytes
FACTS = (  # all the facts that a loop has
    *("delta", "noise", "charged", "loop", "public", "environment", "ledger", "earlier", "own_code"),
)


def save(path: Path, plan: Plan, facts: Facts) -> dict[str, Any]:
    """Write the file whole or not at all; its certificate."""
    made = _whole(plan, facts)
    beside = path.with_name(f"{path.name}.partial")
    try:
        beside.write_text(text_of(made), "utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"{path}, which cannot be written ({error.strerror})", "a file to write to") from None
    found: dict[str, Any] = made["certificate"]
    return found


def _whole(plan: Plan, facts: Facts) -> dict[str, Any]:
    fields = codec.dump(facts)
    return {
        "certificate": certificate(plan, facts),
        "plan": codec.dump(plan),
        "facts": {name: fields[name] for name in FACTS if name in fields},
    }


@dataclass(frozen=True)
class Saved:
    """What was found in a file, and the certificate that follows from it."""

    plan: Plan
    facts: Facts
    certificate: dict[str, Any]


def certify(path: Path) -> Saved:
    """The file, if its certificate is what its plan and its facts give; else `CertificateError` names the field."""
    text, name = _text(path), path.name
    try:
        stored = parse(text, name)
        plan: Plan = codec.read(Plan, stored["plan"], "plan")
        facts: Facts = codec.read(Facts, stored["facts"], "facts")
    except (ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        raise CertificateError(name, f"{name} is not what a private loop saves ({error})") from None
    if facts.loop is None:
        raise CertificateError(name, f"{name} says nothing of a loop")
    line = run_cost(plan, facts).line("models")
    if facts.ledger is not None and not facts.ledger.covers(tuple(Item(*entry) for entry in line.entries if entry[1])):
        raise CertificateError(name, f"{name} certifies a cost above what its ledger was charged")
    computed = _whole(plan, facts)
    compare_text(stored, text, computed, name)
    return Saved(plan, facts, computed["certificate"])


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) <= LARGEST:
            return data.decode("utf-8")
        reason = f"more than {LARGEST:,} bytes"
    except OSError as error:
        reason = error.strerror or "unreadable"
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    raise ConfigError(f"{path}, which cannot be read ({reason})", "a certificate that a private loop saved")
