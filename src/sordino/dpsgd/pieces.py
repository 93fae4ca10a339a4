"""One parameter's per-record gradients g_1, ..., g_b, kept in the form in which they are cheapest.

Every form gives their squared norms [b], their weighted sum (in float64 if there are many), and, if asked, the
gradients themselves.

    Rows    g_j as it is                          a bias, a norm's gain, anything that autograd computed
    Outer   g_j = sum_t out_jt (x) in_jt          Linear, convolutions (in = patches), recurrences (t = time)
    Lookup  g_j[v] = sum_{t: index_jt = v} out_jt   Embedding
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sordino import codec
from sordino.parts.clipping import BLOCK, FEW, Cast, summed

NEAR, FAR = 12, 32  # reading and writing a materialised entry, in multiplications: in the cache, in memory
CACHE = 1 << 23  # entries
GRAM = 0.8  # a Gram matrix is small: its multiplications are slower by this
ROOM = 1 << 26  # entries of a materialised tensor that may stay in memory until the weights are known
ROUNDING = 1e-6  # of a Gram sum, relative to the sum of its absolute values
HALF = frozenset({torch.bfloat16, torch.float16})


def wide(value: Tensor) -> Tensor:
    """At least float32: norms and sums of half precision would be off by more than the slack."""
    return value.float() if value.dtype in HALF else value


def sums_in(parameter: Tensor) -> torch.dtype:
    """float32, or float64 for parameters in it: never half precision."""
    return torch.promote_types(parameter.dtype, torch.float32)


class Piece(Protocol):
    """Per-record gradients of one parameter."""

    def squares(self) -> Tensor:
        """||g_j||^2, [b] in float64."""

    def doubt(self) -> Tensor | float:
        """How much `squares` may be wrong by, where that may matter: [b]."""

    def weighted(self, weights: Tensor) -> Tensor:
        """sum_j weights_j g_j, shaped as the parameter; of more than `FEW` records in float64."""

    def rows(self) -> Tensor:
        """The gradients themselves, [b, *shape]."""

    def at(self, index: Tensor) -> Piece:
        """Only these records."""


def weighted_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """sum_j weights_j rows_j of [b, d]; of many in float64."""

    def product(some: slice, cast: Cast, out: Tensor | None) -> Tensor:
        return torch.mm(cast(weights[None, some]), cast(rows[some]), out=out)

    return summed(len(weights), product)[0]


def row_squares(rows: Tensor) -> Tensor:
    """||row||^2 of [b, ...] in float64, from float32 norms of blocks (see `parts.norms`)."""
    rows = rows.reshape(len(rows), -1)
    b, d = rows.shape
    if d <= BLOCK:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.double().square_()
    whole = d - d % BLOCK
    norms = torch.linalg.vector_norm(rows[:, :whole].view(b, -1, BLOCK), dim=2)
    return norms.double().square_().sum(1).add_(row_squares(rows[:, whole:]))


@codec.hides_values
@dataclass(frozen=True)
class Rows:
    """Gradients as they are, [b, *shape]."""

    value: Tensor

    def squares(self) -> Tensor:
        return row_squares(self.value)

    def doubt(self) -> float:
        return 0.0

    def weighted(self, weights: Tensor) -> Tensor:
        return weighted_rows(weights, self.value.reshape(len(weights), -1)).view(self.value.shape[1:])

    def rows(self) -> Tensor:
        return self.value

    def at(self, index: Tensor) -> Rows:
        return Rows(self.value[index])


def _identity(rows: Tensor) -> Tensor:
    return rows


def transposed(rows: Tensor) -> Tensor:
    """[..., O, I] -> [..., I, O]: of a weight that lies the other way round."""
    return rows.transpose(-1, -2)


class OutputGradients:
    """Output gradients [b, T, O], with what the parameters of one layer share: Gram matrices and the scaled copy."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.time_first = not value.is_contiguous()
        self._gram: Tensor | None = None
        self._scaled: tuple[Tensor, Tensor] | None = None

    def gram(self) -> Tensor:
        """[b, T, T]."""
        if self._gram is None:
            self._gram = torch.bmm(self.value, self.value.transpose(1, 2))
        return self._gram

    def scaled(self, weights: Tensor) -> Tensor:
        """[b, T, O]: each record's part times its weight."""
        if self._scaled is None or self._scaled[0] is not weights:
            self._scaled = weights, self.value * weights[:, None, None]
        return self._scaled[1]


def flat(value: Tensor, time_first: bool) -> Tensor:
    """[b, T, I] -> [b T, I], or [T b, I] where the memory lies so."""
    return (value.transpose(0, 1) if time_first else value).reshape(-1, value.shape[2])


@codec.hides_values
@dataclass
class Outer:
    """g_j = sum_t out_jt (x) in_jt, from inputs [b, T, I], output gradients [b, T, O]; `reshape` gives [..., *shape].

    T = 1:     ||g_j||^2 = |in_j|^2 |out_j|^2
    else:      ||g_j||^2 = sum_{t,s} (in_t . in_s)(out_t . out_s), or g_j materialised, whichever is cheaper
    """

    inputs: Tensor | Callable[[], Tensor]  # patches are cut when needed: those of all layers would fill the memory
    outputs: OutputGradients
    reshape: Callable[[Tensor], Tensor] = _identity
    kept: Tensor | None = field(init=False, default=None)
    slack: Tensor | float = field(init=False, default=0.0)

    def read(self) -> Tensor:
        """The inputs, [b, T, I]."""
        return wide(self.inputs if isinstance(self.inputs, Tensor) else self.inputs())

    def squares(self) -> Tensor:
        inputs = self.read()
        if inputs.shape[1] == 1:
            return row_squares(inputs) * row_squares(self.outputs.value)
        (b, t, i), o = inputs.shape, self.outputs.value.shape[2]
        entry = NEAR if b * i * o <= CACHE else FAR  # memory traffic, against two Gram matrices' multiplications
        return self.by_gram(inputs) if GRAM * t * t * (i + o) < entry * i * o else self.materialised(inputs)

    def doubt(self) -> Tensor | float:
        return self.slack

    def by_gram(self, inputs: Tensor) -> Tensor:
        first, second = torch.bmm(inputs, inputs.transpose(1, 2)), self.outputs.gram()
        sizes = (first.diagonal(0, 1, 2) * second.diagonal(0, 1, 2)).sqrt().sum(1)
        self.slack = ROUNDING * sizes.double().square()
        return first.mul_(second).sum(2).sum(1, dtype=torch.float64).clamp(min=0)

    def materialised(self, inputs: Tensor) -> Tensor:
        size = inputs.shape[2] * self.outputs.value.shape[2]
        if len(inputs) * size <= ROOM:
            self.kept = _products(inputs, self.outputs.value)
            return row_squares(self.kept)
        chunk = max(1, ROOM // (8 * size))
        pairs = zip(torch.split(inputs, chunk), torch.split(self.outputs.value, chunk), strict=True)
        return torch.cat([row_squares(_products(a, g)) for a, g in pairs])

    def weighted(self, weights: Tensor) -> Tensor:
        if self.kept is not None:
            return self.reshape(weighted_rows(weights, self.kept.view(len(weights), -1)).view(self.kept.shape[1:]))
        outputs, inputs, time_first = self.outputs.scaled(weights), self.read(), self.outputs.time_first

        def product(some: slice, cast: Cast, out: Tensor | None) -> Tensor:  # sum_jt out_jt (x) in_jt, [O, I]
            return torch.mm(cast(flat(outputs[some], time_first).T), cast(flat(inputs[some], time_first)), out=out)

        return self.reshape(summed(len(inputs), product))

    def rows(self) -> Tensor:
        return self.reshape(_products(self.read(), self.outputs.value) if self.kept is None else self.kept)

    def at(self, index: Tensor) -> Piece:
        if self.kept is not None:
            return Rows(self.reshape(self.kept[index]))
        return Outer(self.read()[index], OutputGradients(self.outputs.value[index]), self.reshape)


def _products(inputs: Tensor, outputs: Tensor) -> Tensor:
    """[b, O, I]; a few inputs are multiplied from the other side, four times as fast."""
    if 4 * inputs.shape[2] <= outputs.shape[2]:
        return torch.bmm(inputs.transpose(1, 2), outputs).transpose(1, 2).contiguous()
    return torch.bmm(outputs.transpose(1, 2), inputs)


@codec.hides_values
@dataclass(frozen=True)
class Lookup:
    """g_j[v] = sum of out_jt over the t with index_jt = v: index [b, T], outputs [b, T, D], `words` rows in the table.

    ||g_j||^2 = sum_{t,s} [index_t = index_s] (out_t . out_s)
    """

    index: Tensor
    outputs: Tensor
    words: int

    def squares(self) -> Tensor:
        t, d = self.outputs.shape[1:]
        if t == 1:
            return row_squares(self.outputs)
        if t * t < NEAR * self.words or len(self.index) * self.words * d > ROOM:
            return self._gram()
        return row_squares(self.rows())

    def _gram(self) -> Tensor:
        """In float64: a common word's gradients may cancel."""
        wide = self.outputs.double()
        equal = self.index[:, :, None] == self.index[:, None, :]
        return (torch.bmm(wide, wide.transpose(1, 2)) * equal).sum((1, 2)).clamp(min=0)

    def doubt(self) -> float:
        return 0.0

    def weighted(self, weights: Tensor) -> Tensor:
        if len(weights) > FEW and self.words > FEW * self.index.shape[1]:  # a table per block costs more than float64
            return self._table(weights, slice(None), Tensor.double, None)
        return summed(len(weights), lambda some, cast, out: self._table(weights, some, cast, out))

    def _table(self, weights: Tensor, some: slice, cast: Cast, out: Tensor | None) -> Tensor:
        """The sum over some records, [words, D]."""
        scaled = cast(self.outputs[some] * weights[some, None, None]).flatten(0, 1)
        table = scaled.new_zeros(self.words, scaled.shape[1]) if out is None else out.zero_()
        return table.index_add_(0, self.index[some].flatten(), scaled)

    def rows(self) -> Tensor:
        b, d = len(self.index), self.outputs.shape[2]
        place = (self.index + self.words * torch.arange(b)[:, None]).flatten()
        return self.outputs.new_zeros(b * self.words, d).index_add_(0, place, self.outputs.flatten(0, 1)).view(b, -1, d)

    def at(self, index: Tensor) -> Lookup:
        return Lookup(self.index[index], self.outputs[index], self.words)


@codec.hides_values
@dataclass
class Tied:
    """One table that is looked up and multiplied by (a tied input and output embedding): g_j = outer_j + lookup_j.

    ||g_j||^2 = ||outer_j||^2 + ||lookup_j||^2 + 2 sum_{t,s} (in_t . out_s) slope_t[index_s]
    """

    outer: Outer  # slopes [b, T, words], inputs [b, T, D]
    lookup: Lookup  # index [b, S], outputs [b, S, D]
    slack: Tensor | float = field(init=False, default=0.0)

    def squares(self) -> Tensor:
        parts = self.outer.squares() + self.lookup.squares()
        self.slack = self.outer.doubt() + 4 * ROUNDING * parts  # the two uses may cancel
        inputs, slopes = self.outer.read(), self.outer.outputs.value
        places = self.lookup.index[:, None, :].expand(-1, slopes.shape[1], -1)
        products = torch.bmm(inputs, self.lookup.outputs.transpose(1, 2))  # [b, T, S]
        cross = (slopes.gather(2, places) * products).sum(2).sum(1, dtype=torch.float64)
        return (parts + 2 * cross).clamp(min=0)

    def doubt(self) -> Tensor | float:
        return self.slack

    def weighted(self, weights: Tensor) -> Tensor:
        return self.outer.weighted(weights) + self.lookup.weighted(weights)

    def rows(self) -> Tensor:
        return self.outer.rows() + self.lookup.rows()

    def at(self, index: Tensor) -> Piece:
        outer = self.outer.at(index)
        lookup = self.lookup.at(index)
        return Tied(outer, lookup) if isinstance(outer, Outer) else Rows(outer.rows() + lookup.rows())


def merge_pieces(pieces: Sequence[Piece]) -> Piece:
    """A parameter used several times: its per-record gradient is the sum of the uses, taken BEFORE the norm."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Outer) and all(isinstance(p, Outer) and p.reshape == first.reshape for p in pieces):
        uses = [p for p in pieces if isinstance(p, Outer)]
        slopes = torch.cat([p.outputs.value for p in uses], 1)
        return Outer(torch.cat([p.read() for p in uses], 1), OutputGradients(slopes), first.reshape)
    if len(pieces) == 2:
        lookup, outer = sorted(pieces, key=lambda piece: isinstance(piece, Outer))
        if isinstance(lookup, Lookup) and isinstance(outer, Outer) and outer.reshape is _identity:
            return Tied(outer, lookup)
    total = pieces[0].rows().clone()
    for piece in pieces[1:]:
        total += piece.rows()
    return Rows(total)
