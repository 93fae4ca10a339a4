"""Promise: a table is read as its site writes it, means what is declared for all, and no value of it becomes public."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sordino.data import load
from sordino.data.files import CsvFormat, table_header
from sordino.data.records import NO_ROW
from sordino.data.tables import declared_encoding
from sordino.errors import ConfigError, DataError
from sordino.parts.losses import IGNORED

COLUMNS: dict[str, Any] = {
    "sex": {"categories": ["F", "M"], "map": {"male": "M", "männlich": "M", "female": "F"}},
    "dose": {"range": [0, 10], "missing": 5},
    "seen": {"date": "2020-01-01", "range": [0, 366]},
    "smoker": {"categories": ["no", "yes"], "missing": "category", "absent": "missing"},
}


def read(folder: Path, text: str | bytes, *, person: Any = None, name: str = "a.csv", **others: Any) -> Any:
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    options = {"path": folder / name, "target": "ill", "classes": ["no", "yes"], "columns": COLUMNS, **others}
    return load("csv", **options, **({} if person is None else {"person": person}))


PLAIN = "sex,dose,seen,smoker,ill\nM,2.5,2020-07-02,no,yes\nF,,2020-01-01,yes,no\n"
GERMAN = "ill;seen;dose;sex;smoker\nyes;02.07.2020;2,5;männlich;no\nno;01.01.2020;k.A.;female;yes\n"
HOW = {"delimiter": ";", "decimal": ",", "dates": "%d.%m.%Y", "na": ["k.A."]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16"])
def test_two_sites_that_write_the_same_rows_differently_have_the_same_records(tmp_path: Path, encoding: str) -> None:
    plain = read(tmp_path, PLAIN)
    named = {"utf-8-sig": "utf-8"}.get(encoding, encoding)
    other = read(tmp_path, GERMAN.encode(encoding), format={**HOW, "encoding": named}, name="b.csv")
    np.testing.assert_array_equal(plain.x, other.x)
    np.testing.assert_array_equal(plain.y, other.y)
    assert plain.encoding.sha256 == other.encoding.sha256 == declared_encoding(
        {"path": "x.csv", "target": "ill", "classes": ["no", "yes"], "columns": COLUMNS}
    ).sha256  # fmt: skip
    assert plain.x[0].tolist() == pytest.approx([0, 1, -0.5, 2 * 183 / 366 - 1, 1, 0, 0])
    assert plain.x[1].tolist() == pytest.approx([1, 0, 0.0, -1, 0, 1, 0])


def test_a_column_that_a_site_lacks_has_the_declared_value(tmp_path: Path) -> None:
    data = read(tmp_path, "sex,dose,seen,ill\nM,2.5,2020-07-02,yes\n")
    assert data.x[0, 4:].tolist() == [0, 0, 1]
    with pytest.raises(ConfigError, match="no column 'dose'"):
        read(tmp_path, "sex,seen,ill\nM,2020-07-02,yes\n")
    with pytest.raises(ConfigError, match=r"columns.dose.absent = 'x'"):
        read(tmp_path, PLAIN, columns={**COLUMNS, "dose": {"range": [0, 1], "absent": "x"}})


def test_a_file_with_semicolons_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"separated by ';'.*format = \{ delimiter = \";\" \}"):
        read(tmp_path, GERMAN)
    with pytest.raises(DataError, match="separated by ';'"):
        table_header(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("text", "how", "says"),
    [
        (GERMAN.encode("latin-1"), HOW, "encoding = \"latin-1\""),
        (GERMAN, {**HOW, "decimal": "."}, "for decimal commas"),
        (GERMAN.replace("2,5", "1.234"), HOW, "thousands separators"),
        (GERMAN, {**HOW, "dates": "%m/%d/%Y"}, "a date as %m/%d/%Y"),
        (GERMAN, {**HOW, "na": []}, "'k.A.' in .*a finite number"),
        (GERMAN.replace("männlich", "divers"), HOW, "'divers' in .*one of F, M"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_cure(tmp_path: Path, text: Any, how: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read(tmp_path, text, format=how)


@pytest.mark.parametrize("how", [{"delimiter": ",", "decimal": ","}, {"delimiter": "ab"}, {"encoding": "klingon"}])
def test_a_format_that_cannot_be_is_refused(how: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        CsvFormat(**how)  # type: ignore[arg-type]


def test_the_order_of_a_file_is_no_order_of_the_model(tmp_path: Path) -> None:
    turned = "ill,smoker,seen,dose,sex\nyes,no,2020-07-02,2.5,M\nno,yes,2020-01-01,,F\n"
    one, other = read(tmp_path, PLAIN), read(tmp_path, turned)
    assert one.encoding == other.encoding
    np.testing.assert_array_equal(one.x, other.x)


# ---- persons ---------------------------------------------------------------------------------------------------------

VISITS = "who,age,ill\na,10,no\nb,20,yes\na,30,yes\na,40,no\nc,50,no\n"
AGE: dict[str, Any] = {"columns": {"age": {"range": [0, 100]}}}


def test_no_row_has_the_label_that_losses_leave_out() -> None:
    assert NO_ROW == IGNORED


@pytest.mark.parametrize(("rows", "kept"), [(1, [[10], [20], [50]]), (2, [[10, 30], [20, 50], [50, 50]])])
def test_all_rows_of_a_person_are_one_record(tmp_path: Path, rows: int, kept: list[list[float]]) -> None:
    data = read(tmp_path, VISITS, person={"column": "who", "rows": rows}, **AGE)
    found = (
        ((data.x.reshape(3, rows) + 1) * 50).round().tolist()
    )  # a row that is not there is 0, the middle of the range
    assert found == kept
    assert data.y.tolist() == ([0, 1, 0] if rows == 1 else [[0, 1], [1, NO_ROW], [0, NO_ROW]])


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_taking_a_person_out_changes_no_other_record(tmp_path: Path, rows: int) -> None:
    person = {"column": "who", "rows": rows}
    whole = read(tmp_path, VISITS, person=person, **AGE)
    for place, name in enumerate("abc"):
        left = "\n".join(line for line in VISITS.splitlines() if not line.startswith(f"{name},")) + "\n"
        rest = read(tmp_path, left, person=person, **AGE)
        np.testing.assert_array_equal(rest.x, np.delete(whole.x, place, axis=0))
        np.testing.assert_array_equal(rest.y, np.delete(whole.y, place, axis=0))


def test_a_person_in_two_silos_is_a_record_in_each(tmp_path: Path) -> None:
    text = "site,who,age,ill\nx,a,10,no\ny,a,20,yes\nx,a,30,no\n"
    data = read(tmp_path, text, person={"column": "who", "rows": 1}, groups="site", **AGE)
    assert data.groups is not None
    assert data.groups.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"person": {"column": "who"}}, "no task.options.person.rows"),
        ({"person": {"column": "who", "rows": 0}}, "a public number"),
        ({"person": {"column": "nobody", "rows": 1}}, "no column 'nobody'"),
        ({"person": {"column": "who", "rows": 2}, "classes": None, "target": "age", "columns": {}}, "set rows = 1"),
    ],
)
def test_a_person_column_that_bounds_nothing_is_refused(tmp_path: Path, others: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, VISITS, **{**AGE, **others})


def test_a_row_without_a_person_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a row without a person"):
        read(tmp_path, VISITS.replace("c,50", ",50"), person={"column": "who", "rows": 1}, **AGE)
