"""What the papers claim, checked on the stored results: a sentence, the numbers, and whether it held here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sordino_papers.paper_000 import EPSILONS, PUBLISHED
from sordino_papers.paper_004 import PUBLISHED as LS_SGD

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """A claim, what we measured, and the verdict."""

    text: str
    measured: str
    holds: bool


def claims(results: Results) -> list[Claim]:
    """Every claim whose results are there."""
    found: list[Claim] = []
    for check in (_table2, _tight, _best, _cnn, _lstm, _denoisers, _sam, _ls_sgd, _beyond):
        try:
            found += list(check(results))
        except KeyError:
            continue  # not run yet
    return found


def _ours(results: Results, name: str) -> float:
    return float(results[name]["ours"])


def _pair(results: Results, name: str) -> str:
    result = results[name]
    spread = "" if result["spread"] is None else f" +- {result['spread']:.2f}"
    return f"{result['ours']:.2f}{spread}"


def _table2(results: Results) -> Iterator[Claim]:
    cells = [f"000-table2-{how}-eps{e}-sigma{s}" for how in PUBLISHED for e in EPSILONS for s in range(4)]
    off = max(abs(_ours(results, name) - results[name]["published"]) for name in cells)
    yield Claim(
        "DP-Fed-LS, Table 2 reproduces under the paper's noise", f"largest difference {off:.2f} points", off <= 2.5
    )
    gains = [
        _ours(results, f"000-table2-{how}-eps{e}-sigma1") - _ours(results, f"000-table2-{how}-eps{e}-sigma0")
        for how in PUBLISHED
        for e in EPSILONS
    ]
    text = "smoothing (sigma 1) beats none in every column of Table 2"
    yield Claim(text, f"gains {min(gains):.2f} to {max(gains):.2f} points", min(gains) > 0)


def _tight(results: Results) -> Iterator[Claim]:
    cells = [f"000-table2-tight-{how}-eps{e}-sigma{s}" for how in PUBLISHED for e in EPSILONS for s in range(4)]
    worst = min(cells, key=lambda name: _ours(results, name))
    text = "tight accounting alone lifts every cell of Table 2 above 88 at the same epsilon and delta"
    yield Claim(text, f"lowest cell {_pair(results, worst)} ({results[worst]['title']})", _ours(results, worst) >= 88)


def _best(results: Results) -> Iterator[Claim]:
    both = [f"000-best-{how}-eps6" for how in PUBLISHED]
    measured = ", ".join(f"{results[name]['title']}: {_pair(results, name)}" for name in both)
    yield Claim(
        "recipes.best reaches 90 on Table 2's task at epsilon 6", measured, min(_ours(results, n) for n in both) >= 90
    )


def _gain(results: Results, text: str, base: str, others: tuple[str, ...]) -> Iterator[Claim]:
    top = max(others, key=lambda name: _ours(results, name))
    measured = f"{results[top]['title']}: {_pair(results, top)}; {results[base]['title']}: {_pair(results, base)}"
    yield Claim(text, measured, _ours(results, top) > _ours(results, base))


def _cnn(results: Results) -> Iterator[Claim]:
    others = ("000-cnn-z2.4-sigma0.5", "000-cnn-z2.4-sigma1")
    yield from _gain(results, "CNN by writer: smoothing gains at the smallest epsilon", "000-cnn-z2.4-sigma0", others)


def _lstm(results: Results) -> Iterator[Claim]:
    others = ("000-lstm-z1-sigma0.5", "000-lstm-z1-sigma1")
    yield from _gain(results, "LSTM by role: smoothing gains at the smallest epsilon", "000-lstm-z1-sigma0", others)


def _denoisers(results: Results) -> Iterator[Claim]:
    names = [f"000-denoisers-z2.4-{kind}" for kind in ("james_stein", "james_stein_plain", "soft_threshold")]
    smooth = _ours(results, "000-cnn-z2.4-sigma1")
    top = max(names, key=lambda name: _ours(results, name))
    measured = f"best of them {_pair(results, top)}; smoothing {_pair(results, '000-cnn-z2.4-sigma1')}"
    yield Claim("James-Stein and soft threshold stay far below smoothing", measured, smooth - _ours(results, top) > 5)


def _sam(results: Results) -> Iterator[Claim]:
    for setting in ("femnist", "mnist"):
        if f"003-{setting}-dp-fedsam" in results:
            yield from _sam_in(results, setting)


def _sam_in(results: Results, setting: str) -> Iterator[Claim]:
    def name(slug: str) -> str:
        return f"003-{setting}-{slug}"

    sam, avg = name("dp-fedsam"), name("dp-fedavg")
    forms = [name(f"topk-{form}") for form in ("of-the-update", "of-the-mean", "by-public-mask")]
    top = max((form for form in forms if form in results), key=_by(results))
    pairs = f"{_pair(results, sam)} against {_pair(results, avg)}"
    yield Claim(
        f"{setting}: DP-FedSAM beats DP-FedAvg at equal epsilon", pairs, _ours(results, sam) > _ours(results, avg)
    )
    best = f"{results[top]['title']} {_pair(results, top)} against {_pair(results, sam)}"
    yield Claim(
        f"{setting}: the best sound top_k is no worse than DP-FedSAM", best, _ours(results, top) >= _ours(results, sam)
    )
    norms = [results[cell]["update_norm"] for cell in (sam, avg)]
    yield Claim(
        f"{setting}: DP-FedSAM has smaller updates (median)",
        f"{norms[0]:.3f} against {norms[1]:.3f}",
        norms[0] < norms[1],
    )


def _ls_sgd(results: Results) -> Iterator[Claim]:
    cells = {(epsilon, s): f"004-table2-eps{epsilon:.2f}-sigma{s}" for epsilon, row in LS_SGD.items() for s in row}
    gains = [_ours(results, name) - results[name]["published"] for name in cells.values()]
    text = "DP-LSSGD, Table 2: ours above the published figure in every cell, at an epsilon that is true"
    yield Claim(text, f"by {min(gains):.2f} to {max(gains):.2f} points", min(gains) > 0)
    for epsilon, needed in ((0.10, 87.5), (0.30, 90.0)):
        top = max((cells[epsilon, s] for s in LS_SGD[epsilon]), key=_by(results))
        measured = f"{results[top]['title']}: {_pair(results, top)}"
        yield Claim(f"DP-LSSGD, {needed} at epsilon {epsilon:.2f}", measured, _ours(results, top) >= needed)
    none, smooth = cells[0.10, 0], cells[0.10, 3]
    pair = f"{_pair(results, smooth)} against {_pair(results, none)}"
    yield Claim(
        "DP-LSSGD, smoothing is no worse than none at epsilon 0.10",
        pair,
        _ours(results, smooth) >= _ours(results, none),
    )


def _by(results: Results) -> Callable[[str], float]:
    return lambda name: _ours(results, name)


def _beyond(results: Results) -> Iterator[Claim]:
    for task in ("mnist", "adult", "writers"):
        names = [name for name in results if name.startswith(f"beyond-{task}-")]
        if names:
            top, base = max(names, key=_by(results)), f"beyond-{task}-last-model"
            default = f"beyond-{task}-mean-of-models-step-1.5"
            best = f"best: {results[top]['title']} {_pair(results, top)}"
            measured = f"{_pair(results, default)} against {_pair(results, base)}; {best}"
            text = f"beyond, {task}: the defaults of recipes.best beat the last model at step 1"
            yield Claim(text, measured, _ours(results, default) > _ours(results, base))
