"""Private hyperparameter selection (`sordino tune --private`): the best of a random number of private runs is released.

    charge the whole to the ledger; draw K (secret); K times: draw a candidate, run it, score it on public rows;
    keep the best, remove the rest; the cost is `Tuned` of the one cost that all trials have

Guarantee: Papernot, Steinke 2022 (accounting.trials), for one who sees the folder of the best. A trial that has lost is
removed at once, its numbers are printed nowhere, and K is in no file. Trials that a kill leaves are removed unread by
the next search into the same folder: whoever reads them has a release that no certificate covers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sordino.accounting import calibration
from sordino.accounting.calibration import noisier
from sordino.accounting.composition import Cost, Line, Selection, cost_of_best
from sordino.accounting.rounding import upto
from sordino.accounting.trials import Trials
from sordino.certificate.build import headline
from sordino.certificate.facts import run_cost
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import ConfigError, DivergedError
from sordino.report.aggregate import better, choose_metric, value_text
from sordino.runs import admission
from sordino.runs.execution import Executed, execute
from sordino.tuning.calibrated_file import multipliers
from sordino.tuning.search_space import Axis, Changes, Sweep
from sordino.tuning.sweep import evaluate

Say = Callable[[str], None]
Trial = tuple[Changes, Config]
FREE = ("recipe.", "plan.", "task.model", "task.loss")  # what trials may differ in; never data, clients or budget


@dataclass(frozen=True)
class PrivateTuning:
    """A private search: the file, the search space, the law of the number of trials, and the target epsilon."""

    sweep: Sweep
    space: tuple[Axis, ...]
    trials: Trials
    epsilon: float | None = None

    @cached_property
    def id(self) -> str:
        """Its name in a ledger."""
        return secrets.token_hex(16)

    @cached_property
    def metric(self) -> str:
        """The metric that chooses, on the public rows that choose."""
        task = self.sweep.config({}).build()
        return choose_metric(self.sweep.spec.metric, list(task.evaluate(task.layout.flatten(task.model))))

    @cached_property
    def selection(self) -> Selection:
        """How the released run was selected: on its certificate."""
        config = self.sweep.config({})
        rows = [one for one in config.build().declared_public if "rows" in one.what]
        by = f"{self.metric} on " + " and ".join(f"{one.rows} {one.what}" for one in rows)
        return Selection(id=self.id, trials=self.trials, over=tuple(axis.key for axis in self.space), by=by)

    @cached_property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier of every trial, such that the best of all costs `epsilon`; None: the file's own."""
        config = self.sweep.config({})
        if self.epsilon is None:
            return None
        if config.deltas or multipliers(config.plan):
            fix = "drop --epsilon: every silo keeps its noise, and the certificate says what all trials cost"
            raise ConfigError("--epsilon, and silos with noise or deltas of their own", "one noise for all", fix)
        reads = config.plan.local.reads
        weakest = 0 if reads is None else int(np.argmin(reads.sizes))

        def line_of(z: float) -> Line:
            return cost_of_best(noisier(config.plan, z).cost(), self.selection).line("models", weakest)

        return calibration.noise_multiplier(line_of, self.epsilon, config.delta)

    def config(self, changes: Changes) -> Config:
        """The file of a trial: charged as the best of all trials."""
        found = self.sweep.config(changes)
        plan = found.plan if self.noise_multiplier is None else noisier(found.plan, self.noise_multiplier)
        return replace(found, plan=plan, privacy=replace(found.privacy, selected=self.selection))

    def check(self) -> None:
        """Refuse, before anything is drawn: no guarantee, other data, or a value that changes the cost of a trial."""
        wrong = next((axis.key for axis in self.space if not axis.key.startswith(FREE)), None)
        if wrong is not None:
            fix = "other data are another unit"
            raise ConfigError(f"{wrong} in the search space", f"keys of {', '.join(FREE)}", fix)
        config = self.config({})
        line = headline(_cost(config).of("models"), config.delta, config.deltas)
        if line["epsilon"] is None:
            raise ConfigError("private tuning of a plan without a guarantee", "noise", "give --epsilon")
        for axis in self.space:
            ends = () if axis.interval is None else (axis.interval.low, axis.interval.high)
            integer = axis.interval is not None and axis.interval.integer
            for value in (*axis.values, *(round(end) if integer else end for end in ends)):
                self.check_alike(config, {axis.key: value})

    def check_alike(self, config: Config, changes: Changes) -> None:
        """Refuse a candidate that has another cost."""
        own = self.config(changes)
        if _cost(own) != _cost(config) or (own.delta, own.deltas) != (config.delta, config.deltas):
            keys = ", ".join(f"{key} = {value}" for key, value in changes.items())
            needed = "trials that all cost the same: steps, clip norms, models, but not rounds, rates or noise"
            fix = "leave it to the file, or to --epsilon"
            raise ConfigError(f"{keys}, with which a trial has another cost", needed, fix)

    def draw(self) -> list[Trial]:
        """The trials: how many, which candidates, and in simulation the seed of each; all secret until one is best."""
        config = self.config({})
        rng = config.streams.at(0, "tries")
        found = []
        for _ in range(self.trials.draw(rng)):
            changes = {axis.key: axis.draw(rng) for axis in self.space}
            self.check_alike(config, changes)
            own, seed = self.config(changes), int(rng.integers(2**62))
            own = replace(own, run=replace(own.run, coins=seed if own.privacy.noise == "simulation" else None))
            found.append((changes, own))
        return found


def _cost(config: Config) -> Cost:
    return run_cost(config.plan, admission.planned_facts(config))


def tune_private(tuning: PrivateTuning, out: Path, say: Say) -> dict[str, Any]:
    """Run the trials; the folder of the best is `out`, and nothing else is left."""
    if out.exists():
        raise ConfigError(f"{out}, which exists", "a new folder", "choose another --out")
    tuning.check()
    config = tuning.config({})
    admission.admit_whole(config, tuning.id)
    number = f"trials: a random number, {tuning.trials.mean:g} on average"
    say(f"{number}; how many, how long they take and their results stay secret")
    with _private_folder(out) as folder:
        best = _best(tuning, tuning.draw(), folder)
        if best is None:
            raise DivergedError("no trial of this search left a model: nothing is released, and its cost is charged")
        durable_files.move(folder / "best", out)
    changes, done = best
    return _released(tuning, changes, replace(done, path=out))


def _best(tuning: PrivateTuning, trials: Sequence[Trial], folder: Path) -> tuple[Changes, Executed] | None:
    """The best of all trials, in folder/best; every other one is removed."""
    sign = 1.0 if better(tuning.metric) == "smaller" else -1.0
    kept, least = None, float("inf")
    for changes, config in trials:
        try:
            done = execute(config, folder / "trial", tried=True)
        except DivergedError:
            shutil.rmtree(folder / "trial")
            continue
        score = sign * float(done.history[-1][tuning.metric])
        if score < least:
            shutil.rmtree(folder / "best", ignore_errors=True)
            durable_files.move(folder / "trial", folder / "best")
            kept, least = (changes, done), score
        else:
            shutil.rmtree(folder / "trial")
    return kept


@contextmanager
def _private_folder(out: Path) -> Iterator[Path]:
    """A folder that only its owner reads, removed at the end; what a killed search left in it is removed unread."""
    folder = out.with_name(f".{out.name}.trials")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"a search into {out} that is running", "a folder of its own", "wait for it") from None
        for left in folder.iterdir():
            shutil.rmtree(left)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _released(tuning: PrivateTuning, changes: Changes, done: Executed) -> dict[str, Any]:
    """What is released: the best run, its score on rows that chose, and its metric on rows that did not."""
    config, metric = tuning.sweep.config(changes, validation=False), tuning.metric
    task = config.build()
    rows = " and ".join(f"{one.rows} {one.what}" for one in task.declared_public if "rows" in one.what)
    return {
        "out": str(done.path),
        "metric": metric,
        "best": changes,
        "chosen": {metric: done.history[-1][metric], "by": tuning.selection.by},
        "reported": {metric: evaluate(task, done.path)[metric], "rows": rows},
        "certificate": done.certificate,
    }


def text(found: dict[str, Any]) -> str:
    """The best run in a few lines."""
    metric, made = found["metric"], found["certificate"]
    best = ", ".join(f"{key} = {value_text(value)}" for key, value in found["best"].items())
    return "\n".join(
        [
            f"best: {best}",
            f"{metric} {found['chosen'][metric]:.4f} by {found['chosen']['by']}, which chose",
            f"{metric} {found['reported'][metric]:.4f} on {found['reported']['rows']}, which had no part in choosing",
            f"the whole search: epsilon {upto(made['epsilon'], 4)}, delta {upto(made['delta'])}, unit {made['unit']}, "
            f"relation {made['relation']}; nothing but this run is left of it",
            f"files: {found['out']}/{{plan.toml, certificate.json, history.jsonl, model.safetensors}}",
        ]
    )
