"""Paper 000, Figures E.8 and F.9, and paper 004, Figure 2: what takes seconds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.calibration import calibrate
from sordino.parts.samplers import FixedSize
from sordino.recipes import dp_fed_avg
from sordino_papers.panels import curves
from sordino_papers.studies import Row, Study, gathered, picked
from sordino_papers.theory.central_noise import uniform_noise
from sordino_papers.verdicts import fact, verdict

Floats = NDArray[np.float64]

# ---- Figure E.8: the noise of Theorem 1, T = 1000 --------------------------------------------------------------------

ROUNDS, RATE, CLIENTS = 1000, 0.05, 2000
EPSILONS = tuple(float(e) for e in range(11, 31))
TRIED = (11.0, 15.0, 20.0, 25.0, 30.0)  # of the accountant's line
PUBLISHED = {"Theorem 1": (-0.80, 3.31), "accountant": (-0.73, 2.29)}


def theorem(epsilon: float) -> float:
    """nu / C of Theorem 1."""
    return uniform_noise(epsilon=epsilon, delta=CLIENTS**-1.1, rounds=ROUNDS, rate=RATE, clip_norm=1.0).std


def tight(epsilon: float) -> float:
    """The noise multiplier that our accountant needs for the same cohorts."""
    plan = dp_fed_avg(rounds=ROUNDS, clients=FixedSize(CLIENTS, 100), lr=0.1, clip_norm=1.0, noise_multiplier=1.0)
    solved = calibrate(plan, epsilon=epsilon, delta=CLIENTS**-1.1)
    return float(solved.release.mechanism.noise_multiplier)  # type: ignore[attr-defined]


def figure_e8(repeats: int, workers: int) -> list[Row]:
    """Noise by epsilon, and the least-squares line through the logarithms; nothing is drawn, nothing to repeat."""
    rows: list[Row] = [{"line": "Theorem 1", "epsilon": e, "noise": float(f"{theorem(e):.6g}")} for e in EPSILONS]
    rows += [{"line": "accountant", "epsilon": e, "noise": float(f"{tight(e):.6g}")} for e in TRIED]
    for line, (slope, intercept) in PUBLISHED.items():
        mine = picked(rows, line=line)
        logs = [np.log([row[name] for row in mine]) for name in ("epsilon", "noise")]
        found = np.polyfit(logs[0], logs[1], 1)
        rows.append({"fit": line, "slope": round(float(found[0]), 3), "intercept": round(float(found[1]), 3),
                     "published slope": slope, "published intercept": intercept})  # fmt: skip
    return rows


def e8_claims(rows: list[Row]) -> list[Row]:
    """The line of Theorem 1 to two digits."""
    (row,) = picked(rows, fit="Theorem 1")
    near = (
        abs(row["slope"] - row["published slope"]) < 0.02 and abs(row["intercept"] - row["published intercept"]) < 0.05
    )
    text = "000: Figure E.8, T = 1000: the noise of Theorem 1 by epsilon, log-log (slope to .02, intercept to .05)"
    return [fact(text, f"slope {row['slope']:.2f}, intercept {row['intercept']:.2f}", near)]


def draw_e8(rows: list[Row], path: Path) -> None:
    """Both lines."""
    panel = {line: picked(rows, line=line) for line in PUBLISHED}
    curves({"T = 1000, 100 of 2,000": panel}, "epsilon", "noise", path, ylabel="noise multiplier", log=True, log_y=True)


def _quick_e8() -> Row:
    return {"line": "Theorem 1", "epsilon": 20.0, "noise": float(f"{theorem(20.0):.6g}")}


# ---- Figure F.9: two weights, gradient descent with and without smoothing --------------------------------------------

UPDATES, STEP, NOISE = 100, 0.1, 0.3


def roughness(sigma: float, seed: int) -> float:
    """Mean length of the second differences of the path of W over 100 noised gradient steps."""
    rng = np.random.default_rng(seed)
    y = np.repeat([0.0, 1.0], 50)
    x = rng.normal(size=(100, 2)) + np.where(y[:, None] == 0, 1.5, -1.5)  # separated along (c, c), c < 0
    shrink = 1 / (1 + 4 * sigma)  # of the difference of the two weights: the cycle of two has eigenvalues 0 and 4
    w, path = np.zeros(2), [np.zeros(2)]
    for _ in range(UPDATES):
        gradient = ((1 / (1 + np.exp(-x @ w)) - y)[:, None] * x).mean(0) + NOISE * rng.normal(size=2)
        middle = gradient.mean()
        w = w - STEP * (middle + shrink * (gradient - middle))
        path.append(w)
    return float(np.linalg.norm(np.diff(np.array(path), n=2, axis=0), axis=1).mean())


def figure_f9(repeats: int, workers: int) -> list[Row]:
    """Plain and smoothed, the same points and noise."""
    rows = [{"sigma": s, "roughness": roughness(s, seed)} for s in (0.0, 1.0) for seed in range(repeats)]
    return gathered(rows, ("sigma",), "roughness")


def f9_claims(rows: list[Row]) -> list[Row]:
    """The path of the smoothed one is smoother."""
    plain, smooth = (picked(rows, sigma=s)[0]["values"] for s in (0.0, 1.0))
    text = "000: Figure F.9: the path of GD is rougher than that of LSGD (mean second difference)"
    return [verdict(text, plain, smooth, "the paper: step 0.1, noise 0.3, sigma 1", unit="of length")]


def draw_f9(rows: list[Row], path: Path) -> None:
    """Roughness by sigma."""
    curves({"100 noised steps": {"mean second difference": rows}}, "sigma", "roughness", path)


def _quick_f9() -> Row:
    return {"sigma": 1.0, "roughness": roughness(1.0, 0)}


# ---- paper 004, Figure 2: a smoothed signal, and a smoothed picture --------------------------------------------------

POINTS, SIDE, ADDED = 256, 64, 0.3
SIGNALS = {"sin(x)": 10.0, "sin(x) sin(y)": 100.0}  # and the sigma of the paper


def smoothed(v: Floats, sigma: float) -> Floats:
    """(I + sigma L)^-1 v on a cycle."""
    waves = 1 - np.cos(2 * math.pi * np.arange(len(v) // 2 + 1) / len(v))
    made: Floats = np.fft.irfft(np.fft.rfft(v) / (1 + 2 * sigma * waves), len(v))
    return made


def removed(signal: str, seed: int) -> tuple[float, float]:
    """Mean square error of the noised signal, before and after smoothing; a picture is flattened row by row."""
    if signal == "sin(x)":
        clean = np.sin(np.linspace(0, 2 * math.pi, POINTS))
    else:
        side = np.sin(np.linspace(0, 2 * math.pi, SIDE))
        clean = np.outer(side, side).ravel()
    noisy = clean + ADDED * np.random.default_rng(seed).normal(size=clean.size)
    after = smoothed(noisy, SIGNALS[signal])
    return float(np.square(noisy - clean).mean()), float(np.square(after - clean).mean())


def figure2(repeats: int, workers: int) -> list[Row]:
    """Both signals, before and after."""
    rows = []
    for signal in SIGNALS:
        for seed in range(repeats):
            pair = zip(("noised", "smoothed"), removed(signal, seed), strict=True)
            rows += [{"signal": signal, "state": state, "error": error} for state, error in pair]
    return gathered(rows, ("signal", "state"), "error")


def figure2_claims(rows: list[Row]) -> list[Row]:
    """Smoothing removes noise."""
    found = []
    for signal, sigma in SIGNALS.items():
        before, after = (picked(rows, signal=signal, state=state)[0]["values"] for state in ("noised", "smoothed"))
        text = f"004: Figure 2, {signal}: smoothing (sigma {sigma:g}) lowers the mean square error"
        found.append(verdict(text, before, after, "sigma: the paper; noise 0.3: nobody", unit="of the MSE"))
    return found


def draw_figure2(rows: list[Row], path: Path) -> None:
    """Error before and after."""
    place = {"noised": 0, "smoothed": 1}
    lines = {signal: [{**row, "x": place[row["state"]]} for row in picked(rows, signal=signal)] for signal in SIGNALS}
    curves({"before (0) and after (1) smoothing": lines}, "x", "error", path, ylabel="mean square error", log_y=True)


def _quick2() -> Row:
    return {"signal": "sin(x)", "state": "smoothed", "error": removed("sin(x)", 0)[1]}


STUDIES = (
    Study("000-figure-e8", "Figure E.8: the noise of Theorem 1 at T = 1000, uniform",
          "tau = 0.05, N = 2000, delta = N^-1.1; the accountant's line is ours, by PLD (the paper's: Renyi).",
          figure_e8, e8_claims, draw_e8, 1, "nothing", _quick_e8, "noise"),
    Study("000-figure-f9", "Figure F.9: the path of two weights",
          "100 points, 100 gradient steps of 0.1 with noise 0.3, plain and smoothed with sigma 1.",
          figure_f9, f9_claims, draw_f9, 20, "the paper", _quick_f9, "roughness"),
    Study("004-figure2", "Figure 2: a smoothed signal, and a smoothed picture",
          "sin(x) at 256 points, sigma 10; sin(x) sin(y) at 64 x 64, flattened, sigma 100; noise 0.3.",
          figure2, figure2_claims, draw_figure2, 20, "sigma: the paper", _quick2, "error"),
)  # fmt: skip
