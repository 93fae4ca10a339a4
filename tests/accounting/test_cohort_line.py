"""Promises to one who sees who is in which round: exact over the coins, nothing outside delta, what k rounds cost."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from tests.accounting import oracles
from tests.accounting.test_accounting_truths import laplace_delta, two_laplace_delta
from tests.tiny import plan

from sordino.accounting import accountant, renyi
from sordino.accounting.composition import Participation
from sordino.accounting.events import Event, GaussianNoise, LaplaceNoise, PoissonSampled, PubliclySampled, Relation
from sordino.accounting.pld import gaussian_epsilon
from sordino.certificate.build import certificate
from sordino.certificate.facts import Facts, participation, run_cost
from sordino.cli.planning import epsilon_of, epsilon_text
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.encoding import Clip
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.record_samplers import AllRecords
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, NoiseShares, Release
from sordino.parts.samplers import Cohort, CyclicPoisson, FixedSize, Poisson, Sampler
from sordino.parts.strategies import BandedSquareRoot
from sordino.plan import Plan


def made(clients: Sampler, release: Release, rounds: int) -> Plan:
    norm: int = getattr(getattr(release, "mechanism", None), "norm", 2)
    return plan(rounds=rounds, clients=clients, release=release, encode=(Clip(1.0, norm=1 if norm == 1 else 2),))


def epsilon(found: Plan, delta: float) -> float:
    line = found.forecast.line("cohort")
    return accountant.epsilon(line.entries, line.relation, delta).value


# ---- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("population", "rate", "rounds", "noise_multiplier", "delta", "checked"),
    [
        (500, 0.1, 200, 0.95, 0.002, 27.04),
        (10**7, 1e-5, 10_000, 0.6, 1e-5, 9.197),
        (1000, 0.01, 100, 1.0, 1e-6, 10.17),
    ],
)
def test_one_who_sees_cohorts_is_billed_the_checked_epsilon(
    population: int, rate: float, rounds: int, noise_multiplier: float, delta: float, checked: float
) -> None:
    found = epsilon(made(Poisson(population, rate), CentralNoise(Gaussian(noise_multiplier)), rounds), delta)
    assert found == pytest.approx(checked, rel=1e-3)
    if rounds <= 200:
        truth = {"rate": rate, "rounds": rounds, "mu": 1 / noise_multiplier}
        assert oracles.public_coin_delta(found, **truth) <= delta  # type: ignore[arg-type]
        assert oracles.public_coin_delta(found * 0.998, **truth) > delta  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "rounds", "noise_multiplier"), [(0.3, 7, 1.0), (0.02, 40, 0.7), (0.9, 12, 3.0)])
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_rounds_by_a_seen_coin_are_the_binomial_mixture_of_gaussians(
    rate: float, rounds: int, noise_multiplier: float, relation: Relation
) -> None:
    mu = (2 if relation == "replace_one" else 1) / noise_multiplier
    for at in (0.0, 0.5, 2.0, 6.0):
        truth = oracles.public_coin_delta(at, rate=rate, rounds=rounds, mu=mu)
        ours = accountant.delta_at([(PubliclySampled(rate, GaussianNoise(noise_multiplier)), rounds)], relation, at)
        assert truth * (1 - 1e-9) <= ours <= truth * 1.005 + 1e-11


@pytest.mark.parametrize("at", [0.1, 0.7, 1.5])
def test_two_laplace_rounds_by_a_seen_coin_are_their_closed_form(at: float) -> None:
    q = 0.3
    truth = 2 * q * (1 - q) * laplace_delta(at, 1.0) + q * q * two_laplace_delta(at, 1.0, 1.0)
    ours = accountant.delta_at([(PubliclySampled(q, LaplaceNoise(1.0)), 2)], "zero_out", at)
    assert truth * (1 - 1e-9) <= ours <= truth * 1.01 + 1e-9


def test_billed_as_if_the_coins_were_unseen_it_would_fall_below_the_truth() -> None:
    """Sabotage: amplification is for one who does not see the cohort."""
    wrong = accountant.epsilon([(PoissonSampled(0.1, GaussianNoise(0.95)), 200)], "add_remove", 0.002).value
    assert oracles.public_coin_delta(wrong, rate=0.1, rounds=200, mu=1 / 0.95) > 50 * 0.002


def test_moments_by_a_seen_coin_are_the_mixture_of_moments() -> None:
    found = PubliclySampled(0.2, GaussianNoise(1.5)).renyi("zero_out")
    assert found is not None
    for order, divergence in zip(renyi.ORDERS[:60:7], found[:60:7], strict=True):
        moment = 0.8 + 0.2 * math.exp((order - 1) * order / (2 * 1.5**2))
        assert divergence == pytest.approx(math.log(moment) / (order - 1), rel=1e-12)


# ---- nothing outside delta ------------------------------------------------------------------------------------------


def test_a_client_that_is_hardly_ever_drawn_is_billed_for_being_drawn() -> None:
    """A tail of 1e-6 outside delta said epsilon 0 here; the truth at delta 1e-9 is not 0."""
    found = epsilon(made(Poisson(1, 1e-8), CentralNoise(Gaussian(0.5)), 10), 1e-9)
    assert oracles.public_coin_delta(0.0, rate=1e-8, rounds=10, mu=2.0) > 1e-9
    assert found > 0
    assert oracles.public_coin_delta(found, rate=1e-8, rounds=10, mu=2.0) <= 1e-9


def test_more_rounds_than_any_tail_foresees_stay_within_delta() -> None:
    """Next to no noise: a client is safe only if it is never drawn, and delta says so."""
    found = epsilon(made(Poisson(1000, 1e-4), CentralNoise(Gaussian(0.05)), 10), 5e-4)
    assert oracles.public_coin_delta(found, rate=1e-4, rounds=10, mu=20.0) <= 5e-4


@dataclass(frozen=True)
class Silent(Sampler, kind="silent_about_its_law"):
    """Random cohorts whose law nobody states."""

    population: int
    relation: ClassVar[Relation] = "zero_out"

    @property
    def expected(self) -> float:
        return 1.0

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        return rng.integers(self.population, size=1)

    def amplify(self, event: Event) -> Event:
        return event

    def max_participations(self, rounds: int) -> int:
        return 1


def test_a_sampler_that_states_no_rate_is_billed_for_every_round() -> None:
    found = made(Silent(10), CentralNoise(Gaussian(2.0)), 7).forecast
    assert found.line("cohort").entries == ((GaussianNoise(2.0), 7),)


# ---- the law of each sampler ----------------------------------------------------------------------------------------


def kept(population: int, rate: float, cap: int) -> float:
    """P[client 0 is kept], over all sets of clients that come and all sets of them that are kept."""
    total = 0.0
    for came in itertools.product((0, 1), repeat=population):
        chance = math.prod(rate if one else 1 - rate for one in came)
        total += chance * came[0] * min(1.0, cap / max(sum(came), 1))
    return total


@pytest.mark.parametrize(("population", "rate", "cap"), [(1, 0.4, 1), (5, 0.3, 2), (8, 0.5, 3), (6, 0.2, 6)])
def test_a_cap_takes_a_client_with_its_exact_probability(population: int, rate: float, cap: int) -> None:
    found = Poisson(population, rate, cap).inclusion_rate
    assert found is not None
    assert kept(population, rate, cap) <= found * (1 + 1e-12)
    assert found == pytest.approx(kept(population, rate, cap), rel=1e-8)


@pytest.mark.parametrize(
    "clients", [Poisson(20, 0.3), Poisson(20, 0.3, cap=6), FixedSize(20, 7), CyclicPoisson(20, 4, 0.3)], ids=str
)
def test_a_sampler_draws_a_client_as_often_as_its_rate_says(clients: Sampler) -> None:
    rng, rounds = np.random.default_rng(5), 8000
    met = sum(0 in clients.draw(t, rng) for t in range(rounds))
    exposed, rate = clients.amplified_rounds(rounds), clients.inclusion_rate
    assert rate is not None
    assert abs(met - exposed * rate) < 5 * math.sqrt(exposed * rate * (1 - rate))


def test_shared_noise_is_billed_column_by_column_where_the_bands_fit_between_turns() -> None:
    release = CorrelatedNoise(Gaussian(2.0), BandedSquareRoot(3))
    found = made(CyclicPoisson(40, 4, 0.5), release, 10).forecast
    column = release.strategy.max_column_norm
    assert found.line("cohort").entries == ((PubliclySampled(0.5, GaussianNoise(2.0 / column)), 3),)


def test_several_steps_by_one_coin_are_never_billed_as_if_each_had_its_own() -> None:
    local = NoisyLocalSgd(AllRecords((30,)), 1.0, 2.0, 0.1, steps=5)
    found = plan(rounds=20, clients=Poisson(4, 0.2), local=local, encode=(), release=Forward()).forecast.line("cohort")
    spent = accountant.epsilon(found.entries, found.relation, 1e-5).value
    truth = {"rate": 0.2, "rounds": 20, "mu": 1.0, "steps": 5}
    assert oracles.public_coin_delta(spent, **truth) <= 1e-5  # type: ignore[arg-type]
    wrong = accountant.epsilon([(PubliclySampled(0.2, GaussianNoise(2.0)), 100)], "replace_one", 1e-5).value
    assert oracles.public_coin_delta(wrong, **truth) > 1e-5  # type: ignore[arg-type]


# ---- before, during and after a run ---------------------------------------------------------------------------------

SHARES = made(Poisson(50, 0.2), NoiseShares(2.0, 3), 10)
Z, COIN = GaussianNoise(2.0), PubliclySampled(0.2, GaussianNoise(2.0))


def test_cohorts_that_were_drawn_and_seen_are_counted() -> None:
    done = Facts(1e-5, "simulation", 10, max_participations=4)
    assert run_cost(SHARES, done).line("cohort").entries == ((Z, 4),)


def test_a_run_that_was_cut_pays_for_what_was_drawn_and_for_the_coins_of_a_whole_run() -> None:
    cut = Facts(1e-5, "simulation", 3, max_participations=2)
    assert run_cost(SHARES, cut).line("cohort").entries == ((Z, 2), (COIN, 10))
    assert certificate(SHARES, cut)["counts"]["rounds_accounted"] == 10


def test_rounds_run_again_have_coins_of_their_own() -> None:
    again = participation(SHARES, Facts(1e-5, "simulation", 12, repeats=2, repeated=(3, 3)))
    assert SHARES.cost(again).line("cohort").entries == ((COIN, 12),)


def test_realised_rounds_are_what_the_plan_says_of_them() -> None:
    assert SHARES.cost(Participation(10, 3)).line("cohort").entries == ((Z, 3),)
    assert replace(SHARES, rounds=3).forecast.line("cohort").entries == ((COIN, 3),)


# ---- in words -------------------------------------------------------------------------------------------------------


def test_the_certificate_says_what_a_client_in_k_rounds_is_promised() -> None:
    central = made(Poisson(500, 0.1), CentralNoise(Gaussian(0.95)), 200)
    found = certificate(central, Facts(0.002, "simulation", 200))
    first, cohort, _ = found["adversaries"]
    assert "by_participations" not in first
    told = cohort["by_participations"]
    assert told[0]["participations"] == 20
    for one in told:
        assert one["epsilon"] == pytest.approx(
            gaussian_epsilon(math.sqrt(one["participations"]) / 0.95, 0.002), abs=2e-6
        )
    assert told[-1]["chance_of_more"] <= 1e-6 < told[-2]["chance_of_more"]
    assert told[0]["epsilon"] < cohort["epsilon"] < told[-1]["epsilon"]
    assert any("averaged over these draws" in said for said in found["assumptions"])


def test_the_calculator_says_it_too() -> None:
    found = epsilon_of("poisson", 500, 200, delta=0.002, cohort=50, noise_multiplier=0.95)
    sentence = (
        "averaged over the random cohorts; by the number of rounds that a client is in: 23.86 in 20 (chance of more "
    )
    assert f"{sentence}0." in epsilon_text(found)


def test_laplace_noise_and_a_cap_have_the_line_too() -> None:
    for clients, release in (
        (Poisson(50, 0.2), CentralNoise(Laplace(3.0))),
        (Poisson(50, 0.2, cap=12), CentralNoise(Gaussian(2.0))),
        (FixedSize(50, 10), CentralNoise(Gaussian(2.0))),
    ):
        found, sure = epsilon(made(clients, release, 10), 1e-5), Participation(10, 10)
        everybody = made(clients, release, 10).cost(sure).line("cohort")
        assert 0 < found < accountant.epsilon(everybody.entries, everybody.relation, 1e-5).value
