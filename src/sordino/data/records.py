"""`Dataset`: training and test arrays, and the checks that every data set passes. Called by all readers in data/."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sordino import codec
from sordino.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sordino.data.columns import PendingColumn

Array = NDArray[Any]
Ints = NDArray[np.int64]


@codec.hides_values
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Dataset:
    """Training and test records, and the natural client of each where the data has one."""

    x: Array  # float32 [n, ...], or int64 [n, length] for text
    y: Array  # int64 labels or float32 targets, [n]
    test_x: Array  # of no record where nothing was declared public
    test_y: Array
    groups: Ints | None = None  # natural client of each training record, [n]
    test_groups: Ints | None = None  # same numbering; new numbers for clients that only appear in the test
    classes: int | None = None  # None: regression
    target_unit: float = 1.0  # regression: one unit of y in the original unit (dollars, percent)
    offsets: Ints | None = None  # records in the order of their clients, mapped into memory: not read, not checked
    names: tuple[str, ...] = ()  # of the natural clients, in the order of their numbers, where they have names
    waiting: tuple[PendingColumn, ...] = ()  # coordinates of x that are scaled once a noised histogram is released
    name: str = ""
    description: str = ""
    licence: str = ""


def fixed_order(n: int) -> Ints:
    """A permutation that is public and the same everywhere: the numbers 0 .. n - 1 sorted by their SplitMix64."""
    z = (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable").astype(np.int64)


def hold_out(
    x: Array,
    y: Array,
    groups: Ints | None = None,
    classes: int | None = None,
    target_unit: float = 1.0,
    share: float = 0.2,
) -> Dataset:
    """The last `share` of the fixed order are the test; within every group where there are groups.

    Checked before the records are reordered, so that a message names the record as the file numbers it.
    """
    x, y = _checked(x, y, groups, classes, "")
    order = fixed_order(len(y))
    parts = [order] if groups is None else [order[groups[order] == g] for g in np.unique(groups)]
    cuts = [len(part) - int(len(part) * share) for part in parts]
    train = np.concatenate([part[:cut] for part, cut in zip(parts, cuts, strict=True)])
    test = np.concatenate([part[cut:] for part, cut in zip(parts, cuts, strict=True)])
    return Dataset(
        x=x[train],
        y=y[train],
        test_x=x[test],
        test_y=y[test],
        groups=None if groups is None else groups[train],
        test_groups=None if groups is None else groups[test],
        classes=classes,
        target_unit=target_unit,
    )


def without_test(
    x: Array, y: Array, groups: Ints | None = None, classes: int | None = None, names: tuple[str, ...] = ()
) -> Dataset:
    """A data set without public test records."""
    x, y = _checked(x, y, groups, classes, "")
    return Dataset(x=x, y=y, test_x=x[:0], test_y=y[:0], groups=groups, classes=classes, names=names)


def to_unit(values: Array, low: float | Array, high: float | Array) -> Array:
    """From a public range to [-1, 1], clipped there, so that a record's norm has a public bound."""
    return np.asarray(np.clip(2 * (values - low) / (high - low) - 1, -1, 1), dtype=np.float32)


def select_records(data: Dataset, train: int | None, test: int | None, validation: bool) -> Dataset:
    """The first `train` and `test` records; with `validation` the test is what follows the training records taken."""
    if data.offsets is not None and (train is not None or validation):
        raise ConfigError("train or validation of memory-mapped data", "all of its records", "write another folder")
    if validation and train is None:
        raise ConfigError("validation = true without train", "how many records to train on", "add train = 50000 (say)")
    if validation:
        _check_count("train", train, len(data.y) - 1)
        groups = None if data.groups is None else data.groups[train:]
        data = replace(data, test_x=data.x[train:], test_y=data.y[train:], test_groups=groups)
    _check_count("train", train, len(data.y))
    _check_count("test", test, len(data.test_y))
    return replace(
        data,
        x=data.x[:train],
        y=data.y[:train],
        groups=None if data.groups is None else data.groups[:train],
        test_x=data.test_x[:test],
        test_y=data.test_y[:test],
        test_groups=None if data.test_groups is None else data.test_groups[:test],
    )


def _check_count(option: str, asked: int | None, present: int) -> None:
    if asked is not None and not 1 <= asked <= present:
        raise DataError(f"{option} = {asked}", f"between 1 and the {present} records there are")


def check_dataset(data: Dataset) -> Dataset:
    """The data set in its final types, checked. Pixels (uint8) are divided by 255, their public range."""
    lazy = data.offsets is not None
    x, y = (data.x, data.y) if lazy else _checked(data.x, data.y, data.groups, data.classes, "")
    test_x, test_y = data.test_x, data.test_y
    if len(test_x) or len(test_y):
        test_x, test_y = _checked(test_x, test_y, data.test_groups, data.classes, "test_")
    if x.shape[1:] != test_x.shape[1:]:
        found = f"training records of shape {x.shape[1:]}, test records of {test_x.shape[1:]}"
        raise DataError(found, "the same shape")
    return replace(data, x=x, y=y, test_x=test_x, test_y=test_y)


def _checked(x: Array, y: Array, groups: Ints | None, classes: int | None, part: str) -> tuple[Array, Array]:
    """x and y in their final types: matching lengths, labels in range, finite. `part` is "" or "test_"."""
    if x.ndim < 2 or y.ndim != 1:
        raise DataError(f"{part}x of shape {x.shape} and {part}y of shape {y.shape}", "x [n, ...] and y [n]")
    lengths = {"x": len(x), "y": len(y)} | ({} if groups is None else {"groups": len(groups)})
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{n} records in {part}{name}" for name, n in lengths.items())
        raise DataError(found, "the same number in each")
    if not len(y):
        raise DataError(f"no records in {part}y", "at least one", "five records or more can be split into two parts")
    x, y = _features(x, part + "x"), _targets(y, classes, part + "y")
    _check_finite(part + "x", x)
    _check_finite(part + "y", y)
    return x, y


def _features(x: Array, label: str) -> Array:
    if x.dtype == np.uint8:
        return np.divide(x, np.float32(255), dtype=np.float32)
    if x.dtype.kind in "iu":
        return int64(x, label)
    return _float32(x, label)


def int64(values: Array, label: str) -> Array:
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"the number {values.max()} in {label}", "integers of 64 bits with a sign")
    return values.astype(np.int64, copy=False)


def _targets(y: Array, classes: int | None, name: str) -> Array:
    """int64 labels inside 0 .. classes - 1, or float32 targets."""
    if classes is None:
        return _float32(y, name)
    if y.dtype.kind not in "iu":
        found = f"{name} of type {y.dtype}"
        raise DataError(found, "integer labels", "store it as int64, or leave classes out for regression")
    wrong = np.flatnonzero((y < 0) | (y >= classes))
    if len(wrong):
        raise DataError(f"label {y[wrong[0]]} in {name}, record {wrong[0]}", f"labels from 0 to {classes - 1}")
    return y.astype(np.int64, copy=False)


def _float32(values: Array, label: str) -> Array:
    """`values` in float32; what overflows becomes infinite and is refused by the next check."""
    if values.dtype.kind not in "fiub":
        raise DataError(f"{label} of type {values.dtype}", "real numbers")
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def _check_finite(label: str, values: Array) -> None:
    if not np.issubdtype(values.dtype, np.floating):
        return
    finite = np.isfinite(values)
    if finite.all():
        return
    wrong = int(values.size - np.count_nonzero(finite))
    record, *inside = (int(i) for i in np.unravel_index(int(np.argmin(finite)), values.shape))
    where = f"record {record}" + (f", position {tuple(inside)}" if inside else "")
    found = f"{wrong} NaN or infinite value(s) in {label}, the first in {where}"
    raise DataError(found, "finite numbers", "impute missing values by public constants before training")
