"""A mistake in the input ends with code 2 and one sentence, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.commands import arrays, contents, federation, sordino, spelt_out


def refused(file: Path, *words: str) -> None:
    """`run` refuses the file, says every word of `words`, and leaves no trace."""
    out, before = file.parent / "runs" / "a", contents(file.parent)
    sentence = sordino("run", file, "--out", out).sentence
    assert [word for word in words if word not in sentence] == [], sentence
    assert not out.parent.exists()
    assert contents(file.parent) == before


@pytest.mark.parametrize(
    ("found", "instead", "words"),
    [
        ("clip_norm =", "clip_nrom =", ("recipe.clip_nrom", "'clip_norm'")),
        ("[task]", "[tasks]", ("tasks", "'task'")),
        ("[run]", "[run]\nsede = 1", ("run.sede", "'seed'")),
        ("[run]", "[privacy]\ndleta = 1e-5\n[run]", ("privacy.dleta", "'delta'")),
        ("dataset =", "datset =", ("task.datset", "'dataset'")),
        ("rate =", "cup = 3, rate =", ("recipe.clients.cup", "'cap'")),
        ("{ path", "{ pth", ("'pth'", "'path'")),
    ],
)
def test_an_unknown_key_names_the_nearest(found: str, instead: str, words: tuple[str, ...], tmp_path: Path) -> None:
    refused(federation(tmp_path, (found, instead)), "unknown", *words)


@pytest.mark.parametrize(
    ("found", "instead", "words"),
    [
        ("rounds = 4", "rounds = 4.5", ("recipe.rounds = 4.5",)),
        ("rounds = 4", 'rounds = "4"', ("recipe.rounds = '4'",)),
        ("lr = 0.5", "lr = true", ("recipe.lr = True", "number")),
        ('dataset = "npz"', "dataset = 3", ("task.dataset = 3",)),
        ("[run]", "[privacy]\nnoise = 'quantum'\n[run]", ("privacy.noise = 'quantum'", "simulation", "secure")),
        ("seed = 3", "seed = 2026-01-01", ("2026",)),
        ("{ path", "{ train = 'many', path", ("task.options", "'many'")),
        ("{ path", "{ name = 'npz', path", ("unknown option 'name'", "path")),
    ],
)
def test_a_wrong_type_is_shown(found: str, instead: str, words: tuple[str, ...], tmp_path: Path) -> None:
    refused(federation(tmp_path, (found, instead)), *words)


@pytest.mark.parametrize(
    ("found", "instead", "words"),
    [
        ("rate = 0.5", "rate = 1.5", ("rate = 1.5", "(0, 1]")),
        ("rate = 0.5", "rate = 0.0", ("rate = 0.0", "(0, 1]")),
        ("rate = 0.5", "rate = nan", ("rate = nan", "(0, 1]")),
        ("[run]", "[privacy]\ndelta = 1.0\n[run]", ("delta = 1.0", "[0, 1)")),
        ("[run]", "[privacy]\ndelta = 1.5\nallow_large_delta = true\n[run]", ("delta = 1.5", "[0, 1)")),
        ("[run]", "[privacy]\ndelta = 0.5\n[run]", ("delta = 0.5", "allow_large_delta")),
        ("rounds = 4", "rounds = 0", ("rounds = 0", "at least 1")),
        ("rounds = 4\n", "", ("recipe.rounds",)),
        ("clip_norm = 1.0", "clip_norm = -1.0", ("clip_norm -1.0", "positive")),
        ("clip_norm = 1.0", "clip_norm = inf", ("bound",)),
        ("noise_multiplier = 2.0", "noise_multiplier = -2.0", ("noise multiplier -2.0", "positive")),
        ("seed = 3", "seed = 99999999999999999999", ("seed = 99999999999999999999",)),
        ("seed = 3", "seed = 3\neval_every = 0", ("eval_every = 0", "at least 1")),
        ("poisson", "poison", ("'poison'", "'poisson'")),
        ('"dp_fed_avg"', '"dp_fedavg"', ("recipe 'dp_fedavg'", "'dp_fed_avg'")),
        ('name = "dp_fed_avg"\n', "", ("name", "dp_fed_avg")),
        ('"npz"', '"npy"', ("data set 'npy'", "'npz'")),
        ("[task]", "[plan]\nrounds = 1\n[task]", ("both [recipe] and [plan]",)),
        ("[recipe]", "loss = 'mze'\n[recipe]", ("'mze'", "'mse'")),
        ("[recipe]", "loss = 'mse'\n[recipe]", ("loss 'mse'",)),
        ("[recipe]", "model = { kind = 'char_lstm' }\n[recipe]", ("a model and a loss that fit the data",)),
        ("clients = 60", "clients = 600", ("a plan for 60 clients", "600")),
    ],
)
def test_a_value_that_cannot_be_is_refused(found: str, instead: str, words: tuple[str, ...], tmp_path: Path) -> None:
    refused(federation(tmp_path, (found, instead)), *words)


def test_a_population_that_is_not_the_data_s_is_refused(tmp_path: Path) -> None:
    refused(federation(tmp_path, ("population = 60", "population = 61")), "61 clients", "60", "population = 60")


def test_noise_without_a_clip_is_refused(tmp_path: Path) -> None:
    without = spelt_out(tmp_path, ('encode = [{ kind = "clip", clip_norm = 1.0 }]\n', ""))
    refused(without, "without a norm bound", "Clip")


def test_neither_a_recipe_nor_a_plan_is_refused(tmp_path: Path) -> None:
    file = federation(tmp_path)
    file.write_text(file.read_text().split("[recipe]")[0])
    refused(file, "neither [recipe] nor [plan]")


@pytest.mark.parametrize("key", ["x", "test_x"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_that_is_not_finite_is_refused(key: str, value: float, tmp_path: Path) -> None:
    data = arrays()
    data[key][17, 2] = value
    refused(federation(tmp_path, data=data), "1 NaN or infinite", key, "record 17")


def test_data_without_a_record_is_refused(tmp_path: Path) -> None:
    empty: dict[str, Any] = {**arrays(), "x": np.zeros((0, 6), np.float32), "y": np.zeros(0, np.int64)}
    refused(federation(tmp_path, data=empty), "no records")


def test_data_that_is_no_data_is_refused(tmp_path: Path) -> None:
    file = federation(tmp_path)
    (tmp_path / "data.npz").write_bytes(b"PK but no archive")
    refused(file, "data.npz", "cannot be read")
    (tmp_path / "data.npz").unlink()
    refused(file, "data.npz", "cannot be read")


@pytest.mark.parametrize("command", ["plan", "run", "calibrate"])
def test_a_file_that_cannot_be_read_is_refused(command: str, tmp_path: Path) -> None:
    options: dict[str, tuple[object, ...]] = {"run": ("--out", tmp_path / "a"), "calibrate": ("--epsilon", 1)}
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin").write_bytes(b"name = '\xe4\xff'")
    (tmp_path / "prose").write_text("dear sordino,")
    for name, word in (("nowhere", "No such file"), ("folder", "directory"), ("latin", "UTF-8"), ("prose", "not TOML")):
        sentence = sordino(command, tmp_path / name, *options.get(command, ())).sentence
        assert word in sentence
        assert name in sentence
    assert not (tmp_path / "a").exists()


def test_an_out_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    file, out = federation(tmp_path), tmp_path / "a"
    out.mkdir()
    (out / "precious").write_text("mine")
    before = contents(tmp_path)
    assert "--resume" in sordino("run", file, "--out", out).sentence
    assert "plan.toml" in sordino("run", file, "--out", out, "--resume").sentence
    assert "data.npz/a" in sordino("run", file, "--out", tmp_path / "data.npz" / "a").sentence
    assert contents(tmp_path) == before


def test_calibrate_never_overwrites(tmp_path: Path) -> None:
    file, out = federation(tmp_path), tmp_path / "mine.toml"
    out.write_text("mine")
    assert "mine.toml" in sordino("calibrate", file, "--epsilon", 1, "--out", out).sentence
    assert out.read_text() == "mine"
    assert "nowhere" in sordino("calibrate", file, "--epsilon", 1, "--out", tmp_path / "nowhere" / "a.toml").sentence


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--epsilon 1 --free round", "'rounds'"),
        ("--epsilon 1 --free clip_norm", "noise_multiplier, rounds or cohort"),
        ("--epsilon 0", "epsilon 0"),
        ("--epsilon nan", "epsilon nan"),
        ("--epsilon 1 --delta 1", "delta = 1"),
        ("--epsilon 0.01 --free rounds", "already for 1 round"),
        ("", "--epsilon"),
    ],
)
def test_a_target_that_cannot_be_met_is_refused(words: str, named: str, tmp_path: Path) -> None:
    file, out = federation(tmp_path), tmp_path / "calibrated.toml"
    assert named in sordino("calibrate", file, *words.split(), "--out", out).sentence
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("trane", "trane"),
        ("--bogus", "--bogus"),
        ("plan", "file"),
        ("plan a.toml b.toml", "b.toml"),
        ("run a.toml", "--out"),
        ("run a.toml --out b --thread 2", "--thread"),
        ("certify /", "plan.toml"),
        ("recipes show dp_fed_av", "'dp_fed_avg'"),
        ("recipes show", "name"),
    ],
)
def test_a_command_that_is_not_one_is_refused(words: str, named: str) -> None:
    assert named in sordino(*words.split()).sentence


def test_an_engine_or_threads_that_are_not_there_are_refused(tmp_path: Path) -> None:
    file, out = federation(tmp_path), tmp_path / "a"
    assert "'inprocess'" in sordino("run", file, "--out", out, "--engine", "inproces").sentence
    assert "at least 1" in sordino("run", file, "--out", out, "--threads", 0).sentence
    assert "nonsense" in sordino("run", file, "--out", out, "--device", "nonsense").sentence
    assert not out.exists()


LONG = "x" * 300  # more than any file system takes as a name


@pytest.mark.parametrize(
    "words",
    [
        ("run", "{fed}", "--out", "{folder}/" + LONG),
        ("plan", "{folder}/" + LONG),
        ("certify", "{folder}/" + LONG),
        ("explain", "{folder}/" + LONG),
        ("report", "{folder}/" + LONG),
        ("compare", "{folder}/" + LONG, "{folder}/" + LONG),
        ("audit", "{folder}/" + LONG),
        ("audit", "{folder}/" + LONG, "--mechanism"),
        ("tune", "{fed}", "--out", "/proc/x"),
        ("tune", "{fed}", "--out", "{folder}/" + LONG),
        ("tune", "{fed}", "--out", "/proc/x.toml"),
        ("calibrate", "{fed}", "--epsilon", "4", "--delta", "1e-3", "--out", "/proc/x.toml"),
        ("calibrate", "{fed}", "--epsilon", "4", "--delta", "1e-3", "--out", "{folder}/" + LONG),
    ],
    ids=lambda words: " ".join(word for word in words if LONG not in word and "{" not in word),
)
def test_a_path_that_the_system_refuses_is_one_sentence(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sordino.cli.tune_output.tune", _never_reached)
    file = federation(tmp_path)
    before = contents(tmp_path)
    said = sordino(*(word.format(fed=file, folder=tmp_path) for word in words)).sentence
    assert LONG[:20] in said or "/proc/x" in said
    assert contents(tmp_path) == before


def _never_reached(*_: object, **__: object) -> None:
    raise AssertionError("the work was begun before the path was tried")
