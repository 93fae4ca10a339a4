"""Ratios to the calibration kernel, now and as stored. Pure; the standard library alone."""

from __future__ import annotations

TOLERANCE = 1.35  # a workload that got slower by more than this factor is a regression
Ratios = dict[str, float]


def regressions(found: Ratios, stored: Ratios, tolerance: float = TOLERANCE) -> list[str]:
    """Names of what got slower than the baseline allows; what has no baseline cannot regress."""
    return [name for name, ratio in found.items() if name in stored and ratio > tolerance * stored[name]]


def table(found: Ratios, stored: Ratios, tolerance: float = TOLERANCE) -> str:
    """One line per workload: times the kernel now, in the baseline, and now over then."""
    slower = regressions(found, stored, tolerance)
    lines = [f"{'workload':<14} {'now':>9} {'baseline':>9} {'change':>7}"]
    for name, ratio in found.items():
        then = f"{stored[name]:9.3f} {ratio / stored[name]:7.2f}" if name in stored else f"{'none':>9} {'':7}"
        lines.append(f"{name:<14} {ratio:9.3f} {then}{'  SLOWER' if name in slower else ''}")
    missing = [name for name in stored if name not in found]
    return "\n".join([*lines, *(f"{name:<14} is in the baseline, but was not measured" for name in missing)])


def least(pairs: list[tuple[float, float]]) -> float:
    """Of turns (workload, kernel) in seconds: the least of one over the least of the other."""
    return min(work for work, _ in pairs) / min(kernel for _, kernel in pairs)
