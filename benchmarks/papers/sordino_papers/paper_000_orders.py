"""Paper 000, Figures G.10 and G.11 on a small scale: is an update smooth, and in which order of its weights?"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sordino_papers.choosing import within
from sordino_papers.panels import curves
from sordino_papers.paper_000_small import ORDERS
from sordino_papers.paper_000_spectra import MARKS, bands, updates
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

LAYER, SHAPE = "conv2.weight", (16, 8, 5, 5)
SHUFFLES = 4  # of the output channels, as in Figure G.10 (e) to (h)
MODES = (1, 3, 10, 32, 100, 320, 1600)  # of 1,600 waves along 3,200 weights
NATURAL = "OIHW"


def ways(update: Tensor) -> dict[str, Tensor]:
    """The update of the layer flattened in every order, and in the natural one with shuffled output channels."""
    weights = update.view(SHAPE)
    found = {name: weights.permute(axes or (0, 1, 2, 3)).flatten() for name, axes in ORDERS.items()}
    for number in range(SHUFFLES):
        places = torch.randperm(SHAPE[0], generator=torch.Generator().manual_seed(number))
        found[f"outputs shuffled, {number + 1}"] = weights[places].flatten()
    return found


def height(signal: Tensor) -> float:
    """Decades between the lowest and the highest three bands of a spectrum: 0 for white noise."""
    sizes = torch.tensor([size for _, size in bands(signal)]).log10()
    return float(sizes[:3].mean() - sizes[-3:].mean())


def share(signal: Tensor, modes: int) -> float:
    """The part of the energy (without the mean) in the slowest waves: projections on the first eigenvectors of L."""
    power = torch.fft.rfft(signal).abs().square()[1:]
    return float(power[:modes].sum() / power.sum())


def one_seed(seed: int) -> list[Row]:
    """Figure G.10 at the last round, Figure G.11 at every marked one."""
    found = {t: layers[LAYER] for t, layers in updates(seed).items()}
    orders = [{"order": name, "decades": height(signal)} for name, signal in ways(found[MARKS[-1]]).items()]
    slow = [{"round": t, "waves": n, "share": share(signal, n)} for t, signal in found.items() for n in MODES]
    return [*orders, *slow]


def figures_g(repeats: int, workers: int) -> list[Row]:
    """Rows of Figure G.10, then of Figure G.11."""
    rows = [row for one in side_by_side(one_seed, [(seed,) for seed in range(repeats)], workers) for row in one]
    orders, slow = ([row for row in rows if key in row] for key in ("order", "round"))
    evenly = {n: n / MODES[-1] for n in MODES}
    found = gathered(slow, ("round", "waves"), "share")
    return [*gathered(orders, ("order",), "decades"), *({**row, "white noise": evenly[row["waves"]]} for row in found)]


def claims(rows: list[Row]) -> list[Row]:
    """The paper: the spectrum does not depend on the order, and projections fall to 0 rapidly."""
    natural = picked(rows, order=NATURAL)[0]["values"]
    said = []
    for row in [row for row in rows if row.get("order", NATURAL) != NATURAL]:
        apart = [a - b for a, b in zip(row["values"], natural, strict=True)]
        text = f"000: Figure G.10 scaled, {row['order']}: as much low frequency as {NATURAL}, to 0.1 decades"
        said.append(within(text, apart, 0.1, "nothing", "decades"))
    slow = picked(rows, round=MARKS[-1], waves=100)[0]["values"]
    text = f"000: Figure G.11 scaled, round {MARKS[-1]}: 100 slow waves of 1,600 hold above twice an even share"
    even = [2 * 100 / MODES[-1]] * len(slow)
    return [*said, verdict(text, slow, even, "nothing", unit="of the energy")]


def draw(rows: list[Row], path: Path) -> None:
    """Share of an update's energy in its slowest waves, by round."""
    lines = {f"round {t}": picked(rows, round=t) for t in MARKS}
    even = [{"waves": n, "share": n / MODES[-1]} for n in MODES]
    x, y = "slowest waves along the layer", "share of the update's energy"
    curves({LAYER: {**lines, "white noise": even}}, "waves", "share", path, xlabel=x, ylabel=y, log=True, log_y=True)


def quick() -> Row:
    """The natural order, seed 0."""
    return one_seed(0)[0]


STUDIES = (
    Study(
        "000-figures-g",
        "Figures G.10 and G.11: spectra by order of the weights, and projections (scaled)",
        "The small CNN of 000-small without noise or clip, its second convolution (the first has one input channel, so "
        "that orders coincide). decades: log10 of the lowest three of twelve bands of frequency over the highest "
        f"three, round {MARKS[-1]}; white noise has 0. share: of the update's energy in its slowest waves, which are "
        "the first eigenvectors of the Laplacian of the cycle.",
        figures_g,
        claims,
        draw,
        5,
        "nothing",
        quick,
        "decades",
    ),
)
