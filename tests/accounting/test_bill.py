"""Promises of the cost: one line per adversary, amplified only where the coins are unseen, never moved by who came."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from tests.tiny import plan

from sordino.accounting import accountant
from sordino.accounting.composition import Adversary, Line, Participation, client_cost
from sordino.accounting.events import (
    CappedPoisson,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    PubliclySampled,
    Relation,
    Shuffled,
    Unprotected,
)
from sordino.accounting.sensitivity import Patterns
from sordino.certificate.build import headline, line_entry
from sordino.parts.encoding import Clip, LaplacianSmoothing
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, NoNoise, Release, ShuffledNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin, Sampler
from sordino.parts.server_optimizers import Adam
from sordino.plan import Plan

ROUNDS = 10
EVERYONE, POISSON, CAPPED = Everyone(100), Poisson(100, 0.1), Poisson(100, 0.1, cap=20)
FIXED, TURNS = FixedSize(100, 10), RoundRobin(100, 30)
SAMPLERS: tuple[Sampler, ...] = (EVERYONE, POISSON, CAPPED, FIXED, TURNS)
Z, B = GaussianNoise(2.0), LaplaceNoise(2.0)
CENTRAL, LOCAL = CentralNoise(Gaussian(2.0)), LocalNoise(Gaussian(2.0))


KEPT = CAPPED.inclusion_rate or 0.0  # held to its law in test_cohort_line.py
RATES = {POISSON: 0.1, CAPPED: KEPT, FIXED: 0.1}


def seen(clients: Sampler, event: Event) -> tuple[Event, int]:
    """To one who sees the cohort: by a coin that is seen, every round; public cohorts, as often as they come."""
    if clients in RATES:
        return PubliclySampled(RATES[clients], event), ROUNDS
    return event, 3 if clients == TURNS else ROUNDS


def planned(clients: Sampler, release: Release, rounds: int = ROUNDS) -> Plan:
    norm: int = getattr(getattr(release, "mechanism", None), "norm", 2)
    return plan(rounds=rounds, clients=clients, release=release, encode=(Clip(1.0, norm=1 if norm == 1 else 2),))


def line(clients: Sampler, release: Release, adversary: Adversary) -> Line:
    return planned(clients, release).cost().line(adversary)


@pytest.mark.parametrize(
    ("clients", "release", "relation", "event", "count"),
    [
        (POISSON, CENTRAL, "add_remove", PoissonSampled(0.1, Z), ROUNDS),
        (CAPPED, CENTRAL, "add_remove", CappedPoisson(0.1, 100, 20, Z), ROUNDS),
        (FIXED, CENTRAL, "replace_one", FixedSampled(100, 10, Z), ROUNDS),
        (EVERYONE, CENTRAL, "replace_one", Z, ROUNDS),
        (TURNS, CENTRAL, "zero_out", Z, 3),
        (POISSON, CentralNoise(Laplace(2.0)), "add_remove", PoissonSampled(0.1, B), ROUNDS),
        (EVERYONE, CentralNoise(Laplace(2.0)), "replace_one", B, ROUNDS),
        # the variance of summed shares shows how many came, so an unknown number is never amplified
        (POISSON, NoiseShares(2.0, 5), "zero_out", PubliclySampled(0.1, Z), ROUNDS),
        (POISSON, NoiseShares(2.0, 10), "zero_out", PubliclySampled(0.1, Z), ROUNDS),
        (CAPPED, NoiseShares(2.0, 5), "zero_out", PubliclySampled(KEPT, Z), ROUNDS),
        (FIXED, NoiseShares(2.0, 10), "replace_one", FixedSampled(100, 10, Z), ROUNDS),
        (FIXED, NoiseShares(2.0, 9), "zero_out", PubliclySampled(0.1, Z), ROUNDS),
        (EVERYONE, NoiseShares(2.0, 100), "replace_one", Z, ROUNDS),
        (TURNS, NoiseShares(2.0, 30), "zero_out", Z, 3),
    ],
    ids=str,
)
def test_one_who_sees_only_models_is_billed_as_proved(
    clients: Sampler, release: Release, relation: Relation, event: Event, count: int
) -> None:
    assert line(clients, release, "models") == Line("models", relation, ((event, count),))


@pytest.mark.parametrize(
    ("clients", "relation"),
    [
        (POISSON, "zero_out"),
        (CAPPED, "zero_out"),
        (FIXED, "zero_out"),
        (EVERYONE, "replace_one"),
        (TURNS, "zero_out"),
    ],
    ids=str,
)
@pytest.mark.parametrize("release", [CENTRAL, NoiseShares(2.0, 5)], ids=str)
def test_one_who_sees_the_cohort_is_never_fooled_by_its_coins(
    clients: Sampler, release: Release, relation: Relation
) -> None:
    assert line(clients, release, "cohort") == Line("cohort", relation, (seen(clients, Z),))


@pytest.mark.parametrize("clients", SAMPLERS, ids=str)
def test_messages_are_unprotected_under_central_noise(clients: Sampler) -> None:
    ((event, count),) = line(clients, CENTRAL, "messages").entries
    assert (event, count) == (Unprotected(), 3 if clients == TURNS else ROUNDS)


@pytest.mark.parametrize("clients", SAMPLERS, ids=str)
def test_a_message_under_noise_shares_is_protected_by_its_own_share(clients: Sampler) -> None:
    found = line(clients, NoiseShares(2.0, 4), "messages")
    assert found == Line("messages", "replace_one", (seen(clients, GaussianNoise(1.0)),))


@pytest.mark.parametrize("clients", SAMPLERS, ids=str)
@pytest.mark.parametrize("adversary", ["models", "cohort", "messages"])
def test_local_noise_is_replace_one_and_unamplified_for_every_adversary(clients: Sampler, adversary: Adversary) -> None:
    assert line(clients, LOCAL, adversary) == Line(adversary, "replace_one", (seen(clients, Z),))


def test_clients_with_their_own_noise_have_a_line_of_their_own_and_the_least_is_the_headline() -> None:
    own = LocalNoise(Gaussian(9.0), tuple([5.0, 2.0, 7.0] + [8.0] * 97))
    cost = planned(EVERYONE, own).cost()
    assert [found.silos[:1] for found in cost.of("models")] == [(0,), (1,), (2,), (3,)]
    assert cost.line("models", 1).entries == ((Z, ROUNDS),)
    assert headline(cost.of("models"), 1e-5)["epsilon"] == line_entry(cost.line("models", 1), 1e-5)["epsilon"]


@pytest.mark.parametrize("clients", SAMPLERS, ids=str)
def test_shuffled_noise_is_replace_one_and_its_crowd_is_the_least_accepted(clients: Sampler) -> None:
    release = ShuffledNoise(Gaussian(2.0), 7)
    for adversary in ("models", "cohort"):
        found = line(clients, release, adversary)
        assert (found.relation, found.entries) == ("replace_one", (seen(clients, Shuffled(7, Z)),))
    assert line(clients, release, "messages").entries == (seen(clients, Z),)


@pytest.mark.parametrize("clients", SAMPLERS, ids=str)
def test_no_noise_is_allowed_with_every_sampler_and_promises_nothing(clients: Sampler) -> None:
    for found in planned(clients, NoNoise()).cost().lines:
        assert accountant.epsilon(found.entries, found.relation, 1e-5).value == math.inf


@pytest.mark.parametrize("clients", SAMPLERS, ids=str)
@pytest.mark.parametrize("release", [CENTRAL, NoiseShares(2.0, 10), LOCAL], ids=str)
def test_every_plan_has_one_line_per_adversary_about_clients(clients: Sampler, release: Release) -> None:
    cost = planned(clients, release).cost()
    assert cost.unit == "client"
    assert [found.adversary for found in cost.lines] == ["models", "cohort", "messages"]


@pytest.mark.parametrize("release", [CENTRAL, NoiseShares(2.0, 10), LOCAL], ids=str)
@pytest.mark.parametrize("clients", SAMPLERS, ids=str)
def test_postprocessing_server_and_radius_never_change_the_bill(clients: Sampler, release: Release) -> None:
    base = planned(clients, release)
    smooth = replace(base, postprocess=(LaplacianSmoothing(3.0), LaplacianSmoothing(1.0)))
    assert smooth.cost() == base.cost()
    assert replace(base, server=Adam()).cost() == base.cost()
    assert replace(base, encode=(Clip(77.0),)).cost() == base.cost()


@pytest.mark.parametrize("at_least", [1, 4, 10])
def test_dropouts_do_not_change_the_bill(at_least: int) -> None:
    """Whoever comes, the noise is at least what is accounted; too few, and nothing is released."""
    shares = NoiseShares(2.0, at_least)
    assert shares.event() == Z
    assert not shares.accepts(at_least - 1)
    for received in range(at_least, 30):
        assert shares.accepts(received)
        assert shares.noise_std(np.arange(received), 0) >= 2.0 * (1 - 1e-12)
    assert shares.denominator(10.0, 3) == shares.denominator(10.0, 30) == 10.0  # nor does it show in the scale


@pytest.mark.parametrize("release", [CENTRAL, NoiseShares(2.0, 5), NoNoise()], ids=str)
def test_the_denominator_is_never_the_realised_cohort_where_messages_are_unseen(release: Release) -> None:
    assert [release.denominator(10.0, received) for received in (0, 1, 10, 25)] == [10.0] * 4


def test_realised_counts_move_only_the_lines_of_those_who_see_them() -> None:
    base = planned(POISSON, CENTRAL)
    forecast, real = base.cost(), base.cost(Participation(releases=ROUNDS, max_participations=2))
    assert real.line("models") == forecast.line("models")
    assert real.line("cohort").entries == ((Z, 2),)
    assert base.cost(Participation(releases=13, max_participations=2)).line("models").entries == (
        (PoissonSampled(0.1, Z), 13),
    )


def _epsilon(found: Line, delta: float) -> float:
    return accountant.epsilon(found.entries, found.relation, delta).value


def test_the_published_plan_costs_7_30_to_one_who_sees_models_and_23_9_to_one_who_sees_the_cohort() -> None:
    """PRIVACY rule 3: paper 003, z = .95, q = .1, T = 200, delta = 1/500, a client in 20 rounds."""
    published = planned(Poisson(500, 0.1), CentralNoise(Gaussian(0.95)), rounds=200)
    cost = published.cost(Participation(releases=200, max_participations=20))
    assert _epsilon(cost.line("models"), 1 / 500) == pytest.approx(7.30, abs=0.03)
    assert _epsilon(cost.line("cohort"), 1 / 500) == pytest.approx(23.9, abs=0.1)


def test_fixed_cohorts_cost_what_replacing_a_client_costs() -> None:
    """PRIVACY rule 2: T = 200, q = .05, z = 2.4, delta = 2000^-1.1: 3.06, never below 2.62; not Poisson's 0.94."""
    cost = planned(FixedSize(2000, 100), CentralNoise(Gaussian(2.4)), rounds=200).cost()
    assert 2.62 <= _epsilon(cost.line("models"), 2000**-1.1) <= 3.07


def test_who_sees_more_of_local_noise_pays_the_same_and_who_sees_more_of_shares_pays_more() -> None:
    local = planned(POISSON, LOCAL).cost()
    assert len({_epsilon(found, 1e-3) for found in local.lines}) == 1
    shares = planned(FIXED, NoiseShares(2.0, 10)).cost()
    assert _epsilon(shares.line("models"), 1e-3) < _epsilon(shares.line("messages"), 1e-3)


# ---- parts of one's own ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thinned(Poisson, kind="test_thinned"):
    """A stranger's sampler that draws as Poisson does."""

    amplifies: ClassVar[bool] = False


@dataclass(frozen=True)
class Woven(CentralNoise, kind="test_woven"):
    """A stranger's noise that depends on earlier noise: one event stands for all rounds of a client."""

    correlated: ClassVar[bool] = True

    def run_events(self, allowed: Patterns) -> tuple[tuple[Event, int], ...]:
        return ((GaussianNoise(2.0 / math.log2(2 + allowed.max_participations)), 1),)

    def hides_cohort(self, clients: Sampler) -> bool:
        return False


def test_a_sampler_that_does_not_say_so_amplifies_nothing() -> None:
    cost = client_cost(Thinned(100, 0.1), CentralNoise(Gaussian(2.0)), Participation(releases=30, max_participations=9))
    assert cost.line("models").entries == cost.line("cohort").entries == ((GaussianNoise(2.0), 9),)
    assert cost.line("models").relation == "zero_out"
    proved = client_cost(
        Poisson(100, 0.1), CentralNoise(Gaussian(2.0)), Participation(releases=30, max_participations=9)
    )
    assert proved.line("models").entries == ((PoissonSampled(0.1, GaussianNoise(2.0)), 30),)


def test_one_event_may_stand_for_a_whole_run() -> None:
    for most in (1, 9):
        cost = client_cost(Poisson(100, 0.1), Woven(Gaussian(2.0)), Participation(releases=30, max_participations=most))
        assert cost.line("models").entries == ((GaussianNoise(2.0 / math.log2(2 + most)), 1),)
