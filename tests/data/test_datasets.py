"""Promises of the data sets: published facts hold, preprocessing is public, and mistakes are named."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sordino.data import datasets, records, shakespeare
from sordino.data.datasets import load
from sordino.data.files import TextTable
from sordino.data.records import Dataset
from sordino.data.tables import Column, encode
from sordino.errors import ConfigError, DataError

loaded = functools.cache(load)  # each real set is read once

# --- what holds of every set ---


def _check(data: Dataset, n: int, m: int, shape: tuple[int, ...]) -> None:
    assert data.x.shape == (n, *shape)
    assert data.test_x.shape == (m, *shape)
    assert len(data.y) == n
    assert len(data.test_y) == m
    assert data.y.dtype == (np.float32 if data.classes is None else np.int64)
    assert data.description
    assert data.licence


@pytest.mark.parametrize(
    ("name", "n", "m", "shape"),
    [
        ("digits", 1438, 359, (1, 8, 8)),
        ("breast_cancer", 456, 113, (30,)),
        ("wine", 143, 35, (13,)),
        ("diabetes", 354, 88, (10,)),
    ],
)
def test_bundled_sets_need_no_file(
    name: str, n: int, m: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path))
    data = load(name)
    _check(data, n, m, shape)
    assert data.x.dtype == np.float32
    assert np.abs(data.x).max() <= 1


def test_digits_are_the_default_and_scaled_to_one() -> None:
    data = load()
    assert (data.name, data.classes) == ("digits", 10)
    assert (data.x.min(), data.x.max()) == (0, 1)


def test_the_held_out_part_is_the_same_for_everyone() -> None:
    """SplitMix64 of 1, 2, ... sorted: fixed by arithmetic, not by a library's generator."""
    assert records.fixed_order(10).tolist() == _splitmix_order(10)
    order = records.fixed_order(1797)
    assert np.array_equal(np.sort(order), np.arange(1797))


def _splitmix_order(n: int) -> list[int]:
    mask = (1 << 64) - 1

    def mix(i: int) -> int:
        z = (i + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    return sorted(range(n), key=mix)


def test_scaling_uses_no_statistics_of_the_data() -> None:
    """A record is encoded the same alone and among others."""
    column = Column(range=(0, 100), missing=50)
    tables = [
        TextTable(Path("a.csv"), ("age",), [[token] for token in tokens])
        for tokens in (["30"], ["30", "99", "?", "1000"])
    ]
    alone, among = (encode(table, "age", column) for table in tables)
    assert alone[0, 0] == among[0, 0] == pytest.approx(-0.4)
    assert among[2:, 0].tolist() == [0.0, 1.0]


def test_loading_is_light() -> None:
    code = (
        "import sys, sordino.data.datasets, sordino.data.records as _; "
        "assert not {'torch', 'sklearn', 'PIL'} & {*sys.modules}"
    )
    src = str(Path(datasets.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": src})


# --- published facts ---


@pytest.mark.usefixtures("real_data")
def test_mnist_is_mnist() -> None:
    data = loaded("mnist_writers")
    _check(data, 60_000, 10_000, (1, 28, 28))
    histogram = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(data.y).tolist() == histogram
    mean, mean_square = data.x.mean(), np.square(data.x).mean()
    assert mean == pytest.approx(0.1307, abs=5e-5)
    assert np.sqrt(mean_square - mean**2) == pytest.approx(0.3081, abs=5e-5)


@pytest.mark.usefixtures("real_data")
def test_mnist_has_539_writers_and_other_people_in_the_test() -> None:
    data = loaded("mnist_writers")
    assert data.groups is not None
    assert data.test_groups is not None
    sizes = np.bincount(data.groups)
    assert [len(sizes), sizes.min(), sizes.max(), np.median(sizes)] == [539, 19, 131, 116]
    assert len(np.unique(data.test_groups)) == 297
    assert not np.intersect1d(data.groups, data.test_groups).size


@pytest.mark.usefixtures("real_data")
def test_validation_is_what_follows_the_training_records() -> None:
    full, part = loaded("mnist_writers"), load("mnist", train=50_000, validation=True, test=9_000)
    assert np.array_equal(part.y, full.y[:50_000])
    assert np.array_equal(part.test_y, full.y[50_000:59_000])
    assert np.array_equal(part.test_x[0], full.x[50_000])


@pytest.mark.usefixtures("real_data")
def test_femnist_has_105_writers_in_both_parts() -> None:
    data = loaded("femnist")
    _check(data, 14_640, 1_677, (1, 28, 28))
    assert data.classes == 62
    assert np.array_equal(np.unique(data.groups), np.arange(105))  # type: ignore[arg-type]
    assert np.array_equal(np.unique(data.test_groups), np.arange(105))  # type: ignore[arg-type]


@pytest.mark.usefixtures("real_data")
def test_cifar_sheets_keep_the_canonical_order() -> None:
    data = load("cifar10", train=12_000, test=100)
    _check(data, 12_000, 100, (3, 32, 32))
    assert data.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.test_y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert np.rint(data.x[0, :, 0, 0] * 255).tolist() == [59, 62, 63]  # the first pixel of the canonical first image


@pytest.mark.usefixtures("real_data")
def test_adult_is_split_as_uci_split_it() -> None:
    data = loaded("adult")
    _check(data, 32_561, 16_281, (104,))
    assert (int(data.y.sum()), int(data.test_y.sum())) == (7841, 3846)
    assert np.abs(data.x).max() == 1


@pytest.mark.usefixtures("real_data")
def test_insurance_has_1338_charges() -> None:
    data = loaded("insurance")
    _check(data, 1071, 267, (11,))
    charges = np.concatenate([data.y, data.test_y]) * data.target_unit
    assert charges.max() == pytest.approx(63_770.43, rel=1e-5)
    assert charges.mean() == pytest.approx(13_270.42, rel=1e-5)


@pytest.mark.usefixtures("real_data")
def test_heart_disease_has_four_hospitals() -> None:
    data = loaded("heart_disease")
    assert data.groups is not None
    assert data.test_groups is not None
    assert (np.bincount(data.groups) + np.bincount(data.test_groups)).tolist() == [303, 294, 123, 200]
    assert np.bincount(data.test_groups).tolist() == [60, 58, 24, 40]
    assert data.y.sum() + data.test_y.sum() == 509


@pytest.mark.usefixtures("real_data")
def test_loans_make_a_model_of_eleven_parameters() -> None:
    data = loaded("loans")
    _check(data, 8_000, 2_000, (10,))
    assert data.name == "lending_club"
    assert data.y.max() * data.target_unit == pytest.approx(30.94)


@pytest.mark.usefixtures("real_data")
def test_shakespeare_has_1015_roles_of_100_samples_and_no_more() -> None:
    assert len(shakespeare.role_texts(1015, 100)) == 1015
    with pytest.raises(DataError, match="found 1015 roles"):
        load("shakespeare", roles=1016)


@pytest.mark.usefixtures("real_data")
def test_shakespeare_stays_within_its_bounds() -> None:
    data = load("shakespeare", roles=30, per_role=200)
    assert data.x.shape[1:] == (80,)
    assert data.x.dtype == data.y.dtype == np.int64
    assert data.groups is not None
    assert len(np.unique(data.groups)) == 30
    assert np.bincount(data.groups).max() == 200
    assert data.classes == len(shakespeare.ALPHABET) == len(set(shakespeare.ALPHABET)) == 80


def test_a_window_is_followed_by_its_next_character() -> None:
    labels = shakespeare.encode("abcdefghij" * 30)
    x, y = shakespeare.windows(labels, 50)
    assert x.shape == (50, 80)
    assert np.array_equal(y, labels[80 + np.arange(50) * 220 // 50])
    assert shakespeare.windows(labels[:80], 5)[0].shape == (0, 80)


def test_a_character_outside_the_alphabet_is_named() -> None:
    with pytest.raises(DataError, match="é"):
        shakespeare.encode("café")
    with pytest.raises(DataError, match="—"):
        shakespeare.encode("to be — or")


# --- names and options ---


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'femnist'"):
        load("femnits")
    with pytest.raises(ConfigError, match="unknown data set 'zzz'"):
        load("zzz")


def test_an_unknown_option_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'roles'"):
        load("shakespeare", rolls=3)
    with pytest.raises(ConfigError, match="without path"):
        load("npz")


def test_every_name_has_one_line() -> None:
    assert list(datasets.descriptions()) == datasets.names()
    assert all(line and "\n" not in line for line in datasets.descriptions().values())


def test_more_records_than_there_are_is_refused() -> None:
    assert len(load("wine", train=10, test=3).y) == 10
    for option in ({"train": 144}, {"train": 0}, {"test": 36}, {"train": 143, "validation": True}):
        with pytest.raises(DataError, match="from 1 to"):
            load("wine", **option)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="validation = true without train"):
        load("wine", validation=True)
