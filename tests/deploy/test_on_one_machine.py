"""Promise: `sordino run fed.toml --engine flower` is the whole federation on one machine, as docs/deploy.md begins."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.deploy import hospitals
from tests.pages import machine

from sordino.federation.local_federation import flower_command, kill_all
from sordino.ledger.ledger import Ledger
from sordino.runs.folder import RunFolder

FILE = """
[task]
dataset = "digits"
partition = { kind = "iid", clients = 2 }

[recipe]
name = "silo"
rounds = 2
sizes = [719, 719]
epsilons = [4.0, 8.0]

[privacy]
noise = "secure"

[federation]
silos = ["north", "south"]
inputs = [1, 8, 8]
classes = 10
"""


def test_the_two_commands_that_the_page_begins_with(tmp_path: Path) -> None:
    (tmp_path / "fed.toml").write_text(FILE)
    for script, stays in machine("on this machine"):
        words = [flower_command("sordino"), *script.split()[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, stays) == (0, False), f"{script}\n{done.stdout}\n{done.stderr}"
    made = RunFolder.open(tmp_path / "runs" / "a").certify()
    assert made["counts"]["charges_per_silo"] == [2, 2]
    assert made["noise"]["mode"] == "secure"
    assert (tmp_path / "hospitals" / "silos" / "south" / "policy.toml").is_file()


def processes_in(folder: Path) -> set[int]:
    """Processes that work in the folder, or were told of it; a process that nobody has waited for does neither."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            inside = Path(os.readlink(place / "cwd")).is_relative_to(folder)
            if inside or str(folder).encode() in (place / "cmdline").read_bytes():
                found.add(int(place.name))
    return found


KINDS = {  # what stands in the command line of each kind of process
    "parent": b"--engine",
    "server": b"federation\0run",
    "gate": b"federation\0gate",
    "superlink": b"flower-superlink",
    "node": b"flower-supernode",
    "silo": b"silo\0serve",
}


def processes_of(kind: str, folder: Path) -> list[int]:
    found = []
    for one in processes_in(folder):
        with suppress(OSError):
            words = Path(f"/proc/{one}/cmdline").read_bytes()
            if KINDS[kind] in words and not (kind == "silo" and b"--engine" in words):
                found.append(one)
    return sorted(found)


@dataclass
class Attempts:
    """One run, begun and resumed as often as one of its processes is killed."""

    folder: Path
    log: list[str] = field(default_factory=list)
    begun: bool = False

    @property
    def rounds(self) -> int:
        history = self.folder / "runs" / "a" / "history.jsonl"
        return history.read_text().count("\n") if history.exists() else 0

    def begin(self) -> subprocess.Popen[bytes]:
        words = [flower_command("sordino"), "run", "fed.toml", "--engine", "flower", "--out", "runs/a"]
        words += ["--resume"] if self.begun else []
        self.begun = True
        with open(self.folder / "said.log", "ab") as said:
            return subprocess.Popen(words, cwd=self.folder, stdout=said, stderr=said)

    def kill(self, kind: str, moment: Callable[[], bool], coins: random.Random) -> None:
        """Kill one process of this kind when it is there and the moment has come; the run ends, and all of it."""
        run = self.begin()
        try:
            hospitals.until(f"the moment for {kind}", lambda: run.poll() is not None or moment())
            hospitals.until(f"a {kind}", lambda: run.poll() is not None or bool(processes_of(kind, self.folder)))
            assert run.poll() is None, (self.folder / "said.log").read_text()
            os.kill(coins.choice(processes_of(kind, self.folder)), signal.SIGKILL)
            began = time.monotonic()
            code = run.wait(600)
            took = time.monotonic() - began
            hospitals.until("the end of all processes", lambda: not processes_in(self.folder))
            self.log.append(f"{kind} after round {self.rounds}: exit {code}, noticed after {took:.1f} s")
            assert code in (2, -signal.SIGKILL), (self.folder / "said.log").read_text()
        finally:
            run.kill()
            run.wait()
            kill_all([*processes_in(self.folder)])

    def finish(self) -> dict[str, Any]:
        assert self.begin().wait(1200) == 0, (self.folder / "said.log").read_text()
        return RunFolder.open(self.folder / "runs" / "a").certify()

    def charged(self, name: str) -> int:
        run = json.loads((self.folder / "runs" / "a" / "run.json").read_text())["run"]
        with Ledger.open(self.folder / "runs" / "a-federation" / "app" / "silos" / name / "ledger.db") as ledger:
            return sum(ledger.charges(run).values())


def test_whoever_is_killed_no_process_is_left_and_resume_ends_with_the_charges_of_a_healthy_run(tmp_path: Path) -> None:
    """In CI the parent, then the server's process, each in a round; SORDINO_KILLS=60: any, at random moments."""
    count, coins = int(os.environ.get("SORDINO_KILLS", "0")), random.Random(os.environ.get("SORDINO_SEED", "0"))
    rounds = 4 if not count else 5 + count
    text = FILE.replace("rounds = 2", f"rounds = {rounds}").replace("epsilons = [4.0, 8.0]", "epsilons = [40.0, 80.0]")
    (tmp_path / "fed.toml").write_text(text)
    attempts = Attempts(tmp_path)
    for number in range(count or 2):
        done, wait = attempts.rounds, time.monotonic() + coins.random() * 30
        if count and number % 3 == 0:  # at any moment, also before the first message
            moment = partial(lambda wait: time.monotonic() > wait, wait)
        else:
            moment = partial(lambda done: attempts.rounds > done, done)
        attempts.kill(list(KINDS)[number % len(KINDS)], moment, coins)
        print(f"{number + 1}: {attempts.log[-1]}", flush=True)
    made = attempts.finish()
    charges = [attempts.charged(name) for name in ("north", "south")]
    print(f"{rounds} rounds, {len(attempts.log)} kills, charges {charges}")
    assert made["counts"]["charges_per_silo"] == charges
    # a silo that ends between charge and message, which every kill may cause, pays again
    assert all(rounds <= one <= rounds + len(attempts.log) for one in charges)
