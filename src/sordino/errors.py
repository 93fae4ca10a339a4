"""Exceptions of this package, and short reprs of values for their messages. Used everywhere.

    SordinoError
    ├── UserError               a mistake in the input: exit code 2, one sentence
    │   ├── ConfigError         a TOML file or an option that cannot be read
    │   ├── DataError           data that cannot be trained on
    │   ├── PlanError           a plan that cannot be certified; `rule` is the name of the broken rule
    │   ├── PartError           a part of a plan, written by the user, that raised or returned an invalid value
    │   ├── StorageError        a full disk or memory, or a folder that is missing or not writable
    │   ├── EngineError         a plan that needs a feature which the engine does not have
    │   ├── SideConditionError  a closed-form bound used outside the range where it is proved
    │   └── UnreachableError    a calibration target that no noise multiplier, rate, ... can meet
    ├── BudgetError             a round that would exceed a privacy budget: the run stops before it
    ├── DivergedError           a round after which the model has NaN or infinity: the run stops, its checkpoint stays
    ├── QuorumError             a round that too few clients answered: exit code 3, continue with --resume
    ├── RankError               a process of a distributed run that ended early: exit code 3, continue with --resume
    └── CertificateError        a certificate that disagrees with the files of its run: exit code 1

A user's error says what was found, what is needed, and how to fix it.
"""

from __future__ import annotations

import reprlib
from typing import Any

LONGEST = 600  # characters of each of found, needed and fix


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxlist = self.maxtuple = self.maxdict = 12

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"


brief_repr = _Short().repr  # a repr in one line; of a very long integer only the number of bits


def shorten(text: str) -> str:
    """Return the text without its middle if it is longer than `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 105]} ... {text[-100:]}"


class SordinoError(Exception):
    """Base of all exceptions of this package."""


class UserError(SordinoError):
    """Raised for a mistake in the user's input; its message says what was found, what is needed and how to fix it."""

    def __init__(self, found: str, needed: str = "", fix: str = "") -> None:
        self.found, self.needed, self.fix = found, needed, fix
        parts = [f"found {shorten(found)}"]
        if needed:
            parts.append(f"needed {shorten(needed)}")
        if fix:
            parts.append(f"fix: {shorten(fix)}")
        super().__init__("; ".join(parts))


class ConfigError(UserError):
    """Raised for an invalid TOML file or command-line option."""


class DataError(UserError):
    """Raised for data that cannot be trained on, or for a model that does not fit the data."""


class PlanError(UserError):
    """Raised for a plan that cannot be certified. `rule` is the name of the broken rule (docs/privacy.md)."""

    def __init__(self, rule: str, found: str, needed: str = "", fix: str = "") -> None:
        self.rule = rule
        super().__init__(f"[{rule}] {found}", needed, fix)


class PartError(UserError):
    """Raised if a part written by the user raises or returns an invalid value in a run. Charged rounds stay charged."""

    def __init__(self, found: str, needed: str = "") -> None:
        fix = "repair the part; charged rounds stay charged, and --resume continues the run if the code is the same"
        super().__init__(found, needed or "a part that works", fix)


class StorageError(UserError):
    """Raised for a full disk or memory, or a folder that cannot be written; the message says how to continue."""


class EngineError(UserError):
    """Raised for a plan that needs a feature its engine lacks, and for an engine that failed."""


class SideConditionError(UserError):
    """Raised where a closed-form privacy bound is used outside the range in which it is proved."""


class UnreachableError(UserError):
    """Raised for a target epsilon that no noise multiplier, or other calibrated number, can meet."""


class BudgetError(SordinoError):
    """Raised before a round that would exceed a privacy budget; `refused` is that round and its cohort."""

    def __init__(self, message: str, refused: Any = None) -> None:
        self.refused = refused
        super().__init__(message)


class DivergedError(SordinoError):
    """Raised after a round that left NaN or infinity in the server's state; the checkpoint is older than the round."""


class QuorumError(SordinoError):
    """Raised if too few clients answered a round in all attempts; `collected` holds the messages that arrived."""

    def __init__(self, what: str, collected: Any = None) -> None:
        self.collected = collected
        super().__init__(f"{what}; nothing of the round was released; continue with --resume")


class RankError(SordinoError):
    """Raised if a process of a distributed run ended early; charged rounds stay charged.

    `lost`: a process other than this one ended. `said`: another process has already printed the message.
    """

    def __init__(self, what: str, *, lost: bool = False, said: bool = False) -> None:
        self.lost, self.said = lost, said
        super().__init__(f"{what}; charged rounds stay charged; continue with --resume")


class Stopped(SystemExit):
    """Raised on SIGTERM or SIGHUP to exit with code 128 + signal number, after files and processes are cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class CertificateError(SordinoError):
    """Raised if a certificate disagrees with the files of its run; `field` is the first field that differs."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(shorten(message))
