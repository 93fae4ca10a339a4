"""Promise: an own gradient or solver sees coordinates in one public order, and their shapes, on every path.

On the default path of a wide CNN rows were channels last, so an algorithm that reads coordinates was another one there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from tests.tiny import final, noise, plan, seeded
from torch import Tensor, nn

from sordino.engines.inprocess import InProcess
from sordino.layout import Layout
from sordino.parts.gradients import Anchor, Batch, Blur, Gradient, Objective, Plain, Sam
from sordino.parts.local_solvers import LocalSgd, Work
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone
from sordino.rng import Seeded
from sordino.task import Task


@dataclass(frozen=True)
class FirstCoordinates(Gradient, kind="test_first_coordinates"):
    """Moves the first third of all coordinates alone."""

    gradient: Gradient = field(default_factory=Plain)

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        slope = self.gradient.at(objective, w, batch, anchor).clone()
        slope[:, slope.shape[1] // 3 :] = 0
        return slope


@dataclass(frozen=True)
class FirstInput(Gradient, kind="test_first_input"):
    """Moves what the largest weight takes from its first input alone: it is found by its shape."""

    def at(self, objective: Objective, w: Tensor, batch: Batch, anchor: Anchor) -> Tensor:
        slope = objective.gradient(w, batch).clone()
        kept = torch.zeros_like(slope)
        objective.layout.views(kept)[largest(objective.layout)][:, :, 0] = 1
        return slope * kept


def largest(layout: Layout) -> str:
    return max(layout.slots, key=lambda slot: slot.stop - slot.start).name


@dataclass(frozen=True)
class FirstSolver(LocalSgd, kind="test_first_solver"):
    """A solver of the user's own that sends the first third of all coordinates alone."""

    def solve(self, work: Work) -> Tensor:
        sent = super().solve(work).clone()
        sent[:, sent.shape[1] // 3 :] = 0
        return sent


def wide() -> nn.Module:
    layers = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * 64, 3))


PATHS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any], str]] = {
    "one client": (wide, (1, 8, 8), {}, "OneClient"),
    "many clients": (wide, (1, 8, 8), {"path": "batched"}, "ManyClients"),
    "linear": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), (1, 8, 8), {}, "LinearClients"),
    "dense": (lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), (8,), {}, "DenseClients"),
}


def moved(name: str, local: LocalSgd) -> tuple[Tensor, Task, str]:
    """How far a round of three clients moves each coordinate, and by which objective."""
    make, shape, options, _ = PATHS[name]
    held = [(noise(4, *shape, seed=seed), torch.arange(4) % 3) for seed in range(3)]
    data = Task.of(seeded(make()), held)
    asked = plan(rounds=1, clients=Everyone(3), encode=(), release=NoNoise(), local=local)
    worker = InProcess(**options)
    header = worker.prepare(asked, data, Seeded(0)).header
    return final(asked, data, worker) - data.layout.flatten(data.model), data, str(header["gradient"])


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("within", ["itself", "blur"])
def test_an_own_gradient_moves_the_coordinates_that_it_names(name: str, within: Literal["itself", "blur"]) -> None:
    gradient: Gradient = FirstCoordinates() if within == "itself" else Blur(0.1, FirstCoordinates())
    change, _, objective = moved(name, LocalSgd(lr=0.1, epochs=1, gradient=gradient))
    assert objective == PATHS[name][3]
    assert_first_third(change)


def assert_first_third(change: Tensor) -> None:
    third = len(change) // 3
    assert bool((change[:third] != 0).any())
    assert int((change[third:] != 0).sum()) == 0


@pytest.mark.parametrize("name", PATHS)
def test_an_own_gradient_is_told_the_shapes(name: str) -> None:
    change, data, _ = moved(name, LocalSgd(lr=0.1, epochs=1, gradient=FirstInput()))
    first = data.layout.views(change)[largest(data.layout)][:, 0]
    assert bool((first != 0).any())
    assert int((change != 0).sum()) == int((first != 0).sum())


@pytest.mark.parametrize("name", PATHS)
def test_an_own_solver_sends_the_coordinates_that_it_names(name: str) -> None:
    change, _, _ = moved(name, FirstSolver(lr=0.1, epochs=1))
    assert_first_third(change)


def test_the_order_changes_no_gradient_of_sordino() -> None:
    """They treat all coordinates alike, so an engine may have them in the order in which it is fastest."""
    for gradient in (Plain(), Sam(0.05), Blur(0.1), Sam(0.05, adaptive=True)):
        assert LocalSgd(lr=0.1, epochs=1, gradient=gradient).any_order
        fast, _, _ = moved("one client", LocalSgd(lr=0.1, epochs=1, gradient=gradient))
        plain, _, _ = moved("many clients", LocalSgd(lr=0.1, epochs=1, gradient=gradient))
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-5)
    assert not LocalSgd(lr=0.1, epochs=1, gradient=Blur(0.1, FirstCoordinates())).any_order
    assert not FirstSolver(lr=0.1, epochs=1).any_order
