"""Public tabular data sets: Adult, heart disease, medical charges, loans, scikit-learn's. Called by `datasets`.

Ranges, imputations and vocabularies are constants of this file; no statistic of the data is computed. A numeric column
is scaled from its range to [-1, 1] and clipped there. A category is one-hot encoded over a fixed vocabulary, and a
missing category is all zeros. The ranges were chosen with a look at these public values. For private data take ranges
from domain knowledge, since a range read off private rows is itself a release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from sordino.data.files import Source, TextTable, parse_csv, read_source
from sordino.data.records import Array, Dataset, hold_out
from sordino.data.tables import ZEROS, Column, encode, to_unit
from sordino.errors import DataError

Columns = dict[str, Column]
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"


def _numeric(ranges: Mapping[str, tuple[float, float]], missing: dict[str, float] | None = None) -> Columns:
    return {name: Column(range=span, missing=(missing or {}).get(name)) for name, span in ranges.items()}


def _categorical(vocabularies: dict[str, str]) -> Columns:
    return {name: Column(categories=tuple(words.split()), missing=ZEROS) for name, words in vocabularies.items()}


def _table(source: Source, header: str = "") -> TextTable:
    lines = read_source(source).decode("utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("|"))  # adult.test begins with such a line
    return parse_csv(Path(source.path), text, tuple(header.split()))


def _features(table: TextTable, columns: Columns) -> Array:
    return np.hstack([encode(table, name, column) for name, column in columns.items()]).astype(np.float32)


_ADULT_SUMS = {
    "adult/adult.data": "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult/adult.test": "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
ADULT = tuple(Source(path, digest, _UCI + path) for path, digest in _ADULT_SUMS.items())
_ADULT_HEADER = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
)
# The vocabulary of adult.names. fnlwgt is left out: a sampling weight of the census, not a feature of a person.
ADULT_COLUMNS = _numeric(
    {"age": (17, 90), "education-num": (1, 16), "capital-gain": (0, 10_000), "capital-loss": (0, 5_000)}
    | {"hours-per-week": (0, 100)}
) | _categorical(
    {
        "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
        "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
        "1st-4th 10th Doctorate 5th-6th Preschool",
        "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse",
        "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
        "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces",
        "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
        "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
        "sex": "Female Male",
        "native-country": "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India "
        "Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland "
        "France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand "
        "Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands",
    }
)


def adult() -> Dataset:
    """Load UCI Adult, which asks whether an income is above 50,000 dollars, with UCI's own test records."""
    parts = [_table(source, _ADULT_HEADER) for source in ADULT]
    x, test_x = (_features(table, ADULT_COLUMNS) for table in parts)
    incomes = [[token.rstrip(".") == ">50K" for token in table.column("income")] for table in parts]
    y, test_y = (np.array(rich, dtype=np.int64) for rich in incomes)
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, classes=2)


HOSPITALS = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
_HEART_HEADER = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num"
# Imputed by what a healthy adult would show: pressure 120, cholesterol 200, heart rate 150, no finding elsewhere.
HEART_COLUMNS = _numeric(
    {
        **{"age": (20, 80), "sex": (0, 1), "trestbps": (80, 200), "chol": (100, 400), "fbs": (0, 1)},
        **{"thalach": (60, 200), "exang": (0, 1), "oldpeak": (-3, 6), "ca": (0, 3)},
    },
    missing={"trestbps": 120, "chol": 200, "fbs": 0, "thalach": 150, "exang": 0, "oldpeak": 0, "ca": 0},
) | _categorical({"cp": "1 2 3 4", "restecg": "0 1 2", "slope": "1 2 3", "thal": "3 6 7"})


def heart_disease() -> Dataset:
    """Load UCI heart disease (present or not). The four hospitals are the natural clients; a fifth of each is test."""
    tables = [_hospital(name, digest) for name, digest in HOSPITALS.items()]
    x = np.concatenate([_features(table, HEART_COLUMNS) for table in tables])
    y = np.concatenate([(table.numbers("num") != 0).astype(np.int64) for table in tables])
    groups = np.repeat(np.arange(len(tables)), [len(table.rows) for table in tables])
    return replace(hold_out(x, y, groups, classes=2), names=tuple(HOSPITALS))


def _hospital(name: str, digest: str) -> TextTable:
    """Return one hospital's table, in which a blood pressure or cholesterol of 0 is replaced by a missing value."""
    file = f"processed.{name}.data"
    table = _table(Source(f"heart_disease/{file}", f"sha256:{digest}", f"{_UCI}heart-disease/{file}"), _HEART_HEADER)
    measured = [table.header.index(column) for column in ("trestbps", "chol")]
    zeros = ("0", "0.0")
    rows = [["?" if j in measured and cell in zeros else cell for j, cell in enumerate(row)] for row in table.rows]
    return replace(table, rows=rows)


INSURANCE = Source(
    "insurance/insurance.csv",
    "sha256:505c1cbc2e63d0363bac59501563df2530aadf4cdb9cfee226f4ef32f5468281",
    "https://raw.githubusercontent.com/stedy/Machine-Learning-with-R-datasets/master/insurance.csv",
)
INSURANCE_COLUMNS = _numeric({"age": (18, 65), "bmi": (15, 55), "children": (0, 5)}) | _categorical(
    {"sex": "female male", "smoker": "no yes", "region": "northeast northwest southeast southwest"}
)


def insurance() -> Dataset:
    """Load yearly medical charges of insured persons; the target is in units of 10,000 dollars."""
    table = _table(INSURANCE)
    return hold_out(_features(table, INSURANCE_COLUMNS), table.numbers("charges") / 10_000, unit=10_000.0)


LOANS = Source(  # published by OpenIntro without a sum; what is read of it has one
    "lending_club/loans_full_schema.csv", "", "https://www.openintro.org/data/csv/loans_full_schema.csv"
)
LOANS_SUM = "56611a3a7b45aa1dd01e6314d5ab665f4b78e2da7ba27b2d1571234c380eac39"  # sha256 of features and rates
# Ten numbers known before the rate is set (grade and instalment follow from the rate): 11 parameters with the bias.
LOANS_COLUMNS = _numeric(
    {
        **{"loan_amount": (0, 40_000), "term": (36, 60), "annual_income": (0, 250_000), "debt_to_income": (0, 60)},
        **{"delinq_2y": (0, 5), "inquiries_last_12m": (0, 10), "open_credit_lines": (0, 40)},
        **{"total_credit_limit": (0, 1_000_000), "total_credit_utilized": (0, 250_000)},
        **{"account_never_delinq_percent": (0, 100)},
    },
    missing={"debt_to_income": 20},
)


def loans() -> Dataset:
    """Load loans of Lending Club; the target is the interest rate in units of 10 percent."""
    table = _table(LOANS)
    missing = next((name for name in (*LOANS_COLUMNS, "interest_rate") if name not in table.header), None)
    if missing is not None:
        needed = "the file loans_full_schema.csv of OpenIntro"
        raise DataError(f"no column {missing} in {LOANS.path}", needed, f"download it from {LOANS.url}")
    x, rate = _features(table, LOANS_COLUMNS), table.numbers("interest_rate")
    found = hashlib.sha256(x.astype("<f4").tobytes() + rate.astype("<f8").tobytes()).hexdigest()
    if found != LOANS_SUM:
        fix = f"delete {LOANS.path} in the cache and load again"
        raise DataError(f"{LOANS.path} whose numbers have sha256 {found}", f"{LOANS_SUM}, of {LOANS.url}", fix)
    return hold_out(x, rate / 10, unit=10.0)


Range = tuple[float, float]

# Ten measurements of a cell nucleus (radius, texture, perimeter, area, smoothness, compactness, concavity, concave
# points, symmetry, fractal dimension): mean, standard error, worst value. Rounded outwards from the published table.
BREAST_CANCER: tuple[Range, ...] = (
    *((5, 30), (5, 40), (40, 200), (100, 2600), (0.05, 0.2), (0, 0.4), (0, 0.5), (0, 0.25), (0.1, 0.35), (0.04, 0.1)),
    *((0, 3), (0, 5), (0, 25), (0, 600), (0, 0.04), (0, 0.15), (0, 0.4), (0, 0.06), (0, 0.08), (0, 0.03)),
    *((5, 40), (10, 50), (50, 260), (100, 4500), (0.05, 0.25), (0, 1.2), (0, 1.3), (0, 0.3), (0.1, 0.7), (0.05, 0.25)),
)

# age, sex (1 or 2), body mass index, blood pressure, cholesterol, LDL, HDL, their ratio, log triglycerides, glucose.
DIABETES: tuple[Range, ...] = (
    *((0, 100), (1, 2), (15, 45), (60, 140), (90, 310)),
    *((40, 250), (20, 100), (2, 10), (3, 6.5), (50, 130)),
)

# alcohol, malic acid, ash, alcalinity, magnesium, phenols, flavanoids,
# nonflavanoids, proanthocyanins, colour, hue, OD280/OD315, proline.
WINE: tuple[Range, ...] = (
    *((11, 15), (0, 6), (1, 3.5), (10, 30), (70, 170), (0.5, 4), (0, 5.5)),
    *((0, 0.7), (0, 4), (1, 13), (0.4, 1.8), (1, 4), (200, 1700)),
)


def _scaled(values: Array, ranges: tuple[Range, ...]) -> Array:
    return to_unit(values, *np.array(ranges, dtype=np.float64).T)


def digits() -> Dataset:
    """Load handwritten digits of 8x8 pixels, scaled from 0..16 to 0..1."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return hold_out((x.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y, classes=10)


def breast_cancer() -> Dataset:
    """Load breast tumours, to be classified as benign or malignant from 30 measurements."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return hold_out(_scaled(x, BREAST_CANCER), y, classes=2)


def wine() -> Dataset:
    """Load wines, whose cultivar (one of three) is predicted from 13 measurements."""
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    return hold_out(_scaled(x, WINE), y, classes=3)


def diabetes() -> Dataset:
    """Load diabetes patients; the target is disease progression after one year, divided by 100.

    The raw columns are used, since scikit-learn's scaled columns use mean and variance of the data.
    """
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return hold_out(_scaled(x, DIABETES), y / 100, unit=100.0)
