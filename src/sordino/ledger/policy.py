"""Data-use policy of a silo: a TOML file that states which plans may use the data. Read by silos and `sordino`.

```toml
dataset = "cleveland"
epsilon = 4.0
delta = 1e-4
unit = "record"
releases = ["local_noise"]
expires = "2027-06-30"
```
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sordino import codec
from sordino.accounting.bounds import Protected
from sordino.accounting.composition import Adversary
from sordino.accounting.events import Event, Relation
from sordino.errors import ConfigError, brief_repr
from sordino.graph import GRADES, Grade
from sordino.ledger.totals import Limit
from sordino.parts.releases import Release
from sordino.rng import Mode

if TYPE_CHECKING:
    from sordino.plan import Plan

EXAMPLE = "docs/silos.md#a-silos-own-policy has an example"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Data-use policy of a silo: which plans may use its data, and the privacy limit over all runs.

    Runs are charged their cost against `adversary`: "cohort" sees models and who takes part, "models" sees only models
    (this relies on secret sampling by the server), "messages" sees every message. `models` and `plans` list allowed
    SHA-256 hashes; an empty list allows all. `own_code` lists the results of the code check (`sordino.graph`) with
    which user code may run.
    """

    dataset: str
    epsilon: float
    delta: float
    unit: Protected
    releases: tuple[str, ...]
    relation: Relation = "replace_one"
    adversary: Adversary = "cohort"
    noise: tuple[Mode, ...] = ("secure",)
    least_noise_multiplier: float = 0.0
    least_cohort: float = 0.0
    models: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    own_code: tuple[Grade, ...] = ("by construction", "per record (vmap)")
    expires: str | None = None
    purpose: str = ""  # for people, and for `sordino dpia`: what the data are used for
    retention: str = ""  # likewise: how long data and models are kept

    def __post_init__(self) -> None:
        lists: dict[str, tuple[Sequence[str], list[str]]] = {
            "releases": (self.releases, sorted(Release.members)),
            "noise": (self.noise, list(get_args(Mode))),
            "own_code": (self.own_code, list(GRADES)),
        }
        for name, (given, known) in lists.items():
            wrong = next((one for one in given if one not in known), None)
            if wrong is not None or not given:
                fix = codec.nearest(str(wrong), known) if given else f"choose among {', '.join(known)}"
                found = f"{name} = {brief_repr(list(given))} in a policy"
                raise ConfigError(found, f"a list of known values for {name}, at least one", fix)
        for name in ("least_noise_multiplier", "least_cohort"):
            if not 0 <= getattr(self, name) < math.inf:
                found = f"{name} = {brief_repr(getattr(self, name))} in a policy"
                raise ConfigError(found, "a finite number, 0 or above", f"correct {name}, or leave it out")
        for digest in (*self.models, *self.plans):
            if len(digest) != 64 or not set(digest) <= set(string.hexdigits.lower()):
                found = f"the hash {brief_repr(digest)} in a policy"
                raise ConfigError(found, "64 lower-case hexadecimal digits", "copy the hash that `sha256sum` prints")
        self.limit  # noqa: B018  (refuses an invalid epsilon or delta)
        self._expiry()

    @property
    def limit(self) -> Limit:
        """Privacy limit over all runs, for the silo's ledger."""
        return Limit(self.epsilon, self.delta, self.unit, self.relation)

    def _expiry(self) -> date:
        try:
            return date.max if self.expires is None else date.fromisoformat(self.expires)
        except ValueError:
            found = f"expires = {brief_repr(self.expires)} in a policy"
            raise ConfigError(found, "a date in ISO 8601", 'write it like "2027-01-31"') from None

    def check(
        self, plan: Plan, *, noise: Mode, silo: int = 0, model: str = "", today: date | None = None,
        own_code: Grade = "by construction", persons: bool = False,
    ) -> str | None:  # fmt: skip
        """Return why a plan may not use the data, in one sentence; None if it may. The ledger checks the budget.

        `silo` is this silo's index in the plan, `model` the hash of the run's model, and `own_code` the result of the
        check of the user code that runs on this silo's records. With `persons`, each record has all rows of one person.
        """
        unit: Protected = "user" if persons and plan.unit == "record" else plan.unit
        asked = (
            (self._expiry() >= (today or date.today()), f"the policy has expired on {self.expires}"),
            (not self.plans or plan.hash in self.plans, f"the plan {plan.hash[:12]} is not among those allowed"),
            (not self.models or model in self.models, f"the model {model[:12] or '(none)'} is not among those allowed"),
            (unit == self.unit, f"the plan protects one {unit}, and the policy requires one {self.unit}"),
            (plan.release.kind in self.releases, f"the release {plan.release.kind!r} is not allowed"),
            (own_code in self.own_code, f"user code that is {own_code!r} is not allowed"),
            (noise in self.noise, f"noise of mode {noise!r} is not allowed"),
            (
                plan.local.reads is None or plan.local.reads.pass_rounds == 1,
                "silos keep no allocation of records by pass",
            ),
            (not plan.prepare, "the plan releases histograms before round 1, which silos do not support"),
            (0 <= silo < plan.clients.population, f"the plan has no silo {silo}"),
        )
        refused = next((reason for good, reason in asked if not good), None)
        if refused is not None:
            return refused
        line = plan.forecast.line(self.adversary, silo)
        noise_multiplier, least = min(noise_of(event) for event, _ in line.entries), self.least_noise_multiplier
        if noise_multiplier < least:
            return f"the noise multiplier is {noise_multiplier:g}, and the least allowed is {least:g}"
        cohort = getattr(plan.release, "at_least", plan.clients.expected)
        if cohort < self.least_cohort:
            return f"a round may have {cohort:g} clients, and the least allowed is {self.least_cohort:g}"
        return self.limit.mismatch(unit, line.relation)


def noise_of(event: Event) -> float:
    """Return the noise multiplier of an event, or of the event that it samples or shuffles; 0 if it has none."""
    inner: Any = event
    while hasattr(inner, "event"):
        inner = inner.event
    return float(getattr(inner, "noise_multiplier", 0.0))


def load(path: Path) -> Policy:
    table = codec.read_toml(path, EXAMPLE)
    codec.check_plain(table)
    codec.load_plugins()
    found: Policy = codec.read(Policy, table)
    return found
