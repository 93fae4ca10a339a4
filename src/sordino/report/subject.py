"""One run as a report sees it: what was certified, and what its folder or its file holds beside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sordino import codec
from sordino.certificate.facts import Facts
from sordino.data.metrics import ONLY_CLASS
from sordino.outcome import DIAGNOSTIC, last_figures
from sordino.parts.samplers import Cohort
from sordino.plan import Plan, State
from sordino.report.text_table import is_number

MAIN = ("accuracy", "balanced_accuracy", "rmse", "loss")  # known by, where none was asked for
UNASKED = ("loss", "accuracy", "balanced_accuracy", "rmse", ONLY_CLASS)  # what every evaluation gives


@codec.hides_values
@dataclass(frozen=True)
class Last:
    """The states before and after the last round, and the tensors that the model was saved as, by name."""

    before: State
    after: State
    model: dict[str, Tensor]

    def shapes(self, result: Tensor) -> list[torch.Size] | None:
        """Of the tensors, in the order in which they lie in the vector `result`; None if it is not made of them.

        A file of tensors keeps names and no order: each is found by its values.
        """
        found: list[torch.Size] = []
        left, start = dict(self.model), 0
        while start < len(result):
            name = next((name for name, one in left.items() if _begins(result[start:], one)), None)
            if name is None:
                return None
            found.append(left[name].shape)
            start += left.pop(name).numel()
        return found


def _begins(vector: Tensor, one: Tensor) -> bool:
    flat = one.reshape(-1)
    if not (one.is_floating_point() and 0 < len(flat) <= len(vector)):
        return False
    return torch.equal(vector[: len(flat)].to(flat.dtype), flat)


@codec.hides_values
@dataclass(frozen=True)
class Subject:
    """A certified run. A loop of PyTorch has a certificate, a plan and facts, and nothing else of this."""

    name: str
    certificate: dict[str, Any]
    plan: Plan
    facts: Facts
    history: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)  # that were charged, from 0; one that ran again stands twice
    cohorts: list[Cohort] = field(default_factory=list)  # of each of them, where that is public or seen by design
    settings: dict[str, Any] = field(default_factory=dict)  # plan.toml
    audit: dict[str, Any] = field(default_factory=dict)  # audit.json, by layer
    last: Last | None = None

    @property
    def is_loop(self) -> bool:
        return self.certificate["loop"] is not None

    @property
    def evaluated(self) -> dict[str, float]:
        """The figures of the last round that was evaluated, all of that round; empty: none was."""
        return last_figures(self.history) or {}

    @property
    def evaluated_after(self) -> int | None:
        """Which round that was."""
        lines = (line["round"] for line in reversed(self.history) if last_figures([line]))
        return next(lines, None)

    @property
    def asked_metrics(self) -> list[str]:
        """The metrics of the last evaluation that somebody asked for, in their order; the others come unasked."""
        asked = self.settings.get("run", {}).get("metrics", [])
        kinds = [one.get("name", one["kind"]) if isinstance(one, dict) else str(one) for one in asked]
        named = ["worst_group" if kind == "group_accuracy" else kind for kind in kinds]
        own = [name for name in self.evaluated if name not in UNASKED and "/" not in name]
        return [name for name in dict.fromkeys((*named, *own)) if name in self.evaluated]

    @property
    def main_metric(self) -> str | None:
        """The figure that a run is known by: the first that was asked for, else the usual one."""
        return next((name for name in (*self.asked_metrics, *MAIN, *self.evaluated) if name in self.evaluated), None)

    @property
    def metrics(self) -> dict[str, dict[str, list[float]]]:
        """Every public figure of the history that is a quantity: in which rounds, and what it was."""
        found: dict[str, dict[str, list[float]]] = {}
        for line in self.history:
            for name, value in line.items():
                if name not in ("round", "void", ONLY_CLASS, DIAGNOSTIC) and is_number(value):
                    series = found.setdefault(name, {"round": [], "value": []})
                    series["round"].append(line["round"])
                    series["value"].append(float(value))
        return found

    def diagnostic(self, name: str) -> dict[str, list[float]]:
        """A figure of unreleased data: NOT private, and never there but in a simulation."""
        lines = [(line["round"], line.get(DIAGNOSTIC, {}).get(name)) for line in self.history]
        kept = [(t, float(value)) for t, value in lines if is_number(value)]
        return {"round": [t for t, _ in kept], "value": [value for _, value in kept]}
