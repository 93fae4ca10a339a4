"""What the theorems of paper 002 say of local and global iterations."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from sordino.recipes import client_level
from sordino_papers.theory import local_noise as silo
from sordino_papers.theory.central_noise import require, require_count

Mechanism = Literal["laplace", "gaussian"]
GROWTH = client_level.NOISE_GROWTH


def local_steps(total: int, mechanism: Mechanism) -> int:
    """The rule of `sordino.recipes.client_level.local_steps`, with its arguments checked. Theorems 4 and 5."""
    require_count(total=total)
    _require_mechanism(mechanism)
    return client_level.local_steps(total, mechanism)


def _require_mechanism(name: str) -> None:
    require(name in GROWTH, f"mechanism = {name!r}", "'laplace' or 'gaussian'")


@dataclass(frozen=True)
class Upload:
    """Noise of clients on their own uploads, for a budget of all the rounds that they take part in.

    p -> dimension, N -> population, b -> cohort, xi -> sensitivity of one gradient (twice the clip norm when sound,
    in L1 for Laplace), c_2 -> c2, the constant that paper 002 leaves open for Gaussian noise.
    """

    mechanism: Mechanism
    epsilon: float
    dimension: int
    population: int
    cohort: int
    sensitivity: float
    delta: float = 1e-5
    c2: float = 2.0

    def __post_init__(self) -> None:
        _require_mechanism(self.mechanism)

    @property
    def constant(self) -> float:
        """C_M of Theorem 3."""
        p, n, xi = self.dimension, self.population, self.sensitivity
        if self.mechanism == "laplace":
            return silo.laplace_constant(
                epsilon=self.epsilon, dimension=p, cohort=self.cohort, population=n, sensitivity=xi
            )
        return silo.gaussian_constant(
            epsilon=self.epsilon, delta=self.delta, dimension=p, population=n, sensitivity=xi, c2=self.c2
        )

    def bound(self, objective: silo.Objective, *, steps: int, rounds: int) -> float:
        """Bound on E||w - w*||^2 after `rounds` rounds of `steps` local steps. Paper 002, Theorem 3."""
        return silo.client_distance_bound(
            objective,
            steps=steps,
            rounds=rounds,
            cohort=self.cohort,
            population=self.population,
            constant=self.constant,
            growth=GROWTH[self.mechanism],
        )


def best_rounds(objective: silo.Objective, upload: Upload, *, steps: int, limit: int = 10**6) -> int | None:
    """Rounds T_g at which the bound of Theorem 3 is least for these local steps; T* = steps T_g in the paper's words.

    None if it still falls at `limit`: with Gaussian noise it may fall for ever, with Laplace noise it cannot (the
    bound is a convex function of the rounds that ends up growing). Paper 002, Corollary 5.1, which does not find it.
    """

    def rising(rounds: int) -> bool:
        here = upload.bound(objective, steps=steps, rounds=rounds)
        return upload.bound(objective, steps=steps, rounds=rounds + 1) >= here

    found = bisect_left(range(1, limit), True, key=rising) + 1
    return found if found < limit else None
