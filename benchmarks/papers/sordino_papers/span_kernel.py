"""The gradient of a net i-h-o (ReLU, cross-entropy) for a chunk of clients, record by record in machine code.

Coordinates of records in their own span are triangular: a record has few that are not zero, and zeros are skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sordino.kernels import compiled

ZERO = np.float32(0)


@compiled
def gradient(w: Any, x: Any, y: Any, real: Any, hidden: int, outputs: int, slope: Any) -> None:
    """Mean gradients into slope [m, d] at rows w [m, d] = (W1 [h, i], c1, W2 [o, h], c2); x [m, b, i], real [m, b]."""
    clients, records, inputs = x.shape
    first, turned = np.empty((inputs, hidden), np.float32), np.empty((inputs, hidden), np.float32)
    a, back, score = np.empty(hidden, np.float32), np.empty(hidden, np.float32), np.empty(outputs, np.float32)
    bias, second = hidden * inputs, hidden * inputs + hidden
    last = second + outputs * hidden
    for c in range(clients):
        count = 0
        for j in range(records):
            count += real[c, j]
        for d in range(w.shape[1]):
            slope[c, d] = ZERO
        if count == 0:
            continue
        share = np.float32(1) / np.float32(count)
        for h in range(hidden):
            for i in range(inputs):
                first[i, h] = w[c, h * inputs + i]
                turned[i, h] = ZERO
        for j in range(records):
            if real[c, j]:
                _forward(x[c, j], first, w[c], bias, second, last, a, score)
                _softmax(score, y[c, j], share)
                _backward(x[c, j], w[c], second, a, score, back, slope[c], bias, last, turned)
        for h in range(hidden):
            for i in range(inputs):
                slope[c, h * inputs + i] = turned[i, h]


@compiled
def _forward(x: Any, first: Any, w: Any, bias: int, second: int, last: int, a: Any, score: Any) -> None:
    """a = relu(W1 x + c1),  score = W2 a + c2."""
    inputs, hidden = first.shape
    for h in range(hidden):
        a[h] = w[bias + h]
    for i in range(inputs):
        v = x[i]
        if v != ZERO:
            for h in range(hidden):
                a[h] += v * first[i, h]
    for h in range(hidden):
        a[h] = max(a[h], ZERO)
    for o in range(len(score)):
        total = w[last + o]
        for h in range(hidden):
            total += w[second + o * hidden + h] * a[h]
        score[o] = total


@compiled
def _softmax(score: Any, label: int, share: Any) -> None:
    """score <- (softmax(score) - one at the label) * share."""
    top = score[0]
    for o in range(1, len(score)):
        top = max(top, score[o])
    total = ZERO
    for o in range(len(score)):
        score[o] = np.exp(score[o] - top)
        total += score[o]
    for o in range(len(score)):
        score[o] *= share / total
    score[label] -= share


@compiled
def _backward(
    x: Any, w: Any, second: int, a: Any, r: Any, back: Any, slope: Any, bias: int, last: int, turned: Any
) -> None:
    """dW2 += r a^T,  dc2 += r,  back = (W2^T r) * (a > 0),  dc1 += back,  dW1^T += x back^T."""
    inputs, hidden = turned.shape
    for h in range(hidden):
        back[h] = ZERO
    for o in range(len(r)):
        v, base = r[o], second + o * hidden
        slope[last + o] += v
        for h in range(hidden):
            slope[base + h] += v * a[h]
            back[h] += v * w[base + h]
    for h in range(hidden):
        back[h] = back[h] if a[h] > ZERO else ZERO
        slope[bias + h] += back[h]
    for i in range(inputs):
        v = x[i]
        if v != ZERO:
            for h in range(hidden):
                turned[i, h] += v * back[h]
