"""What can be turned in a plan: local steps or epochs, rounds, records per batch, and the step size as a factor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sordino.errors import PlanError
from sordino.parts.encode import Clip
from sordino.parts.gradients import Bounded
from sordino.parts.local import LocalSgd
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.records import FixedRecords, OnePass, PoissonRecords
from sordino.parts.schedules import Linear, Schedule, scaled
from sordino.parts.server import Adam, Sgd
from sordino.plan import Plan


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
    return replace(plan, rounds=wanted.rounds, local=local, encode=encode, server=server)


def _longer(clip: Clip, factor: float) -> Clip:
    return replace(clip, radius=scaled(clip.radius, factor))


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
