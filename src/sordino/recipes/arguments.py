"""The arguments that recipes have in common, written once: `**shared: Unpack[Federated]` under `@shares(federated)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Required, TypedDict, Unpack, get_args

from sordino.errors import ConfigError
from sordino.parts.encoding import Clip, Postprocess, Step
from sordino.parts.gradients import Gradient, Plain
from sordino.parts.local_solvers import LocalSgd, LocalSolver
from sordino.parts.mechanisms import Gaussian, Mechanism
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import CentralNoise, LocalNoise, NoNoise, Release
from sordino.parts.samplers import Sampler
from sordino.parts.schedules import Schedule
from sordino.parts.server_optimizers import ServerOptimizer, Sgd
from sordino.plan import Plan

P = ParamSpec("P")


def shares(build: Callable[..., Any], **usual: Any) -> Callable[[Callable[P, Plan]], Callable[P, Plan]]:
    """Write a recipe's shared arguments into its signature, with the defaults of `build`, or its `usual` ones.

    Files, pages and `help()` then know every argument: what is required, what is shared, the recipe's own.
    """
    known = inspect.signature(build, eval_str=True).parameters

    def sharing(recipe: Callable[P, Plan]) -> Callable[P, Plan]:
        *own, rest = inspect.signature(recipe, eval_str=True).parameters.values()
        names = get_args(rest.annotation)[0].__annotations__
        shared = [known[name].replace(default=usual.get(name, known[name].default)) for name in names]
        ordered = sorted([*shared, *own], key=lambda parameter: parameter.default is not parameter.empty)
        signature = inspect.Signature(ordered, return_annotation=Plan)

        @wraps(recipe)
        def made(*args: P.args, **given: P.kwargs) -> Plan:
            signature.bind(*args, **given)
            return recipe(*args, **{**usual, **given})

        made.__signature__ = signature  # type: ignore[attr-defined]
        return made

    return sharing


def released(
    noise_multiplier: float | None, release: Release | None, usual: Callable[[Mechanism], Release] = CentralNoise
) -> Release:
    """A number is Gaussian noise where the recipe has it, 0 none; any other noise is a release of its own."""
    if (noise_multiplier is None) == (release is None):
        found = "neither a noise multiplier nor a release" if release is None else "a noise multiplier and a release"
        raise ConfigError(found, "exactly one of them", "a release has its own noise multiplier")
    if release is not None:
        return release
    return usual(Gaussian(noise_multiplier)) if noise_multiplier else NoNoise()


# ---- clients ---------------------------------------------------------------------------------------------------------


class Messages(TypedDict, total=False):
    """Clients that send one clipped message each; noise on the sum."""

    rounds: Required[int]
    clients: Required[Sampler]
    clip_norm: Required[float | Schedule]
    noise_multiplier: float | None
    release: Release | None
    denoiser: Postprocess | None
    server: ServerOptimizer


def messages(
    local: LocalSolver,
    sparsify: Step | None = None,
    *,
    rounds: int,
    clients: Sampler,
    clip_norm: float | Schedule,
    noise_multiplier: float | None = None,
    release: Release | None = None,
    denoiser: Postprocess | None = None,
    server: ServerOptimizer = Sgd(),
) -> Plan:
    """Their plan: what `local` makes of the model, made sparse if asked, clipped."""
    return Plan(
        rounds=rounds,
        clients=clients,
        local=local,
        encode=(sparsify, Clip(clip_norm)) if sparsify else (Clip(clip_norm),),
        release=released(noise_multiplier, release),
        postprocess=(denoiser,) if denoiser else (),
        server=server,
    ).fitted()


class Federated(Messages, total=False):
    """Messages of clients that take SGD steps of their own."""

    lr: Required[float | Schedule]
    epochs: int
    batch: int | None
    momentum: float
    weight_decay: float


@shares(messages)
def federated(
    *,
    lr: float | Schedule,
    epochs: int = 1,
    batch: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    gradient: Gradient = Plain(),
    project: bool = False,
    sparsify: Step | None = None,
    **shared: Unpack[Messages],
) -> Plan:
    """Their plan; `gradient`, `project` and `sparsify` are what a recipe may add of its own."""
    local = LocalSgd(lr, epochs, None, batch, momentum, weight_decay, project, gradient)
    return messages(local, sparsify, **shared)


# ---- records ---------------------------------------------------------------------------------------------------------


class Silos(TypedDict, total=False):
    """Silos that clip record by record and send one gradient per round."""

    rounds: Required[int]
    clients: Required[Sampler]
    records: Required[RecordSampler]
    clip_norm: Required[float | Schedule]
    noise_multiplier: float | None
    release: Release | None
    gradient: Gradient


def silos(
    server: ServerOptimizer,
    *,
    rounds: int,
    clients: Sampler,
    records: RecordSampler,
    clip_norm: float | Schedule,
    noise_multiplier: float | None = None,
    release: Release | None = None,
    gradient: Gradient = Plain(),
) -> Plan:
    """Their plan; a noise multiplier is noise of every silo's own."""
    return Plan(
        rounds=rounds,
        clients=clients,
        local=BatchGradient(records, clip_norm, gradient=gradient),
        release=released(noise_multiplier, release, LocalNoise),
        server=server,
    ).fitted()
