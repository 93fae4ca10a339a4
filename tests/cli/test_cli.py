"""The command line: what each command promises to print."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.commands import Said, federation, sordino, spelt_out

from sordino import cli
from sordino.accounting import accountant
from sordino.config import load_config
from sordino.parts.samplers import Poisson
from sordino.plan import Plan
from sordino.recipes import RECIPES

CONSOLE = [str(Path(sys.executable).parent / "sordino")]


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that runs."""
    return federation(tmp_path_factory.mktemp("fed"))


@pytest.fixture(scope="module")
def ran(fed: Path) -> Said:
    """`run --json` of it, into runs/a."""
    return sordino("run", fed, "--out", fed.parent / "runs" / "a", "--json")


def cost(plan: Plan, delta: float) -> float:
    """Epsilon to one who sees the released models."""
    line = plan.cost().line("models")
    return accountant.epsilon(line.entries, line.relation, delta).value


# ---- one JSON object ------------------------------------------------------------------------------------------------


def test_every_command_takes_json() -> None:
    def leaves(command: Any) -> list[Any]:
        inner = getattr(command, "commands", None)
        return [command] if inner is None else [leaf for each in inner.values() for leaf in leaves(each)]

    found = leaves(typer.main.get_command(cli.app))
    assert len(found) >= 7
    assert [leaf.name for leaf in found if not any("--json" in option.opts for option in leaf.params)] == []


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("plan", "FED"), "bounds"),
        (("epsilon", "--sampler", "full", "--population", 9, "--noise-multiplier", 2), "epsilon"),
        (("calibrate", "FED", "--epsilon", 3), "value"),
        (("certify", "RUN"), "certified"),
        (("explain", "RUN"), ""),
        (("recipes", "list"), "recipes"),
        (("recipes", "show", "dp_fed_avg"), "example"),
    ],
)
def test_json_is_one_object_and_nothing_else(words: tuple[object, ...], key: str, fed: Path, ran: Said) -> None:
    there = {"FED": fed, "RUN": ran.json["out"]}
    said = sordino(*(there.get(str(word), word) for word in words), "--json")
    assert said.err == ""
    assert not key or key in said.json


def test_a_run_says_where_how_good_and_how_private(ran: Said) -> None:
    assert ran.err == ""
    found = ran.json
    assert found["last"]["round"] == 4
    assert 0 <= found["last"]["accuracy"] <= 1
    assert found["certificate"] == json.loads((Path(found["out"]) / "certificate.json").read_text())


def test_infinity_is_a_word_in_json(tmp_path: Path) -> None:
    clipless = (
        ('release = { kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }', ""),
        ("clip_norm = 1.0", "clip_norm = inf"),
        ('kind = "poisson", population = 60, rate = 0.5', 'kind = "everyone", population = 60'),
        ("[run]", 'release = { kind = "no_noise" }\n\n[run]'),
    )
    found = sordino("plan", spelt_out(tmp_path, *clipless), "--json").json
    assert found["plan"]["encode"][0]["clip_norm"] == "inf"
    assert found["epsilon"] is None


def test_a_pipe_gets_plain_lines_and_a_mistake_gets_code_two(fed: Path) -> None:
    out = fed.parent / "piped"
    done = subprocess.run(
        [*CONSOLE, "run", fed, "--out", out], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[:4]] == [["round", f"{t}/4"] for t in range(1, 5)]
    assert "epsilon" in done.stdout
    assert str(out) in done.stdout
    assert "\x1b" not in done.stdout
    wrong = subprocess.run([*CONSOLE, "trane", fed], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("sordino: ")
    assert wrong.stderr.count("\n") == 1


def test_stopping_by_hand_is_a_sentence_and_code_130(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sordino.runs.execution.execute", stopped)
    said = sordino("run", fed, "--out", fed.parent / "never")
    assert said.code == 130
    assert "--resume" in said.err
    assert said.err.strip().count("\n") == 0


# ---- plan -----------------------------------------------------------------------------------------------------------


def test_plan_touches_no_data(fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("plan read data")

    monkeypatch.setattr("sordino.config.sections.load", never)
    gone = tmp_path / "gone.toml"
    gone.write_text(fed.read_text().replace("data.npz", "no such file.npz"))
    assert sordino("plan", gone, "--json").json["epsilon"] == sordino("plan", fed, "--json").json["epsilon"]
    assert list(tmp_path.iterdir()) == [gone]


def test_the_forecast_is_the_certificate_of_the_run(fed: Path, ran: Said) -> None:
    forecast, certificate = sordino("plan", fed, "--json").json, ran.json["certificate"]
    shared = set(forecast) & set(certificate)
    assert shared >= {"epsilon", "delta", "unit", "relation", "adversaries", "sampler", "trust", "clip", "plan_sha256"}
    assert {key: forecast[key] for key in shared} == {key: certificate[key] for key in shared}


def test_plan_shows_how_the_message_comes_to_be_bounded(fed: Path) -> None:
    chain = sordino("plan", fed, "--json").json["bounds"]
    assert [entry["after"] for entry in chain] == ["local_sgd", "clip"]
    assert chain[0]["bound"] == "none"
    assert "at most 1" in chain[1]["bound"]
    page = sordino("plan", fed).out
    assert all(word in page for word in ("4 rounds", "poisson", "local_sgd", "clip", "forecast", "add_remove"))


# ---- calibrate ------------------------------------------------------------------------------------------------------


def test_calibrate_writes_a_file_that_costs_the_target(fed: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibrated.toml"
    found = sordino("calibrate", fed, "--epsilon", 1.5, "--out", out, "--json").json
    forecast = sordino("plan", out, "--json").json
    assert 1.5 * 0.995 <= forecast["epsilon"] <= 1.5
    assert forecast["epsilon"] == found["epsilon"]
    assert forecast["plan"]["release"]["mechanism"]["noise_multiplier"] == found["value"]
    before, after = load_config(fed), load_config(out)
    assert replace(after, plan=before.plan, privacy=before.privacy) == before  # nothing else has changed


@pytest.mark.parametrize("free", ["rounds", "cohort"])
def test_calibrate_finds_the_most_that_the_target_allows(free: str, fed: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibrated.toml"
    found = sordino("calibrate", fed, "--epsilon", 1.2, "--free", free, "--out", out, "--json").json
    config = load_config(out)
    plan, size = config.plan, config.plan.clients.expected
    more = replace(plan, rounds=plan.rounds + 1) if free == "rounds" else _larger(plan)
    assert found["value"] == (plan.rounds if free == "rounds" else pytest.approx(size))
    assert cost(plan, config.delta) <= 1.2 < cost(more, config.delta)


def _larger(plan: Plan) -> Plan:
    """One client more in a round, on average."""
    return replace(plan, clients=Poisson(60, (plan.clients.expected + 1) / 60))


def test_calibrate_takes_another_delta_into_the_file(fed: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibrated.toml"
    sordino("calibrate", fed, "--epsilon", 2, "--delta", 1e-6, "--out", out, "--json")
    forecast = sordino("plan", out, "--json").json
    assert forecast["delta"] == 1e-6
    assert 2 * 0.995 <= forecast["epsilon"] <= 2


# ---- recipes --------------------------------------------------------------------------------------------------------


def test_recipes_list_names_them_all() -> None:
    found = sordino("recipes", "list", "--json").json["recipes"]
    assert [entry["name"] for entry in found] == list(RECIPES)
    assert all(entry["summary"] for entry in found)


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_example_of_a_recipe_is_a_file_that_plans(name: str, tmp_path: Path) -> None:
    file = tmp_path / "fed.toml"
    file.write_text(sordino("recipes", "show", name).out)
    assert sordino("plan", file, "--json").json["rounds"] >= 5


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_example_of_a_recipe_learns_something_under_a_modest_epsilon(name: str, tmp_path: Path) -> None:
    """As it is printed; guessing has .1 on digits and .66 on the tumours, and .07 was once the worst of them."""
    file = tmp_path / "fed.toml"
    file.write_text(sordino("recipes", "show", name).out + "eval_every = 1000\n")
    found = sordino("run", file, "--out", tmp_path / "a", "--json").json
    assert found["last"]["accuracy"] > 0.8
    assert 0.5 < found["certificate"]["epsilon"] < 8
