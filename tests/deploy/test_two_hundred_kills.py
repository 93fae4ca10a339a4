"""Promise: whenever a silo is killed, no message has left it without a charge of its own.

Two hundred SIGKILLs at random moments of a silo that works on jobs; then the ledger is laid beside what came out. The
silo is a process of its own each time, its ledger a file that outlives it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tests.deploy import hospitals

from sordino.config import Config, load_config
from sordino.engines.messages import Job
from sordino.federation.silo_service import SiloService, SiloSpec, model_hash, silo_task
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import JobEntry

KILLS, ROUNDS = 200, 40
fork = multiprocessing.get_context("fork")


def job_of(config: Config, run: str, number: int) -> Job:
    """One job after another: another round, or the same from another start."""
    start = torch.full((46,), float(number // ROUNDS))
    return Job(run, config.plan, 3, "secure", public=config.plan.public(number % ROUNDS, 46), start=start)


class Killed:
    """A silo in a process of its own, started anew whenever it was killed."""

    def __init__(self, make: Callable[[Connection], None]) -> None:
        self.make, self.kills = make, 0
        self._begin()

    def _begin(self) -> None:
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=self.make, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, body: bytes, kill_after: float | None) -> bytes | None:
        """The reply, if it had left before the kill."""
        self.pipe.send_bytes(body)
        if kill_after is not None:
            time.sleep(kill_after)
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
            self.kills += 1
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None
        finally:
            if kill_after is not None:
                self.process.join()
                self._begin()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def test_no_message_leaves_without_its_own_charge(ground: Path) -> None:
    text = hospitals.RECIPE.format(rounds=ROUNDS, noise="secure")
    folder = hospitals.make(ground / "kills", hospitals.file_of(ground, "kills", text)) / "silos" / "va"
    (folder / "policy.toml").write_text((folder / "policy.toml").read_text().replace("epsilon = 8.0", "epsilon = 1e6"))
    config, spec = load_config(folder / "fed.toml"), SiloSpec.read(folder)
    task, run, coins = silo_task(config, spec), secrets.token_hex(16), random.Random(0)

    def work(pipe: Connection) -> None:
        silo = SiloService.open(folder, spec, task, model_hash(config), lambda said: None)
        while True:
            pipe.send_bytes(silo.reply(pipe.recv_bytes()))

    came: dict[str, set[bytes]] = {}
    silo, number = Killed(work), 0
    try:
        began = time.monotonic()
        silo.ask(job_of(config, run, 0).to_bytes(), None)  # it starts, opens the ledger, is admitted, and answers
        usual = time.monotonic() - began
        while silo.kills < KILLS:
            job = job_of(config, run, number)
            dies = coins.random() < 0.7
            reply = silo.ask(job.to_bytes(), coins.random() * 1.3 * usual if dies else None)
            if reply is not None:
                came.setdefault(job.id, set()).add(reply)
                number += 1
    finally:
        silo.end()
    beside(folder, run, came)


def beside(folder: Path, run: str, came: dict[str, set[bytes]]) -> None:
    """The ledger beside what came out."""
    with Ledger.open(folder / "ledger.db") as ledger:
        charged = [entry.job for entry in ledger.history("va") if isinstance(entry, JobEntry)]
        assert len(came) > KILLS / 4
        for job, replies in came.items():
            assert len(replies) == 1, "two different messages for one job"
            assert charged.count(job) >= 1
            assert ledger.replay(job) == next(iter(replies))
        assert sum(ledger.charges(run).values()) == len(charged) <= len(came) + KILLS + 1
        print(f"{KILLS} kills, {len(came)} messages, {len(charged)} charges")
    rows = [reply[-4 * 46 :] for replies in came.values() for reply in replies]
    assert len(set(rows)) == len(rows), "the same noise twice"
