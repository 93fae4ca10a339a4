"""Promise: whoever operates a federation sees who is connected, awaited or has refused, and what is left to spend."""

from __future__ import annotations

import json
import re
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.commands import sordino
from tests.engines.cases import with_test
from tests.engines.test_remote import LOCAL, collected, refusing
from tests.federation.test_encoding import NAMES, OPTIONS, federation, folder_of
from tests.tiny import mlp

from sordino.config import Config
from sordino.engines.messages import Job, Reply
from sordino.errors import ConfigError, QuorumError
from sordino.federation import status
from sordino.federation.app import Watch
from sordino.federation.silo_service import SiloService, SiloSpec, silo_task
from sordino.federation.status import StatusBoard, notify_systemd, prometheus, rotating_log
from sordino.ledger.ledger import Ledger


def project() -> Config:
    config = federation()
    assert config.federation is not None
    return replace(config, federation=replace(config.federation, project="heart 2026"))


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """A server's run as its process tells of it: two silos, one of them away and awaited, the other refuses."""
    said: list[str] = []
    found = Watch.of(project(), tmp_path / "runs" / "a", said.append)
    found.round({"round": 3, "accuracy": 0.8125})
    found.nodes({0: (7, "")}, [1], 1.7e9)
    found.refused({0: "no epsilon is left", 1: "another plan"})
    assert said == ["round 3/2 accuracy=0.8125", f"refused by {NAMES[0]}: no epsilon is left; {NAMES[1]}: another plan"]
    return found


# ---- a server's run --------------------------------------------------------------------------------------------------


def test_status_names_the_round_who_is_connected_awaited_and_refused(watch: Watch, tmp_path: Path) -> None:
    said = sordino("federation", "status", tmp_path)
    assert said.code == 0
    for words in (
        "server a, project 'heart 2026': running",
        "round 3 of 2 accuracy=0.8125",
        f"connected: {NAMES[0]}; not connected: {NAMES[1]}",
        f"waiting for {NAMES[1]} since 2023-11-14T22:13:20Z",
        f"refused by {NAMES[0]}, 1 times",
        "no epsilon is left",
    ):
        assert words in said.out
    [seen] = sordino("federation", "status", tmp_path / "runs" / "a", "--json").json["processes"]
    assert seen["awaited"] == {"silos": [NAMES[1]], "since": "2023-11-14T22:13:20Z"}
    assert seen["plan"] == project().plan.hash
    assert sordino("federation", "status", tmp_path, "--check").code == 0


def test_a_run_that_ended_is_no_running_process(watch: Watch, tmp_path: Path) -> None:
    watch.board.update(state="stopped", awaited=None)
    assert "'heart 2026': stopped" in sordino("federation", "status", tmp_path).out
    assert sordino("federation", "status", tmp_path, "--check").code == 1
    watch.board.update(state="training")
    held = json.loads(watch.board.file.read_text())
    watch.board.file.write_text(json.dumps({**held, "pid": 2**22 + 1}))  # no such process
    assert sordino("federation", "status", tmp_path, "--check").code == 1


def test_a_folder_without_a_status_and_a_damaged_file_are_one_sentence(tmp_path: Path) -> None:
    assert "no status file in" in sordino("federation", "status", tmp_path).sentence
    (tmp_path / "status.json").write_text("{")
    assert "which cannot be read" in sordino("federation", "status", tmp_path).sentence


def test_status_and_log_are_their_owners_alone(watch: Watch, tmp_path: Path) -> None:
    for name in ("a.status.json", "a.log"):
        assert stat.S_IMODE((tmp_path / "runs" / name).stat().st_mode) == 0o600


def test_a_log_has_time_and_level_and_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LARGEST", 1000)
    log = rotating_log(tmp_path / "x.log")
    for i in range(60):
        log(f"round {i}", "WARNING" if i % 2 else "INFO")
    lines = (tmp_path / "x.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING round 59", lines[-1])
    assert len(list(tmp_path.iterdir())) > 1
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())


# ---- the endpoint and the watchdog -----------------------------------------------------------------------------------


def answer(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_one_endpoint_gives_json_prometheus_text_and_health(watch: Watch) -> None:
    server = watch.board.serve("127.0.0.1:0")
    port = int(server.server_address[1])
    try:
        assert json.loads(answer(port, "/status")[1])["round"] == 3
        code, text = answer(port, "/metrics")
        assert code == 200
        assert f'sordino_silo_connected{{silo="{NAMES[1]}"}} 0' in text.splitlines()
        assert 'sordino_metric{name="accuracy"} 0.8125' in text.splitlines()
        assert all(re.fullmatch(r'[a-z_]+(\{[a-z]+="[^"]*"\})? \S+', line) for line in text.splitlines())
        assert answer(port, "/health") == (200, "ok\n")
        watch.board.beats -= 130  # its loop has not run for two minutes
        assert answer(port, "/health") == (503, "stuck\n")
        assert "sordino_healthy 0" in answer(port, "/metrics")[1]
        watch.board.facts["busy"] = True  # it trains: an hour is allowed
        assert answer(port, "/health")[0] == 200
        assert answer(port, "/etc/passwd")[0] == 404
    finally:
        server.shutdown()
        server.server_close()


def test_an_address_that_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    for wrong in ("nowhere", "127.0.0.1:99999", "203.0.113.9:80"):
        with pytest.raises(ConfigError, match="HOST:PORT of this machine"):
            StatusBoard(tmp_path / "s").serve(wrong)


def test_every_beat_reaches_the_watchdog_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_systemd("READY=1")
        StatusBoard(tmp_path / "s").beat()
        assert [systemd.recv(100) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]
        monkeypatch.delenv("NOTIFY_SOCKET")
        StatusBoard(tmp_path / "s").beat()
        systemd.setblocking(False)
        with pytest.raises(BlockingIOError):
            systemd.recv(100)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_silo_logs_a_refusal_with_reason_project_and_plan_hash(tmp_path: Path) -> None:
    config, log = project(), list[tuple[str, str]]()
    spec, folder = SiloSpec(NAMES[0], "csv", options=OPTIONS), folder_of(tmp_path, NAMES[0])
    policy = {"dataset": NAMES[0], "epsilon": 0.001, "delta": 1e-3, "unit": "record", "relation": "replace_one"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in policy.items()]
    (folder / "policy.toml").write_text("\n".join([*lines, f'releases = ["{config.plan.release.kind}"]']))
    service = SiloService.open(
        folder, spec, silo_task(config, spec, folder), "", lambda line, level="INFO": log.append((level, line)), config
    )
    asked = Job("ab" * 16, config.plan, 0, "secure")
    heard = Reply.from_bytes(service.reply(asked.to_bytes()), asked, 0)
    assert heard.refused
    [(level, said)] = [one for one in log if "refused" in one[1]]
    assert level == "WARNING"
    assert heard.refused.split(":")[0] in said
    assert f"project 'heart 2026', plan {config.plan.hash}" in said
    assert service.budget() == {"dataset": NAMES[0], "spent": 0.0, "limit": 0.001, "left": 0.001}
    assert 'sordino_epsilon{kind="left"} 0.001' in prometheus({"budget": service.budget()}, True)


def test_the_server_names_all_refusers_at_once() -> None:
    wires, heard = refusing(with_test(mlp()), 2, 4), list[Mapping[int, str]]()
    named: Any = wires
    named.names, named.log_refusals = [f"silo{i}" for i in range(6)], heard.append
    found = collected(LOCAL, wires)
    assert [set(one) for one in heard] == [{2, 4}]
    assert set(found.refused) == {2, 4}
    with pytest.raises(QuorumError, match=r"client 2 \(silo2\): .*client 4 \(silo4\): "):
        collected(LOCAL, wires, quorum=6)


# ---- the ledger's history --------------------------------------------------------------------------------------------


def test_history_names_project_and_round_and_epsilon_grows_with_every_charge(tmp_path: Path) -> None:
    from tests.federation.test_receipts_and_ledger import LOCAL as ROUNDS
    from tests.federation.test_receipts_and_ledger import job, released, served

    till = replace(served(tmp_path, relation="replace_one"), project="heart 2026")
    for t in range(3):
        released(till, job(ROUNDS, t, 0.0))
    till.ledger.close()
    said = sordino("ledger", "history", tmp_path / "l", "own")
    assert said.out.count("project 'heart 2026'") == 4  # the run, and three rounds
    assert "round 3, " in said.out
    lines = sordino("ledger", "history", tmp_path / "l", "own", "--json").json["lines"]
    spent = [line["spent"] for line in lines if line["spent"] is not None]
    assert len(spent) == 3
    assert spent == sorted(spent)
    with Ledger.open(tmp_path / "l") as ledger:
        assert spent[-1] == pytest.approx(ledger.statement("own").epsilon, abs=1e-6)
    assert f"epsilon so far {spent[-1]:.3f}"[:18] in said.out
