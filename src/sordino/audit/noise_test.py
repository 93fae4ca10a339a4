"""Is what ran what the plan says? The law of the noise, coordinate by coordinate.

An attack on one round sees half the noise, never 2% less of it; a test of the law does. Each question below is a family
of statistics whose law under the plan is known exactly (chi-square, normal) or bounded (Chernoff; Dvoretzky, Kiefer,
Wolfowitz with Massart's constant), so that Bonferroni over all of them keeps the promise. Which noise that is,
the parts of the plan say (`Release.noise_draws`, `Mechanism.distribution`); what they do not say is not examined.

Guarantee: correct code raises a false alarm with probability at most `FALSE_ALARM` over the audit's own coins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import special
from torch import Tensor

from sordino.accounting.bounds import AlreadyPrivate
from sordino.audit.trial_rounds import TrialRound, TrialRounds
from sordino.audit.worst_case import whitening
from sordino.parts.mechanisms import Distribution, Mechanism, Normal
from sordino.parts.releases import own_message
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Seeded

Array = NDArray[np.float64]
Pairs = Sequence[tuple[int, int]]
FALSE_ALARM = 1e-6  # of one audit, all its questions together
QUESTIONS = 64  # at most so many families in one audit: each is judged at FALSE_ALARM / QUESTIONS
BLOCK = 32  # neighbouring coordinates whose energies are summed
TAILS = (1.0, 2.0, 3.0, 3.3, 3.6, 4.0)  # in standard deviations
BLUR = 1e-3  # standard deviations: float32 moves a draw by less, and an atom of a discrete law is found within
MESSAGES, WIDTH = 64, 512  # messages of single clients that are noised, and their length


@dataclass(frozen=True)
class Finding:
    """One question: how many statistics answered it, the chance of the worst under the plan, and where that was.

    One that was not examined has not passed: `worst` then says what was missing.
    """

    question: str
    statistics: int
    chance: float  # at least the probability, under the plan, of anything as odd among them
    worst: str
    examined: bool = True

    @property
    def passed(self) -> bool:
        return self.examined and self.chance >= FALSE_ALARM / QUESTIONS


def not_examined(question: str, why: str) -> Finding:
    """A question without an answer: a part does not state what it takes, or there was nothing to look at."""
    return Finding(question, 0, math.nan, why, examined=False)


def finding(question: str, chances: ArrayLike, worst: Callable[[int], str], some: ArrayLike | None = None) -> Finding:
    """Bonferroni over a family: n times its smallest p-value; `some` says which statistics have anything to go by."""
    flat = np.nan_to_num(np.atleast_1d(np.asarray(chances, dtype=np.float64)).ravel(), nan=0.0)
    there = np.arange(len(flat)) if some is None else np.flatnonzero(np.atleast_1d(some).ravel())
    if not len(there):
        return not_examined(question, "there was nothing to look at")
    least = int(there[np.argmin(flat[there])])
    return Finding(question, len(there), float(min(1.0, len(there) * flat[least])), worst(least))


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
    """2 exp(-n KL(hits / n || rate)): for independent variables in [0, 1] of this mean on average (Hoeffding 1963).

    And for coins that are negatively associated, as of sampling without replacement.
    """
    n, p = np.maximum(np.asarray(trials, dtype=np.float64), 1e-300), np.asarray(rate, dtype=np.float64)
    seen = np.clip(np.asarray(hits, dtype=np.float64) / n, 0.0, 1.0)
    distance = special.rel_entr(seen, p) + special.rel_entr(1 - seen, 1 - p)
    return np.asarray(np.minimum(1.0, 2 * np.exp(-n * distance)))


def dkw(normals: Array) -> float:
    """Kolmogorov's distance to the normal law: P[D > e] <= 2 exp(-2 n e^2) (Massart 1990)."""
    n, ranked = len(normals), special.ndtr(np.sort(normals))
    steps = np.arange(n + 1) / n
    distance = max(float(np.max(steps[1:] - ranked)), float(np.max(ranked - steps[:-1])))
    return min(1.0, 2 * math.exp(-2 * n * distance**2))


# ---- what the parts state --------------------------------------------------------------------------------------------


class NotStatedError(Exception):
    """A part does not state what a statistic is compared with; the text says which, and what it could state."""


def noise_draws(plan: Plan, cohort: Cohort, t: int) -> tuple[Mechanism, ...]:
    """The independent draws whose sum is in a round's sum, if the plan is what ran."""
    if not isinstance(plan.bound, AlreadyPrivate):
        found = plan.release.noise_draws(cohort)
        if found is None:
            raise NotStatedError(f"release {plan.release.kind!r} does not state its noise (noise_draws)")
        return found
    own = [plan.local.own_noise(t, int(client)) for client in cohort]
    if any(one is None for one in own):
        raise NotStatedError(f"local solver {plan.local.kind!r} does not state the noise of a message (own_noise)")
    return tuple(one for one in own if one is not None)


def distribution_of(drawn: Sequence[Mechanism]) -> Distribution:
    """The distribution of one coordinate of their sum."""
    first, noise_multipliers = drawn[0], tuple(one.noise_multiplier for one in drawn)
    alike = all(one == first.with_noise_multiplier(one.noise_multiplier) for one in drawn)
    found = first.sum_distribution(noise_multipliers) if alike else None
    if found is None and len(drawn) == 1:
        raise NotStatedError(f"mechanism {first.kind!r} does not state its distribution")
    if found is None:
        what = "its distribution (sum_distribution)" if alike else "how draws of different mechanisms add up"
        several = f"of which a sum holds {len(drawn)} draws"
        raise NotStatedError(f"mechanism {first.kind!r}, {several}, does not state {what}")
    return found


def as_normals(noise: Array, drawn: Sequence[Mechanism], coins: np.random.Generator) -> Array:
    """Noise of the stated distribution F as standard normals: Phi^-1(U), U uniform in [F(x - blur), F(x + blur)].

    For a discrete law that is the randomised probability integral transform: exactly uniform where atoms lie further
    apart than the blur. For a continuous one it moves a draw by at most the blur. What is no number becomes infinite.
    """
    stated, sound = distribution_of(drawn), np.isfinite(noise)
    noise = np.where(sound, noise, 0.0)
    blur, u = BLUR * math.sqrt(sum(one.std**2 for one in drawn)), coins.random(noise.shape)
    below, above = noise - blur, noise + blur
    lower = (1 - u) * stated.cdf(below) + u * stated.cdf(above)
    upper = (1 - u) * stated.sf(below) + u * stated.sf(above)  # the same point, counted from the other end
    found = np.where(lower <= 0.5, special.ndtri(lower), -special.ndtri(upper))
    return np.where(sound & ~np.isnan(found), found, np.inf)


# ---- the noise -------------------------------------------------------------------------------------------------------


def noise_tests(trials: TrialRounds) -> list[Finding]:
    """Every coordinate of every round's noise, as standard normals if the plan is what ran."""
    asked: dict[str, Callable[[], list[Finding]]]
    asked = {"noise of the sums": lambda: _sums(trials), "noise of the messages": lambda: _messages(trials.plan)}
    found: list[Finding] = []
    for question, ask in asked.items():
        try:
            found += ask()
        except NotStatedError as missing:
            found.append(not_examined(question, str(missing)))
    return found


def _sums(trials: TrialRounds) -> list[Finding]:
    """The noise in the sums of trial rounds."""
    plan = trials.plan
    rounds = [s for s in trials.rounds if plan.release.accepts(len(s.cohort)) and noise_draws(plan, s.cohort, s.t)]
    if not rounds:
        why = f"no trial round had noise: release {plan.release.kind!r} states none"
        return [not_examined("noise of the sums", why)]
    z = np.stack([standardised(plan, seen) for seen in rounds])  # [rounds, d], NaN where nothing was sent
    z = whitened(plan, z, rounds)
    found = [*_energies(z), *_shape(z), *_independence(z, _neighbours(rounds))]
    return found if isinstance(plan.bound, AlreadyPrivate) else [*found, _along(z, rounds, plan)]


def _messages(plan: Plan) -> list[Finding]:
    """The noise that single clients add to their own messages, as in a deployment, where the release has them do it."""
    release = plan.release
    if not release.client_noise:
        return []
    clients = np.arange(MESSAGES) % plan.clients.population
    empty, rows = torch.zeros(WIDTH, dtype=torch.float64), []
    for i, client in enumerate(clients.tolist()):
        alone, coins = np.array([client], dtype=np.int64), Seeded(i)
        sent = own_message(release, empty, client, 0, coins.at(0, "client noise", client), secure=False)
        rows.append(as_normals(sent.double().numpy(), noise_draws(plan, alone, 0), coins.at(0, "audit blur")))
    z = np.stack(rows)
    found = [*_energies(z), *_shape(z), *_independence(z, [(i, i + 1) for i in range(0, MESSAGES - 1, 2)])]
    return [replace(one, question=f"message: {one.question}") for one in found]


def whitened(plan: Plan, noise: Array, rounds: Sequence[TrialRound]) -> Array:
    """C (noise of an episode): Z itself, if what the rounds share is what is accounted."""
    if not plan.release.correlated:
        return noise
    if not isinstance(distribution_of(noise_draws(plan, rounds[0].cohort, rounds[0].t)), Normal):
        raise NotStatedError(f"release {plan.release.kind!r} shares noise among rounds that is not Gaussian")
    found = np.empty_like(noise)
    for episode in {seen.episode for seen in rounds}:
        rows = [i for i, seen in enumerate(rounds) if seen.episode == episode]
        white, broken = whitening(plan.release, len(rows)), np.isinf(noise[rows])
        if white is None:
            raise NotStatedError(f"release {plan.release.kind!r}, whose rounds share noise, states no noise_matrix")
        found[rows] = np.where(broken.any(0), np.inf, white @ np.where(broken, 0.0, noise[rows]))
    return found


def standardised(plan: Plan, seen: TrialRound) -> Array:
    """The noise of one round's sum as standard normals [d]: what moved, without the clean sum, by its claimed law."""
    drawn, coins = noise_draws(plan, seen.cohort, seen.t), Seeded(seen.episode).at(seen.t, "audit blur")
    count = plan.clients.expected  # a constant of the plan where nobody may see who came; else what the release says
    if "cohort" in plan.release.sees:
        count = plan.release.denominator(plan.clients.expected, len(seen.cohort))
    if isinstance(plan.bound, AlreadyPrivate):
        return as_normals((seen.moved.double() * count).numpy(), drawn, coins)
    clean = _update(plan, seen, seen.total / count)
    unit = _update(plan, seen, seen.total.new_ones(len(seen.total)))
    noise = ((seen.moved.double() - clean) / unit * count).numpy()
    return np.where(np.asarray(unit) == 0, np.nan, as_normals(noise, drawn, coins))


def _update(plan: Plan, seen: TrialRound, encoded: Tensor) -> Tensor:
    """What an encoded mean does to the model."""
    return plan.split(plan.decode(encoded, seen.public), seen.public)[0].double()


def _energies(z: Array) -> list[Finding]:
    """Sums of squares: of every coordinate, of every block of neighbours, of every round, of all."""
    sent = ~np.isnan(z)
    squares = np.where(sent, z, 0.0) ** 2
    coordinates, counts = squares.sum(0), sent.sum(0)
    edges = np.arange(0, z.shape[1], BLOCK)
    blocks, sizes = np.add.reduceat(coordinates, edges), np.add.reduceat(counts, edges)
    rounds, widths = squares.sum(1), sent.sum(1)

    def energy_test(question: str, energy: Array, freedom: Array, where: Callable[[int], str]) -> Finding:
        def text(i: int) -> str:
            return f"{where(i)}{math.sqrt(energy[i] / max(freedom[i], 1)):.3f} times the noise"

        return finding(question, chi_square(energy, freedom), text, freedom > 0)

    def block(i: int) -> str:
        return f"coordinates {i * BLOCK} to {i * BLOCK + BLOCK - 1} have "

    return [
        energy_test("noise of all coordinates", np.array([squares.sum()]), np.array([sent.sum()]), lambda _: ""),
        energy_test("noise of each coordinate", coordinates, counts, lambda i: f"coordinate {i} has "),
        energy_test("noise of each block of coordinates", blocks, sizes, block),
        energy_test("noise of each round", rounds, widths, lambda i: f"trial round {i} has "),
    ]


def _shape(z: Array) -> list[Finding]:
    """The law itself: centre, tails, and Kolmogorov's distance."""
    sent = ~np.isnan(z)
    each, counts = z[sent], sent.sum(0)
    if not len(each):
        names = ("centre of each coordinate", "tails of the noise", "shape of the noise")
        return [not_examined(name, "no coordinate was ever sent") for name in names]
    size = np.abs(each)
    beyond = np.array([float((size > cut).sum()) for cut in TAILS])
    rates = 2 * special.ndtr(-np.array(TAILS))
    means = np.where(sent, z, 0.0).sum(0) / np.sqrt(np.maximum(counts, 1))
    return [
        finding(
            "centre of each coordinate",
            normal(means),
            lambda i: f"coordinate {i} is off by {means[i]:.1f} sigma",
            counts > 0,
        ),
        finding(
            "tails of the noise",
            chernoff(beyond, np.full(len(TAILS), len(each)), rates),
            lambda i: f"{beyond[i]:.0f} draws beyond {TAILS[i]} sigma where {rates[i] * len(each):.0f} are due",
        ),
        finding(
            "shape of the noise", np.array([dkw(each)]), lambda _: "distance to the distribution that is accounted for"
        ),
    ]


def _neighbours(rounds: Sequence[TrialRound]) -> Pairs:
    """Successive rounds, and the same round under other coins."""
    place = {(seen.episode, seen.t): i for i, seen in enumerate(rounds)}
    return [
        (i, place[other])
        for (episode, t), i in place.items()
        for other in ((episode, t + 1), (episode + 1, t))
        if other in place
    ]


def _independence(z: Array, pairs: Pairs) -> list[Finding]:
    """<z_s, z_t> / ||z_s|| is standard normal for independent rounds s, t; sign(z_j) z_k likewise within one."""
    full = np.where(np.isfinite(z), z, 0.0)
    first, second = (full[[pair[side] for pair in pairs]] for side in (0, 1))
    lengths = np.linalg.norm(np.where(second != 0, first, 0.0), axis=1) if pairs else np.zeros(0)
    repeats = (first * second).sum(1) / np.maximum(lengths, 1e-300) if pairs else np.zeros(0)
    shifts = [shift for shift in (1, z.shape[1] // 4, z.shape[1] // 2) if 0 < shift < z.shape[1]]
    correlations = [_correlation(full, shift) for shift in shifts]
    z_of = np.array([one[0] for one in correlations])
    return [
        finding(
            "noise of two rounds", normal(repeats), lambda i: f"{repeats[i]:.1f} sigma of correlation", lengths > 0
        ),
        finding(
            "noise of two coordinates",
            normal(z_of),
            lambda i: f"{z_of[i]:.1f} sigma of correlation at distance {shifts[i]}",
            np.array([one[1] for one in correlations]) > 0,
        ),
    ]


def _correlation(z: Array, shift: int) -> tuple[float, int]:
    """sum sign(z_j) z_k over its standard deviation, and over how many pairs."""
    one, other = z[:, :-shift], z[:, shift:]
    both = (one != 0) & (other != 0)
    return float((np.sign(one) * other)[both].sum() / math.sqrt(max(both.sum(), 1))), int(both.sum())


def _along(z: Array, rounds: Sequence[TrialRound], plan: Plan) -> Finding:
    """The noise along the clean sum: a denominator that follows the cohort, or a sum that is weighed, shows there."""
    clean = np.stack([np.asarray(_update(plan, seen, seen.total)) for seen in rounds])
    clean = np.where(np.isfinite(z), clean, 0.0)
    lengths = np.linalg.norm(clean, axis=1)
    some = lengths > 0
    along = (np.where(np.isfinite(z), z, 0.0) * clean)[some].sum(1) / lengths[some]
    energy, freedom = np.array([(along**2).sum()]), np.array([some.sum()])
    return finding(
        "noise along the sum",
        chi_square(energy, freedom),
        lambda i: f"{math.sqrt(energy[i] / max(freedom[i], 1)):.3f} times the noise",
        freedom > 0,
    )


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """What the plan does not explain."""
    return [one for one in findings if one.examined and not one.passed]


def unexamined(findings: Iterable[Finding]) -> list[Finding]:
    """What nobody has looked at: it has neither passed nor failed."""
    return [one for one in findings if not one.examined]
