"""Promises of the membership attack: its figures are the textbook's, it finds what leaks, and it knows its ceiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from sklearn.metrics import roc_auc_score
from tests.commands import federation, sordino
from tests.tiny import final, noise, plan
from torch import nn

from sordino.audit.training_attacks import auc, audit_membership, true_positive_rate
from sordino.certificate.certificate_file import text_of
from sordino.config import load_config
from sordino.errors import DataError
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone
from sordino.runs.folder import RunFolder
from sordino.task import Task

Floats = NDArray[np.float64]


def losses(seed: int, members: int, strangers: int, ties: bool) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    inside, outside = rng.exponential(1.0, members), rng.exponential(1.5, strangers)
    return (inside.round(1), outside.round(1)) if ties else (inside, outside)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("members", "strangers"), [(50, 70), (1, 9), (9, 1), (300, 20)])
def test_the_auc_is_that_of_the_roc_curve(members: int, strangers: int, ties: bool) -> None:
    inside, outside = losses(1, members, strangers, ties)
    truth = np.r_[np.ones(members), np.zeros(strangers)]
    assert auc(inside, outside) == pytest.approx(roc_auc_score(truth, -np.r_[inside, outside]), abs=1e-12)


def test_the_auc_at_its_ends_and_in_the_middle() -> None:
    low, high = np.arange(5.0), np.arange(5.0, 9.0)
    assert auc(low, high) == 1.0
    assert auc(high, low) == 0.0
    assert auc(np.ones(3), np.ones(4)) == 0.5


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("at", [0.0, 0.001, 0.01, 0.1, 0.5, 1.0])
def test_the_true_positive_rate_is_the_best_of_all_thresholds(at: float, ties: bool) -> None:
    inside, outside = losses(2, 200, 150, ties)
    best = 0.0
    for threshold in [*np.r_[inside, outside], np.inf]:
        if np.mean(outside < threshold) <= at:
            best = max(best, float(np.mean(inside < threshold)))
    assert true_positive_rate(inside, outside, at) == pytest.approx(best)


def coins(records: int, seed: int, features: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Records whose labels have nothing to do with them: all that can be learnt is by heart."""
    return noise(records, features, seed=seed), torch.from_numpy(np.random.default_rng(seed).integers(2, size=records))


def test_a_model_that_saw_nothing_gives_nothing_away() -> None:
    data = Task.of(nn.Linear(400, 2), [coins(1500, s) for s in (1, 2)], test=coins(3000, 3))
    found = audit_membership(data.model, data)
    assert (found.members, found.strangers) == (3000, 3000)
    assert found.auc == pytest.approx(0.5, abs=0.03)
    assert found.true_positives["0.01"] == pytest.approx(0.01, abs=0.01)
    assert found.true_positives["0.001"] <= found.true_positives["0.01"]


def test_a_model_that_learnt_by_heart_gives_everything_away() -> None:
    data = Task.of(nn.Linear(400, 2), [coins(10, s) for s in (1, 2)], test=coins(400, 3))
    local = LocalSgd(lr=0.1, epochs=20)
    by_heart = plan(rounds=5, clients=Everyone(2), local=local, encode=(Clip(1e9),), release=NoNoise())
    data.layout.load(data.model, final(by_heart, data))
    found = audit_membership(data.model, data)
    assert found.auc > 0.99
    assert found.true_positives["0.01"] > 0.5


def test_only_so_many_records_are_attacked_and_the_same_ones_each_time() -> None:
    data = Task.of(nn.Linear(400, 2), [coins(300, 1)], test=coins(50, 2))
    found = audit_membership(data.model, data, most=100)
    assert (found.members, found.strangers) == (100, 50)
    assert found == audit_membership(data.model, data, most=100)
    assert found != audit_membership(data.model, data, most=100, seed=1)


def test_records_that_no_client_holds_are_no_members() -> None:
    whole = Task.of(nn.Linear(400, 2), [coins(300, 1)], test=coins(50, 2))
    fewer = Task(whole.model, type(whole.clients)(whole.clients.records, np.arange(40), np.array([0, 40])), whole.test)
    assert audit_membership(whole.model, fewer).members == 40


def test_without_strangers_there_is_no_attack() -> None:
    data = Task.of(nn.Linear(400, 2), [coins(10, 1)])
    with pytest.raises(DataError, match="test"):
        audit_membership(data.model, data)


# ---- the command ----------------------------------------------------------------------------------------------------


def finished(folder: Path, *changes: tuple[str, str], data: dict[str, Any] | None = None) -> Path:
    file = federation(folder, *changes, data=data)
    assert sordino("run", file, "--out", folder / "a", "--json").code == 0
    return folder / "a"


def by_heart_data() -> dict[str, Any]:
    """More coins than records; those of the test are others."""
    (x, y), (test_x, test_y) = coins(240, 5), coins(400, 6)
    parts = {"x": x, "y": y, "test_x": test_x, "test_y": test_y}
    return {**{name: part.numpy() for name, part in parts.items()}, "classes": np.int64(2)}


def test_the_audit_of_a_private_run_stays_below_its_ceiling(tmp_path: Path) -> None:
    out = finished(tmp_path)
    found = sordino("audit", out, "--json").json
    attack = found["membership"]
    assert found["passed"] is True
    assert (attack["members"], attack["strangers"]) == (240, 30)
    assert 0 <= attack["auc"] <= attack["auc_at_most"] <= 1
    assert 0.5 < attack["auc_at_most"] < 1
    reach = sordino("explain", out, "--json").json["against"][0]
    assert reach["adversary"] == "models"
    assert attack["auc_at_most"] == reach["auc_at_most"]
    assert attack["true_positive_rate_at_1_percent_at_most"] == reach["true_positive_rate_at_1_percent"]
    text = sordino("audit", out)
    assert text.code == 0
    assert text.out.endswith("passed\n")


def test_chance_alone_fails_no_audit(tmp_path: Path) -> None:
    """So much noise that the ceiling is a coin's: on few records a coin lands above one half every second time."""
    found = []
    for seed in range(6):
        (tmp_path / str(seed)).mkdir()
        changes = (("noise_multiplier = 2.0", "noise_multiplier = 400.0"), ("seed = 3", f"seed = {seed}"))
        found.append(sordino("audit", finished(tmp_path / str(seed), *changes), "--json").json)
    assert all(one["membership"]["auc_at_most"] < 0.51 for one in found)
    assert any(one["membership"]["auc"] > one["membership"]["auc_at_most"] for one in found)
    assert all(one["passed"] for one in found)


def test_a_model_that_knows_more_than_its_certificate_allows_fails_the_audit(tmp_path: Path) -> None:
    out = finished(tmp_path, ("noise_multiplier = 2.0", "noise_multiplier = 100.0"), data=by_heart_data())
    assert sordino("audit", out, "--json").json["passed"]
    data = load_config(out / "plan.toml").build()
    by_heart = plan(
        rounds=5, clients=Everyone(60), local=LocalSgd(lr=0.1, epochs=5), encode=(Clip(1e9),), release=NoNoise()
    )
    data.layout.load(data.model, final(by_heart, data))
    save_file(data.model.state_dict(), out / "model.safetensors")
    (out / "certificate.json").write_text(text_of(RunFolder.open(out).certificate()))  # a forgery that certifies
    said = sordino("audit", out)
    assert said.code == 1
    assert "FAILED" in said.out


def test_a_file_and_an_unfinished_run_are_no_target(tmp_path: Path) -> None:
    file = federation(tmp_path)
    assert "--mechanism" in sordino("audit", file).sentence
    out = finished(tmp_path)
    (out / "certificate.json").unlink()
    assert "finished run" in sordino("audit", out).sentence
