"""Closed forms of papers 001 (silos, record level) and 002 (client-side noise). None of them feeds a certificate.

    silo_std, one_pass_std, shuffled_std     paper 001, Theorems 2.1, 2.3 and 4.1
    silo_experiment_std                      paper 001, Appendix H: what its experiments used
    client_laplace_scale, client_gaussian_std, sound_client_gaussian_std   paper 002, Theorems 1 and 2
    laplace_constant, gaussian_constant, client_distance_bound             paper 002, Theorem 3

A side condition that fails is a `SideConditionError` with the numbers in the sentence. Every std of paper 001 is on
a silo's batch MEAN; `clip_norm` is the Lipschitz constant L, which per-record clipping enforces. Paper 002 adds its
noise to a client's whole upload, the sum of `steps` gradient steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sordino_papers.theory.central_noise import require, require_budget, require_count, require_positive, require_rate

Relation = Literal["published", "replace_one"]


# ------------------------------------------------------------------------------------------------------- paper 001


def _require_at_most(name: str, value: float, limit: float, where: str) -> None:
    require(value <= limit, f"{name} = {value:g}", f"{name} <= {limit:.4g} ({where})", f"lower {name}")


def _require_batch(batch: int, records: int, least: float, where: str) -> None:
    require_count(batch=batch, records=records)
    _require_at_most("batch", batch, records, "records per silo")
    require(batch >= least, f"batch = {batch}", f"batch >= {least:.4g} ({where})", "raise the batch or the rounds")


def silo_std(*, epsilon: float, delta: float, rounds: int, clip_norm: float, records: int, batch: int) -> float:
    """Noise of noisy minibatch SGD in one silo, which meets its own (epsilon, delta) against everyone.

        s^2 = 256 clip norm^2 rounds ln(2.5 rounds/delta) ln(2/delta) / (records^2 epsilon^2)

    Side conditions: epsilon <= ln(2/delta), batch >= epsilon records / (4 sqrt(2 rounds ln(2/delta))).
    Paper 001, Theorem 2.1, complete version (the informal one and the proof allow twice that epsilon). The proof
    samples with replacement but bounds the sensitivity as if a record were drawn once: use it without replacement.
    The value is loose: at 35 rounds, 1238 records, epsilon 12 it is worth 0.36.
    """
    require_budget(epsilon=epsilon, delta=delta)
    require_positive(clip_norm=clip_norm)
    require_count(rounds=rounds)
    log = math.log(2.0 / delta)
    _require_at_most("epsilon", epsilon, log, "Theorem 2.1 of paper 001, ln(2/delta)")
    least = epsilon * records / (4.0 * math.sqrt(2.0 * rounds * log))
    _require_batch(batch, records, least, "Theorem 2.1 of paper 001")
    return 16.0 * clip_norm * math.sqrt(rounds * math.log(2.5 * rounds / delta) * log) / (records * epsilon)


def one_pass_std(*, epsilon: float, delta: float, clip_norm: float, batch: int) -> float:
    """Noise of one-pass accelerated minibatch SGD: disjoint batches, each record used once, so no composition.

        s^2 = 32 clip norm^2 ln(1.25/delta) / (epsilon^2 batch^2)

    Side condition: epsilon <= 8 ln(1/delta). Paper 001, Theorem 2.3: the Gaussian mechanism at sensitivity
    2 clip norm/batch, replace one, through zCDP. At delta 1e-6, epsilon 1 4 16 is worth 0.37 1.66 7.87.
    """
    require_budget(epsilon=epsilon, delta=delta)
    require_positive(clip_norm=clip_norm)
    require_count(batch=batch)
    _require_at_most("epsilon", epsilon, -8.0 * math.log(delta), "Theorem 2.3 of paper 001, 8 ln(1/delta)")
    return clip_norm * math.sqrt(32.0 * math.log(1.25 / delta)) / (epsilon * batch)


def shuffled_std(
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    clip_norm: float,
    records: int,
    cohort: int,
    population: int,
    constant: float,
) -> float:
    """Noise of shuffled minibatch SGD, for a central (epsilon, delta); the order, up to an unpublished constant.

        s^2 = C clip norm^2 R M ln(R M^2/(N delta)) ln(R/delta) ln(1/delta) / (n^2 N^2 epsilon^2)

    R rounds, M = cohort, N = population of silos, n = records per silo, C = constant, which the paper only says
    exists: no value of it is known to be sound. Side conditions: epsilon <= ln(2/delta);
    M >= 16 ln(18 R M^2/(N delta)), where the proof needs 36/n for 18 (more when n = 1);
    R >= N/M; R >= n^2 N^2 epsilon^2 / M. Paper 001, Theorem 4.1.
    """
    require_budget(epsilon=epsilon, delta=delta)
    require_positive(clip_norm=clip_norm, constant=constant)
    require_count(rounds=rounds, records=records, cohort=cohort, population=population)
    _require_at_most("epsilon", epsilon, math.log(2.0 / delta), "Theorem 4.1 of paper 001, ln(2/delta)")
    _require_at_most("cohort", cohort, population, "population")
    total = records * population
    reports = rounds * cohort**2 / (population * delta)
    _require_shuffle(
        rounds, cohort, max(population, (total * epsilon) ** 2) / cohort, max(18.0, 36.0 / records) * reports
    )
    logs = math.log(reports) * math.log(rounds / delta) * -math.log(delta)
    return clip_norm * math.sqrt(constant * rounds * cohort * logs) / (total * epsilon)


def _require_shuffle(rounds: int, cohort: int, least_rounds: float, inside: float) -> None:
    where = "Theorem 4.1 of paper 001"
    require(rounds >= least_rounds, f"rounds = {rounds}", f"rounds >= {least_rounds:.4g} ({where})", "raise the rounds")
    least = 16.0 * math.log(inside)
    require(cohort >= least, f"cohort = {cohort}", f"cohort >= {least:.4g} ({where})", "raise the cohort or delta")


def silo_experiment_std(
    *, epsilon: float, delta: float, rounds: int, clip_norm: float, records: int, batch: int
) -> float:
    """Noise of the experiments of paper 001 (Appendix H), about 25 times below Theorem 2.1 at its settings.

        s^2 = 8 clip norm^2 ln(1/delta) rounds / (records^2 epsilon^2)

    Side condition: batch >= records sqrt(epsilon) / (2 sqrt(rounds)). It rests on a moments bound with unpublished
    constants, and it is NOT sound for large epsilon: at 35 rounds, 1238 records, delta 1/records^2, the claimed 6 12 18
    are 5.7 12.9 21.4 under replace one with full batches (12.6 and 20.3 at the paper's batches, by a tight accountant).
    Use it to reproduce the figures, with the true epsilon beside it.
    """
    require_budget(epsilon=epsilon, delta=delta)
    require_positive(clip_norm=clip_norm)
    require_count(rounds=rounds)
    least = records * math.sqrt(epsilon / rounds) / 2.0
    _require_batch(batch, records, least, "Appendix H of paper 001")
    return clip_norm * math.sqrt(-8.0 * math.log(delta) * rounds) / (records * epsilon)


# ------------------------------------------------------------------------------------------------------- paper 002


def round_robin_participations(*, rounds: int, cohort: int, population: int) -> int:
    """Rounds that the busiest client takes part in: ceil(cohort rounds / population), the T_l of paper 002.

    The paper writes the fraction without the ceiling, which is short by one round for some clients.
    """
    require_count(rounds=rounds, cohort=cohort, population=population)
    _require_at_most("cohort", cohort, population, "population")
    return -(-cohort * rounds // population)


def upload_sensitivity(*, steps: int, learning_rate: float, clip_norm: float, relation: Relation) -> float:
    """How far one client's upload moves: learning_rate steps clip norm as published, twice that under replace one.

    Each of `steps` full-batch gradients is clipped to `clip_norm`. The paper bounds the difference of two clipped
    gradients by the clip norm of one; two of them can be 2 clip norm apart (g and -g). `learning_rate` is the round's
    largest. Paper 002, Theorems 1 and 2 (Xi_1 in L1, Xi_2 in L2).
    """
    require_count(steps=steps)
    require_positive(learning_rate=learning_rate, clip_norm=clip_norm)
    require(relation in ("published", "replace_one"), f"relation = {relation!r}", "'published' or 'replace_one'")
    return (2.0 if relation == "replace_one" else 1.0) * learning_rate * steps * clip_norm


def client_laplace_scale(
    *, epsilon: float, participations: int, steps: int, learning_rate: float, clip_norm: float, relation: Relation
) -> float:
    """Laplace scale per coordinate for a pure epsilon over all the rounds a client takes part in.

        scale = participations Xi_1 / epsilon,    Xi_1 = `upload_sensitivity` in L1

    Paper 002, Theorem 1. With relation "published" the claimed epsilon 1 3 5 is truly 2 6 10; "replace_one" is sound.
    """
    require_positive(epsilon=epsilon)
    require_count(participations=participations)
    xi = upload_sensitivity(steps=steps, learning_rate=learning_rate, clip_norm=clip_norm, relation=relation)
    return participations * xi / epsilon


def client_gaussian_std(
    *,
    epsilon: float,
    delta: float,
    participations: int,
    steps: int,
    learning_rate: float,
    clip_norm: float,
    relation: Relation,
    c1: float,
    c2: float,
    rate: float = 1.0,
) -> float:
    """Gaussian std per coordinate, up to the two constants that paper 002 leaves open.

        std = c2 rate sqrt(participations ln(1/delta)) / epsilon * Xi_2,    Xi_2 = `upload_sensitivity` in L2

    Side condition: epsilon < c1 rate^2 participations. Clients use full batches, so rate = 1. Paper 002, Theorem 2.
    At rate 1, c2 = 2 with relation "replace_one" is sound for epsilon <= 2.34 ln(1/delta), whatever c1.
    """
    require_budget(epsilon=epsilon, delta=delta)
    require_count(participations=participations)
    require_positive(c1=c1, c2=c2)
    require_rate(rate)
    limit = c1 * rate**2 * participations
    needed = f"epsilon < {limit:.4g} (Theorem 2 of paper 002)"
    require(epsilon < limit, f"epsilon = {epsilon:g}", needed, "lower epsilon, or use sound_client_gaussian_std")
    xi = upload_sensitivity(steps=steps, learning_rate=learning_rate, clip_norm=clip_norm, relation=relation)
    return c2 * rate * math.sqrt(-participations * math.log(delta)) / epsilon * xi


def sound_client_gaussian_std(
    *, epsilon: float, delta: float, participations: int, steps: int, learning_rate: float, clip_norm: float
) -> float:
    """Gaussian std per coordinate that is proved for every epsilon, replace one, without open constants.

        std = Xi_2 sqrt(participations / (2 rho)),    rho = (sqrt(ln(1/delta) + epsilon) - sqrt(ln(1/delta)))^2

    rho-zCDP composes by addition and implies (rho + 2 sqrt(rho ln(1/delta)), delta)-DP (Bun and Steinke 2016,
    Propositions 1.3 and 1.6). In the place of Theorem 2 of paper 002.
    """
    require_budget(epsilon=epsilon, delta=delta)
    require_count(participations=participations)
    xi = upload_sensitivity(steps=steps, learning_rate=learning_rate, clip_norm=clip_norm, relation="replace_one")
    log = -math.log(delta)
    root_rho = epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))
    return xi * math.sqrt(participations / 2.0) / root_rho


def laplace_constant(*, epsilon: float, dimension: int, cohort: int, population: int, sensitivity: float) -> float:
    """C_M of Theorem 3 for Laplace: 8 dimension cohort xi^2 / (population^2 epsilon^2); growth z = 2.

    `sensitivity` xi is that of one gradient in L1: C as published, 2 C when sound, C the clip norm. Equal client sizes.
    """
    require_positive(epsilon=epsilon, sensitivity=sensitivity)
    require_count(dimension=dimension, cohort=cohort, population=population)
    return 8.0 * dimension * cohort * (sensitivity / (population * epsilon)) ** 2


def gaussian_constant(
    *, epsilon: float, delta: float, dimension: int, population: int, sensitivity: float, c2: float
) -> float:
    """C_M of Theorem 3 for Gaussian noise: 4 dimension c2^2 ln(1/delta) xi^2 / (population epsilon^2); growth z = 1.

    The paper has 8 for 4: its Corollary 2.1 gives a Gaussian the variance 2 std^2 of a Laplace. Equal client sizes.
    """
    require_budget(epsilon=epsilon, delta=delta)
    require_positive(sensitivity=sensitivity, c2=c2)
    require_count(dimension=dimension, population=population)
    return -4.0 * dimension * math.log(delta) * (c2 * sensitivity / epsilon) ** 2 / population


@dataclass(frozen=True)
class Objective:
    """Constants of Theorem 3 of paper 002.

    lambda -> smoothness, mu -> convexity (strong), G -> gradient (largest root mean square norm),
    Gamma -> heterogeneity (f* minus the mean of the local optima), Y_0 -> distance (squared, to the optimum).
    """

    smoothness: float
    convexity: float
    gradient: float
    heterogeneity: float
    distance: float

    def __post_init__(self) -> None:
        require_positive(smoothness=self.smoothness, convexity=self.convexity)
        for name in ("gradient", "heterogeneity", "distance"):
            value = float(getattr(self, name))
            require(0.0 <= value < math.inf, f"{name} = {value:g}", f"a finite {name} >= 0")
        _require_at_most("convexity", self.convexity, self.smoothness, "smoothness")

    def drift(self, *, steps: int, cohort: int, population: int) -> float:
        """omega_0 = 6 lambda Gamma + 8 (E-1)^2 G^2 + 4 E^2 G^2 (N-b)/((N-1) b)."""
        absent = (population - cohort) / ((population - 1) * cohort) if population > 1 else 0.0
        squares = 8.0 * (steps - 1) ** 2 + 4.0 * steps**2 * absent
        return 6.0 * self.smoothness * self.heterogeneity + squares * self.gradient**2


def client_distance_bound(
    objective: Objective,
    *,
    steps: int,
    rounds: int,
    cohort: int,
    population: int,
    constant: float,
    growth: float,
) -> float:
    """Bound on E||w - w*||^2 after `rounds` rounds of `steps` local steps, k = steps rounds in all.

        Y_k <= (4 omega_0/mu^2 + gamma Y_0)/(k + gamma) + 4/mu^2 rounds/(k + gamma - 1)^2 omega_1
        omega_1 = C_M steps^2 rounds^z,  gamma = max(8 lambda/mu, steps),  step size 2/(mu (k + gamma))

    C_M -> constant, z -> growth (2 Laplace, 1 Gaussian), omega_0 -> `Objective.drift`. Side conditions: a mu-strongly
    convex, lambda-smooth loss, mu <= lambda, 0 <= z <= 2, that step size, equal client sizes. Paper 002, Theorem 3.
    """
    require_count(steps=steps, rounds=rounds, cohort=cohort, population=population)
    _require_at_most("cohort", cohort, population, "population")
    require(0.0 <= constant < math.inf, f"constant = {constant:g}", "a finite constant >= 0")
    require(0.0 <= growth <= 2.0, f"growth = {growth:g}", "0 <= growth <= 2", "2 for Laplace, 1 for Gaussian")
    gamma = max(8.0 * objective.smoothness / objective.convexity, float(steps))
    reach, factor = steps * rounds + gamma, 4.0 / objective.convexity**2
    drift = objective.drift(steps=steps, cohort=cohort, population=population)
    noise = constant * steps**2 * math.pow(rounds, growth)
    return (factor * drift + gamma * objective.distance) / reach + factor * rounds * noise / (reach - 1.0) ** 2
