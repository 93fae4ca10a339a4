"""`sordino tune`: the search of `sordino.tuning` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.cli.app import Changes, ConfigFile, JsonFlag, Own, Seed, app, bring, changed, say
from sordino.errors import ConfigError

LAW = "negative_binomial"


@app.command()
def tune(
    file: ConfigFile,
    epsilon: Annotated[list[float] | None, typer.Option(help="A budget; several give a curve each.")] = None,
    data: Annotated[str, typer.Option(help="public | synthetic: what the search may look at.")] = "public",
    trials: Annotated[int, typer.Option(help="Simulations per candidate.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the tuned file (of the first epsilon), or run, here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG.")] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Try on the private data; release the best alone.")
    ] = False,
    over: Annotated[
        list[str] | None, typer.Option(help="--private: what to try, as in 'recipe.lr=[0.1, 0.3]'; may be repeated.")
    ] = None,
    tries: Annotated[float, typer.Option(help="--private: how many tries on average.")] = 10.0,
    law: Annotated[str, typer.Option(help="--private: negative_binomial | poisson, the law of their number.")] = LAW,
    shape: Annotated[float, typer.Option(help="--private: eta of the negative binomial; 1 is geometric.")] = 1.0,
    metric: Annotated[str, typer.Option(help="--private: the figure that chooses.")] = "",
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Local steps, rounds, batch and step size for a budget, without touching private data; or privately, billed."""
    bring(own)
    import torch

    from sordino.cli import tuned as command

    torch.set_num_threads(1)
    changes = changed(values, seed)
    if private:
        number = command.tries_of(tries, law, shape)
        asked = command.private_tuning(file, changes, over or [], number, epsilon or [], metric)
        return command.run_private(asked, out, as_json)
    if over:
        raise ConfigError("--over without --private", "both", "sordino sweep tries settings on public data")
    known: dict[str, Any] = {"source": data, "trials": trials, "changes": changes, "quiet": as_json}
    found = command.tune_config(file, epsilons=epsilon or [], out=out, plot=plot, **known)
    say(as_json, found, command.text(found))
    return None
