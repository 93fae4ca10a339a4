"""Federation on one machine, for `sordino run --engine flower`, with the same processes as across machines.

The processes are the SuperLink, the gate, the server's process (`app`), and for each silo a SuperNode and the silo's
process. They communicate over TLS on 127.0.0.1, with node keys. When the run ends, or this process dies (also by
SIGKILL), all of them end (`lifeline`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from sordino import codec
from sordino.config import Config, FederationSpec
from sordino.errors import ConfigError, EngineError
from sordino.federation import keys, lifeline
from sordino.federation import new_federation as folders
from sordino.federation.flower_api import JOINED, Link, flower
from sordino.federation.silo_service import SiloSpec
from sordino.runs.execution import Executed
from sordino.runs.folder import RunFolder

HERE = "127.0.0.1"
START_TIMEOUT = 180.0  # seconds in which a process must listen
GRACE = 3.0  # seconds between SIGTERM and SIGKILL
LOADING = 300.0  # seconds that all processes may take to start and to load
SORDINO = (sys.executable, "-P", "-m", "sordino")
PULSE = 0.2  # seconds between two checks for a new round


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    """Return whether a process listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HERE, port)) == 0


def descendants(process: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def kill_all(processes: list[int]) -> None:
    """Kill processes by id; a process that has ended already is no error."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def flower_command(name: str) -> str:
    """Return the path of a Flower command next to this Python interpreter; refuse a missing one."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        found = f"no {name} beside {sys.executable}"
        raise EngineError(found, "Flower's commands (package flwr)", "run pip install 'sordino[flower]'")
    return str(path)


@codec.hides_values
@dataclass
class LocalFederation:
    """Processes of a federation whose `folder` `sordino federation new` wrote; `silos` are in the plan's order."""

    folder: Path
    silos: tuple[str, ...]
    home: Path  # where keys, logs, the SuperLink's database and FLWR_HOME are
    port: int = field(default_factory=free_port)  # of the gate: what nodes reach
    link_port: int = field(default_factory=free_port)  # of the SuperLink
    nodes: dict[str, int] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    log_start: dict[str, int] = field(default_factory=dict)  # size of each log when its process was last started
    token: str = field(default_factory=lambda: secrets.token_hex(16))  # in the environment of all processes
    lifeline: subprocess.Popen[bytes] | None = None  # kills them when this process ends

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "flwr").mkdir(exist_ok=True)
        keys.write_certificates(self.home)
        link = {"address": self.link_address, "root-certificates": str(self.home / "ca.crt")}
        (self.home / "flwr" / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "here", "here": link}}))
        for name in self.silos:
            self.nodes.setdefault(name, free_port())
            keys.write_node_key(self.home / name)
        for secret in (self.home / f"{name}.secret" for name in ("link", *self.silos)):
            if not secret.exists():
                keys.write_private(secret, secrets.token_bytes(32))

    @property
    def link_address(self) -> str:
        return f"{HERE}:{self.link_port}"

    @property
    def link(self) -> Link:
        """Client of the SuperLink's Control and Runtime APIs."""
        return Link(self.link_address, *((self.home / name).read_bytes() for name in ("ca.crt", "link.secret")))

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # its tools call others
        own = {"PATH": path, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(self.home / "flwr")}
        own |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        return {**os.environ, **own, lifeline.VARIABLE: self.token}

    def start(self, name: str, command: list[str]) -> None:
        """Start a process in a new session, with its output in home/NAME.log; it is killed when this process ends."""
        if self.lifeline is None:
            self.lifeline = subprocess.Popen(
                [sys.executable, "-I", "-S", lifeline.__file__, self.token], env={}, stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        with open(self.home / f"{name}.log", "ab") as log:
            self.log_start[name] = log.tell()
            self.running[name] = subprocess.Popen(
                command, cwd=self.home, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, umask=0o077,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a process and its descendants."""
        process = self.running.pop(name, None)
        if process is not None:
            kill_all([process.pid, *descendants(process.pid)])
            process.wait()

    def stop(self) -> None:
        """Stop all processes and their descendants: SIGTERM first, then SIGKILL."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for name in list(self.running):
            self.kill(name)
        if self.lifeline is not None:
            self.lifeline.communicate()  # ends its input: it kills whatever is left
            self.lifeline = None

    def __enter__(self) -> LocalFederation:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def superlink(self) -> None:
        """Start the SuperLink with a database; only registered node keys may connect, and it executes no app code."""
        self.check_free(self.link_port)
        command = [flower_command("flower-superlink"), "--host", HERE, "--port", str(self.link_port)]
        command += ["--database", "link.db", "--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        command += ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        command += ["--isolation", "process", "--superexec-auth-secret-file", "link.secret"]
        self.start("superlink", command)
        self.wait_for("superlink", self.link_port)

    def gate(self) -> None:
        """Start the gate, through which nodes reach the SuperLink."""
        self.check_free(self.port)
        where = ["--host", HERE, "--port", str(self.port), "--link", self.link_address]
        self.start("gate", [*SORDINO, "federation", "gate", ".", *where])

    def check_free(self, port: int) -> None:
        """Refuse a port on which some process listens."""
        if is_listening(port):
            found = f"port {port} of {HERE}, which is taken"
            raise EngineError(found, "a free port", "set another port in [federation]")

    def supernode(self, name: str, link: int | None = None) -> None:
        """Start a silo's SuperNode in the mode that executes no app code."""
        port = self.nodes[name]
        command = [flower_command("flower-supernode"), "--isolation", "process", "--host", HERE, "--port", str(port)]
        command += ["--superlink", f"{HERE}:{link or self.port}", "--root-certificates", "ca.crt"]
        command += ["--auth-supernode-private-key", name, "--superexec-auth-secret-file", f"{name}.secret"]
        self.start(f"node.{name}", command)

    def silo(self, name: str, among: Path | None = None) -> None:
        """Start the process with a silo's data, policy and ledger."""
        folder = (among or self.folder) / "silos" / name
        where = ["--node", f"{HERE}:{self.nodes[name]}", "--secret", str(self.home / f"{name}.secret")]
        where += ["--key", str(self.home / name)]
        self.start(f"silo.{name}", [*SORDINO, "silo", "serve", str(folder), *where])

    def up(self) -> None:
        """Start all processes, register each silo's node key under its name, and wait until all nodes are admitted.

        The SuperLink begins with an empty database: the database of an earlier start would block the nodes' keys for a
        minute, and has runs that nobody continues. The silos' replies are in their ledgers.
        """
        for file in self.home.glob("link.db*"):
            file.unlink()
        self.gate()
        self.superlink()
        for name in self.silos:
            self.silo(name)  # silos take longest to load
        self.wait_for("gate", self.port)
        for name in self.silos:
            self.link.register(keys.registered_form(keys.public_text(self.home / f"{name}.pub")), name)
            self.supernode(name)
        for name in self.silos:
            self.join(name)

    def submit(self, out: Path, resume: bool = False, app: Path | None = None) -> str:
        """Start the server's process of a run, and return its name; a successful run has a certificate in `out`."""
        folder, name = (app or self.folder) / "server", f"server.{out.name}"
        for file in ("ca.crt", "link.secret"):
            if not (folder / file).exists():
                (folder / file).symlink_to((self.home / file).absolute())
        words = [str(folder), "--out", str(out), "--link", self.link_address, *(["--resume"] if resume else [])]
        self.start(name, [*SORDINO, "federation", "run", *words])
        return name

    def wait_for(self, name: str, port: int) -> None:
        """Wait until a process listens on a port; if it ends instead, raise an error with the end of its log."""
        until = time.monotonic() + START_TIMEOUT
        while not is_listening(port):
            if self.running[name].poll() is not None or time.monotonic() > until:
                found = f"a process ({name}) that does not start ({self.log_tail(name)})"
                raise EngineError(found, f"a process that listens on port {port}", f"see {name}.log in {self.home}")
            time.sleep(0.1)

    def join(self, name: str, link: int | None = None, seconds: float = 300.0) -> None:
        """Start a silo's node again and again until the SuperLink admits it.

        The SuperLink blocks the key of a killed node for a minute.
        """
        node, until = f"node.{name}", time.monotonic() + seconds
        while node not in self.running or JOINED not in self.log_text(node):
            if time.monotonic() > until:
                found = f"the node of silo {name!r}, which the SuperLink does not admit ({self.log_tail(node)})"
                raise EngineError(found, "a registered key", f"see {node}.log in {self.home}")
            if node not in self.running or self.running[node].poll() is not None:
                self.supernode(name, link)
            time.sleep(0.2)

    def check(self) -> None:
        """Raise an error if a process has ended."""
        for name, process in self.running.items():
            if process.poll() is not None:
                found = f"a process ({name}) that has ended ({self.log_tail(name)})"
                raise EngineError(found, "a process until the end of the run", "start the run again with --resume")

    def log_text(self, name: str) -> str:
        """Return the log of a process since its last start."""
        return (self.home / f"{name}.log").read_bytes()[self.log_start.get(name, 0) :].decode(errors="replace")

    def log_tail(self, name: str) -> str:
        """Return the last 400 characters of a process's log in one line."""
        return " ".join(self.log_text(name).split())[-400:]


def run_locally(
    config: Config, out: Path, *, resume: bool = False, on_round: Callable[[dict[str, Any]], None]
) -> Executed:
    """Run a configuration in a federation on this machine, whose folder is written beside `out`.

    If the configuration has no [federation], each client of the plan is a silo with that client's part of the data set.
    """
    flower()
    out, names = out.absolute(), config.task.silos
    home = out.with_name(f"{out.name}-federation")
    if config.federation is None:
        names = names or tuple(f"silo{i}" for i in range(config.plan.clients.population))
        config = replace(config, federation=FederationSpec(silos=names))
    assert config.federation is not None
    config = replace(config, federation=replace(config.federation, simulated=True), task=config.task.absolute())
    assert config.federation is not None
    if not resume and (out.exists() or home.exists()):
        there = out if out.exists() else home
        found = f"{there}, a folder that exists already"
        raise ConfigError(found, "a new folder", "choose another --out, or add --resume")
    with LocalFederation(home / "app", config.federation.silos, home) as federation:
        if not (home / "app").exists():
            own = {name: keys.public_text(home / f"{name}.pub") for name in config.federation.silos}
            write_app(home / "app", replace(config, federation=replace(config.federation, keys=own)))
        federation.up()
        server = federation.submit(out, resume=resume and (out / "run.json").exists())
        wait_for_certificate(federation, server, out, config.federation, on_round)
    return Executed(out, RunFolder.open(out).history(), json.loads((out / "certificate.json").read_text()))


def write_app(folder: Path, config: Config) -> None:
    """Write the folders of server and silos, in which each silo has its part of the data set, all or none."""
    assert config.federation is not None
    draft = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    folders.write_federation(draft, config, codec.to_toml(config))
    for name in config.federation.silos:
        own = draft / "silos" / name
        spec = replace(SiloSpec.read(own), simulated=True, group="", secret="", key="")
        (own / "silo.toml").write_text(tomli_w.dumps(codec.dump(spec)))
    draft.rename(folder)


def wait_for_certificate(
    federation: LocalFederation,
    server: str,
    out: Path,
    spec: FederationSpec,
    on_round: Callable[[dict[str, Any]], None],
) -> None:
    """Wait for the certificate; raise an error if a process ends before it, or if no round ends for too long."""
    history, reported = out / "history.jsonl", 0
    patience = LOADING + spec.tries * spec.timeout
    until = time.monotonic() + patience
    while True:
        finished = (out / "certificate.json").exists()
        text = history.read_text("utf-8") if history.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be half written
        for line in lines[reported:]:
            on_round(json.loads(line))
            reported, until = reported + 1, time.monotonic() + patience
        if finished:
            return
        ended = federation.running[server].poll() is not None
        said = [line for line in federation.log_text(server).splitlines() if line.startswith("sordino: ")]
        if ended and said and "certificate.json" not in said[-1]:
            raise EngineError(f"a run that stopped: {said[-1].removeprefix('sordino: ')}")  # with its own fix
        if not (ended and said):
            federation.check()
        if time.monotonic() > until:
            found = f"a run that has stalled ({federation.log_tail('superlink')})"
            raise EngineError(found, "a new round within the timeout", "start the run again with --resume")
        time.sleep(PULSE)
