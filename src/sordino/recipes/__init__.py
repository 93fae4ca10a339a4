"""One paper, one module; every recipe is a function that returns a `Plan`. Add yours to RECIPES."""

from __future__ import annotations

from collections.abc import Callable

from sordino.plan import Plan
from sordino.recipes.fed_avg import dp_fed_avg
from sordino.recipes.fed_ls import dp_fed_ls

RECIPES: dict[str, Callable[..., Plan]] = {"dp_fed_avg": dp_fed_avg, "dp_fed_ls": dp_fed_ls}

__all__ = ["RECIPES", "dp_fed_avg", "dp_fed_ls"]
