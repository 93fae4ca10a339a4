"""Exceptions of this package, and short reprs for their sentences. Used everywhere.

    SordinoError
    ├── UserError               a mistake in the input: exit code 2, one sentence
    │   ├── ConfigError         a TOML file or an option that cannot be read
    │   ├── DataError           data that cannot be trained on
    │   ├── PlanError           a plan whose certificate would be meaningless; `rule` names why
    │   ├── PartError           a part from elsewhere that raises, or returns what it must not
    │   ├── StorageError        a disk or a memory that is full, a folder that is gone or may not be written
    │   ├── EngineError         a release that asks for what the engine does not offer
    │   ├── SideConditionError  a closed form asked outside the range where it is proved
    │   └── UnreachableError    a calibration target that no value can meet
    ├── BudgetError             a round that would overspend: the run stops before it
    ├── DivergedError           a round after which the model is not finite: the run stops, the state before it is kept
    ├── QuorumError             a round that too few clients answered: exit code 3, continue with --resume
    ├── RankError               a process of a distributed run that ended early: exit code 3, continue with --resume
    └── CertificateError        a certificate that disagrees with what ran: exit code 1

A user's error says what was found, what is needed, and how to fix it.
"""

from __future__ import annotations

import reprlib
from typing import Any

LONGEST = 600  # characters of each of found, needed and fix


class _Short(reprlib.Repr):
    """Short repr of any value in one line; a very long integer is replaced by its number of bits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxlist = self.maxtuple = self.maxdict = 12

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"


brief_repr = _Short().repr


def shorten(text: str) -> str:
    """Return the text without its middle if it is longer than `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 105]} ... {text[-100:]}"


class SordinoError(Exception):
    """Base of all exceptions of this package."""


class UserError(SordinoError):
    """A mistake in the input, as one sentence: what was found, what is needed, how to fix it."""

    def __init__(self, found: str, needed: str = "", fix: str = "") -> None:
        self.found, self.needed, self.fix = found, needed, fix
        parts = [f"found {shorten(found)}"]
        if needed:
            parts.append(f"needed {shorten(needed)}")
        if fix:
            parts.append(f"fix: {shorten(fix)}")
        super().__init__("; ".join(parts))


class ConfigError(UserError):
    """A TOML file or an option that cannot be read."""


class DataError(UserError):
    """Data that cannot be trained on."""


class PlanError(UserError):
    """A plan that cannot be certified. `rule` is the name of the broken rule (docs/privacy.md)."""

    def __init__(self, rule: str, found: str, needed: str = "", fix: str = "") -> None:
        self.rule = rule
        super().__init__(f"[{rule}] {found}", needed, fix)


class PartError(UserError):
    """A user's part that failed in a run, or returned an invalid value. Charged rounds stay charged."""

    def __init__(self, found: str, needed: str = "") -> None:
        fix = "repair the part; charged rounds stay charged, and --resume continues the run if the code is the same"
        super().__init__(found, needed or "a part that works", fix)


class StorageError(UserError):
    """A full disk or memory, or a folder that cannot be written; the sentence says how to continue."""


class EngineError(UserError):
    """A release that needs what the engine does not offer, or an engine that failed."""


class SideConditionError(UserError):
    """A closed form asked outside the range where it is proved; the numbers are in the sentence."""


class UnreachableError(UserError):
    """A calibration target that no value of the free quantity can meet."""


class BudgetError(SordinoError):
    """A round that would overspend a budget; nothing of it was released. `refused` is its round and cohort."""

    def __init__(self, message: str, refused: Any = None) -> None:
        self.refused = refused
        super().__init__(message)


class DivergedError(SordinoError):
    """A round whose step left NaN or infinity in the server's state; the state before it is the last good one."""


class QuorumError(SordinoError):
    """A round that too few clients answered in all tries. `collected` holds the answers and receipts that came."""

    def __init__(self, what: str, collected: Any = None) -> None:
        self.collected = collected
        super().__init__(f"{what}; nothing of the round was released; continue with --resume")


class RankError(SordinoError):
    """A process of a distributed run ended early. What was charged stays charged, and the checkpoint is whole.

    `lost`: another process than this one ended. `said`: another process has printed the sentence already.
    """

    def __init__(self, what: str, *, lost: bool = False, said: bool = False) -> None:
        self.lost, self.said = lost, said
        super().__init__(f"{what}; what was charged stays charged; continue with --resume")


class Stopped(SystemExit):
    """Exit after SIGTERM or SIGHUP: files and processes are cleaned up first, and the exit code is the shell's."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class CertificateError(SordinoError):
    """A certificate that disagrees with what ran; `field` is the first field that differs."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(shorten(message))
