"""The schema of a certificate is published, and every certificate keeps to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.accounting.test_record_runs import THREE, own_budgets, written
from tests.commands import federation, sordino
from tests.dpsgd.loops import private, train

from sordino.certificate.build import FORMAT
from sordino.certificate.certificate_file import schema

CHECK = jsonschema.Draft202012Validator(schema())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A certificate of each sort: clients, silos with budgets of their own, no noise, a loop."""
    folder = tmp_path_factory.mktemp("schema")
    parts = private()
    train(parts)
    found = {"loop": parts[1].certificate()}
    quiet = federation(folder, ("noise_multiplier = 2.0", "noise_multiplier = 0.0"))
    assert sordino("run", quiet, "--out", folder / "quiet").code == 0
    assert sordino("run", federation(folder), "--out", folder / "clients").code == 0
    silos = written(folder, THREE, privacy=own_budgets(9.0, 9.0, 9.0, 9.0))
    assert sordino("run", silos, "--out", folder / "silos").code == 0
    for name in ("quiet", "clients", "silos"):
        found[name] = json.loads((folder / name / "certificate.json").read_text())
    return found


@pytest.mark.parametrize("name", ["loop", "quiet", "clients", "silos"])
def test_every_certificate_keeps_to_the_schema(made: dict[str, Any], name: str) -> None:
    CHECK.validate(made[name])
    assert list(made[name]) == list(schema()["properties"])


def test_what_is_missing_strange_or_of_another_type_is_found(made: dict[str, Any]) -> None:
    """A field may be left out nowhere, and be an empty list only where it is a list."""
    found = made["clients"]
    for name, value in found.items():
        assert not CHECK.is_valid({key: held for key, held in found.items() if key != name}), name
        assert CHECK.is_valid({**found, name: []}) == (isinstance(value, list) and name != "adversaries"), name
    assert not CHECK.is_valid({**found, "more": 1})
    assert not CHECK.is_valid({**found, "loop": {"epsilon_so_far": 1.0}})
    assert not CHECK.is_valid({**found, "epsilon": -1.0})


def test_the_schema_is_itself_one_and_says_what_every_field_means() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["properties"]["format"]["const"] == FORMAT
    assert all(field.get("description") for field in schema()["properties"].values())
    root = Path(__file__).parents[2]
    assert "certificate.schema.json" in (root / "pyproject.toml").read_text()  # it is part of what is installed
