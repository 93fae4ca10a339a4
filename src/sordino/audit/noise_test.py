"""Noise tests of the behaviour audit: they check that the added noise has the distribution that the plan states.

An attack on one round detects noise of half the scale, but not noise that is 2% too small; goodness-of-fit tests do.
Each question is a family of statistics whose distribution under the plan is known (chi-square, normal) or bounded
(Chernoff; Dvoretzky, Kiefer, Wolfowitz with Massart's constant), with Bonferroni's correction. The parts of the plan
state their noise (`Release.noise_draws`, `Mechanism.distribution`); a question about a part that does not is reported
as not examined. Called by `summary`.

Guarantee: correct code raises a false alarm with probability at most `FALSE_ALARM` over the audit's own randomness.
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
from sordino.audit.attacks import whitening
from sordino.audit.trial_rounds import TrialRound, TrialRounds
from sordino.parts.mechanisms import Distribution, Mechanism, Normal
from sordino.parts.releases import own_message
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Seeded

Array = NDArray[np.float64]
Pairs = Sequence[tuple[int, int]]
FALSE_ALARM = 1e-6  # of one audit, all its questions together
QUESTIONS = 64  # most questions of one audit: each is judged at FALSE_ALARM / QUESTIONS
BLOCK = 32  # neighbouring coordinates whose energies are summed
TAILS = (1.0, 2.0, 3.0, 3.3, 3.6, 4.0)  # in standard deviations
BLUR = 1e-3  # standard deviations: more than float32 moves a draw, and less than atoms of a discrete law lie apart
MESSAGES, WIDTH = 64, 512  # messages of single clients that are noised, and their length


@dataclass(frozen=True)
class Finding:
    """Result of one test: number of statistics, smallest p-value after Bonferroni correction, and its statistic.

    A test that could not run has not passed; `worst` then says what was missing.
    """

    question: str
    statistics: int
    chance: float  # upper bound on the probability, under the plan, of a statistic as extreme as the worst
    worst: str  # description of the most extreme statistic
    examined: bool = True

    @property
    def passed(self) -> bool:
        return self.examined and self.chance >= FALSE_ALARM / QUESTIONS


def not_examined(question: str, why: str) -> Finding:
    """Return the result of a test that could not run, which counts as not passed."""
    return Finding(question, 0, math.nan, why, examined=False)


def finding(question: str, chances: ArrayLike, worst: Callable[[int], str], some: ArrayLike | None = None) -> Finding:
    """Combine n p-values into one result by Bonferroni's correction: n times the smallest p-value.

    worst(i) describes statistic i. Only statistics marked in `some` count, by default all.
    """
    flat = np.nan_to_num(np.atleast_1d(np.asarray(chances, dtype=np.float64)).ravel(), nan=0.0)
    there = np.arange(len(flat)) if some is None else np.flatnonzero(np.atleast_1d(some).ravel())
    if not len(there):
        return not_examined(question, "there are no data for this question")
    least = int(there[np.argmin(flat[there])])
    return Finding(question, len(there), float(min(1.0, len(there) * flat[least])), worst(least))


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Return the tests that ran and did not pass."""
    return [one for one in findings if one.examined and not one.passed]


def unexamined(findings: Iterable[Finding]) -> list[Finding]:
    """Return the tests that could not run, and neither passed nor failed."""
    return [one for one in findings if not one.examined]


# ---- p-values
def chi_square(energy: Array, freedom: Array) -> Array:
    """Return two-sided p-values (twice the smaller tail) of chi-square statistics with `freedom` degrees of freedom."""
    none = np.asarray(freedom) == 0
    half = np.where(none, 1.0, freedom) / 2
    tails = np.minimum(special.gammainc(half, energy / 2), special.gammaincc(half, energy / 2))
    return np.where(none, 1.0, np.minimum(1.0, 2 * tails))


def normal(z: Array) -> Array:
    """Return two-sided p-values of standard normal statistics z."""
    return np.asarray(2 * special.ndtr(-np.abs(z)))


def chernoff(hits: ArrayLike, trials: ArrayLike, rate: ArrayLike) -> Array:
    """Return two-sided p-values 2 exp(-n KL(hits / n || rate)) of a sum of n = `trials` variables in [0, 1].

    The bound holds for independent or negatively associated variables (Hoeffding 1963), so also for sampling without
    replacement.
    """
    n, p = np.maximum(np.asarray(trials, dtype=np.float64), 1e-300), np.asarray(rate, dtype=np.float64)
    seen = np.clip(np.asarray(hits, dtype=np.float64) / n, 0.0, 1.0)
    distance = special.rel_entr(seen, p) + special.rel_entr(1 - seen, 1 - p)
    return np.asarray(np.minimum(1.0, 2 * np.exp(-n * distance)))


def dkw(normals: Array) -> float:
    """Return the p-value 2 exp(-2 n e^2) of n samples at Kolmogorov distance e to a standard normal (Massart 1990)."""
    n, ranked = len(normals), special.ndtr(np.sort(normals))
    steps = np.arange(n + 1) / n
    distance = max(float(np.max(steps[1:] - ranked)), float(np.max(ranked - steps[:-1])))
    return min(1.0, 2 * math.exp(-2 * n * distance**2))


# ---- what the parts state
class NotStatedError(Exception):
    """Raised if a part of the plan does not state its noise, so that no test can run; names part and method."""


def noise_draws(plan: Plan, cohort: Cohort, t: int) -> tuple[Mechanism, ...]:
    """Return the mechanisms whose independent noise draws are in the sum of round t."""
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
    """Return the distribution of one coordinate of the sum of independent noise draws."""
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


def as_normals(noise: Array, drawn: Sequence[Mechanism], rng: np.random.Generator) -> Array:
    """Map noise x of the stated distribution F to standard normals Phi^-1(U), U uniform in [F(x - b), F(x + b)].

    The blur b is small. For a discrete F this is the randomised probability integral transform, exact if atoms are
    further apart than b. For a continuous F it moves x by at most b. NaN and infinity become infinity.
    """
    stated, sound = distribution_of(drawn), np.isfinite(noise)
    noise = np.where(sound, noise, 0.0)
    blur, u = BLUR * math.sqrt(sum(one.std**2 for one in drawn)), rng.random(noise.shape)
    below, above = noise - blur, noise + blur
    lower = (1 - u) * stated.cdf(below) + u * stated.cdf(above)
    upper = (1 - u) * stated.sf(below) + u * stated.sf(above)  # the same point, counted from the other end
    found = np.where(lower <= 0.5, special.ndtri(lower), -special.ndtri(upper))
    return np.where(sound & ~np.isnan(found), found, np.inf)


# ---- the noise
def noise_tests(trials: TrialRounds) -> list[Finding]:
    """Test the noise in the sums of trial rounds, coordinate by coordinate, and the noise in single messages."""
    asked: dict[str, Callable[[], list[Finding]]]
    asked = {
        "noise of the sums": lambda: _test_sums(trials),
        "noise of the messages": lambda: _test_messages(trials.plan),
    }
    found: list[Finding] = []
    for question, ask in asked.items():
        try:
            found += ask()
        except NotStatedError as missing:
            found.append(not_examined(question, str(missing)))
    return found


def _test_sums(trials: TrialRounds) -> list[Finding]:
    plan = trials.plan
    rounds = [s for s in trials.rounds if plan.release.accepts(len(s.cohort)) and noise_draws(plan, s.cohort, s.t)]
    if not rounds:
        why = f"no trial round had noise: release {plan.release.kind!r} states none"
        return [not_examined("noise of the sums", why)]
    z = whitened(plan, np.stack([standardised(plan, seen) for seen in rounds]), rounds)
    place = {(seen.episode, seen.t): i for i, seen in enumerate(rounds)}
    pairs = [  # successive rounds, and the same round with other random streams
        (i, place[other])
        for (episode, t), i in place.items()
        for other in ((episode, t + 1), (episode + 1, t))
        if other in place
    ]
    found = [*_energies(z), *_shape(z), *_independence(z, pairs)]
    return found if isinstance(plan.bound, AlreadyPrivate) else [*found, _along_sum(z, rounds, plan)]


def _test_messages(plan: Plan) -> list[Finding]:
    release = plan.release
    if not release.client_noise:
        return []
    empty, rows = torch.zeros(WIDTH, dtype=torch.float64), []
    for i, client in enumerate((np.arange(MESSAGES) % plan.clients.population).tolist()):
        alone, streams = np.array([client], dtype=np.int64), Seeded(i)
        sent = own_message(release, empty, client, 0, streams.at(0, "client noise", client), secure=False)
        rows.append(as_normals(sent.double().numpy(), noise_draws(plan, alone, 0), streams.at(0, "audit blur")))
    z = np.stack(rows)
    found = [*_energies(z), *_shape(z), *_independence(z, [(i, i + 1) for i in range(0, MESSAGES - 1, 2)])]
    return [replace(one, question=f"message: {one.question}") for one in found]


def whitened(plan: Plan, noise: Array, rounds: Sequence[TrialRound]) -> Array:
    """Return the noise of each episode multiplied by the inverse of the noise matrix that the release states.

    The result is white noise if the correlations between rounds are as stated.
    """
    if not plan.release.correlated:
        return noise
    if not isinstance(distribution_of(noise_draws(plan, rounds[0].cohort, rounds[0].t)), Normal):
        raise NotStatedError(f"release {plan.release.kind!r} has noise that is shared between rounds and not Gaussian")
    found = np.empty_like(noise)
    for episode in {seen.episode for seen in rounds}:
        rows = [i for i, seen in enumerate(rounds) if seen.episode == episode]
        white, broken = whitening(plan.release, len(rows)), np.isinf(noise[rows])
        if white is None:
            raise NotStatedError(f"release {plan.release.kind!r}, whose rounds share noise, states no noise_matrix")
        found[rows] = np.where(broken.any(0), np.inf, white @ np.where(broken, 0.0, noise[rows]))
    return found


def standardised(plan: Plan, seen: TrialRound) -> Array:
    """Return the noise of one round's sum, mapped to standard normals [d]; NaN for coordinates that were not sent.

    The noise is the model's step minus the step that the sum without noise would make.
    """
    drawn, rng = noise_draws(plan, seen.cohort, seen.t), Seeded(seen.episode).at(seen.t, "audit blur")
    count = plan.clients.expected  # a constant of the plan, unless the cohort is seen
    if "cohort" in plan.release.sees:
        count = plan.release.denominator(plan.clients.expected, len(seen.cohort))
    if isinstance(plan.bound, AlreadyPrivate):
        return as_normals((seen.moved.double() * count).numpy(), drawn, rng)
    clean, unit = _step(plan, seen, seen.total / count), _step(plan, seen, seen.total.new_ones(len(seen.total)))
    noise = ((seen.moved.double() - clean) / unit * count).numpy()
    return np.where(np.asarray(unit) == 0, np.nan, as_normals(noise, drawn, rng))


def _step(plan: Plan, seen: TrialRound, encoded: Tensor) -> Tensor:
    return plan.split(plan.decode(encoded, seen.public), seen.public)[0].double()


def _energy_test(question: str, energy: Array, freedom: Array, where: Callable[[int], str]) -> Finding:
    def text(i: int) -> str:
        return f"{where(i)}{math.sqrt(energy[i] / max(freedom[i], 1)):.3f} times the noise"

    return finding(question, chi_square(energy, freedom), text, freedom > 0)


def _energies(z: Array) -> list[Finding]:
    """Test sums of squares: of all coordinates, each coordinate, each block of neighbours and each round."""
    sent = ~np.isnan(z)
    squares = np.where(sent, z, 0.0) ** 2
    each, counts, edges = squares.sum(0), sent.sum(0), np.arange(0, z.shape[1], BLOCK)
    blocks, sizes = np.add.reduceat(each, edges), np.add.reduceat(counts, edges)

    def block(i: int) -> str:
        return f"coordinates {i * BLOCK} to {i * BLOCK + BLOCK - 1} have "

    return [
        _energy_test("noise of all coordinates", np.array([squares.sum()]), np.array([sent.sum()]), lambda _: ""),
        _energy_test("noise of each coordinate", each, counts, lambda i: f"coordinate {i} has "),
        _energy_test("noise of each block of coordinates", blocks, sizes, block),
        _energy_test("noise of each round", squares.sum(1), sent.sum(1), lambda i: f"trial round {i} has "),
    ]


def _shape(z: Array) -> list[Finding]:
    """Test the mean of each coordinate, the tails, and the Kolmogorov distance of the whole distribution."""
    names, sent = ("centre of each coordinate", "tails of the noise", "shape of the noise"), ~np.isnan(z)
    each, counts = z[sent], sent.sum(0)
    n = len(each)
    if not n:
        return [not_examined(name, "no coordinate was ever sent") for name in names]
    beyond = np.array([float((np.abs(each) > cut).sum()) for cut in TAILS])
    rates = 2 * special.ndtr(-np.array(TAILS))
    means = np.where(sent, z, 0.0).sum(0) / np.sqrt(np.maximum(counts, 1))

    def tail(i: int) -> str:
        return f"{beyond[i]:.0f} draws beyond {TAILS[i]} sigma where {rates[i] * n:.0f} are due"

    return [
        finding(names[0], normal(means), lambda i: f"coordinate {i} is off by {means[i]:.1f} sigma", counts > 0),
        finding(names[1], chernoff(beyond, np.full(len(TAILS), n), rates), tail),
        finding(names[2], dkw(each), lambda _: "distance to the distribution that is accounted for"),
    ]


def _independence(z: Array, pairs: Pairs) -> list[Finding]:
    """Test <z_s, z_t> / ||z_s||, standard normal for independent rounds s, t, and sign(z_j) z_k within a round."""
    full, width = np.where(np.isfinite(z), z, 0.0), z.shape[1]
    repeats, lengths = np.zeros(len(pairs)), np.zeros(len(pairs))
    for i, (s, t) in enumerate(pairs):
        lengths[i] = np.linalg.norm(np.where(full[t] != 0, full[s], 0.0))
        repeats[i] = (full[s] * full[t]).sum() / max(lengths[i], 1e-300)
    shifts = [shift for shift in (1, width // 4, width // 2) if 0 < shift < width]
    sums, counts = np.zeros(len(shifts)), np.zeros(len(shifts))
    for i, shift in enumerate(shifts):
        one, other = full[:, :-shift], full[:, shift:]
        both = (one != 0) & (other != 0)
        counts[i] = both.sum()
        sums[i] = (np.sign(one) * other)[both].sum() / math.sqrt(max(counts[i], 1))

    def distant(i: int) -> str:
        return f"{sums[i]:.1f} sigma of correlation at distance {shifts[i]}"

    def repeated(i: int) -> str:
        return f"{repeats[i]:.1f} sigma of correlation"

    return [
        finding("noise of two rounds", normal(repeats), repeated, lengths > 0),
        finding("noise of two coordinates", normal(sums), distant, counts > 0),
    ]


def _along_sum(z: Array, rounds: Sequence[TrialRound], plan: Plan) -> Finding:
    """Test the noise in the direction of the clean sum, which detects a data-dependent denominator or weights."""
    clean = np.stack([np.asarray(_step(plan, seen, seen.total)) for seen in rounds])
    clean = np.where(np.isfinite(z), clean, 0.0)
    lengths = np.linalg.norm(clean, axis=1)
    some = lengths > 0
    along = (np.where(np.isfinite(z), z, 0.0) * clean)[some].sum(1) / lengths[some]
    return _energy_test("noise along the sum", np.array([(along**2).sum()]), np.array([some.sum()]), lambda _: "")
