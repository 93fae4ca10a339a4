"""A page that is followed from its first block to its last, in an empty folder, works as it stands.

Blocks with a title are files; blocks named console are commands, each behind `$ `; Python blocks run between them. What
a command prints is compared where the page shows it; `...` leaves lines out.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from scipy.stats import norm
from tests.commands import sordino
from tests.pages import (
    ELSEWHERE,
    EXCEPTIONS,
    LANGUAGES,
    PAGES,
    ROOT,
    Block,
    blocks,
    every,
    followed,
    runs_here,
    words,
)
from typer.main import get_command

from sordino.accounting.pld import gaussian_epsilon
from sordino.cli import app
from sordino.codec import Part

# files that a page's commands make, and what is made smaller in them: a test has less time than a reader
SMALLER: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "README.md": {
        "fed.toml": (("rounds = 60", "rounds = 3"), ("epochs = 5", "epochs = 1")),
    },
    "docs/officer.md": {"fed.toml": (("epochs = 5", "epochs = 1"),)},
    "docs/distributed.md": {"fed.toml": (("rounds = 60", "rounds = 2"), ("epochs = 5", "epochs = 1"))},
    "docs/silos.md": {"fed.toml": (("rounds = 20", "rounds = 2"), ("steps = 5", "steps = 1"))},
}
FEWER = (" --workers 2", "")  # processes have tests of their own, and one page that is about them
ABOUT_WORKERS = "docs/distributed.md"


@pytest.fixture
def _as_before() -> Iterator[None]:
    """A part that a page defines is no other test's."""
    known = [(family.members, {**family.members}) for family in Part.__subclasses__()]
    yield
    for held, before in known:
        for kind in held.keys() - before.keys():
            del held[kind]


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("page", [page for page in PAGES if followed(page)], ids=lambda page: page.stem)
def test_a_page_works_from_its_first_block_to_its_last(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    provide(page, request)
    names: dict[str, object] = {"__name__": "__main__"}
    small = dict(SMALLER.get(str(page.relative_to(ROOT)), {}))
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.title).write_text(block.text, "utf-8")
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, block.where, "exec"), names)
        for command, shown in block.commands:
            if runs_here(block, command):
                follow(command if block.name == ABOUT_WORKERS else command.replace(*FEWER), shown)
                shrink(small)
    assert not small, "a file that the page no longer makes"


def provide(page: Path, request: pytest.FixtureRequest) -> None:
    """Skip, visibly, where a package or the data of a page are absent."""
    text = page.read_text("utf-8")
    for extra in ("transformers", "peft"):
        if f"from {extra} import" in text:
            pytest.importorskip(extra)
    if "examples/hospitals.toml" in text:
        request.getfixturevalue("real_data")


def follow(command: str, shown: str) -> None:
    """One command, and what the page says that it prints."""
    first, *rest = words(command)
    out = rest[-1] if ">" in rest else ""
    if first == "python":
        sys.argv = rest
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(rest[0], run_name="__main__")
        return
    assert first == "sordino", f"a command that is not ours: {command}"
    said = sordino(*(rest[: rest.index(">")] if out else rest))
    assert said.code == 0, f"{command}: {said.err}"
    if out:
        Path(out).write_text(said.out, "utf-8")
    missing = [line for line in shown.splitlines() if line.strip() not in ("", "...") and line not in said.out]
    assert not missing, f"{command} does not print {missing}, but:\n{said.out}"


def shrink(small: dict[str, tuple[tuple[str, str], ...]]) -> None:
    """Make files smaller as soon as they are there."""
    for name in [name for name in small if Path(name).exists()]:
        text = Path(name).read_text("utf-8")
        for found, instead in small.pop(name):
            assert found in text, (name, found)
            text = text.replace(found, instead)
        Path(name).write_text(text, "utf-8")


# ---- nothing is left out ----


def left_out(block: Block) -> list[str]:
    """Commands and code of a block that no test executes and that no exception names."""
    if block.language == "console":
        missed = [command for command, _ in block.commands if not taken(block, command)]
        return missed if block.commands else ["a console without a command"]
    if block.language == "sh":
        return [] if (block.name, block.title) in ELSEWHERE else block.text.splitlines()
    if block.language == "text":
        return [line for line in block.text.splitlines() if re.match(r"(\$ |sordino [a-z]|make |pip |python )", line)]
    return [] if block.language in LANGUAGES else [f"a block of {block.language or 'nothing'}"]


def taken(block: Block, command: str) -> bool:
    named = (block.name, command.split()[0]) in ELSEWHERE
    return runs_here(block, command) or named or command in EXCEPTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_executed_or_is_a_named_exception(page: Path) -> None:
    assert [(block.where, lines) for block in blocks(page) if (lines := left_out(block))] == []
    assert page.read_text("utf-8").count("```") == 2 * len(blocks(page)), "a fence that is not read as a block"


@pytest.mark.parametrize("made", ["```\nsordino plan fed.toml\n```", "```text\n$ make demo\n```", "```sh\nls\n```"])
def test_a_block_that_nobody_executes_is_found(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pages.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"{made}\n")
    assert left_out(blocks(tmp_path / "page.md")[0])


def test_every_exception_and_every_block_of_another_test_is_still_on_a_page() -> None:
    commands = {command for block in every("console") for command, _ in block.commands}
    assert set(EXCEPTIONS) <= commands
    starts = {(block.name, command.split()[0]) for block in every("console") for command, _ in block.commands}
    titles = {(block.name, block.title) for page in PAGES for block in blocks(page)}
    assert set(ELSEWHERE) <= starts | titles
    for test in set(ELSEWHERE.values()):
        assert re.search(r"tests\.pages import|PAGE\b", (ROOT / test).read_text("utf-8")), f"{test} reads no page"


# ---- what is named in passing exists ----

INLINE = re.compile(r"(?<!`)`((?:sordino|make|pip install|python) [^`\n]+)`")
NAMES = re.compile(r"[A-Z]{2,}$|\.\.\.|[a-z]+=")  # FILE, ..., key=value: words that stand for others


def mentioned() -> list[object]:
    """Every command that a page or a block names: in a sentence or in a console."""
    found = {(page, command) for page in PAGES for command in INLINE.findall(page.read_text("utf-8"))}
    found |= {(block.page, command) for block in every("console") for command, _ in block.commands}
    named = sorted((str(page.relative_to(ROOT)), command) for page, command in found)
    return [pytest.param(command, id=f"{page}: {command}") for page, command in named]


@pytest.mark.parametrize("command", mentioned())
def test_a_command_that_is_named_exists(command: str) -> None:
    first, *rest = command.replace("\\|", "|").split()
    if first == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE), f"no target {rest[0]}"
    elif first == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        asked = re.findall(r"\[(\w+)\]", command)
        assert all(extra in known for extra in asked), f"no extra {asked}"
        version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
        ours = (".", "sordino", f"sordino-{version}-py3-none-any.whl")
        assert asked or rest[1].split("/")[0] in ours, command
    elif first == "python":
        assert (ROOT / rest[0]).is_file(), f"no file {rest[0]}"
    elif first == "torchrun":
        assert "-m sordino" not in command or check(rest[rest.index("sordino") + 1 :])
    else:
        assert check(rest)


def check(rest: list[str]) -> bool:
    """A command of ours by its path in the tree of commands, and every option that is named."""
    at = get_command(app)
    while rest and rest[0] in getattr(at, "commands", {}):
        at, rest = at.commands[rest[0]], rest[1:]  # type: ignore[attr-defined]
    assert not getattr(at, "commands", {}) or not rest or NAMES.search(rest[0]) or rest[0].startswith("--"), rest
    known = {option for parameter in at.params for option in parameter.opts} | {"--help"}
    asked = {word.strip("[]") for word in rest if re.match(r"\[?--\w", word)}
    assert asked <= known, f"{sorted(asked - known)} of {at.name}"
    return True


def test_a_command_that_is_not_there_is_found() -> None:
    for wrong in (
        "make nothing",
        "sordino plan fed.toml --fast",
        "sordino ledgers show",
        "pip install 'sordino[none]'",
    ):
        with pytest.raises(AssertionError):
            test_a_command_that_is_named_exists(wrong)


# ---- single pages ----


def test_the_table_of_attackers_follows_from_the_gaussian_curve() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for mu, epsilon, found, auc in (map(float, row) for row in rows):
        assert gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon, abs=0.05)
        assert 100 * norm.cdf(norm.ppf(0.01) + mu) == pytest.approx(found, abs=0.05)
        assert norm.cdf(mu / 2**0.5) == pytest.approx(auc, abs=0.005)


def test_the_list_of_tasks_has_twenty_five_and_every_page_of_it_is_there() -> None:
    page = (ROOT / "docs" / "tasks.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 26))
    names = [name for row in rows for name in re.findall(r"\(([\w-]+\.md)", row[3])]
    assert len(names) >= 25
    assert all((ROOT / "docs" / name).is_file() for name in names)


def test_the_site_has_every_page() -> None:
    told = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if "template" not in page} - told == set()
