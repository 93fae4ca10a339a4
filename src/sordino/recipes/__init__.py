"""One paper, one module; every recipe is a function that returns a `Plan`. Yours comes in by `add_recipe`."""

from __future__ import annotations

from collections.abc import Callable

from sordino.errors import ConfigError
from sordino.plan import Plan
from sordino.recipes.best import best
from sordino.recipes.client_level import (
    band_mf,
    blur,
    client_side_fed_avg,
    dp_fed_avg,
    dp_fed_ls,
    dp_fed_sam,
    dp_fed_sam_top_k,
    dp_ftrl,
    fed_smp,
    scaffold,
)
from sordino.recipes.record_level import (
    accelerated_minibatch_sgd,
    dp_adam,
    dp_ls_adam,
    dp_ls_sgd,
    dp_sgd,
    noisy_local_sgd,
    noisy_minibatch_sgd,
    silo,
)

RECIPES: dict[str, Callable[..., Plan]] = {
    "dp_fed_avg": dp_fed_avg,
    "dp_fed_ls": dp_fed_ls,
    "dp_fed_sam": dp_fed_sam,
    "dp_fed_sam_top_k": dp_fed_sam_top_k,
    "fed_smp": fed_smp,
    "blur": blur,
    "best": best,
    "dp_ftrl": dp_ftrl,
    "band_mf": band_mf,
    "scaffold": scaffold,
    "noisy_minibatch_sgd": noisy_minibatch_sgd,
    "accelerated_minibatch_sgd": accelerated_minibatch_sgd,
    "noisy_local_sgd": noisy_local_sgd,
    "client_side_fed_avg": client_side_fed_avg,
    "silo": silo,
    "dp_sgd": dp_sgd,
    "dp_ls_sgd": dp_ls_sgd,
    "dp_adam": dp_adam,
    "dp_ls_adam": dp_ls_adam,
}


def add_recipe(function: Callable[..., Plan]) -> Callable[..., Plan]:
    """A recipe of your own, under the function's name: keyword arguments with declared types, a `Plan` returned."""
    name = function.__name__
    known = RECIPES.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
        raise ConfigError(f"a second recipe {name!r}", "a name of its own", f"{known.__module__} has this one")
    RECIPES[name] = function
    return function


__all__ = [
    "RECIPES",
    "accelerated_minibatch_sgd",
    "add_recipe",
    "band_mf",
    "best",
    "blur",
    "client_side_fed_avg",
    "dp_adam",
    "dp_fed_avg",
    "dp_fed_ls",
    "dp_fed_sam",
    "dp_fed_sam_top_k",
    "dp_ftrl",
    "dp_ls_adam",
    "dp_ls_sgd",
    "dp_sgd",
    "fed_smp",
    "noisy_local_sgd",
    "noisy_minibatch_sgd",
    "scaffold",
    "silo",
]
