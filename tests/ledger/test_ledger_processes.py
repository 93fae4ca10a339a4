"""The ledger under races and kills: real processes, and no message that left without a charge of its own.

20 kills here, 200 with HYPOTHESIS_PROFILE=nightly.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from sordino.accounting.events import GaussianNoise
from sordino.accounting.pld import gaussian_epsilon
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Item, JobEntry, Limit

KILLS = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 20
ROOM, RACERS = 60, 8
SILO = """
import os, sys, secrets
from pathlib import Path
from sordino.errors import BudgetError
from sordino.accounting.events import GaussianNoise
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Item

folder, first, jobs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ledger = Ledger.open(folder / "l")
drawn, sent = (os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for name in ("drawn", "sent"))
made = 0
print("ready", flush=True)
sys.stdin.readline()


def note(file, job, message):
    os.write(file, f"{job} {message.decode()}\\n".encode())


for job in range(first, first + jobs):
    def make():
        message = secrets.token_hex(8).encode()  # the noise
        note(drawn, job, message)
        return message
    try:
        note(sent, job, RELEASE(ledger, "run", str(job), (Item(GaussianNoise(4.0)),), make))
        made += 1
    except BudgetError:
        break
print(made, flush=True)
"""
HONEST = """
def RELEASE(ledger, run, job, items, make):
    receipt = ledger.charge(run, job, items)
    return ledger.store(receipt, make()) if receipt.message is None else receipt.message
"""
NOISE_FIRST = """
def RELEASE(ledger, run, job, items, make):  # sabotage: the charge comes after the noise
    message = make()
    DIE
    receipt = ledger.charge(run, job, items)
    return ledger.store(receipt, message) if receipt.message is None else receipt.message
"""
NEVER_STORED = """
def RELEASE(ledger, run, job, items, make):  # sabotage: what was sent is not kept, and a job is charged once
    if not ledger.charges(run).get(job):
        ledger.charge(run, job, items)
    return make()
"""


def script(release: str = HONEST) -> str:
    head, tail = SILO.split("folder, first")
    return f"{head}\n{release}\nfolder, first{tail}"


def started(folder: Path, first: int = 0, jobs: int = 10**6, release: str = HONEST) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", script(release), str(folder), str(first), str(jobs)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Ledger.open(tmp_path / "l", create=True) as ledger:
        room = gaussian_epsilon((ROOM + 0.5) ** 0.5 / 2, 1e-5)
        ledger.limit("own", Limit(room, 1e-5, "record"))
        ledger.admit("run", "own", Request("record", "replace_one", ()), whole=False)
    return tmp_path


def pairs(file: Path) -> list[tuple[str, str]]:
    """Job and message of every whole line."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [(line.split()[0], line.split()[1]) for line in lines]


def check_promises(folder: Path) -> int:
    """Every draw has a charge of its own; of a job one message ever left, and it was kept; the sum is in the limit."""
    with Ledger.open(folder / "l") as ledger:
        charges, spent = ledger.charges("run"), ledger.statement("own")
        draws, sent = Counter(job for job, _ in pairs(folder / "drawn")), pairs(folder / "sent")
        assert all(draws[job] <= charges.get(job, 0) for job in draws), "noise was drawn that nobody paid for"
        assert all(len({one for job, one in sent if job == each}) == 1 for each, _ in sent), "two messages for one job"
        assert all(ledger.replay(job) == message.encode() for job, message in sent), "a message left and was not kept"
        assert spent.epsilon <= spent.limit.epsilon
        assert spent.items == (Item(GaussianNoise(4.0), sum(charges.values())),)
        return len(sent)


def test_eight_processes_that_race_get_as_many_charges_as_one_alone(folder: Path) -> None:
    racers = [started(folder, 1000 * k) for k in range(RACERS)]
    for racer in racers:
        let_go(racer)
    made = [int(racer.communicate()[0]) for racer in racers]
    assert sum(made) == ROOM
    assert check_promises(folder) == ROOM


def test_no_message_leaves_without_a_charge_of_its_own_whatever_is_killed_when(folder: Path) -> None:
    """Killed at random moments, and started again on the same jobs."""
    with Ledger.open(folder / "l") as ledger:
        ledger.limit("own", Limit(1e6, 1e-5, "record"))
    coins = random.Random(0)
    for _ in range(KILLS):
        process = started(folder, len(pairs(folder / "sent")) // 2, 400)
        before = len(pairs(folder / "sent"))
        let_go(process)
        while len(pairs(folder / "sent")) < before + 2 and process.poll() is None:
            time.sleep(0.002)
        time.sleep(coins.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert check_promises(folder) > KILLS
    with Ledger.open(folder / "l") as ledger:
        lines = [line for line in ledger.history("own") if isinstance(line, JobEntry)]
    assert len(lines) >= len({job for job, _ in pairs(folder / "sent")})


def killed(folder: Path, release: str) -> None:
    """The silo dies at DIE in its first job, and is started again."""
    dying = release.replace("DIE", "os.kill(os.getpid(), 9)")
    for text in (dying, release.replace("DIE", "pass")):
        process = started(folder, 0, 1, text)
        let_go(process)
        process.communicate()


def test_a_silo_that_draws_its_noise_before_the_charge_is_caught(folder: Path) -> None:
    killed(folder, NOISE_FIRST)
    with pytest.raises(AssertionError, match="noise was drawn that nobody paid for"):
        check_promises(folder)


def test_a_silo_that_does_not_keep_what_it_sends_is_caught(folder: Path) -> None:
    for _ in range(2):
        process = started(folder, 0, 1, NEVER_STORED)
        let_go(process)
        process.communicate()
    with pytest.raises(AssertionError, match=r"noise was drawn|two messages|not kept"):
        check_promises(folder)


def test_a_silo_that_dies_between_noise_and_store_pays_again_and_the_first_draw_never_leaves(folder: Path) -> None:
    dies = """
def RELEASE(ledger, run, job, items, make):
    receipt = ledger.charge(run, job, items)
    message = make()
    DIE
    return ledger.store(receipt, message)
"""
    killed(folder, dies)
    assert check_promises(folder) == 1
    assert len(pairs(folder / "drawn")) == 2
