"""`sordino schema`: the JSON Schema of a configuration, so that an editor can check and complete the file."""

from __future__ import annotations

import dataclasses
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sordino.cli.app import JsonFlag, Own, app, bring, say
from sordino.codec import Part

Schema = dict[str, Any]
_SCALARS: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}


@app.command()
def schema(own: Own = None, as_json: JsonFlag = True) -> None:
    """The JSON Schema of a configuration file, for editors."""
    bring(own)
    from sordino.config import Config

    say(True, json_schema(Config), "")


def json_schema(declared: Any) -> Schema:
    """The schema of a type; families and dataclasses are defined once, under $defs."""
    defs: dict[str, Schema] = {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema(declared, defs), "$defs": defs}


def _schema(declared: Any, defs: dict[str, Schema]) -> Schema:
    origin, args = get_origin(declared), get_args(declared)
    if declared in _SCALARS:
        return _SCALARS[declared]
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(option, defs) for option in args if option is not NoneType]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0], defs)}
    if isinstance(declared, type) and (issubclass(declared, Part) or dataclasses.is_dataclass(declared)):
        return _named(declared, defs)
    return {"type": "object"} if origin is dict else {}


def _named(cls: Any, defs: dict[str, Schema]) -> Schema:
    name = cls.__name__
    if name not in defs:
        defs[name] = {}
        family = issubclass(cls, Part) and not cls.kind
        members = [cls.members[kind] for kind in sorted(cls.members)] if family else []
        alone = [member.kind for member in members if not _needed(member)]  # may be written by its name
        written = [*([{"enum": alone}] if alone else []), *(_named(member, defs) for member in members)]
        defs[name] = {"oneOf": written} if family else _table(cls, defs)
    return {"$ref": f"#/$defs/{name}"}


def _table(cls: Any, defs: dict[str, Schema]) -> Schema:
    hints, fields = get_type_hints(cls), [field for field in dataclasses.fields(cls) if field.init]
    kind = {"kind": {"const": cls.kind}} if issubclass(cls, Part) else {}
    return {
        "type": "object",
        "description": (cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else "",
        "properties": {**kind, **{field.name: _schema(hints[field.name], defs) for field in fields}},
        "required": [*kind, *_needed(cls)],
        "additionalProperties": False,
    }


def _needed(cls: Any) -> list[str]:
    missing, fields = dataclasses.MISSING, dataclasses.fields(cls)
    return [f.name for f in fields if f.init and f.default is missing and f.default_factory is missing]
