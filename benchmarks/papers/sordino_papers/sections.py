"""Pieces of the pages: a table of cells, a study with its figure, a table of claims, cells that came out again."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

from sordino.accounting.rounding import upto
from sordino_papers.cells import Results, Table
from sordino_papers.kept import middle
from sordino_papers.studies import Study

Row = dict[str, Any]
PER_SEED = ("values", "figures")  # of a row of a study: kept, judged and drawn, not shown
LONG = 3  # rows of one shape that a page shows; more of them stand in a file beside it
ALONG = ("round", "epoch", "k")  # a row that has None here is the end of a curve
COLUMNS = ("setting", "published", "ours", "spread", "claimed epsilon", "epsilon", "update norm (median)", "seeds", "s")


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def entry(value: Any, name: str = "") -> str:
    """A value in a table; an epsilon is rounded up."""
    if value is None:
        return "-"
    if name == "epsilon" and isinstance(value, float):
        return upto(value, 4)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- a table of cells ------------------------------------------------------------------------------------------------


def table_text(table: Table, results: Results) -> str:
    """One table; the column of the paper's protocol stands where a cell has it."""
    found = [results[cell.id] for cell in table.cells if cell.id in results]
    protocol = any(middle(result, "protocol") is not None for result in found)
    columns = [*COLUMNS[:4], "paper's protocol", *COLUMNS[4:]] if protocol else list(COLUMNS)
    about = " ".join(text for text in (f"`sordino papers run {table.id}`.", table.about, _chosen(table.chosen)) if text)
    if len(found) > LONG:
        shown = f"All {len(found)} cells: [{table.id}.csv](rows/{table.id}.csv)."
    else:
        shown = grid(columns, (_cell(result, protocol) for result in found))
    return f"### {table.title}\n\n{about}\n\n{shown}"


def cells_csv(table: Table, results: Results) -> str | None:
    """The cells of a table too long for a page."""
    found = [results[cell.id] for cell in table.cells if cell.id in results]
    names = ("id", "title", "published", "ours", "spread", "epsilon_claimed", "epsilon", "seeds")
    return as_csv([{name: one.get(name) for name in names} for one in found]) if len(found) > LONG else None


def _chosen(who: str) -> str:
    return f"Chosen by: {who}." if who else ""


def _cell(result: Row, protocol: bool) -> list[str]:
    return [
        result["title"],
        _number(result["published"], 2),
        f"**{result['ours']:.2f}**",
        _number(result["spread"], 2),
        *([_number(middle(result, "protocol"), 2)] if protocol else []),
        _number(result["epsilon_claimed"], 2),
        "-" if result["epsilon"] is None else upto(result["epsilon"]),
        _number(middle(result, "update_norm"), 3),
        str(result["seeds"]),
        _number(middle(result, "seconds"), 0),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


# ---- a study ---------------------------------------------------------------------------------------------------------


def study_text(study: Study, found: Row) -> str:
    """A study: its figure, and its rows as tables of one shape each; of a long one its ends, and a file of them all."""
    made = f"`sordino papers run {study.id}` ({_took(found)})."
    head = f"### {study.title}\n\n" + " ".join(text for text in (made, study.about, _chosen(study.chosen)) if text)
    head += f" [Figure](../figures/{study.id}.png)."
    tables = [
        _rows(keys, rows) for keys, rows in shapes(found["rows"]).items() if not (is_long(found) and trials(keys))
    ]
    file = [f"All {len(found['rows'])} rows: [{study.id}.csv](rows/{study.id}.csv)."] if is_long(found) else []
    return "\n\n".join([head, *(table for table in tables if table), *file])


def _took(found: Row) -> str:
    """Seconds of one core; of older results by the clock."""
    return f"{found['core_seconds']:.0f} s of one core" if "core_seconds" in found else f"{found['seconds']:.0f} s"


def shapes(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """The rows of a study by what they have."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(key for key in row if key not in PER_SEED), []).append(row)
    return found


def trials(keys: Sequence[str]) -> bool:
    """Whether rows of this shape are what a search tried: one run each, judged on validation images."""
    return "validation" in keys and "repeats" not in keys


def is_long(found: Row) -> bool:
    """Whether a page leaves rows of it to a file."""
    return any(len(rows) > LONG for rows in shapes(found["rows"]).values())


def _rows(keys: tuple[str, ...], rows: list[Row]) -> str:
    if len(rows) > LONG:
        ends = [row for row in rows if any(name in row and row[name] is None for name in ALONG)]
        rows = ends if len(ends) <= LONG else []
    shown = [key for key in keys if any(row[key] is not None for row in rows)]
    return grid(shown, ([entry(row[key], key) for key in shown] for row in rows)) if rows else ""


def as_csv(rows: Sequence[Row]) -> str:
    """All rows of a study with every column that one of them has; the seeds' own figures stay in the results."""
    names = list(dict.fromkeys(key for row in rows for key in row if key not in PER_SEED))
    file = StringIO()
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


# ---- claims and digits -----------------------------------------------------------------------------------------------


def claims_table(rows: Iterable[Row]) -> str:
    """Claims with their interval or figure, verdict and seeds; who chose stands in the file beside the page."""
    head = ("claim", "difference with 95% interval, or figure", "holds here", "seeds")
    return grid(head, ([row["text"], row["measured"], _answer(row), entry(row["seeds"])] for row in rows))


def _answer(row: Row) -> str:
    return "**no**" if row["verdict"] == "no" else str(row["verdict"])


def paper_claims_table(rows: Iterable[Row]) -> str:
    """The claims of a paper, each once."""
    head = (
        "claim",
        "paper",
        "ours",
        "ratio, paper / ours",
        "holds here",
        "seeds",
        "cause if not, or what else to know",
    )
    return grid(head, (
        [row["text"], row["published"], row["measured"], row["regime"], _answer(row), entry(row["seeds"]),
         row["cause"] or "-"]
        for row in rows
    ))  # fmt: skip


def headlines_table(rows: Iterable[Row]) -> str:
    """The table that is read in a minute."""
    head = (
        "headline",
        "the paper's number",
        "ours",
        "same regime? (ratio, paper / ours)",
        "verdict",
        "cause if not, or what else to know",
    )
    return grid(head, (
        [row["title"], row["published"], row["measured"], row["same"], f"**{row['verdict']}**", row["cause"] or "-"]
        for row in rows
    ))  # fmt: skip


def digits_table(rows: Iterable[Row]) -> str:
    """Runs that were computed again."""
    return grid(("run", "kept", "found", "every digit", "code", "torch, instructions"), map(_again, rows))


def _again(row: Row) -> list[str]:
    figures = (f"{row['kept']:.6g}", f"{row['found']:.6g}", "yes" if row["answer"] == "same" else "**no**")
    return [f"{row['id']}, {row['of']}", *figures, row["code"], f"{row['torch']}, {row['cpu']}"]
