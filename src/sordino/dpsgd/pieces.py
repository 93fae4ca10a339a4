"""Per-record gradients of one batch: the tape of recorded layer calls, and one `Piece` per parameter. Used in dpsgd/.

Layers run on detached weights and pass their outputs to `Tape.watch`. The backward pass then computes no weight
gradient, only the gradient at the output of every layer, from which the layer's rule makes its pieces. A piece holds
the gradients g_1, ..., g_b of one parameter, for the b records, in the form that is cheapest, and computes their
squared norms, their weighted sum (in float64 if there are many) and, if needed, the gradients themselves. Pieces are
made inside the backward pass, layer by layer, and store whichever is smaller: the gradients, or the inputs and output
gradients that they are products of. Patches and Gram matrices, which are larger, are computed for a few records at a
time. With inputs in_jt and output gradients out_jt of record j at position t, and outer product (x):

    Rows    g_j in full                           a bias, a norm's gain, anything that autograd computed
    Outer   g_j = sum_t out_jt (x) in_jt          Linear, convolutions (in = patches), recurrences (t = time)
    Lookup  g_j[v] = sum_{t: index_jt = v} out_jt   Embedding
    Tied    Outer + Lookup                        one table as input and output embedding
    ByGroup pieces of some of the units each      users with different numbers of records (`users`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from sordino import codec
from sordino.errors import PlanError
from sordino.parts.clipping import BLOCK, FEW, Cast, summed

NEAR, FAR = 12, 32  # cost of reading and writing an entry in the cache and in memory, in multiplications
CACHE = 1 << 23  # entries that fit in the cache
GRAM = 0.8  # cost of a multiplication in a Gram matrix, relative to other products
CHUNK = 1 << 20  # entries of patches, products and Gram matrices that are computed at once
KEPT = 1 << 22  # entries of a batch's gradients that are stored for speed although their factors are smaller
ROOM = 1 << 26  # entries of gradients that are computed at once if fast norms are not precise enough
ROUNDING = 1e-6  # rounding error of a Gram sum, relative to the sum of its absolute values
HALF = frozenset({torch.bfloat16, torch.float16})


@contextmanager
def ieee_products() -> Iterator[None]:
    """Context in which float32 products are IEEE float32, whatever precision the user allows for the model.

    Factors rounded to TF32 or bfloat16 would make norms too small by up to 1e-4, and clipped gradients too long.
    """
    backends: Any = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # torch before 2.9
        before = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            backends.cudnn.allow_tf32 = before[1]
        return
    allowed = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, precision in zip(places, allowed, strict=True):
            place.fp32_precision = precision


def chunks(records: slice, entries: int) -> Iterator[slice]:
    """Yield consecutive slices of a range of records, each with about `CHUNK` numbers; one record has `entries`."""
    width = max(1, CHUNK // max(1, entries))
    for first in range(records.start, records.stop, width):
        yield slice(first, min(first + width, records.stop))


def wide(value: Tensor) -> Tensor:
    """Return a half-precision tensor as float32, because norms and sums in half precision are too inexact."""
    return value.float() if value.dtype in HALF else value


def sums_in(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's gradients are summed: float32, or float64 for float64 parameters."""
    return torch.promote_types(parameter.dtype, torch.float32)


class Piece(Protocol):
    """Interface of the per-record gradients g_1, ..., g_b of one parameter.

    squares   ||g_j||^2 of every record, in float64
    doubt     bound on the error of `squares` for every record
    weighted  sum_j weights_j g_j, shaped like the parameter; in float64 for more than `FEW` records
    rows      the gradients themselves, [b, *shape]
    at        the piece of some of the records only
    compact   a piece of the same gradients in the form with the least memory, where up to `room` entries cost nothing
    """

    def squares(self) -> Tensor: ...
    def doubt(self) -> Tensor | float: ...
    def weighted(self, weights: Tensor) -> Tensor: ...
    def rows(self) -> Tensor: ...
    def at(self, index: Tensor) -> Piece: ...
    def compact(self, room: int = 0) -> Piece: ...


def weighted_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Return sum_j weights_j rows_j for rows [b, d]; in float64 for many records."""

    def product(some: slice, cast: Cast, out: Tensor | None) -> Tensor:
        return torch.mm(cast(weights[None, some]), cast(rows[some]), out=out)

    return summed(len(weights), product)[0]


def row_squares(rows: Tensor) -> Tensor:
    """Return the squared norm of every row in float64, from float32 norms of blocks (see `parts.clipping`)."""
    rows = rows.reshape(len(rows), -1)
    b, d = rows.shape
    if d <= BLOCK:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.double().square_()
    whole = d - d % BLOCK
    norms = torch.linalg.vector_norm(rows[:, :whole].view(b, -1, BLOCK), dim=2)
    return norms.double().square_().sum(1).add_(row_squares(rows[:, whole:]))


def identity(rows: Tensor) -> Tensor:
    return rows


@codec.hides_values
@dataclass(frozen=True)
class Rows:
    """Per-record gradients of a parameter in full; `reshape` gives them its shape, `known` are their squared norms."""

    value: Tensor
    reshape: Callable[[Tensor], Tensor] = identity
    known: Tensor | None = None

    def squares(self) -> Tensor:
        return row_squares(self.value) if self.known is None else self.known

    def doubt(self) -> float:
        return 0.0

    def weighted(self, weights: Tensor) -> Tensor:
        flat = weighted_rows(weights, self.value.reshape(len(weights), -1))
        return self.reshape(flat.view(self.value.shape[1:]))

    def rows(self) -> Tensor:
        return self.reshape(self.value)

    def at(self, index: Tensor) -> Rows:
        return Rows(self.value[index], self.reshape)

    def compact(self, room: int = 0) -> Rows:
        return self


class OutputGradients:
    """Output gradients [b, T, O] of a layer; if two weights share them (`shared`), Gram matrices are computed once."""

    def __init__(self, value: Tensor, shared: bool = False) -> None:
        self.value, self.shared = value, shared
        self.time_first = not value.is_contiguous()
        self._gram: Tensor | None = None

    def gram(self, some: slice) -> Tensor:
        """Return the Gram matrix of every record's output gradients, for some records: [len(some), T, T]."""
        if not self.shared:
            return torch.bmm(self.value[some], self.value[some].transpose(1, 2))
        if self._gram is None:
            self._gram = torch.bmm(self.value, self.value.transpose(1, 2))
        return self._gram[some]

    def forget(self) -> None:
        """Free the Gram matrices, after both weights have used them."""
        self._gram = None


def _flat(value: Tensor, time_first: bool) -> Tensor:
    """Reshape [b, T, I] to [b T, I], or to [T b, I] if the memory is in that order."""
    return (value.transpose(0, 1) if time_first else value).reshape(-1, value.shape[2])


@codec.hides_values
@dataclass
class Outer:
    """Per-record gradients of a linear weight: g_j = sum_t out_jt (x) in_jt.

    The sum over T positions t has inputs in_jt of length I and output gradients out_jt of length O. `reshape` maps
    [..., O, I] to the parameter's shape. `cut` computes the inputs of some records from the stored ones (patches from
    images, which are smaller). `product` computes sum_j g_j faster, from output gradients and stored inputs.

    T = 1:     ||g_j||^2 = |in_j|^2 |out_j|^2
    else:      ||g_j||^2 = sum_{t,s} (in_t . in_s)(out_t . out_s), or from g_j itself, whichever is cheaper

    g_j is stored if it has fewer entries than its inputs and output gradients, or at most `room` over all records;
    otherwise the products are computed again for the weighted sum.
    """

    inputs: Tensor
    outputs: OutputGradients
    reshape: Callable[[Tensor], Tensor] = identity
    cut: Callable[[Tensor], Tensor] = identity
    product: Callable[[Tensor, Tensor], Tensor] | None = None
    known: Tensor | None = field(init=False, default=None)
    slack: Tensor | float = field(init=False, default=0.0)

    def read(self, some: slice = slice(None)) -> Tensor:
        return wide(self.cut(self.inputs[some]))

    def squares(self) -> Tensor:
        if self.known is None:
            found = self.compact()
            return found.squares() if found is not self else self._squares()
        return self.known

    def _squares(self) -> Tensor:
        return row_squares(self.read()) * row_squares(self.outputs.value) if self.known is None else self.known

    def doubt(self) -> Tensor | float:
        return self.slack

    def compact(self, room: int = 0) -> Piece:
        (b, t, o), i = self.outputs.value.shape, self.read(slice(0, 1)).shape[2]
        if t == 1 or not b or self.known is not None:
            return self
        smaller = i * o <= t * o + self.inputs[0].numel() or b * i * o <= room
        entry = (NEAR if b * i * o <= CACHE else FAR) if smaller else t + NEAR  # multiplications per entry of g_j
        if GRAM * t * t * (i + o) < entry * i * o:
            self.known = self._by_gram(b, t * (t + i))
            return self
        kept = self.outputs.value.new_empty(b if smaller else 0, o, i)
        self.known = self._materialised(b, (t + o) * i, kept)
        return Rows(kept, self.reshape, self.known) if smaller else self

    def _by_gram(self, b: int, entries: int) -> Tensor:
        squares: Tensor = self.outputs.value.new_empty(b, dtype=torch.float64)
        slack = torch.empty_like(squares)
        for some in chunks(slice(0, b), entries):
            inputs = self.read(some)
            first, second = torch.bmm(inputs, inputs.transpose(1, 2)), self.outputs.gram(some)
            sizes = (first.diagonal(0, 1, 2) * second.diagonal(0, 1, 2)).sqrt().sum(1)
            slack[some] = ROUNDING * sizes.double().square()
            squares[some] = first.mul_(second).sum(2).sum(1, dtype=torch.float64).clamp(min=0)
        self.slack = slack
        return squares

    def _materialised(self, b: int, entries: int, kept: Tensor) -> Tensor:
        squares = self.outputs.value.new_empty(b, dtype=torch.float64)
        for some in chunks(slice(0, b), entries):
            rows = _products(self.read(some), self.outputs.value[some], kept[some] if len(kept) else None)
            squares[some] = row_squares(rows)
        return squares

    def weighted(self, weights: Tensor) -> Tensor:
        time_first, outputs, fast = self.outputs.time_first, self.outputs.value, self.product
        if fast is not None:
            return summed(
                len(weights),
                lambda some, cast, _: fast(
                    cast(outputs[some] * weights[some, None, None]), cast(wide(self.inputs[some]))
                ),
            )

        def product(some: slice, cast: Cast, out: Tensor | None) -> Tensor:  # sum_jt out_jt (x) in_jt, [O, I]
            left = _flat(outputs[some] * weights[some, None, None], time_first)
            return torch.mm(cast(left.T), cast(_flat(self.read(some), time_first)), out=out)

        return self.reshape(summed(len(weights), product))

    def rows(self) -> Tensor:
        return self.reshape(_products(self.read(), self.outputs.value))

    def at(self, index: Tensor) -> Piece:
        outputs = OutputGradients(self.outputs.value[index])
        return Outer(self.inputs[index], outputs, self.reshape, self.cut, self.product)


def _products(inputs: Tensor, outputs: Tensor, out: Tensor | None = None) -> Tensor:
    """Return sum_t out_jt (x) in_jt for every record j, [b, O, I], by the faster order of multiplication."""
    if 4 * inputs.shape[2] <= outputs.shape[2]:
        found = torch.bmm(inputs.transpose(1, 2), outputs).transpose(1, 2)
        return found.contiguous() if out is None else out.copy_(found)
    return torch.bmm(outputs.transpose(1, 2), inputs, out=out)


@codec.hides_values
@dataclass(frozen=True)
class Lookup:
    """Per-record gradients of an embedding table with `words` rows: g_j[v] = sum_{t: index_jt = v} out_jt.

    index_jt [b, T] is the row that record j reads at position t, and out_jt [b, T, D] its output gradient.

    ||g_j||^2 = sum_{t,s} [index_t = index_s] (out_t . out_s)
    """

    index: Tensor
    outputs: Tensor
    words: int

    def squares(self) -> Tensor:
        t, d = self.outputs.shape[1:]
        if t == 1:
            return row_squares(self.outputs)
        found = self.outputs.new_empty(len(self.index), dtype=torch.float64)
        by_gram = t * t < NEAR * self.words
        for some in chunks(slice(0, len(found)), 3 * t * t + 3 * t * d if by_gram else self.words * d):
            found[some] = self._gram(some) if by_gram else row_squares(self.at(some).rows())
        return found

    def _gram(self, some: slice) -> Tensor:
        double, index = self.outputs[some].double(), self.index[some]  # gradients of a repeated row may cancel
        equal = index[:, :, None] == index[:, None, :]
        return torch.bmm(double, double.transpose(1, 2)).mul_(equal).sum((1, 2)).clamp(min=0)

    def doubt(self) -> float:
        return 0.0

    def weighted(self, weights: Tensor) -> Tensor:
        if len(weights) > FEW and self.words > FEW * self.index.shape[1]:  # a table per block costs more than float64
            return self._table(weights, slice(None), Tensor.double, None)
        return summed(len(weights), lambda some, cast, out: self._table(weights, some, cast, out))

    def _table(self, weights: Tensor, some: slice, cast: Cast, out: Tensor | None) -> Tensor:
        scaled = cast(self.outputs[some] * weights[some, None, None]).flatten(0, 1)
        table = scaled.new_zeros(self.words, scaled.shape[1]) if out is None else out.zero_()
        return table.index_add_(0, self.index[some].flatten(), scaled)

    def rows(self) -> Tensor:
        b, d = len(self.index), self.outputs.shape[2]
        place = (self.index + self.words * torch.arange(b, device=self.index.device)[:, None]).flatten()
        return self.outputs.new_zeros(b * self.words, d).index_add_(0, place, self.outputs.flatten(0, 1)).view(b, -1, d)

    def at(self, index: Tensor | slice) -> Lookup:
        return Lookup(self.index[index], self.outputs[index], self.words)

    def compact(self, room: int = 0) -> Lookup:
        return self


@codec.hides_values
@dataclass
class Tied:
    """Per-record gradients g_j = outer_j + lookup_j of a table that is both input and output embedding.

    ||g_j||^2 = ||outer_j||^2 + ||lookup_j||^2 + 2 sum_{t,s} (in_t . out_s) slope_t[index_s]

    in_t and slope_t are inputs and output gradients of the output embedding; index_s and out_s are rows and output
    gradients of the input embedding.
    """

    outer: Outer  # slopes [b, T, words], inputs [b, T, D]
    lookup: Lookup  # index [b, S], outputs [b, S, D]
    slack: Tensor | float = field(init=False, default=0.0)

    def squares(self) -> Tensor:
        parts = self.outer.squares() + self.lookup.squares()
        self.slack = self.outer.doubt() + 4 * ROUNDING * parts  # the two uses may cancel
        (b, t, words), s, cross = self.outer.outputs.value.shape, self.lookup.index.shape[1], torch.zeros_like(parts)
        if t * s > NEAR * words:  # a table takes less than the products
            for some in chunks(slice(0, b), words * self.lookup.outputs.shape[2]):
                cross[some] = row_squares(self.at(torch.arange(some.start, some.stop)).rows())
            return cross
        for some in chunks(slice(0, b), 3 * t * s):
            inputs, slopes = self.outer.read(some), self.outer.outputs.value[some]
            places = self.lookup.index[some, None, :].expand(-1, t, -1)
            products = torch.bmm(inputs, self.lookup.outputs[some].transpose(1, 2))  # [b, T, S]
            cross[some] = (slopes.gather(2, places) * products).sum(2).sum(1, dtype=torch.float64)
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

    def compact(self, room: int = 0) -> Tied:
        return self


Keep = Callable[[Piece], Piece]  # chooses the form in which gradients are kept until the step


@codec.hides_values
@dataclass(frozen=True)
class ByGroup:
    """Gradients of `count` units (records or users) in groups, each with the numbers of its units and their piece."""

    count: int
    groups: tuple[tuple[Tensor, Piece], ...]

    def squares(self) -> Tensor:
        return self._joined([piece.squares() for _, piece in self.groups])

    def doubt(self) -> Tensor | float:
        found = [piece.doubt() for _, piece in self.groups]
        if not any(isinstance(doubt, Tensor) for doubt in found):
            return 0.0
        groups = zip(self.groups, found, strict=True)
        each = [torch.zeros(len(own), dtype=torch.float64, device=own.device) + doubt for (own, _), doubt in groups]
        return self._joined(each)

    def weighted(self, weights: Tensor) -> Tensor:
        own, first = self.groups[0]
        total = first.weighted(weights[own])
        for own, piece in self.groups[1:]:
            total = total + piece.weighted(weights[own])
        return total

    def rows(self) -> Tensor:
        return self._joined([piece.rows() for _, piece in self.groups])

    def at(self, index: Tensor) -> ByGroup:
        found = []
        for own, piece in self.groups:
            places = own.new_full((self.count,), -1)
            places[own] = torch.arange(len(own), device=own.device)
            kept = places[index] >= 0
            if bool(kept.any()):
                found.append((kept.nonzero()[:, 0], piece.at(places[index][kept])))
        return ByGroup(len(index), tuple(found))

    def compact(self, room: int = 0) -> ByGroup:
        return self

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        found = values[0].new_empty(self.count, *values[0].shape[1:])
        for (own, _), part in zip(self.groups, values, strict=True):
            found[own] = part
        return found


def merge_pieces(pieces: Sequence[Piece]) -> Piece:
    """Return one piece for a parameter that is used several times; gradients of all uses are summed before the norm."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, ByGroup) and all(isinstance(piece, ByGroup) for piece in pieces):  # of the same units
        every = zip(*(piece.groups for piece in pieces if isinstance(piece, ByGroup)), strict=True)
        return ByGroup(first.count, tuple((uses[0][0], merge_pieces([one for _, one in uses])) for uses in every))
    if isinstance(first, Outer) and all(isinstance(p, Outer) and p.reshape == first.reshape for p in pieces):
        uses = [p for p in pieces if isinstance(p, Outer)]
        slopes = torch.cat([p.outputs.value for p in uses], 1)
        return Outer(torch.cat([p.read() for p in uses], 1), OutputGradients(slopes), first.reshape).compact()
    if len(pieces) == 2:
        lookup, outer = sorted(pieces, key=lambda piece: isinstance(piece, Outer))
        if isinstance(lookup, Lookup) and isinstance(outer, Outer) and outer.reshape is identity:
            return Tied(outer, lookup)
    total = pieces[0].rows().clone()
    for piece in pieces[1:]:
        total += piece.rows()
    return Rows(total)


Pieces = Iterable[tuple[nn.Parameter | None, Piece]]
Use = Callable[[Tensor], Pieces]  # from d loss / d output to the pieces of the parameters


@codec.hides_values
@dataclass
class Call:
    """Recorded call of a layer: its rule and, after the backward pass, the pieces of its parameters."""

    tape: Tape
    use: Use | None  # None after the backward pass, to free its tensors
    shape: tuple[int, ...]
    axis: int = 0
    kept: Tensor | None = None
    version: int = 0
    found: list[tuple[nn.Parameter, Piece]] = field(default_factory=list)

    def add(self, slope: Tensor) -> None:
        """Compute per-record gradients of a layer call from the gradient at the layer's output.

        An input of the layer that was overwritten since the forward pass is refused.
        """
        slope = slope.view(self.shape) if slope.shape != self.shape else slope
        if self.tape.row is not None:
            self.tape.leaked |= self.leaks(slope, self.tape.row)
            return
        if self.use is None:
            return
        use, kept, self.use, self.kept = self.use, self.kept, None, None
        if not self.tape.batch:
            return
        if kept is not None and kept._version != self.version:
            raise RuntimeError("a layer's input was changed in place before the backward pass; use inplace=False there")
        with torch.no_grad(), torch.autocast(slope.device.type, enabled=False), ieee_products():
            for parameter, piece in use(wide(slope)):
                if parameter is not None and parameter.requires_grad:
                    merge, keep = self.tape.merge, self.tape.keep
                    self.found.append((parameter, keep(piece) if merge is None else merge(piece, keep)))

    def leaks(self, slope: Tensor, own: int) -> bool:
        """Return whether the gradient of one record's loss is nonzero in other records' slices."""
        slices = slope.movedim(self.axis, 0)
        width = len(slices) // self.tape.batch
        others = torch.cat([slices[: own * width], slices[(own + 1) * width :]])
        return bool(((others != 0) & others.isfinite()).any())


class UnrecordableError(PlanError):
    """Raised if layer rules cannot separate the records of a batch; then the whole model runs record by record."""

    def __init__(self, found: str) -> None:
        fix = "make the batch the first axis of every layer's input, and use parameters in their own layer only"
        super().__init__("per-record", found, "layers with one slice per record", fix)


class Watch(torch.autograd.Function):
    """Identity whose backward passes the gradient to `call`; `anchor` makes the output differentiable."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, call: Call) -> Tensor:
        ctx.call = call
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.add(slopes[0])
        return slopes[0], slopes[0].new_zeros(()), None


class Copies(torch.autograd.Function):
    """Expanded view of a parameter, one copy per record; its backward passes the copies' gradients to `call`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, anchor: Tensor, call: Call, batch: int) -> Tensor:
        ctx.call = call
        return parameter.expand(batch, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.add(slopes[0])
        return None, slopes[0].new_zeros(()), None, None


class Tape:
    """Tape of the recorded layer calls of one batch; `anchor` is a zero tensor on the model's device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.anchor = torch.zeros((), requires_grad=True, device=device)
        self.batch = 0  # records of the next forward pass
        self.channels_last = False  # whether images are stored channels last: fast, but `view` may fail on them
        self.calls: list[Call] = []
        self.row: int | None = None  # the record whose gradient is computed, while slices are checked
        self.leaked = False  # whether that gradient was nonzero in another record's slice
        self.room = KEPT  # entries of this batch's gradients that may be kept though their factors are smaller
        self.merge: Callable[[Piece, Keep], Piece] | None = None  # from gradients of records to those of users

    def keep(self, piece: Piece) -> Piece:
        """Return a piece in the form that takes the least memory, where up to `room` entries are free."""
        small = piece.compact(self.room)
        self.room -= small.value.numel() if isinstance(small, Rows) and small is not piece else 0
        return small

    def clear(self) -> None:
        for call in self.calls:  # the user's loss may still refer to the calls
            call.use, call.kept, call.found = None, None, []
        self.calls, self.room = [], KEPT
        self.anchor.grad = None

    def drop_finished(self) -> None:
        """Discard the calls whose backward pass is over."""
        for call in self.calls:
            call.found = []
        self.calls = [call for call in self.calls if call.use is not None]

    def check_slices(self, leaves: Sequence[Tensor], rows: Iterable[int], parameters: Sequence[Tensor] = ()) -> None:
        """Refuse layers in which the gradient of one record's output is nonzero in other records' slices.

        `leaves` are outputs [b, ...], and `rows` the records to test. This finds a rule with the wrong record axis, a
        layer that mixes records, and a use of `parameters` outside the recorded layers.
        """
        for row in rows:
            figure = torch.stack([y[row].float().sum() for y in leaves]).sum()
            self.row, self.leaked = row, False
            try:
                slopes = torch.autograd.grad(figure, [self.anchor, *parameters], allow_unused=True, retain_graph=True)
            finally:
                self.row = None
            if any(slope is not None for slope in slopes[1:]):
                raise UnrecordableError("a parameter used outside the layer that owns it")
            if self.leaked:
                raise UnrecordableError("layers whose gradient for one record is nonzero for other records")

    def records(self, x: Tensor, axis: int, tail: int) -> Tensor:
        """Return x as [records, positions, ...]; positions merge all other dimensions but the last `tail` - 1."""
        if axis == 0 and self.batch and x.dim() and len(x) != self.batch and len(x) % self.batch == 0:
            x = x.view(self.batch, -1, *x.shape[1:])  # records times positions, flattened: `leaks` verifies it
        self.check(x, axis, tail)
        x = x.detach().movedim(axis, 0)
        shape = (len(x), prod(x.shape[1 : x.dim() - tail + 1]), *x.shape[x.dim() - tail + 1 :])
        return x.reshape(shape)

    def check(self, x: Tensor, axis: int, least: int) -> None:
        """Refuse an input without one slice per record."""
        if x.dim() <= axis or x.dim() < least or x.shape[axis] != self.batch:
            found = f"an input of shape {list(x.shape)} where {self.batch} records lie along axis {axis}"
            raise UnrecordableError(found)

    def watch(
        self, output: Tensor, use: Use, kept: Tensor | None = None, axis: int = 0, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return a layer's `output` in `shape`, recorded so that the backward pass makes its pieces by `use`.

        `kept` is the input that the rule needs unchanged in the backward pass; records lie along `axis`.
        """
        call = Call(self, use, shape or tuple(output.shape), axis, kept, 0 if kept is None else kept._version)
        self.calls.append(call)
        watched: Tensor = Watch.apply(output, self.anchor, call)  # type: ignore[no-untyped-call]
        return watched if shape is None else watched.view(shape)

    def copies(self, parameter: nn.Parameter, use: Use) -> Tensor:
        """Return one copy of a parameter per record, [b, *shape], whose gradients are recorded."""
        self.calls.append(Call(self, use, (self.batch, *parameter.shape)))
        own: Tensor = Copies.apply(parameter.detach(), self.anchor, self.calls[-1], self.batch)  # type: ignore[no-untyped-call]
        return own

    def pieces(self) -> dict[nn.Parameter, Piece]:
        """Return the per-record gradients of every trained parameter that was used."""
        uses: dict[nn.Parameter, list[Piece]] = {}
        for call in self.calls:
            for parameter, piece in call.found:
                uses.setdefault(parameter, []).append(piece)
        with torch.no_grad(), torch.autocast(self.anchor.device.type, enabled=False):
            return {parameter: merge_pieces(pieces) for parameter, pieces in uses.items()}


def first_length(args: Any, kwargs: Any) -> int:
    """Return the number of records of a batch: the length of the first tensor among the arguments."""
    return next((len(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()), 0)
