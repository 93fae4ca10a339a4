"""Promise: at the end every silo holds the certified model; what it finds on its own held-out rows stays there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.commands import sordino
from tests.engines.wires import Wires
from tests.federation.test_encoding import NAMES, OPTIONS, federation, folder_of

from sordino.engines.remote import Remote
from sordino.errors import DataError
from sordino.federation.app import server_task
from sordino.federation.delivery import MARK, deliver
from sordino.federation.silo_service import SiloService, SiloSpec, silo_task
from sordino.runs.execution import execute


class Directly:
    """Bytes handed to the silos' services; what they answer is kept."""

    def __init__(self, services: list[SiloService]) -> None:
        self.services, self.sent, self.answers = services, dict[int, bytes](), list[bytes]()

    def exchange(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]:
        for silo, body in bodies.items():
            self.sent[silo] = body
            self.answers.append(self.services[silo].reply(body))
            yield silo, self.answers[-1]


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Path, Directly]:
    """A run between two silos without a ledger; each has held-out rows of its own."""
    config, services = federation(), []
    given: dict[str, Any] = {"policy": "", "heldout": "heldout.csv", "options": OPTIONS}
    for name in NAMES:
        spec, folder = SiloSpec(name, "csv", **given), folder_of(tmp_path, name)
        (folder / "heldout.csv").write_text("sex,age,ill\nF,20,no\nM,80,yes\nM,30,no\n")
        services.append(SiloService.open(folder, spec, silo_task(config, spec, folder), "", lambda line: None, config))
    wires = Wires({place: service.silo for place, service in enumerate(services)})
    from dataclasses import replace

    public = replace(config, privacy=replace(config.privacy, noise="simulation"))
    execute(public, tmp_path / "run", engine=Remote(wires, quorum=2), task=server_task(public))
    return tmp_path, Directly(services)


def test_every_silo_ends_with_model_and_certificate_and_scores_its_rows(finished: tuple[Path, Directly]) -> None:
    folder, channel = finished
    assert deliver(folder / "run", 2, channel, 9.0) == [0, 1]
    for name in NAMES:
        for file in ("model.safetensors", "certificate.json"):
            assert (folder / name / "model" / file).read_bytes() == (folder / "run" / file).read_bytes()
        new = folder / name / "new.csv"
        new.write_text("age,sex\n20,F\n80,M\n")
        assert sordino("predict", folder / name / "model", new, "--out", folder / "scores.csv").code == 0
        assert len((folder / "scores.csv").read_text().splitlines()) == 3


def test_figures_of_held_out_rows_stay_in_the_silo(finished: tuple[Path, Directly]) -> None:
    folder, channel = finished
    deliver(folder / "run", 2, channel, 9.0)
    kept = folder / NAMES[0] / "model" / "evaluation.json"
    assert json.loads(kept.read_text()).keys() >= {"rows", "loss", "accuracy", "auc"}
    assert kept.stat().st_mode & 0o077 == 0
    assert set(channel.answers) == {b"taken"}


def test_the_result_of_another_run_or_of_other_weights_is_refused(finished: tuple[Path, Directly]) -> None:
    folder, channel = finished
    deliver(folder / "run", 2, channel, 9.0)
    body, service = channel.sent[0], channel.services[0]
    run = json.loads((folder / "run" / "certificate.json").read_text())["run"]["id"].encode()
    wrong = {
        "did not take part": body.replace(run, b"0" * 32),
        "does not name": body[:-1] + bytes([body[-1] ^ 1]),
        "another form or size": body[:-1],
        "cannot be read": MARK + b"x",
    }
    for says, other in wrong.items():
        with pytest.raises(DataError, match=says):
            service.reply(other)
