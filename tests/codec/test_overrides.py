"""Promises of --set and --seed: typed as TOML, plan.toml holds them, a wrong key is named with the nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.commands import federation, sordino

from sordino import codec
from sordino.cli.console import time_left, working
from sordino.config import load_config
from sordino.errors import ConfigError
from sordino.parts.encoding import Clip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("3", 3),
        ("1e-3", 0.001),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('{ kind = "everyone", population = 9 }', {"kind": "everyone", "population": 9}),
        ("mnist", "mnist"),
        ('"two words"', "two words"),
        ("data/a.npz", "data/a.npz"),
    ],
)
def test_a_value_is_typed_as_toml_does_it_and_a_bare_word_is_text(text: str, value: Any) -> None:
    assert codec.parse_setting(f"some.key={text}") == ("some.key", value)


@pytest.mark.parametrize("text", ["lr", "=3", "lr=", "lr=a b", "lr=1\nb=2", "lr=[1,"])
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        codec.parse_setting(text)


def test_only_the_named_place_changes_and_the_table_given_does_not() -> None:
    table = {"a": {"b": [{"c": 1, "d": 2}, {"c": 3}]}, "e": 5}
    assert codec.put(table, "a.b.1.c", 9) == {"a": {"b": [{"c": 1, "d": 2}, {"c": 9}]}, "e": 5}
    assert codec.put(table, "f.g", 9) == {**table, "f": {"g": 9}}
    assert table == {"a": {"b": [{"c": 1, "d": 2}, {"c": 3}]}, "e": 5}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("recpie.lr=1", "did you mean 'recipe'?"),
        ("recipe.clip_nrom=1", "did you mean 'clip_norm'?"),
        ("run.sede=1", "did you mean 'seed'?"),
        ("plan.encode.2.clip_norm=1", "a number from 0 to 0"),
        ("plan.encode.0.clip_nrom=1", "did you mean 'clip_norm'?"),
        ("recipe.lr.at=1", "set recipe.lr itself"),
        ("recipe.lr=fast", "a number"),
        ("run..seed=1", "names with dots"),
    ],
)
def test_a_wrong_key_is_one_sentence(tmp_path: Path, key: str, said: str) -> None:
    assert said in sordino("plan", federation(tmp_path), "--set", key).sentence


def test_the_folder_holds_what_was_overridden(tmp_path: Path) -> None:
    file, out = federation(tmp_path), tmp_path / "run"
    words = [
        "run",
        file,
        "--out",
        out,
        "--set",
        "recipe.rounds=2",
        "--set",
        "plan.encode.0.clip_norm=0.25",
        "--seed",
        11,
    ]
    assert sordino(*words).code == 0
    kept = load_config(out / "plan.toml")
    assert (kept.plan.rounds, kept.run.seed) == (2, 11)
    assert kept.plan.encode == (Clip(0.25),)
    assert sordino("certify", out).code == 0
    assert sordino(*words, "--resume").code == 0
    assert sordino("run", file, "--out", out, "--resume").code != 0  # without them it is another run


def test_a_plan_that_a_recipe_builds_is_changed_where_it_stands(tmp_path: Path) -> None:
    """In whatever order they are given: the recipe's own arguments first."""
    file = federation(tmp_path)
    one = load_config(file, ["plan.server.lr=0.5", "recipe.clip_norm=3.0"])
    two = load_config(file, ["recipe.clip_norm=3.0", "plan.server.lr=0.5"])
    assert one == two
    assert one.plan.encode == (Clip(3.0),)
    assert one.plan.server.lr == 0.5  # type: ignore[attr-defined]


def test_calibrate_and_audit_take_them_too(tmp_path: Path) -> None:
    file, out = federation(tmp_path), tmp_path / "run"
    few, many = (
        sordino("calibrate", file, "--epsilon", 3, "--set", f"recipe.rounds={n}", "--json").json["value"]
        for n in (2, 8)
    )
    assert few < many
    assert sordino("run", file, "--out", out).code == 0
    assert "the folder of a finished run" in sordino("audit", out, "--mechanism", "--seed", 4).sentence


def test_progress_never_goes_back_where_work_is_found_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    with working("tune", quiet=False) as progress:
        for done, total in ((1, 4), (2, 4), (3, 12), (6, 12), (9, 12), (12, 12)):
            progress(done, total, "")
    shares = [int(line.split("%")[0].split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert shares == [25, 50, 50, 50, 75, 100]


def test_the_time_left_is_that_of_the_rest_at_the_same_pace() -> None:
    assert time_left(30.0, 1.0, 3.0) == ", about 60 s left"
    assert time_left(300.0, 1.0, 3.0) == ", about 10 min left"
    assert time_left(3.0, 3.0, 3.0) == time_left(3.0, 0.0, 3.0) == ""


def test_a_search_tells_how_far_it_is(tmp_path: Path) -> None:
    words = ["tune", federation(tmp_path), "--epsilon", 5, "--trials", 1, "--set", "recipe.rounds=2"]
    said = [line for line in sordino(*words).out.splitlines() if line.startswith("tune, epsilon 5 ")]
    shares = [int(line.split("%")[0].split()[-1]) for line in said]
    assert len(said) >= 8
    assert shares[-1] == 100
    assert shares == sorted(shares)
    assert shares.count(100) == 1  # and not before it is done
    assert all(" s left" in line for line in said if "100%" not in line)
