"""docs/lint.md: every number of its tables is what the peer printed, and what our accountant proves today."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sordino.lint import RULES, check, stated

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lint.md").read_text("utf-8")
PEERS: dict[str, Any] = json.loads((ROOT / "benchmarks" / "peers" / "lint.json").read_text("utf-8"))
SMALL = 2000**-1.1
COHORT: dict[str, Any] = {"clients": 20, "sampled": 10, "rounds": 40, "noise_multiplier": 4.0, "delta": 1e-5}
WITHOUT: dict[str, Any] = {"clients": 2000, "sampled": 100, "rounds": 200, "noise_multiplier": 1.8, "delta": SMALL}
LOOP: dict[str, Any] = {"records": 1000, "batch_size": 100, "epochs": 5, "noise_multiplier": 1.0, "delta": 1e-5}
PFL: dict[str, Any] = {"rate": 0.1, "rounds": 100, "noise_multiplier": 2.0, "delta": 1e-5}
JAX: dict[str, Any] = {"records": 2000, "batch_size": 100, "steps": 200, "noise_multiplier": 1.8, "delta": SMALL}
SILO: dict[str, Any] = {
    "records": 1000, "batch_size": 10, "epochs": 1, "rounds": 10, "client_rate": 0.1, "noise_multiplier": 0.8,
    "delta": 1e-5,
}  # fmt: skip
SINGLE: dict[str, Any] = {"call": "single_iteration", "epsilon": 2.0, "delta": 1e-5, "rounds": 40}
BANDS: dict[str, Any] = {
    "call": "banded", "rounds": 100, "min_separation": 20, "noise_multiplier": 4.4721, "delta": 1e-5
}  # fmt: skip
# rows of the tables in order: library, settings, which proved line, and what the peer printed (None: our claim)
ROWS: list[tuple[str, dict[str, Any], int, float | None]] = [
    ("flower", COHORT, 0, PEERS["flwr"]["fixed_cohort"]),
    ("flower", COHORT, 1, PEERS["flwr"]["fixed_cohort"]),
    ("flower", WITHOUT | {"sampling": "without_replacement"}, 2, PEERS["flwr"]["without_replacement"]),
    ("opacus", LOOP, 0, PEERS["opacus"]["poisson"]),
    ("opacus", LOOP | {"poisson": False}, 0, PEERS["opacus"]["shuffled"]),
    ("opacus", LOOP | {"poisson": False}, 1, PEERS["opacus"]["shuffled"]),
    ("opacus", LOOP | {"accountant": "gdp"}, 0, PEERS["opacus"]["gdp"]),
    ("pfl", PFL, 0, PEERS["pfl"]["pld"]),
    ("pfl", PFL | {"noise_scale": 0.5}, 0, PEERS["pfl"]["scaled"]),
    ("pfl", SINGLE, 0, None),
    ("pfl", BANDS, 0, None),
    ("jax_privacy", JAX, 0, PEERS["jax"]["poisson"]),
    ("jax_privacy", JAX | {"sampling": "fixed_batch_size"}, 0, PEERS["jax"]["fixed_batch"]),
    ("jax_privacy", JAX, 0, PEERS["jax"]["poisson_accumulated"]),
    ("fl4health", SILO, 0, PEERS["fl4health"]["records"]),
    ("fl4health", SILO, 1, PEERS["fl4health"]["records"]),
    ("fl4health", WITHOUT | {"call": "without_replacement"}, 2, PEERS["fl4health"]["without_replacement"]),
]
SHOWN = [
    (said, float(claimed), float(proved))
    for said, claimed, proved in re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
]


def test_the_page_has_a_row_for_each_of_these() -> None:
    assert len(SHOWN) == len(ROWS)


@pytest.mark.parametrize(("row", "shown"), list(zip(ROWS, SHOWN, strict=True)), ids=[one[0] for one in SHOWN])
def test_a_row_is_what_the_peer_printed_and_what_is_proved(row: Any, shown: tuple[str, float, float]) -> None:
    library, values, place, printed = row
    found = check(stated(library, values))
    claimed = found["claims"]["epsilon"] if printed is None else printed
    assert shown[1] == pytest.approx(claimed, abs=6e-4 if claimed < 10 else 6e-3)
    proved = found["proved"][place]["epsilon"]
    assert 0 <= shown[2] - proved <= (1.1e-3 if proved < 10 else 1.1e-2), "rounded up"


def test_lint_claims_what_the_peers_print() -> None:
    for library, values, _, printed in ROWS:
        if printed is None or printed == PEERS["jax"]["poisson_accumulated"]:
            continue
        assert check(stated(library, values))["claims"]["epsilon"] == pytest.approx(printed, rel=3e-3), (
            library,
            values,
        )


def test_the_facts_behind_rules_without_an_epsilon_are_those_of_the_installed_peers() -> None:
    adaptive = PEERS["flwr"]["adaptive"]
    assert adaptive["noise_over_needed"] == pytest.approx(adaptive["new_norm_over_old"], rel=0.01)
    assert f"was {adaptive['noise_over_needed']:.3f}".replace(" 0.", " .") in PAGE
    assert PEERS["opacus"]["denominators"] == {"1000": 100, "1001": 91}
    assert PEERS["jax"]["keras_checks_with"] == ["self.batch_size"]
    assert PEERS["jax"]["keras_poisson_default"] == "False"
    assert PEERS["pfl"]["scaled_noise"] == 1.0
    assert PEERS["pfl"]["repeats_in_a_cohort_of_ten"]
    small = check(stated("jax_privacy", JAX | {"batch_size": 10}))["claims"]["epsilon"]
    assert small == pytest.approx(PEERS["jax"]["poisson_accumulated"], rel=0.02)


def test_versions_of_rules_page_and_peers_agree() -> None:
    names = {"flower": "flwr", "jax_privacy": "jax"}
    for rule in RULES:
        if rule.library != "nvflare":
            assert PEERS[names.get(rule.library, rule.library)]["version"] in rule.version
        assert rule.version in PAGE
