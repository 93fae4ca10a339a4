"""`sordino recipes`: list, and a file to start from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer

from sordino import codec
from sordino.cli.app import JsonFlag, Own, app, bring, say
from sordino.codec import plugins
from sordino.errors import ConfigError

recipes_app = typer.Typer(no_args_is_help=True, help="Algorithms that are ready to use.", rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def recipes_list(own: Own = None, as_json: JsonFlag = False) -> None:
    """Names and one line each."""
    strange = bool(own) or plugins.offered()
    if strange:
        bring(own)
    found = recipes(strange)
    wide = max(len(entry["name"]) for entry in found)
    say(as_json, {"recipes": found}, "\n".join(f"{entry['name']:<{wide}}  {entry['summary']}" for entry in found))


@recipes_app.command("show")
def recipes_show(name: str, own: Own = None, as_json: JsonFlag = False) -> None:
    """Arguments of one recipe, and a file to start from."""
    bring(own)
    found = recipe(name)
    say(as_json, found, found["example"])


SENTENCES = {  # here, so that a list of names does not wait for torch
    "dp_fed_avg": "DP-FedAvg (McMahan et al. 2018): clip each client's update, add noise to the sum.",
    "dp_fed_ls": "Paper 000, DP-Fed-LS: DP-FedAvg with Laplacian smoothing of the noised mean.",
    "dp_fed_sam": "Paper 003, DP-FedSAM: DP-FedAvg with sharpness-aware local steps.",
    "dp_fed_sam_top_k": "Paper 003, DP-FedSAM-top_k in three sound forms: a share of the coordinates is kept.",
    "fed_smp": "Fed-SMP (Hu et al. 2022): one public mask a round for all clients, random or by public data.",
    "blur": "BLUR (Cheng et al. 2022): local steps are pulled back into the clip ball; LUS adds a client's own top-k.",
    "best": "Our own: tight noise, a bold server step and a mean of the last models, solved for an epsilon.",
    "dp_ftrl": "DP-FTRL (Kairouz et al. 2021): noise that later rounds take back, by a tree.",
    "band_mf": "BandMF (Choquette-Choo et al. 2023): noise that later rounds take back, by an optimised band.",
    "scaffold": "SCAFFOLD (Karimireddy et al. 2020): control and update in one clipped, noised message.",
    "noisy_minibatch_sgd": "Paper 001: silos clip records, noise their gradient and trust nobody.",
    "accelerated_minibatch_sgd": "Paper 001: the same with acceleration, one pass or stages.",
    "noisy_local_sgd": "Paper 001, its baseline: noise in every local step of a silo.",
    "client_side_fed_avg": "Paper 002: every client adds Laplace or Gaussian noise to its own upload.",
    "silo": "Our own for silos: momentum, a falling step, and an epsilon for every silo that its noise is solved for.",
    "dp_sgd": "DP-SGD (Abadi et al. 2016): one holder of all data, gradients clipped record by record.",
    "dp_ls_sgd": "Paper 004, DP-LSSGD: DP-SGD with Laplacian smoothing of the noised gradient.",
    "dp_adam": "DP-Adam: DP-SGD's gradient, stepped by Adam.",
    "dp_ls_adam": "Paper 004, DP-LSAdam: DP-LSSGD's gradient, stepped by Adam.",
}


def recipes(strange: bool = True) -> list[dict[str, str]]:
    """Every recipe in a sentence; those of others, where there are any, in the first line of their own words."""
    if not strange:
        return [{"name": name, "summary": said} for name, said in SENTENCES.items()]
    from sordino.recipes import RECIPES

    return [{"name": name, "summary": SENTENCES.get(name) or _summary(made)} for name, made in RECIPES.items()]


def _summary(function: Callable[..., Any]) -> str:
    return ((inspect.getdoc(function) or "").splitlines() or ["without a word of its own"])[0]


def _type(annotation: Any) -> str:
    """`float | Schedule`, without the modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+", "", text)


def recipe(name: str) -> dict[str, Any]:
    """One recipe: its arguments and an example file."""
    from sordino.recipes import RECIPES, starters

    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r}", "a known recipe", codec.nearest(name, list(RECIPES)))
    parameters = inspect.signature(RECIPES[name]).parameters.values()
    arguments = {p.name: {"type": _type(p.annotation), "required": p.default is p.empty} for p in parameters}
    return {
        "name": name,
        "equation": inspect.getdoc(RECIPES[name]),
        "arguments": arguments,
        "example": starters.example(name),
    }
