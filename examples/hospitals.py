"""Four hospitals train one model; nobody trusts anybody, and every hospital has an epsilon of its own.

Needs the UCI heart disease files: downloaded on first use, or read from $SORDINO_DATA.
"""

from __future__ import annotations

import numpy as np

from sordino import recipes, train
from sordino.accounting.rounding import upto
from sordino.config import TaskSpec
from sordino.models import Logistic

HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "Long Beach")
EPSILONS = (1.0, 2.0, 4.0, 8.0)


def main() -> None:
    """Train, then print the accuracy and four certificates."""
    task = TaskSpec(dataset="heart_disease", model=Logistic()).build(4, seed=0)
    sizes = tuple(int(size) for size in np.diff(task.clients.offsets))
    plan = recipes.silo(sizes=sizes, epsilons=EPSILONS)
    done = train(plan, task)
    print(f"accuracy {done.history[-1]['accuracy']:.3f} on {len(task.test or ())} patients of all four hospitals")
    for entry in done.certificate["adversaries"][-1]["silos"]:
        (silo,) = entry["silos"]
        print(
            f"{HOSPITALS[silo]:<12} {sizes[silo]:>4} records: epsilon {upto(entry['epsilon'])} at delta "
            f"{upto(entry['delta'])} ({entry['relation']}), even to one who reads every message"
        )


if __name__ == "__main__":
    main()
