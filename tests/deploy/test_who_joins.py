"""Promise: nobody joins whose key was not registered, and what leaves a silo is its noised message alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.deploy import hospitals
from tests.deploy.proxy import Proxy

from sordino.engines.base import ClientJob
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError, EngineError
from sordino.federation import keys
from sordino.federation.flower_api import Node, flower
from sordino.federation.local_federation import HERE, LocalFederation, flower_command, free_port
from sordino.federation.silo_service import SiloSpec, serve
from sordino.ledger.ledger import Ledger
from sordino.rng import Seeded


@pytest.fixture(scope="module")
def strangers(federation: LocalFederation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Five who want in, at once; what each has said when it has given up."""
    other = keys.write_certificates(tmp_path_factory.mktemp("other"))
    keys.write_node_key(federation.home / "stranger")
    here, ca = f"{HERE}:{federation.port}", str(federation.home / "ca.crt")
    asks = {
        "unregistered": ["--root-certificates", ca, "--auth-supernode-private-key", "stranger"],
        "no_key": ["--root-certificates", ca],
        "other_ca": ["--root-certificates", str(other / "ca.crt"), "--auth-supernode-private-key", "va"],
        "plain": ["--insecure"],
        "in_use": ["--root-certificates", ca, "--auth-supernode-private-key", "va"],
    }
    for name, words in asks.items():
        command = [
            flower_command("flower-supernode"),
            "--isolation",
            "process",
            "--host",
            HERE,
            "--port",
            str(free_port()),
        ]
        federation.start(f"stranger.{name}", [*command, "--superlink", here, "--max-retries", "2", *words])
    until = time.monotonic() + 300
    while time.monotonic() < until and any(federation.running[f"stranger.{n}"].poll() is None for n in asks):
        time.sleep(0.2)
    said = {name: (federation.home / f"stranger.{name}.log").read_text() for name in asks}
    yield said
    for name in asks:
        federation.kill(f"stranger.{name}")


@pytest.mark.parametrize("who", ["unregistered", "no_key", "other_ca", "plain", "in_use"])
def test_who_has_no_right_to_does_not_join(who: str, strangers: dict[str, str]) -> None:
    assert "SuperNode ID:" not in strangers[who], strangers[who]
    assert any(word in strangers[who] for word in ("Exit Code", "rror", "retrying", "Giving up")), strangers[who]


def test_a_silo_behind_a_secret_is_not_served_by_another_user(federation: LocalFederation) -> None:
    f = flower()
    federation.wait_for("node.cleveland", federation.nodes["cleveland"])
    with pytest.raises(f.HTTPStatusError):
        Node(f"{HERE}:{federation.nodes['cleveland']}", b"another secret").poller()()


# ---- what leaves -----------------------------------------------------------------------------------------------------


def test_the_noised_message_leaves_byte_for_byte_and_nothing_of_the_clean_one(
    federation: LocalFederation, guarded: Path, ground: Path
) -> None:
    """All that leaves the node of `va` in a round, TLS taken off, beside the row that it was made from."""
    proxy = Proxy(federation.home, federation.port)
    hospitals.leave(federation, "va")
    text = hospitals.RECIPE.format(rounds=1, noise="secure")
    app = hospitals.make(ground / "app_proxy", hospitals.file_of(ground, "proxied", text, timeout=600.0))
    out = ground / "runs" / "proxied"
    try:
        federation.join("va", proxy.start())
        federation.submit(out, app=app)
        hospitals.finished(federation, out)
        kept = proxy.everything
    finally:
        hospitals.leave(federation, "va")
        proxy.stop()
        federation.join("va")
    with Ledger.open(guarded / "silos" / "va" / "ledger.db") as ledger:
        run = (out / "run.json").read_text().split('"run": "')[1][:32]
        (job,) = ledger.charges(run)
        message = ledger.replay(job)
    assert message is not None
    assert message in kept
    clean = clean_row(ground)
    noised = np.frombuffer(message[-len(clean) :], "<f4")
    assert float(np.abs(noised - np.frombuffer(clean, "<f4")).max()) > 0
    assert not any(clean[i : i + 32] in kept for i in range(0, len(clean) - 31))


def clean_row(ground: Path) -> bytes:
    """What `va` would send in round 1 without noise."""
    config = hospitals.config_of(ground, "proxied")
    whole = hospitals.whole(config)
    worker = InProcess(own_noise=True).prepare(config.plan, whole.as_silo(3), Seeded(0))
    start = whole.layout.flatten(whole.model)
    [(_, rows, _norms)] = worker.encoded(ClientJob(config.plan.public(0, len(start)), start, np.array([3])))
    return rows[0].to(torch.float32).numpy().tobytes()


# ---- bad inputs ------------------------------------------------------------------------------------------------------


def test_a_taken_port_is_one_sentence(federation: LocalFederation, tmp_path: Path) -> None:
    ports = federation.port, federation.link_port
    other = LocalFederation(federation.folder, federation.silos, tmp_path, *ports)
    for port, start in ((federation.link_port, other.superlink), (federation.port, other.gate)):
        with pytest.raises(EngineError, match=f"port {port} .* which is taken"):
            start()


def test_an_unreadable_key_and_an_unknown_silo_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "node.pub").write_text("nothing")
    with pytest.raises(ConfigError, match="no readable public key"):
        keys.public_text(tmp_path / "node.pub")
    with pytest.raises(ConfigError, match=r"silo.toml, which cannot be read"):
        SiloSpec.read(tmp_path)
    (tmp_path / "silo.toml").write_text('name = "va"\ndataset = "npz"\nsecrets = 3\n')
    with pytest.raises(ConfigError, match="unknown key"):
        SiloSpec.read(tmp_path)


def test_a_node_that_does_not_answer_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def say(line: str, level: str = "INFO") -> None:
        said.append(line)
        if len(said) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("sordino.federation.silo_service.IDLE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        serve(Node(f"{HERE}:{free_port()}"), lambda data: data, say)
    assert all("does not answer" in line for line in said)
