"""jax_privacy's half of strategies.py: `python strategies_jax.py kind T b file.npy` keeps C and prints a line of JSON.

jax compiles a step on its first call, in every optimisation anew. CPU seconds of the whole call, and of its steps
without the first: those after it, times steps / (steps - 1).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy.matrix_factorization import banded, buffered_toeplitz, dense, optimization, toeplitz

MARKS: list[float] = []
_optimize = optimization.optimize


def marked(loss: Any, params: Any, **given: Any) -> Any:
    """The library's own optimiser, with the time at the end of every step."""
    told = given.pop("callback", lambda _: None)

    def each(step: Any) -> Any:
        step.loss.block_until_ready()
        MARKS.append(time.process_time())
        return told(step)

    return _optimize(loss, params, callback=each, **given)


def buffers(count: int, rounds: int, apart: int) -> Any:
    most = -(-rounds // apart)
    return buffered_toeplitz.optimize(
        n=rounds, min_sep=apart, max_participations=most, error="mean", min_buffers=count, max_buffers=count
    )


FOUND = {
    "toeplitz": lambda t, b: toeplitz.optimize_banded_toeplitz(t, b),
    "columns": lambda t, b: banded.optimize(t, bands=b),
    "dense": lambda t, b: dense.optimize(t, bands=b, equal_norm=True),
    "dense, fixed order": lambda t, b: dense.optimize(t, epochs=t // b),
    "2 buffers": lambda t, b: buffers(2, t, b),
    "3 buffers": lambda t, b: buffers(3, t, b),
}
AS_MATRIX = {
    "toeplitz": lambda c, t: toeplitz.materialize_lower_triangular(jnp.asarray(c, float), t),
    "columns": lambda c, t: banded.ColumnNormalizedBanded(params=jnp.asarray(c.params, float)).materialize(),
    "2 buffers": lambda c, t: c.materialize(t),
    "3 buffers": lambda c, t: c.materialize(t),
}


def main(kind: str, rounds: int, apart: int, file: str) -> None:
    optimization.optimize = marked
    began = time.process_time()
    found = FOUND[kind](rounds, apart)
    jax.block_until_ready(jax.tree.leaves(found))
    whole = time.process_time() - began
    with jax.enable_x64():
        np.save(file, np.asarray(AS_MATRIX.get(kind, lambda c, t: c)(found, rounds), dtype=np.float64))
    run = (MARKS[-1] - MARKS[0]) * len(MARKS) / (len(MARKS) - 1)
    print(json.dumps({"seconds": whole, "compiled": run, "steps": len(MARKS)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
