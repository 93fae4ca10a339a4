"""One federation for all tests: SuperLink, four SuperNodes, four silos. No process outlives the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy import hospitals

from sordino.federation.local_federation import LocalFederation


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the hospitals' files."""
    folder = tmp_path_factory.mktemp("ground")
    hospitals.write_rows(folder)
    return folder


@pytest.fixture(scope="session")
def federation(ground: Path) -> Iterator[LocalFederation]:
    """Silos that hold their data open: for plans in simulation mode."""
    folder = hospitals.make(ground / "open", hospitals.file_of(ground, "no_noise", hospitals.planned("no_noise", 10)))
    with LocalFederation(folder, hospitals.SILOS, ground / "home") as found:
        found.up()
        yield found


@pytest.fixture(scope="session")
def guarded(federation: LocalFederation, ground: Path) -> Path:
    """The same nodes, behind silos with a policy and a ledger: the folder in which these are.

    The policies allow any number of rounds of the recipe, so that a test can count what is charged.
    Files are run in the order of their names: from test_under_policy.py on the nodes are behind these silos.
    """
    file = hospitals.file_of(ground, "silo", hospitals.RECIPE.format(rounds=12, noise="secure"))
    folder = hospitals.make(ground / "guarded", file)
    for name in hospitals.SILOS:
        hospitals.allow(folder, name, epsilon=1000.0, plans=[])
        federation.kill(f"silo.{name}")
        federation.silo(name, folder)
    return folder


@pytest.fixture
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower tells a ServerApp's process of itself."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
