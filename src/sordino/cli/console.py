"""Common code of all commands: the typer application, shared options, output as text or JSON, and progress bars."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

Progress = Callable[[float, float, str], None]  # work done, work in all, what was last done


@contextmanager
def working(name: str, quiet: bool) -> Iterator[Progress]:
    """Yield a function that displays the share of work done and the estimated time left."""
    largest = 0.0

    def share(done: float, total: float) -> float:  # never falls, also if more work is found on the way
        nonlocal largest
        largest = max(largest, min(done / max(total, 1e-9), 1.0))
        return largest

    if quiet:
        yield lambda done, total, note: None
    elif sys.stdout.isatty():
        from rich import progress

        columns = (
            progress.TextColumn(name), progress.BarColumn(), progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(), progress.TextColumn("{task.description}"),
        )  # fmt: skip
        with progress.Progress(*columns, speed_estimate_period=600) as bar:
            job = bar.add_task("", total=1.0)
            yield lambda done, total, note: bar.update(job, completed=share(done, total), description=note)
    else:
        began = time.monotonic()

        def show(done: float, total: float, note: str) -> None:
            percent, rest = 100 * share(done, total), time_left(time.monotonic() - began, done, total)
            with tolerate_closed_pipe(sys.stdout):
                print(f"{name} {percent:.0f}%: {note}{rest}", flush=True)

        yield show


def time_left(spent: float, done: float, total: float) -> str:
    """Return the estimated time left as text; empty before the first result and at the end."""
    if done <= 0 or done >= total:
        return ""
    seconds = spent / done * (total - done)
    return f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"


app = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
ConfigFile = Annotated[Path, typer.Argument(help="A TOML file: [task], [recipe] or [plan], [privacy], [run].")]
Certified = Annotated[Path, typer.Argument(help="The folder of a run, or the certificate file of a DP-SGD loop.")]
RunPaths = Annotated[list[Path], typer.Argument(help="Folders of runs, or certificate files of DP-SGD loops.")]
Own = Annotated[list[Path] | None, typer.Option("--with", help="A Python file of parts of your own; may be repeated.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value for a key of the file, as in recipe.lr=0.5; may be repeated."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Another [run] seed.")]


def changed(values: list[str] | None, seed: int | None) -> list[str]:
    """Return the values of option --set, with --seed as one more value."""
    return [*(values or []), *([] if seed is None else [f"run.seed={seed}"])]


def load_own_parts(own: list[Path] | None) -> None:
    """Load the parts that users wrote: those of installed packages, and those in the files of --with."""
    from sordino import codec

    codec.load_plugins()
    for file in own or []:
        codec.load_parts_file(file)


@contextmanager
def tolerate_closed_pipe(stream: TextIO) -> Iterator[None]:
    """Drop further output without an error if the reader of the stream has ended, as with `| head`."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def output(as_json: bool, data: dict[str, Any], text: str) -> None:
    with tolerate_closed_pipe(sys.stdout):
        print(json.dumps(json_safe(data), allow_nan=False) if as_json else text)


def json_safe(value: Any) -> Any:
    """Return a copy of JSON data in which infinity and NaN, which JSON does not have, are strings."""
    if isinstance(value, dict):
        return {name: json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
