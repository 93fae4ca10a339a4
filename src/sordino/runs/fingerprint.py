"""What a run was started with beside its plan: the data, under a key that stays in the folder."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sordino.config import Config
from sordino.data.clients import Records
from sordino.data.initial_weights import frozen
from sordino.data.lineage import keyed_hash, sampled_hash
from sordino.data.named_fields import unwrapped_model
from sordino.engines.checks import model_answers, same_answers
from sordino.errors import CertificateError
from sordino.task import Task
from sordino.version import __version__

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
        fixed = frozen(unwrapped_model(task.model))
        weights = {} if task.init is None else {"the initial weights": task.init.sha256}
        base = {} if fixed is None else {"the frozen weights": fixed.sha256}
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
