"""`sordino board`: accuracy at equal epsilon; list, choose, run, show, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Accuracy at equal epsilon, with certificates.", rich_markup_mode=None)
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Results = Annotated[Path, typer.Option(help="Where results are kept.")]
RowId = Annotated[str, typer.Argument(metavar="ROW", help="A row, or 'all': rows that are not kept yet.")]
KEPT = Path("benchmarks/board")


@app.command("list")
def list_rows(results: Results = KEPT, as_json: JsonFlag = False) -> None:
    """Every row with its unit, epsilon and stand-in, and whether it is kept."""
    from sordino_papers.board_rows import ROWS
    from sordino_papers.board_rows import results as kept

    known = kept(results)
    rows = [
        {"id": row.id, "title": row.title, "unit": row.problem.unit, "epsilon": row.epsilon, "stand_in": row.stand_in,
         "kept": row.id in known}
        for row in ROWS
    ]  # fmt: skip
    lines = [f"{row['id']:<26} {row['unit']:<7} {'kept' if row['kept'] else '-':<5} {row['title']}" for row in rows]
    print(json.dumps({"rows": rows}) if as_json else "\n".join(lines))


@app.command()
def choose(
    stand_in: Annotated[str, typer.Argument(help="A stand-in of `sordino board list --json`.")],
    results: Results = KEPT,
    as_json: JsonFlag = False,
) -> None:
    """Try the settings of a grid on a stand-in and keep all tries; rows read the best of them."""
    from sordino.errors import ConfigError
    from sordino_papers.board_choosing import STAND_INS
    from sordino_papers.board_choosing import choose as tries

    if stand_in not in STAND_INS:
        raise ConfigError(f"a stand-in {stand_in!r}", f"one of {', '.join(STAND_INS)}")
    lines = []
    for line in tries(stand_in, results):
        lines.append(line)
        if not as_json:
            print(line, flush=True)
    if as_json:
        print(json.dumps({"stand_in": stand_in, "tries": lines}))


@app.command()
def run(
    row: RowId,
    check: Annotated[
        bool, typer.Option("--check", help="Compute the first seed of a kept row again; exit 1 if it differs.")
    ] = False,
    results: Results = KEPT,
    as_json: JsonFlag = False,
) -> None:
    """Run a row once: five seeds with secure noise, one with repeatable noise, and keep the result.

    'all' runs what is not kept yet, and tries settings on stand-ins where that was not done.
    """
    from sordino_papers import board_choosing, board_rows

    if check:
        known, again = board_rows.check(board_rows.found_row(row), results)
        said = {"id": row, "kept": known, "found": again, "agrees": known == again}
        print(json.dumps(said) if as_json else f"{row}: kept {known}, found {again}")
        if known != again:
            raise typer.Exit(1)
        return
    done = board_rows.results(results)
    names = [one.id for one in board_rows.ROWS if one.id not in done] if row == "all" else [row]
    found = []
    for name in names:
        stand_in = board_rows.found_row(name).stand_in
        for tried in board_choosing.choose(stand_in, results) if row == "all" else ():
            _tell(tried)
        found.append(board_rows.measure(board_rows.found_row(name), results))
        if not as_json:
            print(line(found[-1]), flush=True)
    if as_json:
        print(json.dumps({"results": found}))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def line(result: dict[str, object]) -> str:
    """One line of a result."""
    return (
        f"{result['id']}: {result['mean']:.2f} +- {result['half_width']:.2f} at epsilon {result['epsilon']:.4g}, "
        f"without privacy {result['without_privacy']:.2f}, {result['cpu_seconds']} CPU s"
    )


@app.command()
def show(results: Results = KEPT, as_json: JsonFlag = False) -> None:
    """Print the kept rows."""
    from sordino_papers.board_rows import results as kept

    known = kept(results)
    print(json.dumps({"results": list(known.values())}) if as_json else "\n".join(line(one) for one in known.values()))


@app.command()
def best(results: Results = KEPT, as_json: JsonFlag = False) -> None:
    """Compare the rule of recipes.best with its defaults on three tasks that are nowhere on the board."""
    from sordino_papers import board_best

    found = board_best.compare(results)
    print(json.dumps(found) if as_json else "\n".join("  ".join(row) for row in board_best.rows(found)))


@app.command()
def reissue(results: Results = KEPT, as_json: JsonFlag = False) -> None:
    """Write kept certificates anew from their plans and charges, after a change of the certificate's format."""
    from sordino_papers import board_rows

    known = board_rows.results(results)
    changed = [name for name in known if board_rows.reissue(board_rows.BY_ID[name], results)]
    print(json.dumps({"changed": changed}) if as_json else f"{len(changed)} of {len(known)} changed")


@app.command()
def export(
    row: RowId,
    to: Annotated[Path, typer.Option(help="A new folder; features of private rows are private.")],
    results: Results = KEPT,
    as_json: JsonFlag = False,
) -> None:
    """Write a kept row's features and settings for the same head by another library (benchmarks/board/peers.py)."""
    from sordino_papers import board_rows

    board_rows.export(board_rows.found_row(row), to, results)
    print(json.dumps({"written": str(to)}) if as_json else f"written: {to}")


@app.command()
def page(
    results: Results = KEPT,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/board.md"),
    as_json: JsonFlag = False,
) -> None:
    """Render the kept rows as a page with a figure."""
    from sordino_papers import board_page

    board_page.write(results, out)
    print(json.dumps({"written": str(out)}) if as_json else f"written: {out}")
