"""Promises to silos that have names: a budget, a size or a noise goes to the silo it was written for, or nowhere."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.commands import sordino

from sordino.accounting.rounding import upto
from sordino.config import Config, load_config, parse
from sordino.errors import ConfigError
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import LocalNoise

SITES = {"NY": 30, "LA": 20, "Bern": 50}  # the alphabet says Bern, LA, NY; the file does not
FILE = """
[task]
dataset = "csv"
options = {{ path = "{folder}/sites.csv", target = "sick", groups = "site", classes = 2 }}
{task}

[recipe]
name = "silo"
rounds = 3
{sizes}
{recipe}

[privacy]
{privacy}
"""
SIZES = "sizes = { NY = 30, LA = 20, Bern = 50 }"
LIST = "sizes = [50, 20, 30]"
SAME = "silos.NY = { epsilon = 1 }\nsilos.LA = { epsilon = 2 }\nsilos.Bern = { epsilon = 4 }"


def written(folder: Path, privacy: str = SAME, sizes: str = SIZES, recipe: str = "", task: str = "") -> Path:
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal():.3f},{site},{i % 2}" for site, count in SITES.items() for i in range(count)]
    (folder / "sites.csv").write_text("\n".join(["age,site,sick", *rows]) + "\n")
    file = folder / "fed.toml"
    file.write_text(FILE.format(folder=folder, privacy=privacy, sizes=sizes, recipe=recipe, task=task))
    return file


def spent(made: dict[str, Any]) -> dict[str, float]:
    own = made["adversaries"][-1]["silos"]
    return {made["silos"][silo]: entry["epsilon"] for entry in own for silo in entry["silos"]}


@pytest.mark.parametrize("task", ["", 'silos = ["NY", "Bern", "LA"]'])
def test_every_silo_spends_the_budget_under_its_own_name(tmp_path: Path, task: str) -> None:
    """By position in the alphabet the first number was Bern's, which nobody had written."""
    file = written(tmp_path, task=task)
    found = sordino("run", file, "--out", tmp_path / "run", "--json").json["certificate"]
    assert spent(found) == pytest.approx({"NY": 1.0, "LA": 2.0, "Bern": 4.0}, rel=1e-3)
    deltas = {entry["delta"] for entry in found["adversaries"][-1]["silos"]}
    assert deltas == {min(n**-1.1, 1e-3) for n in SITES.values()}
    said = sordino("explain", tmp_path / "run").out
    assert all(f"Silo {name}: epsilon {upto(value)} at" in said for name, value in spent(found).items())
    assert spent(sordino("plan", file, "--json").json) == spent(found)
    assert "of NY" in sordino("plan", file).out
    assert sordino("certify", tmp_path / "run").code == 0
    again = sordino("run", tmp_path / "run" / "plan.toml", "--out", tmp_path / "again", "--json").json["certificate"]
    assert spent(again) == spent(found)


def test_the_data_are_cut_in_the_order_of_the_names(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, task='silos = ["NY", "Bern", "LA"]'))
    assert config.task.silos == ("NY", "Bern", "LA")
    assert np.diff(config.build().clients.offsets).tolist() == [30, 50, 20]
    assert np.diff(load_config(written(tmp_path)).build().clients.offsets).tolist() == [50, 20, 30]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"privacy": SAME.replace("NY", "NYC")}, "silo 'NYC' in privacy.silos"),
        ({"privacy": "silos.NY = { epsilon = 1 }"}, "no silo 'Bern' in privacy.silos"),
        ({"privacy": "silos = [{ epsilon = 1 }, { epsilon = 2 }, { epsilon = 4 }]", "sizes": LIST}, "their order"),
        ({"privacy": "", "sizes": LIST, "recipe": "epsilons = [4, 2, 1]"}, "values by the silos' names"),
        ({"privacy": "", "sizes": LIST, "recipe": "epsilons = [4]"}, "values by the silos' names"),
        ({"task": 'silos = ["NY", "LA"]'}, "silo 'Bern' in recipe.sizes"),
        ({"task": 'silos = ["NY", "LA", "Bern", "NY"]'}, "silo 'NY' twice"),
        ({"task": 'partition = { kind = "iid", clients = 3 }'}, "a partition that has none"),
    ],
)  # fmt: skip
def test_a_budget_that_belongs_to_nobody_is_refused(tmp_path: Path, given: dict[str, str], said: str) -> None:
    refused = sordino("run", written(tmp_path, **given), "--out", tmp_path / "run")
    assert said in refused.sentence
    assert not (tmp_path / "run").exists()


def test_names_that_the_data_do_not_have_are_refused_before_anything_runs(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace("NY", "Rome"))
    assert (
        "silo 'Rome' in [task] silos; needed a silo of the data"
        in sordino("run", file, "--out", tmp_path / "a").sentence
    )


def test_a_list_that_says_its_own_order_is_taken(tmp_path: Path) -> None:
    task = 'silos = ["NY", "LA", "Bern"]'
    found = load_config(written(tmp_path, "", "sizes = [30, 20, 50]", "epsilons = [1, 2, 4]", task))
    named = load_config(written(tmp_path, "", SIZES, "epsilons = { NY = 1, LA = 2, Bern = 4 }", task))
    assert found.plan == named.plan


def test_noise_and_sizes_of_any_recipe_may_be_named() -> None:
    text = """
    [task]
    dataset = "heart_disease"
    [recipe]
    name = "noisy_minibatch_sgd"
    rounds = 2
    clients = { kind = "everyone", population = 2 }
    records = { kind = "fixed_records", batch = 5, sizes = { b = 20, a = 10 } }
    clip_norm = 1.0
    lr = 0.1
    [recipe.release]
    kind = "local_noise"
    mechanism = { kind = "gaussian", noise_multiplier = 1.0 }
    noise_multipliers = { a = 3.0, b = 4.0 }
    """
    config = parse(tomllib.loads(text))
    assert isinstance(config.plan.local, BatchGradient)
    assert isinstance(config.plan.release, LocalNoise)
    assert (config.task.silos, config.plan.local.records.sizes) == (("a", "b"), (10, 20))
    assert config.plan.release.noise_multipliers == (3.0, 4.0)
    with pytest.raises(ConfigError, match=r"silo 'c' in recipe\.release\.noise_multipliers"):
        parse(tomllib.loads(text.replace("b = 4.0", "c = 4.0")))


UNNAMED = """
[task]
dataset = "digits"
partition = { kind = "iid", clients = 2 }
[recipe]
name = "silo"
sizes = [719, 719]
rounds = 2
[privacy]
"""


def test_silos_without_names_keep_a_list() -> None:
    config = parse(tomllib.loads(UNNAMED + "silos = [{ epsilon = 1 }, { epsilon = 2 }]"))
    assert isinstance(config, Config)
    assert [budget.epsilon for budget in config.budgets] == [1, 2]
    named = parse(tomllib.loads(UNNAMED + "silos = { a = { epsilon = 1 }, b = { epsilon = 2 } }"))
    with pytest.raises(ConfigError, match="data without natural silos"):
        named.build()


def test_the_hospitals_of_the_example_have_their_names() -> None:
    config = load_config(Path(__file__).resolve().parents[2] / "examples" / "hospitals.toml")
    assert config.task.silos == ("cleveland", "hungarian", "switzerland", "va")
    assert [budget.epsilon for budget in config.budgets] == [1.0, 2.0, 4.0, 8.0]


def test_a_size_that_is_not_the_datas_is_told_by_the_silos_name(tmp_path: Path) -> None:
    said = sordino(
        "run", written(tmp_path, sizes=SIZES.replace("LA = 20", "LA = 21")), "--out", tmp_path / "a"
    ).sentence
    assert "silo 'LA' with 20 records, while the plan declares 21" in said
    assert "set sizes = { Bern = 50, LA = 20, NY = 30 } in [recipe]" in said
    assert not (tmp_path / "a").exists()
