"""`sordino papers`: list, run and show the papers' tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sordino_papers.cells import Cell
    from sordino_papers.runner import Ask
    from sordino_papers.studies import Study

app = typer.Typer(no_args_is_help=True, help="The papers' tables, ours beside theirs.", rich_markup_mode=None)
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Results = Annotated[Path, typer.Option(help="Where results are kept.")]
Result = dict[str, Any]
Found = tuple[list[Result], list[str]]  # results, and what there is to say of them
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
    again: Annotated[bool, typer.Option("--again", help="Run seeds anew that are kept already.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a table, a cell or a study, print ours beside theirs, and keep the results.

    Seeds that are kept already are not run again, and a result of fewer seeds replaces none of more.
    """
    from sordino.errors import ConfigError
    from sordino_papers import runner

    for option, count in (("--seeds", seeds), ("--workers", workers)):
        if count is not None and count < 1:
            raise ConfigError(f"{option} {count}", "at least 1")
    one = runner.study(name)
    if one is not None:
        found, notes = _run_study(one, seeds, workers, results, as_json)
    else:
        ask = runner.Ask(seeds, workers, results, again)
        found, notes = _run_cells(runner.chosen(name), ask, as_json), ask.notes
    if as_json:
        print(json.dumps({"id": name, "results": found, "notes": notes}))


def _run_cells(cells: tuple[Cell, ...], ask: Ask, as_json: bool) -> list[Result]:
    """Run, show and keep cell by cell; what there is to say goes to standard error unless it is in the JSON."""
    from sordino_papers import kept, runner

    assert ask.folder is not None
    found = []
    for result in runner.run_cells(cells, ask):
        told = kept.keep(result, ask.folder)
        ask.notes += [told] if told else []
        found.append(result)
        if not as_json:
            _show(result)
            _tell(ask.notes)
    return found


def _run_study(one: Study, repeats: int | None, workers: int, folder: Path, as_json: bool) -> Found:
    from sordino_papers import kept, page, runner

    found = runner.run_study(one, repeats, workers)
    notes = [told for told in (kept.keep(found, folder),) if told]
    if not as_json:
        _show_study(found, page.study_claims(one, found))
        _tell(notes)
    return [found], notes


def _tell(notes: list[str]) -> None:
    while notes:
        print(notes.pop(0), file=sys.stderr, flush=True)


def _show(result: Result) -> None:
    published = "" if result["published"] is None else f" (published {result['published']:.2f})"
    spread = "" if result["spread"] is None else f" +- {result['spread']:.2f}"
    claimed = "" if result["epsilon_claimed"] is None else f", claimed {result['epsilon_claimed']:g}"
    epsilon = "none" if result["epsilon"] is None else f"{result['epsilon']:.3g}"
    print(f"{result['id']}: {result['ours']:.2f}{spread}{published}; epsilon {epsilon}{claimed}", flush=True)


def _show_study(found: Result, claims: list[dict[str, Any]]) -> None:
    for row in found["rows"]:
        print("  ".join(f"{key}={_short(value)}" for key, value in row.items()))
    for claim in claims:
        print(f"{claim['verdict']}: {claim['text']}: {claim['measured']}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command()
def page(
    results: Results = KEPT,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/papers.md"),
    as_json: JsonFlag = False,
) -> None:
    """Render the kept results as a page."""
    from sordino_papers import kept
    from sordino_papers import page as pages

    pages.write(kept.stored(results), out)
    print(json.dumps({"written": str(out)}) if as_json else f"written: {out}")
