"""`sordino lint` reads files without running them: calls with literals, tables, filters; the rest is not examined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.commands import sordino

from sordino.lint import Settings, read_file


def settings(folder: Path, text: str, name: str = "app.py") -> list[Settings]:
    (folder / name).write_text(text)
    return read_file(folder / name)


def one(folder: Path, text: str, name: str = "app.py") -> Settings:
    (found,) = settings(folder, text, name)
    return found


def test_a_file_is_never_run(tmp_path: Path) -> None:
    text = f"""
from pathlib import Path
from flwr.clientapp.mod import LocalDpMod
Path({str(tmp_path / "ran")!r}).write_text("ran")
mod = LocalDpMod(1.0, 2.0, 0.5, 1e-5)
"""
    assert one(tmp_path, text).values == {"clip_norm": 1.0, "sensitivity": 2.0, "epsilon": 0.5, "delta": 1e-5}
    assert not (tmp_path / "ran").exists()


def test_names_bound_once_and_arithmetic_are_read_and_the_rest_is_not_examined(tmp_path: Path) -> None:
    text = """
import flwr.clientapp.mod as m
import sys
CLIP = 0.5
EPSILON = 1.0
EPSILON = 2.0
def app(delta):
    return m.LocalDpMod(CLIP, 2 * CLIP, EPSILON, delta)
def other(CLIP2=1): return m.LocalDpMod(float(sys.argv[1]), -1.0, 10 ** -1, 1 / 1e5)
"""
    first, second = settings(tmp_path, text)
    assert (first.values, first.unread) == ({"clip_norm": 0.5, "sensitivity": 1.0}, ("epsilon", "delta"))
    assert first.where == "app.py:8"
    assert set(second.unread) == {"clipping_norm", "sensitivity"}, "a call, and a number that is no sensitivity"
    assert second.values == {"epsilon": pytest.approx(0.1), "delta": pytest.approx(1e-5)}


def test_calls_of_a_library_that_the_file_does_not_import_are_not_taken(tmp_path: Path) -> None:
    text = "import sordino as so\nso.make_private(model, optimizer, loader, poisson_sampling=False)\n"
    assert settings(tmp_path, text) == []
    assert len(settings(tmp_path, f"import opacus\n{text}")) == 1


def test_an_engine_and_a_loader_complete_a_call_unless_two_disagree(tmp_path: Path) -> None:
    text = """
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
loader = DataLoader(data, batch_size=100)
engine = PrivacyEngine(accountant="gdp")
net, optimizer, loader = engine.make_private(module=net, optimizer=optimizer, data_loader=loader,
    noise_multiplier=1.0, max_grad_norm=1.0)
"""
    found = one(tmp_path, text)
    assert found.values == {
        "noise_multiplier": 1.0, "clip_norm": 1.0, "poisson": True, "batch_size": 100, "accountant": "gdp"
    }  # fmt: skip
    assert "batch_size" not in one(tmp_path, f"{text}\nDataLoader(test, 256)\n").values
    said = sordino("lint", tmp_path / "app.py", "--records", 1000, "--batch-size", 100, "--epochs", 5, "--delta", 1e-5)
    assert "claims  epsilon 4.01" in said.out


def test_an_enumeration_is_read_by_its_name(tmp_path: Path) -> None:
    text = """
from flwr.supercore.privacy_accounting import *
config = PrivacyConfig(1e-5, 2000, NeighboringRelation.REPLACE_ONE, SamplingMethod.WITHOUT_REPLACEMENT)
event = GaussianPrivacyEvent(noise_multiplier=1.8, sample_size=100, population_size=2000)
"""
    found = one(tmp_path, text)
    assert (found.call, found.get("sampling"), found.get("delta")) == ("accountant", "without_replacement", 1e-5)


@pytest.mark.parametrize(
    ("text", "library", "values"),
    [
        (
            "import pfl\nGaussianMechanism.construct_single_iteration(1.0, 2.0, 1e-5)",
            "pfl",
            {"epsilon": 2.0, "delta": 1e-5},
        ),
        (
            "import pfl\nPLDPrivacyAccountant(100, 0.1, 'gaussian', delta=1e-5, noise_parameter=2.0, noise_scale=0.5)",
            "pfl",
            {"rounds": 100, "rate": 0.1, "delta": 1e-5, "noise_multiplier": 2.0, "noise_scale": 0.5},
        ),
        (
            "import pfl.privacy\nBandedMatrixFactorizationMechanism(1.0, 100, 20, make)",
            "pfl",
            {"rounds": 100, "min_separation": 20},
        ),
        (
            "from jax_privacy import keras_api\nkeras_api.DPKerasConfig(1.0, 1e-5, 1.0, 10, 10, 200, 2000)",
            "jax_privacy",
            {
                "epsilon": 1.0, "delta": 1e-5, "batch_size": 10, "accumulation": 10, "steps": 200, "records": 2000,
                "poisson": False,
            },
        ),
        (
            "import fl4health\nFlInstanceLevelAccountant(0.1, 0.8, 1, [10], [1000])",
            "fl4health",
            {"client_rate": 0.1, "noise_multiplier": 0.8, "epochs": 1, "batch_size": 10, "records": 1000},
        ),
        (
            "import flwr\nDifferentialPrivacyServerSideFixedClipping(s, 4.0, 1.0, 10, accountant=RdpAccountant(c))",
            "flower",
            {"noise_multiplier": 4.0, "clip_norm": 1.0, "sampled": 10, "accounted": True},
        ),
        ("import nvflare\nSVTPrivacy(epsilon=1.0)", "nvflare", {"fraction": 0.1, "epsilon": 1.0, "noise_var": 0.1}),
    ],
)  # fmt: skip
def test_calls_of_each_library_are_read(tmp_path: Path, text: str, library: str, values: dict[str, Any]) -> None:
    found = one(tmp_path, text)
    assert (found.library, found.values, found.unread) == (library, values, ())


def test_star_arguments_are_not_examined_and_hide_the_defaults(tmp_path: Path) -> None:
    found = one(tmp_path, "import opacus\nengine.make_private(**options)\n")
    assert (found.values, found.unread) == ({}, ("**",))


def test_a_table_of_numbers_an_app_and_a_filter_are_read(tmp_path: Path) -> None:
    assert one(tmp_path, 'library = "plain"\nrounds = 3\n', "run.toml").values == {"rounds": 3}
    app = '[tool.flwr.app.config]\nnum-server-rounds = 3\ndp-epsilon = 5.0\ndp-delta = "x"\n'
    found = one(tmp_path, app, "pyproject.toml")
    assert found.values == {"clip_norm": 1.0, "sensitivity": 1e-4, "epsilon": 5.0, "delta": 1e-5, "rounds": 3}
    job = '{"f": [{"path": "a.b.SVTPrivacy", "args": {"fraction": 0.2}}, {"name": "PercentilePrivacy"}]}'
    first, second = settings(tmp_path, job, "config.json")
    assert (first.call, first.get("fraction"), second.call) == ("svt", 0.2, "percentile")
    assert settings(tmp_path, "[a]\nb = 1\n", "other.toml") == []
