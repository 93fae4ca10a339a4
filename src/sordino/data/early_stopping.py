"""Stop a run early, by public figures of its released models. It saves time, not epsilon.

The rule reads models and public rows and nothing else, so a run that it may stop is a function of one that goes to its
end: that one's bill, of all planned rounds, covers it. The bill of the rounds that ran would not: when to stop was read
off models that depend on the data, and whoever chooses the moment can choose one at which much was learnt.
tests/contracts/test_early_stopping.py shows a rule under which that smaller bill is false.
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
    """End after `patience` evaluations in which `metric` was not better than ever before, by at least `margin`.

    `lower` says that the smaller figure is the better one; by default so of loss, rmse and mae. All planned rounds are
    billed.
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
        """The round after which the run was over, by its public figures alone; None: it was not."""
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
        """Refuse a figure that nobody computes, and a run without public rows to compute it of."""
        if not figures:
            found = f"early stopping on {self.metric!r}, and no row that is declared public"
            raise ConfigError(found, "public test rows: private ones would have to be paid for", "give test rows")
        self.check_name(list(figures))

    def check_name(self, known: Sequence[str]) -> None:
        """Refuse a name that is not among those that an evaluation gives."""
        if self.metric not in known:
            found = f"early stopping on {self.metric!r}"
            raise ConfigError(found, "one of " + ", ".join(sorted(known)), nearest(self.metric, list(known)))

    @property
    def words(self) -> str:
        """What ended the run, for a certificate."""
        return (
            f"early stopping on public rows: {self.metric} was not better in {self.patience} evaluations; all planned "
            "rounds are billed, for when to stop was read off released models"
        )
