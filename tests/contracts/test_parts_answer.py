"""Promise: a part answers for itself; outside parts/ hardly a line asks which of the shipped parts it has before it.

Every such line is a place where a part from elsewhere is treated otherwise than ours. Lines are counted by their syntax
tree: `isinstance` of a class that is registered under a kind of its family and shipped with Sordino, in any file but
parts/ and the file that defines the class.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import sordino
import sordino.parts
from sordino.codec import Part

ROOT = Path(sordino.__file__).parent
MOST = 10
PLACES = ("sordino.parts.", "sordino.accounting.")  # where parts of a plan, and their events, are defined


def shipped(base: type[Part] = Part) -> dict[str, str]:
    """Module by name of every registered part of ours."""
    for module in pkgutil.iter_modules(sordino.parts.__path__):
        importlib.import_module(f"sordino.parts.{module.name}")
    found = {}
    for cls in base.__subclasses__():
        if cls.kind and cls.members.get(cls.kind) is cls and cls.__module__.startswith(PLACES):
            found[cls.__name__] = cls.__module__
        found |= shipped(cls)
    return found


def asked_in(file: Path, parts: dict[str, str]) -> set[int]:
    """Lines of a file that ask for the type of a shipped part."""
    tree = ast.parse(file.read_text("utf-8"))
    module = ".".join(("sordino", *file.relative_to(ROOT).with_suffix("").parts))
    imported = {
        (name.asname or name.name): name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sordino")
        for name in node.names
    }
    ours = {alias for alias, name in imported.items() if name in parts and parts[name] != module}
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if {inner.id for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Name)} & ours
    }


def test_parts_answer_for_themselves() -> None:
    parts = shipped()
    assert {"Poisson", "CentralNoise", "LocalSgd", "GaussianNoise", "Clip"} <= parts.keys()
    files = [file for file in sorted(ROOT.rglob("*.py")) if file.relative_to(ROOT).parts[0] != "parts"]
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in sorted(asked_in(file, parts))]
    assert len(found) <= MOST, found
    assert not [line for line in found if line.startswith("audit/")]
