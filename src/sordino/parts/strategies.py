"""Strategies C of matrix mechanisms, in which the noise of round t is row t of C^-1 Z; `CorrelatedNoise` calls them.

A strategy streams: `step` turns this round's fresh Z into its noise by what it remembers of earlier noise, and a run
holds so many vectors: bands - 1, or one per buffer, or one per level of the tree. The mathematics is in
`sordino.accounting.matrix`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from sordino.accounting.matrix import optimize, sensitivity, toeplitz
from sordino.accounting.matrix import optimize as drifting
from sordino.accounting.matrix.sensitivity import Patterns
from sordino.accounting.matrix.toeplitz import Floats
from sordino.codec import Part
from sordino.codec.boundary import returns, tensor, tensors
from sordino.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

Fresh = Callable[[], "Tensor"]  # one more vector of the mechanism's own noise
Memory = dict[str, "Tensor"]
LONG = 4096  # rounds after which a column of C has no entries that matter


def noise_and_memory(found: object) -> str:
    """A tensor of finite noise, and what is remembered."""
    if isinstance(found, tuple) and len(found) == 2 and hasattr(found[0], "device"):
        return tensor(found[0], tuple(found[0].shape), found[0], finite=True) or tensors(found[1])
    return "finite noise, and a dict of tensors"


class Strategy(Part):
    """A lower triangular matrix C: the noise of round t is row t of C^-1 Z, Z independent from round to round.

    Two methods are needed, `noise_matrix` and `step`; a `Toeplitz` strategy needs `column` alone. The others have
    defaults that hold for any C, and are written out where a closed form is faster.
    """

    @abstractmethod
    def noise_matrix(self, rounds: int) -> Floats:
        """The rounds' noise as a matrix of all Z that were drawn: C^-1."""

    def sensitivity(self, allowed: Patterns) -> float:
        """The most that one client moves C X; never below the truth."""
        return _sensitivity(self, allowed)

    def errors(self, rounds: int, work: Floats | None = None) -> Floats:
        """The variance of every model's noise, for Z of variance 1; `work` is the first column of the server's A."""
        made = toeplitz.dense(np.ones(rounds) if work is None else work, rounds)
        return np.asarray(np.sum((made @ self.noise_matrix(rounds)) ** 2, axis=1))

    @property
    def max_column_norm(self) -> float:
        """The most that one round of one client moves C X: the norm of the longest column."""
        return _sensitivity(self, Patterns(LONG, 1))

    def noise_std(self, t: int) -> float:
        """Standard deviation of the noise of round t (from 0), for Z of variance 1: the norm of row t of C^-1."""
        return float(np.linalg.norm(self.noise_matrix(t + 1)[t]))

    @abstractmethod
    @returns(lambda found, part, fresh, memory: noise_and_memory(found))
    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        """The noise of the next round, and what later rounds must know of it, in the precision of `memory`.

        For release `memory` is float64 and so is every step from fresh noise to the noise of the round: a cast to
        float32 that is scaled afterwards is a lattice that the public grid does not contain, and the grid tells sums
        apart.
        """

    def init(self, length: int) -> Memory:
        """Before the first round."""
        return {}

    def fitted(self, allowed: Patterns, work: Callable[[], Floats]) -> Strategy:
        """The strategy optimised for a run of such patterns and such a server; coefficients that are given stay."""
        return self

    def is_fitted(self, rounds: int) -> bool:
        """Whether it has its coefficients for a run of so many rounds."""
        return True

    @property
    def bands(self) -> int | None:
        """Columns so many rounds apart do not meet; None: all of them meet."""
        return None


@lru_cache(maxsize=32)
def _sensitivity(strategy: Strategy, allowed: Patterns) -> float:
    inverse = strategy.noise_matrix(allowed.rounds)
    matrix = np.linalg.solve(inverse, np.eye(len(inverse)))
    return sensitivity.sensitivity_bound(matrix.T @ matrix, allowed)


class Toeplitz(Strategy):
    """C_ts = c_{t-s}: the same coefficients in every round. A strategy of your own needs `column` alone.

    n_t = z_t - sum_{j >= 1} c_j n_{t-j}; the noise n of as many rounds as `column` has entries is remembered.
    """

    @abstractmethod
    def column(self, rounds: int) -> Floats:
        """c_0 = 1, c_1, ...: at most `rounds` entries, zeros at the end left out."""

    def sensitivity(self, allowed: Patterns) -> float:
        return sensitivity.toeplitz_sensitivity(self.column(allowed.rounds), allowed)

    def errors(self, rounds: int, work: Floats | None = None) -> Floats:
        return toeplitz.errors(self.column(rounds), rounds, work)

    def inverse(self, rounds: int) -> Floats:
        """The first column of C^-1."""
        return toeplitz.inverse(self.column(rounds), rounds)

    def noise_matrix(self, rounds: int) -> Floats:
        return toeplitz.dense(self.inverse(rounds), rounds)

    @property
    def max_column_norm(self) -> float:
        return float(np.linalg.norm(self.column(LONG)))

    def init(self, length: int) -> Memory:
        import torch

        return {"past": torch.zeros(0, length)}

    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        import torch

        past = memory["past"]  # the noise of the last rounds, the newest first
        weights = torch.from_numpy(np.asarray(self.column(len(past) + 1)[1:], dtype=np.float64)).to(past.dtype)
        noise = (fresh() - weights @ past[: len(weights)]).to(past.dtype)
        return noise.double(), {"past": torch.cat([noise[None], past])[: len(self.column(LONG)) - 1]}

    def noise_std(self, t: int) -> float:
        return float(_row_norms(self, max(1 << t.bit_length(), 64))[t])


@lru_cache(maxsize=32)
def _row_norms(strategy: Toeplitz, rounds: int) -> Floats:
    """sqrt(r_0^2 + ... + r_t^2) for t < rounds, r the first column of C^-1."""
    return np.asarray(np.sqrt(np.cumsum(strategy.inverse(rounds) ** 2)))


@dataclass(frozen=True)
class Identity(Toeplitz, kind="identity"):
    """C = I: every round has noise of its own."""

    def column(self, rounds: int) -> Floats:
        return np.ones(1)

    def init(self, length: int) -> Memory:
        return {}

    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        return fresh(), {}

    @property
    def bands(self) -> int | None:
        return 1


def check_count(name: str, value: int, most: int = 100_000) -> None:
    """Refuse a number of vectors that means nothing."""
    if not 1 <= value <= most:
        raise PlanError("correlated noise", f"{name} = {value}", f"at least 1, and at most {most:,}")


@dataclass(frozen=True)
class BufferedToeplitz(Toeplitz, kind="buffered_toeplitz"):
    """c_t = sum_j weights_j decays_j^(t-1): n_t = z_t - sum_j weights_j s_j,  s_j <- decays_j s_j + n_t  (BLT, 2024).

    As many vectors of memory as buffers, however long the correlation. `forget` as in `Banded`.
    """

    buffers: int
    weights: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    forget: float | None = None

    def __post_init__(self) -> None:
        check_count("buffers", self.buffers, 16)
        check_forget(self.forget)
        both = np.asarray([self.weights, self.decays]) if len(self.weights) == len(self.decays) else None
        fine = both is not None and np.isfinite(both).all() and (not both.size or both[1].max() <= 1.0)
        if not (fine and (not self.weights or (both is not None and both.min() >= 0.0))):
            needed = "as many weights >= 0 as decays in [0, 1]"
            raise PlanError("correlated noise", "buffers that do not fall", needed, "leave weights and decays out")

    def fitted(self, allowed: Patterns, work: Callable[[], Floats]) -> Strategy:
        if self.weights:
            return self
        found = optimize.best_buffers(optimize.Goal(allowed, work()).forgetting(self.forget), self.buffers)
        return replace(self, weights=digits(found.weights), decays=digits(found.decays))

    def is_fitted(self, rounds: int) -> bool:
        return bool(self.weights)

    def column(self, rounds: int) -> Floats:
        if not self.weights:
            raise PlanError("correlated noise", "buffers without weights", "a fitted plan", "plan = plan.fitted()")
        return optimize.Buffers(self.weights, self.decays).column(rounds)

    def inverse(self, rounds: int) -> Floats:
        """r_t = [t = 0] - sum_j weights_j s_j,  s_j <- decays_j s_j + r_t: O(rounds * buffers)."""
        weights, decays, found = np.asarray(self.weights), np.asarray(self.decays), np.zeros(rounds)
        held = np.zeros(len(weights))
        for t in range(rounds):
            found[t] = float(t == 0) - weights @ held
            held = decays * held + found[t]
        return found

    def init(self, length: int) -> Memory:
        import torch

        return {"past": torch.zeros(len(self.weights) or self.buffers, length, dtype=torch.float64)}

    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        import torch

        past = memory["past"]
        weights, decays = (torch.tensor(side, dtype=past.dtype) for side in (self.weights, self.decays))
        noise = fresh() - weights @ past
        return noise, {"past": past.mul(decays[:, None]).add_(noise)}


def check_forget(forget: float | None) -> None:
    """Refuse a share of the noise that is none."""
    if forget is not None and not 0.0 <= forget < 1.0:
        raise PlanError("correlated noise", f"forget = {forget}", "a number in [0, 1)", "0: sums; leave it out: 2/T")


def digits(values: tuple[float, ...]) -> tuple[float, ...]:
    """As a plan writes them."""
    return tuple(float(f"{value:.12g}") for value in values)


@dataclass(frozen=True)
class Tree(Strategy, kind="tree"):
    """Noisy sums of dyadic blocks of rounds, each block's own noise weighed against its halves' (Honaker 2015).

    Honest: only blocks that end within the run are released, and the weights need no later round.
    """

    def sensitivity(self, allowed: Patterns) -> float:
        return _tree_sensitivity(allowed)

    def noise_matrix(self, rounds: int) -> Floats:
        return toeplitz.tree_noise_matrix(rounds)

    @property
    def max_column_norm(self) -> float:
        return math.sqrt(1 + math.log2(LONG))

    def noise_std(self, t: int) -> float:
        return toeplitz.tree_noise_std(t)

    def init(self, length: int) -> Memory:
        import torch

        return {"blocks": torch.zeros(1, length), "at": torch.zeros((), dtype=torch.int64)}

    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        """The sum of all blocks' noise after this round, less that before it."""
        import torch

        blocks, at = memory["blocks"].clone(), int(memory["at"])
        before = blocks.double().sum(0)
        carry, level = fresh(), 0
        while at >> level & 1:
            own = toeplitz.tree_own_weight(level + 1)
            carry = own * fresh() + (1 - own) * (carry + blocks[level])
            blocks[level] = 0.0
            level += 1
        if level == len(blocks):
            blocks = torch.cat([blocks, torch.zeros_like(blocks[:1])])
        blocks[level] = carry
        return blocks.double().sum(0) - before, {"blocks": blocks, "at": memory["at"] + 1}


@lru_cache(maxsize=32)
def _tree_sensitivity(allowed: Patterns) -> float:
    return sensitivity.sensitivity_bound(toeplitz.tree_gram(allowed.rounds), allowed)


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
        return toeplitz.square_root(min(self.width, rounds))


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
        goal = optimize.Goal(allowed, work()).forgetting(self.forget)
        found = optimize.best_bands(goal, self.width)
        if self.forget != 0.0 or not self._ends(found, allowed) or allowed.rounds > drifting.LONGEST:
            return replace(self, coefficients=digits(tuple(found)), ends=self._ends(found, allowed))
        first, drift = drifting.Search(goal, len(found)).found(found)
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
        return drifting.columns(np.asarray(self.coefficients), drift, rounds, self.ends)

    def sensitivity(self, allowed: Patterns) -> float:
        """Columns that do not meet, none longer than c: sqrt(rounds of one client) ||c||, whenever the run ended."""
        if not self.ends:
            return super().sensitivity(allowed)
        if len(self.coefficients) <= allowed.min_separation:
            return math.sqrt(allowed.reachable) * float(np.linalg.norm(self.coefficients))
        made = drifting.matrix(self._columns(allowed.rounds)) / self._scales(allowed.rounds)
        return sensitivity.sensitivity_bound(made.T @ made, allowed)

    def errors(self, rounds: int, work: Floats | None = None) -> Floats:
        made, scales = np.ones(rounds) if work is None else work, self._scales(rounds)
        if self.drift:
            return drifting.errors(self._columns(rounds), scales, made)
        found = super().errors(rounds, work)
        late = range(max(0, self.ends - len(self.coefficients) + 1), rounds) if self.ends else ()
        back = toeplitz.inverse(self.column(rounds), rounds)
        for t in late:  # sum_s A_{t-s} scale_s r_{s-j}, the noise of model t in each Z_j
            found[t] = np.sum(toeplitz.correlate(back[: t + 1], made[t::-1] * scales[: t + 1]) ** 2)
        return found

    def noise_matrix(self, rounds: int) -> Floats:
        if not self.drift:
            return self._scales(rounds)[:, None] * super().noise_matrix(rounds)
        return self._scales(rounds)[:, None] * drifting.solve_columns(self._columns(rounds), np.eye(rounds))

    def noise_std(self, t: int) -> float:
        if not self.drift:
            return self.scale(t) * super().noise_std(t)
        unit = np.zeros((t + 1, 1))
        unit[t] = self.scale(t)
        return float(np.linalg.norm(drifting.solve_columns(self._columns(t + 1), unit, back=True)))
