"""Promise: a report leads with the metric asked for, and says if the model predicts one class: as of its last round."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from tests.commands import sordino, spelt_out

from sordino.data.metrics import SHARES
from sordino.outcome import DIAGNOSTIC
from sordino.report import cards, charts, figures, page
from sordino.report.comparison import Subject, compare
from sordino.report.data import report_data
from sordino.report.figures import Axis, Chart, Series, plot_chart
from sordino.report.trackers import Tracker, TrackerBackend
from sordino.runs.folder import subject

LINES: list[dict[str, Any]] = [  # predicts one class after round 10, and no longer after round 60
    {"round": 10, "loss": 0.3, "accuracy": 0.947, "balanced_accuracy": 0.5, "only_class": 0, "auc": 0.58, "early": 1.5},
    {"round": 11, DIAGNOSTIC: {"seconds": 0.1}},
    {"round": 60, "loss": 0.2, "accuracy": 0.947, "balanced_accuracy": 0.61, "auc": 0.656},
]


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A real run on labels of which 19 in 20 are 0, whose model predicts 0 for every row; AUC was asked for."""
    place, rng = tmp_path_factory.mktemp("skewed"), np.random.default_rng(0)
    y = (np.arange(300) % 20 == 0).astype(np.int64)
    x = (rng.standard_normal((300, 6)) + 0.2 * y[:, None]).astype(np.float32)
    changes = [("[run]", '[run]\nmetrics = ["auc"]'), ("noise_multiplier = 2.0", "noise_multiplier = 0.5")]
    file = spelt_out(place, *changes)
    np.savez(place / "data.npz", x=x[:240], y=y[:240], test_x=x[240:], test_y=y[240:], classes=np.int64(2))
    assert sordino("run", file, "--out", place / "skewed").code == 0
    return subject(place / "skewed", "skewed")


def of(one: Subject, *lines: dict[str, Any]) -> Subject:
    return replace(one, history=list(lines))


def test_the_headline_is_the_metric_that_was_asked_for(skewed: Subject) -> None:
    (run,) = report_data([skewed])["runs"]
    last = skewed.history[-1]
    assert (run["answer"]["metric"], run["answer"]["value"]) == ("auc", last["auc"])
    assert run["answer"]["value"] < last["accuracy"] == 0.95


@pytest.mark.parametrize(
    ("asked", "figures", "wanted"),
    [
        ([], {"loss": 1.0, "accuracy": 0.9, "balanced_accuracy": 0.8}, "accuracy"),
        (
            [{"kind": "balanced_accuracy"}],
            {"loss": 1.0, "accuracy": 0.9, "balanced_accuracy": 0.8},
            "balanced_accuracy",
        ),
        ([{"kind": "f1"}, {"kind": "auc"}], {"accuracy": 0.9, "auc": 0.6, "f1": 0.2}, "f1"),
        ([{"kind": "own", "name": "gain"}], {"accuracy": 0.9, "gain": 3.0}, "gain"),
        ([{"kind": "group_accuracy"}], {"accuracy": 0.9, "accuracy/a": 0.9, "worst_group": 0.7}, "worst_group"),
        ([], {"loss": 1.0, "accuracy": 0.9, "of_a_script": 3.0}, "of_a_script"),
        ([], {"loss": 1.0, "rmse": 2.0}, "rmse"),
    ],
)
def test_what_was_asked_for_comes_first(asked: Any, figures: Any, wanted: str, skewed: Subject) -> None:
    one = replace(of(skewed, {"round": 4, **figures}), settings={"run": {"metrics": asked}})
    assert report_data([one])["runs"][0]["answer"]["metric"] == wanted


def test_a_model_that_predicts_one_class_is_said_in_red_at_the_top(skewed: Subject) -> None:
    found = report_data([skewed])
    assert found["runs"][0]["answer"]["only_class"] == 0
    text = page.render_page(found)
    said = re.search(r'<p class="banner bad" role="alert"><strong>skewed predicts class 0 for every test row', text)
    assert said is not None
    assert said.start() < text.index("epsilon, at most")
    red, green, blue = (int(figures.LIGHT["bad"][i : i + 2], 16) for i in (1, 3, 5))
    assert red > 3 * max(green, blue)


def test_a_class_of_an_earlier_round_is_not_shown_for_a_later_one(skewed: Subject) -> None:
    """Round 10 predicted one class; the page of the model after round 60 said so of it."""
    one = of(skewed, *LINES)
    found = report_data([one])
    answer = found["runs"][0]["answer"]
    assert (answer["only_class"], answer["evaluated_after"], answer["value"]) == (None, 60, 0.656)
    assert "predicts class" not in page.render_page(found)
    assert compare([one])["runs"][0]["metrics"] == {k: v for k, v in LINES[2].items() if k != "round"}
    assert "after round 60; " in page.render_page(found)


def test_the_class_is_a_flag_and_never_a_curve(skewed: Subject) -> None:
    drawn = charts.metrics(report_data([of(skewed, *LINES)]))
    titles = [one.title for one in drawn]
    assert "Accuracy by round" in titles
    assert not any("nly class" in title for title in titles)
    early = next(one for one in drawn if one.title == "Early by round")
    assert "was last evaluated after round 10, at 1.5" in early.says
    assert "ends at 0.656" in next(one for one in drawn if one.title == "Auc by round").says


@given(st.sampled_from([*SHARES, "accuracy/north", "r2"]), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_the_axis_of_a_metric_ends_where_the_metric_does(name: str, values: list[float]) -> None:
    """Of one accuracy in all rounds the axis went to 1.4."""
    low, high = charts.metric_axis(name).limits(values)
    assert (0.0 if name != "r2" else -0.5) <= low < high <= 1.0
    axes = Figure().add_subplot()
    plot_chart(axes, Chart("a", "a", "", Axis("round"), charts.metric_axis(name), (Series("a", (0.0,), (values[0],)),)))
    assert axes.get_ylim()[1] <= 1.0


def test_the_axis_of_privacy_and_utility_ends_at_one(skewed: Subject) -> None:
    runs = [replace(of(skewed, {"round": 4, "auc": value}), name=str(value), settings={}) for value in (0.99, 1.0)]
    chart = charts.utility(report_data(runs))
    assert chart is not None
    assert chart.y.limits([0.99, 1.0])[1] <= 1.0


def test_a_model_card_says_it_in_words_and_lists_no_class_among_its_figures(skewed: Subject) -> None:
    said = cards._evaluation(skewed.certificate["utility"])
    assert "**The model predicts class 0 for every row.**" in said
    assert "| only_class" not in said
    assert "| auc |" in said


def test_a_tracker_gets_a_flag_in_every_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker shows the last value of a figure: a class that was sent once would stand there for good."""
    sent = list[dict[str, float]]()

    class Kept:
        def __init__(self, folder: Path) -> None: ...
        def log_settings(self, told: dict[str, str]) -> None: ...
        def close(self) -> None: ...
        def log_figures(self, round_: int, told: dict[str, float]) -> None:
            sent.append(told)

    monkeypatch.setitem(TrackerBackend.members, "kept", Kept)
    with Tracker("kept", tmp_path) as tracker:
        for line in LINES:
            tracker(line)
    assert [one.get("public/predicts_one_class") for one in sent] == [1.0, None, 0.0]
    assert not any("only_class" in name for one in sent for name in one)
