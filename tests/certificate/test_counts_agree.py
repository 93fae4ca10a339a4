"""Promise: on a certificate rounds charged, rounds accounted and the counts of events agree, after any kills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.test_receipts import CENTRAL, FOUR, LOCAL, SHARES, Clumsy, config, federation, go, paid
from tests.engines.wires import Wires, lost

from sordino.certificate.build import certificate
from sordino.certificate.explain import _counted
from sordino.certificate.facts import Facts, check_counts, participation, run_cost
from sordino.engines.base import Receipt
from sordino.errors import CertificateError, QuorumError
from sordino.loop import RoundReceipts
from sordino.outcome import count_charges, facts_of_charges
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import FixedRecords, OnePass
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import LocalNoise
from sordino.parts.samplers import Everyone, Poisson, RoundRobin
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded


def events(made: dict[str, Any]) -> set[int]:
    """The largest count of events of rounds, of every adversary."""
    lines = [line.get("silos", [line]) for line in made["adversaries"]]
    return {max(one["events"][0]["count"] for one in silos) for silos in lines}


def resumed(release: Any, path: Path, rounds: int, stops: int) -> tuple[dict[str, Any], Wires]:
    """A run that stops so many times because one silo's message is lost, and is resumed every time."""
    one = config(release, rounds=rounds)
    wires = federation(one)
    wires.faults.append(lost(0, asks=tuple(range(3, 2 + 4 * stops))))
    for again in range(stops):
        with pytest.raises(QuorumError):
            go(one, path, wires, quorum=4, resume=again > 0)
    return go(one, path, wires, quorum=4, resume=stops > 0), wires


def test_a_resumed_round_that_silos_answer_with_the_same_bytes_is_charged_and_not_billed(tmp_path: Path) -> None:
    made, wires = resumed(LOCAL, tmp_path / "a", rounds=10, stops=1)
    assert made["counts"]["rounds_charged"] == 11
    assert (made["counts"]["rounds_replayed"], made["counts"]["rounds_accounted"]) == (1, 10)
    assert events(made) == {10}
    assert paid(wires) == [10] * 4
    assert _counted(made).startswith(
        "10 rounds were planned, 11 were charged before their noise was drawn, this certificate covers 10. "
        "1 round was charged again, but every silo sent its stored message again: no new release."
    )


def test_a_round_that_stopped_before_the_noise_of_the_server_is_charged_and_billed_once(tmp_path: Path) -> None:
    made, _ = resumed(CENTRAL, tmp_path / "a", rounds=3, stops=2)
    assert (made["counts"]["rounds_charged"], made["counts"]["rounds_accounted"]) == (3, 3)
    assert "rounds_replayed" not in made["counts"]
    assert events(made) == {3}


def test_a_silo_that_paid_more_often_than_it_was_asked_is_in_the_rounds_that_are_billed(tmp_path: Path) -> None:
    one = config()
    wires = federation(one)
    wires.silos[2].store = Clumsy()
    made = go(one, tmp_path / "a", wires)
    assert made["counts"]["charges_per_silo"] == [3, 3, 4, 3]
    assert (made["counts"]["rounds_accounted"], events(made)) == (4, {4})


# ---- any kills and resumes, any sampler ------------------------------------------------------------------------------

SILOS = (6, 4, 9)
RECORDS = Plan(
    rounds=4,
    clients=Everyone(3),
    local=BatchGradient(FixedRecords(2, SILOS), 1.0),
    release=LocalNoise(Gaussian(2.0)),
    server=Sgd(lr=0.5),
)
PLANS = [
    *(config(release, rounds=4).plan for release in (LOCAL, CENTRAL, SHARES)),
    *(replace(config(release, rounds=4).plan, clients=Poisson(4, 0.5)) for release in (LOCAL, CENTRAL)),
    *(replace(config(release, rounds=4).plan, clients=RoundRobin(4, 2)) for release in (LOCAL, CENTRAL)),
    RECORDS,
    replace(RECORDS, rounds=2, local=BatchGradient(OnePass(2, SILOS), 1.0)),
]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Plan, list[int], list[Any], list[RoundReceipts]]:
    """Charges of a run that is killed and resumed at will, and what silos that keep their messages say of them."""
    plan, rounds, t = draw(st.sampled_from(PLANS)), list[int](), 0
    while t < plan.rounds:
        rounds.append(t)
        step = draw(st.sampled_from([1, 1, 1, 0, -1]))  # goes on; is resumed from its checkpoint, or the one before
        t = max(0, t + step) if len(rounds) < 12 else t + 1
    seen = plan.clients.random and bool({"cohort", "messages"} & plan.release.sees)
    coins = [Seeded(draw(st.integers(0, 99))).at(i, "cohort") for i in range(len(rounds))]
    cohorts = [plan.clients.draw(t, rng) for t, rng in zip(rounds, coins, strict=True)] if seen else []
    deployed = draw(st.booleans()) and (seen or not plan.clients.random)
    return plan, rounds, cohorts, _receipts(plan, rounds, cohorts, draw) if deployed else []


def _receipts(plan: Plan, rounds: list[int], cohorts: list[Any], draw: st.DrawFn) -> list[RoundReceipts]:
    """Every silo of the cohort says what it paid; one may have been charged twice for one message."""
    said = list[RoundReceipts]()
    for after in range(1, len(rounds) + 1):
        if draw(st.booleans()):
            known = count_charges(plan, rounds[:after], cohorts[:after], said or [RoundReceipts(0)]).total
            asked = cohorts[after - 1] if cohorts else np.arange(plan.clients.population)
            more = draw(st.sampled_from([0, 0, 1]))
            said.append(
                RoundReceipts(after, (), tuple(Receipt(int(c), int(known[c]) + more) for c in asked if known[c]))
            )
    return said


@settings(max_examples=150, deadline=None)
@given(histories())
def test_charged_billed_and_events_agree_after_any_kills_and_resumes(
    history: tuple[Plan, list[int], list[Any], list[RoundReceipts]],
) -> None:
    plan, rounds, cohorts, settled = history
    facts = facts_of_charges(plan, rounds, cohorts, Facts(1e-3, "secure", 0), settled)
    found, cost = participation(plan, facts), run_cost(plan, facts)
    check_counts(plan, facts, found, cost)
    new = len(rounds) - facts.replayed
    assert max(plan.rounds, new, *facts.receipts) <= found.releases <= plan.rounds + facts.repeats
    counts = {who: max(line.entries[0][1] for line in cost.of(who)) for who in ("models", "cohort", "messages")}
    assert max(counts.values()) <= found.releases
    disjoint = plan.local.reads is not None and plan.local.reads.disjoint
    if plan.clients.kind == "everyone" and not disjoint:
        paid_by_one = max(facts.receipts) if facts.receipts else len(rounds)
        assert set(counts.values()) == {paid_by_one} == {found.releases}


def test_no_certificate_is_made_of_counts_that_disagree() -> None:
    plan = config(LOCAL, FOUR, rounds=10).plan
    good = Facts(1e-3, "secure", 11, max_participations=10, receipts=(10,) * 4, replayed=1)
    assert certificate(plan, good)["counts"]["rounds_accounted"] == 10
    facts = replace(good, replayed=12)
    with pytest.raises(CertificateError, match="do not agree"):
        certificate(plan, facts)
    found, cost = participation(plan, good), run_cost(plan, good)
    for wrong in (replace(found, releases=11), replace(found, releases=9)):
        with pytest.raises(CertificateError, match="rounds are accounted"):
            check_counts(plan, good, wrong, cost)
    with pytest.raises(CertificateError, match="counts 10 releases of one client, and not 11"):
        check_counts(plan, Facts(1e-3, "secure", 11), participation(plan, Facts(1e-3, "secure", 11)), cost)
