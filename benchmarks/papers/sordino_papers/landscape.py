"""Loss around a trained model along two random filter-normalised directions (Li et al. 2018; paper 003, Figure 3)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import codec
from sordino.data.clients import Records
from sordino.errors import DataError
from sordino.layout import Layout
from sordino.rng import Seeded
from sordino.task import Task, evaluate


@codec.hides_values
@dataclass(frozen=True)
class Landscape:
    """loss[i, j] at model + span[i] * first + span[j] * second."""

    span: NDArray[np.float64]
    loss: NDArray[np.float64]

    @property
    def sharpness(self) -> float:
        """Mean rise of the loss over the square: smaller is flatter."""
        middle = len(self.span) // 2
        return float(self.loss.mean() - self.loss[middle, middle])


def landscape(model: nn.Module, task: Task, *, reach: float = 1.0, points: int = 21, seed: int = 0) -> Landscape:
    """Evaluate on (at most 2000 of) the task's public test records."""
    if task.test is None:
        raise DataError("a task without test records", "public records to evaluate on")
    some = Records(task.test.x[:2000], task.test.y[:2000])
    layout, probe = Layout.of(model), copy.deepcopy(model).eval()
    centre = layout.flatten(model)
    first, second = (direction(centre, layout, seed, name) for name in ("first", "second"))
    span = np.linspace(-reach, reach, points)

    def loss(a: float, b: float) -> float:
        layout.load(probe, centre + a * first + b * second)
        return evaluate(probe, some, task.losses)["loss"]

    return Landscape(span, np.asarray([[loss(a, b) for b in span] for a in span]))


def direction(centre: Tensor, layout: Layout, seed: int, name: str) -> Tensor:
    """A random direction whose every filter (first axis of a tensor) has the norm of the model's own filter."""
    uniform = torch.from_numpy(Seeded(seed).at(0, f"landscape {name}").random((2, layout.size)))
    random = (uniform[0].log() * -2).sqrt() * (uniform[1] * 2 * torch.pi).cos()  # Box-Muller: a picture, not a release
    scaled = torch.zeros_like(centre)
    for slot in layout.slots:
        if slot.trainable and len(slot.shape) > 1:
            own, raw = (rows[slot.start : slot.stop].view(slot.shape[0], -1) for rows in (centre, random.float()))
            ratio = own.norm(dim=1, keepdim=True) / raw.norm(dim=1, keepdim=True).clamp(min=1e-12)
            scaled[slot.start : slot.stop] = (raw * ratio).reshape(-1)
    return scaled


def draw(found: Landscape, path: Path, title: str = "loss around the model") -> None:
    """Surface and contour, side by side; beside a PNG also as SVG."""
    import matplotlib

    from sordino.report.figures import save_figure

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(10, 4.2), layout="constrained")
    a, b = np.meshgrid(found.span, found.span)
    surface = figure.add_subplot(1, 2, 1, projection="3d")
    surface.plot_surface(a, b, found.loss.T, cmap="viridis", linewidth=0)
    contour = figure.add_subplot(1, 2, 2)
    lines = contour.contour(a, b, found.loss.T, levels=15, cmap="viridis")
    contour.clabel(lines, fontsize=7)
    contour.set_aspect("equal")
    contour.set_xticks(np.linspace(found.span[0], found.span[-1], 5))
    for axes in (surface, contour):
        axes.set_xlabel("step along a first direction", labelpad=8 if axes is surface else None)
        axes.set_ylabel("step along a second", labelpad=8 if axes is surface else None)
    surface.set_zlabel("loss on public test rows")
    figure.suptitle(f"{title} (mean rise {found.sharpness:.3g})")
    save_figure(figure, path)
    plt.close(figure)
