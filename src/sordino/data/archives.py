"""Images in archives: CIFAR-10 and CIFAR-100, SVHN, EMNIST. Read in memory: nothing is unpacked to a path of theirs,
no pickle of theirs can run code. Pixels are uint8 here; `finish` divides by 255."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import warnings
import zipfile
import zlib
from typing import Any, Literal

import numpy as np

from sordino.data.idx import idx
from sordino.data.records import Array, Dataset, Ints
from sordino.data.sources import Source, read
from sordino.errors import DataError

_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
CIFAR10 = Source(
    "cifar10/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a", f"{_CIFAR}cifar-10-python.tar.gz"
)
CIFAR100 = Source(
    "cifar100/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85", f"{_CIFAR}cifar-100-python.tar.gz"
)
SVHN = {
    "train": Source("svhn/train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373", f"{_SVHN}train_32x32.mat"),
    "test": Source("svhn/test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3", f"{_SVHN}test_32x32.mat"),
    "extra": Source("svhn/extra_32x32.mat", "md5:a93ce644f1a588dc4d68dda5feec44a7", f"{_SVHN}extra_32x32.mat"),
}
EMNIST = Source(
    "emnist/gzip.zip",
    "md5:58c8d27c78d21e728a6bc7b3cc06412e",
    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
)
Split = Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"]
EMNIST_CLASSES: dict[str, int] = {
    "balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10,
}  # fmt: skip
MOST = 1 << 31  # bytes that one member of an archive may unpack to


# ---- CIFAR -----------------------------------------------------------------------------------------------------------


def cifar10_archive() -> Dataset:
    """All 50,000 pictures of ten kinds of objects, in the canonical order."""
    names = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)]
    return _cifar(read(CIFAR10), names, "cifar-10-batches-py/test_batch", b"labels", 10)


def cifar100(*, coarse: bool = False) -> Dataset:
    """50,000 pictures of a hundred kinds of objects; `coarse`: their twenty superclasses."""
    labels, classes = (b"coarse_labels", 20) if coarse else (b"fine_labels", 100)
    return _cifar(read(CIFAR100), ["cifar-100-python/train"], "cifar-100-python/test", labels, classes)


def _cifar(packed: bytes, train: list[str], test: str, labels: bytes, classes: int) -> Dataset:
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            parts = [_batch(tar, name, labels) for name in train]
            test_x, test_y = _batch(tar, test, labels)
    except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error, pickle.UnpicklingError) as error:
        raise DataError(f"a CIFAR archive that cannot be read ({error})", "the canonical archive") from None
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, classes=classes)


def _batch(tar: tarfile.TarFile, name: str, labels: bytes) -> tuple[Array, Ints]:
    member = tar.extractfile(name)
    if member is None:
        raise DataError(f"no {name} in the CIFAR archive", "the canonical archive")
    batch = ArraysOnly(member, encoding="bytes").load()
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[labels], dtype=np.int64)


def _dtype(spec: str | bytes, *_: Any) -> np.dtype[Any]:
    """np.dtype as old pickles call it: dtype("u1", 0, 1)."""
    return np.dtype(spec.decode() if isinstance(spec, bytes) else spec, copy=True)


class ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays and nothing else, so that an archive cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        known = {"numpy ndarray": np.ndarray, "numpy dtype": _dtype}
        if f"{module} {name}" not in known:
            raise DataError(f"{module}.{name} in the CIFAR archive", "arrays only", "restore the canonical archive")
        return known[f"{module} {name}"]


# ---- SVHN ------------------------------------------------------------------------------------------------------------


def svhn(*, extra: bool = False) -> Dataset:
    """73,257 house numbers, a digit each; with `extra` the 531,131 easier ones behind them, 604,388 as in paper 000."""
    parts = [_mat(read(SVHN[name])) for name in ("train", *(["extra"] if extra else []))]
    test_x, test_y = _mat(read(SVHN["test"]))
    x, y = (np.concatenate(side) for side in zip(*parts, strict=True))
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, classes=10)


def _mat(content: bytes) -> tuple[Array, Ints]:
    """X [32, 32, 3, n] and y [n, 1] of a MATLAB 5 file; the digit 0 is written 10."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = loadmat(io.BytesIO(content), variable_names=("X", "y"))
        x, y = np.asarray(held["X"]), np.asarray(held["y"]).reshape(-1).astype(np.int64)
    except (MatReadError, ValueError, KeyError, TypeError, NotImplementedError, OSError, zlib.error) as error:
        raise DataError(f"a file of SVHN that cannot be read ({error})", "X and y in the format MATLAB 5") from None
    if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.shape[3] != len(y) or x.dtype != np.uint8:
        raise DataError(f"X of shape {list(x.shape)} and {len(y)} labels", "32 x 32 x 3 x n bytes and n labels")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


# ---- EMNIST ----------------------------------------------------------------------------------------------------------


def emnist(*, split: Split = "balanced") -> Dataset:
    """Handwritten characters, 28x28: balanced (47 classes), byclass (62), bymerge (47), letters (26), digits, mnist.

    NIST stores the images turned over their diagonal, and counts letters from 1: both are undone here.
    """
    if split not in EMNIST_CLASSES:
        raise DataError(f"split = {split!r}", "one of " + ", ".join(EMNIST_CLASSES))
    try:
        with zipfile.ZipFile(io.BytesIO(read(EMNIST))) as held:
            x, y = _emnist_part(held, split, "train")
            test_x, test_y = _emnist_part(held, split, "test")
    except (zipfile.BadZipFile, KeyError, EOFError, OSError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise DataError(f"EMNIST's archive, which cannot be read ({error})", "the canonical gzip.zip") from None
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, classes=EMNIST_CLASSES[split])


def _emnist_part(held: zipfile.ZipFile, split: str, part: str) -> tuple[Array, Ints]:
    images, labels = (
        idx(_member(held, f"gzip/emnist-{split}-{part}-{name}-ubyte.gz")) for name in ("images-idx3", "labels-idx1")
    )
    first = 1 if split == "letters" else 0
    return np.ascontiguousarray(images.transpose(0, 2, 1))[:, None], labels.astype(np.int64) - first


def _member(held: zipfile.ZipFile, name: str) -> bytes:
    """One packed member, if what it unpacks to is no more than fits."""
    packed = held.read(name)
    with gzip.open(io.BytesIO(packed)) as unpacked:
        if len(unpacked.read(MOST + 1)) > MOST:
            raise DataError(f"{name}, which unpacks to more than {MOST:,} bytes", "the canonical archive")
    return packed
