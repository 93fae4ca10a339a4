"""Lazy exports of a package: names are imported when first used. Called by the `__init__` of sordino and its packages.

A package lists its public names once, as imports for the type checker:

    if TYPE_CHECKING:
        from sordino.parts.mechanisms import Gaussian as Gaussian

    __all__, __getattr__ = lazy.exports(__name__, __file__)

so `import sordino` and the privacy calculator do not wait for torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def exports(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a package, from the TYPE_CHECKING imports of its `__init__` file."""
    tree = ast.parse(Path(file).read_text("utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    homes = {one.asname or one.name: (str(line.module), one.name) for line in imports for one in line.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, inside = homes[name]
        value = getattr(import_module(home), inside, None) if home != package else import_module(f"{home}.{inside}")
        setattr(sys.modules[package], name, value)
        return value

    return sorted(homes), load
