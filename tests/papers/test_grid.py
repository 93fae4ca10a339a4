"""Promises of a grid: each of its runs is, to rounding, the run alone; what it cannot do it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.silos import SIZES, planned, silos
from tests.tiny import clients, final, mlp, task
from tests.tiny import plan as client_plan
from torch import nn

from sordino.errors import DataError, PlanError
from sordino.parts.encoding import Adaptive, Clip, LaplacianSmoothing
from sordino.parts.gradients import Blur, Bounded, Moreau, Plain, Sam
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.record_samplers import AllRecords, FixedRecords, OnePass, PoissonRecords, subsets
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, NoNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin
from sordino.parts.schedules import Decay
from sordino.parts.server_optimizers import Accelerated, Adam, Average, Sgd
from sordino.parts.sparsify import PublicMask, RandomMask
from sordino.plan import Plan
from sordino.task import Task
from sordino_papers.grid import run_grid

CLIENT = {"clients": Everyone(3), "rounds": 3}


def matches(plans: list[Plan], data: Task, seeds: list[int] | None = None) -> None:
    """Every row of the grid is the run of its plan and seed."""
    seeds = seeds or list(range(len(plans)))
    found = run_grid(plans, data, seeds)
    assert found.shape == (len(plans), data.layout.size)
    for row, plan, seed in zip(found, plans, seeds, strict=True):
        assert torch.allclose(row, final(plan, data, seed=seed), atol=1e-5)


@pytest.mark.parametrize("reads", [AllRecords(SIZES), FixedRecords(2, SIZES), PoissonRecords(2.0, SIZES)], ids=str)
def test_silos_with_other_steps_noises_and_seeds(reads: Any) -> None:
    base = planned(local=BatchGradient(reads, 0.7))
    plans = [replace(base, server=Sgd(lr=lr), release=LocalNoise(Gaussian(z))) for lr in (0.1, 1.0) for z in (0.5, 2.0)]
    matches([*plans, plans[0]], silos(), [3, 3, 4, 5, 6])


@pytest.mark.parametrize(("loss", "outputs"), [("mse", 1), ("absolute", 1), ("hinge", 1), ("logistic", 1)])
def test_every_loss_and_its_envelope(loss: str, outputs: int) -> None:
    matches([planned(), planned(server=Sgd(lr=0.1))], silos(loss, outputs))
    if loss in ("absolute", "hinge"):
        smooth = BatchGradient(AllRecords(SIZES), 0.7, gradient=Moreau(1.0))
        matches([planned(local=smooth), planned(local=smooth, server=Sgd(lr=0.1))], silos(loss, outputs))


@pytest.mark.parametrize("reads", [AllRecords(SIZES), FixedRecords(2, SIZES)], ids=str)
def test_radii_of_records_may_differ(reads: Any) -> None:
    plans = [
        planned(local=BatchGradient(reads, r), server=Sgd(lr=lr))
        for r in (0.3, 1.0, Decay(2.0, 0.5))
        for lr in (0.1, 1)
    ]
    matches(plans, silos())


@pytest.mark.parametrize("gradient", [Plain(), Blur(0.5), Sam(0.1)], ids=str)
@pytest.mark.parametrize("project", [False, True])
def test_radii_of_clips_may_differ_whether_the_steps_look_at_them_or_not(gradient: Any, project: bool) -> None:
    local = LocalSgd(lr=0.5, epochs=2, gradient=gradient, project=project)
    plans = [client_plan(**CLIENT, local=local, encode=(Clip(r),)) for r in (0.05, 0.5, Decay(1.0, 0.5))]
    matches(plans, silos())


def test_a_server_of_a_stranger_is_not_taken_for_ours() -> None:
    """It inherits from Sgd and steps by the whole vector: rows of many runs must not meet in it."""

    @dataclass(frozen=True)
    class Longest(Sgd, kind="longest_for_a_test"):
        def step(self, memory: dict[str, Any], mean: Any, t: int) -> dict[str, Any]:
            return {"params": memory["params"] - mean / (1 + mean.abs().sum())}

    assert not Longest().by_coordinate
    matches([planned(server=Longest()), planned(server=Longest(), release=LocalNoise(Gaussian(0.5)))], silos())


def test_one_pass_reads_the_same_blocks() -> None:
    matches([planned(rounds=2, local=BatchGradient(OnePass(2, SIZES), 1.0))] * 2, silos())


def test_noise_of_local_steps_may_differ_in_size_and_step() -> None:
    plans = [
        planned(local=NoisyLocalSgd(FixedRecords(2, SIZES), 1.0, z, lr, 3, own), release=Forward(), server=Sgd())
        for z, lr, own in ((0.5, 0.1, ()), (2.0, 0.1, (1.0, 2.0, 3.0)), (1.0, Decay(0.3, 0.5), ()))
    ]
    matches(plans, silos())


@pytest.mark.parametrize(
    "local",
    [
        LocalSgd(lr=0.1, epochs=2, batch=2),
        LocalSgd(lr=0.1, steps=3, momentum=0.5, weight_decay=0.1),
        LocalSgd(lr=0.1, epochs=1, gradient=Sam(0.1)),
        LocalSgd(lr=0.1, steps=2, gradient=Bounded(0.3)),
        LocalSgd(lr=0.5, epochs=2, project=True),
    ],
    ids=str,
)
def test_client_level_solvers(local: LocalSgd) -> None:
    plans = [client_plan(**CLIENT, local=replace(local, lr=lr)) for lr in (local.lr, 0.3, local.lr)]
    matches(plans, silos())


@pytest.mark.parametrize("clients", [FixedSize(3, 2), Poisson(3, 0.4), RoundRobin(3, 1)], ids=str)
def test_every_run_draws_its_own_cohorts(clients: Any) -> None:
    matches([planned(clients=clients)] * 3, silos())
    matches([client_plan(rounds=3, clients=clients)] * 3, silos())
    matches([planned(), planned(clients=clients)], silos())  # and may have a sampler of its own


@pytest.mark.parametrize(
    "server",
    [
        Sgd(lr=0.3, momentum=0.5, ball=1.0),
        Sgd(lr=Decay(0.3, 0.5), average=Average(growth=1.5)),
        Adam(lr=0.1),
        Accelerated(v=2.0, mu=0.5),
        Accelerated(v=2.0, ball=0.5),
    ],
    ids=str,
)
def test_every_server(server: Any) -> None:
    matches([planned(server=server), planned(server=Sgd()), planned(server=server)], silos())


@pytest.mark.parametrize(
    "release",
    [CentralNoise(Gaussian(1.0)), NoiseShares(1.0, 2), LocalNoise(Gaussian(1.0), (1.0, 2.0, 3.0)), NoNoise()],
    ids=str,
)
def test_every_release(release: Any) -> None:
    matches([planned(release=release), planned(release=release)], silos())


def test_encode_steps_schedules_and_postprocessing() -> None:
    smooth = (LaplacianSmoothing(1.0),)
    matches([client_plan(**CLIENT, encode=(Clip(Decay(1.0, 0.5)),), postprocess=p) for p in ((), smooth)], silos())
    matches([client_plan(**CLIENT, encode=(Clip(Adaptive(0.3)),))] * 2, silos())
    laplace = client_plan(**CLIENT, encode=(Clip(0.5, norm=1),), release=LocalNoise(Laplace(1.0)))
    matches([laplace, laplace], silos())


def test_rounds_that_are_void_move_nothing() -> None:
    matches([planned(clients=Poisson(3, 0.4), release=NoiseShares(1.0, 1))] * 4, silos())


def test_a_grid_that_does_not_fit_in_memory_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [planned(server=Sgd(lr=lr)) for lr in (0.1, 0.2, 0.3)]
    whole = run_grid(plans, silos(), [0, 1, 2])
    monkeypatch.setattr("sordino_papers.grid.GATHERED", 1)
    assert torch.allclose(run_grid(plans, silos(), [0, 1, 2]), whole, atol=1e-6)


def test_no_plans_are_no_rows() -> None:
    assert run_grid([], silos(), []).shape == (0, 15)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(plans: list[Plan], data: Task) -> str:
    with pytest.raises(PlanError) as caught:
        run_grid(plans, data, list(range(len(plans))))
    assert caught.value.rule == "grid"
    return str(caught.value)


def test_other_local_work_is_refused() -> None:
    base = planned()
    for other in (
        planned(rounds=2),
        planned(local=BatchGradient(FixedRecords(2, SIZES), 1.0, norm=1)),
        planned(local=BatchGradient(FixedRecords(3, SIZES), 1.0)),
        client_plan(**CLIENT),
    ):
        assert "different local work" in refused([base, other], silos())


def test_a_model_that_is_not_linear_is_refused() -> None:
    data = Task.of(mlp(), clients(SIZES))
    assert "not linear" in refused([planned()], data)
    smooth = planned(local=BatchGradient(FixedRecords(2, SIZES), 1.0, gradient=Moreau(1.0)))
    refused([smooth], silos("mse", 1))  # an envelope without a closed form


def test_masks_are_refused() -> None:
    masked = client_plan(**CLIENT, encode=(PublicMask(0.5, RandomMask()), Clip(1.0)))
    assert "look at the model" in refused([masked], silos())


def test_a_plan_for_another_population_is_refused_wherever_it_stands() -> None:
    reads = AllRecords((6,))
    few, many = (planned(clients=Everyone(n), local=BatchGradient(reads, 1.0)) for n in (2, 3))
    refused([many, few], silos(sizes=(6, 6, 6)))


def test_data_that_a_run_would_refuse_is_refused() -> None:
    with pytest.raises(DataError):
        run_grid([planned()], silos(sizes=(6, 4, 8)), [0])
    with pytest.raises(PlanError):
        run_grid(
            [client_plan(local=LocalSgd(lr=0.1, epochs=1))], task(model=nn.Sequential(nn.Linear(4, 3), nn.ReLU())), [0]
        )


def test_as_many_seeds_as_plans_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        run_grid([planned()] * 2, silos(), [0])


# ---- batches drawn together ------------------------------------------------------------------------------------------


def test_batches_drawn_together_are_sets_and_all_equally_likely() -> None:
    sizes = np.array([5] * 40_000)
    picks = subsets([sizes], 3, [np.random.default_rng(0)])
    assert picks.shape == (40_000, 3)
    assert all(len(set(row)) == 3 for row in picks[:2000].tolist())
    found = np.unique(np.sort(picks, axis=1), axis=0, return_counts=True)[1]
    assert len(found) == 10  # 5 choose 3
    assert float(((found - 4000) ** 2 / 4000).sum()) < 27.9, "chi-square with 9 degrees of freedom, at 0.001"


def test_batches_drawn_together_keep_to_the_sizes_and_coins_of_their_own() -> None:
    sizes = [np.array([3, 9, 4]), np.array([7])]
    picks = subsets(sizes, 3, [np.random.default_rng(k) for k in (1, 2)])
    assert np.all(picks < np.array([[3], [9], [4], [7]]))
    assert np.all(picks >= 0)
    assert sorted(picks[0].tolist()) == [0, 1, 2]
    alone = subsets(sizes[1:], 3, [np.random.default_rng(2)])
    assert np.array_equal(picks[3:], alone)


def test_a_grid_in_law_differs_in_coins_alone() -> None:
    """Batches of all records leave nothing to draw: then both are the same run."""
    whole = planned(local=BatchGradient(FixedRecords(min(SIZES), (min(SIZES),) * 3), 0.7))
    data = silos(sizes=(min(SIZES),) * 3)
    assert torch.allclose(run_grid([whole], data, [3], exact=False), run_grid([whole], data, [3]), atol=1e-5)
    some = planned(local=BatchGradient(FixedRecords(2, SIZES), 0.7))
    first, second = (run_grid([some] * 2, silos(), [3, 4], exact=exact) for exact in (True, False))
    assert not torch.allclose(first, second, atol=1e-5)
    assert not torch.allclose(second[0], second[1], atol=1e-5)


def test_a_grid_in_law_has_the_mean_of_the_runs() -> None:
    base = planned(rounds=1, local=BatchGradient(FixedRecords(2, SIZES), 0.7), release=NoNoise(), server=Sgd(lr=1.0))
    seeds = list(range(400))
    exact, law = (run_grid([base] * 400, silos(), seeds, exact=choice) for choice in (True, False))
    gap, spread = (exact.mean(0) - law.mean(0)).abs(), (exact.std(0) + law.std(0)) / 20
    assert bool((gap <= 4 * spread + 1e-6).all())


@pytest.mark.parametrize("clients", [Everyone(5), RoundRobin(5, 2)], ids=str)
def test_no_coin_is_drawn_for_a_cohort_that_is_public(clients: Any) -> None:
    """A grid opens no stream for them: they must not touch the one they are given."""
    assert not clients.random
    coins, twin = np.random.default_rng(1), np.random.default_rng(1)
    for t in range(3):
        clients.draw(t, coins)
    assert coins.random() == twin.random()
