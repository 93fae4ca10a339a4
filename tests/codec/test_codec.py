"""Promises of the codec: a plan survives its file with the same hash, and a mistake is named with its remedy."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import pkgutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny import plan

import sordino
from sordino import codec
from sordino.cli.configure import json_schema
from sordino.codec import Part
from sordino.data.metrics import add_metric
from sordino.errors import ConfigError, PlanError
from sordino.models.nets import add_model
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.losses import add_loss
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import PoissonRecords
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import CentralNoise, Forward, NoNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson
from sordino.parts.schedules import Decay
from sordino.parts.server_optimizers import Adam, Sgd
from sordino.plan import Plan

for _module in pkgutil.walk_packages(sordino.__path__, "sordino."):
    if not _module.name.startswith("sordino.cli"):
        importlib.import_module(_module.name)  # every part registers itself

add_metric("own_of_test_codec")(lambda outputs, targets: 0.0)
add_loss("own_of_test_codec")(lambda outputs, targets: targets)


@add_model("own_of_test_codec")
def _net(shape: tuple[int, ...], outputs: int, width: int = 2) -> torch.nn.Module:
    return torch.nn.Linear(shape[0], outputs * width)


GAUSSIAN = {"kind": "gaussian", "noise_multiplier": 1.5}
RECORDS = {"kind": "fixed_records", "batch": 2, "sizes": [9]}

# One table per kind, as a file would hold it, with every field that has no default. A new kind needs a line here.
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "Sampler": {
        "everyone": {"population": 6},
        "poisson": {"population": 6, "rate": 0.5, "cap": 4},
        "fixed": {"population": 6, "cohort": 3},
        "roundrobin": {"population": 6, "cohort": 2},
        "min_separation": {"population": 6, "cohort": 2, "rest": 3, "seed": 1},
        "cyclic_poisson": {"population": 6, "groups": 2, "rate": 0.5},
        "random_allocation": {"population": 6, "bins": 2},
        "kept_bins": {"population": 6, "bins": 2},
    },
    "Schedule": {
        "constant": {"value": 0.5},
        "decay": {"start": 0.5, "factor": 0.9},
        "linear": {"start": 0.5, "end": 0.25, "rounds": 7},
        "piecewise": {"start": 0.5, "factor": 0.1, "milestones": [1, 5]},
        "inverse_time": {"scale": 0.5, "shift": 4.0},
        "per_step": {"schedule": {"kind": "inverse_time", "scale": 0.5, "shift": 4.0}},
        "travelled": {"schedule": {"kind": "inverse_time", "scale": 0.5, "shift": 4.0}, "steps": 3},
        "adaptive": {"start": 0.5},
        "clip_norms": {"names": ["first", "second"], "clip_norms": [0.3, 0.4]},
        "scaled": {"schedule": {"kind": "decay", "start": 0.5, "factor": 0.9}, "factor": 2.0},
    },
    "LocalSolver": {
        "scaffold": {"lr": 0.25, "steps": 3, "batch": 2},
        "local_sgd": {"lr": 0.25, "steps": 3, "batch": 2, "momentum": 0.5, "weight_decay": 0.25, "project": True},
        "batch_gradient": {
            "records": RECORDS,
            "clip_norm": 0.5,
            "norm": 1,
            "gradient": {"kind": "moreau", "beta": 2.0},
        },
        "noisy_local_sgd": {
            "records": RECORDS,
            "clip_norm": {"kind": "decay", "start": 0.5, "factor": 0.9},
            "noise_multiplier": 1.5,
            "lr": 0.25,
            "steps": 3,
            "noise_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    },
    "RecordSampler": {
        "all_records": {"sizes": [5, 3, 2, 1, 7, 4]},
        "poisson_records": {"batch": 2.5, "sizes": [9]},
        "fixed_records": {"batch": 2, "sizes": [9]},
        "allocated_records": {"bins": 3, "sizes": [9]},
        "one_pass": {"batch": 2, "sizes": [9]},
        "shuffled_records": {"batch": 2, "sizes": [9]},
        "records_in_turn": {"batch": 2, "sizes": [9]},
    },
    "Gradient": {
        "plain": {},
        "sam": {"rho": 0.05},
        "blur": {"strength": 0.5},
        "proximal": {"strength": 0.5},
        "bounded": {"clip_norm": 0.5, "norm": 1},
        "moreau": {"beta": 2.0, "steps": 30},
    },
    "Step": {
        "clip": {"clip_norm": 0.5, "norm": 1},
        "sparsify_update": {"keep": 0.5},
        "public_mask": {"keep": 0.5, "source": {"kind": "random"}},
    },
    "MaskSource": {"random": {}, "public_data": {}, "released": {}},
    "Postprocess": {
        "laplacian_smoothing": {"strength": 0.5},
        "when_noisy": {"denoiser": {"kind": "laplacian_smoothing", "strength": 0.5}, "above": 12.5},
        "james_stein": {},
        "soft_threshold": {},
        "sparsify_mean": {"keep": 0.5},
    },
    "ServerOptimizer": {
        "sgd": {
            "lr": 0.5,
            "momentum": 0.25,
            "weight_decay": 0.125,
            "ball": 2.0,
            "average": {"growth": 1.5, "after": 1},
        },
        "torch_optimizer": {"name": "torch.optim.sgd.SGD"},
        "yogi": {"lr": 0.5, "beta1": 0.25, "beta2": 0.5, "floor": 0.125},
        "adagrad": {"lr": 0.5, "beta1": 0.25, "floor": 0.125},
        "adam": {"lr": 0.5, "beta1": 0.25, "beta2": 0.5, "floor": 0.125},
        "accelerated": {"v": 2.0, "mu": 0.5, "weight_decay": 0.25, "ball": 2.0},
        "stages": {
            "stages": [
                {"rounds": 1, "server": {"kind": "sgd", "lr": 0.5, "momentum": 0.25}},
                {"rounds": 1, "server": {"kind": "accelerated", "v": 2.0}},
            ]
        },
    },
    "Extractor": {
        "scattering": {"J": 3, "groups": 9, "normalise": "digits"},
        "random_convolutions": {"filters": 8, "kernel": 3, "grid": 2, "seed": 4},
        "pretrained": {"size": 96, "stages": [6, 7]},
    },
    "Preparation": {
        "histogram": {"column": "a", "epsilon": 0.1, "low": 0.0, "high": 5.0, "bins": 8, "grid": "log"},
        "moment": {"column": "mean", "noise_multiplier": 15.0, "clip_norm": 2.0, "size": 4},
    },
    "Mechanism": {"gaussian": {"noise_multiplier": 1.5}, "laplace": {"noise_multiplier": 1.5}},
    "Release": {
        "central_noise": {"mechanism": GAUSSIAN},
        "scheduled_noise": {"noise_multiplier": [2.0, 1.0], "steps": [5, 5], "scale": 1.5},
        "noise_shares": {"noise_multiplier": 1.5, "at_least": 2},
        "local_noise": {"mechanism": GAUSSIAN, "noise_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]},
        "shuffled_noise": {"mechanism": GAUSSIAN, "at_least": 2},
        "masked_noise": {"noise_multiplier": 1.5, "keep": 0.5},
        "correlated_noise": {"mechanism": GAUSSIAN, "strategy": {"kind": "banded_square_root", "width": 2}},
        "forward": {},
        "no_noise": {},
    },
    "Strategy": {
        "identity": {},
        "banded_square_root": {"width": 2},
        "banded": {"width": 2, "coefficients": [1.0, 0.25]},
        "buffered_toeplitz": {"buffers": 2, "weights": [0.25, 0.5], "decays": [0.5, 0.75]},
        "tree": {},
    },
    "Event": {
        "gaussian": {"noise_multiplier": 1.5},
        "laplace": {"noise_multiplier": 1.5},
        "poisson_sampled": {"rate": 0.5, "event": GAUSSIAN},
        "publicly_sampled": {"rate": 0.5, "event": GAUSSIAN},
        "kept_bins": {
            "bins": 10,
            "event": {"kind": "gaussian", "noise_multiplier": 1.0},
            "kept": [10, 5],
            "own": [2.0, 1.5],
            "shared": [1.5, 2.0],
        },
        "allocated": {"bins": 4, "event": GAUSSIAN},
        "capped_poisson": {"rate": 0.5, "population": 9, "cap": 5, "event": GAUSSIAN},
        "fixed_sampled": {"population": 9, "cohort": 5, "event": GAUSSIAN},
        "shuffled": {"reports": 9, "event": GAUSSIAN},
        "approximate": {"epsilon": 0.5, "delta": 0.25},
        "tuned": {"event": GAUSSIAN, "count": 3, "trials": {"mean": 2.5}},
        "unprotected": {},
    },
    "Metric": {
        "auc": {"each": True},
        "average_precision": {"each": True},
        "balanced_accuracy": {},
        "f1": {"average": "micro"},
        "token_accuracy": {},
        "group_accuracy": {},
        "r2": {},
        "mae": {},
        "own": {"name": "own_of_test_codec"},
    },
    "Loss": {
        "cross_entropy": {},
        "mse": {},
        "tokens": {},
        "logistic": {},
        "absolute": {},
        "hinge": {},
        "quantile": {"tau": 0.9},
        "own": {"name": "own_of_test_codec"},
    },
    "Partitioner": {
        "iid": {"clients": 3},
        "dirichlet": {"clients": 3, "alpha": 0.5},
        "shards": {"clients": 3},
        "sorted_target": {"clients": 3},
        "natural": {"clients": 3},
    },
    "Architecture": {
        "logistic": {},
        "linear": {},
        "mlp": {"hidden": [5, 4]},
        "svhn_cnn": {},
        "emnist_cnn": {},
        "femnist_cnn": {},
        "small_cnn": {},
        "dp_mnist_cnn": {},
        "resnet18": {},
        "char_lstm": {},
        "own": {"name": "own_of_test_codec", "options": {"width": 3}},
        "in_memory": {"name": "Net", "layout": "ab" * 32, "inputs": [4], "loss": "mine", "metrics": ["one"]},
    },
}
FAMILIES: dict[str, Any] = {family.__name__: family for family in Part.__subclasses__()}
KINDS = [
    (name, kind)
    for name, family in FAMILIES.items()
    for kind, part in family.members.items()
    if part.__module__.startswith("sordino.")  # other tests bring parts of their own
]
FOR_RECORDS: dict[str, dict[str, Any]] = {
    "batch_gradient": {"encode": ()},
    "noisy_local_sgd": {"encode": (), "release": Forward()},
}


def of_a_loop(clip_norm: Any) -> dict[str, Any]:
    """Parts of a plan whose records may all be in every step."""
    return {"local": BatchGradient(PoissonRecords(2.0, (6,)), clip_norm), "encode": (), "clients": Everyone(6)}


IN_PLAN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Sampler": lambda part: {"clients": part},
    "LocalSolver": lambda part: {"local": part, **({} if part.reads is None else FOR_RECORDS[part.kind])},
    "RecordSampler": lambda part: {"local": BatchGradient(part, 0.5), "encode": ()},
    "Step": lambda part: {"encode": (part, Clip(0.5))},
    "Postprocess": lambda part: {"postprocess": (part,)},
    "ServerOptimizer": lambda part: {"server": part},
    "Release": lambda part: {"release": part, **(of_a_loop(0.5) if part.scheduled else {})},
    "Strategy": lambda part: {"release": CorrelatedNoise(Gaussian(1.5), part)},
    "Schedule": lambda part: of_a_loop(part) if part.kind == "clip_norms" else {"encode": (Clip(part),)},
    "Gradient": lambda part: {"local": LocalSgd(lr=0.5, epochs=1, gradient=part)},
    "Preparation": lambda part: {"prepare": (part,)},
    "Mechanism": lambda part: {"release": CentralNoise(part), "encode": (Clip(0.5, norm=1),)},
}
UNFIT = {("Release", "forward"), ("Release", "masked_noise")}  # no plan may hold them as things stand


def example(family: str, kind: str) -> Any:
    if kind not in EXAMPLES.get(family, {}):
        pytest.fail(f"{family} {kind!r} has no example in {__name__}.EXAMPLES: add the table a file would hold")
    return codec.read(FAMILIES[family], {"kind": kind, **EXAMPLES[family][kind]})


def again(value: Plan) -> Plan:
    back = codec.read(Plan, tomllib.loads(codec.to_toml(value)))
    assert isinstance(back, Plan)
    return back


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_every_part_survives_toml_and_json_with_its_hash(family: str, kind: str) -> None:
    part, of = example(family, kind), FAMILIES[family]
    assert part.kind == kind
    assert type(part) is of.members[kind]
    written = tomllib.loads(codec.to_toml(part))
    assert written == json.loads(codec.to_json(part))
    assert written["kind"] == kind
    assert codec.read(of, written) == part
    assert codec.digest(codec.read(of, written)) == codec.digest(part)


@pytest.mark.parametrize(("family", "kind"), [pair for pair in KINDS if pair[0] in IN_PLAN and pair not in UNFIT])
def test_a_plan_with_any_part_survives_its_file_with_its_hash(family: str, kind: str) -> None:
    whole = plan(**IN_PLAN[family](example(family, kind)))
    back = again(whole)
    assert back == whole
    assert back.hash == whole.hash
    assert codec.to_toml(back) == codec.to_toml(whole)


def test_an_infinite_radius_survives_its_file() -> None:
    whole = plan(encode=(Clip(math.inf),), release=NoNoise())
    assert again(whole) == whole
    assert again(whole).hash == whole.hash


@pytest.mark.parametrize(
    ("whole", "fraction"),
    [
        (plan(encode=(Clip(1),)), plan(encode=(Clip(1.0),))),
        (plan(local=LocalSgd(lr=1, epochs=1)), plan(local=LocalSgd(lr=1.0, epochs=1))),
        (plan(server=Sgd(lr=Decay(1, 1))), plan(server=Sgd(lr=Decay(1.0, 1.0)))),
        (plan(clients=Poisson(6, 1)), plan(clients=Poisson(6, 1.0))),
        (plan(release=CentralNoise(Gaussian(2))), plan(release=CentralNoise(Gaussian(2.0)))),
    ],
)
def test_equal_plans_have_one_hash_whether_a_number_was_written_1_or_1_0(whole: Plan, fraction: Plan) -> None:
    """Else the certificate of a plan made in Python as Clip(1) would not match its own plan.toml."""
    assert whole == fraction
    assert whole.hash == fraction.hash
    assert again(whole).hash == whole.hash


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path to every number of a plan; an index into a tuple is a name too."""
    if isinstance(value, tuple):
        yield from (found for i, item in enumerate(value) for found in numbers(item, (*path, str(i))))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from numbers(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, int | float):
        yield path


def moved(value: Any, path: tuple[str, ...], share: float) -> Any:
    """The same value with one number a little larger; a whole number by one."""
    if not path:
        return (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * (1 + share)
    if isinstance(value, tuple):
        return tuple(moved(item, path[1:], share) if str(i) == path[0] else item for i, item in enumerate(value))
    return replace(value, **{path[0]: moved(getattr(value, path[0]), path[1:], share)})


FULL = Plan(
    rounds=5,
    clients=FixedSize(9, 5),
    local=LocalSgd(lr=Decay(0.5, 0.9), steps=4, batch=3, momentum=0.5, weight_decay=0.25, project=True),
    encode=(Clip(2.0),),
    release=CentralNoise(Gaussian(1.5)),
    postprocess=(example("Postprocess", "laplacian_smoothing"),),
    server=Adam(lr=0.25, beta1=0.5, beta2=0.25, floor=0.125),
)
TABLE: dict[str, Any] = tomllib.loads(codec.to_toml(FULL))
NUMBERS = [path for path in numbers(FULL) if path[-1] != "norm"]


def test_the_hash_changes_with_any_number() -> None:
    assert len(NUMBERS) == 17
    changed = [moved(FULL, path, share) for path in NUMBERS for share in (1e-12, 0.5)]
    assert FULL not in changed
    assert FULL.hash not in {other.hash for other in changed}


def test_the_hash_changes_with_the_kind_and_with_the_norm() -> None:
    assert plan(server=Adam()).hash != plan(server=Sgd()).hash
    assert plan(encode=(Clip(1.0, norm=1),)).hash != plan(encode=(Clip(1.0, norm=2),)).hash
    assert replace(FULL, postprocess=()).hash != FULL.hash


def spoilt(path: str, value: Any, drop: bool = False) -> Any:
    """The plan's table with one entry set, or taken out."""
    new: Any = copy.deepcopy(TABLE)
    *way, last = path.split(".")
    holder: Any = new
    for key in way:
        holder = holder[int(key) if key.isdigit() else key]
    if drop:
        del holder[last]
    else:
        holder[last] = value
    return new


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (spoilt("round", 3), "unknown key round; .*did you mean 'rounds'"),
        (spoilt("clients.cohrt", 3), "unknown key clients.cohrt; .*did you mean 'cohort'"),
        (spoilt("local.epoch", 3), "unknown key local.epoch; .*did you mean 'epochs'"),
        (spoilt("encode.0.clip_nrom", 3.0), r"unknown key encode\[0\].clip_nrom; .*did you mean 'clip_norm'"),
        (
            spoilt("release.mechanism.multiplyer", 3.0),
            "release.mechanism.multiplyer; .*did you mean 'noise_multiplier'",
        ),
        (spoilt("local.lr.facter", 3.0), "unknown key local.lr.facter; .*did you mean 'factor'"),
        (
            spoilt("local.lr", {"kind": "linear", "start": 1.0, "end": 0.1, "rounds": 3, "round": 3}),
            "unknown key local.lr.round; .*did you mean 'rounds'",  # not the fields of the model named linear
        ),
        (spoilt("nonsense", 3), "unknown key nonsense; .*use one of: .*release"),
        (spoilt("rounds", "three"), "rounds = 'three'.*whole number"),
        (spoilt("rounds", 2.5), "rounds = 2.5.*whole number"),
        (spoilt("rounds", True), "rounds = True.*whole number"),
        (spoilt("clients.cohort", "5"), "clients.cohort = '5'.*whole number"),
        (spoilt("release.mechanism.noise_multiplier", "1"), "release.mechanism.noise_multiplier = '1'.*number"),
        (spoilt("server.lr", [1.0]), r"server.lr = \[1.0\]|server.lr"),
        (spoilt("encode.0.norm", 3), r"encode\[0\].norm = 3.*1, 2"),
        (spoilt("clients.kind", "poison"), "kind 'poison' in clients; .*did you mean 'poisson'"),
        (spoilt("release.mechanism.kind", "gauss"), "kind 'gauss' in release.mechanism; .*did you mean 'gaussian'"),
        (spoilt("clients.kind", None, drop=True), "no kind in clients"),
        (spoilt("rounds", None, drop=True), "no rounds"),
        (spoilt("clients.population", None, drop=True), "no clients.population"),
        (spoilt("release", None, drop=True), "no release"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_with_its_place_and_remedy(data: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        codec.read(Plan, data)
    assert "\n" not in str(caught.value)


def test_a_plan_that_breaks_a_rule_is_refused_when_read() -> None:
    with pytest.raises((PlanError, ConfigError), match="Clip"):
        codec.read(Plan, spoilt("encode", []))


def test_reading_names_the_file_it_was_asked_about() -> None:
    with pytest.raises(ConfigError, match=r"plan\.clients\.cohrt"):
        codec.read(Plan, spoilt("clients.cohrt", 3), where="plan")


def test_the_schema_for_editors_names_every_kind_of_a_plan() -> None:
    text = json.dumps(json_schema(Plan))
    assert all(word in text for word in ("rounds", "clients", "population", "cohort", "noise_multiplier", "strength"))


def test_a_part_where_another_kind_fits_is_refused() -> None:
    with pytest.raises(ConfigError):
        codec.read(Everyone, {"kind": "poisson", "population": 6})
