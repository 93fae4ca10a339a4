"""What every command shares: the application, its flags, and how it speaks."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

app = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
ConfigFile = Annotated[Path, typer.Argument(help="A TOML file: [task], [recipe] or [plan], [privacy], [run].")]
Certified = Annotated[
    Path, typer.Argument(help="The folder of a run, or the file of a loop (optimizer.save_certificate).")
]
RunPaths = Annotated[
    list[Path], typer.Argument(help="Folders of runs, or files of loops (optimizer.save_certificate).")
]
RunPath = Annotated[Path, typer.Argument(help="The folder of a run.")]
Own = Annotated[list[Path] | None, typer.Option("--with", help="A Python file of parts of your own; may be repeated.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value for a key of the file, as in recipe.lr=0.5; may be repeated."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Another [run] seed.")]


def changed(values: list[str] | None, seed: int | None) -> list[str]:
    """What --set and --seed change in a file."""
    return [*(values or []), *([] if seed is None else [f"run.seed={seed}"])]


def bring(own: list[Path] | None) -> None:
    """Parts of the user's own: packages that are installed, and files that the command names."""
    from sordino.codec import plugins

    plugins.load()
    for file in own or []:
        plugins.load_file(file)


@contextmanager
def listened(stream: TextIO) -> Iterator[None]:
    """Whoever reads a stream may leave (`| head`): from then on it goes nowhere, and what was running runs on."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(as_json: bool, data: dict[str, Any], text: str) -> None:
    with listened(sys.stdout):
        print(json.dumps(finite(data), allow_nan=False) if as_json else text)


def heard(show: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """The same, for a reader who may leave."""

    def on_round(line: dict[str, Any]) -> None:
        with listened(sys.stdout):
            show(line)

    return on_round


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as words."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
