"""Rounds of a run, recorded in a folder or in memory, and their progress bars. Called by `execute` and by `train`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any, Protocol

from sordino import codec
from sordino.certificate.build import check_provable
from sordino.codec import named_failures
from sordino.config import Config
from sordino.engines.base import Engine
from sordino.engines.prepare import begin, known
from sordino.errors import BudgetError, CertificateError, ConfigError
from sordino.ledger.budget import Filter
from sordino.loop import Round, Tally, check, run
from sordino.outcome import DIAGNOSTIC, history_line
from sordino.parts.samplers import Cohort
from sordino.plan import State
from sordino.rng import Mode
from sordino.task import Task

OnRound = Callable[[dict[str, Any]], None]


class RunRecorder(Protocol):
    """Where a run is recorded; a round is charged there before its noise is drawn."""

    @property
    def charged(self) -> int: ...  # how often
    def charge(self, t: int, cohort: Cohort | None) -> None: ...
    def announce(self, rounds: int, header: dict[str, str | int]) -> None: ...
    def record(self, line: dict[str, Any], noise: Mode) -> None: ...
    def save(self, state: State) -> None: ...
    def refuse(self, config: Config, error: BudgetError) -> None: ...


@codec.hides_values
@dataclass
class InMemoryRun(Tally):
    """A run that is kept in memory: what a folder would hold of it."""

    run: str = field(default_factory=lambda: secrets.token_hex(16))  # its id, also where it is written down later
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
        """Nothing to do: the state is handed over at the end."""

    def refuse(self, config: Config, error: BudgetError) -> None:
        """Nothing to do: the error is raised."""


@codec.hides_values
@dataclass(frozen=True)
class RunStart:
    """Where a run stands before its next round."""

    writer: RunRecorder
    state: State | None = None  # None: no round is done
    history: tuple[dict[str, Any], ...] = ()
    budget: Filter | None = None  # after what earlier rounds were charged
    refused: BudgetError | None = None  # a budget has ended the run
    notes: tuple[str, ...] = ()  # what its owner should know


def check_run(config: Config, task: Task, engine: Engine) -> None:
    """Every mistake is found here, before anything is charged, written or computed; also in a metric or stopping rule.

    A plan whose epsilon accounting cannot prove is refused here too.
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
    """Run what is left of the plan, or as far as a budget or the rule to stop lets it; the last state."""
    plan, asked, refused = config.plan, config.run, start.refused
    state = State.initial(plan, task.layout.flatten(task.model))
    if start.state is not None:
        _check_memory(start.state, state)
        state = start.state
    if plan.prepare and not known(state):
        state = _prepare(config, task, start.writer, state)
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
    return state, refused


def _check_memory(found: State, first: State) -> None:
    """The checkpoint's state must be one that this plan's server and release can have written."""
    for who, kept, wanted in (("server", found.memory, first.memory), ("release", found.noise, first.noise)):
        shapes = [{name: (held.shape, held.dtype) for name, held in memory.items()} for memory in (kept, wanted)]
        if shapes[0] != shapes[1]:
            raise CertificateError("checkpoint", f"the checkpoint does not hold what this plan's {who} remembers")


def _prepare(config: Config, task: Task, writer: RunRecorder, state: State) -> State:
    """Preparations are charged, released and saved before the first round: a run that is continued reads them."""
    if config.privacy.limited and writer.charged:
        found = "preparations that a kill has lost after they were charged, and a budget that paid for them once"
        raise ConfigError(found, "all of them", "start anew in another --out: what was charged stays spent")
    state = begin(config.plan, task, config.streams, writer.charge, state)[1]
    writer.save(state)
    return state


def keep_round(writer: RunRecorder, done: Round, show: OnRound | None, noise: Mode) -> dict[str, Any]:
    """History, then the checkpoint: a kill between them costs a line that `resume` drops."""
    line = history_line(done)
    writer.record(line, noise)
    writer.save(done.state)
    if show is not None:
        show(line)
    return line


def single_class_note(history: list[dict[str, Any]]) -> tuple[str, ...]:
    """What accuracy does not say: that the model tells nobody apart."""
    last = next((line for line in reversed(history) if "loss" in line), None)
    if last is None or "only_class" not in last:
        return ()
    return (f"the model predicts class {last['only_class']} only: read balanced_accuracy, not accuracy",)


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
