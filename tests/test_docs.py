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
from tests.pages import ELSEWHERE, PAGES, ROOT, Block, blocks, every, followed

import sordino
from sordino import codec
from sordino.codec import Part
from sordino.codec.part import PLUGINS
from sordino.config import parse
from sordino.data import datasets
from sordino.ledger.policy import Policy
from sordino.recipes import RECIPES
from sordino.tuning.search_space import SweepSpec

PRIVACY, CONFIGURATION = ((ROOT / "docs" / name).read_text("utf-8") for name in ("privacy.md", "configuration.md"))


def named(found: list[Block]) -> list[object]:
    return [pytest.param(block, id=block.where) for block in found]


def rules(tree: ast.AST) -> set[str]:
    """Rule of every PlanError(rule, ...), require(condition, rule, ...) and require_values(condition, rule, ...)."""
    place = {"PlanError": 0, "require": 1, "require_values": 1}
    calls = [(ast.unparse(node.func), node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [args[place[name]] for name, args in calls if name in place]
    return {str(rule.value) for rule in found if isinstance(rule, ast.Constant)}


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
    assert len(every("python")) >= 5
    assert len(every_rule()) >= 20
    assert len(families()) >= 10


def alone() -> list[Block]:
    """Python blocks of pages that no other test follows from their first block to their last (tests/test_pages.py)."""
    return [b for b in every("python") if not followed(b.page) and (b.name, b.title) not in ELSEWHERE]


@pytest.mark.parametrize("block", named(alone()))
def test_a_python_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = [(family.members, {**family.members}) for family in Part.__subclasses__()]
    try:
        exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
    finally:  # a part that a page defines is no other test's
        for held, before in known:
            for kind in held.keys() - before.keys():
                del held[kind]


def unread() -> list[Block]:
    """Configurations but those that the commands of their page read."""
    return [block for block in every("toml") if not (block.title and followed(block.page))]


@pytest.mark.parametrize("block", named(unread()))
def test_a_configuration_block_is_read(block: Block) -> None:
    table = tomllib.loads(block.text)
    for code in (other for other in blocks(block.page) if other.title.endswith(".py")):  # what --with names
        if "add_model" in code.text:
            exec(compile(code.text, code.where, "exec"), {"__name__": "__main__"})
    if "project" in table:
        known = {PLUGINS, "sordino.engines", "sordino.trackers", "sordino.report_sections"}
        assert set(table["project"]["entry-points"]) <= known
    elif "releases" in table:
        assert codec.read(Policy, table).limit.epsilon > 0
    elif "sweep" in table:
        assert SweepSpec.read(table["sweep"]).settings()  # its page is run whole: tests/test_pages.py
    else:
        assert parse(table).plan.rounds >= 1


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
