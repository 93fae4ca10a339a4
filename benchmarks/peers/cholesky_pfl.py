"""How far one user moves what pfl's banded matrix mechanism releases, over what its accountant is told.

benchmarks/peers/.venv-pfl/bin/python benchmarks/peers/cholesky_pfl.py      (nothing of Sordino is imported)

The mechanism adds C^-1 Z to the sums of T rounds; a user, clipped to norm 1, comes in rounds at least `apart` from each
other. Told to the accountant is how often: k = ceil(T / apart) Gaussian releases of sensitivity 1, so sqrt(k) in all.
C is read off the noise itself: fed with unit vectors for Z, the mechanism's own code answers with the columns of C^-1.
The truth is the most of ||C x|| over every pattern of rounds and every choice of signs, one by one; where there are too
many (T = 100, 200), over patterns by their columns' squares, which is exact for columns that do not meet.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import types
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
import torch
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.privacy.ftrl_mechanism import BandedMatrixFactorizationMechanism

SMALL = ((6, 3), (8, 4), (12, 6), (16, 8), (20, 5), (30, 20))
LARGE = ((100, 20), (200, 10))


def mechanism(rounds: int, apart: int) -> tuple[BandedMatrixFactorizationMechanism, int]:
    """As a user of pfl makes it; and the number of releases that its accountant is asked to compose."""
    told: list[int] = []

    def accountant(releases: int) -> types.SimpleNamespace:
        told.append(releases)
        return types.SimpleNamespace(cohort_noise_parameter=1.0)

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it leaves its matrix where it stands
        return BandedMatrixFactorizationMechanism(1.0, rounds, apart, accountant), told[0]


def read_off(made: BandedMatrixFactorizationMechanism, rounds: int) -> np.ndarray:
    """C, from the noise that is added where Z is the identity: what `query_matrix` says, to float32."""
    noise = [np.asarray(made._C_inv_noise.step(row)) for row in torch.eye(rounds)]
    found = np.linalg.inv(np.stack(noise).astype(np.float64))
    if np.abs(found - made.query_matrix).max() > 1e-4:
        raise SystemExit("the noise is not that of query_matrix")
    return np.asarray(made.query_matrix, dtype=np.float64)


def every(first: int, rounds: int, apart: int) -> Iterator[tuple[int, ...]]:
    """All patterns of rounds from `first` on."""
    yield ()
    for t in range(first, rounds):
        for later in every(t + apart, rounds, apart):
            yield (t, *later)


def moved(c: np.ndarray, apart: int) -> float:
    """The most that one user moves C X: every pattern, every sign."""
    found = 0.0
    for pattern in every(0, len(c), apart):
        for signs in itertools.product((1.0, -1.0), repeat=max(len(pattern) - 1, 0)):
            found = max(found, float(np.linalg.norm(c[:, list(pattern)] @ np.array([1.0, *signs][: len(pattern)]))))
    return found


def moved_apart(c: np.ndarray, apart: int) -> float:
    """The same, for columns that do not meet: the best sum of their squares over patterns."""
    reach = max(int(np.flatnonzero(np.abs(c[:, s]) > 1e-9)[-1]) - s for s in range(len(c)))
    if reach >= apart:
        raise SystemExit(f"columns of {reach + 1} rows, users {apart} rounds apart: they meet")
    best = np.zeros(len(c) + apart)
    for t in reversed(range(len(c))):
        best[t] = max(best[t + 1], float(c[:, t] @ c[:, t]) + best[t + apart])
    return math.sqrt(best[0])


def main() -> None:
    torch.set_num_threads(1)
    set_framework_module(pytorch_ops)
    print(f"pfl {version('pfl')}: T, rounds apart | billed | moved | ratio | longest column | with the other factor")
    for rounds, apart in SMALL + LARGE:
        made, releases = mechanism(rounds, apart)
        c, measure = read_off(made, rounds), moved if (rounds, apart) in SMALL else moved_apart
        gram = made.query_matrix @ made.query_matrix.T  # X, which was optimised to be C^T C
        other = np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1]
        billed, truth = math.sqrt(releases), measure(c, apart)
        longest = float(np.linalg.norm(c, axis=0).max())
        print(
            f"{rounds}, {apart} | {billed:.4f} | {truth:.4f} | {truth / billed:.4f} | {longest:.3f} | "
            f"{measure(other, apart):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
