"""Trackers get the rounds through their own libraries; what is not private is named so, and never leaves a release."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.commands import federation, sordino

import sordino as so
from sordino.errors import ConfigError, Stopped
from sordino.outcome import DIAGNOSTIC
from sordino.report.text_table import flatten
from sordino.report.trackers import Tracker, TrackerBackend

LINE = {"round": 1, "accuracy": 0.5, "void": True, DIAGNOSTIC: {"update_norm": 2.0, "note": "words"}}
CERTIFICATE = {
    "delta": 1e-3,
    "adversaries": [{"adversary": "models", "epsilon": 2.0}, {"adversary": "messages", "epsilon": None}],
}


class Kept(TrackerBackend):
    """A library that only remembers."""

    def __init__(self, folder: Path = Path()) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def log_settings(self, told: dict[str, str]) -> None: ...

    def log_figures(self, round_: int, told: dict[str, float]) -> None:
        self.told.append((round_, told))

    def close(self) -> None: ...


def told(noise: Any) -> list[tuple[int, dict[str, float]]]:
    seen, kept = Tracker.__new__(Tracker), Kept()
    seen.noise, seen.last, seen.backend = noise, 0, kept
    seen(dict(LINE))
    seen.finish(CERTIFICATE)
    return kept.told


def test_diagnostics_are_named_as_not_private() -> None:
    public = {"public/accuracy": 0.5, "public/predicts_one_class": 0.0}
    assert told("simulation")[0] == (1, {**public, "NOT PRIVATE/update_norm": 2.0})


def test_a_run_for_release_sends_no_diagnostics() -> None:
    assert told("secure")[0] == (1, {"public/accuracy": 0.5, "public/predicts_one_class": 0.0})


def test_a_tracker_that_was_told_nothing_sends_no_diagnostics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setitem(TrackerBackend.members, "tensorboard", lambda folder: kept)
    seen = Tracker("tensorboard", tmp_path)
    so.train(tiny.plan(), tiny.task(), noise="secure", on_round=seen)
    assert len(kept.told) == 2
    assert not any(name.startswith("NOT PRIVATE") for _, figures in kept.told for name in figures)


def test_an_adversary_without_a_guarantee_has_no_epsilon() -> None:
    assert told("secure")[1] == (1, {"epsilon/models": 2.0, "delta": 1e-3})


def test_settings_have_dotted_names() -> None:
    table = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": "x"}, {"e": "y"}]}
    assert dict(flatten(table)) == {"a.b": 1, "a.c": [1, 2], "d.0.e": "x", "d.1.e": "y"}


def run_tracked(folder: Path, kind: str) -> dict[str, Any]:
    said = sordino("run", federation(folder), "--out", folder / "a", "--track", kind, "--json")
    assert sordino("certify", folder / "a").code == 0
    return said.json


@pytest.mark.filterwarnings("default")
def test_tensorboard_holds_what_ran(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = run_tracked(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "a.track" / "tensorboard"))
    events.Reload()
    last = events.Scalars("public/accuracy")[-1]
    assert (last.step, last.value) == (found["last"]["round"], pytest.approx(found["last"]["accuracy"]))
    assert events.Scalars("epsilon/models")[-1].value == pytest.approx(found["certificate"]["epsilon"])
    assert any(name.startswith("NOT PRIVATE/") for name in events.Tags()["scalars"])


@pytest.mark.filterwarnings("default")
def test_mlflow_holds_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = run_tracked(tmp_path, "mlflow")
    (ran,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("sordino").experiment_id])
    assert ran.data.metrics["public/accuracy"] == pytest.approx(found["last"]["accuracy"])
    assert ran.data.metrics["epsilon/models"] == found["certificate"]["epsilon"]
    assert ran.data.params["plan.rounds"] == "4"


@pytest.mark.filterwarnings("default")
def test_wandb_without_a_key_writes_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    run_tracked(tmp_path, "wandb")
    (log,) = (tmp_path / "a.track" / "wandb").rglob("run-*.wandb")
    assert all(name in log.read_bytes() for name in (b"public/accuracy", b"epsilon/models", b"NOT PRIVATE/"))


def test_a_tracker_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        Tracker("tensorbord", tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'sordino\[mlflow\]'"):
        Tracker("mlflow", tmp_path)


def test_a_run_says_where_its_tracker_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    said = sordino("run", federation(tmp_path), "--out", tmp_path / "a", "--track", "tensorboard")
    assert said.out.splitlines()[-1] == f"tracked: {tmp_path / 'a.track'}"


class Failing(Kept):
    """A library that fails in one of its calls."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error, self.calls = where, error, 0
        self._call("open")

    def _call(self, name: str) -> None:
        self.calls += 1
        if name == self.where:
            raise self.error

    def log_settings(self, told: dict[str, str]) -> None:
        self._call("settings")

    def log_figures(self, round_: int, told: dict[str, float]) -> None:
        self._call("epsilon" if "delta" in told else f"round {round_}")

    def close(self) -> None:
        self._call("close")


FAILURES: list[tuple[str, BaseException]] = [
    ("open", ConnectionRefusedError("the server is gone")),
    ("open", SystemExit(0)),
    ("settings", OSError(28, "No space left on device")),
    ("round 1", ConnectionResetError("the server is gone")),
    ("round 3", RuntimeError("the server answers 500")),
    ("epsilon", TimeoutError("no answer")),
    ("close", OSError(28, "No space left on device")),
]


@pytest.mark.parametrize(("where", "error"), FAILURES, ids=[f"{one[0]} {type(one[1]).__name__}" for one in FAILURES])
def test_a_tracker_that_fails_is_one_warning_and_the_run_is_certified(
    where: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(TrackerBackend.members, "mlflow", lambda folder: Failing(where, error))
    said = sordino("run", federation(tmp_path), "--out", tmp_path / "a", "--track", "mlflow", "--json")
    assert said.json["last"]["round"] == 4
    assert sordino("certify", tmp_path / "a").code == 0
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "tracker mlflow failed" in warned
    assert type(error).__name__ in warned
    assert "the run goes on" in warned


def test_a_request_to_end_is_no_failure_of_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TrackerBackend.members, "mlflow", lambda folder: Failing("round 1", Stopped(15)))
    assert sordino("run", federation(tmp_path), "--out", tmp_path / "a", "--track", "mlflow").code == 143
