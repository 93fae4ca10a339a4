"""Promises of the theorems' prescriptions: formulas by hand, exponents, and refusals outside their range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny import mlp, noise, seeded
from torch import nn

from sordino.errors import ConfigError, SideConditionError
from sordino.parts.server_optimizers import Accelerated, Average, Sgd, Stages
from sordino.task import Task
from sordino_papers import theory
from sordino_papers.theory import Federation, Prescription, Upload
from sordino_papers.theory import local_noise as silo
from sordino_papers.theory.lower_bounds import shuffled_round

LOOSE = Federation(
    records=1000,
    population=25,
    cohort=16,
    dimension=50,
    epsilon=1.0,
    delta=1e-6,
    clip_norm=2.0,
    distance=10.0,
    smoothness=0.25,
)
STRONG = replace(LOOSE, convexity=0.01)
SMOOTHED = replace(LOOSE, smoothness=math.inf)
Rule = Callable[[Federation], Prescription]


def exponent(rule: Rule, f: Federation, field: str, of: str, factor: float = 16.0) -> float:
    """How a figure grows with a field: the slope in logarithms between f and `factor` times as much."""
    kind = type(getattr(f, field))
    more = replace(f, **{field: kind(getattr(f, field) * factor)})
    return math.log(getattr(rule(more), of) / getattr(rule(f), of), factor)


def is_plain(found: Prescription, lr: float) -> bool:
    """Projected steps of this size and a plain average."""
    server = found.server
    assert isinstance(server, Sgd)
    return server == Sgd(lr=server.lr, ball=10.0, average=Average()) and server.lr == pytest.approx(lr)


# ---- paper 001, Theorem 2.1 ------------------------------------------------------------------------------------------


def test_convex_by_hand() -> None:
    """n < epsilon^2 n^2/d = 20000, so R = max(.25*10*sqrt(16*1000)/2, 1000/K) and K >= 1000/(4 sqrt(2R ln 2e6))."""
    found = theory.convex(LOOSE)
    assert found.rounds == math.ceil(max(1.25 * math.sqrt(16000), 1000 / found.batch)) == 334
    assert found.batch == 3  # 1000/(4 sqrt(2*334*14.5087)) = 2.54; 2 would make R = 500 and need 2.08
    xi = math.log(2.5 * 334 / 1e-6) * math.log(2e6) / 1000**2
    q = min(1000, 1 / (50 * xi))
    lr = min(1.0, 10 * math.sqrt(16 * q) / (2 * 334))
    assert is_plain(found, lr)
    assert found.risk == pytest.approx(20 / math.sqrt(16 * q))
    assert found.std == silo.silo_std(epsilon=1.0, delta=1e-6, rounds=334, clip_norm=2.0, records=1000, batch=3)


def test_strongly_convex_by_hand() -> None:
    found = theory.strongly_convex(STRONG, batch=500)
    inside = 0.25 * 100 * 0.01 * 16 * 1e6 / (50 * 4)
    assert found.rounds == math.ceil(200 * math.log(inside)) == 1981
    noise = (8 * 4 / 500 + 50 * found.std**2) / 16
    lr = min(1.0, math.log(max(2, (0.01 * 10 * 1981) ** 2 / noise)) / (0.01 * 1981))
    assert isinstance(found.server, Sgd)
    assert found.server.lr == pytest.approx(lr)
    assert found.server.average is not None
    assert found.server.average.growth == pytest.approx(1 / (1 - 0.01 * lr))
    xi = math.log(2.5 * 1981 / 1e-6) * math.log(2e6) / 1000**2
    assert found.risk == pytest.approx(4 / (0.01 * 16) * (1 / 1000 + 50 * xi))


@pytest.mark.parametrize(("rule", "f", "power"), [(theory.convex, LOOSE, -0.5), (theory.strongly_convex, STRONG, -1.0)])
def test_the_risk_falls_with_the_cohort_as_the_theorem_says(rule: Rule, f: Federation, power: float) -> None:
    many = replace(f, population=10**6)
    assert exponent(rule, many, "cohort", "risk") == pytest.approx(power, abs=0.05)


def test_where_privacy_binds_the_risk_falls_like_one_over_epsilon_n() -> None:
    hard = replace(LOOSE, dimension=10**6, epsilon=0.01, records=10**5)
    assert exponent(theory.convex, hard, "epsilon", "risk") == pytest.approx(-1.0, abs=0.06)
    assert exponent(theory.convex, hard, "records", "risk") == pytest.approx(-1.0, abs=0.06)
    assert exponent(theory.convex, hard, "dimension", "risk") == pytest.approx(0.5, abs=0.06)


def test_the_bound_that_the_proof_ends_with_holds_at_the_prescribed_values() -> None:
    """Equation (27): lr L^2 [R (2/(Mn) + 256 d xi/M) + 8/(MK)] + D^2/(lr R) <= 272 risk."""
    for epsilon in (0.01, 0.1, 1.0, 5.0):
        f = replace(LOOSE, epsilon=epsilon)
        found = theory.convex(f)
        assert isinstance(found.server, Sgd)
        assert isinstance(found.server.lr, float)
        xi = math.log(2.5 * found.rounds / 1e-6) * math.log(2e6) / (1000 * epsilon) ** 2
        inner = found.rounds * (2 / (16 * 1000) + 256 * 50 * xi / 16) + 8 / (16 * found.batch)
        whole = found.server.lr * 4 * inner + 100 / (found.server.lr * found.rounds)
        assert whole <= 272 * found.risk


def test_the_default_batch_is_the_smallest_that_is_proved() -> None:
    found = theory.convex(LOOSE)
    with pytest.raises(SideConditionError, match="batch"):
        theory.convex(LOOSE, batch=found.batch - 1)
    assert theory.convex(LOOSE, batch=found.batch + 1).rounds <= found.rounds


# ---- Theorems 2.2 and 2.4 --------------------------------------------------------------------------------------------


def test_the_smoothing_of_a_non_smooth_loss_by_hand() -> None:
    found = theory.non_smooth(SMOOTHED)
    assert found.theorem == "2.2, convex"
    assert found.smoothing == pytest.approx(2 * math.sqrt(16 * 1000) / 10)
    assert found.rounds == 16000  # M min{n, epsilon^2 n^2/d}
    strong = theory.non_smooth(replace(SMOOTHED, convexity=0.01), batch=100)
    assert strong.smoothing == pytest.approx(0.01 * 16 * 1000)
    assert strong.theorem == "2.2, strongly convex"


def test_the_accelerated_one_needs_the_square_root_of_the_rounds() -> None:
    q = 1e6 / (50 * math.log(1e6))
    found = theory.non_smooth(replace(SMOOTHED, cohort=25), batch=1000, accelerate=True)
    assert found.theorem == "2.4, convex"
    assert found.rounds == math.ceil(math.sqrt(25 * q))  # full batches of everyone: no term of sampling
    assert found.smoothing == pytest.approx(2 * math.sqrt(25 * q) / 10)
    partial = theory.non_smooth(SMOOTHED, batch=10, accelerate=True)
    assert partial.rounds == math.ceil(max(math.sqrt(16 * q), q / 10))
    assert found.rounds < theory.non_smooth(replace(SMOOTHED, cohort=25)).rounds


def test_the_server_of_the_accelerated_one_by_hand() -> None:
    found = theory.accelerated(replace(LOOSE, cohort=25), batch=1000)
    pull = math.sqrt(50 * found.std**2 / 25 / found.rounds) / 20
    assert isinstance(found.server, Accelerated)
    assert found.server.v == pytest.approx(2 * (0.25 + pull))
    assert found.server.weight_decay == pytest.approx(pull)
    assert found.server.ball == 10.0
    assert found.rounds == math.ceil(math.sqrt(0.25 * 10 / 2 * math.sqrt(25 * LOOSE.reach)))
    xi = math.log(2.5 * found.rounds / 1e-6) * math.log(2e6) / 1000**2
    start = 0.25 * 100 / found.rounds**2
    assert found.risk == pytest.approx(start + 20 * math.sqrt(50 * xi / 25))


# ---- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 30, 200, 5000])
@pytest.mark.parametrize("variance", [0.0, 1e-6, 1.0])
def test_the_stages_fill_the_rounds_exactly(rounds: int, variance: float) -> None:
    made = theory.multi_stage(STRONG, rounds, variance)
    assert made.rounds == rounds
    assert isinstance(theory.accelerated(STRONG).server, Stages)


def test_the_stages_by_hand() -> None:
    """beta/mu = 25: 4 sqrt(50) = 28.3; Delta = 20; V^2 = 1e-4: 128e-4 2^(k+1)/(3*.01*20) passes 29 at k = 10."""
    made = theory.multi_stage(STRONG, 29 * 9 + 44 + 10, 1e-4)
    assert [stage.rounds for stage in made.stages] == [29] * 9 + [54]
    curves = [stage.server.v for stage in made.stages if isinstance(stage.server, Accelerated)]
    assert curves[0] == 0.5  # 2 beta
    assert curves[-1] == pytest.approx(max(0.5, math.sqrt(1e-6 * 54 * 55 * 56 * 2**9 / 60)))
    assert curves[-1] > 0.5
    assert all(stage.server.mu == 0.01 for stage in made.stages if isinstance(stage.server, Accelerated))


def test_the_curvature_of_a_stage_minimises_the_bound_of_the_stage() -> None:
    """2 v ||w - w*||^2/(R(R+1)) + 4 V^2 (R+2)/(3 v) with ||w - w*||^2 = 2 Delta/mu: the paper's quotient does not."""
    rounds, variance, delta, mu = 40, 1.0, STRONG.gap, STRONG.convexity

    def bound(v: float) -> float:
        return 4 * v * delta / (mu * rounds * (rounds + 1)) + 4 * variance * (rounds + 2) / (3 * v)

    (stage,) = theory.multi_stage(STRONG, rounds, variance).stages
    assert isinstance(stage.server, Accelerated)
    ours = bound(stage.server.v)
    assert all(ours <= bound(stage.server.v * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    published = max(0.5, math.sqrt(mu * variance / (3 * delta * rounds * (rounds + 1) * (rounds + 2))))
    assert bound(published) > 3 * ours


# ---- Theorems 2.3 and 4.1 --------------------------------------------------------------------------------------------


def test_one_pass_by_hand() -> None:
    found = theory.one_pass(replace(LOOSE, cohort=25))
    batch = (2 / 2.5) ** 0.4 * 1000**0.6 * (50 * math.log(1e6)) ** 0.2 / 25**0.2
    assert found.batch == round(batch)
    assert found.rounds == 1000 // found.batch
    assert found.std == silo.one_pass_std(epsilon=1.0, delta=1e-6, clip_norm=2.0, batch=found.batch)
    order = (4 / found.batch + 50 * found.std**2 / 32) / 25
    assert found.risk == pytest.approx(25 / found.rounds**2 + 10 * math.sqrt(order / found.rounds))


def test_one_pass_has_the_exponents_of_the_theorem() -> None:
    """(8): the private term falls like (epsilon n sqrt(N))^(-4/5), with R like (epsilon n)^(2/5)."""
    calm = replace(LOOSE, cohort=25, deviation=0.0, records=10**6, dimension=10**4)
    assert exponent(theory.one_pass, calm, "epsilon", "risk", 4.0) == pytest.approx(-0.8, abs=0.02)
    assert exponent(theory.one_pass, calm, "records", "risk") == pytest.approx(-0.8, abs=0.02)
    assert exponent(theory.one_pass, calm, "records", "rounds") == pytest.approx(0.4, abs=0.02)


def test_one_pass_for_a_strongly_convex_loss_takes_about_root_kappa_rounds() -> None:
    found = theory.one_pass(replace(STRONG, cohort=25))
    log = math.log(0.01 * 20 * min(1e6 * 25 / (4 * 50 * math.log(1e6)), 1000 * 25 / 4))
    assert found.batch == round(1000 / (5 * log))
    assert isinstance(found.server, Stages)
    assert found.server.rounds == found.rounds


def test_silos_that_are_absent_cost_only_if_they_differ() -> None:
    alike = theory.one_pass(replace(LOOSE, heterogeneity=0.0))
    assert alike.risk < theory.one_pass(replace(LOOSE, heterogeneity=1.0)).risk < theory.one_pass(LOOSE).risk
    everyone = replace(LOOSE, cohort=25)
    assert theory.one_pass(everyone) == theory.one_pass(replace(everyone, heterogeneity=0.0))


MANY = replace(LOOSE, records=10, population=5000, cohort=5000, epsilon=0.5)


def test_shuffled_by_hand() -> None:
    found = theory.shuffled(MANY, constant=2.0)
    assert found.rounds == 10**2 * 5000**2 * 0.25 / 5000 == 125000
    assert found.batch == 1
    logs = math.log(125000 * 5000 / 1e-6) * math.log(125000 / 1e-6) * math.log(1e6)
    q = min(10, (0.5 * 50000) ** 2 / (50 * 5000 * logs))
    assert found.risk == pytest.approx(20 / math.sqrt(5000 * q))
    assert is_plain(found, 10 * math.sqrt(5000 * q) / (2 * 125000))
    assert theory.shuffled(replace(MANY, convexity=0.01), constant=2.0).theorem == "4.1, strongly convex"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: replace(LOOSE, epsilon=0.0), "epsilon = 0"),
        (lambda: replace(LOOSE, delta=1.0), "delta = 1"),
        (lambda: replace(LOOSE, cohort=26), "cohort = 26"),
        (lambda: replace(LOOSE, convexity=-1.0), "convexity"),
        (lambda: replace(LOOSE, convexity=0.5), "convexity <= 0.25"),
        (lambda: theory.convex(SMOOTHED), "smoothness = inf"),
        (lambda: theory.one_pass(SMOOTHED), "smoothness = inf"),
        (lambda: theory.strongly_convex(LOOSE), "convexity = 0"),
        (lambda: theory.convex(LOOSE, batch=1001), "batch = 1001"),
        (lambda: theory.convex(replace(LOOSE, epsilon=15.0)), "epsilon <= 14.51"),
        (lambda: theory.one_pass(replace(LOOSE, epsilon=200.0)), "epsilon <= 110.5"),
        (lambda: theory.one_pass(replace(LOOSE, epsilon=0.001)), "batch <= 1000"),
        (lambda: theory.shuffled(LOOSE, constant=1.0), "cohort"),
    ],
)
def test_outside_the_range_of_a_theorem_the_answer_is_a_refusal(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(SideConditionError, match=said):
        ask()


def regression(sizes: tuple[int, ...] = (6, 9, 0, 5), model: nn.Module | None = None, loss: str = "mse") -> Task:
    silos = [(noise(size, 3, seed=i) + i, noise(size, seed=10 + i) + i) for i, size in enumerate(sizes)]
    return Task.of(model or nn.Linear(3, 1), silos, loss=loss)


@pytest.mark.parametrize("loss", ["mse", "absolute", "logistic"])
def test_a_linear_model_under_a_convex_loss_is_let_through(loss: str) -> None:
    theory.require_convex(regression(loss=loss))
    theory.require_convex(regression(model=nn.Sequential(nn.Flatten(), nn.Linear(3, 1)), loss=loss))


def test_hidden_layers_and_unknown_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match="linear"):
        theory.require_convex(regression(model=mlp(3, 4, 1)))
    own = replace(regression(), loss=lambda out, y: (out[:, 0] - y).abs().sqrt())
    with pytest.raises(ConfigError, match="your own"):
        theory.require_convex(own)
    with pytest.raises(ConfigError, match="absolute"):
        theory.heterogeneity(regression(loss="absolute"))


# ---- heterogeneity ---------------------------------------------------------------------------------------------------


def test_the_heterogeneity_of_least_squares_is_its_closed_form() -> None:
    """F_i = mean (x w - y)^2 with a column of ones: w* solves sum_i A_i w = sum_i b_i, grad F_i = 2 (A_i w - b_i)."""
    task = regression(model=seeded(nn.Linear(3, 1)))
    pairs = []
    for i in (0, 1, 3):
        x, y = task.clients.records.x[task.clients.rows(i)].double(), task.clients.records.y[task.clients.rows(i)]
        full = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        pairs.append((full.T @ full / len(x), full.T @ y.double() / len(x)))
    best = torch.linalg.solve(torch.stack([a for a, _ in pairs]).sum(0), torch.stack([b for _, b in pairs]).sum(0))
    wanted = sum(float((2 * (a @ best - b)).square().sum()) for a, b in pairs) / 3
    assert theory.heterogeneity(task) == pytest.approx(wanted, rel=1e-6)


def test_silos_with_the_same_records_have_no_heterogeneity() -> None:
    x, y = noise(30, 3), (noise(30, seed=5) > 0).long()
    for loss, classes, target in (("cross_entropy", 2, y), ("logistic", 1, y.float()), ("mse", 1, y.float())):
        task = Task.of(nn.Linear(3, classes), [(x, target)] * 4, loss=loss)
        assert theory.heterogeneity(task) < 1e-15


def test_silos_that_disagree_more_have_more_of_it() -> None:
    x, y = noise(40, 3), noise(40, seed=5)
    shifts = [Task.of(nn.Linear(3, 1), [(x, y + s), (x, y - s)], loss="mse") for s in (0.0, 1.0, 2.0)]
    found = [theory.heterogeneity(task) for task in shifts]
    assert found[0] < 1e-15
    assert found[2] == pytest.approx(4 * found[1], rel=1e-6)


# ---- paper 002 -------------------------------------------------------------------------------------------------------

BOWL = silo.Objective(smoothness=1.0, convexity=0.1, gradient=1.0, heterogeneity=0.1, distance=10.0)
LAPLACE = Upload("laplace", epsilon=3.0, dimension=11, population=5000, cohort=50, sensitivity=1.0)


@pytest.mark.parametrize(
    ("total", "laplace", "gaussian"), [(1, 1, 1), (8, 4, 3), (27, 9, 5), (100, 22, 10), (1000, 100, 32)]
)
def test_the_local_steps_of_the_rule(total: int, laplace: int, gaussian: int) -> None:
    assert theory.local_steps(total, "laplace") == laplace
    assert theory.local_steps(total, "gaussian") == gaussian


def test_the_bound_by_hand() -> None:
    """gamma = 80, k = 50: (400 omega_0 + 800)/130 + 400*10/129^2 C 25 10^2, C = 8*11*50/(5000*3)^2."""
    drift = 0.6 + 8 * 16 + 4 * 25 * (4950 / 4999) / 50
    constant = 8 * 11 * 50 / 15000**2
    wanted = (400 * drift + 800) / 130 + 4000 / 129**2 * constant * 25 * 100
    assert LAPLACE.bound(BOWL, steps=5, rounds=10) == pytest.approx(wanted)
    gaussian = replace(LAPLACE, mechanism="gaussian", delta=1e-6)
    spread = 4 * 11 * math.log(1e6) * 4 / (5000 * 9)
    wanted = (400 * drift + 800) / 130 + 4000 / 129**2 * spread * 25 * 10
    assert gaussian.bound(BOWL, steps=5, rounds=10) == pytest.approx(wanted)


@pytest.mark.parametrize(("mechanism", "epsilon"), [("laplace", 3.0), ("gaussian", 1.0)])
def test_the_best_rounds_are_those_of_a_scan(mechanism: Any, epsilon: float) -> None:
    upload = replace(LAPLACE, mechanism=mechanism, epsilon=epsilon)
    scan = min(range(1, 5000), key=lambda rounds: upload.bound(BOWL, steps=2, rounds=rounds))
    assert theory.best_rounds(BOWL, upload, steps=2) == scan
    assert 1 < scan < 4999


def test_more_budget_wants_more_rounds() -> None:
    found = [theory.best_rounds(BOWL, replace(LAPLACE, epsilon=epsilon), steps=1) for epsilon in (1.0, 3.0, 5.0, 100.0)]
    assert found == sorted(found, key=lambda rounds: rounds or math.inf)
    assert None not in found
    free = replace(LAPLACE, mechanism="gaussian", epsilon=1000.0)
    assert theory.best_rounds(BOWL, free, steps=1) is None


def test_the_rule_is_the_best_power_for_laplace_noise_but_only_for_it() -> None:
    """E^2/T + E^(1-z) T^(z-1): its minimiser grows like T^(2/3) at z = 2; at z = 1 and below it is one step."""

    def best(total: float, z: float) -> float:
        grid = [math.pow(total, i / 2000) for i in range(2001)]
        return min(grid, key=lambda e: e**2 / total + math.pow(e, 1 - z) * math.pow(total, z - 1))

    assert math.log(best(1e12, 2.0) / best(1e6, 2.0), 1e6) == pytest.approx(2 / 3, abs=0.01)
    assert best(1e6, 1.0) == best(1e6, 0.5) == 1.0


@pytest.mark.parametrize(
    "ask",
    [
        lambda: theory.local_steps(0, "laplace"),
        lambda: theory.local_steps(10, "uniform"),  # type: ignore[arg-type]
        lambda: replace(LAPLACE, epsilon=0.0).bound(BOWL, steps=1, rounds=1),
        lambda: replace(LAPLACE, cohort=5001).bound(BOWL, steps=1, rounds=1),
        lambda: replace(LAPLACE, mechanism="uniform"),  # type: ignore[arg-type]
    ],
)
def test_impossible_uploads_are_refused(ask: Callable[[], Any]) -> None:
    with pytest.raises(SideConditionError):
        ask()


def test_a_shuffled_round_is_theorem_f2() -> None:
    e0, n, silos, slack = 0.1, 1, 10_000, 1e-6
    step = 8 * math.sqrt(math.exp(e0) * math.log(4e6)) / 100 + 8 * math.exp(e0) / 10_000
    by_hand = math.log(1 + (math.exp(e0) - 1) / (math.exp(e0) + 1) * step)
    found = shuffled_round(epsilon=e0, delta=1e-9, records=n, population=silos, slack=slack)
    assert found == pytest.approx((by_hand, slack + 2e4 * 1e-9), rel=1e-12)
    assert found[0] < e0
    with pytest.raises(SideConditionError, match=r"N / \(16"):
        shuffled_round(epsilon=0.1, delta=0.0, records=100, population=1000, slack=1e-6)
