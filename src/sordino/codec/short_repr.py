"""repr of objects that hold records: names, shapes and counts in one short line, and no value of the data.

A notebook saves what a cell prints. So whatever holds a tensor, an array or bytes is printed by its shape, and whatever
holds such a holder by its type; numbers that were computed from records (floats) are not printed either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

LONGEST = 400  # characters of a whole repr
LONGEST_WORD = 40  # of one text in it
T = TypeVar("T")


def hides_values(cls: type[T]) -> type[T]:
    """Class decorator, above `@dataclass`: its repr shows no value of a tensor, an array or a float."""
    cls.__repr__ = short_repr  # type: ignore[method-assign]
    return cls


def hides(cls: type[Any]) -> bool:
    """Whether a class has this repr itself."""
    return vars(cls).get("__repr__") is short_repr


def short_repr(value: Any) -> str:
    """Type(field=description, ...), or what its own `described_fields()` says, cut to `LONGEST` characters."""
    own = getattr(value, "described_fields", None)
    said = described_fields(value) if own is None else own()
    whole = f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in said.items())})"
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 5]} ...)"


def described_fields(value: Any) -> dict[str, str]:
    """Every field of a dataclass but those that are None or empty."""
    shown = [(field.name, getattr(value, field.name, None)) for field in fields(value) if field.repr]
    return {name: described(item) for name, item in shown if not _empty(item)}


def described(item: Any) -> str:
    """A field without its data: a whole number, a short text, a shape, a count or a type."""
    if item is None or isinstance(item, bool | int):
        return repr(item) if not isinstance(item, int) or item.bit_length() <= 64 else "int"
    if isinstance(item, str):
        return repr(item) if len(item) <= LONGEST_WORD else f"text of {len(item)} characters"
    if hasattr(item, "shape") and hasattr(item, "dtype"):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    if isinstance(item, bytes | bytearray):
        return f"{len(item)} bytes"
    if isinstance(item, Mapping | list | tuple | set | frozenset):
        return f"{type(item).__name__} of {len(item)}"
    return repr(item) if hides(type(item)) else type(item).__name__


def _empty(item: Any) -> bool:
    return item is None or (isinstance(item, str | tuple | list | dict) and not item)
