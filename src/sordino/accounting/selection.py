"""Cost of private hyperparameter selection: the best of many private runs alone is released (`sordino tune --private`).

A trial is: draw a candidate by public chances, run it, score its release on public rows. All trials have one cost, so
whichever candidate is drawn, one is as private as the next; their number is random and secret. Then the best of them,
with its candidate and score, costs `Tuned` of that cost (`trials`: Papernot, Steinke 2022).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sordino.accounting.composition import Cost, Line
from sordino.accounting.events import Tuned
from sordino.accounting.trials import Trials
from sordino.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How a run came to be the one that is shown: `over` which keys, `by` what; `id` is its name in a ledger."""

    id: str
    trials: Trials
    over: tuple[str, ...]
    by: str

    @property
    def assumed(self) -> list[str]:
        """What must hold for the cost."""
        return [
            f"this run is the best, by {self.by}, of a random number of trials ({self.trials.law.replace('_', ' ')}, "
            f"{self.trials.mean:g} on average) over {', '.join(self.over)}, each with the same cost",
            "how many trials there were, how long they took, and every trial but this one stayed secret",
        ]


def cost_of_best(cost: Cost, selection: Selection | None) -> Cost:
    """The cost of one trial as that of the best; no selection: as it is."""
    return cost if selection is None else replace(cost, lines=tuple(_line(one, selection.trials) for one in cost.lines))


def _line(line: Line, trials: Trials) -> Line:
    entries = tuple((event, count) for event, count in line.entries if count)
    if not entries or not all(event.protects for event, _ in entries):
        return line
    if len(entries) > 1:
        found = f"a trial of {len(entries)} kinds of events"
        raise PlanError("tuning", found, "one kind of event", "tune on public data: sordino tune without --private")
    ((event, count),) = entries
    return replace(line, entries=((Tuned(event, count, trials), 1),))
