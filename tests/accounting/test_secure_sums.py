"""Promise: a secure sum of rounded shares is as private as Gaussian noise, up to a distance that is proved and billed.

Oracles: the exact laws of both sums by their Fourier series; the theta series of the proof, term by term; the normal
distribution by mpmath.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.special import ndtri
from tests.tiny import plan

from sordino.accounting import accountant, secure_sums
from sordino.accounting.events import GaussianNoise
from sordino.accounting.secure_sums import SumGrid, rounding_distance
from sordino.certificate.build import certificate
from sordino.certificate.facts import Facts
from sordino.errors import PlanError
from sordino.ledger.totals import Limit
from sordino.parts import mechanisms
from sordino.parts.mechanisms import Gaussian, rounded_gaussian
from sordino.parts.record_samplers import AllRecords, FixedRecords, PoissonRecords
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import NoiseShares
from sordino.parts.samplers import Everyone, FixedSize, Poisson
from sordino.plan import Plan
from sordino.rng import Secure, SecureGenerator, Seeded

# ---- the distance ----------------------------------------------------------------------------------------------------

CIRCLE, TERMS = 512, range(-6, 7)  # Fourier coefficients of a law on the integers, and of its periods


def transform(centre: float, std: float, power: int, theta: Any) -> Any:
    """Of N(centre, std^2) plus `power` uniform variables on [-1/2, 1/2], at frequency theta."""
    return np.exp(2j * np.pi * centre * theta - 2 * (np.pi * std * theta) ** 2) * np.sinc(theta) ** power


def law_of(frequencies: Any) -> Any:
    return np.fft.fft(frequencies).real / CIRCLE


def exact_distance(centres: tuple[float, ...], std: float) -> float:
    """Total variation between sum_i rint(N(c_i, std^2)) and rint of the Gaussian sum plus n - 1 uniform variables."""
    theta, n = np.fft.fftfreq(CIRCLE), len(centres)
    rounded = [sum(transform(c, std, 1, theta + m) for m in TERMS) for c in centres]
    processed = sum(transform(sum(centres), std * math.sqrt(n), n, theta + m) for m in TERMS)
    return float(np.abs(law_of(np.prod(rounded, axis=0)) - law_of(processed)).sum() / 2)


@pytest.mark.parametrize("std", [1.0, 1.1, 1.3])
@pytest.mark.parametrize("centres", [(0.0, 0.5), (0.25, 0.25), (0.5, 0.5), (0.1, 0.7, 0.3), (0.5, 0.5, 0.0, 0.25)])
def test_the_distance_bounds_that_of_the_exact_laws_and_is_reached_within_a_factor(
    centres: tuple[float, ...], std: float
) -> None:
    assert exact_distance(centres, std) <= rounding_distance(len(centres), std)


def test_two_members_at_the_worst_place_come_within_a_factor_of_twenty_of_the_bound() -> None:
    """So a bound without the factor of the proof, as a bound on single probabilities, would be false."""
    worst = max(exact_distance((a, b), 1.0) for a in np.arange(0, 1, 0.05) for b in np.arange(0, 1, 0.05))
    assert rounding_distance(2, 1.0) / 20 < worst


def theta_series(n: int, s: float) -> float:
    """Half the sum over classes m != 0 of Z^n / Z(1, ..., 1) of exp(-2 pi^2 s^2 (|m|^2 - (sum m)^2 / n))."""
    lattice = (m for m in itertools.product(range(-3, 4), repeat=n - 1) if any(m))
    return math.fsum(math.exp(-2 * (math.pi * s) ** 2 * (sum(i * i for i in m) - sum(m) ** 2 / n)) for m in lattice) / 2


def integral(n: int, s: float) -> float:
    """1/2 sqrt(2 pi n) s times the integral over |theta| <= 1/2 of n b (a + b)^(n - 1)."""

    def term(theta: float) -> float:
        a, b = (sum(math.exp(-2 * (math.pi * s * (theta + m)) ** 2) for m in ms) for ms in ((0,), (-2, -1, 1, 2)))
        return n * b * (a + b) ** (n - 1)

    return math.sqrt(2 * math.pi * n) * s / 2 * float(integrate.quad(term, -0.5, 0.5, epsabs=0, limit=500)[0])


@pytest.mark.parametrize("s", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_series_integral_and_closed_form_stand_in_this_order(n: int, s: float) -> None:
    assert theta_series(n, s) <= integral(n, s) * (1 + 1e-6) <= rounding_distance(n, s) * (1 + 1e-6)


@pytest.mark.parametrize("n", [10, 100, 1000])
@pytest.mark.parametrize("s", [1.0, 1.7, 3.0])
def test_the_closed_form_is_above_the_integral_for_many_members(n: int, s: float) -> None:
    assert integral(n, s) <= rounding_distance(n, s)


def test_what_is_not_proved_has_distance_one() -> None:
    assert rounding_distance(2, 0.99) == 1.0
    assert rounding_distance(10**8, 4.0) == 1.0
    assert rounding_distance(1, 0.1) == 0.0
    assert rounding_distance(2, 4.0) < 1e-67


# ---- the grid and the words ------------------------------------------------------------------------------------------


@given(st.floats(1e-4, 1e4), st.integers(2, 100_000), st.floats(1.0, 1e5))
def test_a_word_holds_the_largest_sum_with_fourteen_deviations_of_its_noise(
    std: float, members: int, largest: float
) -> None:
    grid = SumGrid(std, members, largest)
    sum_of_all = members * (largest / grid.step + 0.5) + 14 * math.sqrt(members) * grid.ratio
    assert sum_of_all <= 2.0 ** (grid.bits - 1) - 1
    assert grid.ratio >= 4
    assert grid.step == 2.0 ** round(math.log2(grid.step))
    assert grid.wrapping <= math.exp(-98) * 1.001
    assert grid.rounding <= 1e-57


def test_sixteen_bits_are_used_where_they_suffice() -> None:
    """Silos, a hundred clients, and a thousand, whose largest sum needs 32 bits whatever the grid."""
    assert [SumGrid(1 / math.sqrt(n), n).bits for n in (3, 10, 100, 1000)] == [16, 16, 16, 32]
    assert SumGrid(0.1, 100).ratio == 25.6  # between 2^4 and 2^5 steps: more than the two bits that privacy needs
    with pytest.raises(PlanError, match="64-bit words"):
        SumGrid(1e-4, 10**7, 1e9).bits  # noqa: B018


def test_the_range_of_a_message_is_one_at_client_level_and_its_records_at_record_level() -> None:
    shares = NoiseShares(2.0, 3)
    grids = {
        "client": shares.sum_grid(Everyone(4), None),
        "all": shares.sum_grid(Everyone(4), AllRecords((10, 20, 30, 40))),
        "poisson": shares.sum_grid(Everyone(4), PoissonRecords(8, (100,))),
        "fixed": shares.sum_grid(Everyone(4), FixedRecords(8, (100,))),
    }
    assert {name: round(grid.largest) for name, grid in grids.items()} == {
        "client": 1,
        "all": 40,
        "poisson": 100,
        "fixed": 8,
    }
    assert shares.sum_grid(FixedSize(50, 5), None).members == 5
    assert shares.sum_grid(Poisson(50, 0.2), None).members == 50


@pytest.mark.parametrize("bits", [16, 32])
def test_a_word_that_is_too_small_would_be_noticed(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest possible sum of 1000 clients, by integers modulo 2^bits: false with 16 bits."""
    monkeypatch.setattr(secure_sums, "WORDS", (bits,))
    monkeypatch.setattr(secure_sums, "FREE", -math.inf if bits == 16 else 14.0)  # sabotage: wrap-around ignored
    grid = SumGrid(1 / math.sqrt(1000), 1000)
    steps = Gaussian(grid.share_std).sample_rounded(np.ones(1000), grid.step, Seeded(3).at(0, "x"))
    words = steps.astype(f"u{bits // 8}").sum(dtype=f"u{bits // 8}")
    found = int(words.view(f"i{bits // 8}")) * grid.step
    assert (abs(found - 1000) < 14) == (bits == 32)
    assert (grid.wrapping < 1e-40) == (bits == 32)


# ---- draws that are rounded ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["secure", "simulation"])
@pytest.mark.parametrize("centre", [0.0, 0.5, 0.25, -1234.5])
def test_a_share_is_rounded_after_its_noise_also_at_the_edges_of_cells(centre: float, mode: str) -> None:
    """Every cell has the normal probability; rounding the row first would move the mean by up to half a step."""
    rng = Secure().at(0, "x") if mode == "secure" else Seeded(11).at(0, "x")
    size, scale, step = 400_000, 4.3, 2.0**-7
    found = Gaussian(scale * step).sample_rounded(np.full(size, centre * step), step, rng)
    cells = np.arange(-14, 15) + math.floor(centre)
    edges = np.concatenate([[-np.inf], cells[:-1] + 0.5, [np.inf]])
    chances = np.diff(stats.norm.cdf((edges - centre) / scale))
    counts = np.bincount(np.clip(found, cells[0], cells[-1]) - cells[0], minlength=len(cells))
    assert stats.chisquare(counts, chances * size).pvalue > 1e-6
    assert abs(found.mean() - centre) < 6 * scale / math.sqrt(size)


def test_rounding_before_the_noise_would_be_noticed() -> None:
    """Sabotage: the same test statistic, a row half a step above the grid, rounded by itself."""
    size, scale = 400_000, 4.3
    rng = np.random.default_rng(0)
    found = np.rint(np.full(size, 0.5)) + np.rint(scale * rng.standard_normal(size))
    assert abs(found.mean() - 0.5) > 6 * scale / math.sqrt(size)


def test_the_inverse_of_the_normal_distribution_is_as_exact_as_is_assumed() -> None:
    coins = np.random.default_rng(1)
    words = np.concatenate([2.0 ** np.arange(4, 63), coins.integers(1, 2**63, 200).astype(float)]) + 0.5
    for u, found in zip(words * 2.0**-64, ndtri(words * 2.0**-64), strict=True):
        with mpmath.workdps(60):
            true = -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(float(u)))
            assert abs(found - true) < mechanisms.NDTRI * (1 + abs(true)) / 100


class Words(SecureGenerator):
    """A generator whose first words are given, then fair bits."""

    def __init__(self, *given: int) -> None:
        super().__init__(np.random.PCG64(0))
        self.given = list(given)

    def integers(self, low: Any, *args: Any, size: Any = None, dtype: Any = np.int64, **more: Any) -> Any:
        if not self.given:
            return np.random.default_rng(0).integers(low, size=size, dtype=dtype)
        found = np.array([self.given.pop(0) for _ in range(size or 1)], dtype=np.uint64)
        return found if size else found[0]


def edge_word(edge: float, centre: float, scale: float, bits: int) -> int:
    """The first `bits` bits of Phi((edge - centre) / scale): where U decides on which side of the edge it falls."""
    with mpmath.workdps(120):
        return int(mpmath.floor(mpmath.ncdf((mpmath.mpf(edge) - centre) / scale) * mpmath.mpf(2) ** bits))


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("edge", [-0.5, -3.5, -20.5])
def test_a_draw_at_the_edge_of_a_cell_is_decided_by_further_bits(edge: float, more: int) -> None:
    """U agrees with Phi at the edge in its first 64 bits, where float64 cannot tell; the next 64 decide."""
    centre, scale = 0.125, 4.0
    whole = edge_word(edge, centre, scale, 128)
    first, second = whole >> 64, min(max((whole & (2**64 - 1)) + more * 2**40, 0), 2**64 - 1)
    exact = math.floor(edge) if (first << 64) + second < whole else math.floor(edge) + 1
    if more:
        found = rounded_gaussian(np.array([centre]), scale, Words(first, second))
        assert found.tolist() == [exact]
        mirrored = rounded_gaussian(np.array([-centre]), scale, Words(first | 2**63, second))
        assert mirrored.tolist() == [-exact]
    else:  # equal in 128 bits: the third word decides, and the draw ends on one side or the other
        found = rounded_gaussian(np.array([centre]), scale, Words(first, second))
        assert found.tolist()[0] in (math.floor(edge), math.floor(edge) + 1)


def test_no_cell_of_the_tails_is_beyond_reach() -> None:
    """The least 64 bits are -9.16 deviations; further bits go on, where a generator of 53 bits ends at -8.3."""
    far = rounded_gaussian(np.zeros(1), 4.0, Words(0, 0, 0))
    assert far[0] < -4.0 * 13
    assert rounded_gaussian(np.zeros(1), 4.0, Words(2**63, 0, 0))[0] > 4.0 * 13


# ---- the bill --------------------------------------------------------------------------------------------------------


SHARES = NoiseShares(20.0, 3)


def summed() -> Plan:
    return plan(release=SHARES, clients=Everyone(4), rounds=50)


def facts(length: int) -> Facts:
    return Facts(1e-5, "secure", 50, 50, sum_length=length)


@pytest.mark.parametrize("unit", ["client", "record"])
def test_the_distance_is_on_the_certificate_and_in_its_epsilon(unit: str) -> None:
    one = summed()
    if unit == "record":
        one = replace(one, local=BatchGradient(AllRecords((20,)), 1.0), encode=())
    made = certificate(one, facts(1000))
    grid, found = SHARES.sum_grid(one.clients, one.local.reads), made["secure_sum"]
    assert found["distance"] >= 50 * 1000 * (grid.rounding + grid.wrapping)
    assert found["distance"] < 1e-35
    assert found["word_bits"] == 16
    assert certificate(one, facts(0))["secure_sum"] is None
    assert made["epsilon"] == pytest.approx(certificate(one, facts(0))["epsilon"], abs=2e-6)


def test_a_certificate_without_the_distance_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a grid as coarse as the noise the distance is large: it raises epsilon, or there is none."""
    without = certificate(summed(), facts(0))
    monkeypatch.setattr(secure_sums, "FINEST", 0)
    monkeypatch.setattr(secure_sums, "COARSEST", 0)
    ratio = SHARES.share.std / 8  # 11.5: in steps of 8
    assert rounding_distance(4, ratio) > 1e-9
    assert certificate(summed(), facts(10))["epsilon"] is None
    monkeypatch.setattr(secure_sums, "rounding_distance", lambda members, ratio: 1e-10)
    billed = certificate(summed(), facts(10))
    assert billed["epsilon"] > without["epsilon"]
    by_line = {line["adversary"]: line["epsilon"] for line in billed["adversaries"]}
    bare = {line["adversary"]: line["epsilon"] for line in without["adversaries"]}
    assert by_line["cohort"] > bare["cohort"]
    assert by_line["messages"] == bare["messages"]  # a message that is noised, then rounded, is post-processing


@pytest.mark.parametrize("distance", [1e-40, 1e-12, 1e-9, 1e-7])
def test_epsilon_near_a_release_sets_the_right_share_of_delta_aside(distance: float) -> None:
    entries, delta = ((GaussianNoise(1.0), 4),), 1e-5
    found = accountant.epsilon_near(entries, "add_remove", delta, distance).value
    if math.isfinite(found):
        left = accountant.delta_at(entries, "add_remove", found) + (1 + math.exp(found)) * distance
        assert left <= delta * (1 + 1e-9)
    assert found >= accountant.epsilon(entries, "add_remove", delta).value
    assert math.isinf(accountant.epsilon_near(entries, "add_remove", delta, 1e-5).value)


def test_a_ledger_composes_at_a_delta_that_leaves_room_for_the_rounding() -> None:
    limit = Limit(1.0, 1e-5, "client", "zero_out")
    room = limit.delta - limit.proved_at
    grid = SHARES.sum_grid(Everyone(4), None)
    assert 0 < room < 1e-20
    assert 1e12 * grid.rounding * (1 + math.exp(50)) < room
    assert Limit(1.0, 0.0, "client", "zero_out").proved_at == 0.0
