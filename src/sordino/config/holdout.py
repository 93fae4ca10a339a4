"""Two parts of the public test rows: one chooses settings, the other reports what the choice is worth.

A figure of rows that had a part in choosing is too good: the best of many looks better than it is. So a search sees
`validation` alone, and the winner is reported on `test`. Who is in which part follows from a public seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from sordino.data.clients import Records
from sordino.errors import ConfigError, DataError
from sordino.rng import Seeded
from sordino.task import Task

Part = Literal["validation", "test"]
LEAST = 2  # rows of a part


@dataclass(frozen=True)
class HoldoutPart:
    """Which part of the test rows a run is judged by; `share` of them are validation."""

    part: Part
    seed: int = 0
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"share = {self.share:g} of the test rows", "a share in (0, 1)", "0.5 cuts them in half")

    def rows(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The places of this part among so many rows, in their order."""
        order = Seeded(self.seed).at(0, "halves of the test rows").permutation(count)
        cut = round(self.share * count)
        return np.sort(order[:cut] if self.part == "validation" else order[cut:]).astype(np.int64)

    def of(self, task: Task) -> Task:
        """The task, judged by the rows of this part."""
        test, groups = task.test, task.groups
        if test is None:
            fix = "name them in [task] options: test = ..., or public_test_fraction = 0.2"
            raise DataError("no row that is declared public", "rows to choose by and rows to report on", fix)
        rows = self.rows(len(test))
        if min(len(rows), len(test) - len(rows)) < LEAST:
            raise DataError(f"{len(test)} public rows, cut in two", f"at least {LEAST} in each part")
        place = torch.from_numpy(rows)
        mine = Records(test.x[place], test.y[place])
        return replace(task, test=mine, groups=None if groups is None else groups[place])

    @property
    def words(self) -> str:
        """Which rows these are."""
        return f"the {self.part} part, share {self.share:g}, public seed {self.seed}"
