"""Promises of the recipes: each one trains, each is what its paper says, and the unsound form is refused by name."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import SIZES, clients, mlp

from sordino.data.task import Task
from sordino.errors import PlanError
from sordino.parts.denoise import JamesStein, SoftThreshold, SparsifyMean
from sordino.parts.encode import Adaptive, Clip
from sordino.parts.gradients import Blur, Bounded, Plain, Sam
from sordino.parts.local import LocalSgd
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.postprocess import LaplacianSmoothing
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.records import AllRecords
from sordino.parts.release import CentralNoise, LocalNoise, NoiseShares, NoNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson
from sordino.parts.schedules import Decay, Scaled
from sordino.parts.server import Average
from sordino.parts.sparsify import PublicDataMask, PublicMask, RandomMask, ReleasedMask, SparsifyUpdate
from sordino.plan import Plan
from sordino.privacy.certificate import default_delta, line_entry
from sordino.recipes import (
    RECIPES,
    best,
    blur,
    client_side_fed_avg,
    dp_fed_avg,
    dp_fed_ls,
    dp_fed_sam,
    dp_fed_sam_top_k,
    fed_smp,
    silo,
)
from sordino.training import train

N = len(SIZES)
USUAL: dict[str, Any] = {"rounds": 2, "clients": Everyone(N), "lr": 0.1, "radius": 0.5, "multiplier": 0.2}
SILOS: dict[str, Any] = {"sizes": (5, 5, 5), "clients": Everyone(3), "batch": 2}
ALONE: dict[str, Any] = {"rounds": 2, "records": 15, "batch": 5, "lr": 0.1, "radius": 0.5, "multiplier": 0.2}
TURNS: dict[str, Any] = {
    "rounds": 2,
    "population": N,
    "cohort": 3,
    "lr": 0.1,
    "steps": 2,
    "radius": 0.5,
    "multiplier": 0.2,
}
BARE = {"best", "silo", "client_side_fed_avg", "dp_sgd", "dp_ls_sgd", "dp_adam", "dp_ls_adam"}  # take nothing of USUAL
OWN: dict[str, list[dict[str, Any]]] = {  # beside USUAL
    "dp_fed_avg": [{}, {"server_momentum": 0.5}],
    "dp_fed_ls": [{"denoiser": d} for d in ("smoothing", "james_stein", "james_stein_plain", "soft_threshold")]
    + [{"denoiser": "none"}],
    "dp_fed_sam": [{}, {"adaptive": True}, {"trust": "secure_sum"}, {"radius": Adaptive(0.5)}],
    "dp_fed_sam_top_k": [{"form": form} for form in ("update", "mean", "mask")],
    "fed_smp": [{"mask": mask} for mask in ("random", "public_data", "released")],
    "blur": [{}, {"keep": 0.4}, {"keep": 0.4, "by": "influence"}],
    "scaffold": [{}, {"steps": 2}],
    "best": [{"population": N, "epsilon": 8.0, "rounds": 2}],
    "noisy_minibatch_sgd": [{**SILOS, "sampling": s, "batch": 1} for s in ("fixed", "poisson", "one_pass", "all")]
    + [{**SILOS, "trust": trust, "batch": 1} for trust in ("shuffler", "secure_sum", "server")]
    + [{**SILOS, "momentum": 0.5, "weight_decay": 0.1, "ball": 1.0, "smoothing": 2.0, "average": Average(after=1)}],
    "accelerated_minibatch_sgd": [{**SILOS, "v": 5.0}, {**SILOS, "v": 5.0, "mu": 0.5, "ball": 1.0}],
    "noisy_local_sgd": [{**SILOS, "steps": 2}, {**SILOS, "steps": 2, "multipliers": (0.2, 0.3, 0.4)}],
    "silo": [{"sizes": (5, 3, 7), "epsilons": (4.0,), "rounds": 2}],
    "client_side_fed_avg": [{**TURNS, "mechanism": mechanism} for mechanism in ("laplace", "gaussian")],
    **{name: [ALONE] for name in ("dp_sgd", "dp_ls_sgd", "dp_adam", "dp_ls_adam")},
}


def data(own: dict[str, Any]) -> Task:
    """Clients, or silos of the sizes that a recipe was told."""
    sizes = own.get("sizes", (own["records"],) if "records" in own else SIZES)
    return Task.of(mlp(), clients(sizes), test=clients((10,))[0], public=clients((8,))[0])


def built(name: str, own: dict[str, Any]) -> Plan:
    if name in BARE:
        return RECIPES[name](**own)
    known = inspect.signature(RECIPES[name]).parameters
    return RECIPES[name](**{**{key: value for key, value in USUAL.items() if key in known}, **own})


def test_every_recipe_has_an_example_here() -> None:
    assert set(OWN) == set(RECIPES)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_trains_and_is_certified(name: str) -> None:
    for own in OWN[name]:
        task = data(own)
        found = train(built(name, own), task)
        assert len(found.history) == 2
        assert math.isfinite(found.history[-1]["loss"])
        assert found.certificate["epsilon"] > 0
        vector = task.layout.flatten(found.model)
        assert bool(vector.isfinite().all())
        assert not torch.equal(vector, task.layout.flatten(task.model))


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"best", "silo", "noisy_local_sgd"}))
def test_without_a_multiplier_a_recipe_has_no_noise_and_says_so(name: str) -> None:
    bare = built(name, {**OWN[name][0], "multiplier": 0.0})
    assert bare.release == NoNoise()


# ---- what each one is ------------------------------------------------------------------------------------------------


def test_the_published_top_k_is_refused_by_name_with_the_way_to_its_counterexample() -> None:
    with pytest.raises(PlanError) as refused:
        dp_fed_sam_top_k(**USUAL, form="published")
    assert refused.value.rule == "mask after noise"
    assert "docs/privacy.md#mask-after-noise" in str(refused.value)
    page = (Path(__file__).parent.parent / "docs" / "privacy.md").read_text("utf-8")
    assert "\n### mask after noise\n" in page


def test_the_three_sound_top_k_forms_say_where_they_drop_coordinates() -> None:
    update, mean, mask = (dp_fed_sam_top_k(**USUAL, form=form, keep=0.3) for form in ("update", "mean", "mask"))
    assert update.encode == (SparsifyUpdate(0.3), Clip(0.5))
    assert (mean.encode, mean.postprocess) == ((Clip(0.5),), (SparsifyMean(0.3),))
    assert mask.encode == (PublicMask(0.3, ReleasedMask()), Clip(0.5))
    assert update.postprocess == mask.postprocess == ()
    assert update.bill() == mean.bill() == mask.bill() == dp_fed_avg(**USUAL).bill()


def test_sam_its_adaptive_form_and_blur_are_gradients_of_the_local_solver() -> None:
    assert local(dp_fed_sam(**USUAL, rho=0.2)).gradient == Sam(0.2)
    assert local(dp_fed_sam(**USUAL, adaptive=True)).gradient == Sam(0.5, adaptive=True)
    assert local(blur(**USUAL, strength=0.3)).gradient == Blur(0.3)
    assert local(fed_smp(**USUAL)).gradient == Plain()
    assert (local(dp_fed_sam(**USUAL)).momentum, local(dp_fed_sam(**USUAL)).weight_decay) == (0.5, 5e-4)


def local(planned: Plan) -> LocalSgd:
    assert isinstance(planned.local, LocalSgd)
    return planned.local


def test_blur_alone_sends_everything_and_lus_is_the_clients_own_top_k() -> None:
    assert blur(**USUAL).encode == (Clip(0.5),)
    assert blur(**USUAL, keep=0.4, by="influence").encode == (SparsifyUpdate(0.4, "influence"), Clip(0.5))


def test_fed_smp_takes_its_mask_from_where_it_says() -> None:
    sources = [fed_smp(**USUAL, mask=mask).mask for mask in ("random", "public_data", "released")]
    assert sources == [PublicMask(0.4, source) for source in (RandomMask(), PublicDataMask(), ReleasedMask())]


def test_dp_fed_ls_projects_every_step_and_puts_one_denoiser_in_the_place_of_smoothing() -> None:
    kinds: dict[str, Any] = {
        "smoothing": (LaplacianSmoothing(2.0, (0, 2, 3, 1)),),
        "james_stein": (JamesStein(positive=True),),
        "james_stein_plain": (JamesStein(positive=False),),
        "soft_threshold": (SoftThreshold(),),
        "none": (),
    }
    for name, wanted in kinds.items():
        planned = dp_fed_ls(**USUAL, strength=2.0, order=(0, 2, 3, 1), denoiser=name)  # type: ignore[arg-type]
        assert planned.postprocess == wanted
        assert local(planned).project
        assert planned.bill() == dp_fed_avg(**USUAL).bill()


def trusts(recipe: Any) -> bool:
    """Whether somebody else may add the noise of clients; of silos: tests/privacy/test_record_bill.py."""
    names = inspect.signature(recipe).parameters
    return "trust" in names and "sizes" not in names


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if trusts(recipe)])
def test_a_secure_sum_shares_the_same_noise_among_the_clients(name: str) -> None:
    own = {**USUAL, "clients": FixedSize(N, 4), "trust": "secure_sum"}
    shares, central = RECIPES[name](**own), RECIPES[name](**{**own, "trust": "server"})
    assert shares.release == NoiseShares(0.2, at_least=4)
    assert central.release == CentralNoise(Gaussian(0.2))
    assert shares.release.noise_std(np.arange(4)) == central.release.noise_std(np.arange(4))
    assert shares.release.needs == {"secure_sum"}
    assert shares.bill().line("models") == central.bill().line("models")


def test_shares_under_poisson_accept_half_the_expected_cohort() -> None:
    planned = dp_fed_sam(**{**USUAL, "clients": Poisson(40, 0.25)}, trust="secure_sum")
    assert planned.release == NoiseShares(0.2, at_least=5)


# ---- best ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("population", "epsilon", "delta"), [(40, 8.0, None), (500, 1.0, 1e-6)])
def test_best_costs_its_epsilon_and_hardly_less(population: int, epsilon: float, delta: float | None) -> None:
    planned = best(population=population, epsilon=epsilon, delta=delta, rounds=10)
    assert planned.clients.population == population
    spent = line_entry(planned.bill().line("models"), delta or default_delta(population))["epsilon"]
    assert 0.99 * epsilon <= spent <= epsilon


# ---- silos and uploads with noise of their own -----------------------------------------------------------------------


def test_an_upload_is_clipped_to_the_longest_way_its_steps_can_go() -> None:
    """lr * steps * radius, in the norm of the noise; replacing a client moves it twice that."""
    for mechanism, norm, noise in (("laplace", 1, Laplace(0.2)), ("gaussian", 2, Gaussian(0.2))):
        planned = client_side_fed_avg(**{**TURNS, "lr": Decay(0.1, 0.5)}, mechanism=mechanism)  # type: ignore[arg-type]
        assert planned.encode == (Clip(Scaled(Decay(0.1, 0.5), 1.0), norm),)  # type: ignore[arg-type]
        assert planned.release == LocalNoise(noise)
        assert local(planned).gradient == Bounded(0.5, norm)  # type: ignore[arg-type]
        line = planned.bill().line("models")
        assert (line.relation, line.entries) == ("replace_one", ((noise.event(), 1),))  # each client once in two rounds


def test_the_silo_recipe_reads_everything_and_trusts_nobody() -> None:
    planned = silo(sizes=(50, 80), epsilons=(1.0, 2.0), deltas=(1e-3,), rounds=5, radius=0.3)
    assert planned.local == BatchGradient(AllRecords((50, 80)), 0.3)
    assert isinstance(planned.release, LocalNoise)
    assert planned.release.multipliers[0] > 1.5 * planned.release.multipliers[1]
    assert planned.clients == Everyone(2)
