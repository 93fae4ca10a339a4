"""A run on disk: what it leaves, how it continues, and that nothing it writes says more than the certificate."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import POPULATION, ROUNDS, arrays, contents, federation, lines, sordino, spelt_out
from tests.faults import Killed

from sordino.config import load_config
from sordino.plan import State
from sordino.rng import Seeded
from sordino.runs.writer import RunWriter, locked

CONSOLE = str(Path(sys.executable).parent / "sordino")
LONG = (("rounds = 4", "rounds = 30\nepochs = 200"), ("seed = 3", "seed = 3\neval_every = 10"))
SHARES = (
    ('release = { kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }', ""),
    ("[run]", 'release = { kind = "noise_shares", noise_multiplier = 2.0, at_least = 5 }\n\n[run]'),
)
DIAGNOSTIC = "diagnostic, not private"


def run(file: Path, name: str, *options: object) -> Path:
    """A finished run of `file` in a folder of that name beside it."""
    out = file.parent / name
    assert sordino("run", file, "--out", out, "--json", *options).json["last"]["round"] == load_config(file).plan.rounds
    return out


def certificate(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "certificate.json").read_text())
    return found


def cohorts(file: Path) -> list[list[int]]:
    """Whom a simulated run draws, round by round."""
    config = load_config(file)
    rng, clients = Seeded(config.run.seed), config.plan.clients
    return [clients.draw(t, rng.at(t, "cohort")).tolist() for t in range(config.plan.rounds)]


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federation(tmp_path_factory.mktemp("fed"))


@pytest.fixture(scope="module")
def finished(fed: Path) -> Path:
    return run(fed, "finished")


# ---- what a run leaves ----------------------------------------------------------------------------------------------


def test_a_run_writes_plan_certificate_history_model_and_checkpoint(fed: Path, finished: Path) -> None:
    needed = "run.json plan.toml certificate.json engine.jsonl history.jsonl model.safetensors checkpoint charges.jsonl"
    assert {file.name for file in finished.iterdir()} == set(needed.split())
    assert not [name for name in contents(finished) if name.endswith(".partial")]
    assert load_config(finished / "plan.toml") == load_config(fed)
    assert [line["round"] for line in lines(finished / "history.jsonl")] == [1, 2, 3, 4]
    assert certificate(finished)["counts"]["rounds_charged"] == ROUNDS


def test_the_last_iterate_is_evaluated_on_the_whole_test_set(fed: Path, finished: Path) -> None:
    task, data = load_config(fed).build(), arrays()
    task.model.load_state_dict(load_file(finished / "model.safetensors"))
    assert task.test is not None
    labels = task.model.eval()(task.test.x).argmax(1).numpy()
    history = lines(finished / "history.jsonl")
    assert len(labels) == len(data["test_y"])
    assert history[-1]["accuracy"] == pytest.approx((labels == data["test_y"]).mean())
    assert history[-1]["loss"] == pytest.approx(task.evaluate(task.layout.flatten(task.model))["loss"])
    assert len({line["loss"] for line in history}) == ROUNDS  # so it is this round's loss and no other's


def test_the_last_round_is_evaluated_whatever_eval_every_says(tmp_path: Path) -> None:
    history = lines(run(federation(tmp_path, ("seed = 3", "seed = 3\neval_every = 3")), "a") / "history.jsonl")
    assert ["accuracy" in line for line in history] == [False, False, True, True]


def test_a_run_never_overwrites_another(fed: Path, finished: Path) -> None:
    before = contents(finished)
    assert "exists" in sordino("run", fed, "--out", finished).sentence
    assert contents(finished) == before


def test_the_same_seed_gives_the_same_files_and_another_seed_another_model(tmp_path: Path) -> None:
    file = federation(tmp_path)
    one, two = run(file, "one"), run(file, "two")
    other = run(federation(tmp_path, ("seed = 3", "seed = 4")), "other")
    for name in ("model.safetensors", "plan.toml"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    states = [load_file(out / "checkpoint" / "state.safetensors") for out in (one, two)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    made = [{key: value for key, value in certificate(out).items() if key != "run"} for out in (one, two)]
    assert made[0] == made[1]
    assert certificate(one)["run"]["id"] != certificate(two)["run"]["id"]  # and yet neither passes for the other
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


# ---- continuing -----------------------------------------------------------------------------------------------------


def test_a_killed_run_continues_bit_exact_and_only_one_process_runs_in_a_folder(tmp_path: Path) -> None:
    file, out = federation(tmp_path, *LONG), tmp_path / "killed"
    command = [CONSOLE, "run", str(file), "--out", str(out), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        history, patience = out / "history.jsonl", time.monotonic() + 60
        while not (history.exists() and history.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None
            assert time.monotonic() < patience
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        assert "which another process uses" in sordino("run", file, "--out", out, "--resume").sentence
    finally:
        process.kill()  # SIGKILL: no handler, no clean-up
        process.wait()
    assert not (out / "certificate.json").exists()
    done = int(lines(out / "charges.jsonl")[-1]["round"])
    assert 3 <= done < 30
    assert "--resume" in sordino("certify", out).sentence
    assert run(file, "killed", "--resume") == out
    whole = run(file, "whole")
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [line["round"] for line in lines(out / "history.jsonl")] == list(range(1, 31))
    assert certificate(out)["counts"]["rounds_charged"] == len(lines(out / "charges.jsonl")) >= 30
    assert sordino("certify", out, "--json").json["certified"] is True


def test_a_round_run_again_is_billed_as_a_new_release(
    fed: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunWriter.save

    def dying(self: RunWriter, state: State) -> None:
        if state.t == 3:
            raise Killed
        save(self, state)

    out = fed.parent / "again"
    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "save", dying)
        with pytest.raises(Killed):
            sordino("run", fed, "--out", out)
    run(fed, "again", "--resume")
    assert [line["round"] for line in lines(out / "charges.jsonl")] == [1, 2, 3, 3, 4]
    assert [line["round"] for line in lines(out / "history.jsonl")] == [1, 2, 3, 4]
    assert (out / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    made, usual = certificate(out), certificate(finished)
    assert (made["counts"]["rounds_charged"], made["counts"]["rounds_accounted"]) == (5, 5)
    assert made["adversaries"][0]["events"][0]["count"] == 5
    assert made["epsilon"] > usual["epsilon"]
    assert sordino("certify", out).code == 0


def test_a_charge_cut_short_by_a_kill_does_not_spoil_the_next(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(self: RunWriter, t: int, cohort: object) -> None:
        with open(self.path / "charges.jsonl", "a") as file:
            file.write('{"rou')
        raise Killed

    out = fed.parent / "torn"
    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "charge", dying)
        with pytest.raises(Killed):
            sordino("run", fed, "--out", out)
    run(fed, "torn", "--resume")
    assert [line["round"] for line in lines(out / "charges.jsonl")] == [1, 2, 3, 4]
    assert sordino("certify", out).code == 0


@pytest.mark.parametrize("change", [("seed = 3", "seed = 4"), ("noise_multiplier = 2.0", "noise_multiplier = 2.1")])
def test_another_configuration_does_not_continue_a_run(change: tuple[str, str], finished: Path, tmp_path: Path) -> None:
    before = contents(finished)
    data = (str(tmp_path / "data.npz"), str(finished.parent / "data.npz"))
    assert "plan.toml" in sordino("run", federation(tmp_path, change, data), "--out", finished, "--resume").sentence
    assert contents(finished) == before


def test_resuming_a_finished_run_changes_nothing(fed: Path, finished: Path) -> None:
    before = contents(finished)
    run(fed, "finished", "--resume")
    run(finished / "plan.toml", ".", "--resume")
    assert contents(finished) == before


def test_two_runs_in_one_folder_are_refused(fed: Path, finished: Path) -> None:
    with locked(finished):
        assert "which another process uses" in sordino("run", fed, "--out", finished, "--resume").sentence


# ---- what the files may say -----------------------------------------------------------------------------------------


def test_an_unseen_cohort_is_in_no_file(tmp_path: Path) -> None:
    file = federation(tmp_path)
    one = run(file, "one")
    other = run(federation(tmp_path, ("seed = 3", "seed = 4")), "other")
    for out in (one, other):  # other cohorts, and no word of them
        assert [line["round"] for line in lines(out / "charges.jsonl")] == list(range(1, ROUNDS + 1))
        assert all(set(line) == {"round", "config", "before"} for line in lines(out / "charges.jsonl"))
    hashes = {"model_sha256": "", "config_sha256": "", "run": "", "utility": ""}
    assert {**certificate(one), **hashes} == {**certificate(other), **hashes}
    for line in lines(one / "history.jsonl"):
        assert set(line) == {"round", "loss", "accuracy", "balanced_accuracy", DIAGNOSTIC}
    assert set(load_file(one / "checkpoint" / "state.safetensors")) == {"memory.params"}


def test_a_cohort_that_is_seen_is_charged_and_its_busiest_client_counted(tmp_path: Path) -> None:
    file = spelt_out(tmp_path, *SHARES)
    out, drawn = run(file, "a"), cohorts(file)
    charges = lines(out / "charges.jsonl")
    assert [line["cohort"] for line in charges] == drawn
    assert max(map(max, drawn)) < POPULATION
    most = max(Counter(client for cohort in drawn for client in cohort).values())
    made = certificate(out)
    assert made["counts"]["max_participations"] == most
    assert [line["events"][0]["count"] for line in made["adversaries"]] == [most] * 3
    assert sordino("certify", out).code == 0


def test_secure_noise_is_said_is_never_repeated_and_writes_no_diagnostics(tmp_path: Path) -> None:
    file = federation(tmp_path, ("[run]", '[privacy]\nnoise = "secure"\n\n[run]'))
    one, two = run(file, "one"), run(file, "two")
    assert certificate(one)["noise"]["mode"] == "secure"
    assert "not for release" not in certificate(one)["noise"]["note"]
    assert (one / "model.safetensors").read_bytes() != (two / "model.safetensors").read_bytes()
    assert not [line for line in lines(one / "history.jsonl") if DIAGNOSTIC in line]
    assert sordino("certify", one).code == 0


def test_simulated_noise_is_said_not_to_be_for_release(finished: Path) -> None:
    assert certificate(finished)["noise"]["mode"] == "simulation"
    assert "not for release" in certificate(finished)["noise"]["note"]


def test_a_folder_says_how_its_rounds_were_computed(finished: Path) -> None:
    (line,) = [json.loads(text) for text in (finished / "engine.jsonl").read_text().splitlines()]
    assert line["after_round"] == 0
    assert line["engine"] == "inprocess"
    assert line["path"] in ("batched", "sequential")
    assert line["device"] == "cpu"
