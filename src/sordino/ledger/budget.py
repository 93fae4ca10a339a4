"""Budgets per client: a filter that refuses the round in which a client would exceed its budget. The loop calls it.

Each participation is one release without amplification (whoever meters it sees who takes part), so a budget is worth a
fixed number of rounds: the most for which accounting proves (epsilon, delta). Counting against a fixed number is safe
even when later cohorts depend on earlier releases: the k-fold composition is what was proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sordino.accounting import calibration
from sordino.accounting.bounds import AlreadyPrivate
from sordino.accounting.calibration import Budget
from sordino.accounting.composition import Cost, Line, Participation, reads_of, record_patterns, with_preparations
from sordino.errors import BudgetError, PlanError, UnreachableError
from sordino.ledger.charges import ClientCharges
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.samplers import Cohort

if TYPE_CHECKING:
    from sordino.plan import Plan


@dataclass(frozen=True)
class Filter:
    """Privacy filter: `allowed` and `spent` rounds of every client.

    Where the batches of an epoch are disjoint, releases of one record are counted: a round costs for the epochs that it
    begins, or, if it is run again, for all that it touches.
    """

    allowed: NDArray[np.int64]
    spent: NDArray[np.int64] = field(repr=False)
    epochs: Epochs | None = field(default=None, repr=False)
    # of clients that are charged to ledgers of their own
    elsewhere: ClientCharges | None = field(default=None, repr=False)

    def check(self, cohort: Cohort, t: int = 0) -> None:
        """Refuse a cohort in which somebody has no round left; nothing of the round has happened yet."""
        over = cohort[self.spent[cohort] + self._cost(cohort, t) > self.allowed[cohort]]
        if len(over):
            first = int(over[0])
            raise BudgetError(
                f"the next round would overspend the budget of {len(over)} client(s), first client {first}, "
                f"whose budget is worth {self.allowed[first]} round(s); the round was not run",
                refused=(t, cohort),
            )

    def charge(self, cohort: Cohort, t: int = 0) -> None:
        """Check, then count."""
        self.check(cohort, t)
        self.count(cohort, t)

    def count(self, cohort: Cohort, t: int = 0) -> None:
        """What was charged already stays charged, whatever the budget."""
        self.spent[cohort] += self._cost(cohort, t)
        if self.epochs is not None:
            self.epochs.note(cohort, t)
        if self.elsewhere is not None:
            self.elsewhere.ask(cohort, t)

    def ask(self, cohort: Cohort, t: int) -> None:
        """`count`, for rounds that are replayed from a log (`ChargeListener`)."""
        self.count(cohort, t)

    def add_receipts(self, refused: Iterable[int], charged: Iterable[tuple[int, int]], t: int) -> None:
        """What silos say of round t: a refusal costs nothing, and one that was killed may have been charged twice.

        Where epochs are counted, a charge beyond those that were asked for is taken for a whole round anew.
        """
        if self.elsewhere is None:
            return
        before = self.elsewhere.total - self.elsewhere.asked
        self.elsewhere.add_receipts(refused, charged, t)
        if self.epochs is None:
            self.spent[:] = self.elsewhere.total
        else:
            beyond = np.maximum(self.elsewhere.total - self.elsewhere.asked, 0) - np.maximum(before, 0)
            self.spent[:] += np.maximum(beyond, 0) * self.epochs.steps

    def _cost(self, cohort: Cohort, t: int) -> NDArray[np.int64]:
        """Releases that one record of each would be in beyond those it was in; the same job again is none."""
        cost = np.ones(len(cohort), dtype=np.int64) if self.epochs is None else self.epochs.begun(cohort, t)
        return cost if self.elsewhere is None else np.where(self.elsewhere.again(cohort, t), 0, cost)


@dataclass(frozen=True)
class Epochs:
    """Which epochs of its records a silo has read: the last one, and the rounds it was in."""

    reads: RecordSampler
    steps: int  # of a silo in one round
    last: NDArray[np.int64]
    read: dict[int, NDArray[np.bool_]] = field(default_factory=dict)

    def begun(self, cohort: Cohort, t: int) -> NDArray[np.int64]:
        """How many epochs round t begins for each of a cohort; all that it touches, if it is run again."""
        first, end = self._touched(cohort, t)
        again = self.read[t][cohort] if t in self.read else np.zeros(len(cohort), dtype=np.bool_)
        cost: NDArray[np.int64] = np.where(again, end - first + 1, end - np.maximum(self.last[cohort], first - 1))
        return cost

    def note(self, cohort: Cohort, t: int) -> None:
        """Round t was run."""
        self.last[cohort] = np.maximum(self.last[cohort], self._touched(cohort, t)[1])
        self.read.setdefault(t, np.zeros(len(self.last), dtype=np.bool_))[cohort] = True

    def _touched(self, cohort: Cohort, t: int) -> NDArray[np.int64]:
        """First and last epoch [2, m] of a round's steps."""
        ends = (t * self.steps, (t + 1) * self.steps - 1)
        return np.asarray([[self.reads.epoch(step, int(silo)) for silo in cohort] for step in ends], dtype=np.int64)


def client_filter(plan: Plan, budget: Budget, own: Mapping[int, Budget] | None = None) -> Filter:
    """The filter of a plan whose cohorts are seen; `own` gives single clients budgets of their own."""
    if plan.clients.random and not {"cohort", "messages"} & plan.release.sees:  # of either unit
        found = "a budget per client where the cohort is secret"
        needed = "a release that shows the cohort (noise_shares, local_noise), or a public sampler"
        raise PlanError("client budget", found, needed, "refusing a round would tell who was in it")
    digest = plan.hash
    population, reads, spent = plan.clients.population, plan.local.reads, plan.local.bound()
    differ = bool(own) or len(plan.forecast.of("cohort")) > 1  # else one client stands for all
    kinds = range(population if differ else 1)
    worth = [_worth(plan, digest, client, (own or {}).get(client, budget)) for client in kinds]
    allowed = np.full(population, worth[0]) if len(worth) < population else np.asarray(worth)
    nothing = np.zeros(population, dtype=np.int64)
    steps, epochs = spent.count if isinstance(spent, AlreadyPrivate) else 1, None
    if reads is not None and reads.disjoint:
        epochs = Epochs(reads, steps, nothing - 1)
    return Filter(allowed.astype(np.int64), nothing, epochs)


def check_affordable(plan: Plan, budget: Filter, names: tuple[str, ...] = ()) -> None:
    """Refuse a plan that cannot be run to its end within a budget: it would stop there, for sure.

    Public cohorts are counted. Random ones are refused where a client keeps within its rounds with probability < 1e-6.
    """
    needed, allowed = _needed(plan, budget), budget.allowed
    if plan.clients.random:
        counted = budget.epochs is None
        chance = plan.clients.participation_cdf(allowed, plan.rounds) if counted else np.ones(len(allowed))
        over = np.flatnonzero((allowed < 1) | (chance < UNLIKELY))
    else:
        over = np.flatnonzero(needed > allowed)
    if not len(over):
        return
    first = int(over[0])
    who = repr(names[first]) if names else str(first)
    often = "about " * plan.clients.random + f"{needed[first]:.4g}"
    found = f"{plan.rounds} rounds of which client {who} is in {often}, and a budget worth {allowed[first]} for it"
    fix = "fewer rounds, more noise (sordino calibrate), or a larger budget"
    raise PlanError("client budget", found, "a plan that its budgets can afford", fix)


UNLIKELY = 1e-6


def _needed(plan: Plan, budget: Filter) -> NDArray[np.float64]:
    """Rounds of every client as planned, or, where epochs are counted, releases of one record of it: of the cost."""
    turns = plan.clients.participations(plan.rounds)
    if budget.epochs is None:
        return turns
    if plan.release.correlated:
        whole = [Participation(plan.rounds, math.ceil(n)) for n in turns]
        parts = (plan.clients, plan.local, plan.release)
        return np.asarray([reads_of(*parts, one, silo) for silo, one in enumerate(whole)], dtype=np.float64)
    rounds = replace(plan, prepare=())
    costs = [rounds.cost(Participation(plan.rounds, math.ceil(n)), silo) for silo, n in enumerate(turns)]
    return np.asarray([sum(count for _, count in cost.line("cohort").entries) for cost in costs], dtype=np.float64)


def _worth(plan: Plan, digest: str, client: int, budget: Budget) -> int:
    """The most rounds whose cost is within a client's budget; 0 if even one costs more."""
    key = digest, plan.forecast.line("cohort", client), budget
    if key not in _KNOWN:
        try:
            _KNOWN[key] = calibration.rounds(lambda n: _line(plan, client, n), budget.epsilon, budget.delta)
        except UnreachableError:
            _KNOWN[key] = 0
    return _KNOWN[key]


_KNOWN: dict[tuple[str, Line, Budget], int] = {}  # clients whose line is one and the same are asked for once


def _line(plan: Plan, client: int, n: int) -> Line:
    """What n rounds of a client cost; where the batches of an epoch are disjoint, n releases of one record of it."""
    if plan.local.reads is not None and plan.local.reads.disjoint:
        sure = Participation(plan.rounds, plan.rounds)
        line = replace(plan, prepare=()).cost(sure, client).line("cohort", client)
        if plan.release.correlated:
            allowed = record_patterns(plan.clients, plan.local, plan.rounds, n, client)
            line = replace(line, entries=plan.release.run_events(allowed))
        else:
            line = replace(line, entries=tuple((event, n) for event, _ in line.entries))
        return with_preparations(Cost(plan.unit, (line,)), plan.prepare, plan.release, 1).lines[0]
    return plan.cost(Participation(max(n, plan.rounds), n), client).line("cohort")
