"""The pages are true of the code: their blocks run, their links resolve, and they leave out no rule and no kind."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import sordino
from sordino import codec
from sordino.cli import app
from sordino.codec import Part
from sordino.config import parse
from sordino.data import datasets
from sordino.privacy.policy import Policy
from sordino.recipes import RECIPES
from sordino.tuning.spec import SweepSpec

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PRIVACY, CONFIGURATION = ((ROOT / "docs" / name).read_text("utf-8") for name in ("privacy.md", "configuration.md"))


def blocks(language: str) -> list[tuple[str, str]]:
    """Every fenced block of a language: where it stands, and its text."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in re.finditer(rf"^```{language}(?: title=\"fed.toml\")?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            found.append((f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}", match[1]))
    return found


def named(found: list[tuple[str, str]]) -> list[object]:
    return [pytest.param(where, text, id=where) for where, text in found]


def rules(tree: ast.AST) -> set[str]:
    """The first argument of every PlanError(...)."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "PlanError")
    return {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}  # type: ignore[misc]


def every_rule() -> set[str]:
    sources = (ROOT / "src").rglob("*.py")
    return set().union(*(rules(ast.parse(source.read_text("utf-8"))) for source in sources))


def families() -> dict[str, type[Part]]:
    """Every family of parts in the package, once all of its modules are there."""
    for module in pkgutil.walk_packages(sordino.__path__, "sordino."):
        importlib.import_module(module.name)
    return {family.__name__: family for family in Part.__subclasses__() if family.__module__.startswith("sordino.")}


def row(text: str, name: str) -> str:
    """All table rows that begin with a name."""
    return "\n".join(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))


def anchors(text: str) -> set[str]:
    """What a heading of a page is called in a link to it."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_there_are_pages_and_blocks_to_check() -> None:
    assert {"README.md", "concepts.md", "configuration.md", "privacy.md"} <= {page.name for page in PAGES}
    assert len(blocks("python")) >= 5
    assert len(every_rule()) >= 20
    assert len(families()) >= 10


def alone() -> list[tuple[str, str]]:
    """Python blocks of pages that no other test follows from their first block to their last (tests/test_pages.py)."""
    followed = {page.name for page in PAGES if "```console" in page.read_text("utf-8")}
    return [(where, text) for where, text in blocks("python") if where.partition(":")[0] not in followed]


@pytest.mark.parametrize(("where", "text"), named(alone()))
def test_a_python_block_runs(where: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for extra in ("transformers", "peft"):
        if f"from {extra} import" in text:
            pytest.importorskip(extra)
    known = [(family.members, {**family.members}) for family in Part.__subclasses__()]
    try:
        exec(compile(text, where, "exec"), {"__name__": "__main__"})
    finally:  # a part that a page defines is no other test's
        for held, before in known:
            for kind in held.keys() - before.keys():
                del held[kind]


def shown() -> list[tuple[str, str]]:
    """Every command of the calculator that a page shows, and what it is said to print."""
    answers = [text for _, block in blocks("") for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    pairs = [(command, output.strip()) for command, _, output in (answer.partition("\n") for answer in answers)]
    return [(command, output) for command, output in pairs if command.startswith("sordino epsilon ")]


@pytest.mark.parametrize(("command", "output"), named(shown()))
def test_the_calculator_prints_what_the_page_shows(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app(command.split()[1:], standalone_mode=False)
    printed = capsys.readouterr().out.splitlines()
    said = [line for line in output.splitlines() if line != "..."]
    assert printed[: len(said)] == said


@pytest.mark.parametrize(("where", "text"), named(blocks("toml")))
def test_a_configuration_block_is_read(where: str, text: str) -> None:
    table = tomllib.loads(text)
    for place, code in blocks("python"):  # files of the same page: what --with names
        if place.split(":")[0] == where.split(":")[0] and re.match(r"# \w+\.py\n", code):
            exec(compile(code, place, "exec"), {"__name__": "__main__"})
    if "releases" in table:
        assert codec.read(Policy, table).limit.epsilon > 0, where
    elif "sweep" in table:
        assert codec.read(SweepSpec, table["sweep"], "sweep").settings(), (
            where
        )  # its page is run whole: test_tuning_page
    else:
        assert parse(table).plan.rounds >= 1, where


@pytest.mark.parametrize("rule", sorted(every_rule()))
def test_every_rule_that_an_error_can_name_has_a_heading(rule: str) -> None:
    assert f"\n### {rule}\n" in PRIVACY


def test_no_heading_explains_a_rule_that_no_error_names() -> None:
    section = PRIVACY.partition("## Rules by name")[2].partition("\n## ")[0]
    assert set(re.findall(r"^### (.+)$", section, re.MULTILINE)) == every_rule()


@pytest.mark.parametrize("family", sorted(families()))
def test_every_kind_and_its_keys_are_in_the_reference(family: str) -> None:
    for kind, part in families()[family].members.items():
        if not part.__module__.startswith("sordino."):
            continue  # a stranger's, registered by another test
        found = row(CONFIGURATION, kind)
        assert found, f"no row for {family} {kind}"
        missing = [key.name for key in fields(part) if f"`{key.name}`" not in found]  # type: ignore[arg-type]
        assert not missing, f"{family} {kind} without {missing}"


def test_every_recipe_and_its_arguments_are_in_the_reference() -> None:
    for name, recipe in RECIPES.items():
        section = CONFIGURATION.partition(f"\n#### `{name}`\n")[2].partition("\n#")[0]
        missing = [key for key in inspect.signature(recipe).parameters if f"| `{key}` |" not in section]
        assert section, f"no section for recipe {name}"
        assert not missing, f"recipe {name} without {missing}"


def test_every_data_set_is_in_the_reference_with_what_it_is() -> None:
    for name, description in datasets.descriptions().items():
        assert description in row(CONFIGURATION, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(os.path.relpath(page, ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), f"{page.name} links to {target}"
