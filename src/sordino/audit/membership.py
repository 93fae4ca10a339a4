"""Loss-threshold membership inference: is a record whose loss is low a training record? (paper 000, Figure 7)"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.data.clients import Records
from sordino.errors import DataError
from sordino.rng import Seeded
from sordino.task import Task

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MembershipAudit:
    """How well the attack told members from strangers: guessing has AUC 0.5 and equal rates."""

    members: int
    strangers: int
    auc: float
    true_positives: dict[str, float]  # at false-positive rates 0.001 and 0.01


def audit_membership(model: nn.Module, task: Task, *, most: int = 20_000, seed: int = 0) -> MembershipAudit:
    """Attack `model` with the clients' records as members and the test records as strangers."""
    strangers = task.test
    if strangers is None or not len(strangers):
        raise DataError("a task without test records", "records that were not trained on")
    rng, task = Seeded(seed).at(0, "membership"), task if model is task.model else replace(task, model=model)
    inside = _losses(task, _some(task.clients.records, task.clients.index, most, rng))
    outside = _losses(task, _some(strangers, np.arange(len(strangers)), most, rng))
    rates = {str(at): true_positive_rate(inside, outside, at) for at in (0.001, 0.01)}
    return MembershipAudit(len(inside), len(outside), auc(inside, outside), rates)


def auc(inside: Floats, outside: Floats) -> float:
    """P[loss of a member < loss of a stranger], ties half: the area under the attack's ROC curve."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([inside, outside]))
    n, m = len(inside), len(outside)
    wins = ranks[n:].sum() - m * (m + 1) / 2
    return float(wins / (n * m))


def true_positive_rate(inside: Floats, outside: Floats, at: float) -> float:
    """Share of members found when at most a share `at` of strangers is accused."""
    allowed = int(np.floor(at * len(outside)))
    threshold = np.sort(outside)[allowed] if allowed < len(outside) else np.inf
    return float(np.mean(inside < threshold))


def _some(records: Records, index: NDArray[np.int64], most: int, rng: np.random.Generator) -> Records:
    chosen = index if len(index) <= most else rng.choice(index, most, replace=False)
    where = torch.from_numpy(np.sort(chosen))
    return Records(records.x[where], records.y[where])


def _losses(task: Task, records: Records) -> Floats:
    """By the task's graphs: an attack shows no record to code of the user's own either."""
    model, losses = task.program.running().eval(), task.program.losses
    with torch.no_grad():
        pairs = zip(torch.split(records.x, 2048), torch.split(records.y, 2048), strict=True)
        parts: list[Tensor] = [losses(model(x), y) for x, y in pairs]
    return torch.cat(parts).double().numpy()
