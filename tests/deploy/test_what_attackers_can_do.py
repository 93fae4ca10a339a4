"""Promise: who holds ca.crt, a member's key or an account on the server runs no code there and speaks in no other name.

Each row of the table "Who can do what" in docs/deploy.md that is an attack is a test here, in test_who_joins.py (keys
and certificates) or in test_secure_sum.py (members of a secure sum). After all of them the silos have paid nothing.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import socket
import ssl
import stat
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.deploy import hospitals

from sordino.errors import ConfigError, EngineError
from sordino.federation import keys
from sordino.federation.flower_api import APP, Link, flower
from sordino.federation.local_federation import HERE, SORDINO, LocalFederation, flower_command, free_port
from sordino.federation.new_federation import rendered
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import JobEntry


def charges(guarded: Path) -> dict[str, int]:
    """How many jobs each silo's ledger has charged, in all runs."""
    found = dict.fromkeys(hospitals.SILOS, 0)
    for name in hospitals.SILOS:
        file = guarded / "silos" / name / "ledger.db"
        if not file.exists():  # a silo that has not loaded yet
            continue
        with suppress(ConfigError), Ledger.open(file) as ledger:
            found[name] = sum(isinstance(entry, JobEntry) for entry in ledger.history(name))
    return found


@pytest.fixture(autouse=True)
def _nobody_pays(guarded: Path) -> Iterator[None]:
    before = charges(guarded)
    yield
    assert charges(guarded) == before


def evil_app(mark: Path) -> bytes:
    """An app whose import, on server or node, leaves a mark."""
    with io.BytesIO() as data:
        with zipfile.ZipFile(data, "w") as bundle:
            bundle.writestr("pyproject.toml", APP.replace("none:app", "evil:app"))
            bundle.writestr("evil.py", f"open({str(mark)!r}, 'w').close()\n")
        return data.getvalue()


# ---- with ca.crt alone, at the address that silos reach --------------------------------------------------------------


def member(federation: LocalFederation) -> Link:
    """What a member has: the server's public address and ca.crt."""
    return Link(f"{HERE}:{federation.port}", (federation.home / "ca.crt").read_bytes(), b"guessed")


def test_a_member_starts_no_run_and_registers_removes_or_lists_nobody(federation: LocalFederation) -> None:
    f = flower()
    from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, UnregisterNodeRequest

    keys.write_node_key(federation.home / "stranger")
    public = keys.registered_form(keys.public_text(federation.home / "stranger.pub"))
    asked = {
        "StartRun": f.StartRunRequest(),
        "StopRun": f.StopRunRequest(run_id=1),
        "RegisterNode": f.RegisterNodeRequest(public_key=public, name="va"),
        "UnregisterNode": UnregisterNodeRequest(node_id=1),
        "ListNodes": ListNodesRequest(),
        "ListRuns": ListRunsRequest(),
    }
    for name, request in asked.items():
        with member(federation).control() as client, pytest.raises(f.HTTPStatusError) as caught:
            getattr(client, name)(request)
        assert caught.value.response.status_code == 404
    with pytest.raises(EngineError, match="gives no task"):
        member(federation).take(1)


def raw(federation: LocalFederation, request: bytes) -> bytes:
    """All that the gate answers to bytes that no client library would send."""
    trust = ssl.create_default_context(cafile=str(federation.home / "ca.crt"))
    plain, said = socket.create_connection((HERE, federation.port), 20), b""
    with trust.wrap_socket(plain, server_hostname=HERE) as wire:
        wire.sendall(request)
        while data := wire.recv(65536):
            said += data
    return said


PATHS = (
    "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/openapi.json", "/health", "//v1/control/start-run",
    "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol%2fstart-run",
    "/v1/fleet/pull-messages?/../../control/start-run", "/v1/fleet/", "https://127.0.0.1/v1/control/start-run",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_other_path_passes_the_gate(path: str, federation: LocalFederation) -> None:
    request = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    assert raw(federation, request.encode()).startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))


@pytest.mark.parametrize(
    "head", ["Content-Length: 4\r\nTransfer-Encoding: chunked", "Content-Length: 4", "Content-Length: 5"]
)
def test_a_request_inside_another_does_not_reach_the_superlink(head: str, federation: LocalFederation) -> None:
    before = federation.log_text("superlink").count("ControlServicer")
    inner = "POST /v1/control/list-runs HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    outer = f"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: here\r\n{head}\r\n\r\n0\r\n\r\n{inner}"
    raw(federation, outer.encode())
    assert federation.log_text("superlink").count("ControlServicer") == before
    with federation.link.control() as client:  # on the loopback the same request is heard, and counted
        from flwr.proto.control_pb2 import ListRunsRequest

        client.ListRuns(ListRunsRequest())
    hospitals.until("its line", lambda: federation.log_text("superlink").count("ControlServicer") > before)


# ---- with an account on the server, where Control is reached ---------------------------------------------------------


def test_an_app_of_somebody_else_is_run_by_nobody_and_stopped(
    federation: LocalFederation, guarded: Path, ground: Path, tmp_path: Path
) -> None:
    f, mark = flower(), tmp_path / "mark"
    data = evil_app(mark)
    with federation.link.control() as client:
        bundle = f.Fab(hash_str=hashlib.sha256(data).hexdigest(), content=data)
        evil = int(client.StartRun(f.StartRunRequest(fab=bundle)).run_id)
    own = federation.link.start_run()
    assert evil != own
    federation.link.take(own)
    federation.link.stop_run(own)
    from flwr.proto.control_pb2 import ListRunsRequest

    with federation.link.control() as client:
        status = client.ListRuns(ListRunsRequest(run_id=evil)).run_dict[evil].status
    assert (status.status, status.sub_status) == ("finished", "stopped")
    assert not mark.exists()
    with pytest.raises(EngineError, match="gives no task"):  # and nobody takes a task without the secret
        Link(federation.link_address, federation.link.ca, b"guessed" * 8).take(own)


def test_a_key_that_was_registered_under_a_silos_name_is_not_that_silo(
    federation: LocalFederation, guarded: Path, ground: Path
) -> None:
    """`va` is down, and another key is registered as `va`, with a node and a silo that would answer."""
    keys.write_node_key(federation.home / "thief")
    shutil.copy(federation.home / "va.secret", federation.home / "thief.secret")
    federation.link.register(keys.registered_form(keys.public_text(federation.home / "thief.pub")), "va")
    hospitals.leave(federation, "va")
    federation.nodes["thief"] = free_port()
    text = hospitals.RECIPE.format(rounds=2, noise="secure")
    file = hospitals.file_of(ground, "borrowed", text, timeout=20.0, tries=1)
    app, out = hospitals.make(ground / "app_borrowed", file), ground / "runs" / "borrowed"
    try:
        federation.join("thief")
        where = ["--node", f"{HERE}:{federation.nodes['thief']}", "--secret", str(federation.home / "thief.secret")]
        own = ["silo", "serve", str(guarded / "silos" / "va"), "--key", str(federation.home / "thief")]
        federation.start("silo.thief", [*SORDINO, *own, *where])
        federation.submit(out, app=app)
        log = out.with_name("borrowed.log")
        hospitals.until("the end of the run", lambda: log.exists() and "sordino: " in log.read_text())
        assert "va (not connected)" in log.read_text()
        assert "fewer clients reported" in log.read_text()
        assert "run " not in federation.log_text("silo.thief")  # it was sent nothing
    finally:
        for name in ("node.thief", "silo.thief"):
            federation.kill(name)
        federation.join("va")


def test_a_release_without_pinned_keys_is_refused_before_any_silo_is_asked(
    federation: LocalFederation, guarded: Path, ground: Path
) -> None:
    text = hospitals.RECIPE.format(rounds=2, noise="secure")
    app = hospitals.make(ground / "app_unpinned", hospitals.file_of(ground, "unpinned", text))
    file = app / "server" / "fed.toml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("keys.va")))
    federation.submit(ground / "runs" / "unpinned", app=app)
    log = ground / "runs" / "unpinned.log"
    hospitals.until("the refusal", lambda: log.exists() and "sordino: " in log.read_text())
    assert "no public key of va in [federation]" in log.read_text()


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_superlinks_database_is_its_owners_alone(federation: LocalFederation) -> None:
    files = [
        file for file in federation.home.iterdir() if file.name.startswith(("link.db", "link.secret", "server.key"))
    ]
    assert len(files) >= 3
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 for file in files)
    assert not (federation.home / "ca.key").exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
def test_there_is_one_ca_and_its_key_is_not_in_the_servers_folder(tmp_path: Path) -> None:
    server = tmp_path / "server"
    server.mkdir()
    script = server / "certificates.sh"
    script.write_text(rendered("certificates.sh", port=8001))
    script.chmod(0o755)

    def made() -> tuple[int, str]:
        done = subprocess.run([str(script), "server.example"], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert made()[0] == 0
    first = (server / "ca.crt").read_bytes(), (server / "server.crt").read_bytes()
    assert not list(server.glob("ca.key"))
    assert stat.S_IMODE((tmp_path / "ca" / "ca.key").stat().st_mode) == 0o600
    assert made()[0] == 0  # the next certificate, by the same CA
    assert (server / "ca.crt").read_bytes() == first[0]
    assert (server / "server.crt").read_bytes() != first[1]
    verify = ["openssl", "verify", "-CAfile", str(server / "ca.crt"), str(server / "server.crt")]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
    shutil.move(tmp_path / "ca", tmp_path / "elsewhere")
    code, said = made()
    assert (code, "whose key is not in" in said) == (2, True)
    assert (server / "ca.crt").read_bytes() == first[0]


def test_flwr_itself_starts_no_run_at_the_address_that_silos_reach(federation: LocalFederation, tmp_path: Path) -> None:
    """`flwr run evil`, as a member would: by the command, with ca.crt."""
    app = tmp_path / "evil"
    with zipfile.ZipFile(io.BytesIO(evil_app(tmp_path / "mark"))) as bundle:
        bundle.extractall(app)
    home = tmp_path / "flwr"
    home.mkdir()
    where = f'address = "{HERE}:{federation.port}"\nroot-certificates = "{federation.home}/ca.crt"\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{where}')
    command = [flower_command("flwr"), "run", str(app), "here"]
    own = {**federation.environment, "FLWR_HOME": str(home)}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not (tmp_path / "mark").exists()
