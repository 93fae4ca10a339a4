"""Budgets of clients, and charges of deployed runs. Called by the loop, by servers and by silos.

`Filter` refuses the round in which a client would exceed its budget. Each participation is one release without
amplification, since whoever enforces the budget sees who takes part. So a budget allows a fixed number k of rounds, the
largest for which accounting proves (epsilon, delta). This is safe even if later cohorts depend on earlier releases,
since the bound is that of k-fold composition.

`SiloCost` is the cost that a silo charges to its ledger. A silo sees only the rounds in which it takes part. So a cost
that relies on amplification by the server's secret sampling is charged at admission for the whole run, and so is a
release whose noise is one event for the whole run. Every other cost is charged round by round.

`ClientCharges` counts on the server how often each client was charged, from requests and from the silos' receipts:

    charges of a client = max(last receipt + requests since - refusals since,  rounds with a reply of the client)

If the server draws the noise, all requests count instead of the rounds with a reply. A silo that stores its messages
answers a repeated job with the stored bytes, without a new charge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sordino.accounting import calibration, composition
from sordino.accounting.bounds import AlreadyPrivate, Protected
from sordino.accounting.calibration import Budget
from sordino.accounting.composition import Adversary, Cost, Line, Participation
from sordino.accounting.events import Unprotected
from sordino.errors import BudgetError, PlanError, UnreachableError
from sordino.ledger.ledger import Request
from sordino.ledger.totals import Block, Item
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.samplers import Cohort

if TYPE_CHECKING:
    from sordino.plan import Plan

Counts = NDArray[np.int64]  # by client
UNLIKELY = 1e-6


def _releases_per_round(plan: Plan) -> int:
    spent = plan.local.bound()
    return spent.count if isinstance(spent, AlreadyPrivate) else 1


# ---- a budget per client
@dataclass(frozen=True)
class Filter:
    """Privacy filter over rounds: the numbers of `allowed` and of `spent` rounds of each client.

    If the batches of an epoch are disjoint, releases of one record are counted instead of rounds: a round costs one for
    each epoch that it begins or, if the round is repeated, for each epoch that it reads from.
    """

    allowed: Counts
    spent: Counts = field(repr=False)
    epochs: Epochs | None = field(default=None, repr=False)
    elsewhere: ClientCharges | None = field(default=None, repr=False)  # where every client has its own ledger

    def check(self, cohort: Cohort, t: int = 0) -> None:
        """Refuse the cohort of round t if a client has no budget left for this round."""
        over = cohort[self.spent[cohort] + self._cost(cohort, t) > self.allowed[cohort]]
        if len(over):
            first = int(over[0])
            raise BudgetError(
                f"the next round would exceed the budget of {len(over)} client(s), first client {first}, "
                f"whose budget allows {self.allowed[first]} round(s); the round was not run; fix: plan fewer rounds, "
                "add noise, or raise the budget",
                refused=(t, cohort),
            )

    def charge(self, cohort: Cohort, t: int = 0) -> None:
        self.check(cohort, t)
        self.ask(cohort, t)

    def ask(self, cohort: Cohort, t: int) -> None:
        """Count a round for its cohort without checking the budget."""
        self.spent[cohort] += self._cost(cohort, t)
        if self.epochs is not None:
            self.epochs.note(cohort, t)
        if self.elsewhere is not None:
            self.elsewhere.ask(cohort, t)

    def add_receipts(self, refused: Iterable[int], charged: Iterable[tuple[int, int]], t: int) -> None:
        """Correct the counts of round t by the silos' receipts: pairs of a client and its number of charges.

        A silo that refused is not charged, and a silo that was killed may have charged twice. If epochs are counted,
        every charge beyond the requested ones counts as one whole round.
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

    def _cost(self, cohort: Cohort, t: int) -> Counts:
        cost = np.ones(len(cohort), dtype=np.int64) if self.epochs is None else self.epochs.begun(cohort, t)
        return cost if self.elsewhere is None else np.where(self.elsewhere.again(cohort, t), 0, cost)


@dataclass(frozen=True)
class Epochs:
    """Progress of each silo through its records: the last epoch that it has read, and its rounds."""

    reads: RecordSampler
    steps: int  # of a silo in one round
    last: Counts
    read: dict[int, NDArray[np.bool_]] = field(default_factory=dict)

    def begun(self, cohort: Cohort, t: int) -> Counts:
        """Return, for each client, the number of epochs that round t begins or, if it is repeated, reads from."""
        first, end = self._touched(cohort, t)
        again = self.read[t][cohort] if t in self.read else np.zeros(len(cohort), dtype=np.bool_)
        cost: Counts = np.where(again, end - first + 1, end - np.maximum(self.last[cohort], first - 1))
        return cost

    def note(self, cohort: Cohort, t: int) -> None:
        self.last[cohort] = np.maximum(self.last[cohort], self._touched(cohort, t)[1])
        self.read.setdefault(t, np.zeros(len(self.last), dtype=np.bool_))[cohort] = True

    def _touched(self, cohort: Cohort, t: int) -> Counts:
        """Return the first and the last epoch, [2, m], that round t reads, for each of m clients."""
        ends = (t * self.steps, (t + 1) * self.steps - 1)
        return np.asarray([[self.reads.epoch(step, int(silo)) for silo in cohort] for step in ends], dtype=np.int64)


def client_filter(plan: Plan, budget: Budget, own: Mapping[int, Budget] | None = None) -> Filter:
    """Return the privacy filter of a plan with visible cohorts; `own` has budgets that differ, by client."""
    if plan.clients.random and not {"cohort", "messages"} & plan.release.sees:  # of either unit
        found = "budgets per client in a plan with secret cohorts: a refused round would reveal its cohort"
        needed = "a release that shows the cohort (noise_shares, local_noise), or a public sampler"
        raise PlanError("client budget", found, needed, "change release or sampler, or drop the client budgets")
    digest, population, reads = plan.hash, plan.clients.population, plan.local.reads
    differ = bool(own) or len(plan.forecast.of("cohort")) > 1  # else all clients have the same number of rounds
    kinds = range(population if differ else 1)
    worth = [_max_rounds(plan, digest, client, (own or {}).get(client, budget)) for client in kinds]
    allowed = np.full(population, worth[0]) if len(worth) < population else np.asarray(worth)
    nothing, disjoint = np.zeros(population, dtype=np.int64), reads is not None and reads.disjoint
    epochs = Epochs(reads, _releases_per_round(plan), nothing - 1) if reads is not None and disjoint else None
    return Filter(allowed.astype(np.int64), nothing, epochs)


def check_affordable(plan: Plan, budget: Filter, names: tuple[str, ...] = ()) -> None:
    """Refuse a plan that client budgets would almost certainly stop before its last round.

    Public cohorts are counted. With random cohorts, a plan is refused if some client stays within its allowed rounds
    with probability below 1e-6.
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
    found = f"{plan.rounds} rounds, {often} of them with client {who}, whose budget allows {allowed[first]} rounds"
    fix = "plan fewer rounds, add noise (sordino calibrate), or raise the budget"
    raise PlanError("client budget", found, "a plan within the clients' budgets", fix)


def _needed(plan: Plan, budget: Filter) -> NDArray[np.float64]:
    """Return each client's planned number of rounds or, if epochs are counted, of releases of one record."""
    turns = plan.clients.participations(plan.rounds)
    if budget.epochs is None:
        return turns
    planned = [Participation(plan.rounds, math.ceil(n)) for n in turns]
    if plan.release.correlated:
        parts = (plan.clients, plan.local, plan.release)
        each = [composition.reads_of(*parts, one, silo) for silo, one in enumerate(planned)]
        return np.asarray(each, dtype=np.float64)
    rounds = replace(plan, prepare=())
    lines = [rounds.cost(one, silo).line("cohort") for silo, one in enumerate(planned)]
    return np.asarray([sum(count for _, count in line.entries) for line in lines], dtype=np.float64)


_KNOWN: dict[tuple[str, Line, Budget], int] = {}  # clients with the same line are computed once


def _max_rounds(plan: Plan, digest: str, client: int, budget: Budget) -> int:
    key = digest, plan.forecast.line("cohort", client), budget
    if key not in _KNOWN:
        try:
            _KNOWN[key] = calibration.rounds(lambda n: _line(plan, client, n), budget.epsilon, budget.delta)
        except UnreachableError:
            _KNOWN[key] = 0
    return _KNOWN[key]


def _line(plan: Plan, client: int, n: int) -> Line:
    """Return the cost of n rounds of a client or, if batches of an epoch are disjoint, of n releases of one record."""
    if plan.local.reads is None or not plan.local.reads.disjoint:
        return plan.cost(Participation(max(n, plan.rounds), n), client).line("cohort")
    line = replace(plan, prepare=()).cost(Participation(plan.rounds, plan.rounds), client).line("cohort", client)
    if plan.release.correlated:
        allowed = composition.record_patterns(plan.clients, plan.local, plan.rounds, n, client)
        line = replace(line, entries=plan.release.run_events(allowed))
    else:
        line = replace(line, entries=tuple((event, n) for event, _ in line.entries))
    return composition.with_preparations(Cost(plan.unit, (line,)), plan.prepare, plan.release, 1).lines[0]


# ---- charges of deployed runs
@dataclass(frozen=True)
class SiloCost:
    """Charges of a plan to one silo's ledger: the plan's cost to that silo's data, against one adversary."""

    plan: Plan
    silo: int
    adversary: Adversary = "cohort"
    persons: bool = False  # each record of the silo holds all rows of one person

    @property
    def whole(self) -> bool:
        """Whether the whole run is charged at admission."""
        plan = self.plan
        hidden = plan.clients.random and plan.clients.amplifies and plan.release.hides_cohort(plan.clients)
        return plan.release.correlated or (self.adversary == "models" and plan.unit == "client" and hidden)

    @property
    def jobs(self) -> int:
        """Number of messages that the charge at admission covers: one for each round that may sample this silo."""
        return self.plan.clients.amplified_rounds(self.plan.rounds) if self.whole else 0

    @property
    def asked(self) -> Request:
        """Request for admission to the ledger: the cost of all planned rounds with this silo.

        If cohorts are random, it is the cost of the expected number of such rounds, rounded up.
        """
        line = self.plan.forecast.line(self.adversary, self.silo)
        if self.whole:
            items = tuple(Item(event, count) for event, count in line.entries if count)
        else:
            rounds = math.ceil(float(self.plan.clients.participations(self.plan.rounds)[self.silo]))
            if self._blocks(0) is not None:
                items = tuple(item for t in range(rounds) for item in self.job(t))
            else:
                items = tuple(Item(event, count) for event, count in self._line(rounds).entries if count)
        unit: Protected = "user" if self.persons and self.plan.unit == "record" else self.plan.unit
        return Request(unit, line.relation, items, self.plan.hash)

    def job(self, t: int) -> tuple[Item, ...]:
        """Return the cost of one message of round t; if the run was charged at admission, of a repeated message."""
        if self.plan.release.correlated:  # a repeated round with correlated noise has no bound
            return (Item(Unprotected()),)
        blocks, entries = self._blocks(t), self._line(1).entries
        if blocks is None:
            return tuple(Item(event, count) for event, count in entries)
        ((event, _),) = entries
        return tuple(Item(event, 1, block) for block in blocks)

    def _line(self, rounds: int) -> Line:
        """Return the cost of rounds with this silo, without amplification by the sampling of silos."""
        seen: Adversary = "messages" if self.adversary == "messages" else "cohort"
        return self.plan.cost(Participation(rounds, rounds), self.silo).line(seen, self.silo)

    def _blocks(self, t: int) -> list[Block] | None:
        reads, steps = self.plan.local.reads, _releases_per_round(self.plan)
        if reads is None:
            return None
        found = [reads.block(step, self.silo) for step in range(t * steps, (t + 1) * steps)]
        order = f"{self.silo}/{reads.size(self.silo)}"
        blocks = [Block(f"{order}/{one[0]}", one[1], one[2]) for one in found if one is not None]
        return blocks if len(blocks) == steps else None


@dataclass
class ClientCharges:
    """Counts of each client's charges so far, on the server of a deployed run."""

    asked: Counts  # requests that were not refused
    since: Counts  # requests after the last receipt that were not refused
    receipts: Counts  # charges that the last receipt reports
    replays: bool  # silos answer a repeated job with stored bytes, without a charge
    local: bool  # clients draw the noise
    answered: dict[int, set[int]] = field(default_factory=dict)  # clients by round
    open: dict[int, set[int]] = field(default_factory=dict)  # clients by round that were sent the round's current job
    replayed: list[int] = field(default_factory=list)  # rounds that were repeated without new noise

    @classmethod
    def of(cls, plan: Plan) -> ClientCharges:
        none, local = np.zeros(plan.clients.population, dtype=np.int64), plan.release.local
        return cls(none, none.copy(), none.copy(), local and "secure_sum" not in plan.needs, local)

    def again(self, cohort: Cohort, t: int) -> NDArray[np.bool_]:
        """Return which clients of a cohort were sent the current job of round t before."""
        known = self.open.get(t) if self.replays else None
        return np.zeros(len(cohort), dtype=np.bool_) if not known else np.isin(cohort, list(known))

    def ask(self, cohort: Cohort, t: int) -> None:
        """Count a request to the cohort for round t.

        Jobs of later rounds then count as new, since they start from another model.
        """
        fresh = cohort[~self.again(cohort, t)]
        self.replayed += [t] * (len(cohort) > 0 and len(fresh) == 0)
        self.asked[fresh] += 1
        self.since[fresh] += 1
        if self.replays:
            self.open = {round: who for round, who in self.open.items() if round <= t}
            self.open.setdefault(t, set()).update(cohort.tolist())

    def add_receipts(self, refused: Iterable[int], charged: Iterable[tuple[int, int]], t: int) -> None:
        """Record the clients that refused round t, and the total number of charges that each other client reports."""
        for client in refused:
            self.asked[client] = max(0, self.asked[client] - 1)
            self.since[client] -= 1
            self.open.get(t, set()).discard(client)
        for client, charges in charged:
            self.receipts[client], self.since[client] = max(self.receipts[client], charges), 0
            self.answered.setdefault(t, set()).add(client)

    @property
    def total(self) -> Counts:
        floor = self.asked if not self.local else np.zeros_like(self.asked)
        for who in self.answered.values() if self.local else ():
            floor[list(who)] += 1
        found: Counts = np.maximum(self.receipts + np.maximum(self.since, 0), floor)
        return found
