"""Kept bins: the price of a whole run in which each client has one secret bin of b, kept in all passes.

Client u is in rounds J, J + b, J + 2b, ... of T, its bin J uniform and secret; noise is C^-1 Z, Z of std s (C = I:
independent). Under Q, without u, the likelihood ratio of the run is S = (1/b) sum_j exp(M_j - <M_j>/2), where the
martingales M_j have predictable covariations <M_i, M_j> <= G_ij / s^2:

    G = sum_t a_t a_t^T,    a_tj = sum over rounds r = j mod b of |C_tr|

Kahane's inequality: for convex phi, E phi(S) does not fall if covariances grow entry by entry. So S is dominated by a
Gaussian S with d on the diagonal and c elsewhere, d and c the largest entries of G: a release N(sqrt(c), s^2) beside
one pass of random allocation onto b bins at sensitivity sqrt(d - c). By convexity the same holds for n of the bins,
evenly spaced, averaged over rotations, with the largest c among them.

Guarantee: `kept_bins` dominates the run, add/remove or zero out, whatever the directions of the messages and
however later ones depend on earlier releases (proof: docs/privacy.md, "Kept bins"). A few n are tried, each a bound.
"""

from __future__ import annotations

import math

import numpy as np

from sordino.accounting.events import GaussianNoise, KeptBins
from sordino.accounting.sensitivity import Floats

_SLACK = 1e-9  # relative: more than the rounding of C and of the sums
_FEW, _ORDERS = 4, (2, 3, 4, 6, 8, 12, 20, 30)  # so few choices are all tried, else the best at each Renyi order


def bin_rows(strategy: Floats, bins: int) -> Floats:
    """Return a [rounds, bins]: the sum of |C_tr| over rounds r of each bin, for a lower triangular C."""
    size = np.abs(strategy)
    return np.stack([size[:, j::bins].sum(axis=1) for j in range(bins)], axis=1)


def gram_of_bins(rows: Floats) -> Floats:
    """Return G = sum_t a_t a_t^T."""
    return np.asarray(rows.T @ rows)


def largest_entries(gram: Floats, kept: int) -> tuple[float, float]:
    """Return (d, c): the largest diagonal entry, and the largest of two among `kept` evenly spaced bins."""
    places = np.arange(len(gram))
    step = len(gram) // kept
    others = [float(gram[places, (places + k * step) % len(gram)].max()) for k in range(1, kept)]
    return float(gram.diagonal().max()), max(others, default=0.0)


def kept_bins(gram: Floats, noise_multiplier: float) -> KeptBins | GaussianNoise:
    """Return the event of the run; with a single bin, or next to no noise, that of one who knows the bin."""
    most = float(gram.diagonal().max()) * (1 + _SLACK)
    known = GaussianNoise(noise_multiplier / math.sqrt(most))
    if len(gram) == 1 or not noise_multiplier > 0:
        return known
    spacings = range(1, len(gram) // 2 + 1)
    options = {len(gram) // step: largest_entries(gram, len(gram) // step) for step in spacings}
    best = {min(options, key=lambda n, a=a: _divergence(*options[n], n, noise_multiplier, a)) for a in _ORDERS}  # type: ignore[misc]
    kept = tuple(sorted(options if len(options) <= _FEW else best, reverse=True))
    own = tuple(noise_multiplier / math.sqrt(most - options[n][1]) for n in kept)
    shared = tuple(noise_multiplier / math.sqrt(options[n][1]) if options[n][1] > 0 else math.inf for n in kept)
    return KeptBins(len(gram), known, kept, own, shared)


def _divergence(d: float, c: float, kept: int, noise_multiplier: float, order: int) -> float:
    """Estimate the Renyi divergence of a choice, by its terms of order 2 and of the highest order; only to choose."""
    own, power = (d - c) / noise_multiplier**2, order * (order - 1) / 2
    logs = [0.0, math.log(power / kept) + min(own, 1e9), (1 - order) * math.log(kept) + min(power * own, 1e12)]
    return order * c / (2 * noise_multiplier**2) + float(np.logaddexp.reduce(logs)) / (order - 1)
