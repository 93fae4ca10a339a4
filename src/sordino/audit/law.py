"""Is what ran what the plan says? The law of the noise, coordinate by coordinate, and of the coins.

An attack on one round sees half the noise, never 2% less of it; a test of the law does. Each question below is a family
of statistics whose law under the plan is known exactly (chi-square, normal) or bounded (Chernoff; Dvoretzky, Kiefer,
Wolfowitz with Massart's constant), so that Bonferroni over all of them keeps the promise:

Guarantee: correct code raises a false alarm with probability at most `FALSE_ALARM` over the audit's own coins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special
from torch import Tensor

from sordino.audit.rehearsal import Rehearsal, Seen
from sordino.audit.sequence import whitening
from sordino.parts.correlated import CorrelatedNoise
from sordino.parts.mechanisms import Gaussian, Laplace, Mechanism
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, ShuffledNoise
from sordino.parts.schedules import at, paces
from sordino.plan import Plan

Array = NDArray[np.float64]
FALSE_ALARM = 1e-6  # of one audit, all its questions together
QUESTIONS = 40  # at most so many families in one audit: each is judged at FALSE_ALARM / QUESTIONS
BLOCK = 32  # neighbouring coordinates whose energies are summed
TAILS = (1.0, 2.0, 3.0, 3.3, 3.6, 4.0)  # in standard deviations


@dataclass(frozen=True)
class Finding:
    """One question: how many statistics answered it, the chance of the worst under the plan, and where that was."""

    question: str
    statistics: int
    chance: float  # at least the probability, under the plan, of anything as odd among them
    worst: str

    @property
    def passed(self) -> bool:
        return self.chance >= FALSE_ALARM / QUESTIONS


def finding(question: str, chances: Array, worst: Callable[[int], str]) -> Finding:
    """Bonferroni over a family: n times its smallest p-value."""
    flat = np.nan_to_num(np.atleast_1d(chances).ravel(), nan=0.0)
    if not len(flat):
        return Finding(question, 0, 1.0, "nothing to see")
    least = int(np.argmin(flat))
    return Finding(question, len(flat), float(min(1.0, len(flat) * flat[least])), worst(least))


# ---- p-values --------------------------------------------------------------------------------------------------------


def chi_square(energy: Array, freedom: Array) -> Array:
    """Two-sided: twice the smaller tail of a chi-square."""
    none = np.asarray(freedom) == 0
    half = np.where(none, 1.0, freedom) / 2
    tails = np.minimum(special.gammainc(half, energy / 2), special.gammaincc(half, energy / 2))
    return np.where(none, 1.0, np.minimum(1.0, 2 * tails))


def normal(z: Array) -> Array:
    """Two-sided, of standard normals."""
    return np.asarray(2 * special.ndtr(-np.abs(z)))


def chernoff(hits: ArrayLike, trials: ArrayLike, rate: ArrayLike) -> Array:
    """2 exp(-n KL(hits / n || rate)): for independent coins, and for coins that are negatively associated."""
    n, p = np.maximum(np.asarray(trials, dtype=np.float64), 1e-300), np.asarray(rate, dtype=np.float64)
    seen = np.clip(np.asarray(hits, dtype=np.float64) / n, 0.0, 1.0)
    distance = special.rel_entr(seen, p) + special.rel_entr(1 - seen, 1 - p)
    return np.asarray(np.minimum(1.0, 2 * np.exp(-n * distance)))


def dkw(normals: Array) -> float:
    """Kolmogorov's distance to the normal law: P[D > e] <= 2 exp(-2 n e^2) (Massart 1990)."""
    n, ranked = len(normals), special.ndtr(np.sort(normals))
    steps = np.arange(n + 1) / n
    distance = max(float(np.max(steps[1:] - ranked)), float(np.max(ranked - steps[:-1]))) if n else 0.0
    return min(1.0, 2 * math.exp(-2 * n * distance**2))


# ---- the noise -------------------------------------------------------------------------------------------------------


def noise_law(rehearsal: Rehearsal) -> list[Finding]:
    """Every coordinate of every round's noise, as standard normals if the plan is what ran."""
    plan = rehearsal.plan
    rounds = [seen for seen in rehearsal.rounds if plan.release.accepts(len(seen.cohort))]
    if not rounds or not _promises_noise(plan):
        return []
    z = np.stack([standardised(plan, seen) for seen in rounds])  # [rounds, d], NaN where nothing was sent
    z = whitened(plan.release, z, rounds) if isinstance(plan.release, CorrelatedNoise) else z
    found = [*_energies(z), *_shape(z), *_independence(z, rounds)]
    return found if isinstance(plan.local, NoisyLocalSgd) else [*found, _along(z, rounds, plan)]


def _promises_noise(plan: Plan) -> bool:
    noises = CentralNoise | CorrelatedNoise | NoiseShares | LocalNoise | ShuffledNoise
    return isinstance(plan.release, noises) or isinstance(plan.local, NoisyLocalSgd)


def whitened(release: CorrelatedNoise, noise: Array, rounds: Sequence[Seen]) -> Array:
    """C (noise of an episode): Z itself, if what the rounds share is what is billed."""
    found = np.empty_like(noise)
    for episode in {seen.episode for seen in rounds}:
        rows = [i for i, seen in enumerate(rounds) if seen.episode == episode]
        found[rows] = whitening(release, len(rows)) @ noise[rows]
    return found


def standardised(plan: Plan, seen: Seen) -> Array:
    """The noise of one round's sum as standard normals [d]: what moved, without the clean sum, by its claimed law."""
    each = isinstance(plan.release, LocalNoise | ShuffledNoise | Forward)  # every message is seen: so is their number
    count = float(max(len(seen.cohort), 1)) if each else plan.clients.expected
    if isinstance(plan.local, NoisyLocalSgd):
        return np.asarray(seen.moved.double() * count / _step_noise(plan, plan.local, seen))
    clean = _update(plan, seen, seen.total / count)
    unit = _update(plan, seen, seen.total.new_ones(len(seen.total)))
    noise = ((seen.moved.double() - clean) / unit * count).numpy()
    found = np.where(np.isfinite(noise), normals(plan, seen, noise), np.inf)
    return np.where(np.asarray(unit) == 0, np.nan, found)


def _update(plan: Plan, seen: Seen, encoded: Tensor) -> Tensor:
    """What an encoded mean does to the model."""
    return plan.split(plan.decode(encoded, seen.public), seen.public)[0].double()


def _step_noise(plan: Plan, local: NoisyLocalSgd, seen: Seen) -> float:
    """Standard deviation of the sum of silos whose every step adds noise of its own."""
    pace = math.hypot(*paces(local.lr, seen.t, local.steps)) * at(local.radius, seen.t) / local.records.count
    return pace * math.sqrt(sum(local.noise(int(silo)).std ** 2 for silo in seen.cohort))


def normals(plan: Plan, seen: Seen, noise: Array) -> Array:
    """Noise of the claimed law as standard normals: x / std, or Phi^-1(F(x)) of a sum of Laplace draws."""
    drawn = _drawn(plan, seen)
    if all(isinstance(each, Gaussian) for each in drawn):
        return np.asarray(noise / math.sqrt(sum(each.std**2 for each in drawn)))
    scales = {each.multiplier for each in drawn if isinstance(each, Laplace)}
    if len(scales) != 1:
        return np.full_like(noise, np.nan)  # unlike scales: their sum has no simple law, each is audited as a message
    tails = laplace_tail(np.abs(noise) / scales.pop(), len(drawn))
    return np.asarray(-np.sign(noise) * special.ndtri(tails))


def _drawn(plan: Plan, seen: Seen) -> list[Mechanism]:
    """The independent draws whose sum is in a round's sum, if the plan is what ran."""
    release = plan.release
    if isinstance(release, NoiseShares):
        return [release.share] * len(seen.cohort)
    if isinstance(release, LocalNoise):
        return [release.of(int(client)) for client in seen.cohort]
    if isinstance(release, ShuffledNoise):
        return [release.mechanism] * len(seen.cohort)
    assert isinstance(release, CentralNoise | CorrelatedNoise)
    return [release.mechanism]


def laplace_tail(x: Array, count: int) -> Array:
    """P[sum of `count` Laplace(1) > x], x >= 0: sum_j C(2n-j-1, n-1) 2^-(2n-j) Q(j, x).

    The sum is a difference of two Erlang(n) clocks; when the other has run out, j phases of the first are left.
    """
    j = np.arange(1, count + 1)
    log_weight = special.gammaln(2 * count - j) - special.gammaln(count) - special.gammaln(count - j + 1)
    weights = np.exp(log_weight - (2 * count - j) * math.log(2))
    return np.asarray(sum(w * special.gammaincc(k, x) for w, k in zip(weights, j, strict=True)))


def _energies(z: Array) -> list[Finding]:
    """Sums of squares: of every coordinate, of every block of neighbours, of every round, of all."""
    squares, sent = np.nan_to_num(z) ** 2, np.isfinite(z)
    missing = ~sent & ~np.isnan(z)
    squares[missing] = np.inf
    coordinates, counts = squares.sum(0), sent.sum(0)
    edges = np.arange(0, z.shape[1], BLOCK)
    blocks, sizes = np.add.reduceat(coordinates, edges), np.add.reduceat(counts, edges)
    rounds, widths = squares.sum(1), sent.sum(1)

    def scale(energy: Array, freedom: Array) -> Callable[[int], str]:
        return lambda i: f"{math.sqrt(energy[i] / max(freedom[i], 1)):.3f} times the noise"

    whole, all_sent = np.array([squares.sum()]), np.array([sent.sum()])
    return [
        finding("noise of all coordinates", chi_square(whole, all_sent), scale(whole, all_sent)),
        finding(
            "noise of each coordinate",
            chi_square(coordinates, counts),
            lambda i: f"coordinate {i} has {scale(coordinates, counts)(i)}",
        ),
        finding(
            "noise of each block of coordinates",
            chi_square(blocks, sizes),
            lambda i: f"coordinates {i * BLOCK} to {i * BLOCK + BLOCK - 1} have {scale(blocks, sizes)(i)}",
        ),
        finding(
            "noise of each round",
            chi_square(rounds, widths),
            lambda i: f"rehearsed round {i} has {scale(rounds, widths)(i)}",
        ),
    ]


def _shape(z: Array) -> list[Finding]:
    """The law itself: centre, tails, and Kolmogorov's distance."""
    each = z[np.isfinite(z)]
    size, sent = np.abs(each), np.isfinite(z).sum(0)
    beyond = np.array([float((size > cut).sum()) for cut in TAILS])
    rates = 2 * special.ndtr(-np.array(TAILS))
    means = np.nansum(z, axis=0) / np.sqrt(np.maximum(sent, 1))
    return [
        finding("centre of each coordinate", normal(means), lambda i: f"coordinate {i} is off by {means[i]:.1f} sigma"),
        finding(
            "tails of the noise",
            chernoff(beyond, np.full(len(TAILS), len(each)), rates),
            lambda i: f"{beyond[i]:.0f} draws beyond {TAILS[i]} sigma where {rates[i] * len(each):.0f} are due",
        ),
        finding("shape of the noise", np.array([dkw(each)]), lambda _: "distance to the law that is billed"),
    ]


def _independence(z: Array, rounds: Sequence[Seen]) -> list[Finding]:
    """<z_s, z_t> / ||z_s|| is standard normal for independent rounds s, t; sign(z_j) z_k likewise within one."""
    place = {(seen.episode, seen.t): i for i, seen in enumerate(rounds)}
    pairs = [
        (i, place[other])
        for (episode, t), i in place.items()
        for other in ((episode, t + 1), (episode + 1, t))
        if other in place
    ]
    full = np.nan_to_num(z)
    first, second = (full[[pair[side] for pair in pairs]] for side in (0, 1))
    lengths = np.maximum(np.linalg.norm(np.where(second != 0, first, 0.0), axis=1), 1e-300) if pairs else np.ones(0)
    repeats = (first * second).sum(1) / lengths if pairs else np.zeros(0)
    found = [finding("noise of two rounds", normal(repeats), lambda i: f"{repeats[i]:.1f} sigma of likeness")]
    shifts = [shift for shift in (1, z.shape[1] // 4, z.shape[1] // 2) if shift]
    likeness = np.array([_likeness(full, shift) for shift in shifts])
    return [
        *found,
        finding(
            "noise of two coordinates",
            normal(likeness),
            lambda i: f"{likeness[i]:.1f} sigma of likeness at distance {shifts[i]}",
        ),
    ]


def _likeness(z: Array, shift: int) -> float:
    one, other = z[:, :-shift], z[:, shift:]
    both = (one != 0) & (other != 0)
    return float((np.sign(one) * other)[both].sum() / math.sqrt(max(both.sum(), 1)))


def _along(z: Array, rounds: Sequence[Seen], plan: Plan) -> Finding:
    """The noise along the clean sum: a denominator that follows the cohort, or a sum that is weighed, shows there."""
    clean = np.stack([np.asarray(_update(plan, seen, seen.total)) for seen in rounds])
    clean = np.where(np.isfinite(z), clean, 0.0)
    lengths = np.linalg.norm(clean, axis=1)
    some = lengths > 0
    along = (np.nan_to_num(z) * clean)[some].sum(1) / lengths[some]
    energy, freedom = np.array([(along**2).sum()]), np.array([some.sum()])
    return finding(
        "noise along the sum",
        chi_square(energy, freedom),
        lambda i: f"{math.sqrt(energy[i] / max(freedom[i], 1)):.3f} times the noise",
    )


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """What the plan does not explain."""
    return [one for one in findings if not one.passed]
