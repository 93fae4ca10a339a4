"""Hyperparameter search on public data: local steps, rounds, batch and step size. Called by `sordino tune`.

The search starts from the papers' rule and varies one hyperparameter after the other; every candidate is calibrated to
the same budget. Where the best value is the smallest or largest one tried, up to `EXTENSIONS` further values are tried.
The search reads public or synthetic records in the shape of the task, never private ones, so it costs no privacy.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.calibration import Budget, calibrate, calibrate_silos
from sordino.accounting.rounding import upto
from sordino.certificate.facts import Declared
from sordino.codec import durable_files
from sordino.data.clients import Clients, Records
from sordino.errors import ConfigError, DataError, PlanError, UnreachableError
from sordino.loop import run
from sordino.parts.schedules import scaled
from sordino.plan import Plan
from sordino.recipes.client_level import local_steps
from sordino.report.text_table import Estimate
from sordino.rng import Seeded
from sordino.task import Task

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of local steps and rounds
LR_FACTORS = (0.1, 0.3, 1.0, 3.0)
BATCH_SHARES = (0.05, 0.2, 0.5, 1.0)  # of the smallest silo
EXTENSIONS = 3  # values tried beyond the smallest or largest one, per hyperparameter
Progress = Callable[[float, float, str], None]  # work done, work in all, the last candidate
Source = Literal["public", "synthetic"]


# ---- data for the search
def tuning_task(plan: Plan, task: Task, source: Source, seed: int) -> Task:
    """Return a task on public or synthetic records with the same numbers of clients and of records per client."""
    sizes = _sizes(plan, task)
    records, test = _public(task, seed) if source == "public" else _synthetic(task, sum(sizes), seed)
    rng = Seeded(seed).at(0, "stand-in")
    index = rng.choice(len(records), sum(sizes), replace=len(records) < sum(sizes)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Task(task.model, Clients(records, index, offsets), test, task.loss)


def _sizes(plan: Plan, task: Task) -> list[int]:
    """Return each client's number of records: as declared if the privacy unit is a record, else the average size."""
    reads, population = plan.local.reads, plan.clients.population
    if reads is not None:
        return [reads.size(silo) for silo in range(population)]
    return [max(1, len(task.clients.index) // population)] * population


def _public(task: Task, seed: int) -> tuple[Records, Records]:
    public = task.public or task.test
    if public is None or len(public) < 20:
        found = "fewer than 20 public records to tune on"
        raise DataError(found, "at least 20 rows declared public", "name a test file, or use --data synthetic")
    order = torch.from_numpy(Seeded(seed).at(0, "public halves").permutation(len(public)))
    first, second = order[: len(order) // 2], order[len(order) // 2 :]
    return Records(public.x[first], public.y[first]), Records(public.x[second], public.y[second])


def _synthetic(task: Task, count: int, seed: int) -> tuple[Records, Records]:
    """Return training and test records: standard normal inputs, labelled by a random network of the task's shape."""
    like, rng = task.clients.records, Seeded(seed).at(0, "made up")
    if not like.x.is_floating_point():
        raise DataError("inputs that are not numbers", "a task with numeric inputs", "use --data public")

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    x, teacher = normal(count + 1000, *like.x.shape[1:]), copy.deepcopy(task.model).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.copy_(normal(*parameter.shape) / max(1, parameter[0].numel()) ** 0.5)
        out: Tensor = teacher(x)
    if like.y.is_floating_point():
        y = (out + 0.3 * normal(*out.shape)).reshape(len(x), *like.y.shape[1:])
    else:
        y = (out.argmax(-1) if out.shape[-1] > 1 else (out[:, 0] > 0)).to(like.y.dtype)
    return Records(x[:count], y[:count]), Records(x[count:], y[count:])


# ---- hyperparameters of a plan
@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a plan: rounds, local steps (or epochs), batch size, and a factor on the step size.

    A hyperparameter that the plan does not have is None.
    """

    rounds: int
    steps: int | None = None
    batch: int | None = None
    lr_factor: float = 1.0

    @property
    def total(self) -> int:
        """Number of iterations, T = steps * rounds."""
        return self.rounds * (self.steps or 1)

    def at_total(self, steps: int) -> Hyperparameters:
        """Return a copy with other local steps, and rounds that keep the total number of iterations."""
        return replace(self, steps=steps, rounds=max(1, round(self.total / steps)))

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in asdict(self).items() if value is not None)


def hyperparameters(plan: Plan) -> Hyperparameters:
    """Return the plan's hyperparameters: rounds, the local solver's steps or epochs, and its batch size."""
    local = plan.local
    own = getattr(local, "__dataclass_fields__", {})  # a solver's fixed number of steps is no field of it
    steps = next((getattr(local, name) for name in ("steps", "epochs") if name in own and getattr(local, name)), None)
    records = getattr(local, "records", None)
    if steps is None and records is None:
        found, needed = f"local solver {local.kind!r}", "a local solver with steps, epochs or records"
        raise PlanError("tuning", found, needed, "choose another recipe, or set its values by hand")
    batch = getattr(records, "batch", None)
    return Hyperparameters(plan.rounds, steps, None if batch is None else int(batch))


def with_hyperparameters(plan: Plan, wanted: Hyperparameters) -> Plan:
    """Return the plan with other hyperparameters.

    A clip norm that is a product with the step size and the number of steps (paper 002) is changed with them. A
    decreasing server step size is stretched to the new number of rounds. Where the local solver has no step size,
    `lr_factor` scales that of the server.
    """
    now, local, encode, server = hyperparameters(plan), plan.local, plan.encode, plan.server
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
    factor = 1.0 if hasattr(local, "lr") else wanted.lr_factor
    if server.rounds not in (None, wanted.rounds):
        found, needed = f"server {server.kind!r}, which fixes the number of rounds", "a server without such a number"
        raise PlanError("tuning", found, needed, "use the server optimizer sgd, adam or accelerated")
    if hasattr(server, "v"):
        server = replace(server, v=server.v / factor)  # type: ignore[type-var]
    elif hasattr(server, "lr"):
        lr = replace(server.lr, rounds=wanted.rounds) if hasattr(server.lr, "rounds") else server.lr
        server = replace(server, lr=scaled(lr, factor) if factor != 1.0 else lr)  # type: ignore[type-var]
    return replace(plan, rounds=wanted.rounds, local=local, encode=encode, server=server).fitted()


def first_guess(plan: Plan) -> tuple[str, Hyperparameters]:
    """Return the papers' rule for the hyperparameters of this plan, as text and as values; else the plan's own."""
    now, reads = hyperparameters(plan), plan.local.reads
    if plan.release.kind == "local_noise" and reads is None and now.steps is not None:
        laplace = plan.release.mechanism.kind == "laplace"  # type: ignore[attr-defined]
        power = "2/3" if laplace else "1/2"
        steps = local_steps(now.total, "laplace" if laplace else "gaussian")
        return f"local steps E = T^({power}) of T = steps * rounds (paper 002)", now.at_total(steps)
    if reads is not None and now.batch is not None:
        rule = "batches of all records of the smallest silo (paper 001: a larger batch needs less noise)"
        return rule, replace(now, batch=min(reads.sizes))
    return "the plan's own", now


# ---- the search
@dataclass(frozen=True)
class Tuned:
    """Result of a search: the best hyperparameters for one epsilon, all losses, and the search's privacy cost.

    `at_edge` names hyperparameters whose best value is the smallest or largest one tried.
    """

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
        """Result as JSON data, for `sordino tune --json`."""
        proposal = {name: value for name, value in asdict(self.chosen).items() if value is not None}
        found = {"epsilon": self.epsilon, "delta": self.delta, "proposal": proposal, "rule": self.rule}
        if self.silos:
            found["silos"] = [asdict(budget) for budget in self.silos]
        return {**found, "curves": self.curves, "at_edge": list(self.at_edge), "privacy_cost": self.cost}


Losses = tuple[float, ...]  # of one candidate, by seed; empty if it is refused or cannot meet the budget
Trials = dict[Hyperparameters, Losses]


class TrialLog:
    """Log of finished trials in a folder, so that a stopped search is resumed without repeating them.

    tune.json      options of the search       trials.jsonl   one line per finished trial
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
            found = f"{out}, which has a search with other options"
            raise ConfigError(found, "the options that the search was started with", "choose another --out")
        lines = self.file.read_text("utf-8").splitlines(keepends=True) if self.file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a kill may leave half a line
        durable_files.write(self.file, "".join(whole).encode())
        self.entries = [json.loads(line) for line in whole]

    def trials(self, epsilon: float) -> Trials:
        own = [entry for entry in self.entries if entry["epsilon"] == epsilon]
        return {Hyperparameters(**entry["hyperparameters"]): tuple(entry["losses"]) for entry in own}

    def append(self, epsilon: float, wanted: Hyperparameters, losses: Losses) -> None:
        entry = {"epsilon": epsilon, "hyperparameters": asdict(wanted), "losses": list(losses)}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def tune(
    plan: Plan, task: Task, *, epsilon: float, delta: float, source: Source = "public", seeds: int = 3, seed: int = 0,
    public: tuple[Declared, ...] | None = None, silos: tuple[Budget, ...] = (), progress: Progress | None = None,
    done: Trials | None = None, on_trial: Callable[[Hyperparameters, Losses], None] | None = None,
) -> Tuned:  # fmt: skip
    """Search the hyperparameters with the least mean loss over `seeds` simulations, calibrated to (epsilon, delta).

    `public` states which rows of the task are public and who declared them; default: the task's own declaration.
    With budgets of `silos` each silo's noise is calibrated to its own budget, and epsilon is the largest of them.
    `progress` is called after every candidate. Trials in `done`, of an earlier search that was stopped, are not
    repeated; `on_trial` is called with every new trial.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}", "at least 1 simulation per candidate", "set --seeds 3")
    declared = task.declared_public if public is None else public
    read = " and ".join(f"{one.rows} {one.what} (declared by {one.by})" for one in declared)
    cost = {
        "public": f"nothing for private rows: only {read} were read, which are not protected",
        "synthetic": "nothing: every record was synthetic",
    }[source]
    if plan.local.reads is None:
        cost += f"; that a client holds {_sizes(plan, task)[0]} records on average was taken as public"
    tasks = [tuning_task(plan, task, source, seed + trial) for trial in range(seeds)]
    rule, first = first_guess(plan)
    search = CoordinateSearch(plan, tasks, epsilon, delta, silos, dict(done or {}), progress, on_trial)
    best, curves, edges = search.run(first)
    if not search.losses(best):
        needed = f"an epsilon above {upto(epsilon, 6)}"
        raise UnreachableError("no candidate that fits the budget", needed, "raise epsilon")
    return Tuned(epsilon, delta, search.solved(best), best, rule, curves, edges, cost, silos)


@codec.hides_values
@dataclass
class CoordinateSearch:
    """Coordinate search, which varies one hyperparameter after the other and compares losses on the tuning tasks."""

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
        """Return the best candidate, the losses by hyperparameter, and the hyperparameters that are best at an edge.

        The work of a candidate that `progress` shows is rounds times local steps, plus one for its calibration.
        """
        curves: dict[str, list[dict[str, Any]]] = {}
        edges: dict[str, bool] = {}
        names = ["lr_factor", *(name for name in ("steps", "batch") if getattr(best, name) is not None)]
        names += ["rounds", "lr_factor"]
        for place, name in enumerate(names):
            later = sum(one.total + 1 for other in names[place + 1 :] for one in self.candidates(other, best))
            rest = later + EXTENSIONS * (best.total + 1)  # of this hyperparameter, beyond the edge
            asked = [*self.candidates(name, best), best]
            left = [rest + sum(one.total + 1 for one in asked[i + 1 :]) for i in range(len(asked))]
            tried = {one: self.mean_loss(one, work) for one, work in zip(asked, left, strict=True)}
            for _ in range(EXTENSIONS):
                beyond = self._beyond(name, tried)
                if beyond is None:
                    break
                tried[beyond] = self.mean_loss(beyond, rest)
            best = min(tried, key=lambda one: (tried[one], one.total))
            edges[name] = self._beyond(name, tried) is not None
            curves[name] = []
            for one in sorted(tried, key=lambda one: float(getattr(one, name))):
                found = Estimate.of(losses) if (losses := self.losses(one)) else Estimate(math.inf, None)
                row = {name: float(getattr(one, name)), "loss": found.mean, "half_width": found.half_width}
                curves[name].append(row)
        if self.progress is not None:
            self.progress(self.done, self.done, f"best: {best.text}")
        return best, curves, tuple(name for name, edge in edges.items() if edge)

    def candidates(self, name: str, best: Hyperparameters) -> list[Hyperparameters]:
        """Return candidates that vary one hyperparameter of `best`; with other local steps, steps * rounds stays."""
        if name == "lr_factor":
            return [replace(best, lr_factor=best.lr_factor * factor) for factor in LR_FACTORS]
        if name == "batch":
            most = min(self.plan.local.reads.sizes) if self.plan.local.reads is not None else 1
            return [replace(best, batch=n) for n in sorted({max(1, round(most * s)) for s in BATCH_SHARES})]
        if name == "steps":
            wanted = sorted({max(1, round((best.steps or 1) * factor)) for factor in FACTORS} | {1})
            return [best.at_total(steps) for steps in wanted if steps <= best.total]
        return [replace(best, rounds=n) for n in sorted({max(1, round(best.rounds * factor)) for factor in FACTORS})]

    def _beyond(self, name: str, tried: dict[Hyperparameters, float]) -> Hyperparameters | None:
        """Return the next candidate beyond the tried ones if the best is the smallest or largest; else None."""
        best = min(tried, key=lambda one: (tried[one], one.total))
        values, now = {getattr(one, name) for one in tried}, getattr(best, name)
        if math.isinf(tried[best]) or now not in (min(values), max(values)):
            return None
        up = now == max(values)
        if name == "lr_factor":
            return replace(best, lr_factor=float(f"{now * (3 if up else 1 / 3):.6g}"))
        wanted = now * 2 if up else now // 2
        if wanted < 1 or (name == "batch" and up) or (name == "steps" and wanted > best.total):
            return None  # the largest batch is the whole smallest silo
        return best.at_total(wanted) if name == "steps" else replace(best, **{name: wanted})

    def solved(self, wanted: Hyperparameters) -> Plan:
        """Return the candidate's plan, its noise calibrated to epsilon, or for every silo to its own budget."""
        plan = with_hyperparameters(self.plan, wanted)
        if self.silos:
            return calibrate_silos(plan, self.silos)
        return calibrate(plan, epsilon=self.epsilon, delta=self.delta)

    def losses(self, wanted: Hyperparameters) -> Losses:
        """Return the final loss of each simulation; empty for a candidate that is refused or cannot meet the budget."""
        if wanted not in self.trials:
            found: Losses = ()
            try:
                plan = self.solved(wanted)
                for seed, task in enumerate(self.tasks):
                    *_, done = run(plan, task, streams=Seeded(seed), eval_every=plan.rounds)
                    found += (done.metrics["loss"],)
            except (PlanError, UnreachableError):
                found = ()
            self.trials[wanted] = found if all(map(math.isfinite, found)) else ()
            if self.on_trial is not None:
                self.on_trial(wanted, self.trials[wanted])
        return self.trials[wanted]

    def mean_loss(self, wanted: Hyperparameters, rest: float) -> float:
        """Return the mean of `losses`, or infinity if empty; report progress, with `rest` as the remaining work."""
        new, losses = wanted not in self.trials, self.losses(wanted)
        loss = Estimate.of(losses).mean if losses else math.inf
        self.done += wanted.total + 1 if new else 0
        if self.progress is not None and new:
            self.progress(self.done, self.done + rest, f"{wanted.text}: loss {loss:.4g}")
        return loss
