"""One federation for all tests: SuperLink, four SuperNodes, four silos. No process outlives the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy import hospitals

from sordino.flower.loopback import Loopback


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the hospitals' files."""
    folder = tmp_path_factory.mktemp("ground")
    hospitals.write_rows(folder)
    return folder


@pytest.fixture(scope="session")
def federation(ground: Path) -> Iterator[Loopback]:
    """Silos that hold their data open: for plans in simulation mode."""
    folder = hospitals.make(ground / "open", hospitals.file_of(ground, "no_noise", hospitals.planned("no_noise", 10)))
    with Loopback(folder, hospitals.SILOS, ground / "home") as found:
        found.up()
        yield found
