"""Promises to those who bring tables: columns are what is declared of them, and a mistake is named where it is."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sordino.config import parse
from sordino.data import files
from sordino.data.datasets import load, preview
from sordino.errors import ConfigError, DataError, UserError

HEADER = ["id", "amount", "state", "rank", "paid"]
ROWS = [
    ["1", "0", "CA", "1", "yes"],
    ["2", "250", "NY", "", "no"],
    ["3", "9000", "TX", "3.0", "yes"],
    ["4", "", "", "2", "no"],
]
COLUMNS: dict[str, Any] = {
    "amount": {"range": [0, 500], "missing": 250},
    "state": {"categories": ["CA", "NY", "other"], "missing": "category"},
    "rank": {"categories": [1, 2, 3], "missing": "1"},
}
OPTIONS: dict[str, Any] = {"target": "paid", "classes": ["no", "yes"], "ignore": ["id"], "columns": COLUMNS}


def _write(path: Path, rows: list[list[str]], header: list[str] = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def _parquet(path: Path, rows: list[list[str]] = ROWS) -> Path:
    """The same table as pandas would store it: numbers as floats, nothing as null."""
    arrow = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    numbers = {"id", "amount", "rank"}
    held = {
        name: [(float(row[j]) if name in numbers else row[j]) if row[j] else None for row in rows]
        for j, name in enumerate(HEADER)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(arrow.table(held), path)
    return path


# ---- columns ---------------------------------------------------------------------------------------------------------


def test_columns_become_what_is_declared_of_them(tmp_path: Path) -> None:
    data = load("csv", path=_write(tmp_path / "a.csv", ROWS), **OPTIONS)
    amount, state, rank = data.x[:, 0], data.x[:, 1:5], data.x[:, 5:]
    assert amount.tolist() == [-1, 0, 1, 0]  # the range goes to [-1, 1], 9000 is clamped, nothing is 250
    assert state.argmax(1).tolist() == [0, 1, 2, 3]  # TX is other, and nothing has a place of its own
    assert rank.argmax(1).tolist() == [0, 0, 2, 1]  # 3.0 is 3, and nothing is 1
    assert (state.sum(1) == 1).all()
    assert data.y.tolist() == [1, 0, 1, 0]
    assert data.classes == 2


def test_parquet_and_csv_are_one_table(tmp_path: Path) -> None:
    text, packed = _write(tmp_path / "a.csv", ROWS), _parquet(tmp_path / "a.parquet")
    one, two = load("csv", path=text, **OPTIONS), load("parquet", path=packed, **OPTIONS)
    assert np.array_equal(one.x, two.x)
    assert np.array_equal(one.y, two.y)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = _parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install \"sordino\[parquet\]\""):
        load("parquet", path=packed, **OPTIONS)


def test_a_missing_number_may_have_a_coordinate_of_its_own(tmp_path: Path) -> None:
    columns = {**COLUMNS, "amount": {"range": [0, 500], "missing": "category"}}
    data = load("csv", path=_write(tmp_path / "a.csv", ROWS), **{**OPTIONS, "columns": columns})
    assert data.x[:, :2].tolist() == [[-1, 0], [0, 0], [1, 0], [0, 1]]


def test_a_target_that_is_a_number_is_scaled_by_its_range(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", [["1", "5"], ["2", "15"]], ["x", "y"])
    data = load("csv", path=path, target="y", columns={"y": {"range": [0, 20]}})
    assert (data.y.tolist(), data.target_unit) == ([-0.5, 0.5], 10)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (["5", "x", "CA", "1", "yes"], r"'x' in .*a\.csv, row 5 \(line 6\), column 'amount'; needed a finite number"),
        (["5", "1", "CA", "9", "yes"], r"'9' in .*a\.csv, row 5 \(line 6\), column 'rank'; needed one of 1, 2, 3"),
        (["5", "1", "CA", "1", "maybe"], r"label 'maybe' in .*row 5 \(line 6\), column 'paid'; needed one of no, yes"),
        (["5", "1", "CA", "1", ""], r"a missing label in .*row 5 \(line 6\), column 'paid'"),
    ],
)
def test_a_value_that_was_not_declared_is_named_by_file_row_and_column(
    tmp_path: Path, row: list[str], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        load("csv", path=_write(tmp_path / "a.csv", [*ROWS, row]), **OPTIONS)


@pytest.mark.parametrize("name", ["amount", "state", "rank"])
def test_a_missing_value_is_refused_unless_it_is_declared(tmp_path: Path, name: str) -> None:
    columns = {key: {k: v for k, v in one.items() if key != name or k != "missing"} for key, one in COLUMNS.items()}
    with pytest.raises(DataError, match=rf"a missing value in .*a\.csv, row \d \(line \d\), column '{name}'.*declare"):
        load("csv", path=_write(tmp_path / "a.csv", ROWS), **{**OPTIONS, "columns": columns})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"range": [5, 1]}, "low < high"),
    ({"range": [0]}, "a list of 2"),
    ({"ranges": [0, 1]}, "did you mean 'range'"),
    ({"range": [0, 1], "missing": 7}, "inside the range"),
    ({"range": [0, 1], "missing": "often"}, '"mean" or "median"'),
    ({"range": [0, 1], "missing": "median"}, "a noised histogram from which it is computed"),
    ({"quantiles": [0.1, 0.9]}, "computed from private rows"),
    ({"quantiles": [0.9, 0.1], "histogram": {"epsilon": 1.0, "within": [0, 1]}}, "0 <= low < high <= 1"),
    ({"range": [0, 1], "histogram": {"epsilon": 1.0, "within": [0, 1]}}, "a histogram that is not used"),
    (
        {"range": [0, 1], "quantiles": [0, 1], "histogram": {"epsilon": 1.0, "within": [0, 1]}},
        "drop range or quantiles",
    ),
    ({"quantiles": [0, 1], "histogram": {"epsilon": 0.0, "within": [0, 1]}}, "a positive number"),
    ({"quantiles": [0, 1], "histogram": {"epsilon": 1.0, "within": [1, 0]}}, "low < high"),
    ({"quantiles": [0, 1], "histogram": {"epsilon": 1.0, "within": [0, 1], "bins": 1}}, "from 2 to"),
    ({"categories": ["a", "a"]}, "each category once"),
    ({"categories": ["a", "b"], "range": [0, 1]}, "a column of categories"),
    ({"categories": ["a", "b"], "missing": "c"}, '"category"'),
]


@pytest.mark.parametrize(("column", "said"), WRONG)
def test_a_declaration_that_means_nothing_is_refused_by_plan_and_run(
    tmp_path: Path, column: dict[str, Any], said: str
) -> None:
    options = {**OPTIONS, "path": _write(tmp_path / "a.csv", ROWS), "columns": {**COLUMNS, "amount": column}}
    for refuse in (lambda: load("csv", **options), lambda: preview("csv", options)):
        with pytest.raises(UserError, match=said):
            refuse()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": {"amuont": {"range": [0, 1]}}}, "no column 'amuont' in .*did you mean 'amount'"),
        ({"ignore": ["idd"]}, "no column 'idd'"),
        ({"ignore": "id"}, "a list of columns"),
        ({"classes": ["yes"]}, "at least two words"),
        ({"ranges": {"amount": [0, 1]}}, "both in ranges and in columns"),
        ({"columns": {**COLUMNS, "paid": {"range": [0, 1]}}}, "for the target"),
        ({"files": "sites"}, "both path and files"),
        ({"path": None}, "neither path nor files"),
        ({"columns": 5}, "one table per column"),
        ({"target": 5}, "the name of a column"),
    ],
)
def test_options_that_contradict_each_other_or_the_header_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    given = {**OPTIONS, "path": str(_write(tmp_path / "a.csv", ROWS)), **options}
    for refuse in (lambda: load("csv", **given), lambda: preview("csv", given)):
        with pytest.raises(UserError, match=said):
            refuse()


# ---- several files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pattern", "folder", "list"])
def test_every_file_is_a_silo_named_after_it(tmp_path: Path, how: str) -> None:
    for name, count in (("NY", 3), ("CA", 2)):
        _write(tmp_path / "sites" / f"{name}.csv", ROWS[:count])
    (tmp_path / "sites" / "notes.txt").write_text("no table")
    listed = [str(tmp_path / "sites" / f"{name}.csv") for name in ("NY", "CA")]
    ways: dict[str, Any] = {
        "pattern": str(tmp_path / "sites" / "*.csv"),
        "folder": str(tmp_path / "sites"),
        "list": listed,
    }
    files = ways[how]
    data = load("csv", files=files, **OPTIONS)
    assert data.names == (("NY", "CA") if how == "list" else ("CA", "NY"))
    assert data.groups is not None
    assert np.bincount(data.groups).tolist() == ([3, 2] if how == "list" else [2, 3])
    assert preview("csv", {**OPTIONS, "files": files}).names == data.names


def test_a_folder_may_hold_both_kinds_of_tables(tmp_path: Path) -> None:
    _write(tmp_path / "sites" / "CA.csv", ROWS)
    _parquet(tmp_path / "sites" / "NY.parquet")
    data = load("csv", files=str(tmp_path / "sites"), **OPTIONS)
    assert data.names == ("CA", "NY")
    assert np.array_equal(data.x[:4], data.x[4:])


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "sites" / "CA.csv", ROWS)
    _write(tmp_path / "sites" / "NY.csv", [[*row, "1"] for row in ROWS], [*HEADER, "extra"])
    with pytest.raises(DataError, match=r"column 'extra' in .*NY\.csv, which is not in .*CA\.csv"):
        load("csv", files=str(tmp_path / "sites"), **OPTIONS)
    with pytest.raises(DataError, match="no file for files"):
        load("csv", files=str(tmp_path / "nowhere" / "*.csv"), **OPTIONS)
    with pytest.raises(ConfigError, match="is the training file"):
        load("csv", files=[str(tmp_path / "sites" / "CA.csv")], test=str(tmp_path / "sites" / "CA.csv"), **OPTIONS)
    with pytest.raises(ConfigError, match="two files named 'CA'"):
        load("csv", files=[str(tmp_path / "CA.csv"), str(tmp_path / "sites" / "CA.csv")], **OPTIONS)
    with pytest.raises(ConfigError, match="both files and groups"):
        load("csv", files=str(tmp_path / "sites"), groups="state", **OPTIONS)


def test_a_test_file_is_encoded_as_the_others(tmp_path: Path) -> None:
    path, test = _write(tmp_path / "a.csv", ROWS), _write(tmp_path / "test.csv", ROWS[::-1])
    data = load("csv", path=path, test=str(test), **OPTIONS)
    assert np.array_equal(data.x[::-1], data.test_x)


# ---- what plan sees --------------------------------------------------------------------------------------------------


def test_columns_without_a_range_are_said_aloud_and_declared_ones_are_not(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", ROWS)
    (note,) = preview("csv", {"path": str(path), "target": "paid", "columns": COLUMNS}).notes
    assert "1 column(s) without a declared range are not scaled: id;" in note
    assert preview("csv", {**OPTIONS, "path": str(path)}).notes == ()


def test_plan_reads_no_row(tmp_path: Path) -> None:
    """A file whose rows are nonsense, and that goes on for ever, has a header like any other."""
    path = tmp_path / "a.csv"
    path.write_bytes((",".join(HEADER) + "\n").encode() + b"\xff\xfe,not,a,row\n" * 100_000)
    assert preview("csv", {**OPTIONS, "path": str(path)}).notes == ()
    with pytest.raises(DataError, match="cannot be read"):
        load("csv", path=path, **OPTIONS)


def test_a_file_that_is_not_here_is_no_mistake_of_the_plan(tmp_path: Path) -> None:
    (note,) = preview("csv", {**OPTIONS, "path": str(tmp_path / "elsewhere.csv")}).notes
    assert "elsewhere.csv does not exist here" in note
    seen = preview("csv", {**OPTIONS, "files": str(tmp_path / "nowhere" / "*.csv")})
    assert (seen.names, len(seen.notes)) == ((), 1)


def test_plan_refuses_a_test_that_is_a_silo(tmp_path: Path) -> None:
    path = str(_write(tmp_path / "a.csv", ROWS))
    with pytest.raises(ConfigError, match="is the training file"):
        preview("csv", {**OPTIONS, "path": path, "test": path})
    with pytest.raises(ConfigError, match="one declaration of which"):
        preview("csv", {**OPTIONS, "path": path, "test": "b.csv", "public_test_fraction": 0.5})


def _config(tmp_path: Path, **more: Any) -> dict[str, Any]:
    for name in ("CA", "NY"):
        _write(tmp_path / "sites" / f"{name}.csv", ROWS)
    recipe = {"name": "silo", "sizes": {"CA": 4, "NY": 4}, "epsilons": {"CA": 1.0, "NY": 2.0}, "rounds": 2}
    task = {"dataset": "csv", "options": {**OPTIONS, "files": str(tmp_path / "sites" / "*.csv")}}
    return {"task": task, "recipe": recipe, "privacy": {"delta": 1e-3}, **more}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"CA": 4, "NY": 4, "TX": 4}, "silo 'TX' in .*task.* silos"),
        ({"CA": 4, "FL": 4}, "silo 'FL' in .*task.* silos; needed a silo of the data"),
        ([4, 4, 4], "values by the silos' names|the same population"),
    ],
)
def test_plan_finds_silos_that_the_files_are_not(tmp_path: Path, sizes: Any, said: str) -> None:
    table = _config(tmp_path)
    names = list(sizes) if isinstance(sizes, dict) else []
    table["recipe"] |= {"sizes": sizes, "epsilons": dict.fromkeys(names, 1.0) if names else [1.0]}
    with pytest.raises(UserError, match=said):
        parse(table).check_task()


def test_plan_agrees_with_a_run_on_files_that_fit(tmp_path: Path) -> None:
    config = parse(_config(tmp_path))
    assert config.check_task() == ()
    assert config.build().clients.population == 2


def test_what_is_declared_of_columns_is_said_on_the_certificate(tmp_path: Path) -> None:
    config = parse(_config(tmp_path))
    (said,) = config.build().declared_public
    assert (said.rows, said.by) == (3, "the configuration: [task.options.columns]")


def test_a_number_of_classes_that_was_read_off_the_labels_is_said(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((6, 2)), y=np.array([0, 1, 2, 0, 1, 2]))
    options = {"path": str(tmp_path / "a.npz")}
    table = {"dataset": "npz", "options": options, "partition": {"kind": "iid", "clients": 2}}
    recipe = {"name": "dp_fed_avg", "clients": {"kind": "poisson", "population": 2, "rate": 0.5}, "lr": 0.1}
    config = parse(
        {"task": table, "recipe": {**recipe, "clip_norm": 1.0, "noise_multiplier": 1.0, "rounds": 1, "epochs": 1}}
    )
    (said,) = config.build().declared_public
    assert (said.rows, said.what) == (1, "number of classes")


def test_every_ending_of_parquet_is_one(tmp_path: Path) -> None:
    for ending in files.PARQUET:
        assert len(load("csv", path=_parquet(tmp_path / f"a{ending}"), **OPTIONS).x) == 4
