"""Paper 000, Table 3 at the paper's ratio of noise to signal.

The ratio is z sqrt(d) / S: noise multiplier z, d parameters, expected cohort S. The paper's Table 3 has 33 to 44 (z =
1.8 to 2.4, d = 3.4 million, S = 100). Here d = 144,554 and S = 20 give 34 to 46; 000-small, with d = 8,394, has 8 to
11, where smoothing loses: the paper's claim is not tested there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sordino.parts.encoding import LaplacianSmoothing
from sordino_papers.cells import Cell, Results, Row, Table
from sordino_papers.claims import beats, common, every
from sordino_papers.panels import curves
from sordino_papers.paper_000_small import MULTIPLIERS, SMALL, WAYS, Channels, How, name3, small_job
from sordino_papers.verdicts import paired

STRENGTHS = (0.0, 0.5, 1.0, 1.5)
WIDE: Channels = (48, 96)  # 144,554 parameters
TUNED = (
    "clip norm, step, epochs, batch: those of 000-small (held-out images, without smoothing, 8,394 parameters); only "
    "the width of the net was changed, to reach the paper's ratio"
)


def name(how: How, z: float, s: float) -> str:
    """The id of a cell of the table."""
    return f"000-regime-{how}-z{z:g}-sigma{s:g}"


def _table() -> Table:
    cells = tuple(
        Cell(name(how, z, s), f"{how}, z = {z:g}, sigma {s:g}",
             partial(small_job, how, z, LaplacianSmoothing(s), channels=WIDE), seeds=5)
        for how in WAYS
        for z in MULTIPLIERS
        for s in STRENGTHS
    )  # fmt: skip
    about = (
        "Scaled Table 3 at the paper's ratio of noise to signal, z sqrt(d) / S = 34 to 46 (the paper: 33 to 44; "
        "000-small: 8 to 11): the task of 000-small, both ways of sampling, with a CNN of 144,554 parameters."
    )
    claims = every(*(partial(column, how, z, s) for how in WAYS for z in MULTIPLIERS for s in STRENGTHS[1:]))
    return Table("000-regime", "Table 3 at the paper's noise-to-signal ratio (scaled)", cells, about, TUNED, claims)


def column(how: How, z: float, s: float, results: Results) -> Iterator[Row]:
    """Smoothing against none in one column."""
    text = f"000: Table 3 at the paper's noise-to-signal ratio, {how}, z = {z:g}: smoothing (sigma {s:g}) beats none"
    yield beats(results, text, name(how, z, s), name(how, z, 0.0), TUNED)


# ---- the crossing: at which ratio smoothing begins to pay ------------------------------------------------------------

AT = 2.0  # z
WIDTHS: dict[Channels, int] = {(4, 8): 3578, (16, 32): 22826, (24, 48): 43658, (32, 64): 70890}  # and 8,394, 144,554


def width_name(channels: Channels, s: float) -> str:
    """The id of a cell of the crossing; two widths are cells of other tables."""
    known = {SMALL: name3("poisson", AT, s), WIDE: name("poisson", AT, s)}
    return known.get(channels, f"000-crossing-c{channels[0]}-sigma{s:g}")


def _crossing() -> Table:
    cells = tuple(
        Cell(width_name(channels, s), f"channels {channels}, sigma {s:g}",
             partial(small_job, "poisson", AT, LaplacianSmoothing(s), channels=channels), seeds=5)
        for channels in WIDTHS
        for s in (0.0, 1.0)
    )  # fmt: skip
    about = "The task of 000-small, Poisson, z = 2, with nets of other widths: the ratio from 6 to 38."
    return Table(
        "000-crossing", "Smoothing by noise-to-signal ratio", cells, about, TUNED, crossing_claims, draw=draw_crossing
    )


def draw_crossing(results: Results, path: Path) -> None:
    """Accuracy of sigma 1 less that of none by the ratio, with the 95% interval: every width, every z of Table 3."""
    points = [(ratio(n), width_name(c, 1.0), width_name(c, 0.0)) for c, n in _sizes().items()]
    for channels, of in ((SMALL, name3), (WIDE, name)):
        each = [(z / AT * ratio(_sizes()[channels]), z) for z in MULTIPLIERS if z != AT]
        points += [(at, of("poisson", z, 1.0), of("poisson", z, 0.0)) for at, z in each]
    found: list[Row] = []
    for at, up, down in sorted(points):
        if up in results and down in results:
            one, other = common(results, up, down)
            gap = paired(one, other)
            found.append({"ratio": round(at, 1), "points": gap.mean, "spread": gap.high - gap.mean})
    lines: dict[str, list[Row]] = {"sigma 1 less none": found, "no difference": [{"ratio": None, "points": 0.0}]}
    curves({"smoothing by noise-to-signal ratio": lines}, "ratio", "points", path, xlabel="z sqrt(d) / S",
           ylabel="points of accuracy gained")  # fmt: skip


def _sizes() -> dict[Channels, int]:
    return {**WIDTHS, SMALL: 8394, WIDE: 144_554}


def ratio(parameters: int) -> float:
    """z sqrt(d) / S at z = 2 and S = 20."""
    return AT * math.sqrt(parameters) / 20


def crossing_claims(results: Results) -> Iterator[Row]:
    """Sigma 1 against none at every width that has run."""
    for channels, parameters in sorted(_sizes().items()):
        if width_name(channels, 0.0) in results and width_name(channels, 1.0) in results:
            text = f"000: z sqrt(d) / S = {ratio(parameters):.1f} (d = {parameters:,}): smoothing (sigma 1) beats none"
            yield beats(results, text, width_name(channels, 1.0), width_name(channels, 0.0), TUNED)


TABLES = (_table(), _crossing())

__all__ = ["TABLES"]
