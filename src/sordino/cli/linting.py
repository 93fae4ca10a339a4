"""Command `sordino lint`: compares the epsilon that another library's settings claim with the one that is proved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sordino import codec
from sordino.cli.console import Changes, JsonFlag, app, output
from sordino.errors import ConfigError


@app.command()
def lint(
    file: Annotated[Path | None, typer.Argument(help="A Python, TOML or JSON file; it is parsed, never run.")] = None,
    library: Annotated[
        str | None, typer.Option(help="opacus | flower | pfl | jax_privacy | fl4health | nvflare | plain")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    sampled: Annotated[int | None, typer.Option(help="Clients in a round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise std / clip norm.")] = None,
    delta: Annotated[float | None, typer.Option(help="The delta at which epsilon is stated.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The epsilon that the settings state.")] = None,
    records: Annotated[int | None, typer.Option(help="Number of records of a DP-SGD loop or of a client.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Records in a batch.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the records.")] = None,
    values: Changes = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Print the guarantee that another library's settings claim, the proved one, the adversary, and how to fix them."""
    from sordino.lint import check, read_file, stated, text

    given: dict[str, Any] = {
        "clients": clients, "sampled": sampled, "rounds": rounds, "noise_multiplier": noise_multiplier, "delta": delta,
        "epsilon": epsilon, "records": records, "batch_size": batch_size, "epochs": epochs,
    }  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    given |= dict(map(codec.parse_setting, values or []))
    if file is None and library is None:
        raise ConfigError("neither a file nor --library", "settings to check", "add --library flower, or a file")
    asked = stated(library or "plain", given)
    found = [one.filled(asked.values) for one in read_file(file)] if file is not None else [asked]
    found = [one for one in found if library in (None, one.library)]
    if not found:
        needed = "a call or a key that lint knows (docs/lint.md)"
        raise ConfigError(f"{file} without a privacy setting that lint can read", needed, "give --library and numbers")
    results = [check(one) for one in found]
    output(as_json, {"results": results}, "\n".join(map(text, results)))
