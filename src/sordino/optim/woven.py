"""What the noise of a loop remembers, where steps share it: how many steps it was drawn for, and the vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from sordino.errors import ConfigError, PlanError
from sordino.parts.release import Release

ALL = np.zeros(1, dtype=np.int64)  # the one holder of the data


class Memory:
    """The release of a loop with its state. Secret: whoever holds it can take the noise off later steps.

    One step, one draw: where the count of charged steps and that of draws differ (a step that failed half-way, a
    checkpoint of another time), the noise of a step would not be that of the bill, and no step is taken.
    """

    def __init__(self, release: Release, length: int) -> None:
        self.release, self.drawn = release, 0
        self.held: dict[str, Tensor] = release.init(length)

    def noised(self, total: Tensor, t: int, coins: Callable[[str], np.random.Generator]) -> Tensor:
        """The total of step t with its noise."""
        if self.release.joint and self.drawn != t:
            raise PlanError(
                "correlated noise",
                f"step {t + 1} where noise was drawn for {self.drawn}",
                "the noise of every step that was charged",
                "load the last checkpoint into a new run",
            )
        self.drawn = t + 1
        noised, self.held = self.release.noised(total, ALL, coins, self.held)
        return noised

    def state(self) -> dict[str, Any]:
        """For a checkpoint; later steps do not write into it."""
        if not self.release.joint:
            return {}
        return {"secret": {"drawn": self.drawn, **{name: held.clone() for name, held in self.held.items()}}}

    def check(self, kept: dict[str, Any], steps: int) -> None:
        """Refuse a checkpoint whose noise is not that of the steps that will be billed."""
        if not self.release.joint:
            return
        if _kinds(kept) != _kinds(self.held) or kept.get("drawn") != steps:
            found = f"noise of {kept.get('drawn', 'no')} steps in a checkpoint, and {steps} steps that were charged"
            fix = "load the newest checkpoint into a new run: correlated noise cannot go back to an older one"
            raise ConfigError(found, "the noise of all of them", fix)

    def load(self, kept: dict[str, Any]) -> None:
        """Go on from the noise state of a checkpoint that was checked."""
        if self.release.joint:
            self.drawn = int(kept["drawn"])
            self.held = {name: held.clone() for name, held in kept.items() if name != "drawn"}


def _kinds(held: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Names, parameters and dtype of each; how many vectors there are may change from step to step."""
    return {
        name: (part.shape[-1] if part.dim() else 0, str(part.dtype)) for name, part in held.items() if name != "drawn"
    }
