"""Registry of data sets by name (`load("mnist")`, `add_dataset`), and readers of the user's own arrays.

Called by the configuration, `cli` and scripts. Nothing is read or downloaded before `load`. The user's own arrays are:

npz      x, y and optionally test_x, test_y, groups, test_groups, classes; the file is read whole.
memmap   x.npy [n, ...] float32 or int64, y.npy [n] float32 or int64, clients.npy [population + 1] int64: client i holds
         the rows clients[i] to clients[i + 1]. A round reads only the rows of its cohort; 8 bytes for each client and
         each record are in memory. test_x.npy and test_y.npy are read whole, and checked.

Each row is private unless the user declares it public: by another file (`test = "public.csv"`), by arrays called
test_x and test_y, or by a share of the rows (`public_test_fraction = 0.2`). Otherwise there are no test records.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sordino.codec import Foreign, nearest, package_of
from sordino.data import images, records, shakespeare, tables, tabular
from sordino.data.files import UNREADABLE, read_npz, regular_file
from sordino.data.records import Array, Dataset
from sordino.data.tables import Column, Paths, TablePreview
from sordino.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sordino.parts.mechanisms import Histogram

# ---- the user's own arrays -------------------------------------------------------------------------------------------


def npz(
    *, path: Paths, classes: int | None = None, test: Paths | None = None, public_test_fraction: float | None = None
) -> Dataset:
    """Read an .npz file with x, y and optionally test_x, test_y, groups, test_groups, classes.

    An integer y has class labels, a float y real targets. The number of classes should be public: pass `classes`, or
    store it in the file; otherwise it is the largest label plus one. Test records are public by declaration: test_x and
    test_y, the x and y of another file `test`, or a fixed `public_test_fraction` of the records.
    """
    with records.name_file(path):
        arrays = read_npz(Path(path))
        data = _from_arrays(arrays, classes)
    own = {"test_x and test_y": arrays.get("test_x")}
    records.check_public_source(path, test, public_test_fraction=public_test_fraction, **own)
    if test is not None:
        with records.name_file(test):
            other = _from_arrays(read_npz(Path(test)), data.classes)
        return replace(data, test_x=other.x, test_y=other.y)
    return records.with_public_fraction(data, path, public_test_fraction)


def _from_arrays(arrays: dict[str, Array], classes: int | None) -> Dataset:
    for key in ("x", "y"):
        if key not in arrays or not arrays[key].ndim:
            raise DataError(f"no array {key}", "arrays x and y", "save both with numpy.savez(path, x=..., y=...)")
    if ("test_x" in arrays) != ("test_y" in arrays):
        raise DataError("only one of test_x and test_y", "both arrays, or neither", "save the other one too")
    y, held = arrays["y"], arrays.get("classes")
    if classes is None and held is not None:
        if held.size != 1 or held.dtype.kind not in "iu":
            raise DataError(f"classes of shape {held.shape}", "one integer", "save the number of classes as classes")
        classes = int(held.item())
    elif classes is None and y.dtype.kind in "iu" and y.size:
        classes = int(y.max()) + 1
    groups = {key: arrays[key] for key in ("groups", "test_groups") if key in arrays}
    for key, values in groups.items():
        if values.dtype.kind not in "iu" or values.ndim != 1:
            found = f"{key} of type {values.dtype} and shape {values.shape}"
            raise DataError(found, "one integer per record", "number the groups, and save an integer array")
        groups[key] = records.int64(values, key)
    names = tuple(str(value) for value in np.unique(groups["groups"])) if "groups" in groups else ()
    classes = records.check_classes(classes)
    data = records.without_test(arrays["x"], y, groups.get("groups"), classes, names)
    if "test_x" not in arrays:
        return data
    return replace(data, test_x=arrays["test_x"], test_y=arrays["test_y"], test_groups=groups.get("test_groups"))


PARTS = ("x", "y", "clients", "test_x", "test_y")
_TYPES = (np.dtype(np.float32), np.dtype(np.int64))


def memmap(*, path: str | Path, classes: int | None = None) -> Dataset:
    """Map the arrays of a folder into memory without reading them; `classes` is None for real targets.

    Training records are not checked at the start: one with NaN or infinity makes its client's update count as zero.
    """
    try:
        folder = Path(path).expanduser()
        tested = any((folder / f"test_{side}.npy").exists() for side in "xy")
    except (OSError, ValueError, RuntimeError) as error:
        found = f"{str(path)!r}, which cannot be read ({error})"
        raise DataError(found, "the path of a folder", "correct path in the options") from None
    arrays: dict[str, Array] = {}
    for name in PARTS[: None if tested else 3]:
        file = folder / f"{name}.npy"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of a header that an old Python wrote
                arrays[name] = np.load(regular_file(file), mmap_mode="c", allow_pickle=False)  # copy on write
        except UNREADABLE as error:
            found = f"{file}, which cannot be read ({error})"
            raise DataError(found, "an .npy file", "write the folder with sordino.data.datasets.write_memmap") from None
    _check_memmap(arrays["x"], arrays["y"], arrays["clients"], classes, folder)
    test_x, test_y = (np.array(arrays[f"test_{side}"]) if tested else np.array(arrays[side][:0]) for side in "xy")
    offsets = np.array(arrays["clients"])
    return Dataset(x=arrays["x"], y=arrays["y"], test_x=test_x, test_y=test_y, classes=classes, offsets=offsets)


def _check_memmap(x: Array, y: Array, offsets: Array, classes: int | None, folder: Path) -> None:
    if x.ndim < 2 or y.ndim != 1:
        found, fix = f"x of shape {x.shape} and y of shape {y.shape} in {folder}", "reshape the arrays"
        raise DataError(found, "x of shape [n, ...] and y of shape [n]", fix)
    for name, array in (("x", x), ("y", y)):
        if array.dtype not in _TYPES:
            fix = f"convert {name}.npy with numpy.astype"
            raise DataError(f"{name} of type {array.dtype} in {folder}", "float32 or int64", fix)
    if (classes is None) != (y.dtype == _TYPES[0]):
        found = f"y of type {y.dtype} and classes = {classes}"
        needed = "int64 labels and a number of classes, or float32 targets and no classes"
        raise DataError(found, needed, "convert y.npy, or correct the option classes")
    whole = offsets.dtype == np.int64 and offsets.ndim == 1 and len(offsets) > 1
    rising = whole and offsets[0] == 0 and offsets[-1] == len(x) and bool((np.diff(offsets) >= 0).all())
    if not rising or len(y) != len(x):
        found = f"clients.npy that does not partition the {len(x)} rows of x and {len(y)} of y in {folder}"
        needed = "int64 row numbers that rise from 0 to the number of rows"
        raise DataError(found, needed, "write clients.npy as [0, cumulative sums of the clients' sizes]")


def write_memmap(
    folder: Path, x: Array, y: Array, sizes: Array, test_x: Array | None = None, test_y: Array | None = None
) -> None:
    """Write a folder that `memmap` reads; x and y are sorted by client, and client i has sizes[i] records."""
    folder.mkdir(parents=True, exist_ok=True)
    clients = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    for name, array in zip(PARTS, (x, y, clients, test_x, test_y), strict=True):
        if array is not None:
            np.save(folder / f"{name}.npy", array)


# ---- registry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    read: Callable[..., Dataset]
    description: str
    licence: str
    shape: tuple[int, ...] | None = None  # None: known only once the data is read
    classes: int = 0  # 0: a number is predicted


_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)
_UCI = "CC BY 4.0 (UCI)"
_NIST = "public domain (NIST SD19)"
_SETS = {
    "digits": _Entry(
        tabular.digits, "1,797 handwritten digits, 8x8, bundled with scikit-learn", _UCI, (1, 8, 8), 10
    ),
    "breast_cancer": _Entry(tabular.breast_cancer, "569 tumours, 30 measurements, bundled", _UCI, (30,), 2),
    "diabetes": _Entry(tabular.diabetes, "442 patients, disease progression (regression), bundled", "public", (10,)),
    "wine": _Entry(tabular.wine, "178 wines of 3 cultivars, 13 measurements, bundled", _UCI, (13,), 3),
    "mnist": _Entry(images.mnist, "70,000 handwritten digits, 28x28", "CC BY-SA 3.0 (as commonly listed)", _GREY, 10),
    "mnist_writers": _Entry(
        images.mnist_writers, "MNIST with its 539 real writers as clients", "CC BY-SA 3.0; writers BSD-style (QMNIST)",
        _GREY, 10,
    ),
    "fashion_mnist": _Entry(images.fashion_mnist, "70,000 pictures of clothes, 28x28", "MIT", _GREY, 10),
    "femnist": _Entry(images.femnist, "LEAF FEMNIST, 62 characters, 105 real writers as clients", _NIST, _GREY, 62),
    "cifar10": _Entry(images.cifar10, "pictures of 10 kinds of objects, 3x32x32", "cite Krizhevsky 2009", _COLOUR, 10),
    "femnist_leaf": _Entry(shakespeare.femnist_leaf, "LEAF FEMNIST whole, about 3,550 real writers as clients", _NIST),
    "cifar100": _Entry(images.cifar100, "pictures of 100 kinds of objects, 3x32x32", "cite Krizhevsky 2009"),
    "svhn": _Entry(
        images.svhn, "house numbers, 3x32x32; extra = true: 604,388 of them", "non-commercial use only", _COLOUR, 10
    ),
    "emnist": _Entry(images.emnist, "handwritten characters, 28x28, six splits", "public domain (NIST)"),
    "adult": _Entry(tabular.adult, "UCI Adult: income above 50,000 dollars", "CC BY 4.0", (104,), 2),
    "insurance": _Entry(tabular.insurance, "1,338 yearly medical charges (regression)", "public domain / DbCL", (11,)),
    "heart_disease": _Entry(tabular.heart_disease, "UCI heart disease, 4 hospitals as clients", "CC BY 4.0", (22,), 2),
    "lending_club": _Entry(
        tabular.loans, "10,000 loans: interest rate from 10 numbers (regression)", "Lending Club public releases", (10,)
    ),
    "shakespeare": _Entry(
        shakespeare.shakespeare, "next character in Shakespeare, roles as clients",
        "free, non-commercial distribution only",
    ),
    "npz": _Entry(npz, "your own arrays: path to an .npz with x and y", "yours"),
    "memmap": _Entry(memmap, "your own large arrays: path to a folder of .npy files, read as needed", "yours"),
    "csv": _Entry(tables.table, "your own tables: a .csv, or one for every silo, and their target column", "yours"),
    "parquet": _Entry(tables.table, "the same of .parquet files (the extra `parquet`)", "yours"),
}  # fmt: skip
_ALIASES = {"loans": "lending_club"}
TABLES = ("csv", "parquet")
OWN = ("npz", "memmap", *TABLES)  # data sets of the user's own: no row of them is public unless declared


def add_dataset(
    name: str, read: Callable[..., Dataset], *, description: str = "", licence: str = "not stated",
    shape: tuple[int, ...] | None = None, classes: int = 0,
) -> None:  # fmt: skip
    """Register a data set that `read(**options)` returns; you declare that its test records are public.

    If `shape`, the shape of one record, is given, `sordino plan` tries the model on synthetic records of that shape;
    `classes` = 0 means real targets.
    """
    known = _SETS.get(_ALIASES.get(name, name))
    if known is not None and (known.read.__module__, known.read.__qualname__) != (read.__module__, read.__qualname__):
        found = f"a second data set {name!r}; {known.read.__module__} has registered the first"
        raise ConfigError(found, "a name that no other data set has", "choose another name")
    _SETS[name] = _Entry(read, description, licence, None if shape is None else tuple(shape), classes)


def foreign(name: str) -> tuple[Foreign, ...]:
    """Return the third-party package that registered a data set; empty for a data set of Sordino."""
    entry = _SETS.get(_ALIASES.get(name, name))
    if entry is None or entry.read.__module__.startswith("sordino."):
        return ()
    return (Foreign(*package_of(entry.read.__module__), "Dataset", name),)


def record_of(name: str) -> tuple[tuple[int, ...], int] | None:
    """Return the shape of a record and the number of classes (0: real target); None if only the data can tell."""
    entry = _SETS.get(_ALIASES.get(name, name))
    return None if entry is None or entry.shape is None else (entry.shape, entry.classes)


def names() -> list[str]:
    """Return the names of all data sets that `load` can load."""
    return list(_SETS)


def descriptions() -> dict[str, str]:
    """Return a one-line description of each data set, by name."""
    return {name: entry.description for name, entry in _SETS.items()}


def load(
    name: str = "digits", *, train: int | None = None, test: int | Paths | None = None, validation: bool = False,
    **options: Any,
) -> Dataset:  # fmt: skip
    """Load a data set by name and check that it is finite, of matching lengths, and has its labels in range.

    Only the first `train` training records and the first `test` test records are used (data sets with groups may be
    sorted by group). With `validation` the test records are the training records after the first `train`:
    `load("mnist", train=50000, validation=True)` is tested on the last 10,000 training images. Rows of the user's own
    data are private; for such data `test` may be the path of a public file.
    """
    if isinstance(test, str | Path):
        options, test = {**options, "test": test}, None
    name, entry = _checked_entry(name, options, validation)
    data = replace(entry.read(**options), name=name, description=entry.description, licence=entry.licence)
    return records.select_records(data, train, test, validation)


def _checked_entry(name: str, options: Mapping[str, Any], validation: bool) -> tuple[str, _Entry]:
    """Return name and entry of a data set; refuse, without reading data, an unknown name or wrong options."""
    name = _ALIASES.get(name, name)
    if name not in _SETS:
        raise ConfigError(f"unknown data set {name!r}", "one of " + ", ".join(_SETS), nearest(name, list(_SETS)))
    parameters = inspect.signature(_SETS[name].read).parameters
    known = list(dict.fromkeys([*parameters, "train", "test", "validation"]))
    if "test" in options and "test" not in parameters:
        needed = "a whole number, the number of test records to use"
        raise ConfigError(f"test = {options['test']!r} for data set {name}", needed, "write a number, such as 1000")
    unknown = next((option for option in options if option not in known), None)
    if unknown is not None:
        found = f"unknown option {unknown!r} of data set {name}"
        raise ConfigError(found, "one of " + ", ".join(known), nearest(unknown, known))
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            needed = f"a value for the option {option}"
            raise ConfigError(f"data set {name} without {option}", needed, f"add {option} = ... to [task.options]")
    if validation and name in OWN:
        fix = "declare a public file, test = ..., or a share of the rows, public_test_fraction = 0.2"
        found = f"validation = true for {name}, whose rows are private"
        raise ConfigError(found, "test rows that are declared public", fix)
    return name, _SETS[name]


# ---- facts that need no rows -----------------------------------------------------------------------------------------


def names_silos(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether the natural clients of a data set have names, from a table's column, files, or hospitals."""
    return name == "heart_disease" or (name in TABLES and bool(options.get("groups") or options.get("files")))


def preview(name: str, options: Mapping[str, Any]) -> TablePreview:
    """Return silo names and notes for the user about a data set, without reading a row.

    Options that `load` would refuse are refused. For the user's own tables, files that exist are opened for their
    headers, and headers that a run would refuse are refused.
    """
    named = isinstance(options.get("test"), str | Path)  # a file; else a number of test records
    counts = ("train", "validation", *(() if named else ("test",)))
    own = {key: value for key, value in options.items() if key not in counts}
    _checked_entry(name, own, options.get("validation") is True)
    if name in TABLES:
        return tables.preview(own)
    return TablePreview(tuple(tabular.HOSPITALS) if name == "heart_disease" and not options else ())


def preparations(name: str, options: Mapping[str, Any]) -> tuple[Histogram, ...]:
    """Return the noised histograms that must be released before the columns of a data set can be scaled."""
    return tables.preparations(options) if name in TABLES else ()


def declarations(
    name: str, options: Mapping[str, Any], *, labels: bool
) -> tuple[str, str, tuple[tuple[int, str, str], ...]]:
    """Return the declarations of public data: name of the test records, who declares them public, public values.

    The publisher of a data set declares its test records public; for own files the user does. Each public value is
    (count, description, who declares it public). `labels` says that the targets are classes.
    """
    name = _ALIASES.get(name, name)
    if name not in OWN:
        publisher = [f"the package {part.package}" for part in foreign(name)] or ["the publisher of the data set"]
        return f"test rows of {name}", publisher[0], ()
    values: tuple[tuple[int, str, str], ...] = ()
    if name in TABLES:
        columns = tables.column_declarations(options.get("columns"), options.get("ranges")).values()
        count = sum(column != Column(histogram=column.histogram) for column in columns)
        by = "the configuration: [task.options.columns]"
        values = ((count, "ranges, categories and constants of columns", by),) if count else ()
    elif labels and "classes" not in options:
        values = ((1, "number of classes", "the file: its own, or the largest label in it"),)
    file = Path(str(options.get("path") or options.get("files", ""))).name
    if isinstance(options.get("test"), str | Path):
        return f"rows of {Path(options['test']).name}", "the configuration: test names the file", values
    if "public_test_fraction" in options:
        by = f"the configuration: public_test_fraction = {options['public_test_fraction']}"
        return f"test rows of {file}", by, values
    return f"test rows of {file}", "the data: they are called test_x and test_y", values
