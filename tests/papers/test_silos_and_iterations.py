"""Promises of the experiments of papers 001 and 002: who takes part, what is compared with what, who chooses."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sordino.parts.samplers import RoundRobin
from sordino_papers import (
    choosing,
    kept,
    paper_001,
    paper_001_charges,
    paper_001_lower,
    paper_002_claims,
    paper_002_theory,
)
from sordino_papers import paper_001_silos as silos
from sordino_papers import paper_002 as loans
from sordino_papers import paper_002_femnist as femnist

KEPT = Path(__file__).parents[2] / "benchmarks" / "papers" / "results"
needs_data = pytest.mark.skipif("SORDINO_DATA" not in os.environ, reason="needs the data sets ($SORDINO_DATA)")
NOBODY = np.random.default_rng(0)


# ---- who takes part --------------------------------------------------------------------------------------------------


def test_figure_7_takes_all_clients_in_every_round() -> None:
    plan = loans.loans_plan(3.0, 30, 10, loans.CLIENTS)
    assert all(sorted(plan.clients.draw(t, NOBODY)) == list(range(loans.CLIENTS)) for t in range(plan.rounds))
    sevens = [job for job in loans.jobs(10) if job[0] == "7"]
    assert {cohort for *_, cohort, _ in sevens} == {loans.CLIENTS, loans.TURN}


def turns_see(sampler: Any, target: np.ndarray[Any, Any], rounds: int) -> float:
    """The largest distance of a round's mean target from the mean of all, in standard deviations of the target."""
    means = [target[sampler.draw(t, NOBODY)].mean() for t in range(rounds)]
    return float(np.abs(np.array(means) - target.mean()).max() / target.std())


def test_a_turn_sees_all_kinds_of_loans_though_silos_are_sorted() -> None:
    target = np.arange(loans.CLIENTS, dtype=np.float64)  # silos by sorted target
    assert turns_see(loans.loans_plan(3.0, 20, 1, loans.TURN).clients, target, 20) < 0.35
    assert turns_see(RoundRobin(loans.CLIENTS, loans.TURN), target, 20) > 1.5  # neighbours in the sorted order


def test_a_client_pays_for_the_rounds_it_is_in_and_no_more() -> None:
    for cohort, taken in ((loans.TURN, 2), (loans.CLIENTS, 20)):
        plan = loans.loans_plan(3.0, 40, 2, cohort)  # 20 rounds
        noise = plan.release.noise_std(np.arange(1), 0) / math.sqrt(2)
        assert noise == pytest.approx(2 * taken / 3.0, rel=0.01)  # pure epsilon adds up; replacing moves by 2


def test_gaussian_noise_of_a_whole_run_does_not_depend_on_the_local_steps() -> None:
    """Rounds times E^2 times T_l is T^2/3 for every E: what makes larger E no cheaper under Gaussian noise."""
    variances = []
    for steps in (1, 4, 8):  # T = 120: the writers' turns come out even
        plan = femnist.femnist_plan(200.0, femnist.TOTAL, steps)
        variances.append(plan.rounds * (steps * plan.release.noise_std(np.arange(1), 0)) ** 2)
    assert variances == pytest.approx([variances[0]] * 3, rel=0.01)


# ---- what is compared with what --------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", ["", ", momentum"])
def test_local_sgd_has_the_same_server_momentum_as_minibatch_sgd(beta: str) -> None:
    some = [
        paper_001_charges.plans(f"{name}{beta}", (50, 50, 50), 3, 1.0, math.inf)[0].server
        for name in ("minibatch", "local")
    ]
    assert some[0].momentum == some[1].momentum == (0.8 if beta else 0.0)  # type: ignore[attr-defined]


def test_fewer_silos_a_round_are_drawn_but_every_silo_pays_for_all_rounds() -> None:
    few, all_ = (paper_001_charges.plans("minibatch", (60,) * 10, cohort, 1.0, 1.0)[0] for cohort in (5, 10))
    assert (few.clients.expected, all_.clients.expected) == (5, 10)
    assert few.release.noise_multipliers == all_.release.noise_multipliers


def test_no_algorithm_of_figure_3_has_momentum() -> None:
    for name in (*paper_001.CENTRAL, *paper_001.LOCAL):
        server = paper_001.plans(name, 25, math.inf)[0].server
        assert getattr(server, "momentum", 0.0) == 0.0


@needs_data
def test_silos_of_one_pair_of_digits_differ_and_silos_alike_do_not() -> None:
    pairs, alike = silos.differences(0)
    assert alike["v*^2"] < 0.1 * pairs["v*^2"]
    assert 0.05 < pairs["v*^2, pixels"] < 1.0  # the paper says 0.17 to 0.2 for its preprocessing


# ---- who chooses -----------------------------------------------------------------------------------------------------


def test_the_validation_set_chooses_and_the_test_set_reports() -> None:
    rows = [
        {"E": e, "loss": test, "validation": held} for e, test, held in ((1, 0.1, 0.9), (2, 0.5, 0.2), (2, 0.7, 0.2))
    ]
    found = choosing.least(choosing.judged(rows, ("E",), "loss"))
    assert (found["E"], found["loss"], found["values"]) == (2, 0.6, [0.5, 0.7])
    assert choosing.turned(found) == [-0.5, -0.7]
    with pytest.raises(KeyError):
        choosing.only([])


@pytest.mark.parametrize(
    ("differences", "answer"),
    [([0.01, 0.0, -0.01, 0.0], "yes"), ([0.5, 0.51, 0.49, 0.5], "no"), ([0.5, -0.5, 0.4, -0.4], "undecided")],
)
def test_the_same_means_an_interval_inside_the_margin(differences: list[float], answer: str) -> None:
    assert choosing.within("a is b", differences, 0.1, "nothing", "points")["verdict"] == answer


WIGGLE = (0.1, -0.1, 0.2, 0.0, -0.2)
Heights = dict[float, dict[int, float]]


def trend_of(heights: Heights, noise: float) -> dict[str, Any]:
    """The verdict on "T grows" where T has this height at an epsilon, give or take the noise."""
    found = {
        epsilon: [
            {"T": t, "values": [height + noise * t * one for one in WIGGLE], "validation": height, "repeats": 5}
            for t, height in line.items()
        ]
        for epsilon, line in heights.items()
    }
    best = {epsilon: choosing.most(rows) for epsilon, rows in found.items()}
    claim = paper_002_claims.Trend("T", True, lambda row: list(row["values"]), "nothing", "points")
    return claim.judged("it grows", found, best)


GROWS: Heights = {1.0: {1: 5.0, 2: 4.0}, 3.0: {1: 4.5, 2: 4.6}, math.inf: {1: 0.0, 2: 9.0}}
FALLS: Heights = {1.0: {1: 4.0, 2: 5.0}, 3.0: {1: 4.6, 2: 4.5}, math.inf: {1: 0.0, 2: 9.0}}
STAYS: Heights = {1.0: {1: 5.0, 2: 4.0}, 3.0: {1: 5.0, 2: 4.0}, math.inf: {1: 0.0, 2: 9.0}}


@pytest.mark.parametrize(
    ("heights", "noise", "answer"),
    [
        (GROWS, 0.1, "yes"),
        (GROWS, 10.0, "undecided"),  # the same best numbers, drowned
        (FALLS, 0.1, "no"),
        (FALLS, 10.0, "undecided"),
        (STAYS, 0.1, "undecided"),  # one number is best at both ends, whatever is best without noise
    ],
)
def test_a_trend_is_decided_by_paired_seeds_at_both_ends_of_epsilon(
    heights: Heights, noise: float, answer: str
) -> None:
    found = trend_of(heights, noise)
    assert (found["verdict"], found["seeds"]) == (answer, 5)
    assert f"T* = {[max(line, key=lambda t: line[t]) for line in heights.values()]}" in found["measured"]


def test_the_interval_of_a_ratio_of_means_is_the_jackknifes() -> None:
    losses = np.random.default_rng(0).lognormal(size=(3, 6))  # totals by seeds
    rows = [{"values": list(line)} for line in losses]

    def statistic(kept: Any) -> float:
        means = kept.mean(1)
        return -float(np.log(means.max() / means.min()))

    known = [6 * statistic(losses) - 5 * statistic(np.delete(losses, seed, 1)) for seed in range(6)]
    assert paper_002_claims._without(rows) == pytest.approx(known)


@needs_data
def test_an_image_of_a_silo_is_in_one_place_only() -> None:
    task, held = silos.odd_even(0)
    assert task.test is not None
    assert {task.clients.size(silo) for silo in range(silos.SILOS)} == {silos.PER_SILO}
    places = [{row.numpy().tobytes() for row in part} for part in (task.clients.records.x, task.test.x, held.x)]
    assert [len(place) for place in places] == [25 * 1238, 25 * 310 - 0, 25 * 310]
    assert len(set.union(*places)) == sum(map(len, places))
    labels = [task.clients.records.y[torch.from_numpy(task.clients.rows(silo))] for silo in range(silos.SILOS)]
    assert all(int(y.sum()) == silos.PER_SILO // 2 for y in labels)


@needs_data
def test_loans_charges_and_images_to_choose_on_are_not_trained_on_nor_reported() -> None:
    cases = [loans.loans(), paper_001_charges.charges(3, 0), femnist.femnist("mlp")]
    for task, held in cases:
        assert task.test is not None
        train, test, choice = (_keys(part) for part in (task.clients.records, task.test, held))
        clashes = len(choice & (train | test))
        assert clashes <= 0.01 * len(choice)  # a few people and scribbles have the same figures


def _keys(records: Any) -> set[bytes]:
    return {x.numpy().tobytes() + y.numpy().tobytes() for x, y in zip(records.x, records.y, strict=True)}


# ---- theorems --------------------------------------------------------------------------------------------------------


def test_no_gradient_near_the_optimum_is_longer_than_zeta() -> None:
    problem, rng = paper_002_theory.PROBLEM, np.random.default_rng(0)
    away = rng.standard_normal((200, problem.dimension))
    points = problem.best + np.linalg.norm(problem.best) * away / np.linalg.norm(away, axis=1, keepdims=True)
    slopes = problem.curvature * (points[:, None] - problem.centres[None])
    assert np.abs(slopes).sum(-1).max() <= paper_002_theory.zeta("laplace")
    assert np.linalg.norm(slopes, axis=-1).max() <= paper_002_theory.zeta("gaussian")


def test_a_run_with_the_steps_of_theorem_3_is_below_its_bound() -> None:
    quick = paper_002_theory.STUDIES[0].quick
    assert quick is not None
    known = paper_002_theory.upload("laplace").bound(paper_002_theory.objective("laplace"), steps=1, rounds=4)
    assert quick()["distance"] < known


@pytest.mark.parametrize(("count", "epsilon"), paper_001_lower.SETTINGS)
def test_the_lower_bound_is_taken_where_its_side_conditions_hold(count: int, epsilon: float) -> None:
    one = paper_001_lower.each_round(count, epsilon)
    assert one.epsilon <= 1 / paper_001_lower.RECORDS
    assert one.composition < 1.2  # of order 1: compositional
    assert 0 < paper_001_lower.bound(count, epsilon).total < 0.1


# ---- kept results ----------------------------------------------------------------------------------------------------


def test_the_kept_figure_7_is_judged_seed_by_seed() -> None:
    file = KEPT / "002-loans.json"
    if not file.is_file():
        pytest.skip("002-loans has not been run")
    rows = kept.read(file)["rows"]
    judged = [row for row in paper_002_claims.loans_claims(rows) if "Figure 7, b = N:" in row["text"]]
    assert [row["seeds"] for row in judged] == [10, 10, 10, 10]
