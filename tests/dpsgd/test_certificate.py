"""A loop is a plan: its certificate is that of the plan, in the one format, and can be made again from its file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import federation, sordino
from tests.dpsgd.loops import data, mlp, private, train
from tests.dpsgd.test_recipes import TWINS, plan

from sordino.certificate.build import certificate
from sordino.certificate.facts import Facts, Loop, OwnCode
from sordino.dpsgd import account
from sordino.errors import CertificateError, ConfigError, EngineError, PlanError
from sordino.parts.record_samplers import PoissonRecords
from sordino.parts.server_optimizers import TorchOptimizer
from sordino.task import Task
from sordino.training import train as run
from sordino.version import versions


@pytest.mark.parametrize("name", TWINS)
def test_a_loop_is_the_plan_of_its_recipe(name: str) -> None:
    optimizer, strength = TWINS[name]
    settings = private(optimizer=optimizer, noise_multiplier=1.3, clip_norm=0.5, smoothing=strength)[1].account.settings
    recipe = plan(name, records=PoissonRecords(12, (60,)), noise_multiplier=1.3)
    assert isinstance(settings.plan.server, TorchOptimizer)
    assert settings.plan.server.name == f"{optimizer.__module__}.{optimizer.__qualname__}"
    assert settings.plan == replace(recipe, server=settings.plan.server)
    assert settings.plan.cost() == recipe.cost()


def test_a_plan_that_names_a_torch_optimizer_does_not_run_in_a_federation() -> None:
    settings = private()[1].account.settings
    with pytest.raises(EngineError, match="torch_optimizer"):
        run(settings.plan, Task.of(mlp(), [data().tensors]))
    with pytest.raises(PlanError, match="only in a PyTorch loop"):
        settings.plan.server.step({}, torch.zeros(1), 0)


def test_the_certificate_of_a_loop_is_that_of_its_plan_and_its_counts() -> None:
    parts = private(epochs=2)
    train(parts)
    found, plan = parts[1].certificate(), parts[1].account.settings.plan
    seen = found["loop"]
    loop = Loop(seen["loss"]["reduction"], seen["loss"]["check"], *seen["kept_apart"].values())
    own = OwnCode(**found["own_code"])
    facts = Facts(1e-3, "simulation", 5, loop=loop, environment=(versions(),), own_code=own)
    assert own.grade == "by construction"
    assert found == certificate(plan, facts)
    assert found["run"] is None
    assert found["server"] == {"kind": "torch_optimizer", "name": "torch.optim.sgd.SGD"}


def test_a_federated_run_and_a_loop_have_one_format(tmp_path: Path) -> None:
    loop = private()[1].certificate()
    trained = run(plan("dp_sgd", noise_multiplier=1.3), Task.of(mlp(), [data().tensors])).certificate
    sordino("run", federation(tmp_path), "--out", tmp_path / "run")
    folder = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert list(loop) == list(trained) == list(folder)
    assert (trained["loop"], folder["loop"]) == (None, None)


# ---- in a file -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = private(epochs=3, epsilon=3.0, smoothing=1.0)
    train(parts)
    file = tmp_path_factory.mktemp("loop") / "certificate.json"
    made = parts[1].save_certificate(file)
    assert made == parts[1].certificate()
    return file


def test_a_loops_file_certifies_and_says_what_it_proves(kept: Path) -> None:
    said = sordino("certify", kept)
    assert said.code == 0
    assert "no hash chain of charges" in said.out
    found = sordino("certify", kept, "--json").json
    whole = json.loads(kept.read_text())
    assert {**whole["certificate"], "certified": True, "proved": found["proved"]} == found
    assert found["counts"] == {"rounds_planned": 15, "rounds_charged": 5, "rounds_accounted": 15}


def test_a_loops_file_is_explained(kept: Path) -> None:
    said = sordino("explain", kept).out
    assert "What is protected is what any single record contributed to the training, in all steps." in said
    assert "adding or removing one record. With 1% false positives" in said
    assert "15 steps of the loop were planned, 5 were charged" in said
    assert "The steps taken so far cost epsilon" in said
    assert not re.search(r"\b(silo|message|round)s?\b", said)  # a loop has none of them
    assert "no ledger proves that there were no other steps" in said


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, item in pairs for leaf in leaves(item, (*path, key))]
    return [path]


def spoilt(value: Any) -> Any:
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else f"{value}x"


def test_any_value_that_is_changed_in_a_loops_file_is_noticed(kept: Path, tmp_path: Path) -> None:
    whole, copy = json.loads(kept.read_text()), tmp_path / "copy.json"
    paths = leaves(whole)
    assert len(paths) > 80
    for path in paths:
        table = json.loads(kept.read_text())
        *way, last = path
        inner = table
        for step in way:
            inner = inner[step]
        inner[last] = spoilt(inner[last])
        copy.write_text(json.dumps(table, indent=2) + "\n")
        with pytest.raises(CertificateError):
            pytest.fail(f"{path} was not noticed: {account.certify(copy)}")


@pytest.mark.parametrize(
    ("found", "instead"),
    [("{\n", "{\n\n"), ('"facts": {', '"facts": {"charged": 5,'), ('"charged": 5', '"charged": 4'), ("{", "[")],
)
def test_a_loops_file_that_is_written_otherwise_is_exit_code_one(
    kept: Path, tmp_path: Path, found: str, instead: str
) -> None:
    copy = tmp_path / "copy.json"
    copy.write_text(kept.read_text().replace(found, instead, 1))
    for command in ("certify", "explain"):
        said = sordino(command, copy)
        assert (said.code, said.out) == (1, "")


def test_a_loops_file_can_be_signed(kept: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    copy = tmp_path / "loop.json"
    copy.write_bytes(kept.read_bytes())
    for name in ("mine", "yours"):
        key = Ed25519PrivateKey.generate()
        pem, plain = form.Encoding.PEM, form.NoEncryption()
        (tmp_path / f"{name}.pem").write_bytes(key.private_bytes(pem, form.PrivateFormat.PKCS8, plain))
        public = key.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
    assert sordino("certify", copy, "--sign", tmp_path / "mine.pem").code == 0
    assert (tmp_path / "loop.sig").exists()
    assert sordino("certify", copy, "--key", tmp_path / "mine.pub").code == 0
    assert sordino("certify", copy, "--key", tmp_path / "yours.pub").code == 1


def test_a_place_that_cannot_be_written_to_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        private()[1].save_certificate(tmp_path / "nowhere" / "certificate.json")
