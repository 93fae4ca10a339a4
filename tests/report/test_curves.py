"""Curves are the cost's: they end at the certificate, and between they are what fewer rounds cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from sordino.accounting.composition import Selection
from sordino.accounting.pld import gaussian_epsilon
from sordino.accounting.profiles import ceiling
from sordino.accounting.renyi import Trials
from sordino.audit.tradeoff import Limit
from sordino.certificate.build import certificate, headline
from sordino.certificate.facts import run_cost
from sordino.parts.mechanisms import Histogram
from sordino.report.comparison import Subject
from sordino.report.data import FALSE_ALARMS, cost_groups, delta_curve, over_rounds, trade_off

PHI = NormalDist()


@pytest.mark.parametrize("name", ["central", "smooth", "shares", "local", "secure", "loop"])
def test_the_last_point_is_the_certificate_of_every_adversary(runs: dict[str, Subject], name: str) -> None:
    made = {line["adversary"]: line["epsilon"] for line in runs[name].certificate["adversaries"]}
    for one in over_rounds(runs[name]):
        for who in one["adversaries"]:
            assert made[who] == (None if one["epsilon"] is None else one["epsilon"][-1])
    assert {who for one in over_rounds(runs[name]) for who in one["adversaries"]} == set(made)


@pytest.mark.parametrize("name", ["central", "shares", "local", "silos", "loop"])
def test_more_rounds_never_cost_less(runs: dict[str, Subject], name: str) -> None:
    for one in over_rounds(runs[name]):
        if one["epsilon"] is not None:
            assert one["round"][0] == one["epsilon"][0] == 0
            assert np.all(np.diff(one["epsilon"]) >= 0)
            assert one["round"] == sorted(set(one["round"]))


def test_a_point_is_what_a_plan_of_so_few_rounds_costs(runs: dict[str, Subject]) -> None:
    one = runs["central"]
    models = over_rounds(one)[0]
    for t, epsilon in list(zip(models["round"], models["epsilon"], strict=True))[1:]:
        fewer = replace(one.plan, rounds=t).cost().of("models")
        assert epsilon == headline(fewer, one.facts.delta)["epsilon"]


def test_where_cohorts_are_seen_the_rounds_of_the_busiest_client_count(
    runs: dict[str, Subject], folders: dict[str, Path]
) -> None:
    charges = [json.loads(line) for line in (folders["shares"] / "charges.jsonl").read_text().splitlines()]
    seen = next(one for one in over_rounds(runs["shares"]) if "cohort" in one["adversaries"])
    for t, epsilon in list(zip(seen["round"], seen["epsilon"], strict=True))[1:]:
        busiest = np.bincount([client for charge in charges[:t] for client in charge["cohort"]]).max()
        exact = gaussian_epsilon(float(np.sqrt(busiest)) / 9.0, runs["shares"].facts.delta)
        assert exact <= epsilon <= exact + 2e-6


def test_what_columns_cost_is_in_every_point(runs: dict[str, Subject]) -> None:
    one = runs["central"]
    plan = replace(one.plan, prepare=(Histogram("age", 0.5, 0.0, 100.0),))
    dear = Subject("dear", certificate(plan, one.facts), plan, one.facts)
    before, after = over_rounds(one)[0], over_rounds(dear)[0]
    assert after["round"] == before["round"][1:]
    assert after["epsilon"][-1] == dear.certificate["epsilon"]
    assert after["epsilon"][0] >= before["epsilon"][1] + 0.1


def test_the_best_of_many_tries_is_drawn_as_it_is_billed(runs: dict[str, Subject]) -> None:
    one = runs["shares"]
    chosen = Selection(id="a", trials=Trials(mean=3.0), over=("recipe.lr",), by="accuracy")
    facts = replace(one.facts, selection=chosen)
    best = Subject("best", certificate(one.plan, facts), one.plan, facts, cohorts=one.cohorts, rounds=one.rounds)
    for once, tuned in zip(over_rounds(one), over_rounds(best), strict=True):
        assert tuned["epsilon"][-1] > once["epsilon"][-1]
        made = {line["adversary"]: line["epsilon"] for line in best.certificate["adversaries"]}
        assert all(made[who] == tuned["epsilon"][-1] for who in tuned["adversaries"])


def test_no_line_is_drawn_where_nothing_is_guaranteed(runs: dict[str, Subject]) -> None:
    assert {one["epsilon"] for one in over_rounds(runs["none"])} == {None}
    assert delta_curve(runs["none"]) == []
    assert set(trade_off(runs["none"])[0]["true_positive_rate"]) == {1.0}


def test_silos_that_differ_have_a_curve_each(runs: dict[str, Subject]) -> None:
    found = over_rounds(runs["silos"])
    entries = {tuple(one["silos"]): one["epsilon"] for one in runs["silos"].certificate["adversaries"][-1]["silos"]}
    assert [one["label"] for one in found] == ["silo 0", "silo 1", "silo 2", "silo 3"]
    assert [one["epsilon"][-1] for one in found] == [entries[k,] for k in range(4)]
    assert all(one["adversaries"] == ["models", "cohort", "messages"] for one in found)


def test_a_gaussian_attack_is_phi_of_phi_inverse_plus_mu(runs: dict[str, Subject]) -> None:
    found = next(one for one in trade_off(runs["shares"]) if "messages" in one["adversaries"])
    mu = found["gdp"]["mu"]
    for a, b in zip(found["false_positive_rate"], found["true_positive_rate"], strict=True):
        if 0 < a < 1:
            assert b <= PHI.cdf(PHI.inv_cdf(a) + mu)
            assert b >= PHI.cdf(PHI.inv_cdf(a) + mu - 2e-4)  # the certificate's mu is rounded up


def test_attacks_agree_with_the_ceiling_and_with_the_auditor(runs: dict[str, Subject]) -> None:
    one = runs["central"]
    line, made = run_cost(one.plan, one.facts).line("models"), one.certificate
    found = np.asarray(trade_off(one)[0]["true_positive_rate"])
    at = int(np.argmin(np.abs(FALSE_ALARMS - 0.01)))
    assert found[at] == pytest.approx(ceiling(line).true_positives, rel=2e-3)
    inside = (FALSE_ALARMS > 0) & (FALSE_ALARMS < 1)
    assert np.all(found[inside] <= Limit.of(line, made["epsilon"], made["delta"]).most(FALSE_ALARMS[inside]) + 1e-3)
    assert np.all(found >= FALSE_ALARMS - 1e-12)
    assert np.all(np.diff(found) >= -1e-12)


@pytest.mark.parametrize("name", ["central", "shares", "silos"])
def test_the_certificate_is_a_point_of_its_delta_curve(runs: dict[str, Subject], name: str) -> None:
    deltas = runs[name].facts.deltas or (runs[name].facts.delta,) * len(cost_groups(runs[name]))
    for own, one in zip(deltas, delta_curve(runs[name]), strict=False):
        at = np.interp(one["certified"], one["epsilon"], one["delta"])
        assert at == pytest.approx(own, rel=0.05)
        assert np.all(np.diff(one["delta"]) <= 1e-15)
