"""A user's own data: an .npz of arrays, or a table of numbers as .csv."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sordino.data.records import Array, Dataset, Ints, hold_out, to_unit
from sordino.data.tabular import MISSING, Table, number, parse
from sordino.errors import ConfigError, DataError


def npz(*, path: str | Path, classes: int | None = None) -> Dataset:
    """Arrays x, y and, where present, test_x, test_y, groups, test_groups, classes.

    Integer y are labels and float y are targets. The number of classes should be public: give `classes`, here or in the
    file; without it, it is the largest label plus one. Without test_x a fixed fifth of the records is held out.
    """
    arrays = _arrays(Path(path).expanduser())
    x, y = (_needed(arrays, key, path) for key in ("x", "y"))
    if ("test_x" in arrays) != ("test_y" in arrays):
        raise DataError(f"only one of test_x and test_y in {path}", "both or neither")
    classes = classes if classes is not None else _classes(arrays, y)
    groups = _whole(arrays.get("groups"), "groups")
    if "test_x" in arrays:
        return Dataset(
            x=x,
            y=y,
            test_x=arrays["test_x"],
            test_y=arrays["test_y"],
            groups=groups,
            test_groups=_whole(arrays.get("test_groups"), "test_groups"),
            classes=classes,
        )
    return hold_out(x, y, groups, classes)


def _arrays(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {key: _labels_from_bool(key, file[key]) for key in file.files}
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}, which cannot be read ({error})", "an .npz of plain arrays x and y") from error


def _labels_from_bool(key: str, values: Array) -> Array:
    return values.astype(np.int64) if key in ("y", "test_y") and values.dtype == np.bool_ else values


def _needed(arrays: dict[str, Array], key: str, path: str | Path) -> Array:
    if key not in arrays or not arrays[key].ndim:
        raise DataError(f"no array {key} in {path}", "arrays x and y", f"save it with numpy.savez(path, {key}=...)")
    return arrays[key]


def _classes(arrays: dict[str, Array], y: Array) -> int | None:
    if "classes" in arrays:
        if arrays["classes"].size != 1 or not np.issubdtype(arrays["classes"].dtype, np.integer):
            raise DataError(f"classes of shape {arrays['classes'].shape}", "one whole number")
        return int(arrays["classes"].item())
    return int(y.max()) + 1 if np.issubdtype(y.dtype, np.integer) and y.size else None


def _whole(groups: Array | None, key: str) -> Ints | None:
    if groups is None:
        return None
    if not np.issubdtype(groups.dtype, np.integer) or groups.ndim != 1:
        raise DataError(f"{key} of type {groups.dtype} and shape {groups.shape}", "one integer per record")
    return groups.astype(np.int64, copy=False)


def table(
    *,
    path: str | Path,
    target: str,
    groups: str | None = None,
    classes: int | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Dataset:
    """A comma-separated file with a header: column `target` from all the others, which must be numbers.

    `classes` makes the target a label; `groups` names the column of natural clients; `ranges` gives public ranges:
    those columns go to [-1, 1] and are clipped there.
    """
    columns = _columns(Path(path).expanduser())
    ranges = dict(ranges or {})
    _known([target, *([groups] if groups else []), *ranges], columns, path)
    features = [name for name in columns if name not in (target, groups)]
    if not features:
        raise DataError(f"no feature column in {path}", "at least one beside the target and the groups")
    x = np.stack([_scaled(_numbers(columns, name), ranges.get(name)) for name in features], axis=1)
    who = np.unique(np.array(columns[groups]), return_inverse=True)[1].astype(np.int64) if groups else None
    return hold_out(x, _target(_numbers(columns, target), classes), who, classes)


def _columns(path: Path) -> Table:
    try:
        return parse(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}, which cannot be read ({error})", "a comma-separated text file") from error


def _known(names: list[str], columns: Table, path: str | Path) -> None:
    missing = next((name for name in names if name not in columns), None)
    if missing is not None:
        raise ConfigError(f"no column {missing!r} in {path}", "one of " + ", ".join(columns))


def _numbers(columns: Table, name: str) -> Array:
    """A column of numbers; missing ones are NaN, which the final check refuses with their place."""
    return np.array([np.nan if t in MISSING else number(name, i, t) for i, t in enumerate(columns[name])])


def _scaled(values: Array, limits: tuple[float, float] | None) -> Array:
    if limits is None:
        return values
    low, high = limits
    if not low < high:
        raise ConfigError(f"the range {low} to {high}", "low < high")
    return to_unit(values, low, high)


def _target(values: Array, classes: int | None) -> Array:
    if classes is None:
        return values
    if not np.array_equal(values, np.rint(values)):
        raise DataError("a label that is not a whole number", f"labels from 0 to {classes - 1}")
    return values.astype(np.int64)
