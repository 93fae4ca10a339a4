"""Serialization of plans to TOML, JSON and SHA-256, and strictly typed reading of TOML files and single settings.

Called as `codec.read`, `codec.dump`, ... by every package that reads or writes a configuration. Errors about an unknown
name suggest the nearest known one, also for names of other libraries (`ELSEWHERE`). Functions that users register
by name (`add_model`, `add_loss`, `add_metric`) are stored here too; a part of kind "own" looks its function up.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from sordino.codec.part import DEEPEST, Foreign, Part, check_part, package_of
from sordino.errors import ConfigError, brief_repr

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_hints = functools.cache(get_type_hints)

# ---- writing ---------------------------------------------------------------------------------------------------------


def dump(value: Any) -> Any:
    """Return a value as plain data (dicts, lists, numbers), with the `kind` of every part, without fields of None.

    A whole number where a float is declared becomes a float, so that 1 and 1.0 have one written form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        check_part(value, type(value).__name__)
        plain = {"kind": value.kind} if isinstance(value, Part) and value.kind else {}
        for name in (field.name for field in dataclasses.fields(value)):
            item, declared = getattr(value, name), _hints(type(value))[name]
            if isinstance(item, int) and not isinstance(item, bool) and float in (declared, *get_args(declared)):
                item = float(item)
            if item is not None:
                plain[name] = dump(item)
        return plain
    if isinstance(value, Mapping):
        return {str(name): dump(item) for name, item in value.items()}
    return [dump(item) for item in value] if isinstance(value, list | tuple) else value


def to_json(value: Any) -> str:
    """Return the canonical JSON of a value: sorted keys, no spaces."""
    return json.dumps(dump(value), sort_keys=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def to_toml(value: Any) -> str:
    """Return a value as a TOML document."""
    return tomli_w.dumps(dump(value))


# ---- reading ---------------------------------------------------------------------------------------------------------

_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text in quotes"),
}


def read(declared: Any, data: Any, where: str = "") -> Any:
    """Return the value of the declared type that plain data describes; other data raises a `ConfigError`."""
    origin, options = get_origin(declared), get_args(declared)
    if declared is Any or (data is None and NoneType in options):
        return data
    if isinstance(declared, type) and not origin and isinstance(data, declared) and dataclasses.is_dataclass(data):
        return data  # a finished value, as Python code passes it
    if origin in (Union, UnionType):  # a table is read as the part among the options, anything else as the first one
        branches = [option for option in options if option is not NoneType]
        classes = [option for option in branches if isinstance(option, type)]
        parts = [option for option in classes if issubclass(option, Part) or dataclasses.is_dataclass(option)]
        table = isinstance(data, Mapping) or dataclasses.is_dataclass(data)
        return read(((parts if table else branches) or branches)[0], data, where)
    if origin is Literal:
        if data in options and not isinstance(data, bool):
            return options[options.index(data)]
        words = [str(option) for option in options]
        fix = nearest(brief_repr(data), words)
        raise ConfigError(f"{where} = {brief_repr(data)}", "one of " + ", ".join(words), fix)
    if origin is tuple:  # tuple[int, ...] is a list of any length, tuple[int, int] one of two
        if not isinstance(data, list | tuple):
            raise ConfigError(f"{where} = {brief_repr(data)}", "a list", "put it in [ ]")
        if options[-1] is not Ellipsis and len(data) != len(options):
            needed = f"a list of {len(options)} entries"
            raise ConfigError(f"{where} = {brief_repr(data)}", needed, "change the number of entries")
        return tuple(read(options[0], entry, f"{where}[{i}]") for i, entry in enumerate(data))
    if isinstance(declared, type) and issubclass(declared, Part) and not declared.kind and isinstance(data, str):
        data = _only_kind(declared, data, where)
    if declared not in _SCALARS:
        if not isinstance(data, Mapping):
            found = f"{where or 'a value'} = {brief_repr(data)}"
            raise ConfigError(found, "a table", f"write [{where}] or {where} = {{ ... }}")
        return dict(data) if dict in (origin, declared) else _read_part(declared, data, where)
    kinds, needed = _SCALARS[declared]
    if not isinstance(data, kinds) or (isinstance(data, bool) and declared is not bool):
        raise ConfigError(f"{where} = {brief_repr(data)}", needed, f"set {where} to {needed}")
    if isinstance(data, int) and not -(2**63) <= data < 2**63:
        raise _too_large(where, data)
    return float(data) if declared is float and isinstance(data, int) else data


def _too_large(where: str, number: int) -> ConfigError:
    return ConfigError(f"{where} = {brief_repr(number)}", "a whole number of at most 64 bits", "use a smaller number")


def _only_kind(family: type[Part], kind: str, where: str) -> dict[str, Any]:
    """Return the table of a part that is written by its kind alone (loss = "mse"); refuse one that needs more."""
    parameters = inspect.signature(family.members[kind]).parameters if kind in family.members else {}
    needed = [f"{name} = ..." for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if needed:
        fix = f'write {where} = {{ kind = "{kind}", {", ".join(needed)} }}'
        raise ConfigError(f"{where} = {kind!r} alone", "a table with the values that this kind needs", fix)
    return {"kind": kind}


def _read_part(cls: Any, table: Mapping[str, Any], where: str) -> Any:
    entries = dict(table)
    if issubclass(cls, Part) and not cls.kind:
        known = sorted(cls.members)
        if "kind" not in table:
            raise ConfigError(f"no kind in {where}", "a known kind", "use one of: " + ", ".join(known))
        if not isinstance(table["kind"], str) or table["kind"] not in cls.members:
            kind = brief_repr(table["kind"])
            raise ConfigError(f"kind {kind} in {where}", "a known kind", nearest(kind, known))
        cls = cls.members[table["kind"]]
    if issubclass(cls, Part) and entries.pop("kind", cls.kind) != cls.kind:
        found, needed = f"kind {brief_repr(table['kind'])} in {where}", f"kind {cls.kind!r}"
        raise ConfigError(found, needed, f"write kind = {cls.kind!r}, or drop kind")
    if inspect.isabstract(cls):
        lacks = ", ".join(sorted(cls.__abstractmethods__))
        found, needed = f"{where}, a {cls.__name__} without {lacks}", "every abstract method of its family"
        raise ConfigError(found, needed, f"define {lacks} in {cls.__name__}")
    return call(cls, entries, where)


def call(function: Callable[..., T], arguments: Mapping[str, Any], where: str) -> T:
    """Return the result of a function or dataclass called with plain data, each argument read as its declared type."""
    is_class, prefix = isinstance(function, type), f"{where}." if where else ""
    parameters = inspect.signature(function, eval_str=not is_class).parameters
    for name in arguments:
        if name not in parameters:
            raise ConfigError(f"unknown key {prefix}{name}", "a known key", nearest(name, list(parameters)))
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ConfigError(f"no {prefix}{name}", f"a value for {name}", f"add {name} = ...")
    hints = _hints(function) if is_class else {name: parameter.annotation for name, parameter in parameters.items()}
    return function(**{name: read(hints[name], item, prefix + name) for name, item in arguments.items()})


def check_plain(data: Any) -> None:
    """Refuse plain data that no configuration needs: deep nesting, dates, integers beyond 64 bits."""
    level: list[tuple[str, Any]] = [("", data)]
    for _ in range(DEEPEST):
        inside = [
            (f"{where}.{name}" if where else str(name), item)
            for where, value in level
            for name, item in (value.items() if isinstance(value, Mapping) else enumerate(value))
        ]
        for where, item in inside:
            if not isinstance(item, Mapping | list | tuple | str | int | float) and not dataclasses.is_dataclass(item):
                found, needed = f"{where} = {brief_repr(item)}", "a number, text, a list or a table"
                raise ConfigError(found, needed, "write a date as text in quotes, for example")
            if isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise _too_large(where, item)
        level = [(where, item) for where, item in inside if isinstance(item, Mapping | list | tuple)]
        if not level:
            return
    found = f"{level[0][0]}, nested {DEEPEST} deep"
    raise ConfigError(found, f"at most {DEEPEST} levels", "use fewer levels of tables")


# ---- TOML files, and single values set on the command line -----------------------------------------------------------

LARGEST = 4 << 20  # bytes of a configuration
_KEY = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DEEP = re.compile(rf"(?<![A-Za-z0-9_-]){_KEY}(?:\.[ \t]*+{_KEY}){{{DEEPEST}}}")  # a.b.c: a level for each
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")  # text without quotes, which a shell would take away


def read_toml(path: Path, fix: str = "") -> dict[str, Any]:
    """Return the table of a TOML file, of limited size and depth; `fix` is added to the error of a file not in TOML."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}, which is a device or a pipe", "a TOML file", "write it to a file first")
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            needed = f"a configuration of at most {LARGEST:,} bytes"
            raise ConfigError(f"{path} of more than {LARGEST:,} bytes", needed, "check that it is the right file")
        text = data.decode("utf-8")
        if _DEEP.search(text):
            found, needed = f"{path}, which holds a key of more than {DEEPEST} parts", f"at most {DEEPEST} parts"
            raise ConfigError(found, needed, "shorten the key")
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        found = f"{path}, which cannot be read ({reason})"
        raise ConfigError(found, "a TOML file", "check the path and its permissions") from None
    except RecursionError:
        found, needed = f"{path}, whose lists or tables are nested too deep", f"at most {DEEPEST} levels"
        raise ConfigError(found, needed, "use fewer levels") from None
    except ValueError as error:  # not TOML, or an integer of thousands of digits
        raise ConfigError(f"{path} that is not TOML ({error})", "a TOML file", fix) from None


def parse_setting(text: str) -> tuple[str, Any]:
    """Return key and value of a setting, `recipe.lr=0.5` or `task.dataset=mnist`: a TOML literal, or a word as text."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key or not value:
        raise ConfigError(f"--set {brief_repr(text)}", "key=value", "write recipe.lr=0.5, for example")
    try:
        found = tomllib.loads(f"value = {value}")
        if list(found) == ["value"]:  # a line break would begin another key
            return key, found["value"]
    except (ValueError, RecursionError):
        if _WORD.fullmatch(value):
            return key, value
    unread, fix = f"{key} = {brief_repr(value)}", "write 0.5, true, [1, 2] or 'some words', for example"
    raise ConfigError(unread, "a value as TOML writes it", fix)


def put(table: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return the table with the value at a dotted key changed; missing tables are added, list entries must exist."""
    places = key.split(".")
    if "" in places or len(places) > DEEPEST:
        raise ConfigError(f"the key {brief_repr(key)}", "names with dots between them", "write recipe.lr, for example")
    changed: dict[str, Any] = _put(table, places, value, "")
    return changed


def _put(old: Any, places: Sequence[str], value: Any, where: str) -> Any:
    if not places:
        return value
    first, rest = places[0], places[1:]
    here = f"{where}.{first}" if where else first
    if isinstance(old, list | tuple):
        if not (first.isdecimal() and int(first) < len(old)):
            found, needed = f"the key {here} in a list of {len(old)}", f"a number from 0 to {len(old) - 1}"
            raise ConfigError(found, needed, f"write {where}.0 for the first entry")
        return [_put(item, rest, value, here) if k == int(first) else item for k, item in enumerate(old)]
    if not isinstance(old, Mapping):
        found = f"the key {here}, and {where} = {brief_repr(old)}"
        raise ConfigError(found, f"a table at {where}", f"set {where} itself")
    return {**old, first: _put(old.get(first, {}), rest, value, here)}


# ---- names -----------------------------------------------------------------------------------------------------------

ELSEWHERE = {  # names in Opacus, Flower, pfl and TensorFlow Privacy, and what Sordino calls them
    "max_grad_norm": ("clip_norm",), "l2_norm_clip": ("clip_norm",), "clipping_norm": ("clip_norm",),
    "clipping_bound": ("clip_norm",), "multiplier": ("noise_multiplier",), "tries": ("trials",),
    "whole": ("integer",), "radius": ("clip_norm",), "noise_scale": ("noise_multiplier",),
    "target_epsilon": ("epsilon",), "target_delta": ("delta",), "sample_rate": ("rate",), "fraction_train": ("rate",),
    "fraction_fit": ("rate",), "num_clients": ("population",), "num_supernodes": ("population",),
    "population_size": ("population",), "cohort_size": ("size", "cohort"), "num_sampled_clients": ("size", "cohort"),
    "num_rounds": ("rounds",), "num_server_rounds": ("rounds",), "central_num_iterations": ("rounds",),
    "local_num_epochs": ("epochs",), "local_epochs": ("epochs",), "learning_rate": ("lr",),
    "local_learning_rate": ("lr",), "batch_size": ("batch", "max_physical_batch_size"),
    "local_batch_size": ("batch",), "data_loader": ("loader",), "module": ("model",),
    "physical_batch": ("max_physical_batch_size",), "secure_mode": ("noise",),
}  # fmt: skip


def nearest(word: str, known: list[str]) -> str:
    """Return a suggestion for an unknown name: what Sordino calls another library's name, or the nearest known name.

    If no known name is near, all are listed."""
    ours = next((name for name in ELSEWHERE.get(word, ()) if name in known), None)
    if ours is not None:
        return f"{word} is called {ours} here"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "use one of: " + ", ".join(sorted(known))


def check_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function, so that an unknown keyword argument raises a `ConfigError` with the nearest known one."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def called(*args: P.args, **words: P.kwargs) -> R:
        unknown = next((word for word in words if word not in known), None)
        if unknown is not None:
            raise ConfigError(f"argument {unknown}", f"an argument of {function.__name__}", nearest(unknown, known))
        return function(*args, **words)

    return called


# ---- functions that users register by name ---------------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {}  # by family (model, loss, metric) and name


def register_function(family: str, name: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a user's model, loss or metric function (`family`) under a name."""

    def register(function: Function) -> Function:
        known = _FUNCTIONS.get((family, name))
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            fix = f"choose another name: {known.__module__} has registered this one"
            raise ConfigError(f"a second {family} {name!r}", f"a name that no other {family} has", fix)
        _FUNCTIONS[family, name] = function
        return function

    return register


def find_function(family: str, name: str) -> Callable[..., Any]:
    """Return the user's model, loss or metric function (`family`) that was registered under a name."""
    if (family, name) not in _FUNCTIONS:
        known = [other for of, other in _FUNCTIONS if of == family]
        how = f'register it by @sordino.add_{family}("{name}") in a file that --with names, or in a package'
        found = f"{family} {name!r} of kind own"
        raise ConfigError(found, "a registered function", nearest(name, known) if known else how)
    return _FUNCTIONS[family, name]


def function_origin(family: str, name: str) -> Foreign:
    """Return package and version of a registered function, which the certificate lists."""
    return Foreign(*package_of(find_function(family, name).__module__), family, name)


def read_options(function: Callable[..., Any], options: Mapping[str, Any], skip: int, where: str) -> dict[str, Any]:
    """Return options of a configuration file as typed keyword arguments of a function; `skip` skips its first ones."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[skip:]
    if any(one.kind is one.VAR_KEYWORD for one in own):
        return dict(options)
    named = {one.name: one for one in own if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    unknown = next((name for name in options if name not in named), None)
    if unknown is not None:
        takes = ", ".join(named) or "no option"
        raise ConfigError(f"unknown option {unknown!r} of {where}", takes, nearest(unknown, list(named)))
    missing = next((n for n, one in named.items() if one.default is one.empty and n not in options), None)
    if missing is not None:
        fix = f"write options = {{ {missing} = ... }}"
        raise ConfigError(f"{where} without {missing}", f"a value for {missing}", fix)
    types = {name: Any if one.annotation is one.empty else one.annotation for name, one in named.items()}
    return {name: read(types[name], value, f"{where}.{name}") for name, value in options.items()}
