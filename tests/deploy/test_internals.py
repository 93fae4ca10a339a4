"""Promise: which name of Flower a new release has lost is said by name, and a wrong flwr in one sentence."""

from __future__ import annotations

import ast
from importlib import metadata
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("version", ["1.40.2", "1.42.0", "2.0"])
def test_another_version_is_refused_in_one_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(EngineError, match=f"found flwr {version}; needed flwr>=1.41,<1.42"):
        flower_api.installed()


def test_a_missing_flwr_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(EngineError, match=r"no flwr in this environment; .*sordino\[flower\]"):
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
