"""docs/papers.md: every stored result beside what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sordino_papers.cells import Table
from sordino_papers.claims import claims
from sordino_papers.studies import Study
from sordino_papers.tables import STUDIES, TABLES

HEAD = """# The papers' tables, ours beside theirs

Made by `sordino papers run ID` and `sordino papers page`; the raw results are in `benchmarks/papers/results`.
Accuracy in percent: mean and standard deviation over seeds, of the LAST round on the WHOLE test set.
"epsilon" is what our certificate says of the run; "claimed" is what the paper says of the same noise.
"""


def page(results: dict[str, dict[str, Any]]) -> str:
    """The whole page; a table without results is left out."""
    parts = [table_text(table, results) for table in TABLES if any(cell.id in results for cell in table.cells)]
    parts += [study_text(study, results[study.id]) for study in STUDIES if study.id in results]
    return "\n\n".join([HEAD.strip(), claims_text(results), *parts]) + "\n"


def study_text(study: Study, found: dict[str, Any]) -> str:
    """A study: its figure, and its rows as tables of one shape each."""
    head = f"## {study.title}\n\n`sordino papers run {study.id}` ({found['seconds']:.0f} s). {study.about}"
    shapes: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        shapes.setdefault(tuple(key for key in row if key != "values"), []).append(row)
    tables = [_plain_table(keys, rows) for keys, rows in shapes.items()]
    return "\n\n".join([head, f"![{study.title}](figures/{study.id}.png)", *tables])


def _plain_table(keys: tuple[str, ...], rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    return "\n".join([*lines, *("| " + " | ".join(_entry(row[key]) for key in keys) + " |" for row in rows)])


def _entry(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def claims_text(results: dict[str, dict[str, Any]]) -> str:
    """Every claim that the stored results can judge; a claim that failed here is a result too."""
    judged = [(claim.text, claim.measured, claim.holds) for claim in claims(results)]
    for study in STUDIES:
        said = results.get(study.id, {}).get("claims", [])
        judged += [(claim["text"], claim["measured"], claim["holds"]) for claim in said]
    rows = [f"| {text} | {measured} | {'yes' if holds else '**no**'} |" for text, measured, holds in judged]
    return "\n".join(["## Claims, checked", "", "| claim | measured | holds here |", "|---|---|---|", *rows])


def table_text(table: Table, results: dict[str, dict[str, Any]]) -> str:
    """One table, with its findings where somebody wrote them down beside the results."""
    rows = [_row(results[cell.id]) for cell in table.cells if cell.id in results]
    columns = (
        "setting",
        "published",
        "ours",
        "spread",
        "paper's protocol",
        "claimed epsilon",
        "epsilon",
        "update norm (median)",
    )
    head = "| " + " | ".join((*columns, "seeds", "s")) + " |"
    lines = [
        f"## {table.title}",
        "",
        f"`sordino papers run {table.id}`. {table.about}",
        "",
        head,
        "|---|" + "---|" * 9,
        *rows,
    ]
    return "\n".join(lines)


def _row(result: dict[str, Any]) -> str:
    cells = [
        result["title"],
        _number(result["published"], 2),
        f"**{result['ours']:.2f}**",
        _number(result["spread"], 2),
        _number(result["paper_protocol"], 2),
        _number(result["epsilon_claimed"], 2),
        _number(result["epsilon"], 2),
        _number(result["update_norm"], 3),
        str(result["seeds"]),
        f"{result['seconds']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def write(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the page, with the findings that stand beside the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results), encoding="utf-8")
    for study in STUDIES:
        if study.id in results:
            study.draw(results[study.id]["rows"], path.parent / "figures" / f"{study.id}.png")
