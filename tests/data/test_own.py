"""Promises to those who bring their own data: it is loaded as it is, or the mistake is named."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.data.datasets import load, preview, write_memmap
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


def test_rows_become_a_test_only_where_they_are_declared_public(tmp_path: Path) -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.linspace(0, 1, 20)
    path = _npz(tmp_path / "a.npz", x=x, y=y)
    private = load("npz", path=path)
    assert (private.x.shape, private.test_x.shape) == ((20, 2), (0, 2))
    data = load("npz", path=path, public_test_fraction=0.2)
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
        ({"x": X, "y": Y, "test_x": X}, "both arrays"),
        ({"x": X, "y": Y, "test_x": X[:, :1], "test_y": Y}, "the same shape"),
        ({"x": X, "y": Y - 1, "classes": 2}, "label -1"),
        ({"x": X, "y": Y + 2, "classes": 2}, "labels from 0 to 1"),
        ({"x": X, "y": Y, "classes": [1, 2]}, "one integer"),
        ({"x": X[:0], "y": Y[:0]}, "no records in y"),
        ({"x": X[:, 0], "y": Y}, r"x of shape \[n, \.\.\.\]"),
        ({"x": X.astype(str), "y": Y}, "numbers"),
        ({"x": X.astype("m8[s]"), "y": Y}, "numbers"),
        ({"x": X, "y": Y.astype(np.uint64) + np.uint64(2**63)}, "9223372036854775809 classes"),
        ({"x": X.astype(np.uint64) + np.uint64(2**63), "y": Y}, "int64"),
        ({"x": X, "y": Y, "groups": Y.astype(np.uint64) + np.uint64(2**63)}, "int64"),
        ({"x": X, "y": Y, "classes": 0}, "0 classes"),
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
    options: dict[str, Any] = {"path": path, "target": "sick", "groups": "site", "classes": 2}
    data = load("csv", **options, ranges={"age": (0, 100)}, public_test_fraction=0.2)
    assert data.names == ("a", "b")
    assert (data.x.shape, data.test_x.shape) == ((10, 1), (2, 1))
    assert np.array_equal(data.groups, data.y)  # type: ignore[arg-type]
    assert data.x.max() == 1


def test_a_mistake_in_a_table_says_where(tmp_path: Path) -> None:
    path = _csv(tmp_path, [f"{'' if i == 4 else i},1,{i}" for i in range(12)])
    with pytest.raises(DataError, match=r"a missing value in .*a\.csv, row 5 \(line 6\), column 'age'"):
        load("csv", path=path, target="sick")
    with pytest.raises(ConfigError, match=r"no column 'ill' in .*a\.csv"):
        load("csv", path=path, target="ill")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["1,1,1", "x,1,1"], r"'x' in .*a\.csv, row 2 \(line 3\), column 'age'"),
        (["1,1,1", "", "x,1,1"], r"row 2 \(line 4\), column 'age'"),
        (["1,1,1", "1,1"], r"2 values in .*a\.csv, row 2 \(line 3\)"),
        (["1,1,0", f"{'9' * 140_000},1,1"], r"a\.csv with a line 3 that cannot be read .field larger"),
        (["1,1,0", f"{'9' * 400},1,1"], r"'9+' in .*row 2 .* column 'age'; needed a finite"),
        (["1,1,0", "inf,1,1"], "'inf' in .*row 2 .* column 'age'"),
        (["1,1,0", "1,1,99999999999999999999"], r"label '9+' in .*row 2 .* column 'sick'; needed a number from 0 to 1"),
        (["1,1,0", "1,1,-1"], "label '-1' in .*row 2"),
        (["1,1,0", "1,1,0.5"], "label '0.5' in .*row 2"),
        ([], "no row under the header of .*a.csv"),
    ],
)
def test_a_table_that_cannot_be_trained_on_is_refused(tmp_path: Path, rows: list[str], said: str) -> None:
    with pytest.raises(DataError, match=said) as refused:
        load("csv", path=_csv(tmp_path, rows), target="sick", classes=2)
    assert len(str(refused.value)) < 400


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,a,y\n1,2,3\n")
    with pytest.raises(DataError, match="two columns named 'a'"):
        load("csv", path=tmp_path / "a.csv", target="y")


# ---- which rows are public ------------------------------------------------------------------------------------------


def test_a_file_of_its_own_may_be_named_as_the_test(tmp_path: Path) -> None:
    private = _csv(tmp_path, [f"{i},{'ab'[i % 2]},{i % 2}" for i in range(12)])
    (tmp_path / "public.csv").write_text("sick,age\n1,7\n0,8\n")
    data = load("csv", path=private, target="sick", groups="site", classes=2, test=str(tmp_path / "public.csv"))
    assert (data.x[:, 0].tolist(), data.test_x[:, 0].tolist()) == (list(range(12)), [7, 8])
    arrays = _npz(tmp_path / "a.npz", x=X, y=Y), _npz(tmp_path / "b.npz", x=X[:3] + 1, y=Y[:3])
    assert len(load("npz", path=arrays[0], test=arrays[1], classes=2).test_x) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"test": "a.csv"}, "is the training file"),
        ({"test": "absent.csv"}, "does not exist"),
        ({"test": "b.csv", "public_test_fraction": 0.2}, "one declaration of which rows are public"),
        ({"public_test_fraction": 1.5}, "between 0 and 1"),
        ({"public_test_fraction": 0.01}, "at least one public test record"),
        ({"train": 5, "validation": True}, "whose rows are private"),
    ],
)
def test_a_doubt_about_what_is_public_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = _csv(tmp_path, [f"{i},1,{i % 2}" for i in range(12)])
    if "test" in options:
        options = {**options, "test": str(tmp_path / options["test"])}
    with pytest.raises((ConfigError, DataError), match=said):
        load("csv", path=path, target="sick", **options)
    with pytest.raises(ConfigError, match="the number of test records"):
        load("digits", test="b.csv")


# ---- files that are damaged -----------------------------------------------------------------------------------------


def _archive(shape: tuple[int, ...] = (10, 2), compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An .npz whose x says it has another shape than it holds."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, values in (("x", X), ("y", Y)):
            member = io.BytesIO()
            np.save(member, values)
            data = member.getvalue()
            if name == "x":
                old, new = b"(10, 2), }", f"{shape}, }}".encode()
                data = data.replace(old + b" " * (len(new) - len(old)), new)
            archive.writestr(f"{name}.npy", data)
    return out.getvalue()


def _method(data: bytes, method: int) -> bytes:
    """The same archive, said to be packed in another way."""
    for mark, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.index(mark) + place
        data = data[:at] + method.to_bytes(2, "little") + data[at + 2 :]
    return data


@pytest.mark.parametrize(
    "content",
    [_archive((4 * 10**12, 2)), _archive((-1, 2)), _archive((10**30, 2)), _method(_archive(), 97), _archive()[:-40]],
)
def test_an_archive_that_lies_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz, which cannot be read"):
        load("npz", path=tmp_path / "a.npz")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/a.npz", "a\0b", "/dev/zero", "."])
@pytest.mark.parametrize("name", ["npz", "csv", "memmap"])
def test_what_is_no_file_is_refused_at_once(name: str, path: str) -> None:
    options: dict[str, Any] = {"target": "y"} if name == "csv" else {}
    with pytest.raises(DataError, match="cannot be read"):
        load(name, path=path, **options)


CSV = "age,site,sick\n" + "".join(f"{i}.5,{'ab'[i % 2]},{i % 2}\n" for i in range(12))


MANY = 10_000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 150


@settings(max_examples=MANY, deadline=None)
@given(data=st.data(), name=st.sampled_from(["npz", "csv", "columns", "parquet", "memmap"]))
def test_a_damaged_file_is_read_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    """Bytes flipped, dropped, put in between or cut off: never a traceback, never more than a sentence."""
    folder = tmp_path_factory.mktemp("damaged")
    ending = "csv" if name == "columns" else name
    file, options = folder / f"a.{ending}", OPTIONS[name]
    if name == "memmap":
        write_memmap(folder, X.astype(np.float32), Y, np.full(5, 2))
        spoilt = folder / data.draw(st.sampled_from(["x.npy", "y.npy", "clients.npy"]))
        spoilt.write_bytes(_damaged(spoilt.read_bytes(), data))
        file = folder
    else:
        packed: dict[str, Callable[[], bytes]] = {
            "npz": lambda: _archive(compression=data.draw(st.sampled_from([0, 8, 12, 14]))),
            "parquet": _parquet,
        }
        file.write_bytes(_damaged(packed.get(name, CSV.encode)(), data))
    if name in ("csv", "columns", "parquet"):
        with suppress(DataError, ConfigError):  # what plan looks at
            preview(ending, {**options, "path": str(file)})
    try:
        found = load(ending, path=file, **options)
    except (DataError, ConfigError) as error:
        said = str(error)
    else:
        assert name == "memmap" or np.isfinite(found.x).all()
        assert name not in ("columns", "parquet") or np.abs(found.x).max() <= 1  # as declared, whatever was in the file
        assert not len(found.test_y)
        return
    assert len(said) < 700
    assert str(file) in said


OPTIONS: dict[str, dict[str, Any]] = {
    "npz": {},
    "csv": {"target": "sick", "groups": "site", "classes": 2},
    "memmap": {"classes": 2},
}
AGE = {"quantiles": [0.1, 0.9], "missing": "median", "histogram": {"epsilon": 1.0, "within": [0, 20]}}
SITE = {"categories": ["a", "b"], "missing": "category"}
OPTIONS["columns"] = {"target": "sick", "classes": ["0", "1"], "columns": {"age": AGE, "site": SITE}}
OPTIONS["parquet"] = {
    **OPTIONS["columns"],
    "columns": {"age": {"range": [0, 12], "missing": 0}, "site": {"categories": ["a", "other"]}},
}


@cache
def _parquet() -> bytes:
    """The same table as CSV."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    held = {
        "age": [i + 0.5 for i in range(12)],
        "site": ["ab"[i % 2] for i in range(12)],
        "sick": [i % 2 for i in range(12)],
    }
    parquet.write_table(arrow.table(held), out)
    return out.getvalue()


PIECES = [b"\0", b",", b'"', b"\r", b"9" * 30, b"\xff", b"nan", b"1e999", b"\n\n", b"-", b""]


def _damaged(content: bytes, data: st.DataObject) -> bytes:
    """Up to four places: a byte changed, bytes dropped, put in between, or the end cut off."""
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        lost = data.draw(st.sampled_from([0, 1, 3, len(content)]))
        piece = data.draw(st.sampled_from(PIECES) | st.binary(max_size=3))
        content = content[:at] + piece + content[at + lost :]
    return content
