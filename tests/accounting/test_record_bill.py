"""Promises of a record-level cost: records' coins amplify, silos' never do, each silo pays for what it sent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.silos import SIZES, planned, silos
from tests.tiny import plan as client_plan

from sordino.accounting import accountant
from sordino.accounting.accountant import silo_deltas
from sordino.accounting.calibration import Budget, calibrate, calibrate_silos
from sordino.accounting.composition import ADVERSARIES, Cost, Participation
from sordino.accounting.events import (
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
from sordino.accounting.sensitivity import dense
from sordino.certificate.build import certificate, headline
from sordino.certificate.explain import ceilings
from sordino.certificate.facts import Facts, participation
from sordino.config import from_recipe
from sordino.errors import BudgetError, ConfigError, PlanError
from sordino.ledger.budget import check_affordable, client_filter
from sordino.outcome import facts_of_charges
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.record_samplers import (
    AllRecords,
    FixedRecords,
    OnePass,
    PoissonRecords,
    RecordSampler,
    RecordsInTurn,
    ShuffledRecords,
)
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, NoNoise, Release, ShuffledNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin, Sampler
from sordino.parts.strategies import BandedSquareRoot
from sordino.plan import Plan
from sordino.recipes import dp_ls_sgd, noisy_local_sgd, noisy_minibatch_sgd, silo
from sordino.recipes.record_level import budgets
from sordino.training import train

ROUNDS, N = 6, 30
Z = GaussianNoise(2.0)
EVERYONE, FIXED, POISSON = Everyone(4), FixedSize(4, 2), Poisson(4, 0.5)
LOCAL = LocalNoise(Gaussian(2.0))
SAMPLERS: list[tuple[RecordSampler, Relation, Event, int]] = [
    (AllRecords((N,)), "replace_one", Z, ROUNDS),
    (FixedRecords(3, (N,)), "replace_one", FixedSampled(N, 3, Z), ROUNDS),
    (PoissonRecords(3.0, (N,)), "add_remove", PoissonSampled(0.1, Z), ROUNDS),
    (OnePass(3, (N,)), "replace_one", Z, 1),
]


def made(
    reads: RecordSampler, release: Release = LOCAL, clients: Sampler = EVERYONE, rounds: int = ROUNDS, norm: Any = 2
) -> Plan:
    return planned(rounds=rounds, clients=clients, local=BatchGradient(reads, 1.0, norm), release=release)


def entries(cost: Cost, adversary: Any = "models", silo: int = 0) -> tuple[Event, int]:
    (entry,) = cost.line(adversary, silo).entries
    return entry


def epsilon_of(event: Event, count: int, relation: Relation = "replace_one", delta: float = 1e-5) -> float:
    return accountant.epsilon(((event, count),), relation, delta).value


# ---- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reads", "relation", "event", "count"), SAMPLERS, ids=lambda v: str(v))
def test_local_noise_is_billed_alike_to_everybody(
    reads: RecordSampler, relation: Relation, event: Event, count: int
) -> None:
    cost = made(reads).cost()
    assert cost.unit == "record"
    for who in ADVERSARIES:
        line = cost.line(who)
        assert (line.relation, line.entries, line.silos) == (relation, ((event, count),), ())


@pytest.mark.parametrize(("reads", "relation", "event", "count"), SAMPLERS, ids=lambda v: str(v))
def test_central_noise_protects_what_is_released_and_no_message(
    reads: RecordSampler, relation: Relation, event: Event, count: int
) -> None:
    cost = made(reads, CentralNoise(Gaussian(2.0))).cost()
    assert entries(cost, "models") == entries(cost, "cohort") == (event, count)
    assert entries(cost, "messages") == (Unprotected(), count)
    assert cost.line("models").relation == relation


def test_noise_shares_are_their_total_to_the_server_and_a_share_to_one_who_reads_messages() -> None:
    cost = made(FixedRecords(3, (N,)), NoiseShares(2.0, at_least=4)).cost()
    assert entries(cost, "cohort") == (FixedSampled(N, 3, Z), ROUNDS)
    assert entries(cost, "messages") == (FixedSampled(N, 3, GaussianNoise(1.0)), ROUNDS)


@pytest.mark.parametrize("release", [LOCAL, CentralNoise(Gaussian(2.0)), NoiseShares(2.0, 1)], ids=str)
@pytest.mark.parametrize("clients", [FIXED, POISSON, RoundRobin(4, 1)], ids=str)
def test_coins_that_choose_silos_never_amplify(clients: Sampler, release: Release) -> None:
    cost = made(FixedRecords(3, (N,)), release, clients).cost()
    event, count = entries(cost)
    seen = clients.random and not isinstance(release, CentralNoise)
    assert event == (PubliclySampled(0.5, FixedSampled(N, 3, Z)) if seen else FixedSampled(N, 3, Z))
    assert count == (ROUNDS if clients.random else clients.max_participations(ROUNDS))


def test_no_noise_promises_nothing_whatever_the_coins() -> None:
    for reads, *_ in SAMPLERS:
        for line in made(reads, NoNoise()).cost().lines:
            assert isinstance(line.entries[0][0], Unprotected)


def test_noise_in_local_steps_is_billed_step_by_step() -> None:
    for reads, _, event, count in SAMPLERS:
        local = NoisyLocalSgd(reads, 1.0, 2.0, 0.1, steps=2 if reads.disjoint else 5)
        cost = planned(
            rounds=ROUNDS if not reads.disjoint else 5, clients=EVERYONE, local=local, release=Forward()
        ).cost()
        assert entries(cost) == (event, count if reads.disjoint else 5 * ROUNDS)


def test_shuffled_batches_are_billed_by_epochs_not_by_rounds() -> None:
    """30 records in batches of 3: ten rounds an epoch; thirty rounds are three reads of a record, not thirty."""
    reads = ShuffledRecords(3, (30,))
    assert entries(made(reads, LOCAL, rounds=30).cost()) == (Z, 3)
    assert entries(made(reads, LOCAL, rounds=31).cost()) == (Z, 4)
    plan = made(reads, LOCAL, rounds=30)
    for repeated, accounted in (((28, 29), 4), ((28, 28), 5), ((19, 20), 5)):  # disjoint batches; one twice; two epochs
        again = Participation(releases=32, max_participations=32, repeats=2, repeated=repeated)
        assert entries(plan.cost(again)) == (Z, accounted)
    assert entries(plan.cost(Participation(releases=32, max_participations=32, repeats=2))) == (
        Z,
        5,
    )  # nobody knows which
    steps = NoisyLocalSgd(reads, 1.0, 2.0, 0.1, steps=5)
    assert entries(planned(rounds=6, clients=EVERYONE, local=steps, release=Forward()).cost()) == (Z, 3)


CORRELATED = CorrelatedNoise(Gaussian(2.0), BandedSquareRoot(10))


def test_correlated_noise_over_batches_in_turn_is_one_event_of_reads_an_epoch_apart() -> None:
    """30 records in batches of 3 are read every ten rounds: ten bands do not meet, three reads are sqrt(3) ||c||."""
    column = BandedSquareRoot(10).column(30)
    ((event, count),) = made(RecordsInTurn(3, (30,)), CORRELATED, rounds=30).cost().line("models").entries
    assert count == 1
    assert isinstance(event, GaussianNoise)
    assert event.noise_multiplier == pytest.approx(2.0 / np.linalg.norm(column) / math.sqrt(3))


@pytest.mark.parametrize(
    "reads", [RecordsInTurn(3, (30,)), ShuffledRecords(3, (30,)), AllRecords((30,)), OnePass(1, (30,))]
)
def test_no_record_moves_correlated_noise_more_than_is_billed(reads: RecordSampler) -> None:
    """Every record's own rounds, through the matrix; the sabotage costs one column for each of its rounds."""
    rounds = 24
    matrix = dense(BandedSquareRoot(10).column(rounds), rounds)
    ((event, _),) = made(reads, CORRELATED, rounds=rounds).cost().line("models").entries
    assert isinstance(event, GaussianNoise)
    there = np.zeros((rounds, 30))
    for t in range(rounds):
        there[t, reads.draw(t, 0, 30, np.random.default_rng(t))] = 1.0
    moved = np.linalg.norm(matrix @ there, axis=0).max()
    assert 2.0 / event.noise_multiplier >= moved * (1 - 1e-9)
    if isinstance(reads, AllRecords):
        assert moved > 1.5 * np.linalg.norm(matrix[:, 0]) * math.sqrt(rounds)


def test_one_holder_of_all_records_may_correlate_its_noise_and_smooth_it() -> None:
    made = dp_ls_sgd(rounds=30, records=RecordsInTurn(3, (30,)), lr=0.1, clip_norm=1.0, release=CORRELATED)
    ((event, count),) = made.cost().line("models").entries
    assert (count, made.unit) == (1, "record")
    assert isinstance(event, GaussianNoise)
    assert event.noise_multiplier == pytest.approx(2.0 / math.sqrt(3) / np.linalg.norm(BandedSquareRoot(10).column(30)))


@pytest.mark.parametrize("reads", [PoissonRecords(3.0, (30,)), FixedRecords(3, (30,))])
def test_correlated_noise_over_random_batches_is_refused(reads: RecordSampler) -> None:
    with pytest.raises(PlanError, match="any two rounds"):
        made(reads, CORRELATED, rounds=30)


def test_a_filter_counts_the_reads_of_correlated_noise() -> None:
    plan = made(RecordsInTurn(3, (30,)), CORRELATED, rounds=30)
    line = plan.cost().line("cohort")
    paid = Budget(accountant.epsilon(line.entries, line.relation, 1e-5).value * 1.01, 1e-5)
    assert client_filter(plan, paid).allowed.min() >= 3  # more than three do not fit in thirty rounds
    assert client_filter(plan, replace(paid, epsilon=0.7 * paid.epsilon)).allowed.max() < 3
    check_affordable(plan, client_filter(plan, paid))
    with pytest.raises(PlanError, match="budget"):
        check_affordable(plan, client_filter(plan, replace(paid, epsilon=0.7 * paid.epsilon)))


def test_a_silo_that_sits_rounds_out_is_still_billed_for_every_epoch_it_was_in() -> None:
    """Two rounds of different epochs may read one record twice: a count of its own rounds would say once."""
    each = Participation(releases=30, max_participations=2, per_client=(2, 1, 0, 30))
    cost = made(ShuffledRecords(3, (30,)), LOCAL, FIXED, rounds=30).cost(each)
    assert [cost.line("messages", silo).entries[0][1] for silo in range(4)] == [2, 1, 0, 3]


def test_a_filter_counts_the_epochs_of_shuffled_batches() -> None:
    """A budget worth two reads lasts two epochs; a round that is run again is a read more."""
    plan = made(ShuffledRecords(3, (30,)), LOCAL, rounds=30)
    worth_two = replace(client_filter(plan, Budget(1e9, 1e-5)), allowed=np.full(4, 2))
    everyone = np.arange(4)
    for t in range(20):
        worth_two.charge(everyone, t)
    with pytest.raises(BudgetError):
        worth_two.charge(everyone, 20)
    again = replace(client_filter(plan, Budget(1e9, 1e-5)), allowed=np.full(4, 2))
    for t in (0, 1, 1):
        again.charge(everyone, t)
    again.charge(everyone, 2)
    with pytest.raises(BudgetError):
        again.charge(everyone, 10)


def test_laplace_needs_an_l1_clip_and_a_sampler_with_a_proof() -> None:
    laplace = LocalNoise(Laplace(2.0))
    assert entries(made(AllRecords((N,)), laplace, norm=1).cost()) == (LaplaceNoise(2.0), ROUNDS)
    assert entries(made(PoissonRecords(3.0, (N,)), laplace, norm=1).cost())[0] == PoissonSampled(0.1, LaplaceNoise(2.0))
    assert entries(made(FixedRecords(3, (N,)), laplace, norm=1).cost())[0] == FixedSampled(N, 3, LaplaceNoise(2.0))
    with pytest.raises(PlanError) as refused:
        made(AllRecords((N,)), laplace, norm=2)
    assert refused.value.rule == "norm"


def test_one_fixed_batch_under_laplace_noise_costs_the_closed_form() -> None:
    """Pure epsilon of a batch of m of n, one record replaced: log(1 + m / n (exp(2 / z) - 1)), Balle et al. 2018."""
    found = accountant.epsilon(((FixedSampled(30, 3, LaplaceNoise(2.0)), 1),), "replace_one", 0.0).value
    exact = math.log1p(0.1 * math.expm1(1.0))
    assert exact <= found <= exact * (1 + 1e-6)


# ---- shuffling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reads", [FixedRecords(2, (N,)), OnePass(5, (N,)), AllRecords((N,)), PoissonRecords(1.0, (N,))], ids=str
)
def test_shuffled_messages_of_several_records_are_refused(reads: RecordSampler) -> None:
    with pytest.raises(PlanError) as refused:
        made(reads, ShuffledNoise(Gaussian(2.0), 2))
    assert refused.value.rule == "shuffle"
    assert "docs/privacy.md#shuffle" in str(refused.value)


def test_shuffled_messages_of_one_record_are_amplified_by_the_crowd_alone() -> None:
    cost = made(FixedRecords(1, (N,)), ShuffledNoise(Gaussian(2.0), 3)).cost()
    assert entries(cost, "cohort") == (Shuffled(3, Z), ROUNDS)  # never by the record's own coin as well
    assert entries(cost, "messages") == (FixedSampled(N, 1, Z), ROUNDS)
    once = made(OnePass(1, (N,)), ShuffledNoise(Gaussian(2.0), 3)).cost()
    assert entries(once, "cohort") == (Shuffled(3, Z), 1)


# ---- one pass --------------------------------------------------------------------------------------------------------


def test_one_pass_is_one_release_and_one_more_for_every_round_that_ran_again() -> None:
    plan = made(OnePass(3, (N,)), rounds=10)
    for repeats in (0, 1, 3):
        cost = plan.cost(Participation(releases=10 + repeats, max_participations=10 + repeats, repeats=repeats))
        assert entries(cost) == (Z, 1 + repeats)
    assert entries(plan.cost(Participation(releases=1, max_participations=1, repeats=4)))[1] == 1


@pytest.mark.parametrize(("sizes", "rounds"), [((30,), 11), ((30, 40, 50, 29), 10)])
def test_more_rounds_than_disjoint_batches_are_refused(sizes: tuple[int, ...], rounds: int) -> None:
    with pytest.raises(PlanError) as refused:
        made(OnePass(3, sizes), rounds=rounds)
    assert refused.value.rule == "one pass"
    made(OnePass(3, sizes), rounds=rounds - 1)


def test_the_steps_of_a_local_solver_count_as_batches_of_the_pass() -> None:
    local = NoisyLocalSgd(OnePass(3, (N,)), 1.0, 2.0, 0.1, steps=5)
    planned(rounds=2, clients=EVERYONE, local=local, release=Forward())
    with pytest.raises(PlanError, match="15 disjoint batches, while the smallest silo has records for 10"):
        planned(rounds=3, clients=EVERYONE, local=local, release=Forward())


# ---- each silo for itself --------------------------------------------------------------------------------------------


def test_silos_that_differ_have_a_line_each_and_the_worst_is_the_headline() -> None:
    cost = made(FixedRecords(3, (30, 60, 30, 90))).cost()
    assert [line.silos for line in cost.of("models")] == [(0, 2), (1,), (3,)]
    found = headline(cost.of("models"), 1e-5)
    assert found["epsilon"] == pytest.approx(epsilon_of(FixedSampled(30, 3, Z), ROUNDS), abs=2e-6)
    assert [entry["silos"] for entry in found["silos"]] == [[0, 2], [1], [3]]
    assert max(entry["epsilon"] for entry in found["silos"]) == found["epsilon"]


def test_every_silo_has_its_own_noise_and_its_own_delta() -> None:
    own = LocalNoise(Gaussian(1.0), (2.0, 4.0, 4.0, 8.0))
    cost = made(AllRecords((N,)), own).cost()
    assert [entries(cost, "messages", each)[0] for each in range(4)] == [GaussianNoise(z) for z in (2.0, 4.0, 4.0, 8.0)]
    deltas = (1e-3, 1e-5, 1e-6, 1e-4)
    found = headline(cost.of("models"), 1e-5, deltas)
    each = {tuple(entry["silos"]): entry for entry in found["silos"]}
    assert set(each) == {(0,), (1,), (2,), (3,)}
    for index, z in enumerate((2.0, 4.0, 4.0, 8.0)):
        exact = epsilon_of(GaussianNoise(z), ROUNDS, delta=deltas[index])
        assert each[(index,)]["delta"] == deltas[index]
        assert exact <= each[(index,)]["epsilon"] <= exact + 2e-6
    assert (found["epsilon"], found["delta"]) == (max(e["epsilon"] for e in each.values()), 1e-3)


def test_a_silo_without_a_guarantee_is_the_worst() -> None:
    cost = Cost("record", (*made(AllRecords((N,))).cost().lines, *made(AllRecords((N,)), NoNoise()).cost().lines))
    assert headline(cost.of("models"), 1e-5)["epsilon"] is None


def test_a_silo_is_billed_for_the_rounds_it_was_in() -> None:
    plan = made(AllRecords((N,)), clients=FIXED)
    cohorts = [np.array(pair) for pair in ([0, 1], [0, 2], [0, 1], [0, 2], [0, 1], [0, 1])]
    facts = facts_of_charges(plan, list(range(ROUNDS)), cohorts, Facts(1e-5, "simulation", 0))
    assert facts.per_client == (6, 4, 2, 0)
    cost = plan.cost(participation(plan, facts))
    assert [entries(cost, "messages", each)[1] for each in range(4)] == [6, 4, 2, 0]
    made_of = certificate(plan, facts)
    assert made_of["counts"]["participations_per_silo"] == [6, 4, 2, 0]
    assert [entry["epsilon"] for entry in made_of["adversaries"][0]["silos"]][-1] == 0.0
    assert set(ceilings(plan, facts)) == set(ADVERSARIES)


def test_a_run_that_was_cut_is_billed_as_planned_for_every_silo() -> None:
    plan = made(FixedRecords(3, (N,)), clients=FIXED)
    facts = facts_of_charges(plan, [0], [np.array([0, 1])], Facts(1e-5, "simulation", 0))
    cost = plan.cost(participation(plan, facts))
    read, by_coin = FixedSampled(N, 3, Z), PubliclySampled(0.5, FixedSampled(N, 3, Z))
    for each in range(4):
        drawn = ((read, 1),) if each < 2 else ()
        assert cost.line("messages", each).entries == (*drawn, (by_coin, ROUNDS))
    whole = made(FixedRecords(3, (N,)))
    cut = facts_of_charges(whole, [0, 1], [], Facts(1e-5, "simulation", 0))
    assert entries(whole.cost(participation(whole, cut)))[1] == ROUNDS


@pytest.mark.parametrize("again", [0, 1, 5])
def test_a_public_cohort_that_ran_again_pays_though_the_run_was_cut(again: int) -> None:
    """Ten rounds planned, each client in two; round 1 ran again `again` times and the run stopped after it."""
    turns = client_plan(rounds=10, clients=RoundRobin(10, 2))
    facts = facts_of_charges(turns, [0] * (1 + again), [], Facts(1e-5, "simulation", 0))
    assert participation(turns, facts).max_participations == 2 + again


def test_a_hidden_cohort_is_never_counted() -> None:
    plan = made(FixedRecords(3, (N,)), CentralNoise(Gaussian(2.0)), FIXED)
    facts = facts_of_charges(plan, list(range(ROUNDS)), [], Facts(1e-5, "simulation", 0))
    assert (facts.max_participations, facts.per_client) == (None, ())
    assert "participations_per_silo" not in certificate(plan, facts)["counts"]


# ---- calibration -----------------------------------------------------------------------------------------------------


SIXTY = (30, 60, 60)


@pytest.mark.parametrize("reads", [AllRecords(SIXTY), FixedRecords(5, SIXTY), OnePass(5, SIXTY)], ids=lambda r: r.kind)
def test_every_silo_spends_its_own_budget_and_hardly_less(reads: RecordSampler) -> None:
    base = noisy_minibatch_sgd(
        rounds=5, clients=Everyone(3), records=reads, clip_norm=1.0, noise_multiplier=1.0, lr=0.1
    )
    asked = [Budget(1.0, 1e-4), Budget(2.0, 1e-5), Budget(1.0, 1e-5)]
    cost = calibrate_silos(base, asked).cost()
    for index, budget in enumerate(asked):
        event, count = entries(cost, "messages", index)
        assert 0.99 * budget.epsilon <= epsilon_of(event, count, delta=budget.delta) <= budget.epsilon


def test_local_sgd_and_the_silo_recipe_meet_their_budgets_too() -> None:
    reads = FixedRecords(3, (30, 60))
    local = noisy_local_sgd(
        rounds=3, clients=Everyone(2), records=reads, clip_norm=1.0, noise_multiplier=1.0, lr=0.1, steps=2
    )
    ready = silo(sizes=(30, 60), epsilons=(1.0, 3.0), rounds=4)
    for plan, asked in (
        (calibrate_silos(local, budgets((30, 60), (1.0, 3.0))), (1.0, 3.0)),
        (ready, (1.0, 3.0)),
    ):
        for index, (size, epsilon) in enumerate(zip((30, 60), asked, strict=True)):
            spent = epsilon_of(*entries(plan.cost(), "messages", index), delta=min(size**-1.1, 1e-3))
            assert 0.99 * epsilon <= spent <= epsilon


def test_one_multiplier_for_all_is_solved_for_the_silo_that_pays_most() -> None:
    plan = calibrate(made(FixedRecords(3, (90, 30, 60, 60))), epsilon=1.0, delta=1e-5)
    assert 0.99 <= headline(plan.cost().of("models"), 1e-5)["epsilon"] <= 1.0


def test_rounds_are_solved_for_the_silo_that_pays_most() -> None:
    own = LocalNoise(Gaussian(1.0), (9.0, 60.0, 30.0, 45.0))
    plan = calibrate(made(AllRecords((90, 30, 60, 60)), own), epsilon=2.0, delta=1e-5, free="rounds")
    assert headline(plan.cost().of("models"), 1e-5)["epsilon"] <= 2.0
    clients = client_plan(clients=Everyone(3), release=LocalNoise(Gaussian(1.0), (60.0, 9.0, 30.0)))
    found = calibrate(clients, epsilon=2.0, delta=1e-5, free="rounds")
    assert headline(found.cost().of("models"), 1e-5)["epsilon"] <= 2.0


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_of_nothing_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigError, match="epsilon above 0"):
        silo(sizes=(30, 60), epsilons=(1.0, epsilon))


def test_budgets_that_do_not_fit_the_silos_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 epsilons for 3 silos"):
        silo(sizes=(30, 60, 90), epsilons=(1.0, 2.0))
    with pytest.raises(ConfigError, match="2 deltas for 3 silos"):
        silo(sizes=(30, 60, 90), epsilons=(1.0,), deltas=(1e-5, 1e-5))
    with pytest.raises(PlanError, match="2 budgets for 4 silos"):
        calibrate_silos(made(AllRecords((N,))), [Budget(1.0, 1e-5)] * 2)


def test_multipliers_of_the_silos_own_are_refused_where_somebody_else_adds_the_noise() -> None:
    """No other release has a place for them, so none can be said to have noise that it does not add."""
    silos = {"rounds": 2, "clients": {"kind": "everyone", "population": 2}, "clip_norm": 1.0, "lr": 0.1}
    usual = {**silos, "name": "noisy_minibatch_sgd", "records": {"kind": "all_records", "sizes": [30]}}
    own = {"mechanism": {"kind": "gaussian", "noise_multiplier": 1.0}, "noise_multipliers": [1.0, 2.0]}
    assert from_recipe({**usual, "release": {**own, "kind": "local_noise"}}).release.event() == Gaussian(1.0).event()
    for kind in ("central_noise", "noise_shares", "shuffled_noise"):
        with pytest.raises(ConfigError, match=r"recipe\.release\.(mechanism|noise_multipliers)"):
            from_recipe({**usual, "release": {**own, "kind": kind}})


def test_delta_is_small_against_the_records_of_a_silo() -> None:
    plan, task = planned(local=BatchGradient(AllRecords(SIZES), 1.0)), silos()
    assert plan.units == max(SIZES)
    found = train(plan, task).certificate["adversaries"][-1]
    assert {entry["delta"] for entry in found["silos"]} == {1e-3} == {found["delta"]}  # few records: size^-1.1 is more
    large = planned(local=BatchGradient(FixedRecords(2, (600, 6000, 9)), 1.0))
    assert silo_deltas(large) == (600**-1.1, 6000**-1.1, 1e-3)
    assert train(plan, task, delta=1e-4).certificate["delta"] == 1e-4
    with pytest.raises(ConfigError, match=r"population\^-1.1"):
        train(plan, task, delta=0.5)
