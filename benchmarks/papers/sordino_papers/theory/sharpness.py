"""What paper 003 claims of DP-FedSAM, as numbers; what refutes each, and the sound form. No certificate uses them.

    claimed_sensitivity      Theorem 1      claimed_descent       Theorem 3, by the last line of its proof
    claimed_epsilon          Theorem 2 (Eq. 16, 17)
    claimed_round_epsilon    Theorem 4      claimed_generalisation  Theorem 5
    generalisation_gap       the sound form: what differential privacy does say about train and test

Theorem 1 does not hold: its bound is 0 at rho = 0, where two data sets that differ in one record still give two updates
(the proof takes gradients of different records to differ by the smoothness alone). Sensitivity comes from the clip.
Theorem 3 does not hold as proved: <a, b> is written as -||a||^2/2 - ||b||^2/2 + ||a - b||^2/2, so a term -2 B^2 enters,
and with a large enough bound B on gradients the right side is negative. Theorem 4 does not hold: gradients of different
records are taken to differ by at most 2 L rho, and the noise to grow with the dimension. Theorem 5 rests on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from sordino_papers.theory.central_noise import require, require_budget, require_count, require_positive


def claimed_sensitivity(*, step: float, rho: float, steps: int, smooth: float) -> float:
    """E ||update - update'||^2 of a client whose data differ in one record, as claimed in Theorem 1.

    6 eta^2 rho^2 K L^2 (12 K^2 L^2 eta^2 + 10) / (1 - 2 eta^2 L^2 K)
    """
    require_positive(step=step, smooth=smooth)
    require_count(steps=steps)
    squared = (step * smooth) ** 2
    require(2.0 * squared * steps < 1.0, f"step = {step:g}", "2 eta^2 L^2 K < 1", "take a smaller step")
    return 6.0 * squared * rho**2 * steps * (12.0 * steps**2 * squared + 10.0) / (1.0 - 2.0 * squared * steps)


@dataclass(frozen=True)
class Descent:
    """Constants of Theorem 3: L, B, sigma_l, sigma_g, K, T, m, d, and the means of alpha-bar and alpha-tilde."""

    smooth: float
    gradient: float  # B: any number that no client's gradient exceeds
    gap: float  # f(w1) - f*
    steps: int
    rounds: int
    rho: float = 0.0
    sampled: float = 0.0  # sigma_l^2
    apart: float = 0.0  # sigma_g^2
    kept: float = 1.0  # mean of alpha-bar: the fraction of an update that the clip leaves
    uneven: float = 0.0  # mean of alpha-tilde
    noise: float = 0.0  # sigma^2 C^2 p d / m^2

    @property
    def step(self) -> float:
        """eta = 1/(L sqrt(K T))."""
        return 1.0 / (self.smooth * math.sqrt(self.steps * self.rounds))


def claimed_descent(d: Descent) -> float:
    """Mean over t of alpha-bar ||grad f(w_t)||^2 as claimed: the right side of (31), the last line with constants.

    2 L gap/sqrt(K T) + a~ (L^2 rho^2 - 2 B^2) + 30 eta^2 L^2 a (2 L^2 rho^2 s_l + 6 K (3 s_g + 6 L^2 rho^2))
    + 72 eta^4 K^3 L^6 rho^2 + 3 eta L (L^2 rho^2 + B^2) + L noise/(eta K)
    """
    require_positive(smooth=d.smooth, gap=d.gap)
    require_count(steps=d.steps, rounds=d.rounds)
    eta, bend = d.step, (d.smooth * d.rho) ** 2
    first = 2.0 * d.smooth * d.gap / math.sqrt(d.steps * d.rounds)
    clipped = d.uneven * (bend - 2.0 * d.gradient**2)
    inner = 2.0 * bend * d.sampled + 6.0 * d.steps * (3.0 * d.apart + 6.0 * bend)
    wander = 30.0 * (eta * d.smooth) ** 2 * d.kept * inner + 72.0 * (eta * d.smooth) ** 4 * d.steps**3 * bend
    return (
        first + clipped + wander + 3.0 * eta * d.smooth * (bend + d.gradient**2) + d.smooth * d.noise / (eta * d.steps)
    )


@dataclass(frozen=True)
class Sharp:
    """One federation of paper 003: clip norm C, noise multiplier sigma, m of N clients, d parameters, T rounds."""

    clip_norm: float
    noise_multiplier: float
    cohort: int
    population: int
    dimension: int
    rounds: int
    smooth: float  # L
    rho: float


ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64))  # the Renyi orders that accountants usually try


def claimed_epsilon(*, rate: float, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Epsilon of T rounds by Theorem 2, the least over the usual orders alpha: 8.51 and 10.79 at the paper's settings.

        epsilon = T/(alpha-1) ln E[(1 - q + q mu_1/mu_0)^alpha] + ln(1 - 1/alpha) - (ln alpha + ln delta)/(alpha-1)

    z ~ mu_0 = N(0, sigma^2), mu_1 = N(1, sigma^2) (the text says the mixture, which would count q twice). Eq. 16, 17.
    It is the epsilon of Poisson cohorts with one clip of the whole update, which is not what the authors ran.
    """
    require_budget(epsilon=1.0, delta=delta)
    require_positive(rate=rate, noise_multiplier=noise_multiplier)
    require_count(rounds=rounds)
    sigma = noise_multiplier
    z = np.linspace(-40 * sigma, 40 * sigma + 64, 200_001)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * sigma**2))
    density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi)) + math.log(z[1] - z[0])

    def at(order: float) -> float:
        spent = rounds * float(logsumexp(order * ratio + density)) / (order - 1)
        return spent + math.log(1 - 1 / order) - (math.log(order) + math.log(delta)) / (order - 1)

    return min(at(order) for order in ORDERS)


def claimed_round_epsilon(sharp: Sharp, *, delta: float) -> float:
    """Epsilon of one round as claimed in Theorem 4, before its delta is scaled by m / N.

    log(1 - m/N + m/N exp(L rho sqrt(2 log 1/delta)/(sigma C d) + (sqrt(2) L rho/(sigma C d))^2))
    """
    require(0.0 < delta < 1.0, f"delta = {delta:g}", "0 < delta < 1")
    require_positive(clip_norm=sharp.clip_norm, noise_multiplier=sharp.noise_multiplier, smooth=sharp.smooth)
    ratio = sharp.smooth * sharp.rho / (sharp.noise_multiplier * sharp.clip_norm * sharp.dimension)
    q = sharp.cohort / sharp.population
    return math.log1p(q * math.expm1(ratio * math.sqrt(2.0 * math.log(1.0 / delta)) + 2.0 * ratio**2))


def claimed_generalisation(sharp: Sharp, *, delta: float) -> float:
    """|train loss - test loss| with high probability as claimed in Theorem 5: 4 epsilon'.

        epsilon' = sqrt(2 T log(1/delta)) e + T e (exp(e) - 1)/(exp(e) + 1),   e of Theorem 4

    It is below what a single record can do to a model without noise, whatever is trained: see `generalisation_gap`.
    """
    one = claimed_round_epsilon(sharp, delta=delta)
    return 4.0 * (math.sqrt(2.0 * sharp.rounds * math.log(1.0 / delta)) * one + sharp.rounds * one * math.tanh(one / 2))


def generalisation_gap(*, epsilon: float, delta: float) -> float:
    """|E train loss - E test loss| for losses in [0, 1] of an (epsilon, delta)-DP training, replace-one relation.

        (e^epsilon - 1 + 2 delta) / (e^epsilon + 1)

    A unit's expected loss changes by at most the total variation when the unit is replaced by a fresh one, and that is
    the difference of the two risks (on-average stability). The unit of the guarantee is the unit of the average:
    records, or clients with their mean losses.
    """
    require_budget(epsilon=epsilon, delta=delta)
    return min(1.0, math.tanh(epsilon / 2.0) + 2.0 * delta / (1.0 + math.exp(epsilon)))
