"""The bill of a loop: steps are counted before their noise is drawn, and the count only grows."""

from __future__ import annotations

import os
import uuid
from functools import cached_property
from typing import Any

from sordino import codec
from sordino.errors import BudgetError, ConfigError
from sordino.optim.settings import Settings, differing
from sordino.privacy import accounting
from sordino.privacy.certificate import line_entry, not_covered
from sordino.version import __version__


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
            target = f"epsilon {self.settings.epsilon:g} at delta {self.settings.delta:.3g}"
            raise BudgetError(
                f"step {number + 1} would overspend {target}, worth {self.most} steps; the step was not taken"
            )
        if self.process != os.getpid():
            self._rename()
        self.taken[self.own] += 1
        return number

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to continue the bill."""
        return {"settings": codec.dump(self.settings), "taken": dict(self.taken)}

    def load(self, state: Any) -> None:
        """Continue the bill of a checkpoint of the same settings."""
        if not isinstance(state, dict) or "taken" not in state:
            raise ConfigError(
                "a state without the steps that were charged", "one that a private optimizer saved", "start a new run"
            )
        other = differing(self.settings, state.get("settings"))
        if other:
            raise ConfigError(f"a checkpoint with {other}", "the settings it was saved with", "make_private with those")
        for name, count in state["taken"].items():
            self.taken[name] = max(self.taken.get(name, 0), int(count))

    def certificate(self) -> dict[str, Any]:
        """The certificate: epsilon of all planned steps, for stopping looks at data, or of those taken if more."""
        settings, steps = self.settings, self.steps
        billed = max(settings.steps, steps)
        main = line_entry(settings.line(billed), settings.delta)
        so_far = line_entry(settings.line(steps), settings.delta)["epsilon"] if steps else 0.0
        return {
            "format": 1,
            "epsilon": main["epsilon"],
            "epsilon_so_far": so_far,
            "delta": settings.delta,
            "unit": "record",
            "relation": settings.records.relation,
            "events": main["events"],
            "epsilon_rdp": main["epsilon_rdp"],
            "accountant": {"library": accounting.VERSION, "method": main["method"], "grid": main["grid"]},
            "adversary": "sees every model and every noised gradient, and not which records were drawn",
            "sampler": {**codec.dump(settings.records), "rate": settings.records.rate(0)},
            "clip": {
                "scope": "one norm over the gradient of each single record",
                "radius": settings.clip,
                "norm": settings.mechanism.norm,
            },
            "denominator": settings.records.count,
            "multiplier": settings.mechanism.multiplier,
            "smoothing": settings.smoothing.strength,
            "noise": {"mode": settings.noise, "note": _NOTES[settings.noise]},
            "loss": {"reduction": settings.reduction, "check": _LOSS},
            "counts": {"steps_planned": settings.steps, "steps_taken": steps, "steps_billed": billed},
            "assumptions": _assumptions(settings),
            "not_covered": [*not_covered(), "losses and accuracies on the training records, where a loop prints them"],
            "settings_sha256": codec.digest(settings),
            "sordino": __version__,
        }


_NOTES = {
    "simulation": "fast repeatable generator: for experiments, not for release",
    "secure": "AES counter generator keyed by the operating system, double precision, sum rounded to a public grid",
}
_LOSS = "in the first batches and in some later ones its gradient is that of a known loss; any other stops the run"


def _assumptions(settings: Settings) -> list[str]:
    """What must hold outside this program for the numbers to be true."""
    return [
        "one record is one entry of the data set; a person with several entries counts several times",
        f"the number of records, {settings.records.size(0)}, the settings and the test data are public",
        "which records were drawn, and how many, stays secret",
        "the data set gives every record by itself, and the loop trains on the batches as the loader gives them",
        "no checkpoint was continued in two places; if one was, every copy has to be billed",
        "epsilon_so_far holds only if the run did not stop for a reason that it read off the data",
        f"the loss is the {settings.reduction} over the records of a batch, each with a term of its own",
    ]
