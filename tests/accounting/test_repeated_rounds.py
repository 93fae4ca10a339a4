"""A round that is run again after a kill is accounted by WHICH round it was: the same clients and records are in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accounting.oracles import lower_bound
from tests.commands import federation, sordino
from tests.tiny import plan

from sordino.accounting import accountant
from sordino.accounting.composition import Line, Participation, repeated_rounds
from sordino.accounting.events import Unprotected
from sordino.accounting.sensitivity import Patterns
from sordino.certificate.facts import Facts, run_cost
from sordino.config import load_config
from sordino.engines.base import Receipt
from sordino.loop import RoundReceipts
from sordino.outcome import facts_of_charges
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, NoiseShares
from sordino.parts.samplers import (
    NO_RANDOMNESS,
    CyclicPoisson,
    Everyone,
    FixedSize,
    MinSeparation,
    Poisson,
    RoundRobin,
    Sampler,
)
from sordino.parts.strategies import BandedSquareRoot, Identity
from sordino.plan import Plan
from sordino.runs import admission, execution, rounds
from sordino.runs.folder import RunFolder

DELTA = 100**-1.1
TURNS = CyclicPoisson(100, 10, 0.9)


def turns_plan(**changes: Any) -> Plan:
    """T = 11, 10 groups, rate .9, z = 1: group 0 has two rounds, every other group one."""
    return plan(**{"rounds": 11, "clients": TURNS, "release": CentralNoise(Gaussian(1.0)), **changes})


def of_chain(made: Plan, charged: list[int]) -> dict[str, Line]:
    """The cost of a run whose chain of charges holds these rounds."""
    cost = run_cost(made, facts_of_charges(made, charged, [], Facts(DELTA, "simulation", 0)))
    return {who: cost.line(who) for who in ("models", "cohort")}


def epsilon(line: Line) -> float:
    return accountant.epsilon(line.entries, line.relation, DELTA).value


# ---- groups in turn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kills", "exposures", "true"), [(0, 2, 3.686), (1, 3, 4.804), (8, 10, 10.906)])
def test_a_repeated_round_of_turns_hits_the_same_group_again(kills: int, exposures: int, true: float) -> None:
    found = of_chain(turns_plan(), [0] * kills + list(range(11)))
    assert found["models"].entries[0][1] == exposures
    assert found["cohort"].entries[0][1] == exposures  # rate .9: some client is in all of them
    assert epsilon(found["models"]) == pytest.approx(true, abs=6e-4)
    assert epsilon(found["models"]) >= lower_bound(rate=0.9, noise_multiplier=2.0, rounds=exposures, delta=DELTA)


def test_repeats_of_different_groups_do_not_add_up() -> None:
    found = of_chain(turns_plan(), [*range(1, 10), *range(11)])  # nine kills, each of another group
    assert found["models"].entries[0][1] == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 12), st.lists(st.integers(0, 29), max_size=12))
def test_amplified_rounds_are_those_in_which_a_client_can_be_drawn(T: int, groups: int, again: list[int]) -> None:
    repeated = [t % T for t in again]
    times = Counter(t % groups for t in [*range(T), *repeated])
    assert CyclicPoisson(20, groups, 0.5).amplified_rounds(T, repeated) == max(times.values())


def test_repeats_that_nobody_can_name_may_be_of_any_group() -> None:
    cost = turns_plan().cost(Participation(releases=14, max_participations=5, repeats=3))
    assert cost.line("models").entries[0][1] == 2 + 3


# ---- public cohorts, and every other sampler -------------------------------------------------------------------------


SAMPLERS: list[Sampler] = [
    Everyone(6), RoundRobin(10, 3), RoundRobin(10, 3, seed=4), MinSeparation(12, 2, 3),
    FixedSize(9, 3), Poisson(9, 0.4),
    CyclicPoisson(12, 4, 0.7),
]  # fmt: skip


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda one: one.kind)
@settings(max_examples=20, deadline=None)
@given(again=st.lists(st.integers(0, 10), max_size=8))
def test_no_client_is_in_more_rounds_than_are_billed(sampler: Sampler, again: list[int]) -> None:
    most = sampler.participations_with_repeats(11, again)
    drawn = [sampler.draw(t, np.random.default_rng(t + 100 * i)) for i, t in enumerate([*range(11), *again])]
    truth = np.bincount(np.concatenate(drawn), minlength=sampler.population).max()
    assert truth == most if not sampler.random else truth <= most
    assert most <= 11 + len(again)


def test_public_cohorts_that_ran_again_are_counted_client_by_client() -> None:
    made = plan(rounds=10, clients=RoundRobin(10, 1), release=CentralNoise(Gaussian(2.0)))
    assert of_chain(made, [*range(10), *range(10)])["cohort"].entries[0][1] == 2  # each once more
    assert of_chain(made, [*range(10), *[3] * 10])["cohort"].entries[0][1] == 11


# ---- noise that rounds share -----------------------------------------------------------------------------------------


def correlated(strategy: Any, clients: Sampler = RoundRobin(10, 1)) -> Plan:
    return plan(rounds=11, clients=clients, release=CorrelatedNoise(Gaussian(2.0), strategy))


def test_independent_noise_written_as_correlated_costs_what_it_costs() -> None:
    """C = I: client 0 is in rounds 1 and 11; with round 1 run again twice it was in four releases."""
    line = of_chain(correlated(Identity()), [0, 0, 0, *range(1, 11)])["cohort"]
    plain = replace(line, entries=((CentralNoise(Gaussian(2.0)).event(), 4),))
    assert epsilon(line) == pytest.approx(epsilon(plain), rel=1e-6)


@pytest.mark.parametrize(("bands", "clients"), [(4, RoundRobin(10, 1)), (4, Everyone(3)), (11, RoundRobin(4, 1))])
def test_a_row_that_is_drawn_again_is_billed_for_what_it_moves(bands: int, clients: Sampler) -> None:
    """The sensitivity of C with row t written twice, over every client's true rounds, is never above the cost's."""
    made = correlated(BandedSquareRoot(bands), clients)
    release = made.release
    assert isinstance(release, CorrelatedNoise)
    inverse = release.strategy.noise_matrix(11)
    matrix = np.linalg.inv(inverse)
    member = np.zeros((clients.population, 11))
    for t in range(11):
        member[clients.draw(t, NO_RANDOMNESS), t] = 1.0
    for t in range(11):
        rows = np.vstack([matrix, matrix[t]])
        truth = max(float(np.linalg.norm(rows @ one)) for one in member) / 2.0
        entries = of_chain(made, [*range(11), t])["cohort"].entries
        billed_mu = sum(count / event.noise_multiplier**2 for event, count in entries) ** 0.5  # type: ignore[attr-defined]
        assert truth <= billed_mu * (1 + 1e-9)


def test_a_shared_noise_of_somebody_s_own_has_no_price_for_a_row_drawn_again() -> None:
    class Woven(CentralNoise, kind="woven_again"):
        correlated: ClassVar[bool] = True

        def run_events(self, allowed: Patterns) -> Any:
            return ((self.event(), 1),)

    made = replace(correlated(Identity(), Everyone(6)), release=Woven(Gaussian(2.0)))
    assert epsilon(of_chain(made, list(range(11)))["cohort"]) < np.inf
    assert of_chain(made, [0, *range(11)])["cohort"].entries[-1] == (Unprotected(), 1)


# ---- a run that is killed --------------------------------------------------------------------------------------------


def test_a_run_in_turns_that_was_killed_pays_the_ledger_and_certifies_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice after the charge of round 1: group 0 has four exposures, by certificate, ledger and forecast."""
    words = ("--epsilon", 50, "--delta", DELTA, "--unit", "client", "--relation", "add_remove")
    sordino("ledger", "limit", tmp_path / "l", "digits", *words)
    sampler = '{ kind = "poisson", population = 60, rate = 0.5 }'
    instead = '{ kind = "cyclic_poisson", population = 60, groups = 3, rate = 0.5 }'
    pays = f'[privacy]\nledger = "{tmp_path / "l"}"\ndataset = "digits"\n[run]'
    config = load_config(federation(tmp_path, (sampler, instead), ("[run]", pays)))
    keep = rounds.keep_round

    def kill(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "keep_round", kill)
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            execution.execute(config, tmp_path / "a", resume=resume)
    monkeypatch.setattr(rounds, "keep_round", keep)
    made = execution.execute(config, tmp_path / "a", resume=True).certificate
    planned = config.plan.forecast.line("models").entries[0][1]
    assert planned == 2  # four rounds, three groups
    assert made["adversaries"][0]["events"][0]["count"] == planned + 2
    assert sordino("ledger", "show", tmp_path / "l", "--json").json["datasets"][0]["events"][0]["count"] == planned + 2
    chain = RunFolder.open(tmp_path / "a").contents().log
    assert repeated_rounds(chain.rounds) == (0, 0)
    assert admission.planned_facts(config, chain.rounds, 4).repeated == (0, 0)


def test_a_silo_s_receipts_beyond_its_rounds_are_repeats_that_nobody_can_name() -> None:
    made = plan(rounds=10, clients=RoundRobin(10, 1), release=NoiseShares(2.0, at_least=1))
    notes = [RoundReceipts(t + 1, (), (Receipt(t, 3 if t == 4 else 1),)) for t in range(10)]
    facts = facts_of_charges(made, list(range(10)), [], Facts(DELTA, "simulation", 0), notes)
    assert (facts.repeats, facts.repeated, facts.max_participations) == (2, (), 3)
