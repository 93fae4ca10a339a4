"""Promise: silos with a policy and a ledger train together for release, at the price of the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy import hospitals

from sordino.federation.local_federation import LocalFederation
from sordino.ledger.ledger import Ledger
from sordino.runs.folder import RunFolder
from sordino.training import train


@pytest.fixture(scope="module")
def started(federation: LocalFederation, guarded: Path, ground: Path) -> dict[str, Path]:
    """A run for release, and one that the policies forbid, at once."""
    file = hospitals.file_of(ground, "forbidden", hospitals.planned("local_noise", 3, "secure"))
    apps = {"release": guarded, "forbidden": hospitals.make(ground / "app_forbidden", file)}
    for name, app in apps.items():
        federation.submit(ground / "runs" / name, app=app)
    return {name: ground / "runs" / name for name in apps}


def test_a_plan_that_a_policy_forbids_is_refused_before_anything_is_charged(
    started: dict[str, Path], guarded: Path
) -> None:
    out = started["forbidden"]
    log = out.with_name("forbidden.log")
    hospitals.until("the refusal", lambda: log.exists() and "sordino: " in log.read_text())
    said = log.read_text()
    assert said.count("sordino: ") == 1
    assert "the plan protects one client, and the policy requires one record" in said
    assert not (out / "certificate.json").exists()
    for name in hospitals.SILOS:
        with Ledger.open(guarded / "silos" / name / "ledger.db") as ledger:
            assert ledger.statement(name).runs <= 1  # the other run's


def test_twelve_rounds_for_release_learn_and_cost_what_a_simulation_says(
    federation: LocalFederation, started: dict[str, Path], ground: Path
) -> None:
    out = started["release"]
    made = hospitals.finished(federation, out)
    config = hospitals.config_of(ground, "silo")
    deltas = [silo["delta"] for silo in made["adversaries"][-1]["silos"]]
    here = train(config.plan, hospitals.whole(config), deltas=deltas, allow_large_delta=True)
    last = RunFolder.open(out).history()[-1]["accuracy"]
    print(f"accuracy {last:.4f}, in one process {here.history[-1]['accuracy']:.4f}")
    # the noise is random: 180 runs in one process had a mean of .804, a least of .742, and two below .77
    assert last >= (0.70 if hospitals.real() else here.history[-1]["accuracy"] - 0.05)
    assert [silo["epsilon"] for silo in made["adversaries"][-1]["silos"]] == [
        silo["epsilon"] for silo in here.certificate["adversaries"][-1]["silos"]
    ]
    assert RunFolder.open(out).certify() == made
    assert made["counts"]["charges_per_silo"] == [12] * 4
    assert made["noise"]["mode"] == "secure"
    assert [one["what"] for one in made["declared_public"]] == ["rows of test.npz"]  # and no silo's private file
