"""Engines by name: `sordino run --engine NAME` and `so.train(engine="NAME")` look them up here.

    so.engines.add("pool", Pool)                       # in a script, or in a file that --with names
    [project.entry-points."sordino.engines"]
    pool = "my_package:Pool"                           # in an installed package

What is registered is called to make the engine: a class or a function. It is given those of `device`, `threads` and
`timeout` that it has parameters for; an option that it has none for is refused when the user sets it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import torch

from sordino import codec
from sordino.engines.base import Engine
from sordino.engines.distributed import Distributed
from sordino.engines.inprocess import InProcess, known_device
from sordino.engines.rank_environment import local_rank
from sordino.errors import ConfigError

GROUP = "sordino.engines"
DEFAULTS: dict[str, Any] = {"device": "cpu", "threads": 1, "timeout": 3600.0}
Make = Callable[..., Engine]


def _distributed(device: str, threads: int, timeout: float) -> Engine:
    own = f"cuda:{local_rank()}" if device == "cuda" else device  # each process its own
    return Distributed(InProcess(device=own), threads, timeout)


SHIPPED: dict[str, Make] = {"inprocess": lambda device, threads: InProcess(device=device), "distributed": _distributed}
_ADDED: dict[str, Make] = {}


def add(name: str, make: Make) -> None:
    """Register an engine under a name; a name that is taken by another one is refused."""
    if name in (*SHIPPED, "flower") or _ADDED.get(name, make).__qualname__ != make.__qualname__:
        raise ConfigError(f"a second engine {name!r}", "a name of its own")
    _ADDED[name] = make


def engine_named(name: str, **options: Any) -> Engine:
    """The engine of this name with `device`, `threads` and `timeout`; else one sentence with the names there are."""
    points = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    known = [*SHIPPED, *_ADDED, *(other for other in points if other not in _ADDED)]
    if name not in known:
        how = f'sordino.engines.add("{name}", ...) in a file that --with names, or an entry point of {GROUP}'
        fix = f"{codec.nearest(name, [*known, 'flower'])} A new one: {how}"
        raise ConfigError(f"--engine {name}", f"one of {', '.join([*known, 'flower'])}", fix)
    if "threads" in options:  # one unless asked for: two that share a core are far slower
        torch.set_num_threads(max(1, options["threads"]))
    options = {**DEFAULTS, **options}
    if options["threads"] < 1:
        raise ConfigError(f"--threads {options['threads']}", "at least 1")
    if not options["timeout"] > 0:
        raise ConfigError(f"--timeout {options['timeout']:g}", "seconds above 0")
    known_device(options["device"])
    make = SHIPPED.get(name) or _ADDED.get(name) or points[name].load()
    takes = inspect.signature(make).parameters
    refused = next((key for key, value in options.items() if value != DEFAULTS[key] and key not in takes), None)
    if refused is not None and name not in SHIPPED:
        raise ConfigError(f"--{refused} with --engine {name}", "an option that this engine has", f"drop --{refused}")
    made = make(**{key: value for key, value in options.items() if key in takes})
    if not isinstance(made, Engine):
        found = f"--engine {name}, which makes a {type(made).__name__}"
        raise ConfigError(found, "a subclass of sordino.engines.Engine")
    return made
