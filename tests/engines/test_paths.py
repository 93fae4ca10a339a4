"""Promises of the seam: every way is in one table, the first that fits is taken, and no refusal chooses one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.tiny import noise, plan, seeded
from torch import Tensor, nn

import sordino.engines
from sordino.engines import objectives
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import PATHS, choose_path
from sordino.parts.gradients import Moreau
from sordino.parts.local_solvers import LocalSgd
from sordino.rng import Seeded
from sordino.task import Task

MODELS: dict[str, nn.Module] = {
    "LinearClients": nn.Linear(4, 3),
    "DenseClients": nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
    "ManyClients": nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)),
    "OneClient": nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
}


def task(model: nn.Module, loss: str = "cross_entropy") -> Task:
    y = torch.arange(6) % 3 if loss == "cross_entropy" else noise(6, 3)
    return Task.of(seeded(model), [(noise(6, 4), y)] * 2, loss=loss)


@pytest.mark.parametrize(("place", "name"), list(enumerate(MODELS)))
def test_each_way_is_taken_by_the_models_it_is_for(place: int, name: str) -> None:
    made = InProcess().prepare(plan(), task(MODELS[name]), Seeded(0))
    assert choose_path(plan(), task(MODELS[name])) is PATHS[place]
    assert (made.header["gradient"], made.header["path"]) == (name, PATHS[place].path)


def test_a_path_that_is_asked_for_takes_the_best_way_on_it() -> None:
    for path, wanted in (
        ("batched", ["LinearClients", "DenseClients", "ManyClients", "ManyClients"]),
        ("sequential", ["OneClient"] * 4),
    ):
        made = [InProcess(path=path).prepare(plan(), task(model), Seeded(0)) for model in MODELS.values()]  # type: ignore[arg-type]
        assert [one.header["gradient"] for one in made] == wanted


def test_an_envelope_goes_only_where_it_is_computed() -> None:
    smoothed = plan(local=LocalSgd(lr=0.1, epochs=1, gradient=Moreau(1.0)))
    found = {
        (name, loss): PATHS.index(choose_path(smoothed, task(MODELS[name], loss)))
        for name in ("LinearClients", "DenseClients")
        for loss in ("absolute", "mse")
    }
    assert list(found.values()) == [0, 2, 2, 2]


def test_large_steps_go_one_client_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "BATCH_BELOW", {"cpu": 1.0})
    assert [PATHS.index(choose_path(plan(), task(model))) for model in MODELS.values()] == [0, 1, 3, 3]


def test_every_way_computes_the_same_gradient() -> None:
    data, w = task(MODELS["LinearClients"]), noise(1, 15)
    batch = next(iter(InProcess().prepare(plan(), data, Seeded(0)).reader.batches(torch.tensor([0]).numpy(), [ROWS])))
    found: list[Tensor] = []
    for way in (PATHS[0], PATHS[2], PATHS[3]):
        ours = way.make(data, plan(), Seeded(0))
        start = ours.place(w[0], 1)
        found.append(ours.gradient(start, batch).clone())
    assert all(torch.allclose(found[0], other, atol=1e-6) for other in found)


ROWS = torch.arange(6)[None].numpy()


def test_no_refusal_chooses_a_path() -> None:
    """A doubt about privacy stops the run: an engine that caught it might go on another way."""
    for file in Path(next(iter(sordino.engines.__path__))).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                assert "PlanError" not in ast.unparse(node.type), f"{file.name}:{node.lineno}"
