"""`sordino report`: runs as one page of HTML that opens offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.app import JsonFlag, Own, RunPaths, app, bring, say


@app.command()
def report(
    targets: RunPaths,
    out: Annotated[Path | None, typer.Option(help="The page; a file that is there is replaced.")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """One self-contained HTML page of runs, or of a sweep: the guarantee, curves, certificate in words, audits."""
    bring(own)
    from sordino.report.data import collected
    from sordino.report.page import write
    from sordino.runs.shown import subjects
    from sordino.tuning.shown import with_cells

    runs, notes = with_cells(targets)
    found = collected(subjects(runs), notes)
    file = out if out is not None or as_json else Path("report.html")
    if file is not None:
        write(file, found)
    say(as_json, found, f"written: {file}")
