"""Promises to those who bring their own data: it is loaded as it is, or the mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sordino.data.datasets import load
from sordino.errors import ConfigError, DataError


def _npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_own_arrays_are_loaded_as_they_are(tmp_path: Path) -> None:
    x, y = np.ones((6, 2)), np.array([0, 1, 2, 0, 1, 2])
    path = _npz(tmp_path / "a.npz", x=x, y=y, test_x=x[:2], test_y=y[:2], groups=y)
    data = load("npz", path=path)
    assert (data.x.shape, data.test_x.shape) == ((6, 2), (2, 2))
    assert data.classes == 3
    assert np.array_equal(data.groups, y)  # type: ignore[arg-type]


def test_own_arrays_without_a_test_hold_out_a_fifth(tmp_path: Path) -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.linspace(0, 1, 20)
    data = load("npz", path=_npz(tmp_path / "a.npz", x=x, y=y))
    assert (data.x.shape, data.test_x.shape) == ((16, 2), (4, 2))
    assert data.classes is None
    assert np.array_equal(np.sort(np.concatenate([data.x, data.test_x])[:, 0]), x[:, 0])


def test_booleans_are_labels(tmp_path: Path) -> None:
    data = load("npz", path=_npz(tmp_path / "a.npz", x=np.ones((10, 1)), y=np.arange(10) % 2 == 0))
    assert data.classes == 2


X, Y = np.zeros((10, 2)), np.zeros(10, dtype=np.int64)
NAN = np.where(np.arange(20).reshape(10, 2) > 16, np.nan, 0.0)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (
            {"x": NAN, "y": Y, "test_x": X, "test_y": Y},
            r"3 NaN or infinite .* in x, the first in record 8, position \(1,\)",
        ),
        ({"x": X, "y": Y + np.inf}, "10 NaN or infinite value.* in y, the first in record 0"),
        ({"x": X + 1e300, "y": Y}, "NaN or infinite"),
        ({"x": X}, "no array y"),
        ({"x": X, "y": Y[:9]}, "10 records in x, 9 records in y"),
        ({"x": X, "y": Y[:9], "test_x": X, "test_y": Y}, "10 records in x, 9 records in y"),
        ({"x": X, "y": Y, "groups": Y[:3]}, "3 records in groups"),
        ({"x": X, "y": Y, "groups": Y + 0.5}, "one integer per record"),
        ({"x": X, "y": Y, "test_x": X}, "both or neither"),
        ({"x": X, "y": Y, "test_x": X[:, :1], "test_y": Y}, "the same shape"),
        ({"x": X, "y": Y - 1, "classes": 2}, "label -1"),
        ({"x": X, "y": Y + 2, "classes": 2}, "labels from 0 to 1"),
        ({"x": X, "y": Y, "classes": [1, 2]}, "one whole number"),
        ({"x": X[:0], "y": Y[:0]}, "no records in y"),
        ({"x": X[:3], "y": Y[:3]}, "no records in test_y"),
        ({"x": X[:, 0], "y": Y}, r"x \[n, \.\.\.\]"),
        ({"x": X.astype(str), "y": Y}, "numbers"),
        ({"x": np.array([[{}]] * 10), "y": Y}, "cannot be read"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load("npz", path=_npz(tmp_path / "a.npz", **arrays))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    for content in (b"", b"not an archive", b"PK\x03\x04 half a zip"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npz, which cannot be read"):
            load("npz", path=tmp_path / "a.npz")
    for name in ("npz", "csv"):
        options: dict[str, Any] = {"target": "y"} if name == "csv" else {}
        with pytest.raises(DataError, match="absent"):
            load(name, path=tmp_path / "absent", **options)


def _csv(tmp_path: Path, rows: list[str]) -> Path:
    (tmp_path / "a.csv").write_text("\n".join(["age,site,sick", *rows]) + "\n")
    return tmp_path / "a.csv"


def test_an_own_table_is_scaled_by_public_ranges(tmp_path: Path) -> None:
    path = _csv(tmp_path, [f"{10 * i},{'ab'[i % 2]},{i % 2}" for i in range(12)])
    data = load("csv", path=path, target="sick", groups="site", classes=2, ranges={"age": (0, 100)})
    assert (data.x.shape, data.test_x.shape) == ((10, 1), (2, 1))
    assert np.array_equal(data.groups, data.y)  # type: ignore[arg-type]
    assert data.x.max() == 1


def test_a_table_with_a_hole_says_where(tmp_path: Path) -> None:
    path = _csv(tmp_path, [f"{'' if i == 4 else i},1,{i}" for i in range(12)])
    with pytest.raises(DataError, match=r"1 NaN or infinite value\(s\) in x, the first in record 4"):
        load("csv", path=path, target="sick")
    with pytest.raises(ConfigError, match="no column 'ill'"):
        load("csv", path=path, target="ill")
    with pytest.raises(DataError, match="'x' in column age, record 1"):
        load("csv", path=_csv(tmp_path, ["1,1,1", "x,1,1"]), target="sick")
    with pytest.raises(DataError, match="2 values in row 1"):
        load("csv", path=_csv(tmp_path, ["1,1,1", "1,1"]), target="sick")
