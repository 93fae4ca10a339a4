"""Promise: runs that differ in their seed are one setting, with intervals and paired differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from tests.commands import sordino

from sordino.report import charts
from sordino.report.comparison import Subject, compare, comparison_table
from sordino.report.data import report_data
from sordino.report.page import render_page


def seeded(one: Subject, name: str, seed: int, accuracy: float) -> Subject:
    settings = {**one.settings, "run": {**one.settings["run"], "seed": seed}}
    history = [{"round": t, "accuracy": accuracy - 0.1 * (2 - t), "loss": 1.0} for t in (1, 2)]
    return replace(one, name=f"{name}-{seed}", settings=settings, history=history)


@pytest.fixture(scope="module")
def swept(runs: dict[str, Subject]) -> list[Subject]:
    """Three settings of three seeds; the seeds of one setting are all 0.1 below those of the best."""
    values = {"central": (0.8, 0.7, 0.9), "smooth": (0.7, 0.6, 0.8), "shares": (0.5, 0.6, 0.4)}
    return [seeded(runs[name], name, seed, value) for name, all_ in values.items() for seed, value in enumerate(all_)]


def test_seeds_become_one_row_and_differences_are_paired(swept: list[Subject]) -> None:
    rows = {row["name"]: row for row in compare(swept)["comparison"]["rows"]}
    assert set(rows) == {"central", "smooth", "shares"}
    assert rows["central"]["best"]
    assert rows["central"]["metrics"]["accuracy"]["mean"] == pytest.approx(mean((0.8, 0.7, 0.9)))
    assert rows["central"]["metrics"]["accuracy"]["half_width"] == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    gap = rows["smooth"]["minus_best"]
    assert gap["mean"] == pytest.approx(-0.1)
    assert gap["half_width"] == pytest.approx(0.0, abs=1e-12)  # paired: every seed is lower by the same
    assert rows["shares"]["minus_best"]["half_width"] > 0.3


def test_an_epsilon_of_another_relation_says_so_where_it_stands(swept: list[Subject]) -> None:
    said = comparison_table(compare(swept))
    column = said.head.index("epsilon (models)")
    assert [row[column].partition(" ")[2] for row in said.rows] == ["(add_remove)", "(add_remove)", "(zero_out)"]
    alike = comparison_table(compare(swept[:6]))
    assert all("(" not in row[alike.head.index("epsilon (models)")] for row in alike.rows)


def test_a_setting_without_a_guarantee_is_not_the_best(runs: dict[str, Subject]) -> None:
    both = [seeded(runs["none"], "none", 0, 0.99), seeded(runs["central"], "central", 0, 0.5)]
    assert [row["best"] for row in compare(both)["comparison"]["rows"]] == [False, True]


def test_curves_have_bands_over_seeds_and_the_page_begins_with_the_comparison(swept: list[Subject]) -> None:
    found = report_data(swept)
    chart = charts.metrics(found)[0]
    assert [one.kind for one in chart.series] == ["band", "line"] * 3
    assert chart.series[1].ys == pytest.approx((0.7, 0.8))
    text = render_page(found)
    assert (
        text.index('<h2 id="answer-h">The comparison')
        < text.index("Privacy and utility")
        < text.index('<h2 id="runs-h">')
    )
    assert text.count("Epsilon by round: ") > 0
    assert "Epsilon by round: central-1" not in text  # one figure for a setting, not for a seed


def test_utility_has_a_dot_with_an_interval_for_every_setting(swept: list[Subject]) -> None:
    chart = charts.utility(report_data(swept))
    assert chart is not None
    assert [one.name for one in chart.series] == ["central (add remove)", "smooth (add remove)", "shares (zero out)"]
    assert all(one.tops[0] > one.ys[0] for one in chart.series)
    assert "Relations differ" in chart.says


def test_one_command_draws_accuracy_against_epsilon(folders: dict[str, Path], tmp_path: Path) -> None:
    both = (folders["central"], folders["shares"])
    assert sordino("compare", *both, "--plot", tmp_path / "a.png").code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "at least two settings" in sordino("compare", folders["central"], "--plot", tmp_path / "b.png").sentence
    assert "cannot be written" in sordino("compare", *both, "--plot", tmp_path / "c.xyz").sentence
