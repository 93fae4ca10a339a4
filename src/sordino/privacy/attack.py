"""What a certificate means for an attacker: the best true-positive rate at a false-positive rate, and the AUC.

Any test that tells two neighbours apart with false-positive rate a has true-positive rate at most
min over e of exp(e) * a + delta(e) (Wasserman & Zhou 2010; Kairouz et al. 2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sordino.parts.events import Unprotected
from sordino.privacy import accounting
from sordino.privacy.bill import Line

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ceiling:
    """The most that any membership test can reach."""

    true_positives: float  # at 1% false positives
    auc: float


def ceiling(line: Line, at: float = 0.01) -> Ceiling:
    """Ceilings for one line of a bill; 1 and 1 where there is no guarantee."""
    if any(isinstance(event, Unprotected) for event, count in line.entries if count):
        return Ceiling(1.0, 1.0)
    mu = accounting.gaussian_mu(line.entries, line.relation)
    if mu is not None:
        return Ceiling(power(mu, at), _phi(mu / math.sqrt(2)))
    found, above = _from_curve(line, at), accounting.dominating_mu(line.entries, line.relation)
    return Ceiling(min(found.true_positives, power(above, at)), min(found.auc, _phi(above / math.sqrt(2))))


def power(mu: float, at: float) -> float:
    """Phi(Phi^-1(at) + mu): the exact ceiling under mu-GDP."""
    from scipy.special import ndtri

    return _phi(float(ndtri(at)) + mu)


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _from_curve(line: Line, at: float) -> Ceiling:
    epsilons = np.sinh(np.linspace(-6, 6, 3001)) / 10  # within 20 of 0, and close together where epsilon is small
    deltas = np.asarray(accounting.deltas_at(line.entries, line.relation, epsilons.tolist()))
    grid = np.union1d(np.geomspace(1e-6, 1, 600), np.linspace(0, 1, 600))
    rates = true_positives(grid, epsilons, deltas)
    area = float(np.sum(np.diff(grid) * rates[1:]))  # the curve rises, so right ends give an upper sum
    return Ceiling(float(true_positives(np.asarray([at]), epsilons, deltas)[0]), min(1.0, area))


def true_positives(false_positives: Floats, epsilons: Floats, deltas: Floats) -> Floats:
    """min over e of exp(e) * a + delta(e), at most 1."""
    bounds = np.exp(epsilons)[None, :] * false_positives[:, None] + deltas[None, :]
    return np.asarray(np.minimum(1.0, bounds.min(axis=1)), dtype=np.float64)
