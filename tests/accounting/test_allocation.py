"""Random allocation: an upper bound in both orders, tight to four digits; an unsound grid is caught."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ndtr

from sordino import codec
from sordino.accounting import accountant, allocation, pld
from sordino.accounting.calibration import noise_multiplier
from sordino.accounting.composition import Line
from sordino.accounting.events import Allocated, Event, GaussianNoise, LaplaceNoise, PoissonSampled
from sordino.accounting.pairs import Pair

Array = NDArray[np.float64]

# bins, noise multiplier, passes, delta, epsilon of removal and of addition
TABLE = [
    (10, 1.0, 1, 1e-5, 2.1889, 1.3649),
    (10, 0.5, 1, 1e-5, 7.6951, 3.5569),
    (10, 2.0, 10, 1e-6, 2.4242, 2.3761),
    (30, 1.0, 5, 1e-5, 2.4043, 1.9664),
    (100, 0.5, 1, 1e-5, 5.3966, 1.3338),
    (100, 1.0, 1, 1e-6, 0.8581, 0.4866),
    (100, 1.0, 10, 1e-5, 1.7021, 1.5484),
    (100, 2.0, 5, 1e-6, 0.4809, 0.4764),
    (1000, 0.5, 1, 1e-5, 3.1342, 0.4975),
]


def epsilons(bins: int, s: float, passes: int, delta: float) -> tuple[float, float]:
    """Epsilon of a removed and of an added unit."""
    orders = allocation.allocated(bins, 1 / s)
    one, other = (
        accountant._on_grid((((pair, passes),),), delta, None, False)[0] for pair in (orders.removed, orders.added)
    )
    return one, other


@pytest.mark.parametrize(("bins", "s", "passes", "delta", "removed", "added"), TABLE)
def test_nine_settings_cost_what_two_other_computations_found(
    bins: int, s: float, passes: int, delta: float, removed: float, added: float
) -> None:
    found = epsilons(bins, s, passes, delta)
    assert found[0] == pytest.approx(removed, rel=4e-4)
    assert found[1] == pytest.approx(added, rel=4e-4)
    billed = accountant.epsilon(((Allocated(bins, GaussianNoise(s)), passes),), "add_remove", delta)
    assert billed.value == pytest.approx(max(found), rel=1e-12)
    poisson = accountant.epsilon(((PoissonSampled(1 / bins, GaussianNoise(s)), passes * bins),), "add_remove", delta)
    assert billed.value < poisson.value


# ---- never below the truth -------------------------------------------------------------------------------------------


def delta_of_two_bins(mu: float, epsilon: float, *, added: bool) -> float:
    """delta of one pass with t = 2, by one integral: given W_1 = w, (w + W_2)/2 is an option on a lognormal."""
    z = np.linspace(-16.0, 16.0 + mu, 400_001)
    w, k = np.exp(mu * z - mu * mu / 2), math.exp(-epsilon if added else epsilon)
    strike = 2 * k - w
    safe = np.maximum(strike, 1e-300)
    up = -np.log(safe) / mu + mu / 2
    call = np.where(strike > 0, ndtr(up) - safe * ndtr(up - mu), 1 - strike)
    value = (np.where(strike > 0, call - 1 + strike, 0.0) if added else call) / 2
    heights = value * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float(np.trapezoid(heights, z)) / (k if added else 1.0)


@pytest.mark.parametrize("s", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("added", [False, True])
def test_two_bins_are_above_the_closed_integral_and_close_to_it(s: float, added: bool) -> None:
    orders = allocation.allocated(2, 1 / s)
    pair = orders.added if added else orders.removed
    asked = np.asarray([0.05, 0.2, 0.5, 1.0, 1.5]) / s
    for epsilon, found in zip(asked, pld.single_deltas(pair, asked), strict=True):
        true = delta_of_two_bins(1 / s, float(epsilon), added=added)
        assert true * (1 - 1e-9) <= found <= true * 1.001 + 1e-11


def sampled_delta(bins: int, s: float, epsilon: float, shift: float, *, added: bool) -> tuple[float, float]:
    """delta of one pass by importance sampling with a fixed seed, and its standard error.

    Added: all terms are tilted. Removed: under P the unit is in the first bin; that term, or a random other one, is
    tilted up, and the density of the mixture divides.
    """
    rng, mu, count = np.random.default_rng(5), 1 / s, 2_000_000 // bins
    z = rng.standard_normal((count, bins))
    if added:
        z -= shift
        weights = np.exp(shift * z.sum(1) + bins * shift**2 / 2)
    else:
        other, own = rng.integers(1, bins, count), rng.random(count) < 0.5
        z[:, 0] += mu + np.where(own, shift, 0.0)
        far = mu + shift
        z[np.arange(count), other] += np.where(own, 0.0, far)
        first = np.exp(shift * (z[:, 0] - mu) - shift**2 / 2)
        weights = 1 / (first / 2 + np.exp(far * z[:, 1:] - far**2 / 2).mean(1) / 2)
    ratio = np.log(np.exp(mu * z - mu * mu / 2).mean(1))
    each = weights * np.maximum(-np.expm1(epsilon - (-ratio if added else ratio)), 0.0)
    return float(each.mean()), float(each.std()) / math.sqrt(count)


SAMPLED = [
    (10, 1.0, 1e-5, 2.6, False),
    (10, 1.0, 1e-5, 1.1, True),
    (10, 0.5, 1e-5, 2.9, False),
    (100, 0.5, 1e-5, 3.0, False),
    (100, 1.0, 1e-6, 3.6, False),
]


@pytest.mark.parametrize(("bins", "s", "delta", "shift", "added"), SAMPLED)
def test_importance_sampling_finds_the_delta_that_was_paid_for(
    bins: int, s: float, delta: float, shift: float, added: bool
) -> None:
    epsilon = epsilons(bins, s, 1, delta)[int(added)]
    found, error = sampled_delta(bins, s, epsilon, shift, added=added)
    assert error < 0.03 * found
    assert found - 4 * error <= delta
    assert found + 4 * error >= 0.97 * delta


@pytest.mark.parametrize(("bins", "s", "passes"), [(10, 1.0, 3), (30, 1.0, 5), (50, 2.0, 4)])
@pytest.mark.parametrize("added", [False, True])
def test_passes_compose_to_the_delta_that_sampling_finds(bins: int, s: float, passes: int, added: bool) -> None:
    rng, mu, count, delta = np.random.default_rng(6), 1 / s, 100_000, 0.02
    losses = np.zeros(count)
    for _ in range(passes):
        z = rng.standard_normal((count, bins))
        if not added:
            z[:, 0] += mu
        losses += (-1 if added else 1) * np.log(np.exp(mu * z - mu * mu / 2).mean(1))
    each = np.maximum(-np.expm1(epsilons(bins, s, passes, delta)[int(added)] - losses), 0.0)
    error = float(each.std()) / math.sqrt(count)
    assert each.mean() - 4 * error <= delta <= each.mean() + 4 * error + 0.01 * delta
    assert error < 0.02 * delta


def test_a_grid_that_rounds_to_the_nearest_point_falls_below_the_truth_and_ours_never_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def least_ratio() -> float:
        total = allocation.sum_of_terms.__wrapped__(2, 1.0, 20)
        logs, epsilons = total.logs - math.log(2), np.linspace(0.05, 3, 60)
        deltas = [float(total.masses @ np.maximum(np.exp(logs) - math.exp(e), 0.0)) for e in epsilons]
        true = [delta_of_two_bins(1.0, float(e), added=False) for e in epsilons]
        return min(found / exact for found, exact in zip(deltas, true, strict=True))

    assert least_ratio() >= 1.0
    sound = allocation.upper_share
    monkeypatch.setattr(allocation, "upper_share", lambda excess, step: np.rint(sound(excess, step)))
    assert least_ratio() < 0.7
    assert abs(allocation.sum_of_terms.__wrapped__(2, 1.0, 200).mean - 2) > 1e-4  # and it shows on a finer grid


@pytest.mark.parametrize("mu", [1e-4, 0.1, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("bins", [2, 3, 7, 100])
def test_every_step_preserves_the_mean_and_the_probability(bins: int, mu: float) -> None:
    total = allocation.sum_of_terms.__wrapped__(bins, mu, 300)
    assert total.mean == pytest.approx(bins, rel=1e-7)
    assert float(total.masses.sum()) + total.zero == pytest.approx(1.0, rel=1e-7)
    assert total.infinite <= 1e-20 * bins


def test_rounding_only_raises_the_probabilities() -> None:
    total = allocation.sum_of_terms.__wrapped__(10, 1.0, 300)
    assert 0 < float(total.masses.sum()) + total.zero - 1 < 1e-9
    assert 0 < total.mean / 10 - 1 < 1e-9


# ---- on the accountant's grid ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.3, 0.02, 0.001])
def test_outcomes_on_a_grid_dominate_the_pair_that_they_come_from(step: float) -> None:
    orders = allocation.allocated(20, 0.7)
    asked = np.linspace(0.0, 2.0, 41)
    for pair in (orders.removed, orders.added):
        on_grid, atoms = pld.losses_on(pair, step, 1e-14), pair.atoms()
        assert atoms is not None
        for epsilon in asked:
            exact = float(atoms[1] @ np.maximum(-np.expm1(epsilon - atoms[0]), 0.0)) + atoms[2]
            gains = np.maximum(-np.expm1(np.minimum(epsilon - on_grid.values, 0.0)), 0.0)
            found = float(on_grid.masses @ gains) + on_grid.infinite
            assert found >= exact * (1 - 1e-12)
            assert found <= exact + step / 2


def test_one_bin_or_other_noise_or_a_replaced_unit_costs_one_round() -> None:
    for event, relation in (
        (Allocated(1, GaussianNoise(2.0)), "add_remove"),
        (Allocated(10, LaplaceNoise(2.0)), "add_remove"),
        (Allocated(10, GaussianNoise(2.0)), "replace_one"),
        (Allocated(10, GaussianNoise(0.01)), "add_remove"),
    ):
        alone = accountant.epsilon(((event.event, 3),), relation, 1e-5)  # type: ignore[arg-type]
        assert accountant.epsilon(((event, 3),), relation, 1e-5).value == pytest.approx(alone.value, rel=1e-3)  # type: ignore[arg-type]


def test_a_pass_composes_with_other_releases() -> None:
    allocated, gaussian = (Allocated(10, GaussianNoise(1.0)), 2), (GaussianNoise(4.0), 1)
    both = accountant.epsilon((allocated, gaussian), "add_remove", 1e-5).value
    one, other = (accountant.epsilon((each,), "add_remove", 5e-6).value for each in (allocated, gaussian))
    assert max(one, other) * 0.9 < both < one + other


def test_the_event_survives_the_codec_and_refuses_no_bins() -> None:
    event = Allocated(100, GaussianNoise(0.5))
    assert codec.read(Event, codec.dump(event)) == event
    with pytest.raises(Exception, match="bins = 0"):
        Allocated(0, GaussianNoise(1.0))


def test_noise_is_calibrated_to_a_budget() -> None:
    def line(z: float) -> Line:
        return Line("models", "add_remove", ((Allocated(20, GaussianNoise(z)), 3),))

    z = noise_multiplier(line, 2.0, 1e-5)
    assert 0.99 * 2.0 <= accountant.epsilon(line(z).entries, "add_remove", 1e-5).value <= 2.0


def test_the_curve_is_symmetric_enough_to_compose_and_never_rises() -> None:
    pair: Pair = allocation.allocated(10, 1.0).removed
    deltas = pld.single_deltas(pair, np.linspace(-2, 6, 200))
    assert np.all(np.diff(deltas) <= 1e-12)


# ---- a second opinion ------------------------------------------------------------------------------------------------

BRACKETS = [  # by pld_accounting 2.0: lower and upper bound on epsilon of removal
    (10, 1.0, 1, 1e-5, 2.187, 2.195),
    (10, 0.5, 1, 1e-5, 7.693, 7.703),
    (30, 1.0, 5, 1e-5, 2.396, 2.417),
    (100, 0.5, 1, 1e-5, 5.394, 5.406),
    (100, 1.0, 1, 1e-6, 0.853, 0.866),
]


@pytest.mark.parametrize(("bins", "s", "passes", "delta", "low", "high"), BRACKETS)
def test_another_library_brackets_the_bound(
    bins: int, s: float, passes: int, delta: float, low: float, high: float
) -> None:
    assert low <= epsilons(bins, s, passes, delta)[0] <= high


def test_the_installed_other_library_still_brackets_it() -> None:
    other = pytest.importorskip(
        "PLD_accounting", reason="pld_accounting 2.0 is not installed: its kept brackets stand above"
    )
    for bins, s, passes, delta, _, _ in BRACKETS[:2]:
        high, low = other.gaussian_allocation_epsilon_range(delta=delta, sigma=s, num_steps=bins, num_epochs=passes)
        assert low <= epsilons(bins, s, passes, delta)[0] <= high
