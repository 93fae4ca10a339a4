"""Recipes: functions that return the `Plan` of a published method. `add_recipe` registers a recipe of your own."""

from __future__ import annotations

from collections.abc import Callable

from sordino.errors import ConfigError
from sordino.plan import Plan
from sordino.recipes.best import best, head

# isort: off
# fmt: off
from sordino.recipes.client_level import (
    band_mf, blur, client_side_fed_avg, dp_fed_avg, dp_fed_ls, dp_fed_sam, dp_fed_sam_top_k, dp_ftrl, fed_smp, scaffold,
)
from sordino.recipes.record_level import (
    accelerated_minibatch_sgd, dp_adam, dp_ls_adam, dp_ls_sgd, dp_sgd, noisy_local_sgd, noisy_minibatch_sgd, silo,
)

_SHIPPED: tuple[Callable[..., Plan], ...] = (
    dp_fed_avg, dp_fed_ls, dp_fed_sam, dp_fed_sam_top_k, fed_smp, blur, best, head, dp_ftrl, band_mf, scaffold,
    noisy_minibatch_sgd, accelerated_minibatch_sgd, noisy_local_sgd, client_side_fed_avg, silo, dp_sgd, dp_ls_sgd,
    dp_adam, dp_ls_adam,
)
__all__ = [
    "RECIPES", "accelerated_minibatch_sgd", "add_recipe", "band_mf", "best", "blur", "client_side_fed_avg", "dp_adam",
    "dp_fed_avg", "dp_fed_ls", "dp_fed_sam", "dp_fed_sam_top_k", "dp_ftrl", "dp_ls_adam", "dp_ls_sgd", "dp_sgd",
    "fed_smp", "head", "noisy_local_sgd", "noisy_minibatch_sgd", "scaffold", "silo",
]
# fmt: on
RECIPES: dict[str, Callable[..., Plan]] = {recipe.__name__: recipe for recipe in _SHIPPED}


def add_recipe(function: Callable[..., Plan]) -> Callable[..., Plan]:
    """Register a function as a recipe under its name; it has typed keyword arguments and returns a `Plan`."""
    name = function.__name__
    known = RECIPES.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
        fix = f"rename it: {known.__module__} has registered this name"
        raise ConfigError(f"a second recipe {name!r}", "a name that no other recipe has", fix)
    RECIPES[name] = function
    return function
