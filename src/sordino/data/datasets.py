"""Registry of data sets by name: `load("mnist")`, `add_dataset`. Nothing is read or downloaded before `load`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.codec import Foreign, nearest, package_of
from sordino.data import arrays, images, shakespeare, tables, tabular
from sordino.data.records import Dataset, check_dataset, select_records
from sordino.data.tables import TablePreview
from sordino.errors import ConfigError

if TYPE_CHECKING:
    from sordino.parts.mechanisms import Histogram

__all__ = ["Dataset", "add_dataset", "declared_by", "descriptions", "foreign", "load", "names", "names_silos"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A registered data set: its reader, description and licence."""

    read: Callable[..., Dataset]
    description: str
    licence: str


_SETS = {
    "digits": _Entry(tabular.digits, "1,797 handwritten digits, 8x8, bundled with scikit-learn", "CC BY 4.0 (UCI)"),
    "breast_cancer": _Entry(tabular.breast_cancer, "569 tumours, 30 measurements, bundled", "CC BY 4.0 (UCI)"),
    "diabetes": _Entry(tabular.diabetes, "442 patients, disease progression (regression), bundled", "public"),
    "wine": _Entry(tabular.wine, "178 wines of 3 cultivars, 13 measurements, bundled", "CC BY 4.0 (UCI)"),
    "mnist": _Entry(images.mnist, "70,000 handwritten digits, 28x28", "CC BY-SA 3.0 (as commonly listed)"),
    "mnist_writers": _Entry(
        images.mnist_writers, "MNIST with its 539 real writers as clients", "CC BY-SA 3.0; writers BSD-style (QMNIST)"
    ),
    "fashion_mnist": _Entry(images.fashion_mnist, "70,000 pictures of clothes, 28x28", "MIT"),
    "femnist": _Entry(
        images.femnist, "LEAF FEMNIST, 62 characters, 105 real writers as clients", "public domain (NIST SD19)"
    ),
    "cifar10": _Entry(images.cifar10, "pictures of 10 kinds of objects, 3x32x32", "cite Krizhevsky 2009"),
    "femnist_leaf": _Entry(
        shakespeare.femnist_leaf, "LEAF FEMNIST whole, about 3,550 real writers as clients", "public domain (NIST SD19)"
    ),
    "cifar100": _Entry(images.cifar100, "pictures of 100 kinds of objects, 3x32x32", "cite Krizhevsky 2009"),
    "svhn": _Entry(images.svhn, "house numbers, 3x32x32; extra = true: 604,388 of them", "non-commercial use only"),
    "emnist": _Entry(images.emnist, "handwritten characters, 28x28, six splits", "public domain (NIST)"),
    "adult": _Entry(tabular.adult, "UCI Adult: income above 50,000 dollars", "CC BY 4.0"),
    "insurance": _Entry(tabular.insurance, "1,338 yearly medical charges (regression)", "public domain / DbCL"),
    "heart_disease": _Entry(tabular.heart_disease, "UCI heart disease, 4 hospitals as clients", "CC BY 4.0"),
    "lending_club": _Entry(
        tabular.loans, "10,000 loans: interest rate from 10 numbers (regression)", "Lending Club public releases"
    ),
    "shakespeare": _Entry(
        shakespeare.shakespeare,
        "next character in Shakespeare, roles as clients",
        "free, non-commercial distribution only",
    ),
    "npz": _Entry(arrays.npz, "your own arrays: path to an .npz with x and y", "yours"),
    "memmap": _Entry(arrays.memmap, "your own large arrays: path to a folder of .npy files, read as needed", "yours"),
    "csv": _Entry(tables.table, "your own tables: a .csv, or one for every silo, and their target column", "yours"),
    "parquet": _Entry(tables.table, "the same of .parquet files (the extra `parquet`)", "yours"),
}
_ALIASES = {"loans": "lending_club"}
TABLES = ("csv", "parquet")
_PICTURE, _COLOURS = (1, 28, 28), (3, 32, 32)
_RECORDS: dict[str, tuple[tuple[int, ...], int]] = {  # shape of one record, and how many classes; 0: a number
    **{"digits": ((1, 8, 8), 10), "breast_cancer": ((30,), 2), "diabetes": ((10,), 0), "wine": ((13,), 3)},
    **{"mnist": (_PICTURE, 10), "mnist_writers": (_PICTURE, 10), "fashion_mnist": (_PICTURE, 10)},
    **{"femnist": (_PICTURE, 62), "cifar10": (_COLOURS, 10), "svhn": (_COLOURS, 10), "adult": ((104,), 2)},
    **{"insurance": ((11,), 0), "heart_disease": ((22,), 2), "lending_club": ((10,), 0)},
}


def add_dataset(
    name: str,
    read: Callable[..., Dataset],
    *,
    description: str = "",
    licence: str = "not stated",
    shape: tuple[int, ...] | None = None,
    classes: int = 0,
) -> None:
    """Register a data set: `read(**options)` returns it; its test records are public by your declaration.

    With the `shape` of one record and the number of `classes` (0: a number), `sordino plan` tries the model on it.
    """
    known = _SETS.get(_ALIASES.get(name, name))
    if known is not None and (known.read.__module__, known.read.__qualname__) != (read.__module__, read.__qualname__):
        raise ConfigError(f"a second data set {name!r}", "a name of its own", f"{known.read.__module__} has this one")
    _SETS[name] = _Entry(read, description, licence)
    if shape is not None:
        _RECORDS[name] = tuple(shape), classes


def foreign(name: str) -> tuple[Foreign, ...]:
    """The package that a registered data set comes from; empty for Sordino's own."""
    entry = _SETS.get(_ALIASES.get(name, name))
    if entry is None or entry.read.__module__.startswith("sordino."):
        return ()
    return (Foreign(*package_of(entry.read.__module__), "Dataset", name),)


def record_of(name: str) -> tuple[tuple[int, ...], int] | None:
    """Shape of one record and number of classes (0: a number), where they are known without reading anything."""
    return _RECORDS.get(_ALIASES.get(name, name))


def names() -> list[str]:
    """The names that `load` knows."""
    return list(_SETS)


def descriptions() -> dict[str, str]:
    """One line for each name."""
    return {name: entry.description for name, entry in _SETS.items()}


def load(
    name: str = "digits",
    *,
    train: int | None = None,
    test: int | str | Path | None = None,
    validation: bool = False,
    **options: Any,
) -> Dataset:
    """A data set, checked: finite, of matching lengths, labels in range.

    `train` and `test` keep the first records of each part (sets with groups may be ordered by group). With `validation`
    the test part is the training records after the first `train`: `load("mnist", train=50000, validation=True)` is
    tested on the last 10,000 training images. Of own data nothing is public unasked: there `test` may name a file.
    """
    if isinstance(test, str | Path):
        options, test = {**options, "test": test}, None
    name, entry = _known(name, options, validation)
    data = replace(entry.read(**options), name=name, description=entry.description, licence=entry.licence)
    return check_dataset(select_records(data, train, test, validation))


def check_known(name: str, options: Mapping[str, Any]) -> None:
    """Refuse, without reading anything, a name or options that `load` would refuse."""
    counted = {"train", "validation"} | ({"test"} if not isinstance(options.get("test"), str | Path) else set())
    _known(name, {key: options[key] for key in options if key not in counted}, options.get("validation") is True)


def _known(name: str, options: dict[str, Any], validation: bool) -> tuple[str, _Entry]:
    name = _ALIASES.get(name, name)
    if name not in _SETS:
        raise ConfigError(f"unknown data set {name!r}", "one of " + ", ".join(_SETS), nearest(name, list(_SETS)))
    parameters = inspect.signature(_SETS[name].read).parameters
    known = list(dict.fromkeys([*parameters, "train", "test", "validation"]))
    if "test" in options and "test" not in parameters:
        raise ConfigError(f"test = {options['test']!r} of data set {name}", "how many of its test records to keep")
    unknown = next((option for option in options if option not in known), None)
    if unknown is not None:
        found = f"unknown option {unknown!r} of data set {name}"
        raise ConfigError(found, "one of " + ", ".join(known), nearest(unknown, known))
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConfigError(f"data set {name} without {option}", f"the option {option}")
    if validation and name in arrays.NAMES:
        fix = "name a file, test = ..., or say public_test_fraction = 0.2"
        raise ConfigError(f"validation = true of {name}, whose rows are private", "rows that may be public", fix)
    return name, _SETS[name]


def names_silos(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the natural clients of a data set have names: a column of a table, files, or hospitals."""
    return name == "heart_disease" or (name in TABLES and bool(options.get("groups") or options.get("files")))


def preview(name: str, options: Mapping[str, Any]) -> TablePreview:
    """Silo names and notes of a data set before a row is read.

    For own tables the names and headers of existing files are read; what a run would refuse by them is refused.
    """
    if name in TABLES:
        return tables.preview(
            {key: value for key, value in options.items() if key != "test" or isinstance(value, str | Path)}
        )
    return TablePreview(tuple(tabular.HOSPITALS) if name == "heart_disease" and not options else (), ())


def preparations(name: str, options: Mapping[str, Any]) -> tuple[Histogram, ...]:
    """The noised histograms that must be released before the data can be scaled."""
    return tables.preparations(options) if name in TABLES else ()


def declared_values(name: str, options: Mapping[str, Any], *, labels: bool) -> tuple[tuple[int, str, str], ...]:
    """Public values that encode records: (how many, of what, who declares them); `labels`: targets are classes."""
    if name in TABLES:
        return tables.declared_values(options)
    if name in arrays.NAMES and labels and "classes" not in options:
        return ((1, "number of classes", "the file: its own, or the largest label in it"),)
    return ()


def declared_by(name: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Name of the public test records, and who declares them public: the publisher, or the user for own files."""
    name = _ALIASES.get(name, name)
    if name not in arrays.NAMES:
        publisher = [f"the package {part.package}" for part in foreign(name)] or ["the publisher of the data set"]
        return f"test rows of {name}", publisher[0]
    file = Path(str(options.get("path") or options.get("files", ""))).name
    if isinstance(options.get("test"), str | Path):
        return f"rows of {Path(options['test']).name}", "the configuration: test names the file"
    if "public_test_fraction" in options:
        share = options["public_test_fraction"]
        return f"test rows of {file}", f"the configuration: public_test_fraction = {share}"
    return f"test rows of {file}", "the data: they are called test_x and test_y"
