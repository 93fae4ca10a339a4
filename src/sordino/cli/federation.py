"""`sordino federation new` and `sordino silo serve`: a plan across machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.app import JsonFlag, Own, app, bring, say

federation = typer.Typer(no_args_is_help=True, help="A plan across machines, over Flower.")
silo = typer.Typer(no_args_is_help=True, help="One silo of a federation.")
app.add_typer(federation, name="federation")
app.add_typer(silo, name="silo")


@federation.command()
def new(
    folder: Annotated[Path, typer.Argument(help="A new folder: the Flower app, and a folder for every silo.")],
    file: Annotated[Path, typer.Option("--from", help="A TOML file with a [federation] that names the silos.")],
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a Flower app for the server, and for every silo a policy, a key script and service units."""
    bring(own)
    from sordino.flower.new import new_federation

    names = new_federation(folder, file)
    steps = f"{folder}: flwr run {folder}; {folder}/silos/{{{', '.join(names)}}}: one for each silo (docs/deploy.md)"
    say(as_json, {"folder": str(folder), "silos": names}, steps)


@silo.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="The silo's folder: silo.toml, fed.toml, policy.toml, ledger.db.")],
    node: Annotated[str | None, typer.Option(help="Where the node's Runtime API is; silo.toml says it too.")] = None,
    secret: Annotated[Path | None, typer.Option(help="The node's --superexec-auth-secret-file.")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer the jobs of this silo's node, within its policy and its budget, until stopped."""
    bring(own)
    from sordino.flower.counter import serve_silo

    serve_silo(folder, node, secret, as_json)
