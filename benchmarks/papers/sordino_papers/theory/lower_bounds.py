"""What no algorithm of paper 001's class can beat when every message is private: Theorem 3.1, as numbers.

The theorem hides a constant and logarithms (Omega~): a number here is the order, with 1 for what is hidden. It is a
statement about the worst loss and distribution of a class, so one task may well be easier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sordino_papers.theory.central_noise import require, require_budget, require_count, require_positive


@dataclass(frozen=True)
class Rounds:
    """What the proof asks of every round's randomizers.

    epsilon -> the largest epsilon_r of a silo's message in one round, delta -> the least delta_r, total -> sum of the
    delta_r, C -> composition: sqrt(sum epsilon_r^2) <= C epsilon.
    """

    epsilon: float
    delta: float
    total: float
    composition: float = 1.0

    def __post_init__(self) -> None:
        require_budget(epsilon=self.epsilon, delta=self.delta)
        require(0 < self.total < 1, f"total = {self.total:g}", "0 < total < 1")
        require_positive(composition=self.composition)


@dataclass(frozen=True)
class LowerBound:
    """statistics -> the term that is there without privacy; privacy -> the price of it; trivial -> L D, of any w."""

    statistics: float
    privacy: float
    trivial: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.statistics + self.privacy


def lower_bound(
    *,
    records: int,
    silos: int,
    dimension: int,
    epsilon: float,
    clip_norm: float,
    distance: float,
    deviation: float,
    rounds: Rounds,
    convexity: float = 0.0,
) -> LowerBound:
    """The least excess population risk, all N silos in every round, each with n records of one distribution.

        convex:            phi D/sqrt(N n) + L D min{1, sqrt(d)/(epsilon n sqrt(N) C^2)}
        strongly convex:   phi^2/(mu n N) + L D min{1, d/(epsilon^2 n^2 N C^4)}

    n -> records, N -> silos, phi -> deviation. Side conditions: epsilon <= sqrt(N), epsilon_r <= 1/n,
    N >= 16 ln(2/(delta_r n)), and sum delta_r = o(1/(n N)^2), which is held to at most 1/(n N)^2 here.
    With C = 1 (an absolute constant) the algorithm is compositional. Paper 001, Theorem 3.1.
    """
    require_count(records=records, silos=silos, dimension=dimension)
    require_positive(clip_norm=clip_norm, distance=distance, epsilon=epsilon)
    require(deviation >= 0 and convexity >= 0, "a negative constant", "deviation >= 0 and convexity >= 0")
    _check(records, silos, epsilon, rounds)
    trivial, c = clip_norm * distance, max(1.0, rounds.composition)
    hard = math.sqrt(dimension) / (epsilon * records * math.sqrt(silos) * c**2)
    if convexity:
        return LowerBound(deviation**2 / (convexity * records * silos), trivial * min(1.0, hard**2), trivial)
    return LowerBound(deviation * distance / math.sqrt(records * silos), trivial * min(1.0, hard), trivial)


def _check(records: int, silos: int, epsilon: float, rounds: Rounds) -> None:
    where = "Theorem 3.1 of paper 001"
    most = math.sqrt(silos)
    require(epsilon <= most, f"epsilon = {epsilon:g}", f"epsilon <= {most:.4g} (sqrt(N), {where})")
    need = f"epsilon_r <= {1 / records:.4g} (1/n, {where})"
    require(rounds.epsilon <= 1 / records, f"epsilon_r = {rounds.epsilon:.4g}", need, "take more rounds")
    least = 16 * math.log(2 / (rounds.delta * records))
    require(silos >= least, f"silos = {silos}", f"silos >= {least:.4g} (16 ln(2/(delta_r n)), {where})")
    small = (records * silos) ** -2.0
    require(rounds.total <= small, f"total delta = {rounds.total:.3g}", f"at most {small:.3g} (1/(n N)^2, {where})")


def shuffled_round(*, epsilon: float, delta: float, records: int, population: int, slack: float) -> tuple[float, float]:
    """(epsilon, delta) of one round whose N messages, each (epsilon_0, delta_0)-DP for a record, are shuffled.

        epsilon = ln[1 + (e^e0 - 1)/(e^e0 + 1) (8 sqrt(e^(n e0) ln(4/slack))/sqrt(N) + 8 e^(n e0)/N)]
        delta = slack + 2 N n e^((n-1) e0) delta_0

    Side condition: epsilon_0 <= ln(N / (16 ln(2/slack))) / n. Paper 001, Theorem F.2; n records in each silo.
    """
    require_budget(epsilon=epsilon, delta=slack)
    require_count(records=records, population=population)
    require(0.0 <= delta < 1.0, f"delta = {delta:g}", "0 <= delta < 1")
    inside = population / (16 * math.log(2 / slack))
    most = math.log(inside) / records if inside > 0 else -math.inf
    require(epsilon <= most, f"epsilon = {epsilon:g}", f"epsilon <= {most:.4g} = ln(N / (16 ln(2/slack))) / n")
    grown = math.exp(records * epsilon)
    step = 8 * math.sqrt(grown * math.log(4 / slack) / population) + 8 * grown / population
    amplified = math.log1p(math.tanh(epsilon / 2) * step)
    return amplified, slack + 2 * population * records * math.exp((records - 1) * epsilon) * delta
