"""What the members of a secure sum and their server say: a JSON head, then bytes. Nothing that is read can run code."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sordino import codec
from sordino.errors import DataError, shown

MARK = b"sordino sum 1\n"
HEAD = 1 << 20
STAGES = ("keys", "shares", "mask", "unmask")


@codec.hides_values
@dataclass(frozen=True)
class Letter:
    """One stage of one session: what is asked or answered."""

    stage: str
    session: str
    said: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def to_bytes(self) -> bytes:
        head = json.dumps({"stage": self.stage, "session": self.session, "said": self.said}).encode()
        return MARK + len(head).to_bytes(4, "little") + head + self.body

    @classmethod
    def of_bytes(cls, data: bytes) -> Letter:
        """What `to_bytes` wrote; else a `DataError` in one sentence."""
        start = len(MARK) + 4
        length = int.from_bytes(data[len(MARK) : start], "little")
        if not data.startswith(MARK) or not 0 < length <= min(HEAD, len(data) - start):
            raise DataError("a letter of a secure sum without a head", "one as this program writes it")
        try:
            table = json.loads(data[start : start + length])
            stage, session, said = table["stage"], table["session"], table["said"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError("a letter of a secure sum that cannot be read", "one as this program writes it") from None
        if stage not in STAGES or not isinstance(session, str) or len(session) > 64 or not isinstance(said, dict):
            raise DataError(f"stage {shown(stage)} of a secure sum", "one of " + ", ".join(STAGES))
        return cls(stage, session, said, data[start + length :])


def is_letter(data: bytes) -> bool:
    """Whether bytes are of a secure sum, and no job."""
    return data.startswith(MARK)
