"""`make bench-nets`: DP-SGD on nets drawn at random, beside plain SGD and Opacus: time and memory of a step.

Each net at each batch size by each method in a process of its own, one thread, interleaved: A, B, C, ..., A, B, C, ...
Of the CPU time of a step the least counts, of memory the most. Writes results.json and the table in README.md. Without
--seed a new seed is drawn, so that nothing can be tuned to the nets; the page names it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from nets import nets

HERE = Path(__file__).resolve().parent
PLAIN, OURS, BOUND = ("torch", "SGD"), ("sordino", "make_private"), ("sordino", "make_private, memory=")
HOOKS, GHOST = ("opacus", "hooks"), ("opacus", "ghost")
METHODS = {PLAIN: "plain SGD", OURS: "ours", BOUND: "ours, memory=", HOOKS: "Opacus hooks", GHOST: "Opacus ghost"}
FIGURES = {"ms": "CPU ms of a step", "live": "peak of live tensors, MB", "rss": "peak RSS over imports, MB"}
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
Row = dict[str, Any]


def child(method: tuple[str, str], seed: int, number: int, batch: int, budget: float, first: bool) -> Row:
    """What one process says; a process that dies or hangs is an error of the method."""
    peer, name = method
    own = HERE.parent / "peers" / ".venv-opacus" / "bin" / "python"
    python = str(own) if peer == "opacus" else sys.executable
    command = [python, "one_net.py", peer, name, str(seed), str(number), str(batch), str(budget), str(first)]
    single = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=HERE, env=single, capture_output=True, text=True, timeout=90)
        found: Row = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": "more than 90 seconds"}
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    return found


def measure(seed: int, batches: list[int], rounds: int, budget: float, minutes: float, only: list[str]) -> list[Row]:
    """All nets in turn, of each all methods in turn; as many rounds as there is time for."""
    words = [f"{net.family}: {net.words}" for net in nets(seed, 1)]
    rows = {
        (number, batch, method): {"net": text, "batch": batch, "method": METHODS[method]}
        for batch in batches for number, text in enumerate(words) for method in METHODS
        if not only or METHODS[method] in only
    }  # fmt: skip
    end = time.monotonic() + 60 * minutes
    for turn in range(rounds):
        for (number, batch, method), row in rows.items():
            if time.monotonic() > end:
                print("out of time: the rest of the rounds is left out", file=sys.stderr)
                return list(rows.values())
            if "error" in row:
                continue
            found = child(method, seed, number, batch, budget, turn == 0)
            row |= {name: found[name] for name in ("error", "versions") if name in found}
            row["ms"] = min(row.get("ms", 1e9), found["ms"]) if "ms" in found else None
            row |= {name: max(row.get(name, 0.0), found[name]) for name in ("rss", "live") if name in found}
            print(f"{turn + 1}: {row['net']}, {batch}, {row['method']}: {found}", file=sys.stderr, flush=True)
    return list(rows.values())


def machine() -> Row:
    info = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def markdown(found: Row) -> str:
    """The page's table: one line per net, batch and figure, with the ratio of ours to plain SGD."""
    known = {(row["net"], row["batch"], row["method"]): row for row in found["rows"]}
    names = list(dict.fromkeys(row["method"] for row in found["rows"]))
    made, load = found["machine"], " to ".join(str(one) for one in found["load"])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    text = [
        f"{found['date']}, seed {found['seed']}; {made['cpu']}, {made['cores']} cores, of which one is used; load "
        f'{load}; Python {made["python"]}, {versions}. memory= is "{found["memory"]}".',
        "",
        *([found["note"], ""] if "note" in found else []),
    ]
    for figure, title in FIGURES.items():
        text += [f"**{title}**", "", f"| net | batch | {' | '.join(names)} | ours / plain |"]
        text += ["|---|---|" + "---|" * (len(names) + 1)]
        for net, batch in dict.fromkeys((row["net"], row["batch"]) for row in found["rows"]):
            entries = [known[net, batch, name].get(figure) for name in names]
            shown = ["failed" if value is None else f"{value:,.0f}" for value in entries]
            ratio = None if figure in found.get("no_ratio", ()) else _ratio(known, net, batch, figure)
            text.append(f"| {net} | {batch} | {' | '.join(shown)} | {'' if ratio is None else f'{ratio:.2f}'} |")
        text.append("")
    return "\n".join([*text, *_summary(known, [one for one in FIGURES if one not in found.get("no_ratio", ())])]) + "\n"


def _ratio(known: dict[tuple[str, int, str], Row], net: str, batch: int, figure: str) -> float | None:
    ours, plain = (known.get((net, batch, name), {}).get(figure) for name in ("ours", "plain SGD"))
    return ours / plain if ours and plain else None


def _summary(known: dict[tuple[str, int, str], Row], figures: list[str]) -> list[str]:
    """Geometric means of ours / plain SGD by family."""
    lines = [f"| ours / plain SGD, geometric mean | {' | '.join(FIGURES[one] for one in figures)} |"]
    lines.append("|---|" + "---|" * len(figures))
    for family in dict.fromkeys(net.partition(":")[0] for net, _, _ in known):
        pairs = dict.fromkeys((net, batch) for net, batch, _ in known if net.startswith(family + ":"))
        means = []
        for figure in figures:
            ratios = [ratio for net, batch in pairs if (ratio := _ratio(known, net, batch, figure)) is not None]
            means.append(f"{geometric_mean(ratios):.2f}" if ratios else "")
        lines.append(f"| {family} | {' | '.join(means)} |")
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    options.add_argument("--batches", type=int, nargs="+", default=[1024, 256])
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--budget", type=float, default=0.5, help="seconds of steps per process, at least four steps")
    options.add_argument("--minutes", type=float, default=14.0, help="no process starts later")
    options.add_argument("--only", nargs="*", default=[], help="methods, as the table names them")
    options.add_argument("--out", type=Path, default=HERE, help="folder of results.json and README.md")
    given, before = options.parse_args(), os.getloadavg()[0]
    rows = measure(given.seed, given.batches, given.rounds, given.budget, given.minutes, given.only)
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.pop("versions", {})
    found = {
        "date": str(datetime.datetime.now(tz=datetime.UTC).date()), "seed": given.seed, "machine": machine(),
        "load": [round(one, 1) for one in (before, os.getloadavg()[0])], "versions": versions, "memory": "128 MB",
        "rows": rows,
    }  # fmt: skip
    given.out.mkdir(exist_ok=True)
    (given.out / "results.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    page = given.out / "README.md"
    text = page.read_text("utf-8") if page.exists() else f"# Random nets\n\n{BEGIN}{END}"
    head, _, rest = text.partition(BEGIN)
    page.write_text(head + BEGIN + "\n" + markdown(found) + END + rest.partition(END)[2], "utf-8")
    print(markdown(found))


if __name__ == "__main__":
    main()
