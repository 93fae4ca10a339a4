"""`sordino tune --private`: the best of a random number of private runs, of which nothing else is ever shown.

    charge the whole to the ledger; draw K (secret); K times: draw a candidate, run it, score it on public rows;
    keep the best, remove the rest; the bill is `Tuned` of the one bill that all tries have

Guarantee: Papernot, Steinke 2022 (`accounting.trials`), for one who sees the winner's folder. A try that has lost is removed at
once, its numbers are printed nowhere, and K is in no file. Tries that a kill leaves are removed unread by the next
tuning into the same folder: whoever reads them has a release that is on no bill.
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
from sordino.accounting.composition import Cost, Line
from sordino.accounting.rounding import upto
from sordino.accounting.selection import Selection, cost_of_best
from sordino.accounting.trials import Trials
from sordino.certificate.build import headline
from sordino.certificate.facts import run_cost
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import ConfigError, DivergedError
from sordino.outcome import declared_public
from sordino.runs import admission
from sordino.runs.execution import Executed, execute
from sordino.tuning.spec import Axis, Changes, Sweep, shown_value
from sordino.tuning.sweep import judged
from sordino.tuning.table import better, chosen_metric

Say = Callable[[str], None]
Try = tuple[Changes, Config]
FREE = ("recipe.", "plan.", "task.model", "task.loss")  # what a try may have of its own; never data, cut or budget


@dataclass(frozen=True)
class Tuning:
    """What is asked: a file with what may be tried, how often on average, and what all of it may cost."""

    asked: Sweep
    space: tuple[Axis, ...]
    tries: Trials
    epsilon: float | None = None

    @cached_property
    def id(self) -> str:
        """Its name in a ledger."""
        return secrets.token_hex(16)

    @cached_property
    def metric(self) -> str:
        """The figure that chooses, on the public rows that choose."""
        task = self.asked.config({}).build()
        return chosen_metric(self.asked.spec.metric, list(task.evaluate(task.layout.flatten(task.model))))

    @cached_property
    def selection(self) -> Selection:
        """How the winner comes to be shown: on its certificate."""
        config = self.asked.config({})
        rows = [one for one in declared_public(config.build()) if "rows" in one.what]
        by = f"{self.metric} on " + " and ".join(f"{one.rows} {one.what}" for one in rows)
        return Selection(id=self.id, trials=self.tries, over=tuple(axis.key for axis in self.space), by=by)

    @cached_property
    def noise_multiplier(self) -> float | None:
        """The noise of every try, such that the best of all costs what it may; None: the file's own."""
        config = self.asked.config({})
        if self.epsilon is None:
            return None
        if config.deltas or any(
            getattr(part, "noise_multipliers", ()) for part in (config.plan.release, config.plan.local)
        ):
            fix = "drop --epsilon: every silo keeps its noise, and the bill says what all tries cost"
            raise ConfigError("--epsilon, and silos with noise or deltas of their own", "one noise for all", fix)
        reads = config.plan.local.reads
        weakest = 0 if reads is None else int(np.argmin(reads.sizes))

        def line_of(z: float) -> Line:
            return cost_of_best(noisier(config.plan, z).cost(), self.selection).line("models", weakest)

        return calibration.noise_multiplier(line_of, self.epsilon, config.delta)

    def config(self, changes: Changes) -> Config:
        """The file of a try: billed as the best of all tries."""
        found = self.asked.config(changes)
        plan = found.plan if self.noise_multiplier is None else noisier(found.plan, self.noise_multiplier)
        return replace(found, plan=plan, privacy=replace(found.privacy, selected=self.selection))

    def check(self) -> None:
        """Refuse, before anything is drawn: no guarantee, other data, or a value with which a try has another bill."""
        wrong = next((axis.key for axis in self.space if not axis.key.startswith(FREE)), None)
        if wrong is not None:
            raise ConfigError(
                f"{wrong} among what is tried", f"keys of {', '.join(FREE)}", "other data are another unit"
            )
        config = self.config({})
        line = headline(_cost(config).of("models"), config.delta, config.deltas)
        if line["epsilon"] is None:
            raise ConfigError("private tuning of a plan without a guarantee", "noise", "give --epsilon")
        for axis in self.space:
            ends = () if axis.interval is None else (axis.interval.low, axis.interval.high)
            whole = axis.interval is not None and axis.interval.whole
            for value in (*axis.values, *(round(end) if whole else end for end in ends)):
                self.check_alike(config, {axis.key: value})

    def check_alike(self, config: Config, changes: Changes) -> None:
        """Refuse a candidate whose bill is another."""
        own = self.config(changes)
        if _cost(own) != _cost(config) or (own.delta, own.deltas) != (config.delta, config.deltas):
            keys = ", ".join(f"{key} = {value}" for key, value in changes.items())
            needed = "tries that all cost the same: steps, clip norms, models, but not rounds, rates or noise"
            raise ConfigError(
                f"{keys}, with which a try has another bill", needed, "leave it to the file, or to --epsilon"
            )

    def draw(self) -> list[Try]:
        """The tries: how many, which candidates, and in simulation the coins of each; all secret until one has won."""
        config = self.config({})
        coins = config.streams.at(0, "tries")
        found = []
        for _ in range(self.tries.draw(coins)):
            changes = {axis.key: axis.draw(coins) for axis in self.space}
            self.check_alike(config, changes)
            own, seed = self.config(changes), int(coins.integers(2**62))
            own = replace(own, run=replace(own.run, coins=seed if own.privacy.noise == "simulation" else None))
            found.append((changes, own))
        return found


def _cost(config: Config) -> Cost:
    return run_cost(config.plan, admission.planned_facts(config))


def tune_private(tuning: Tuning, out: Path, say: Say) -> dict[str, Any]:
    """Run the tries; the winner's folder is `out`, and nothing else is left."""
    if out.exists():
        raise ConfigError(f"{out}, which exists", "a new folder", "choose another --out")
    tuning.check()
    config = tuning.config({})
    admission.admit_whole(config, tuning.id)
    said = f"tries: a random number, {tuning.tries.mean:g} on average"
    say(f"{said}; how many, how long they take and what they come to is not shown")
    with _workshop(out) as shop:
        best = _best(tuning, tuning.draw(), shop)
        if best is None:
            raise DivergedError("no try of this tuning left a model: nothing is released, and what it costs is spent")
        durable_files.move(shop / "best", out)
    changes, done = best
    return _told(tuning, changes, replace(done, path=out))


def _best(tuning: Tuning, tries: Sequence[Try], shop: Path) -> tuple[Changes, Executed] | None:
    """The best of all tries, in shop/best; whatever has lost is gone."""
    sign = 1.0 if better(tuning.metric) == "smaller" else -1.0
    kept, least = None, float("inf")
    for changes, config in tries:
        try:
            done = execute(config, shop / "try", tried=True)
        except DivergedError:
            shutil.rmtree(shop / "try")
            continue
        score = sign * float(done.history[-1][tuning.metric])
        if score < least:
            shutil.rmtree(shop / "best", ignore_errors=True)
            durable_files.move(shop / "try", shop / "best")
            kept, least = (changes, done), score
        else:
            shutil.rmtree(shop / "try")
    return kept


@contextmanager
def _workshop(out: Path) -> Iterator[Path]:
    """A folder that only its owner reads, gone at the end; what a killed tuning left in it goes unread."""
    shop = out.with_name(f".{out.name}.tries")
    shop.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(shop, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"a tuning into {out} that goes on", "a folder of its own", "wait for it") from None
        for left in shop.iterdir():
            shutil.rmtree(left)
        try:
            yield shop
        finally:
            shutil.rmtree(shop, ignore_errors=True)
    finally:
        os.close(lock)


def _told(tuning: Tuning, changes: Changes, done: Executed) -> dict[str, Any]:
    """What is released: the winner, its score on rows that chose, and its figure on rows that did not."""
    config, metric = tuning.asked.config(changes, judged=False), tuning.metric
    task = config.build()
    rows = " and ".join(f"{one.rows} {one.what}" for one in declared_public(task) if "rows" in one.what)
    return {
        "out": str(done.path),
        "metric": metric,
        "best": changes,
        "chosen": {metric: done.history[-1][metric], "by": tuning.selection.by},
        "reported": {metric: judged(task, done.path)[metric], "rows": rows},
        "certificate": done.certificate,
    }


def text(told: dict[str, Any]) -> str:
    """The winner in a few lines."""
    metric, made = told["metric"], told["certificate"]
    best = ", ".join(f"{key} = {shown_value(value)}" for key, value in told["best"].items())
    return "\n".join(
        [
            f"best: {best}",
            f"{metric} {told['chosen'][metric]:.4f} by {told['chosen']['by']}, which chose",
            f"{metric} {told['reported'][metric]:.4f} on {told['reported']['rows']}, which had no part in choosing",
            f"the whole search: epsilon {upto(made['epsilon'], 4)}, delta {upto(made['delta'])}, unit {made['unit']}, "
            f"relation {made['relation']}; nothing but this run is left of it",
            f"files: {told['out']}/{{plan.toml, certificate.json, history.jsonl, model.safetensors}}",
        ]
    )
