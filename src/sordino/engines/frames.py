"""One form for all that processes say to one another: a line of JSON, then arrays. Nothing that is read can run code.

    {"format": 1, "kind": "job", ..., "arrays": [["start", "<f4", 7850], ...]}\\n   then their bytes, in that order

Who reads says how long it may be and what must stand in it; anything else is a `DataError` in one sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.errors import DataError, brief_repr
from sordino.parts.encoding import Public

FORMAT = 1
DTYPES = ("<f4", "<f8", "<i8")
MOST_BROADCAST = 4  # vectors that a solver may be told of earlier releases
BROADCAST = "broadcast."
PUBLIC = ("t", "clip_norm", "size", "state")
MOST_STATE = 16  # numbers that steps may have learned from earlier releases
Array = NDArray[Any]


def bad(found: str, needed: str = "") -> DataError:
    """What was sent is not what this program sends."""
    return DataError(f"a message with {found}", needed)


@codec.hides_values
@dataclass(frozen=True)
class Frame:
    """What is said, and the arrays [n] that go with it."""

    kind: str
    said: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        held = {name: np.ascontiguousarray(one).astype(_little(one), copy=False) for name, one in self.arrays.items()}
        declared = [[name, _little(array), len(array)] for name, array in held.items()]
        head = {"format": FORMAT, "kind": self.kind, **self.said, "arrays": declared}
        return b"".join([json.dumps(head).encode(), b"\n", *(array.tobytes() for array in held.values())])

    @classmethod
    def of_bytes(cls, body: bytes, most: int, head: int) -> Frame:
        """What `to_bytes` wrote: at most so many bytes in all, and so many of them before the arrays."""
        if len(body) > most:
            raise bad(f"{len(body)} bytes", f"at most {most}")
        end = body.find(b"\n", 0, head)
        if end < 0:
            raise bad("no line of JSON at its beginning", f"one of at most {head} bytes")
        try:
            said = json.loads(body[:end])
        except (ValueError, RecursionError):
            raise bad("a first line that is not JSON", "a table") from None
        if not isinstance(said, dict):
            raise bad("a first line that is no table", "a table")
        version, kind, declared = (said.pop(name, None) for name in ("format", "kind", "arrays"))
        if type(version) is not int or version != FORMAT:
            raise bad(f"format {brief_repr(version)}", f"format {FORMAT}: the same version of sordino on both sides")
        if not isinstance(kind, str):
            raise bad(f"kind {brief_repr(kind)}", "a word")
        return cls(kind, said, _arrays(declared, memoryview(body)[end + 1 :]))

    def holds(self, said: tuple[str, ...], arrays: frozenset[str] | set[str]) -> None:
        """Refuse other words or arrays than these."""
        for found, needed in ((set(self.said), set(said)), (set(self.arrays), set(arrays))):
            if found != needed:
                other = sorted(found ^ needed)[0]
                wrong = "missing" if other in needed else "in it"
                raise bad(f"{brief_repr(other)} {wrong}", f"a {self.kind} as it is written")


def _little(array: Array) -> str:
    found = array.dtype.newbyteorder("<").str
    assert found in DTYPES, found
    return found


def _arrays(declared: Any, raw: memoryview) -> dict[str, Array]:
    """The arrays as declared: known types, lengths that make up the bytes that are there."""
    if not isinstance(declared, list):
        raise bad(f"arrays {brief_repr(declared)}", "a list of [name, type, length]")
    found: dict[str, Array] = {}
    place = 0
    for one in declared:
        if not (isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and one[0] not in found):
            raise bad(f"an array {brief_repr(one)}", "[name, type, length], each name once")
        name, dtype, length = one
        if dtype not in DTYPES:
            raise bad(f"an array of type {brief_repr(dtype)}", f"one of {', '.join(DTYPES)}")
        size = count(length, f"the length of {brief_repr(name)}") * np.dtype(dtype).itemsize
        if place + size > len(raw):
            left = f"{len(raw) - place} bytes left for {brief_repr(name)}, which takes {size}"
            raise bad(left, "all of it: was it cut short?")
        found[name] = np.frombuffer(raw[place : place + size], dtype=dtype)
        place += size
    if place != len(raw):
        raise bad(f"{len(raw) - place} bytes after its last array", "nothing there")
    return found


# ---- values ----------------------------------------------------------------------------------------------------------


def count(value: Any, name: str, end: int = 2**63) -> int:
    """A whole number from 0, below `end`."""
    if type(value) is not int or not 0 <= value < end:
        raise bad(f"{name} = {brief_repr(value)}", f"a whole number from 0 to {end - 1}")
    return value


def text(value: Any, name: str, longest: int = 600) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise bad(f"{name} = {brief_repr(value)}", f"text of at most {longest} characters")
    return value


def vector(array: Array, name: str, length: int) -> Tensor:
    """A finite float32 vector [length]."""
    if array.dtype != np.dtype("<f4"):
        raise bad(f"{name} of type {array.dtype.str}", "<f4")
    if len(array) != length:
        raise bad(f"{name} of {len(array)} numbers", f"{length}")
    if not bool(np.isfinite(array).all()):
        raise bad(f"NaN or infinity in {name}", "finite numbers")
    return torch.from_numpy(array.astype(np.float32))


def within(array: Array, name: str, end: int) -> NDArray[np.int64]:
    """Distinct whole numbers from 0, below `end`."""
    if array.dtype != np.dtype("<i8"):
        raise bad(f"{name} of type {array.dtype.str}", "<i8")
    if len(array) and not 0 <= array.min() <= array.max() < end:
        raise bad(f"a number out of range in {name}", f"0 to {end - 1}")
    if len(np.unique(array)) != len(array):
        raise bad(f"a number twice in {name}", "each at most once")
    return array.astype(np.int64)


# ---- what everybody knows in a round --------------------------------------------------------------------------------


def public_said(public: Public) -> dict[str, Any]:
    """The numbers of it; a clip norm that bounds nothing is null."""
    clip_norm = None if public.clip_norm == math.inf else public.clip_norm
    return {"t": public.t, "clip_norm": clip_norm, "size": public.size, "state": dict(public.state)}


def public_arrays(public: Public) -> dict[str, Array]:
    """The arrays of it."""
    mask = {} if public.mask is None else {"mask": public.mask.cpu().numpy().astype("<i8")}
    return {
        **mask,
        **{f"{BROADCAST}{name}": held.cpu().numpy().astype("<f4") for name, held in public.broadcast.items()},
    }


def public_of(frame: Frame, size: int) -> Public:
    """What `public_said` and `public_arrays` wrote, for a model of `size` numbers."""
    t, clip_norm, length, state = (frame.said.get(name) for name in PUBLIC)
    if clip_norm is not None and not (type(clip_norm) in (int, float) and 0 < clip_norm < math.inf):
        raise bad(f"clip_norm {brief_repr(clip_norm)}", "a number above 0, or null")
    broadcast = [name for name in frame.arrays if name.startswith(BROADCAST)]
    if len(broadcast) > MOST_BROADCAST:
        raise bad(f"{len(broadcast)} broadcast vectors", f"at most {MOST_BROADCAST}")
    mask = frame.arrays.get("mask")
    return Public(
        count(t, "t"),
        math.inf if clip_norm is None else float(clip_norm),
        count(length, "size", size + 1),
        None if mask is None else torch.from_numpy(within(mask, "mask", size)),
        {name.removeprefix(BROADCAST): vector(frame.arrays[name], name, size) for name in broadcast},
        state=_learned(state),
    )


def _learned(state: Any) -> dict[str, float]:
    """The numbers that steps have learned, by name."""
    named = isinstance(state, dict) and len(state) <= MOST_STATE
    if not (named and all(type(value) in (int, float) and math.isfinite(value) for value in state.values())):
        raise bad(f"state {brief_repr(state)}", f"at most {MOST_STATE} finite numbers, by name")
    return {name: float(value) for name, value in state.items()}


def public_names(frame: Frame) -> set[str]:
    """The arrays in a frame that belong to `Public`."""
    return {name for name in frame.arrays if name == "mask" or name.startswith(BROADCAST)}


def public_bytes(size: int) -> int:
    """The most that its arrays take for a model of `size` numbers."""
    return (8 + 4 * MOST_BROADCAST) * size
