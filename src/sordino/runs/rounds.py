"""Rounds of a run, recorded in a folder or in memory, and progress bars. Called by `execute` and `train`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from sordino import codec
from sordino.accounting.accountant import check_provable
from sordino.codec import named_failures
from sordino.config import Config
from sordino.engines.base import CPU, Engine
from sordino.engines.checks import prepare_columns, released_histograms
from sordino.errors import BudgetError, CertificateError, ConfigError
from sordino.ledger.budget import Filter
from sordino.loop import Round, Tally, check, run
from sordino.outcome import DIAGNOSTIC, history_line
from sordino.plan import State
from sordino.rng import Mode
from sordino.runs.charge_log import RESTORE
from sordino.task import Task

if TYPE_CHECKING:
    from sordino.runs.writer import RunWriter

OnRound = Callable[[dict[str, Any]], None]


@codec.hides_values
@dataclass
class InMemoryRun(Tally):
    """Charges and history of a run of `train` that has no folder."""

    run: str = field(default_factory=lambda: secrets.token_hex(16))  # id, also if the run is saved to a folder later
    history: list[dict[str, Any]] = field(default_factory=list)
    engine: list[tuple[int, dict[str, str | int]]] = field(default_factory=list)

    @property
    def charged(self) -> int:
        return len(self.rounds) + self.prepared

    def announce(self, rounds: int, header: dict[str, str | int]) -> None:
        self.engine.append((rounds, header))

    def record(self, line: dict[str, Any], noise: Mode) -> None:
        self.history.append(line)

    def save(self, state: State) -> None:
        """Do nothing, since `run_rounds` returns the last state."""

    def refuse(self, config: Config, error: BudgetError) -> None:
        """Ignore the refusal: a local run notifies nobody, and `run_rounds` returns the error to its caller."""


@codec.hides_values
@dataclass(frozen=True)
class RunStart:
    """State of a new or resumed run before its next round."""

    writer: RunWriter | InMemoryRun
    state: State | None = None  # None: no round has run
    history: tuple[dict[str, Any], ...] = ()
    budget: Filter | None = None  # with the charges of earlier rounds
    refused: BudgetError | None = None  # a budget has ended the run
    notes: tuple[str, ...] = ()  # for the user


def check_run(config: Config, task: Task, engine: Engine) -> None:
    """Refuse an invalid plan, task, budget, metric or stopping rule before anything is charged or written.

    A plan whose epsilon the accountant cannot compute is refused too.
    """
    check(config.plan, task, engine)
    if config.privacy.silos or config.privacy.client_epsilon is not None:
        config.check_budget()
    check_provable(config.plan, config.delta, config.deltas)
    stop = config.run.stop
    figures = task.evaluate(task.layout.flatten(task.model)) if task.metrics or stop is not None else {}
    if stop is not None:
        stop.check(figures)


def run_rounds(
    config: Config, task: Task, start: RunStart, engine: Engine, show: OnRound | None = None
) -> tuple[State, BudgetError | None]:
    """Run the remaining rounds; return the last state, and the budget error if a budget ended the run early."""
    plan, asked, refused = config.plan, config.run, start.refused
    state = State.initial(plan, task.layout.flatten(task.model))
    if start.state is not None:
        found = start.state
        for who, saved, new in (("server", found.memory, state.memory), ("release", found.noise, state.noise)):
            shapes = [{name: (one.shape, one.dtype) for name, one in memory.items()} for memory in (saved, new)]
            if shapes[0] != shapes[1]:
                what = f"the checkpoint has tensors of other shapes than this plan's {who}"
                raise CertificateError("checkpoint", what + RESTORE)
        state = found
    if plan.prepare and not released_histograms(state):  # charged and saved before round 1, for a resumed run to read
        if config.privacy.limited and start.writer.charged:
            lost = "histograms that were charged and then lost by a kill, and a budget that covers them only once"
            fix = "start a new run in another --out; charged rounds stay charged"
            raise ConfigError(lost, "a checkpoint with the released histograms", fix)
        state = prepare_columns(plan, task, config.streams, start.writer.charge, state)[1]
        start.writer.save(state)
    seen, stop = list(start.history), asked.stop
    over = refused is not None or (stop is not None and stop.ends(seen) is not None)
    remaining = run(
        plan, task, engine=engine, streams=config.streams, charges=start.writer, state=state, budget=start.budget,
        eval_every=asked.eval_every, train_metrics=bool(asked.train_metrics),
        announce=partial(start.writer.announce, state.t), checked=True,
    )  # fmt: skip
    try:
        with named_failures(), closing(remaining) as rounds:
            for done in () if over else rounds:
                state = done.state
                seen.append(keep_round(start.writer, done, show, config.privacy.noise))
                if stop is not None and stop.ends(seen) is not None:
                    break
    except BudgetError as error:
        refused = error
        start.writer.refuse(config, error)
    return state.on(CPU), refused


def keep_round(writer: RunWriter | InMemoryRun, done: Round, show: OnRound | None, noise: Mode) -> dict[str, Any]:
    """Write a round's history line, then its checkpoint, and return the line.

    `--resume` drops a history line that has no checkpoint.
    """
    line = history_line(done)
    writer.record(line, noise)
    writer.save(done.state)
    if show is not None:
        show(line)
    return line


def single_class_note(history: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return a note for the user if the last evaluated model predicts one class only, else nothing."""
    last: dict[str, Any] = next((line for line in reversed(history) if "loss" in line), {})
    if "only_class" not in last:
        return ()
    return (f"the model predicts class {last['only_class']} only: read balanced_accuracy, not accuracy",)


# ---- progress
@contextmanager
def bar_where_seen(rounds: int, asked: bool = True) -> Iterator[OnRound]:
    """Show a progress bar in a notebook or on a terminal's standard error, if `asked`; show none in a pipe."""
    shell = sys.modules.get("IPython")  # set only if it was imported
    if asked and shell is not None and hasattr(shell.get_ipython(), "kernel"):
        from IPython.display import HTML, display

        html: Any = HTML
        show: Any = display

        def bar(done: int, text: str) -> Any:
            return html(f'<progress value="{done}" max="{rounds}"></progress> {done}/{rounds} rounds {escape(text)}')

        output = show(bar(0, ""), display_id=True)
        yield lambda line: output.update(bar(line["round"], summary(line)))
    elif asked and sys.stderr.isatty():
        with terminal_bar(rounds, stderr=True) as on_round:
            yield on_round
    else:
        yield lambda line: None


@contextmanager
def terminal_bar(rounds: int, stderr: bool = False) -> Iterator[OnRound]:
    """Show a progress bar with the last evaluated metrics; on standard error the bar is removed at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    words, text = TextColumn("rounds"), TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text)
    with Progress(*columns, console=Console(stderr=stderr), transient=stderr) as bar:
        job = bar.add_task("", total=rounds)
        yield lambda line: bar.update(job, completed=line["round"], description=summary(line))


def summary(line: dict[str, Any]) -> str:
    """Format accuracy, rmse and loss of one history line, with its warnings."""
    figures = (f"{name} {line[name]:.3f}" for name in ("accuracy", "rmse", "loss") if name in line)
    return " ".join(figures) + warnings(line)


def warnings(line: dict[str, Any]) -> str:
    """Return the warnings of one history line: updates with NaN, or a model that predicts one class only."""
    bad = int(line.get(DIAGNOSTIC, {}).get("nonfinite_updates", 0))
    only = f"  predicts class {line['only_class']} only" if "only_class" in line else ""
    return only + (f"  {bad} update(s) with NaN or infinity counted as zero" if bad else "")
