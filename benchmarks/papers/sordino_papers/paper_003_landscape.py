"""Paper 003, Figure 3: the loss around DP-FedAvg's and DP-FedSAM's models, side by side on one scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sordino.loop import run
from sordino.outcome import final_model
from sordino.report.figures import save_figure
from sordino.rng import Seeded
from sordino_papers.landscape import Landscape, landscape
from sordino_papers.once import once
from sordino_papers.paper_003 import REACH, Row, Setting, plan, task
from sordino_papers.paper_003_fair import BEST_TOP_K, CHOSEN, TUNED
from sordino_papers.span import InSpan
from sordino_papers.studies import Study, side_by_side

SHOWN = ("DP-FedAvg", "DP-FedSAM", BEST_TOP_K)
POINTS = 15


def surface(setting: Setting, seed: int) -> Row:
    """The loss around one run's model; `figures` is loss[i][j] at model + a_i first + a_j second."""
    ours, held = plan(setting, seed), task(setting, seed)
    *_, last = run(ours, held, engine=InSpan(chunk=16), streams=Seeded(seed), eval_every=setting.rounds)
    found = landscape(final_model(ours, held, last.state), held, reach=REACH, points=POINTS)
    middle = POINTS // 2
    return {
        "method": setting.method,
        "seed": seed,
        "loss": float(f"{found.loss[middle, middle]:.4g}"),
        "mean rise": float(f"{found.sharpness:.4g}"),
        "rise at the corners": float(f"{_corners(found):.4g}"),
        "figures": [[float(f"{loss:.4g}") for loss in line] for line in found.loss],
    }


def _corners(found: Landscape) -> float:
    middle = len(found.span) // 2
    return float(found.loss[[0, 0, -1, -1], [0, -1, 0, -1]].mean() - found.loss[middle, middle])


def one_surface(setting: Setting, seed: int) -> Row:
    """The same, kept."""
    return once(surface, setting, seed)


def rows(repeats: int, workers: int) -> list[Row]:
    """One model per method: seed 0 of the fair test."""
    return side_by_side(one_surface, [(CHOSEN[method], 0) for method in SHOWN], workers)


def quick() -> Row:
    """The first of them."""
    found = surface(CHOSEN[SHOWN[0]], 0)
    return {name: found[name] for name in ("method", "seed", "mean rise")}


def draw(found: list[Row], path: Path) -> None:
    """Surfaces above, contours below; one scale of colour, height and level for all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    losses = [np.asarray(row["figures"]) for row in found]
    low, high = min(loss.min() for loss in losses), max(loss.max() for loss in losses)
    figure = plt.figure(figsize=(3.8 * len(found), 7), layout="constrained")
    for place, (row, loss) in enumerate(zip(found, losses, strict=True), start=1):
        above = figure.add_subplot(2, len(found), place, projection="3d")
        above.set_title(f"{row['method']} (mean rise {row['mean rise']:.3g})", fontsize="medium")
        _panel(above, figure.add_subplot(2, len(found), len(found) + place), loss, (low, high))
    save_figure(figure, path)
    plt.close(figure)


def _panel(above: Any, below: Any, loss: Any, scale: tuple[float, float]) -> None:
    span = np.linspace(-REACH, REACH, len(loss))
    a, b = np.meshgrid(span, span)
    above.plot_surface(a, b, loss.T, cmap="viridis", linewidth=0, vmin=scale[0], vmax=scale[1])
    above.set_zlim(*scale)
    for axis in (above, below):
        axis.set_xlabel("along the first direction", fontsize="small")
        axis.set_ylabel("along the second direction", fontsize="small")
    above.set_zlabel("test loss", fontsize="small")
    lines = below.contour(a, b, loss.T, levels=np.linspace(*scale, 15), cmap="viridis", vmin=scale[0], vmax=scale[1])
    below.clabel(lines, fontsize=7)
    below.set_aspect("equal")


STUDIES = (
    Study(
        "003-landscape",
        "DP-FedSAM, Figure 3: the loss around the models",
        "Seed 0 of 003-mnist (Dirichlet 0.6), 2,000 test images, two random filter-normalised directions, the same for "
        "all, one scale. The verdict on flatness is by five seeds, in the column rise of 003-mnist.",
        rows,
        lambda found: [],
        draw,
        1,
        TUNED,
        quick,
        "mean rise",
    ),
)
