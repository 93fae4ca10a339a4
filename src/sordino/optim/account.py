"""The bill of a loop: steps are counted before their noise is drawn, and the count only grows."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from functools import cached_property
from typing import Any

from sordino import codec
from sordino.data.lineage import IN_PROCESS, Runs, remember_loop
from sordino.errors import BudgetError
from sordino.optim.charging import LedgerAccount, check_payer
from sordino.optim.loop_record import LoopRecord, read_record, written_record
from sordino.optim.settings import Settings
from sordino.privacy.earlier import EarlierRun, cost_of
from sordino.privacy.facts import Facts, Loop, billed
from sordino.privacy.rounding import upto
from sordino.version import versions

ELSEWHERE = "0" * 32  # the name of steps that the ledger knows and no checkpoint does


class Account:
    """Steps charged so far, by the process that charged them.

    Loading a checkpoint takes the larger count for every process, so neither going back to an older checkpoint nor
    joining two that grew apart makes a release disappear. A copy of an account (deepcopy, pickle, fork) counts what
    it charges under a name of its own: two copies that are joined are billed for the steps of both. Whatever this
    process has charged for a run is counted in every account of that run, whatever a checkpoint says.
    """

    def __init__(self, settings: Settings, ledger: LedgerAccount | None = None, earlier: Runs = ()) -> None:
        self.settings, self.run, self.ledger = settings, uuid.uuid4().hex, ledger
        self.earlier = earlier  # runs that the first weights come from
        self.taken: dict[str, int] = {}
        self._rename()

    def _rename(self) -> None:
        """From here on charge under a new name, in this process."""
        self.own, self.process = uuid.uuid4().hex, os.getpid()
        self.taken[self.own] = 0
        if self.ledger is not None:
            self.ledger.renew()

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
        if self.ledger is not None:
            self.ledger.pay(self.run, number)
        self.taken[self.own] += 1
        _CHARGED_HERE.setdefault(self.run, {})[self.own] = self.taken[self.own]
        return number

    def _limit(self) -> str:
        if self.settings.plan.release.joint:
            return f"of a loop whose noise was made for {self.settings.steps}: later ones have none to share"
        target = f"epsilon {upto(self.settings.epsilon, 6)} at delta {upto(self.settings.delta)}"
        return f"would overspend {target}, worth {self.most} steps"

    def state(self, **others: Any) -> dict[str, Any]:
        """What a checkpoint needs to continue the bill; `others` are bound by the same checksum."""
        payer = {} if self.ledger is None else {"dataset": self.ledger.dataset}
        before = {"earlier": codec.dump(self.earlier)} if self.earlier else {}
        return written_record(self.settings, self.run, self.taken, **payer, **before, **others)

    def joined(self, record: LoopRecord) -> dict[str, int]:
        """The counts of this account, of a checkpoint, and of this process: the larger of each name's.

        Steps that the ledger has seen begun, and that none of them has, stand under a name of their own.
        """
        check_payer(self.ledger, record)
        found = dict(self.taken)
        for counts in (record.taken, _CHARGED_HERE.get(record.run, {})):
            for name, count in counts.items():
                found[name] = max(found.get(name, 0), count)
        if self.ledger is not None:
            known = self.ledger.known_steps(*{record.run, *([self.run] if self.steps else [])})
            found[ELSEWHERE] = found.get(ELSEWHERE, 0) + max(0, known - sum(found.values()))
        return found

    def load(self, state: Any) -> None:
        """Continue the bill of a checkpoint."""
        self.accept(read_record(state, self.settings))

    def accept(self, record: LoopRecord) -> None:
        """Continue the bill of a checkpoint, under its id if nothing was charged here."""
        taken = self.joined(record)
        self.run = self.run if self.steps else record.run
        self.taken = taken
        every = {one.run: one for one in (*record.earlier, *self.earlier) if one.run != self.run}
        self.earlier = tuple(every.values())
        remember_loop(self.run, self.cost)

    def cost(self) -> EarlierRun | None:
        """What this loop has cost, to a run that begins with its weights; None before its first step."""
        if not self.steps:
            return None
        plan, delta = self.settings.plan, self.settings.delta
        return cost_of(billed(plan, Facts(delta, self.settings.noise, self.steps)), delta, self.run, IN_PROCESS)

    def facts(self, loop: Loop) -> Facts:
        """What a certificate needs beside the plan."""
        paid = None if self.ledger is None else self.ledger.standing(self.run)
        known = Facts(self.settings.delta, self.settings.noise, self.steps, loop=loop, environment=(versions(),))
        return replace(known, ledger=paid, earlier=self.earlier)


_CHARGED_HERE: dict[str, dict[str, int]] = {}  # steps that this process has charged, by run and by account
