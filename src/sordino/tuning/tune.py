"""Hyperparameter search of `sordino tune`: local steps, rounds, batch and step size for a budget, on public data.

The papers' rule first, then one hyperparameter after the other, every candidate calibrated to the same budget. Where
the best value is the smallest or the largest that was tried, the search goes on beyond it, `EXTENSIONS` times at most.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sordino import codec
from sordino.accounting.calibration import Budget, calibrate, calibrate_silos
from sordino.accounting.rounding import upto
from sordino.certificate.facts import Declared
from sordino.codec import durable_files
from sordino.errors import ConfigError, PlanError, UnreachableError
from sordino.loop import run
from sordino.outcome import declared_public
from sordino.parts.schedules import scaled
from sordino.plan import Plan
from sordino.recipes.client_level import local_steps
from sordino.report.aggregate import Estimate
from sordino.rng import Seeded
from sordino.task import Task
from sordino.tuning.tuning_data import Source, privacy_cost, tuning_task

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of local steps and rounds
LR_FACTORS = (0.1, 0.3, 1.0, 3.0)
BATCH_SHARES = (0.05, 0.2, 0.5, 1.0)  # of the smallest silo
EXTENSIONS = 3  # values tried beyond the edge, per hyperparameter
Progress = Callable[[float, float, str], None]  # work done, work in all, the last candidate


@dataclass(frozen=True)
class Hyperparameters:
    """Rounds, local steps (or epochs), records per batch, and a factor on the step size; None: the plan has none."""

    rounds: int
    steps: int | None = None
    batch: int | None = None
    lr_factor: float = 1.0

    @property
    def total(self) -> int:
        """T = steps * rounds."""
        return self.rounds * (self.steps or 1)

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in asdict(self).items() if value is not None)


def hyperparameters(plan: Plan) -> Hyperparameters:
    """As the plan has them, by the fields of its local solver: steps or epochs, and the batch of its records."""
    local = plan.local
    steps, records = getattr(local, "steps", None) or getattr(local, "epochs", None), getattr(local, "records", None)
    if steps is None and records is None:
        raise PlanError("tuning", f"local solver {local.kind!r}", "one with steps, epochs or records")
    batch = getattr(records, "batch", None)
    return Hyperparameters(plan.rounds, steps, None if batch is None else int(batch))


def with_hyperparameters(plan: Plan, wanted: Hyperparameters) -> Plan:
    """The plan with other hyperparameters; a clip norm that is lr * steps * zeta (paper 002) follows."""
    now, local, encode = hyperparameters(plan), plan.local, plan.encode
    if getattr(getattr(local, "gradient", None), "kind", "") == "bounded":
        factor = wanted.lr_factor * (wanted.steps or 1) / (now.steps or 1)
        encode = tuple(
            replace(step, clip_norm=scaled(step.clip_norm, factor)) if hasattr(step, "clip_norm") else step  # type: ignore[type-var]
            for step in encode
        )
    changes: dict[str, Any] = {}
    if now.steps is not None:
        changes["steps" if getattr(local, "steps", None) is not None else "epochs"] = wanted.steps
    if now.batch is not None:
        changes["records"] = replace(local.records, batch=wanted.batch)  # type: ignore[attr-defined]
    if hasattr(local, "lr") and wanted.lr_factor != 1.0:
        changes["lr"] = scaled(local.lr, wanted.lr_factor)
    local = replace(local, **changes)  # type: ignore[type-var]
    server = _server(plan.server, wanted.rounds, 1.0 if hasattr(local, "lr") else wanted.lr_factor)
    return replace(plan, rounds=wanted.rounds, local=local, encode=encode, server=server).fitted()


def _server(server: Any, rounds: int, factor: float) -> Any:
    """A step that falls over the rounds falls over the new ones; the step of a gradient is scaled."""
    if getattr(server, "rounds", rounds) != rounds:
        raise PlanError("tuning", f"server {server.kind!r} with rounds of its own", "sgd, adam or accelerated")
    if hasattr(server, "v"):
        return replace(server, v=server.v / factor)
    if not hasattr(server, "lr"):
        return server
    lr = replace(server.lr, rounds=rounds) if hasattr(server.lr, "rounds") else server.lr
    return replace(server, lr=scaled(lr, factor) if factor != 1.0 else lr)


@dataclass(frozen=True)
class Tuned:
    """The hyperparameters proposed for one epsilon, the losses they were chosen by, and what the search cost."""

    epsilon: float
    delta: float
    plan: Plan
    chosen: Hyperparameters
    rule: str
    curves: dict[str, list[dict[str, Any]]]
    at_edge: tuple[str, ...]
    cost: str
    silos: tuple[Budget, ...] = ()

    @property
    def entry(self) -> dict[str, Any]:
        """As plain data."""
        proposal = {name: value for name, value in asdict(self.chosen).items() if value is not None}
        found = {"epsilon": self.epsilon, "delta": self.delta, "proposal": proposal, "rule": self.rule}
        if self.silos:
            found["silos"] = [asdict(budget) for budget in self.silos]
        return {**found, "curves": self.curves, "at_edge": list(self.at_edge), "privacy_cost": self.cost}


Losses = tuple[float, ...]  # of one candidate, by seed; empty if it is refused or cannot meet the budget
Trials = dict[Hyperparameters, Losses]


class TrialLog:
    """Finished trials in a folder: a search that was stopped is resumed without repeating them.

    tune.json      the search that was asked for       trials.jsonl   one line per trial, appended as it ends
    """

    def __init__(self, out: Path, asked: dict[str, Any], resume: bool) -> None:
        search = (json.dumps({"format": "sordino tune 1", **asked}, indent=1) + "\n").encode()
        self.file, header = out / "trials.jsonl", out / "tune.json"
        if not out.exists():
            out.mkdir(parents=True)
            durable_files.write(header, search)
        elif not resume:
            raise ConfigError(f"{out}, which exists", "a new folder", "choose another --out, or add --resume")
        elif not header.is_file() or durable_files.read(header) != search:
            raise ConfigError(f"a search in {out} that asks for something else", "the same search", "another --out")
        lines = self.file.read_text("utf-8").splitlines(keepends=True) if self.file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a kill may leave half a line
        durable_files.write(self.file, "".join(whole).encode())
        self.entries = [json.loads(line) for line in whole]

    def trials(self, epsilon: float) -> Trials:
        """The finished trials of one epsilon."""
        mine = [entry for entry in self.entries if entry["epsilon"] == epsilon]
        return {Hyperparameters(**entry["hyperparameters"]): tuple(entry["losses"]) for entry in mine}

    def append(self, epsilon: float, wanted: Hyperparameters, losses: Losses) -> None:
        """Write one trial down."""
        entry = {"epsilon": epsilon, "hyperparameters": asdict(wanted), "losses": list(losses)}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def tune(
    plan: Plan, task: Task, *, epsilon: float, delta: float, source: Source = "public", seeds: int = 3, seed: int = 0,
    public: tuple[Declared, ...] | None = None, silos: tuple[Budget, ...] = (), progress: Progress | None = None,
    done: Trials | None = None, on_trial: Callable[[Hyperparameters, Losses], None] | None = None,
) -> Tuned:  # fmt: skip
    """The hyperparameters with the least mean loss over `seeds` simulations, each candidate at (epsilon, delta).

    `public` says which rows of the task are public and by whose word; default: by the caller's, who made the task.
    With budgets of the `silos` every candidate gives each silo the noise of its own budget; epsilon is then the worst.
    `progress` is called after every candidate. `done` are trials of an earlier search that was stopped, which are not
    run again; `on_trial` is called with every new one.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}", "at least 1")
    cost = privacy_cost(plan, task, source, declared_public(task) if public is None else public)
    tasks = [tuning_task(plan, task, source, seed + trial) for trial in range(seeds)]
    rule, first = first_guess(plan)
    search = _Search(plan, tasks, epsilon, delta, silos, dict(done or {}), progress, on_trial)
    best, curves, edges = search.run(first)
    if not search.losses(best):
        needed = f"epsilon above {upto(epsilon, 6)}"
        raise UnreachableError("no candidate that fits the budget", needed, "raise epsilon")
    return Tuned(epsilon, delta, search.solved(best), best, rule, curves, edges, cost, silos)


def first_guess(plan: Plan) -> tuple[str, Hyperparameters]:
    """Where the papers' rules put the hyperparameters, the total number of iterations given; else the plan's own."""
    now, reads = hyperparameters(plan), plan.local.reads
    if plan.release.kind == "local_noise" and reads is None and now.steps is not None:
        laplace = plan.release.mechanism.kind == "laplace"  # type: ignore[attr-defined]
        name: Literal["laplace", "gaussian"] = "laplace" if laplace else "gaussian"
        steps = local_steps(now.total, name)
        power = "2/3" if name == "laplace" else "1/2"
        return f"E = T^({power}) (paper 002)", replace(now, steps=steps, rounds=max(1, round(now.total / steps)))
    if reads is not None and now.batch is not None:
        rule = "all records of the smallest silo (paper 001: the larger K, the less noise)"
        return rule, replace(now, batch=min(reads.sizes))
    return "the plan's own", now


@codec.hides_values
@dataclass
class _Search:
    """Coordinate search: the loss of candidates on the tuning tasks, one hyperparameter after the other."""

    plan: Plan
    tasks: list[Task]
    epsilon: float
    delta: float
    silos: tuple[Budget, ...]
    trials: Trials
    progress: Progress | None
    on_trial: Callable[[Hyperparameters, Losses], None] | None
    done: float = 0.0

    def run(self, best: Hyperparameters) -> tuple[Hyperparameters, dict[str, list[dict[str, Any]]], tuple[str, ...]]:
        """The best candidate, the losses along every hyperparameter, and those whose best value is at the edge."""
        curves: dict[str, list[dict[str, Any]]] = {}
        edges: dict[str, bool] = {}
        names = ["lr_factor", *(name for name in ("steps", "batch") if getattr(best, name) is not None)]
        names += ["rounds", "lr_factor"]
        for place, name in enumerate(names):
            later = sum(_work(one) for other in names[place + 1 :] for one in self.candidates(other, best))
            rest = later + EXTENSIONS * _work(best)  # of this hyperparameter, beyond the edge
            asked = [*self.candidates(name, best), best]
            tried = {one: self.mean_loss(one, rest + sum(map(_work, asked[i + 1 :]))) for i, one in enumerate(asked)}
            for _ in range(EXTENSIONS):
                beyond = self._beyond(name, tried)
                if beyond is None:
                    break
                tried[beyond] = self.mean_loss(beyond, rest)
            best = min(tried, key=lambda one: (tried[one], one.total))
            edges[name] = self._beyond(name, tried) is not None
            curves[name] = []
            for one in sorted(tried, key=lambda one: _value(one, name)):
                found = Estimate.of(losses) if (losses := self.losses(one)) else Estimate(math.inf, None)
                curves[name].append({name: _value(one, name), "loss": found.mean, "half_width": found.half_width})
        if self.progress is not None:
            self.progress(self.done, self.done, f"best: {best.text}")
        return best, curves, tuple(name for name, edge in edges.items() if edge)

    def candidates(self, name: str, best: Hyperparameters) -> Iterator[Hyperparameters]:
        """Values of one hyperparameter around the best so far; local steps at a constant total."""
        if name == "lr_factor":
            yield from (replace(best, lr_factor=best.lr_factor * factor) for factor in LR_FACTORS)
        elif name == "batch":
            most = min(self.plan.local.reads.sizes) if self.plan.local.reads is not None else 1
            yield from (replace(best, batch=n) for n in sorted({max(1, round(most * s)) for s in BATCH_SHARES}))
        elif name == "steps":
            wanted = sorted({max(1, round((best.steps or 1) * factor)) for factor in FACTORS} | {1})
            yield from (_at_total(best, steps) for steps in wanted if steps <= best.total)
        else:
            wanted = sorted({max(1, round(best.rounds * factor)) for factor in FACTORS})
            yield from (replace(best, rounds=n) for n in wanted)

    def _beyond(self, name: str, tried: dict[Hyperparameters, float]) -> Hyperparameters | None:
        """The next value where the best one is the least or the largest tried, and a further one makes sense."""
        best = min(tried, key=lambda one: (tried[one], one.total))
        if math.isinf(tried[best]):
            return None
        values = {_value(one, name) for one in tried}
        if _value(best, name) not in (min(values), max(values)):
            return None
        up = _value(best, name) == max(values)
        if name == "lr_factor":
            return replace(best, lr_factor=float(f"{best.lr_factor * (3 if up else 1 / 3):.6g}"))
        if name == "steps":
            wanted = (best.steps or 1) * 2 if up else (best.steps or 1) // 2
            return _at_total(best, wanted) if 1 <= wanted <= best.total else None
        if name == "batch":  # the largest is the whole smallest silo
            wanted = 0 if up else (best.batch or 1) // 2
            return replace(best, batch=wanted) if wanted >= 1 else None
        wanted = best.rounds * 2 if up else best.rounds // 2
        return replace(best, rounds=wanted) if wanted >= 1 else None

    def solved(self, wanted: Hyperparameters) -> Plan:
        """The candidate, calibrated: to one epsilon, or every silo to its own."""
        plan = with_hyperparameters(self.plan, wanted)
        if self.silos:
            return calibrate_silos(plan, self.silos)
        return calibrate(plan, epsilon=self.epsilon, delta=self.delta)

    def losses(self, wanted: Hyperparameters) -> Losses:
        """The last loss of every simulation; none for a candidate that is refused or cannot meet the budget."""
        if wanted not in self.trials:
            try:
                plan = self.solved(wanted)
                last = []
                for seed, task in enumerate(self.tasks):
                    *_, done = run(plan, task, streams=Seeded(seed), eval_every=plan.rounds)
                    last.append(done.metrics["loss"])
                found = tuple(last)
            except (PlanError, UnreachableError):
                found = ()
            self.trials[wanted] = found if all(map(math.isfinite, found)) else ()
            if self.on_trial is not None:
                self.on_trial(wanted, self.trials[wanted])
        return self.trials[wanted]

    def mean_loss(self, wanted: Hyperparameters, rest: float) -> float:
        """The mean of `losses`, infinite without; tells the progress, `rest` being the work that is to come."""
        new, losses = wanted not in self.trials, self.losses(wanted)
        loss = Estimate.of(losses).mean if losses else math.inf
        self.done += _work(wanted) if new else 0.0
        if self.progress is not None and new:
            self.progress(self.done, self.done + rest, f"{wanted.text}: loss {loss:.4g}")
        return loss


def _at_total(best: Hyperparameters, steps: int) -> Hyperparameters:
    return replace(best, steps=steps, rounds=max(1, round(best.total / steps)))


def _work(wanted: Hyperparameters) -> float:
    """How long a candidate takes, in some unit: rounds times local steps, and a little for its calibration."""
    return float(wanted.total + 1)


def _value(wanted: Hyperparameters, name: str) -> float:
    return float(getattr(wanted, name))
