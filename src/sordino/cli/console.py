"""What every command shares: the application, common options, output as text or JSON, and progress of long work."""

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
    """Show how much of a long work is done, in any unit, and the time that the rest takes at the same pace."""
    if quiet:
        yield lambda done, total, note: None
    elif sys.stdout.isatty():
        from rich import progress

        columns = (
            progress.TextColumn(name), progress.BarColumn(), progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(), progress.TextColumn("{task.description}"),
        )  # fmt: skip
        with progress.Progress(*columns, speed_estimate_period=600) as bar:
            job, share = bar.add_task("", total=1.0), forward()
            yield lambda done, total, note: bar.update(job, completed=share(done, total), description=note)
    else:
        began, share = time.monotonic(), forward()

        def show(done: float, total: float, note: str) -> None:
            percent, rest = 100 * share(done, total), left(time.monotonic() - began, done, total)
            with listened(sys.stdout):
                print(f"{name} {percent:.0f}%: {note}{rest}", flush=True)

        yield show


def forward() -> Callable[[float, float], float]:
    """Return a function of the share that is done, which never falls where more work is found on the way."""
    most = 0.0

    def share(done: float, total: float) -> float:
        nonlocal most
        most = max(most, min(done / max(total, 1e-9), 1.0))
        return most

    return share


def left(spent: float, done: float, total: float) -> str:
    """Return the time that is left, in words; empty at the end, or where nothing is known yet."""
    if done <= 0 or done >= total:
        return ""
    seconds = spent / done * (total - done)
    return f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"


app = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
ConfigFile = Annotated[Path, typer.Argument(help="A TOML file: [task], [recipe] or [plan], [privacy], [run].")]
Certified = Annotated[
    Path, typer.Argument(help="The folder of a run, or the file of a loop (optimizer.save_certificate).")
]
RunPaths = Annotated[
    list[Path], typer.Argument(help="Folders of runs, or files of loops (optimizer.save_certificate).")
]
Own = Annotated[list[Path] | None, typer.Option("--with", help="A Python file of parts of your own; may be repeated.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value for a key of the file, as in recipe.lr=0.5; may be repeated."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Another [run] seed.")]


def changed(values: list[str] | None, seed: int | None) -> list[str]:
    """Return the changes of --set and --seed to a file."""
    return [*(values or []), *([] if seed is None else [f"run.seed={seed}"])]


def bring(own: list[Path] | None) -> None:
    """Load the user's own parts: installed packages, and files that the command names."""
    from sordino import codec

    codec.load_plugins()
    for file in own or []:
        codec.load_parts_file(file)


@contextmanager
def listened(stream: TextIO) -> Iterator[None]:
    """Write to a stream whose reader may end (`| head`): from then on the output is dropped, and the work goes on."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(as_json: bool, data: dict[str, Any], text: str) -> None:
    with listened(sys.stdout):
        print(json.dumps(finite(data), allow_nan=False) if as_json else text)


def finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by strings."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
