"""Promise: the package is small, its packages import in one direction, and its functions and files are short.

The one place where the order of the packages is stated: a package imports only from packages before it. Imports for
type checkers alone do not run, and do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import sordino

ORDER = (
    *("version", "lazy", "errors", "rng", "codec", "layout", "graph", "kernels"),  # values, random streams, code
    *("accounting", "parts", "plan", "recipes"),  # what a release costs, what an algorithm is made of, the algorithm
    *("ledger", "certificate"),  # what outlives a run, what is said of it
    *("data", "task", "models", "dpsgd", "features", "engines"),  # whose records, which model, who computes
    *("loop", "outcome", "config"),  # the loop, what it leaves, the file
    *("report", "runs", "federation", "tuning", "audit", "training", "lint", "cli"),  # what is built on it
)
ROOT = Path(sordino.__file__).parent
MOST_FILES, MOST_LINES, MOST_NAMES = 186, 47_600, 32
FILES = sorted(ROOT.rglob("*.py"))


def package_of(module: str) -> str:
    """The package, or the top-level file, that a module is in."""
    return [*module.split("."), "__init__"][1]


def own_package(file: Path) -> str:
    return package_of(".".join(("sordino", *file.relative_to(ROOT).with_suffix("").parts)))


def for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    return {inner for block in blocks for line in block.body for inner in ast.walk(line)}


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """Packages that a file imports from, and in which line."""
    tree = ast.parse(file.read_text("utf-8"))
    idle = for_type_checkers(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in idle and (node.module or "").split(".")[0] == "sordino":
            whole = [f"sordino.{name.name}" for name in node.names] if node.module == "sordino" else [str(node.module)]
            yield from ((package_of(module), node.lineno) for module in whole)


def test_every_package_is_in_the_order() -> None:
    packages = {own_package(file) for file in FILES}
    assert packages - {"__init__", "__main__"} == set(ORDER)


def test_no_package_imports_from_a_later_one() -> None:
    backwards = [
        f"{file.relative_to(ROOT)}:{line} imports from {other}"
        for file in FILES
        if file.parent != ROOT or file.stem not in ("__init__", "__main__")
        for other, line in imported(file)
        if ORDER.index(other)
        > ORDER.index(package_of(".".join(("sordino", *file.relative_to(ROOT).with_suffix("").parts))))
    ]
    assert backwards == []


def test_few_files_are_on_the_top_level() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 12


def test_no_file_stem_stands_twice_in_the_package() -> None:
    stems = [file.stem for file in FILES if file.stem not in ("__init__", "__main__")]
    assert sorted({stem for stem in stems if stems.count(stem) > 1}) == []


def test_the_source_is_small() -> None:
    assert len(FILES) <= MOST_FILES
    assert sum(len(file.read_text("utf-8").splitlines()) for file in FILES) <= MOST_LINES


def test_few_names_are_public_on_top() -> None:
    assert len(sordino.__all__) <= MOST_NAMES


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of the body, without the docstring."""
    said = ast.get_docstring(node, clean=False)
    return (node.end_lineno or 0) - node.body[0].lineno + 1 - (said.count("\n") + 1 if said else 0)


def test_functions_are_short() -> None:
    lengths = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": lines_of(node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert median(lengths.values()) <= 8
    assert {name: length for name, length in lengths.items() if length > 45} == {}
