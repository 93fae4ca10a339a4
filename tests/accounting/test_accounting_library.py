"""The third opinion, dp_accounting 0.6.0: equal to ours where it is right, and where it is not, pinned."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event as de
from dp_accounting import rdp
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as plds
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant

import sordino
from sordino.accounting import accountant, renyi
from sordino.accounting.accountant import epsilon, rdp_epsilon
from sordino.accounting.events import FixedSampled, GaussianNoise, LaplaceNoise, PoissonSampled
from sordino.accounting.pld import gaussian_epsilon

SOURCE = Path(sordino.__file__).parent
REMOVE, REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE


def library_rdp(event: Any, relation: NeighboringRelation, delta: float, count: int = 1) -> float:
    return float(rdp.RdpAccountant(neighboring_relation=relation).compose(event, count).get_epsilon(delta))


def test_the_library_is_the_version_that_was_examined() -> None:
    assert version("dp-accounting") == "0.6.0"


def imports(file: Path) -> set[str]:
    """The packages that a file imports anywhere, inside functions too."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in names}


def test_no_file_of_ours_imports_the_library() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 30
    found = [str(file.relative_to(SOURCE)) for file in files if "dp_accounting" in imports(file)]
    assert found == []


def test_an_epsilon_needs_neither_torch_nor_the_library_nor_the_heavy_half_of_scipy() -> None:
    code = """
import sys
from sordino.cli import main
sys.argv = "sordino epsilon --sampler poisson --population 1000 --cohort 50".split()
sys.argv += "--rounds 30 --noise-multiplier 2 --json".split()
try:
    main()
except SystemExit as stop:
    assert not stop.code
names = "torch", "dp_accounting", "scipy.stats", "scipy.signal", "scipy.optimize"
print([name for name in names if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- Renyi under replace-one ----------------------------------------------------------------------------------------


def test_the_librarys_rdp_forgets_that_replacing_moves_a_gaussian_by_two() -> None:
    wrong = library_rdp(de.GaussianDpEvent(2.0), REPLACE, 1e-5)
    assert wrong == pytest.approx(2.17, abs=0.005)
    assert wrong == library_rdp(de.GaussianDpEvent(2.0), REMOVE, 1e-5)
    found = epsilon([(GaussianNoise(2.0), 1)], "replace_one", 1e-5)
    assert found.value == pytest.approx(4.38, abs=0.005)
    assert found.rdp == pytest.approx(library_rdp(de.GaussianDpEvent(1.0), REMOVE, 1e-5))
    assert found.value > wrong


def test_the_librarys_rdp_forgets_that_replacing_moves_laplace_by_two() -> None:
    assert library_rdp(de.LaplaceDpEvent(2.0), REPLACE, 1e-5) == library_rdp(de.LaplaceDpEvent(2.0), REMOVE, 1e-5)
    ours = rdp_epsilon([(LaplaceNoise(2.0), 1)], "replace_one", 1e-5)
    assert ours == pytest.approx(library_rdp(de.LaplaceDpEvent(1.0), REMOVE, 1e-5))


def test_the_librarys_rdp_of_fixed_cohorts_is_below_a_certified_lower_bound() -> None:
    event = de.SampledWithoutReplacementDpEvent(2000, 100, de.GaussianDpEvent(1.8))
    assert library_rdp(event, REPLACE, 2000**-1.1, 200) < 4.60
    found = epsilon([(FixedSampled(2000, 100, GaussianNoise(1.8)), 200)], "replace_one", 2000**-1.1)
    assert found.rdp is not None
    assert 4.60 < found.value < found.rdp
    doubled = de.SampledWithoutReplacementDpEvent(2000, 100, de.GaussianDpEvent(0.9))
    assert found.rdp < library_rdp(doubled, REPLACE, 2000**-1.1, 200)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.9])
@pytest.mark.parametrize("noise_multiplier", [0.6, 2.0, 30.0])
def test_divergences_of_sampled_noise_are_the_librarys(rate: float, noise_multiplier: float) -> None:
    ours = renyi.poisson_gaussian(rate, 1 / noise_multiplier)
    whole = np.flatnonzero(renyi.ORDERS % 1 == 0)[::7]  # its other orders are above the truth, or left out
    theirs = rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian(
        rate, noise_multiplier, renyi.ORDERS[whole]
    )
    assert ours[whole] == pytest.approx(theirs, rel=1e-6, abs=2e-9)
    moments = (renyi.ORDERS - 1) * ours  # convex in the order
    slopes = np.diff(moments) / np.diff(renyi.ORDERS)
    assert np.all(np.diff(slopes) >= -1e-6 * np.abs(slopes[:-1]) - 1e-6)


@pytest.mark.parametrize("size", [1e-3, 0.4, 3.0])
def test_divergences_of_plain_noise_are_the_librarys(size: float) -> None:
    for event, theirs in ((GaussianNoise(1 / size), de.GaussianDpEvent), (LaplaceNoise(1 / size), de.LaplaceDpEvent)):
        found = rdp_epsilon([(event, 7)], "add_remove", 1e-5)
        assert found == pytest.approx(library_rdp(theirs(1 / size), REMOVE, 1e-5, 7), rel=1e-3)


# ---- its loss distributions -----------------------------------------------------------------------------------------

SMALL = PoissonSampled(128 / 60_000, GaussianNoise(20.0))


def library_pld(rate: float, noise_multiplier: float, count: int, grid: float, delta: float) -> float:
    once = plds.from_gaussian_mechanism(noise_multiplier, value_discretization_interval=grid, sampling_prob=rate)
    return float(once.self_compose(count).get_epsilon_for_delta(delta))


def test_a_coarse_grid_triples_a_small_epsilon_and_ours_does_not() -> None:
    found = epsilon([(SMALL, 23_450)], "add_remove", 1e-5)
    assert found.value == pytest.approx(0.047, abs=0.001)
    assert library_pld(128 / 60_000, 20.0, 23_450, 1e-3, 1e-5) > 3 * found.value
    assert found.grid is not None
    assert accountant.bound([(SMALL, 23_450)], "add_remove", 1e-5, found.grid / 2).value == pytest.approx(
        found.value, rel=0.001
    )


def test_a_grid_that_is_not_refined_would_be_noticed() -> None:
    assert accountant.bound([(SMALL, 23_450)], "add_remove", 1e-5, 1e-3).value > 3 * 0.047


def test_the_rounding_of_the_librarys_transform_falls_below_the_truth_and_ours_does_not() -> None:
    truth = gaussian_epsilon(1.0, 1e-14)  # 10,000 rounds of everybody at noise multiplier 100
    assert library_pld(1.0, 100.0, 10_000, 2.5e-4, 1e-14) < 0.98 * truth
    found = accountant.bound([(PoissonSampled(1.0, GaussianNoise(100.0)), 10_000)], "add_remove", 1e-14)
    assert found.method == "pld"
    assert truth <= found.value <= 1.001 * truth


@pytest.mark.parametrize("noise_multiplier", [0.6, 3.0])
def test_every_grid_is_above_the_next_finer_one(noise_multiplier: float) -> None:
    entries = ((PoissonSampled(0.02, GaussianNoise(noise_multiplier)), 500),)
    found = [accountant.bound(entries, "add_remove", 1e-5, grid).value for grid in (1e-2, 4e-3, 1e-3, 2.5e-4)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


@pytest.mark.parametrize("count", [2, 60, 1000])
@pytest.mark.parametrize(("rate", "noise_multiplier"), [(0.02, 0.7), (0.3, 2.0), (0.9, 20.0)])
def test_on_the_same_grid_ours_is_the_librarys_to_a_millionth_from_above(
    rate: float, noise_multiplier: float, count: int
) -> None:
    grid, delta = 2e-3, 1e-5
    theirs = library_pld(rate, noise_multiplier, count, grid, delta)
    sampled = PoissonSampled(rate, GaussianNoise(noise_multiplier))
    ours = accountant.bound([(sampled, count)], "add_remove", delta, grid).value
    assert theirs * (1 - 1e-9) <= ours <= theirs * (1 + 1e-6)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize(
    "event",
    [
        de.SampledWithReplacementDpEvent(100, 10, de.GaussianDpEvent(1.0)),
        de.PoissonSampledDpEvent(0.1, de.PoissonSampledDpEvent(0.01, de.GaussianDpEvent(0.8))),
    ],
    ids=["with replacement", "nested poisson"],
)
def test_the_library_refuses_what_we_do_not_offer(event: Any, relation: NeighboringRelation) -> None:
    assert not rdp.RdpAccountant(neighboring_relation=relation).supports(event)
    assert not PLDAccountant(relation).supports(event)
