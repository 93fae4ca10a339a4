"""Count of a private loop's charged steps, in the loop and in its ledger, and the loop's certificate.

    admission   all planned steps are charged at once, before the first noise is drawn, as `sordino run` does
    block       range of steps, about `BLOCKS` in a run, that ends where an epoch ends; charged before its first step.
                Planned blocks were charged at admission; blocks beyond the plan, or repeated, are charged again

The count never decreases. The ledger stores which blocks were begun: a checkpoint older than the ledger (copied, rolled
back, saved before a kill) continues from the ledger's count, and steps that are taken again are charged again.

A certificate file holds certificate, plan and facts. `certify` proves that the certificate follows from the plan and
the counts in the file. It cannot prove that the loop took no other step, because a loop has no hash chain of charges as
the folder of a run has; a signature states who is responsible. Called by dpsgd/optimizer.py, runs/ and cli/.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.accounting.composition import Participation
from sordino.accounting.events import Event, Relation
from sordino.accounting.rounding import upto
from sordino.certificate.build import certificate
from sordino.certificate.certificate_file import compare_text, parse, text_of
from sordino.certificate.facts import EarlierRun, Facts, Loop, run_cost
from sordino.data.lineage import IN_PROCESS, Runs, register_loop
from sordino.dpsgd.processes import ALONE, Ranks
from sordino.dpsgd.settings import LoopRecord, Settings, read_record, write_record
from sordino.errors import BudgetError, CertificateError, ConfigError, UserError, brief_repr
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Item, Statement
from sordino.plan import Plan
from sordino.version import versions

_LOG = logging.getLogger("sordino")
ELSEWHERE = "0" * 32  # process name for steps that are in the ledger and in no checkpoint


class Account:
    """Count of a loop's charged steps, by the process that charged them.

    Loading a checkpoint takes the larger count for every process, so that no release is lost by loading an older
    checkpoint, or by joining two diverged ones. A copy of an account (deepcopy, pickle, fork) counts its charges under
    a new process name, so joined copies are charged for the steps of both. Charges of this process count in every
    account of the run, also if a checkpoint does not contain them.
    """

    def __init__(
        self, settings: Settings, ledger: LedgerAccount | None = None, earlier: Runs = (), ranks: Ranks = ALONE
    ) -> None:
        self.settings, self.run, self.ledger, self.ranks = settings, uuid.uuid4().hex, ledger, ranks
        self.earlier = earlier  # runs that the first weights come from
        self.taken: dict[str, int] = {}
        self.own = ""
        self._rename()
        if ranks.size > 1:  # all ranks take the same steps, which are counted once: under the names of rank 0
            self.run, self.own = ranks.gather([self.run, self.own])[0]
            self.taken = {self.own: 0}

    def _rename(self) -> None:
        self.own, self.process = uuid.uuid4().hex, os.getpid()
        self.taken[self.own] = 0
        if self.ledger is not None:
            self.ledger.unused = range(0)  # a copy, or a forked process, charges blocks of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, taken=dict(state["taken"]))
        self._rename()

    @property
    def steps(self) -> int:
        """Number of noised steps that were charged."""
        return sum(self.taken.values())

    @cached_property
    def max_steps(self) -> float:
        return self.settings.max_steps()

    def charge(self) -> int:
        """Charge one step before its noise is drawn, and return its number; raise `BudgetError` beyond the budget."""
        number = self.steps
        if number >= self.settings.steps and number >= self.max_steps:
            target = f"epsilon {upto(self.settings.epsilon, 6)} at delta {upto(self.settings.delta)}"
            limit = f"would exceed {target}, which allows {self.max_steps} steps"
            if self.settings.plan.release.correlated:
                limit = f"of a loop whose correlated noise was planned for {self.settings.steps} steps"
            raise BudgetError(f"step {number + 1} {limit}; the step was not taken: end the loop here, or raise epsilon")
        if self.process != os.getpid():
            self._rename()
        if self.ledger is not None:
            self.ledger.charge(self.run, number)
        self.taken[self.own] += 1
        _CHARGED_HERE.setdefault(self.run, {})[self.own] = self.taken
        return number

    def forfeit(self, count: int) -> None:
        """Charge steps that are not taken: the rest of a pass whose allocation another process, or a copy, holds."""
        _LOG.warning("%d steps, the rest of a pass that was begun elsewhere, are charged and not taken", count)
        for _ in range(count):
            self.charge()

    def charge_preparation(self) -> None:
        """Charge the releases of the records' mean and scale (`prepare=`) before their noise is drawn."""
        if self.ledger is not None:
            self.ledger.charge_preparation(self.run)
        _PREPARED_HERE[self.run] = _PREPARED_HERE.get(self.run, 0) + 1

    @property
    def prepared(self) -> int:
        """Number of releases of the records' mean and scale, in this process or the ledger; 0 if the plan has none."""
        if not self.settings.plan.prepare:
            return 0
        known = 0 if self.ledger is None else self.ledger.known_preparations(self.run)
        return max(1, _PREPARED_HERE.get(self.run, 0), known)

    def state(self, **others: Any) -> dict[str, Any]:
        """Return the count of charged steps as a record for a checkpoint, with a checksum over it and `others`."""
        charged_to = {} if self.ledger is None else {"dataset": self.ledger.dataset}
        before = {"earlier": codec.dump(self.earlier)} if self.earlier else {}
        return write_record(self.settings, self.run, self.taken, **charged_to, **before, **others)

    def join(self, record: LoopRecord) -> dict[str, int]:
        """Return the charged steps by process: the largest count of this account, the checkpoint and this process.

        Steps that only the ledger contains are counted under the process name `ELSEWHERE`.
        """
        if self.ledger is not None:  # a loop that is charged to a ledger stays charged to it
            self.ledger.check(record)
        elif record.dataset:
            raise _other_ledger(record.dataset, "no ledger")
        found = dict(self.taken)
        here = _CHARGED_HERE.get(record.run, {})
        for counts in (record.taken, {name: table[name] for name, table in here.items()}):
            for name, count in counts.items():
                found[name] = max(found.get(name, 0), count)
        if self.settings.plan.release.scheduled or self.settings.records.pass_rounds > 1:
            _check_one_history(found, [self.taken, record.taken, *here.values()])
        if self.ledger is not None:
            known = self.ledger.known_steps(*{record.run, *([self.run] if self.steps else [])})
            found[ELSEWHERE] = found.get(ELSEWHERE, 0) + max(0, known - sum(found.values()))
        return found

    def load(self, state: Any) -> None:
        """Continue the count of charged steps of a checkpoint, after checking its record."""
        self.accept(read_record(state, self.settings))

    def accept(self, record: LoopRecord) -> None:
        """Continue the count of charged steps of a checked record, and its run id if this loop has charged nothing."""
        taken = self.join(record)
        self.run = self.run if self.steps else record.run
        self.taken = taken
        every = {one.run: one for one in (*record.earlier, *self.earlier) if one.run != self.run}
        self.earlier = tuple(every.values())
        register_loop(self.run, self.cost)

    def cost(self) -> EarlierRun | None:
        """Return this loop's privacy cost, for a later run that starts from its weights; None before the first step."""
        if not self.steps:
            return None
        plan, delta = self.settings.plan, self.settings.delta
        cost = run_cost(plan, Facts(delta, self.settings.noise, self.steps, prepared=self.prepared))
        return EarlierRun.of_cost(replace(cost, unit=self.settings.unit), delta, self.run, IN_PROCESS)

    def facts(self, loop: Loop) -> Facts:
        """Return the facts that a certificate needs in addition to the plan."""
        statement = None if self.ledger is None else self.ledger.statement(self.run)
        facts = Facts(self.settings.delta, self.settings.noise, self.steps, loop=loop, environment=(versions(),))
        return replace(facts, ledger=statement, earlier=self.earlier, prepared=self.prepared)


_CHARGED_HERE: dict[str, dict[str, dict[str, int]]] = {}  # counts of accounts of this process, by run and own name
_PREPARED_HERE: dict[str, int] = {}  # releases of preparations in this process, by run
PREPARATION = "preparation"  # name of the job of releases before the first step
BLOCKS = 200  # approximate number of charges of a loop to its ledger, which all later runs must read


@dataclass
class LedgerAccount:
    """Account of one loop in a ledger file; `dataset` is the name of its data set in the ledger."""

    path: Path
    dataset: str
    settings: Settings
    ranks: Ranks = ALONE
    unused: range = field(default=range(0))  # steps of the block that this process has charged and not yet taken

    @classmethod
    def of(
        cls, ledger: Ledger | str | Path | None, dataset: str | None, settings: Settings, ranks: Ranks = ALONE
    ) -> LedgerAccount | None:
        """Return the loop's account in a ledger, None without a ledger; refuse a loop beyond the budget.

        Nothing is charged.
        """
        named = ledger_path(ledger, dataset)
        if named is None:
            return None
        found = cls(*named, settings, ranks)
        with Ledger.open(found.path) as opened:
            opened.consider(found.dataset, found.planned())
        return found

    def planned(self) -> Request:
        """Return the ledger request for all planned steps."""
        line = self.settings.forecast.line("models")
        return Request(self.settings.unit, line.relation, _items(line.entries), self.settings.plan.hash)

    def charge(self, run: str, step: int) -> None:
        """Charge the block of steps that contains `step`, once for all ranks; raise `BudgetError` if it is refused."""
        if step not in self.unused:
            block = self._block(step)
            self.ranks.once(lambda: self._charge(run, block))
            self.unused = range(step, block.stop)
        self.unused = range(step + 1, self.unused.stop)

    def _charge(self, run: str, block: range) -> None:
        with Ledger.open(self.path) as ledger:
            ledger.admit(run, self.dataset, self.planned(), whole=True, jobs=self._planned_blocks)
            self._refuse_again(ledger, run, block)
            for one in (*self._not_charged(ledger, run, block.start), block):
                ledger.charge(run, _job(run, one), self._cost(one))

    def charge_preparation(self, run: str) -> None:
        """Charge the releases of mean and scale: at first with all planned steps, then for every repetition."""
        cost = tuple(Item(part.event(self._relation), 1) for part in self.settings.plan.prepare)
        with Ledger.open(self.path) as ledger:
            ledger.admit(run, self.dataset, self.planned(), whole=True, jobs=self._planned_blocks)
            ledger.charge(run, f"{run} {PREPARATION}", cost)

    def known_preparations(self, run: str) -> int:
        """Return how often the ledger has charged the releases of mean and scale to a run."""
        with Ledger.open(self.path) as ledger:
            return _charges(ledger, run).get(f"{run} {PREPARATION}", 0)

    @property
    def _relation(self) -> Relation:
        return self.settings.plan.forecast.line("models").relation

    def known_steps(self, *runs: str) -> int:
        """Return the number of steps that the ledger has charged to these runs.

        Steps of the current block that this process has not taken yet are not counted.
        """
        with Ledger.open(self.path) as ledger:
            charged = [entry for run in runs for entry in _charges(ledger, run).items()]
        return sum(_length(job) * times for job, times in charged) - len(self.unused)

    def statement(self, run: str) -> Statement | None:
        """Return all charges of the ledger to the data set; None before this loop's first charge."""
        with Ledger.open(self.path) as ledger:
            return ledger.statement(run=run) if _charges(ledger, run) else None

    def check(self, record: LoopRecord) -> None:
        """Refuse a checkpoint that was charged to another data set, or has more steps than this ledger contains."""
        if record.dataset and record.dataset != self.dataset:
            raise _other_ledger(record.dataset, f"dataset={self.dataset!r}")
        steps = sum(record.taken.values())
        known = self.known_steps(record.run) + len(self.unused) if record.dataset else steps
        if known < steps:
            found = f"the ledger {self.path} with {known} steps of a run whose checkpoint has {steps}"
            needed = "the ledger that holds all charges of the run"
            raise ConfigError(found, needed, "restore the newest copy of the ledger")

    @property
    def _span(self) -> int:
        """Number of steps of one epoch, or of several in very long runs; no block crosses a multiple of this number."""
        epochs = max(1, self.settings.steps // self.settings.per_epoch)
        return self.settings.per_epoch * -(-epochs // BLOCKS)

    @property
    def _width(self) -> int:
        """Number of steps of a block: a span, or an equal part of a span."""
        return -(-self._span // max(1, BLOCKS * self._span // self.settings.steps))

    @property
    def _planned_blocks(self) -> int:
        spans, rest = divmod(self.settings.steps, self._span)
        return spans * -(-self._span // self._width) + -(-rest // self._width) + bool(self.settings.plan.prepare)

    def _block(self, step: int) -> range:
        """Return the block that contains a step; either all or none of its steps are planned."""
        planned = self.settings.steps
        origin, end = (0, planned) if step < planned else (planned, sys.maxsize)
        first = step - (step - origin) % self._span
        start = first + (step - first) // self._width * self._width
        return range(start, min(start + self._width, first + self._span, end))

    def _not_charged(self, ledger: Ledger, run: str, steps: int) -> list[range]:
        """Return the blocks of steps that the loop took before it used this ledger."""
        charged, found, start = _charges(ledger, run), list[range](), 0
        known = sum(_length(job) * times for job, times in charged.items())
        while known < steps and start < steps:
            block = self._block(start)
            if _job(run, block) not in charged:
                found.append(block)
                known += len(block)
            start = block.stop
        return found

    def _cost(self, block: range) -> tuple[Item, ...]:
        """Return the events of a block of steps, for a charge beyond the planned steps."""
        if self.settings.plan.release.correlated:  # such a charge is refused
            return ()
        taken = Participation(len(block), len(block), first=block.start, prepared=0)
        return _items(self.settings.plan.cost(taken).line("models").entries)

    def _refuse_again(self, ledger: Ledger, run: str, block: range) -> None:
        if self.settings.plan.release.correlated and _job(run, block) in _charges(ledger, run):
            raise BudgetError(
                f"steps {block.start + 1} to {block.stop} of correlated noise were charged to {self.path} before: "
                "their noise may not be drawn again; start a new run"
            )


def _check_one_history(joined: dict[str, int], histories: Sequence[dict[str, int]]) -> None:
    """Refuse to add up the step counts of two copies of one run, under scheduled noise or random allocation.

    If both copies continued from one checkpoint, each took the same step numbers. The sum of their counts would charge
    the noise of later steps (scheduled noise), or too few passes (random allocation).
    """
    if not any(all(own.get(name, 0) == count for name, count in joined.items()) for own in histories):
        found = (
            "a checkpoint of a copy of this run, both of which continued, under scheduled noise or random allocation"
        )
        needed = "every step taken once: the noise of a step, or its pass, depends on its number"
        raise ConfigError(found, needed, "load the newest checkpoint of one of the two into a new process")


def _other_ledger(dataset: str, found: str) -> ConfigError:
    wrong = f"a checkpoint of a loop charged to the ledger's data set {brief_repr(dataset)}, and {found}"
    fix = "pass the same ledger= and dataset= to make_private as at the start of the run"
    return ConfigError(wrong, "the ledger and data set that the loop was charged to", fix)


def ledger_path(ledger: Ledger | str | Path | None, dataset: str | None) -> tuple[Path, str] | None:
    """Return the ledger's path and the data set's name; refuse one argument without the other."""
    if ledger is None and dataset is None:
        return None
    if ledger is None or dataset is None:
        found, lacks = ("ledger", "dataset") if dataset is None else ("dataset", "ledger")
        raise ConfigError(f"{found}= without {lacks}=", "both or neither", f"add {lacks}=...")
    if not isinstance(dataset, str) or not isinstance(ledger, str | Path | Ledger):
        needed = "the path of a ledger file, and the data set's name in it"
        fix = 'pass ledger="ledger.db", dataset="name"'
        raise ConfigError(f"ledger={brief_repr(ledger)}, dataset={brief_repr(dataset)}", needed, fix)
    return ledger.path if isinstance(ledger, Ledger) else Path(ledger).expanduser(), dataset


def _items(entries: tuple[tuple[Event, int], ...]) -> tuple[Item, ...]:
    return tuple(Item(event, count) for event, count in entries if count)


def _job(run: str, block: range) -> str:
    return f"{run} steps {block.start + 1}-{block.stop}"


def _length(job: str) -> int:
    found = re.fullmatch(r"\w+ steps (\d+)-(\d+)", job)
    return 0 if found is None else int(found[2]) - int(found[1]) + 1


def _charges(ledger: Ledger, run: str) -> dict[str, int]:
    """Return how often each block of a run was charged; empty for a run that the ledger has not admitted."""
    try:
        return ledger.charges(run)
    except ConfigError:
        return {}


LARGEST = 4 << 20  # bytes of a certificate file
FACTS = ("delta", "noise", "charged", "loop", "public", "environment", "ledger", "earlier", "own_code")  # in the file


def save_certificate(path: Path, plan: Plan, facts: Facts) -> dict[str, Any]:
    """Write a loop's certificate file atomically, and return the certificate."""
    content = _content(plan, facts)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text_of(content), "utf-8")
        os.replace(partial, path)
    except OSError as error:
        found = f"{path}, which cannot be written ({error.strerror})"
        raise ConfigError(found, "a path that can be written", "choose another path") from None
    made: dict[str, Any] = content["certificate"]
    return made


def _content(plan: Plan, facts: Facts) -> dict[str, Any]:
    fields = codec.dump(facts)
    stored = {name: fields[name] for name in FACTS if name in fields}
    stored |= {"prepared": facts.prepared} if facts.prepared else {}
    return {"certificate": certificate(plan, facts), "plan": codec.dump(plan), "facts": stored}


@dataclass(frozen=True)
class SavedCertificate:
    """Content of a certificate file: plan, facts, and the certificate that follows from them."""

    plan: Plan
    facts: Facts
    certificate: dict[str, Any]


def certify(path: Path) -> SavedCertificate:
    """Read a certificate file and recompute its certificate; raise `CertificateError` if the two differ."""
    text, name = _text(path), path.name
    try:
        stored = parse(text, name)
        plan: Plan = codec.read(Plan, stored["plan"], "plan")
        facts: Facts = codec.read(Facts, stored["facts"], "facts")
    except (ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        raise CertificateError(name, f"{name} cannot be read as the certificate of a private loop ({error})") from None
    if facts.loop is None:
        raise CertificateError(name, f"{name} is not the certificate of a private loop; name the folder of a run")
    line = run_cost(plan, facts).line("models")
    if facts.ledger is not None and not facts.ledger.covers(tuple(Item(*entry) for entry in line.entries if entry[1])):
        raise CertificateError(name, f"{name} certifies a larger cost than its ledger was charged; save it again")
    computed = _content(plan, facts)
    compare_text(stored, text, computed, name)
    return SavedCertificate(plan, facts, computed["certificate"])


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) <= LARGEST:
            return data.decode("utf-8")
        reason = f"more than {LARGEST:,} bytes"
    except OSError as error:
        reason = error.strerror or "unreadable"
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    fix = "name a file that optimizer.save_certificate has written"
    raise ConfigError(f"{path}, which cannot be read ({reason})", "the certificate file of a private loop", fix)
