"""What can be turned in a plan: local steps or epochs, rounds, records per batch, and the step size as a factor.

The search: the papers' rule first, then one knob after the other, every candidate calibrated to the same budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, Literal

from sordino.accounting.calibration import Budget, calibrate, calibrate_silos
from sordino.accounting.rounding import upto
from sordino.certificate.facts import Declared
from sordino.errors import ConfigError, PlanError, UnreachableError
from sordino.loop import run
from sordino.outcome import declared_public
from sordino.parts.encoding import Clip
from sordino.parts.gradients import Bounded
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Laplace
from sordino.parts.record_samplers import FixedRecords, OnePass, PoissonRecords
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import LocalNoise
from sordino.parts.schedules import Linear, Schedule, scaled
from sordino.parts.server_optimizers import Adam, Sgd
from sordino.plan import Plan
from sordino.recipes.client_side import local_steps
from sordino.rng import Seeded
from sordino.task import Task
from sordino.tuning.proxy_data import Source, cost, stand_in


@dataclass(frozen=True)
class Knobs:
    """E local steps (or epochs), rounds, batch of records, and a factor on the step size; None: not there to turn."""

    rounds: int
    steps: int | None = None
    batch: int | None = None
    pace: float = 1.0

    @property
    def total(self) -> int:
        """T = E * rounds."""
        return self.rounds * (self.steps or 1)


def knobs(plan: Plan) -> Knobs:
    """As the plan has them."""
    local = plan.local
    if isinstance(local, LocalSgd):
        return Knobs(plan.rounds, local.steps or local.epochs)
    if isinstance(local, NoisyLocalSgd):
        return Knobs(plan.rounds, local.steps, _batch(local))
    if isinstance(local, BatchGradient):
        return Knobs(plan.rounds, None, _batch(local))
    raise PlanError("tuning", f"local solver {local.kind!r}", "local_sgd, noisy_local_sgd or batch_gradient")


def _batch(local: BatchGradient | NoisyLocalSgd) -> int | None:
    records = local.records
    return int(records.batch) if isinstance(records, PoissonRecords | FixedRecords | OnePass) else None


def turned(plan: Plan, wanted: Knobs) -> Plan:
    """The plan with its knobs set; a clip that is lr * steps * zeta (paper 002) follows."""
    now = knobs(plan)
    local = _local(plan.local, wanted)
    encode = plan.encode
    if isinstance(getattr(plan.local, "gradient", None), Bounded):
        factor = wanted.pace * (wanted.steps or 1) / (now.steps or 1)
        encode = tuple(_longer(step, factor) if isinstance(step, Clip) else step for step in encode)
    pace = wanted.pace if isinstance(plan.local, BatchGradient) else 1.0
    server = _server(plan.server, wanted.rounds, pace)
    return replace(plan, rounds=wanted.rounds, local=local, encode=encode, server=server).fitted()


def _longer(clip: Clip, factor: float) -> Clip:
    return replace(clip, clip_norm=scaled(clip.clip_norm, factor))


def _local(local: Any, wanted: Knobs) -> Any:
    """The local solver with the wanted steps, batch and pace."""
    changes: dict[str, Any] = {}
    if isinstance(local, LocalSgd):
        changes["epochs" if local.epochs is not None else "steps"] = wanted.steps
    if isinstance(local, NoisyLocalSgd):
        changes["steps"] = wanted.steps
    if wanted.batch is not None and not isinstance(local, LocalSgd):
        changes["records"] = replace(local.records, batch=wanted.batch)
    if hasattr(local, "lr"):
        changes["lr"] = scaled(local.lr, wanted.pace) if wanted.pace != 1.0 else local.lr
    return replace(local, **changes)


def _server(server: Any, rounds: int, pace: float) -> Any:
    """A step that falls over the rounds falls over the new ones; the step of a gradient follows the pace."""
    if not isinstance(server, Sgd | Adam):
        if getattr(server, "rounds", rounds) != rounds:
            raise PlanError("tuning", f"server {server.kind!r} with rounds of its own", "sgd, adam or accelerated")
        return replace(server, v=server.v / pace) if hasattr(server, "v") else server
    lr: float | Schedule = replace(server.lr, rounds=rounds) if isinstance(server.lr, Linear) else server.lr
    return replace(server, lr=scaled(lr, pace) if pace != 1.0 else lr)


FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
OnTried = Callable[[float, float, str], None]
PACES = (0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Tuned:
    """What is proposed for one epsilon, the curves it was chosen from, and what the search cost."""

    epsilon: float
    delta: float
    plan: Plan
    chosen: Knobs
    rule: str
    curves: dict[str, list[dict[str, float]]]
    cost: str
    silos: tuple[Budget, ...] = ()

    @property
    def entry(self) -> dict[str, Any]:
        """As plain data."""
        kept = {name: value for name, value in asdict(self.chosen).items() if value is not None}
        found = {"epsilon": self.epsilon, "delta": self.delta, "proposal": kept, "rule": self.rule}
        if self.silos:
            found["silos"] = [asdict(budget) for budget in self.silos]
        return {**found, "curves": self.curves, "privacy_cost": self.cost}


def tune(
    plan: Plan,
    task: Task,
    *,
    epsilon: float,
    delta: float,
    source: Source = "public",
    trials: int = 3,
    seed: int = 0,
    public: tuple[Declared, ...] | None = None,
    silos: tuple[Budget, ...] = (),
    on_tried: OnTried | None = None,
) -> Tuned:
    """The knobs with the least loss on stand-in data, each candidate at (epsilon, delta).

    `public` says which rows of the task are public and by whose word; default: by the caller's, who made the task.
    With budgets of the `silos` every candidate gives each silo the noise of its own budget; epsilon is then the worst.
    `on_tried` hears after every candidate how much work is done, how much there is in all, and what was tried.
    """
    if trials < 1:
        raise ConfigError(f"--trials {trials}", "at least 1")
    spent = cost(plan, task, source, declared_public(task) if public is None else public)
    data = [stand_in(plan, task, source, seed + trial) for trial in range(trials)]
    judge = _Judge(plan, data, epsilon, delta, silos)
    rule, first = by_rule(plan)
    curves: dict[str, list[dict[str, float]]] = {}
    best, sweeps, before = first, _sweeps(plan), 0.0
    for number, (name, candidates) in enumerate(sweeps):
        asked = list(candidates(best))
        rest = sum(_work(wanted) for _, later in sweeps[number + 1 :] for wanted in later(best))
        tried = _tried(judge, asked, before, rest, on_tried)
        before += sum(map(_work, asked))
        curves[name] = [{name: _value(wanted, name), "loss": loss} for loss, wanted in tried]
        best = min([(judge(best), best), *tried], key=lambda pair: pair[0])[1]
    if math.isinf(judge(best)):
        raise UnreachableError(
            "no candidate that fits the budget", f"epsilon above {upto(epsilon, 6)}", "raise epsilon"
        )
    return Tuned(epsilon, delta, judge.plan_of(best), best, rule, curves, spent, silos)


def _tried(
    judge: _Judge, candidates: list[Knobs], before: float, rest: float, told: OnTried | None
) -> list[tuple[float, Knobs]]:
    """The loss of every candidate, between the work `before` and the `rest`, which the best so far stands for."""
    found, done, total = [], before, before + sum(map(_work, candidates)) + rest
    for wanted in candidates:
        found.append((judge(wanted), wanted))
        done += _work(wanted)
        if told is not None:
            told(done, total, f"{_said(wanted)}: loss {found[-1][0]:.4g}")
    return found


def _work(wanted: Knobs) -> float:
    """How long a candidate takes, in some unit: rounds times local steps, and a little for its calibration."""
    return float(wanted.total + 1)


def _said(wanted: Knobs) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in asdict(wanted).items() if value is not None)


def by_rule(plan: Plan) -> tuple[str, Knobs]:
    """Where the papers' rules put the knobs, the total number of iterations given; the plan's own where none speaks."""
    now = knobs(plan)
    if isinstance(plan.release, LocalNoise) and plan.local.reads is None and now.steps is not None:
        name: Literal["laplace", "gaussian"] = "laplace" if isinstance(plan.release.mechanism, Laplace) else "gaussian"
        steps = local_steps(now.total, name)
        power = "2/3" if name == "laplace" else "1/2"
        return f"E = T^({power}) (paper 002)", replace(now, steps=steps, rounds=max(1, round(now.total / steps)))
    if plan.local.reads is not None and now.batch is not None:
        most = min(plan.local.reads.sizes)
        return "all records of the smallest silo (paper 001: the larger K, the less noise)", replace(now, batch=most)
    return "the plan's own", now


Candidates = Callable[[Knobs], Iterable[Knobs]]


def _sweeps(plan: Plan) -> list[tuple[str, Candidates]]:
    """One knob after the other; local steps at a constant total, rounds at constant steps."""
    now = knobs(plan)
    sweeps: list[tuple[str, Candidates]] = [("pace", _paces)]
    if now.steps is not None:
        sweeps.append(("steps", _steps))
    if now.batch is not None:
        sweeps.append(("batch", lambda best: _batches(plan, best)))
    return [*sweeps, ("rounds", _rounds), ("pace", _paces)]


def _paces(best: Knobs) -> list[Knobs]:
    return [replace(best, pace=best.pace * pace) for pace in PACES]


def _steps(best: Knobs) -> list[Knobs]:
    wanted = sorted({max(1, round((best.steps or 1) * factor)) for factor in FACTORS} | {1})
    return [replace(best, steps=e, rounds=max(1, round(best.total / e))) for e in wanted if e <= best.total]


def _rounds(best: Knobs) -> list[Knobs]:
    return [replace(best, rounds=n) for n in sorted({max(1, round(best.rounds * factor)) for factor in FACTORS})]


def _batches(plan: Plan, best: Knobs) -> list[Knobs]:
    reads = plan.local.reads
    most = min(reads.sizes) if reads is not None else 1
    return [replace(best, batch=b) for b in sorted({max(1, round(most * share)) for share in (0.05, 0.2, 0.5, 1.0)})]


def _value(wanted: Knobs, name: str) -> float:
    return float(getattr(wanted, name))


class _Judge:
    """Loss of a candidate on the stand-in tasks; infinite for one that is refused or cannot meet the budget."""

    def __init__(
        self, plan: Plan, data: list[Task], epsilon: float, delta: float, silos: tuple[Budget, ...] = ()
    ) -> None:
        self.plan, self.data, self.epsilon, self.delta, self.silos = plan, data, epsilon, delta, silos
        self.known: dict[Knobs, float] = {}

    def plan_of(self, wanted: Knobs) -> Plan:
        """The candidate, calibrated: to one epsilon, or every silo to its own."""
        if self.silos:
            return calibrate_silos(turned(self.plan, wanted), self.silos)
        return calibrate(turned(self.plan, wanted), epsilon=self.epsilon, delta=self.delta)

    def __call__(self, wanted: Knobs) -> float:
        if wanted not in self.known:
            self.known[wanted] = self._loss(wanted)
        return self.known[wanted]

    def _loss(self, wanted: Knobs) -> float:
        try:
            plan = self.plan_of(wanted)
        except (PlanError, UnreachableError):
            return math.inf
        found = mean(_last_loss(plan, task, seed) for seed, task in enumerate(self.data))
        return found if math.isfinite(found) else math.inf


def _last_loss(plan: Plan, task: Task, seed: int) -> float:
    *_, last = run(plan, task, streams=Seeded(seed), eval_every=plan.rounds)
    return last.metrics["loss"]
