"""TOML files as tables: read whole, and refused in one sentence where they have no end, or are no TOML."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from sordino.codec.part import DEEPEST
from sordino.errors import ConfigError

LARGEST = 4 << 20  # bytes of a configuration
_KEY = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DEEP = re.compile(rf"(?<![A-Za-z0-9_-]){_KEY}(?:\.[ \t]*+{_KEY}){{{DEEPEST}}}")  # a.b.c: a level for each


def table(path: Path, fix: str = "") -> dict[str, Any]:
    """What a file says; `fix` is where to see how such a file looks."""
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
    """The whole of a file that has an end, and keys that a parser can follow in time."""
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
