"""Functions of the user's own by name: `add_model`, `add_loss`, `add_metric`. A file names them, and imports nothing.

A part of kind "own" holds the name and the options; its function is looked up when it is used. Whose function it was
stands on the certificate, as that of a foreign part does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sordino.codec.form import read
from sordino.codec.part import Foreign, package_of
from sordino.codec.words import nearest
from sordino.errors import ConfigError

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
