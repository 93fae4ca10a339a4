"""Table of rules for ATen operations: the record axis of an output, given the record axes of the inputs.

`flow` reads it. A tensor of a batch has one dimension along which its records lie. With b records, o = outer and
i = inner entries,

    size[dim] = o b i,   entry e of that dimension belongs to record (e // i) mod b

so that `view` may merge and split dimensions. A rule returns the output's `Rows`, or raises `MixesError` if the
operation reads along that dimension, so that an output for one record depends on other records. Rules read shapes and
dimensions, no values. An operation whose inputs hold no records needs no rule; one without a rule may mix records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor


class MixesError(Exception):
    """Raised for an operation that mixes records (`certain`), or that has no rule and may mix them."""

    def __init__(self, why: str, certain: bool = False) -> None:
        super().__init__(why)
        self.certain = certain


@dataclass(frozen=True)
class Rows:
    """Record axis of a tensor: records lie along `dim`, whose size is outer x records x inner.

    With `position`, the entries are the records' own indices in the batch (an arange), allowed in x[indices] alone.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    position: bool = False

    def size(self, records: int) -> int:
        """Return the size of dimension `dim` in a batch of so many records."""
        return self.outer * records * self.inner


@dataclass(frozen=True)
class Call:
    """One operation of a run: its arguments by name, the record axes of its tensors, and its first output."""

    name: str
    arguments: Mapping[str, Any]
    rows: Callable[[Tensor], Rows | None]
    output: Any
    records: int

    def of(self, name: str) -> Rows | None:
        """Return the record axis of an argument; None if it is no tensor, or a tensor without records."""
        value = self.arguments.get(name)
        return self.rows(value) if isinstance(value, Tensor) else None

    def tensor(self, name: str = "self") -> Tensor:
        found = self.arguments[name]
        assert isinstance(found, Tensor)
        return found

    def own(self, name: str = "self") -> Rows:
        """Return the record axis of an argument; raise `MixesError` if only other arguments hold records."""
        found = self.of(name)
        if found is None:
            raise MixesError(f"{self.name} with records in other arguments than '{name}', which may mix records")
        return found

    def dims(self) -> set[int]:
        """Return the dimensions that the argument `dim` or `dims` names; an empty set if there is neither."""
        named, width = self.arguments.get("dim", self.arguments.get("dims")), self.tensor().dim()
        return {_place(d, width) for d in ([named] if isinstance(named, int) else named or [])}

    def public(self, *names: str) -> None:
        """Raise `MixesError` if one of these arguments holds records."""
        if any(self.of(name) is not None for name in names):
            raise MixesError(f"{self.name} with records in {' or '.join(names)}, which mixes records")

    def mixes(self, why: str, certain: bool = True) -> MixesError:
        return MixesError(f"{self.name} {why}", certain)


Rule = Callable[[Call], Rows]
_OTHER_DIMS = "of tensors in which records lie along different dimensions"
_SUMS, _ACROSS = "that sums over records", "across the dimension of the records"


def _place(dim: int, width: int) -> int:
    return dim + width if dim < 0 else dim


def _tensors(values: Any) -> list[Tensor]:
    nested = [_tensors(value) if isinstance(value, list | tuple) else [value] for value in values]
    return [value for part in nested for value in part if isinstance(value, Tensor)]


def pointwise(call: Call) -> Rows:
    """Rule of elementwise operations, with broadcasting: all inputs must have the same record axis."""
    width = call.output.dim()
    axes = [(value, call.rows(value)) for value in _tensors(call.arguments.values())]
    found = {replace(rows, dim=rows.dim + width - value.dim()) for value, rows in axes if rows is not None}
    if len(found) != 1:
        raise call.mixes(_OTHER_DIMS)
    return found.pop()


def same(call: Call) -> Rows:
    """Rule of operations whose output has the first argument's shape, such as copies and random numbers."""
    return call.own(next(iter(call.arguments)))


def view(call: Call) -> Rows:
    """Rule of `view` and `reshape`, which keep the row-major order, so that the record axis is found by its stride."""
    rows, after = call.own(), call.output.shape
    stride = rows.inner * prod(call.tensor().shape[rows.dim + 1 :])
    for dim in range(len(after)):  # in which the record index lies whole
        rest = prod(after[dim + 1 :])
        if rest and after[dim] > 1 and stride % rest == 0 and after[dim] % (call.records * (stride // rest)) == 0:
            inner = stride // rest
            return Rows(dim, after[dim] // (call.records * inner), inner)
    raise call.mixes("that splits or moves the records of a batch", certain=False)


def permute(call: Call) -> Rows:
    order = [_place(d, call.tensor().dim()) for d in call.arguments["dims"]]
    return replace(call.own(), dim=order.index(call.own().dim))


def transpose(call: Call) -> Rows:
    """Rule of `transpose` and `t`, which exchange two dimensions."""
    rows, width = call.own(), call.tensor().dim()
    if "dim0" not in call.arguments and width != 2:
        return rows
    first, second = (_place(call.arguments.get(name, d), width) for d, name in enumerate(("dim0", "dim1")))
    return replace(rows, dim={first: second, second: first}.get(rows.dim, rows.dim))


def unsqueeze(call: Call) -> Rows:
    rows, at = call.own(), _place(call.arguments["dim"], call.tensor().dim() + 1)
    return replace(rows, dim=rows.dim + (at <= rows.dim))


def squeeze(call: Call) -> Rows:
    """Rule of `squeeze`, which must name dimensions: else a batch of one record would lose its record axis."""
    rows, shape, dims = call.own(), call.tensor().shape, call.dims()
    if call.arguments.get("dim") is None:
        raise call.mixes("without a dimension, which changes a batch of one record", certain=False)
    if rows.dim in dims:
        raise call.mixes("of the dimension along which records lie")
    return replace(rows, dim=rows.dim - sum(d < rows.dim and shape[d] == 1 for d in dims))


def select(call: Call) -> Rows:
    """Rule of `select` and `unbind`, which remove the dimension that they index."""
    rows, at = call.own(), _place(call.arguments["dim"], call.tensor().dim())
    if at == rows.dim:
        raise call.mixes("of single records of a batch")
    return replace(rows, dim=rows.dim - (at < rows.dim))


def along(call: Call) -> Rows:
    """Rule of softmax, cumulative sums, sorting and splitting along dimensions other than the record axis."""
    rows, dims = call.own(), call.dims()
    if not dims:
        raise call.mixes("over all entries of a batch")
    if rows.dim in dims:
        raise call.mixes("along the dimension of the records")
    return rows


def slice_(call: Call) -> Rows:
    """Rule of slices along a dimension other than the record axis, and of slices that contain all records."""
    rows, tensor = call.own(), call.tensor()
    whole = call.output.shape[rows.dim] == tensor.shape[rows.dim] if call.output.dim() == tensor.dim() else False
    everything = call.arguments.get("start") in (None, 0) and call.arguments.get("step", 1) == 1 and whole
    end = call.arguments.get("end")
    if _place(call.arguments["dim"], tensor.dim()) == rows.dim and everything and (end is None or end >= 2**31):
        return rows
    return along(call)


def expand(call: Call) -> Rows:
    """Rule of `expand`, which adds leading dimensions and repeats dimensions of size one."""
    rows = call.own()
    return replace(rows, dim=rows.dim + call.output.dim() - call.tensor().dim())


def repeat(call: Call) -> Rows:
    rows, times = call.own(), call.arguments["repeats"]
    at = rows.dim + len(times) - call.tensor().dim()
    if times[at] != 1:
        raise call.mixes("of the records of a batch")
    return replace(rows, dim=at)


def reduction(call: Call) -> Rows:
    """Rule of reductions over dimensions other than the record axis, which are removed unless `keepdim` is set."""
    rows, dims = call.own(), call.dims()
    if not dims:
        raise call.mixes("over all entries of a batch")
    if rows.dim in dims:
        raise call.mixes("over the records of a batch")
    removed = 0 if call.arguments.get("keepdim", False) else sum(d < rows.dim for d in dims)
    return replace(rows, dim=rows.dim - removed)


def product(left: Rows | None, right: Rows | None, call: Call, batched: int = 0) -> Rows:
    """Return the record axis of the product [..., n, k] x [..., k, m].

    Records may lie along n or m, or along the same leading dimension of both factors.
    """
    if left is not None and right is not None:
        if left == right and left.dim < batched:
            return left
        raise call.mixes("of records with records")
    if left is not None and left.dim <= batched:
        return left
    if right is not None and (right.dim < batched or right.dim == batched + 1):
        return right
    raise call.mixes(_SUMS)


def added_matrices(call: Call) -> Rows:
    """Rule of `addmm` and `baddbmm`, which add an input, with broadcasting, to a matrix product."""
    first, second, batched = ("mat1", "mat2", 0) if "mat1" in call.arguments else ("batch1", "batch2", 1)
    if call.of(first) is None and call.of(second) is None:
        raise call.mixes("of public matrices and records")
    rows, added = product(call.of(first), call.of(second), call, batched), call.of("self")
    if added is not None and replace(added, dim=added.dim + call.output.dim() - call.tensor().dim()) != rows:
        raise call.mixes(_OTHER_DIMS)
    return rows


def of_input(
    name: str, why: str, fits: Callable[[Rows, Call], bool] = lambda rows, call: True, public: str = "weight bias"
) -> Rule:
    """Return the rule of operations with records in argument `name` alone, whose axis the output has too.

    `fits` checks that axis, and `why` is the reason if it does not fit; the arguments in `public` hold no records."""

    def rule(call: Call) -> Rows:
        call.public(*public.split())
        rows = call.own(name)
        if not fits(rows, call):
            raise call.mixes(why)
        return rows

    return rule


def trailing(count: int) -> Rule:
    """Return the rule of operations on the last `count` dimensions, which must not contain the record axis."""

    def rule(call: Call) -> Rows:
        name = next(iter(call.arguments))
        rows, width = call.own(name), call.tensor(name).dim()
        others = [value for value in _tensors(call.arguments.values()) if value is not call.tensor(name)]
        if rows.dim >= width - count or any(call.rows(value) is not None for value in others):
            raise call.mixes(_ACROSS)
        return rows

    return rule


def batch_norm(call: Call) -> Rows:
    """Rule of batch norm, which is allowed with fixed statistics, or if each record has its own channels."""
    rows = call.own("input")
    training = call.arguments.get("training", call.arguments.get("train", True))
    if training and (rows.dim != 1 or call.arguments.get("running_mean") is not None):
        raise call.mixes("by statistics of the batch")
    if not training:
        call.public("weight", "bias", "running_mean", "running_var")
    return rows


def together(*names: str) -> Rule:
    """Return the rule of `gather` and `scatter`: these arguments have one record axis, and `dim` is another one."""

    def rule(call: Call) -> Rows:
        found = {call.of(name) for name in names if isinstance(call.arguments.get(name), Tensor)}
        rows = next(iter(found)) if len(found) == 1 else None
        if rows is None or rows.dim == _place(call.arguments.get("dim", -1), call.tensor(names[0]).dim()):
            raise call.mixes("between records, or between records and public entries")
        return rows

    return rule


def attention(call: Call) -> Rows:
    """Rule of attention softmax(q k^T) v, whose arguments are [records, heads, tokens, width]."""
    found = {call.of(name) for name in ("query", "key", "value")}
    rows = found.pop() if len(found) == 1 else None
    if rows is None or rows.dim > 1:
        raise call.mixes("between records")
    mask, own = call.arguments.get("attn_mask"), call.of("attn_mask")
    if mask is not None and own is not None and replace(own, dim=own.dim + call.output.dim() - mask.dim()) != rows:
        raise call.mixes("with a mask of other records")
    return rows


def index(call: Call) -> Rows:
    """Rule of indexing: table[i] with a public table and indices from records, and x[:, i] with public indices."""
    tensor, indices = call.tensor(), call.arguments["indices"]
    there = [(at, value) for at, value in enumerate(indices) if value is not None]
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
    if rows is not None and not own and rows.dim not in places and tensor.dim() >= len(indices):
        return rows if rows.dim < places[0] else replace(rows, dim=rows.dim - len(places) + len(shape))
    raise call.mixes("of records by other records")


def index_select(call: Call) -> Rows:
    at = _place(call.arguments["dim"], call.tensor().dim())
    rows, chosen = call.of("self"), call.of("index")
    if rows is None and chosen is not None:
        return replace(chosen, dim=at)
    if rows is not None and chosen is None and rows.dim != at:
        return rows
    raise call.mixes("of records by other records")


def cat(call: Call) -> Rows:
    """Rule of `cat` along a dimension other than the record axis, and of `stack` along a new dimension."""
    tensors = [value for value in call.arguments["tensors"] if value.dim() > 1 or value.numel()]
    found = {call.rows(value) for value in tensors}
    rows = found.pop() if len(found) == 1 else None
    if rows is None:
        raise call.mixes(_OTHER_DIMS)
    at = _place(call.arguments.get("dim", 0), call.output.dim())
    if call.name.startswith("stack"):
        return replace(rows, dim=rows.dim + (at <= rows.dim))
    if at == rows.dim:
        raise call.mixes("along the dimension of the records")
    return rows


def unreduced_loss(call: Call) -> Rows:
    """Rule of losses with reduction='none': elementwise losses, and -log p of a class for [records, classes, ...]."""
    if call.arguments.get("reduction", 1) != 0:
        raise call.mixes("with a mean or a sum over the batch (reduction='none' keeps a term for each record)")
    if not call.name.startswith("nll"):
        return pointwise(call)
    call.public("weight")
    rows = call.own()
    if rows != call.of("target") or rows.dim != 0:
        raise call.mixes("of records with the targets of others")
    return rows


def _batched_images(rows: Rows, call: Call) -> bool:
    return rows.dim == 0 and call.tensor("input").dim() == call.tensor("weight").dim()


def _before_normalized(rows: Rows, call: Call) -> bool:
    return rows.dim < call.tensor("input").dim() - len(call.arguments["normalized_shape"])


_TABLE: tuple[tuple[Rule, str], ...] = (
    (same, "clone alias detach _to_copy contiguous empty_like zeros_like ones_like full_like rand_like randn_like"),
    (same, "randint_like bernoulli normal uniform exponential native_dropout lift_fresh lift _conj resolve_conj zero"),
    (same, "fill random log_normal cauchy geometric"),
    (view, "view _unsafe_view reshape _reshape_alias"),
    (permute, "permute"),
    (transpose, "transpose t"),
    (unsqueeze, "unsqueeze"),
    (squeeze, "squeeze"),
    (select, "select unbind"),
    (slice_, "slice"),
    (
        along,
        "_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp sort flip roll cummax",
    ),
    (along, "cummin topk split unsafe_split split_with_sizes unsafe_split_with_sizes glu argsort"),
    (expand, "expand"),
    (repeat, "repeat"),
    (
        reduction,
        "sum mean amax amin max min argmax argmin var std var_mean std_mean logsumexp any all prod norm median",
    ),
    (reduction, "linalg_vector_norm nanmedian mode nansum nanmean count_nonzero aminmax kthvalue"),
    (lambda call: product(call.of("self"), call.of("mat2"), call, 0), "mm"),
    (lambda call: product(call.of("self"), call.of("mat2"), call, 1), "bmm"),
    (added_matrices, "addmm baddbmm"),
    (of_input("self", _SUMS, lambda rows, call: rows.dim == 0, "vec"), "mv"),
    (of_input("input", _SUMS, lambda rows, call: rows.dim != call.tensor("input").dim() - 1), "linear"),
    (of_input("input", _ACROSS, _batched_images), "convolution conv1d conv2d conv3d"),
    (trailing(1), "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d"),
    (trailing(1), "upsample_linear1d max_pool1d_with_indices reflection_pad1d replication_pad1d"),
    (trailing(2), "max_pool2d avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_avg_pool2d tril triu"),
    (trailing(2), "adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d reflection_pad2d"),
    (trailing(2), "replication_pad2d _upsample_bilinear2d_aa"),
    (trailing(3), "max_pool3d avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_max_pool3d im2col"),
    (trailing(3), "upsample_nearest3d upsample_trilinear3d replication_pad3d pixel_shuffle pixel_unshuffle"),
    (trailing(3), "channel_shuffle native_channel_shuffle"),
    (lambda call: trailing(len(call.arguments["pad"]) // 2)(call), "constant_pad_nd"),
    (of_input("input", _ACROSS, _before_normalized), "native_layer_norm layer_norm _fused_rms_norm rms_norm"),
    (of_input("input", _ACROSS, lambda rows, call: rows.dim == 0), "native_group_norm group_norm"),
    (batch_norm, "native_batch_norm _native_batch_norm_legit batch_norm _native_batch_norm_legit_no_training"),
    (of_input("indices", "", public="weight"), "embedding"),
    (together("self", "index"), "gather"),
    (together("self", "index", "src"), "scatter scatter_add scatter_reduce"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"),
    (attention, "_scaled_dot_product_flash_attention scaled_dot_product_attention"),
    (index, "index _unsafe_index"),
    (index_select, "index_select"),
    (cat, "cat stack"),
    (unreduced_loss, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss nll_loss_forward"),
    (unreduced_loss, "binary_cross_entropy_with_logits nll_loss2d_forward"),
    (pointwise, "masked_fill copy where clamp dropout"),
)


def _words(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


RULES: dict[str, Rule] = {name: rule for rule, names in _TABLE for name in names.split()}

# Operations of which only the first output has a rule; a graph that reads another output is refused.
FIRST_ONLY = _words(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit nll_loss_forward _fused_rms_norm",
    "_native_batch_norm_legit_no_training _scaled_dot_product_flash_attention_for_cpu nll_loss2d_forward",
    "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention",
)
# Public tensors whose size may be the number of records: every entry is the same constant, or a fresh random number.
UNIFORM = _words(
    "zeros ones full empty rand randn new_zeros new_ones new_full new_empty expand repeat empty_strided",
    "new_empty_strided",
)
# Operations that are allowed on the indices of records in a batch (an arange).
POSITIONS = _words(
    "view _unsafe_view unsqueeze expand index _unsafe_index clone alias detach _to_copy slice permute transpose",
    "lift_fresh reshape squeeze",
)
# Arguments that are sizes, and the operations in which such an argument may be the number of records.
SIZES = frozenset({"size", "shape", "N", "repeats", "stride"})
SIZED = UNIFORM | {"view", "_unsafe_view", "reshape", "_reshape_alias", "native_group_norm"}
