"""Progress bars of a run: in a terminal and in a notebook. Used by `train` and `sordino run`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from sordino.outcome import DIAGNOSTIC
from sordino.runs.rounds import OnRound


def ignore(line: dict[str, Any]) -> None:
    """No progress is shown."""


@contextmanager
def bar_where_seen(rounds: int, asked: bool = True) -> Iterator[OnRound]:
    """A bar in a notebook or on a terminal's standard error, nothing in a pipe or if not asked for."""
    if asked and _in_notebook():
        yield _notebook_bar(rounds)
    elif asked and sys.stderr.isatty():
        with terminal_bar(rounds, stderr=True) as on_round:
            yield on_round
    else:
        yield ignore


@contextmanager
def terminal_bar(rounds: int, stderr: bool = False) -> Iterator[OnRound]:
    """A bar of rich, with the metrics of the last evaluation; on standard error it vanishes at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    words, text = TextColumn("rounds"), TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text)
    with Progress(*columns, console=Console(stderr=stderr), transient=stderr) as bar:
        job = bar.add_task("", total=rounds)
        yield lambda line: bar.update(job, completed=line["round"], description=summary(line))


def summary(line: dict[str, Any]) -> str:
    """The usual metrics of one line of history, and what should alarm."""
    return " ".join(f"{name} {line[name]:.3f}" for name in ("accuracy", "rmse", "loss") if name in line) + alarm(line)


def alarm(line: dict[str, Any]) -> str:
    """Updates that were no numbers, and a model that predicts one class only."""
    bad = int(line.get(DIAGNOSTIC, {}).get("nonfinite_updates", 0))
    only = f"  predicts class {line['only_class']} only" if "only_class" in line else ""
    return only + (f"  {bad} update(s) with NaN or infinity counted as zero" if bad else "")


def _in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this; IPython is looked for only where somebody has imported it."""
    shell = sys.modules.get("IPython")
    found = None if shell is None else shell.get_ipython()
    return found is not None and hasattr(found, "kernel")


def _notebook_bar(rounds: int) -> OnRound:
    """One output of the cell that is written anew after every round."""
    from IPython.display import HTML, display

    html: Any = HTML
    show: Any = display

    def bar(done: int, said: str) -> Any:
        return html(f'<progress value="{done}" max="{rounds}"></progress> {done}/{rounds} rounds {escape(said)}')

    shown = show(bar(0, ""), display_id=True)
    return lambda line: shown.update(bar(line["round"], summary(line)))
