"""Which method runs on which federation, in which order, and what is kept of several repeats. Pure; no imports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One method on one workload, `rounds` of it after the warm-up; without a bar it repeats only if time is left."""

    workload: str
    peer: str
    method: str
    rounds: int
    barred: bool = True

    @property
    def key(self) -> tuple[str, str, str]:
        return self.workload, self.peer, self.method


OURS, PAIR, BARE = ("sordino_fl", "run"), ("sordino_fl", "run, 2 workers"), ("bare", "by hand")
INEXACT, PLAIN = ("sordino_fl", "run, exact=False"), ("sordino_fl", "run, not compiled")
PFL, FLOWER, FLOWER1 = ("pfl", "FedAvg"), ("flwr", "simulation, 2 CPUs"), ("flwr", "simulation, 1 CPU")
WOVEN, WOVEN_PFL = ("sordino_fl", "run, banded"), ("pfl", "FedAvg, banded")
JOBS = (
    Job("w1", *OURS, 60),
    Job("w1", *BARE, 60),
    Job("w1", *PFL, 3),
    Job("w1", *WOVEN, 60),
    Job("w1", *WOVEN_PFL, 3),
    Job("w1", *FLOWER, 3),
    Job("w2", *OURS, 2),
    Job("w2", *BARE, 2),
    Job("w2", *PFL, 2),
    Job("w3", *OURS, 2),
    Job("w3", *BARE, 2),
    Job("w3", *PFL, 2),
    Job("w4", *OURS, 2),
    Job("w4", *BARE, 2),
    Job("w4", *PFL, 2),
    *(Job(work, *who, 3) for work in ("w2x", "w3x") for who in (OURS, PAIR)),
    Job("w6", *INEXACT, 3),
    Job("w6", *PFL, 1),
    Job("w6", *OURS, 1, barred=False),
    *(Job(work, *PLAIN, rounds, barred=False) for work, rounds in (("w1", 60), ("w2", 2), ("w3", 2))),
    Job("w2", *FLOWER, 2, barred=False),
    Job("w3", *FLOWER, 2, barred=False),
    Job("w4", *FLOWER, 2, barred=False),
    Job("w1", *FLOWER1, 3, barred=False),
)


def turns(repeats: int, jobs: tuple[Job, ...] = JOBS) -> Iterator[Job]:
    """The repeats of the jobs with a bar, in turn, then those of the others, while time is left."""
    for barred in (True, False):
        for _ in range(repeats):
            yield from (job for job in jobs if job.barred == barred)


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The better of two repeats, figure by figure; an error does not wipe out what was measured before it."""
    repeats = before.get("repeats", 0) + ("seconds" in found)
    if "seconds" not in found or "seconds" not in before:
        return {**before, **found, "repeats": repeats}
    seconds = {name: min(value, before["seconds"][name]) for name, value in found["seconds"].items()}
    return {**before, **found, "seconds": seconds, "repeats": repeats}


def rows(found: dict[tuple[str, str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """What is kept of every method: its least seconds, and how many times as long as ours they are."""
    kept = []
    for (workload, peer, method), entry in found.items():
        ours = found.get((workload, *OURS), {}).get("seconds", {})
        own = entry.get("seconds", {})
        ratio = {name: round(own[name] / ours[name], 4) for name in ours if name in own}
        plain = {name: value for name, value in entry.items() if name != "versions"}
        kept.append({"workload": workload, "peer": peer, "method": method, "ratio": ratio, **plain})
    return kept


def joined(before: dict[str, Any], now: dict[str, Any], only: list[str]) -> dict[str, Any]:
    """What was kept, with the workloads `only` measured anew: a ratio is always inside one call."""
    fresh = {(row["workload"], row["peer"], row["method"]): row for row in now["rows"] if "seconds" in row}
    kept = [fresh.get((row["workload"], row["peer"], row["method"]), row) for row in before["rows"]]
    return {**before, "versions": {**before["versions"], **now["versions"]}, "rows": kept, "anew": sorted(only)}
