"""Compiled clipped gradients of linear models, for sweeps in grid.py: sums over records that many runs share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sordino.kernels import compiled
from sordino.kernels.linear import ONE, ZERO, slope


@compiled
def clipped(
    x: Any, y: Any, rows: Any, weight: Any, bias: Any, sizes: Any, loss: Any, ball: Any, out: Any, order: Any
) -> None:
    """out[k] = sum over client k's rows of the record's gradient, pulled into the ball; out [m, o d (+ o)].

    One record's gradient is r (x, 1)^T, of norm ||r|| ||(x, 1)||; `sizes` [n] are ||(x, 1)|| of the table's records.
    x is the flat table, each record filled up with zeros to a multiple of 8. ball = (clip_norm, norm, smallest factor
    that keeps its digits). Clients go in `order`: those that share records best follow each other, while the records
    are in the cache.
    """
    outputs, wide = weight.shape[1], len(x) // len(sizes)
    w, total = np.empty(outputs * wide, np.float32), np.empty(outputs * wide, np.float32)
    z, offset = np.empty((1, outputs), np.float32), np.empty(outputs, np.float32)
    for k in order:
        _fill(weight, k, wide, w, total, offset)
        for i in range(rows.shape[1]):
            row = rows[k, i]
            record = x[row * wide : (row + 1) * wide]
            for o in range(outputs):
                z[0, o] = bias[k, o] + _dot(record, w[o * wide : (o + 1) * wide])
            slope(z, 0, y, row, loss, -ONE)
            if _pull(z, np.float64(sizes[row]), ball):
                for o in range(outputs):
                    part, own = z[0, o], total[o * wide : (o + 1) * wide]
                    offset[o] += part
                    for d in range(wide):
                        own[d] += part * record[d]
        _hand_over(total, offset, weight.shape[2], out, k)


@compiled
def _fill(weight: Any, k: int, wide: int, w: Any, total: Any, offset: Any) -> None:
    """Client k's weights, filled up like the records; sums that begin at zero."""
    for o in range(weight.shape[1]):
        offset[o] = ZERO
        for d in range(wide):
            w[o * wide + d] = weight[k, o, d] if d < weight.shape[2] else ZERO
            total[o * wide + d] = ZERO


@compiled
def _dot(x: Any, w: Any) -> Any:
    total = ZERO
    for d in range(x.size):
        total += x[d] * w[d]
    return total


@compiled
def _hand_over(total: Any, offset: Any, inputs: int, out: Any, k: int) -> None:
    outputs = len(offset)
    for o in range(outputs):
        for d in range(inputs):
            out[k, o * inputs + d] = total[o * (len(total) // outputs) + d]
        if out.shape[1] > outputs * inputs:
            out[k, outputs * inputs + o] = offset[o]


@compiled
def _pull(r: Any, size: Any, ball: Any) -> bool:
    """r[0] min(1, clip norm / (||r[0]|| size)), in place; False where nothing is left, or the norm is not finite."""
    clip_norm, norm, floor = ball
    total, top = 0.0, 0.0
    for o in range(r.shape[1]):
        entry = abs(np.float64(r[0, o]))
        total += entry * entry if norm == 2 else entry
    scale = factor((math.sqrt(total) if norm == 2 else total) * size, clip_norm, floor)
    if scale == ZERO:
        return False
    for o in range(r.shape[1]):
        r[0, o] *= scale
        top = max(top, abs(np.float64(r[0, o])))
    return bool(top >= floor)


@compiled
def factor(length: Any, clip_norm: Any, floor: Any) -> Any:
    """`factors` of parts/clipping.py for one record; the clip norm is the slack inside the ball already."""
    if not length < math.inf:
        return ZERO
    scale = np.float32(clip_norm / length) if length > clip_norm else ONE
    return scale if scale >= floor else ZERO
