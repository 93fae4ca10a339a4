"""The whole FEMNIST as LEAF's script writes it: JSON files of users with their images. Called by `datasets`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data.downloads import cache_folder
from sordino.data.records import Array, Dataset, Ints
from sordino.errors import DataError

FOLDER, CLASSES, PIXELS = "femnist/leaf", 62, 784
HOW = (
    "clone https://github.com/TalwalkarLab/leaf, run data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, and "
    "put its data/train and data/test into {folder}"
)
User = tuple[str, Array, Ints]  # name, images [n, 28, 28], labels [n]


def femnist_leaf(*, path: str | Path | None = None, writers: int | None = None, least: int = 1) -> Dataset:
    """62 handwritten characters of about 3,550 writers, the groups; or of the first `writers` with `least` images.

    LEAF draws its split itself and publishes no sum, so what is checked is the content: 784 numbers from 0 to 1 in
    each image, labels below 62, test writers that have training images too. White is 1.
    """
    folder = _folder(path)
    train = {name: (x, y) for name, x, y in _users(folder / "train") if len(y) >= least}
    chosen = sorted(train)[:writers]
    test = {name: (x, y) for name, x, y in _users(folder / "test") if name in set(chosen)}
    if not chosen or not test or (writers is not None and len(chosen) < writers):
        found = f"{len(chosen)} writers with {least} training images or more, {len(test)} of them with a test"
        raise DataError(f"{found} in {folder}", "at least as many as are asked for", "ask for fewer")
    x, y, groups = _stacked(train, chosen, chosen)
    test_x, test_y, test_groups = _stacked(test, [name for name in chosen if name in test], chosen)
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, groups=groups, test_groups=test_groups, classes=CLASSES)


def leaf_folder() -> Path | None:
    """LEAF's folder below SORDINO_DATA or the cache, if there is one."""
    named = os.environ.get("SORDINO_DATA")
    folders = [*([Path(named).expanduser()] if named else []), cache_folder()]
    return next((folder / FOLDER for folder in folders if (folder / FOLDER / "train").is_dir()), None)


def _folder(path: str | Path | None) -> Path:
    found = leaf_folder() if path is None else Path(path).expanduser()
    if found is None or not (found / "train").is_dir() or not (found / "test").is_dir():
        folder = found or cache_folder() / FOLDER
        raise DataError(f"no LEAF FEMNIST in {folder}", "its folders train and test", HOW.format(folder=folder))
    return found


def _users(folder: Path) -> Iterator[User]:
    """All users of a folder's files."""
    for file in sorted(folder.glob("*.json")):
        try:
            held: Any = json.loads(file.read_bytes())
            users, data = held["users"], held["user_data"]
            yield from (_user(str(name), data[name], file) for name in users)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{file}, which cannot be read ({error!r})", "users and user_data, as LEAF writes"
            ) from None


def _user(name: str, data: Any, file: Path) -> User:
    x, y = np.asarray(data["x"], dtype=np.float64).reshape(-1, PIXELS), np.asarray(data["y"], dtype=np.int64)
    if len(x) != len(y) or not len(y) or not (0 <= y.min() <= y.max() < CLASSES):
        raise ValueError(f"user {name}: {len(x)} images and {len(y)} labels, which must be below {CLASSES}")
    if not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(f"user {name}: pixels from {x.min():g} to {x.max():g}, which must be from 0 to 1")
    return name, np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28), y


def _stacked(held: dict[str, tuple[Array, Ints]], names: list[str], order: list[str]) -> tuple[Array, Ints, Ints]:
    places = {name: place for place, name in enumerate(order)}
    groups = np.repeat([places[name] for name in names], [len(held[name][1]) for name in names])
    return (
        np.concatenate([held[name][0] for name in names])[:, None],
        np.concatenate([held[name][1] for name in names]),
        groups.astype(np.int64),
    )
