"""Third-party parts: entry points, files given by `--with`, functions registered by name. Called by `cli`, `config`.

    [project.entry-points."sordino.parts"]
    my_pkg = "my_pkg.parts"            # a module: importing it registers what it defines

The file of a run imports nothing: only installed packages, and files that the command line names, are imported. A part
of kind "own" holds the name and options of a function registered by `add_model`, `add_loss` or `add_metric`; it is
looked up when used, and the certificate names the package that it comes from.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from sordino.codec.part import FILES, Foreign, package_of
from sordino.codec.serialization import nearest, read
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
            what = group.rpartition(".")[2].replace("_", " ")
            found = f"package {whose}, whose {what} cannot be loaded ({type(error).__name__}: {error})"
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


Function = TypeVar("Function", bound=Callable[..., Any])
_ADDED: dict[tuple[str, str], Callable[..., Any]] = {}


def add(family: str, name: str, function: Callable[..., Any]) -> None:
    """Register a function under a name; registering the same function again is no error."""
    known = _ADDED.get((family, name))
    if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
        raise ConfigError(f"a second {family} {name!r}", "a name of its own", f"{known.__module__} has this one")
    _ADDED[family, name] = function


def registers(family: str, name: str) -> Callable[[Function], Function]:
    """Decorator that registers a function under a name of its family."""

    def register(function: Function) -> Function:
        add(family, name, function)
        return function

    return register


def find(family: str, name: str) -> Callable[..., Any]:
    """The registered function of that name."""
    if (family, name) not in _ADDED:
        known = [other for of, other in _ADDED if of == family]
        how = f'@sordino.add_{family}("{name}") in a file that --with names, or in an installed package'
        found = f"{family} {name!r} of kind own"
        raise ConfigError(found, "one that was added", nearest(name, known) if known else how)
    return _ADDED[family, name]


def origin(family: str, name: str) -> Foreign:
    """Package and version of a registered function, for the certificate."""
    return Foreign(*package_of(find(family, name).__module__), family, name)


def arguments(function: Callable[..., Any], options: Mapping[str, Any], given: int, where: str) -> dict[str, Any]:
    """Options of a file as keyword arguments, read as their declared types; the first `given` are Sordino's."""
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
    types = {name: Any if one.annotation is one.empty else one.annotation for name, one in named.items()}
    return {name: read(types[name], value, f"{where}.{name}") for name, value in options.items()}
