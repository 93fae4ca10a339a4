"""Arguments that recipes share, and the function that builds a `Plan` from them; every recipe module uses both.

A recipe declares its shared arguments once, as `**shared: Unpack[Federated]`, under the decorator `@shares()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from inspect import Parameter
from typing import Any, ParamSpec, Required, TypedDict, Unpack, get_args, get_type_hints

from sordino.errors import ConfigError
from sordino.parts.encoding import Clip, Postprocess, Step
from sordino.parts.gradients import Gradient, Plain
from sordino.parts.local_solvers import LocalSgd, LocalSolver
from sordino.parts.mechanisms import Gaussian, Mechanism
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.releases import CentralNoise, NoNoise, Release
from sordino.parts.samplers import Sampler
from sordino.parts.schedules import Schedule
from sordino.parts.server_optimizers import ServerOptimizer, Sgd
from sordino.plan import Plan

P = ParamSpec("P")
DEFAULTS: dict[str, Any] = {
    "noise_multiplier": None, "release": None, "denoiser": None, "server": Sgd(), "gradient": Plain(),
    "epochs": 1, "batch": None, "momentum": 0.0, "weight_decay": 0.0,
}  # fmt: skip


class Rounds(TypedDict, total=False):
    """Arguments of every client-level recipe: rounds, clip norm, post-processing and server."""

    rounds: Required[int]
    clip_norm: Required[float | Schedule]
    denoiser: Postprocess | None
    server: ServerOptimizer


class Messages(Rounds, total=False):
    """Arguments of a recipe whose clients send one clipped message each: those of `Rounds`, the sampler, the noise."""

    clients: Required[Sampler]
    noise_multiplier: float | None
    release: Release | None


class LocalWork(TypedDict, total=False):
    """Arguments of recipes for the local SGD of clients."""

    lr: Required[float | Schedule]
    epochs: int
    batch: int | None
    momentum: float
    weight_decay: float


class Federated(Messages, LocalWork, total=False):
    """Arguments of a recipe whose clients run local SGD and send one clipped message each."""


class Correlated(Rounds, LocalWork, total=False):
    """Arguments of a federated recipe with correlated noise, except its sampler and its noise."""

    gradient: Gradient


class SingleSilo(TypedDict, total=False):
    """Arguments of a recipe for one silo that holds all the records and adds the noise."""

    rounds: Required[int]
    records: Required[RecordSampler]
    clip_norm: Required[float | Schedule]
    noise_multiplier: float | None
    release: Release | None
    denoiser: Postprocess | None


class Silos(TypedDict, total=False):
    """Arguments of a recipe whose silos clip record by record and send one gradient per round."""

    rounds: Required[int]
    clients: Required[Sampler]
    records: Required[RecordSampler]
    clip_norm: Required[float | Schedule]
    noise_multiplier: float | None
    release: Release | None
    gradient: Gradient


def shares(**usual: Any) -> Callable[[Callable[P, Plan]], Callable[P, Plan]]:
    """Return a decorator that writes a recipe's shared arguments into its signature, with defaults `usual` first.

    Configuration files, reference pages and `help()` read all arguments of a recipe from that signature.
    """

    def decorate(recipe: Callable[P, Plan]) -> Callable[P, Plan]:
        *own, rest = inspect.signature(recipe, eval_str=True).parameters.values()
        defaults = {**DEFAULTS, **usual}
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, Parameter.empty), annotation=annotation)
            for name, annotation in get_type_hints(get_args(rest.annotation)[0]).items()
        ]
        ordered = sorted([*shared, *own], key=lambda parameter: parameter.default is not parameter.empty)
        signature = inspect.Signature(ordered, return_annotation=Plan)

        @wraps(recipe)
        def build(*args: P.args, **given: P.kwargs) -> Plan:
            signature.bind(*args, **given)
            return recipe(*args, **{**usual, **given})

        build.__signature__ = signature  # type: ignore[attr-defined]
        return build

    return decorate


def plan_of(
    local: LocalSolver,
    given: dict[str, Any],
    encode: tuple[Step, ...] = (),
    noise: Callable[[Mechanism], Release] = CentralNoise,
) -> Plan:
    """Return the plan of a local solver, encode steps and a recipe's shared arguments, with its noise strategy fitted.

    A `noise_multiplier` means Gaussian noise in the release `noise`, 0 means no noise; else `release` is used.
    """
    given = {**DEFAULTS, **given}
    multiplier, release, denoiser = given["noise_multiplier"], given["release"], given["denoiser"]
    if (multiplier is None) == (release is None):
        found = "neither a noise multiplier nor a release" if release is None else "a noise multiplier and a release"
        fix = "set noise_multiplier" if release is None else "drop noise_multiplier: the release has its own"
        raise ConfigError(found, "exactly one of the two", fix)
    if release is None:
        release = noise(Gaussian(multiplier)) if multiplier else NoNoise()
    plan = Plan(
        rounds=given["rounds"], clients=given["clients"], local=local, encode=encode, release=release,
        postprocess=(denoiser,) if denoiser else (), server=given["server"],
    )  # fmt: skip
    return plan.fitted() if release.correlated else plan


def federated(
    *,
    gradient: Gradient = Plain(),
    project: bool = False,
    sparsify: Step | None = None,
    noise: Callable[[Mechanism], Release] = CentralNoise,
    **shared: Unpack[Federated],
) -> Plan:
    """Return the plan of clients that run local SGD and send a clipped update, after an optional `sparsify` step."""
    given: dict[str, Any] = {**DEFAULTS, **shared}
    decay, momentum = given["weight_decay"], given["momentum"]
    local = LocalSgd(given["lr"], given["epochs"], None, given["batch"], momentum, decay, project, gradient)
    clip = Clip(given["clip_norm"])
    return plan_of(local, given, (sparsify, clip) if sparsify else (clip,), noise)
