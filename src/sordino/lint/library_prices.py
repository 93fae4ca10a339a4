"""Epsilons of other libraries' settings: what a library accounts, and what our accountant proves of what it runs.

A claim is the epsilon of the event that the library composes, under the neighbours that it names. A proved price is of
the protocol that its code runs, against a named adversary. Neither feeds a certificate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from sordino.accounting import accountant, calibration, renyi
from sordino.accounting.composition import Line
from sordino.accounting.events import Entries, Event, FixedSampled, GaussianNoise, PoissonSampled, Relation
from sordino.accounting.pairs import Array
from sordino.accounting.pld import gaussian_epsilon
from sordino.lint.known_calls import Settings

MODELS = "one who sees the released models, and no cohort"
COHORTS = "one who also sees the cohorts, as the server does"
STEPS = "one who sees the model after every step"
MESSAGES = "one who sees every message, as the server does"
BANDED_MOVES = {  # (rounds, min_separation): movement of C X by one user with pfl 0.6.0's matrix, rounded up
    (12, 6): 1.710,
    (20, 5): 2.214,
    (30, 20): 2.261,
    (100, 20): 3.223,
    (200, 10): 4.922,
}  # fmt: skip  (benchmarks/peers/cholesky_pfl.py, docs/errata.md)


class MissingError(Exception):
    """Raised where a price needs keys that the settings do not state."""

    def __init__(self, *keys: str) -> None:
        super().__init__(", ".join(keys))
        self.keys = keys


@dataclass(frozen=True)
class Price:
    """An epsilon at a delta: for which neighbours, against whom, and of what. None: no guarantee."""

    epsilon: float | None
    delta: float
    relation: Relation
    against: str
    words: str


def _need(settings: Settings, *keys: str) -> list[float]:
    missing = [key for key in keys if key not in settings.values]
    if missing:
        raise MissingError(*missing)
    return [settings.values[key] for key in keys]  # type: ignore[misc]


def _price(entries: Entries, relation: Relation, delta: float, against: str, words: str, rdp: bool = False) -> Price:
    if rdp:
        found = accountant.rdp_epsilon(entries, relation, delta)
        return Price(found, delta, relation, against, words)
    value = accountant.epsilon(entries, relation, delta).value
    return Price(value if value < math.inf else None, delta, relation, against, words)


@lru_cache(maxsize=32)
def _solved(event_of: Callable[[float], Event], count: int, epsilon: float, delta: float) -> float:
    """Return a noise multiplier at which `count` events cost epsilon or up to 0.5% more: no calibration finds less.

    Epsilon falls at least as fast as the multiplier grows, so z cost(z) / epsilon is not above the solution.
    """
    z = calibration.noise_multiplier(lambda z: Line("models", "add_remove", ((event_of(z), count),)), epsilon, delta)
    cost = accountant.epsilon(((event_of(z), count),), "add_remove", delta).value
    return z * min(cost / epsilon, 1.0)


def _single_release(epsilon: float, delta: float) -> float:
    """Return the noise multiplier of one Gaussian release that costs (epsilon, delta), rounded down."""
    low, high = 1e-3, 1e6
    while high > low * (1 + 1e-9):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if gaussian_epsilon(1 / middle, delta) <= epsilon else (middle, high)
    return low


@dataclass(frozen=True)
class _Poisson:
    rate: float

    def __call__(self, z: float) -> Event:
        return PoissonSampled(self.rate, GaussianNoise(z)) if self.rate < 1 else GaussianNoise(z)


# ---- client level ----------------------------------------------------------------------------------------------------


def _fixed_cohorts(settings: Settings) -> list[Price]:
    """Return what is proved of cohorts of fixed size under central Gaussian noise."""
    z, rounds, delta = _need(settings, "noise_multiplier", "rounds", "delta")
    entries = ((GaussianNoise(z), int(rounds)),)
    found = [
        _price(entries, "zero_out", delta, COHORTS, "a client sends an empty update: the sum moves by C"),
        _price(entries, "replace_one", delta, COHORTS, "a client is replaced: the sum moves by 2C"),
    ]
    if settings.has("clients", "sampled") and 0 < settings.get("sampled") < settings.get("clients"):
        event = FixedSampled(settings.get("clients"), settings.get("sampled"), GaussianNoise(z))
        words = "a client is replaced, and who takes part stays secret"
        found.append(_price(((event, int(rounds)),), "replace_one", delta, MODELS, words))
    return found


@lru_cache(maxsize=16)
def _moments_without_replacement(rate: float, z: float) -> Array:
    """Return log A_a for a = 0, ..., 1024: Wang, Balle, Kasiviswanathan 2019, Theorem 27, as dp-accounting has it.

    Sensitivity 1, so `z` is not halved for a replacement; only to reproduce what is printed, never as a bound.
    """
    x = np.linspace(-14.0, 258 / z + 14.0, 20_000)  # Q = N(0, 1); r = dP/dQ = exp(x/z - 1/(2 z^2))
    log_ratio = x / z - 1 / (2 * z**2)
    away = np.where(log_ratio > 1e-9, log_ratio, 0) + np.log(-np.expm1(-np.maximum(np.abs(log_ratio), 1e-9)))
    density = -(x**2) / 2 - 0.5 * math.log(2 * math.pi) + math.log(x[1] - x[0])
    even = [float(logsumexp(k * away + density)) for k in range(2, 258, 2)]  # log E_Q[(r - 1)^k]
    i = np.arange(1025.0)
    terms = math.log(2) + (i - 1) * i / (2 * z**2)
    first = math.log(4) + math.log(math.expm1(1 / z**2)) if z > 0.04 else math.inf
    terms[:3] = 0.0, -np.inf, min(first, 1 / z**2 + math.log(2))
    k = np.arange(3, 257)
    near = math.log(4) + (np.asarray(even)[k // 2 - 1] + np.asarray(even)[(k + 1) // 2 - 1]) / 2
    small = terms.copy()
    small[3:257] = np.minimum(terms[3:257], near)
    found = np.zeros(1025)
    for a in range(2, 1025):
        ways = gammaln(a + 1) - gammaln(i[: a + 1] + 1) - gammaln(a - i[: a + 1] + 1)
        found[a] = logsumexp((small if a <= 256 else terms)[: a + 1] + ways + i[: a + 1] * math.log(rate))
    return found


def _unhalved(settings: Settings) -> Price:
    """Return sampling without replacement accounted as if a replacement moved the sum by C: the claim (RDP)."""
    keys = ("noise_multiplier", "rounds", "delta", "clients", "sampled")
    z, rounds, delta, clients, sampled = _need(settings, *keys)
    logs, orders = _moments_without_replacement(sampled / clients, z), renyi.ORDERS
    below = np.floor(orders).astype(np.int64)
    share = orders - below
    between = (1 - share) * logs[below] + share * logs[np.minimum(below + 1, 1024)]
    words = "drawn without replacement, the sum moved by C (RDP)"
    value = renyi.epsilon(rounds * between / (orders - 1), delta)
    return Price(value if value < math.inf else None, delta, "replace_one", MODELS, words)


def _flower_claim(settings: Settings) -> Price | None:
    if settings.get("accounted") is False or settings.call == "adaptive_clipping":
        return None
    if settings.get("sampling") == "without_replacement":
        return _unhalved(settings)
    z, rounds, delta = _need(settings, "noise_multiplier", "rounds", "delta")
    words = "one Gaussian a round, the sum moved by C (RDP)"
    return _price(((GaussianNoise(z), int(rounds)),), "add_remove", delta, COHORTS, words, rdp=True)


def _flower_proved(settings: Settings) -> list[Price]:
    return [] if settings.get("accounted") is False else _fixed_cohorts(settings)


def local_noise(settings: Settings) -> float:
    """Return the std of LocalDpMod's noise: sensitivity sqrt(2 ln(1.25 / delta)) / epsilon."""
    sensitivity, epsilon, delta = _need(settings, "sensitivity", "epsilon", "delta")
    if not 0 < delta < 1.25:
        raise MissingError("delta")
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def _local_claim(settings: Settings) -> Price:
    epsilon, delta = _need(settings, "epsilon", "delta")
    return Price(epsilon, delta, "replace_one", MESSAGES, "as its arguments say, for one message")


def _local_proved(settings: Settings) -> list[Price]:
    clip, delta = _need(settings, "clip_norm", "delta")
    rounds, std = int(settings.get("rounds", 1)), local_noise(settings)
    if std <= 0:
        return []
    words = f"a client's update moves by 2 clip norms in each of {rounds} rounds"
    return [_price(((GaussianNoise(std / clip), rounds),), "replace_one", delta, MESSAGES, words)]


def _pfl_multiplier(settings: Settings) -> float:
    if settings.has("noise_multiplier"):
        return float(settings.get("noise_multiplier"))
    rate, rounds, epsilon, delta = _need(settings, "rate", "rounds", "epsilon", "delta")
    return _solved(_Poisson(rate), int(rounds), epsilon, delta)


def _pfl_claim(settings: Settings) -> Price:
    rate, rounds, delta = _need(settings, "rate", "rounds", "delta")
    event = _Poisson(rate)(_pfl_multiplier(settings))
    return _price(((event, int(rounds)),), "add_remove", delta, MODELS, "Poisson sampling at the stated rate")


def _pfl_proved(settings: Settings) -> list[Price]:
    rate, rounds, delta = _need(settings, "rate", "rounds", "delta")
    noise = _pfl_multiplier(settings) * settings.get("noise_scale", 1.0)
    words = f"noise of {noise:.4g} clips is added; if the cohorts are drawn by Poisson sampling, as accounted"
    return [_price(((_Poisson(rate)(noise), int(rounds)),), "add_remove", delta, MODELS, words)]


def _single_claim(settings: Settings) -> Price:
    epsilon, delta = _need(settings, "epsilon", "delta")
    return Price(epsilon, delta, "add_remove", COHORTS, "for one iteration")


def _single_proved(settings: Settings) -> list[Price]:
    epsilon, delta = _need(settings, "epsilon", "delta")
    rounds = int(settings.get("rounds", 1))
    event = GaussianNoise(_single_release(epsilon, delta))
    return [_price(((event, rounds),), "zero_out", delta, COHORTS, f"{rounds} iterations with the same client")]


def _banded_releases(settings: Settings) -> int:
    rounds, apart = _need(settings, "rounds", "min_separation")
    return math.ceil(rounds / apart)


def _banded_claim(settings: Settings) -> Price:
    z, delta = _need(settings, "noise_multiplier", "delta")
    words = f"{_banded_releases(settings)} Gaussians of sensitivity 1"
    return _price(((GaussianNoise(z), _banded_releases(settings)),), "add_remove", delta, COHORTS, words)


def _banded_proved(settings: Settings) -> list[Price]:
    z, delta, rounds, apart = _need(settings, "noise_multiplier", "delta", "rounds", "min_separation")
    moved = BANDED_MOVES.get((int(rounds), int(apart)))
    if moved is None:
        return []
    words = f"one user moves C X by {moved:g} clips where {math.sqrt(_banded_releases(settings)):.3f} is accounted"
    return [_price(((GaussianNoise(z / moved), 1),), "zero_out", delta, COHORTS, words)]


# ---- record level ----------------------------------------------------------------------------------------------------


def _sgd(settings: Settings, accumulation: int = 1) -> tuple[float, int, int]:
    """Return rate, steps and passes of a DP-SGD loop, from records and batch size or from a rate."""
    if settings.has("records", "batch_size"):
        records, batch = settings.get("records"), settings.get("batch_size") * accumulation
        per_pass = math.ceil(records / batch) if settings.library == "opacus" else records / batch
        rate = min(1.0, 1 / per_pass)
    else:
        (rate,) = _need(settings, "rate") if settings.has("rate") else _need(settings, "records", "batch_size")
    if settings.has("steps"):
        steps = int(settings.get("steps"))
    else:
        (epochs,) = _need(settings, "epochs")
        steps = int(epochs / rate)
    return rate, steps, max(1, math.ceil(steps * rate * (1 - 1e-12)))


def _sgd_multiplier(settings: Settings, accumulation: int = 1) -> float:
    if settings.has("noise_multiplier"):
        return float(settings.get("noise_multiplier"))
    epsilon, delta = _need(settings, "epsilon", "delta")
    rate, steps, _ = _sgd(settings, accumulation)
    return _solved(_Poisson(rate), steps, epsilon, delta)


def clt_epsilon(rate: float, steps: int, z: float, delta: float) -> float:
    """Return Opacus' "gdp" epsilon, by the central limit theorem: mu = q sqrt(T (exp(1 / z^2) - 1)). No bound."""
    return gaussian_epsilon(rate * math.sqrt(steps * math.expm1(min(1 / z**2, 100.0))), delta)


def _sgd_claim(settings: Settings) -> Price:
    (delta,) = _need(settings, "delta")
    if settings.has("epsilon") and not settings.has("noise_multiplier"):
        return Price(settings.get("epsilon"), delta, "add_remove", STEPS, "the target of its calibration")
    (z,), (rate, steps, _) = _need(settings, "noise_multiplier"), _sgd(settings)
    if settings.get("accountant") == "gdp":
        return Price(clt_epsilon(rate, steps, z, delta), delta, "add_remove", STEPS, "Poisson sampling, an estimate")
    entries = ((_Poisson(rate)(z), steps),)
    return _price(entries, "add_remove", delta, STEPS, "Poisson sampling", rdp=settings.get("accountant") == "rdp")


def _sampled_sgd(rate: float, steps: int, passes: int, z: float, delta: float, poisson: bool) -> list[Price]:
    """Return what is proved of a loop with Poisson batches, or with batches of a shuffled pass."""
    if poisson:
        words = "the number of records is public, and a record becomes an empty one"
        return [_price(((_Poisson(rate)(z), steps),), "zero_out", delta, STEPS, words)]
    entries = ((GaussianNoise(z), passes),)
    words = f"each record is in one batch of each of {passes} passes; shuffling proves no amplification"
    return [
        _price(entries, "zero_out", delta, STEPS, words),
        _price(entries, "replace_one", delta, STEPS, "the same, and a record is replaced: the sum moves by 2C"),
    ]


def _sgd_proved(settings: Settings) -> list[Price]:
    (delta,), (rate, steps, passes) = _need(settings, "delta"), _sgd(settings)
    return _sampled_sgd(rate, steps, passes, _sgd_multiplier(settings), delta, settings.get("poisson", True))


def _keras_claim(settings: Settings) -> Price:
    epsilon, delta = _need(settings, "epsilon", "delta")
    return Price(epsilon, delta, "add_remove", STEPS, "its epsilon, checked for Poisson sampling")


def _keras_proved(settings: Settings) -> list[Price]:
    accumulation = int(settings.get("accumulation", 1))
    (delta,), (rate, steps, passes) = _need(settings, "delta"), _sgd(settings, accumulation)
    z = _sgd_multiplier(settings, accumulation)
    return _sampled_sgd(rate, steps, passes, z, delta, settings.get("poisson", False))


def _jax_claim(settings: Settings) -> Price:
    if settings.get("sampling") != "fixed_batch_size":
        return _sgd_claim(settings)
    z, delta = _need(settings, "noise_multiplier", "delta")
    rate, steps, _ = _sgd(settings)
    words = "Poisson sampling at half the noise multiplier"
    return _price(((_Poisson(rate)(z / 2), steps),), "add_remove", delta, STEPS, words)


def _jax_proved(settings: Settings) -> list[Price]:
    if settings.get("sampling") != "fixed_batch_size":
        return _sgd_proved(settings)
    z, delta, records, batch = _need(settings, "noise_multiplier", "delta", "records", "batch_size")
    event = FixedSampled(int(records), int(batch), GaussianNoise(z))
    words = "drawn without replacement, a record is replaced (Balle, Barthe, Gaboardi 2018, Theorem 9)"
    return [_price(((event, _sgd(settings)[1]),), "replace_one", delta, STEPS, words)]


def _silo_steps(settings: Settings, rounds: float) -> tuple[float, int]:
    epochs, batch, records = _need(settings, "epochs", "batch_size", "records")
    return min(1.0, batch / records), math.ceil(rounds * epochs * math.ceil(records / batch))


def _instance_claim(settings: Settings) -> Price:
    clients, z, rounds, delta = _need(settings, "client_rate", "noise_multiplier", "rounds", "delta")
    rate, steps = _silo_steps(settings, rounds)
    orders = renyi.ORDERS
    own = np.isin(orders, (1.5, 2, 2.5, 3, 3.5, 4, 4.5)) | ((orders >= 5) & (orders % 1 == 0) & (orders < 1000))
    losses = steps * (renyi.poisson_gaussian(rate * clients, 1 / z) if z > 0 else np.full(len(orders), np.inf))
    words = "Poisson sampling at the product of client rate and batch rate (RDP)"
    value = renyi.epsilon(np.where(own, losses, np.inf), delta)
    return Price(value if value < math.inf else None, delta, "add_remove", MODELS, words)


def _instance_proved(settings: Settings) -> list[Price]:
    clients, z, rounds, delta = _need(settings, "client_rate", "noise_multiplier", "rounds", "delta")
    taken = max(1, math.ceil(clients * rounds))
    found = []
    for times, who in ((int(rounds), "every round"), (taken, f"{taken} rounds, the expected number")):
        rate, steps = _silo_steps(settings, times)
        words = f"a record of a client that takes part in {who}: {steps} steps at the batch rate"
        found.append(_price(((_Poisson(rate)(z), steps),), "zero_out", delta, COHORTS, words))
    return found


# ---- filters ---------------------------------------------------------------------------------------------------------


def svt_epsilons(settings: Settings) -> tuple[float, float, float]:
    """Return (threshold, query, release) epsilons of one call of NVFlare's SVTPrivacy for a model of d parameters.

    c = ceil(fraction d) values are released. Query noise 2 c gamma / query pays for c accepted coordinates, and the
    loop accepts until at least c of d passed; each accepted one costs query / c, so d / c times `query` bounds it.
    """
    size, fraction, epsilon, noise_var = _need(settings, "parameters", "fraction", "epsilon", "noise_var")
    uploaded = min(math.ceil(size * fraction), size)
    threshold = epsilon / (1 + (2 * uploaded) ** (2 / 3))
    release = settings.get("epsilon_release", uploaded * noise_var)
    return threshold, epsilon - threshold, release


def _svt_claim(settings: Settings) -> Price:
    rounds = settings.get("rounds", 1)
    return Price(
        rounds * sum(svt_epsilons(settings)), 0.0, "replace_one", MESSAGES, "selection and release, as it logs"
    )


def _svt_proved(settings: Settings) -> list[Price]:
    threshold, query, release = svt_epsilons(settings)
    size, fraction = _need(settings, "parameters", "fraction")
    accepted = size / min(math.ceil(size * fraction), size)
    total = settings.get("rounds", 1) * (threshold + query * accepted + release)
    words = "every coordinate may pass the threshold; parameters that are scalars are sent as they are, and not covered"
    return [Price(total * (1 + 1e-12), 0.0, "replace_one", MESSAGES, words)]


def _plain_proved(settings: Settings) -> list[Price]:
    sampling = settings.get("sampling", "fixed")
    if sampling == "poisson":
        z, rounds, delta = _need(settings, "noise_multiplier", "rounds", "delta")
        clients, sampled = (
            (1.0, settings.get("rate")) if settings.has("rate") else _need(settings, "clients", "sampled")
        )
        entries = ((_Poisson(min(1.0, sampled / clients))(z), int(rounds)),)
        return [_price(entries, "add_remove", delta, MODELS, "Poisson sampling, cohorts secret")]
    return _fixed_cohorts(settings)


Claim = Callable[[Settings], Price | None]
Proved = Callable[[Settings], list[Price]]
PROTOCOLS: dict[tuple[str, str], tuple[Claim, Proved]] = {  # the first of a library is that of plain numbers
    ("flower", "fixed_clipping"): (_flower_claim, _flower_proved),
    ("flower", "accountant"): (_flower_claim, _flower_proved),
    ("flower", "adaptive_clipping"): (_flower_claim, lambda _: []),
    ("flower", "local"): (_local_claim, _local_proved),
    ("opacus", "dp_sgd"): (_sgd_claim, _sgd_proved),
    ("pfl", "accountant"): (_pfl_claim, _pfl_proved),
    ("pfl", "single_iteration"): (_single_claim, _single_proved),
    ("pfl", "banded"): (_banded_claim, _banded_proved),
    ("jax_privacy", "dp_sgd"): (_jax_claim, _jax_proved),
    ("jax_privacy", "keras"): (_keras_claim, _keras_proved),
    ("fl4health", "records"): (_instance_claim, _instance_proved),
    ("fl4health", "without_replacement"): (_unhalved, _fixed_cohorts),
    ("nvflare", "svt"): (_svt_claim, _svt_proved),
    ("nvflare", "percentile"): (lambda _: None, lambda _: []),
    ("plain", "fixed"): (lambda _: None, _plain_proved),
}
