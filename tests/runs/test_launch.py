"""`sordino run --workers`: a rank that dies ends the run with one sentence, a true cost, a checkpoint, no orphan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import contents, federation, lines, sordino, spelt_out

from sordino.errors import ConfigError, RankError
from sordino.runs.launch import launch, rendezvous_folder, stop_signals

CONSOLE = str(Path(sys.executable).parent / "sordino")
PATIENCE = 600.0  # seconds: a hang; nothing here takes that long on the busiest machine
LONG = (("rounds = 4", "rounds = 120\nepochs = 250"), ("seed = 3", "seed = 3\neval_every = 10"))
SHARES = (
    ('release = { kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }', ""),
    ("[run]", 'release = { kind = "noise_shares", noise_multiplier = 2.0, at_least = 5 }\n\n[run]'),
)
FAILS = """
import os
from sordino.cli import main
from sordino.engines.inprocess import InProcessWorker as Worker

honest = Worker.solve
def solve(self, clients, public, start):
    if os.environ["RANK"] == "1" and public.t == 1:
        raise ValueError("a client's own code fails")
    return honest(self, clients, public, start)
Worker.solve = solve
main()
"""


def heed_signals() -> None:
    """As in a shell's foreground: a job in the background ignores SIGINT, one under nohup SIGHUP."""
    for one in (signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)


@pytest.fixture
def hangup_ends() -> Iterator[None]:
    """SIGHUP and SIGINT have their default meaning in this process, whoever started it.

    `nohup make test` ignores the first, a job in the background of a script the second.
    """
    defaults: dict[signal.Signals, Any] = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {one: signal.signal(one, meaning) for one, meaning in defaults.items()}
    yield
    for one, meaning in before.items():
        signal.signal(one, meaning)


@contextmanager
def two_workers(file: Path, out: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run that has done three rounds in this go: its watcher, and its ranks' processes in order."""
    history, command = out / "history.jsonl", [CONSOLE, "run", str(file), "--out", str(out), "--workers", "2", *options]
    before = len(lines(history)) if history.exists() else 0
    watcher = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heed_signals,
    )  # fmt: skip
    try:
        until = time.monotonic() + PATIENCE
        while not (history.exists() and history.read_bytes().count(b"\n") >= before + 3):
            assert watcher.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        yield watcher, ranks(watcher.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(watcher.pid, signal.SIGKILL)
        watcher.communicate()


def ranks(watcher: int) -> list[int]:
    """The watcher's children, by the rank in their environment."""
    children = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
    named = {_rank(int(child)): int(child) for child in children}
    return [named[rank] for rank in sorted(named)]


def _rank(process: int) -> int:
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return int(next(word for word in words if word.startswith(b"RANK=")).removeprefix(b"RANK="))


def gone(processes: list[int], patience: float = PATIENCE) -> bool:
    """Whether all of them end in time; a zombie that nobody has waited for yet has ended."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if not any(_alive(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(watcher: subprocess.Popen[str], code: int, *words: str) -> None:
    """With this code and one sentence that holds the words, long before anybody's own patience is over."""
    _, said = watcher.communicate(timeout=PATIENCE)
    assert watcher.returncode == code
    assert said.startswith("sordino: ")
    assert said.count("\n") == 1
    assert [word for word in (*words, "charged rounds stay charged", "--resume") if word not in said] == []


def like(one: Path, other: Path) -> bool:
    """The same model to 1e-5."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all(torch.allclose(first[name], second[name], rtol=0.0, atol=1e-5) for name in first)


def finished(file: Path, out: Path, *options: str) -> Path:
    """Run, or continued, by this process alone."""
    assert sordino("run", file, "--out", out, *options).code == 0
    assert sordino("certify", out).code == 0
    return out


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_run_that_loses_a_rank_or_is_interrupted_continues_to_the_same_model_and_leaves_no_orphan(
    tmp_path: Path,
) -> None:
    file, out = federation(tmp_path, *LONG), tmp_path / "a"
    with two_workers(file, out) as (watcher, started):
        os.kill(started[1], signal.SIGKILL)
        ended(watcher, 3, "rank 1 of 2", "SIGKILL")
        assert gone(started)
    assert not (out / "certificate.json").exists()
    for how, code in ((signal.SIGINT, 130), (signal.SIGHUP, 129)):
        with two_workers(file, out, "--resume") as (watcher, started):
            os.killpg(watcher.pid, how)  # as a terminal does
            ended(watcher, code, "sordino: stopped;")
            assert gone(started)
    finished(file, out, "--resume")
    assert like(out, finished(file, tmp_path / "whole"))
    charged = lines(out / "charges.jsonl")
    counts = json.loads((out / "certificate.json").read_text())["counts"]
    assert {line["round"] for line in charged} == set(range(1, 121))
    assert counts["rounds_charged"] == len(charged) >= 120


def test_a_client_that_fails_on_one_rank_is_named_and_its_round_stays_charged(tmp_path: Path) -> None:
    file, out = spelt_out(tmp_path, *SHARES), tmp_path / "a"
    with pytest.raises(RankError) as caught:
        launch(["-c", FAILS, "run", str(file), "--out", str(out), "--json"], 2)
    sentence = str(caught.value)
    assert sentence.startswith("rank 1 of 2 failed in round 2 (ValueError: a client's own code fails); charged rounds")
    assert [line["round"] for line in lines(out / "charges.jsonl")] == [1, 2]
    finished(file, out, "--resume")
    assert [line["round"] for line in lines(out / "charges.jsonl")] == [1, 2, 2, 3, 4]  # shares may have been sent
    assert json.loads((out / "certificate.json").read_text())["counts"]["rounds_charged"] == 5
    assert like(out, finished(file, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workers", 0), ("--workers 0", "at least 1")),
        (("--workers", -3), ("--workers -3", "at least 1")),
        (("--workers", 2, "--engine", "inprocess"), ("--workers 2", "--engine inprocess")),
        (("--engine", "distributd"), ("'distributed'",)),
        (("--timeout", 0), ("--timeout 0",)),
    ],
)
def test_options_that_contradict_themselves_are_refused(
    options: tuple[object, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    _refused(tmp_path, options, words)


@pytest.mark.parametrize("options", [("--workers", 2), ("--engine", "inprocess")])
def test_options_that_contradict_torchrun_are_refused(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _refused(tmp_path, options, ("torchrun",))


def _refused(folder: Path, options: tuple[object, ...], words: tuple[str, ...]) -> None:
    file = federation(folder)
    before = contents(folder)
    sentence = sordino("run", file, "--out", folder / "a", *options).sentence
    assert [word for word in words if word not in sentence] == [], sentence
    assert contents(folder) == before


# ---- the watcher alone: ranks that are no more than a few lines of Python -------------------------------------------


def ranks_that(*bodies: str) -> list[str]:
    """A command in which rank r does the r-th body."""
    return ["-c", f"import os, sys, time\nexec({list(bodies)!r}[int(os.environ['RANK'])])"]


SLEEP = "time.sleep(600)"
SAYS = "print('sordino: found a mistake', file=sys.stderr); sys.exit({code})"


@pytest.mark.parametrize("code", [1, 2])
def test_what_rank_zero_says_and_its_code_are_the_run_s(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(ranks_that(SAYS.format(code=code), SLEEP), 2) == code
    assert capsys.readouterr().err == "sordino: found a mistake\n"


def test_a_mistake_that_all_ranks_find_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(ranks_that(*[SAYS.format(code=2)] * 3), 3) == 2
    assert capsys.readouterr().err == "sordino: found a mistake\n"


def test_a_mistake_that_only_another_rank_finds_is_said_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.runs.launch.GRACE", 0.5)
    with pytest.raises(ConfigError, match="on rank 1 of 2: a mistake"):
        launch(ranks_that(SLEEP, SAYS.format(code=2)), 2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os.kill(os.getpid(), 9)", "rank 1 of 3 was killed by SIGKILL;"),
        ("os.kill(os.getpid(), 11)", "rank 1 of 3 was killed by SIGSEGV;"),
        ("raise OSError('no data here')", r"rank 1 of 3 ended with code 1 \(OSError: no data here\);"),
    ],
)
def test_the_rank_that_was_first_is_named_not_those_that_lost_it(body: str, words: str) -> None:
    with pytest.raises(RankError, match=words):
        launch(ranks_that("sys.exit(4)", "time.sleep(0.5); " + body, "sys.exit(4)"), 3)


def test_a_rank_that_others_waited_for_in_vain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.runs.launch.GRACE", 0.5)
    with pytest.raises(RankError, match="no answer from rank 1 of 2 within --timeout"):
        launch(ranks_that("sys.exit(4)", SLEEP), 2)


def test_a_rank_that_fails_after_the_run_is_done_does_not_undo_it() -> None:
    assert launch(ranks_that("pass", "time.sleep(0.5); os.kill(os.getpid(), 11)"), 2) == 0


def test_a_rank_that_does_not_leave_does_not_hold_up_a_run_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.runs.launch.GRACE", 0.5)
    assert launch(ranks_that("pass", "import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP), 2) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_watcher(how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"from sordino.runs.launch import follow_watcher; follow_watcher(); print(os.getpid(), flush=True); {SLEEP}"
    code = f"from sordino.runs.launch import launch; launch({ranks_that(body)!r}, 1)"
    watcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    with watcher:
        assert watcher.stdout is not None
        rank = int(watcher.stdout.readline())
        assert not gone([rank], patience=0.2)
        watcher.send_signal(how)
    assert gone([rank])
    assert how == signal.SIGKILL or not list(tmp_path.iterdir())  # what is asked to end leaves no files either
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert launch(ranks_that("pass"), 1) == 0
    assert not list(tmp_path.iterdir())  # and what was killed leaves none to those who come later


def test_a_folder_in_which_others_meet_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "sordino-mine").mkdir()  # somebody else's word, and no watcher's
    with rendezvous_folder() as first:
        with rendezvous_folder() as second:
            assert first.is_dir()
            assert first != second
        assert sorted(tmp_path.iterdir()) == sorted([first, tmp_path / "sordino-mine"])


@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_is_asked_to_end_says_what_an_interrupted_one_says(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sordino.config.load_config", lambda *_: os.kill(os.getpid(), how))
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    said = sordino("run", federation(tmp_path), "--out", tmp_path / "a")
    assert (said.code, said.err) == (
        128 + how,
        "sordino: stopped; charged rounds stay charged; continue with --resume\n",
    )
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stop_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_who_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    file, out = federation(tmp_path), tmp_path / "a"
    done = subprocess.Popen(
        [CONSOLE, "run", str(file), "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert done.stdout is not None
    done.stdout.close()
    assert done.stderr is not None
    with done:
        assert done.stderr.read() == ""
    assert done.returncode == 0
    assert sordino("certify", out).code == 0
