"""federated.json as the tables of README.md, between two markers, with every bar beside what was found. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BEGIN, END = "<!-- begin: made by federated.py -->", "<!-- end of federated -->"
TITLES = {
    "w1": "W1, logistic regression 784 x 10: 1000 clients x 50, cohort 50, 5 epochs, batch 10",
    "w2": "W2, EMNIST CNN, 1.7M parameters: 500 clients x 178, cohort 4 (of 50), 2 epochs, batch 32",
    "w3": "W3, SVHN CNN, 3.4M parameters: 100 clients x 300, cohort 2 (of 100), 1 epoch, batch 64",
    "w2x": "W2 for two workers: cohort 8 (of 50)",
    "w3x": "W3 for two workers: cohort 6 (of 100)",
    "w4": "W4, character LSTM, 2 x 256, 80 characters: 20 clients x 200, cohort 2 (of 20), 1 epoch, batch 50",
    "w6": "W6, 180 convex runs: 25 silos x 1238 x 50 features, 35 rounds of one minibatch gradient of 35 per silo; "
    "seconds for all 180, for pfl 180 times those of one run",
}
NAMES = {"sordino_fl": "sordino", "bare": "torch", "flwr": "Flower", "pfl": "pfl"}
COLUMNS = ("method", "s/round, CPU", "s/round, wall", "ours is faster by, CPU", "wall", "repeats")
HEAD = f"| {' | '.join(COLUMNS)} |\n|---{'|---:' * 5}|"
Row = dict[str, Any]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Bar:
    """A ratio of two methods' seconds on a workload, at least or at most a number."""

    name: str
    over: tuple[str, str]  # the method whose seconds are divided
    under: tuple[str, str]
    workload: str
    needed: float
    least: bool = True
    figure: str = "cpu"

    def found(self, rows: dict[Key, Row]) -> float | None:
        """The ratio; None where one of the two was not measured."""
        pair = [rows.get((self.workload, *who), {}).get("seconds") for who in (self.over, self.under)]
        return None if None in pair else pair[0][self.figure] / pair[1][self.figure]  # type: ignore[index]


_OURS, _PAIR, _BARE = ("sordino_fl", "run"), ("sordino_fl", "run, 2 workers"), ("bare", "by hand")
_INEXACT = ("sordino_fl", "run, exact=False")
_PFL, _FLOWER = ("pfl", "FedAvg"), ("flwr", "simulation, 2 CPUs")
_WOVEN, _WOVEN_PFL = ("sordino_fl", "run, banded"), ("pfl", "FedAvg, banded")
BARS = (
    Bar("W1: times pfl, CPU", _PFL, _OURS, "w1", 20),
    Bar("W1, banded noise: times pfl, CPU", _WOVEN_PFL, _WOVEN, "w1", 20),
    Bar("W1: times Flower, CPU", _FLOWER, _OURS, "w1", 45),
    Bar("W1: over the loop by hand, CPU", _OURS, _BARE, "w1", 1.3, least=False),
    *(Bar(f"{w.upper()}: times pfl, CPU", _PFL, _OURS, w, 1.2) for w in ("w2", "w3", "w4")),
    *(Bar(f"{w.upper()}: over the loop by hand, CPU", _OURS, _BARE, w, 1.05, least=False) for w in ("w2", "w3", "w4")),
    Bar("W6, exact=False: times pfl, CPU", _PFL, _INEXACT, "w6", 100),
    *(Bar(f"{w.upper()}: 2 workers, times 1, wall", _OURS, _PAIR, f"{w}x", 1.8, figure="wall") for w in ("w2", "w3")),
)
FIGURES: dict[str, tuple[str, float | None]] = {  # of ours alone: what it is, and the most it may be
    "import": ("seconds of `import torch, sordino` beyond `import torch`", 0.3),
    "names": ("the same with `run`, `Task` and a recipe imported, since names load when first used", None),
    "epsilon": ("seconds of `sordino epsilon`, without importing torch", 1.5),
    "server": ("W3, cohort 10, smoothing on: server's share of a round", 0.03),
}


def holds(found: float | None, needed: float | None, least: bool) -> str:
    """yes or no; a figure that was not measured holds nothing."""
    if found is None:
        return "not measured"
    if needed is None:
        return ""
    return "yes" if (found >= needed if least else found <= needed) else "no"


def bars(results: dict[str, Any]) -> str:
    """One line per bar."""
    rows = {(row["workload"], row["peer"], row["method"]): row for row in results["rows"]}
    lines = ["| bar | needed | found | holds |", "|---|---:|---:|---|"]
    lines += [_bar(bar.name, bar.needed, bar.least, bar.found(rows), 2) for bar in BARS]
    for key, (name, most) in FIGURES.items():
        entry = results["figures"].get(key, {})
        said = f" ({_cell(entry['error'])})" if "error" in entry else ""
        lines.append(_bar(name + said, most, False, entry.get("value"), 3))
    return "\n".join(lines)


def _bar(name: str, needed: float | None, least: bool, found: float | None, digits: int) -> str:
    shown = "" if found is None else f"{found:.{digits}f}"
    asked = "no bar" if needed is None else f"at {'least' if least else 'most'} {needed:g}"
    return f"| {name} | {asked} | {shown} | {holds(found, needed, least)} |"


def inserted(page: str, results: dict[str, Any]) -> str:
    """The page with everything between the markers replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}"


def table(results: dict[str, Any]) -> str:
    """Conditions, bars, then one table per workload."""
    parts = [_conditions(results), bars(results)]
    for name in sorted({row["workload"] for row in results["rows"]}):
        rows = [_line(row) for row in results["rows"] if row["workload"] == name]
        parts.append("\n".join([f"**{TITLES.get(name, name)}**\n", HEAD, *rows]))
    return "\n\n".join(parts)


def _conditions(results: dict[str, Any]) -> str:
    machine, load = results["machine"], results["load"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
    anew = ", ".join(TITLES.get(name, name).split(":")[0] for name in results.get("anew", ()))
    return (
        f"{versions}, Python {machine['python']}; {machine['cpu']}, {machine['cores']} cores. "
        f"Load at start {load[0]}, at end {load[1]}." + (f" In a later call of their own: {anew}." if anew else "")
    )


def _line(row: Row) -> str:
    name = f"{NAMES.get(row['peer'], row['peer'])}: {row['method']}"
    if "seconds" not in row:
        said = f"does not run: {_cell(row['error'])}" if "error" in row else "not measured: no time left"
        return f"| {name} | {said} | | | | |"
    times = [f"{row['seconds'][key]:.4g}" if key in row["seconds"] else "" for key in ("cpu", "wall")]
    ratios = [f"{row['ratio'][key]:.2f}" if key in row["ratio"] else "" for key in ("cpu", "wall")]
    name += f" (then failed: {_cell(row['error'])})" if "error" in row else ""
    return f"| {name} | {' | '.join([*times, *ratios])} | {row['repeats']} |"


def _cell(text: str) -> str:
    return text.replace("|", "/")
