"""`sordino epsilon`: values that are known, and a calculator that does not wait for torch."""

from __future__ import annotations

import pytest
from tests.commands import sordino


def epsilon(**options: object) -> float:
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return float(sordino("epsilon", *words, "--json").json["epsilon"])


@pytest.mark.parametrize(("noise_multiplier", "known"), [(2.4, 0.94), (2.2, 1.06), (2.0, 1.20), (1.8, 1.39)])
def test_poisson_of_paper_000_cnn(noise_multiplier: float, known: float) -> None:
    found = epsilon(sampler="poisson", population=2000, cohort=100, rounds=200, noise_multiplier=noise_multiplier)
    assert found == pytest.approx(known, abs=0.02)


@pytest.mark.parametrize(
    ("noise_multiplier", "least", "most"), [(2.4, 2.62, 3.06), (2.2, 3.07, 3.59), (2.0, 3.69, 4.31), (1.8, 4.60, 5.36)]
)
def test_fixed_of_paper_000_cnn_is_above_what_an_attack_proves(
    noise_multiplier: float, least: float, most: float
) -> None:
    found = epsilon(sampler="fixed", population=2000, cohort=100, rounds=200, noise_multiplier=noise_multiplier)
    assert least <= found <= most * 1.02


@pytest.mark.parametrize(("noise_multiplier", "known"), [(1.4, 6.38), (0.8, 17.08)])
def test_poisson_of_paper_000_lstm(noise_multiplier: float, known: float) -> None:
    found = epsilon(sampler="poisson", population=975, cohort=195, rounds=100, noise_multiplier=noise_multiplier)
    assert found == pytest.approx(known, rel=0.02)


def test_everyone_once_is_the_gaussian_mechanism_with_movement_two() -> None:
    words = ("epsilon", "--sampler", "full", "--population", 50, "--noise-multiplier", 2, "--delta", 1e-5, "--json")
    found = sordino(*words).json
    assert found["epsilon"] == pytest.approx(4.38, abs=0.01)
    assert found["relation"] == "replace_one"
    assert (found["unit"], found["delta"]) == ("client", 1e-5)


def test_a_shuffler_amplifies() -> None:
    assert 0.1675 <= epsilon(sampler="shuffle", population=100000, epsilon0=4, delta=1e-6) <= 0.1728


def test_laplace_is_pure_and_adds_up() -> None:
    everyone = epsilon(sampler="full", population=50, mechanism="laplace", noise_multiplier=10, rounds=3, delta=0)
    in_turn = epsilon(
        sampler="roundrobin", population=10, cohort=2, mechanism="laplace", noise_multiplier=10, rounds=10, delta=0
    )
    assert everyone == pytest.approx(3 * 2 / 10, abs=2e-6)  # replaced: movement 2, three rounds
    assert in_turn == pytest.approx(2 * 1 / 10, abs=2e-6)  # zeroed out: movement 1, two of ten rounds


@pytest.mark.parametrize(("population", "delta"), [(2000, 2000**-1.1), (500, 1e-3), (3, 1e-3)])
def test_delta_defaults_to_population_to_the_minus_1_1_and_at_most_a_thousandth(population: int, delta: float) -> None:
    found = sordino("epsilon", "--sampler", "full", "--population", population, "--noise-multiplier", 4, "--json").json
    assert found["delta"] == pytest.approx(delta)


def test_who_sees_the_cohort_gets_no_amplification() -> None:
    words = ("--sampler", "poisson", "--population", 1000, "--cohort", 10, "--noise-multiplier", 1, "--json")
    models, cohort = sordino("epsilon", *words).json["adversaries"]
    assert (models["adversary"], cohort["adversary"]) == ("models", "cohort")
    assert models["epsilon"] < cohort["epsilon"] / 5


def test_no_guarantee_is_said_and_not_a_number() -> None:
    words = ("epsilon", "--sampler", "full", "--population", 50, "--noise-multiplier", 2, "--delta", 0)
    assert sordino(*words, "--json").json["epsilon"] is None  # a Gaussian is never pure
    assert sordino(*words).out.startswith("epsilon - ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--sampler full --population 0 --noise-multiplier 1", "--population 0"),
        ("--sampler full --population -3 --noise-multiplier 1", "--population -3"),
        ("--sampler full --population ten --noise-multiplier 1", "--population"),
        ("--sampler full --population 9", "--noise-multiplier"),
        ("--sampler full --population 9 --noise-multiplier 0", "noise multiplier 0"),
        ("--sampler full --population 9 --noise-multiplier nan", "noise multiplier nan"),
        ("--sampler full --population 9 --noise-multiplier 1 --rounds 0", "--rounds 0"),
        ("--sampler full --population 9 --noise-multiplier 1 --delta 1", "delta = 1"),
        ("--sampler full --population 9 --noise-multiplier 1 --mechanism laplas", "'laplace'"),
        ("--sampler fixt --population 9 --noise-multiplier 1", "'fixed'"),
        ("--sampler fixed --population 9 --noise-multiplier 1", "--cohort"),
        ("--sampler fixed --population 9 --noise-multiplier 1 --cohort 2.5", "--cohort 2.5"),
        ("--sampler fixed --population 9 --noise-multiplier 1 --cohort nan", "--cohort nan"),
        ("--sampler fixed --population 9 --noise-multiplier 1 --cohort inf", "--cohort inf"),
        ("--sampler fixed --population 9 --noise-multiplier 1 --cohort 10", "cohort"),
        ("--sampler poisson --population 9 --noise-multiplier 1 --cohort 10", "rate"),
        ("--sampler poisson --population 9 --noise-multiplier 1 --cohort 3 --cap 0", "cap = 0"),
        ("--sampler shuffle --population 900", "--epsilon0"),
        ("--sampler shuffle --population 900 --epsilon0 -1", "epsilon0 = -1"),
        ("--sampler shuffle --population 900 --noise-multiplier 1 --mechanism laplas", "'laplace'"),
        ("--population 9 --noise-multiplier 1", "--sampler"),
    ],
)
def test_a_question_without_an_answer_is_one_sentence(words: str, named: str) -> None:
    assert named in sordino("epsilon", *words.split()).sentence


def test_random_allocation_costs_less_than_poisson_and_names_what_is_missing() -> None:
    found = epsilon(sampler="allocation", bins=10, passes=1, noise_multiplier=1, delta=1e-5)
    assert found == pytest.approx(2.1889, rel=1e-4)
    assert found < epsilon(sampler="poisson", population=10, cohort=1, rounds=10, noise_multiplier=1, delta=1e-5)
    words = ("epsilon", "--sampler", "allocation", "--noise-multiplier", 1)
    assert "no --bins" in sordino(*words, "--delta", 1e-5).sentence
    assert "no --population" in sordino(*words, "--bins", 10).sentence
    assert "--sampler allocation" in sordino("epsilon", "--sampler", "poisson", "--bins", 10).sentence
