"""Images: MNIST, also by writer, Fashion-MNIST, FEMNIST, CIFAR-10. Pixels are uint8 here; `finish` divides by 255."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np

from sordino.data import leaf
from sordino.data.archives import cifar10_archive
from sordino.data.idx import idx
from sordino.data.records import Array, Dataset
from sordino.data.sources import Source, find, read

_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"


def _four(folder: str, base: str, sums: tuple[str, ...], inside: tuple[str, ...]) -> tuple[Source, ...]:
    """`sums` are the publisher's, of the packed files; `inside` those of the bytes in them."""
    found = zip(_FILES, sums, inside, strict=True)
    return tuple(Source(f"{folder}/{f}", f"md5:{s}", base + f, unpacked=f"sha256:{i}") for f, s, i in found)


MNIST = _four(
    "mnist",
    _MNIST,
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
FASHION_MNIST = _four(
    "fashion_mnist",
    _FASHION,
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)
WRITERS = Source("mnist/mnist_writers.npz", "sha256:b779726f22dba99b6b69afac5e362a6aee1cae9ad0c97ae003d166ed35d8fdb0")
QMNIST = (
    Source(
        "mnist/qmnist-train-labels-idx2-int.gz",
        "md5:0058f8dd561b90ffdd0f734c6a30e5e4",
        _QMNIST + "qmnist-train-labels-idx2-int.gz",
    ),
    Source(
        "mnist/qmnist-test-labels-idx2-int.gz",
        "md5:5b5b05890a5e13444e108efe57b788aa",
        _QMNIST + "qmnist-test-labels-idx2-int.gz",
    ),
)
FEMNIST = Source(
    "femnist/femnist_leaf_subset.npz",
    "sha256:3558f0b1cea35aec0137ce3407e9cbdffd3004f7067cc4f73faf9eb1723470af",
    advice=leaf.HOW.format(folder=f"{leaf.FOLDER} below SORDINO_DATA or the cache"),
)
CIFAR10_LABELS = Source("cifar10/labels.npz", "sha256:b4f5bb8db0d9df30be17bb35661f3814077d871968ecc4ff7e4afc0995d2aad8")
CIFAR10_SHEETS = (  # two of training images, one of test images
    Source("cifar10/train_1.webp", "sha256:33ee1170f92bf498b555fd84884f47b0fd5cf861cd8906ba0494510ca02d8860"),
    Source("cifar10/train_2.webp", "sha256:f0cd79b244135a07833be96f5a711f71baf12b52ebbb0558a5e2b87a0fb99d41"),
    Source("cifar10/test.webp", "sha256:1925251749113162ebc2866d7e46840a66fa4573713aa743599fd9d0370e7362"),
)


def mnist(standard: bool = False) -> Dataset:
    """Handwritten digits, in the canonical order; `standard`: (x - 0.1307) / 0.3081, the published constants."""
    data = _from_idx(MNIST)
    return replace(data, x=_standard(data.x), test_x=_standard(data.test_x)) if standard else data


def _standard(pixels: Array) -> Array:
    return (pixels.astype(np.float32) / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081)


def fashion_mnist() -> Dataset:
    """Ten kinds of clothes, in the canonical order."""
    return _from_idx(FASHION_MNIST)


def _from_idx(sources: tuple[Source, ...]) -> Dataset:
    x, y, test_x, test_y = (idx(read(source)) for source in sources)
    return Dataset(x=x[:, None], y=y, test_x=test_x[:, None], test_y=test_y, classes=10)


def mnist_writers() -> Dataset:
    """MNIST with the NIST writer of every image as its group; test writers are other people."""
    data = _from_idx(MNIST)
    train, test = _writer_numbers()
    groups = np.unique(train, return_inverse=True)[1].astype(np.int64)
    test_groups = np.unique(test, return_inverse=True)[1].astype(np.int64) + groups.max() + 1
    return Dataset(
        x=data.x, y=data.y, test_x=data.test_x, test_y=data.test_y, groups=groups, test_groups=test_groups, classes=10
    )


def _writer_numbers() -> tuple[Array, Array]:
    """NIST's writer of each training and test image: the packed file where there is one, else QMNIST's third column."""
    if find(WRITERS):
        with np.load(io.BytesIO(read(WRITERS))) as file:
            return file["writer_train"], file["writer_test"]
    train, test = (idx(read(source)) for source in QMNIST)
    return train[:, 2], test[:10_000, 2]  # QMNIST's first 10,000 test images are MNIST's


def femnist() -> Dataset:
    """62 handwritten characters; the groups are the writers, each with training and test images. White is 1.

    The packed subset of 105 writers where the data folder has it; else as many writers, by name, of LEAF's own files
    (other writers, and another split: figures come near, not out the same).
    """
    if find(FEMNIST) is None and leaf.there() is not None:
        return leaf.femnist_leaf(writers=105, least=100)
    with np.load(io.BytesIO(read(FEMNIST))) as file:
        return Dataset(
            x=file["x_train"][:, None],
            y=file["y_train"],
            test_x=file["x_test"][:, None],
            test_y=file["y_test"],
            groups=file["writer_train"].astype(np.int64),
            test_groups=file["writer_test"].astype(np.int64),
            classes=62,
        )


def cifar10() -> Dataset:
    """Ten kinds of objects, canonical order: the first 20,000 where the data folder has sheets, else all 50,000."""
    return _cifar_from_sheets() if find(CIFAR10_LABELS) else cifar10_archive()


def _cifar_from_sheets() -> Dataset:
    with np.load(io.BytesIO(read(CIFAR10_LABELS))) as file:
        y, test_y = file["y_train"], file["y_test"]
    *train, test_x = (_tiles(read(sheet)) for sheet in CIFAR10_SHEETS)
    x = np.concatenate(train)
    return Dataset(x=x, y=y[: len(x)], test_x=test_x, test_y=test_y, classes=10)


def _tiles(webp: bytes) -> Array:
    """The 100x100 images of a sheet, [10000, 3, 32, 32]."""
    from PIL import Image

    with Image.open(io.BytesIO(webp)) as image:
        sheet = np.asarray(image.convert("RGB"))
    return sheet.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
