"""Checkpoint of a run: the state between two rounds, its checksum, and the charges and lines it was written after.

Written by `RunWriter`, read by `--resume`, `certify` and reports.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from sordino import codec
from sordino.codec import durable_files
from sordino.errors import CertificateError
from sordino.plan import State
from sordino.runs.charge_log import ChargeLog, PrefixHash

STATE, BEFORE = "state.safetensors", "before.safetensors"
_SIDES = ("memory", "public_state", "secret_state")


class TornError(Exception):
    """A checkpoint that is not what was written: cut short, or with other bytes than its checksum."""


@codec.hides_values
@dataclass(frozen=True)
class Checkpoint:
    """A state, the charge log's head when it was written, and hashes of history.jsonl and engine.jsonl up to then."""

    state: State
    head: str
    history: PrefixHash
    engine: PrefixHash

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the numbers and the named tensors that the file holds."""
        named = {f"{side}.{name}": one for side in _SIDES for name, one in getattr(self.state, side).items()}
        logs = {"history": [self.history.size, self.history.sha256], "engine": [self.engine.size, self.engine.sha256]}
        bound = {"t": self.state.t, "head": self.head, **logs}
        return bound, {name: named[name].contiguous() for name in sorted(named)}

    @property
    def sha256(self) -> str:
        """SHA-256 of the checkpoint's tensors, round number, charge log head and bound files."""
        bound, named = self._content()
        found = hashlib.sha256(json.dumps(bound).encode())
        for name, tensor in named.items():
            found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def to_bytes(self) -> bytes:
        """Return the checkpoint as a safetensors file."""
        bound, named = self._content()
        return safetensors.torch.save(named, metadata={"sordino": json.dumps({**bound, "sha256": self.sha256})})

    @classmethod
    def of_bytes(cls, data: bytes) -> Checkpoint:
        """Read what `to_bytes` wrote, or raise `TornError`."""
        try:
            bound = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["sordino"])
            named = safetensors.torch.load(data)
            parts = [
                {name.removeprefix(f"{side}."): one for name, one in named.items() if name.startswith(f"{side}.")}
                for side in _SIDES
            ]
            files = [PrefixHash(*bound[name]) for name in ("history", "engine")]
            found = cls(State(bound["t"], *parts), bound["head"], *files)
            whole = type(found.state.t) is int and found.sha256 == bound["sha256"]
        except Exception as error:  # whatever a damaged file makes its readers raise
            raise TornError(str(error)) from None
        if not whole:
            raise TornError("its bytes do not have its checksum")
        return found

    def save(self, folder: Path) -> None:
        """Write the file under another name, then move it; the one before stays, so one of the two is always whole."""
        durable_files.stage(folder / STATE, self.to_bytes(), durable_files.PRIVATE)
        if (folder / STATE).exists():
            durable_files.move(folder / STATE, folder / BEFORE)
        durable_files.move(folder / f"{STATE}{durable_files.PARTIAL}", folder / STATE)

    def check(self, log: ChargeLog, *, fallback: bool = False) -> None:
        """Refuse a checkpoint that was not written after a charge of this log, with the next round's charges at most.

        A `fallback`, the checkpoint before the last, may have one more charged round after it.
        """
        t, heads, wrong = self.state.t, log.heads[1:], ""
        if self.head not in heads:
            wrong = "belongs to another run, or charges after which it was written are gone"
        else:
            place = heads.index(self.head)
            later = {charge.round - t for charge in log.charges[place + 1 :]}
            if log.charges[place].round != t:
                wrong = f"holds round {t} where the charge it was written after is of another"
            elif not later <= ({1, 2} if fallback else {1}):
                wrong = f"is of round {t}, and later rounds were charged and saved after it"
        if wrong:
            raise CertificateError("checkpoint", f"the checkpoint {wrong}")


def latest(folder: Path, log: ChargeLog) -> tuple[Checkpoint | None, str]:
    """Return the last checkpoint that is whole and, if that is not the last one written, why; None before the first.

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
