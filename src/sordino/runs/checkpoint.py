"""State of a run between two rounds, with its checksum and what it was written after; keyed fingerprint of its data."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from sordino import codec
from sordino.codec import durable_files
from sordino.config import Config
from sordino.data.clients import Records, unwrapped_model
from sordino.data.lineage import declared_frozen, keyed_hash, sampled_hash
from sordino.engines.checks import model_answers, same_answers
from sordino.errors import CertificateError
from sordino.plan import State
from sordino.runs.charge_log import ChargeLog, PrefixHash
from sordino.task import Task
from sordino.version import __version__

STATE, BEFORE = "state.safetensors", "before.safetensors"


class TornError(Exception):
    """A checkpoint that is not what was written: cut short, or with other bytes than its checksum."""


@codec.hides_values
@dataclass(frozen=True)
class Checkpoint:
    """A state, the chain's head when it was written, and how much history there was."""

    state: State
    head: str
    history: PrefixHash
    engine: PrefixHash

    @property
    def _bound(self) -> dict[str, Any]:
        logs = {"history": [self.history.size, self.history.sha256], "engine": [self.engine.size, self.engine.sha256]}
        return {"t": self.state.t, "head": self.head, **logs}

    @property
    def _named(self) -> dict[str, Tensor]:
        named = {f"memory.{name}": tensor for name, tensor in self.state.memory.items()}
        named |= {f"public_state.{name}": tensor for name, tensor in self.state.public_state.items()}
        named |= {f"secret_state.{name}": tensor for name, tensor in self.state.secret_state.items()}
        return {name: named[name].contiguous() for name in sorted(named)}

    @property
    def sha256(self) -> str:
        """Of everything in it."""
        found = hashlib.sha256(json.dumps(self._bound).encode())
        for name, tensor in self._named.items():
            found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def to_bytes(self) -> bytes:
        """A safetensors file."""
        said = json.dumps({**self._bound, "sha256": self.sha256})
        return safetensors.torch.save(self._named, metadata={"sordino": said})

    @classmethod
    def of_bytes(cls, data: bytes) -> Checkpoint:
        """What `to_bytes` wrote, or `TornError`."""
        try:
            said = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["sordino"])
            named = safetensors.torch.load(data)
            parts = [
                {name.removeprefix(side): held for name, held in named.items() if name.startswith(side)}
                for side in ("memory.", "public_state.", "secret_state.")
            ]
            marks = [PrefixHash(*said[name]) for name in ("history", "engine")]
            found = cls(State(said["t"], *parts), said["head"], *marks)
            whole = type(found.state.t) is int and found.sha256 == said["sha256"]
        except Exception as error:  # whatever a damaged file makes its readers raise
            raise TornError(str(error)) from None
        if not whole:
            raise TornError("its bytes do not have its checksum")
        return found

    def save(self, folder: Path) -> None:
        """Written beside, then moved: the one before is kept, so that one of the two is whole at any moment."""
        durable_files.stage(folder / STATE, self.to_bytes(), durable_files.PRIVATE)
        if (folder / STATE).exists():
            durable_files.move(folder / STATE, folder / BEFORE)
        durable_files.move(folder / f"{STATE}{durable_files.PARTIAL}", folder / STATE)

    def check(self, log: ChargeLog, *, fallback: bool = False) -> None:
        """It was written after a charge of this chain; whatever was charged later is the round that follows.

        A `fallback`, the checkpoint before the last, may have one round more after it.
        """
        t = self.state.t
        if self.head not in log.heads:
            raise _disagrees("belongs to another run, or charges after which it was written are gone")
        place = log.heads.index(self.head)
        if log.charges[place].round != t:
            raise _disagrees(f"holds round {t} where the charge it was written after is of another")
        later = {charge.round - t for charge in log.charges[place + 1 :]}
        if not later <= ({1, 2} if fallback else {1}):
            raise _disagrees(f"is of round {t}, and later rounds were charged and saved after it")


def _disagrees(what: str) -> CertificateError:
    return CertificateError("checkpoint", f"the checkpoint {what}")


def latest(folder: Path, log: ChargeLog) -> tuple[Checkpoint | None, str]:
    """The last checkpoint that is whole and, where that is not the last one written, why; None before the first.

    A torn one gives way to the one before it, and its round is run, and charged, again. One that is whole and disagrees
    with the charges does not: that is no accident of a disk.
    """
    why = "is missing"
    if (folder / STATE).exists():
        try:
            found = Checkpoint.of_bytes(durable_files.read(folder / STATE))
            found.check(log)
            return found, ""
        except TornError as error:
            why = f"is damaged ({error})"
    if (folder / BEFORE).exists():
        try:
            older = Checkpoint.of_bytes(durable_files.read(folder / BEFORE))
        except TornError as error:
            what = f"checkpoint/{STATE} {why}, and the one before it is damaged too ({error}): start anew"
            raise CertificateError("checkpoint", what) from None
        older.check(log, fallback=True)
        return older, why
    if why != "is missing" or any(charge.round > 1 for charge in log.charges):
        raise CertificateError("checkpoint", f"checkpoint/{STATE} {why}, and there is none before it: start anew")
    return None, ""


_WORDS = "what module and loss say of a made-up record, so one of them is another"


@dataclass(frozen=True)
class Fingerprint:
    """HMAC-SHA256 of the data, part by part. Without the key, which is never released, it tells nothing of them.

    `words` are what module and loss say of made-up records: functions of a script have no other mark than a name.
    """

    key: str
    parts: dict[str, str]
    words: tuple[float, ...] = ()

    @classmethod
    def of(cls, task: Task, key: str = "") -> Fingerprint:
        key = key or secrets.token_hex(32)
        clients = task.clients
        cut = [torch.from_numpy(np.ascontiguousarray(side)) for side in (clients.index, clients.offsets)]
        parts = {
            "the clients' records": _records(key, clients.records),
            "who holds which record": keyed_hash(key, *([] if clients.records.lazy else cut[:1]), cut[1]),
            "the test records": _records(key, task.test),
            "the public records": _records(key, task.public),
        }
        fixed = declared_frozen(unwrapped_model(task.model))
        weights = {} if task.init is None else {"the initial weights": task.init.sha256}
        base = {"the frozen weights": fixed[0].sha256} if fixed else {}
        return cls(key, parts | weights | base, model_answers(task))

    def changed(self, task: Task) -> list[str]:
        """The parts of the data that are not what they were."""
        now = Fingerprint.of(task, self.key)
        other = [name for name, kept in self.parts.items() if now.parts.get(name) != kept]
        return other or ([] if same_answers(self.words, now.words) else [_WORDS])

    def to_bytes(self) -> bytes:
        return json.dumps({"key": self.key, "parts": self.parts, "words": self.words}, indent=2).encode() + b"\n"

    @classmethod
    def of_bytes(cls, data: bytes) -> Fingerprint:
        try:
            table: dict[str, Any] = json.loads(data)
            return cls(str(table["key"]), dict(table["parts"]), tuple(map(float, table.get("words", ()))))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CertificateError("checkpoint/data.json", "checkpoint/data.json is not a fingerprint") from None


def _records(key: str, records: Records | None) -> str:
    if records is None:
        return "none"
    return (sampled_hash if records.lazy else keyed_hash)(key, records.x, records.y)


def software(config: Config) -> str:
    """The version of this package, and of those whose parts the configuration holds: one set for a whole run."""
    others = sorted({f" and {part.package} {part.version}" for part in config.foreign})
    return "".join([__version__, *others])
