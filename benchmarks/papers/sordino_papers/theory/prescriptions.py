"""What the theorems of paper 001 prescribe: rounds, batch, server, and the risk they promise for it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from sordino.parts.server_optimizers import Accelerated, Average, ServerOptimizer, Sgd, Stage, Stages
from sordino_papers.theory import local_noise as silo
from sordino_papers.theory.central_noise import require, require_budget, require_count, require_positive


@dataclass(frozen=True)
class Federation:
    """The numbers of paper 001.

    n -> records of each silo, N -> population, M -> cohort, d -> dimension, L -> clip norm (the Lipschitz constant, or
    the clip of every record), D -> distance (a bound on ||w||), beta -> smoothness (infinite for a non-smooth loss),
    mu -> convexity (0 if not strong), phi -> deviation of a record's gradient, v -> heterogeneity (the largest root
    mean square distance of a silo's gradient from the mean). phi and v are at most L, and are L where not known.
    """

    records: int
    population: int
    cohort: int
    dimension: int
    epsilon: float
    delta: float
    clip_norm: float
    distance: float
    smoothness: float = math.inf
    convexity: float = 0.0
    deviation: float | None = None
    heterogeneity: float | None = None

    def __post_init__(self) -> None:
        require_budget(epsilon=self.epsilon, delta=self.delta)
        require_count(records=self.records, population=self.population, cohort=self.cohort, dimension=self.dimension)
        require_positive(clip_norm=self.clip_norm, distance=self.distance)
        _at_most("cohort", self.cohort, self.population, "population")
        require(self.convexity >= 0, f"convexity = {self.convexity:g}", "convexity >= 0", "0 for a convex loss")
        _at_most("convexity", self.convexity, self.smoothness, "smoothness")

    @property
    def useful(self) -> float:
        """min(n, epsilon^2 n^2 / d): the samples of a silo that count once privacy is paid for."""
        return min(self.records, (self.epsilon * self.records) ** 2 / self.dimension)

    @property
    def reach(self) -> float:
        """epsilon^2 n^2 / (d ln(1/delta))."""
        return (self.epsilon * self.records) ** 2 / (self.dimension * -math.log(self.delta))

    @property
    def gap(self) -> float:
        """L D, at least F(w_0) - F*: the Delta of the multi-stage bounds."""
        return self.clip_norm * self.distance


@dataclass(frozen=True)
class Prescription:
    """Rounds, batch (records of a silo per round) and server that a theorem asks for, and what it promises.

    std -> noise on a silo's batch mean by the theorem; risk -> the bound on the excess loss, up to a constant and
    logarithms; smoothing -> beta of the Moreau envelope to train on in the place of a non-smooth loss.
    """

    theorem: str
    rounds: int
    batch: int
    server: ServerOptimizer
    std: float
    risk: float
    smoothing: float | None = None


def convex(f: Federation, batch: int | None = None) -> Prescription:
    """Noisy minibatch SGD for a convex smooth loss, silos alike; batch = None takes the smallest that is proved.

        R = max(beta D sqrt(M)/L min{sqrt(n), epsilon n/sqrt(d)}, min{n, epsilon^2 n^2/d}/K),   K >= `silo_std`'s
        lr = min(1/(4 beta), D sqrt(M)/(L R) min{sqrt(n), 1/sqrt(d xi)}),   plain average of the iterates
        risk = L D/sqrt(M) max{1/sqrt(n), sqrt(d xi)}, times 272;   xi = ln(2.5R/delta) ln(2/delta)/(n epsilon)^2

    Paper 001, Theorem 2.1 (its M~ = sqrt(M) is a misprint for M).
    """
    return _minibatch(replace(f, convexity=0.0), batch)


def strongly_convex(f: Federation, batch: int | None = None) -> Prescription:
    """Noisy minibatch SGD for a mu-strongly convex smooth loss, silos alike.

        R = max(8 beta/mu ln(beta D^2 mu M epsilon^2 n^2/(d L^2)), min{n, epsilon^2 n^2/d}/K)
        lr = min(1/(4 beta), ln(max{2, mu^2 D^2 R^2/c})/(mu R)),   c = 8 L^2/(M K) + d std^2/M
        risk = L^2/(mu M) (1/n + d xi);   weights (1 - mu lr)^-(r+1)

    Paper 001, Theorem 2.1 and Lemma E.9, whose c this is; the complete version forgets K in R and doubles the noise.
    """
    require_positive(convexity=f.convexity)
    return _minibatch(f, batch)


def _minibatch(f: Federation, batch: int | None) -> Prescription:
    require_positive(smoothness=f.smoothness)
    first = _first_rounds(f, f.useful, f.cohort * (f.epsilon * f.records) ** 2 / f.dimension)
    rounds, size, std = _sized(f, batch, lambda k: _whole(max(first, f.useful / k)))
    xi = math.log(2.5 * rounds / f.delta) * math.log(2 / f.delta) / (f.records * f.epsilon) ** 2
    return _plain(f, "2.1", rounds, size, std, xi)


def _first_rounds(f: Federation, useful: float, signal: float) -> float:
    """Rounds until the start is forgotten."""
    if not f.convexity:
        return f.smoothness * f.distance / f.clip_norm * math.sqrt(f.cohort * useful)
    inside = f.smoothness * f.convexity * (f.distance / f.clip_norm) ** 2 * signal
    return 8 * f.smoothness / f.convexity * math.log(inside)


def _plain(f: Federation, theorem: str, rounds: int, batch: int, std: float, xi: float) -> Prescription:
    """Step size, averaging and risk of plain noisy steps."""
    most, mu = 1 / (4 * f.smoothness), f.convexity
    if not mu:
        root = math.sqrt(f.cohort * min(f.records, 1 / (f.dimension * xi)))
        server = Sgd(lr=min(most, f.gap * root / (f.clip_norm**2 * rounds)), ball=f.distance, average=Average())
        return Prescription(f"{theorem}, convex", rounds, batch, server, std, f.gap / root)
    noise = (8 * f.clip_norm**2 / batch + f.dimension * std**2) / f.cohort
    lr = min(most, math.log(max(2.0, (mu * f.distance * rounds) ** 2 / noise)) / (mu * rounds))
    risk = f.clip_norm**2 / (mu * f.cohort) * (1 / f.records + f.dimension * xi)
    server = Sgd(lr=lr, ball=f.distance, average=Average(growth=1 / (1 - mu * lr)))
    return Prescription(f"{theorem}, strongly convex", rounds, batch, server, std, risk)


def accelerated(f: Federation, batch: int | None = None) -> Prescription:
    """Accelerated noisy minibatch SGD on the empirical loss of any silos, convex or (multi-stage) strongly convex.

        convex:   R = max((beta D/L)^(1/2) (M q)^(1/4), q/K),   v = 2 (beta + lambda),   lambda = V/(2 D sqrt(R))
        strongly: R = max(sqrt(beta/mu) ln(D mu M epsilon^2 n^2/(L d)), q/K),   stages of `multi_stage`
        q = epsilon^2 n^2/(d ln(1/delta)),   V^2 = phi^2/(M K) + d std^2/M,   without q/K and phi if M K = N n
        risk = beta D^2/R^2 + V D/sqrt(R)   or   L D exp(-sqrt(mu/beta) R) + V^2/(mu R),   V without the noise's 256

    Paper 001, Theorem E.1 with Lemmas E.11 and E.12.
    """
    require_positive(smoothness=f.smoothness)
    phi = f.clip_norm if f.deviation is None else f.deviation
    signal = f.distance * f.convexity * f.cohort / f.clip_norm * (f.epsilon * f.records) ** 2 / f.dimension
    bend = f.smoothness * f.distance / f.clip_norm
    first = math.sqrt(bend * math.sqrt(f.cohort * f.reach))
    if f.convexity:
        first = math.sqrt(f.smoothness / f.convexity) * math.log(signal)

    def sampled(k: int) -> bool:
        return f.cohort * k < f.population * f.records

    again = f.reach * (phi / f.clip_norm) ** 2
    rounds, size, std = _sized(f, batch, lambda k: _whole(max(first, again / k if sampled(k) else 0.0)))
    made = Prescription("E.1", rounds, size, Sgd(), std, 0.0)
    return _fast(f, made, sampled(size) * phi**2 / size, 256.0)


def _fast(f: Federation, made: Prescription, spread: float, constant: float) -> Prescription:
    """Server and risk of accelerated steps; `spread` is the variance of a silo's mean before the noise.

    The risk leaves out the `constant` of the noise, as the theorems do; the server does not.
    """
    noise, rounds, mu = f.dimension * made.std**2, made.rounds, f.convexity
    variance, order = (spread + noise) / f.cohort, (spread + noise / constant) / f.cohort
    if mu:
        start = f.gap * math.exp(-math.sqrt(mu / f.smoothness) * rounds)
        name, risk = f"{made.theorem}, strongly convex", start + order / (mu * rounds)
        return replace(made, theorem=name, server=multi_stage(f, rounds, variance), risk=risk)
    pull = math.sqrt(variance / rounds) / (2 * f.distance)
    server = Accelerated(v=2 * (f.smoothness + pull), weight_decay=pull, ball=f.distance)
    risk = f.smoothness * (f.distance / rounds) ** 2 + f.distance * math.sqrt(order / rounds)
    return replace(made, theorem=f"{made.theorem}, convex", server=server, risk=risk)


def multi_stage(f: Federation, rounds: int, variance: float) -> Stages:
    """The stages that fit in `rounds`, each of which halves the distance Delta = L D to the best loss.

        R_k = ceil(max{4 sqrt(2 beta/mu), 128 V^2/(3 mu Delta 2^-(k+1))})
        v_k = max{2 beta, sqrt(mu V^2 R_k (R_k+1) (R_k+2)/(3 Delta 2^-(k-1)))}

    The paper divides by R_k (R_k+1) (R_k+2): minimising 4 v Delta/(mu R^2) + 4 V^2 R/(3 v), the bound of one stage,
    puts the product above, as in Ghadimi and Lan (2013). Rounds left over go to the last stage; a first stage that
    does not fit takes all there are. Paper 001, Appendix E.5.1.
    """
    require_positive(convexity=f.convexity, smoothness=f.smoothness)
    require_count(rounds=rounds)
    lengths: list[int] = []
    while (left := rounds - sum(lengths)) and (wanted := _stage_rounds(f, len(lengths) + 1, variance)) <= left:
        lengths.append(wanted)
    lengths = [*lengths[:-1], rounds - sum(lengths[:-1])]
    curves = [_stage_curve(f, k, length, variance) for k, length in enumerate(lengths, start=1)]
    servers = [Accelerated(v=curve, mu=f.convexity, ball=f.distance) for curve in curves]
    return Stages(tuple(Stage(length, server) for length, server in zip(lengths, servers, strict=True)))


def _stage_rounds(f: Federation, k: int, variance: float) -> int:
    noisy = 128 * variance * 2.0 ** (k + 1) / (3 * f.convexity * f.gap)
    return _whole(max(4 * math.sqrt(2 * f.smoothness / f.convexity), noisy))


def _stage_curve(f: Federation, k: int, rounds: int, variance: float) -> float:
    cubic = f.convexity * variance * rounds * (rounds + 1) * (rounds + 2)
    return max(2 * f.smoothness, math.sqrt(cubic * 2.0 ** (k - 1) / (3 * f.gap)))


def non_smooth(f: Federation, batch: int | None = None, *, accelerate: bool = False) -> Prescription:
    """The smooth theorems on the Moreau envelope of a non-smooth loss, which costs L^2/(2 beta) of loss.

        beta = L sqrt(M q)/D   or, strongly convex,   mu M q;     q = min{n, epsilon^2 n^2/d}, or `reach` if accelerated

    The envelope is L-Lipschitz (the paper says 2L, and keeps the noise of L), and mu beta/(mu + beta)-strongly convex
    (the paper says mu). Paper 001, Theorem 2.2, and Theorem 2.4 for the accelerated one, on the empirical loss.
    """
    q, mu = (f.reach if accelerate else f.useful), f.convexity
    beta = mu * f.cohort * q if mu else f.clip_norm * math.sqrt(f.cohort * q) / f.distance
    smooth = replace(f, smoothness=beta, convexity=mu * beta / (mu + beta))
    made = (accelerated if accelerate else _minibatch)(smooth, batch)
    theorem = made.theorem.replace("E.1", "2.4").replace("2.1", "2.2")
    return replace(made, theorem=theorem, smoothing=beta, risk=made.risk + f.clip_norm**2 / (2 * beta))


def one_pass(f: Federation) -> Prescription:
    """Accelerated steps on disjoint batches, each record used once: the population loss of any silos.

        convex:   K = (L/(beta D))^(2/5) n^(3/5) (d ln(1/delta))^(1/5) / (epsilon^(2/5) M^(1/5)),   R = floor(n/K)
        strongly: K = n/(sqrt(beta/mu) ln(mu L D min{epsilon^2 n^2 M/(L^2 d ln(1/delta)), n M/phi^2}))
        V^2 = phi^2/(M K) + v^2/M (N-M)/(N-1) + d std^2/M;   risk as in `accelerated`

    Paper 001, Theorem 2.3. Misprints there: beta^2 for beta in the first term, 8 for 32 in the proof's noise, and a
    1/mu that (9) and (38) each lack in another term.
    """
    require_positive(smoothness=f.smoothness)
    size = max(1, round(_one_pass_batch(f)))
    _at_most("batch", size, f.records, "records per silo")
    std = silo.one_pass_std(epsilon=f.epsilon, delta=f.delta, clip_norm=f.clip_norm, batch=size)
    phi, v = (f.clip_norm if given is None else given for given in (f.deviation, f.heterogeneity))
    absent = (f.population - f.cohort) / (f.population - 1) if f.population > 1 else 0.0
    made = Prescription("2.3", f.records // size, size, Sgd(), std, 0.0)
    return _fast(f, made, phi**2 / size + v**2 * absent, 32.0)


def _one_pass_batch(f: Federation) -> float:
    n, noisy = f.records, f.dimension * -math.log(f.delta)
    if not f.convexity:
        bend = f.smoothness * f.distance / f.clip_norm
        return float((n**3 * noisy / (bend * f.epsilon) ** 2 / f.cohort) ** 0.2)
    phi = f.clip_norm if f.deviation is None else f.deviation
    signal = n * f.cohort / max(phi**2, f.clip_norm**2 * noisy / (f.epsilon**2 * n))
    return n / (math.sqrt(f.smoothness / f.convexity) * max(1.0, math.log(f.convexity * f.gap * signal)))


def shuffled(f: Federation, *, constant: float) -> Prescription:
    """Noisy minibatch SGD, batch 1, behind a shuffler; epsilon and delta are central.

        R = max(n^2 N^2 epsilon^2/M, N/M, q, first),   q = min{n, epsilon^2 n^2 N^2/(d M)}
        first = beta D sqrt(M q)/L   or   8 beta/mu ln(beta D^2 mu epsilon^2 n^2 N^2/(d L^2))

    Step size and risk as in `convex` and `strongly_convex`, with xi = M ln(R M^2/(N delta)) ln(R/delta) ln(1/delta)
    / (n N epsilon)^2. The theorem only says that some `constant` exists (see `shuffled_std`). Paper 001, Theorem 4.1.
    """
    require_positive(smoothness=f.smoothness)
    total = (f.records * f.population * f.epsilon) ** 2
    q = min(f.records, total / (f.dimension * f.cohort))
    first = _first_rounds(f, q, total / f.dimension)
    rounds = _whole(max(total / f.cohort, f.population / f.cohort, q, first))
    std = silo.shuffled_std(
        epsilon=f.epsilon,
        delta=f.delta,
        rounds=rounds,
        clip_norm=f.clip_norm,
        records=f.records,
        cohort=f.cohort,
        population=f.population,
        constant=constant,
    )
    logs = math.log(rounds * f.cohort**2 / (f.population * f.delta)) * math.log(rounds / f.delta) * -math.log(f.delta)
    return _plain(f, "4.1", rounds, 1, std, f.cohort * logs / total)


def _sized(f: Federation, batch: int | None, rounds_at: Callable[[int], int]) -> tuple[int, int, float]:
    """Rounds, batch and noise; by default the smallest batch for which the theorem proves its privacy."""

    def proved(k: int) -> bool:
        return k >= f.epsilon * f.records / (4 * math.sqrt(2 * rounds_at(k) * math.log(2 / f.delta)))

    size = bisect_left(range(1, f.records + 1), True, key=proved) + 1 if batch is None else batch
    _at_most("batch", size, f.records, "records per silo")
    rounds = rounds_at(size)
    std = silo.silo_std(
        epsilon=f.epsilon, delta=f.delta, rounds=rounds, clip_norm=f.clip_norm, records=f.records, batch=size
    )
    return rounds, size, std


def _whole(value: float) -> int:
    """Rounded up, at least 1; rounding errors do not make a round."""
    return max(1, math.ceil(value * (1 - 1e-12)))


def _at_most(name: str, value: float, limit: float, where: str) -> None:
    require(value <= limit, f"{name} = {value:g}", f"{name} <= {limit:g} ({where})", f"lower {name}")
