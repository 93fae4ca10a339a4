"""Promises of strategies: noise is C^-1 Z row by row; no pattern of rounds moves more than the sensitivity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.accounting.matrix_oracles import every_pattern, root_mean_square

from sordino.accounting import matrix, sensitivity
from sordino.accounting.matrix import Goal, best_bands, best_buffers
from sordino.accounting.sensitivity import Patterns
from sordino.errors import PlanError
from sordino.parts.strategies import Banded, BandedSquareRoot, BufferedToeplitz, Identity, Strategy, Toeplitz, Tree

ROUNDS = 24
ALLOWED = Patterns(ROUNDS, 6, 4)
GOAL = Goal(ALLOWED, np.ones(ROUNDS))


def sums() -> np.ndarray:
    return np.ones(ROUNDS)


TOEPLITZ = [
    Identity(),
    BandedSquareRoot(5),
    BandedSquareRoot(ROUNDS),
    Banded(4).fitted(ALLOWED, sums),
    Banded(7).fitted(ALLOWED, sums),
    Banded(4, forget=0.0).fitted(ALLOWED, sums),  # drifts
    Banded(3, (1.0, 0.6, 0.5), ends=30, drift=(0.0, -0.7, -0.4)),  # of a run that ended early
    BufferedToeplitz(2).fitted(ALLOWED, sums),
]


def streamed(strategy: Strategy, rounds: int, length: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Noise of every round, and all Z drawn, in order."""
    rng, drawn = np.random.default_rng(0), []

    def fresh() -> torch.Tensor:
        drawn.append(rng.standard_normal(length))
        return torch.from_numpy(drawn[-1])

    memory, noise = strategy.init(length), []
    for _ in range(rounds):
        n, memory = strategy.step(fresh, memory)
        noise.append(n.numpy().copy())
    return np.stack(noise), np.stack(drawn)


@pytest.mark.parametrize("strategy", TOEPLITZ)
def test_the_noise_of_a_round_is_its_row_of_the_inverse(strategy: Strategy) -> None:
    noise, z = streamed(strategy, ROUNDS)
    assert np.allclose(noise, np.linalg.solve(matrix_of(strategy), z), atol=1e-5)


def matrix_of(strategy: Strategy) -> np.ndarray:
    """C by its definition, entry by entry."""
    rounds = strategy.ends if isinstance(strategy, Banded) and strategy.ends else ROUNDS
    column = sensitivity.padded(strategy.column(rounds), rounds)  # type: ignore[attr-defined]
    made = np.array([[column[t - s] if t >= s else 0.0 for s in range(rounds)] for t in range(rounds)])
    if isinstance(strategy, Banded) and strategy.drift:
        made += [
            [
                (s / rounds) ** 0.5 * strategy.drift[t - s] if 0 <= t - s < len(strategy.drift) else 0.0
                for s in range(rounds)
            ]
            for t in range(rounds)
        ]
    if isinstance(strategy, Banded) and strategy.ends:
        made *= np.linalg.norm(column) / np.linalg.norm(made, axis=0)
    return made[:ROUNDS, :ROUNDS]


@pytest.mark.parametrize("strategy", TOEPLITZ)
@pytest.mark.parametrize("work", [None, 0.9 ** np.arange(ROUNDS)], ids=["sums", "forgets"])
def test_errors_are_those_of_the_matrix(strategy: Strategy, work: np.ndarray | None) -> None:
    made = sensitivity.dense(np.ones(ROUNDS) if work is None else work, ROUNDS) @ np.linalg.inv(matrix_of(strategy))
    assert np.allclose(strategy.errors(ROUNDS, work), np.sum(made**2, axis=1))


def test_the_noise_of_a_tree_is_what_its_blocks_say() -> None:
    noise, z = streamed(Tree(), ROUNDS)
    assert np.allclose(noise, matrix.tree_noise_matrix(ROUNDS) @ z, atol=1e-5)


def test_the_tree_estimates_sums_without_bias_from_its_blocks() -> None:
    """A C^-1 of the tree maps the blocks' sums to the sums of rounds: B C = A."""
    blocks = []
    for t in range(ROUNDS):
        level = 0
        blocks.append((t, t + 1))
        while t >> level & 1:
            level += 1
            blocks.append((t + 1 - (1 << level), t + 1))
    c = np.array([[float(a <= s < b) for s in range(ROUNDS)] for a, b in blocks])
    made = np.cumsum(matrix.tree_noise_matrix(ROUNDS), axis=0) @ c
    assert np.allclose(made, np.tril(np.ones((ROUNDS, ROUNDS))))
    assert np.allclose(c.T @ c, matrix.tree_gram(ROUNDS))


@pytest.mark.parametrize("strategy", [*TOEPLITZ, Tree()])
def test_the_state_before_stays_true(strategy: Strategy) -> None:
    rng = np.random.default_rng(3)
    zs = [torch.from_numpy(rng.standard_normal(3)) for _ in range(60)]
    memory = strategy.init(3)
    for t in range(9):
        _, memory = strategy.step(iter(zs[5 * t : 5 * t + 5]).__next__, memory)
    again = [strategy.step(iter(zs[50:]).__next__, memory)[0].clone() for _ in range(2)]
    assert torch.equal(again[0], again[1])


@pytest.mark.parametrize(("most", "apart"), [(1, 1), (3, 1), (3, 3), (4, 2), (2, 5), (9, 4)])
@pytest.mark.parametrize("strategy", [BandedSquareRoot(3), BandedSquareRoot(10), Tree(), "rises", "signs"])
def test_no_pattern_moves_more_than_the_sensitivity(strategy: Strategy | str, most: int, apart: int) -> None:
    rounds = 10
    allowed = Patterns(rounds, most, apart)
    if isinstance(strategy, str):
        column = {"rises": np.array([1.0, 0.2, 0.9, 0.1, 0.5]), "signs": np.array([1.0, -0.6, 0.4, -0.3, 0.2])}[
            strategy
        ]
        claimed, gram = sensitivity.toeplitz_sensitivity(column, allowed), sensitivity._gram(column, rounds)
    else:
        claimed = strategy.sensitivity(allowed)
        gram = matrix.tree_gram(rounds)
        if not isinstance(strategy, Tree):
            gram = sensitivity._gram(strategy.column(rounds), rounds)  # type: ignore[attr-defined]
    worst = max(np.abs(gram[np.ix_(p, p)]).sum() for p in every_pattern(allowed))
    assert claimed >= np.sqrt(worst) - 1e-12
    if isinstance(strategy, BandedSquareRoot):
        assert claimed == pytest.approx(np.sqrt(worst))  # falls: exact


BOLD = Banded(3, (1.0, 0.2, 0.1), ends=10, drift=(0.0, 0.8, 0.9))  # columns of P from 1.0 to 1.7 long


@pytest.mark.parametrize("rounds", [5, 9, 10])
@pytest.mark.parametrize(("most", "apart"), [(1, 1), (3, 1), (3, 3), (4, 2), (2, 5), (9, 4)])
@pytest.mark.parametrize("bands", [Banded(3), Banded(3, forget=0.0), BOLD], ids=["bands", "drift", "bold"])
def test_no_pattern_moves_more_than_columns_of_one_length(bands: Strategy, most: int, apart: int, rounds: int) -> None:
    """Also where the run ended early, or clients come closer than the bands were made for."""
    bands = bands.fitted(Patterns(10, 4, 3), lambda: np.ones(10))
    assert isinstance(bands, Banded)
    allowed, made = Patterns(rounds, most, apart), np.linalg.inv(bands.noise_matrix(rounds))
    gram = np.abs(made.T @ made)
    worst = max(gram[np.ix_(p, p)].sum() for p in every_pattern(allowed))
    assert bands.ends == 10
    assert bands.sensitivity(allowed) >= np.sqrt(worst) - 1e-12
    assert bands.max_column_norm >= np.sqrt(gram.max()) - 1e-12
    if rounds == 10 and apart >= 3:
        assert bands.sensitivity(allowed) == pytest.approx(np.sqrt(worst))


def test_columns_are_left_alone_where_bands_meet_and_no_round_comes_after_the_last() -> None:
    assert Banded(4).fitted(Patterns(10, 4, 3), lambda: np.ones(10)) == Banded(
        4,
        Banded(4).fitted(Patterns(10, 4, 3), lambda: np.ones(10)).coefficients,  # type: ignore[attr-defined]
    )
    with pytest.raises(PlanError, match="round 11, with noise bands for 10 rounds"):
        streamed(Banded(3).fitted(Patterns(10, 4, 3), lambda: np.ones(10)), 11)


@pytest.mark.parametrize(("rounds", "apart", "known"), [(200, 10, 16.858882), (180, 30, 6.766566)])
def test_bands_that_drift_have_the_noise_of_a_free_matrix_to_half_a_percent(
    rounds: int, apart: int, known: float
) -> None:
    """The least that columns of one length and so many bands can have; jax_privacy 2.0.0 `banded.optimize` finds it."""
    allowed = Patterns(rounds, -(-rounds // apart), apart)
    made = Banded(apart, forget=0.0).fitted(allowed, lambda: np.ones(rounds))
    assert isinstance(made, Banded)
    assert made.drift
    found = made.sensitivity(allowed) * np.sqrt(np.mean(made.errors(rounds)))
    assert known < found < 1.005 * known


def test_the_last_model_has_less_noise_where_columns_are_of_one_length() -> None:
    """T=200, a client in every tenth round."""
    allowed = Patterns(200, 20, 10)
    fitted = Banded(10, forget=0.0).fitted(allowed, lambda: np.ones(200))
    assert isinstance(fitted, Banded)
    made, plain = replace(fitted, drift=()), replace(fitted, drift=(), ends=0)
    assert made.sensitivity(allowed) == pytest.approx(plain.sensitivity(allowed), rel=1e-12)
    noise = made.sensitivity(allowed) * np.sqrt(made.errors(200))
    assert noise[-1] < 0.965 * plain.sensitivity(allowed) * np.sqrt(plain.errors(200)[-1])


def test_bands_for_a_training_that_forgets_are_better_where_it_does() -> None:
    """At every pace the default stays within 2.3% of the best, until nothing older than 20 rounds is left."""
    allowed = Patterns(200, 20, 10)

    def noise(pace: float, forget: float | None) -> float:
        made = Banded(10, forget=forget).fitted(allowed, lambda: np.ones(200))
        return float(
            made.sensitivity(allowed) * np.sqrt(np.mean(made.errors(200, np.power(1.0 - pace, np.arange(200.0)))))
        )

    for pace in (0.0, 0.005, 0.01, 0.02):
        assert noise(pace, pace) < noise(pace, None) * 1.0001 < 1.023 * noise(pace, pace)
    assert noise(0.05, None) < 0.93 * noise(0.05, 0.0)


@pytest.mark.parametrize(
    ("rounds", "apart", "most", "width", "known"),
    [
        (20, 3, 4, 20, 4.189687961863782),
        (50, 5, 10, 20, 6.854215613248186),
        (100, 7, 3, 100, 3.828931227414473),
        (64, 1, 64, 8, 24.418861271546355),
        (64, 4, 16, 4, 4.879805323985784),
        (30, 30, 1, 30, 1.4650145076844),
        (200, 10, 20, 200, 16.74628491914926),
        (33, 8, 5, 12, 3.3388960824867486),
        (500, 20, 25, 60, 10.60697381141692),
        (1000, 100, 10, 300, 6.915732797038903),
    ],
)
def test_a_second_library_finds_the_same_sensitivities(
    rounds: int, apart: int, most: int, width: int, known: float
) -> None:
    """jax_privacy 2.0.0, matrix.minsep_sensitivity_squared of the square root's first entries."""
    found = BandedSquareRoot(width).sensitivity(Patterns(rounds, most, apart))
    assert found == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize(
    ("rounds", "apart", "bands", "buffers"),
    [(200, 10, 17.049073, (18.112980, 18.112980)), (2048, 342, 8.799215, (9.178572, 9.167115))],
)
def test_optimised_strategies_are_no_worse_than_a_second_library(
    rounds: int, apart: int, bands: float, buffers: tuple[float, float]
) -> None:
    """jax_privacy 2.0.0: matrix.optimize_banded_toeplitz, buffered_toeplitz.optimize(error="mean"); rms of sums."""
    allowed = Patterns(rounds, -(-rounds // apart), apart)
    goal = Goal(allowed, np.ones(rounds))
    made = best_bands(goal, apart), best_buffers(goal, 2).column(rounds), best_buffers(goal, 3).column(rounds)
    found = [root_mean_square(c, rounds, sensitivity.toeplitz_sensitivity(c, allowed)) for c in made]
    for ours, theirs in zip(found, (bands, *buffers), strict=True):
        assert ours <= theirs * 1.0001
    root = matrix.square_root(apart)
    assert found[0] < root_mean_square(root, rounds, sensitivity.toeplitz_sensitivity(root, allowed))


@pytest.mark.parametrize("rounds", [1000, 4097])
def test_few_bands_are_found_for_a_long_run(rounds: int) -> None:
    """The search once took a step whose inverse overflows. The best of two bands, by a scan."""
    allowed = Patterns(rounds, 4, rounds // 4)
    column = best_bands(Goal(allowed, np.ones(rounds)), 3)
    pairs = [np.array([1.0, one]) for one in np.linspace(0.5, 1.0, 101)]
    loss = Goal(allowed, np.ones(rounds)).loss
    assert loss(column)[0] < min(loss(pair)[0] for pair in pairs)
    assert loss(best_bands(Goal(allowed, np.ones(rounds)), 2))[0] < min(loss(pair)[0] for pair in pairs) + 1e-6


def test_the_gradient_of_the_search_is_right() -> None:
    from scipy.optimize import check_grad

    work = np.tril(np.ones((ROUNDS, ROUNDS))) * np.linspace(1, 0.5, ROUNDS)
    for goal in (GOAL, Goal(GOAL.patterns, work)):
        start = matrix.square_root(6)[1:] + 0.01
        off = check_grad(
            lambda r, g=goal: g.loss(np.concatenate([[1.0], r]))[0],
            lambda r, g=goal: g.loss(np.concatenate([[1.0], r]))[1][1:6],
            start,
        )
        assert off < 1e-5


@pytest.mark.parametrize("dense", [False, True])
def test_the_gradient_of_a_drift_is_right(dense: bool) -> None:
    from scipy.optimize import check_grad

    work = np.power(0.9, np.arange(ROUNDS, dtype=np.float64))
    if dense:
        work = np.tril(np.ones((ROUNDS, ROUNDS))) * np.linspace(1, 0.5, ROUNDS)
    search = matrix.DriftSearch(Goal(ALLOWED, work), 5)
    at = np.array([0.5, 0.4, 0.3, 0.2, -0.3, 0.1, 0.2, -0.1])
    assert check_grad(lambda x: search.loss(x)[0], lambda x: search.loss(x)[1], at) < 1e-5
    c, d = search.split(at)
    made = sensitivity.dense(work, ROUNDS) if work.ndim == 1 else work
    p = matrix.banded_matrix(matrix.columns(c, d, ROUNDS, ROUNDS))
    noise = made @ np.diag(np.linalg.norm(p, axis=0)) @ np.linalg.inv(p)
    assert search.loss(at)[0] == pytest.approx(np.log(np.sum(noise**2) / ROUNDS))


def test_a_drift_is_looked_for_where_sums_are_asked_for_and_columns_do_not_meet() -> None:
    def drifts(strategy: Strategy, allowed: Patterns = ALLOWED) -> bool:
        return bool(strategy.fitted(allowed, lambda: np.ones(allowed.rounds)).drift)  # type: ignore[attr-defined]

    assert drifts(Banded(4, forget=0.0))
    assert not drifts(Banded(4))
    assert not drifts(Banded(5, forget=0.0))
    assert not drifts(Banded(1, forget=0.0))
    assert not drifts(Banded(3, forget=0.0), Patterns(matrix.LONGEST + 1, 4, 1000))


EVERY_STRATEGY: dict[str, Callable[[], Strategy]] = {
    "identity": Identity,
    "banded_square_root": lambda: BandedSquareRoot(4),
    "banded": lambda: Banded(4).fitted(Patterns(100, 20, 5), lambda: np.ones(100)),
    "banded with a drift": lambda: Banded(4, forget=0.0).fitted(Patterns(100, 20, 5), lambda: np.ones(100)),
    "buffered_toeplitz": lambda: BufferedToeplitz(3).fitted(Patterns(100, 20, 5), lambda: np.ones(100)),
    "tree": Tree,
}


@pytest.mark.parametrize("name", EVERY_STRATEGY)
def test_the_noise_std_of_every_round_is_the_norm_of_its_row(name: str) -> None:
    strategy = EVERY_STRATEGY[name]()
    rows = np.linalg.norm(strategy.noise_matrix(100), axis=1)
    assert [strategy.noise_std(t) for t in range(100)] == pytest.approx(rows, rel=1e-9)
    assert [Strategy.noise_std(strategy, t) for t in (0, 6, 99)] == pytest.approx(rows[[0, 6, 99]], rel=1e-9)


@pytest.mark.parametrize("name", ["banded_square_root", "buffered_toeplitz"])
def test_the_noise_std_of_a_round_is_that_of_a_dense_inverse(name: str) -> None:
    strategy = EVERY_STRATEGY[name]()
    assert isinstance(strategy, Toeplitz)
    rows = np.linalg.norm(np.linalg.inv(sensitivity.dense(strategy.column(100), 100)), axis=1)
    assert [strategy.noise_std(t) for t in range(100)] == pytest.approx(rows, rel=1e-9)


@pytest.mark.parametrize("name", EVERY_STRATEGY)
def test_the_noise_std_of_a_round_is_what_its_draws_have(name: str) -> None:
    strategy, rng = EVERY_STRATEGY[name](), np.random.default_rng(0)
    memory, size = strategy.init(40_000), 40_000
    for t in range(9):
        noise, memory = strategy.step(lambda: torch.from_numpy(rng.standard_normal(size)), memory)
        assert float(noise.std()) == pytest.approx(strategy.noise_std(t), rel=0.02)


def test_a_matrix_workload_of_sums_is_the_toeplitz_one() -> None:
    dense = Goal(GOAL.patterns, np.tril(np.ones((ROUNDS, ROUNDS))))
    column = matrix.square_root(5)
    assert dense.error(column)[0] == pytest.approx(GOAL.error(column)[0])
    assert np.allclose(dense.error(column)[1], GOAL.error(column)[1])


@pytest.mark.parametrize(
    "call",
    [
        lambda: BandedSquareRoot(0),
        lambda: Banded(3, (0.5, 0.1)),
        lambda: Banded(3, forget=1.0),
        lambda: Banded(3, ends=-1),
        lambda: Banded(2, (1.0, 0.5), drift=(0.0, 0.1)),
        lambda: Banded(2, (1.0, 0.5), ends=9, drift=(0.1, 0.1)),
        lambda: Banded(2, (1.0, 0.5), ends=9, drift=(0.0,)),
        lambda: Banded(2, (1.0, 0.5), ends=9, drift=(0.0, float("nan"))),
        lambda: BufferedToeplitz(2, forget=-0.1),
        lambda: Banded(2, (1.0, 0.5, 0.1)),
        lambda: BufferedToeplitz(2, (0.5,), (0.5, 0.4)),
        lambda: BufferedToeplitz(1, (-0.5,), (0.5,)),
        lambda: BufferedToeplitz(1, (0.5,), (1.5,)),
        lambda: Patterns(0, 1, 1),
    ],
)
def test_strategies_that_mean_nothing_are_refused(call: object) -> None:
    with pytest.raises(PlanError):
        call()  # type: ignore[operator]
