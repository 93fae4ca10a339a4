"""Strategies with bands: a round's noise takes back that of the last rounds, and of no earlier ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sordino.accounting import matrix, sensitivity
from sordino.accounting.sensitivity import Floats, Patterns
from sordino.errors import PlanError
from sordino.parts.strategies import LONG, Fresh, Memory, Strategy, Toeplitz, check_count, check_forget, digits

if TYPE_CHECKING:
    from torch import Tensor


class _Banded(Toeplitz):
    """n_t = z_t - sum_{j=1}^{bands-1} c_j n_{t-j}: the last rounds' noise is remembered, one row spare.

    The new row takes the place of one that the state before does not read: that state stays true. It is remembered in
    float32 in simulation, in float64 for release (`CorrelatedNoise.noised`): the cast below, before `scale`, is then
    none.
    """

    width: int

    @property
    def bands(self) -> int | None:
        return self.width

    def scale(self, t: int) -> float:
        """What the noise n_t of round t is multiplied by where it is added."""
        return 1.0

    def row(self, t: int) -> Floats:
        """c_0, c_1, ... of round t: what is taken back of the noise of so many rounds before."""
        return self.column(LONG)

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
        weights = np.concatenate([[0.0], self.row(t)[1:]])[(place - np.arange(len(past))) % len(past)]
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
        return matrix.square_root(min(self.width, rounds))


@dataclass(frozen=True)
class Banded(_Banded, kind="banded"):
    """`width` entries that make the models' noise least for a run's rounds, patterns and server (BandMF, 2023).

    C_ts = (c_{t-s} + sqrt(s / ends) drift_{t-s}) / scale_s. Columns are of one length, those too that the end of the
    run cuts off: scale_s = ||what is left of c + ...|| / ||c||. So the noise of the last rounds is smaller and nobody
    moves C X by more: for bands that do not meet. `forget` is the share of a model's noise that training itself takes
    back in a round (curvature times step; Koloskova 2023): 0 is for sums, nothing given is 2 / rounds. A drift is
    looked for where `forget` is 0: it takes .6 to 1.3% of the noise of sums, .2% where training forgets. The plan
    writes `coefficients`, `drift` and `ends` down, so that noise, certificate and a resumed run have the same.
    """

    width: int
    coefficients: tuple[float, ...] = ()
    forget: float | None = None
    ends: int = 0  # the rounds of the run; 0: no column is scaled
    drift: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_count("width", self.width)
        check_forget(self.forget)
        given = np.asarray(self.coefficients)
        if len(given) and not (len(given) <= self.width and given[0] == 1.0 and np.isfinite(given).all()):
            needed = "at most `width` finite numbers that begin with 1"
            raise PlanError("correlated noise", f"{len(given)} coefficients", needed, "leave them out")
        if self.ends < 0:
            raise PlanError("correlated noise", f"ends = {self.ends}", "the rounds of the run", "leave it out")
        fits = len(self.drift) == len(self.coefficients) and self.drift[:1] == (0.0,) and self.ends
        if self.drift and not (fits and np.isfinite(self.drift).all()):
            needed = "a finite number for each coefficient, that of the first 0, and `ends`"
            raise PlanError("correlated noise", f"a drift of {len(self.drift)} numbers", needed, "leave it out")

    def fitted(self, allowed: Patterns, work: Callable[[], Floats]) -> Strategy:
        if self.coefficients:
            return replace(self, ends=self._ends(self.coefficients, allowed))
        goal = matrix.Goal(allowed, work()).forgetting(self.forget)
        found = matrix.best_bands(goal, self.width)
        if self.forget != 0.0 or not self._ends(found, allowed) or allowed.rounds > matrix.LONGEST:
            return replace(self, coefficients=digits(tuple(found)), ends=self._ends(found, allowed))
        first, drift = matrix.DriftSearch(goal, len(found)).found(found)
        return replace(self, coefficients=digits(tuple(first)), drift=digits(tuple(drift)), ends=allowed.rounds)

    def is_fitted(self, rounds: int) -> bool:
        return bool(self.coefficients) and self.ends in (0, rounds)

    def _ends(self, column: Sequence[float] | Floats, allowed: Patterns) -> int:
        return allowed.rounds if self.drift or 1 < len(column) <= allowed.min_separation else 0

    def column(self, rounds: int) -> Floats:
        if not self.coefficients:
            raise PlanError("correlated noise", "bands without coefficients", "a fitted plan", "plan = plan.fitted()")
        return np.asarray(self.coefficients[:rounds])

    def row(self, t: int) -> Floats:
        if not self.drift:
            return self.column(LONG)
        before = np.sqrt(np.maximum(t - np.arange(len(self.drift)), 0) / self.ends)
        return np.asarray(self.column(LONG) + before * np.asarray(self.drift))

    def scale(self, t: int) -> float:
        if not self.ends:
            return 1.0
        if t >= self.ends:
            raise PlanError("correlated noise", f"round {t + 1} of a run of {self.ends}", "a plan of as many rounds")
        first = np.asarray(self.coefficients)
        whole = first + np.sqrt(t / self.ends) * np.asarray(self.drift) if self.drift else first
        return float(np.linalg.norm(whole[: self.ends - t]) / np.linalg.norm(first))

    def _scales(self, rounds: int) -> Floats:
        return np.array([self.scale(t) for t in range(rounds)])

    def _columns(self, rounds: int) -> Floats:
        """[rounds, bands]: each column from the diagonal down, before it is scaled."""
        drift = np.asarray(self.drift) if self.drift else np.zeros(len(self.coefficients))
        return matrix.columns(np.asarray(self.coefficients), drift, rounds, self.ends)

    def sensitivity(self, allowed: Patterns) -> float:
        """Columns that do not meet, none longer than c: sqrt(rounds of one client) ||c||, whenever the run ended."""
        if not self.ends:
            return super().sensitivity(allowed)
        if len(self.coefficients) <= allowed.min_separation:
            return math.sqrt(allowed.reachable) * float(np.linalg.norm(self.coefficients))
        made = matrix.banded_matrix(self._columns(allowed.rounds)) / self._scales(allowed.rounds)
        return sensitivity.sensitivity_bound(made.T @ made, allowed)

    def errors(self, rounds: int, work: Floats | None = None) -> Floats:
        made, scales = np.ones(rounds) if work is None else work, self._scales(rounds)
        if self.drift:
            return matrix.drifting_errors(self._columns(rounds), scales, made)
        found = super().errors(rounds, work)
        late = range(max(0, self.ends - len(self.coefficients) + 1), rounds) if self.ends else ()
        back = matrix.inverse(self.column(rounds), rounds)
        for t in late:  # sum_s A_{t-s} scale_s r_{s-j}, the noise of model t in each Z_j
            found[t] = np.sum(matrix.correlate(back[: t + 1], made[t::-1] * scales[: t + 1]) ** 2)
        return found

    def noise_matrix(self, rounds: int) -> Floats:
        if not self.drift:
            return self._scales(rounds)[:, None] * super().noise_matrix(rounds)
        return self._scales(rounds)[:, None] * matrix.solve_columns(self._columns(rounds), np.eye(rounds))

    def noise_std(self, t: int) -> float:
        if not self.drift:
            return self.scale(t) * super().noise_std(t)
        unit = np.zeros((t + 1, 1))
        unit[t] = self.scale(t)
        return float(np.linalg.norm(matrix.solve_columns(self._columns(t + 1), unit, back=True)))
