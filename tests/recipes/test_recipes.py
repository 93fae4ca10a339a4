"""Promises of the recipes: each one trains, each is what its paper says, and the unsound form is refused by name."""

from __future__ import annotations

import inspect
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Required, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from tests.tiny import SIZES, clients, mlp
from torch import Tensor

import sordino
from sordino.accounting.accountant import default_delta
from sordino.certificate.build import line_entry
from sordino.codec import Part
from sordino.config import from_recipe
from sordino.errors import ConfigError, PlanError
from sordino.parts.encoding import (
    Adaptive,
    Clip,
    ClipNorms,
    JamesStein,
    LaplacianSmoothing,
    Noised,
    Postprocess,
    SoftThreshold,
    Step,
    WhenNoisy,
)
from sordino.parts.gradients import Blur, Bounded, Gradient, Moreau, Plain, Proximal, Sam
from sordino.parts.local_solvers import LocalSgd, Scaffold
from sordino.parts.mechanisms import Gaussian, Laplace, Mechanism
from sordino.parts.record_samplers import AllRecords, FixedRecords, OnePass, PoissonRecords, RecordSampler
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import (
    CentralNoise,
    Forward,
    LocalNoise,
    MaskedNoise,
    NoiseShares,
    NoNoise,
    Release,
    ScheduledNoise,
    ShuffledNoise,
)
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin, Sampler
from sordino.parts.schedules import Decay, Linear, Scaled
from sordino.parts.server_optimizers import Accelerated, Adam, Average, ServerOptimizer, Sgd, Yogi
from sordino.parts.sparsify import (
    MaskSource,
    PublicDataMask,
    PublicMask,
    RandomMask,
    ReleasedMask,
    SparsifyMean,
    SparsifyUpdate,
)
from sordino.parts.strategies import BandedSquareRoot, Tree
from sordino.plan import Plan
from sordino.recipes import (
    RECIPES,
    accelerated_minibatch_sgd,
    best,
    blur,
    client_side_fed_avg,
    dp_adam,
    dp_fed_avg,
    dp_fed_ls,
    dp_fed_sam,
    dp_fed_sam_top_k,
    dp_ftrl,
    dp_ls_adam,
    dp_ls_sgd,
    dp_sgd,
    fed_smp,
    head,
    noisy_local_sgd,
    noisy_minibatch_sgd,
    scaffold,
    silo,
    starters,
)
from sordino.recipes.arguments import Correlated, Federated, Messages, Silos, SingleSilo
from sordino.recipes.best import head_rule
from sordino.task import Task
from sordino.training import train

N = len(SIZES)
USUAL: dict[str, Any] = {"rounds": 2, "clients": Everyone(N), "lr": 0.1, "clip_norm": 0.5, "noise_multiplier": 0.2}
QUIET = Gaussian(0.2)
UNTOLD = {key: value for key, value in USUAL.items() if key != "noise_multiplier"}  # what a release is given beside
FIVE = (5, 5, 5)
SILOS: dict[str, Any] = {"rounds": 2, "clients": Everyone(3), "records": FixedRecords(2, FIVE), "clip_norm": 0.5}
ALONE: dict[str, Any] = {
    "rounds": 2,
    "records": PoissonRecords(5, (15,)),
    "lr": 0.1,
    "clip_norm": 0.5,
    "noise_multiplier": 0.2,
}
TURNS: dict[str, Any] = {"rounds": 2, "population": N, "cohort": 3, "lr": 0.1, "steps": 2, "clip_norm": 0.5}
BARE = {
    "best",
    "head",
    "silo",
    "client_side_fed_avg",
    "dp_sgd",
    "dp_ls_sgd",
    "dp_adam",
    "dp_ls_adam",
}  # take nothing of USUAL
OWN: dict[str, list[dict[str, Any]]] = {  # beside USUAL
    "dp_fed_avg": [{}, {"server": Yogi(0.1)}, {"gradient": Proximal(0.1)}],
    "dp_fed_ls": [{}, *({"denoiser": d} for d in (JamesStein(), JamesStein(False), SoftThreshold(), None))],
    "dp_fed_sam": [
        {},
        {"adaptive": True, "denoiser": SparsifyMean(0.4)},
        {"noise_multiplier": None, "release": NoiseShares(0.2, 3)},
        {"clip_norm": Adaptive(0.5)},
    ],
    "dp_fed_sam_top_k": [{}, {"sparsify": SparsifyUpdate(0.4)}],
    "fed_smp": [{"mask": mask} for mask in (RandomMask(), PublicDataMask(), ReleasedMask())],
    "blur": [{}, {"sparsify": SparsifyUpdate(0.4)}, {"sparsify": SparsifyUpdate(0.4, "influence")}],
    "scaffold": [{}, {"steps": 2}],
    "best": [{"population": N, "epsilon": 8.0, "rounds": 2}],
    "head": [{"population": N, "epsilon": 8.0, "rounds": 2}],
    "dp_ftrl": [{}, {"strategy": BandedSquareRoot(2)}, {"strategy": Tree()}],
    "band_mf": [{"population": N, "groups": 2, "cohort": N / 4}],
    "noisy_minibatch_sgd": [
        {**SILOS, "records": reads}
        for reads in (FixedRecords(1, FIVE), PoissonRecords(1, FIVE), OnePass(1, FIVE), AllRecords(FIVE))
    ]
    + [
        {**SILOS, "records": FixedRecords(1, FIVE), "noise_multiplier": None, "release": release}
        for release in (ShuffledNoise(QUIET, 3), NoiseShares(0.2, 3), CentralNoise(QUIET))
    ]
    + [
        {
            **SILOS,
            "momentum": 0.5,
            "weight_decay": 0.1,
            "ball": 1.0,
            "gradient": Moreau(2.0),
            "average": Average(after=1),
        }
    ],
    "accelerated_minibatch_sgd": [{**SILOS, "v": 5.0}, {**SILOS, "v": 5.0, "mu": 0.5, "ball": 1.0}],
    "noisy_local_sgd": [{**SILOS, "steps": 2}, {**SILOS, "steps": 2, "noise_multipliers": (0.2, 0.3, 0.4)}],
    "silo": [{"sizes": (5, 3, 7), "epsilons": (4.0,), "rounds": 2}],
    "client_side_fed_avg": [{**TURNS, "mechanism": mechanism} for mechanism in (Laplace(0.2), QUIET)],
    **{name: [ALONE] for name in ("dp_sgd", "dp_ls_sgd", "dp_adam", "dp_ls_adam")},
}


def data(own: dict[str, Any]) -> Task:
    """Clients, or silos of the sizes that a recipe was told."""
    sizes = own["records"].sizes if "records" in own else own.get("sizes", SIZES)
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


@pytest.mark.parametrize(
    "name", sorted(set(RECIPES) - {"best", "head", "silo", "noisy_local_sgd", "client_side_fed_avg"})
)
def test_without_a_multiplier_a_recipe_has_no_noise_and_says_so(name: str) -> None:
    bare = built(name, {**OWN[name][0], "noise_multiplier": 0.0})
    assert bare.release == NoNoise()


# ---- what each one is ------------------------------------------------------------------------------------------------


def test_the_published_top_k_is_refused_by_name_with_the_way_to_its_counterexample() -> None:
    with pytest.raises(PlanError) as refused:
        dp_fed_sam(**UNTOLD, release=MaskedNoise(0.2, keep=0.4))
    assert refused.value.rule == "mask after noise"
    assert "docs/privacy.md#mask-after-noise" in str(refused.value)
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text("utf-8")
    assert "\n### mask after noise\n" in page


def test_the_three_sound_top_k_forms_say_where_they_drop_coordinates() -> None:
    update = dp_fed_sam_top_k(**USUAL, sparsify=SparsifyUpdate(0.3))
    mean = dp_fed_sam(**USUAL, denoiser=SparsifyMean(0.3))
    mask = dp_fed_sam_top_k(**USUAL)
    assert update.encode == (SparsifyUpdate(0.3), Clip(0.5))
    assert (mean.encode, mean.postprocess) == ((Clip(0.5),), (SparsifyMean(0.3),))
    assert mask.encode == (PublicMask(0.4, ReleasedMask()), Clip(0.5))
    assert update.postprocess == mask.postprocess == ()
    assert update.cost() == mean.cost() == mask.cost() == dp_fed_avg(**USUAL).cost()


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
    lus = SparsifyUpdate(0.4, "influence")
    assert blur(**USUAL, sparsify=lus).encode == (lus, Clip(0.5))


def test_fed_smp_takes_its_mask_from_where_it_says() -> None:
    for source in (RandomMask(), PublicDataMask(), ReleasedMask()):
        assert fed_smp(**USUAL, mask=source).mask == PublicMask(0.4, source)


def test_dp_fed_ls_projects_every_step_and_puts_one_denoiser_in_the_place_of_smoothing() -> None:
    assert dp_fed_ls(**USUAL).postprocess == (WhenNoisy(LaplacianSmoothing(1.0)),)
    assert dp_fed_ls(**USUAL, denoiser=None).postprocess == ()
    for denoiser in (LaplacianSmoothing(2.0, (0, 2, 3, 1)), JamesStein(), SoftThreshold()):
        planned = dp_fed_ls(**USUAL, denoiser=denoiser)
        assert planned.postprocess == (denoiser,)
        assert local(planned).project
        assert planned.cost() == dp_fed_avg(**USUAL).cost()


@pytest.mark.parametrize("recipe", [dp_fed_avg, dp_fed_ls, dp_fed_sam, dp_fed_sam_top_k, fed_smp, blur, scaffold])
def test_a_secure_sum_shares_the_same_noise_among_the_clients(recipe: Any) -> None:
    """Whom the clients trust is a release, not a word: the server sees sums only, and the cost stays."""
    own = {**UNTOLD, "clients": FixedSize(N, 4)}
    shares, central = recipe(**own, release=NoiseShares(0.2, at_least=4)), recipe(**own, noise_multiplier=0.2)
    assert central.release == CentralNoise(QUIET)
    assert shares.release.noise_std(np.arange(4), 0) == central.release.noise_std(np.arange(4), 0)
    assert shares.release.needs == {"secure_sum"}
    assert shares.cost().line("models") == central.cost().line("models")


@pytest.mark.parametrize("name", [n for n, f in RECIPES.items() if "release" in inspect.signature(f).parameters])
def test_noise_is_said_once_as_a_number_or_as_a_release(name: str) -> None:
    own = {**OWN[name][0], "noise_multiplier": None}
    with pytest.raises(ConfigError, match="neither a noise multiplier nor a release"):
        built(name, own)
    with pytest.raises(ConfigError, match="a noise multiplier and a release"):
        built(name, {**own, "noise_multiplier": 0.2, "release": CentralNoise(QUIET)})
    assert built(name, {**own, "release": CentralNoise(QUIET)}).release == CentralNoise(QUIET)


# ---- arguments -------------------------------------------------------------------------------------------------------


def by_hand() -> list[tuple[Plan, Plan]]:
    """Every recipe beside the plan that its paper describes, part by part."""
    fed: dict[str, Any] = {"rounds": 2, "clients": Everyone(N), "release": CentralNoise(QUIET), "server": Sgd()}
    sgd, clip = LocalSgd(lr=0.1, epochs=1), (Clip(0.5),)
    sam = replace(sgd, momentum=0.5, weight_decay=5e-4, gradient=Sam(0.5))
    mask = PublicMask(0.4, ReleasedMask())
    smooth: dict[str, Any] = {"postprocess": (LaplacianSmoothing(1.0),)}
    noisy_only: dict[str, Any] = {"postprocess": (WhenNoisy(LaplacianSmoothing(1.0)),)}
    silos: dict[str, Any] = {"rounds": 2, "clients": Everyone(3), "release": LocalNoise(QUIET)}
    batch, forward = BatchGradient(FixedRecords(2, FIVE), 0.5), {**silos, "release": Forward()}
    spent = NoisyLocalSgd(FixedRecords(2, FIVE), 0.5, 0.2, 0.1, steps=2)
    alone: dict[str, Any] = {"rounds": 2, "clients": Everyone(1), "release": CentralNoise(QUIET)}
    alone |= {"local": BatchGradient(PoissonRecords(5, (15,)), 0.5)}
    adam, noisy = Adam(0.1, 0.9, 0.999, 1e-8), {**SILOS, "noise_multiplier": 0.2}
    bounded = LocalSgd(lr=0.1, steps=2, gradient=Bounded(0.5, 1))
    return [
        (dp_fed_avg(**USUAL), Plan(**fed, local=sgd, encode=clip)),
        (dp_fed_ls(**USUAL), Plan(**fed, local=replace(sgd, project=True), encode=clip, **noisy_only)),
        (dp_fed_sam(**USUAL), Plan(**fed, local=sam, encode=clip)),
        (dp_fed_sam_top_k(**USUAL), Plan(**fed, local=sam, encode=(mask, *clip))),
        (fed_smp(**USUAL), Plan(**fed, local=replace(sam, gradient=Plain()), encode=(PublicMask(0.4), *clip))),
        (blur(**USUAL), Plan(**fed, local=replace(sam, gradient=Blur(0.1)), encode=clip)),
        (scaffold(**USUAL), Plan(**fed, local=Scaffold(0.1, steps=5), encode=clip)),
        (noisy_minibatch_sgd(**noisy, lr=0.3), Plan(**silos, local=batch, server=Sgd(lr=0.3))),
        (accelerated_minibatch_sgd(**noisy, v=2.0), Plan(**silos, local=batch, server=Accelerated(2.0))),
        (noisy_local_sgd(**noisy, lr=0.1, steps=2), Plan(**forward, local=spent, server=Sgd())),
        (
            client_side_fed_avg(**TURNS, mechanism=Laplace(0.2)),
            Plan(
                rounds=2,
                clients=RoundRobin(N, 3),
                local=bounded,
                encode=(Clip(0.1, 1),),
                release=LocalNoise(Laplace(0.2)),
                server=Sgd(),
            ),
        ),
        (dp_sgd(**ALONE), Plan(**alone, server=Sgd(lr=0.1))),
        (dp_ls_sgd(**ALONE), Plan(**alone, server=Sgd(lr=0.1), **smooth)),
        (dp_adam(**ALONE), Plan(**alone, server=adam)),
        (dp_ls_adam(**ALONE), Plan(**alone, server=adam, **smooth)),
    ]


def test_a_recipe_is_its_plan_by_hand() -> None:
    for made, wanted in by_hand():
        assert made.hash == wanted.hash, made


def test_best_and_silo_are_their_plans_by_hand_up_to_the_noise_they_solve_for() -> None:
    made = best(population=100, epsilon=4.0)
    average = Average(growth=1 + 1 / (1 / 6 * 60))
    wanted = Plan(
        rounds=60,
        clients=Poisson(100, 0.2),
        local=LocalSgd(lr=0.1, epochs=1, batch=10),
        encode=(Clip(0.8),),
        release=made.release,
        server=Sgd(lr=Linear(1.5, 1.5, 60), average=average),
    )
    assert made.hash == wanted.hash
    silos = silo(sizes=(50, 80), epsilons=(1.0, 2.0), rounds=5)
    server = Sgd(lr=Linear(0.25, 0.1 * 0.25, 5), momentum=0.5)
    every = BatchGradient(AllRecords((50, 80)), 1.0)
    assert silos.hash == Plan(rounds=5, clients=Everyone(2), local=every, release=silos.release, server=server).hash


SHARED: list[tuple[Any, Any]] = [
    *((Messages, scaffold), (Federated, dp_fed_avg), (Correlated, dp_ftrl)),
    *((Silos, noisy_minibatch_sgd), (SingleSilo, dp_sgd), (SingleSilo, dp_ls_adam)),
]


@pytest.mark.parametrize(("listed", "recipe"), SHARED)
def test_a_recipe_has_the_arguments_of_its_shared_list(listed: Any, recipe: Any) -> None:
    """Same names, same types, and required here is required there: the checker of types is told the truth."""
    taken = inspect.signature(recipe, eval_str=True).parameters
    for name, declared in get_type_hints(listed, include_extras=True).items():
        required = get_origin(declared) is Required
        assert taken[name].annotation == (get_args(declared)[0] if required else declared)
        assert required == (taken[name].default is inspect.Parameter.empty)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_an_argument_that_a_recipe_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="server_lr"):
        built(name, {**OWN[name][0], "server_lr": 1.0})


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_no_recipe_enumerates_words_for_parts_and_few_arguments_are_its_own(name: str) -> None:
    parameters = inspect.signature(RECIPES[name], eval_str=True).parameters
    words = [p.name for p in parameters.values() if str in (p.annotation, *get_args(p.annotation))]
    assert not words
    assert not [p.name for p in parameters.values() if "Literal" in str(p.annotation)]
    written = inspect.signature(inspect.unwrap(RECIPES[name])).parameters
    assert len(written.keys() - {"prepare"}) <= (14 if name == "best" else 9)  # what columns ask for is the data's


def families(recipe: Any) -> set[Any]:
    """Of the parts that it takes."""
    hints = [p.annotation for p in inspect.signature(recipe, eval_str=True).parameters.values()]
    each = [hint for declared in hints for hint in (declared, *get_args(declared))]
    return {hint for hint in each if isinstance(hint, type) and issubclass(hint, Part)}


def test_every_part_that_a_recipe_may_take_is_a_public_name() -> None:
    taken = set().union(*map(families, RECIPES.values()))
    assert taken > {
        Sampler,
        RecordSampler,
        Release,
        Postprocess,
        ServerOptimizer,
        Gradient,
        Step,
        MaskSource,
        Mechanism,
    }
    ours = {part for family in taken for part in family.members.values() if part.__module__.startswith("sordino.")}
    hidden = {part for part in ours if getattr(sordino.parts, part.__name__, None) is not part}
    assert hidden == {MaskedNoise, ScheduledNoise, ClipNorms}  # one is always refused, two are made by make_private


def test_a_recipe_in_a_file_takes_parts() -> None:
    """A denoiser, a server, a release and a mask by their tables; what they are is known to the codec, not to us."""
    made = from_recipe(
        {
            "name": "fed_smp",
            "rounds": 2,
            "clients": {"kind": "fixed", "population": N, "cohort": 4},
            "lr": 0.1,
            "clip_norm": 0.5,
            "mask": {"kind": "released", "explore": 0.1},
            "denoiser": {"kind": "james_stein", "positive": False},
            "release": {"kind": "noise_shares", "noise_multiplier": 0.2, "at_least": 4},
            "server": {"kind": "yogi", "lr": 0.1},
        }
    )
    assert made.mask == PublicMask(0.4, ReleasedMask(explore=0.1))
    assert (made.postprocess, made.server) == ((JamesStein(positive=False),), Yogi(0.1))
    assert made.release == NoiseShares(0.2, 4)


@dataclass(frozen=True)
class Thinned(Postprocess, kind="thinned_in_test_recipes"):
    """A stranger's: the mean, times `share`."""

    share: float

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        return self.share * mean


def test_a_strangers_denoiser_stands_in_the_file_of_a_recipe_and_runs() -> None:
    """Where recipes knew words for parts, a file could not name one that is not ours."""
    text = starters.example("dp_fed_ls").replace(
        '{ kind = "laplacian_smoothing", strength = 1.0 }', '{ kind = "thinned_in_test_recipes", share = 0.5 }'
    )
    made = from_recipe(tomllib.loads(text)["recipe"])
    assert made.postprocess == (WhenNoisy(Thinned(0.5)),)
    small = replace(made, postprocess=(Thinned(0.5),), rounds=1, clients=Everyone(N), release=NoNoise())
    whole = replace(small, postprocess=())
    start, *ends = (task_end(plan) for plan in (None, small, whole))
    torch.testing.assert_close(ends[0] - start, 0.5 * (ends[1] - start), rtol=1e-4, atol=1e-6)


def task_end(planned: Plan | None) -> Tensor:
    task = data({})
    return task.layout.flatten(task.model if planned is None else train(planned, task).model)


# ---- best ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("population", "epsilon", "delta"), [(40, 8.0, None), (500, 1.0, 1e-6)])
def test_best_costs_its_epsilon_and_hardly_less(population: int, epsilon: float, delta: float | None) -> None:
    planned = best(population=population, epsilon=epsilon, delta=delta, rounds=10)
    assert planned.clients.population == population
    spent = line_entry(planned.cost().line("models"), delta or default_delta(population))["epsilon"]
    assert 0.99 * epsilon <= spent <= epsilon


def test_head_is_few_rounds_of_everybody_and_costs_its_epsilon() -> None:
    for epsilon, rounds in ((1.0, 5), (2.0, 9), (8.0, 25)):
        planned = head(population=539, epsilon=epsilon)
        assert (planned.rounds, planned.clients, planned.encode) == (rounds, Poisson(539, 1.0), (Clip(0.05),))
        line = planned.cost().line("models")
        assert line.relation == "add_remove"
        assert 0.99 * epsilon <= line_entry(line, default_delta(539))["epsilon"] <= epsilon
    with pytest.raises(PlanError, match="epsilon = -1"):
        head(population=539, epsilon=-1.0)


def test_best_of_a_head_says_why_and_takes_its_rounds_from_public_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="sordino"):
        planned = best(population=539, epsilon=2.0, head_size=39_690)
    rounds, step = head_rule(539, 2.0, 39_690)
    assert f"everybody in each of {rounds} rounds" in caplog.text
    assert planned == head(population=539, epsilon=2.0, rounds=rounds, step=step)
    more = [head_rule(n, e, size)[0] for n, e, size in ((5390, 2.0, 39_690), (539, 8.0, 39_690), (539, 2.0, 397))]
    assert min(more) > rounds  # more clients, more epsilon, fewer weights: less noise, so a longer path
    for wrong in ({"population": 0}, {"epsilon": -1.0}, {"head_size": 0}):
        with pytest.raises(PlanError, match=f"{next(iter(wrong))} = "):
            best(**{"population": 100, "epsilon": 4.0, "head_size": 10, **wrong})  # type: ignore[arg-type]


# ---- silos and uploads with noise of their own -----------------------------------------------------------------------


def test_an_upload_is_clipped_to_the_longest_way_its_steps_can_go() -> None:
    """lr * steps * clip norm, in the norm of the noise; replacing a client moves it twice that."""
    for noise in (Laplace(0.2), QUIET):
        planned = client_side_fed_avg(**{**TURNS, "lr": Decay(0.1, 0.5)}, mechanism=noise)
        assert planned.encode == (Clip(Scaled(Decay(0.1, 0.5), 1.0), noise.norm),)
        assert planned.release == LocalNoise(noise)
        assert local(planned).gradient == Bounded(0.5, noise.norm)
        line = planned.cost().line("models")
        assert (line.relation, line.entries) == ("replace_one", ((noise.event(), 1),))  # each client once in two rounds


def test_the_silo_recipe_reads_everything_and_trusts_nobody() -> None:
    planned = silo(sizes=(50, 80), epsilons=(1.0, 2.0), deltas=(1e-3,), rounds=5, clip_norm=0.3)
    assert planned.local == BatchGradient(AllRecords((50, 80)), 0.3)
    assert isinstance(planned.release, LocalNoise)
    assert planned.release.noise_multipliers[0] > 1.5 * planned.release.noise_multipliers[1]
    assert planned.clients == Everyone(2)
