"""`Part`, the base class of everything in a plan, and plugins, which are parts from other packages and files.

Called by every package that defines parts, by `plan`, and by `cli` and `config`, which load the plugins:

    [project.entry-points."sordino.parts"]
    my_pkg = "my_pkg.parts"            # a module: importing it registers the parts that it defines

A configuration file imports nothing: only installed packages, and files that the command line names, are imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import sys
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, ClassVar, TypeVar

from sordino.codec import boundary
from sordino.errors import ConfigError, PlanError, brief_repr

DEEPEST = 32  # levels of tables in a file, of parts in a plan
PLUGINS = "sordino.parts"  # group of entry points
FILES: dict[str, tuple[str, str]] = {}  # module of a file loaded by `load_parts_file` -> (file name, sha256)
_PLAIN = {int, float, str, bool, NoneType}


class Part(ABC):  # noqa: B024  (each family has abstract methods of its own)
    """Base class of everything in a plan; `kind` is a part's name in configuration files, unique within its family."""

    kind: ClassVar[str] = ""
    members: ClassVar[dict[str, type[Part]]] = {}

    def rests_on(self) -> tuple[Foreign, ...]:
        """Return the third-party functions and modules that this part refers to by name."""
        return ()

    def __init_subclass__(cls, kind: str = "") -> None:
        kind = kind or cls.__dict__.get("kind", "")  # dataclass(slots=True) makes the class a second time
        if not kind and Part in cls.__bases__:
            cls.members = {}  # a new family
        elif kind:
            cls.kind = kind
            _check_kind_is_unique(cls, cls.members.get(kind))
            cls.members[kind] = cls
        if Part not in cls.__bases__ and not cls.__module__.startswith("sordino."):
            boundary.wrap(cls, lambda: _error_name(cls))


def _check_kind_is_unique(cls: type[Part], other: type[Part] | None) -> None:
    """Refuse a second class of one kind; a class that is defined again (slots, notebooks) replaces the first."""
    if other is None:
        return
    again = (cls.__module__, cls.__name__) == (other.__module__, other.__name__)
    slots = all(other.__dict__.get(name) is method for name, method in cls.__dict__.items() if callable(method))
    if not again or (other.__module__.startswith("sordino.") and not slots):
        found = f"a second {family_of(cls).__name__} of kind {cls.kind!r}, {cls.__module__}.{cls.__name__}"
        fix = f"choose another kind: {other.__module__}.{other.__name__} has this one"
        raise ConfigError(found, "a kind that no other part of the family has", fix)


def family_of(cls: type[Part]) -> type[Part]:
    """Return the family of a part: the direct subclass of `Part` above it, such as Sampler, Step or Release."""
    return next(base for base in cls.__mro__ if Part in base.__bases__)


def nested_values(value: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield a value and everything in its fields, recursively, each with its dotted path."""
    if depth > DEEPEST:
        needed = f"at most {DEEPEST} levels of nested parts"
        raise PlanError("parts", f"{where}, nested {DEEPEST} deep", needed, "nest fewer parts")
    yield where, value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            path = f"{where}.{field.name}" if where else field.name
            yield from nested_values(getattr(value, field.name), path, depth + 1)
    elif isinstance(value, list | tuple) and not {*map(type, value)} <= _PLAIN:
        for i, item in enumerate(value):
            yield from nested_values(item, f"{where}[{i}]", depth + 1)


def check_parts(value: Any, where: str) -> None:
    """Refuse a value that holds, at any depth, a part which behaves otherwise than its form in a file.

    A subclass that inherits its `kind` would be written as its parent, and a method set on an instance would not be
    written at all: the run would then have the hash and the cost of another plan.
    """
    for place, item in nested_values(value, where):
        if dataclasses.is_dataclass(item):
            check_part(item, place)
        elif not (isinstance(item, list | tuple) or type(item) in _PLAIN or type(item).__module__ == "numpy"):
            found, needed = f"{place} = {brief_repr(item)}", "a number, text or a part"
            raise PlanError("parts", found, needed, "define a part (docs/own-parts.md) for other values")


def check_part(part: Any, where: str) -> None:
    """Refuse a part whose class is not registered under its kind, or whose attributes were set after construction."""
    cls, needed = type(part), "exactly the part that its kind names"
    if isinstance(part, Part) and cls.members.get(cls.kind) is not cls:
        found = f"{where}, a {cls.__name__} that would be written as kind {cls.kind!r}"
        raise PlanError("parts", found, needed, f'declare its kind: class {cls.__name__}(..., kind="...")')
    if not isinstance(part, Part) and any(map(dataclasses.is_dataclass, cls.__mro__[1:])):
        found = f"{where}, a {cls.__name__} that would be written as {cls.__mro__[1].__name__}"
        raise PlanError("parts", found, needed, f"use {cls.__mro__[1].__name__} itself")
    extra = sorted(getattr(part, "__dict__", {}).keys() - {field.name for field in dataclasses.fields(part)})
    if extra:
        found = f"{where}, a {cls.__name__} whose attribute {extra[0]!r} was set after construction"
        raise PlanError("parts", found, needed, "define a subclass with its own kind")


# ---- third-party parts -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Foreign:
    """Name and version of a third-party part, whose privacy statements are trusted; certificates list it."""

    package: str
    version: str
    family: str
    kind: str


def foreign(value: Any) -> tuple[Foreign, ...]:
    """Return the third-party parts and functions inside a plan or another value, each once."""
    found: set[Foreign] = set()
    for part in (item for _, item in nested_values(value) if isinstance(item, Part)):
        cls = type(part)
        defined = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls  # a module name can be forged
        if not (defined and cls.__module__.startswith("sordino.")):
            found.add(Foreign(*package_of(cls.__module__), family_of(cls).__name__, part.kind))
        found.update(part.rests_on())
    return tuple(sorted(found))


def _error_name(cls: type[Part]) -> str:
    return f"part {cls.kind or cls.__name__!r} ({family_of(cls).__name__} of {package_of(cls.__module__)[0]})"


def package_of(module: str) -> tuple[str, str]:
    """Return package and version of a module; for a file of `--with` its name and SHA-256, for a script no version."""
    package = module.partition(".")[0]
    return FILES[module] if module in FILES else (package, _version(package))


@cache
def _version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, ())
    return importlib.metadata.version(names[0]) if names else ""


def plugins_installed() -> bool:
    """Return whether an installed package offers parts, without importing it."""
    return bool(importlib.metadata.entry_points(group=PLUGINS))


@cache
def load_plugins(group: str = PLUGINS) -> None:
    """Import the modules that installed packages offer under a group of entry points; done once per process."""
    for point in importlib.metadata.entry_points(group=group):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist is not None else point.value
            what = group.rpartition(".")[2].replace("_", " ")
            found = f"package {package}, whose {what} cannot be loaded ({type(error).__name__}: {error})"
            raise ConfigError(found, f"{point.value} that can be imported", f"repair or uninstall {package}") from None


def load_parts_file(path: Path) -> None:
    """Import a Python file of parts (`--with my_parts.py`); certificates name the file and its SHA-256."""
    try:
        source = path.read_bytes()
        code = compile(source, str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        found = f"--with {path}, which cannot be read ({reason})"
        raise ConfigError(found, "a Python file of parts", "check the path and the file's syntax") from None
    name, origin = f"sordino_with_{path.stem}", (path.name, f"sha256:{hashlib.sha256(source).hexdigest()}")
    if FILES.get(name) == origin:
        return
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name], FILES[name] = module, origin
    try:
        exec(code, module.__dict__)
    except Exception as error:
        del sys.modules[name], FILES[name]
        found = f"--with {path}, which fails ({type(error).__name__}: {error})"
        raise ConfigError(found, "a Python file that defines parts", "run it with python to see where") from None


@contextmanager
def named_failures() -> Iterator[None]:
    """Context around a run in which the failure of a third-party part becomes a `PartError` that names the part."""
    try:
        yield
    except (Exception, SystemExit) as error:
        found = boundary.failure(error)
        if found is None:
            raise
        raise found from error


# ---- repr without values ---------------------------------------------------------------------------------------------

LONGEST, LONGEST_WORD = 400, 40  # characters of a whole repr, and of one text in it
T = TypeVar("T")


def hides_values(cls: type[T]) -> type[T]:
    """Class decorator, above `@dataclass`, whose repr shows no value of a tensor, an array or a float.

    A notebook saves what a cell prints, and such values may be computed from private records. So tensors, arrays and
    bytes are printed by their shape, other objects by their type.
    """
    cls.__repr__ = short_repr  # type: ignore[method-assign]
    return cls


def hides(cls: type[Any]) -> bool:
    """Return whether a class is decorated by `hides_values`."""
    return vars(cls).get("__repr__") is short_repr


def short_repr(value: Any) -> str:
    """Return the repr Type(field=description, ...) without data, of at most `LONGEST` characters.

    A class may define `described_fields()` to choose its fields."""
    own = getattr(value, "described_fields", None)
    texts = described_fields(value) if own is None else own()
    whole = f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 5]} ...)"


def described_fields(value: Any) -> dict[str, str]:
    """Return a description of every field of a dataclass, by name, except fields that are None or empty."""
    named = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value) if field.repr)
    shown = ((name, item) for name, item in named if item is not None)
    return {name: described(item) for name, item in shown if not isinstance(item, str | tuple | list | dict) or item}


def described(item: Any) -> str:
    """Return a description of a value without its data: a whole number, a short text, a shape, a count or a type."""
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
