"""Serialization of plans: values to TOML, JSON and hash, and strictly typed reading. Called through `codec`.

An unknown name is answered with the nearest known one, also by the words of other libraries (`ELSEWHERE`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from sordino.codec.part import DEEPEST, Part, check_part, join
from sordino.errors import ConfigError, brief_repr

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# ---- writing ---------------------------------------------------------------------------------------------------------


def dump(value: Any) -> Any:
    """Plain data (dicts, lists, numbers) of a value; a part carries its `kind`; fields that are None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        check_part(value, type(value).__name__)
        kind = {"kind": value.kind} if isinstance(value, Part) and value.kind else {}
        named = {field.name: _as_declared(value, field.name) for field in dataclasses.fields(value)}
        return {**kind, **{name: dump(item) for name, item in named.items() if item is not None}}
    if isinstance(value, Mapping):
        return {str(name): dump(item) for name, item in value.items()}
    return [dump(item) for item in value] if isinstance(value, list | tuple) else value


def _as_declared(value: Any, name: str) -> Any:
    """A field's value; a whole number where a float is declared becomes one: 1 and 1.0 have one written form."""
    kind: Any = type(value)
    declared = _hints(kind)[name]
    item = getattr(value, name)
    whole = isinstance(item, int) and not isinstance(item, bool)
    return float(item) if whole and (declared is float or float in get_args(declared)) else item


def to_json(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces; the input of `digest`."""
    return json.dumps(dump(value), sort_keys=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """sha256 of the canonical JSON."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def to_toml(value: Any) -> str:
    """The value as a TOML document."""
    return tomli_w.dumps(dump(value))


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(declared: Any, data: Any, where: str = "") -> Any:
    """The value of the declared type that plain data describes, or a `ConfigError` in one sentence."""
    origin = get_origin(declared)
    if declared is Any:
        return data
    if isinstance(declared, type) and not origin and isinstance(data, declared) and dataclasses.is_dataclass(data):
        return data  # a finished value, as Python code passes it
    if origin in (Union, UnionType):
        return _read_union(get_args(declared), data, where)
    if origin is Literal:
        options = get_args(declared)
        found = [option for option in options if option == data and not isinstance(data, bool)]
        if not found:
            words = [str(option) for option in options]
            raise ConfigError(
                f"{where} = {brief_repr(data)}", "one of " + ", ".join(words), nearest(brief_repr(data), words)
            )
        return found[0]
    if origin is tuple:
        # tuple[int, ...] is a list of any length, tuple[int, int] one of two
        items = get_args(declared)
        if not isinstance(data, list | tuple):
            raise ConfigError(f"{where} = {brief_repr(data)}", "a list", "put it in [ ]")
        if items[-1] is not Ellipsis and len(data) != len(items):
            raise ConfigError(f"{where} = {brief_repr(data)}", f"a list of {len(items)}")
        return tuple(read(items[0], entry, f"{where}[{i}]") for i, entry in enumerate(data))
    if origin is dict or declared is dict:
        return dict(_table(data, where))
    if isinstance(declared, type) and issubclass(declared, Part) and not declared.kind:
        return _read_kind(declared, data, where) if isinstance(data, str) else _read_member(declared, data, where)
    if dataclasses.is_dataclass(declared):
        return _read_fields(declared, _table(data, where), where)
    return _read_scalar(declared, data, where)


def _read_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    """The branch that fits the shape of the data: a table reads as the part, anything else as the scalar."""
    if data is None and NoneType in options:
        return None
    branches = [option for option in options if option is not NoneType]
    structured = [option for option in branches if _is_table(option)]
    wanted = structured if isinstance(data, Mapping) or dataclasses.is_dataclass(data) else branches
    return read((wanted or branches)[0], data, where)


def _is_table(declared: Any) -> bool:
    return isinstance(declared, type) and (issubclass(declared, Part) or dataclasses.is_dataclass(declared))


def _table(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        found = f"{where or 'a value'} = {brief_repr(data)}"
        raise ConfigError(found, "a table", f"write [{where}] or {where} = {{ ... }}")
    return data


def _read_kind(family: type[Part], kind: str, where: str) -> Any:
    """A part that needs nothing but its name may be written by it alone: loss = "mse"."""
    fields = dataclasses.fields(family.members[kind]) if kind in family.members else ()  # type: ignore[arg-type]
    needed = [f"{field.name} = ..." for field in fields if _required(field)]
    if needed:
        fix = f'write {where} = {{ kind = "{kind}", {", ".join(needed)} }}'
        raise ConfigError(f"{where} = {kind!r} alone", "its other values beside it", fix)
    return _read_member(family, {"kind": kind}, where)


def _read_member(family: type[Part], data: Any, where: str) -> Any:
    known, table = sorted(family.members), _table(data, where)
    if "kind" not in table:
        raise ConfigError(f"no kind in {where}", "a known kind", "known: " + ", ".join(known))
    kind = table["kind"]
    if not isinstance(kind, str) or kind not in family.members:
        raise ConfigError(f"kind {brief_repr(kind)} in {where}", "a known kind", nearest(brief_repr(kind), known))
    return _read_fields(family.members[kind], table, where)


def _read_fields(cls: Any, table: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a table; `kind` is taken off a part's."""
    entries = dict(table)
    if issubclass(cls, Part) and entries.pop("kind", cls.kind) != cls.kind:
        raise ConfigError(f"kind {brief_repr(table['kind'])} in {where}", f"kind {cls.kind!r}")
    if inspect.isabstract(cls):
        lacks = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{where}, a {cls.__name__} without {lacks}", "all that its family asks of a part")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    needed = [name for name, field in fields.items() if _required(field)]
    _check_keys(entries, fields, needed, where)
    hints = _hints(cls)
    return cls(**{name: read(hints[name], item, join(where, name)) for name, item in entries.items()})


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _check_keys(entries: Mapping[str, Any], known: Iterable[str], needed: Iterable[str], where: str) -> None:
    names = list(known)
    for name in entries:
        if name not in names:
            raise ConfigError(f"unknown key {join(where, name)}", "a known key", nearest(name, names))
    for name in needed:
        if name not in entries:
            raise ConfigError(f"no {join(where, name)}", f"a value for {name}", f"add {name} = ...")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text in quotes"),
}


def _read_scalar(declared: Any, data: Any, where: str) -> Any:
    kinds, words = _SCALARS[declared]
    if not isinstance(data, kinds) or (isinstance(data, bool) and declared is not bool):
        raise ConfigError(f"{where} = {brief_repr(data)}", words)
    if isinstance(data, int) and not -(2**63) <= data < 2**63:
        raise ConfigError(f"{where} = {brief_repr(data)}", "a whole number of at most 64 bits")
    return float(data) if declared is float and isinstance(data, int) else data


def call(function: Callable[..., T], arguments: Mapping[str, Any], where: str) -> T:
    """Call a function of keyword arguments with plain data, each read as the parameter's declared type."""
    parameters = inspect.signature(function, eval_str=True).parameters
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    _check_keys(arguments, parameters, needed, where)
    return function(**{n: read(parameters[n].annotation, item, f"{where}.{n}") for n, item in arguments.items()})


def check_plain(data: Any) -> None:
    """Refuse plain data that no configuration needs: deep nesting, dates, integers beyond 64 bits."""
    level: list[tuple[str, Any]] = [("", data)]
    for _ in range(DEEPEST):
        inside = [
            (join(where, str(name)), item)
            for where, value in level
            for name, item in (value.items() if isinstance(value, Mapping) else enumerate(value))
        ]
        for where, item in inside:
            if not isinstance(item, Mapping | list | tuple | str | int | float) and not dataclasses.is_dataclass(item):
                raise ConfigError(f"{where} = {brief_repr(item)}", "a number, text, a list or a table")
            if isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise ConfigError(f"{where} = {brief_repr(item)}", "a whole number of at most 64 bits")
        level = [(where, item) for where, item in inside if isinstance(item, Mapping | list | tuple)]
        if not level:
            return
    raise ConfigError(f"{level[0][0]}, nested {DEEPEST} deep", f"at most {DEEPEST} levels", "write the plan flatter")


ELSEWHERE = {  # what Opacus, Flower, pfl and TensorFlow Privacy call it, and what it may be called here
    "max_grad_norm": ("clip_norm",),
    "l2_norm_clip": ("clip_norm",),
    "clipping_norm": ("clip_norm",),
    "clipping_bound": ("clip_norm",),
    "multiplier": ("noise_multiplier",),
    "tries": ("trials",),
    "whole": ("integer",),
    "radius": ("clip_norm",),
    "noise_scale": ("noise_multiplier",),
    "target_epsilon": ("epsilon",),
    "target_delta": ("delta",),
    "sample_rate": ("rate",),
    "fraction_train": ("rate",),
    "fraction_fit": ("rate",),
    "num_clients": ("population",),
    "num_supernodes": ("population",),
    "population_size": ("population",),
    "cohort_size": ("size", "cohort"),
    "num_sampled_clients": ("size", "cohort"),
    "num_rounds": ("rounds",),
    "num_server_rounds": ("rounds",),
    "central_num_iterations": ("rounds",),
    "local_num_epochs": ("epochs",),
    "local_epochs": ("epochs",),
    "learning_rate": ("lr",),
    "local_learning_rate": ("lr",),
    "batch_size": ("batch", "max_physical_batch_size"),
    "local_batch_size": ("batch",),
    "data_loader": ("loader",),
    "module": ("model",),
    "physical_batch": ("max_physical_batch_size",),
    "secure_mode": ("noise",),
}


def nearest(word: str, known: list[str]) -> str:
    """The known word that a mistyped or a foreign one most likely meant, or all of them."""
    ours = next((name for name in ELSEWHERE.get(word, ()) if name in known), None)
    if ours is not None:
        return f"{word} is called {ours} here"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(sorted(known))


def check_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: an unknown keyword argument is a `ConfigError` that names the nearest one."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def called(*args: P.args, **words: P.kwargs) -> R:
        strange = next((word for word in words if word not in known), None)
        if strange is not None:
            raise ConfigError(f"argument {strange}", f"an argument of {function.__name__}", nearest(strange, known))
        return function(*args, **words)

    return called
