"""Parts, recipes, data sets and models of other people: packages that say so, and files named on the command line.

    [project.entry-points."sordino.parts"]
    my_pkg = "my_pkg.parts"            # a module: importing it registers what it defines

A file that describes a run never says what is imported: only what is installed, or named by whoever gives the command.

Functions of the user's own by name: `add_model`, `add_loss`, `add_metric`. A file names them, and imports nothing.

A part of kind "own" holds the name and the options; its function is looked up when it is used. Whose function it was
stands on the certificate, as that of a foreign part does."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sordino.codec.part import FILES, Foreign, package_of
from sordino.codec.serialization import read
from sordino.codec.spelling import nearest
from sordino.errors import ConfigError

GROUP = "sordino.parts"


def offered() -> bool:
    """Whether any installed package offers parts; nothing is imported."""
    return bool(importlib.metadata.entry_points(group=GROUP))


@cache
def load(group: str = GROUP) -> None:
    """Import what every installed package offers under a group of entry points, once."""
    for point in importlib.metadata.entry_points(group=group):
        try:
            point.load()
        except Exception as error:
            whose = point.dist.name if point.dist is not None else point.value
            found = f"package {whose}, whose {group.rpartition('.')[2].replace('_', ' ')} cannot be loaded ({type(error).__name__}: {error})"
            raise ConfigError(found, f"{point.value} that can be imported", f"mend or uninstall {whose}") from None


def load_file(path: Path) -> None:
    """Run a file of parts (`--with my_parts.py`); a certificate names it with the sha256 of what was run."""
    try:
        source = path.read_bytes()
        code = compile(source, str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--with {path}, which cannot be read ({reason})", "a Python file of parts") from None
    name, said = f"sordino_with_{path.stem}", (path.name, f"sha256:{hashlib.sha256(source).hexdigest()}")
    if FILES.get(name) == said:
        return
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name], FILES[name] = module, said
    try:
        exec(code, module.__dict__)
    except Exception as error:
        del sys.modules[name], FILES[name]
        found = f"--with {path}, which fails ({type(error).__name__}: {error})"
        raise ConfigError(found, "a Python file that defines parts", "run it with python to see where") from None


_ADDED: dict[tuple[str, str], Callable[..., Any]] = {}


def add(family: str, name: str, function: Callable[..., Any]) -> None:
    """Register a function under a name of its family; the same function may come again, another may not."""
    known = _ADDED.get((family, name))
    if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
        raise ConfigError(f"a second {family} {name!r}", "a name of its own", f"{known.__module__} has this one")
    _ADDED[family, name] = function


def find(family: str, name: str) -> Callable[..., Any]:
    """The function of that name, or a sentence that says how one is added."""
    if (family, name) not in _ADDED:
        known = [other for of, other in _ADDED if of == family]
        how = f'@sordino.add_{family}("{name}") in a file that --with names, or in an installed package'
        raise ConfigError(
            f"{family} {name!r} of kind own", "one that was added", nearest(name, known) if known else how
        )
    return _ADDED[family, name]


def origin(family: str, name: str) -> Foreign:
    """Whose function it is."""
    return Foreign(*package_of(find(family, name).__module__), family, name)


def arguments(function: Callable[..., Any], options: Mapping[str, Any], given: int, where: str) -> dict[str, Any]:
    """Options of a file as keyword arguments, those with a declared type read as it; the first `given` are ours."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[given:]
    if any(one.kind is one.VAR_KEYWORD for one in own):
        return dict(options)
    named = {one.name: one for one in own if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    unknown = next((name for name in options if name not in named), None)
    if unknown is not None:
        takes = ", ".join(named) or "no option"
        raise ConfigError(f"unknown option {unknown!r} of {where}", takes, nearest(unknown, list(named)))
    missing = next((n for n, one in named.items() if one.default is one.empty and n not in options), None)
    if missing is not None:
        raise ConfigError(f"{where} without {missing}", "a value for it", f"options = {{ {missing} = ... }}")
    return {name: _typed(named[name].annotation, value, f"{where}.{name}") for name, value in options.items()}


def _typed(declared: Any, value: Any, where: str) -> Any:
    return value if declared is inspect.Parameter.empty else read(declared, value, where)
