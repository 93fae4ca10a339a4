"""Train metrics: asked for, true, among the diagnostics that are not private, and refused beside a release."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.commands import federation, lines, sordino
from tests.tiny import clients, mlp, plan
from torch import nn

from sordino.data.clients import Clients, Records
from sordino.errors import ConfigError
from sordino.outcome import DIAGNOSTIC
from sordino.report.text_table import NOT_PRIVATE
from sordino.task import Task
from sordino.training import train

TEST = (torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))


def test_they_are_the_figures_of_the_released_model_on_all_records() -> None:
    task = Task.of(mlp(), clients(), test=TEST)
    done = train(plan(rounds=3), task, allow_large_delta=True, eval_every=2, train_metrics=True)
    x, y = (torch.cat([pair[side] for pair in clients()]) for side in (0, 1))
    with torch.no_grad():
        out = done.model(x)
    last = {name.removeprefix(NOT_PRIVATE): value for name, value in done.history[-1].items()}
    assert last["train_loss"] == pytest.approx(float(F.cross_entropy(out, y)), rel=1e-5)
    assert last["train_accuracy"] == pytest.approx(float((out.argmax(1) == y).float().mean()))
    assert [f"{NOT_PRIVATE}train_loss" in line for line in done.history] == [False, True, True]  # where it is evaluated


def test_only_records_that_a_client_holds_are_read() -> None:
    x, y = torch.randn(10, 4), torch.randn(10, 1)
    held = Clients(Records(x, y), np.array([3, 1, 7], np.int64), np.array([0, 2, 3], np.int64))
    model = nn.Linear(4, 1)
    found = Task(model, held, loss="mse").evaluate_clients(
        torch.cat([p.detach().reshape(-1) for p in (model.weight, model.bias)])
    )
    wanted = float(F.mse_loss(model(x[[3, 1, 7]]), y[[3, 1, 7]]).detach())
    assert found == pytest.approx({"train_loss": wanted, "train_rmse": wanted**0.5}, rel=1e-5)


def test_they_are_marked_as_not_private_and_no_figure_of_the_run_changes() -> None:
    task = Task.of(mlp(), clients(), test=TEST)
    plain = train(plan(), task, allow_large_delta=True)
    asked = train(plan(), task, allow_large_delta=True, train_metrics=True)
    for one, other in zip(plain.history, asked.history, strict=True):
        first, second = ({k: v for k, v in line.items() if not k.startswith(NOT_PRIVATE)} for line in (one, other))
        assert first == second
        assert not [name for name in one if name.removeprefix(NOT_PRIVATE).startswith("train")]
        assert not [name for name in second if name.startswith("train")]
    assert plain.certificate == asked.certificate
    assert any("train metrics" in text for text in asked.certificate["not_covered"])


def test_a_run_for_release_refuses_them(tmp_path: Path) -> None:
    task = Task.of(mlp(), clients())
    with pytest.raises(ConfigError, match="train_metrics"):
        train(plan(), task, allow_large_delta=True, noise="secure", train_metrics=True)
    file = federation(tmp_path, ("[run]", '[privacy]\nnoise = "secure"\n\n[run]\ntrain_metrics = true'))
    assert "train_metrics" in sordino("run", file, "--out", tmp_path / "run").sentence
    assert not (tmp_path / "run").exists()


def test_a_file_asks_for_them_and_history_marks_them(tmp_path: Path) -> None:
    file = federation(tmp_path, ("[run]", "[run]\ntrain_metrics = true"))
    sordino("run", file, "--out", tmp_path / "run")
    for line in lines(tmp_path / "run" / "history.jsonl"):
        assert "train_accuracy" in line[DIAGNOSTIC]
        assert not [name for name in line if name.startswith("train")]
    assert sordino("certify", tmp_path / "run").code == 0
