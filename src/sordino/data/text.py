"""Text: the roles of Shakespeare's plays, next-character prediction (LEAF)."""

from __future__ import annotations

import json

import numpy as np

from sordino.data.plays import roles_of, text_of
from sordino.data.records import Array, Dataset, Ints, fixed_order
from sordino.data.sources import Source, find, read
from sordino.errors import DataError

WINDOW = 80
# LEAF's alphabet, fixed and public: a character's label is its place here.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

ROLES = Source("shakespeare/roles.jsonl", "sha256:8780a0e6c6009d1753aa2b3f102a59309977e3565756213af5bbbd61b38e8020")
PLAYS = Source(  # no sum of the archive is published; that of the text in it is checked (plays.TEXT_SUM)
    "shakespeare/1994-01-100.zip", "", "https://www.gutenberg.org/files/100/old/old/1994-01-100.zip"
)


def shakespeare(*, roles: int = 100, per_role: int = 500, least: int = 100) -> Dataset:
    """80 characters predict the next; the groups are the roles with at least `least` samples.

    `roles` of them in a fixed public order, each with at most `per_role` training windows, evenly spread over the first
    80% of its text, and a quarter as many test windows from the rest: no character is in both. 640 bytes per window.
    """
    if min(roles, per_role, least) < 1:
        raise DataError(f"roles = {roles}, per_role = {per_role}, least = {least}", "each at least 1")
    texts = [np.asarray(encode(said), dtype=np.int64) for said in spoken(roles, least)]
    cuts = [len(text) * 4 // 5 for text in texts]
    train = [windows(text[:cut], per_role) for text, cut in zip(texts, cuts, strict=True)]
    test = [windows(text[cut:], max(per_role // 4, 1)) for text, cut in zip(texts, cuts, strict=True)]
    (x, y, groups), (test_x, test_y, test_groups) = _stack(train), _stack(test)
    return Dataset(
        x=x, y=y, test_x=test_x, test_y=test_y, groups=groups, test_groups=test_groups, classes=len(ALPHABET)
    )


def encode(text: str) -> Ints:
    """The labels of the characters of a text."""
    table = np.full(129, -1, dtype=np.int64)  # the last place is for every character beyond ASCII
    table[np.frombuffer(ALPHABET.encode("ascii"), np.uint8)] = np.arange(len(ALPHABET))
    labels = table[np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), 128)]
    if (labels < 0).any():
        raise DataError(f"the character {text[int(np.argmin(labels))]!r}", "characters of the public alphabet")
    return labels


def windows(text: Ints, most: int) -> tuple[Ints, Ints]:
    """At most `most` windows evenly spread over a text, [m, WINDOW], and the character after each, [m]."""
    places = max(len(text) - WINDOW, 0)
    count = min(most, places)
    starts = np.arange(count) * places // max(count, 1)
    return text[starts[:, None] + np.arange(WINDOW)], text[starts + WINDOW]


def spoken(asked: int, least: int) -> list[str]:
    """The first `asked` roles, in the fixed order, among those with enough samples."""
    able = [text for text in _texts() if len(text) - WINDOW >= least]
    if asked > len(able):
        raise DataError(f"{len(able)} roles with {least} samples or more", f"{asked}", "ask for fewer roles")
    return [able[i] for i in fixed_order(len(able))[:asked]]


def _texts() -> list[str]:
    """What every role says, in the order of their names: the packed file if there is one, else Gutenberg's archive."""
    if find(ROLES) is None:
        return list(roles_of(text_of(read(PLAYS))).values())
    return [json.loads(line)["text"] for line in read(ROLES).decode("utf-8").splitlines()]


def _stack(parts: list[tuple[Ints, Ints]]) -> tuple[Array, Array, Ints]:
    """All windows, all next characters, and the role of each."""
    groups = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), groups
