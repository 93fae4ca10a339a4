"""One paper, one module; every recipe is a function that returns a `Plan`. Add yours to RECIPES."""

from __future__ import annotations

from collections.abc import Callable

from sordino.plan import Plan
from sordino.recipes.best import best
from sordino.recipes.fed_avg import dp_fed_avg
from sordino.recipes.fed_ls import dp_fed_ls
from sordino.recipes.fed_sam import blur, dp_fed_sam, dp_fed_sam_top_k, fed_smp

RECIPES: dict[str, Callable[..., Plan]] = {
    "dp_fed_avg": dp_fed_avg,
    "dp_fed_ls": dp_fed_ls,
    "dp_fed_sam": dp_fed_sam,
    "dp_fed_sam_top_k": dp_fed_sam_top_k,
    "fed_smp": fed_smp,
    "blur": blur,
    "best": best,
}

__all__ = ["RECIPES", "best", "blur", "dp_fed_avg", "dp_fed_ls", "dp_fed_sam", "dp_fed_sam_top_k", "fed_smp"]
