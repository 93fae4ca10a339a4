"""The idx format of MNIST and its kin."""

from __future__ import annotations

import gzip
from typing import Any

import numpy as np

from sordino.data.records import Array
from sordino.data.sources import GZIP
from sordino.errors import DataError

_TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype("u1"), 0x0C: np.dtype(">i4")}


def idx(content: bytes) -> Array:
    """An array in the idx format, packed or not: two zero bytes, type, number of axes, their lengths, the values."""
    raw = gzip.decompress(content) if content[:2] == GZIP else content
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise DataError("a file that is not idx", "the idx header of unsigned bytes or 32-bit integers")
    kind, axes = _TYPES[raw[2]], raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw, ">i4", axes, 4))
    return np.frombuffer(raw, kind, offset=4 + 4 * axes).reshape(shape)
