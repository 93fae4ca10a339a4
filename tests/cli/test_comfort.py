"""Comfort: help without asking, a doctor, the examples of the wheel, words of other libraries understood."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from tests.commands import federation, sordino
from torch.utils.data import DataLoader, TensorDataset

from sordino import codec
from sordino.cli.configure import SENTENCES
from sordino.dpsgd import make_private
from sordino.errors import ConfigError
from sordino.recipes import RECIPES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("words", [(), ("recipes",), ("ledger",)])
def test_a_command_without_words_prints_its_help(words: tuple[str, ...]) -> None:
    said = sordino(*words)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("Usage: ")
    assert "\nCommands:\n" in said.out


def test_every_recipe_has_one_sentence_of_its_own() -> None:
    ours = {name for name, made in RECIPES.items() if made.__module__.startswith("sordino.")}
    assert set(SENTENCES) == ours
    assert len(set(SENTENCES.values())) == len(SENTENCES)
    assert all(said.endswith(".") and said.count(". ") == said.count("et al. ") for said in SENTENCES.values())


def test_a_list_of_recipes_does_not_wait_for_torch() -> None:
    check = "import sys; from sordino.cli.configure import recipes; recipes(False); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_doctor_says_what_is_there_and_how_to_get_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    found = sordino("doctor", "--json").json["findings"]
    assert all(one["state"] in ("ok", "note") for one in found)
    assert any(one["what"].startswith("torch ") and one["state"] == "ok" for one in found)
    assert all("pip install 'sordino[" in one["fix"] for one in found if one["what"].startswith("no ") and one["fix"])


def test_the_doctor_finds_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "nowhere"))
    said = sordino("doctor")
    assert said.code == 1
    assert "trouble  SORDINO_DATA" in said.out


def test_the_examples_are_copied_whole_and_never_over_anything(tmp_path: Path) -> None:
    names = sordino("examples", "--to", tmp_path / "ex", "--json").json["examples"]
    assert {"demo.py", "fed.toml", "own_part/own_part/parts.py"} <= set(names)
    for name in names:
        assert (tmp_path / "ex" / name).read_bytes() == (ROOT / "examples" / name).read_bytes()
    assert sordino("examples", "--to", tmp_path / "ex").code == 2


def test_every_example_is_in_the_wheel() -> None:
    """setuptools takes what these patterns name."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["data-files"]
    held = {str(file.relative_to(ROOT)) for globs in told.values() for glob in globs for file in ROOT.glob(glob)}
    assert held == {f"examples/{name}" for name in sordino("examples", "--json").json["examples"]}


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm is called clip_norm here"),
        ({"multiplier": 1.0}, "multiplier is called noise_multiplier here"),
        ({"target_epsilon": 1.0}, "target_epsilon is called epsilon here"),
        ({"epsilonn": 1.0}, "did you mean 'epsilon'"),
    ],
)
def test_the_words_of_opacus_are_understood(words: dict[str, float], ours: str) -> None:
    model = torch.nn.Linear(2, 2)
    loader = DataLoader(TensorDataset(torch.rand(8, 2), torch.zeros(8, dtype=torch.int64)), batch_size=4)
    with pytest.raises(ConfigError, match=ours):
        make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader, epochs=1, **words)  # type: ignore[arg-type]


def test_the_words_of_others_are_understood_in_a_file(tmp_path: Path) -> None:
    said = sordino("plan", federation(tmp_path, ("noise_multiplier = 2.0", "multiplier = 2.0")))
    assert said.code == 2
    assert "multiplier is called noise_multiplier here" in said.sentence


def test_a_word_of_ours_is_never_taken_for_another() -> None:
    from sordino.codec.serialization import ELSEWHERE

    assert codec.nearest("batch_size", ["batch_size", "lr"]) == "did you mean 'batch_size'?"
    assert all(names for names in ELSEWHERE.values())
