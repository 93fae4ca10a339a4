"""Promises of correlated noise: one event for a whole run, by the sampler; refused where nothing keeps rounds apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from sordino.accounting.accountant import default_delta, epsilon
from sordino.accounting.calibration import calibrate
from sordino.accounting.composition import Participation
from sordino.accounting.events import Event, GaussianNoise, PoissonSampled, Relation
from sordino.audit.trial_rounds import RecordingEngine
from sordino.errors import PlanError
from sordino.loop import run
from sordino.parts.correlated_noise import CorrelatedNoise, noise_of_models
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise
from sordino.parts.samplers import CyclicPoisson, Everyone, FixedSize, MinSeparation, Poisson, RoundRobin, Sampler
from sordino.parts.schedules import Decay
from sordino.parts.server_optimizers import Adam, Sgd
from sordino.parts.strategies import Banded, BandedSquareRoot, BufferedToeplitz, Identity, Strategy, Tree
from sordino.plan import Plan, State
from sordino.recipes.best import best, forecasts
from sordino.rng import Seeded
from sordino.task import Task

STRATEGIES = [Identity(), BandedSquareRoot(4), Banded(4), BufferedToeplitz(2), Tree()]


def plan(strategy: Strategy, clients: Sampler | None = None, rounds: int = 20, noise_multiplier: float = 2.0) -> Plan:
    return Plan(
        rounds=rounds,
        clients=clients or RoundRobin(40, 10),
        local=LocalSgd(0.1, epochs=1),
        encode=(Clip(1.0),),
        release=CorrelatedNoise(Gaussian(noise_multiplier), strategy),
        server=Sgd(),
    ).fitted()


def entries(made: Plan, who: str = "models") -> tuple[tuple[object, int], ...]:
    return made.cost().line(who).entries  # type: ignore[arg-type]


def test_the_whole_run_is_one_event_of_the_sensitivity() -> None:
    ((event, count),) = entries(plan(BandedSquareRoot(4)))
    squares = 1 + 0.5**2 + 0.375**2 + 0.3125**2
    assert count == 1
    assert isinstance(event, GaussianNoise)
    assert event.noise_multiplier == pytest.approx(
        2 / math.sqrt(5 * squares)
    )  # five turns, four rounds apart, four bands


def test_identity_costs_what_independent_noise_costs() -> None:
    ((event, count),) = entries(plan(Identity()))
    independent = replace(plan(Identity()), release=CentralNoise(Gaussian(2.0)))
    ((each, times),) = entries(independent)
    assert isinstance(event, GaussianNoise)
    assert isinstance(each, GaussianNoise)
    assert (count, times) == (1, 5)
    assert event.noise_multiplier == pytest.approx(each.noise_multiplier / math.sqrt(times))


def test_more_bands_than_rounds_between_turns_cost_more() -> None:
    narrow, wide = (entries(plan(BandedSquareRoot(bands)))[0][0] for bands in (4, 12))
    assert isinstance(narrow, GaussianNoise)
    assert isinstance(wide, GaussianNoise)
    assert wide.noise_multiplier < narrow.noise_multiplier


@pytest.mark.parametrize("clients", [Poisson(40, 0.25), FixedSize(40, 10)])
def test_a_sampler_that_keeps_nobody_apart_is_refused(clients: Sampler) -> None:
    with pytest.raises(PlanError, match="any two rounds"):
        plan(BandedSquareRoot(4), clients)


def test_turns_are_amplified_where_the_bands_fit_between_them() -> None:
    ((event, count),) = entries(plan(BandedSquareRoot(4), CyclicPoisson(40, 4, 0.5)))
    assert count == 5
    assert isinstance(event, PoissonSampled)
    assert event.rate == 0.5
    with pytest.raises(PlanError, match="bands"):
        plan(BandedSquareRoot(5), CyclicPoisson(40, 4, 0.5))
    with pytest.raises(PlanError, match="bands"):
        plan(BufferedToeplitz(2), CyclicPoisson(40, 4, 0.5))


def test_everyone_comes_every_round() -> None:
    ((event, _),) = entries(plan(BandedSquareRoot(4), Everyone(10)))
    column = np.array([1.0, 0.5, 0.375, 0.3125])
    total = np.convolve(np.ones(20), column)[:20]
    assert isinstance(event, GaussianNoise)
    assert event.noise_multiplier == pytest.approx(2 / np.linalg.norm(total))


def test_a_run_that_ended_early_costs_less() -> None:
    made = plan(BandedSquareRoot(4))
    short = made.cost(Participation(releases=8, max_participations=2)).line("models").entries[0][0]
    whole = entries(made)[0][0]
    assert isinstance(short, GaussianNoise)
    assert isinstance(whole, GaussianNoise)
    assert short.noise_multiplier == pytest.approx(whole.noise_multiplier * math.sqrt(5 / 2))


def test_the_plan_writes_the_coefficients_down() -> None:
    made = plan(Banded(4))
    assert isinstance(made.release, CorrelatedNoise)
    assert isinstance(made.release.strategy, Banded)
    assert len(made.release.strategy.coefficients) == 4
    assert replace(made, rounds=20).hash == made.hash
    assert plan(Banded(4), rounds=21).release != made.release  # another run, other bands


def test_a_plan_that_is_not_fitted_has_no_cost_and_does_not_run() -> None:
    for strategy in (Banded(4), BufferedToeplitz(2)):
        bare = replace(plan(Identity()), release=CorrelatedNoise(Gaussian(2.0), strategy))
        assert bare.release == CorrelatedNoise(Gaussian(2.0), strategy)  # building a plan changes nothing in it
        with pytest.raises(PlanError, match=r"not fitted to 20 rounds.*fix: plan = plan.fitted\(\)"):
            bare.cost()
        with pytest.raises(PlanError, match=r"fix: plan = plan.fitted\(\)"):
            list(run(bare, still(40, 50)))
        fitted = bare.fitted()
        assert fitted.fitted() is fitted
        assert fitted.cost() == plan(strategy).cost()
    longer = replace(plan(Banded(4)), rounds=30)
    with pytest.raises(PlanError, match="not fitted to 30 rounds"):
        longer.cost()
    assert longer.fitted().cost().lines


def test_what_the_server_makes_of_a_round_is_in_the_bands() -> None:
    plain = plan(Banded(4))
    for server in (Sgd(momentum=0.9), Sgd(lr=Decay(1.0, 0.8))):
        other = replace(plain, release=CorrelatedNoise(Gaussian(2.0), Banded(4)), server=server).fitted()
        assert other.release != plain.release
    assert (
        replace(plain, release=CorrelatedNoise(Gaussian(2.0), Banded(4)), server=Adam()).fitted().release
        == plain.release
    )


@pytest.mark.parametrize(
    "server",
    [
        Sgd(),
        Sgd(momentum=0.5),
        Sgd(weight_decay=0.2),
        Sgd(momentum=0.5, weight_decay=0.2),
        Sgd(lr=Decay(1.0, 0.9), momentum=0.3),
        Sgd(lr=Decay(1.0, 0.9), momentum=0.3, weight_decay=0.2),
    ],
)
def test_a_workload_is_what_the_server_does(server: Sgd) -> None:
    rounds = 8
    memory, rows = server.init(torch.zeros(rounds, dtype=torch.float64)), []
    for t in range(rounds):
        memory = server.step(memory, torch.eye(rounds, dtype=torch.float64)[t], t)
        rows.append(-memory["params"].numpy())
    found = server.workload(rounds)
    if found.ndim == 1:
        from sordino.accounting.sensitivity import dense

        found = dense(found, rounds)
    assert np.allclose(np.stack(rows), found)


def test_calibration_finds_the_multiplier() -> None:
    made = calibrate(plan(Banded(4), noise_multiplier=1.0), epsilon=1.0, delta=1e-5)
    line = made.cost().line("models")
    assert epsilon(line.entries, line.relation, 1e-5).value == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("server", [Sgd(), Sgd(lr=Decay(1.0, 0.9), momentum=0.3)])
@pytest.mark.parametrize("strategy", [BandedSquareRoot(4), Tree()])
def test_the_forecast_of_noise_is_that_of_the_matrix(strategy: Strategy, server: Sgd) -> None:
    from sordino.accounting.sensitivity import dense

    work = server.workload(20)
    whole = work if work.ndim == 2 else dense(work, 20)
    known = 2.0 * np.sqrt(np.mean(np.sum((whole @ strategy.noise_matrix(20)) ** 2, axis=1)))
    assert noise_of_models(CorrelatedNoise(Gaussian(2.0), strategy), work) == pytest.approx(known)


@pytest.mark.parametrize("clients", [RoundRobin(40, 10), CyclicPoisson(40, 4, 0.5), Everyone(10)])
def test_independent_noise_beside_it_has_the_same_price(clients: Sampler) -> None:
    made = plan(BandedSquareRoot(4), clients)
    assert isinstance(made.release, CorrelatedNoise)
    release = made.release.independent(clients, made.patterns)
    assert release is not None
    alone = replace(made, release=release)
    lines = [one.cost().line("models") for one in (made, alone)]
    spent = [epsilon(line.entries, line.relation, 1e-5).value for line in lines]
    assert spent[0] == pytest.approx(spent[1], rel=1e-3)


def test_best_takes_the_least_noise_and_stays_as_it_was_unless_asked() -> None:
    same: dict[str, Any] = {"population": 60, "epsilon": 2.0, "rounds": 20, "rate": 0.1}
    found = forecasts(**same)
    assert [one.noise for one in found] == sorted(one.noise for one in found)
    assert len({one.name for one in found}) == len(found) >= 3
    assert best(**same, correlate=True).hash == found[0].plan.hash
    assert best(**same) == next(one.plan for one in found if "Poisson" in one.name)
    for one in found:
        line = one.plan.cost().line("models")
        assert epsilon(line.entries, line.relation, default_delta(60)).value == pytest.approx(2.0, rel=2e-2)


# ---- samplers --------------------------------------------------------------------------------------------------------


def test_whoever_was_drawn_rests() -> None:
    sampler = MinSeparation(60, 7, 8, seed=3)
    last: dict[int, int] = {}
    counts = np.zeros(60)
    for t in range(200):
        for client in sampler.draw(t, np.random.default_rng(t)):
            assert t - last.get(int(client), -100) >= 8
            last[int(client)] = t
            counts[client] += 1
    assert np.array_equal(counts, sampler.participations(200))
    assert sampler.max_participations(200) == counts.max()
    assert len(set(counts)) > 1  # random, not in turn


def test_cohorts_that_cannot_rest_are_refused() -> None:
    with pytest.raises(PlanError, match="rest"):
        MinSeparation(60, 10, 7)


def test_turns_take_one_group_at_a_time() -> None:
    sampler, rng = CyclicPoisson(41, 4, 0.5), np.random.default_rng(0)
    sizes = []
    for t in range(400):
        drawn = sampler.draw(t, rng)
        assert set(drawn % 4) <= {t % 4}
        sizes.append(len(drawn))
    assert np.mean(sizes) == pytest.approx(sampler.expected, rel=0.05)


# ---- runs ------------------------------------------------------------------------------------------------------------


def still(clients: int, dimension: int) -> Task:
    """A task without slopes: every message is zero, so models hold noise alone."""
    layer = nn.Linear(dimension, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return Task.of(layer, [(torch.zeros(1, dimension), torch.zeros(1, 1))] * clients, loss="mse")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_models_of_a_run_have_the_noise_that_the_strategy_says(strategy: Strategy) -> None:
    made, dimension = plan(strategy), 20_000
    models = [done.state.memory["params"].numpy() for done in run(made, still(40, dimension), streams=Seeded(1))]
    assert isinstance(made.release, CorrelatedNoise)
    known = made.release.strategy.errors(20) * (2.0 / 10) ** 2
    found = np.stack([model.astype(np.float64).var() for model in models])
    assert np.allclose(found, known, rtol=0.06)


def test_a_run_that_goes_on_from_its_state_is_the_same_run() -> None:
    made, task = plan(Banded(4)), still(40, 50)
    whole = [done.state for done in run(made, task, streams=Seeded(2))]
    part = [done.state for done in run(made, task, streams=Seeded(2), state=_kept(made, task, 9))]
    assert torch.equal(whole[-1].memory["params"], part[-1].memory["params"])


@dataclass(frozen=True)
class Hasty(Sampler, kind="hasty"):
    """Says that a client rests five rounds, and draws it again after two."""

    population: int
    relation: ClassVar[Relation] = "zero_out"
    random: ClassVar[bool] = False

    @property
    def expected(self) -> float:
        return 2.0

    def draw(self, t: int, rng: np.random.Generator) -> np.ndarray:
        return np.array([0, 1 + t % (self.population - 1)]) if t % 2 == 0 else np.array([1 + t % (self.population - 1)])

    def amplify(self, event: Event) -> Event:
        return event

    def max_participations(self, rounds: int) -> int:
        return -(-rounds // 5)

    @property
    def min_separation(self) -> int | None:
        return 5


class Early(CyclicPoisson, kind="early"):
    """CyclicPoisson that take everybody in every round."""

    def draw(self, t: int, rng: np.random.Generator) -> np.ndarray:
        return np.arange(self.population, dtype=np.int64)


def cohorts(made: Plan, task: Task, state: State | None = None) -> list[tuple[int, ...]]:
    """Who was asked for anything, round by round."""
    engine = RecordingEngine()
    list(run(made, task, engine=engine, streams=Seeded(2), state=state))
    return [tuple(job.cohort.tolist()) for job, _ in engine.seen]


@pytest.mark.parametrize("begun", [0, 7])
def test_whoever_comes_too_early_is_left_out_before_anything_is_computed(begun: int) -> None:
    """Also where the run was resumed: the rounds before count."""
    made, task = plan(BandedSquareRoot(4), Hasty(40)), still(40, 5)
    state = _kept(made, task, begun) if begun else None
    met: dict[int, list[int]] = {}
    for t, cohort in enumerate(cohorts(made, task)[:begun] + cohorts(made, task, state)):
        for client in cohort:
            met.setdefault(client, []).append(t)
    assert met[0] == [0, 6, 12, 18]  # drawn in every second round
    assert all(np.diff(rounds).min(initial=99) >= 5 for rounds in met.values())
    assert max(map(len, met.values())) <= made.clients.max_participations(20)


def test_independent_noise_has_nobody_rest() -> None:
    made, task = replace(plan(Identity(), Hasty(40)), release=CentralNoise(Gaussian(2.0))), still(40, 5)
    assert sum(0 in cohort for cohort in cohorts(made, task)) == 10


def test_who_is_not_of_the_group_is_left_out() -> None:
    made, task = plan(BandedSquareRoot(4), Early(40, 4, 0.5)), still(40, 5)
    for t, cohort in enumerate(cohorts(made, task)):
        assert {client % 4 for client in cohort} == {t % 4}


def _kept(made: Plan, task: Task, rounds: int) -> State:
    import copy

    for done in run(made, task, streams=Seeded(2)):
        if done.state.t == rounds:
            return copy.deepcopy(done.state)
    raise AssertionError
