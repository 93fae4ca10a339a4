"""When to look whether a model keeps records apart: at the start, at random passes, and before a certificate.

At the start parameters are shaken too (on a copy), so that mixing behind a weight of zero shows at once. Later passes
are chosen by coins that the model does not see, so often that those looks cost half a percent of the work.
A model that is made of torch's own layers in a row needs no second look (`apart`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from sordino.per_record.apart import kept_apart
from sordino.per_record.company import COARSE, FEW, ROUNDING, SOME, TURNED, Company, precise, refused, shaken, subset
from sordino.per_record.pieces import HALF
from sordino.per_record.tape import UnrecordableError
from sordino.rng import Secure

WORK = 0.005  # of the records of a run are run once more
WHOLE = 0.25  # of the looks have the whole batch for company, and compare gradients too

HALVED = 0.1  # the same as COARSE, of models in half precision

Forward = Callable[[Any], Any]


class Lookout:
    """Looks at one model; `of(model)` is the pass over (inputs) of that model or of a copy of it."""

    def __init__(self, model: nn.Module, of: Callable[[nn.Module], Forward], coins: np.random.Generator | None) -> None:
        self.model, self.of = model, of
        self.coins = Secure().at(0, "mixing") if coins is None else coins
        self.looks = 0
        self.random = False  # whether a pass has asked torch for coins

    def wants(self, size: int, expected: float) -> bool:
        """A coin for this pass; `expected` is the public size of a batch."""
        due = self.coins.random() < WORK / (WHOLE + (1 - WHOLE) * min(1.0, FEW / expected) + min(1.0, SOME / expected))
        return due and size > 1

    def needed(self) -> bool:
        """Whether the model could mix records at a later pass: not if it is made of layers that never do."""
        return not kept_apart(self.model)

    def start(self, company: Company) -> None:
        """The first batch as it is, then a few records with shaken parameters."""
        self.compare(company, min(SOME, company.size - 1))
        self._shaken(self._few(company))

    def again(self, company: Company) -> None:
        """A later batch; any disagreement is a refusal now, for steps have been taken."""
        company = company if self.coins.random() < WHOLE else replace(self._few(company), slopes=False)
        try:
            self.compare(company, int(self.coins.integers(1, min(SOME, company.size - 1) + 1)))
        except UnrecordableError:
            raise refused() from None

    def _few(self, company: Company) -> Company:
        if company.size <= FEW:
            return company
        return company.few(subset(company.size, self.coins, FEW))

    def compare(self, company: Company, count: int) -> None:
        """Refuse values that depend on the company; `UnrecordableError` where only the rules of the layers fail."""
        some = subset(company.size, self.coins, count)
        gap = replace(company, random=self.random).gap(some, self.coins)
        if gap.random and not self.random:
            self.random = True
            gap = replace(company, random=True).gap(some, self.coins)
        self.looks += 1
        if gap.values > ROUNDING and self._confirmed(company, some, gap.values):
            if not replace(company, random=self.random).steady():
                raise UnrecordableError("a model with coins that are not torch's")
            raise refused()
        if gap.slopes > TURNED:
            raise UnrecordableError("layers whose gradient for one record touches other records")

    def _confirmed(self, company: Company, some: torch.Tensor, found: float) -> bool:
        """What float32 may have rounded is asked again in float64."""
        half = torch.is_autocast_enabled("cpu") or any(p.dtype in HALF for p in self.model.parameters())
        if found > (HALVED if half else COARSE):
            return True
        exact = self._exact(company, precise(self.model), some)
        return exact is not None and exact > ROUNDING

    def _exact(self, company: Company, twin: nn.Module | None, some: torch.Tensor) -> float | None:
        """The distance of values in a copy in float64; None where it does not run."""
        if twin is None:
            return None
        inputs = tree_map(_double, company.inputs)
        try:
            twins = replace(company, forward=self.of(twin), inputs=inputs, tape=None, during=nullcontext)
            return replace(twins, random=self.random).gap(some, self.coins).values
        except (RuntimeError, ValueError, NotImplementedError):
            return None

    def _shaken(self, few: Company) -> None:
        """Refuse what shows with shaken parameters: in float32, and in a copy in float64 where that may be rounding."""
        some = subset(few.size, self.coins, (few.size + 1) // 2)
        with shaken(self.model, self.coins):
            found = self._plainly(few, some)
            if found is not None and found <= ROUNDING:
                return
            exact = self._exact(few, precise(self.model), some)
        if (found is not None and found > COARSE) if exact is None else (exact > ROUNDING):
            raise refused()

    def _plainly(self, few: Company, some: torch.Tensor) -> float | None:
        """The distance of values by the model's own layers; 0 if coins from elsewhere move it, None if it won't run."""
        plain = replace(few, forward=self.of(self.model), tape=None, during=nullcontext, random=self.random)
        try:
            found = plain.gap(some, self.coins).values
            return found if found <= ROUNDING or plain.steady() else 0.0
        except (RuntimeError, ValueError, NotImplementedError):
            return None


def _double(item: Any) -> Any:
    return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
