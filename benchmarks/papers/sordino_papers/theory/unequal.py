"""Paper 001 for silos of different sizes, budgets and weights: Theorems 2.1, 2.2, 2.4 and E.1 in complete versions.

With psi_i = (L_i/(n_i epsilon_i))^2 ln(2.5R/delta_i) ln(2/delta_i) of silo i and M_r of N silos in round r,

    Psi = sqrt(E[(mean of the M_r largest psi_i)^2]),   1/M = E[1/M_r],   1/M' = sqrt(E[1/M_r^2])

the bounds hold with the smaller of Psi/M' and psi_max/M: the average silo counts if M_r hardly varies, else the worst.
xi_i and Xi are the same over L^2. A weight p_i other than 1/N multiplies L_i, beta_i and mu_i by p_i N, so that
L = max L_i, beta = max beta_i, mu = min mu_i (Appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sordino.parts.server_optimizers import Accelerated, Average, ServerOptimizer, Sgd
from sordino_papers.theory import local_noise as silo_noise
from sordino_papers.theory.central_noise import require, require_budget, require_count, require_positive
from sordino_papers.theory.prescriptions import Federation, multi_stage


@dataclass(frozen=True)
class Silo:
    """n_i -> records, (epsilon_i, delta_i) -> its own budget, p_i N -> weight (1: as heavy as the average silo)."""

    records: int
    epsilon: float
    delta: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_count(records=self.records)
        require_budget(epsilon=self.epsilon, delta=self.delta)
        require_positive(weight=self.weight)

    def xi(self, rounds: int | None) -> float:
        """psi_i over the square of the record's L; without its logarithms where `rounds` is None."""
        logs = 1.0 if rounds is None else math.log(2.5 * rounds / self.delta) * math.log(2 / self.delta)
        return (self.weight / (self.records * self.epsilon)) ** 2 * logs


@dataclass(frozen=True)
class Unequal:
    """N silos of their own kind each, and the law of M_r.

    cohorts -> {M_r: probability}; D -> distance; smoothness, convexity and clip norm (Lipschitz constant) are those of
    one record's loss, before weights. Weights have the mean 1 (p_i sums to 1).
    """

    silos: tuple[Silo, ...]
    cohorts: Mapping[int, float] = field(hash=False)
    dimension: int
    clip_norm: float
    distance: float
    smoothness: float
    convexity: float = 0.0

    def __post_init__(self) -> None:
        require(len(self.silos) > 0, "no silo", "at least one")
        require_count(dimension=self.dimension)
        require_positive(clip_norm=self.clip_norm, distance=self.distance, smoothness=self.smoothness)
        mean = sum(one.weight for one in self.silos) / len(self.silos)
        require(math.isclose(mean, 1.0, rel_tol=1e-9), f"weights of mean {mean:g}", "weights p_i N of mean 1")
        total, sizes = sum(self.cohorts.values()), list(self.cohorts)
        require(math.isclose(total, 1.0, rel_tol=1e-9), f"probabilities of sum {total:g}", "probabilities of sum 1")
        inside = bool(sizes) and min(sizes) >= 1 and max(sizes) <= len(self.silos)
        require(inside, f"cohorts of {sizes}", f"1 to {len(self.silos)} silos in a round")
        require(0 <= self.convexity <= self.smoothness, f"convexity = {self.convexity:g}", "0 <= mu <= beta")

    @property
    def cohort(self) -> float:
        """M: the harmonic mean of M_r."""
        return 1 / sum(chance / size for size, chance in self.cohorts.items())

    @property
    def steady_cohort(self) -> float:
        """M', at most M: the two agree if M_r is fixed. (The paper writes E sqrt(1/M_r^2), which would be M again.)"""
        return 1 / math.sqrt(sum(chance / size**2 for size, chance in self.cohorts.items()))

    @property
    def fewest(self) -> int:
        """n_min."""
        return min(one.records for one in self.silos)

    @property
    def heaviest(self) -> float:
        """The largest p_i N."""
        return max(one.weight for one in self.silos)

    @property
    def lipschitz(self) -> float:
        """L."""
        return self.clip_norm * self.heaviest

    @property
    def beta(self) -> float:
        """beta."""
        return self.smoothness * self.heaviest

    @property
    def mu(self) -> float:
        """mu."""
        return self.convexity * min(one.weight for one in self.silos)

    def xis(self, rounds: int | None = None) -> list[float]:
        """psi_i/L^2, the largest first."""
        return sorted((one.xi(rounds) / self.heaviest**2 for one in self.silos), reverse=True)

    def average(self, rounds: int | None = None) -> float:
        """Psi/L^2."""
        largest = self.xis(rounds)
        return math.sqrt(sum(chance * (sum(largest[:m]) / m) ** 2 for m, chance in self.cohorts.items()))

    def noise(self, rounds: int | None = None) -> Noise:
        """The smaller of Psi/M' and psi_max/M, and which it is."""
        mean, worst = self.average(rounds), self.xis(rounds)[0]
        if mean / self.steady_cohort <= worst / self.cohort:
            return Noise("average", mean, self.steady_cohort)
        return Noise("worst", worst, self.cohort)


@dataclass(frozen=True)
class Noise:
    """What decides the privacy term: xi~ and M~ (the paper's M~ = sqrt(M') is a misprint for M')."""

    by: Literal["average", "worst"]
    xi: float
    cohort: float


@dataclass(frozen=True)
class UnequalPrescription:
    """Rounds and server; every silo's batch K_i (the same share of its records) and noise on its batch mean."""

    theorem: str
    rounds: int
    batches: tuple[int, ...]
    stds: tuple[float, ...]
    server: ServerOptimizer
    risk: float
    decided_by: Literal["average", "worst"]
    smoothing: float | None = None  # beta of the Moreau envelope, where the loss is not smooth


def unequal_minibatch(f: Unequal, share: float = 1.0) -> UnequalPrescription:
    """Noisy minibatch SGD, population loss of silos with one distribution; `share` of every silo's records a round.

        R = max(beta D sqrt(M~ q)/L, q/K)   or   max(8 beta/mu ln(beta D^2 mu M~/(d L^2 xi~)), q/K)
        q = min{n_min, 1/(d xi~)} with xi~ without logarithms, K the smallest batch
        lr = min(1/(4 beta), D sqrt(M~)/(L R) min{sqrt(n_min), 1/sqrt(d xi~)})   or as in `strongly_convex`
        risk = L D/sqrt(M~) max{1/sqrt(n_min), sqrt(d xi~)}   or   L^2/mu (1/(M n_min) + d xi~/M~)

    Paper 001, Theorem 2.1, complete version, up to its constant 272; equal silos give `convex`, `strongly_convex`.
    """
    first = f.noise()
    q = min(f.fewest, 1 / (f.dimension * first.xi))
    rounds, batches, stds = _sized(f, share, lambda k: max(_forgotten(f, first, q), q / k))
    noise, most = f.noise(rounds), 1 / (4 * f.beta)
    if not f.mu:
        root = math.sqrt(noise.cohort * min(f.fewest, 1 / (f.dimension * noise.xi)))
        lr = min(most, f.distance * root / (f.lipschitz * rounds))
        plain = Sgd(lr=lr, ball=f.distance, average=Average())
        risk = f.lipschitz * f.distance / root
        return UnequalPrescription("2.1, convex", rounds, batches, stds, plain, risk, noise.by)
    server = _growing(f, rounds, min(batches), noise)
    each = 1 / (f.cohort * f.fewest) + f.dimension * noise.xi / noise.cohort
    risk = f.lipschitz**2 / f.mu * each
    return UnequalPrescription("2.1, strongly convex", rounds, batches, stds, server, risk, noise.by)


def _forgotten(f: Unequal, noise: Noise, q: float) -> float:
    """Rounds until the start is forgotten."""
    bend = f.beta * f.distance / f.lipschitz
    if not f.mu:
        return bend * math.sqrt(noise.cohort * q)
    inside = bend * f.distance / f.lipschitz * f.mu * noise.cohort / (f.dimension * noise.xi)
    return 8 * f.beta / f.mu * math.log(inside)


def _growing(f: Unequal, rounds: int, batch: int, noise: Noise) -> Sgd:
    """Step and weights of Lemma E.9: c = 8 L^2/(M K) + d V, V the noise on the mean of the silos."""
    mu, most = f.mu, 1 / (4 * f.beta)
    spread = 8 * f.lipschitz**2 / (f.cohort * batch)
    spread += f.dimension * 256 * f.lipschitz**2 * rounds * noise.xi / noise.cohort
    lr = min(most, math.log(max(2.0, (mu * f.distance * rounds) ** 2 / spread)) / (mu * rounds))
    return Sgd(lr=lr, ball=f.distance, average=Average(growth=1 / (1 - mu * lr)))


def unequal_accelerated(f: Unequal, share: float = 1.0, deviation: float | None = None) -> UnequalPrescription:
    """Accelerated noisy minibatch SGD on the empirical loss of any silos, convex or (multi-stage) strongly convex.

        R = max((beta D sqrt(M~)/(L sqrt(d xi~)))^(1/2), again)   or   max(sqrt(beta/mu) ln(D mu M~/(L d xi~)), again)
        again = phi^2/(L^2 d xi~ K), only if records are left out;   V^2 = phi^2/(M K) + 256 d L^2 R xi~/M~
        convex: v = 2 (beta + lambda),   lambda = V/(2 D sqrt(R));   strongly convex: the stages of `multi_stage`
        risk = beta D^2/R^2 + phi D/sqrt(M K R) + D L sqrt(d xi~/M~)
        or     L D exp(-sqrt(mu/beta) R) + phi^2/(mu M K R) + d L^2 xi~/(mu M~)

    phi -> deviation, L where not known. Paper 001, Theorem E.1, complete version, (30) and (32), Lemmas E.11, E.12.
    """
    phi, first = (f.lipschitz if deviation is None else deviation), f.noise()
    reach = 1 / (f.dimension * first.xi)
    whole = share == 1.0 and max(f.cohorts) == min(f.cohorts) == len(f.silos)
    start = math.sqrt(f.beta * f.distance / f.lipschitz * math.sqrt(first.cohort * reach))
    if f.mu:
        start = math.sqrt(f.beta / f.mu) * math.log(f.distance * f.mu * first.cohort * reach / f.lipschitz)
    again = 0.0 if whole else reach * (phi / f.lipschitz) ** 2
    rounds, batches, stds = _sized(f, share, lambda k: max(start, again / k))
    noise, sampled = f.noise(rounds), 0.0 if whole else phi**2 / (f.cohort * min(batches))
    private = f.dimension * f.lipschitz**2 * noise.xi / noise.cohort
    server, risk = (_staged if f.mu else _pulled)(f, rounds, sampled, private)
    name = "E.1, strongly convex" if f.mu else "E.1, convex"
    return UnequalPrescription(name, rounds, batches, stds, server, risk, noise.by)


def _pulled(f: Unequal, rounds: int, sampled: float, private: float) -> tuple[ServerOptimizer, float]:
    """Server and risk of the regularised convex loss."""
    pull = math.sqrt((sampled + 256 * rounds * private) / rounds) / (2 * f.distance)
    risk = f.beta * (f.distance / rounds) ** 2 + f.distance * (math.sqrt(sampled / rounds) + math.sqrt(private))
    return Accelerated(v=2 * (f.beta + pull), weight_decay=pull, ball=f.distance), risk


def _staged(f: Unequal, rounds: int, sampled: float, private: float) -> tuple[ServerOptimizer, float]:
    """Server and risk of stages on the strongly convex loss; the stages ask for no silo's own numbers."""
    one = f.silos[0]
    shared = Federation(
        one.records, len(f.silos), min(f.cohorts), f.dimension, one.epsilon, one.delta, f.lipschitz, f.distance,
        f.beta, f.mu,
    )  # fmt: skip
    start = shared.gap * math.exp(-math.sqrt(f.mu / f.beta) * rounds)
    risk = start + sampled / (f.mu * rounds) + private / f.mu
    return multi_stage(shared, rounds, sampled + 256 * rounds * private), risk


def unequal_non_smooth(f: Unequal, share: float = 1.0, *, accelerate: bool = False) -> UnequalPrescription:
    """The smooth theorems on the Moreau envelope of a non-smooth loss, which costs L^2/(2 beta) of loss.

        beta = L sqrt(M~ q)/D   or, strongly convex,   mu M~ q;   q = min{n_min, 1/(d xi~)}; accelerated: 1/(d xi~)

    `f.smoothness` is not read. As in `non_smooth`, the envelope is L-Lipschitz and mu beta/(mu + beta)-strongly convex.
    Paper 001, Theorem 2.2, and Theorem 2.4 for the accelerated one, complete versions.
    """
    first, mu = f.noise(), f.mu
    reach = 1 / (f.dimension * first.xi)
    q = reach if accelerate else min(f.fewest, reach)
    beta = mu * first.cohort * q if mu else f.lipschitz * math.sqrt(first.cohort * q) / f.distance
    lightest = min(one.weight for one in f.silos)
    smooth = replace(f, smoothness=beta / f.heaviest, convexity=mu * beta / (mu + beta) / lightest if mu else 0.0)
    made = (unequal_accelerated if accelerate else unequal_minibatch)(smooth, share)
    theorem = made.theorem.replace("E.1", "2.4").replace("2.1", "2.2")
    return replace(made, theorem=theorem, smoothing=beta, risk=made.risk + f.lipschitz**2 / (2 * beta))


def _sized(
    f: Unequal, share: float, rounds_at: Callable[[int], float]
) -> tuple[int, tuple[int, ...], tuple[float, ...]]:
    """Rounds, and every silo's batch and noise; a silo whose batch is too small for its proof is refused."""
    require(0 < share <= 1, f"share = {share:g}", "0 < share <= 1")
    batches = tuple(max(1, math.ceil(share * one.records * (1 - 1e-12))) for one in f.silos)
    rounds = max(1, math.ceil(rounds_at(min(batches)) * (1 - 1e-12)))
    return rounds, batches, tuple(_stds(f, rounds, batches))


def _stds(f: Unequal, rounds: int, batches: Sequence[int]) -> list[float]:
    return [
        silo_noise.silo_std(
            epsilon=one.epsilon,
            delta=one.delta,
            rounds=rounds,
            clip_norm=f.clip_norm * one.weight,
            records=one.records,
            batch=batch,
        )
        for one, batch in zip(f.silos, batches, strict=True)
    ]
