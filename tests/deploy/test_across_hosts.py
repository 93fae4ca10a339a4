"""Promise: what docs/deploy.md says, command by command, makes a federation of five machines.

Every machine is a network namespace with an address of its own on a wire between them, and sees of the file system its
own /srv alone. It needs root and iproute2, and makes namespaces, so it is asked for: `make test-hosts`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.deploy import hospitals
from tests.pages import ROOT, blocks, machine

from sordino.federation.flower_api import JOINED
from sordino.federation.local_federation import descendants, flower_command, kill_all

TOOLS = ("ip", "unshare", "mount", "openssl", "ssh-keygen")
missing = [name for name in TOOLS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif("SORDINO_HOSTS" not in os.environ, reason="makes network namespaces: make test-hosts"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces"),
    pytest.mark.skipif(bool(missing), reason=f"not here: {', '.join(missing)}"),
]
SERVER, WIRE = "192.0.2.1", "192.0.2.{}"  # addresses of documentation: nobody's, and none is reached from outside
ALONE = 'mount --make-rprivate / && mount --bind "$0" /srv && mount -t tmpfs none "$1" && shift && cd /srv && exec "$@"'


@dataclass
class Host:
    """One machine: a network namespace, and a folder that is its /srv."""

    name: str
    space: str
    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def command(self, words: str) -> list[str]:
        alone = ["unshare", "--mount", "sh", "-c", ALONE, str(self.folder), str(self.folder.parent)]
        return ["ip", "netns", "exec", self.space, *alone, "sh", "-ec", f"cd sordino\n{words}"]

    def follow(self, title: str, **other: str) -> Iterator[str]:
        """What the page has this machine do: each command, before it is done; those that stay are begun."""
        for script, stays in machine(title):
            for found, instead in {"server.example": SERVER, **other}.items():
                script = script.replace(found, instead)
            command = script.splitlines()[-1]
            yield command
            if stays:
                self.begin(command.split()[0].strip("./"), script)
            else:
                self.do(script)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(flower_command("flwr")).parent), os.environ["PATH"]])
        own = {"HOME": "/srv", "EDITOR": "cat"}  # silo.toml and policy.toml are right as they come
        return {**os.environ, **own, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def do(self, words: str) -> str:
        """Commands to their end; what they said."""
        done = subprocess.run(self.command(words), env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def begin(self, name: str, words: str) -> None:
        """One command that stays."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                self.command(words), env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def log_text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self.running.values():
            kill_all([*descendants(process.pid), process.pid])
            process.wait()


def wired(hosts: list[Host]) -> None:
    """A switch in the first host's namespace, a cable to each other one, and no way out."""
    first = hosts[0].space
    subprocess.run(["ip", "-n", first, "link", "add", "switch", "type", "bridge"], check=True)
    subprocess.run(["ip", "-n", first, "addr", "add", f"{SERVER}/24", "dev", "switch"], check=True)
    for place, host in enumerate(hosts[1:], start=2):
        cable = ["link", "add", f"port{place}", "type", "veth", "peer", "name", "eth0", "netns", host.space]
        for words in (
            cable,
            ["link", "set", f"port{place}", "master", "switch"],
            ["link", "set", f"port{place}", "up"],
        ):
            subprocess.run(["ip", "-n", first, *words], check=True)
        subprocess.run(["ip", "-n", host.space, "addr", "add", f"{WIRE.format(place)}/24", "dev", "eth0"], check=True)
        subprocess.run(["ip", "-n", host.space, "link", "set", "eth0", "up"], check=True)
    subprocess.run(["ip", "-n", first, "link", "set", "switch", "up"], check=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    folder = tmp_path_factory.mktemp("hosts")
    made = [Host(name, f"sordino{os.getpid()}-{name}", folder / name) for name in ("server", *hospitals.SILOS)]
    try:
        for host in made:
            (host.folder / "sordino").mkdir(parents=True)
            subprocess.run(["ip", "netns", "add", host.space], check=True)
            subprocess.run(["ip", "-n", host.space, "link", "set", "lo", "up"], check=True)
        wired(made)
        yield {host.name: host for host in made}
    finally:
        for host in made:
            host.stop()
        for host in made:
            with suppress(subprocess.CalledProcessError):
                subprocess.run(["ip", "netns", "del", host.space], check=True)


def page_file() -> str:
    """The federation's file as the page gives it."""
    return next(block.text for block in blocks(ROOT / "docs" / "deploy.md") if block.language == "toml")


def test_five_machines_walk_the_page(hosts: dict[str, Host], ground: Path) -> None:
    server, silos = hosts["server"], [hosts[name] for name in hospitals.SILOS]
    (server.folder / "sordino" / "fed.toml").write_text(page_file().replace("rounds = 12", "rounds = 3"))
    made = server.folder / "sordino" / "hospitals"

    # the server makes the folders and its certificate, gets the public rows, and starts the SuperLink
    for command in server.follow("on the server"):
        if "superlink" in command:
            shutil.copy(ground / "test.npz", made / "server" / "public.npz")
    hospitals.until("the SuperLink", lambda: "running" in server.log_text("superlink.sh").lower())
    assert not (made / "server" / "ca.key").exists()

    # every silo gets its folder and ca.crt, adds its rows, makes its key, and sends the public half
    walks = []
    for host in silos:
        own = host.folder / "sordino"
        shutil.copytree(made / "silos" / host.name, own, dirs_exist_ok=True)
        shutil.copy(made / "server" / "ca.crt", own)
        shutil.copy(ground / f"{host.name}.npz", own / "rows.npz")
        walks.append(host.follow("in every silo"))
        assert next(walks[-1]) == "./key.sh"
        assert next(walks[-1]).startswith("sordino federation pin")  # and key.sh is done
        shutil.copy(own / "node.pub", made / "server" / f"{host.name}.pub")

    # the server pins the keys and sends the file, the silos compare and join, and the run is begun, then once more
    after = server.follow("on the server, when the keys are there")
    assert next(after).startswith("sordino federation pin")
    first = next(after)  # and the keys are pinned and registered
    assert first.startswith("sordino federation run")
    for host, walk in zip(silos, walks, strict=True):
        shutil.copy(made / "server" / "fed.toml", host.folder / "sordino" / "fed.toml")
        while "ledger" not in next(walk):
            pass
        hospitals.until(f"{host.name}'s node", lambda host=host: JOINED in host.log_text("supernode.sh"))  # type: ignore[misc]
    out = made / "server" / "runs" / "a"
    log = out.with_name("a.log")
    resumed = next(after)  # and the first run is done
    assert (out / "certificate.json").exists(), log.read_text()
    held = (out / "certificate.json").read_bytes()
    assert "--resume" in resumed
    certify = next(after)
    assert log.read_text().count("sordino: ") > 1
    assert (certify, list(after)) == ("sordino certify runs/a", [])
    assert (out / "certificate.json").read_bytes() == held
    assert json.loads(held)["counts"]["charges_per_silo"] == [3] * 4
    for host, walk in zip(silos, walks, strict=True):
        assert list(walk) == []  # and `ledger show` was done
        assert "jobs charged 3" in host.do("sordino ledger show ledger.db")
        assert host.do("ls /srv").split() == sorted(["supernode.sh.log", "sordino.log", "sordino"])
    print(log.read_text())


def test_a_machine_sees_its_own_files_and_the_server_and_nobodys_node(hosts: dict[str, Host]) -> None:
    silo = hosts["va"]
    probe = (
        "import socket, sys\ns = socket.socket(); s.settimeout(5)\nprint(s.connect_ex((sys.argv[1], int(sys.argv[2]))))"
    )
    reached = [
        silo.do(f"python - {host} {port} <<'END'\n{probe}\nEND").strip()
        for host, port in (
            *((SERVER, 8000), ("127.0.0.1", 9104)),
            *((SERVER, 8001), (WIRE.format(2), 9101), ("127.0.0.1", 8000)),
        )
    ]
    assert reached[:2] == ["0", "0"]
    assert all(code != "0" for code in reached[2:])
    assert silo.do(f"ls {hosts['server'].folder.parent}") == ""
