"""Strategies C of matrix mechanisms, in which the noise of round t is row t of C^-1 Z; `CorrelatedNoise` calls them.

A strategy streams: `step` turns this round's fresh Z into its noise by what it remembers of earlier noise, and a run
holds so many vectors: bands - 1, or one per buffer, or one per level of the tree. The mathematics is in
`sordino.accounting.matrix`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from sordino.accounting import matrix, sensitivity
from sordino.accounting.sensitivity import Floats, Patterns
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
        made = sensitivity.dense(np.ones(rounds) if work is None else work, rounds)
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
        return matrix.errors(self.column(rounds), rounds, work)

    def inverse(self, rounds: int) -> Floats:
        """The first column of C^-1."""
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
        found = matrix.best_buffers(matrix.Goal(allowed, work()).forgetting(self.forget), self.buffers)
        return replace(self, weights=digits(found.weights), decays=digits(found.decays))

    def is_fitted(self, rounds: int) -> bool:
        return bool(self.weights)

    def column(self, rounds: int) -> Floats:
        if not self.weights:
            raise PlanError("correlated noise", "buffers without weights", "a fitted plan", "plan = plan.fitted()")
        return matrix.Buffers(self.weights, self.decays).column(rounds)

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
        """The sum of all blocks' noise after this round, less that before it."""
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
