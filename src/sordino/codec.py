"""One codec for every value of a plan: dataclasses <-> TOML, JSON, hash.

A *family* (Sampler, Step, Release, ...) is a direct subclass of `Part`; a concrete part names its `kind`:

    @dataclass(frozen=True)
    class Poisson(Sampler, kind="poisson"): ...

Wherever a family is the declared type, the written form is a table with that `kind`. Reading is strict: an unknown
key, an unknown kind or a wrong type is a `ConfigError` that names the nearest known word.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import tomli_w
from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from sordino.errors import ConfigError

T = TypeVar("T")
STRICT = ConfigDict(extra="forbid", strict=True)
_BRANCHES = {"float", "int", "str", "bool", "none"}  # how pydantic names the branches of a union in an error's path


class Part:
    """Root of everything that can stand in a plan; `kind` is its name in a file."""

    kind: ClassVar[str] = ""
    members: ClassVar[dict[str, type[Part]]] = {}
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def __init_subclass__(cls, kind: str = "") -> None:
        kind = kind or cls.__dict__.get("kind", "")  # dataclass(slots=True) makes the class a second time
        if not kind and Part in cls.__bases__:
            cls.members = {}  # a new family
        elif kind:
            cls.kind = kind
            cls.members[kind] = cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.kind:
            return _with_kind(cls.kind, handler(source))
        choices = {kind: handler.generate_schema(member) for kind, member in sorted(cls.members.items())}
        return core_schema.tagged_union_schema(choices=choices, discriminator=_kind_of)


def _kind_of(value: Any) -> str | None:
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)


def _with_kind(kind: str, inner: CoreSchema) -> CoreSchema:
    """The part's own schema, with `kind` taken off when read and put on when written."""

    def strip(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("kind", kind) != kind:
            raise ValueError(f"kind {value['kind']!r} where only {kind!r} fits")
        return {name: item for name, item in value.items() if name != "kind"}

    return core_schema.no_info_before_validator_function(strip, inner)


def dump(value: Any) -> Any:
    """Plain data (dicts, lists, numbers) of a value; a part carries its `kind`; fields that are None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if isinstance(value, Part) and value.kind else {}
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {**kind, **{name: dump(item) for name, item in named.items() if item is not None}}
    if isinstance(value, Mapping):
        return {str(name): dump(item) for name, item in value.items()}
    return [dump(item) for item in value] if isinstance(value, list | tuple) else value


def to_json(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces; the input of `digest`."""
    return json.dumps(dump(value), sort_keys=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """sha256 of the canonical JSON."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def to_toml(value: Any) -> str:
    """The value as a TOML document."""
    return tomli_w.dumps(dump(value))


def read(cls: Any, data: Any, where: str = "") -> Any:
    """The value of type `cls` that plain data describes, or a `ConfigError` in one sentence."""
    try:
        return TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise _sentence(error, cls, where) from None
    except TypeError as error:
        raise ConfigError(f"{where or 'a value'} that is not plain data ({error})", "numbers, text, lists") from None


def call(function: Callable[..., T], arguments: Mapping[str, Any], where: str) -> T:
    """Call a function of keyword arguments with plain data, each read as the parameter's declared type."""
    parameters = inspect.signature(function, eval_str=True).parameters
    for name in arguments:
        if name not in parameters:
            raise ConfigError(f"unknown key {where}.{name}", "a known key", nearest(name, list(parameters)))
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in arguments]
    if missing:
        raise ConfigError(f"no {where}.{missing[0]}", f"a value for {missing[0]}", f"add {missing[0]} = ...")
    return function(
        **{name: read(parameters[name].annotation, item, f"{where}.{name}") for name, item in arguments.items()}
    )


def json_schema(cls: Any) -> dict[str, Any]:
    """JSON Schema of a type, for editors."""
    return TypeAdapter(cls).json_schema(mode="validation")


def nearest(word: str, known: list[str]) -> str:
    """The known word that a mistyped one most likely meant, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(sorted(known))


def _kinds() -> dict[str, type[Part]]:
    return {kind: part for family in Part.__subclasses__() for kind, part in family.members.items()}


def _fields_at(loc: tuple[Any, ...], cls: Any) -> list[str]:
    """Known keys of the table an error points into: the innermost kind on the path, or the field types along it."""
    for step in reversed(loc):
        if step in _kinds():
            return [field.name for field in dataclasses.fields(_kinds()[step])]  # type: ignore[arg-type]
    for step in loc:
        found = {f.name: f.type for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
        cls = found.get(step, cls)
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _sentence(error: ValidationError, cls: Any, where: str) -> ConfigError:
    first = max(error.errors(include_url=False), key=lambda entry: len(entry["loc"]))  # the branch that got furthest
    loc = first["loc"]
    named = [str(step) for step in loc if step not in _kinds() and step not in _BRANCHES and "[" not in str(step)]
    path = ".".join([*([where] if where else []), *named])
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return ConfigError(f"unknown key {path}", "a known key", nearest(str(loc[-1]), _fields_at(loc[:-1], cls)))
    if first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return ConfigError(f"no {path}", f"a value for {path}", f"add {loc[-1]} = ...")
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = first.get("ctx", {})
        known = [tag.strip(" '") for tag in str(context.get("expected_tags", "")).split(",") if tag]
        word = str(context.get("tag", ""))
        found = f"kind {word!r} in {path}" if word else f"no kind in {path}"
        return ConfigError(found, "a known kind", nearest(word, known))
    return ConfigError(f"{path} = {first['input']!r}", first["msg"].lower())
