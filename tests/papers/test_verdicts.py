"""Promises of verdicts: yes and no need an interval on one side; noise is undecided."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from sordino_papers import ratios
from sordino_papers.choosing import within_all
from sordino_papers.paper_claims import CLAIMS, PaperClaim, Regime, of_paper
from sordino_papers.verdicts import in_all, paired, verdict


def test_the_interval_is_students() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 7), rng.normal(0, 1, 7)
    known = ttest_rel(a, b).confidence_interval(0.95)
    found = paired(list(a), list(b))
    assert (found.low, found.high) == pytest.approx((known.low, known.high))


def test_a_clear_gain_is_yes_a_clear_loss_no_and_noise_undecided() -> None:
    base = [80.0, 82.0, 79.0, 81.0, 83.0]
    wiggle = [0.1, -0.1, 0.2, 0.0, -0.2]
    up, down = ([x + g + w for x, w in zip(base, wiggle, strict=True)] for g in (1, -1))
    near = [x + w for x, w in zip(base, wiggle, strict=True)]
    assert [verdict("", side, base, "nothing")["verdict"] for side in (up, down, near)] == ["yes", "no", "undecided"]


def test_pairs_decide_what_spread_over_seeds_would_hide() -> None:
    base = [60.0, 70.0, 80.0, 90.0, 50.0]
    above = [x + 1 + 0.1 * i for i, x in enumerate(base)]
    assert verdict("", above, base, "nothing")["verdict"] == "yes"
    assert verdict("", sorted(above), base, "nothing")["verdict"] == "undecided"  # pairs torn apart


def test_one_seed_decides_nothing() -> None:
    assert paired([90.0], [10.0]).above() == "undecided"
    assert math.isinf(paired([90.0], [10.0]).high)


def test_seeds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired([1.0, 2.0], [1.0])


SURE, WIDE, LOST = [1.0, 1.1, 0.9, 1.0, 1.2], [9.0, -1.0, 7.0, -2.0, 8.0], [-1.0, -1.1, -0.9, -1.0, -1.2]


def shown(**differences: list[float]) -> tuple[str, str]:
    row = in_all("", {name: (one, [0.0] * len(one)) for name, one in differences.items()}, "nothing")
    return row["verdict"], row["measured"]


def test_of_several_comparisons_the_one_that_decides_is_shown() -> None:
    assert shown(sure=SURE, other=[one + 1 for one in SURE])[0] == "yes"
    answer, told = shown(sure=SURE, wide=WIDE)  # the wide one has the larger mean, and leaves it open
    assert answer == "undecided"
    assert "(wide, of 2)" in told
    answer, told = shown(sure=SURE, lost=LOST, wide=[one - 5 for one in WIDE])
    assert answer == "no"
    assert "(lost, of 3)" in told


def test_all_are_the_same_only_where_every_interval_is_inside_the_margin() -> None:
    def answer(margin: float, **differences: list[float]) -> tuple[str, str]:
        row = within_all("", differences, margin, "nothing", "points")
        return row["verdict"], row["measured"]

    assert answer(1.5, sure=SURE, lost=LOST)[0] == "yes"
    undecided, told = answer(1.5, sure=SURE, wide=[one - 4 for one in WIDE])
    assert undecided == "undecided"
    assert "(wide, of 2)" in told
    refuted, told = answer(0.5, near=[0.1, 0.0, 0.1, 0.2, 0.0], lost=LOST)
    assert refuted == "no"
    assert "(lost, of 2)" in told


# ---- the papers' claims ----------------------------------------------------------------------------------------------


def rows(*answers: str) -> list[dict[str, Any]]:
    return [
        {"text": f"000: a, {i}", "measured": f"+{i} [+0, +9] points", "verdict": one, "seeds": 5}
        for i, one in enumerate(answers)
    ]


@pytest.mark.parametrize(
    ("answers", "answer"),
    [
        (("yes", "yes"), "yes"),
        (("no", "no"), "no"),
        (("yes", "no"), "in part"),
        (("yes", "undecided"), "in part"),
        (("no", "undecided"), "no"),
        (("undecided",), "undecided"),
        ((), "not run"),
    ],
)
def test_a_claim_is_counted_once_whatever_the_number_of_its_comparisons(answers: tuple[str, ...], answer: str) -> None:
    assert PaperClaim("000", "a", ("a,",)).judged(rows(*answers))["verdict"] == answer


@pytest.mark.parametrize(
    ("ours", "same"), [((33.0, 44.0), True), ((17.0, 80.0), True), ((8.0, 11.0), False), ((33.0, 90.0), False)]
)
def test_outside_a_factor_of_two_of_the_papers_ratio_a_claim_is_not_tested(
    ours: tuple[float, float], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratios, "ours", {"000-a": ours}.__getitem__)
    regime = Regime((33.0, 44.0), "000-a")
    claim = PaperClaim("000", "a", ("a,",), regime)
    assert regime.same == same
    assert claim.judged(rows("no"))["verdict"] == ("no" if same else "not tested here")
    assert claim.judged(rows("yes"))["verdict"] == ("yes" if same else "not tested here")


def test_a_comparison_said_the_other_way_round_confirms_the_paper() -> None:
    assert PaperClaim("000", "a", ("a,",), turned=True).judged(rows("no", "no"))["verdict"] == "yes"


def test_the_table_of_headlines_is_read_in_a_minute() -> None:
    titled = [one for one in CLAIMS if one.title]
    assert 12 <= len(titled) <= 18
    assert {one.paper for one in titled} == {"000", "001", "002", "003", "004"}
    assert all(one.published != "-" for one in titled)


def test_what_is_no_claim_of_a_paper_is_our_own() -> None:
    theirs, own = of_paper(
        "004", [{**rows("yes")[0], "text": "004: Table 2, smoothing (sigma 1)"}, {**rows("no")[0], "text": "004: else"}]
    )
    assert [row["verdict"] for row in theirs if row["measured"] != "-"] == ["not tested here"]
    assert [row["text"] for row in own] == ["004: else"]


def test_a_claim_names_the_few_comparisons_that_went_another_way() -> None:
    cause = PaperClaim("000", "a", ("a,",), cause="words").judged(rows("yes", "yes", "undecided"))["cause"]
    assert cause == "words; undecided: 2, +2 [+0, +9] points"
    many = [
        {**row, "text": f"000: a, {name}"}
        for row, name in zip(rows("yes", "no", "no"), ("p", "q: 1", "q: 2"), strict=True)
    ]
    cause = PaperClaim("000", "a", ("a, ",)).judged(many)["cause"]
    assert cause == "no: q (+1 to +2 points)"
    assert PaperClaim("000", "a", ("a,",), cause="words").judged(rows("no", "no"))["cause"] == "words"
    assert PaperClaim("000", "a", ("a,",), cause="words").judged(rows("yes"))["cause"] == ""
    other = {**rows("no")[0], "text": "000: b, tuned"}
    assert "b, tuned: +0" in PaperClaim("000", "a", ("a,",), beside="b,").judged([*rows("yes"), other])["cause"]


def test_a_claim_that_has_not_run_says_the_command() -> None:
    claim = PaperClaim("000", "a", ("a,",), Regime((1.0, 2.0), "000-table2"), cause="words")
    assert claim.judged([])["cause"] == "not run yet: `sordino papers run 000-table2`"


# ---- ratios, computed from plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("000-regime", (1.8 * 144_554**0.5 / 20, 2.4 * 144_554**0.5 / 20)),
        ("003-mnist", (0.95 * 101_770**0.5 / 50,) * 2),
        ("003-cifar10-regime", (0.95 * 464_170**0.5 / 10,) * 2),
        ("003-mnist-regime", (0.95 * 101_770**0.5 / 5,) * 2),
        ("003-protocol", (0.95 * 101_770**0.5 / 5,) * 2),
        ("004-regime", (10 * 10_650**0.5 / 164,) * 2),
        ("004-protocol", (0.1162 * 7850**0.5, 0.3471 * 7850**0.5)),
        ("002-loans-5000, Figure 7", (20 * 2 * 2**0.5 / 3 * (11 / 5000) ** 0.5,) * 2),  # Laplace(2 T / epsilon)
    ],
)
def test_ratios_are_z_sqrt_d_over_s(name: str, by_hand: tuple[float, float]) -> None:
    assert ratios.ours(name) == pytest.approx(by_hand, rel=2e-3)  # calibrated noise is rounded up


def test_every_regime_names_a_ratio_that_is_computed() -> None:
    assert {one.regime.run for one in CLAIMS if one.regime is not None} <= set(ratios.OURS)
