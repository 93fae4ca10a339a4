"""Commands `sordino tune` and `sordino sweep`; the output of `tune` is in tune_output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.cli.console import Changes, ConfigFile, JsonFlag, Own, Seed, app, bring, changed, say, working
from sordino.errors import ConfigError

LAW = "negative_binomial"


@app.command()
def tune(
    file: ConfigFile,
    epsilon: Annotated[list[float] | None, typer.Option(help="A budget; several give a curve each.")] = None,
    data: Annotated[str, typer.Option(help="public | synthetic: the data that the search reads.")] = "public",
    seeds: Annotated[int, typer.Option(help="Simulations per candidate, each with its own seed.")] = 3,
    out: Annotated[Path | None, typer.Option(help="A new folder: the trials and tuned.toml, or the best run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search in --out.")] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Run trials on the private data; release the best alone.")
    ] = False,
    over: Annotated[
        list[str] | None, typer.Option(help="--private: what to try, as in 'recipe.lr=[0.1, 0.3]'; may be repeated.")
    ] = None,
    trials: Annotated[float, typer.Option(help="--private: how many trials on average.")] = 10.0,
    law: Annotated[str, typer.Option(help="--private: negative_binomial | poisson, the law of their number.")] = LAW,
    shape: Annotated[float, typer.Option(help="--private: eta of the negative binomial; 1 is geometric.")] = 1.0,
    metric: Annotated[str, typer.Option(help="--private: the metric that chooses.")] = "",
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Local steps, rounds, batch and step size for a budget, on public data; or on private data, the cost certified."""
    bring(own)
    import torch

    from sordino.cli import tune_output

    torch.set_num_threads(1)
    changes = changed(values, seed)
    if private:
        number = tune_output.read_trials(trials, law, shape)
        asked = tune_output.private_tuning(file, changes, over or [], number, epsilon or [], metric)
        return tune_output.run_private(asked, out, as_json)
    if over:
        raise ConfigError("--over without --private", "both", "sordino sweep compares settings on public data")
    known: dict[str, Any] = {"source": data, "seeds": seeds, "changes": changes, "quiet": as_json}
    found = tune_output.tune_config(file, epsilons=epsilon or [], out=out, resume=resume, **known)
    say(as_json, found, tune_output.text(found))
    return None


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file with [sweep]: grid, random, recipe, epsilon.")],
    out: Annotated[Path | None, typer.Option(help="A new folder for all runs.")] = None,
    workers: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in --out.")] = False,
    forecast: Annotated[bool, typer.Option("--plan", help="Say what would run, and what it would cost.")] = False,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Runs over a grid, random settings or whole recipes, at one epsilon if asked; one table with its privacy cost."""
    bring(own)
    from sordino.tuning import sweep as sweeping
    from sordino.tuning.search_space import Sweep

    asked = Sweep.read(file)
    if forecast:
        planned, text = sweeping.forecast(asked)
        return say(as_json, planned, text)
    if out is None:
        raise ConfigError("a sweep without --out", "a new folder for its runs", "add --out sweeps/a")
    with working("sweep", quiet=as_json) as progress:
        found = sweeping.sweep(asked, out, workers=workers, resume=resume, own=own or [], progress=progress)
    say(as_json, found, (out / "table.txt").read_text("utf-8").rstrip("\n"))
    return None
