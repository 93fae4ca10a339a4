"""Promises of the composition: never below the truth however small delta is, the same everywhere, never a crash."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.accounting.pld.without_replacement import hockey_stick

from sordino.accounting import accountant, pairs, pld
from sordino.accounting.events import (
    Approximate,
    CappedPoisson,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Shuffled,
    has_bound,
)
from sordino.accounting.pld import gaussian_epsilon
from sordino.errors import PlanError

RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one", "zero_out")
Array = NDArray[np.float64]


# ---- against the closed form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "noise_multiplier"), [(10_000, 100.0), (1_000_000, 3000.0), (3, 0.7)])
@pytest.mark.parametrize("relation", RELATIONS)
def test_everybody_every_round_is_never_below_the_gaussian_at_any_delta(
    count: int, noise_multiplier: float, relation: Relation
) -> None:
    moved = 2 if relation == "replace_one" else 1
    events: list[Event] = [PoissonSampled(1.0, GaussianNoise(noise_multiplier))]
    events += [FixedSampled(1000, 1000, GaussianNoise(noise_multiplier))] if relation == "replace_one" else []
    for event in events:
        for delta in (1e-3, 1e-5, 1e-8, 1e-10, 1e-12, 1e-13, 1e-14, 1e-15, 1e-40):
            truth = gaussian_epsilon(moved * math.sqrt(count) / noise_multiplier, delta)
            found = accountant.bound([(event, count)], relation, delta, rough=True)
            assert found.method == "pld"
            assert truth <= found.value <= 1.003 * truth


def test_without_the_tilt_the_transform_would_decide_epsilon() -> None:
    """Sabotage: theta = 0 proves nothing at 1e-14, because its rounding, which is counted, is as large."""
    pair = pairs.Present(0.01, pairs.Gauss(1.0))
    one = pld.Composition([(pld.losses_on(pair, 1e-3, 1e-24), 1000)])
    assert one.epsilon(1e-14) < 4.56
    assert one.tilted(0.0).epsilon(1e-14) > 5
    assert one.tilted(0.0).epsilon(1e-6) == pytest.approx(one.epsilon(1e-6), rel=1e-3)


def test_the_bound_on_the_transforms_rounding_holds() -> None:
    rng = np.random.default_rng(1)
    for size, count in ((64, 3), (128, 16), (32, 100)):
        law = rng.dirichlet(np.ones(9))
        ours, error = pld._convolved([np.append(law, np.zeros(size - 9))], np.asarray([float(count)]))
        exact = _powered([int(mass * 2**60) for mass in law], count, size)
        scale = sum(int(mass * 2**60) for mass in law) ** count
        off = max(abs(float(one) - other / scale) for one, other in zip(ours, exact, strict=True))
        assert off <= error < 1e-9


def _powered(law: list[int], count: int, size: int) -> list[int]:
    """The law count times with itself on a circle, in whole numbers."""
    found, base = [1] + [0] * (size - 1), law + [0] * (size - len(law))
    while count:
        found = _times(found, base) if count & 1 else found
        base = _times(base, base)
        count >>= 1
    return found


def _times(one: list[int], other: list[int]) -> list[int]:
    size = len(one)
    return [sum(one[j] * other[(k - j) % size] for j in range(size) if one[j]) for k in range(size)]


def test_what_lies_beyond_grid_and_window_is_infinite() -> None:
    pair = pairs.Gauss(1.0)
    cut = pld.losses_on(pair, 0.01, 1e-4)
    assert cut.infinite >= math.exp(float(pair.tails(cut.values[-1:])[0][0]))
    assert float(np.sum(cut.masses)) + cut.infinite == pytest.approx(1, abs=1e-12)
    assert pld.Composition([(cut, 5)]).infinite >= -math.expm1(5 * math.log1p(-cut.infinite))
    assert pld.Composition([(cut, 5)]).epsilon(cut.infinite) == math.inf


# ---- pairs ----------------------------------------------------------------------------------------------------------

EVERY: list[pairs.Pair] = [
    pairs.Gauss(0.7),
    pairs.Exponential(1.3),
    pairs.Response(0.9, 0.01),
    pairs.Present(0.1, pairs.Gauss(1.5)),
    pairs.Absent(0.1, pairs.Gauss(1.5)),
    pairs.Present(0.3, pairs.Exponential(2.0)),
    pairs.Absent(0.3, pairs.Exponential(2.0)),
    pairs.Swapped(0.2, 1.1),
    pairs.Mirrored(0.2, pairs.Gauss(1.1)),
    pairs.Either(0.4, pairs.Gauss(2.0), pairs.Present(0.2, pairs.Gauss(1.0))),
]


@pytest.mark.parametrize("pair", EVERY, ids=str)
def test_tails_are_those_of_a_loss(pair: pairs.Pair) -> None:
    """Both fall from 1, and dP = exp(L) dQ: between two losses P lies between exp(l) Q and exp(l') Q."""
    at = np.linspace(-6, 6, 2401)
    some, other = (np.exp(each) for each in pair.tails(at))
    lost = float(np.exp(pair.tails(np.asarray([1e6]))[0][0]))
    p, q = some[:-1] - some[1:], other[:-1] - other[1:]
    assert some[0] == pytest.approx(1, abs=1e-3)
    assert np.all(p >= -1e-15)
    assert np.all(q >= -1e-15)
    assert np.all(np.exp(at[:-1]) * q - 1e-12 <= p)
    assert np.all(p <= np.exp(at[1:]) * q + 1e-12)
    assert some[-1] >= lost


@pytest.mark.parametrize("pair", EVERY, ids=str)
@pytest.mark.parametrize("step", [0.5, 0.01])
def test_a_grid_only_raises_delta(pair: pairs.Pair, step: float) -> None:
    on_grid = pld.losses_on(pair, step, 1e-12)
    for epsilon in (0.0, 0.03, 0.4, 1.0, 2.5):
        values = on_grid.values
        ours = on_grid.infinite + float(on_grid.masses @ np.maximum(0.0, -np.expm1(np.minimum(epsilon - values, 0.0))))
        truth = float(pld.single_deltas(pair, np.asarray([epsilon]))[0])
        assert truth - 1e-12 <= ours
        assert ours <= truth + 0.02 if step == 0.01 else True


@pytest.mark.parametrize("rate", [1e-4, 0.05, 0.7, 1.0])
@pytest.mark.parametrize("noise_multiplier", [0.3, 2.0, 40.0])
def test_the_pair_of_fixed_cohorts_has_the_curve_of_its_theorem(rate: float, noise_multiplier: float) -> None:
    at = np.asarray([-3.0, -0.2, -0.01, 0.0, 0.01, 0.2, 3.0])
    pair = pairs.Mirrored(rate, pairs.Gauss(2 / noise_multiplier))
    curve = hockey_stick(at, rate=rate, noise_multiplier=noise_multiplier)
    assert np.allclose(pld.single_deltas(pair, at), curve, rtol=1e-7, atol=1e-13)


# ---- the same everywhere --------------------------------------------------------------------------------------------

ASK = """
import json
from sordino.accounting import accountant
from sordino.accounting.events import *
cases = [(PoissonSampled(0.01, GaussianNoise(1.0)), 1000, d) for d in (1e-5, 1e-12, 1e-14)]
cases += [(PoissonSampled(1.0, GaussianNoise(100.0)), 10000, 1e-14), (LaplaceNoise(100.0), 10000, 1e-15)]
print(json.dumps([accountant.bound([(e, n)], "add_remove", d).value for e, n, d in cases]))
"""


def test_a_machine_without_wide_instructions_finds_the_same_to_nine_digits() -> None:
    """The transform rounds otherwise without AVX; what it rounds to no longer decides."""
    wide = "AVX2 FMA3 X86_V3 X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"

    def ask(**more: str) -> list[float]:
        code = [sys.executable, "-W", "ignore", "-c", ASK]
        done = subprocess.run(code, capture_output=True, text=True, check=True, env={**os.environ, **more}, timeout=300)
        found: list[float] = json.loads(done.stdout)
        return found

    assert ask() == pytest.approx(ask(NPY_DISABLE_CPU_FEATURES=wide, OPENBLAS_CORETYPE="Nehalem"), rel=1e-9)


# ---- whatever is asked ----------------------------------------------------------------------------------------------

sizes = st.floats(-300, 300).map(lambda power: 10.0**power)
noise = st.one_of(st.builds(GaussianNoise, sizes), st.builds(LaplaceNoise, sizes))
gaussian = st.builds(GaussianNoise, sizes)
rates = st.floats(-12, 0).map(lambda power: 10.0**power)
anything = st.one_of(
    noise,
    st.builds(PoissonSampled, rates, noise),
    st.builds(CappedPoisson, rates, st.just(1000), st.integers(1, 1000), gaussian),
    st.builds(FixedSampled, st.just(10**9), st.integers(1, 10**9), gaussian),
    st.builds(Shuffled, st.sampled_from([1, 50, 10**5, 10**9]), noise),
    st.builds(Approximate, st.floats(0, 1e300), st.floats(0, 1)),
)
counts = st.floats(0, 9).map(lambda power: round(10.0**power))
deltas = st.one_of(st.just(0.0), st.floats(-300, -0.31).map(lambda power: 10.0**power))


@given(first=anything, second=anything, count=counts, more=st.sampled_from([0, 1, 10**6]), delta=deltas,
       relation=st.sampled_from(RELATIONS))  # fmt: skip
@example(PoissonSampled(0.01, GaussianNoise(1e-9)), GaussianNoise(1.0), 10, 0, 1e-5, "add_remove")
@example(PoissonSampled(0.01, GaussianNoise(1e160)), GaussianNoise(1.0), 10, 0, 1e-5, "add_remove")
@example(FixedSampled(10**9, 10**8, GaussianNoise(1e-5)), GaussianNoise(1.0), 10**9, 0, 1e-5, "replace_one")
@example(GaussianNoise(1e-300), GaussianNoise(1e300), 10**9, 1, 1e-300, "replace_one")
@settings(max_examples=25, deadline=None)
def test_any_question_gets_a_number_or_one_sentence(
    first: Event, second: Event, count: int, more: int, delta: float, relation: Relation
) -> None:
    if not (has_bound(first, relation) and has_bound(second, relation)):
        with pytest.raises(PlanError, match=r"^[^\n]*$"):
            accountant.bound([(first, 1), (second, 1)], relation, delta)
        return
    found = accountant.epsilon([(first, count), (second, more)], relation, delta)
    assert found.value >= 0
    assert not math.isnan(found.value)


@pytest.mark.parametrize("noise_multiplier", [1e-308, 1e-160, 1e-9, 1e-5, 1e-4, 1e4, 1e9, 1e160, 1e308])
@pytest.mark.parametrize("relation", RELATIONS)
def test_absurd_multipliers_are_in_order(noise_multiplier: float, relation: Relation) -> None:
    """Sampled rounds cost no more than rounds of everybody, which have a closed form; none crashes."""
    everybody = accountant.bound([(GaussianNoise(noise_multiplier / 2), 7)], relation, 1e-5).value
    for event in (
        PoissonSampled(0.1, GaussianNoise(noise_multiplier)),
        CappedPoisson(0.1, 50, 8, GaussianNoise(noise_multiplier)),
    ):
        assert 0 <= accountant.epsilon([(event, 7)], relation, 1e-5).value <= everybody * (1 + 1e-9) + 1e-12
