"""docs/papers.md: every stored result beside what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sordino_papers import coverage
from sordino_papers.cells import Results, Table
from sordino_papers.claims import settled
from sordino_papers.kept import middle
from sordino_papers.studies import Study
from sordino_papers.tables import STUDIES, TABLES

PER_SEED = ("values", "figures")  # of a row of a study: kept, judged and drawn, not shown

HEAD = """# The papers' tables, ours beside theirs

Made by `sordino papers run ID` and `sordino papers page`; the raw results are in `benchmarks/papers/results`.
Accuracy in percent: mean and standard deviation over seeds, of the LAST round on the WHOLE test set.
"epsilon" is what our certificate says of the run; "claimed" is what the paper says of the same noise; "s" is seconds
per seed. "Paper's protocol", where a table has it, is the authors' way to report: the first 1,010 test images, at the
round with the best accuracy on 10,000 validation images, which no epsilon pays for.
"""
CLAIMS = """
"A beats B" is decided by the differences of paired seeds (same data split, start and noise stream) with a 95% interval
of Student's t: yes if it is above 0, **no** if it is below, undecided otherwise. One number with nothing to pair is yes
or **no** as it stands. "Chosen by" says which data chose the hyper-parameters of the two sides.
""".strip()

DIGITS = """
With one thread per process (the runner sees to it) the same code on the same kind of processor gives the same model to
the last bit: run twice, in other processes, with or without compiled kernels, whatever `OMP_NUM_THREADS` says (seen for
a CNN and a perceptron). Two threads move a CNN's weights by 4e-7 in two rounds, and another instruction set (torch
or oneDNN without AVX2) by 1e-5. A logistic regression and a perceptron had the same accuracy under both instruction
sets at the end. What moves a net's cells is a rewritten inner loop: the perceptron's first cell was 90.15 before its
gradient was written out and is 90.17 since (a review saw cells of nets move by 0.3 between versions; not measured again
here). So a net's cells come out again on the same code and instruction set; every kept result names its code. Of the
first twenty cells checked, nineteen gave the digits that older code had kept; 000-table2-tight-poisson-eps6-sigma1 was
0.01 off, was run anew, and is so below.
""".strip()


def page(results: Results, reproduced: list[dict[str, Any]] | None = None) -> str:
    """The whole page; a table without results is left out."""
    parts = [table_text(table, results) for table in TABLES if any(cell.id in results for cell in table.cells)]
    parts += [study_text(study, results[study.id]) for study in STUDIES if study.id in results]
    return (
        "\n\n".join([HEAD.strip(), coverage.text(), claims_text(results), digits_text(reproduced or []), *parts]) + "\n"
    )


def digits_text(rows: list[dict[str, Any]]) -> str:
    """How far results come out again, and of which runs that was seen."""
    same = sum(row["answer"] == "same" for row in rows)
    seen = f"`sordino papers check`: {same} of {len(rows)} runs gave every digit that is kept." if rows else ""
    columns = ("run", "kept", "found", "every digit", "code", "torch, instructions")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *map(_again, rows)] if rows else []
    return "\n".join(["## The same digits again", "", DIGITS, *(["", seen, "", *lines] if rows else [])])


def _again(row: dict[str, Any]) -> str:
    figures = (f"{row['kept']:.6g}", f"{row['found']:.6g}", "yes" if row["answer"] == "same" else "**no**")
    return (
        "| " + " | ".join((f"{row['id']}, {row['of']}", *figures, row["code"], f"{row['torch']}, {row['cpu']}")) + " |"
    )


def study_text(study: Study, found: dict[str, Any]) -> str:
    """A study: its figure, and its rows as tables of one shape each."""
    made = f"`sordino papers run {study.id}` ({found['seconds']:.0f} s)."
    head = f"## {study.title}\n\n" + " ".join(text for text in (made, study.about, _chosen(study.chosen)) if text)
    shapes: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        shapes.setdefault(tuple(key for key in row if key not in PER_SEED), []).append(row)
    tables = [_plain_table(keys, rows) for keys, rows in shapes.items()]
    return "\n\n".join([head, f"![{study.title}](figures/{study.id}.png)", *tables])


def _plain_table(keys: tuple[str, ...], rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    return "\n".join([*lines, *("| " + " | ".join(_entry(row[key]) for key in keys) + " |" for row in rows)])


def _entry(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def claims_text(results: Results) -> str:
    """Every claim that the kept results can judge, whichever way it went."""
    rows = [_claim(row) for row in judged(results)]
    head = "| claim | difference with 95% interval, or figure | holds here | seeds | chosen by |"
    return "\n".join(["## Claims, checked", "", CLAIMS, "", head, "|---|---|---|---|---|", *rows])


def judged(results: Results) -> list[dict[str, Any]]:
    """The claims of all tables and studies, made from their kept results."""
    found = [row for table in TABLES for row in settled(table.claims, results)]
    for study in STUDIES:
        if study.id in results:
            found += study_claims(study, results[study.id])
    return found


def study_claims(study: Study, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The claims of a study; rows kept without the values of their seeds decide nothing."""
    try:
        return list(study.claims(found["rows"]))
    except KeyError as missing:
        lacks = f"the kept rows have no {missing}: run it anew"
        return [{"text": study.title, "measured": lacks, "verdict": "undecided", "seeds": None, "chosen": "-"}]


def _claim(row: dict[str, Any]) -> str:
    answer = "**no**" if row["verdict"] == "no" else row["verdict"]
    return "| " + " | ".join((row["text"], row["measured"], answer, _entry(row["seeds"]), row["chosen"])) + " |"


COLUMNS = ("setting", "published", "ours", "spread", "claimed epsilon", "epsilon", "update norm (median)", "seeds", "s")


def table_text(table: Table, results: Results) -> str:
    """One table; the column of the paper's protocol stands where a cell has it."""
    found = [results[cell.id] for cell in table.cells if cell.id in results]
    protocol = any(middle(result, "protocol") is not None for result in found)
    columns = [*COLUMNS[:4], "paper's protocol", *COLUMNS[4:]] if protocol else list(COLUMNS)
    about = " ".join(text for text in (f"`sordino papers run {table.id}`.", table.about, _chosen(table.chosen)) if text)
    rule = "|" + "---|" * len(columns)
    rows = [_row(result, protocol) for result in found]
    return "\n".join([f"## {table.title}", "", about, "", "| " + " | ".join(columns) + " |", rule, *rows])


def _chosen(who: str) -> str:
    return f"Chosen by: {who}." if who else ""


def _row(result: dict[str, Any], protocol: bool) -> str:
    cells = [
        result["title"],
        _number(result["published"], 2),
        f"**{result['ours']:.2f}**",
        _number(result["spread"], 2),
        *([_number(middle(result, "protocol"), 2)] if protocol else []),
        _number(result["epsilon_claimed"], 2),
        _number(result["epsilon"], 2),
        _number(middle(result, "update_norm"), 3),
        str(result["seeds"]),
        _number(middle(result, "seconds"), 0),
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def write(results: Results, path: Path, reproduced: list[dict[str, Any]] | None = None) -> None:
    """Write the page, and the figures beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results, reproduced), encoding="utf-8")
    for study in STUDIES:
        if study.id in results:
            study.draw(results[study.id]["rows"], path.parent / "figures" / f"{study.id}.png")
