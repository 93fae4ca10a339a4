"""The sections [privacy], [run] and [federation]."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sordino.data.metrics import Metric
from sordino.data.stopping import EarlyStopping
from sordino.errors import ConfigError
from sordino.privacy.selection import Selection
from sordino.rng import Mode


@dataclass(frozen=True)
class SiloBudget:
    """What one silo may spend; delta defaults to the file's, else to min(size^-1.1, 1e-3) of the silo."""

    epsilon: float
    delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrivacySpec:
    """delta (default min(population^-1.1, 1e-3)), where the noise comes from, and what one client may spend at most.

    `client_epsilon` stops the run before a round in which somebody would spend more, to one who sees the cohort.
    `silos` gives every silo its own budget and delta, by name, or in order where silos have no names; a round that
    would cost one more is not run. `ledger` is a file that all runs on the same data are charged to, before the first
    round; `dataset` is the name that the data have in it. `selected` is what `sordino tune --private` writes: the run
    is the best of many, and is billed so.
    """

    delta: float | None = None
    allow_large_delta: bool = False
    noise: Mode = "simulation"
    client_epsilon: float | None = None
    silos: tuple[SiloBudget, ...] = ()
    ledger: str | None = None
    dataset: str | None = None
    selected: Selection | None = None
    deltas: tuple[float, ...] = ()  # one for every silo, in the plan's order

    def __post_init__(self) -> None:
        if (self.ledger is None) != (self.dataset is None):
            found, lacks = ("ledger", "dataset") if self.dataset is None else ("dataset", "ledger")
            raise ConfigError(f"{found} without {lacks} in [privacy]", "both or neither", f"add {lacks} = ...")
        if self.selected is not None and (self.silos or self.client_epsilon is not None):
            raise ConfigError("the best of many tries under a budget in [privacy]", "tries that end by themselves")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What does not change the guarantee. `coins` seeds a simulation's cohorts, batches and noise; default: `seed`."""

    seed: int = 0
    coins: int | None = None
    eval_every: int = 1
    train_metrics: bool | None = None  # evaluate on the clients' own records too: a diagnostic, NOT private
    metrics: tuple[Metric, ...] = ()  # of the test records, beside loss and accuracy
    stop: EarlyStopping | None = None  # end early by public figures; all planned rounds are billed

    def __post_init__(self) -> None:
        for name, number in (("seed", self.seed), ("coins", self.coins or 0)):
            if not -(2**63) <= number < 2**63:
                raise ConfigError(f"{name} = {number}", "a whole number of at most 64 bits")
        if self.eval_every < 1:
            raise ConfigError(f"eval_every = {self.eval_every}", "at least 1", "1 evaluates after every round")


@dataclass(frozen=True, kw_only=True)
class FederationSpec:
    """Who takes part over a network; nothing of it changes the guarantee.

    `silos` are the names under which nodes are registered, in the order in which the plan counts its clients. A round
    of fewer than `quorum` reports (default: all that it asks) is asked again, `tries` times in all, each `timeout`
    seconds long. The server has no records: `inputs` and `classes` say what the model reads and tells apart (0: a
    number), and `test` names a file of public rows (.npz with x and y), if there is one.
    """

    silos: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    classes: int = 2
    test: str | None = None
    quorum: int | None = None
    timeout: float = 60.0
    tries: int = 3
    port: int = 8000

    def __post_init__(self) -> None:
        wrong = next((name for name in self.silos if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name)), None)
        if wrong is not None:
            raise ConfigError(f"silo {wrong!r} in [federation]", "letters, digits, - and _, at most 64 of them")
        if len(set(self.silos)) != len(self.silos) or not self.silos:
            raise ConfigError(f"[federation] silos = {list(self.silos)}", "at least one name, and each once")
        if self.tries < 1 or not 0 < self.timeout < math.inf or not 0 < self.port < 2**16:
            found = f"[federation] tries = {self.tries}, timeout = {self.timeout:g}, port = {self.port}"
            raise ConfigError(found, "at least one try, seconds above 0, a port below 65536")
        if self.quorum is not None and not 1 <= self.quorum <= len(self.silos):
            raise ConfigError(
                f"[federation] quorum = {self.quorum} of {len(self.silos)} silos", "from 1 to all of them"
            )
