"""Promises of `sordino sweep`: every run once, one composition for the table, no metric from rows that chose."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests.commands import contents, federation, sordino

from sordino.accounting import accountant
from sordino.accounting.composition import Cost, Line
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.accounting.rounding import upto
from sordino.config import load_config
from sordino.config.sections import HoldoutPart
from sordino.errors import ConfigError, DataError
from sordino.ledger.ledger import Ledger
from sordino.report.text_table import Estimate, Row, best_of, seeds_text, settings_table
from sordino.runs.folder import RunFolder
from sordino.tuning.search_space import Interval, Space, Sweep, combinations, random_combinations
from sordino.tuning.sweep import compose_costs, evaluate

GRID = """
base = "fed.toml"
[sweep]
{more}
[sweep.grid]
"recipe.lr" = [0.1, 0.5]
"plan.encode.0.clip_norm" = [0.5, 1.0]
"""


def asked(folder: Path, more: str = "", grid: str = GRID, *changes: tuple[str, str]) -> Path:
    federation(folder, *changes)
    file = folder / "sweep.toml"
    file.write_text(grid.format(more=more))
    return file


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four settings of two seeds on own data, which nobody has called public."""
    folder = tmp_path_factory.mktemp("sweep")
    assert sordino("sweep", asked(folder, "seeds = [0, 1]"), "--out", folder / "a").code == 0
    return folder


def copied(private: Path, folder: Path) -> Path:
    shutil.copytree(private / "a", folder / "a")
    return folder / "a"


# ---- what reading the table costs ------------------------------------------------------------------------------------

EVENT = PoissonSampled(0.5, GaussianNoise(2.0))


def test_reading_the_table_costs_the_composition_of_all_runs(private: Path) -> None:
    made = json.loads((private / "a" / "certificate.json").read_text())
    truth = accountant.epsilon([(EVENT, 8 * 4)], "add_remove", 1e-3).value
    one = accountant.epsilon([(EVENT, 4)], "add_remove", 1e-3).value
    assert made["charged"] is True
    assert made["epsilon"] == pytest.approx(truth, rel=1e-4)
    assert one < 0.5 * made["epsilon"]  # sabotage: the cost of the winner alone
    assert made["epsilon"] < 8 * one  # and epsilons are not added up
    assert [line["adversary"] for line in made["adversaries"]] == ["models", "cohort", "messages"]
    (event,) = made["adversaries"][0]["events"]
    assert event["count"] == 32


def test_the_certificate_is_computed_again_from_the_runs(private: Path, tmp_path: Path) -> None:
    out = copied(private, tmp_path)
    said = sordino("certify", out)
    assert said.code == 0
    assert "all their events composed" in said.out
    file = out / "certificate.json"
    made = json.loads(file.read_text())
    file.write_text(file.read_text().replace(f'"epsilon": {made["epsilon"]}', '"epsilon": 0.1', 1))
    assert sordino("certify", out).code == 1
    file.write_bytes((private / "a" / "certificate.json").read_bytes())
    shutil.rmtree(out / "runs" / "002-seed1")
    assert sordino("certify", out).code != 0


def test_own_data_are_charged_unless_their_owner_calls_them_public(private: Path) -> None:
    made = json.loads((private / "a" / "certificate.json").read_text())
    assert (made["data"], made["declared_by"]) == ("private", "not declared public")
    table: dict[str, Any] = {"sweep": {"grid": {"recipe.lr": [0.1]}}, "task": {"dataset": "digits"}, "recipe": _RECIPE}
    assert Sweep.of(table).data == ("public", "the publisher of digits")
    table["sweep"]["data"] = "private"
    assert Sweep.of(table).data[0] == "private"
    own = {**table, "task": {"dataset": "npz", "options": {"path": "x.npz"}}}
    assert Sweep.of({**own, "sweep": {"grid": {"recipe.lr": [0.1]}}}).data[0] == "private"
    assert Sweep.of({**own, "sweep": {"data": "public", "grid": {"recipe.lr": [0.1]}}}).data == (
        "public",
        'the file: [sweep] data = "public"',
    )


_RECIPE: dict[str, Any] = {
    "name": "dp_fed_avg", "rounds": 1, "clients": {"kind": "everyone", "population": 3}, "lr": 0.1, "clip_norm": 1.0,
    "noise_multiplier": 1.0,
}  # fmt: skip


def test_a_free_table_names_who_declared_the_data_public(tmp_path: Path) -> None:
    file = asked(tmp_path, 'data = "public"\nmetric = "loss"')
    told = sordino("sweep", file, "--out", tmp_path / "a", "--json").json
    assert told["certificate"]["epsilon"] is None
    assert told["certificate"]["charged"] is False
    assert told["better"] == "smaller"
    assert "costs no privacy" in sordino("certify", tmp_path / "a").out
    assert load_config(tmp_path / "a" / "runs" / "000-seed3" / "plan.toml").run.seed == 3  # the file's own


POISSON, FIXED = (
    f'{{{{ kind = "{kind}", population = 60, {how} }}}}'
    for kind, how in (("poisson", "rate = 0.5"), ("fixed", "cohort = 30"))
)
MIXED = GRID.replace('"recipe.lr" = [0.1, 0.5]', f'"recipe.clients" = [{POISSON}, {FIXED}]')


def test_runs_that_protect_different_things_are_refused_in_a_sentence(tmp_path: Path) -> None:
    file = asked(tmp_path, grid=MIXED)
    assert "runs with relations add_remove and replace_one" in sordino("sweep", file, "--out", tmp_path / "a").sentence
    assert not (tmp_path / "a").exists()
    other = asked(tmp_path, grid=GRID.replace('"recipe.lr" = [0.1, 0.5]', '"privacy.delta" = [0.01, 0.001]'))
    assert "different deltas" in sordino("sweep", other, "--plan").sentence
    cut = GRID.replace(
        '"recipe.lr" = [0.1, 0.5]',
        '"task.partition" = [{{ kind = "iid", clients = 60 }}, {{ kind = "dirichlet", clients = 60, alpha = 1.0 }}]',
    )
    assert "partition into other clients" in sordino("sweep", asked(tmp_path, grid=cut), "--plan").sentence


def test_silos_that_differ_are_composed_silo_by_silo() -> None:
    def cost(*noise_multipliers: float) -> Cost:
        lines = [
            Line(who, "replace_one", ((GaussianNoise(z), 2),), (k,))
            for who in _WHO
            for k, z in enumerate(noise_multipliers)
        ]
        return Cost("record", tuple(lines))

    both = compose_costs([cost(1.0, 2.0, 2.0), cost(1.0, 3.0, 3.0)], 3)
    found = {line.silos: dict(line.entries) for line in both.of("messages")}
    assert found == {(0,): {GaussianNoise(1.0): 4}, (1, 2): {GaussianNoise(2.0): 2, GaussianNoise(3.0): 2}}
    with pytest.raises(ConfigError, match="one client and runs that protect one record"):
        compose_costs([cost(1.0), Cost("client", cost(1.0).lines)], 1)


_WHO: Any = ("models", "cohort", "messages")


def test_a_ledger_is_charged_for_every_run_and_asked_for_all_of_them_first(tmp_path: Path) -> None:
    ledger = tmp_path / "ours.ledger"
    words = ["ledger", "limit", ledger, "study", "--delta", 1e-3, "--unit", "client", "--relation", "add_remove"]
    assert sordino(*words, "--epsilon", 2).code == 0
    where = f'[privacy]\nledger = "{ledger}"\ndataset = "study"\n\n[run]'
    file = asked(tmp_path, "", GRID, ("[run]", where))
    refused = sordino("sweep", file, "--out", tmp_path / "a")
    assert refused.code == 1
    assert "would have spent" in refused.err
    assert not (tmp_path / "a").exists()  # one run could have been paid for: the four cannot
    assert sordino(*words, "--epsilon", 30).code == 0
    told = sordino("sweep", file, "--out", tmp_path / "a", "--json").json
    with Ledger.open(ledger) as book:
        spent = book.statement("study")
    assert spent.runs == 4
    assert spent.epsilon == pytest.approx(told["certificate"]["epsilon"], rel=0.01)


# ---- who chooses, who reports ----------------------------------------------------------------------------------------


def test_rows_that_choose_and_rows_that_report_have_none_in_common() -> None:
    both = [set(HoldoutPart(part, 4, 0.4).rows(101).tolist()) for part in ("validation", "test")]
    assert both[0] | both[1] == set(range(101))
    assert not both[0] & both[1]
    assert len(both[0]) == 40
    assert both[0] != set(HoldoutPart("validation", 5, 0.4).rows(101).tolist())
    whole = Sweep.of({"sweep": {"grid": {"recipe.lr": [0.1]}}, "recipe": _RECIPE}).config({}).build()
    with pytest.raises(DataError, match="a task without public test rows"):
        HoldoutPart("validation").of(replace(whole, test=None))
    with pytest.raises(DataError, match="at least 2 rows in each part"):
        HoldoutPart("validation", 0, 0.999).of(whole)


def test_the_winner_is_reported_on_rows_that_had_no_part_in_choosing(private: Path) -> None:
    out = private / "a"
    told = sordino("sweep", private / "sweep.toml", "--out", out, "--resume", "--json").json
    assert "15 test rows of data.npz, the validation part" in told["certificate"]["chosen_by"]
    assert "15 test rows of data.npz, the test part" in told["reported"]["rows"]
    asked = Sweep.read(private / "sweep.toml")
    figures = []
    for seed in (0, 1):
        task = asked.config(told["best"], seed, validation=False).build()
        number = told["table"][0]["setting"]
        figures.append(evaluate(task, out / "runs" / f"{number:03d}-seed{seed}")["accuracy"])
    assert told["reported"]["accuracy"] == pytest.approx(np.mean(figures))
    assert load_config(out / "best.toml").task.half is None
    assert f"on {told['reported']['rows']}, which were not used to select" in (out / "table.txt").read_text()


def test_a_file_of_validation_rows_leaves_the_test_rows_whole(tmp_path: Path) -> None:
    from tests.commands import arrays

    data = arrays()
    np.savez(tmp_path / "test.npz", x=data["test_x"], y=data["test_y"])
    np.savez(tmp_path / "choose.npz", x=data["x"][:40], y=data["y"][:40])
    file = asked(tmp_path, f'validation = "{tmp_path / "choose.npz"}"')
    np.savez(tmp_path / "data.npz", x=data["x"], y=data["y"], classes=np.int64(3))
    text = (tmp_path / "fed.toml").read_text().replace('data.npz" }', f'data.npz", test = "{tmp_path / "test.npz"}" }}')
    (tmp_path / "fed.toml").write_text(text)
    told = sordino("sweep", file, "--plan")
    assert "chosen_by: 40 rows of choose.npz" in told.out
    assert "reported_on: 30 rows of test.npz" in told.out


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_sweep_goes_on_where_it_was(private: Path, tmp_path: Path) -> None:
    out = copied(private, tmp_path)
    shutil.rmtree(out / "runs" / "003-seed1")  # never begun
    (out / "runs" / "001-seed0" / "certificate.json").unlink()  # killed before its end
    (out / "certificate.json").unlink()
    kept = contents(out / "runs" / "000-seed0")
    said = sordino("sweep", private / "sweep.toml", "--out", out, "--resume")
    assert said.code == 0
    assert said.out.count("sweep ") == 2
    assert contents(out / "runs" / "000-seed0") == kept
    assert (out / "table.csv").read_bytes() == (private / "a" / "table.csv").read_bytes()
    assert json.loads((out / "certificate.json").read_text())["epsilon"] is not None


def test_another_question_is_not_the_same_sweep(private: Path, tmp_path: Path) -> None:
    out = copied(private, tmp_path)
    other = asked(tmp_path, "seeds = [0, 1]\nsplit = 7")
    assert "which holds" in sordino("sweep", other, "--out", out, "--resume").sentence
    assert "which exists" in sordino("sweep", private / "sweep.toml", "--out", out).sentence


def test_several_processes_write_the_same_table(private: Path, tmp_path: Path) -> None:
    said = sordino("sweep", private / "sweep.toml", "--out", tmp_path / "b", "--workers", 2)
    assert said.code == 0
    assert (tmp_path / "b" / "table.csv").read_bytes() == (private / "a" / "table.csv").read_bytes()


def test_a_run_that_diverges_is_a_row_and_is_charged_and_not_run_again(tmp_path: Path) -> None:
    steps = GRID.replace('"recipe.lr" = [0.1, 0.5]', '"plan.server.lr" = [1.0, 1e38]').replace("0.5, 1.0]", "1e6]")
    file = asked(tmp_path, grid=steps)
    told = sordino("sweep", file, "--out", tmp_path / "a", "--json").json
    assert [row["accuracy"] is None for row in told["table"]] == [False, True]
    (event,) = told["certificate"]["adversaries"][0]["events"]
    assert event["count"] == 8
    kept = contents(tmp_path / "a" / "runs")
    assert sordino("sweep", file, "--out", tmp_path / "a", "--resume").code == 0
    assert contents(tmp_path / "a" / "runs") == kept
    assert sordino("certify", tmp_path / "a").code == 0


@pytest.mark.parametrize("command", ["explain", "compare", "report"])
def test_a_whole_sweep_is_shown_with_what_reading_it_costs(private: Path, tmp_path: Path, command: str) -> None:
    out = ("--out", tmp_path / "page.html") if command == "report" else ()
    made = json.loads((private / "a" / "certificate.json").read_text())
    one = json.loads((private / "a" / "runs" / "000-seed0" / "certificate.json").read_text())
    assert made["epsilon"] > one["epsilon"]
    asked = sordino(command, private / "a", *out)
    said = (tmp_path / "page.html").read_text() if out else asked.out
    assert asked.code == 0
    assert f"8 runs on private data costs epsilon {upto(made['epsilon'], 4)}" in said

    edited = copied(private, tmp_path) / "runs" / "000-seed0" / "history.jsonl"
    edited.write_text(edited.read_text().replace("accuracy", "acuracy"))
    assert sordino(command, tmp_path / "a", *out).code == 1


def test_every_run_of_a_sweep_is_a_run_like_any_other(private: Path) -> None:
    for folder in sorted((private / "a" / "runs").iterdir()):
        assert RunFolder.open(folder).certify()["epsilon"] is not None
    with open(private / "a" / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8
    assert {line["plan.encode.0.clip_norm"] for line in lines} == {"0.5", "1"}
    assert (private / "a" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (private / "a" / "sweep.svg").read_text()


# ---- what is tried, and how it is told -------------------------------------------------------------------------------


def test_a_grid_is_every_combination_and_random_ones_stay_in_their_interval() -> None:
    space: Space = {"a": (1, 2), "b": ("x", "y", "z")}
    assert len({tuple(one.values()) for one in combinations(space)}) == 6
    wide: Space = {"lr": Interval(1e-3, 10.0, log=True), "n": Interval(2, 5, integer=True), "b": space["b"]}
    found = random_combinations(wide, 400, 3)
    assert found == random_combinations(wide, 400, 3) != random_combinations(wide, 400, 4)
    assert all(1e-3 <= one["lr"] <= 10 and one["n"] in (2, 3, 4, 5) and one["b"] in "xyz" for one in found)
    middle = np.median([one["lr"] for one in found])
    assert 0.03 < middle < 0.3  # evenly in the logarithm: the middle is 0.1
    with pytest.raises(ConfigError, match=r"sweep\.random"):
        combinations(wide)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[sweep]", "without grid"),
        ("[sweep]\nmetrik = 1\n[sweep.grid]\n'recipe.lr' = [1]", "did you mean 'metric'?"),
        ("[sweep.grid]\n'recipe.lrr' = [1]", "did you mean 'lr'?"),
        ("[sweep.grid]\n'recipe.lr' = 1", "a list of values"),
        ("[sweep.grid]\n'recipe.lr' = []", "at least one value"),
        ("[sweep.random]\ntrials = 2\n'recipe.lr' = { low = 2, high = 1 }", "low < high"),
        ("[sweep]\nseeds = [1, 1]\n[sweep.grid]\n'recipe.lr' = [1]", "each seed once"),
        ("[recipe]\nrounds = 2", "no [sweep]"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_runs(tmp_path: Path, wrong: str, said: str) -> None:
    federation(tmp_path)
    (tmp_path / "sweep.toml").write_text(f'base = "fed.toml"\n{wrong}\n')
    assert said in sordino("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "a").sentence
    assert not (tmp_path / "a").exists()


def test_fewer_than_three_seeds_have_no_interval_and_the_table_says_so(private: Path) -> None:
    """Two would have one of 12.7 standard errors to each side."""
    assert Estimate.of([0.3, 0.5]).text() == "0.4000"
    assert "+-" in Estimate.of([0.3, 0.5, 0.9]).text()
    assert "+-" not in (private / "a" / "table.txt").read_text()
    assert seeds_text((0, 1)) == "mean of seeds 0, 1: no interval, which needs 3 seeds"
    assert seeds_text((0, 1, 2)) == "mean of seeds 0, 1, 2, +- 95% interval"


def test_intervals_are_students_and_differences_are_taken_seed_by_seed() -> None:
    values = [0.3, 0.5, 0.9]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    found = Estimate.of(values)
    assert (found.mean - (found.half_width or 0), found.mean + (found.half_width or 0)) == pytest.approx((low, high))
    one, two = (Row(k, {}, (0, 1, 2), tuple(v + k * 0.1 for v in values), None) for k in (0, 1))
    gap = one.minus(two)
    assert gap is not None
    assert [gap.mean, gap.half_width] == pytest.approx([-0.1, 0.0], abs=1e-12)
    assert best_of([one, two], "accuracy") is two
    assert best_of([one, two], "rmse") is one


# ---- algorithms compared at one epsilon ------------------------------------------------------------------------------

COMPARE = """
[task]
dataset = "digits"
options = { train = 120 }
partition = { kind = "iid", clients = 30 }
model = { kind = "own", name = "digit_cnn", options = { channels = 2 } }
[recipe]
rounds = 2
clients = { kind = "poisson", population = 30, rate = 0.5 }
lr = 0.1
clip_norm = 0.5
epochs = 1
batch = 4
[sweep]
epsilon = 8
seeds = [0, 1, 2]
recipe = [
    "dp_fed_avg", "dp_fed_ls", { name = "dp_fed_sam", rho = [0.05, 0.1] }, "dp_fed_sam_top_k", "fed_smp", "blur",
    { name = "best", population = 30, rate = 0.5 },
]
"""
MODEL = Path(__file__).parents[2] / "examples" / "compare_model.py"


def test_seven_methods_are_compared_at_one_epsilon_on_a_net_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "compare.toml"
    file.write_text(COMPARE)
    found = sordino("sweep", file, "--with", MODEL, "--out", tmp_path / "a", "--json").json
    names = [row["values"]["recipe.name"] for row in found["table"]]
    assert len(names) == 8
    assert set(names) == {"dp_fed_avg", "dp_fed_ls", "dp_fed_sam", "dp_fed_sam_top_k", "fed_smp", "blur", "best"}
    for row in found["table"]:
        assert 0.98 * 8 < row["epsilon_of_one_run"] <= 8
        assert row["relation"] == "add_remove"
        assert row["half_width"] is not None
    assert [row["minus_best_half_width"] is None for row in found["table"]] == [True] + [False] * 7
    for folder in (tmp_path / "a" / "runs").iterdir():  # the noise that ran is what was solved
        assert 0.98 * 8 < RunFolder.open(folder).certify()["epsilon"] <= 8
    latex = (tmp_path / "a" / "table.tex").read_text()
    assert r"\toprule" in latex
    assert r"dp\_fed\_sam\_top\_k" in latex
    assert "add" in latex
    assert "<svg" in (tmp_path / "a" / "sweep.svg").read_text()


def test_the_shipped_comparison_has_seven_methods_that_load() -> None:
    from sordino import codec

    codec.load_parts_file(MODEL)
    asked = Sweep.read(MODEL.with_name("compare.toml"))
    settings = asked.spec.settings()
    assert len({one["recipe.name"] for one in settings}) == 7
    spent = {asked.config(one).plan.cost().line("models").entries for one in settings}
    assert len(spent) == 1  # one sampler, one noise: one epsilon for all


def compared(sweep: dict[str, Any], **recipe: Any) -> Sweep:
    shared = {key: value for key, value in _RECIPE.items() if key not in ("name", "noise_multiplier")}
    return Sweep.of({"sweep": sweep, "recipe": {**shared, **recipe}})


def test_a_recipe_takes_common_keys_that_it_knows_and_its_own() -> None:
    asked = compared({"recipe": ["dp_fed_avg", {"name": "scaffold", "steps": [2, 3]}], "epsilon": 20}, epochs=2)
    configs = [asked.config(one) for one in asked.spec.settings()]
    assert [getattr(config.plan.local, "epochs", None) for config in configs] == [2, None, None]
    assert [getattr(config.plan.local, "steps", None) for config in configs] == [None, 2, 3]
    tables = compared({"epsilon": 20, "recipe": {"dp_fed_avg": {}, "scaffold": {"steps": [2, 3]}}})
    assert tables.spec.settings() == asked.spec.settings()
    crossed = compared({"recipe": ["dp_fed_avg", "scaffold"], "epsilon": 20, "grid": {"recipe.epochs": [1, 2]}})
    assert [one.get("recipe.epochs") for one in crossed.spec.settings()] == [1, 2, None]  # scaffold has none
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        compared({"recipe": ["dp_fed_avg", "scaffold"], "epsilon": 20}, epoch=2).runs()
    with pytest.raises(ConfigError, match="did you mean 'scaffold'"):
        compared({"recipe": ["scafold"], "epsilon": 20}).runs()
    with pytest.raises(ConfigError, match="the name of a recipe"):
        compared({"recipe": [3]}).spec.settings()


def test_every_epsilon_of_a_list_is_solved_at_the_delta_of_the_run() -> None:
    asked = compared({"recipe": ["dp_fed_avg"], "epsilon": [4.0, 16.0]})
    for changes, target in zip(asked.spec.settings(), (4.0, 16.0), strict=True):
        config = asked.config(changes)
        line = config.plan.cost().line("models")
        assert accountant.epsilon(line.entries, line.relation, config.delta).value == pytest.approx(target, rel=0.01)


def test_rows_whose_neighbours_differ_say_so_beside_their_epsilon() -> None:
    rows = [Row(k, {"k": k}, (0,), (0.5,), 1.0, name) for k, name in enumerate(("add_remove", "zero_out"))]
    text = settings_table(rows, "accuracy").text().splitlines()
    assert text[0].split()[-1] == "relation"
    assert [line.split()[-1] for line in text[1:]] == ["add_remove", "zero_out"]


def test_a_band_is_the_mean_and_interval_of_every_round_that_all_seeds_have() -> None:
    row = Row(0, {}, (0, 1, 2), (0.3, 0.5, 0.9), 1.0, "add_remove", (((1, 0.1), (2, 0.3)), ((2, 0.5),), ((2, 0.9),)))
    assert row.band() == [(2, Estimate.of([0.3, 0.5, 0.9]))]
