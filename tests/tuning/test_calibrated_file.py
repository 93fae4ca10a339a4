"""Promises of `sordino calibrate`: the recipe is kept, the budget is met, every silo is solved for its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands import federation, sordino

from sordino.config import load_config

SILOS = """
# three silos of the handwritten digits
[task]
dataset = "digits"
options = { train = 120 }
partition = { kind = "iid", clients = 3 }

[recipe]
name = "noisy_minibatch_sgd"
rounds = 3
clients = { kind = "everyone", population = 3 }
records = { kind = "fixed_records", batch = 10, sizes = [40, 40, 40] }
clip_norm = 1.0
noise_multiplier = 3.0  # of every silo
lr = 0.5
"""
BUDGETS = "\n[privacy]\nsilos = [{ epsilon = 1.0 }, { epsilon = 2.0 }, { epsilon = 4.0 }]\n"


def spent(file: Path) -> dict[int, float]:
    """What every silo spends by the forecast of a file, which must load."""
    line = sordino("plan", file, "--json").json["adversaries"][-1]
    groups = line.get("silos") or [{**line, "silos": [0]}]
    return {silo: group["epsilon"] for group in groups for silo in group["silos"]}


@pytest.mark.parametrize(
    ("free", "key"), [("noise_multiplier", "noise_multiplier"), ("rounds", "rounds"), ("cohort", "rate")]
)
def test_the_file_keeps_its_recipe_with_one_number_changed(tmp_path: Path, free: str, key: str) -> None:
    file, out = federation(tmp_path), tmp_path / "out.toml"
    found = sordino("calibrate", file, "--epsilon", 2, "--free", free, "--out", out, "--json").json
    before, after = (path.read_text().splitlines() for path in (file, out))
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    assert key in changed[0][1]
    assert found["recipe_kept"] is True
    assert found["epsilon"] <= 2
    assert sordino("plan", out, "--json").json["adversaries"][0]["epsilon"] == pytest.approx(found["epsilon"])


def test_every_silo_is_solved_for_its_own_budget(tmp_path: Path) -> None:
    """One noise for all gave each silo the same epsilon, or a file that `plan` refuses."""
    file, out = tmp_path / "silos.toml", tmp_path / "out.toml"
    file.write_text(SILOS + BUDGETS)
    assert sordino("plan", file).code == 2  # noise multiplier 3 overspends the first budget
    found = sordino("calibrate", file, "--out", out, "--json").json
    assert found["recipe_kept"] is True
    assert [budget.epsilon for budget in load_config(out).privacy.silos] == [1.0, 2.0, 4.0]
    assert spent(out) == pytest.approx({0: 1.0, 1: 2.0, 2: 4.0}, rel=0.01)
    assert all(cost <= budget for cost, budget in zip(spent(out).values(), (1.0, 2.0, 4.0), strict=True))
    assert "a budget for every silo" in sordino("calibrate", file, "--epsilon", 2).sentence
    assert "silo 2: noise_multiplier = " in sordino("calibrate", file).out


def test_a_recipe_that_solves_its_own_noise_is_given_the_target(tmp_path: Path) -> None:
    file, out = tmp_path / "best.toml", tmp_path / "out.toml"
    file.write_text('[recipe]\nname = "best"\npopulation = 60\nrounds = 3\nepsilon = 8.0  # ours\n')
    found = sordino("calibrate", file, "--epsilon", 3, "--out", out, "--json").json
    assert out.read_text() == file.read_text().replace("8.0", "3.0")
    assert 0.97 * 3 < found["epsilon"] <= 3


def test_a_target_is_needed_where_no_silo_has_a_budget(tmp_path: Path) -> None:
    assert "no --epsilon" in sordino("calibrate", federation(tmp_path)).sentence
