"""Promise: a round costs little more than an echo of its size, and far less CPU than Flower's subprocess mode.

Both are ratios within one run on one machine. The echo takes the same path with the same number of bytes; subprocess
mode is the same jobs answered by the same silo code inside a ClientApp, which Flower starts anew for every message.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from tests.deploy import hospitals

from sordino.flower.loopback import HERE, Loopback, below, tool

ECHO = """
import sys, time
from pathlib import Path
from sordino.flower.internals import Node
from sordino.flower.post import serve
serve(Node(sys.argv[1], Path(sys.argv[2]).read_bytes()), lambda data: data[: len(data) // 2], lambda line: None)
"""
SERVER = '''"""Bytes to all silos and back, round after round; how long each took."""

import json
import os
import time
from pathlib import Path

from flwr.serverapp import ServerApp

from sordino.flower.link import Link

app = ServerApp()


@app.main()
def main(grid, context):
    link, took = Link(grid, {silos}), []
    for _ in range({rounds}):
        began = time.monotonic()
        jobs = {{i: os.urandom({size}) for i in range(4)}}
        assert len(dict(link.carry(jobs, time.time() + 300))) == 4
        took.append(time.monotonic() - began)
    out = Path(str(context.run_config["out"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".part").write_text(json.dumps(took))
    out.with_suffix(".part").rename(out)
'''
CLIENT = '''"""The silo's own code, where Flower runs it: one process for every message."""

from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    from sordino.flower.counter import open_silo
    from sordino.flower.internals import packed, unpacked
    from sordino.flower.post import SiloSpec

    folder = Path(context.node_config["folder"])
    silo = open_silo(folder, SiloSpec.read(folder), lambda line: None)
    return Message(packed(silo.reply(unpacked(message))), reply_to=message)
'''
ROUNDS = 2


def cpu(federation: Loopback) -> float:
    """CPU seconds of all processes of the federation, with the children that they have waited for."""
    total = 0.0
    for process in federation.running.values():
        for one in [process.pid, *below(process.pid)]:
            try:
                words = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            total += sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def seconds(out: Path) -> list[float]:
    """How long the rounds of a run took, from its history's marks."""
    return [json.loads(line)["diagnostic, not private"]["seconds"] for line in (out / "history.jsonl").open()]


@pytest.fixture(scope="module")
def measured(federation: Loopback, ground: Path) -> dict[str, float]:
    """Ours, an echo and subprocess mode, one after the other on the same nodes."""
    file = hospitals.file_of(ground, "cost", hospitals.planned("no_noise", ROUNDS), timeout=300.0)
    ours = hospitals.make(ground / "cost", file)
    for name in hospitals.SILOS:
        federation.kill(f"silo.{name}")
        federation.silo(name, ours)
    found: dict[str, float] = {}
    began, out = cpu(federation), ground / "runs" / "cost"
    federation.submit(out, app=ours)
    hospitals.finished(federation, out)
    found["cpu"] = cpu(federation) - began
    found["round"] = median(seconds(out)[1:])
    found["echo"] = echo(federation, ground, ours)
    found["subprocess"] = in_subprocesses(federation, ground, ours)
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


def echo(federation: Loopback, ground: Path, ours: Path) -> float:
    """The median round of an echo that answers as many bytes as a reply has."""
    for name in hospitals.SILOS:
        federation.kill(f"silo.{name}")
        node, secret = f"{HERE}:{federation.nodes[name]}", str(federation.home / f"{name}.secret")
        federation.start(f"silo.{name}", [sys.executable, "-c", ECHO, node, secret])
    app, out = hospitals.make(ground / "echo", ground / "cost.toml"), ground / "runs" / "echo.json"
    text = SERVER.format(silos=repr(hospitals.SILOS), rounds=ROUNDS + 1, size=1200)
    (app / "sordino_app" / "server.py").write_text(text)
    federation.submit(out, app=app)
    waited(out)
    for name in hospitals.SILOS:
        federation.kill(f"silo.{name}")
    took: list[float] = json.loads(out.read_text())
    return median(took[1:])


def in_subprocesses(federation: Loopback, ground: Path, ours: Path) -> float:
    """CPU of the same rounds where every message starts a process."""
    app, out = hospitals.make(ground / "sub", ground / "cost.toml"), ground / "runs" / "sub"
    (app / "sordino_app" / "client.py").write_text(CLIENT)
    for name in hospitals.SILOS:
        federation.kill(f"node.{name}")
    until = time.monotonic() + 200
    while not all(joined(federation, name) for name in hospitals.SILOS):
        for name in hospitals.SILOS:
            process = federation.running.get(f"node.{name}")
            if process is None or process.poll() is not None:
                subprocess_node(federation, name, ours)
        assert time.monotonic() < until
        time.sleep(0.5)
    began = cpu(federation)
    federation.submit(out, app=app)
    hospitals.finished(federation, out, 900)
    spent = cpu(federation) - began
    for name in hospitals.SILOS:
        federation.kill(f"node.{name}")
    return spent


def joined(federation: Loopback, name: str) -> bool:
    log = federation.home / f"node.{name}.log"
    return f"node.{name}" in federation.running and "SuperNode ID:" in log.read_text().rsplit("Starting Flower", 1)[-1]


def subprocess_node(federation: Loopback, name: str, ours: Path) -> None:
    config = f'folder="{ours / "silos" / name}"'
    command = [tool("flower-supernode"), "--host", HERE, "--port", str(federation.nodes[name])]
    command += ["--superlink", f"{HERE}:{federation.port}", "--root-certificates", "ca.crt", "--node-config", config]
    command += ["--auth-supernode-private-key", name, "--disable-runtime-dependency-installation"]
    federation.start(f"node.{name}", command)


def waited(out: Path) -> None:
    until = time.monotonic() + 300
    while not out.exists():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_round_takes_at_most_one_and_a_half_echoes(measured: dict[str, float]) -> None:
    assert measured["round"] <= 1.5 * measured["echo"], measured


def test_all_processes_take_a_third_of_the_cpu_of_subprocess_mode(measured: dict[str, float]) -> None:
    assert measured["cpu"] <= measured["subprocess"] / 3, measured
