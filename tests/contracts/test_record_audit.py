"""Promise: one record is hidden as well as the cost says and no better; four bugs that would break it are caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.audit.attacks import FEATURES, attack_record, canary_task
from sordino.engines.dense_clients import LinearClients
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.loop import Tally, one_round
from sordino.parts.gradients import Ball, Batch
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllRecords, FixedRecords, OnePass, PoissonRecords
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, Release, ShuffledNoise
from sordino.parts.samplers import Everyone
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan, State
from sordino.recipes import RECIPES
from sordino.rng import Seeded

Z, TRIALS = 1.5, 200_000
USUAL: dict[str, Any] = {"rounds": 2, "clients": Everyone(2), "clip_norm": 0.7, "noise_multiplier": Z}
# Settings of every recipe whose unit is a record; test_every_recipe_is_audited asks for them.
EIGHT = AllRecords((8,))
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "noisy_minibatch_sgd": [
        {**USUAL, "lr": 0.1, "records": reads}
        for reads in (EIGHT, OnePass(4, (8,)), FixedRecords(4, (8,)), PoissonRecords(4, (8,)))
    ]
    + [
        {**USUAL, "lr": 0.1, "records": reads, "noise_multiplier": None, "release": release}
        for reads, release in (
            (EIGHT, NoiseShares(Z, at_least=2)),
            (EIGHT, CentralNoise(Gaussian(Z))),
            (FixedRecords(1, (2,)), ShuffledNoise(Gaussian(Z), at_least=2)),
        )
    ],
    "accelerated_minibatch_sgd": [{**USUAL, "records": FixedRecords(4, (8,)), "v": 1.0}],
    "noisy_local_sgd": [{**USUAL, "lr": 0.1, "steps": 1, "records": reads} for reads in (EIGHT, FixedRecords(8, (8,)))],
    "silo": [{"sizes": (8, 8), "epsilons": (4.0,), "rounds": 1}],
    **{
        name: [{"rounds": 2, "records": PoissonRecords(8, (8,)), "lr": 0.1, "clip_norm": 0.7, "noise_multiplier": Z}]
        for name in ("dp_sgd", "dp_ls_sgd", "dp_adam", "dp_ls_adam")
    },
}


def plan(release: Release, reads: Any = None, local: Any = None) -> Plan:
    local = local or BatchGradient(reads or AllRecords((8,)), 0.7)
    return Plan(rounds=2, clients=Everyone(2), local=local, release=release, server=Sgd(lr=0.1))


LOCAL, SHARES, CENTRAL = LocalNoise(Gaussian(Z)), NoiseShares(Z, at_least=2), CentralNoise(Gaussian(Z))
SPENT = NoisyLocalSgd(AllRecords((8,)), 0.7, Z, 0.1, steps=1)


# ---- correct code lands just below its promise -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "adversary"),
    [(plan(LOCAL), "messages"), (plan(SHARES), "cohort"), (plan(CENTRAL), "models"), (plan(SHARES), "messages")],
    ids=["local", "shares", "central", "one share"],
)
def test_a_canary_is_told_apart_by_two_over_z_and_no_more(planned: Plan, adversary: Any) -> None:
    found = attack_record(planned, adversary, TRIALS)
    share = 2**0.5 if planned.release == SHARES and adversary == "messages" else 1.0
    assert found.upper_mu == pytest.approx(2 / Z * share, rel=1e-6)
    assert 0.9 * found.upper_mu <= found.lower_mu <= found.upper_mu


def test_noise_in_a_local_step_hides_as_much() -> None:
    found = attack_record(plan(Forward(), local=SPENT), "messages", 8_000)
    assert found.upper_mu == pytest.approx(2 / Z, rel=1e-6)
    assert 0.9 * found.upper_mu <= found.lower_mu <= found.upper_mu


@pytest.mark.parametrize("reads", [FixedRecords(4, (8,)), PoissonRecords(4.0, (8,))], ids=str)
def test_a_batch_drawn_in_secret_hides_more_and_never_less_than_billed(reads: Any) -> None:
    found = attack_record(plan(LOCAL, reads), "messages", 8_000)
    assert 0.6 <= found.share <= 1.0


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_recipe_hides_a_record_as_billed(name: str) -> None:
    for settings in EXAMPLES[name]:
        planned = RECIPES[name](**settings)
        assert planned.unit == "record"
        seen: Any = "models" if isinstance(planned.release, CentralNoise) else "messages"
        found = attack_record(planned, seen, 5_000)
        assert found.lower_mu <= found.upper_mu, settings
        sampled = isinstance(settings.get("records"), FixedRecords | PoissonRecords)
        assert found.share > (0.5 if sampled else 0.85), settings


def test_what_is_attacked_is_what_a_round_releases() -> None:
    """The same numbers by the loop's own `one_round`, round after round."""
    planned, task = plan(LOCAL), canary_task(1e9, (8, 8))
    worker = InProcess(path="batched").prepare(planned, task, Seeded(0))
    state, seen = State.initial(planned, torch.zeros(FEATURES)), []
    for seed in range(400):
        after, _ = one_round(planned, task, worker, Seeded(seed), Tally(), state, np.arange(2))
        moved = -planned.server.result(after.memory)[0] / 0.1 / planned.local.unit(planned.public(0))
        seen.append(float(moved) * 2)  # the sum over two silos, in clip norms
    assert abs(np.mean(seen) + 1.0) < 0.4  # the canary is pulled to one clip norm
    assert abs(np.std(seen) / (Z * 2**0.5) - 1) < 0.15


# ---- and what would break it is caught -------------------------------------------------------------------------------


class MeanClipped(LinearClients):
    """The batch's mean gradient is clipped, not each record's: one record can turn all of it (PRIVACY rule 8)."""

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        mean = self.gradient(w, batch)
        inside = (ball.clip_norm / mean.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
        total: Tensor = mean * inside * batch.y.shape[1]
        return total


class NotClipped(LinearClients):
    """Gradients are summed as they are."""

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        return self.gradient(w, batch) * batch.y.shape[1]


def clips_the_mean(worker: InProcessWorker) -> None:
    worker.objective = MeanClipped(worker.task)


def does_not_clip(worker: InProcessWorker) -> None:
    worker.objective = NotClipped(worker.task)


@pytest.mark.parametrize("sabotage", [clips_the_mean, does_not_clip])
@pytest.mark.parametrize(("release", "adversary"), [(LOCAL, "messages"), (SHARES, "cohort"), (CENTRAL, "models")])
def test_a_clip_that_is_not_per_record_is_caught(release: Release, adversary: Any, sabotage: Any) -> None:
    found = attack_record(plan(release), adversary, 20_000, sabotage=sabotage)
    assert found.lower_mu > 1.5 * found.upper_mu


@pytest.mark.parametrize(("release", "adversary"), [(LOCAL, "messages"), (SHARES, "cohort")])
def test_a_silo_that_forgets_its_noise_is_caught(release: Release, adversary: Any) -> None:
    found = attack_record(plan(release), adversary, 20_000, lost=1)
    assert found.lower_mu > 1.2 * found.upper_mu


@pytest.mark.parametrize(
    ("planned", "halved", "adversary"),
    [
        (plan(LOCAL), plan(LocalNoise(Gaussian(Z / 2))), "messages"),
        (plan(CENTRAL), plan(CentralNoise(Gaussian(Z / 2))), "models"),
        (plan(Forward(), local=SPENT), plan(Forward(), local=replace(SPENT, noise_multiplier=Z / 2)), "messages"),
    ],
    ids=["local", "central", "in the step"],
)
def test_half_the_noise_is_caught(planned: Plan, halved: Plan, adversary: Any) -> None:
    found = attack_record(planned, adversary, 6_000, broken=halved)
    assert found.lower_mu > 1.5 * found.upper_mu


def test_a_batch_that_is_always_the_same_is_caught() -> None:
    """Coins that were accounted and never tossed."""
    accounted, ran = plan(LOCAL, FixedRecords(2, (8,))), plan(LOCAL, AllRecords((8,)))
    assert attack_record(accounted, "messages", 10_000, broken=ran).share > 1.2
