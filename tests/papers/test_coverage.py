"""Promises of the coverage: every item of the papers has a row, every row names what exists, every id has a row."""

from __future__ import annotations

import re
from pkgutil import resolve_name

import pytest

from sordino_papers import coverage, page
from sordino_papers.tables import STUDIES, TABLES

ITEMS = [item for items in coverage.COVERAGE.values() for item in items]
IDS = {table.id: table for table in TABLES} | {study.id: study for study in STUDIES}
NUMBERED = {  # what the five papers number, from their texts; lemmas are left to their theorems
    "000": "Algorithm 1; Table 1 2 3 4 5 6 H.7 H.8 H.9 H.10 H.11 H.12; Figure 1 2 3 4 5 6 7 E.8 F.9 G.10 G.11; "
    "Theorem 1 2 3 4 5 6; Corollary 1 2; Proposition 1",
    "001": "Algorithm 1 2 3; Figure 1 2 3 4 5 6 7 8; Theorem 2.1 2.2 2.3 2.4 3.1 4.1 E.1 F.1 F.2 F.3 F.4 F.5 A.2; "
    "Corollary F.1",
    "002": "Algorithm 1; Figure 1 2 3 4 5 6 7; Theorem 1 2 3 4 5; Corollary 1.1 2.1 5.1",
    "003": "Algorithm 1; Table 1 2 3 4; Figure 1 2 3 4 5; Theorem 1 2 3 4 5",
    "004": "Algorithm 1; Table 1 2 3 4; Figure 1 2 3 4 5 6 7; Theorem 2 4 7; Proposition 5 8",
}


KIND = r"(Algorithm|Table|Figure|Theorem|Corollary|Proposition)s? (.*)"


def numbered(name: str) -> set[str]:
    """What a row's name counts: "Theorems 3 to 6 (x), Table 1 (y)" is Theorem 3, ..., Theorem 6 and Table 1."""
    found, kind = set(), ""
    for word in re.sub(r"\s*\([^)]*\)", "", name).split(", "):
        new = re.fullmatch(KIND, word)
        kind, number = (new[1], new[2]) if new else (kind, word)
        first, _, last = number.partition(" to ")
        spread = map(str, range(int(first), int(last) + 1)) if last else [first]
        found |= {f"{kind} {one}" for one in spread if kind and re.fullmatch(r"(?:[A-Z]\.)?\d+(?:\.\d+)?", one)}
    return found


def test_names_are_read_as_they_are_meant() -> None:
    assert numbered("Theorems 3 to 5 (a), Table H.7") == {"Theorem 3", "Theorem 4", "Theorem 5", "Table H.7"}
    assert numbered("Figure 2, G.10, G.11 (spectra)") == {"Figure 2", "Figure G.10", "Figure G.11"}


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_item_of_a_paper_has_a_row(paper: str) -> None:
    (items,) = [items for title, items in coverage.COVERAGE.items() if paper in title]
    listed = set().union(*(numbered(item.name) for item in items))
    wanted = {f"{kind} {n}" for part in NUMBERED[paper].split("; ") for kind, *ns in [part.split()] for n in ns}
    assert wanted - listed == set()
    assert listed - wanted == set()


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_every_row_names_what_exists(item: coverage.Item) -> None:
    for name in item.where:
        ours = name.startswith(("sordino.", "sordino_papers."))
        assert name in IDS or (ours and resolve_name(name) is not None), name
    assert item.where or item.note or item.status == "not done"
    if item.status in ("run", "scaled", "full scale"):
        assert item.where
    if item.status in ("scaled", "refused"):
        assert item.note


def test_every_table_and_study_is_named_by_a_row() -> None:
    assert set(IDS) - {name for item in ITEMS for name in item.where} == set()


def test_what_needs_full_scale_is_marked_so() -> None:
    for item in ITEMS:
        large = [name for name in item.where if getattr(IDS.get(name), "full", False)]
        assert bool(large) == (item.status == "full scale"), item


def test_nothing_of_a_paper_is_left_undone() -> None:
    papers = {title: items for title, items in coverage.COVERAGE.items() if title.startswith("Paper")}
    assert [item.name for items in papers.values() for item in items if item.status == "not done"] == []


def test_a_table_of_full_size_says_its_command_and_its_time() -> None:
    text = page.pages({})["papers.md"]
    for table in [table for table in TABLES if table.full]:
        assert f"`sordino papers run {table.id} --full --device cuda` (about {table.hours}, an estimate)" in text


def test_a_table_that_lacks_cells_says_how_many_are_there() -> None:
    table = next(table for table in TABLES if table.id == "004-table2")
    names = [cell.id for cell in table.cells]
    assert page.beside_coverage({name: {} for name in names[:3]})["004-table2"].startswith("3 of 20 cells")
    assert "004-table2" not in page.beside_coverage({name: {} for name in names})


def test_the_page_shows_every_row() -> None:
    text = coverage.text()
    assert all(f"| {item.name} | {item.status} |" in text for item in ITEMS)
    assert text.count("### ") == len(coverage.COVERAGE)
