"""Private hyperparameter selection (`sordino tune --private`): the best of a random number of private runs is released.

    charge the whole search to the ledger; draw the number of trials K, which stays secret;
    K times: draw a candidate, run it privately, score it on public rows;      release the best run

All trials have the same privacy cost. The cost of the search is that of Papernot, Steinke 2022 (accounting.renyi),
against an adversary who sees the folder of the best trial. Other trials are removed at once, their metrics are printed
nowhere, and K is in no file. Trials that remain after a kill are removed unread by the next search into the same
folder; if somebody reads them, no certificate covers that release.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sordino.accounting import calibration
from sordino.accounting.calibration import noisier
from sordino.accounting.composition import Line, Selection, cost_of_best
from sordino.accounting.renyi import Trials
from sordino.accounting.rounding import upto
from sordino.certificate.build import headline
from sordino.certificate.facts import run_cost
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import ConfigError, DivergedError
from sordino.report.text_table import better, choose_metric, value_text
from sordino.runs import admission
from sordino.runs.execution import Executed, execute
from sordino.task import Task
from sordino.tuning.calibrated_file import multipliers
from sordino.tuning.search_space import Changes, Interval, Space, Sweep, draw_changes
from sordino.tuning.sweep import evaluate

FREE = ("recipe.", "plan.", "task.model", "task.loss")  # keys in which trials may differ; never data, clients, budget


@dataclass(frozen=True)
class PrivateTuning:
    """Private hyperparameter search: its file, search space, distribution of the number of trials, target epsilon."""

    sweep: Sweep
    space: Space
    trials: Trials
    epsilon: float | None = None

    @cached_property
    def id(self) -> str:
        """Random id under which the search is charged to a ledger."""
        return secrets.token_hex(16)

    @cached_property
    def metric(self) -> str:
        """Name of the metric that chooses the best trial, on public rows."""
        task = self.sweep.config({}).build()
        return choose_metric(self.sweep.spec.metric, list(task.evaluate(task.layout.flatten(task.model))))

    @cached_property
    def selection(self) -> Selection:
        """Statement of how the released run was selected, for its certificate."""
        by = f"{self.metric} on {_public_rows(self.sweep.config({}).build())}"
        return Selection(id=self.id, trials=self.trials, over=tuple(self.space), by=by)

    @cached_property
    def noise_multiplier(self) -> float | None:
        """Noise multiplier of every trial for which the whole search costs `epsilon`; None without such a target."""
        config = self.sweep.config({})
        if self.epsilon is None:
            return None
        if config.deltas or multipliers(config.plan):
            needed = "the same noise and delta in all silos"
            fix = "drop --epsilon: every silo keeps its noise, and the certificate states the cost of all trials"
            raise ConfigError("--epsilon with silos that differ in noise or delta", needed, fix)
        reads = config.plan.local.reads
        weakest = 0 if reads is None else int(np.argmin(reads.sizes))

        def line_of(z: float) -> Line:
            return cost_of_best(noisier(config.plan, z).cost(), self.selection).line("models", weakest)

        return calibration.noise_multiplier(line_of, self.epsilon, config.delta)

    def config(self, changes: Changes) -> Config:
        """Return the configuration of one trial, whose certificate states the cost of the whole search."""
        found = self.sweep.config(changes)
        plan = found.plan if self.noise_multiplier is None else noisier(found.plan, self.noise_multiplier)
        return replace(found, plan=plan, privacy=replace(found.privacy, selected=self.selection))

    def check(self) -> None:
        """Refuse a search over data, a plan without a guarantee, or values that change the cost of a trial."""
        wrong = next((key for key in self.space if not key.startswith(FREE)), None)
        if wrong is not None:
            needed = f"only keys that begin with {', '.join(FREE)}"
            raise ConfigError(f"{wrong} in the search space", needed, f"remove {wrong} from it")
        config = self.config({})
        cost = run_cost(config.plan, admission.planned_facts(config))
        if headline(cost.of("models"), config.delta, config.deltas)["epsilon"] is None:
            found = "private tuning of a plan without a guarantee"
            raise ConfigError(found, "a plan with noise", "give --epsilon, or a noise multiplier in the file")
        for key, values in self.space.items():
            if isinstance(values, Interval):
                ends = (values.low, values.high)
                values = tuple(map(round, ends)) if values.integer else ends
            for value in values:
                self.check_alike(config, {key: value})

    def check_alike(self, config: Config, changes: Changes) -> None:
        """Refuse a candidate whose privacy cost differs from that of `config`."""
        own = self.config(changes)
        costs = [run_cost(one.plan, admission.planned_facts(one)) for one in (own, config)]
        if costs[0] != costs[1] or (own.delta, own.deltas) != (config.delta, config.deltas):
            keys = ", ".join(f"{key} = {value}" for key, value in changes.items())
            needed = "trials of equal cost, which may differ in step sizes, clip norms and models only"
            fix = f"set {' and '.join(changes)} to one value in the file"
            raise ConfigError(f"{keys}, which changes the privacy cost of a trial", needed, fix)

    def draw(self) -> list[tuple[Changes, Config]]:
        """Draw the number of trials, each trial's candidate and, in simulation, its seed; all of these stay secret."""
        config = self.config({})
        rng = config.streams.at(0, "tries")
        found = []
        for _ in range(self.trials.draw(rng)):
            changes = draw_changes(self.space, rng)
            self.check_alike(config, changes)
            own, seed = self.config(changes), int(rng.integers(2**62))
            own = replace(own, run=replace(own.run, draw_seed=seed if own.privacy.noise == "simulation" else None))
            found.append((changes, own))
        return found


def tune_private(tuning: PrivateTuning, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the trials, move the folder of the best one to `out`, remove all others, and return what is released.

    Released are the best run, its metric on the rows by which it was selected, and its metric on other public rows.
    """
    if out.exists():
        raise ConfigError(f"{out}, which exists", "a new folder", "choose another --out")
    tuning.check()
    admission.admit_whole(tuning.config({}), tuning.id)
    number = f"trials: a random number, {tuning.trials.mean:g} on average"
    say(f"{number}; how many, how long they take and their results stay secret")
    metric = tuning.metric
    sign = 1.0 if better(metric) == "smaller" else -1.0
    best: tuple[Changes, Executed] | None = None
    least = math.inf
    with _private_folder(out) as folder:
        for changes, config in tuning.draw():
            try:
                done = execute(config, folder / "trial", tried=True)
            except DivergedError:
                shutil.rmtree(folder / "trial")
                continue
            score = sign * float(done.history[-1][metric])
            if score < least:
                shutil.rmtree(folder / "best", ignore_errors=True)
                durable_files.move(folder / "trial", folder / "best")
                best, least = (changes, done), score
            else:
                shutil.rmtree(folder / "trial")
        if best is None:
            raise DivergedError(
                "every trial of this search diverged; nothing is released, and the cost of the search stays charged; "
                "search smaller step sizes"
            )
        durable_files.move(folder / "best", out)
    changes, done = best
    task = tuning.sweep.config(changes, validation=False).build()
    reported = {metric: evaluate(task, out)[metric], "rows": _public_rows(task)}
    chosen = {metric: done.history[-1][metric], "by": tuning.selection.by}
    found = {"out": str(out), "metric": metric, "best": changes, "chosen": chosen, "reported": reported}
    return {**found, "certificate": done.certificate}


def _public_rows(task: Task) -> str:
    return " and ".join(f"{one.rows} {one.what}" for one in task.declared_public if "rows" in one.what)


@contextmanager
def _private_folder(out: Path) -> Iterator[Path]:
    folder = out.with_name(f".{out.name}.trials")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found = f"{out}, into which another search writes"
            raise ConfigError(found, "a folder for this search alone", "choose another --out, or wait") from None
        for left in folder.iterdir():  # trials of a killed search are never read
            shutil.rmtree(left)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def text(found: dict[str, Any]) -> str:
    metric, made, reported = found["metric"], found["certificate"], found["reported"]
    best = ", ".join(f"{key} = {value_text(value)}" for key, value in found["best"].items())
    return (
        f"best: {best}\n"
        f"{metric} {found['chosen'][metric]:.4f} by {found['chosen']['by']}, which selected this run\n"
        f"{metric} {reported[metric]:.4f} on {reported['rows']}, which were not used to select\n"
        f"the whole search: epsilon {upto(made['epsilon'], 4)}, delta {upto(made['delta'])}, unit {made['unit']}, "
        f"relation {made['relation']}; nothing but this run is left of it\n"
        f"files: {found['out']}/{{plan.toml, certificate.json, history.jsonl, model.safetensors}}"
    )
