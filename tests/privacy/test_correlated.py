"""Promises of correlated noise: one event for a whole run, by the sampler; refused where nothing keeps rounds apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sordino.data.task import Task
from sordino.errors import PlanError
from sordino.parts.correlated import CorrelatedNoise
from sordino.parts.encode import Clip
from sordino.parts.events import GaussianNoise, PoissonSampled
from sordino.parts.local import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.release import CentralNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin, Sampler, Separated, Turns
from sordino.parts.schedules import Decay
from sordino.parts.server import Adam, Sgd
from sordino.parts.strategies import Banded, BandedSquareRoot, BufferedToeplitz, Identity, Strategy, Tree
from sordino.plan import Plan, State
from sordino.privacy.bill import Participation
from sordino.privacy.calibrated import calibrated
from sordino.rng import Seeded
from sordino.run import run

STRATEGIES = [Identity(), BandedSquareRoot(4), Banded(4), BufferedToeplitz(2), Tree()]


def plan(strategy: Strategy, clients: Sampler | None = None, rounds: int = 20, multiplier: float = 2.0) -> Plan:
    return Plan(
        rounds=rounds,
        clients=clients or RoundRobin(40, 10),
        local=LocalSgd(0.1, epochs=1),
        encode=(Clip(1.0),),
        release=CorrelatedNoise(Gaussian(multiplier), strategy),
        server=Sgd(),
    )


def entries(made: Plan, who: str = "models") -> tuple[tuple[object, int], ...]:
    return made.bill().line(who).entries  # type: ignore[arg-type]


def test_the_whole_run_is_one_event_of_the_sensitivity() -> None:
    ((event, count),) = entries(plan(BandedSquareRoot(4)))
    squares = 1 + 0.5**2 + 0.375**2 + 0.3125**2
    assert count == 1
    assert isinstance(event, GaussianNoise)
    assert event.multiplier == pytest.approx(2 / math.sqrt(5 * squares))  # five turns, four rounds apart, four bands


def test_identity_costs_what_independent_noise_costs() -> None:
    ((event, count),) = entries(plan(Identity()))
    independent = replace(plan(Identity()), release=CentralNoise(Gaussian(2.0)))
    ((each, times),) = entries(independent)
    assert isinstance(event, GaussianNoise)
    assert isinstance(each, GaussianNoise)
    assert (count, times) == (1, 5)
    assert event.multiplier == pytest.approx(each.multiplier / math.sqrt(times))


def test_more_bands_than_rounds_between_turns_cost_more() -> None:
    narrow, wide = (entries(plan(BandedSquareRoot(bands)))[0][0] for bands in (4, 12))
    assert isinstance(narrow, GaussianNoise)
    assert isinstance(wide, GaussianNoise)
    assert wide.multiplier < narrow.multiplier


@pytest.mark.parametrize("clients", [Poisson(40, 0.25), FixedSize(40, 10)])
def test_a_sampler_that_keeps_nobody_apart_is_refused(clients: Sampler) -> None:
    with pytest.raises(PlanError, match="any two rounds"):
        plan(BandedSquareRoot(4), clients)


def test_turns_are_amplified_where_the_bands_fit_between_them() -> None:
    ((event, count),) = entries(plan(BandedSquareRoot(4), Turns(40, 4, 0.5)))
    assert count == 5
    assert isinstance(event, PoissonSampled)
    assert event.rate == 0.5
    with pytest.raises(PlanError, match="bands"):
        plan(BandedSquareRoot(5), Turns(40, 4, 0.5))
    with pytest.raises(PlanError, match="bands"):
        plan(BufferedToeplitz(2), Turns(40, 4, 0.5))


def test_everyone_comes_every_round() -> None:
    ((event, _),) = entries(plan(BandedSquareRoot(4), Everyone(10)))
    column = np.array([1.0, 0.5, 0.375, 0.3125])
    total = np.convolve(np.ones(20), column)[:20]
    assert isinstance(event, GaussianNoise)
    assert event.multiplier == pytest.approx(2 / np.linalg.norm(total))


def test_a_run_that_ended_early_costs_less() -> None:
    made = plan(BandedSquareRoot(4))
    short = made.bill(Participation(releases=8, most=2)).line("models").entries[0][0]
    whole = entries(made)[0][0]
    assert isinstance(short, GaussianNoise)
    assert isinstance(whole, GaussianNoise)
    assert short.multiplier == pytest.approx(whole.multiplier * math.sqrt(5 / 2))


def test_the_plan_writes_the_coefficients_down() -> None:
    made = plan(Banded(4))
    assert isinstance(made.release, CorrelatedNoise)
    assert isinstance(made.release.strategy, Banded)
    assert len(made.release.strategy.coefficients) == 4
    assert replace(made, rounds=20).hash == made.hash
    assert plan(Banded(4), rounds=21).release != made.release  # another run, other bands


def test_what_the_server_makes_of_a_round_is_in_the_bands() -> None:
    plain = plan(Banded(4))
    for server in (Sgd(momentum=0.9), Sgd(lr=Decay(1.0, 0.8))):
        other = replace(plain, release=CorrelatedNoise(Gaussian(2.0), Banded(4)), server=server)
        assert other.release != plain.release
    assert replace(plain, release=CorrelatedNoise(Gaussian(2.0), Banded(4)), server=Adam()).release == plain.release


@pytest.mark.parametrize("server", [Sgd(), Sgd(momentum=0.5), Sgd(lr=Decay(1.0, 0.9), momentum=0.3)])
def test_a_workload_is_what_the_server_does(server: Sgd) -> None:
    rounds = 8
    memory, rows = server.init(torch.zeros(rounds, dtype=torch.float64)), []
    for t in range(rounds):
        memory = server.step(memory, torch.eye(rounds, dtype=torch.float64)[t], t)
        rows.append(-memory["params"].numpy())
    found = server.workload(rounds)
    if found.ndim == 1:
        from sordino.matrix.toeplitz import dense

        found = dense(found, rounds)
    assert np.allclose(np.stack(rows), found)


def test_calibration_finds_the_multiplier() -> None:
    made = calibrated(plan(Banded(4), multiplier=1.0), epsilon=1.0, delta=1e-5)
    from sordino.privacy.accounting import epsilon

    line = made.bill().line("models")
    assert epsilon(line.entries, line.relation, 1e-5).value == pytest.approx(1.0, rel=1e-2)


# ---- samplers --------------------------------------------------------------------------------------------------------


def test_whoever_was_drawn_rests() -> None:
    sampler = Separated(60, 7, 8, seed=3)
    last: dict[int, int] = {}
    counts = np.zeros(60)
    for t in range(200):
        for client in sampler.draw(t, np.random.default_rng(t)):
            assert t - last.get(int(client), -100) >= 8
            last[int(client)] = t
            counts[client] += 1
    assert np.array_equal(counts, sampler.turns(200))
    assert sampler.most(200) == counts.max()
    assert len(set(counts)) > 1  # random, not in turn


def test_cohorts_that_cannot_rest_are_refused() -> None:
    with pytest.raises(PlanError, match="rest"):
        Separated(60, 10, 7)


def test_turns_take_one_group_at_a_time() -> None:
    sampler, rng = Turns(41, 4, 0.5), np.random.default_rng(0)
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


def _kept(made: Plan, task: Task, rounds: int) -> State:
    import copy

    for done in run(made, task, streams=Seeded(2)):
        if done.state.t == rounds:
            return copy.deepcopy(done.state)
    raise AssertionError
