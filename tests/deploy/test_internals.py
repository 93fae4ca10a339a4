"""Promise: which name of Flower a new release has lost is said by name, and a wrong flwr in one sentence."""

from __future__ import annotations

import ast
import os
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from tests.pages import titled

import sordino
from sordino.errors import EngineError
from sordino.federation import flower_api

ROOT = Path(sordino.__file__).parent


def test_the_installed_flwr_has_every_name() -> None:
    assert flower_api.missing_names() == []
    assert flower_api.flower().Message.__name__ == "Message"


def test_a_lost_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flower_api.NAMES, "flwr.app", ("Message", "Gone"))
    monkeypatch.setitem(flower_api.NAMES, "flwr.moved", ("Elsewhere",))
    assert flower_api.missing_names() == ["flwr.app:Gone", "flwr.moved:Elsewhere"]


def test_the_tests_run_against_the_version_that_was_asked_for() -> None:
    """`make test-deploy FLWR=1.42` must not pass because pip installed another version."""
    asked = os.environ.get("SORDINO_FLWR")
    if asked is None:
        pytest.skip("SORDINO_FLWR names no version")
    assert ".".join(map(str, flower_api.installed())) == asked


@pytest.mark.parametrize("version", ["1.41.0", "1.41.7", "1.42.0", "1.42.1"])
def test_both_supported_versions_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert flower_api.installed() == tuple(map(int, version.split(".")[:2]))


def test_the_extra_asks_for_the_versions_that_are_accepted() -> None:
    extras = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert flower_api.WANTED in extras["flower"]


@pytest.mark.parametrize("version", ["1.40.2", "1.43.0", "2.0"])
def test_another_version_is_refused_in_one_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(EngineError, match=f"found flwr {version}; needed flwr>=1.41,<1.43"):
        flower_api.installed()


def test_a_missing_flwr_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(EngineError, match=r"no package flwr in this environment; .*sordino\[flower\]"):
        flower_api.installed()


def test_flower_is_imported_in_one_file_only() -> None:
    elsewhere = [
        str(file.relative_to(ROOT))
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        if name.split(".")[0] in ("flwr", "httpx")
    ]
    assert elsewhere == []


def test_what_the_page_says_of_flowers_wrappers_is_so(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/from-flower.md: one mask of two keys, and a clip norm that goes the wrong way."""
    exec(titled("docs/from-flower.md", "flwr").text, {})
    assert capsys.readouterr().out.split() == ["True", "True"]
