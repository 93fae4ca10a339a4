"""An attack on what is released of a column before the first round: two neighbours, as far apart as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sordino.accounting.bounds import Unit
from sordino.accounting.composition import Line
from sordino.accounting.events import Relation
from sordino.audit.record_attack import Proved, prove
from sordino.engines.prepare import noised_total
from sordino.parts.mechanisms import Laplace
from sordino.parts.preparation import Preparation, Values
from sordino.plan import Plan
from sordino.rng import Seeded, Streams

HELD = 1 << 24  # numbers drawn for each world
Release = Callable[[Plan, Preparation, Iterable[Values], Streams], Tensor]


@dataclass(frozen=True)
class Copies(Preparation):
    """So many releases of one column as one long message: noise is independent per coordinate, so the law is theirs."""

    inner: Preparation
    count: int

    @property
    def column(self) -> str:  # type: ignore[override]
        return self.inner.column

    def message(self, shares: Values, unit: Unit) -> Values:
        return np.tile(self.inner.message(shares, unit), self.count)

    def noise(self, relation: Relation) -> Laplace:
        return self.inner.noise(relation)


def audit_preparation(
    plan: Plan,
    part: Preparation,
    delta: float,
    trials: int = 200_000,
    alpha: float = 1e-3,
    seed: int = 0,
    release: Release = noised_total,
) -> Proved:
    """One unit's values are all low, or all high; or, where a unit is taken away, all low or not there.

    The bins that differ are added up by their sign, each cut at where Laplace noise of this size tells no more.
    `release` is what runs; the promise is the plan's.
    """
    relation = plan.forecast.lines[0].relation
    own = (np.zeros(1), np.ones(1) if relation == "replace_one" else np.zeros(0))
    first, second = (part.message(values, plan.unit) for values in own)
    copies = Copies(part, min(trials, HELD // len(first)))
    worlds = [_seen(plan, copies, mine, 2 * seed + k, release) for k, mine in enumerate(own)]
    shift, middle = first - second, (first + second) / 2
    there, gone = (np.clip((seen - middle) * np.sign(shift), -1, 1) @ np.abs(shift) for seen in worlds)
    return prove(there, gone, Line("models", relation, ((part.event(relation), 1),)), delta, alpha)


def _seen(plan: Plan, copies: Copies, mine: Values, world: int, release: Release) -> Values:
    """Releases of one client, who has `mine`: others could only add noise. [copies, bins]."""
    drawn: Values = release(plan, copies, [mine], Seeded(world)).numpy()
    return drawn.reshape(copies.count, -1)
