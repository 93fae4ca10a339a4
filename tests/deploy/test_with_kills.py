"""Promise: whoever is killed in the middle of a round, the run goes on or is resumed, and nobody pays for it twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.deploy import hospitals

from sordino.engines.base import ClientJob, Collected, Engine
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError
from sordino.federation import secagg
from sordino.federation.local_federation import LocalFederation
from sordino.ledger.ledger import Ledger
from sordino.loop import run as rounds_of
from sordino.outcome import final_model
from sordino.rng import Seeded
from sordino.runs.folder import RunFolder

ROUNDS = 5


@dataclass(frozen=True)
class Killing:
    """A run under which processes are killed in the middle of a round."""

    out: Path
    guarded: Path

    @property
    def rounds(self) -> int:
        """How many are done."""
        file = self.out / "history.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def charged(self, name: str) -> int:
        """How often a silo was charged for this run, by its own ledger."""
        file = self.guarded / "silos" / name / "ledger.db"
        if not ((self.out / "run.json").exists() and file.exists()):  # the silo's process may not have begun
            return 0
        run = json.loads((self.out / "run.json").read_text())["run"]
        with Ledger.open(file) as ledger:
            try:
                return sum(ledger.charges(run).values())
            except ConfigError:  # not admitted yet
                return 0

    def mid_round(self, *names: str) -> None:
        """Until these silos have paid for a round that is not done."""
        hospitals.until(f"{names} in the middle of a round", lambda: min(map(self.charged, names)) > self.rounds)

    def next_round(self) -> None:
        done = self.rounds
        hospitals.until(f"round {done + 1}", lambda: self.rounds > done)

    def apps(self) -> list[int]:
        """The process of the run's ServerApp: the one that holds its folder's lock."""
        return [int(process.name) for process in Path("/proc").glob("[0-9]*") if holds(process, self.out)]


def holds(process: Path, out: Path) -> bool:
    try:
        return any(os.path.samefile(link, out / "checkpoint" / "lock") for link in (process / "fd").iterdir())
    except OSError:
        return False


def test_each_is_killed_in_the_middle_of_a_round_and_the_run_goes_on(
    federation: LocalFederation, guarded: Path, ground: Path
) -> None:
    text = hospitals.UNBUDGETED.format(rounds=ROUNDS)  # the silos' own ledgers decide
    app = hospitals.make(ground / "app_kills", hospitals.file_of(ground, "killed", text, timeout=600.0))
    run = Killing(ground / "runs" / "killed", guarded)
    federation.submit(run.out, app=app)

    run.mid_round("va")
    federation.kill("node.va")  # a SuperNode, whose silo has paid and stored; another silo, at the same moment
    federation.kill("silo.hungarian")
    federation.silo("hungarian", guarded)  # its ledger says what it has sent
    federation.join("va")
    run.next_round()

    run.mid_round("cleveland")
    apps = run.apps()
    assert apps
    for process in apps:
        os.kill(process, signal.SIGKILL)
    hospitals.until("the ServerApp's end", lambda: not run.apps())
    federation.submit(run.out, resume=True, app=app)
    run.next_round()

    run.mid_round("switzerland")
    federation.kill("superlink")  # its database stays: nodes and server ask it again
    federation.superlink()
    made = hospitals.finished(federation, run.out)

    charges = [run.charged(name) for name in hospitals.SILOS]
    print(f"{ROUNDS} rounds, four kills, charges {charges}")
    assert made["counts"]["charges_per_silo"] == charges
    for name, count in zip(hospitals.SILOS, charges, strict=True):
        assert ROUNDS <= count <= ROUNDS + (1 if name == "hungarian" else 0)
    assert RunFolder.open(run.out).certify() == made


# ---- in a secure sum -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Only(Engine):
    """In one process, with the clients of each round that a run across processes has reported."""

    came: Mapping[int, list[int]]  # by round
    offers = InProcess(own_noise=True).offers

    def prepare(self, *given: Any) -> Any:
        worker = InProcess(own_noise=True).prepare(*given)
        honest = worker.collect

        def collect(job: ClientJob) -> Collected:
            who = np.asarray(self.came[job.public.t], dtype=np.int64)
            return replace(honest(replace(job, cohort=who)), reported=who)

        worker.collect = collect  # type: ignore[method-assign]
        return worker


def test_a_silo_that_dies_in_a_secure_sum_leaves_the_sum_of_those_who_sent_and_no_other(
    federation: LocalFederation, ground: Path
) -> None:
    """Killed once it has paid for its row: before the row has left, it is not in the sum; after that it is."""
    text = hospitals.planned("noise_shares", 2)
    folder = hospitals.make(ground / "summed", hospitals.file_of(ground, "summed", text, timeout=60.0, quorum=3))
    for name in hospitals.SILOS:
        federation.kill(f"silo.{name}")
        hospitals.allow(folder, name, epsilon=1000.0)
        federation.silo(name, folder)
    run = Killing(ground / "runs" / "summed", folder)
    federation.submit(run.out, app=folder)
    run.mid_round("va")
    federation.kill("silo.va")
    federation.silo("va", folder)  # it knows nothing of the session any more, and is not waited for
    made = hospitals.finished(federation, run.out)

    notes = [json.loads(line) for line in (run.out / "receipts.jsonl").read_text().splitlines()]
    came = {t: [client for client, _ in note["paid"]] for t, note in enumerate(notes)}
    assert len(came) == 2
    assert all(len(who) >= 3 for who in came.values())
    config = hospitals.config_of(ground, "summed")
    whole = hospitals.whole(config)
    *_, last = rounds_of(config.plan, whole, engine=Only(came), streams=Seeded(config.run.seed))
    alone = hospitals.flat(final_model(config.plan, whole, last.state).state_dict())
    moved = alone - hospitals.parameters(run.out)
    print(f"in the sums: {came}; charges {made['counts']['charges_per_silo']}")
    grid = secagg.grid_of(config.plan).step  # shares are rounded there, not here; a row more or less is 100 times that
    assert float(moved.abs().max()) <= 1e-5 + 2 * config.plan.rounds * grid
    assert made["counts"]["charges_per_silo"][:3] == [run.charged(name) for name in hospitals.SILOS[:3]]
