"""Promise: silos with a policy and a ledger train together for release, and whoever is killed, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy import hospitals

from sordino.flower.loopback import Loopback
from sordino.privacy.ledger import Ledger
from sordino.runs.folder import RunFolder
from sordino.training import train

ROUNDS = 8


def paid(guarded: Path, name: str, run: str) -> int:
    """How often a silo was charged for a run, by its own ledger."""
    with Ledger.open(guarded / "silos" / name / "ledger.db") as ledger:
        return sum(ledger.charges(run).values())


def test_twelve_rounds_for_release_learn_and_cost_what_a_simulation_says(
    federation: Loopback, guarded: Path, ground: Path
) -> None:
    out = ground / "runs" / "release"
    federation.submit(out, app=guarded)
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


def rounds_done(out: Path) -> int:
    file = out / "history.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def until(what: str, done: Callable[[], bool], federation: Loopback | None = None, seconds: float = 400.0) -> None:
    """Wait, and start nodes anew that have ended, as a service unit does."""
    end = time.monotonic() + seconds
    while not done():
        if federation is not None:
            federation.revive()
        assert time.monotonic() < end, what
        time.sleep(0.1)


def server_apps(out: Path) -> list[int]:
    """Processes of the run's ServerApp: those that hold its folder's lock."""
    held = out / "checkpoint" / "lock"
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if any(os.path.samefile(link, held) for link in (process / "fd").iterdir()):
                    found.append(int(process.name))
            except OSError:
                continue
    return found


def test_each_is_killed_once_and_the_run_goes_on(federation: Loopback, guarded: Path, ground: Path) -> None:
    text = hospitals.UNBUDGETED.format(rounds=ROUNDS)  # the silos' own ledgers decide
    app = hospitals.make(ground / "app_kills", hospitals.file_of(ground, "killed", text, timeout=40.0, tries=6))
    out = ground / "runs" / "killed"
    federation.submit(out, app=app)
    until("round 1", lambda: rounds_done(out) >= 1)

    federation.kill("node.va")  # a SuperNode: its silo's process waits for the next
    federation.supernode("va")
    until("a round after the SuperNode", lambda: rounds_done(out) >= 2, federation)

    federation.kill("silo.hungarian")  # a silo: its ledger says what it has sent
    federation.silo("hungarian", guarded)
    until("a round after the silo", lambda: rounds_done(out) >= 3, federation)

    apps = server_apps(out)
    assert apps
    for process in apps:
        os.kill(process, signal.SIGKILL)
    until("the ServerApp's end", lambda: not server_apps(out))
    federation.submit(out, resume=True, app=app)
    until("a round after the ServerApp", lambda: rounds_done(out) >= 4, federation)

    federation.kill("superlink")  # and the ServerApp with it; the database stays
    until("the ServerApp's end", lambda: not server_apps(out))
    federation.superlink()
    federation.submit(out, resume=True, app=app)
    made = hospitals.finished(federation, out)

    run = json.loads((out / "run.json").read_text())["run"]
    charges = [paid(guarded, name, run) for name in hospitals.SILOS]
    print(f"{ROUNDS} rounds, four kills, charges {charges}")
    assert made["counts"]["charged_by_each_silo"] == charges
    for name, count in zip(hospitals.SILOS, charges, strict=True):
        assert ROUNDS <= count <= ROUNDS + (1 if name == "hungarian" else 0)
    assert RunFolder.open(out).certify() == made


def test_a_plan_that_a_policy_forbids_is_refused_before_anything_is_charged(
    federation: Loopback, guarded: Path, ground: Path
) -> None:
    file = hospitals.file_of(ground, "forbidden", hospitals.planned("local_noise", 3, "secure"))
    app = hospitals.make(ground / "app_forbidden", file)
    out = ground / "runs" / "forbidden"
    federation.submit(out, app=app)
    log = out.with_name("forbidden.log")
    until("the refusal", lambda: log.exists() and "sordino: " in log.read_text())
    said = log.read_text()
    assert said.count("\n") == 1
    assert "the plan protects one client, and the policy wants one record" in said
    assert not (out / "certificate.json").exists()
    for name in hospitals.SILOS:
        with Ledger.open(guarded / "silos" / name / "ledger.db") as ledger:
            assert ledger.spent(name).runs <= 2
