"""Weights to begin with: public by the user's word alone, checked, hashed, on the certificate, the same on a resume."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.commands import federation, sordino
from tests.tiny import clients, mlp, plan, seeded
from torch import Tensor, nn

from sordino.config import load_config
from sordino.errors import DataError
from sordino.task import Task
from sordino.training import train

Weights = dict[str, Tensor]


def saved(path: Path, weights: Weights) -> Path:
    safetensors.torch.save_file(weights, path)
    return path


def with_init(folder: Path, seed: int = 5) -> tuple[Path, Path]:
    """A federation that begins at weights of its own, and the file of them."""
    bare = load_config(federation(folder)).build().model
    file = federation(folder, ("[task]", f'[task]\ninit = "{folder}/model.safetensors"'))
    return file, saved(folder / "model.safetensors", seeded(bare, seed).state_dict())


def test_a_run_begins_where_the_file_says(tmp_path: Path) -> None:
    file, weights = with_init(tmp_path)
    task = load_config(file).build()
    wanted = safetensors.torch.load_file(weights)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in task.model.state_dict().items())


def test_the_certificate_says_that_they_are_public_and_by_whose_word(tmp_path: Path) -> None:
    file, weights = with_init(tmp_path)
    found = sordino("run", file, "--out", tmp_path / "run", "--json").json["certificate"]
    (entry,) = [one for one in found["declared_public"] if one["what"] == "initial weights"]
    assert entry["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert entry["by"] == "the user: init = model.safetensors"
    assert any("what the weights were trained on are not protected" in text for text in found["assumptions"])
    assert "initial weights (declared by the user" in sordino("explain", tmp_path / "run").out
    assert sordino("certify", tmp_path / "run").code == 0
    plain = tmp_path / "plain"
    plain.mkdir()
    other = sordino("run", federation(plain), "--out", plain / "run", "--json").json["certificate"]
    assert found["epsilon"] == other["epsilon"]  # they cost nothing, and protect nothing
    assert all("sha256" not in one for one in other["declared_public"])


def test_other_weights_before_a_resume_are_noticed(tmp_path: Path) -> None:
    file, weights = with_init(tmp_path)
    sordino("run", file, "--out", tmp_path / "run")
    before = weights.read_bytes()
    saved(weights, {name: tensor + 1 for name, tensor in safetensors.torch.load(before).items()})
    assert "the initial weights" in sordino("run", file, "--out", tmp_path / "run", "--resume").sentence
    weights.write_bytes(before)
    assert sordino("run", file, "--out", tmp_path / "run", "--resume").code == 0


def test_a_hash_that_was_edited_is_noticed(tmp_path: Path) -> None:
    file, weights = with_init(tmp_path)
    sordino("run", file, "--out", tmp_path / "run")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    for name in ("run.json", "certificate.json"):
        kept = tmp_path / "run" / name
        before = kept.read_text()
        kept.write_text(before.replace(digest, "0" * 64))
        assert kept.read_text() != before
        assert sordino("certify", tmp_path / "run").code == 1
        kept.write_text(before)


def test_a_task_made_in_python_takes_them_too(tmp_path: Path) -> None:
    other = seeded(mlp(), 9)
    file = saved(tmp_path / "other.safetensors", other.state_dict())
    before = mlp()
    task = Task.of(before, clients(), init=file)
    assert torch.equal(task.layout.flatten(task.model), task.layout.flatten(other))
    assert not torch.equal(task.layout.flatten(before), task.layout.flatten(other))  # the caller's model is left alone
    made = train(plan(), task, allow_large_delta=True).certificate
    (entry,) = made["declared_public"]
    assert (entry["rows"], entry["what"]) == (task.layout.size, "initial weights")
    assert any(text.endswith("what the weights were trained on is not protected") for text in made["assumptions"])


def _without(weights: Weights) -> Weights:
    return dict(list(weights.items())[1:])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without, "without '0.weight'"),
        (lambda w: {**w, "extra": torch.zeros(1)}, "'extra' in"),
        (lambda w: {**w, "0.bias": torch.zeros(3)}, "of shape"),
        (lambda w: {**w, "0.bias": w["0.bias"].double()}, "in float64"),
        (lambda w: {**w, "0.bias": w["0.bias"] * torch.nan}, "NaN or infinity in '0.bias'"),
        (lambda w: {**w, "0.bias": w["0.bias"] + torch.inf}, "NaN or infinity in '0.bias'"),
    ],
    ids=["missing", "extra", "shape", "dtype", "nan", "infinity"],
)
def test_weights_that_do_not_fit_are_one_sentence(
    tmp_path: Path, change: Callable[[Weights], Weights], said: str
) -> None:
    file = saved(tmp_path / "m.safetensors", change(mlp().state_dict()))
    with pytest.raises(DataError, match=said) as error:
        Task.of(mlp(), clients(), init=file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"\x08", b"\xff" * 64, b"PK\x03\x04 a zip", None])
def test_a_file_that_holds_no_weights_is_one_sentence(tmp_path: Path, data: bytes | None) -> None:
    file = tmp_path / "m.safetensors"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(DataError, match=r"no safetensors file|cannot be read") as error:
        Task.of(nn.Linear(4, 3), clients(), init=file)
    assert "\n" not in str(error.value)
