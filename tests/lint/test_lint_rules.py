"""`sordino lint`: every rule is found where it holds and not where it does not, and its numbers are those proved."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.accounting.oracles import lower_bound
from tests.commands import sordino

from sordino.accounting.pld import gaussian_epsilon
from sordino.errors import ConfigError
from sordino.lint import RULES, check, read_file, stated
from sordino.lint.known_calls import CALLS, KEYS
from sordino.lint.library_prices import PROTOCOLS

COHORT: dict[str, Any] = {"clients": 20, "sampled": 10, "rounds": 40, "noise_multiplier": 4.0, "delta": 1e-5}
LOOP: dict[str, Any] = {"records": 1000, "batch_size": 100, "epochs": 5, "noise_multiplier": 1.0, "delta": 1e-5}
MOD: dict[str, Any] = {"call": "local", "clip_norm": 1.0, "sensitivity": 2.0, "epsilon": 0.5, "delta": 1e-5}
PFL: dict[str, Any] = {"rate": 0.1, "rounds": 100, "noise_multiplier": 2.0, "delta": 1e-5}
BANDS: dict[str, Any] = {"call": "banded", "rounds": 100, "min_separation": 20, "noise_multiplier": 4.0, "delta": 1e-5}
KERAS: dict[str, Any] = {
    "call": "keras", "epsilon": 1.0, "delta": 1e-5, "records": 2000, "batch_size": 10, "accumulation": 10,
    "steps": 200, "noise_multiplier": 1.8, "poisson": True,
}  # fmt: skip
JAX: dict[str, Any] = {"records": 2000, "batch_size": 100, "steps": 200, "noise_multiplier": 1.8, "delta": 1e-5}
SILO: dict[str, Any] = {
    "records": 1000, "batch_size": 10, "epochs": 1, "rounds": 10, "client_rate": 0.1, "noise_multiplier": 0.8,
    "delta": 1e-5,
}  # fmt: skip
SVT: dict[str, Any] = {"parameters": 1000, "fraction": 0.1, "epsilon": 0.1, "noise_var": 0.1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {  # rule: library, holds, does not (None: always)
    "flower-fixed-cohort": ("flower", COHORT, COHORT | {"accounted": False}),
    "flower-no-accountant": ("flower", COHORT | {"accounted": False}, COHORT),
    "flower-without-replacement": ("flower", COHORT | {"sampling": "without_replacement"}, COHORT | {"sampling": "no"}),
    "flower-adaptive-order": ("flower", COHORT | {"call": "adaptive_clipping"}, COHORT),
    "flower-local-sensitivity": ("flower", MOD | {"sensitivity": 1.0}, MOD),
    "flower-local-large-epsilon": ("flower", MOD | {"epsilon": 10.0}, MOD),
    "flower-local-rounds": ("flower", MOD | {"rounds": 2}, MOD),
    "opacus-shuffled": ("opacus", LOOP | {"poisson": False}, LOOP),
    "opacus-size-is-public": ("opacus", LOOP, LOOP | {"records": 1050}),
    "opacus-gdp": ("opacus", LOOP | {"accountant": "gdp"}, LOOP | {"accountant": "rdp"}),
    "pfl-banded-factor": ("pfl", BANDS, PFL),
    "pfl-noise-scale": ("pfl", PFL | {"noise_scale": 0.5}, PFL),
    "pfl-cohorts-are-not-poisson": ("pfl", PFL, PFL | {"rate": 1.0}),
    "pfl-single-iteration": (
        "pfl",
        {"call": "single_iteration", "epsilon": 2.0, "delta": 1e-5, "rounds": 40},
        {"call": "single_iteration", "epsilon": 2.0, "delta": 1e-5},
    ),
    "jax-keras-shuffled": ("jax_privacy", KERAS | {"poisson": False}, KERAS),
    "jax-keras-accumulation": ("jax_privacy", KERAS, KERAS | {"accumulation": 1}),
    "jax-fixed-batch": ("jax_privacy", JAX | {"sampling": "fixed_batch_size"}, JAX | {"sampling": "poisson"}),
    "fl4health-product-of-rates": ("fl4health", SILO, SILO | {"client_rate": 1.0}),
    "fl4health-without-replacement": ("fl4health", COHORT | {"call": "without_replacement"}, SILO),
    "nvflare-svt-release": ("nvflare", SVT, {"call": "percentile"}),
    "nvflare-percentile": ("nvflare", {"call": "percentile"}, SVT),
}


def found(library: str, values: dict[str, Any]) -> dict[str, Any]:
    return check(stated(library, values))


def names(library: str, values: dict[str, Any]) -> set[str]:
    return {one["rule"] for one in found(library, values)["findings"]}


def test_every_rule_has_a_case_that_it_finds_and_one_that_it_does_not() -> None:
    assert set(CASES) == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES) >= 20


@pytest.mark.parametrize("rule", sorted(CASES))
def test_a_rule_is_found_where_it_holds_and_only_there(rule: str) -> None:
    library, holds, other = CASES[rule]
    assert rule in names(library, holds)
    assert other is None or rule not in names(library, other)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_names_its_version_its_source_and_a_change(rule: Any) -> None:
    assert (rule.library, rule.call) in PROTOCOLS
    assert rule.version[0].isdigit()
    assert "/" in rule.source
    assert rule.mend
    assert rule.message.endswith(".")


def test_every_call_that_is_read_has_a_protocol_and_known_keys() -> None:
    for name, known in CALLS.items():
        assert not known.call or (known.library, known.call) in PROTOCOLS, name
        assert set(known.keys.values()) | set(known.absent) <= set(KEYS), name


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_a_fixed_cohort_is_priced_by_the_closed_form() -> None:
    one = found("flower", COHORT)
    zeroed, replaced, _ = (line["epsilon"] for line in one["proved"])
    assert zeroed == pytest.approx(gaussian_epsilon(math.sqrt(40) / 4, 1e-5), rel=1e-9)
    assert replaced == pytest.approx(gaussian_epsilon(2 * math.sqrt(40) / 4, 1e-5), rel=1e-9)
    assert zeroed < one["claims"]["epsilon"] < replaced


@pytest.mark.parametrize("library", ["flower", "fl4health"])
def test_without_replacement_the_claim_is_refuted_and_the_proof_is_not(library: str) -> None:
    words = {"sampling": "without_replacement"} if library == "flower" else {"call": "without_replacement"}
    sizes: dict[str, Any] = {"clients": 2000, "sampled": 100, "rounds": 200, "noise_multiplier": 1.8}
    one = found(library, sizes | words | {"delta": 2000**-1.1})
    truth = lower_bound(rate=0.05, noise_multiplier=1.8, rounds=200, delta=2000**-1.1)
    assert one["claims"]["epsilon"] < truth <= one["proved"][-1]["epsilon"]


def test_fixed_batches_are_claimed_at_what_one_pair_reaches_and_proved_above() -> None:
    one = found("jax_privacy", JAX | {"sampling": "fixed_batch_size", "delta": 2000**-1.1})
    truth = lower_bound(rate=0.05, noise_multiplier=1.8, rounds=200, delta=2000**-1.1)
    assert truth <= one["claims"]["epsilon"] < one["proved"][0]["epsilon"]


def test_the_central_limit_estimate_is_below_a_certified_lower_bound() -> None:
    claimed = found("opacus", LOOP | {"accountant": "gdp"})["claims"]["epsilon"]
    truth = lower_bound(rate=0.1, noise_multiplier=2.0, rounds=50, delta=1e-5)  # movement 2 at twice the noise
    assert claimed < truth <= found("opacus", LOOP)["proved"][0]["epsilon"]


def test_a_local_mod_pays_for_two_clip_norms_in_every_round() -> None:
    std = 1e-4 * math.sqrt(2 * math.log(1.25e5)) / 10
    values = MOD | {"sensitivity": 1e-4, "epsilon": 10.0, "rounds": 3}
    (line,) = found("flower", values)["proved"]
    assert line["epsilon"] == pytest.approx(gaussian_epsilon(2 * math.sqrt(3) / std, 1e-5), rel=1e-9)
    right = found("flower", MOD)["proved"][0]["epsilon"]
    assert right < MOD["epsilon"], "the classic formula holds below 1 with the right sensitivity"


def test_a_calibrated_multiplier_is_priced_against_the_library() -> None:
    """Shuffled batches with the noise that Poisson batches need: never below the price of a finer calibration."""
    asked = {"records": 1000, "batch_size": 100, "epochs": 5, "epsilon": 3.0, "delta": 1e-5, "poisson": False}
    price = found("opacus", asked)["proved"][0]["epsilon"]
    poisson = found("opacus", asked | {"poisson": True})["proved"][0]["epsilon"]
    assert 3.0 <= poisson <= 3.0 * 1.011
    assert price > 2 * poisson


def test_the_selection_of_coordinates_is_bounded_by_all_of_them() -> None:
    (line,) = found("nvflare", SVT)["proved"]
    own = found("nvflare", SVT)["claims"]["epsilon"]
    assert own == pytest.approx(0.1 + 100 * 0.1)
    assert own < line["epsilon"] < 0.1 / 0.1 + 100 * 0.1 + 1e-9


def test_silos_and_records_never_multiply_their_rates() -> None:
    one = found("fl4health", SILO)
    always, once = (line["epsilon"] for line in one["proved"])
    assert one["claims"]["epsilon"] < once < always
    assert always == found("fl4health", SILO | {"client_rate": 1.0})["proved"][0]["epsilon"]


# ---- what is missing or wrong ----------------------------------------------------------------------------------------


def test_missing_numbers_are_named_and_the_findings_stay() -> None:
    one = found("flower", {"noise_multiplier": 4.0})
    assert one["missing"] == ["delta", "rounds"]
    assert [each["rule"] for each in one["findings"]] == ["flower-fixed-cohort"]
    assert "missing delta, rounds" in sordino("lint", "--library", "flower", "--noise-multiplier", 4).out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "neither a file nor --library"),
        ("--library flowers", "flower"),
        ("--library flower --set clips=1", "'clips'"),
        ("--library flower --set rounds=many", "rounds = 'many'"),
        ("--library flower --rounds 0", "rounds = 0"),
        ("--library opacus --delta 2", "delta = 2"),
        ("nothing.toml", "no file nothing.toml"),
    ],
)
def test_wrong_input_is_one_sentence(words: str, named: str) -> None:
    assert named in sordino("lint", *words.split()).sentence


def test_wrong_files_are_one_sentence(tmp_path: Any) -> None:
    for name, text in (("a.py", "def ("), ("b.json", "{"), ("c.toml", "= 1"), ("d.py", "import opacus\n")):
        (tmp_path / name).write_text(text)
        assert name in sordino("lint", tmp_path / name).sentence
    with pytest.raises(ConfigError, match="no file"):
        read_file(tmp_path / "gone.py")
