"""`sordino sweep`: a grid or a random search over any key, one table, and what looking at it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.app import JsonFlag, Own, app, bring, say


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file: base = ... and [sweep] with grid or random.")],
    out: Annotated[Path | None, typer.Option(help="A new folder for all runs.")] = None,
    workers: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in --out.")] = False,
    forecast: Annotated[bool, typer.Option("--plan", help="Say what would run, and what it would cost.")] = False,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Runs over a grid, or random settings; one table and picture. On private data a look at it is billed."""
    bring(own)
    from sordino.cli.progress import working
    from sordino.errors import ConfigError
    from sordino.tuning import sweep as sweeping
    from sordino.tuning.spec import Sweep

    asked = Sweep.read(file)
    if forecast:
        told, words = sweeping.forecast(asked)
        return say(as_json, told, words)
    if out is None:
        raise ConfigError("a sweep without --out", "a new folder for its runs", "add --out sweeps/a")
    with working("sweep", quiet=as_json) as on_cell:
        told = sweeping.sweep(asked, out, workers=workers, resume=resume, own=own or [], told=on_cell)
    say(as_json, told, (out / "table.txt").read_text("utf-8").rstrip("\n"))
    return None
