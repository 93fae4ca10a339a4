"""Promises of runs of silos: accounted, certified, explained and stopped silo by silo, also after a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.commands import arrays, lines, sordino
from tests.silos import planned

from sordino.accounting import accountant
from sordino.accounting.calibration import Budget
from sordino.accounting.events import Event, FixedSampled, GaussianNoise, Relation
from sordino.config import load_config
from sordino.errors import BudgetError, ConfigError
from sordino.ledger.budget import client_filter
from sordino.parts.record_samplers import AllRecords
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import Forward
from sordino.parts.samplers import Everyone
from sordino.recipes import silo
from sordino.recipes.record_level import budgets
from sordino.runs.execution import execute
from sordino.runs.folder import RunFolder
from sordino.runs.writer import RunWriter


def cost(event: Event, count: int, relation: Relation = "replace_one", delta: float = 1e-5) -> float:
    return accountant.epsilon(((event, count),), relation, delta).value


SILOS = """
[task]
dataset = "npz"
options = {{ path = "{data}" }}
partition = {{ kind = "iid", clients = 4 }}

[recipe]
name = "noisy_minibatch_sgd"
rounds = 4
clients = {clients}
records = {{ kind = "{records}", batch = 6, sizes = [60] }}
clip_norm = 1.0
noise_multiplier = 8.0
lr = 0.5

[privacy]
{privacy}

[run]
seed = 5
"""
THREE = '{ kind = "fixed", population = 4, cohort = 3 }'
ALL, SOME = '{ kind = "everyone", population = 4 }', '{ kind = "fixed", population = 4, cohort = 2 }'


def written(folder: Path, clients: str = ALL, records: str = "fixed_records", privacy: str = "") -> Path:
    np.savez(folder / "data.npz", **arrays())
    file = folder / "fed.toml"
    file.write_text(SILOS.format(data=folder / "data.npz", clients=clients, records=records, privacy=privacy))
    return file


def own_budgets(*epsilons: float, delta: float = 1e-3) -> str:
    return f"silos = [{', '.join(f'{{ epsilon = {e}, delta = {delta} }}' for e in epsilons)}]"


def killed_in(round_: int, file: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until the checkpoint of a round would be written: it was charged, and its release may have been seen."""
    save = RunWriter.save

    def dies(folder: RunWriter, state: Any) -> None:
        if state.t == round_:
            raise KeyboardInterrupt
        save(folder, state)

    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            execute(load_config(file), out)


def test_a_pass_that_ran_a_round_again_after_a_kill_is_billed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = written(tmp_path, records="one_pass"), tmp_path / "a"
    killed_in(2, file, out, monkeypatch)
    found = execute(load_config(file), out, resume=True).certificate
    assert [line["round"] for line in lines(out / "charges.jsonl")] == [1, 2, 2, 3, 4]
    assert found["counts"]["rounds_charged_again"] == 1
    assert found["adversaries"][0]["events"][0]["count"] == 2
    exact = cost(GaussianNoise(8.0), 2, delta=1e-3)
    assert exact <= found["epsilon"] <= exact + 2e-6
    assert RunFolder.open(out).certify() == found


def test_a_budget_worth_one_pass_refuses_the_round_that_would_read_a_block_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = cost(GaussianNoise(8.0), 1, delta=1e-3) * 1.05
    file = written(tmp_path, records="one_pass", privacy=own_budgets(9.0, once, 9.0, 9.0))
    whole = execute(load_config(file), tmp_path / "whole").certificate
    assert whole["counts"]["rounds_charged"] == 4  # uninterrupted, one release per record is all it costs
    killed_in(2, file, tmp_path / "a", monkeypatch)
    with pytest.raises(BudgetError, match="first client 1"):
        execute(load_config(file), tmp_path / "a", resume=True)
    assert [line["round"] for line in lines(tmp_path / "a" / "charges.jsonl")] == [1, 2]


def test_lines_repeated_in_the_charges_are_noticed(tmp_path: Path) -> None:
    file, out = written(tmp_path, records="one_pass"), tmp_path / "a"
    execute(load_config(file), out)
    charges = out / "charges.jsonl"
    charges.write_text(charges.read_text() + charges.read_text().splitlines()[0] + "\n")
    said = sordino("certify", out)
    assert said.code == 1
    assert "charges.jsonl line 5 does not follow" in said.err


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which half of the silos came to each round."""
    folder = tmp_path_factory.mktemp("some")
    execute(load_config(written(folder, SOME)), folder / "run")
    return folder / "run"


def test_a_run_of_silos_is_certified_and_explained_silo_by_silo(some: Path) -> None:
    found = sordino("certify", some, "--json").json
    counts = [line["cohort"] for line in lines(some / "charges.jsonl")]
    each = [sum(index in cohort for cohort in counts) for index in range(4)]
    assert found["counts"]["participations_per_silo"] == each
    assert found["unit"] == "record"
    said = sordino("explain", some, "--json").json
    assert "single record of a silo" in said["protected"]
    assert len(said["silos"]) == len(set(each))
    assert "Guarantee of each silo" in sordino("explain", some).out


@pytest.mark.parametrize("place", [0, 3])
def test_a_silos_rounds_that_were_touched_are_noticed(some: Path, tmp_path: Path, place: int) -> None:
    copy = Path(shutil.copytree(some, tmp_path / "copy"))
    file = copy / "certificate.json"
    table = json.loads(file.read_text())
    table["counts"]["participations_per_silo"][place] -= 1
    file.write_text(json.dumps(table, indent=2) + "\n")
    for command in ("certify", "explain"):
        said = sordino(command, copy)
        assert said.code == 1
        assert f"counts.participations_per_silo[{place}]" in said.err


def test_a_charge_that_hides_a_silo_is_noticed(some: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(some, tmp_path / "copy"))
    kept = [{**line, "cohort": line["cohort"][1:]} for line in lines(copy / "charges.jsonl")]
    (copy / "charges.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert sordino("certify", copy).code == 1


def test_a_silos_budget_stops_the_round_that_would_overspend_it(tmp_path: Path) -> None:
    two = cost(FixedSampled(60, 6, GaussianNoise(8.0)), 2, delta=1e-3) * 1.02
    file = written(tmp_path, THREE, privacy=own_budgets(9.0, 9.0, two, 9.0))
    config = load_config(file)
    assert config.budget is not None
    assert config.budget.allowed[2] == 2 < config.budget.allowed[0]
    said = sordino("run", file, "--out", tmp_path / "a")
    assert said.code == 1
    assert "first client 2" in said.err
    assert sum(2 in line["cohort"] for line in lines(tmp_path / "a" / "charges.jsonl")) == 2
    assert sordino("certify", tmp_path / "a").code == 0
    everyone = written(tmp_path, privacy=own_budgets(9.0, 9.0, two, 9.0))
    assert "4 rounds, 4 of them with client 2, whose budget allows 2" in sordino("plan", everyone).sentence


def test_a_budget_of_local_steps_is_worth_whole_rounds() -> None:
    local = NoisyLocalSgd(AllRecords((30,)), 1.0, 8.0, 0.1, steps=3)
    plan = planned(rounds=9, clients=Everyone(4), local=local, release=Forward())
    for releases, rounds in ((2, 0), (3, 1), (8, 2)):
        spent = cost(GaussianNoise(8.0), releases) * 1.001
        assert client_filter(plan, Budget(spent, 1e-5)).allowed.tolist() == [rounds] * 4


def test_the_forecast_of_silos_with_their_own_deltas_is_their_certificate(tmp_path: Path) -> None:
    file = written(tmp_path, privacy=own_budgets(9.0, 9.0, 9.0, 9.0, delta=1e-4))
    forecast = sordino("plan", file, "--json").json
    found = execute(load_config(file), tmp_path / "a").certificate
    assert (forecast["epsilon"], forecast["delta"]) == (found["epsilon"], found["delta"])
    assert forecast["delta"] == 1e-4
    assert forecast["adversaries"] == found["adversaries"]


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (own_budgets(9.0, 0.0, 9.0, 9.0), "epsilon above 0"),
        (own_budgets(9.0, -2.0, 9.0, 9.0), "epsilon above 0"),
        (own_budgets(9.0, 9.0), "2 deltas for 4 silos"),
        (own_budgets(9.0, 9.0, 9.0, 9.0, delta=0.4), "at most population^-1.1"),
    ],
)
def test_a_budget_that_means_nothing_is_the_users_mistake(tmp_path: Path, privacy: str, said: str) -> None:
    assert said in sordino("run", written(tmp_path, privacy=privacy), "--out", tmp_path / "a").sentence
    assert not (tmp_path / "a").exists()


def test_an_epsilon_of_nothing_in_the_silo_recipe_is_exit_code_two(tmp_path: Path) -> None:
    file = tmp_path / "fed.toml"
    file.write_text('[recipe]\nname = "silo"\nsizes = [30, 60]\nepsilons = [1.0, 0.0]\n')
    assert "epsilon above 0" in sordino("plan", file).sentence
    file.write_text('[recipe]\nname = "silo"\nsizes = [30, 60, 90]\nepsilons = [1.0, 2.0]\n')
    assert "2 epsilons for 3 silos" in sordino("plan", file).sentence


def test_sizes_that_are_not_the_silos_are_the_users_mistake(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace("sizes = [60]", "sizes = [60, 60, 60, 59]"))
    assert "silo 3 with 60 records" in sordino("run", file, "--out", tmp_path / "a").sentence


def test_a_delta_of_a_small_silo_is_measured_by_its_own_size() -> None:
    """size^-1.1 of each silo, as the silo recipe takes it, passes though one silo is larger."""
    from sordino.config import Config, PrivacySpec, SiloBudget

    plan = silo(sizes=(600, 4000), epsilons=(2.0,), rounds=3)
    own = tuple(SiloBudget(budget.epsilon, budget.delta) for budget in budgets((600, 4000), (2.0,)))
    config = Config(plan=plan, privacy=PrivacySpec(silos=own))
    assert config.deltas == (600**-1.1, 4000**-1.1)
    assert config.budget is not None
    assert config.budget.allowed.min() >= 3  # and the run it was calibrated for is not stopped
    with pytest.raises(ConfigError):
        Config(plan=plan, privacy=PrivacySpec(silos=own[::-1]))
