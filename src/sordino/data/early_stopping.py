"""Early stopping by public metrics of released models. It saves time, not epsilon. Called by the run loop.

The rule reads released models and public rows alone, so a stopped run is a function of the run of all planned rounds:
the cost of all planned rounds covers it. The cost of the rounds that ran would not: the moment of stopping depends on
the data through the models, and could be chosen where much was learnt.
tests/contracts/test_early_stopping.py has a rule under which that smaller cost is false.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sordino.codec import nearest
from sordino.data.metrics import LOWER
from sordino.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End a run after `patience` evaluations without an improvement of `metric` by at least `margin`.

    `lower`: smaller is better; by default for loss, rmse and mae. All planned rounds are charged.
    """

    metric: str = "loss"
    patience: int = 5
    margin: float = 0.0
    lower: bool | None = None

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"patience = {self.patience} of early stopping", "at least one evaluation")
        if not 0 <= self.margin < float("inf"):
            raise ConfigError(f"margin = {self.margin} of early stopping", "0 or more")

    @property
    def falls(self) -> bool:
        """Whether less is better."""
        return self.metric in LOWER if self.lower is None else self.lower

    def ends(self, history: Iterable[Mapping[str, Any]]) -> int | None:
        """The round after which the rule ends a run with this history; None: it does not."""
        best, since = float("inf"), 0
        for line in history:
            if self.metric not in line:
                continue
            found = float(line[self.metric]) * (1 if self.falls else -1)
            since = 0 if found < best - self.margin else since + 1
            best = min(best, found)
            if since >= self.patience:
                return int(line["round"])
        return None

    def check(self, figures: Mapping[str, Any]) -> None:
        """Refuse a metric that no evaluation computes, and a run without public rows."""
        if not figures:
            found = f"early stopping on {self.metric!r}, and no row that is declared public"
            raise ConfigError(found, "public test rows: a metric of private ones costs epsilon", "give test rows")
        self.check_name(list(figures))

    def check_name(self, known: Sequence[str]) -> None:
        """Refuse a metric that is not among the known ones."""
        if self.metric not in known:
            found = f"early stopping on {self.metric!r}"
            raise ConfigError(found, "one of " + ", ".join(sorted(known)), nearest(self.metric, list(known)))

    @property
    def words(self) -> str:
        """The sentence of a certificate on an early end."""
        return (
            f"early stopping on public rows: {self.metric} was not better in {self.patience} evaluations; all planned "
            "rounds are accounted, for when to stop was read off released models"
        )
