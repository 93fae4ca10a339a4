"""Strategies C of matrix mechanisms, in which the noise of round t is row t of C^-1 Z. `CorrelatedNoise` calls them.

Z has one row of independent noise per round. `step` computes the noise of a round from its fresh row of Z and a state
(`memory`) of earlier noise: bands - 1 vectors, or one per buffer, or one per level of the tree. The mathematics is in
`sordino.accounting.matrix`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from sordino.accounting import matrix, sensitivity
from sordino.accounting.sensitivity import Floats, Patterns
from sordino.codec import Part
from sordino.codec.boundary import returns, tensor, tensors
from sordino.errors import PlanError
from sordino.parts.schedules import require, require_values

if TYPE_CHECKING:
    from torch import Tensor

Fresh = Callable[[], "Tensor"]  # draws one vector of independent noise
Memory = dict[str, "Tensor"]
LONG = 4096  # rounds after which the entries of a column of C are negligible


def _check_step(found: object, *_: object) -> str:
    if isinstance(found, tuple) and len(found) == 2 and hasattr(found[0], "device"):
        return tensor(found[0], tuple(found[0].shape), found[0], finite=True) or tensors(found[1])
    return "finite noise, and a dict of tensors"


class Strategy(Part):
    """Base class of strategies: a lower triangular matrix C, by which the noise of round t is row t of C^-1 Z.

    Z has one row of independent noise per round, and X one row per round's sum before noise. A subclass defines
    `noise_matrix` and `step`, or `column` alone if it is `Toeplitz`. The other methods have defaults that hold for any
    C, and are overridden if a closed form is faster.
    """

    @abstractmethod
    def noise_matrix(self, rounds: int) -> Floats:
        """Return C^-1 [rounds, rounds], the inverse of the strategy's matrix C.

        The noise of round t is the sum of the independent noise draws of all rounds, weighted by row t."""

    def sensitivity(self, allowed: Patterns) -> float:
        """Return an upper bound on the L2 sensitivity of C X to one client, for strategy C and rows X of sums."""
        return _sensitivity(self, allowed)

    def errors(self, rounds: int, work: Floats | None = None) -> Floats:
        """Return the noise variance of every round's model, for independent noise draws of variance 1.

        `work` is the first column of the server's workload matrix; by default a model is the sum of all updates."""
        workload = sensitivity.dense(np.ones(rounds) if work is None else work, rounds)
        return np.asarray(np.sum((workload @ self.noise_matrix(rounds)) ** 2, axis=1))

    @property
    def max_column_norm(self) -> float:
        """Largest norm of a column of the strategy's matrix, which is the sensitivity to a client in one round."""
        return _sensitivity(self, Patterns(LONG, 1))

    def noise_std(self, t: int) -> float:
        """Return the standard deviation of the noise of round t, for independent noise draws of variance 1."""
        return float(np.linalg.norm(self.noise_matrix(t + 1)[t]))

    @abstractmethod
    @returns(_check_step)
    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        """Return the noise of the next round, and the new noise state, in the precision of `memory`.

        For release `memory` is float64, and every computation from fresh noise to the round's noise must be too: noise
        that was cast to float32 and then scaled is not on the public grid, so the rounded sum would reveal the clean
        sum.
        """

    def init(self, length: int) -> Memory:
        """Return the state of earlier noise before the first round."""
        return {}

    def fitted(self, allowed: Patterns, work: Callable[[], Floats]) -> Strategy:
        """Return the strategy optimised for participation patterns and a workload, if its coefficients are not set."""
        return self

    def is_fitted(self, rounds: int) -> bool:
        """Return whether the strategy has coefficients for a run of `rounds` rounds."""
        return True

    @property
    def bands(self) -> int | None:
        """Number of bands of the strategy's matrix, at which distance columns do not overlap; None if all overlap."""
        return None


@lru_cache(maxsize=32)
def _sensitivity(strategy: Strategy, allowed: Patterns) -> float:
    inverse = strategy.noise_matrix(allowed.rounds)
    matrix = np.linalg.solve(inverse, np.eye(len(inverse)))
    return sensitivity.sensitivity_bound(matrix.T @ matrix, allowed)


class Toeplitz(Strategy):
    """Base class of Toeplitz strategies C_ts = c_{t-s}; a subclass defines `column` alone.

    The noise is n_t = z_t - sum_{j >= 1} c_j n_{t-j} for fresh noise z_t; the state holds n of earlier rounds.
    """

    @abstractmethod
    def column(self, rounds: int) -> Floats:
        """Return the first column c_0 = 1, c_1, ... of the strategy's matrix: up to `rounds` entries, no zeros last."""

    def sensitivity(self, allowed: Patterns) -> float:
        return sensitivity.toeplitz_sensitivity(self.column(allowed.rounds), allowed)

    def errors(self, rounds: int, work: Floats | None = None) -> Floats:
        return matrix.errors(self.column(rounds), rounds, work)

    def inverse(self, rounds: int) -> Floats:
        """Return the first column of C^-1, the inverse of the strategy's matrix."""
        return matrix.inverse(self.column(rounds), rounds)

    def noise_matrix(self, rounds: int) -> Floats:
        return sensitivity.dense(self.inverse(rounds), rounds)

    @property
    def max_column_norm(self) -> float:
        return float(np.linalg.norm(self.column(LONG)))

    def init(self, length: int) -> Memory:
        import torch

        return {"past": torch.zeros(0, length)}

    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        import torch

        past = memory["past"]  # the noise of the last rounds, the newest first
        weights = torch.from_numpy(np.asarray(self.column(len(past) + 1)[1:], dtype=np.float64)).to(past)
        noise = (fresh() - weights @ past[: len(weights)]).to(past.dtype)
        return noise.double(), {"past": torch.cat([noise[None], past])[: len(self.column(LONG)) - 1]}

    def noise_std(self, t: int) -> float:
        return float(_row_norms(self, max(1 << t.bit_length(), 64))[t])


@lru_cache(maxsize=32)
def _row_norms(strategy: Toeplitz, rounds: int) -> Floats:
    return np.asarray(np.sqrt(np.cumsum(strategy.inverse(rounds) ** 2)))


@dataclass(frozen=True)
class Identity(Toeplitz, kind="identity"):
    """Identity strategy C = I: independent noise in every round."""

    def column(self, rounds: int) -> Floats:
        return np.ones(1)

    def init(self, length: int) -> Memory:
        return {}

    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        return fresh(), {}

    @property
    def bands(self) -> int | None:
        return 1


def _check_count(name: str, value: int, most: int = 100_000) -> None:
    needed = f"at least 1, and at most {most:,}"
    require_values(1 <= value <= most, "correlated noise", needed, **{name: value})


@dataclass(frozen=True)
class BufferedToeplitz(Toeplitz, kind="buffered_toeplitz"):
    """Buffered linear Toeplitz strategy (BLT, 2024): C_{s+t,s} = sum_j weights_j decays_j^(t-1), one buffer per j.

    The noise is n_t = z_t - sum_j weights_j s_j for fresh noise z_t and buffers s_j <- decays_j s_j + n_t. `forget` is
    explained in `Banded`.
    """

    buffers: int
    weights: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    forget: float | None = None

    def __post_init__(self) -> None:
        _check_count("buffers", self.buffers, 16)
        _check_forget(self.forget)
        fits = len(self.weights) == len(self.decays) and all(0.0 <= decay <= 1.0 for decay in self.decays)
        fits = fits and all(0.0 <= weight < math.inf for weight in self.weights)
        needed, fix = "as many weights >= 0 as decays in [0, 1]", "drop weights and decays: plan.fitted() finds them"
        require(fits, "correlated noise", "invalid weights or decays of buffers", needed, fix)

    def fitted(self, allowed: Patterns, work: Callable[[], Floats]) -> Strategy:
        if self.weights:
            return self
        found = matrix.best_buffers(matrix.Goal(allowed, work()).forgetting(self.forget), self.buffers)
        return replace(self, weights=_rounded(found.weights), decays=_rounded(found.decays))

    def is_fitted(self, rounds: int) -> bool:
        return bool(self.weights)

    def column(self, rounds: int) -> Floats:
        if not self.weights:
            raise PlanError("correlated noise", "buffers without weights", "a fitted plan", "plan = plan.fitted()")
        return matrix.Buffers(self.weights, self.decays).column(rounds)

    def inverse(self, rounds: int) -> Floats:
        # r_t = [t = 0] - sum_j weights_j s_j, s_j <- decays_j s_j + r_t
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
        past = memory["past"]
        weights, decays = (past.new_tensor(side) for side in (self.weights, self.decays))
        noise = fresh() - weights @ past
        return noise, {"past": past.mul(decays[:, None]).add_(noise)}


def _check_forget(forget: float | None) -> None:
    fits, fix = forget is None or 0.0 <= forget < 1.0, "set 0 to optimise prefix sums, or drop forget for 2 / rounds"
    require_values(fits, "correlated noise", "a number in [0, 1)", fix, forget=forget)


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.12g}") for value in values)  # the digits that a plan file stores


@dataclass(frozen=True)
class Tree(Strategy, kind="tree"):
    """Binary tree mechanism: noisy sums of dyadic blocks of rounds, combined with optimal weights (Honaker 2015).

    Only blocks that end within the run are released, and the weights depend on no later round.
    """

    def sensitivity(self, allowed: Patterns) -> float:
        return _tree_sensitivity(allowed)

    def noise_matrix(self, rounds: int) -> Floats:
        return matrix.tree_noise_matrix(rounds)

    @property
    def max_column_norm(self) -> float:
        return math.sqrt(1 + math.log2(LONG))

    def noise_std(self, t: int) -> float:
        return matrix.tree_noise_std(t)

    def init(self, length: int) -> Memory:
        import torch

        return {"blocks": torch.zeros(1, length), "at": torch.zeros((), dtype=torch.int64)}

    def step(self, fresh: Fresh, memory: Mapping[str, Tensor]) -> tuple[Tensor, Memory]:
        """Return the noise of the prefix sum after the round minus that before it, and the new state."""
        import torch

        blocks, at = memory["blocks"].clone(), int(memory["at"])
        before = blocks.double().sum(0)
        carry, level = fresh(), 0
        while at >> level & 1:
            own = matrix.tree_own_weight(level + 1)
            carry = own * fresh() + (1 - own) * (carry + blocks[level])
            blocks[level] = 0.0
            level += 1
        if level == len(blocks):
            blocks = torch.cat([blocks, torch.zeros_like(blocks[:1])])
        blocks[level] = carry
        return blocks.double().sum(0) - before, {"blocks": blocks, "at": memory["at"] + 1}


@lru_cache(maxsize=32)
def _tree_sensitivity(allowed: Patterns) -> float:
    return sensitivity.sensitivity_bound(matrix.tree_gram(allowed.rounds), allowed)


class _Banded(Toeplitz):
    # The state has one spare row, so that the previous state stays valid. It is float32 in simulation and float64 for
    # release (`CorrelatedNoise.noised`), where the cast in `step`, before `scale`, does nothing.
    width: int

    @property
    def bands(self) -> int | None:
        return self.width

    def scale(self, t: int) -> float:
        """Return the factor by which the recursively computed noise of round t is multiplied."""
        return 1.0

    def row(self, t: int) -> Floats:
        """Return the weights c_0, c_1, ... in round t, where c_j weighs the noise of round t - j."""
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
        noise = (fresh() - torch.from_numpy(weights).to(past) @ past).to(past.dtype)
        past[place] = noise
        return noise.double() * self.scale(t), {"past": past, "at": torch.tensor(t + 1)}


@dataclass(frozen=True)
class BandedSquareRoot(_Banded, kind="banded_square_root"):
    """Banded square root of the prefix-sum matrix: the first `width` bands c_0 = 1, c_j = c_{j-1} (2j-1)/(2j)."""

    width: int

    def __post_init__(self) -> None:
        _check_count("width", self.width)

    def column(self, rounds: int) -> Floats:
        return matrix.square_root(min(self.width, rounds))


@dataclass(frozen=True)
class Banded(_Banded, kind="banded"):
    """Optimised bands (BandMF, 2023): `width` entries that minimise the models' noise for a run's rounds and server.

    C_ts = (c_{t-s} + sqrt(s / ends) drift_{t-s}) / scale_s, with bands c = `coefficients` that change during the run by
    `drift`. The scales give all columns the norm ||c||, also those that the end of the run cuts off. So the noise of
    the last rounds is smaller at the same sensitivity, if the bands do not overlap. `forget` is the share of a model's
    noise that training removes in a round (curvature times step; Koloskova 2023): 0 optimises prefix sums, the default
    is 2 / rounds. A drift is optimised if `forget` is 0: it removes .6 to 1.3% of the noise of prefix sums (with
    forgetting it would remove .2%). The plan stores `coefficients`, `drift` and `ends` = rounds, so that noise,
    certificate and a resumed run use the same numbers.
    """

    width: int
    coefficients: tuple[float, ...] = ()
    forget: float | None = None
    ends: int = 0  # the rounds of the run; 0: no column is scaled
    drift: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_count("width", self.width)
        _check_forget(self.forget)
        first, rule, fix = np.asarray(self.coefficients), "correlated noise", "drop it: plan.fitted() computes it"
        fits = not len(first) or (len(first) <= self.width and first[0] == 1.0 and bool(np.isfinite(first).all()))
        needed = "at most `width` finite numbers that begin with 1"
        require(fits, rule, f"{len(first)} coefficients", needed, "drop them: plan.fitted() computes them")
        require_values(self.ends >= 0, rule, "the number of rounds of the run", fix, ends=self.ends)
        fits = len(self.drift) == len(first) and self.drift[:1] == (0.0,) and self.ends > 0
        needed = "one finite number per coefficient, of which the first is 0, and `ends` above 0"
        sound = not self.drift or (fits and bool(np.isfinite(self.drift).all()))
        require(sound, rule, f"a drift of {len(self.drift)} numbers", needed, fix)

    def fitted(self, allowed: Patterns, work: Callable[[], Floats]) -> Strategy:
        if self.coefficients:
            return replace(self, ends=self._ends(self.coefficients, allowed))
        goal = matrix.Goal(allowed, work()).forgetting(self.forget)
        found = matrix.best_bands(goal, self.width)
        if self.forget != 0.0 or not self._ends(found, allowed) or allowed.rounds > matrix.LONGEST:
            return replace(self, coefficients=_rounded(found), ends=self._ends(found, allowed))
        first, drift = matrix.DriftSearch(goal, len(found)).found(found)
        return replace(self, coefficients=_rounded(first), drift=_rounded(drift), ends=allowed.rounds)

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
            found = f"round {t + 1}, with noise bands for {self.ends} rounds"
            raise PlanError("correlated noise", found, "bands for all rounds", "drop ends, and call plan.fitted()")
        first = np.asarray(self.coefficients)
        whole = first + np.sqrt(t / self.ends) * np.asarray(self.drift) if self.drift else first
        return float(np.linalg.norm(whole[: self.ends - t]) / np.linalg.norm(first))

    def _scales(self, rounds: int) -> Floats:
        return np.array([self.scale(t) for t in range(rounds)])

    def _columns(self, rounds: int) -> Floats:
        # [rounds, bands]: each column of C from the diagonal down, before scaling
        drift = np.asarray(self.drift) if self.drift else np.zeros(len(self.coefficients))
        return matrix.columns(np.asarray(self.coefficients), drift, rounds, self.ends)

    def sensitivity(self, allowed: Patterns) -> float:
        """Return the L2 sensitivity: sqrt(k) ||coefficients|| for k rounds of one client if bands do not overlap."""
        if not self.ends:
            return super().sensitivity(allowed)
        if len(self.coefficients) <= allowed.min_separation:
            return math.sqrt(allowed.reachable) * float(np.linalg.norm(self.coefficients))
        scaled = matrix.banded_matrix(self._columns(allowed.rounds)) / self._scales(allowed.rounds)
        return sensitivity.sensitivity_bound(scaled.T @ scaled, allowed)

    def errors(self, rounds: int, work: Floats | None = None) -> Floats:
        workload, scales = np.ones(rounds) if work is None else work, self._scales(rounds)
        if self.drift:
            return matrix.drifting_errors(self._columns(rounds), scales, workload)
        found = super().errors(rounds, work)
        late = range(max(0, self.ends - len(self.coefficients) + 1), rounds) if self.ends else ()
        back = matrix.inverse(self.column(rounds), rounds)
        for t in late:  # sum_s A_{t-s} scale_s r_{s-j}, the noise of model t in each Z_j
            found[t] = np.sum(matrix.correlate(back[: t + 1], workload[t::-1] * scales[: t + 1]) ** 2)
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
