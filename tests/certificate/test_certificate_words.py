"""Promise: a certificate states only what holds of its run: who is protected, by which random draws, against whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.engines.test_receipts import CENTRAL, LOCAL, SHARES, config

from sordino.certificate.assumptions import not_covered
from sordino.certificate.build import certificate
from sordino.certificate.explain import ceilings, explain
from sordino.certificate.facts import Facts
from sordino.parts.samplers import Everyone, FixedSize, Poisson, Sampler
from sordino.plan import Plan

DRAWS = "the random draws of the cohorts stay secret from the adversary who sees models"
NONE = {"kind": "no_noise"}


def planned(release: Any, clients: Sampler) -> Plan:
    return replace(config(release, rounds=3).plan, clients=clients)


def made(plan: Plan, **facts: Any) -> dict[str, Any]:
    return certificate(plan, Facts(1e-3, "simulation", facts.pop("charged", 3), **facts))


def said(plan: Plan) -> dict[str, Any]:
    facts = Facts(1e-3, "simulation", 3)
    return explain(certificate(plan, facts), ceilings(plan, facts))


@pytest.mark.parametrize(
    ("plan", "facts", "secret"),
    [
        (planned(CENTRAL, Poisson(40, 0.1)), {}, True),
        (planned(CENTRAL, FixedSize(40, 8)), {}, True),
        (planned(CENTRAL, Everyone(40)), {}, False),
        (planned(SHARES, FixedSize(40, 8)), {}, False),  # a secure sum's server sees who takes part
        (planned(LOCAL, Poisson(40, 0.1)), {"max_participations": 2}, False),
        (planned(CENTRAL, FixedSize(40, 8)), {"filtered": True}, False),  # where the run ends tells who was drawn
    ],
)
def test_secret_draws_are_assumed_only_by_a_line_that_they_amplify(
    plan: Plan, facts: dict[str, Any], secret: bool
) -> None:
    found = made(plan, **facts)
    assert (DRAWS in found["assumptions"]) == secret
    models, cohort, _ = found["adversaries"]
    assert (models["events"] != cohort["events"]) == secret


def test_without_noise_nobody_is_said_to_be_protected() -> None:
    plan = planned(NONE, Poisson(40, 0.1))
    found = said(plan)
    assert found["protected"] == "Nothing is protected: no adversary is promised anything."
    assert found["counted"] == "3 rounds were planned, 3 were charged, this certificate covers 3."
    assert made(plan)["statement"]["data_curator"].startswith("nobody adds noise")
    assert said(planned(CENTRAL, Poisson(40, 0.1)))["protected"].startswith("What is protected is everything")


@pytest.mark.parametrize("release", [CENTRAL, LOCAL, SHARES, NONE])
@pytest.mark.parametrize("clients", [Poisson(40, 0.1), FixedSize(40, 8), Everyone(40)])
def test_neighbours_are_named_for_every_line_that_promises_something(release: Any, clients: Sampler) -> None:
    words = {"add_remove": "unbounded:", "replace_one": "one unit replaced", "zero_out": "with an empty message"}
    found = made(planned(release, clients))
    promised = {line["relation"] for line in found["adversaries"] if line["epsilon"] is not None}
    told = {name for name, text in words.items() if text in found["statement"]["neighbours"]}
    assert told == (promised or {found["relation"]})


def test_releases_that_are_billed_and_were_not_made_are_told_apart() -> None:
    plan = replace(planned(CENTRAL, Poisson(40, 0.1)), rounds=30)
    assert made(plan, charged=12, early="x")["statement"]["releases"] == (
        "this certificate covers 30: one after every round; 12 of them happened"
    )
    assert made(plan, charged=30)["statement"]["releases"] == "this certificate covers 30: one after every round"


def test_what_a_tuned_run_does_not_cover_is_a_whole_sentence() -> None:
    from sordino.accounting.composition import Selection
    from sordino.accounting.renyi import Trials

    best = Selection(id="a", trials=Trials(2.0), over=("lr",), by="accuracy")
    assert not_covered(None, best)[0].endswith("only the trials of the sweep that selected this run are accounted")
