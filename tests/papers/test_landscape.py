"""Promises of the loss landscape: its centre is the model, its directions have the model's scale, and it is drawn."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.commands import federation, sordino
from tests.tiny import clients, mlp, noise, seeded, task
from torch import nn

from sordino.errors import DataError
from sordino.layout import Layout
from sordino.task import Task
from sordino_papers.landscape import Landscape, direction, draw, landscape


def public(model: nn.Module | None = None) -> Task:
    return Task.of(model or mlp(), clients(), test=clients((40,))[0])


def conv_net() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3)))


def test_the_centre_is_the_models_own_test_loss() -> None:
    data = public()
    found = landscape(data.model, data, points=5)
    assert found.loss.shape == (5, 5)
    assert found.span.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert found.loss[2, 2] == pytest.approx(data.evaluate(data.layout.flatten(data.model))["loss"], rel=1e-6)
    assert found.sharpness == pytest.approx(float(found.loss.mean() - found.loss[2, 2]))


def test_every_point_is_the_loss_at_the_model_plus_its_steps() -> None:
    data = public()
    found = landscape(data.model, data, reach=0.5, points=3, seed=4)
    centre = data.layout.flatten(data.model)
    first, second = (direction(centre, data.layout, 4, name) for name in ("first", "second"))
    for i, a in enumerate(found.span):
        for j, b in enumerate(found.span):
            wanted = data.evaluate(centre + float(a) * first + float(b) * second)["loss"]
            assert found.loss[i, j] == pytest.approx(wanted, rel=1e-5)
    assert found.loss[0, 2] != pytest.approx(found.loss[2, 0], rel=1e-3)  # the two directions differ


@pytest.mark.parametrize("build", [mlp, conv_net])
def test_every_filter_of_a_direction_has_the_norm_of_the_models_own(build: type[nn.Module]) -> None:
    model = build()
    layout = Layout.of(model)
    centre = layout.flatten(model)
    way = direction(centre, layout, 0, "first")
    for slot in layout.slots:
        own, step = (vector[slot.start : slot.stop].view(slot.shape) for vector in (centre, way))
        if slot.trainable and len(slot.shape) > 1:
            assert torch.allclose(step.flatten(1).norm(dim=1), own.flatten(1).norm(dim=1), rtol=1e-5)
            cosine = float(step.flatten() @ own.flatten() / (step.norm() * own.norm()))
            assert abs(cosine) < 0.9  # a direction of its own
        else:
            assert not step.any()  # biases, norms and buffers stay


def test_directions_are_normal_and_repeat_with_their_seed_only() -> None:
    layout = Layout.of(nn.Linear(4000, 2))
    centre = noise(layout.size)
    one, same, other, second = (
        direction(centre, layout, seed, name)
        for seed, name in ((0, "first"), (0, "first"), (1, "first"), (0, "second"))
    )
    assert torch.equal(one, same)
    for stranger in (other, second):
        assert abs(float(one @ stranger) / float(one.norm() * stranger.norm())) < 0.1
    row = one[:4000] / one[:4000].std()
    assert abs(float(row.mean())) < 0.1
    assert float((row.abs() < 1).float().mean()) == pytest.approx(0.683, abs=0.03)


def test_the_model_is_left_as_it_was() -> None:
    data = public(mlp())
    data.model.train()
    landscape(data.model, data, points=3)
    assert data.model.training
    assert torch.equal(data.layout.flatten(data.model), data.layout.flatten(mlp()))


def test_without_public_records_there_is_no_landscape() -> None:
    with pytest.raises(DataError, match="test"):
        landscape(mlp(), task())


def test_a_picture_is_written(tmp_path: Path) -> None:
    span = np.linspace(-1, 1, 5)
    bowl = Landscape(span, span[:, None] ** 2 + span[None, :] ** 2)
    assert bowl.sharpness == pytest.approx(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(bowl, tmp_path / "bowl.png")
    data = (tmp_path / "bowl.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_the_command_draws_the_landscape_of_a_run(tmp_path: Path) -> None:
    file, out = federation(tmp_path), tmp_path / "a"
    assert sordino("run", file, "--out", out, "--json").code == 0
    found = sordino("papers", "landscape", out, "--json").json
    assert found["file"] == str(out / "landscape.png")
    assert found["mean_rise"] > 0
    assert (out / "landscape.png").read_bytes().startswith(b"\x89PNG")
    assert sordino("papers", "landscape", out, "--out", tmp_path / "b.png", "--json").code == 0
    assert (tmp_path / "b.png").is_file()
    assert sordino("certify", out).code == 0  # a picture beside a run takes nothing from its certificate
