"""Promise: a plan over Flower gives the model that the same plan gives in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy import hospitals

from sordino.engines.inprocess import InProcess
from sordino.federation import secagg
from sordino.federation.local_federation import LocalFederation
from sordino.runs.folder import RunFolder
from sordino.training import train

KINDS = ("no_noise", "central_noise", "local_noise", "noise_shares")
ROUNDS = {"noise_shares": 3}  # four messages a round: a secure sum


@pytest.fixture(scope="module")
def runs(federation: LocalFederation, ground: Path) -> dict[str, Path]:
    """Four plans at once: nodes take turns."""
    made = {}
    for kind in KINDS:
        app = federation.folder
        if kind != "no_noise":
            file = hospitals.file_of(ground, kind, hospitals.planned(kind, ROUNDS.get(kind, 10)))
            app = hospitals.make(ground / f"app_{kind}", file)
        made[kind] = ground / "runs" / kind
        federation.submit(made[kind], app=app)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_rounds_are_those_of_one_process(
    kind: str, runs: dict[str, Path], federation: LocalFederation, ground: Path
) -> None:
    hospitals.finished(federation, runs[kind])
    config = hospitals.config_of(ground, kind)
    here = train(
        config.plan, hospitals.whole(config), delta=0.01, allow_large_delta=True, engine=InProcess(own_noise=True)
    )
    alone = hospitals.flat(here.model.state_dict())
    grid = secagg.grid_of(config.plan).step if kind == "noise_shares" else 0.0  # shares are rounded there, not here
    assert float((alone - hospitals.parameters(runs[kind])).abs().max()) <= 1e-5 + 2 * config.plan.rounds * grid
    assert RunFolder.open(runs[kind]).certify()["adversaries"][0] == here.certificate["adversaries"][0]
