"""Parts, recipes, data sets and models of other people: packages that say so, and files named on the command line.

    [project.entry-points."sordino.parts"]
    my_pkg = "my_pkg.parts"            # a module: importing it registers what it defines

A file that describes a run never says what is imported: only what is installed, or named by whoever gives the command.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from sordino.codec.part import FILES
from sordino.errors import ConfigError

GROUP = "sordino.parts"


def offered() -> bool:
    """Whether any installed package offers parts; nothing is imported."""
    return bool(importlib.metadata.entry_points(group=GROUP))


@cache
def load() -> None:
    """Import what every installed package offers under `sordino.parts`, once."""
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            whose = point.dist.name if point.dist is not None else point.value
            found = f"package {whose}, whose parts cannot be loaded ({type(error).__name__}: {error})"
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
