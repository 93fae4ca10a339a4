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
from scipy.stats import norm
from tests.commands import sordino

from sordino.pld.gridless import gaussian_epsilon

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
