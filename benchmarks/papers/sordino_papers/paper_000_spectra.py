"""Paper 000, Figures 1 and 2: what smoothing does to a sine with noise, and to the spectra of updates and of noise."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from sordino.loop import run
from sordino.outcome import final_model
from sordino.parts.encoding import LaplacianSmoothing, smooth_cycle
from sordino.rng import Seeded
from sordino_papers.panels import curves
from sordino_papers.paper_000_small import CLIENTS, Knobs, small_plan, small_task
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

# ---- Figure 1: a sine with noise -------------------------------------------------------------------------------------

NOISES, SIGMAS = (0.01, 0.03, 0.1, 0.3, 1.0), (0.5, 1.0, 2.0, 3.0)


def reduced(sigma: float, noise: float, seed: int) -> Row:
    """1 - MSE(smoothed) / MSE(noised) of sin(x), 500 points on [0, 30], as in the paper."""
    clean = torch.sin(torch.linspace(0, 30, 500, dtype=torch.float64))
    noised = clean + noise * torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before, after = ((one - clean).square().mean() for one in (noised, smooth_cycle(noised, sigma)))
    return {"sigma": sigma, "noise": noise, "reduction": float(1 - after / before)}


def figure1(repeats: int, workers: int) -> list[Row]:
    """Every noise and sigma; cheap enough for one process."""
    rows = [reduced(s, noise, seed) for s in SIGMAS for noise in NOISES for seed in range(repeats)]
    return gathered(rows, ("sigma", "noise"), "reduction")


def figure1_claims(rows: list[Row]) -> list[Row]:
    """Bias wins where the noise is small, variance where it is large."""
    low = picked(rows, sigma=3.0, noise=NOISES[0])[0]["values"]
    high, weak = (picked(rows, sigma=s, noise=NOISES[-1])[0]["values"] for s in (3.0, 0.5))
    zero = [0.0] * len(low)
    return [
        verdict("000: Figure 1, smoothing (sigma 3) adds error at noise 0.01", zero, low, "nothing", unit="of the MSE"),
        verdict("000: Figure 1, a larger sigma (3 against 0.5) removes more at noise 1", high, weak, "nothing",
                unit="of the MSE"),
    ]  # fmt: skip


def draw_figure1(rows: list[Row], path: Path) -> None:
    """Share of the error removed, by noise; from -1 up."""
    lines = {
        f"sigma {s:g}": [{**row, "reduction": max(row["reduction"], -1.0)} for row in picked(rows, sigma=s)]
        for s in SIGMAS
    }
    x, y = "standard deviation of the noise", "share of the squared error removed"
    curves({"sin(x), 500 points": lines}, "noise", "reduction", path, xlabel=x, ylabel=y, log=True)


# ---- Figure 2: spectra -----------------------------------------------------------------------------------------------

LAYERS, MARKS, BANDS = ("conv2.weight", "fc1.weight"), (1, 5, 10, 20), 12
STRENGTH, MULTIPLIER = 1.0, 2.0


def updates(seed: int) -> dict[int, dict[str, Tensor]]:
    """The mean update of each marked round of a run without noise and without a clip that binds, by layer."""
    plan, task = small_plan("poisson", 0.0, LaplacianSmoothing(0.0), Knobs(clip_norm=50.0)), small_task(seed)
    before, found = dict(task.model.state_dict()), {}
    for done in run(plan, task, streams=Seeded(seed)):
        now = dict(final_model(plan, task, done.state).state_dict())
        if done.t + 1 in MARKS:
            found[done.t + 1] = {name: (now[name] - before[name]).flatten().double() for name in LAYERS}
        before = {name: value.clone() for name, value in now.items()}
    return found


def bands(signal: Tensor) -> list[tuple[float, float]]:
    """(frequency, root mean square of the Fourier coefficients, over sqrt(d)) in bands of equal ratio."""
    power = (torch.fft.rfft(signal).abs().square() / len(signal))[1:]
    places = torch.arange(1, len(power) + 1, dtype=torch.float64)
    edges = torch.logspace(0, math.log10(len(power)), BANDS + 1, dtype=torch.float64)
    band = (torch.bucketize(places, edges[1:-1], right=True)).tolist()
    groups = [[i for i, b in enumerate(band) if b == one] for one in range(BANDS)]
    return [(float(places[g].log().mean().exp()), float(power[g].mean().sqrt())) for g in groups if g]


def spectra(seed: int) -> list[Row]:
    """By layer, round and band: the update and the noise of z = 2, before and after smoothing."""
    noise = MULTIPLIER * Knobs().clip_norm / (CLIENTS * 0.05)
    rows = []
    for t, layers in updates(seed).items():
        for name, signal in layers.items():
            impulse = torch.zeros_like(signal)
            impulse[0] = noise * math.sqrt(len(signal))  # a flat spectrum of height `noise`, as white noise has
            four = (signal, smooth_cycle(signal, STRENGTH), impulse, smooth_cycle(impulse, STRENGTH))
            rows += [_row(name, t, band) for band in zip(*(bands(one) for one in four), strict=True)]
    return rows


def _row(layer: str, t: int, band: tuple[tuple[float, float], ...]) -> Row:
    names = ("update", "update, smoothed", "noise", "noise, smoothed")
    return {"layer": layer, "round": t, "frequency": round(band[0][0], 2),
            **{name: size for name, (_, size) in zip(names, band, strict=True)}}  # fmt: skip


def figure2(repeats: int, workers: int) -> list[Row]:
    """Mean over seeds of the update's spectrum; the noise's is exact."""
    rows = [row for one in side_by_side(spectra, [(seed,) for seed in range(repeats)], workers) for row in one]
    keys = ("layer", "round", "frequency", "noise", "noise, smoothed")
    first, second = (gathered(rows, keys, name) for name in ("update", "update, smoothed"))
    return [{**a, "update, smoothed": b["update, smoothed"]} for a, b in zip(first, second, strict=True)]


def figure2_claims(rows: list[Row]) -> list[Row]:
    """The update is larger at low frequencies than at high ones, layer by layer."""
    found = []
    for layer in LAYERS:
        lines = picked(rows, layer=layer, round=MARKS[-1])
        text = f"000: Figure 2 scaled, {layer}, round {MARKS[-1]}: an update's lowest bands are above its highest"
        found.append(verdict(text, _height(lines[:3]), _height(lines[-3:]), "nothing", unit="decades"))
    return found


def _height(lines: list[Row]) -> list[float]:
    """Seed by seed, the mean log10 of a few bands."""
    seeds = zip(*(line["values"] for line in lines), strict=True)
    return [sum(math.log10(size) for size in sizes) / len(sizes) for sizes in seeds]


def draw_figure2(rows: list[Row], path: Path) -> None:
    """Magnitudes by frequency at the last round: update and noise, before and after smoothing."""
    names = ("update", "update, smoothed", "noise", "noise, smoothed")
    panels = {}
    for layer in LAYERS:
        lines = picked(rows, layer=layer, round=MARKS[-1])
        panels[layer] = {name: [{"frequency": r["frequency"], "size": r[name]} for r in lines] for name in names}
    x, y = "frequency (waves along the layer)", "magnitude of Fourier coefficients"
    curves(panels, "frequency", "size", path, xlabel=x, ylabel=y, log=True, log_y=True)


def _quick1() -> Row:
    """Seed 0 at sigma 1 and noise 0.3."""
    return reduced(1.0, 0.3, 0)


def _quick2() -> Row:
    """The lowest band of the first layer at the first marked round, seed 0."""
    found = spectra(0)[0]
    return {key: found[key] for key in ("layer", "round", "frequency", "update")}


STUDIES = (
    Study(
        "000-figure1",
        "Figure 1: smoothing a sine with noise",
        "sin(x) at 500 points of [0, 30] plus normal noise; share of the mean squared error that smoothing removes "
        "(below 0: it adds some; drawn from -1 up).",
        figure1,
        figure1_claims,
        draw_figure1,
        20,
        "nothing",
        _quick1,
        "reduction",
    ),
    Study(
        "000-figure2",
        "Figure 2: spectra of the update and of the noise, before and after smoothing (scaled)",
        "The small CNN of 000-small without noise or clip; Fourier coefficients of the mean update of a layer over "
        "the root of its size, in bands of frequency; beside them the noise of z = 2 (flat, exact) and both after "
        "sigma 1.",
        figure2,
        figure2_claims,
        draw_figure2,
        5,
        "nothing",
        _quick2,
        "update",
    ),
)
