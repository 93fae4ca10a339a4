"""`sordino audit`: lower bounds by attack beside the certified upper bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.app import Changes, JsonFlag, Own, Seed, app, bring, changed, finite, say


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

    from sordino.audit import report
    from sordino.runs.shown import keep_audit

    torch.set_num_threads(1)  # two that fight over a core are slower than one
    changes = changed(values, seed)
    report.check_changes(target, changes)
    layer = "mechanism" if mechanism else "canaries" if canaries else "landscape" if landscape else "membership"
    if layer in ("mechanism", "canaries"):
        found = (report.mechanism if mechanism else report.canaries)(target, changes)
    else:
        found = report.surface(target, out) if landscape else report.membership(target)
    say(as_json, found, report.text(found))
    if target.is_dir() and layer != "landscape":
        keep_audit(target, layer, finite(found))
    if not found["passed"]:
        raise typer.Exit(1)
