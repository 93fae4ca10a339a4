"""A page that is followed from its first block to its last, in an empty folder, works as it stands.

Blocks with a title are files; blocks named console are commands, each behind `$ `; Python blocks run between them. What
a command prints is compared where the page shows it; `...` leaves lines out.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from tests.commands import sordino

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```console" in page.read_text("utf-8")]


def test_there_are_pages_to_follow() -> None:
    assert PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_works_from_its_first_block_to_its_last(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for match in BLOCK.finditer(page.read_text("utf-8")):
        language, title, text = match.groups()
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(text, "utf-8")
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, f"{page.name}:{match.start()}", "exec"), names)
        elif language == "console":
            follow(text)


def follow(block: str) -> None:
    """Every command of a block, and what the page says that it prints."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        words = shlex.split(command, comments=True)
        assert words[0] == "sordino", f"a command that is not ours: {command}"
        said = sordino(*words[1:])
        assert said.code == 0, f"{command}: {said.err}"
        missing = [line for line in shown.splitlines() if line.strip() not in ("", "...") and line not in said.out]
        assert not missing, f"{command} does not print {missing}, but:\n{said.out}"
