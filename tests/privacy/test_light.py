"""Promises of the light import: the same numbers to the bit, torch and scipy.stats left alone, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy import signal, stats

from sordino.privacy.light import Later, Normal, fftconvolve, light_scipy

AT = np.concatenate([np.linspace(-40, 40, 4001), [0.0, -0.0, np.inf, -np.inf, 1e-300, -1e300, np.nan]])


def python(code: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("scale", [1.0, 0.3, 17.0, 1e-3, 1e6])
def test_the_normal_distribution_is_scipys_to_the_bit(scale: float) -> None:
    ours, theirs = Normal()(scale=scale), stats.norm(scale=scale)
    for figure in ("cdf", "logcdf"):
        for x in (AT, AT.tolist(), 0.3, np.float64(-2)):
            assert np.array_equal(getattr(ours, figure)(x), getattr(theirs, figure)(x), equal_nan=True), figure
    for q in (1e-300, 1e-16, 0.3, 0.5, 1 - 1e-16, 0.0, 1.0):
        assert ours.ppf(q) == theirs.ppf(q)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 7), (2, 2), (13, 1000), (4096, 4096), (99_991, 31)])
def test_the_convolution_is_scipys_to_the_bit(m: int, n: int) -> None:
    rng = np.random.default_rng(m * n)
    a, b = rng.dirichlet(np.ones(m)), rng.dirichlet(np.ones(n))
    assert np.array_equal(fftconvolve(a, b), signal.fftconvolve(a, b))
    assert np.array_equal(fftconvolve(a.tolist(), b), signal.fftconvolve(a.tolist(), b))


def test_epsilon_is_the_same_with_and_without_it() -> None:
    code = """
import json, sys
{first}
from sordino.privacy import accounting
from sordino.parts.events import GaussianNoise, PoissonSampled
cases = [(((PoissonSampled(0.05, GaussianNoise(z)), n),), relation) for z in (0.7, 2.0) for n in (1, 100)
         for relation in ("add_remove", "zero_out")]
print(json.dumps([accounting.bound(entries, relation, 1e-5).value for entries, relation in cases]))
"""
    light, heavy = python(code.format(first="")), python(code.format(first="import scipy.stats, scipy.signal"))
    assert light == heavy


def test_an_epsilon_needs_neither_torch_nor_the_heavy_half_of_scipy() -> None:
    code = """
import json, sys
from sordino.cli import main
sys.argv = "sordino epsilon --sampler poisson --population 1000 --cohort 50 --rounds 30 --multiplier 2 --json".split()
try:
    main()
except SystemExit as stop:
    assert not stop.code
names = "torch", "scipy.stats", "scipy.signal", "scipy.optimize._optimize"
print(json.dumps({"loaded": [name for name in names if name in sys.modules]}))
"""
    assert python(code) == {"loaded": []}


def test_the_real_modules_are_there_afterwards() -> None:
    code = """
import json, sys
import sordino.privacy.accounting
import scipy, scipy.optimize
from scipy import signal, stats
real = [stats.__spec__ is not None, signal.fftconvolve([1, 2], [1, 1]).tolist()]
real += [stats.norm.ppf(0.5), scipy.optimize.brentq(float, -1, 1)]
print(json.dumps({"real": real}))
"""
    assert python(code) == {"real": [True, [1, 3, 2], 0.0, 0.0]}


def test_what_is_asked_for_is_loaded_even_while_it_stands_in() -> None:
    code = """
import json
from sordino.privacy.light import light_scipy
with light_scipy():
    from scipy import optimize, stats
    found = [optimize.brentq(float, -1, 1), int(stats.binom.support(2, 0.5)[1])]
print(json.dumps({"found": found}))
"""
    assert python(code) == {"found": [0.0, 2]}


def test_a_module_that_is_loaded_already_stays_as_it_is() -> None:
    with light_scipy():
        from scipy import stats as inside

        assert inside is stats
        assert not isinstance(inside, Later)
