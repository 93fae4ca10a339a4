"""Commands that read finished runs: `sordino compare`, `report` and `audit`; and `sordino papers`, where installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.cli.console import Changes, JsonFlag, Own, RunPaths, Seed, app, bring, changed, finite, say
from sordino.errors import ConfigError


@app.command()
def compare(
    targets: RunPaths,
    latex: Annotated[bool, typer.Option("--latex", help="The table for LaTeX (booktabs).")] = False,
    bibtex: Annotated[bool, typer.Option("--bibtex", help="How to cite what ran, for BibTeX.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the metric against epsilon: .png, .svg or .pdf.")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Settings beside each other: metrics with intervals over seeds, paired differences, epsilons, what differs."""
    bring(own)
    from sordino.report import comparison
    from sordino.report.text_table import bibtex as cite
    from sordino.runs.loading import subjects
    from sordino.tuning.sweep import with_runs

    runs, notes = with_runs(targets)
    found = {**comparison.compare(subjects(runs)), "notes": notes}
    made = [comparison.comparison_table(found), comparison.differences_table(found)][: 2 if found["settings"] else 1]
    if plot is not None:
        _plot(found, plot)
    forms = [one.latex(f"tab:sordino-{place}") for place, one in enumerate(made)] * latex + [
        cite([run["sordino"] for run in found["runs"]])
    ] * bibtex
    say(as_json, found, "\n\n".join(forms or [*(one.text() for one in made), *notes]))


def _plot(found: dict[str, Any], file: Path) -> None:
    from sordino.report import charts
    from sordino.report.figures import chart_figure, save_figure

    chart = charts.utility(found)
    if chart is None:
        needed = "two settings or more that have an epsilon and the same metric"
        raise ConfigError(f"--plot of {len(found['comparison']['rows'])} settings", needed)
    try:
        save_figure(chart_figure(chart), file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file}, which cannot be written ({error})", "a .png, .svg or .pdf") from None


@app.command()
def report(
    targets: RunPaths,
    out: Annotated[Path | None, typer.Option(help="The page; a file that is there is replaced.")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """One self-contained HTML page of runs, or of a sweep: the guarantee, curves, certificate in words, audits."""
    bring(own)
    from sordino.report.data import report_data
    from sordino.report.page import write_page
    from sordino.runs.loading import subjects
    from sordino.tuning.sweep import with_runs

    runs, notes = with_runs(targets)
    found = report_data(subjects(runs), notes)
    file = out if out is not None or as_json else Path("report.html")
    if file is not None:
        write_page(file, found)
    say(as_json, found, f"written: {file}")


@app.command()
def audit(
    target: Annotated[Path, typer.Argument(help="The folder of a run, or (--mechanism, --canaries) a TOML file.")],
    mechanism: Annotated[bool, typer.Option("--mechanism", help="Attack a round; test noise and sampling.")] = False,
    canaries: Annotated[bool, typer.Option("--canaries", help="Train once with planted canaries.")] = False,
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
    layer: summary.Layer = "mechanism" if mechanism else "canaries" if canaries else "membership"
    found = summary.audit_target(target, layer, changed(values, seed))
    say(as_json, found, summary.text(found))
    if target.is_dir():
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
