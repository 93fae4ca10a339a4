"""Tables: UCI Adult, UCI heart disease, medical charges, loans.

Scaling, imputation and vocabularies are constants of this file; `load` computes no statistic of the data. A numeric
column goes from its range to [-1, 1] and is clipped there; a category is one-hot over a fixed vocabulary, and a missing
one is all zeros. These sets are public, and their round ranges were chosen with the values in sight: for private data
take ranges from domain knowledge, or the choice itself is a release that nobody billed.
"""

from __future__ import annotations

import csv
import hashlib
import io
from dataclasses import dataclass, replace

import numpy as np

from sordino.data.downloads import Source, read
from sordino.data.records import Array, Dataset, hold_out, to_unit
from sordino.errors import DataError

Table = dict[str, list[str]]
MISSING = frozenset({"", "?", "NA"})

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"


@dataclass(frozen=True, slots=True)
class Numeric:
    """A number with a public range; `missing` is the public constant (in raw units) that stands for no value."""

    column: str
    low: float
    high: float
    missing: float | None = None

    def encode(self, tokens: list[str]) -> Array:
        """[n, 1], from the range to [-1, 1], clipped."""
        values = np.array([self._value(i, token) for i, token in enumerate(tokens)])
        return to_unit(values, self.low, self.high)[:, None]

    def _value(self, record: int, token: str) -> float:
        if token in MISSING and self.missing is not None:
            return self.missing
        return number(self.column, record, token)


@dataclass(frozen=True, slots=True)
class Category:
    """One-hot over a public vocabulary; a missing value is all zeros."""

    column: str
    values: tuple[str, ...]

    def encode(self, tokens: list[str]) -> Array:
        """[n, values]."""
        code = {value: i for i, value in enumerate(self.values)}
        unknown = next((t for t in tokens if t not in code and t not in MISSING), None)
        if unknown is not None:
            raise DataError(f"{unknown!r} in column {self.column}", "one of " + ", ".join(self.values))
        rows = np.array([code.get(token, len(code)) for token in tokens], dtype=np.int64)
        return np.eye(len(code) + 1, len(code))[rows]


Column = Numeric | Category


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def number(column: str, record: int, token: str) -> float:
    """A token as a number."""
    try:
        return float(token)
    except ValueError:
        raise DataError(f"{token!r} in column {column}, record {record}", "a number") from None


def encode(table: Table, columns: tuple[Column, ...]) -> Array:
    """The feature matrix of a table, [n, d] in float32."""
    return np.hstack([column.encode(table[column.column]) for column in columns]).astype(np.float32)


def rows_to_table(rows: list[list[str]], header: tuple[str, ...]) -> Table:
    """Columns by name; every row must be as long as the header."""
    wrong = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
    if wrong is not None:
        raise DataError(f"{len(rows[wrong])} values in row {wrong}", f"{len(header)}, one per column")
    return {name: [row[j].strip() for row in rows] for j, name in enumerate(header)}


def parse(text: str, header: tuple[str, ...] | None = None) -> Table:
    """A comma-separated text; the first row is the header unless one is given."""
    rows = [row for row in csv.reader(io.StringIO(text), skipinitialspace=True) if row]
    if header is None and not rows:
        raise DataError("an empty table", "a header and rows")
    return (
        rows_to_table(rows, header)
        if header is not None
        else rows_to_table(rows[1:], tuple(c.strip() for c in rows[0]))
    )


# --- Adult ---

ADULT = (
    Source(
        "adult/adult.data",
        "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        _UCI + "adult/adult.data",
    ),
    Source(
        "adult/adult.test",
        "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        _UCI + "adult/adult.test",
    ),
)
_ADULT_HEADER = _words(
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
)
_COUNTRIES = _words(
    "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan Greece "
    "South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland France "
    "Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand "
    "Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands"
)
# The vocabulary of adult.names. fnlwgt is left out: a sampling weight of the census, not a feature of a person.
ADULT_COLUMNS: tuple[Column, ...] = (
    Numeric("age", 17, 90),
    Numeric("education-num", 1, 16),
    Numeric("capital-gain", 0, 10_000),
    Numeric("capital-loss", 0, 5_000),
    Numeric("hours-per-week", 0, 100),
    Category(
        "workclass",
        _words("Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked"),
    ),
    Category(
        "education",
        _words(
            "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters 1st-4th "
            "10th Doctorate 5th-6th Preschool"
        ),
    ),
    Category(
        "marital-status",
        _words("Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"),
    ),
    Category(
        "occupation",
        _words(
            "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
            "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv "
            "Armed-Forces"
        ),
    ),
    Category("relationship", ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried")),
    Category("race", ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black")),
    Category("sex", ("Female", "Male")),
    Category("native-country", _COUNTRIES),
)


def adult() -> Dataset:
    """Income above 50,000 dollars; the test is UCI's own."""
    x, y = _adult_part(ADULT[0])
    test_x, test_y = _adult_part(ADULT[1])
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, classes=2)


def _adult_part(source: Source) -> tuple[Array, Array]:
    lines = read(source).decode("ascii").splitlines()
    table = parse("\n".join(line for line in lines if not line.startswith("|")), _ADULT_HEADER)
    income = [token.rstrip(".") for token in table["income"]]
    return encode(table, ADULT_COLUMNS), np.array([token == ">50K" for token in income], dtype=np.int64)


# --- Heart disease ---

HOSPITALS = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
_HEART_HEADER = _words("age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num")
# Imputed by what a healthy adult would show: pressure 120, cholesterol 200, heart rate 150, no finding elsewhere.
HEART_COLUMNS: tuple[Column, ...] = (
    Numeric("age", 20, 80),
    Numeric("sex", 0, 1),
    Numeric("trestbps", 80, 200, missing=120),
    Numeric("chol", 100, 400, missing=200),
    Numeric("fbs", 0, 1, missing=0),
    Numeric("thalach", 60, 200, missing=150),
    Numeric("exang", 0, 1, missing=0),
    Numeric("oldpeak", -3, 6, missing=0),
    Numeric("ca", 0, 3, missing=0),
    Category("cp", ("1", "2", "3", "4")),
    Category("restecg", ("0", "1", "2")),
    Category("slope", ("1", "2", "3")),
    Category("thal", ("3", "6", "7")),
)


def heart_disease() -> Dataset:
    """Heart disease present; the four hospitals are the groups, and a fifth of each is the test."""
    tables = [_hospital(name, digest) for name, digest in HOSPITALS.items()]
    x = np.concatenate([encode(table, HEART_COLUMNS) for table in tables])
    y = np.array([token != "0" for table in tables for token in table["num"]], dtype=np.int64)
    groups = np.repeat(np.arange(len(tables)), [len(table["num"]) for table in tables])
    return replace(hold_out(x, y, groups, classes=2), names=tuple(HOSPITALS))


def _hospital(name: str, digest: str) -> Table:
    """One hospital's table; codes as integers ("4.0" is "4"), and a pressure or cholesterol of 0 is missing."""
    file = f"processed.{name}.data"
    source = Source(f"heart_disease/{file}", f"sha256:{digest}", f"{_UCI}heart-disease/{file}")
    table = parse(read(source).decode("ascii"), _HEART_HEADER)
    table = {c: ["?" if t in MISSING else f"{number(c, i, t):g}" for i, t in enumerate(ts)] for c, ts in table.items()}
    blank = {c: ["?" if t == "0" else t for t in table[c]] for c in ("trestbps", "chol")}
    return table | blank


# --- Regression ---

INSURANCE = Source(
    "insurance/insurance.csv",
    "sha256:505c1cbc2e63d0363bac59501563df2530aadf4cdb9cfee226f4ef32f5468281",
    "https://raw.githubusercontent.com/stedy/Machine-Learning-with-R-datasets/master/insurance.csv",
)
INSURANCE_COLUMNS: tuple[Column, ...] = (
    Numeric("age", 18, 65),
    Numeric("bmi", 15, 55),
    Numeric("children", 0, 5),
    Category("sex", ("female", "male")),
    Category("smoker", ("no", "yes")),
    Category("region", ("northeast", "northwest", "southeast", "southwest")),
)


def insurance() -> Dataset:
    """Medical charges of a year, in units of 10,000 dollars."""
    table = parse(read(INSURANCE).decode("ascii"))
    charges = np.array([number("charges", i, token) for i, token in enumerate(table["charges"])])
    return hold_out(encode(table, INSURANCE_COLUMNS), charges / 10_000, target_unit=10_000.0)


LOANS = Source(  # published by OpenIntro without a sum; what is read of it has one
    "lending_club/loans_full_schema.csv", "", "https://www.openintro.org/data/csv/loans_full_schema.csv"
)
LOANS_SUM = "56611a3a7b45aa1dd01e6314d5ab665f4b78e2da7ba27b2d1571234c380eac39"  # sha256 of features and rates
# Ten numbers known before the rate is set (grade and instalment follow from the rate): 11 parameters with the bias.
LOANS_COLUMNS: tuple[Column, ...] = (
    Numeric("loan_amount", 0, 40_000),
    Numeric("term", 36, 60),
    Numeric("annual_income", 0, 250_000),
    Numeric("debt_to_income", 0, 60, missing=20),
    Numeric("delinq_2y", 0, 5),
    Numeric("inquiries_last_12m", 0, 10),
    Numeric("open_credit_lines", 0, 40),
    Numeric("total_credit_limit", 0, 1_000_000),
    Numeric("total_credit_utilized", 0, 250_000),
    Numeric("account_never_delinq_percent", 0, 100),
)


def loans() -> Dataset:
    """The interest rate of a loan, in units of 10 percent."""
    table = parse(read(LOANS).decode("utf-8"))
    missing = next((c for c in (*(c.column for c in LOANS_COLUMNS), "interest_rate") if c not in table), None)
    if missing is not None:
        raise DataError(f"no column {missing} in {LOANS.path}", "OpenIntro's loans_full_schema", f"see {LOANS.url}")
    rate = np.array([number("interest_rate", i, token) for i, token in enumerate(table["interest_rate"])])
    x = encode(table, LOANS_COLUMNS)
    fix = f"delete {LOANS.path} in the cache and load again"
    found = hashlib.sha256(x.astype("<f4").tobytes() + rate.astype("<f8").tobytes()).hexdigest()
    if found != LOANS_SUM:
        raise DataError(f"other loans in {LOANS.path} (sha256 of their numbers {found})", f"those of {LOANS.url}", fix)
    return hold_out(x, rate / 10, target_unit=10.0)
