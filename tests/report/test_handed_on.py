"""What a curator hands on: an entry for the registry of deployments, and a model card. Nothing in them is made up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.commands import federation, sordino
from tests.report.registry_fields import SCHEMA

from sordino.report.cards import OPEN
from sordino.runs.folder import RunFolder

ABOUT = """
name = "Sums of ten"
curators = ["Example Hospital", "Example Bank"]
description = "Tells whether a sum is large."
intended_use = "An example: not for patients."
region = "Nowhere"
published = "2026-11-17"
sector = "Healthcare"
authors = ["A. Author"]
data = "Rows that a test has made."
justification = "None: an example."
license = "apache-2.0"
"""
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def ran(folder: Path, noise: str) -> Path:
    file = federation(folder, ("[run]", f'[privacy]\nnoise = "{noise}"\n\n[run]'))
    said = sordino("run", file, "--out", folder / noise)
    assert said.code == 0, said.err
    return folder / noise


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("secure"), "secure")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("simulated"), "simulation")


def described(folder: Path) -> Path:
    (folder / "about.toml").write_text(ABOUT)
    return folder / "about.toml"


def registered(out: Path, folder: Path, *words: Any) -> dict[str, Any]:
    said = sordino("certify", out, "--registry", folder / "entry.yaml", *words)
    assert said.code == 0, said.err
    found: dict[str, Any] = yaml.safe_load((folder / "entry.yaml").read_text("utf-8"))
    return found


def test_an_entry_keeps_to_the_schema_and_says_what_the_certificate_says(secure: Path, tmp_path: Path) -> None:
    entry, made = registered(secure, tmp_path, "--about", described(tmp_path)), RunFolder.open(secure).certify()
    CHECK.validate(entry)
    told = entry["deployment"]
    assert told["privacy_loss"]["privacy_parameters"] == {"epsilon": made["epsilon"], "delta": made["delta"]}
    assert told["deployment_model"]["model_name"] == "Central"
    assert told["dp_variant"]["variant_name"] == "Approximate DP"
    assert entry["url_slug"] == "sums-of-ten-example-hospital-example-bank-2026"
    assert OPEN not in (tmp_path / "entry.yaml").read_text()


def test_text_is_never_folded(secure: Path, tmp_path: Path) -> None:
    """The registry refuses '>' since it hurts Markdown."""
    registered(secure, tmp_path)
    styles = {getattr(token, "style", None) for token in yaml.scan((tmp_path / "entry.yaml").read_text())}
    assert styles <= {None, "|", "'", '"'}


def test_what_nobody_has_said_is_marked_and_listed(secure: Path, tmp_path: Path) -> None:
    entry = registered(secure, tmp_path)
    CHECK.validate(entry)
    assert entry["status"] == "Draft"
    assert entry["deployment"]["basic"]["name"] == OPEN
    said = sordino("certify", secure, "--registry", tmp_path / "again.yaml").out
    assert "to be written: name, curators, description" in said


def test_an_experiment_is_not_registered(simulated: Path, tmp_path: Path) -> None:
    said = sordino("certify", simulated, "--registry", tmp_path / "entry.yaml")
    assert (said.code, (tmp_path / "entry.yaml").exists()) == (2, False)
    assert 'noise = "secure"' in said.sentence


@pytest.mark.parametrize(
    ("text", "word"), [("nme = 'x'", "name"), ("published = 'soon'", "2026-01-31"), ("sector = 'Magic'", "Healthcare")]
)
def test_a_mistake_in_what_is_said_is_one_sentence(text: str, word: str, secure: Path, tmp_path: Path) -> None:
    (tmp_path / "about.toml").write_text(text)
    said = sordino("certify", secure, "--registry", tmp_path / "entry.yaml", "--about", tmp_path / "about.toml")
    assert (said.code, (tmp_path / "entry.yaml").exists()) == (2, False)
    assert word in said.sentence


def test_a_file_that_the_registry_would_refuse_is_not_written(secure: Path, tmp_path: Path) -> None:
    said = sordino("certify", secure, "--registry", tmp_path / "My Entry.yml")
    assert said.code == 2
    assert "lower-case letters" in said.sentence


def test_a_model_card_is_read_by_the_hub_and_has_the_run_s_own_figures(secure: Path, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    assert sordino("model-card", secure, "--out", tmp_path / "README.md", "--about", described(tmp_path)).code == 0
    text, made = (tmp_path / "README.md").read_text("utf-8"), RunFolder.open(secure).certify()
    data = hub.ModelCard(text).data
    assert (data.license, data.library_name, data.model_name) == ("apache-2.0", "sordino", "Sums of ten")
    assert {one.metric_type: one.metric_value for one in data.eval_results} == made["utility"]
    (said,) = re.findall(r"\*\*epsilon ([0-9.]+) at delta", text)
    assert made["epsilon"] <= float(said) < 1.001 * made["epsilon"]  # rounded up: never below what was proved
    assert "Not private to publish" not in text
    assert made["model_sha256"] in text


def test_the_card_of_an_experiment_says_that_it_must_not_be_published(simulated: Path, tmp_path: Path) -> None:
    assert sordino("model-card", simulated, "--out", tmp_path / "README.md").code == 0
    assert "Not private to publish" in (tmp_path / "README.md").read_text()
