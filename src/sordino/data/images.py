"""Image data sets: MNIST (and by writer), Fashion-MNIST, FEMNIST, EMNIST, CIFAR-10/100, SVHN. Called by `datasets`.

Archives are read in memory, so that no path in them is written to, and their pickles cannot run code.
Pixels are uint8 here; `check_records` divides them by 255.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import warnings
import zipfile
import zlib
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from sordino.data.files import GZIP, Source, find_source, read_source
from sordino.data.records import Array, Dataset, Ints
from sordino.data.shakespeare import FOLDER, HOW, femnist_leaf, leaf_folder
from sordino.errors import DataError

_TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype("u1"), 0x0C: np.dtype(">i4")}


def idx(content: bytes) -> Array:
    """Parse an array in the idx format, with or without gzip.

    The format is: two zero bytes, type, number of axes, length of each axis, values.
    """
    raw = gzip.decompress(content) if content[:2] == GZIP else content
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        needed = "an idx header of unsigned bytes or 32-bit integers"
        raise DataError("a file that is not in the idx format", needed, "delete the file and load again")
    kind, axes = _TYPES[raw[2]], raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw, ">i4", axes, 4))
    return np.frombuffer(raw, kind, offset=4 + 4 * axes).reshape(shape)


def _source(folder: str, base: str, name: str, md5: str) -> Source:
    return Source(f"{folder}/{name}", f"md5:{md5}", base + name)


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
CIFAR10 = _source("cifar10", _KRIZ, "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a")
CIFAR100 = _source("cifar100", _KRIZ, "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85")
_HOUSE_NUMBERS = "http://ufldl.stanford.edu/housenumbers/"
SVHN = {
    "train": _source("svhn", _HOUSE_NUMBERS, "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
    "test": _source("svhn", _HOUSE_NUMBERS, "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    "extra": _source("svhn", _HOUSE_NUMBERS, "extra_32x32.mat", "a93ce644f1a588dc4d68dda5feec44a7"),
}
_NIST = "https://biometrics.nist.gov/cs_links/EMNIST/"
EMNIST = _source("emnist", _NIST, "gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e")
EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}
MOST = 1 << 31  # bytes that one member of an archive may unpack to
RELOAD = "delete the archive and load again"


def cifar10_archive() -> Dataset:
    """Load CIFAR-10 from its canonical archive: all 50,000 training images in their order."""
    names = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)]
    return _cifar(read_source(CIFAR10), names, "cifar-10-batches-py/test_batch", b"labels", 10)


def cifar100(*, coarse: bool = False) -> Dataset:
    """Load CIFAR-100: 50,000 training images of 100 classes, or of their 20 superclasses if `coarse`."""
    labels, classes = (b"coarse_labels", 20) if coarse else (b"fine_labels", 100)
    return _cifar(read_source(CIFAR100), ["cifar-100-python/train"], "cifar-100-python/test", labels, classes)


def _cifar(packed: bytes, train: list[str], test: str, labels: bytes, classes: int) -> Dataset:
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            parts = [_batch(tar, name, labels) for name in train]
            test_x, test_y = _batch(tar, test, labels)
    except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error, pickle.UnpicklingError) as error:
        raise DataError(f"a CIFAR archive that cannot be read ({error})", "the canonical archive", RELOAD) from None
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, classes=classes)


def _batch(tar: tarfile.TarFile, name: str, labels: bytes) -> tuple[Array, Ints]:
    member = tar.extractfile(name)
    if member is None:
        raise DataError(f"a CIFAR archive without {name}", "the canonical archive", RELOAD)
    batch = ArraysOnly(member, encoding="bytes").load()
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[labels], dtype=np.int64)


def _dtype(spec: str | bytes, *_: Any) -> np.dtype[Any]:
    return np.dtype(spec.decode() if isinstance(spec, bytes) else spec, copy=True)  # old pickles: dtype("u1", 0, 1)


class ArraysOnly(pickle.Unpickler):
    """Unpickler that accepts NumPy arrays only, so that an archive cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        known = {"numpy ndarray": np.ndarray, "numpy dtype": _dtype}
        if f"{module} {name}" not in known:
            raise DataError(f"the class {module}.{name} in a CIFAR archive", "NumPy arrays only", RELOAD)
        return known[f"{module} {name}"]


def svhn(*, extra: bool = False) -> Dataset:
    """Load SVHN: 73,257 images of digits in house numbers; `extra` appends the 531,131 easier ones (604,388 in all)."""
    parts = [_mat(read_source(SVHN[name])) for name in ("train", *(["extra"] if extra else []))]
    test_x, test_y = _mat(read_source(SVHN["test"]))
    x, y = (np.concatenate(side) for side in zip(*parts, strict=True))
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, classes=10)


def _mat(content: bytes) -> tuple[Array, Ints]:
    """Parse X [32, 32, 3, n] and y [n, 1] of a MATLAB 5 file, in which the digit 0 is written 10."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = loadmat(io.BytesIO(content), variable_names=("X", "y"))
        x, y = np.asarray(held["X"]), np.asarray(held["y"]).reshape(-1).astype(np.int64)
    except (MatReadError, ValueError, KeyError, TypeError, NotImplementedError, OSError, zlib.error) as error:
        found = f"an SVHN file that cannot be read ({error})"
        raise DataError(found, "a MATLAB 5 file with X and y", "delete the file and load again") from None
    if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.shape[3] != len(y) or x.dtype != np.uint8:
        found, needed = f"SVHN images of shape {list(x.shape)} and {len(y)} labels", "[32, 32, 3, n] bytes and n labels"
        raise DataError(found, needed, "delete the file and load again")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def emnist(*, split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced") -> Dataset:
    """Load EMNIST: handwritten characters of 28x28 pixels, in one of six splits.

    The splits are balanced (47 classes), byclass (62), bymerge (47), letters (26), digits (10) and mnist (10).
    NIST stores transposed images and counts letters from 1; here images are upright and labels begin with 0.
    """
    if split not in EMNIST_CLASSES:
        raise DataError(f"split = {split!r}", "one of " + ", ".join(EMNIST_CLASSES), "choose one of these splits")
    try:
        with zipfile.ZipFile(io.BytesIO(read_source(EMNIST))) as held:
            x, y = _emnist_part(held, split, "train")
            test_x, test_y = _emnist_part(held, split, "test")
    except (zipfile.BadZipFile, KeyError, EOFError, OSError, zlib.error, NotImplementedError, RuntimeError) as error:
        found = f"EMNIST's archive, which cannot be read ({error})"
        raise DataError(found, "the canonical gzip.zip", RELOAD) from None
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, classes=EMNIST_CLASSES[split])


def _emnist_part(held: zipfile.ZipFile, split: str, part: str) -> tuple[Array, Ints]:
    arrays = []
    for side in ("images-idx3", "labels-idx1"):
        name = f"gzip/emnist-{split}-{part}-{side}-ubyte.gz"
        with gzip.open(io.BytesIO(held.read(name))) as packed:
            content = packed.read(MOST + 1)
        if len(content) > MOST:
            raise DataError(f"{name}, which unpacks to more than {MOST:,} bytes", "the canonical archive", RELOAD)
        arrays.append(idx(content))
    first = 1 if split == "letters" else 0
    return np.ascontiguousarray(arrays[0].transpose(0, 2, 1))[:, None], arrays[1].astype(np.int64) - first


_FILES = [f"{part}-{side}-ubyte.gz" for part in ("train", "t10k") for side in ("images-idx3", "labels-idx1")]
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"


def _four(folder: str, base: str, sums: dict[str, str]) -> tuple[Source, ...]:
    """Return the four files of a data set; `sums` maps the MD5 of a .gz file to the SHA-256 of its content."""
    found = zip(_FILES, sums.items(), strict=True)
    return tuple(Source(f"{folder}/{f}", f"md5:{s}", base + f, unpacked=f"sha256:{i}") for f, (s, i) in found)


MNIST = _four(
    "mnist", _MNIST, {
        "f68b3c2dcbeaaa9fbdd348bbdeb94873": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "d53e105ee54ea40749a09fcbcd1e9432": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "9fb629c4189551a2d022fa330f9573f3": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ec29112dd5afa0611ce80d1b7f02629c": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)  # fmt: skip
FASHION_MNIST = _four(
    "fashion_mnist", _FASHION, {
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "25c81989df183df01b3e8a0aad5dffbe": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "bef4ecab320f06d8554ea6380940ec79": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "bb300cfdad3c16e7a12a480ee83cd310": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)  # fmt: skip
WRITERS = Source("mnist/mnist_writers.npz", "sha256:b779726f22dba99b6b69afac5e362a6aee1cae9ad0c97ae003d166ed35d8fdb0")
QMNIST = (
    _source("mnist", _QMNIST, "qmnist-train-labels-idx2-int.gz", "0058f8dd561b90ffdd0f734c6a30e5e4"),
    _source("mnist", _QMNIST, "qmnist-test-labels-idx2-int.gz", "5b5b05890a5e13444e108efe57b788aa"),
)
FEMNIST = Source(
    "femnist/femnist_leaf_subset.npz",
    "sha256:3558f0b1cea35aec0137ce3407e9cbdffd3004f7067cc4f73faf9eb1723470af",
    advice=HOW.format(folder=f"{FOLDER} below SORDINO_DATA or the cache"),
)
CIFAR10_LABELS = Source("cifar10/labels.npz", "sha256:b4f5bb8db0d9df30be17bb35661f3814077d871968ecc4ff7e4afc0995d2aad8")
CIFAR10_SHEETS = (  # five of training images, one of test images
    Source("cifar10/train_1.webp", "sha256:33ee1170f92bf498b555fd84884f47b0fd5cf861cd8906ba0494510ca02d8860"),
    Source("cifar10/train_2.webp", "sha256:f0cd79b244135a07833be96f5a711f71baf12b52ebbb0558a5e2b87a0fb99d41"),
    Source("cifar10/train_3.webp", "sha256:577efcbfc9a4ea051e4f915841300a1c1943948d918318615797528bd1931ae3"),
    Source("cifar10/train_4.webp", "sha256:a362cd3478100abaef253b26a1c6c0979ac43379b30b03c5c774900ed8f3025c"),
    Source("cifar10/train_5.webp", "sha256:dca43ff04bd60b6081d36b131a960c0ab9d7a4c2f6be4dc305f4248586327eb4"),
    Source("cifar10/test.webp", "sha256:1925251749113162ebc2866d7e46840a66fa4573713aa743599fd9d0370e7362"),
)


def mnist(standard: bool = False) -> Dataset:
    """Load MNIST in the canonical order; `standard` maps each pixel x in [0, 1] to (x - 0.1307) / 0.3081."""
    data = _from_idx(MNIST)
    if not standard:
        return data
    x, test_x = (side.astype(np.float32) / np.float32(255) for side in (data.x, data.test_x))
    mean, std = np.float32(0.1307), np.float32(0.3081)
    return replace(data, x=(x - mean) / std, test_x=(test_x - mean) / std)


def fashion_mnist() -> Dataset:
    """Load Fashion-MNIST, images of ten kinds of clothes, in the canonical order."""
    return _from_idx(FASHION_MNIST)


def _from_idx(sources: tuple[Source, ...]) -> Dataset:
    x, y, test_x, test_y = (idx(read_source(source)) for source in sources)
    return Dataset(x=x[:, None], y=y, test_x=test_x[:, None], test_y=test_y, classes=10)


def mnist_writers() -> Dataset:
    """Load MNIST with the NIST writer of each image as its natural client; test writers are other people.

    The writers are read from mnist_writers.npz if it exists, else from the third column of QMNIST's labels.
    """
    if find_source(WRITERS):
        with np.load(io.BytesIO(read_source(WRITERS))) as file:
            train, test = file["writer_train"], file["writer_test"]
    else:
        train, test = (idx(read_source(source))[:, 2] for source in QMNIST)
        test = test[:10_000]  # QMNIST's first 10,000 test images are MNIST's
    groups = np.unique(train, return_inverse=True)[1].astype(np.int64)
    test_groups = np.unique(test, return_inverse=True)[1].astype(np.int64) + groups.max() + 1
    return replace(_from_idx(MNIST), groups=groups, test_groups=test_groups)


def femnist() -> Dataset:
    """Load 105 writers of FEMNIST (62 handwritten characters), the natural clients, each with train and test images.

    They are read from femnist_leaf_subset.npz if it exists, else 105 writers are read from LEAF's own files: these are
    other writers with another split, so that results are similar but not equal. White is 1.
    """
    if find_source(FEMNIST) is None and leaf_folder() is not None:
        return femnist_leaf(writers=105, least=100)
    with np.load(io.BytesIO(read_source(FEMNIST))) as file:
        x, test_x = file["x_train"][:, None], file["x_test"][:, None]
        groups, test_groups = (file[f"writer_{part}"].astype(np.int64) for part in ("train", "test"))
        y, test_y = file["y_train"], file["y_test"]
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, groups=groups, test_groups=test_groups, classes=62)


def cifar10() -> Dataset:
    """Load ten kinds of objects, in the canonical order: from sheets if the data folder has them, else the archive."""
    if not find_source(CIFAR10_LABELS):
        return cifar10_archive()
    with np.load(io.BytesIO(read_source(CIFAR10_LABELS))) as file:
        y, test_y = file["y_train"], file["y_test"]
    *train, test_x = (_tiles(read_source(sheet)) for sheet in CIFAR10_SHEETS)
    return Dataset(x=np.concatenate(train), y=y, test_x=test_x, test_y=test_y, classes=10)


def _tiles(webp: bytes) -> Array:
    from PIL import Image

    with Image.open(io.BytesIO(webp)) as image:
        sheet = np.asarray(image.convert("RGB"))
    return sheet.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
