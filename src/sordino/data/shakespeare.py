"""LEAF's data sets: Shakespeare's roles as clients (from Gutenberg's text of 1994), and the whole FEMNIST.

A play begins at a line "by William Shakespeare", with its title two to seven lines above. Two blanks, a name and a full
stop begin a speech, four blanks continue it; The Comedy of Errors is printed without these blanks. A role is a client
if it has at least three lines and more than 80 characters. Sonnets, contents and the text after the plays are omitted.
FEMNIST is read as LEAF's script writes it: JSON files of users with their images. Called by `datasets` and `images`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data.files import Source, cache_folder, find_source, read_source
from sordino.data.records import Array, Dataset, Ints, fixed_order
from sordino.errors import DataError

AUTHOR, LAST, FEWEST = "by William Shakespeare", 124_195, 3  # LAST: the line on which the plays end
TEXT_SUM = "c5601d266987ac885ca96522b1b4e439feb7eca39f0fe1111f7342b63b6468f3"  # sha256, lines ended by "\n"
FIX = "delete shakespeare/1994-01-100.zip in the cache and load again"
MOST = 1 << 26  # bytes of the text inside the archive
_ERRORS = "THE COMEDY OF ERRORS"
_SPEECH, _MORE = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)")
_BARE_SPEECH, _BARE_MORE = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"(.*)")
Play = dict[str, list[str]]  # what each role says, line by line


def text_of(archive: bytes) -> str:
    """Return the checked text of 100.txt in Gutenberg's zip archive, which is read in memory and never unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as held:
            info = next(one for one in held.infolist() if one.filename.rpartition("/")[2].lower() == "100.txt")
            if info.file_size > MOST:
                raise DataError(f"100.txt of {info.file_size:,} bytes in the archive", f"at most {MOST:,} bytes", FIX)
            return verified_text(held.read(info))
    except (zipfile.BadZipFile, StopIteration, NotImplementedError, RuntimeError, EOFError) as error:
        raise DataError(f"an archive without 100.txt ({error})", "Gutenberg's 1994-01-100.zip", FIX) from None


def verified_text(content: bytes) -> str:
    """Decode the text that LEAF reads; refuse a text with another SHA-256 (of the text with lines ended by LF)."""
    plain = content.replace(b"\r\n", b"\n")
    found = hashlib.sha256(plain).hexdigest()
    if found != TEXT_SUM:
        raise DataError(f"Shakespeare's works with sha256 {found}", f"Gutenberg's of 1994, sha256 {TEXT_SUM}", FIX)
    return plain.decode("latin-1")


def roles_of(text: str) -> dict[str, str]:
    """Return all lines of each role as one text, sorted by the role's name, which is spelt as in LEAF."""
    found = {}
    for title, play in _plays(text.splitlines()[1:]):
        for role, said in play.items() if len(play) > 1 else ():
            whole = re.sub(r"  +", " ", " ".join(said) + " ")
            if len(said) >= FEWEST and len(whole) > 80:
                found[re.sub(r"\W", "_", f"{title}_{role}")] = whole
    return dict(sorted(found.items()))


def _plays(lines: list[str]) -> Iterator[tuple[str, Play]]:
    begins = [i for i, line in enumerate(lines) if AUTHOR in line and i <= LAST][1:]  # the first begins the sonnets
    for begin, end in zip(begins, [*begins[1:], LAST + 1], strict=True):
        title = next((above.strip() for above in reversed(lines[begin - 7 : begin - 1]) if above.strip()), "")
        yield title, _speeches(lines[begin + 1 : end], bare=title == _ERRORS)


def _speeches(lines: list[str], bare: bool) -> Play:
    play: Play = {}
    speech, more = (_BARE_SPEECH, _BARE_MORE) if bare else (_SPEECH, _MORE)
    who: str | None = None
    for line in lines:
        begun = speech.match(line)
        if begun:
            who = None if bare and begun[1].upper().startswith("ACT ") else begun[1].upper()
        goes_on = begun or more.match(line)
        if bare and not begun and goes_on and goes_on[1].startswith("<"):
            who = None
        if who and goes_on:
            play.setdefault(who, []).append(begun[2] if begun else goes_on[1])
    return play


WINDOW = 80
# LEAF's alphabet, fixed and public: a character's label is its place here.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

ROLES = Source("shakespeare/roles.jsonl", "sha256:8780a0e6c6009d1753aa2b3f102a59309977e3565756213af5bbbd61b38e8020")
PLAYS = Source(  # no sum of the archive is published; that of the text in it is checked (TEXT_SUM)
    "shakespeare/1994-01-100.zip", "", "https://www.gutenberg.org/files/100/old/old/1994-01-100.zip"
)


def shakespeare(*, roles: int = 100, per_role: int = 500, least: int = 100) -> Dataset:
    """Load Shakespeare for next-character prediction: windows of 80 characters, with the roles as natural clients.

    The first `roles` roles, in a fixed public order, that have at least `least` windows are loaded. Each has at most
    `per_role` training windows, evenly spread over the first 80% of its text, and a quarter as many test windows from
    the rest, so that no character is in both. A window takes 640 bytes.
    """
    if min(roles, per_role, least) < 1:
        found = f"roles = {roles}, per_role = {per_role}, least = {least}"
        raise DataError(found, "three numbers of at least 1", "correct the number that is below 1")
    texts = [encode(text) for text in role_texts(roles, least)]
    train = [windows(text[: len(text) * 4 // 5], per_role) for text in texts]
    test = [windows(text[len(text) * 4 // 5 :], max(per_role // 4, 1)) for text in texts]
    return _dataset(dict(enumerate(train)), dict(enumerate(test)), len(ALPHABET))


def _dataset(train: dict[Any, tuple[Array, Ints]], test: dict[Any, tuple[Array, Ints]], classes: int) -> Dataset:
    places = {name: place for place, name in enumerate(train)}
    (x, y, groups), (test_x, test_y, test_groups) = (
        (
            np.concatenate([x for x, _ in held.values()]),
            np.concatenate([y for _, y in held.values()]),
            np.repeat([places[name] for name in held], [len(y) for _, y in held.values()]).astype(np.int64),
        )
        for held in (train, test)
    )
    return Dataset(x=x, y=y, test_x=test_x, test_y=test_y, groups=groups, test_groups=test_groups, classes=classes)


def encode(text: str) -> Ints:
    """Return the label of each character of a text: its position in `ALPHABET`."""
    table = np.full(129, -1, dtype=np.int64)  # the last place is for every character beyond ASCII
    table[np.frombuffer(ALPHABET.encode("ascii"), np.uint8)] = np.arange(len(ALPHABET))
    labels = table[np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), 128)]
    if (labels < 0).any():
        found = f"the character {text[int(np.argmin(labels))]!r}"
        raise DataError(found, f"one of the {len(ALPHABET)} characters of LEAF's alphabet", "remove or replace it")
    return labels


def windows(text: Ints, most: int) -> tuple[Ints, Ints]:
    """Return m <= `most` windows evenly spread over a text, [m, WINDOW], and the character after each window, [m]."""
    places = max(len(text) - WINDOW, 0)
    count = min(most, places)
    starts = np.arange(count) * places // max(count, 1)
    return text[starts[:, None] + np.arange(WINDOW)], text[starts + WINDOW]


def role_texts(count: int, least: int) -> list[str]:
    """Return the texts of the first `count` roles, in a fixed order, among those with at least `least` windows.

    The texts are read from the file roles.jsonl if it exists, else from Gutenberg's archive.
    """
    if find_source(ROLES) is None:
        texts = list(roles_of(text_of(read_source(PLAYS))).values())
    else:
        texts = [json.loads(line)["text"] for line in read_source(ROLES).decode("utf-8").splitlines()]
    able = [text for text in texts if len(text) - WINDOW >= least]
    if count > len(able):
        found = f"{len(able)} roles with at least {least} windows"
        raise DataError(found, f"{count} such roles", "lower the option roles or the option least")
    return [able[i] for i in fixed_order(len(able))[:count]]


FOLDER, CLASSES, PIXELS = "femnist/leaf", 62, 784
HOW = (
    "clone https://github.com/TalwalkarLab/leaf, run data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, and "
    "put its data/train and data/test into {folder}"
)


def femnist_leaf(*, path: str | Path | None = None, writers: int | None = None, least: int = 1) -> Dataset:
    """Load LEAF's FEMNIST: 62 handwritten characters, with about 3,550 writers as natural clients.

    Only the first `writers` writers that have at least `least` training images are loaded. LEAF draws the split into
    train and test at random and publishes no checksum, so the content is checked: 784 numbers from 0 to 1 (white) in
    each image, labels below 62, and training images for each test writer.
    """
    named = leaf_folder() if path is None else Path(path).expanduser()
    folder = named or cache_folder() / FOLDER
    if named is None or not (folder / "train").is_dir() or not (folder / "test").is_dir():
        raise DataError(f"no LEAF FEMNIST in {folder}", "its folders train and test", HOW.format(folder=folder))
    able = {name: (x, y) for name, x, y in _users(folder / "train") if len(y) >= least}
    chosen = sorted(able)[:writers]
    found_test = {name: (x, y) for name, x, y in _users(folder / "test") if name in set(chosen)}
    train, test = {name: able[name] for name in chosen}, {n: found_test[n] for n in chosen if n in found_test}
    if not chosen or not test or (writers is not None and len(chosen) < writers):
        found = f"{len(chosen)} writers with at least {least} training images, {len(test)} of them with test images"
        needed = f"at least {writers or 1} writers, and test images"
        raise DataError(f"{found} in {folder}", needed, "lower the option writers or the option least")
    return _dataset(train, test, CLASSES)


def leaf_folder() -> Path | None:
    """Return the folder of LEAF's FEMNIST files below SORDINO_DATA or below the cache; None if there is none."""
    named = os.environ.get("SORDINO_DATA")
    folders = [*([Path(named).expanduser()] if named else []), cache_folder()]
    return next((folder / FOLDER for folder in folders if (folder / FOLDER / "train").is_dir()), None)


def _users(folder: Path) -> Iterator[tuple[str, Array, Ints]]:
    """Yield name, images [n, 1, 28, 28] and labels [n] of each of LEAF's users (writers)."""
    for file in sorted(folder.glob("*.json")):
        try:
            held: Any = json.loads(file.read_bytes())
            for name in held["users"]:
                data = held["user_data"][name]
                x, y = np.asarray(data["x"], dtype=np.float64).reshape(-1, PIXELS), np.asarray(data["y"], np.int64)
                if len(x) != len(y) or not len(y) or not (0 <= y.min() <= y.max() < CLASSES):
                    raise ValueError(f"user {name}: {len(x)} images and {len(y)} labels, which must be below {CLASSES}")
                if not (x.min() >= 0 and x.max() <= 1):
                    raise ValueError(f"user {name}: pixels from {x.min():g} to {x.max():g}, which must be from 0 to 1")
                yield str(name), np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28), y
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            needed = "a JSON file with users and user_data, as LEAF writes it"
            raise DataError(f"{file}, which cannot be read ({error!r})", needed, "run LEAF's script again") from None
