"""`sordino tune`: the search of `sordino.tuning` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.cli.app import Changes, ConfigFile, JsonFlag, Own, Seed, app, bring, changed, say


@app.command()
def tune(
    file: ConfigFile,
    epsilon: Annotated[list[float] | None, typer.Option(help="A budget; several give a curve each.")] = None,
    data: Annotated[str, typer.Option(help="public | synthetic: what the search may look at.")] = "public",
    trials: Annotated[int, typer.Option(help="Simulations per candidate.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the tuned file (of the first epsilon) here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG.")] = None,
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Local steps, rounds, batch and step size for a budget, found without touching private data."""
    bring(own)
    import torch

    from sordino.cli import tuned as command

    torch.set_num_threads(1)
    changes = changed(values, seed)
    known: dict[str, Any] = {"source": data, "trials": trials, "changes": changes, "quiet": as_json}
    found = command.tune_config(file, epsilons=epsilon or [], out=out, plot=plot, **known)
    say(as_json, found, command.text(found))
