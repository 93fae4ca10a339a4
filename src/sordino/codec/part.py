"""What may stand in a plan: a part of exactly the type that its kind names. And whose it is."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from abc import ABC
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, ClassVar

from sordino.codec import boundary
from sordino.errors import ConfigError, PlanError, brief_repr

DEEPEST = 32  # levels of tables in a file, of parts in a plan
FILES: dict[str, tuple[str, str]] = {}  # modules made of single files: the file's name, and its hash
_PLAIN = {int, float, str, bool, NoneType}


class Part(ABC):  # noqa: B024  (each family has abstract methods of its own)
    """Root of everything that can stand in a plan; `kind` is its name in a file, and names one part of its family.

    What a family leaves abstract a part must have: one without it cannot be made.
    """

    kind: ClassVar[str] = ""
    members: ClassVar[dict[str, type[Part]]] = {}

    def rests_on(self) -> tuple[Foreign, ...]:
        """What is not Sordino's own in it, where its class does not say: functions and modules that it stands for."""
        return ()

    def __init_subclass__(cls, kind: str = "") -> None:
        kind = kind or cls.__dict__.get("kind", "")  # dataclass(slots=True) makes the class a second time
        if not kind and Part in cls.__bases__:
            cls.members = {}  # a new family
        elif kind:
            cls.kind = kind
            _check_free(cls, cls.members.get(kind))
            cls.members[kind] = cls
        if Part not in cls.__bases__ and not _named_ours(cls):
            boundary.wrap(cls, lambda: _called(cls))


def _check_free(cls: type[Part], other: type[Part] | None) -> None:
    """A kind is given once; only a class that is made again (by slots, in a notebook) takes its own place."""
    if other is None:
        return
    again = (cls.__module__, cls.__name__) == (other.__module__, other.__name__)
    slots = all(other.__dict__.get(name) is made for name, made in cls.__dict__.items() if callable(made))
    if not again or (_named_ours(other) and not slots):
        found = f"a second {family_of(cls).__name__} of kind {cls.kind!r}, {cls.__module__}.{cls.__name__}"
        raise ConfigError(found, "a kind of its own", f"{other.__module__}.{other.__name__} has this one")


def family_of(cls: type[Part]) -> type[Part]:
    """Sampler, Step, Release, ...: the direct subclass of `Part`."""
    return next(base for base in cls.__mro__ if Part in base.__bases__)


def join(where: str, name: str) -> str:
    """A place inside a place, as a file writes it."""
    return f"{where}.{name}" if where else name


def nested_values(value: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every dataclass in a value, itself included, with its place; and what is held in their fields."""
    if depth > DEEPEST:
        raise PlanError("parts", f"{where}, nested {DEEPEST} deep", f"at most {DEEPEST} parts in each other")
    yield where, value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from nested_values(getattr(value, field.name), join(where, field.name), depth + 1)
    elif isinstance(value, list | tuple) and not {*map(type, value)} <= _PLAIN:
        for i, item in enumerate(value):
            yield from nested_values(item, f"{where}[{i}]", depth + 1)


def check_parts(value: Any, where: str) -> None:
    """Refuse a value that would not do what its written form says, however deep inside.

    A subclass without a kind of its own is written as its parent, and a method set on an instance is not written at
    all: either would run one thing and have the hash and the bill of another.
    """
    for place, item in nested_values(value, where):
        if dataclasses.is_dataclass(item):
            check_part(item, place)
        elif not (isinstance(item, list | tuple) or type(item) in _PLAIN or type(item).__module__ == "numpy"):
            raise PlanError("parts", f"{place} = {brief_repr(item)}", "a number, text or a part")


def check_part(part: Any, where: str) -> None:
    """One part, whatever is in it: of the registered type, with nothing set on it by hand."""
    cls, needed = type(part), "exactly the part that its kind names"
    if isinstance(part, Part) and cls.members.get(cls.kind) is not cls:
        found = f"{where}, a {cls.__name__} that would be written as kind {cls.kind!r}"
        raise PlanError("parts", found, needed, f'give it a kind of its own: class {cls.__name__}(..., kind="...")')
    if not isinstance(part, Part) and any(map(dataclasses.is_dataclass, cls.__mro__[1:])):
        found = f"{where}, a {cls.__name__} that would be written as {cls.__mro__[1].__name__}"
        raise PlanError("parts", found, needed)
    extra = sorted(getattr(part, "__dict__", {}).keys() - {field.name for field in dataclasses.fields(part)})
    if extra:
        raise PlanError("parts", f"{where}, a {cls.__name__} whose {extra[0]!r} was set by hand", needed)


@dataclasses.dataclass(frozen=True, order=True)
class Foreign:
    """A part that is not Sordino's own: what it states of itself is believed, and named on the certificate."""

    package: str
    version: str
    family: str
    kind: str


def foreign(value: Any) -> tuple[Foreign, ...]:
    """What inside a value comes from elsewhere, each once: parts, and functions that parts of ours only name."""
    parts = [item for _, item in nested_values(value) if isinstance(item, Part)]
    classes = {_origin(cls) for cls in map(type, parts) if not _ours(cls)}
    return tuple(sorted(classes.union(*(part.rests_on() for part in parts))))


def _named_ours(cls: type[Part]) -> bool:
    return cls.__module__.partition(".")[0] == "sordino"


def _ours(cls: type[Part]) -> bool:
    """Whether the class is what one of our modules defines: a name alone can be forged."""
    return _named_ours(cls) and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


def _called(cls: type[Part]) -> str:
    """A class in a sentence."""
    return f"part {cls.kind or cls.__name__!r} ({family_of(cls).__name__} of {package_of(cls.__module__)[0]})"


def _origin(cls: type[Part]) -> Foreign:
    return Foreign(*package_of(cls.__module__), family_of(cls).__name__, cls.kind)


def package_of(module: str) -> tuple[str, str]:
    """The package of a module and its version; of a single file its name and hash; of a script no version."""
    package = module.partition(".")[0]
    return FILES[module] if module in FILES else (package, _version(package))


@cache
def _version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, ())
    return importlib.metadata.version(names[0]) if names else ""
