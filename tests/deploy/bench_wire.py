"""Promise: a round costs little more than an echo of its size, and far less CPU than Flower's subprocess mode.

Both are ratios within one run on one machine, of the least of several: what else the machine does only adds. The echo
takes the same path with the same number of bytes; subprocess mode is the same jobs answered by the same silo code
inside a ClientApp, which Flower starts anew for every message.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from statistics import median

import pytest
from tests.deploy import hospitals

from sordino.engines.messages import Job
from sordino.federation.flower_api import APP
from sordino.federation.local_federation import HERE, LocalFederation, descendants, flower_command

ECHO = """
import sys, time
from pathlib import Path
from sordino.federation.flower_api import Node
from sordino.federation.silo_service import serve
print("ready", flush=True)
serve(Node(sys.argv[1], Path(sys.argv[2]).read_bytes()), lambda data: data[: len(data) // 4], lambda line: None)
"""
SERVER = """
import json
import os
import sys
import time
from pathlib import Path

from sordino.federation.flower_api import FlowerTransport, Link

address, home, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
link, took = Link(address, *((home / name).read_bytes() for name in ("ca.crt", "link.secret"))), []
with link.grid(link.take(link.start_run())) as grid:
    for _ in range({rounds}):
        began = time.monotonic()
        jobs = {{i: os.urandom({size}) for i in range(4)}}
        assert len(dict(FlowerTransport(grid, {silos}).exchange(jobs, time.time() + 300))) == 4
        took.append(time.monotonic() - began)
out.parent.mkdir(parents=True, exist_ok=True)
out.with_suffix(".part").write_text(json.dumps(took))
out.with_suffix(".part").rename(out)
"""
SUBPROCESSES = """
import sys
from pathlib import Path

from sordino.federation import flower_api
from sordino.federation.app import Server

flower_api.app_bundle = Path(sys.argv[1]).read_bytes
Server(Path(sys.argv[2]), sys.argv[3]).run(Path(sys.argv[4]))
"""
CLIENT = '''"""The silo's own code, where Flower runs it: one process for every message."""

from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    from sordino.config import load_config
    from sordino.federation.flower_api import pack, unpack
    from sordino.federation.keys import signer_of
    from sordino.federation.silo_service import SiloService, SiloSpec, model_hash, silo_task

    folder = Path(context.node_config["folder"])
    spec, config = SiloSpec.read(folder), load_config(folder / "fed.toml")
    silo = SiloService.open(folder, spec, silo_task(config, spec, folder), model_hash(config), lambda line: None)
    signer, data = signer_of(config.federation, Path(context.node_config["key"])), unpack(message)
    return Message(pack(signer.signed_answer(data, silo.reply(data))), reply_to=message)
'''
ROUNDS, TURNS = 3, 2


def cpu(federation: LocalFederation) -> float:
    """CPU seconds of all processes of the federation, with the children that they have waited for."""
    total = 0.0
    for process in federation.running.values():
        for one in [process.pid, *descendants(process.pid)]:
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
def measured(federation: LocalFederation, ground: Path) -> dict[str, float]:
    """Ours and an echo in turns, then subprocess mode, on the same nodes."""
    file = hospitals.file_of(ground, "cost", hospitals.planned("no_noise", ROUNDS), timeout=600.0)
    ours, rounds, echoes, spent = hospitals.make(ground / "cost", file), list[float](), list[float](), list[float]()
    for turn in range(TURNS):
        taken, cost = here(federation, ground / "runs" / f"cost{turn}", ours)
        rounds, spent = rounds + taken, [*spent, cost]
        echoes += echo(federation, ground, turn)
    found = {"round": min(rounds), "echo": min(echoes), "cpu": min(spent)}
    found["subprocess"] = in_subprocesses(federation, ground, ours)
    print(f"{len(rounds)} rounds, seconds {spread(rounds)}; {len(echoes)} echoes, seconds {spread(echoes)}")
    print(f"CPU seconds of {ROUNDS} rounds, all processes: {found['cpu']:.1f}, subprocess {found['subprocess']:.1f}")
    return found


def spread(taken: list[float]) -> str:
    return f"{min(taken):.2f} / {median(taken):.2f} / {max(taken):.2f}"


def here(federation: LocalFederation, out: Path, ours: Path) -> tuple[list[float], float]:
    """Seconds of each round but the first, and CPU seconds of the whole run."""
    for name in hospitals.SILOS:
        federation.kill(f"silo.{name}")
        federation.silo(name, ours)
    ready(federation, "records, node")
    began = cpu(federation)
    federation.submit(out, app=ours)
    hospitals.finished(federation, out)
    return seconds(out)[1:], cpu(federation) - began


def ready(federation: LocalFederation, word: str) -> None:
    """Until every silo's process has loaded: what that costs is not the wire's."""
    said = [f"silo.{name}" for name in hospitals.SILOS]
    hospitals.until("the silos", lambda: all(word in federation.log_text(name) for name in said))


def echo(federation: LocalFederation, ground: Path, turn: int) -> list[float]:
    """Seconds of each round but the first of an echo that is asked and answers as many bytes."""
    for name in hospitals.SILOS:
        federation.kill(f"silo.{name}")
        node, secret = f"{HERE}:{federation.nodes[name]}", str(federation.home / f"{name}.secret")
        federation.start(f"silo.{name}", [sys.executable, "-c", ECHO, node, secret])
    ready(federation, "ready")
    out = ground / "runs" / f"echo{turn}.json"
    text = SERVER.format(silos=repr(hospitals.SILOS), rounds=ROUNDS, size=size_of(ground))
    words = [federation.link_address, str(federation.home), str(out)]
    federation.start(f"server.{out.stem}", [sys.executable, "-c", text, *words])
    hospitals.until("the echo", out.exists)
    for name in hospitals.SILOS:
        federation.kill(f"silo.{name}")
    took: list[float] = json.loads(out.read_text())
    return took[1:]


def size_of(ground: Path) -> int:
    """Bytes of a job of ours."""
    config = hospitals.config_of(ground, "cost")
    start = hospitals.whole(config).layout.flatten(hospitals.whole(config).model)
    job = Job("0" * 32, config.plan, 0, "simulation", 0, 1.8e9, config.plan.public(0, len(start)), start)
    return len(job.to_bytes())


def in_subprocesses(federation: LocalFederation, ground: Path, ours: Path) -> float:
    """CPU of the same rounds where every message starts a process."""
    app, out, bundle = hospitals.make(ground / "sub", ground / "cost.toml"), ground / "runs" / "sub", ground / "sub.fab"
    with zipfile.ZipFile(bundle, "w") as held:
        held.writestr("pyproject.toml", APP.replace("none:app", "sordino_app.client:app"))
        held.writestr("sordino_app/__init__.py", "")
        held.writestr("sordino_app/client.py", CLIENT)
    for name in hospitals.SILOS:
        hospitals.leave(federation, name)
        subprocess_node(federation, name, ours)
    for name in hospitals.SILOS:
        federation.join(name)
    began, server = cpu(federation), app / "server"
    for name in ("ca.crt", "link.secret"):
        (server / name).symlink_to(federation.home / name)
    words = [str(bundle), str(server), federation.link_address, str(out)]
    federation.start("server.sub", [sys.executable, "-c", SUBPROCESSES, *words])
    hospitals.finished(federation, out, 1800)
    return cpu(federation) - began


def subprocess_node(federation: LocalFederation, name: str, ours: Path) -> None:
    config = f'folder="{ours / "silos" / name}" key="{federation.home / name}"'
    command = [flower_command("flower-supernode"), "--host", HERE, "--port", str(federation.nodes[name])]
    command += ["--superlink", f"{HERE}:{federation.port}", "--root-certificates", "ca.crt", "--node-config", config]
    command += ["--auth-supernode-private-key", name]
    federation.start(f"node.{name}", command)


def test_a_round_takes_at_most_one_and_a_half_echoes(measured: dict[str, float]) -> None:
    assert measured["round"] <= 1.5 * measured["echo"], measured


def test_all_processes_take_a_third_of_the_cpu_of_subprocess_mode(measured: dict[str, float]) -> None:
    assert measured["cpu"] <= measured["subprocess"] / 3, measured
