"""Promise: silos with a policy and a ledger train together for release, and whoever is killed, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.deploy import hospitals

from sordino.errors import ConfigError
from sordino.flower.loopback import Loopback
from sordino.privacy.ledger import Ledger
from sordino.runs.folder import RunFolder
from sordino.training import train

ROUNDS = 5


@pytest.fixture(scope="module")
def started(federation: Loopback, guarded: Path, ground: Path) -> dict[str, Path]:
    """A run for release, and one that the policies forbid, at once."""
    file = hospitals.file_of(ground, "forbidden", hospitals.planned("local_noise", 3, "secure"))
    apps = {"release": guarded, "forbidden": hospitals.make(ground / "app_forbidden", file)}
    for name, app in apps.items():
        federation.submit(ground / "runs" / name, app=app)
    return {name: ground / "runs" / name for name in apps}


def test_a_plan_that_a_policy_forbids_is_refused_before_anything_is_charged(
    started: dict[str, Path], guarded: Path
) -> None:
    out = started["forbidden"]
    log = out.with_name("forbidden.log")
    until("the refusal", lambda: log.exists() and "sordino: " in log.read_text())
    said = log.read_text()
    assert said.count("\n") == 1
    assert "the plan protects one client, and the policy wants one record" in said
    assert not (out / "certificate.json").exists()
    for name in hospitals.SILOS:
        with Ledger.open(guarded / "silos" / name / "ledger.db") as ledger:
            assert ledger.spent(name).runs <= 1  # the other run's


def test_twelve_rounds_for_release_learn_and_cost_what_a_simulation_says(
    federation: Loopback, started: dict[str, Path], ground: Path
) -> None:
    out = started["release"]
    made = hospitals.finished(federation, out)
    config = hospitals.config_of(ground, "silo")
    deltas = [silo["delta"] for silo in made["adversaries"][-1]["silos"]]
    here = train(config.plan, hospitals.whole(config), deltas=deltas, allow_large_delta=True)
    last = RunFolder.open(out).history()[-1]["accuracy"]
    print(f"accuracy {last:.4f}, in one process {here.history[-1]['accuracy']:.4f}")
    assert last >= (0.77 if hospitals.real() else here.history[-1]["accuracy"] - 0.05)
    assert [silo["epsilon"] for silo in made["adversaries"][-1]["silos"]] == [
        silo["epsilon"] for silo in here.certificate["adversaries"][-1]["silos"]
    ]
    assert RunFolder.open(out).certify() == made
    assert made["counts"]["charged_by_each_silo"] == [12] * 4
    assert made["noise"]["mode"] == "secure"


# ---- killed ----------------------------------------------------------------------------------------------------------


def until(what: str, done: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait for something that must come about; how long it takes is nobody's promise."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.2)


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
        if not (self.out / "run.json").exists():
            return 0
        run = json.loads((self.out / "run.json").read_text())["run"]
        with Ledger.open(self.guarded / "silos" / name / "ledger.db") as ledger:
            try:
                return sum(ledger.charges(run).values())
            except ConfigError:  # not admitted yet
                return 0

    def mid_round(self, *names: str) -> None:
        """Until these silos have paid for a round that is not done."""
        until(f"{names} in the middle of a round", lambda: min(map(self.charged, names)) > self.rounds)

    def next_round(self) -> None:
        done = self.rounds
        until(f"round {done + 1}", lambda: self.rounds > done)

    def apps(self) -> list[int]:
        """The process of the run's ServerApp: the one that holds its folder's lock."""
        return [int(process.name) for process in Path("/proc").glob("[0-9]*") if holds(process, self.out)]


def holds(process: Path, out: Path) -> bool:
    try:
        return any(os.path.samefile(link, out / "checkpoint" / "lock") for link in (process / "fd").iterdir())
    except OSError:
        return False


def test_each_is_killed_in_the_middle_of_a_round_and_the_run_goes_on(
    federation: Loopback, guarded: Path, ground: Path
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
    for process in run.apps():
        os.kill(process, signal.SIGKILL)
    until("the ServerApp's end", lambda: not run.apps())
    federation.submit(run.out, resume=True, app=app)
    run.next_round()

    run.mid_round("switzerland")
    federation.kill("superlink")  # and the ServerApp with it; the database stays
    until("the ServerApp's end", lambda: not run.apps())
    federation.superlink()
    federation.submit(run.out, resume=True, app=app)
    made = hospitals.finished(federation, run.out)

    charges = [run.charged(name) for name in hospitals.SILOS]
    print(f"{ROUNDS} rounds, four kills, charges {charges}")
    assert made["counts"]["charged_by_each_silo"] == charges
    for name, count in zip(hospitals.SILOS, charges, strict=True):
        assert ROUNDS <= count <= ROUNDS + (1 if name == "hungarian" else 0)
    assert RunFolder.open(run.out).certify() == made
