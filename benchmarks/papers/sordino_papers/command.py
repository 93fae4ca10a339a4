"""`sordino papers`: list, run and show the papers' tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="The papers' tables, ours beside theirs.", rich_markup_mode=None)
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Results = Annotated[Path, typer.Option(help="Where results are kept.")]
KEPT = Path("benchmarks/papers/results")


@app.command("list")
def list_ids(as_json: JsonFlag = False) -> None:
    """Every id that can be run: tables, and their cells."""
    from sordino_papers.tables import STUDIES, TABLES

    tables = [
        {
            "id": table.id,
            "title": table.title,
            "cells": [{"id": cell.id, "title": cell.title, "published": cell.published} for cell in table.cells],
        }
        for table in TABLES
    ]
    studies = [{"id": study.id, "title": study.title} for study in STUDIES]
    lines = [f"{table['id']:<20} {len(table['cells']):>3} cells  {table['title']}" for table in tables]
    lines += [f"{study['id']:<20}     study  {study['title']}" for study in studies]
    print(json.dumps({"tables": tables, "studies": studies}) if as_json else "\n".join(lines))


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="ID")],
    seeds: Annotated[int | None, typer.Option(help="Runs per cell; default: the cell's own.")] = None,
    workers: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    results: Results = KEPT,
    as_json: JsonFlag = False,
) -> None:
    """Run a table or a cell, print ours beside theirs, and keep the results."""
    from sordino.errors import ConfigError
    from sordino_papers import runner

    for option, count in (("--seeds", seeds), ("--workers", workers)):
        if count is not None and count < 1:
            raise ConfigError(f"{option} {count}", "at least 1")
    one = runner.study(name)
    if one is not None:
        found = [runner.run_study(one, seeds, workers)]
        if not as_json:
            _show_study(found[0])
    else:
        found = runner.run_cells(name, seeds, workers, (lambda result: None) if as_json else _show)
    runner.store(found, results)
    if as_json:
        print(json.dumps({"id": name, "results": found}))


def _show(result: dict[str, Any]) -> None:
    published = "" if result["published"] is None else f" (published {result['published']:.2f})"
    spread = "" if result["spread"] is None else f" +- {result['spread']:.2f}"
    claimed = "" if result["epsilon_claimed"] is None else f", claimed {result['epsilon_claimed']:g}"
    epsilon = "none" if result["epsilon"] is None else f"{result['epsilon']:.3g}"
    print(f"{result['id']}: {result['ours']:.2f}{spread}{published}; epsilon {epsilon}{claimed}", flush=True)


def _show_study(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        print("  ".join(f"{key}={_short(value)}" for key, value in row.items()))
    for claim in found["claims"]:
        print(f"{'holds' if claim['holds'] else 'DOES NOT HOLD'}: {claim['text']}: {claim['measured']}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command()
def page(
    results: Results = KEPT,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/papers.md"),
    as_json: JsonFlag = False,
) -> None:
    """Render the kept results as a page."""
    from sordino_papers import page as pages
    from sordino_papers import runner

    pages.write(runner.stored(results), out)
    print(json.dumps({"written": str(out)}) if as_json else f"written: {out}")
