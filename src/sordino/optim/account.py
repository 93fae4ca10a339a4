"""The bill of a loop: steps are counted before their noise is drawn, and the count only grows."""

from __future__ import annotations

import os
import uuid
from functools import cached_property
from typing import Any

from sordino import codec
from sordino.errors import BudgetError, ConfigError
from sordino.optim.settings import Settings, differing
from sordino.privacy.facts import Facts, Loop
from sordino.privacy.rounding import upto
from sordino.version import versions


class Account:
    """Steps charged so far, by the process that charged them.

    Loading a checkpoint takes the larger count for every process, so neither going back to an older checkpoint nor
    joining two that grew apart makes a release disappear. A copy of an account (deepcopy, pickle, fork) counts what
    it charges under a name of its own: two copies that are joined are billed for the steps of both.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.taken: dict[str, int] = {}
        self._rename()

    def _rename(self) -> None:
        """From here on charge under a new name, in this process."""
        self.own, self.process = uuid.uuid4().hex, os.getpid()
        self.taken[self.own] = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, taken=dict(state["taken"]))
        self._rename()

    @property
    def steps(self) -> int:
        """How many noised steps were charged."""
        return sum(self.taken.values())

    @cached_property
    def most(self) -> float:
        """The most steps that the target allows; asked only once the planned ones are gone."""
        return self.settings.most()

    def charge(self) -> int:
        """Count one step, before its noise exists; its number."""
        number = self.steps
        if number >= self.settings.steps and number >= self.most:
            raise BudgetError(f"step {number + 1} {self._limit()}; the step was not taken")
        if self.process != os.getpid():
            self._rename()
        self.taken[self.own] += 1
        return number

    def _limit(self) -> str:
        if self.settings.plan.release.joint:
            return f"of a loop whose noise was made for {self.settings.steps}: later ones have none to share"
        target = f"epsilon {upto(self.settings.epsilon, 6)} at delta {upto(self.settings.delta)}"
        return f"would overspend {target}, worth {self.most} steps"

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to continue the bill."""
        return {"settings": codec.dump(self.settings), "taken": dict(self.taken)}

    def joined(self, state: Any) -> dict[str, int]:
        """The counts of this account and of a checkpoint of the same settings, the larger of each process's."""
        if not isinstance(state, dict) or "taken" not in state:
            raise ConfigError(
                "a state without the steps that were charged", "one that a private optimizer saved", "start a new run"
            )
        other = differing(self.settings, state.get("settings"))
        if other:
            raise ConfigError(f"a checkpoint with {other}", "the settings it was saved with", "make_private with those")
        found = dict(self.taken)
        for name, count in state["taken"].items():
            found[name] = max(found.get(name, 0), int(count))
        return found

    def load(self, state: Any) -> None:
        """Continue the bill of a checkpoint."""
        self.taken = self.joined(state)

    def facts(self, loop: Loop) -> Facts:
        """What a certificate needs beside the plan."""
        return Facts(self.settings.delta, self.settings.noise, self.steps, loop=loop, environment=(versions(),))
