"""Compiled local SGD of linear models, one client after the other; `LinearClients` in engines/ calls it.

For every client and batch:   z = W x + c;   r = d loss / d z;   W <- (1 - lr decay) W - lr mean r x^T;   c likewise

x is a record (read without a copy), z its scores, W the weights and c the bias of the client's model.

`_scores` and `_move` are unrolled by hand: on workload W1 of benchmarks/own (784 x 10, batches of 10) plain loops
take 1.43 times as long, and numba's np.dot 1.13 to 1.16 times. Everything else is plain loops: whole-array expressions
would take numba several times as long to compile.
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
    """Run the SGD steps of m clients in place, on weight [m, o, d] and bias [m, o] of linear models.

    `rows` [m, steps, b] are row numbers of x and y (-1: none); pace = (learning rate, weight decay); loss = (number of
    the loss, tau of the quantile loss).
    """
    lr, decay = pace
    clients, steps, width = rows.shape
    outputs = weight.shape[1]
    batch, z = np.empty(width, np.int64), np.empty((width + 1, outputs), np.float32)
    for k in range(clients):
        for s in range(steps):
            b = 0
            for i in range(width):
                if rows[k, s, i] >= 0:
                    batch[b] = rows[k, s, i]
                    b += 1
            if b:
                _scores(x, batch, b, weight[k], bias[k], z)
                for i in range(b):
                    slope(z, i, y, batch[i], loss, lr / np.float32(b))
                _move(x, batch, b, z, weight[k], ONE - lr * decay)
                if has_bias:
                    for o in range(outputs):
                        total = (ONE - lr * decay) * bias[k, o]
                        for i in range(b):
                            total += z[i, o]
                        bias[k, o] = total


@compiled
def _scores(x: Any, batch: Any, b: int, weight: Any, bias: Any, z: Any) -> None:
    """Compute the scores z = W x + c, two records and five outputs at a time."""
    outputs, inputs = weight.shape
    for i in range(0, b, 2):
        j = batch[i]
        k = batch[min(i + 1, b - 1)]
        for o in range(0, outputs - 4, 5):
            a0 = a1 = a2 = a3 = a4 = b0 = b1 = b2 = b3 = b4 = ZERO
            for d in range(inputs):
                p = x[j, d]
                q = x[k, d]
                a0 += p * weight[o, d]
                a1 += p * weight[o + 1, d]
                a2 += p * weight[o + 2, d]
                a3 += p * weight[o + 3, d]
                a4 += p * weight[o + 4, d]
                b0 += q * weight[o, d]
                b1 += q * weight[o + 1, d]
                b2 += q * weight[o + 2, d]
                b3 += q * weight[o + 3, d]
                b4 += q * weight[o + 4, d]
            z[i, o] = a0 + bias[o]
            z[i, o + 1] = a1 + bias[o + 1]
            z[i, o + 2] = a2 + bias[o + 2]
            z[i, o + 3] = a3 + bias[o + 3]
            z[i, o + 4] = a4 + bias[o + 4]
            z[i + 1, o] = b0 + bias[o]
            z[i + 1, o + 1] = b1 + bias[o + 1]
            z[i + 1, o + 2] = b2 + bias[o + 2]
            z[i + 1, o + 3] = b3 + bias[o + 3]
            z[i + 1, o + 4] = b4 + bias[o + 4]
        for o in range(outputs - outputs % 5, outputs):
            a0 = b0 = ZERO
            for d in range(inputs):
                a0 += x[j, d] * weight[o, d]
                b0 += x[k, d] * weight[o, d]
            z[i, o] = a0 + bias[o]
            z[i + 1, o] = b0 + bias[o]


@compiled
def slope(z: Any, i: int, y: Any, row: int, loss: Any, pace: Any) -> None:
    """Replace the scores z[i] of one record by -pace * d loss / d z."""
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
    """Return d loss / d z of one score z with target y."""
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


@compiled
def _move(x: Any, batch: Any, b: int, r: Any, weight: Any, keep: Any) -> None:
    """Update the weights W <- keep W + sum r x^T, five records and two outputs at a time; absent records have r = 0."""
    outputs, inputs = weight.shape
    if keep != ONE:
        for o in range(outputs):
            for d in range(inputs):
                weight[o, d] *= keep
    last = b - 1
    for i in range(0, b, 5):
        x0, x1, x2 = batch[i], batch[min(i + 1, last)], batch[min(i + 2, last)]
        x3, x4 = batch[min(i + 3, last)], batch[min(i + 4, last)]
        for o in range(0, outputs, 2):
            u = min(o + 1, outputs - 1)
            p0, p1, p2 = r[i, o], _at(r, i + 1, b, o), _at(r, i + 2, b, o)
            p3, p4 = _at(r, i + 3, b, o), _at(r, i + 4, b, o)
            q0, q1, q2 = r[i, u], _at(r, i + 1, b, u), _at(r, i + 2, b, u)
            q3, q4 = _at(r, i + 3, b, u), _at(r, i + 4, b, u)
            for d in range(inputs):
                v0, v1, v2, v3, v4 = x[x0, d], x[x1, d], x[x2, d], x[x3, d], x[x4, d]
                first = weight[o, d] + p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3 + p4 * v4
                weight[u, d] = weight[u, d] + q0 * v0 + q1 * v1 + q2 * v2 + q3 * v3 + q4 * v4
                weight[o, d] = first


@compiled
def _at(r: Any, i: int, b: int, o: int) -> Any:
    return r[i, o] if i < b else ZERO
