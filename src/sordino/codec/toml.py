"""TOML files as tables, and single values set from outside (`--set recipe.lr=0.5`). Called by `config` and `cli`."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sordino.codec.part import DEEPEST
from sordino.errors import ConfigError, brief_repr

LARGEST = 4 << 20  # bytes of a configuration
_KEY = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DEEP = re.compile(rf"(?<![A-Za-z0-9_-]){_KEY}(?:\.[ \t]*+{_KEY}){{{DEEPEST}}}")  # a.b.c: a level for each


def table(path: Path, fix: str = "") -> dict[str, Any]:
    """The table of a TOML file; `fix` tells where to find an example."""
    try:
        return tomllib.loads(_text(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}, which cannot be read ({reason})", "a TOML file") from None
    except RecursionError:
        raise ConfigError(f"{path}, whose lists or tables are nested too deep", f"at most {DEEPEST}") from None
    except ValueError as error:  # not TOML, or an integer of thousands of digits
        raise ConfigError(f"{path} that is not TOML ({error})", "a TOML file", fix) from None


def _text(path: Path) -> str:
    """The text of a regular file within the limits of size and of key depth."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path}, which is a device or a pipe", "a TOML file", "write it to a file first")
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ConfigError(f"{path} of more than {LARGEST:,} bytes", "a configuration, at most that long")
    text = data.decode("utf-8")
    if _DEEP.search(text):
        raise ConfigError(f"{path}, which holds a key of more than {DEEPEST} parts", "at most that many")
    return text


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")  # text without quotes, which a shell would take away


def read(text: str) -> tuple[str, Any]:
    """A key and its value: `recipe.lr=0.5`, `task.dataset=mnist`, `recipe.clients={kind="everyone", population=9}`."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key or not value:
        raise ConfigError(f"--set {brief_repr(text)}", "key=value, as in recipe.lr=0.5")
    return key, typed(value, key)


def typed(value: str, where: str) -> Any:
    """The value of a TOML literal; a bare word is text."""
    try:
        found = tomllib.loads(f"value = {value}")
        if list(found) == ["value"]:  # a line break would begin another key
            return found["value"]
    except (ValueError, RecursionError):
        if _WORD.fullmatch(value):
            return value
    raise ConfigError(f"{where} = {brief_repr(value)}", "a value as TOML writes it: 0.5, true, [1, 2], 'some words'")


def put(table: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The table with one value changed; tables on the way are made, places in lists (`encode.0`) must be there."""
    places = key.split(".")
    if "" in places or len(places) > DEEPEST:
        raise ConfigError(f"the key {brief_repr(key)}", "names with dots between them, as in recipe.lr")
    changed: dict[str, Any] = _put(table, places, value, "")
    return changed


def _put(held: Any, places: Sequence[str], value: Any, where: str) -> Any:
    if not places:
        return value
    first, rest = places[0], places[1:]
    here = f"{where}.{first}" if where else first
    if isinstance(held, list | tuple):
        length = len(held)
        if not (first.isdecimal() and int(first) < length):
            raise ConfigError(f"the key {here} in a list of {length}", f"a place from 0 to {length - 1}")
        place = int(first)
        return [_put(item, rest, value, here) if k == place else item for k, item in enumerate(held)]
    if not isinstance(held, Mapping):
        found = f"the key {here}, and {where} = {brief_repr(held)}"
        raise ConfigError(found, f"a table at {where}", f"set {where} itself")
    return {**held, first: _put(held.get(first, {}), rest, value, here)}
