"""`sordino recipes`: list, and a file to start from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer

from sordino import codec
from sordino.cli.app import JsonFlag, Own, app, bring, say
from sordino.errors import ConfigError

recipes_app = typer.Typer(no_args_is_help=True, help="Algorithms that are ready to use.", rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def recipes_list(own: Own = None, as_json: JsonFlag = False) -> None:
    """Names and one line each."""
    bring(own)
    found = recipes()
    say(as_json, {"recipes": found}, "\n".join(f"{entry['name']:<14} {entry['summary']}" for entry in found))


@recipes_app.command("show")
def recipes_show(name: str, own: Own = None, as_json: JsonFlag = False) -> None:
    """Arguments of one recipe, and a file to start from."""
    bring(own)
    found = recipe(name)
    say(as_json, found, found["example"])


def recipes() -> list[dict[str, str]]:
    """Every recipe and its paper."""
    from sordino.recipes import RECIPES

    return [{"name": name, "summary": _summary(function)} for name, function in RECIPES.items()]


def _summary(function: Callable[..., Any]) -> str:
    module = inspect.getmodule(function)
    return (inspect.getdoc(module) or "").splitlines()[0]


def _type(annotation: Any) -> str:
    """`float | Schedule`, without the modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+", "", text)


def recipe(name: str) -> dict[str, Any]:
    """One recipe: its arguments and an example file."""
    from sordino.recipes import RECIPES, starters

    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r}", "a known recipe", codec.nearest(name, list(RECIPES)))
    parameters = inspect.signature(RECIPES[name]).parameters.values()
    arguments = {p.name: {"type": _type(p.annotation), "required": p.default is p.empty} for p in parameters}
    return {
        "name": name,
        "equation": inspect.getdoc(RECIPES[name]),
        "arguments": arguments,
        "example": starters.example(name),
    }
