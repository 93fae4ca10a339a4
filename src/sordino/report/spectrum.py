"""What smoothing does to noise and update, by frequency along a tensor.

    A = I + s L on a cycle of d coordinates:   P_after(w) = P_before(w) / (1 + 2 s (1 - cos w))^2

Noise is white before, so both of its spectra are known exactly. Of the update there is what was released: the step that
the model took in the last round, noise included, as smoothing left it; A is invertible, so also as it was before. Both
are functions of two released models, and cost nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import UserError
from sordino.loop import mean_std
from sordino.parts.encoding import LaplacianSmoothing
from sordino.plan import State
from sordino.report.subject import Subject

BINS = 16
Floats = NDArray[np.float64]


def gain(strength: float, frequency: Floats) -> Floats:
    """(1 + 2 s (1 - cos 2 pi f))^-2: what is left of the power at f cycles per coordinate."""
    return np.asarray((1 + 2 * strength * (1 - np.cos(2 * np.pi * frequency))) ** -2.0)


def spectrum(subject: Subject) -> dict[str, Any] | None:
    """Power by frequency, before and after smoothing; None where a plan does not smooth."""
    steps = subject.plan.postprocess
    smoothing = steps[0] if len(steps) == 1 else None  # all that is done to the noised mean
    if not isinstance(smoothing, LaplacianSmoothing) or smoothing.strength <= 0:
        return None
    frequencies = np.linspace(0, 0.5, 65)
    noise = _noise_power(subject)
    level, after = 1.0 if noise is None else noise, gain(smoothing.strength, frequencies)
    found: dict[str, Any] = {
        "strength": smoothing.strength,
        "in_units": "1 = noise before smoothing" if noise is None else "squares of the model's own units",
    }
    powers = {"before": [level] * len(frequencies), "after": (level * after).tolist()}
    found["noise"] = {"frequency": frequencies.tolist(), **powers}
    return {**found, "update": None if noise is None or subject.last is None else _update(subject, smoothing)}


def _noise_power(subject: Subject) -> float | None:
    """Variance of the noise in one coordinate of the last round's mean, where it is the same in all of them."""
    plan, t = subject.plan, subject.plan.rounds - 1
    state = State(t, {}) if subject.last is None else subject.last.before
    cohort = subject.cohorts[-1] if subject.cohorts else np.arange(max(1, round(plan.clients.expected)))
    try:
        std = mean_std(plan, cohort, len(cohort), plan.public(t, 0, state.public_state))
    except (UserError, KeyError):
        return None
    return None if isinstance(std, Tensor) or not np.isfinite(std) else float(std) ** 2


def _update(subject: Subject, smoothing: LaplacianSmoothing) -> dict[str, Any] | None:
    """The last released step, by frequency; None where the server does more than to subtract it."""
    plan, last = subject.plan, subject.last
    lr = None if last is None else plan.server.plain_lr(last.before.t)
    if last is None or lr is None:
        return None
    shapes = last.shapes(plan.server.result(last.after.memory))
    if shapes is None:
        return None
    step = (last.before.memory["params"].double() - last.after.memory["params"].double()) / lr
    parts = torch.split(step, [shape.numel() for shape in shapes])
    power = [_periodogram(one, shape, smoothing.order) for one, shape in zip(parts, shapes, strict=True)]
    where = np.concatenate([frequencies for frequencies, _ in power])
    after = np.concatenate([values for _, values in power])
    places, inside = _binned(where, after)
    _, before = _binned(where, after / gain(smoothing.strength, where))
    return {"round": last.after.t, "frequency": places.tolist(), "before": before.tolist(), "after": inside.tolist()}


def _periodogram(part: Tensor, shape: torch.Size, order: tuple[int, ...]) -> tuple[Floats, Floats]:
    """|DFT|^2 / d of a tensor round its cycle: as many values as coordinates, their mean is the mean square."""
    turned = part.view(shape).permute(order).reshape(-1) if order and len(shape) == 4 else part
    values = np.abs(np.fft.fft(turned.numpy())) ** 2 / len(turned)
    return np.abs(np.fft.fftfreq(len(turned))), np.asarray(values)


def _binned(where: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Means over equal ranges of frequency; a range without any is left out."""
    place = np.minimum((where * 2 * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    sums, spots = np.bincount(place, values, BINS), np.bincount(place, where, BINS)
    kept = count > 0
    return spots[kept] / count[kept], sums[kept] / count[kept]
