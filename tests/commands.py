"""The command line, called inside this process; and a small federation as a file beside its data."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from sordino.cli import main

POPULATION, ROUNDS = 60, 4
FEDERATION = """
[task]
dataset = "npz"
options = {{ path = "{data}" }}
partition = {{ kind = "iid", clients = 60 }}

[recipe]
name = "dp_fed_avg"
rounds = 4
clients = {{ kind = "poisson", population = 60, rate = 0.5 }}
lr = 0.5
clip_norm = 1.0
noise_multiplier = 2.0

[run]
seed = 3
"""
PLAN = """
[plan]
rounds = 4
clients = { kind = "poisson", population = 60, rate = 0.5 }
local = { kind = "local_sgd", lr = 0.5, epochs = 1 }
encode = [{ kind = "clip", clip_norm = 1.0 }]
release = { kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }
server = { kind = "sgd" }

[run]"""


@dataclass(frozen=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be one strict JSON object on one line."""
        assert self.code == 0, self.err
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        found = json.loads(self.out, parse_constant=_not_json)
        assert isinstance(found, dict)
        return found

    @property
    def sentence(self) -> str:
        """The one line of a refusal."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.startswith("sordino: ")
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1
        return self.err


def _not_json(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def sordino(*arguments: object) -> Said:
    """Call the command; any exception but SystemExit is the command's failure, and the test's."""
    out, err = io.StringIO(), io.StringIO()
    words = ["sordino", *map(str, arguments)]
    with patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stopped:
            return Said(int(stopped.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("main() must exit")


def arrays(seed: int = 0, records: int = 240) -> dict[str, Any]:
    """Three classes of points in six dimensions, 30 of them for the test."""
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=records + 30)
    x = (rng.standard_normal((records + 30, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    return {"x": x[:records], "y": y[:records], "test_x": x[records:], "test_y": y[records:], "classes": np.int64(3)}


def federation(folder: Path, *changes: tuple[str, str], data: dict[str, Any] | None = None) -> Path:
    """fed.toml in `folder`, each change (found, instead) made once, beside data.npz."""
    np.savez(folder / "data.npz", **(data or arrays()))
    text = FEDERATION.format(data=folder / "data.npz")
    for found, instead in changes:
        assert text.count(found) == 1, found
        text = text.replace(found, instead)
    file = folder / "fed.toml"
    file.write_text(text)
    return file


def spelt_out(folder: Path, *changes: tuple[str, str]) -> Path:
    """The same with the plan written out."""
    text = PLAN
    for found, instead in changes:
        assert text.count(found) == 1, found
        text = text.replace(found, instead)
    whole = federation(folder).read_text()
    head, tail = whole.split("[recipe]")[0], whole.split("[run]")[1]
    file = folder / "plan.toml"
    file.write_text(head + text + tail)
    return file


def lines(file: Path) -> list[dict[str, Any]]:
    """A jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, whole."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
