"""Promise: `pip install -c constraints.txt '.[flower]'` resolves: no constraint excludes what flwr's own pins allow."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def constraints(file: Path) -> dict[str, Requirement]:
    lines = [line for line in file.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    return {found.name.lower().replace("_", "-"): found for found in map(Requirement, lines)}


def test_the_constraints_allow_every_version_that_the_flower_extra_was_tested_with() -> None:
    allowed = constraints(ROOT / "constraints.txt")
    tested = constraints(ROOT / "tests" / "deploy" / "constraints.txt")
    assert "flwr" in tested
    for name in allowed.keys() & tested.keys():
        [version] = [one.version for one in tested[name].specifier]
        assert version in allowed[name].specifier, f"{allowed[name]} excludes {tested[name]}"


def test_every_constraint_has_a_newest_version() -> None:
    for name, found in constraints(ROOT / "constraints.txt").items():
        assert {one.operator for one in found.specifier} & {"==", "<="}, name
