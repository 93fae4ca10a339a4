"""Compiled local SGD of linear models, one client after the other; called by `LinearClients` in engines/.

For every client and batch:   z = W x + c;   r = d loss / d z;   W <- (1 - lr decay) W - lr mean r x^T;   c likewise

Both products are BLAS's, by numba's np.dot, on the records of a batch side by side. Everything else is plain loops:
whole-array expressions would take numba several times as long to compile.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sordino.kernels import compiled

CROSS_ENTROPY, MSE, LOGISTIC, ABSOLUTE, HINGE, QUANTILE = range(6)  # CODES of parts/losses.py
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)


@compiled
def descend(x: Any, y: Any, rows: Any, weight: Any, bias: Any, has_bias: bool, pace: Any, loss: Any) -> None:
    """Run every client's SGD steps in place: weight [m, o, d], bias [m, o]; rows [m, steps, b] index x, y (-1: none).

    pace = (learning rate, weight decay); loss = (number of the loss, tau of the quantile loss).
    """
    lr, decay = pace
    clients, steps, width = rows.shape
    outputs = weight.shape[1]
    batch, records = np.empty(width, np.int64), np.empty((width, weight.shape[2]), np.float32)
    z, move = np.empty((width, outputs), np.float32), np.empty(weight.shape[1:], np.float32)
    for k in range(clients):
        for s in range(steps):
            b = 0
            for i in range(width):
                if rows[k, s, i] >= 0:
                    batch[b] = rows[k, s, i]
                    records[b] = x[batch[b]]
                    b += 1
            if b:
                np.dot(records[:b], weight[k].T, z[:b])
                for i in range(b):
                    for o in range(outputs):
                        z[i, o] += bias[k, o]
                    slope(z, i, y, batch[i], loss, lr / np.float32(b))
                np.dot(z[:b].T, records[:b], move)
                for o in range(outputs):
                    for d in range(move.shape[1]):
                        weight[k, o, d] = (ONE - lr * decay) * weight[k, o, d] + move[o, d]
                if has_bias:
                    for o in range(outputs):
                        total = (ONE - lr * decay) * bias[k, o]
                        for i in range(b):
                            total += z[i, o]
                        bias[k, o] = total


@compiled
def slope(z: Any, i: int, y: Any, row: int, loss: Any, pace: Any) -> None:
    """Replace the scores z[i] of one record by -lr * d loss / d z."""
    outputs = z.shape[1]
    if loss[0] == CROSS_ENTROPY:
        top, total = z[i, 0], ZERO
        for o in range(outputs):
            top = max(top, z[i, o])
        for o in range(outputs):
            z[i, o] = math.exp(z[i, o] - top)
            total += z[i, o]
        for o in range(outputs):
            z[i, o] *= -pace / total
        z[i, int(y[row, 0])] += pace
        return
    for o in range(outputs):
        z[i, o] = -pace / np.float32(outputs) * _score_slope(z[i, o], np.float32(y[row, o]), loss[0], loss[1])


@compiled
def _score_slope(z: Any, y: Any, loss: int, tau: Any) -> Any:
    """Return d loss / d z for one score z; the loss is a mean over scores, and the caller divides by their number."""
    if loss == MSE:
        return TWO * (z - y)
    if loss == LOGISTIC:
        return ONE / (ONE + math.exp(-z)) - y
    if loss == HINGE:
        side = TWO * y - ONE
        return -side if side * z < ONE else ZERO
    above = ONE - tau if loss == QUANTILE else ONE
    below = tau if loss == QUANTILE else ONE
    return above if z > y else -below if z < y else ZERO
