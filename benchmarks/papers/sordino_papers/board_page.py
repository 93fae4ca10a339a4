"""The board as a page and a figure, from the kept results alone. Called by `sordino board page`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino.accounting.rounding import upto
from sordino_papers import board_best
from sordino_papers.board import Published
from sordino_papers.board_choosing import GRIDS, KEPT, STAND_INS, stored
from sordino_papers.board_rows import BY_ID, ROWS, certificate_path, results
from sordino_papers.panels import curves

FIGURE = "board.png"
HEAD = """# The board: accuracy at equal epsilon

Private linear heads on public features ([features.md](features.md)). A row is run once, five seeds with secure noise,
and kept whatever it says; the interval is Student's 95% of the mean. Clients that are not natural are cut anew by every
seed; the records that train and test are those of the data set. This page is made by `sordino board page` from
benchmarks/board, and a test compares the two.

![Accuracy against epsilon](figures/board.png)

"""
COLUMNS = ("row", "unit", "epsilon, delta", "accuracy", "no privacy", "goal", "published", "public data", "CPU s")


def write(folder: Path = KEPT, out: Path = Path("docs/board.md")) -> None:
    """Write the page, and its figure into figures/ beside it."""
    out.write_text(text(folder), encoding="utf-8")
    panels: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, found in results(folder).items():
        row = BY_ID[name]
        lines = panels.setdefault(f"unit: {row.problem.unit}", {})
        point = {"epsilon": row.epsilon, "accuracy": found["mean"], "spread": found["half_width"]}
        lines.setdefault(row.title, []).append(point)
    panels = {title: dict(sorted(lines.items(), key=_length, reverse=True)) for title, lines in panels.items()}
    (out.parent / "figures").mkdir(exist_ok=True)
    how = {"xlabel": "epsilon", "ylabel": "test accuracy, %", "log": True}
    curves(panels, "epsilon", "accuracy", out.parent / "figures" / FIGURE, **how)  # type: ignore[arg-type]


def _length(item: tuple[str, list[dict[str, Any]]]) -> int:
    return len(item[1])


def text(folder: Path = KEPT) -> str:
    """The page."""
    known = results(folder)
    missing = [row.id for row in ROWS if row.id not in known]
    parts = [HEAD + _table([_row(name, found) for name, found in known.items()], COLUMNS)]
    parts.append(_notes(known, missing))
    peers = _peers(folder)
    parts += [peers] if peers else []
    parts += [part for part in (_best(folder),) if part]
    parts.append(_settings(known, folder))
    return "\n".join(parts)


def _table(rows: Sequence[tuple[str, ...]], columns: tuple[str, ...]) -> str:
    lines = [" | ".join(columns), "|".join("---" for _ in columns), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines) + "\n"


def _row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    row, link = BY_ID[name], f"../benchmarks/board/{certificate_path(name, Path()).as_posix()}"
    link += "/certificate.json" if row.problem.partition is not None else ""
    return (
        f"{row.title} (`{name}`)",
        f"{found['unit']}, {found['relation'].replace('_', ' or ')}",
        f"[{upto(found['epsilon'], 4)}]({link}), {found['delta']:.2g}",
        f"**{found['mean']:.2f}** +- {found['half_width']:.2f}",
        f"{found['without_privacy']:.2f}",
        "-" if row.goal is None else f"{row.goal:g}{'' if found['mean'] >= row.goal else ' (missed)'}",
        _published(row.published),
        "; ".join(found["public"]) or "none",
        f"{found['cpu_seconds']:g}",
    )


def _published(found: Published | None) -> str:
    if found is None:
        return "-"
    note = f"; {found.note}" if found.note else ""
    return f"{found.accuracy:g} at {found.epsilon:g} as claimed ({found.source}{note})"


def _notes(known: dict[str, Any], missing: list[str]) -> str:
    modes = sorted({found["noise"] for found in known.values()})
    lines = [
        f"Noise mode of all rows: {', '.join(modes)}. Each epsilon links to the certificate of the first seed, which a "
        "test recomputes (`sordino certify`). CPU seconds are those of one head; features are computed once.",
        "",
        '"No privacy" is the same head on the same features without clip and noise: logistic loss with a ridge of '
        "1e-6, 50 iterations of L-BFGS. Where it is close to the private figure, the features are the limit and not "
        "privacy. Epsilons of published figures are as claimed: they were not recomputed here.",
        "",
        "`sordino board run ROW --check` computes the first seed again with repeatable noise and compares it with the "
        "kept figure.",
    ]
    if missing:
        lines += ["", f"Not run yet: {', '.join(f'`{name}`' for name in missing)}."]
    return "\n".join(lines) + "\n"


def _peers(folder: Path) -> str:
    """The same heads by other libraries on the same features."""
    file, known = folder / "peers.json", results(folder)
    if not file.is_file():
        return ""
    columns = ("row", "library", "accuracy", "seeds", "epsilon by its own accountant", "CPU s")
    peers = json.loads(file.read_text("utf-8"))
    rows = []
    for name in dict.fromkeys(one["row"] for one in peers):
        every = [{**known[name], "library": "Sordino"}, *(one for one in peers if one["row"] == name)]
        rows += [
            (f"`{name}`", one["library"], f"{one['mean']:.2f} +- {one['half_width']:.2f}", str(len(one["values"])),
             f"{one['epsilon']:.4g}", f"{one['cpu_seconds']:g}")
            for one in every
        ]  # fmt: skip
    about = "The same cached features, steps, step size, clip norm, momentum and noise multiplier as Sordino's row.\n"
    return f"## The same head by other libraries\n\n{about}\n" + _table(rows, columns)


def _best(folder: Path) -> str:
    """The rule of `recipes.best` on tasks that are nowhere on the board."""
    found = board_best.stored(folder)
    if not found:
        return ""
    about = (
        f"`recipes.best(head_size=...)` takes rounds and step from clients, epsilon and weights alone, by a rule found "
        f"on Fashion-MNIST dealt to clients. On three tasks that are nowhere on this page, epsilon "
        f"{board_best.EPSILON:g}, paired seeds, against the defaults of `recipes.best` (logistic regression on the "
        "records themselves, and on the same features, for which the defaults' step is too small); the difference is "
        "to the better of the two:\n"
    )
    columns = (
        "task",
        "by the rule",
        "defaults, records",
        "defaults, features",
        "difference, 95% interval",
        "beats them",
    )
    return f"## The rule of `recipes.best`\n\n{about}\n" + _table(board_best.rows(found), columns)


def _settings(known: dict[str, Any], folder: Path) -> str:
    tries, columns = stored(folder), ("row", "steps", "step", "clip norm", "chosen on", "tries")
    rows = []
    for name, found in known.items():
        chosen, stand_in = found["settings"], found["stand_in"]
        count = len(tries.get(f"{stand_in}-eps{BY_ID[name].epsilon:g}", []))
        rows.append((f"`{name}`", str(chosen["steps"]), f"{chosen['step']:g}", f"{chosen['clip_norm']:g}", stand_in,
                     str(count)))  # fmt: skip
    about = (
        "Steps (rounds of clients) and the step size per unit of clip norm were chosen on a stand-in: another data "
        "set, by accuracy on held-out records of its training part, with repeatable noise and one seed for each try "
        "(`sordino board choose`, benchmarks/board/chosen.json). No test figure of a row was looked at before its "
        "settings were fixed. The grids of all tables were widened once, when the first best on `loans-record` lay on "
        "the edge. Clip norm, momentum and batch size are the same in all rows; they come from prototypes on MNIST and "
        "CIFAR-10 in which they hardly mattered, but which had test figures in sight. The ranges of the other grids "
        "were set with the prototypes' rounds and steps known, so of MNIST and CIFAR-10 they are not blind either. In "
        "`fashion-539-clients` the best has the most rounds that were tried, at every epsilon, and one seed decided "
        "between steps: where a goal of MNIST by writer is missed, a wider grid with more seeds is what was not done.\n"
    )
    listed = [f"- `{name}`: {_words(name)}" for name in GRIDS]
    where = "\n".join(["The stand-ins:", "", *listed, ""])
    return f"## Settings\n\n{about}\n" + _table(rows, columns) + f"\n{where}"


def _words(name: str) -> str:
    problem = STAND_INS[name]
    cut = "" if problem.partition is None else f", clients by `{problem.partition!r}`"
    label = problem.features.kind if hasattr(problem.features, "kind") else "records scaled to norm 1"
    return f"{problem.data}, {label or 'records scaled to norm 1'}{cut}, {problem.held:,} training records held out"
