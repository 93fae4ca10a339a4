"""results.json as the tables of README.md, between two markers. The standard library alone."""

from __future__ import annotations

from typing import Any

BEGIN, END = "<!-- begin: made by run.py -->", "<!-- end -->"
TITLES = {
    "cnn": "MNIST CNN of paper 004, 26,010 parameters, batch 256",
    "logistic": "Logistic regression 784 x 10, batch 256",
    "transformer": "Transformer encoder, 2 layers of 128, 32 characters, batch 64",
    "lstm64": "Character LSTM, 1 x 64, 80 characters, batch 64",
    "lstm256": "Character LSTM, 2 x 256, 80 characters, batch 16",
}
HEAD = (
    "| method | samples/s | samples/s, steps alone | ours is faster by | steps alone | wall | peak memory, MB |\n"
    "|---|---:|---:|---:|---:|---:|---:|"
)
Row = dict[str, Any]


def inserted(page: str, results: dict[str, Any]) -> str:
    """The page with everything between the markers replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}"


def table(results: dict[str, Any]) -> str:
    """The bars, then one table per workload."""
    parts = [_conditions(results), _bars(results["rows"])]
    for name in dict.fromkeys(row["workload"] for row in results["rows"]):
        rows = [_line(row) for row in results["rows"] if row["workload"] == name]
        parts.append("\n".join([f"**{TITLES.get(name, name)}**\n", HEAD, *rows]))
    return "\n\n".join(parts)


def _conditions(results: dict[str, Any]) -> str:
    machine, load = results["machine"], results["load"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
    rounds = sorted({row["rounds"] for row in results["rows"] if "seconds" in row})
    counts = " to ".join(str(count) for count in dict.fromkeys((rounds[0], rounds[-1])))
    return (
        f"{versions}, Python {machine['python']}; {machine['cpu']}, {machine['cores']} cores, one thread. "
        f"Rounds: {counts}. Load at start {load[0]}, at end {load[1]}."
    )


def _line(row: Row) -> str:
    name = f"{row['peer']}: {row['method']}"
    if "seconds" not in row:
        said = f"does not run: {row['error'].replace('|', '/')}" if "error" in row else "not measured: no time left"
        return f"| {name} | {said} | | | | | |"
    seconds, ratio = row["seconds"], row["ratio"]
    speeds = [f"{1 / seconds[key]:,.0f}" for key in ("loop_cpu", "step_cpu")]
    times = [f"{ratio[key]:.2f}" if key in ratio else "" for key in ("loop_cpu", "step_cpu", "loop_wall")]
    name += f" (then failed: {row['error'].replace('|', '/')})" if "error" in row else ""
    return f"| {name} | {' | '.join([*speeds, *times])} | {row['memory']:,.0f} |"


def _bars(rows: list[Row]) -> str:
    lines = ["| bar | needed | found, whole loop | found, steps alone | holds |", "|---|---:|---:|---:|---|"]
    return "\n".join([*lines, *_speed_bars(rows), *_memory_bars(rows)])


def _speed_bars(rows: list[Row]) -> list[str]:
    cnn = {(row["peer"], row["method"]): row["ratio"] for row in rows if row["workload"] == "cnn" and row["ratio"]}
    rivals = [ratio for (peer, _), ratio in cnn.items() if peer == "opacus"]
    both = ("loop_cpu", "step_cpu")
    hooks = [cnn.get(("opacus", "hooks"), {}).get(key, 0.0) for key in both]
    best = [min((ratio[key] for ratio in rivals), default=0.0) for key in both]
    lines = [_bar("CNN: times Opacus's default (hooks)", 3.0, hooks), _bar("CNN: times Opacus's best", 2.5, best)]
    for (peer, method), ratio in cnn.items():
        if peer == "torch":
            lines.append(_bar(f"CNN: times {method} without privacy", 0.6, [ratio[key] for key in both]))
    return lines


def _bar(name: str, needed: float, found: list[float]) -> str:
    shown = " | ".join(f"{value:.2f}" for value in found)
    return f"| {name} | at least {needed} | {shown} | {'yes' if min(found) >= needed else 'no'} |"


def _memory_bars(rows: list[Row]) -> list[str]:
    lines = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        memory = {
            (row["peer"], row["method"]): row["memory"] for row in rows if row["workload"] == name and "memory" in row
        }
        ours, hooks = memory.get(("sordino", "make_private")), memory.get(("opacus", "hooks"))
        if ours is not None and hooks is not None:
            least = min(value for (peer, _), value in memory.items() if peer == "opacus")
            shown = f"{ours:,.0f} MB | hooks {hooks:,.0f}, least {least:,.0f}"
            holds = "yes" if ours <= least else "below its default, not its least" if ours <= hooks else "no"
            lines.append(f"| {name}: peak memory | at most Opacus's | {shown} | {holds} |")
    return lines
