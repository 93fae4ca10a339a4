"""Who runs whom: a cohort cut into equal loads, the same cut on every rank without a word between them."""

from __future__ import annotations

from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from sordino.parts.local import LocalSolver
from sordino.parts.records import AllRecords

Places = NDArray[np.int64]  # positions in a cohort


def costs(local: LocalSolver, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Records that each client reads in one round, and one for its own sake: public sizes, whole numbers."""
    epochs, steps, batch = (getattr(local, name, None) for name in ("epochs", "steps", "batch"))
    whole = epochs is not None or batch is None or isinstance(local.reads, AllRecords)
    read = sizes if whole else np.minimum(sizes, int(batch or 0))
    return np.add(1, read * int(epochs or steps or 1), dtype=np.int64)


def shares(loads: NDArray[np.int64], ranks: int) -> list[Places]:
    """Longest first, each to the rank with the least to do (Graham 1969: within 4/3 of the best cut).

    Ties go to the earlier client and the lower rank, so all ranks find the same cut.
    """
    owner, busy = np.empty(len(loads), dtype=np.int64), [(0, rank) for rank in range(ranks)]
    for place in np.argsort(-loads, kind="stable"):
        load, rank = busy[0]
        heapreplace(busy, (load + int(loads[place]), rank))
        owner[place] = rank
    return [np.flatnonzero(owner == rank) for rank in range(ranks)]
