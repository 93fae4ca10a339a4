"""Convolutions and largest-of-a-window layers over images with their channels last, one record after the other.

A convolution reads entry  place_t + inside_i  of a record for position t of the kernel and entry i inside it:

    outputs           y_to  = c_o + sum_i w_io x[place_t + inside_i]
    weight_gradients  dw_io =       sum_t g_to x[place_t + inside_i]        and ||dw||^2
    input_gradients   dx[place_t + inside_i] += sum_o g_to w_io

No patch is cut out: what one record needs lies in the nearest cache. All three are sums of the same form, by `_tile`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.kernels import compiled
from sordino.kernels.vectors import above, equal, load, muladd, plus, spread, store, zeros

Floats = NDArray[np.float32]
Places = NDArray[np.int64]

FEW, MANY = 4, 16  # a tile's two sides: the least number of positions, and of channels or entries
_BLOCK = 256  # squares added up in float32; the blocks in float64


@compiled
def _tile(base: Any, s: Any, at: Any, steps: Any, v: Any, first: int, width: int, out: Any, to: int) -> None:
    """out[to + width a + e] = base_e + sum_k s[at_a + steps_k] v[first + width k + e],  a < FEW, e < MANY.

    The sums stay in registers. base: an array and where to begin in it.
    """
    p, q, r, u = at
    a, b = load(base[0], base[1]), load(base[0], base[1] + 8)
    c, d, e, f, g, h = a, b, a, b, a, b
    for k in range(steps.size):
        step = steps[k]
        left, right = load(v, first), load(v, first + 8)
        first += width
        one = spread(s, p + step)
        a, b = muladd(a, one, left), muladd(b, one, right)
        one = spread(s, q + step)
        c, d = muladd(c, one, left), muladd(d, one, right)
        one = spread(s, r + step)
        e, f = muladd(e, one, left), muladd(f, one, right)
        one = spread(s, u + step)
        g, h = muladd(g, one, left), muladd(h, one, right)
    store(out, to, a)
    store(out, to + 8, b)
    store(out, to + width, c)
    store(out, to + width + 8, d)
    store(out, to + 2 * width, e)
    store(out, to + 2 * width + 8, f)
    store(out, to + 3 * width, g)
    store(out, to + 3 * width + 8, h)


@compiled
def _square(row: Any) -> float:
    """||row||^2."""
    total = 0.0
    for start in range(0, row.size, _BLOCK):
        part = np.float32(0.0)
        for i in range(start, min(start + _BLOCK, row.size)):
            part += row[i] * row[i]
        total += float(part)
    return total


@compiled
def weight_gradients(x: Floats, g: Floats, place: Places, inside: Places, out: Floats, squares: Any) -> None:
    """x [b, E], g [b, T O]  ->  out [b, I O], squares [b]. The last tiles overlap where a side is no multiple."""
    entries, channels = inside.size, g.shape[1] // place.size
    none = np.zeros(MANY, np.float32)
    for j in range(x.shape[0]):
        image, slopes, own = x[j], g[j], out[j]
        for n in range(0, entries, FEW):
            i = min(n, entries - FEW)
            at = inside[i], inside[i + 1], inside[i + 2], inside[i + 3]
            for m in range(0, channels, MANY):
                o = min(m, channels - MANY)
                _tile((none, 0), image, at, place, slopes, o, channels, own, i * channels + o)
        squares[j] = _square(own)


@compiled
def outputs(x: Floats, w: Floats, bias: Floats, place: Places, inside: Places, out: Floats) -> None:
    """x [b, E], w [I O], bias [O]  ->  out [b, T O]."""
    positions, channels = place.size, bias.size
    for j in range(x.shape[0]):
        image, own = x[j], out[j]
        for n in range(0, positions, FEW):
            t = min(n, positions - FEW)
            at = place[t], place[t + 1], place[t + 2], place[t + 3]
            for m in range(0, channels, MANY):
                o = min(m, channels - MANY)
                _tile((bias, o), image, at, inside, w, o, channels, own, t * channels + o)


@compiled
def input_gradients(g: Floats, w: Floats, place: Places, inside: Places, run: int, out: Floats) -> None:
    """g [b, T O], w [O I]  ->  out [b, E]; `run` entries of `inside` at a time lie side by side."""
    positions, entries = place.size, inside.size
    channels = w.size // entries
    each, parts = np.arange(channels), np.empty(positions * entries, np.float32)
    none = np.zeros(MANY, np.float32)
    for j in range(g.shape[0]):
        slopes = g[j]
        for m in range(0, entries, MANY):
            i = min(m, entries - MANY)
            for n in range(0, positions, FEW):
                t = min(n, positions - FEW)
                at = t * channels, (t + 1) * channels, (t + 2) * channels, (t + 3) * channels
                _tile((none, 0), slopes, at, each, w, i, entries, parts, t * entries + i)
        _spread_out(parts, place, inside, run, out[j])


@compiled
def _spread_out(parts: Floats, place: Places, inside: Places, run: int, out: Floats) -> None:
    """out[place_t + inside_i] = sum of parts_ti."""
    out[:] = 0
    whole = run - run % 8
    for t in range(place.size):
        for i in range(0, inside.size, run):
            to, of = place[t] + inside[i], t * inside.size + i
            for k in range(0, whole, 8):
                store(out, to + k, plus(load(out, to + k), load(parts, of + k)))
            for k in range(whole, run):
                out[to + k] += parts[of + k]


@compiled
def largest(x: Floats, shape: Any, window: Any, stride: Any, counts: Floats, out: Floats, which: Floats) -> None:
    """x [b, H W C] -> the largest in each window [b, h w C], not-a-number above all; and which (the first) it was.

    shape = (W, C, h, w), of which C is a multiple of 8; counts = 0, 1, 2, ...
    """
    width, channels, high, wide = shape
    for j in range(x.shape[0]):
        image, own, where = x[j], out[j], which[j]
        for y in range(high):
            for z in range(wide):
                start, to = (y * stride[0] * width + z * stride[1]) * channels, (y * wide + z) * channels
                for c in range(0, channels, 8):
                    _largest_of(image, start + c, width * channels, channels, window, counts, own, where, to + c)


@compiled
def _largest_of(
    x: Any, start: int, down: int, right: int, window: Any, counts: Any, out: Any, which: Any, to: int
) -> None:
    """Eight channels of one window."""
    best, found = load(x, start), zeros()
    for a in range(window[0]):
        for b in range(window[1]):
            value, count = load(x, start + a * down + b * right), spread(counts, a * window[1] + b)
            found = above(value, best, count, found)
            best = above(value, best, value, best)
    store(out, to, best)
    store(which, to, found)


@compiled
def largest_back(g: Floats, which: Floats, shape: Any, window: Any, stride: Any, counts: Floats, out: Floats) -> None:
    """out [b, H W C] = the sum of g [b, h w C] over the windows in which an entry was the largest."""
    width, channels, high, wide = shape
    for j in range(g.shape[0]):
        slopes, where, own = g[j], which[j], out[j]
        own[:] = 0
        for y in range(high):
            for z in range(wide):
                start, of = (y * stride[0] * width + z * stride[1]) * channels, (y * wide + z) * channels
                for c in range(0, channels, 8):
                    _hand_back(slopes, where, of + c, window, counts, own, start + c, width * channels, channels)


@compiled
def _hand_back(
    g: Any, which: Any, of: int, window: Any, counts: Any, out: Any, start: int, down: int, right: int
) -> None:
    """Eight channels of one window: the entry that was the largest gets the slope."""
    slope, found = load(g, of), load(which, of)
    for a in range(window[0]):
        for b in range(window[1]):
            to = start + a * down + b * right
            store(out, to, plus(load(out, to), equal(found, spread(counts, a * window[1] + b), slope)))
