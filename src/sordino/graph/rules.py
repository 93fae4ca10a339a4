"""Rules of ATen operations: where the records of a batch lie in the output, given where they lie in the inputs.

A tensor of a batch has one dimension along which records lie. With o = outer, b records and i = inner entries for each,

    size[dim] = o b i,   entry e of that dimension belongs to record (e // i) mod b

so `view` may merge and split dimensions. A rule states the output's `Rows`, or raises `MixesError`: the operation reads
along that dimension, so an output for one record depends on other records. Rules read shapes and dimensions, no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor


class MixesError(Exception):
    """An operation through which records reach each other (`certain`), or may do so for all that the table knows."""

    def __init__(self, why: str, certain: bool = False) -> None:
        super().__init__(why)
        self.certain = certain


@dataclass(frozen=True)
class Rows:
    """Records lie along `dim`, whose size is outer x records x inner.

    `position`: the entries are the places of the records in the batch (an arange), good for x[places] alone.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    position: bool = False

    def size(self, records: int) -> int:
        """Entries of the dimension for so many records."""
        return self.outer * records * self.inner


@dataclass(frozen=True)
class Call:
    """One operation with its arguments by name, where records lie in each tensor argument, and its first output."""

    name: str
    arguments: Mapping[str, Any]
    rows: Callable[[Tensor], Rows | None]
    output: Any
    records: int

    def of(self, name: str) -> Rows | None:
        """Where records lie in a tensor argument; None for a public tensor, or none at all."""
        value = self.arguments.get(name)
        return self.rows(value) if isinstance(value, Tensor) else None

    def tensor(self, name: str) -> Tensor:
        found = self.arguments[name]
        assert isinstance(found, Tensor)
        return found

    def own(self, name: str = "self") -> Rows:
        """Where records lie in an argument that must hold them, if any other does."""
        found = self.of(name)
        if found is None:
            raise MixesError(f"{self.name} with records elsewhere than in its argument '{name}'")
        return found

    def public(self, *names: str) -> None:
        """Refuse records in these arguments."""
        if any(self.of(name) is not None for name in names):
            raise MixesError(f"{self.name} with records in {' or '.join(names)}")

    def mixes(self, why: str, certain: bool = True) -> MixesError:
        return MixesError(f"{self.name} {why}", certain)


Rule = Callable[[Call], Rows]


def pointwise(call: Call) -> Rows:
    """Entry by entry, with broadcasting: all inputs must have the records in the same place of the output."""
    width = call.output.dim()
    found = {
        replace(rows, dim=rows.dim + width - value.dim())
        for value in _tensors(call.arguments.values())
        if (rows := call.rows(value)) is not None
    }
    if len(found) != 1:
        raise call.mixes("of tensors in which records lie along different dimensions")
    return found.pop()


def same(call: Call) -> Rows:
    """The output is laid out as the first argument: copies, random numbers of the same shape."""
    return call.own(next(iter(call.arguments)))


def view(call: Call) -> Rows:
    """Row-major order stays, so record(e) = (e // stride) mod b keeps its stride in entries."""
    rows, after = call.own(), call.output.shape
    stride = rows.inner * prod(call.tensor("self").shape[rows.dim + 1 :])
    for dim in range(len(after)):  # in which the record index lies whole
        rest = prod(after[dim + 1 :])
        if rest and after[dim] > 1 and stride % rest == 0 and after[dim] % (call.records * (stride // rest)) == 0:
            inner = stride // rest
            return Rows(dim, after[dim] // (call.records * inner), inner)
    raise call.mixes("that splits or moves the records of a batch", certain=False)


def _place(dim: int, width: int) -> int:
    return dim + width if dim < 0 else dim


def permute(call: Call) -> Rows:
    order = [_place(d, call.tensor("self").dim()) for d in call.arguments["dims"]]
    return replace(call.own(), dim=order.index(call.own().dim))


def transpose(call: Call) -> Rows:
    rows, width = call.own(), call.tensor("self").dim()
    first, second = (_place(call.arguments[name], width) for name in ("dim0", "dim1"))
    return replace(rows, dim={first: second, second: first}.get(rows.dim, rows.dim))


def turn(call: Call) -> Rows:
    """The transpose of a matrix."""
    rows = call.own()
    return replace(rows, dim=1 - rows.dim) if call.tensor("self").dim() == 2 else rows


def unsqueeze(call: Call) -> Rows:
    rows, at = call.own(), _place(call.arguments["dim"], call.tensor("self").dim() + 1)
    return replace(rows, dim=rows.dim + (at <= rows.dim))


def squeeze(call: Call) -> Rows:
    """By name only: without a dimension, a batch of one record would lose its own."""
    rows, given, shape = call.own(), call.arguments.get("dim"), call.tensor("self").shape
    if given is None:
        raise call.mixes("without a dimension, which changes a batch of one record", certain=False)
    dims = {_place(d, len(shape)) for d in ([given] if isinstance(given, int) else given)}
    if rows.dim in dims:
        raise call.mixes("of the dimension along which records lie")
    return replace(rows, dim=rows.dim - sum(d < rows.dim and shape[d] == 1 for d in dims))


def select(call: Call) -> Rows:
    """One entry of a dimension, or all of them as a list (unbind): that dimension is gone."""
    rows, at = call.own(), _place(call.arguments["dim"], call.tensor("self").dim())
    if at == rows.dim:
        raise call.mixes("of single records of a batch")
    return replace(rows, dim=rows.dim - (at < rows.dim))


def along(call: Call) -> Rows:
    """Along one dimension, which stays: slices, softmax, cumulative sums, sorting, splitting."""
    rows, given = call.own(), call.arguments.get("dim", call.arguments.get("dims"))
    if given is None:
        raise call.mixes("over all entries of a batch")
    dims = {_place(d, call.tensor("self").dim()) for d in ([given] if isinstance(given, int) else given)}
    if rows.dim in dims or not dims:
        raise call.mixes("along the dimension of the records")
    return rows


def cut(call: Call) -> Rows:
    """A slice; the whole of the records' dimension may be asked for."""
    rows, tensor = call.own(), call.tensor("self")
    whole = call.output.shape[rows.dim] == tensor.shape[rows.dim] if call.output.dim() == tensor.dim() else False
    everything = call.arguments.get("start") in (None, 0) and call.arguments.get("step", 1) == 1 and whole
    end = call.arguments.get("end")
    if _place(call.arguments["dim"], tensor.dim()) == rows.dim and everything and (end is None or end >= 2**31):
        return rows
    return along(call)


def expand(call: Call) -> Rows:
    """New leading dimensions, and dimensions of size one repeated."""
    tensor, rows = call.tensor("self"), call.own()
    return replace(rows, dim=rows.dim + call.output.dim() - tensor.dim())


def repeat(call: Call) -> Rows:
    tensor, rows, times = call.tensor("self"), call.own(), call.arguments["repeats"]
    at = rows.dim + len(times) - tensor.dim()
    if times[at] != 1:
        raise call.mixes("of the records of a batch")
    return replace(rows, dim=at)


def reduction(call: Call) -> Rows:
    """Over named dimensions; those before the records' are gone unless kept."""
    rows, given = call.own(), call.arguments.get("dim", call.arguments.get("dims"))
    if given is None or given == []:
        raise call.mixes("over all entries of a batch")
    dims = {_place(d, call.tensor("self").dim()) for d in ([given] if isinstance(given, int) else given)}
    if rows.dim in dims:
        raise call.mixes("over the records of a batch")
    kept = call.arguments.get("keepdim", False)
    return rows if kept else replace(rows, dim=rows.dim - sum(d < rows.dim for d in dims))


def product(left: Rows | None, right: Rows | None, call: Call, batched: int = 0) -> Rows:
    """[..., n, k] x [..., k, m]: records may lie along n or m, or along the same leading dimension of both."""
    if left is not None and right is not None:
        if left == right and left.dim < batched:
            return left
        raise call.mixes("of records with records")
    if left is not None and left.dim <= batched:
        return left
    if right is not None and (right.dim < batched or right.dim == batched + 1):
        return right
    raise call.mixes("that sums over records")


def matrices(batched: int) -> Rule:
    return lambda call: product(call.of("self"), call.of("mat2"), call, batched)


def added_matrices(call: Call) -> Rows:
    """beta input + A B, with broadcasting of the input."""
    first, second, batched = ("mat1", "mat2", 0) if "mat1" in call.arguments else ("batch1", "batch2", 1)
    if call.of(first) is None and call.of(second) is None:
        raise call.mixes("of public matrices and records")
    rows = product(call.of(first), call.of(second), call, batched)
    added = call.of("self")
    if added is not None and replace(added, dim=added.dim + call.output.dim() - call.tensor("self").dim()) != rows:
        raise call.mixes("of tensors in which records lie along different dimensions")
    return rows


def of_input(
    name: str, why: str, fits: Callable[[Rows, Call], bool] = lambda rows, call: True, public: str = "weight bias"
) -> Rule:
    """Records lie in the argument `name` alone, where `fits` allows, and stay there."""

    def rule(call: Call) -> Rows:
        call.public(*public.split())
        rows = call.own(name)
        if not fits(rows, call):
            raise call.mixes(why)
        return rows

    return rule


_SUMS, _ACROSS = "that sums over records", "across the dimension of the records"
vector = of_input("self", _SUMS, lambda rows, call: rows.dim == 0, "vec")
linear = of_input("input", _SUMS, lambda rows, call: rows.dim != call.tensor("input").dim() - 1)
convolution = of_input(
    "input", _ACROSS, lambda rows, call: rows.dim == 0 and call.tensor("input").dim() == call.tensor("weight").dim()
)
layer_norm = of_input(
    "input", _ACROSS, lambda rows, call: rows.dim < call.tensor("input").dim() - len(call.arguments["normalized_shape"])
)
group_norm = of_input("input", _ACROSS, lambda rows, call: rows.dim == 0)
embedding = of_input("indices", "", public="weight")


def trailing(count: int) -> Rule:
    """The operation works on the last `count` dimensions, and on all others entry by entry."""

    def rule(call: Call) -> Rows:
        name = next(iter(call.arguments))
        rows, width = call.own(name), call.tensor(name).dim()
        others = [value for value in _tensors(call.arguments.values()) if value is not call.tensor(name)]
        if rows.dim >= width - count or any(call.rows(value) is not None for value in others):
            raise call.mixes("across the dimension of the records")
        return rows

    return rule


def padding(call: Call) -> Rows:
    return trailing(len(call.arguments["pad"]) // 2)(call)


def batch_norm(call: Call) -> Rows:
    """By fixed statistics entry by entry; by those of the batch only where every record has channels of its own."""
    rows = call.own("input")
    training = call.arguments.get("training", call.arguments.get("train", True))
    if training and (rows.dim != 1 or call.arguments.get("running_mean") is not None):
        raise call.mixes("by statistics of the batch")
    if not training:
        call.public("weight", "bias", "running_mean", "running_var")
    return rows


def together(*names: str) -> Rule:
    """Records lie along the same dimension of all these arguments, and the operation along another one."""

    def rule(call: Call) -> Rows:
        found = {call.of(name) for name in names if isinstance(call.arguments.get(name), Tensor)}
        width = call.tensor(names[0]).dim()
        rows = next(iter(found)) if len(found) == 1 else None
        if rows is None or rows.dim == _place(call.arguments.get("dim", -1), width):
            raise call.mixes("between records, or between records and public entries")
        return rows

    return rule


def attention(call: Call) -> Rows:
    """softmax(q k^T) v of [records, heads, tokens, width]."""
    found = {call.of(name) for name in ("query", "key", "value")}
    rows = found.pop() if len(found) == 1 else None
    if rows is None or rows.dim > 1:
        raise call.mixes("between records")
    mask, own = call.arguments.get("attn_mask"), call.of("attn_mask")
    if mask is not None and own is not None and replace(own, dim=own.dim + call.output.dim() - mask.dim()) != rows:
        raise call.mixes("with a mask of other records")
    return rows


def index(call: Call) -> Rows:
    """table[i] with a public table and records' indices, or x[:, i] with records' entries and public indices."""
    tensor, given = call.tensor("self"), call.arguments["indices"]
    there = [(at, value) for at, value in enumerate(given) if value is not None]
    places = [at for at, _ in there]
    kinds = {value.dtype for _, value in there}
    if kinds & {torch.bool, torch.uint8} or places != list(range(places[0], places[0] + len(places))):
        raise call.mixes("by a mask, or by indices that are not side by side", certain=False)
    shape = torch.broadcast_shapes(*[value.shape for _, value in there])  # type: ignore[no-untyped-call]
    own = {
        (at, replace(found, dim=found.dim + len(shape) - value.dim() + places[0]))
        for at, value in there
        if (found := call.rows(value)) is not None
    }
    rows, chosen = call.of("self"), {replace(found, position=False) for _, found in own}
    by_position = {at for at, found in own if found.position}
    if len(chosen) == 1 and by_position == (set() if rows is None else {rows.dim}) and rows in (None, Rows(places[0])):
        return chosen.pop()
    if rows is not None and not own and rows.dim not in places and tensor.dim() >= len(given):
        return rows if rows.dim < places[0] else replace(rows, dim=rows.dim - len(places) + len(shape))
    raise call.mixes("of records by other records")


def index_select(call: Call) -> Rows:
    at = _place(call.arguments["dim"], call.tensor("self").dim())
    rows, chosen = call.of("self"), call.of("index")
    if rows is None and chosen is not None:
        return replace(chosen, dim=at)
    if rows is not None and chosen is None and rows.dim != at:
        return rows
    raise call.mixes("of records by other records")


def cat(call: Call) -> Rows:
    """Joined along another dimension than the records'; the same for `stack`, which makes a new one."""
    tensors = [value for value in call.arguments["tensors"] if value.dim() > 1 or value.numel()]
    found = {call.rows(value) for value in tensors}
    rows = found.pop() if len(found) == 1 else None
    if rows is None:
        raise call.mixes("of tensors in which records lie along different dimensions")
    at = _place(call.arguments.get("dim", 0), call.output.dim())
    if call.name.startswith("stack"):
        return replace(rows, dim=rows.dim + (at <= rows.dim))
    if at == rows.dim:
        raise call.mixes("along the dimension of the records")
    return rows


def summed_loss(call: Call) -> Rows:
    """A loss with reduction='none' is entry by entry."""
    if call.arguments.get("reduction", 1) != 0:
        raise call.mixes("with a mean or a sum over the batch (reduction='none' keeps a term for each record)")
    return pointwise(call)


def likelihood(call: Call) -> Rows:
    """-log p of a class: of [records, classes, ...] and [records, ...]."""
    if call.arguments["reduction"] != 0:
        raise call.mixes("with a mean or a sum over the batch (reduction='none' keeps a term for each record)")
    call.public("weight")
    rows, chosen = call.own(), call.of("target")
    if rows != chosen or rows.dim != 0:
        raise call.mixes("of records with the targets of others")
    return rows


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
