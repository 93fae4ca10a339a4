"""Kept bins: the deterministic price of a secret bin a client, kept over passes, with independent and banded noise."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests import tiny
from tests.commands import federation, lines, sordino
from tests.faults import Killed, dying

import sordino as so
from sordino import codec, parts
from sordino.accounting import accountant, calibration
from sordino.accounting.composition import Line, Participation, client_cost
from sordino.accounting.events import Allocated, Event, GaussianNoise, KeptBins, PoissonSampled, Unprotected
from sordino.accounting.kept_bins import bin_rows, gram_of_bins, kept_bins, largest_entries
from sordino.accounting.pairs import Both, Gauss
from sordino.accounting.sensitivity import Patterns
from sordino.audit.sampling_and_sensitivity import cohort_tests
from sordino.config import load_config
from sordino.parts.samplers import PassDraws
from sordino.rng import Secure
from sordino.runs.execution import execute
from sordino.runs.folder import RunFolder

Array = NDArray[np.float64]
ROUNDS, BINS, DELTA = 100, 10, 1e-5
WORK = np.ones(ROUNDS)
TABLE = {  # noise of the models relative to Poisson sampling with independent noise: bands 3, 5, 10
    1.0: (1.14, 1.12, 1.09),
    2.0: (1.21, 1.11, 1.03),
    4.0: (1.17, 1.01, 0.91),
    8.0: (1.05, 0.89, 0.76),
}
MONTE_CARLO = {1.0: (1.01, 1.01, 1.05), 2.0: (1.05, 0.97, 0.99), 4.0: (1.08, 0.93, 0.87), 8.0: (1.03, 0.86, 0.74)}


@cache
def fitted(bands: int) -> parts.Strategy:
    return parts.Banded(bands).fitted(Patterns(ROUNDS, ROUNDS // BINS, BINS, True), lambda: WORK)


@cache
def gram(bands: int) -> Array:
    return gram_of_bins(bin_rows(np.asarray(np.linalg.inv(fitted(bands).noise_matrix(ROUNDS)), np.float64), BINS))


def model_noise(strategy: parts.Strategy) -> float:
    return float(np.sqrt(np.mean(strategy.errors(ROUNDS, WORK))))


@cache
def poisson_noise(epsilon: float) -> float:
    def line(z: float) -> Line:
        return Line("models", "add_remove", ((PoissonSampled(1 / BINS, GaussianNoise(z)), ROUNDS),))

    return calibration.noise_multiplier(line, epsilon, DELTA) * model_noise(parts.Identity())


def epsilon(event: Event, delta: float = DELTA) -> float:
    return accountant.bound(((event, 1),), "add_remove", delta).value


@pytest.mark.parametrize(("target", "place"), [(target, place) for target in TABLE for place in range(3)])
def test_the_rigorous_column_is_reproduced(target: float, place: int) -> None:
    """The noise of the table costs at most epsilon, and 1% less noise costs more."""
    bands, ratio = (3, 5, 10)[place], TABLE[target][place]
    scale = poisson_noise(target) / model_noise(fitted(bands))
    assert epsilon(kept_bins(gram(bands), (ratio + 0.006) * scale)) <= target
    assert epsilon(kept_bins(gram(bands), (ratio - 0.012) * scale)) > target
    assert ratio >= MONTE_CARLO[target][place]


# ---- against the law itself ------------------------------------------------------------------------------------------


def simulated(matrix: Array, s: float, at: float, trials: int = 200_000, seed: int = 0) -> tuple[float, float]:
    """Delta of the run at `at` if the client is removed, all messages alike, by sampling; and its standard error."""
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(matrix + 1e-12 * np.eye(len(matrix)))
    drawn = rng.standard_normal((trials, len(matrix))) @ root.T / s
    drawn += matrix[rng.integers(len(matrix), size=trials)] / s**2 - matrix.diagonal() / (2 * s**2)
    loss = np.logaddexp.reduce(drawn, axis=1) - math.log(len(matrix))
    gains = np.maximum(-np.expm1(np.minimum(at - loss, 0.0)), 0.0)
    return float(gains.mean()), float(gains.std() / math.sqrt(trials))


@pytest.mark.parametrize("bands", [3, 10])
@pytest.mark.parametrize("s", [3.0, 8.0])
def test_the_bound_is_never_below_the_simulated_run(bands: int, s: float) -> None:
    event = kept_bins(gram(bands), s)
    for at in (0.5, 1.5):
        mean, error = simulated(gram(bands), s, at)
        assert accountant.delta_at(((event, 1),), "add_remove", at) >= mean - 4 * error


def test_without_the_common_part_the_simulated_run_refutes_the_price() -> None:
    """The sabotage: bins taken as if their columns did not overlap."""
    event = kept_bins(gram(10), 8.0)
    assert isinstance(event, KeptBins)
    wrong = replace(event, shared=(math.inf,) * len(event.kept))
    mean, error = simulated(gram(10), 8.0, 0.5)
    assert accountant.delta_at(((wrong, 1),), "add_remove", 0.5) < mean - 4 * error


def test_an_adversary_who_turns_messages_by_what_was_released_gains_nothing() -> None:
    """T = 6, 2 bins, 3 bands; the client's message is +1 or -1 by the sign of the last release."""
    rng, s, at, trials = np.random.default_rng(1), 1.5, 0.3, 400_000
    matrix = np.tril(sum(np.diag(np.full(6 - k, c), -k) for k, c in enumerate((1.0, 0.6, 0.4))))
    event = kept_bins(gram_of_bins(bin_rows(matrix, 2)), s)
    place, logs = rng.integers(2, size=trials), np.zeros((trials, 2))
    sent, last = np.zeros((trials, 2, 6)), np.ones(trials)
    for t in range(6):
        sent[:, t % 2, t] = np.where(last >= 0, 1.0, -1.0)  # of bin t mod 2, as a function of the releases before
        means = sent @ matrix[t]
        y = means[np.arange(trials), place] + s * rng.standard_normal(trials)
        logs += (means * y[:, None] - means**2 / 2) / s**2
        last = y
    gains = np.maximum(-np.expm1(np.minimum(at - (np.logaddexp(*logs.T) - math.log(2)), 0.0)), 0.0)
    assert accountant.delta_at(((event, 1),), "add_remove", at) >= gains.mean() - 4 * gains.std() / math.sqrt(trials)


def test_convex_functions_grow_with_every_covariance() -> None:
    """Kahane's inequality for two terms, by quadrature, for both orders of neighbours."""
    x, w = np.polynomial.hermite_e.hermegauss(80)
    first, second, weight = *np.meshgrid(x, x, indexing="ij"), np.outer(w, w) / (2 * math.pi)

    def expected(cov: Array, at: float) -> tuple[float, float]:
        root = np.linalg.cholesky(cov)
        one, two = root[0, 0] * first, root[1, 0] * first + root[1, 1] * second
        ratio = (np.exp(one - cov[0, 0] / 2) + np.exp(two - cov[1, 1] / 2)) / 2
        smooth = 0.05  # of the kink, so that the quadrature is exact; also convex
        removed = np.logaddexp(0.0, (ratio - math.exp(at)) / smooth) * smooth
        added = np.logaddexp(0.0, (1 - math.exp(at) * ratio) / smooth) * smooth
        return float((weight * removed).sum()), float((weight * added).sum())

    base = np.array([[0.5, 0.1], [0.1, 0.4]])
    for more in ([[0.1, 0.0], [0.0, 0.0]], [[0.0, 0.2], [0.2, 0.0]], [[0.1, 0.3], [0.3, 0.2]]):
        for at in (0.0, 0.4):
            low, high = expected(base, at), expected(base + np.array(more), at)
            assert high[0] > low[0]
            assert high[1] > low[1]


# ---- the event -------------------------------------------------------------------------------------------------------


def test_independent_noise_is_one_allocation_at_the_noise_of_all_passes() -> None:
    release = parts.CentralNoise(parts.Gaussian(2.0))
    event = release.kept_bins_event(10, 100)
    assert isinstance(event, KeptBins)
    whole = Allocated(10, GaussianNoise(2.0 / math.sqrt(10)))
    assert epsilon(event) == pytest.approx(epsilon(whole), rel=1e-6)
    assert epsilon(event) >= epsilon(whole) * (1 - 1e-12)
    assert parts.CentralNoise(parts.Laplace(2.0)).kept_bins_event(10, 100) is None


def test_the_largest_entries_are_those_of_evenly_spaced_bins() -> None:
    matrix = np.array([[4.0, 3, 1, 2], [3, 5, 3, 1], [1, 3, 4, 3], [2, 1, 3, 4]])
    assert largest_entries(matrix, 4) == (5.0, 3.0)
    assert largest_entries(matrix, 2) == (5.0, 1.0)
    assert largest_entries(matrix, 1) == (5.0, 0.0)


def test_signs_of_the_matrix_do_not_lower_the_price() -> None:
    matrix = np.asarray(np.linalg.inv(fitted(3).noise_matrix(20)), dtype=np.float64)
    turned = matrix * np.where(np.arange(20) % 2, 1.0, -1.0)
    assert np.allclose(bin_rows(matrix, 4), bin_rows(turned, 4))


def test_the_product_of_two_pairs_is_their_composition() -> None:
    event = KeptBins(4, GaussianNoise(1.0), (4,), (1.5,), (2.0,))
    (orders,) = event.pairs("zero_out")
    assert isinstance(orders.removed, Both)
    both, at = orders.removed, np.array([0.5, 1.0, 2.0])
    some, other = both.tails(at)
    deltas = np.exp(some) - np.exp(at + other)
    assert np.allclose(deltas, accountant.deltas_at(((event, 1),), "zero_out", list(at)), rtol=2e-2)
    assert both.factors == (Gauss(0.5), both.second)


def test_a_replaced_client_and_one_who_knows_the_bin_cost_the_run_without_amplification() -> None:
    event = kept_bins(gram(5), 6.0)
    assert isinstance(event, KeptBins)
    assert event.pairs("replace_one") == event.event.pairs("replace_one")
    assert epsilon(event) < epsilon(event.event)
    assert event.mu("zero_out") == event.event.mu("zero_out")


def test_an_event_is_written_and_read_and_wrong_ones_are_refused() -> None:
    event = kept_bins(gram(3), 6.0)
    assert codec.read(Event, codec.dump(event)) == event
    for wrong in ((1,), (11,)):
        with pytest.raises(so.errors.ConfigError, match="kept bins"):
            KeptBins(10, GaussianNoise(1.0), wrong, (1.0,), (1.0,))
    with pytest.raises(so.errors.ConfigError, match="without noise"):
        KeptBins(10, GaussianNoise(1.0), (5,), (0.0,), (1.0,))


# ---- sampler and cost ------------------------------------------------------------------------------------------------


def test_bins_are_kept_and_every_client_is_in_one() -> None:
    clients = parts.KeptBins(500, 7)
    drawn = [clients.draw(t, np.random.default_rng(3)) for t in range(21)]
    assert all(np.array_equal(drawn[t], drawn[t + 7]) for t in range(14))
    assert sorted(np.concatenate(drawn[:7])) == list(range(500))
    assert 30 < min(map(len, drawn)) < max(map(len, drawn)) < 120


def test_for_release_the_bins_survive_a_resumption_and_differ_from_run_to_run() -> None:
    clients = parts.KeptBins(500, 7)
    first = PassDraws(clients, Secure())
    drawn = [first.draw(t) for t in range(10)]
    again = PassDraws(clients, Secure(), first.key_after(9))
    assert np.array_equal(again.draw(10), drawn[3])
    assert not np.array_equal(PassDraws(clients, Secure()).draw(0), drawn[0])


def test_the_other_lines_are_not_amplified_and_a_repeated_round_is_a_release_more() -> None:
    clients, release = parts.KeptBins(500, BINS), parts.CorrelatedNoise(parts.Gaussian(8.0), fitted(5))
    cost = client_cost(clients, release, Participation.planned(clients, ROUNDS))
    turns = parts.RoundRobin(500, 50)
    in_turn = client_cost(turns, release, Participation.planned(turns, ROUNDS))
    assert cost.line("cohort").entries == in_turn.line("cohort").entries
    assert cost.line("messages").entries[0][0] == Unprotected()
    again = client_cost(clients, release, Participation.planned(clients, ROUNDS, (17,)))
    whole, repeated = again.line("models").entries
    assert whole == cost.line("models").entries[0]
    assert repeated == (release.event(), 1)
    by_budget = replace(Participation.planned(clients, ROUNDS), end_reveals_cohorts=True)
    assert client_cost(clients, release, by_budget).line("models").entries == cost.line("cohort").entries


def test_a_plan_is_calibrated_certified_and_assumes_secret_bins() -> None:
    rng = np.random.default_rng(0)
    import torch

    users = [(torch.from_numpy(rng.standard_normal((4, 3), np.float32)), torch.tensor([0, 1, 0, 1])) for _ in range(20)]
    task = so.Task.of(torch.nn.Linear(3, 2), users, test=users[0])
    plan = so.recipes.dp_ftrl(
        rounds=8, clients=parts.KeptBins(20, 4), strategy=parts.Banded(6), epochs=1, batch=4, lr=0.1, clip_norm=1.0,
        noise_multiplier=4.0,
    ).fitted()  # fmt: skip
    plan = so.calibrate(plan, epsilon=2.0, delta=1e-3)
    found = so.train(plan, task, delta=1e-3, on_round=lambda line: None).certificate
    models, cohort = found["adversaries"][0], found["adversaries"][1]
    assert 1.95 <= models["epsilon"] <= 2.0 < cohort["epsilon"]
    assert any("bins" in each for each in found["assumptions"])


def test_it_is_refused_where_cohorts_are_shown() -> None:
    for release in (parts.LocalNoise(parts.Gaussian(1.0)), parts.NoiseShares(1.0, at_least=2)):
        with pytest.raises(so.errors.PlanError, match="hides who takes part"):
            tiny.plan(clients=parts.KeptBins(6, 2), release=release)
    with pytest.raises(so.errors.PlanError, match="bins = 1"):
        parts.KeptBins(6, 1)


def test_the_audit_examines_separation_and_says_what_it_does_not() -> None:
    found = cohort_tests(tiny.plan(clients=parts.KeptBins(60, 4), rounds=32))
    assert [one for one in found if one.examined and not one.passed] == []
    assert any("secret bins" in one.question for one in found)


@pytest.mark.parametrize("noise", ["simulation", "secure"])
def test_a_killed_run_keeps_its_bins_pays_for_a_repeated_round_and_certifies(noise: str, tmp_path: Path) -> None:
    changes = [
        ("rounds = 4", "rounds = 6"),
        ('kind = "poisson", population = 60, rate = 0.5', 'kind = "kept_bins", population = 60, bins = 3'),
    ]
    changes += [("[run]", '[privacy]\nnoise = "secure"\n\n[run]')] if noise == "secure" else []
    config = load_config(federation(tmp_path, *changes))
    with dying() as system:
        whole = execute(config, tmp_path / "whole")
    assert [one["count"] for one in whole.certificate["adversaries"][0]["events"]] == [1]
    paid = set()
    for at in range(system.done // 3, system.done - 20, 53):
        out = tmp_path / f"run{at}"
        with pytest.raises(Killed), dying(at, "after"):
            execute(config, out)
        done = execute(config, out, resume=True)
        assert RunFolder.open(out).certify() == done.certificate
        repeats = len(lines(out / "charges.jsonl")) - 6
        line = done.certificate["adversaries"][0]
        assert [one["count"] for one in line["events"]] == [1, *([repeats] if repeats else [])]
        assert (line["epsilon"] > whole.certificate["epsilon"]) == (repeats > 0)
        paid.add(repeats)
    assert len(paid) >= 1


def test_the_calculator_prices_bands_and_names_what_is_missing() -> None:
    words = ("--sampler", "kept_bins", "--bins", 10, "--passes", 2, "--noise-multiplier", 4, "--delta", 1e-5)
    alone, banded = (sordino("epsilon", *words, *more, "--json").json for more in ((), ("--bands", 3)))
    assert alone["adversaries"][0]["epsilon"] < alone["adversaries"][1]["epsilon"]
    assert banded["adversaries"][0]["epsilon"] < banded["adversaries"][1]["epsilon"]
    assert "--bins" in sordino("epsilon", "--sampler", "kept_bins", "--noise-multiplier", 4).sentence
    assert "--bands" in sordino("epsilon", "--sampler", "full", "--population", 9, "--bands", 3).sentence
