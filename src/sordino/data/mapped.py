"""Data too large to read: a folder of .npy files, mapped into memory, of which a round touches its cohort's rows only.

x.npy [n, ...] float32 or int64, y.npy [n] float32 or int64, clients.npy [population + 1] int64: client i holds the rows
clients[i] to clients[i + 1]. In memory: 8 bytes a client and a record. test_x.npy, test_y.npy: public test records,
read whole, and checked; without these two files there is no test.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from sordino.data.files import UNREADABLE, regular
from sordino.data.records import Array, Dataset
from sordino.errors import DataError

PARTS = ("x", "y", "clients", "test_x", "test_y")
_TYPES = (np.dtype(np.float32), np.dtype(np.int64))


def mapped(*, path: str | Path, classes: int | None = None) -> Dataset:
    """The folder's arrays, not read yet. `classes` for labels, none for targets.

    What is not read cannot be checked: a record that is not finite makes its client's update count as zero.
    """
    folder, tested = _folder(Path(path))
    arrays = {name: _opened(folder / f"{name}.npy") for name in PARTS[: None if tested else 3]}
    _check(arrays, classes, folder)
    test_x, test_y = (np.array(arrays[f"test_{side}"]) if tested else np.array(arrays[side][:0]) for side in "xy")
    return Dataset(
        x=arrays["x"],
        y=arrays["y"],
        test_x=test_x,
        test_y=test_y,
        classes=classes,
        offsets=np.array(arrays["clients"]),
    )


def write(
    folder: Path, x: Array, y: Array, sizes: Array, test_x: Array | None = None, test_y: Array | None = None
) -> None:
    """Arrays in the order of their clients, as `mapped` reads them; `sizes` are the clients' numbers of records."""
    folder.mkdir(parents=True, exist_ok=True)
    clients = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    for name, array in zip(PARTS, (x, y, clients, test_x, test_y), strict=True):
        if array is not None:
            np.save(folder / f"{name}.npy", array)


def _folder(path: Path) -> tuple[Path, bool]:
    """The folder, and whether it holds test records."""
    try:
        there = path.expanduser()
        return there, any((there / f"test_{side}.npy").exists() for side in "xy")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{str(path)!r}, which cannot be read ({error})", "the path of a folder") from None


def _opened(path: Path) -> Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a header that an old Python wrote
            array: Array = np.load(regular(path), mmap_mode="c", allow_pickle=False)  # copy on write: the file stays
    except UNREADABLE as error:
        raise DataError(f"{path}, which cannot be read ({error})", "an .npy file", "see sordino.data.mapped") from None
    return array


def _check(arrays: dict[str, Array], classes: int | None, folder: Path) -> None:
    """Shapes and types, which are known without reading."""
    if arrays["x"].ndim < 2 or arrays["y"].ndim != 1:
        found = f"x of shape {arrays['x'].shape} and y of shape {arrays['y'].shape} in {folder}"
        raise DataError(found, "x [n, ...] and y [n]")
    for name in ("x", "y"):
        if arrays[name].dtype not in _TYPES:
            raise DataError(f"{name} of type {arrays[name].dtype} in {folder}", "float32 or int64", "convert it once")
    if (classes is None) != (arrays["y"].dtype == _TYPES[0]):
        raise DataError(
            f"y of type {arrays['y'].dtype} and classes = {classes}", "int64 labels with classes, or float32 without"
        )
    offsets, count = arrays["clients"], len(arrays["x"])
    rising = (
        offsets.dtype == np.int64 and offsets.ndim == 1 and len(offsets) > 1 and bool((np.diff(offsets) >= 0).all())
    )
    if not rising or offsets[0] != 0 or offsets[-1] != count or len(arrays["y"]) != count:
        raise DataError(
            f"clients.npy that does not cut the {count} rows of x and {len(arrays['y'])} of y in {folder}",
            "int64 row numbers that rise from 0 to the number of rows",
        )
