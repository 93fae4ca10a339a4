"""Promises of what ranks say to one another: JSON and arrays; what a stranger sends runs nothing."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sordino.engines.messages import END, Limits, Order
from sordino.errors import DataError, RankError
from sordino.parts.encoding import Public
from sordino.runs.launch import launch

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(population=6, size=10)
COHORT = np.array([0, 5, 2])
PUBLIC = Public(t=3, clip_norm=0.1, size=10, mask=torch.tensor([1, 9]))


@pytest.mark.parametrize(
    "order",
    [
        Order(),
        Order(PUBLIC, COHORT),
        Order(Public(t=0), COHORT[:0]),
        Order(Public(t=10**9, clip_norm=math.inf, size=10), COHORT),
    ],
)
def test_what_rank_zero_says_is_what_the_others_read(order: Order) -> None:
    read = LIMITS.read(order.to_bytes())
    assert read is not None
    assert len(order.to_bytes()) <= LIMITS.most
    if order.public is None or order.cohort is None:
        assert read == order
        return
    assert read.public is not None
    assert read.cohort is not None
    assert np.array_equal(read.cohort, order.cohort)
    assert (read.public.t, read.public.clip_norm, read.public.size) == (
        order.public.t,
        order.public.clip_norm,
        order.public.size,
    )
    mask, wanted = read.public.mask, order.public.mask
    assert mask is wanted or (mask is not None and wanted is not None and torch.equal(mask, wanted))


def test_the_end_of_a_run_is_an_order_too() -> None:
    assert LIMITS.read(END) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]\n",
        b"17\n",
        b'{"t": 1}\n',
        b"[" * 4000,
        b"\x80\x04\x95",
        Order(PUBLIC, COHORT).to_bytes()[:-8],
        Order(PUBLIC, COHORT).to_bytes() + b"\0" * 8,
        Order(PUBLIC, np.array([6])).to_bytes(),
        Order(PUBLIC, np.array([-1])).to_bytes(),
        Order(Public(t=0, mask=torch.tensor([10])), COHORT).to_bytes(),
        Order(Public(t=-1), COHORT).to_bytes(),
        Order(Public(t=0, clip_norm=math.nan), COHORT).to_bytes(),
        Order(PUBLIC, COHORT).to_bytes().replace(b'"t": 3', b'"t": true'),
        Order(PUBLIC, COHORT).to_bytes().replace(b'"<i8", 3]', b'"<i8", -2]'),
    ],
)
def test_what_rank_zero_would_not_say_is_refused(body: bytes) -> None:
    with pytest.raises(DataError):
        LIMITS.read(body)


def test_damaged_orders_are_refused_or_name_only_clients_and_coordinates_that_exist() -> None:
    rng, whole = np.random.default_rng(0), Order(PUBLIC, COHORT).to_bytes()
    for _ in range(500):
        body = bytearray(whole)
        body[rng.integers(len(body))] ^= 1 << int(rng.integers(8))
        try:
            read = LIMITS.read(bytes(body))
        except DataError:
            continue
        assert read is not None
        if read.cohort is not None:
            assert set(read.cohort.tolist()) <= set(range(6))


def test_nothing_between_ranks_is_a_pickle() -> None:
    words = re.compile(r"import pickle|object_list|_object\(|torch\.load|torch\.save|marshal")
    sources = [*(ROOT / "src/sordino/engines").glob("*.py"), *(ROOT / "src/sordino").rglob("launch.py")]
    assert [(file.name, found) for file in sources for found in words.findall(file.read_text())] == []


ENEMY = """
import os, sys
import torch.distributed as dist
from tests.engines.cases import CASES
from sordino.engines.distributed import Distributed, _fingerprint, join
case = CASES["central noise"]
if os.environ["RANK"] == "1":
    Distributed().prepare(case.plan, case.task, case.streams)

class Evil:
    def __reduce__(self):
        return os.mkdir, (sys.argv[1],)

join(case.task.device, 60.0).compare(_fingerprint(case.plan, case.task, case.streams))
dist.broadcast_object_list([Evil()], src=0)
sys.exit(4)  # says nothing more
"""


def test_a_pickle_that_runs_code_is_refused_by_the_rank_that_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    with pytest.raises(RankError, match=r"rank 1 of 2 .*no order"):
        launch(["-c", ENEMY, str(tmp_path / "owned")], 2)
    assert not (tmp_path / "owned").exists()


LISTENS = """
import os, sys, torch
from sordino.engines.distributed import join
join(torch.device("cpu"), 60.0).compare(b"0")
held = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
own = {os.stat(fd).st_ino for fd in held if os.path.exists(fd)}
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
print(*(row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[9]) in own), file=open(sys.argv[1], "a"))
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for sockets in /proc")
def test_ranks_of_one_machine_listen_on_the_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = next((name for _, name in socket.if_nameindex() if name != "lo"), "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", other)
    assert launch(["-c", LISTENS, str(tmp_path / "found")], 2) == 0
    found = (tmp_path / "found").read_text().split()
    assert len(found) >= 2
    assert set(found) == {"0100007F"}  # 127.0.0.1


LEAVES = """
import atexit, torch, torch.distributed as dist
atexit.register(lambda: print("there" if dist.is_initialized() else "left"))
from sordino.engines.distributed import join
join(torch.device("cpu"), 60.0)
"""
MEETS = """
import torch
import sordino.engines.distributed as group
group.STORE_SECONDS = 1.0
try:
    group.join(torch.device("cpu"), 600.0)
except group.RankError as error:
    print(error)
"""


def alone(code: str, rank: int, size: int, port: int) -> str:
    """What one rank that was started by hand prints."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **place}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_rank_leaves_its_group_before_the_interpreter_goes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert alone(LEAVES, 0, 1, port) == "left\n"


@pytest.mark.parametrize(("rank", "words"), [(0, "is in use"), (1, "is not rank 0")])
def test_a_port_that_is_taken_ends_every_rank_with_a_sentence(rank: int, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sentence = alone(MEETS, rank, 2, taken.getsockname()[1])
    assert f"rank {rank} could not connect to the other ranks" in sentence
    assert words in sentence
