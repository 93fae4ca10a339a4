"""Closed forms of Laplacian smoothing: how much noise and how much signal it removes. No certificate uses them.

    smoothing_gamma, smoothing_beta   paper 004, Propositions 5 and 8
    effective_dimension               d_sigma of papers 000 and 004
    smoothing_risk                    paper 000, Proposition 1

A = I + s L, with L the Laplacian of a cycle of d coordinates and s the smoothing strength. Smoothing is
post-processing: it changes these numbers and never the epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sordino_papers.theory.central_noise import require, require_count


def _cycle(strength: float, dimension: int) -> tuple[float, float]:
    """(4 strength + 1, log a^dimension), with a = (2s+1-sqrt(4s+1))/(2s) = exp(-2 asinh(1/(2 sqrt s)))."""
    require(0.0 <= strength < math.inf, f"strength = {strength:g}", "a finite strength >= 0")
    require_count(dimension=dimension)
    log_root = -2.0 * math.asinh(0.5 / math.sqrt(strength)) if strength > 0.0 else -math.inf
    return 4.0 * strength + 1.0, dimension * log_root


def smoothing_gamma(*, strength: float, dimension: int) -> float:
    """The fraction of the dimension that smoothing keeps: trace(A^-1)/d on a cycle of d coordinates.

        gamma = 1/d sum_i 1/(1 + 2s(1 - cos(2 pi i/d))) = (1 + a^d) / ((1 - a^d) sqrt(4s + 1))

    a = (2s + 1 - sqrt(4s + 1))/(2s). Paper 004, Proposition 5. As d grows, gamma tends to 1/sqrt(4s + 1), not to 0
    as stated there.
    """
    width, log_power = _cycle(strength, dimension)
    return (1.0 + math.exp(log_power)) / (-math.expm1(log_power) * math.sqrt(width))


def smoothing_beta(*, strength: float, dimension: int) -> float:
    """The fraction of the noise energy that smoothing keeps: trace(A^-2)/d on a cycle of d coordinates.

        beta = 1/d sum_i 1/(1 + 2s(1 - cos(2 pi i/d)))^2
             = (2s + 1)/(4s + 1)^(3/2) * (1 + a^d)/(1 - a^d) + 2d/(4s + 1) * a^d/(1 - a^d)^2

    Equal to the formula of paper 004, Proposition 8, and stable for large and small strengths.
    """
    width, log_power = _cycle(strength, dimension)
    power, rest = math.exp(log_power), -math.expm1(log_power)
    body = (2.0 * strength + 1.0) / (width * math.sqrt(width)) * (1.0 + power) / rest
    return body + 2.0 * dimension / width * power / rest**2


def effective_dimension(*, strength: float, dimension: int) -> float:
    """d_sigma = sum_i 1/(1 + 2s(1 - cos(2 pi i/d))) = d gamma: how many coordinates of noise a bound still pays for."""
    return dimension * smoothing_gamma(strength=strength, dimension=dimension)


@dataclass(frozen=True)
class SmoothingRisk:
    """Mean squared error of a smoothed noisy signal: `bias` (squared) plus `variance`."""

    bias: float
    variance: float

    @property
    def total(self) -> float:
        return self.bias + self.variance


def smoothing_risk(signal: npt.ArrayLike, *, strength: float, std: float) -> SmoothingRisk:
    """Bias and variance of A^-1 (signal + N(0, std^2 I)) as an estimate of the signal.

        bias = sum_i (s l_i/(1 + s l_i))^2 <v, e_i>^2,   variance = std^2 sum_i 1/(1 + s l_i)^2

    l_i = 2 - 2 cos(2 pi i/d), e_i the Fourier basis of the cycle. Paper 000, Proposition 1.
    """
    values = np.asarray(signal, dtype=np.float64)
    require(values.ndim == 1 and values.size > 0, f"a signal of shape {values.shape}", "one non-empty axis", "flatten")
    require(bool(np.isfinite(values).all()), "a signal with non-finite entries", "finite entries")
    require(0.0 <= std < math.inf, f"std = {std:g}", "a finite std >= 0")
    variance = std**2 * values.size * smoothing_beta(strength=strength, dimension=values.size)
    lifted = strength * (2.0 - 2.0 * np.cos(2.0 * np.pi * np.arange(values.size) / values.size))
    energy = np.abs(np.fft.fft(values)) ** 2 / values.size
    return SmoothingRisk(float(np.sum((lifted / (1.0 + lifted)) ** 2 * energy)), variance)
