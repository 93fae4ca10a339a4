"""Secure sums of noised messages in integer words: the public grid, the word size, and their cost in delta.

Member i of a sum of n sends K_i = rint((x_i + N_i) / g), where x_i is its message, N_i Gaussian noise of standard
deviation `share_std` = s g, and g the step of the grid. Everybody else sees only S = sum_i K_i modulo 2^bits. Per
coordinate, the distribution of S is within total variation distance

    eta <= n^(3/2) exp(-pi^2 s^2)                        for s >= 1 and 2 <= n <= 10^7

of a function of the Gaussian release sum_i (x_i + N_i) (proof: docs/privacy.md#secure-sums). Reduction modulo 2^bits is
post-processing. The probability that it changes S is at most exp(-t^2 / 2), if a word has room for t standard
deviations of the noise, and is added to eta. The distance of a run is the sum over coordinates and releases;
`accountant.epsilon_near` subtracts its cost from delta. Called by plans and certificates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from sordino.errors import PlanError

FINEST, COARSEST = 20, 2  # bits of the grid below the power of two below a share's standard deviation
WORDS = (16, 32, 64)  # bits
FREE = 14.0  # standard deviations of the sum's noise for which a word has room beside the largest clean sum
MOST_MEMBERS = 10**7


def rounding_distance(members: int, ratio: float) -> float:
    """Return eta, the distance of one coordinate of a sum from post-processed Gaussian noise, rounded up; 1 if unknown.

    `members` is n, and `ratio` is s, the standard deviation of one member's noise in steps of the grid.
    """
    if not (ratio >= 1.0 and 2 <= members <= MOST_MEMBERS):
        return 0.0 if members == 1 else 1.0  # the rounded message of one member is post-processing
    exponent = 1.5 * math.log(members) - (math.pi * ratio) ** 2
    return min(1.0, math.exp(max(exponent, -690.0)) * (1 + 1e-9))


@dataclass(frozen=True)
class SumGrid:
    """Grid and word size of the secure sums of one plan, which silos and server compute from the plan alone.

    share_std  standard deviation of one member's noise
    members    largest number of members of a sum
    largest    bound on the absolute value of one coordinate of a message without noise

    Words are the smallest for which a grid of at least `COARSEST` bits has room; the grid is the finest for such words.
    """

    share_std: float
    members: int
    largest: float = 1.0

    @cached_property
    def _chosen(self) -> tuple[int, int]:
        for bits in WORDS:
            for fine in range(FINEST, COARSEST - 1, -1):
                if self._free(bits, fine) >= FREE:
                    return bits, fine
        found = f"sums of {self.members} messages with coordinates up to {self.largest:g}"
        raise PlanError("secure sum", found, f"sums that fit in {WORDS[-1]}-bit words", "use fewer noise shares")

    def _step(self, fine: int) -> float:
        return math.ldexp(1.0, math.floor(math.log2(self.share_std)) - fine)

    def _free(self, bits: int, fine: int) -> float:
        """Return the room of a word beside the largest clean sum, in standard deviations of the sum's noise.

        |S| <= n largest / g + n / 2 + |N| / g, with the noise N of n shares; n / g and sqrt(n) / g both grow with n.
        """
        step, n = self._step(fine), self.members
        room = math.ldexp(1.0, bits - 1) - 1.0 - n * (self.largest / step + 0.5)
        return room / (math.sqrt(n) * self.share_std / step)

    @property
    def bits(self) -> int:
        """Number of bits of a word."""
        return self._chosen[0]

    @property
    def step(self) -> float:
        """Step g of the grid, a power of two."""
        return self._step(self._chosen[1])

    @property
    def ratio(self) -> float:
        """Standard deviation s of one member's noise, in steps of the grid."""
        return self.share_std / self.step

    @property
    def rounding(self) -> float:
        """Total variation distance of a coordinate of one release from post-processed Gaussian noise."""
        return rounding_distance(max(self.members, 2), self.ratio)

    @property
    def wrapping(self) -> float:
        """Bound exp(-t^2 / 2) on the probability that a coordinate of one release leaves the range of a word."""
        free = min(max(self._free(*self._chosen), 0.0), 37.0)  # beyond, no smaller number is stated
        return min(1.0, math.exp(-0.5 * free**2) * (1 + 1e-9))

    def distance(self, coordinates: int, releases: int) -> float:
        """Return the total variation distance of all coordinates of all releases together."""
        return min(1.0, coordinates * releases * (self.rounding + self.wrapping) * (1 + 1e-9))
