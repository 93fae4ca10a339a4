"""Small finished runs that the tests of the report share: nothing in their folders changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands import sordino, spelt_out
from tests.dpsgd.loops import private, train

from sordino.report.comparison import Subject
from sordino.runs.folder import subject

CENTRAL = 'release = { kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }'
CHANGES = {
    "central": [],
    "smooth": [('server = { kind = "sgd" }', 'postprocess = [{ kind = "laplacian_smoothing", strength = 1.5 }]\n'
                'server = { kind = "sgd", lr = 0.7 }')],
    "shares": [(CENTRAL, 'release = { kind = "noise_shares", noise_multiplier = 9.0, at_least = 20 }')],
    "none": [(CENTRAL, 'release = { kind = "no_noise" }')],
    "secure": [('kind = "sgd" }\n\n[run]', 'kind = "sgd" }\n\n[privacy]\nnoise = "secure"\n\n[run]')],
    "local": [
        (CENTRAL, 'release = { kind = "local_noise", mechanism = { kind = "gaussian", noise_multiplier = 9.0 } }')
    ],
}  # fmt: skip
SILOS = """
[task]
dataset = "npz"
options = {{ path = "{data}" }}
partition = {{ kind = "iid", clients = 4 }}

[recipe]
name = "silo"
sizes = [60, 60, 60, 60]
epsilons = [1.0, 2.0, 4.0, 8.0]
rounds = 5
clip_norm = 1.0
lr = 0.5
"""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind; `loop` is the file of a PyTorch loop."""
    found = {name: _ran(tmp_path_factory.mktemp(name), name) for name in CHANGES}
    place = tmp_path_factory.mktemp("silos")
    spelt_out(place)
    (place / "silos.toml").write_text(SILOS.format(data=place / "data.npz"))
    assert sordino("run", place / "silos.toml", "--out", place / "silos").code == 0
    parts = private(epochs=2)
    train(parts)
    parts[1].save_certificate(place / "loop.json")
    return {**found, "silos": place / "silos", "loop": place / "loop.json"}


def _ran(place: Path, name: str) -> Path:
    said = sordino("run", spelt_out(place, *CHANGES[name]), "--out", place / name)
    assert said.code == 0, said.err
    return place / name


@pytest.fixture(scope="session")
def runs(folders: dict[str, Path]) -> dict[str, Subject]:
    """The same, read and certified."""
    return {name: subject(folder, name) for name, folder in folders.items()}
