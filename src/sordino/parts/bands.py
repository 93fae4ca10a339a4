"""Strategies with bands: a round's noise takes back that of the last rounds, and of no earlier ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sordino.errors import PlanError
from sordino.matrix import optimise, patterns, toeplitz
from sordino.matrix.patterns import Patterns
from sordino.matrix.toeplitz import Floats
from sordino.parts.strategies import LONG, Fresh, Memory, Strategy, Toeplitz, check_count, check_forget, digits

if TYPE_CHECKING:
    from torch import Tensor


class _Banded(Toeplitz):
    """n_t = z_t - sum_{j=1}^{bands-1} c_j n_{t-j}: the last rounds' noise is remembered, in float32, one row spare.

    The new row takes the place of one that the state before does not read: that state stays true.
    """

    width: int

    @property
    def bands(self) -> int | None:
        return self.width

    def scale(self, t: int) -> float:
        """What the noise n_t of round t is multiplied by where it is added."""
        return 1.0

    def init(self, length: int) -> Memory:
        import torch

        rows = len(self.column(LONG))
        return {"past": torch.zeros(rows, length), "at": torch.zeros((), dtype=torch.int64)} if rows > 1 else {}

    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        import torch

        if not memory:
            return fresh(), {}
        past, t = memory["past"], int(memory["at"])
        place = t % len(past)
        weights = np.concatenate([[0.0], self.column(LONG)[1:]])[(place - np.arange(len(past))) % len(past)]
        noise = (fresh() - torch.from_numpy(weights).to(past.dtype) @ past).to(past.dtype)
        past[place] = noise
        return noise.double() * self.scale(t), {"past": past, "at": torch.tensor(t + 1)}


@dataclass(frozen=True)
class BandedSquareRoot(_Banded, kind="banded_square_root"):
    """The first `width` entries of the square root of the matrix of sums: c_j = c_{j-1} (2j-1)/(2j)."""

    width: int

    def __post_init__(self) -> None:
        check_count("width", self.width)

    def column(self, rounds: int) -> Floats:
        return toeplitz.square_root(min(self.width, rounds))


@dataclass(frozen=True)
class Banded(_Banded, kind="banded"):
    """`width` entries that make the models' noise least for a run's rounds, patterns and server (BandMF, 2023).

    C_ts = c_{t-s} / scale_s. A column that the end of the run cuts off is as long as the others, scale_s = ||what is
    left of c|| / ||c||, so the noise of the last rounds is smaller and nobody moves C X by more: for bands that do not
    meet. `forget` is the share of a model's noise that training itself takes back in a round (curvature times step;
    Koloskova 2023): 0 is for sums, nothing given is 2 / rounds. The plan writes `coefficients` and `ends` down, so that
    noise, certificate and a resumed run have the same.
    """

    width: int
    coefficients: tuple[float, ...] = ()
    forget: float | None = None
    ends: int = 0  # the rounds of the run; 0: no column is scaled

    def __post_init__(self) -> None:
        check_count("width", self.width)
        check_forget(self.forget)
        given = np.asarray(self.coefficients)
        if len(given) and not (len(given) <= self.width and given[0] == 1.0 and np.isfinite(given).all()):
            needed = "at most `width` finite numbers that begin with 1"
            raise PlanError("correlated noise", f"{len(given)} coefficients", needed, "leave them out")
        if self.ends < 0:
            raise PlanError("correlated noise", f"ends = {self.ends}", "the rounds of the run", "leave it out")

    def fitted(self, allowed: Patterns, work: Callable[[], Floats]) -> Strategy:
        found = self.coefficients
        if not found:
            goal = optimise.Goal(allowed, work()).forgetting(self.forget)
            found = digits(tuple(optimise.banded(goal, self.width)))
        return replace(self, coefficients=found, ends=allowed.rounds if 1 < len(found) <= allowed.apart else 0)

    def column(self, rounds: int) -> Floats:
        if not self.coefficients:
            raise PlanError("correlated noise", "bands without coefficients", "a plan: it finds them")
        return np.asarray(self.coefficients[:rounds])

    def scale(self, t: int) -> float:
        if not self.ends:
            return 1.0
        if t >= self.ends:
            raise PlanError("correlated noise", f"round {t + 1} of a run of {self.ends}", "a plan of as many rounds")
        whole = np.asarray(self.coefficients)
        return float(np.linalg.norm(whole[: self.ends - t]) / np.linalg.norm(whole))

    def _scales(self, rounds: int) -> Floats:
        return np.array([self.scale(t) for t in range(rounds)])

    def sensitivity(self, allowed: Patterns) -> float:
        """Columns that do not meet, none longer than c: sqrt(rounds of one client) ||c||, whenever the run ended."""
        if not self.ends:
            return super().sensitivity(allowed)
        if len(self.coefficients) <= allowed.apart:
            return math.sqrt(allowed.reachable) * float(np.linalg.norm(self.coefficients))
        made = toeplitz.dense(self.column(allowed.rounds), allowed.rounds) / self._scales(allowed.rounds)
        return patterns.sensitivity_bound(made.T @ made, allowed)

    def errors(self, rounds: int, work: Floats | None = None) -> Floats:
        found = super().errors(rounds, work)
        late = range(max(0, self.ends - len(self.coefficients) + 1), rounds) if self.ends else ()
        made, scales = np.ones(rounds) if work is None else work, self._scales(rounds)
        back = toeplitz.inverse(self.column(rounds), rounds)
        for t in late:  # sum_s A_{t-s} scale_s r_{s-j}, the noise of model t in each Z_j
            found[t] = np.sum(toeplitz.correlate(back[: t + 1], made[t::-1] * scales[: t + 1]) ** 2)
        return found

    def noise_matrix(self, rounds: int) -> Floats:
        return self._scales(rounds)[:, None] * super().noise_matrix(rounds)
