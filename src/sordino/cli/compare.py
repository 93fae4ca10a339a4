"""`sordino compare`: runs beside each other as one table."""

from __future__ import annotations

from typing import Annotated

import typer

from sordino.cli.app import JsonFlag, Own, RunPaths, app, bring, say


@app.command()
def compare(
    targets: RunPaths,
    latex: Annotated[bool, typer.Option("--latex", help="The table for LaTeX (booktabs).")] = False,
    bibtex: Annotated[bool, typer.Option("--bibtex", help="How to cite what ran, for BibTeX.")] = False,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Runs beside each other: metrics, epsilons, and the settings that differ; as text, LaTeX, BibTeX or JSON."""
    bring(own)
    from sordino.report import compare as comparing
    from sordino.report import tables
    from sordino.runs.shown import subjects
    from sordino.tuning.shown import with_cells

    runs, notes = with_cells(targets)
    found = {**comparing.compared(subjects(runs)), "notes": notes}
    made = comparing.table(found)
    cited = tables.bibtex([run["sordino"] for run in found["runs"]])
    forms = [made.latex()] * latex + [cited] * bibtex
    say(as_json, found, "\n\n".join(forms or ["\n".join([made.text(), *notes])]))
