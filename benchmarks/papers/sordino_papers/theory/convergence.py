"""How far DP-Fed-LS and DP-LSSGD are from the optimum: bounds with their constants. No certificate uses them.

    strongly_convex_error, convex_error, nonconvex_error    paper 000, Theorems 4, 5 and 6
    rounds_to_reach                                         paper 000, Corollary 1
    private_federation                                      paper 000, Theorem 3 and Corollary 2
    lssgd_convex_error, lssgd_nonconvex_error               paper 004, Theorems 4 and 7

Every norm is that of A = I + s L (paper 000: ||.||_A for points, ||.||_{A^-1} for gradients); s = 0 is plain DP-Fed.
Where the papers write O(.), the constants here are those of their proofs.

Said of the papers' own forms: Theorems 6 (000) and 7 (004) state the gradient at the MEAN of the iterates, and prove
the mean of the gradients' squares, that is, an iterate drawn at random. Corollary 2 prints its convex and nonconvex
bounds without a constant; by its own proof they lack a factor of 2 sqrt(C0) >= 18 (`COROLLARY`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from sordino_papers.theory.central_noise import require, require_count, require_positive, uniform_noise
from sordino_papers.theory.smoothing import effective_dimension, smoothing_beta, smoothing_gamma

# the least 2 sqrt(C0), at lambda = 2 - sqrt(2)
COROLLARY = 2.0 * math.sqrt(14.0 / (2.0 - math.sqrt(2.0)) * (1.0 + 1.0 / (math.sqrt(2.0) - 1.0)))


@dataclass(frozen=True)
class Landscape:
    """Constants of the clients' objectives: beta, mu, G^2, B^2, variance of a gradient, ||w0 - w*||_A^2, f(w0) - f*."""

    smooth: float
    convex: float = 0.0  # mu; 0 where it is only convex, or not even that
    dissimilar: float = 0.0  # G^2
    aligned: float = 1.0  # B^2
    variance: float = 0.0  # in the norm of A^-1
    distance: float = 0.0
    gap: float = 0.0


@dataclass(frozen=True)
class SmoothedFederation:
    """Algorithm 1 of paper 000: `cohort` of `population` clients without replacement, `steps` local steps, clip norm
    step * steps * `lipschitz`, noise of `ratio` clip norms on the sum (nu_1), server step `server`, strength s."""

    population: int
    cohort: int
    steps: int
    rounds: int
    dimension: int
    strength: float = 0.0
    server: float = 1.0
    lipschitz: float = 1.0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        require_count(population=self.population, cohort=self.cohort, steps=self.steps, rounds=self.rounds)
        require(self.cohort <= self.population, f"a cohort of {self.cohort}", f"at most {self.population}")
        require(self.server >= 1.0, f"server = {self.server:g}", "a server step >= 1", "Theorems 4 to 6 need it")

    @property
    def left_out(self) -> float:
        """1 - tau, the fraction of clients that a round leaves out."""
        return 1.0 - self.cohort / self.population

    @property
    def least(self) -> float:
        """The smallest eigenvalue of A^-1, at least 1/(1 + 4s)."""
        furthest = max(2.0 - 2.0 * math.cos(2.0 * math.pi * i / self.dimension) for i in self._middle())
        return 1.0 / (1.0 + self.strength * furthest)

    def _middle(self) -> tuple[int, int]:
        return self.dimension // 2, (self.dimension + 1) // 2

    @property
    def noise(self) -> float:
        """L^2 nu_1^2 d_sigma / S^2: what the noise of a round adds to H_sigma."""
        kept = effective_dimension(strength=self.strength, dimension=self.dimension)
        return self.lipschitz**2 * self.ratio**2 * kept / self.cohort**2

    def spread(self, land: Landscape) -> float:
        """The part of H_sigma that sampled gradients cause: (1/(eta_g^2 K) + 1/(S K)) variance."""
        return (1.0 / self.server**2 + 1.0 / self.cohort) * land.variance / self.steps

    def apart(self, land: Landscape) -> float:
        """The part of H_sigma that sampled clients cause: 4 (1 - tau) G^2 / S."""
        return 4.0 * self.left_out * land.dissimilar / self.cohort

    def disturbance(self, land: Landscape) -> float:
        """H_sigma of Theorems 4 to 6."""
        return self.spread(land) + self.apart(land) + self.noise

    def largest_step(self, land: Landscape) -> float:
        """eta~ <= Lambda_min^2 / (8 K beta (1 + B^2))."""
        return self.least**2 / (8.0 * self.steps * land.smooth * (1.0 + land.aligned))


@dataclass(frozen=True)
class Error:
    """The four parts of the Meta Theorem, and the step eta~ = eta_l eta_g that they hold for."""

    step: float
    initial: float
    heterogeneity: float
    variance: float
    privacy: float

    @property
    def total(self) -> float:
        return self.initial + self.heterogeneity + self.variance + self.privacy


def _require_land(land: Landscape) -> None:
    require_positive(smooth=land.smooth)
    require(land.aligned >= 1.0, f"aligned = {land.aligned:g}", "B^2 >= 1")


def _parts(fed: SmoothedFederation, land: Landscape, step: float, initial: float, slope: float, drift: float) -> Error:
    """`slope` eta~ K on each part of H_sigma, and `drift` (eta~ K)^2 for clients that wander off."""
    walked = step * fed.steps
    away = drift * walked**2 + slope * walked * fed.apart(land)
    return Error(step, initial, away, slope * walked * fed.spread(land), slope * walked * fed.noise)


def strongly_convex_error(fed: SmoothedFederation, land: Landscape) -> Error:
    """E f(mean of w_t with weights (1 - mu eta~ K/2)^-t) - f*, mu-strongly convex clients. Theorem 4 of paper 000.

    3 mu exp(-mu eta~ K T/2) D + 24 Lambda_min^-2 (eta~ K)^2 beta G^2 + 2 eta~ K H
    eta~ = min{2 log(max(e, mu^2 T D/H)) / (mu K T), Lambda_min^2 / (8 K beta (1 + B^2))},   T >= 1/(mu eta~ K)
    """
    _require_land(land)
    require_positive(convex=land.convex)
    mu, total = land.convex, fed.disturbance(land)
    reach = mu**2 * fed.rounds * land.distance / total if total > 0.0 else math.inf
    falling = 2.0 * math.log(max(math.e, reach)) / (mu * fed.steps * fed.rounds)
    step = min(falling, fed.largest_step(land))
    least = 1.0 / (mu * step * fed.steps)
    require(fed.rounds >= least, f"rounds = {fed.rounds}", f"at least {least:.4g} rounds (1/(mu eta K))", "run longer")
    initial = 3.0 * mu * math.exp(-mu * step * fed.steps * fed.rounds / 2.0) * land.distance
    return _parts(fed, land, step, initial, 2.0, 24.0 * land.smooth * land.dissimilar / fed.least**2)


def convex_error(fed: SmoothedFederation, land: Landscape) -> Error:
    """E f(mean of w_t) - f*, convex clients. Theorem 5 of paper 000.

    2 D/(eta~ K T) + Q (eta~ K)^2 + 2 eta~ K H,   Q = 24 Lambda_min^-2 beta G^2
    eta~ K = min{sqrt(D/(H T)), cbrt(D/(Q T)), Lambda_min^2 / (8 beta (1 + B^2))}
    """
    _require_land(land)
    drift = 24.0 * land.smooth * land.dissimilar / fed.least**2
    step = _step(fed, land, land.distance, fed.disturbance(land), drift)
    return _parts(fed, land, step, 2.0 * land.distance / (step * fed.steps * fed.rounds), 2.0, drift)


def nonconvex_error(fed: SmoothedFederation, land: Landscape) -> Error:
    """Mean over t of E ||grad f(w_t)||^2 in the norm of A^-1. Theorem 6 of paper 000.

    8 F0/(eta~ K T) + Q (eta~ K)^2 + 4 beta eta~ K H,   Q = 32 Lambda_min^-2 beta^2 G^2
    eta~ K = min{sqrt(F0/(H beta T)), cbrt(F0/(Q T)), Lambda_min^2 / (8 beta (1 + B^2))}
    """
    _require_land(land)
    drift = 32.0 * land.smooth**2 * land.dissimilar / fed.least**2
    step = _step(fed, land, land.gap, fed.disturbance(land) * land.smooth, drift)
    return _parts(fed, land, step, 8.0 * land.gap / (step * fed.steps * fed.rounds), 4.0 * land.smooth, drift)


def _step(fed: SmoothedFederation, land: Landscape, start: float, noise: float, drift: float) -> float:
    walks = [fed.largest_step(land) * fed.steps]
    if noise > 0.0:
        walks.append(math.sqrt(start / (noise * fed.rounds)))
    if drift > 0.0:
        walks.append(math.cbrt(start / (drift * fed.rounds)))
    return min(walks) / fed.steps


Theorem = Callable[[SmoothedFederation, Landscape], Error]


def rounds_to_reach(
    error: float, theorem: Theorem, fed: SmoothedFederation, land: Landscape, limit: int = 10**9
) -> int | None:
    """The least T whose bound is at most `error`, at a noise nu_1 that does not depend on T; None beyond `limit`.

    Corollary 1 of paper 000 states its order; here the bound itself is inverted (it falls with T).
    """
    require_positive(error=error)

    def enough(rounds: int) -> bool:
        from sordino.errors import SideConditionError

        try:
            return theorem(replace(fed, rounds=rounds), land).total <= error
        except SideConditionError:  # too few rounds for the theorem
            return False

    found = bisect_left(range(1, limit), True, key=enough) + 1
    return found if found < limit else None


def private_federation(fed: SmoothedFederation, *, epsilon: float, delta: float) -> SmoothedFederation:
    """The federation of Theorem 3 (Corollary 2): its T, and the noise that Theorem 1 asks for at that T.

        T = epsilon^2 N^2 / (C0 L^2 S log(1/delta)),   C0 = 14/lambda (1 + 1/(1 - lambda)),   lambda of Theorem 1

    Give the result to one of the three theorems for the bound. It needs log(1/delta) >= epsilon, eta_g >= sqrt(S).
    The noise is the theorem's, several times what the accountant asks for; it follows L, so that T depends on units.
    """
    require(math.log(1.0 / delta) >= epsilon, f"epsilon = {epsilon:g}", "log(1/delta) >= epsilon", "take a smaller one")
    require(fed.server**2 >= fed.cohort, f"server = {fed.server:g}", f"at least sqrt(S) = {math.sqrt(fed.cohort):.3g}")
    tau = fed.cohort / fed.population

    def rounds_at(split: float) -> int:
        c0 = 14.0 / split * (1.0 + 1.0 / (1.0 - split))
        budget = epsilon**2 * fed.population**2
        return max(1, math.floor(budget / (c0 * fed.lipschitz**2 * fed.cohort * math.log(1.0 / delta))))

    rounds = rounds_at(2.0 - math.sqrt(2.0))  # the split of the least C0
    noise = uniform_noise(epsilon=epsilon, delta=delta, rounds=rounds, rate=tau, clip_norm=1.0)
    return replace(fed, rounds=rounds, ratio=noise.std)


@dataclass(frozen=True)
class SmoothedSgd:
    """DP-LSSGD: steps of size `step` on the mean gradient of `batch` records plus N(0, std^2 I), smoothed by A^-1."""

    rounds: int
    step: float
    batch: int
    std: float
    dimension: int
    strength: float = 0.0
    lipschitz: float = 1.0  # G, of every record's loss

    def __post_init__(self) -> None:
        require_count(rounds=self.rounds, batch=self.batch, dimension=self.dimension)
        require_positive(step=self.step)


def lssgd_convex_error(sgd: SmoothedSgd, *, smooth: float, distance: float) -> float:
    """E F(mean of w_k) - F*, F convex and `smooth`, `distance` = ||w0 - w*||_A^2. Theorem 4 of paper 004.

        (D + T eta^2 (G^2/b + gamma d nu^2)) / (2/3 T eta),   eta <= 1/(2 beta)

    The proof needs the smoothness and the side condition on the step; the theorem does not name them.
    """
    require(
        sgd.step <= 0.5 / smooth, f"step = {sgd.step:g}", f"at most 1/(2 beta) = {0.5 / smooth:.4g}", "take more steps"
    )
    gamma = smoothing_gamma(strength=sgd.strength, dimension=sgd.dimension)
    noise = sgd.lipschitz**2 / sgd.batch + gamma * sgd.dimension * sgd.std**2
    return (distance / (sgd.rounds * sgd.step) + sgd.step * noise) * 1.5


def lssgd_nonconvex_error(sgd: SmoothedSgd, *, smooth: float, gap: float) -> float:
    """Mean over k of E ||grad F(w_k)||^2 in the norm of A^-1, `gap` = F(w0) - F*. Theorem 7 of paper 004.

    2 F0/(eta T) + eta beta (G^2/b + beta_s d nu^2),   eta beta < 1;   beta_s is `smoothing_beta`
    """
    require(sgd.step * smooth < 1.0, f"step = {sgd.step:g}", f"below 1/beta = {1.0 / smooth:.4g}", "take more steps")
    kept = smoothing_beta(strength=sgd.strength, dimension=sgd.dimension)
    noise = sgd.lipschitz**2 / sgd.batch + kept * sgd.dimension * sgd.std**2
    return 2.0 * gap / (sgd.step * sgd.rounds) + sgd.step * smooth * noise
