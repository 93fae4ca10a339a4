"""Per-record gradients of one batch: the tape that layer rules fill, and the pieces that the backward pass yields.

Layers run on detached weights and pass their outputs to `Tape.watch`; the backward pass then computes no weight
gradient at all, only d loss / d output of every layer, from which the layer's rule makes its `Piece`s. A piece holds
one parameter's gradients g_1, ..., g_b in the form in which they are cheapest, and gives their squared norms [b], their
weighted sum (in float64 if there are many) and, if needed, the gradients themselves.

    Rows    g_j in full                           a bias, a norm's gain, anything that autograd computed
    Outer   g_j = sum_t out_jt (x) in_jt          Linear, convolutions (in = patches), recurrences (t = time)
    Lookup  g_j[v] = sum_{t: index_jt = v} out_jt   Embedding
    Tied    Outer + Lookup                        one table as input and output embedding
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from sordino import codec
from sordino.errors import PlanError
from sordino.parts.clipping import BLOCK, FEW, Cast, summed

NEAR, FAR = 12, 32  # reading and writing a materialised entry, in multiplications: in the cache, in memory
CACHE = 1 << 23  # entries
GRAM = 0.8  # a Gram matrix is small: its multiplications are slower by this
ROOM = 1 << 26  # entries of a materialised tensor that may stay in memory until the weights are known
ROUNDING = 1e-6  # of a Gram sum, relative to the sum of its absolute values
HALF = frozenset({torch.bfloat16, torch.float16})


def wide(value: Tensor) -> Tensor:
    """Return half-precision tensors as float32, because norms and sums in half precision are too inexact."""
    return value.float() if value.dtype in HALF else value


def sums_in(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's gradients are summed: float32, or float64 for float64 parameters."""
    return torch.promote_types(parameter.dtype, torch.float32)


class Piece(Protocol):
    """Per-record gradients of one parameter.

    squares   ||g_j||^2, [b] in float64
    doubt     bound on the error of `squares`, [b]
    weighted  sum_j weights_j g_j, shaped as the parameter; of more than `FEW` records in float64
    rows      the gradients themselves, [b, *shape]
    at        the same piece for some of the records only
    """

    def squares(self) -> Tensor: ...
    def doubt(self) -> Tensor | float: ...
    def weighted(self, weights: Tensor) -> Tensor: ...
    def rows(self) -> Tensor: ...
    def at(self, index: Tensor) -> Piece: ...


def weighted_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Return sum_j weights_j rows_j of [b, d]; of many records in float64."""

    def product(some: slice, cast: Cast, out: Tensor | None) -> Tensor:
        return torch.mm(cast(weights[None, some]), cast(rows[some]), out=out)

    return summed(len(weights), product)[0]


def row_squares(rows: Tensor) -> Tensor:
    """Return ||row||^2 of rows [b, ...] in float64, from float32 norms of blocks (see `parts.clipping`)."""
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
    """Per-record gradients of a parameter in full, [b, *shape]."""

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


def identity(rows: Tensor) -> Tensor:
    return rows


class OutputGradients:
    """Output gradients [b, T, O] of a layer; its weight and bias share their Gram matrices and weighted copies."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.time_first = not value.is_contiguous()
        self._gram: Tensor | None = None
        self._scaled: tuple[Tensor, Tensor] | None = None

    def gram(self) -> Tensor:
        """Return the Gram matrices of the output gradients, [b, T, T]."""
        if self._gram is None:
            self._gram = torch.bmm(self.value, self.value.transpose(1, 2))
        return self._gram

    def scaled(self, weights: Tensor) -> Tensor:
        """Return each record's output gradients times its weight, [b, T, O]."""
        if self._scaled is None or self._scaled[0] is not weights:
            self._scaled = weights, self.value * weights[:, None, None]
        return self._scaled[1]


def _flat(value: Tensor, time_first: bool) -> Tensor:
    """Reshape [b, T, I] to [b T, I], or to [T b, I] where the memory is in that order."""
    return (value.transpose(0, 1) if time_first else value).reshape(-1, value.shape[2])


@codec.hides_values
@dataclass
class Outer:
    """Per-record gradients of a linear weight, g_j = sum_t out_jt (x) in_jt, from inputs [b, T, I] and output gradients
    [b, T, O].

    `reshape` maps [..., O, I] to [..., *shape] of the parameter.

    T = 1:     ||g_j||^2 = |in_j|^2 |out_j|^2
    else:      ||g_j||^2 = sum_{t,s} (in_t . in_s)(out_t . out_s), or g_j materialised, whichever is cheaper
    """

    inputs: Tensor | Callable[[], Tensor]  # patches are cut when needed: those of all layers would fill the memory
    outputs: OutputGradients
    reshape: Callable[[Tensor], Tensor] = identity
    kept: Tensor | None = field(init=False, default=None)
    slack: Tensor | float = field(init=False, default=0.0)

    def read(self) -> Tensor:
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
            return torch.mm(cast(_flat(outputs[some], time_first).T), cast(_flat(inputs[some], time_first)), out=out)

        return self.reshape(summed(len(inputs), product))

    def rows(self) -> Tensor:
        return self.reshape(_products(self.read(), self.outputs.value) if self.kept is None else self.kept)

    def at(self, index: Tensor) -> Piece:
        if self.kept is not None:
            return Rows(self.reshape(self.kept[index]))
        return Outer(self.read()[index], OutputGradients(self.outputs.value[index]), self.reshape)


def _products(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return sum_t out_jt (x) in_jt, [b, O, I], in the order of multiplication that is faster."""
    if 4 * inputs.shape[2] <= outputs.shape[2]:
        return torch.bmm(inputs.transpose(1, 2), outputs).transpose(1, 2).contiguous()
    return torch.bmm(outputs.transpose(1, 2), inputs)


@codec.hides_values
@dataclass(frozen=True)
class Lookup:
    """Per-record gradients of an embedding table with `words` rows: g_j[v] = sum of out_jt over the t with index_jt =
    v.

    index is [b, T], outputs are [b, T, D].

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
            double = self.outputs.double()  # a common word's gradients may cancel
            equal = self.index[:, :, None] == self.index[:, None, :]
            return (torch.bmm(double, double.transpose(1, 2)) * equal).sum((1, 2)).clamp(min=0)
        return row_squares(self.rows())

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

    def at(self, index: Tensor) -> Lookup:
        return Lookup(self.index[index], self.outputs[index], self.words)


@codec.hides_values
@dataclass
class Tied:
    """Per-record gradients g_j = outer_j + lookup_j of a table that is both input and output embedding.

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
    """Return one piece for a parameter that is used several times: gradients of all uses are summed BEFORE the norm."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Outer) and all(isinstance(p, Outer) and p.reshape == first.reshape for p in pieces):
        uses = [p for p in pieces if isinstance(p, Outer)]
        slopes = torch.cat([p.outputs.value for p in uses], 1)
        return Outer(torch.cat([p.read() for p in uses], 1), OutputGradients(slopes), first.reshape)
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
    """One recorded call of a layer: its rule, and the gradient of its output after the backward pass."""

    use: Use
    shape: tuple[int, ...]
    axis: int = 0
    kept: Tensor | None = None
    version: int = 0
    slope: Tensor | None = None

    def add(self, slope: Tensor) -> None:
        slope = slope.view(self.shape) if slope.shape != self.shape else slope
        self.slope = slope if self.slope is None else self.slope + slope

    def pieces(self) -> Pieces:
        """Return the per-record gradients by the layer's rule; refuse an input that was overwritten."""
        if self.slope is None:
            return ()
        if self.kept is not None and self.kept._version != self.version:
            raise RuntimeError("a layer's input was changed in place before the backward pass; use inplace=False there")
        return self.use(wide(self.slope))

    def leaks(self, batch: int, own: int = 0) -> bool:
        """Return whether the gradient of one record's loss is nonzero in other records' slices."""
        if self.slope is None:
            return False
        slices = self.slope.movedim(self.axis, 0)
        width = len(slices) // batch
        others = torch.cat([slices[: own * width], slices[(own + 1) * width :]])
        return bool(((others != 0) & others.isfinite()).any())


class UnrecordableError(PlanError):
    """Raised if layer rules cannot separate the records, so that the whole model must run record by record."""

    def __init__(self, found: str) -> None:
        fix = "keep the batch as the first axis of every layer's input"
        super().__init__("per-record", found, "layers with one slice per record", fix)


class Watch(torch.autograd.Function):
    """Identity function whose backward stores the gradient in `call`; `anchor` makes the output differentiable."""

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
    """Expanded view of a parameter, one copy per record; the backward stores the copies' gradients in `call`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, anchor: Tensor, call: Call, batch: int) -> Tensor:
        ctx.call = call
        return parameter.expand(batch, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.add(slopes[0])
        return None, slopes[0].new_zeros(()), None, None


class Tape:
    """Recorded layer calls of one batch; `anchor` is a zero tensor on the model's device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.anchor = torch.zeros((), requires_grad=True, device=device)
        self.batch = 0  # records of the next forward pass
        self.channels_last = False  # images in that order whatever the input's: fast, but `view` may not fit it
        self.calls: list[Call] = []

    def clear(self) -> None:
        self.calls = []
        self.anchor.grad = None

    def check_slices(self, leaves: Sequence[Tensor], rows: Iterable[int], parameters: Sequence[Tensor] = ()) -> None:
        """Refuse layers in which the gradient of one record's output is nonzero in other records' slices.

        `leaves` are outputs [b, ...]. This finds a rule with the wrong record axis, a layer that mixes
        records, and a use of `parameters` outside the recorded layers.
        """
        for row in rows:
            figure = torch.stack([y[row].float().sum() for y in leaves]).sum()
            wanted = [self.anchor, *parameters]
            slopes = torch.autograd.grad(figure, wanted, allow_unused=True, retain_graph=True)
            if any(slope is not None for slope in slopes[1:]):
                raise UnrecordableError("a parameter used outside the layer that owns it")
            leaks = any(call.leaks(self.batch, row) for call in self.calls)
            for call in self.calls:
                call.slope = None
            if leaks:
                raise UnrecordableError("layers whose gradient for one record touches other records")

    def records(self, x: Tensor, axis: int, tail: int) -> Tensor:
        """Return x as [b, T, ...] with records first; T merges all other dimensions but the last `tail` - 1."""
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
        """Return `output` in `shape` as a new tensor whose gradient will be recorded.

        `kept` is the input that the rule needs unchanged in the backward pass; records lie along `axis`.
        """
        call = Call(use, shape or tuple(output.shape), axis, kept, 0 if kept is None else kept._version)
        self.calls.append(call)
        watched: Tensor = Watch.apply(output, self.anchor, call)  # type: ignore[no-untyped-call]
        return watched if shape is None else watched.view(shape)

    def copies(self, parameter: nn.Parameter, use: Use) -> Tensor:
        """Return a copy of a parameter for each record, [b, *shape], whose gradients are recorded."""
        self.calls.append(Call(use, (self.batch, *parameter.shape)))
        own: Tensor = Copies.apply(parameter.detach(), self.anchor, self.calls[-1], self.batch)  # type: ignore[no-untyped-call]
        return own

    def pieces(self) -> dict[nn.Parameter, Piece]:
        """Return the per-record gradients of every trained parameter that was used."""
        uses: dict[nn.Parameter, list[Piece]] = {}
        with torch.no_grad(), torch.autocast(self.anchor.device.type, enabled=False):
            for call in self.calls:
                for parameter, piece in call.pieces():
                    if parameter is not None and parameter.requires_grad:
                        uses.setdefault(parameter, []).append(piece)
            return {parameter: merge_pieces(pieces) for parameter, pieces in uses.items()}


def first_length(args: Any, kwargs: Any) -> int:
    """Return the number of records of a batch: the length of the first tensor among the arguments."""
    return next((len(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()), 0)
