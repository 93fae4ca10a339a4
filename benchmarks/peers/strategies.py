"""Strategies of correlated noise, ours beside jax_privacy's: the noise of sums, and the time it takes to find them.

make bench-strategies [ARGS="--repeats 3 --long"]

A client comes in every b-th of T rounds: (T, b) = (200, 10), 20 times, and (2048, 342), 6 times. The noise is the root
mean square over rounds of what C^-1 Z leaves in the sum of all rounds so far, where Z has the deviation that makes the
run 1-GDP:  sens(C) sqrt(mean_t ||row t of A C^-1||^2),  sens the most over clients, by the same code for both sides,
from the matrix alone. CPU seconds of one thread, each search in a process of its own, in turn, the least of `repeats`;
imports are not counted, jax's compilation stands apart. `--long`: jax_privacy's dense search at T = 2048 too, minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from federated import HERE, spoken

from sordino.accounting.sensitivity import Patterns
from sordino.parts.strategies import Banded, BandedSquareRoot
from sordino.parts.strategies import BufferedToeplitz, Strategy

SIZES = ((200, 10), (2048, 342))
OURS: dict[str, Any] = {
    "bands": lambda b: Banded(b, forget=0.0),
    "square root, nothing to find": BandedSquareRoot,
    "2 buffers": lambda b: BufferedToeplitz(2, forget=0.0),
    "3 buffers": lambda b: BufferedToeplitz(3, forget=0.0),
}
THEIRS = ("toeplitz", "columns", "dense", "dense, fixed order", "2 buffers", "3 buffers")
SHORT, LONG = ("columns", "dense, fixed order"), ("dense",)  # at T = 200 only; at T = 2048 with --long only


def noise_of_sums(c: np.ndarray, apart: int) -> float:
    """For a client in every `apart`-th round, whichever its first is; messages may point anywhere."""
    gram = np.abs(c.T @ c)
    turns = [range(first, len(c), apart) for first in range(apart)]
    most = max(gram[np.ix_(turn, turn)].sum() for turn in turns)
    sums = np.cumsum(np.linalg.inv(c), axis=0)
    return float(np.sqrt(most * np.sum(sums**2) / len(c)))


def ours(kind: str, rounds: int, apart: int, file: str) -> None:
    """One search, in a process of its own."""
    import scipy.linalg
    import scipy.optimize
    import scipy.signal  # noqa: F401

    allowed, bare = Patterns(rounds, -(-rounds // apart), apart), OURS[kind](apart)
    began = time.process_time()
    found: Strategy = bare.fitted(allowed, lambda: np.ones(rounds))
    spent = time.process_time() - began
    np.save(file, np.linalg.inv(found.noise_matrix(rounds)))
    billed = found.sensitivity(allowed) * float(np.sqrt(found.errors(rounds).mean()))
    print(json.dumps({"seconds": spent, "compiled": spent, "billed": billed}))


def searched(side: str, kind: str, rounds: int, apart: int, folder: str) -> dict[str, Any]:
    """What one process found."""
    file = str(Path(folder) / "c.npy")
    python = sys.executable if side == "sordino" else str(HERE / ".venv-jax" / "bin" / "python")
    script = ["strategies.py", "--one"] if side == "sordino" else ["strategies_jax.py"]
    found = spoken([python, *script, kind, str(rounds), str(apart), file], 3600)
    if "error" in found:
        raise SystemExit(f"{side}, {kind}, T = {rounds}: {found['error']}")
    found["noise"] = noise_of_sums(np.load(file), apart)
    if abs(found.get("billed", found["noise"]) / found["noise"] - 1) > 1e-6:
        raise SystemExit(
            f"{kind}, T = {rounds}: the bill's noise is {found['billed']}, the matrix has {found['noise']}"
        )
    return found


def table(rounds: int, apart: int, repeats: int, long: bool) -> None:
    """Rows of one size, every method in turn."""
    left_out = () if rounds < 1000 else SHORT if long else (*SHORT, *LONG)
    rows = [("sordino", kind) for kind in OURS] + [("jax_privacy", kind) for kind in THEIRS if kind not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        turns = [[turn(i, row, rounds, apart, folder) for row in rows] for i in range(repeats)]
    print(f"\nT = {rounds}, b = {apart}, {-(-rounds // apart)} rounds of a client\n")
    print("| | noise of sums | CPU s | without compilation |\n|---|---:|---:|---:|")
    for row, each in zip(rows, zip(*turns, strict=True), strict=True):
        found = [one for one in each if one]
        whole, run = (min(one[key] for one in found) for key in ("seconds", "compiled"))
        print(f"| {row[0]}: {row[1]} | {found[0]['noise']:.4f} | {whole:.3f} | {run:.3f} |", flush=True)


def turn(i: int, row: tuple[str, str], rounds: int, apart: int, folder: str) -> dict[str, Any] | None:
    """The i-th search; one that takes minutes is done once."""
    return None if i and rounds > 1000 and row[1] in LONG else searched(*row, rounds, apart, folder)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--long", action="store_true")
    given = options.parse_args()
    for rounds, apart in SIZES:
        table(rounds, apart, given.repeats, given.long)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        ours(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        main()
