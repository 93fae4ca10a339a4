"""`sordino papers`: list, run and show the papers' tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sordino_papers.cells import Cell
    from sordino_papers.checks import Outcome
    from sordino_papers.runner import Ask
    from sordino_papers.studies import Study

app = typer.Typer(no_args_is_help=True, help="The papers' tables, ours beside theirs.", rich_markup_mode=None)
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Results = Annotated[Path, typer.Option(help="Where results are kept.")]
Workers = Annotated[int, typer.Option(help="Processes, one thread each.")]
Result = dict[str, Any]
KEPT = Path("benchmarks/papers/results")


@app.command("list")
def list_ids(as_json: JsonFlag = False) -> None:
    """Every id that can be run: tables, and their cells."""
    from sordino_papers.tables import STUDIES, TABLES

    tables = [
        {
            "id": table.id,
            "title": table.title,
            "full": table.full,
            "hours": table.hours,
            "cells": [{"id": cell.id, "title": cell.title, "published": cell.published} for cell in table.cells],
        }
        for table in TABLES
    ]
    studies = [{"id": study.id, "title": study.title} for study in STUDIES]
    lines = [line for table in tables if not table["full"] for line in (_line(table), *_cell_lines(table))]
    lines += [f"{study['id']:<20}     study  {study['title']}" for study in studies]
    for table in tables:
        if table["full"]:
            lines += [*_cell_lines(table), f"{_line(table)} (--full; about {table['hours']}, an estimate)"]
    print(json.dumps({"tables": tables, "studies": studies}) if as_json else "\n".join(lines))


def _line(table: dict[str, Any]) -> str:
    return f"{table['id']:<20} {len(table['cells']):>3} cells  {table['title']}"


def _cell_lines(table: dict[str, Any]) -> list[str]:
    """The ids of a table's cells, each of which `sordino papers run` takes."""
    return [f"    {cell['id']:<36} {cell['title']}" for cell in table["cells"]]


def _check_kept(results: Path) -> None:
    """Kept results are in the project's checkout: elsewhere there is nothing to compare with or to render."""
    if not results.is_dir():
        from sordino.errors import ConfigError

        found = f"no folder {results}, in which the checkout of this project keeps its results"
        raise ConfigError(found, "the checkout's root as working folder", "cd to it, or give the folder: --results")


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="ID", help="A table, a cell, a study, or 'all'.")],
    seeds: Annotated[int | None, typer.Option(help="Runs per cell; default: the cell's own.")] = None,
    workers: Workers = 2,
    results: Results = KEPT,
    again: Annotated[bool, typer.Option("--again", help="Run seeds anew that are kept already.")] = False,
    device: Annotated[str, typer.Option(help="Where clients train, 'cuda' for one.")] = "cpu",
    full: Annotated[
        bool, typer.Option("--full", help="Allow a table of the papers' own size: hours on a GPU.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compute one cheap figure again, compare, keep nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a table, a cell or a study, print ours beside theirs, and keep the results.

    Seeds that are kept already are not run again, and a result of fewer seeds replaces none of more.
    """
    from sordino_papers import checks, kept, runner

    _counts(("--seeds", seeds), ("--workers", workers))
    tables, studies = runner.wanted(name, full)
    if quick:
        _check_kept(results)
        _answer(name, checks.quick(tables, studies, kept.stored(results), workers), as_json)
        return
    _cpu_only(studies, device)
    asked = runner.Ask(seeds, workers, results, again, device)
    found = [result for table in tables for result in _run_cells(table.cells, asked, as_json)]
    found += [_run_study(one, asked, as_json) for one in studies]
    if as_json:
        print(json.dumps({"id": name, "results": found, "notes": asked.notes}))


def _counts(*options: tuple[str, int | None]) -> None:
    from sordino.errors import ConfigError

    for option, count in options:
        if count is not None and count < 1:
            raise ConfigError(f"{option} {count}", "at least 1")


def _cpu_only(studies: tuple[Study, ...], device: str) -> None:
    """A device is refused before any work if torch cannot use it, or if nobody would."""
    from sordino.engines.base import device_of
    from sordino.errors import ConfigError

    device_of(device)
    if studies and device != "cpu":
        raise ConfigError(f"--device {device} for {studies[0].id}", "the CPU: studies run there", "leave it out")


def _answer(name: str, outcomes: Iterable[Outcome], as_json: bool) -> list[Outcome]:
    """Print every outcome as it comes; exit code 1 if a figure differs."""
    found = []
    for one in outcomes:
        found.append(one)
        if not as_json:
            print(one, flush=True)
    differs = [one.id for one in found if one.answer in ("differs", "failed")]
    if as_json:
        rows = [{"id": one.id, "answer": one.answer, "kept": one.kept, "found": one.found} for one in found]
        print(json.dumps({"id": name, "outcomes": rows, "differs": differs}))
    else:
        print(_told(found, differs))
    if differs:
        raise typer.Exit(1)
    return found


def _told(found: list[Outcome], differs: list[str]) -> str:
    """How many agree of those that could be compared, and which do not."""
    compared = len([one for one in found if one.answer != "nothing kept"])
    more = {"differs": differs, "nothing kept": [one.id for one in found if one.answer == "nothing kept"]}
    said = [f"{name}: {', '.join(ids)}" for name, ids in more.items() if ids]
    return "; ".join([f"{compared - len(differs)} of {compared} agree", *said])


@app.command()
def check(
    names: Annotated[list[str], typer.Argument(metavar="ID...", help="Tables or cells.")],
    seeds: Annotated[int, typer.Option(help="How many of the kept seeds.")] = 1,
    workers: Workers = 2,
    results: Results = KEPT,
    as_json: JsonFlag = False,
) -> None:
    """Compute kept cells again and compare to the digits kept; the outcome is kept beside the results."""
    from sordino_papers import checks, kept, runner

    _counts(("--seeds", seeds), ("--workers", workers))
    _check_kept(results)
    cells = [cell for name in names for cell in runner.chosen(name)]
    found = list(checks.check(cells, kept.stored(results), seeds, workers))
    checks.remember(found, results)
    _answer(" ".join(names), found, as_json)


@app.command()
def landscape(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path | None, typer.Option(help="The picture; default: landscape.png in the folder.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw the loss around the trained model of a run, along two random directions (paper 003, Figure 3)."""
    from sordino.audit.summary import trained_run
    from sordino_papers import landscape as surfaces

    folder, task = trained_run(run)
    file = out or folder.path / "landscape.png"
    found = surfaces.landscape(task.model, task)
    surfaces.draw(found, file, f"loss around {folder.path.name}")
    said = {"file": str(file), "mean_rise": found.sharpness}
    print(json.dumps(said) if as_json else f"written: {file}, mean rise {found.sharpness:.4g}")


def _run_cells(cells: tuple[Cell, ...], asked: Ask, as_json: bool) -> list[Result]:
    """Run, show and keep cell by cell; what there is to say goes to standard error unless it is in the JSON."""
    from sordino_papers import kept, runner

    assert asked.folder is not None
    found = []
    for result in runner.run_cells(cells, asked):
        told = kept.keep(result, asked.folder)
        asked.notes += [told] if told else []
        found.append(result)
        if not as_json:
            _show(result)
            _tell(asked.notes)
    return found


def _run_study(one: Study, asked: Ask, as_json: bool) -> Result:
    from sordino_papers import kept, page, runner

    assert asked.folder is not None
    found = runner.run_study(one, asked.seeds, asked.workers)
    told = kept.keep(found, asked.folder)
    asked.notes += [told] if told else []
    if not as_json:
        _show_study(found, page.study_claims(one, found))
        _tell(asked.notes)
    return found


def _tell(notes: list[str]) -> None:
    while notes:
        print(notes.pop(0), file=sys.stderr, flush=True)


def _show(result: Result) -> None:
    from sordino.accounting.rounding import upto

    published = "" if result["published"] is None else f" (published {result['published']:.2f})"
    spread = "" if result["spread"] is None else f" +- {result['spread']:.2f}"
    claimed = "" if result["epsilon_claimed"] is None else f", claimed {result['epsilon_claimed']:g}"
    epsilon = "none" if result["epsilon"] is None else upto(result["epsilon"])
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
    from sordino_papers import checks, kept
    from sordino_papers import page as pages

    _check_kept(results)
    pages.write(kept.stored(results), out, checks.recalled(results))
    print(json.dumps({"written": str(out)}) if as_json else f"written: {out}")
