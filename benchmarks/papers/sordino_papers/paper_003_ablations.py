"""Paper 003: its ablations (Tables 2 to 4, Figure 5), and the search for a regime where sharpness-awareness pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_003 import Row, Setting, measured
from sordino_papers.paper_003_fair import CHOSEN, TUNED, epsilon, summed
from sordino_papers.studies import Study, picked, side_by_side
from sordino_papers.verdicts import verdict

ROUNDS, FAR = 30, 100.0  # rounds; a clip norm that no update reaches
RHO = 0.3  # in the regimes
Entry = tuple[str, float, Setting]  # what is varied, to what, in which setting
AVG, SAM, MEAN = "DP-FedAvg", "DP-FedSAM", "top_k of the mean"


def short(method: str) -> Setting:
    """The method as tuned, for fewer rounds than those that report."""
    return replace(CHOSEN[method], rounds=ROUNDS)


def ablations() -> Iterator[Entry]:
    """One number at a time around what was chosen, on Dirichlet 0.6."""
    for z in (0.6, 0.95, 1.5, 2.5):
        yield from (("z (Table 2)", z, replace(short(method), noise_multiplier=z)) for method in (AVG, SAM))
    for keep in (0.1, 0.2, 0.4, 0.6, 0.8):
        yield "share kept (Table 3)", keep, replace(short(MEAN), keep=keep)
    yield "share kept (Table 3)", 1.0, short(SAM)
    for rho in (0.0, 0.01, 0.1, 0.3, 0.5, 1.0):  # 0 is no SAM: Table 4
        yield "rho (Table 4, Figure 5a)", rho, replace(short(SAM), own=rho)
    for epochs in (5, 10, 20, 40):
        yield from (("E (Figure 5b)", epochs, replace(short(method), epochs=epochs)) for method in (AVG, SAM))
    for clients in (100, 300, 500, 700):
        yield from (("M (Figure 5c)", clients, replace(short(method), population=clients)) for method in (AVG, SAM))
    for clip_norm in (0.2, 0.5, 1.0):
        yield from (("C", clip_norm, replace(short(method), clip_norm=clip_norm)) for method in (AVG, SAM))


REGIMES: dict[str, dict[str, Any]] = {
    "z 0.95, E 10 (as reported)": {},
    "z 0.95, E 30": {"epochs": 30},
    "no noise": {"noise_multiplier": 0.0},
    "no noise, no clip": {"noise_multiplier": 0.0, "clip_norm": FAR},
    "no noise, no clip, E 30": {"noise_multiplier": 0.0, "clip_norm": FAR, "epochs": 30},
}


def regimes() -> Iterator[Entry]:
    """Where sharpness-awareness might pay: SAM put into DP-FedAvg as tuned, and nothing else changed."""
    for name, other in REGIMES.items():
        plain = replace(short(AVG), **other)
        yield from ((name, 0.0, plain), (name, RHO, replace(plain, method=SAM, own=RHO)))


def one_run(setting: Setting, seed: int) -> Row:
    """One seed on the test images."""
    return once(measured, setting, seed, "test")


def rows(entries: Callable[[], Iterator[Entry]], repeats: int, workers: int) -> list[Row]:
    """Every entry with the same seeds; a run that stands in several entries is made once."""
    wanted = list(entries())
    jobs = list(dict.fromkeys((setting, seed) for *_, setting in wanted for seed in range(repeats)))
    runs = dict(zip(jobs, side_by_side(one_run, jobs, workers), strict=True))
    return [_row(entry, [runs[entry[2], seed] for seed in range(repeats)]) for entry in wanted]


def _row(entry: Entry, runs: Sequence[Row]) -> Row:
    varied, to, setting = entry
    spent = epsilon(setting) if setting.noise_multiplier else None
    return {"varied": varied, "to": to, "method": setting.method, **summed(runs), "epsilon": spent}


def quick(entries: Callable[[], Iterator[Entry]]) -> Row:
    """Seed 0 of the first entry."""
    varied, to, setting = next(entries())
    return {"varied": varied, "to": to, "method": setting.method, "test": measured(setting, 0)["test"]}


# ---- claims ----------------------------------------------------------------------------------------------------------


def compared(found: list[Row], text: str, better: Row, worse: Row, figure: str = "test") -> list[Row]:
    """The verdict on two entries by the same seeds; nothing if one of them has not been run."""
    rows = [picked(found, **entry) for entry in (better, worse)]
    if not all(rows):
        return []
    up, down = ([float(value) for value in row["figures"][figure]] for (row,) in rows)
    unit = "(norm)" if figure == "norm" else "points"
    return [verdict(f"003: {text} (T = {ROUNDS})", up, down, f"lr and C: {TUNED}", unit=unit)]


def ablation_claims(found: list[Row]) -> list[Row]:
    """The paper's sentences about its ablations."""
    z, kept, rho = ({"varied": name} for name in ("z (Table 2)", "share kept (Table 3)", "rho (Table 4, Figure 5a)"))
    said: list[Row] = []
    for at in (0.6, 0.95, 1.5, 2.5):
        sam, avg = ({**z, "to": at, "method": method} for method in (SAM, AVG))
        said += compared(found, f"Table 2, DP-FedSAM beats DP-FedAvg at z = {at}", sam, avg)
    said += compared(found, "Table 3, 0.4 of the mean beats all of it", {**kept, "to": 0.4}, {**kept, "to": 1.0})
    for at in (0.1, 0.3, 0.5, 1.0):
        said += compared(found, f"Table 4, rho = {at} beats rho = 0", {**rho, "to": at}, {**rho, "to": 0.0})
    for name in ("E (Figure 5b)", "M (Figure 5c)", "C"):
        for at in dict.fromkeys(row["to"] for row in picked(found, varied=name)):
            sam, avg = ({"varied": name, "to": at, "method": method} for method in (SAM, AVG))
            said += compared(found, f"{name} = {at}: DP-FedSAM beats DP-FedAvg", sam, avg)
    return said


def regime_claims(found: list[Row]) -> list[Row]:
    """SAM minus none in every regime: accuracy, the gap between train and test, and the size of updates."""
    said: list[Row] = []
    for name in dict.fromkeys(row["varied"] for row in found):
        sam, none = ({"varied": name, "to": at} for at in (RHO, 0.0))
        said += compared(found, f"{name}: rho = {RHO:g} beats none", sam, none)
        said += compared(found, f"{name}: rho = {RHO:g} has the smaller gap", none, sam, "gap")
        said += compared(found, f"{name}: rho = {RHO:g} moves less", none, sam, "norm")
    return said


# ---- figures ---------------------------------------------------------------------------------------------------------


WORDS = {  # of what is varied; in the regimes it is rho
    "z": "noise multiplier z",
    "share kept": "share of the mean kept",
    "E": "local epochs E",
    "M": "clients M",
    "C": "clip norm C",
}


def draw(found: list[Row], path: Path) -> None:
    """One panel for everything that is varied, one line per method."""
    panels = {
        varied: {
            method: picked(found, varied=varied, method=method)
            for method in dict.fromkeys(row["method"] for row in picked(found, varied=varied))
        }
        for varied in dict.fromkeys(row["varied"] for row in found)
    }
    words = {varied: WORDS.get(varied.split(" (")[0], "rho of SAM") for varied in panels}
    curves(panels, "to", "test", path, xlabel=words, ylabel="test accuracy, %", own_y=True)


STUDIES = (
    Study(
        "003-ablations",
        "DP-FedSAM, Tables 2 to 4 and Figure 5: one number at a time",
        f"As 003-mnist on Dirichlet 0.6, with T = {ROUNDS}; epsilon differs where z or M does. "
        "M = 700 leaves 14 images to a client, M = 100 leaves 100. rho 0 is DP-FedAvg with DP-FedSAM's lr and C.",
        partial(rows, ablations),
        ablation_claims,
        draw,
        5,
        f"what is not varied: {TUNED}",
        partial(quick, ablations),
        "test",
    ),
    Study(
        "003-regimes",
        "DP-FedSAM: is there a regime where SAM pays?",
        f"As 003-mnist on Dirichlet 0.6, with T = {ROUNDS}; DP-FedAvg as tuned, and SAM put into it with the same lr "
        "and C. Without noise there is no epsilon: those rows are no proposal, they show what the noise takes away.",
        partial(rows, regimes),
        regime_claims,
        draw,
        5,
        f"lr and C: {TUNED}",
        partial(quick, regimes),
        "test",
    ),
)
