"""Arrays of the user's own: an .npz, or a folder of memory-mapped .npy files. Called by `datasets.load`.

npz      x, y and, where present, test_x, test_y, groups, test_groups, classes; read whole.
memmap   x.npy [n, ...] float32 or int64, y.npy [n] float32 or int64, clients.npy [population + 1] int64: client i holds
         the rows clients[i] to clients[i + 1]. A round reads the rows of its cohort and no others; in memory are 8
         bytes a client and a record. test_x.npy and test_y.npy are read whole, and checked.

Every row is private unless the user declares it public: by a file of its own (`test = "public.csv"`), by arrays called
test_x and test_y, or by a share of the rows (`public_test_fraction = 0.2`). Without any of them there is no test.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from sordino.data.files import UNREADABLE, read_npz, regular_file
from sordino.data.records import Array, Dataset, Ints, hold_out, int64, without_test
from sordino.errors import ConfigError, DataError

PARTS = ("x", "y", "clients", "test_x", "test_y")
_TYPES = (np.dtype(np.float32), np.dtype(np.int64))


def memmap(*, path: str | Path, classes: int | None = None) -> Dataset:
    """The folder's arrays, not read yet. `classes` for labels, none for targets.

    What is not read cannot be checked: a record that is not finite makes its client's update count as zero.
    """
    try:
        folder = Path(path).expanduser()
        tested = any((folder / f"test_{side}.npy").exists() for side in "xy")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{str(path)!r}, which cannot be read ({error})", "the path of a folder") from None
    arrays = {name: _open_npy(folder / f"{name}.npy") for name in PARTS[: None if tested else 3]}
    _check_memmap(arrays, classes, folder)
    test_x, test_y = (np.array(arrays[f"test_{side}"]) if tested else np.array(arrays[side][:0]) for side in "xy")
    offsets = np.array(arrays["clients"])
    return Dataset(x=arrays["x"], y=arrays["y"], test_x=test_x, test_y=test_y, classes=classes, offsets=offsets)


def write_memmap(
    folder: Path, x: Array, y: Array, sizes: Array, test_x: Array | None = None, test_y: Array | None = None
) -> None:
    """Arrays in the order of their clients, as `memmap` reads them; `sizes` are the clients' numbers of records."""
    folder.mkdir(parents=True, exist_ok=True)
    clients = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    for name, array in zip(PARTS, (x, y, clients, test_x, test_y), strict=True):
        if array is not None:
            np.save(folder / f"{name}.npy", array)


def _open_npy(path: Path) -> Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a header that an old Python wrote
            array: Array = np.load(regular_file(path), mmap_mode="c", allow_pickle=False)  # copy on write
    except UNREADABLE as error:
        raise DataError(f"{path}, which cannot be read ({error})", "an .npy file", "see sordino.data.arrays") from None
    return array


def _check_memmap(arrays: dict[str, Array], classes: int | None, folder: Path) -> None:
    x, y, offsets = arrays["x"], arrays["y"], arrays["clients"]
    if x.ndim < 2 or y.ndim != 1:
        raise DataError(f"x of shape {x.shape} and y of shape {y.shape} in {folder}", "x [n, ...] and y [n]")
    for name, array in (("x", x), ("y", y)):
        if array.dtype not in _TYPES:
            raise DataError(f"{name} of type {array.dtype} in {folder}", "float32 or int64", "convert it once")
    if (classes is None) != (y.dtype == _TYPES[0]):
        found = f"y of type {y.dtype} and classes = {classes}"
        raise DataError(found, "int64 labels with classes, or float32 without")
    whole = offsets.dtype == np.int64 and offsets.ndim == 1 and len(offsets) > 1
    rising = whole and offsets[0] == 0 and offsets[-1] == len(x) and bool((np.diff(offsets) >= 0).all())
    if not rising or len(y) != len(x):
        found = f"clients.npy that does not cut the {len(x)} rows of x and {len(y)} of y in {folder}"
        raise DataError(found, "int64 row numbers that rise from 0 to the number of rows")


NAMES = ("npz", "csv", "parquet", "memmap")  # data sets of the user's own: no row of them is public unless declared
MOST_CLASSES = 1_000_000


def npz(
    *,
    path: str | Path,
    classes: int | None = None,
    test: str | Path | None = None,
    public_test_fraction: float | None = None,
) -> Dataset:
    """Arrays x, y and, where present, test_x, test_y, groups, test_groups, classes.

    Integer y are labels and float y are targets. The number of classes should be public: give `classes`, here or in the
    file; without it, it is the largest label plus one. Test records are declared public: test_x and test_y, the x and y
    of another file `test`, or a fixed `public_test_fraction` of the records. Without any of them there is no test.
    """
    with name_file(path):
        arrays = read_npz(Path(path))
        data = _from_arrays(arrays, classes)
    ways = {"test": test is not None, "public_test_fraction": public_test_fraction is not None}
    ways["test_x and test_y"] = "test_x" in arrays
    check_one_public_source([name for name, given in ways.items() if given])
    if test is not None:
        check_test_file(path, test)
        with name_file(test):
            other = _from_arrays(read_npz(Path(test)), data.classes)
        return replace(data, test_x=other.x, test_y=other.y)
    return with_public_fraction(data, path, public_test_fraction)


def _from_arrays(arrays: dict[str, Array], classes: int | None) -> Dataset:
    for key in ("x", "y"):
        if key not in arrays or not arrays[key].ndim:
            raise DataError(f"no array {key}", "arrays x and y", f"save it with numpy.savez(path, {key}=...)")
    if ("test_x" in arrays) != ("test_y" in arrays):
        raise DataError("only one of test_x and test_y", "both or neither")
    classes = check_classes(classes if classes is not None else _classes(arrays))
    groups, test_groups = (_whole(arrays.get(key), key) for key in ("groups", "test_groups"))
    names = () if groups is None else tuple(str(value) for value in np.unique(groups))
    data = without_test(arrays["x"], arrays["y"], groups, classes, names)
    if "test_x" not in arrays:
        return data
    return replace(data, test_x=arrays["test_x"], test_y=arrays["test_y"], test_groups=test_groups)


def check_one_public_source(ways: list[str]) -> None:
    if len(ways) > 1:
        raise ConfigError(" and ".join(ways), "one way to say which rows are public", f"drop {ways[0]}")


def check_test_file(path: str | Path, test: str | Path) -> None:
    if Path(path).expanduser().resolve() == Path(test).expanduser().resolve():
        found = f"test = {Path(test).name!r}, which is the training file itself"
        raise ConfigError(found, "a file of rows that may be public", "or drop test: no row is public then")


def with_public_fraction(data: Dataset, path: str | Path, fraction: float | None) -> Dataset:
    """The data with a declared share of its rows as public test records."""
    if fraction is None:
        return data
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ConfigError(f"public_test_fraction = {fraction!r}", "a share of the rows between 0 and 1", "say 0.2")
    with name_file(path):
        held = hold_out(data.x, data.y, data.groups, data.classes, share=fraction)
        if not len(held.test_y):
            found = f"{len(data.y)} records, of which {fraction:g} of every group is none"
            raise DataError(found, "at least one public test record", "raise public_test_fraction, or drop it")
    return replace(held, names=data.names, target_unit=data.target_unit, waiting=data.waiting)


@contextmanager
def name_file(path: str | Path) -> Iterator[None]:
    """Name the file in the errors that are raised inside."""
    try:
        yield
    except DataError as error:
        if str(path) in error.found:
            raise
        raise DataError(f"{error.found} in {path}", error.needed, error.fix) from None


def _classes(arrays: dict[str, Array]) -> int | None:
    y = arrays["y"]
    if "classes" in arrays:
        if arrays["classes"].size != 1 or arrays["classes"].dtype.kind not in "iu":
            raise DataError(f"classes of shape {arrays['classes'].shape}", "one whole number")
        return int(arrays["classes"].item())
    return int(y.max()) + 1 if y.dtype.kind in "iu" and y.size else None


def check_classes(classes: int | None) -> int | None:
    if classes is None:
        return None
    if isinstance(classes, bool) or not isinstance(classes, int) or not 1 <= classes <= MOST_CLASSES:
        needed = f"a whole number from 1 to {MOST_CLASSES}"
        raise DataError(f"{classes!r} classes", needed, "labels count from 0; numbers to predict are stored as floats")
    return classes


def _whole(groups: Array | None, key: str) -> Ints | None:
    if groups is None:
        return None
    if groups.dtype.kind not in "iu" or groups.ndim != 1:
        raise DataError(f"{key} of type {groups.dtype} and shape {groups.shape}", "one integer per record")
    return int64(groups, key)
