"""`sordino compare`: runs beside each other as one table.

`sordino report`: runs as one page of HTML that opens offline.

`sordino audit`: lower bounds by attack beside the certified upper bound.

`sordino papers`: the papers' experiments, a package of their own (benchmarks/papers)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.console import Changes, JsonFlag, Own, RunPaths, Seed, app, bring, changed, finite, say
from sordino.errors import ConfigError


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
    from sordino.report import comparison
    from sordino.report import comparison as comparing
    from sordino.runs.loading import subjects
    from sordino.tuning.sweep_summary import with_runs

    runs, notes = with_runs(targets)
    found = {**comparing.compared(subjects(runs)), "notes": notes}
    made = comparing.table(found)
    cited = comparison.bibtex([run["sordino"] for run in found["runs"]])
    forms = [made.latex()] * latex + [cited] * bibtex
    say(as_json, found, "\n\n".join(forms or ["\n".join([made.text(), *notes])]))


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
    from sordino.runs.loading import subjects
    from sordino.tuning.sweep_summary import with_runs

    runs, notes = with_runs(targets)
    found = collected(subjects(runs), notes)
    file = out if out is not None or as_json else Path("report.html")
    if file is not None:
        write(file, found)
    say(as_json, found, f"written: {file}")


@app.command()
def audit(
    target: Annotated[Path, typer.Argument(help="The folder of a run, or (--mechanism, --canaries) a TOML file.")],
    mechanism: Annotated[bool, typer.Option("--mechanism", help="Attack a round, test noise and coins.")] = False,
    canaries: Annotated[bool, typer.Option("--canaries", help="Train once with planted canaries.")] = False,
    landscape: Annotated[bool, typer.Option("--landscape", help="Draw the loss around the model.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the picture goes.")] = None,
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Lower bounds by attack beside the certified upper bound; exit 1 if one exceeds it; kept beside a run."""
    bring(own)
    import torch

    from sordino.audit import summary
    from sordino.runs.loading import keep_audit

    torch.set_num_threads(1)  # two that fight over a core are slower than one
    changes = changed(values, seed)
    summary.check_changes(target, changes)
    layer = "mechanism" if mechanism else "canaries" if canaries else "landscape" if landscape else "membership"
    if layer in ("mechanism", "canaries"):
        found = (summary.mechanism if mechanism else summary.canaries)(target, changes)
    else:
        found = summary.surface(target, out) if landscape else summary.membership(target)
    say(as_json, found, summary.text(found))
    if target.is_dir() and layer != "landscape":
        keep_audit(target, layer, finite(found))
    if not found["passed"]:
        raise typer.Exit(1)


def _papers() -> typer.Typer:
    """The papers' experiments are a package of their own (benchmarks/papers); without it the command says so."""
    try:
        from sordino_papers.command import app as papers
    except ModuleNotFoundError:
        papers = typer.Typer(help="The papers' tables, ours beside theirs.", invoke_without_command=True)
        papers.callback()(_no_papers)
    return papers


def _no_papers() -> None:
    fix = "pip install ./benchmarks/papers in a checkout of Sordino"
    raise ConfigError("no package sordino_papers", "the papers' experiments", fix)


app.add_typer(_papers(), name="papers")


app.add_typer(_papers(), name="papers")
