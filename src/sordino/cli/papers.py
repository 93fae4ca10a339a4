"""`sordino papers`: the papers' experiments, a package of their own (benchmarks/papers)."""

from __future__ import annotations

import typer

from sordino.cli.app import app
from sordino.errors import ConfigError


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
