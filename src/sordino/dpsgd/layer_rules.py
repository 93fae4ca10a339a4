"""Per-record gradient rules of layers: how a layer runs while it is recorded, and its gradients. Used by rule_table.py.

A rule is `rule(tape, module, axis, *args, **kwargs) -> output`; records lie along `axis`. In all formulas g_jt is the
gradient of the loss at the layer's output for record j and position t, x_jt the input there, (x) the outer product, and
dW_j the gradient of record j for weights W. Layers of other libraries are recognised by class name, without importing
the library; their rule is used only if it agrees with the layer's output on synthetic inputs.

    Conv1D (transformers)      x W + c, a Linear whose weight is transposed
    ...RMSNorm                 w * x / sqrt(mean x^2 + eps)

Convolutions in one, two or three dimensions are products with patches, channels last:

y_jt = W p_jt + c   with p_jt the patch of record j under position t, so   dW_j = sum_t g_jt (x) p_jt

nn.MultiheadAttention runs as recorded linear maps. LSTM, GRU and RNN run as a loop over time, in which the gradient of
every gate before its activation is available:

a_t = W x_t + b + V h_{t-1} + c      so   dW_j = sum_t g_jt (x) x_jt,   dV_j = sum_t g_jt (x) h_j,t-1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map

from sordino.dpsgd.pieces import (
    Lookup,
    Outer,
    OutputGradients,
    Pieces,
    Rows,
    Tape,
    UnrecordableError,
    chunks,
    identity,
    wide,
)
from sordino.errors import PlanError

Rule = Callable[..., Any]  # (tape, module, axis, *args, **kwargs) -> output


def linear(
    tape: Tape, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, axis: int = 0, transposed: bool = False
) -> Tensor:
    """Run and record a linear map x W^T + c, or x W + c if `transposed`.

    With output gradients g_jt of record j at position t: dW_j = sum_t g_jt (x) x_jt, and dc_j = sum_t g_jt.
    """
    inputs = tape.records(x, axis, 2)

    def use(slope: Tensor) -> Pieces:
        outputs = tape.records(slope, axis, 2)
        yield weight, Outer(inputs, OutputGradients(outputs), torch.adjoint if transposed else identity)
        if bias is not None:
            yield bias, Rows(outputs.sum(1) if outputs.shape[1] > 1 else outputs[:, 0])

    matrix = weight.detach().t() if transposed else weight.detach()
    output = F.linear(x.reshape(-1, x.shape[-1]), matrix, fixed(bias))
    return tape.watch(output, use, inputs, axis, (*x.shape[:-1], len(matrix)))


def fixed(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


def embedding(tape: Tape, module: nn.Embedding, axis: int, input: Tensor) -> Tensor:
    """Run and record an embedding W[index].

    With output gradients g_jt of record j at position t: dW_j[v] = sum_{t: index_jt = v} g_jt, without the padding
    index. Indices [1, ...] shared by all records (positions) are expanded to [b, ...], so that gradients are separate.
    """
    if axis == 0 and input.dim() > 1 and len(input) == 1 and tape.batch > 1:
        input = input.expand(tape.batch, *input.shape[1:])
    index = tape.records(input, axis, 1)

    def use(slope: Tensor) -> Pieces:
        outputs = tape.records(slope, axis, 2)
        if module.padding_idx is not None:
            outputs = outputs.masked_fill((index == module.padding_idx)[..., None], 0.0)
        yield module.weight, Lookup(index, outputs, module.num_embeddings)  # type: ignore[misc]

    return tape.watch(F.embedding(input, module.weight.detach(), module.padding_idx), use, index, axis)


def layer_norm(tape: Tape, module: nn.LayerNorm | nn.RMSNorm, axis: int, input: Tensor) -> Tensor:
    """Run and record a layer norm w * n(x) + c, where n(x) is the normalised input.

    With output gradients g_jt of record j at position t: dw_j = sum_t g_jt n_jt, and dc_j = sum_t g_jt.
    """
    shape, bias = list(module.normalized_shape), getattr(module, "bias", None)

    def normal(x: Tensor) -> Tensor:
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, shape, None, module.eps)
        return F.layer_norm(x, shape, None, None, module.eps)

    def use(slope: Tensor) -> Pieces:
        x, g = (tape.records(part, axis, len(shape) + 1) for part in (input, slope))
        return _gain_pieces(module.weight, bias, normal, x, g, (1,))

    if isinstance(module, nn.RMSNorm):
        output = F.rms_norm(input, shape, module.weight.detach(), module.eps)
    else:
        output = F.layer_norm(input, shape, module.weight.detach(), fixed(bias), module.eps)
    return tape.watch(output, use, input.detach(), axis)


def group_norm(tape: Tape, module: Any, axis: int, input: Tensor) -> Tensor:
    """Run and record a GroupNorm, or an InstanceNorm without running statistics."""
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else module.num_features
    tape.check(input, axis, 2)

    def normal(x: Tensor) -> Tensor:
        return F.group_norm(x, groups, None, None, module.eps)

    def use(slope: Tensor) -> Pieces:
        return _gain_pieces(module.weight, module.bias, normal, input.detach(), slope, tuple(range(2, input.dim())))

    output = F.group_norm(input, groups, module.weight.detach(), module.bias.detach(), module.eps)
    return tape.watch(output, use, input.detach())


def _gain_pieces(
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    normal: Callable[[Tensor], Tensor],
    x: Tensor,
    slope: Tensor,
    dims: tuple[int, ...],
) -> Pieces:
    """Return the gradients of a norm's weight, sum g_j n(x_j) over `dims`, and of its bias, sum g_j, per record j.

    g_j are output gradients; the normalised input n(x_j) is computed again here to save memory.
    """
    products, sums = [], []
    for some in chunks(slice(0, len(x)), 3 * x[:1].numel()):
        both = slope[some] * normal(wide(x[some])), slope[some]
        product, total = (part.sum(dims) if dims else part for part in both)
        products.append(product)
        sums.append(total)
    yield weight, Rows(torch.cat(products))
    if bias is not None:
        yield bias, Rows(torch.cat(sums))


def third_party_rule(module: nn.Module) -> Rule | None:
    """Return the per-record gradient rule of a layer of another library; None for an unknown layer."""
    kind, names = type(module).__name__, module._parameters.keys()
    if kind == "Conv1D" and names == {"weight", "bias"}:
        return transposed_linear if _agrees(module, lambda own, x: torch.addmm(own.bias, x, own.weight)) else None
    if kind.endswith("RMSNorm") and names == {"weight"} and (eps := _eps(module)):
        return rms_norm if _agrees(module, lambda own, x: F.rms_norm(x, x.shape[-1:], None, eps) * own.weight) else None
    return None


def transposed_linear(tape: Tape, module: Any, axis: int, *args: Tensor, **kwargs: Tensor) -> Tensor:
    (x,) = (*args, *kwargs.values())
    return linear(tape, x, module.weight, module.bias, axis, transposed=True)


def rms_norm(tape: Tape, module: Any, axis: int, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Run and record an RMSNorm w * n(x); with output gradients g_jt of record j, dw_j = sum_t g_jt n_jt."""
    (x,) = (*args, *kwargs.values())

    def normal(some: Tensor) -> Tensor:
        return F.rms_norm(wide(some), some.shape[-1:], None, _eps(module)).to(some.dtype)

    def use(slope: Tensor) -> Pieces:
        inputs, g = (tape.records(part, axis, 2) for part in (x, slope))
        return _gain_pieces(module.weight, None, normal, inputs, g, (1,))

    return tape.watch(normal(x) * module.weight.detach(), use, x.detach(), axis)


def _eps(module: Any) -> float:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return found if isinstance(found, float) else 0.0


def _agrees(module: nn.Module, formula: Callable[[Any, Tensor], Tensor]) -> bool:
    """Return whether the layer's forward equals the formula on synthetic inputs, with the layer's weights."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    x = torch.linspace(-1.0, 2.0, 3 * len(weight)).view(3, -1).to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            return torch.allclose(type(module).forward(module, x), formula(module, x), rtol=1e-3, atol=1e-5)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False


Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_RUN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolution(tape: Tape, module: Conv, axis: int, input: Tensor) -> Tensor:
    """Run and record a convolution as a product with patches p_jt, of record j at position t.

    With output gradients g_jt: dW_j = sum_t g_jt (x) p_jt, and dc_j = sum_t g_jt.
    """
    tape.check(input, axis, len(module.kernel_size) + 2)
    last = len(module.kernel_size) == 2 and (
        tape.channels_last or any(suggest_memory_format(t) == torch.channels_last for t in (input, module.weight))
    )
    products = not input.requires_grad and module.groups == 1  # of patches, faster where there are few channels
    input = input.contiguous(memory_format=torch.channels_last) if last and not products else input
    native = module.padding_mode == "zeros"  # padded by the convolution itself
    x = input if native else _padded(module, input)
    cut = partial(_cut, module, native)

    def use(slope: Tensor) -> Pieces:
        outputs = slope if products else slope.movedim(1, -1).reshape(len(slope), -1, module.out_channels)
        yield module.weight, _piece(module, x.detach(), cut, outputs)  # type: ignore[misc]
        if module.bias is not None:
            yield module.bias, Rows(outputs.sum(1))  # type: ignore[misc]

    weight, bias = module.weight.detach(), fixed(module.bias)
    if not products:
        run: Any = _RUN[len(module.kernel_size)]
        padding = module.padding if native else 0
        return tape.watch(run(x, weight, bias, module.stride, padding, module.dilation, module.groups), use, x)
    flat = weight.movedim(1, -1).flatten(1)  # in the order of the patches
    parts = [F.linear(cut(x[some]), flat, bias) for some in chunks(slice(0, len(x)), cut(x[:1]).numel())]
    output = tape.watch(torch.cat(parts), use, x)
    sides = _sides(module, _padded(module, x[:1]) if native else x)
    image = output.view(len(x), *sides, module.out_channels).movedim(-1, 1)
    return image if last else image.contiguous()


def _cut(module: Conv, native: bool, x: Tensor) -> Tensor:
    return patches(module, _padded(module, x) if native else x)


def _padded(module: Conv, x: Tensor) -> Tensor:
    if not any(module._reversed_padding_repeated_twice):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, tuple(module._reversed_padding_repeated_twice), mode=mode)


def _sides(module: Conv, x: Tensor) -> list[int]:
    """Return the number of positions of the kernel along each dimension of a padded input."""
    shape = zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    return [(side - dilation * (kernel - 1) - 1) // stride + 1 for side, kernel, stride, dilation in shape]


def patches(module: Conv, x: Tensor) -> Tensor:
    """Return the patches [b, positions, kernel entries * C] that a convolution reads of a padded input [b, C, ...]."""
    last = x.movedim(1, -1).contiguous()
    steps = last.stride()[1:-1]
    strides = [step * stride for step, stride in zip(steps, module.stride, strict=True)]
    inside = [step * dilation for step, dilation in zip(steps, module.dilation, strict=True)]
    sides = _sides(module, x)
    size = (len(x), *sides, *module.kernel_size, x.shape[1])
    view = last.as_strided(size, (last.stride(0), *strides, *inside, 1))
    return view.reshape(len(x), prod(sides), prod(module.kernel_size) * x.shape[1])


@dataclass(frozen=True)
class _KernelShape:
    """Reshape of a product with patches to a convolution weight: the input channels move before the kernel axes."""

    shape: tuple[int, ...]

    def __call__(self, flat: Tensor) -> Tensor:
        return flat.view(*flat.shape[:-1], *self.shape).movedim(-1, -1 - len(self.shape[:-1]))


def _piece(module: Conv, x: Tensor, cut: Callable[[Tensor], Tensor], outputs: Tensor) -> Outer | Rows:
    reshape = _KernelShape((*module.kernel_size, module.in_channels // module.groups))
    if module.groups == 1:
        sides = module._reversed_padding_repeated_twice
        fast = partial(_weight_gradient, module) if sides[::2] == sides[1::2] else None  # "same" may pad one side more
        return Outer(x, OutputGradients(outputs), reshape, cut, fast)
    parts = []
    for some in chunks(slice(0, len(x)), 2 * cut(x[:1]).numel()):
        whole = wide(cut(x[some]))
        # [b, T, kernel, groups, C / groups]
        split = whole.view(*whole.shape[:2], prod(module.kernel_size), module.groups, -1)
        inputs = split.permute(0, 3, 1, 2, 4).flatten(3)
        slopes = outputs[some].reshape(len(whole), whole.shape[1], module.groups, -1).permute(0, 2, 3, 1)
        parts.append(torch.matmul(slopes, inputs).flatten(1, 2))
    return Rows(torch.cat(parts), reshape)


def _weight_gradient(module: Conv, slopes: Tensor, x: Tensor) -> Tensor:
    """Return the weight gradient of a convolution, summed over images x with output gradients `slopes`, by torch."""
    padded = module.padding_mode != "zeros"  # then x is padded already
    image = slopes.view(len(slopes), *_sides(module, x if padded else _padded(module, x[:1])), -1).movedim(-1, 1)
    pads = [0] * len(module.stride) if padded else list(module._reversed_padding_repeated_twice[::-2])
    grad = torch.ops.aten.convolution_backward  # (slope, input, weight, bias sizes, ..., which of the three)
    weight = module.weight.detach().to(slopes.dtype)
    options = (list(module.stride), pads, list(module.dilation), False, [0] * len(pads), 1, [False, True, False])
    found: Tensor = grad(image, x, weight, None, *options)[1]
    return found


def attention(
    tape: Tape,
    module: nn.MultiheadAttention,
    axis: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run multi-head attention softmax(q k^T / sqrt(d)) v; all four projections are recorded linear maps."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's own message
    if module.bias_k is not None or module.add_zero_attn or query.dim() != 3:
        raise UnrecordableError("an attention layer with bias_k, with add_zero_attn, or on inputs without a batch axis")
    first = query.transpose(0, 1) if not module.batch_first else query
    same = query is key and key is value
    others = (key, value) if module.batch_first else (key.transpose(0, 1), value.transpose(0, 1))
    parts = _projections(tape, module, first, *others, same=same)
    q, k, v = (x.view(*x.shape[:2], module.num_heads, -1).transpose(1, 2) for x in parts)  # [b, heads, T, E / heads]
    bias = _bias(attn_mask, key_padding_mask, q, k)
    dropout = module.dropout if module.training else 0.0
    if need_weights:
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        weights = torch.softmax(scores if bias is None else scores + bias, 3)
        weights = F.dropout(weights, dropout) if dropout else weights
        values, returned = weights @ v, weights.mean(1) if average_attn_weights else weights
    else:
        values, returned = F.scaled_dot_product_attention(q, k, v, bias, dropout), None
    out = linear(tape, values.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)  # type: ignore[arg-type]
    return (out if module.batch_first else out.transpose(0, 1)), returned


def _projections(
    tape: Tape, module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *, same: bool
) -> tuple[Tensor, ...]:
    """Return q, k and v, by one product if query, key and value are the same tensor, else by three.

    The three blocks of a shared weight are one parameter, so the gradient of a block is padded with zeros.
    """
    bias: nn.Parameter | None = module.in_proj_bias
    whole: nn.Parameter | None = module.in_proj_weight
    if whole is not None and same:
        return linear(tape, query, whole, bias).chunk(3, 2)
    own = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if whole is None else whole.chunk(3)
    pairs = enumerate(zip((query, key, value), own, strict=True))
    return tuple(_part(tape, n, x, weight, bias, whole) for n, (x, weight) in pairs)


def _part(
    tape: Tape, n: int, x: Tensor, weight: Tensor, bias: nn.Parameter | None, whole: nn.Parameter | None
) -> Tensor:
    inputs = tape.records(x, 0, 2)

    def use(slope: Tensor) -> Pieces:
        block = (n * slope.shape[2], (2 - n) * slope.shape[2])
        if whole is None:
            yield weight, Outer(inputs, OutputGradients(slope))  # type: ignore[misc]
        else:
            yield whole, Outer(inputs, OutputGradients(F.pad(slope, block)))
        if bias is not None:
            yield bias, Rows(F.pad(slope.sum(1), block))

    flat = F.linear(x.reshape(-1, x.shape[2]), weight.detach(), None if bias is None else bias.detach().chunk(3)[n])
    return tape.watch(flat, use, inputs, shape=(*x.shape[:2], len(weight)))


def _bias(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return attention mask and key padding mask as one additive mask for the attention scores."""
    total: Tensor | None = None
    if attn_mask is not None:
        mask = _additive(attn_mask, q)
        total = mask.view(len(q), -1, *mask.shape[1:]) if mask.dim() == 3 else mask
    if padding is not None:
        hidden = _additive(padding, q)[:, None, None, :]
        total = hidden if total is None else total + hidden
    return None if total is None else total.expand(len(q), -1, q.shape[2], k.shape[2])


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)  # True means masked


Cell = Callable[[Tape, "_Weights", Tensor, tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]]


class _Weights:
    """Parameters of one recurrent layer in one direction: weights w of inputs and v of states, and their biases."""

    def __init__(self, module: nn.RNNBase, layer: int, backward: bool) -> None:
        suffix = f"_l{layer}" + ("_reverse" if backward else "")
        self.w: nn.Parameter = getattr(module, "weight_ih" + suffix)
        self.v: nn.Parameter = getattr(module, "weight_hh" + suffix)
        self.b: nn.Parameter | None = getattr(module, "bias_ih" + suffix, None)
        self.c: nn.Parameter | None = getattr(module, "bias_hh" + suffix, None)


def recurrence(
    tape: Tape, module: nn.RNNBase, axis: int, input: Tensor, hx: Any = None
) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    """Run nn.LSTM, nn.GRU or nn.RNN; return outputs and last states as the module does."""
    if not isinstance(input, Tensor):
        found, needed = "a packed sequence as input of a recurrent layer", "a padded tensor"
        raise PlanError("per-record", found, needed, "pad the records to one length")
    if torch.is_autocast_enabled(input.device.type):
        with torch.autocast(input.device.type, enabled=False):  # the loop over time runs in one dtype
            own = next(module.parameters()).dtype
            return recurrence(tape, module, axis, input.to(own), tree_map(lambda h: h if h is None else h.to(own), hx))
    tape.check(input, 0 if module.batch_first else 1, 3)
    x = input.transpose(0, 1) if module.batch_first else input  # [T, b, I]
    if hx is None:
        many, parts = module.num_layers * (2 if module.bidirectional else 1), 2 if isinstance(module, nn.LSTM) else 1
        hx = (x.new_zeros(many, x.shape[1], module.hidden_size),) * parts
    states, ends = tuple(hx) if isinstance(hx, tuple | list) else (hx,), []
    for layer in range(module.num_layers):
        if layer and module.dropout and module.training:
            x = F.dropout(x, module.dropout)
        x, last = _layer(tape, module, layer, x, states)
        ends += last
    final = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x.transpose(0, 1) if module.batch_first else x), (final if len(final) > 1 else final[0])


def _layer(
    tape: Tape, module: nn.RNNBase, layer: int, x: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Run one recurrent layer in one or both directions; return outputs and last states."""
    cell: Cell = partial(_plain, torch.relu if getattr(module, "nonlinearity", "tanh") == "relu" else torch.tanh)
    if isinstance(module, nn.LSTM | nn.GRU):
        cell = _lstm if isinstance(module, nn.LSTM) else _gru
    directions = (False, True) if module.bidirectional else (False,)
    outputs, ends = [], []
    for backward in directions:
        start = tuple(state[layer * len(directions) + backward] for state in states)
        out, end = cell(tape, _Weights(module, layer, backward), x.flip(0) if backward else x, start)
        outputs.append(out.flip(0) if backward else out)
        ends.append(end)
    return (torch.cat(outputs, 2) if len(directions) == 2 else outputs[0]), ends


def _lstm(tape: Tape, of: _Weights, x: Tensor, start: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run an LSTM over time: i, f, o = sigmoid;  c_t = f c_{t-1} + i tanh(.);  h_t = o tanh(c_t)."""
    inputs, states = tape.records(x, 1, 2), list[Tensor]()  # h_0, ..., h_T, [T + 1, b, H]

    def use(slope: Tensor) -> Pieces:
        gates = OutputGradients(tape.records(slope, 1, 2), shared=True)
        yield of.w, Outer(inputs, gates)
        yield of.v, Outer(states[0][:-1].transpose(0, 1), gates)
        gates.forget()
        sums = Rows(gates.value.sum(1))
        yield of.b, sums
        yield of.c, sums

    bias = None if of.b is None or of.c is None else (of.b + of.c).detach()
    flat = F.linear(x.reshape(-1, x.shape[2]), of.w.detach(), bias)
    gates = tape.watch(flat, use, inputs, 1, (*x.shape[:2], len(of.w)))
    outputs, last = _LstmLoop.apply(gates, of.v.detach(), *start, states)  # type: ignore[no-untyped-call]
    return outputs, (outputs[-1], last)


class _LstmLoop(torch.autograd.Function):
    """Recurrence of an LSTM over time with its backward, given the input's contribution to the gates [T, b, 4 H]."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, v: Tensor, h: Tensor, c: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        steps, size = len(gates), h.shape[1]
        cells, hidden = gates.new_empty(steps + 1, *c.shape), gates.new_empty(steps + 1, *h.shape)
        outputs, curved = hidden[1:], gates.new_empty(steps, *c.shape)
        cells[0], hidden[0] = c, h
        states.append(hidden)
        turned = v.t().contiguous()
        for t in range(steps):
            a = gates[t].addmm_(h, turned)  # in place: nothing else needs the gates
            a[:, : 2 * size].sigmoid_()
            a[:, 2 * size : 3 * size].tanh_()
            a[:, 3 * size :].sigmoid_()
            i, f, n, o = a.chunk(4, 1)
            torch.addcmul(f * cells[t], i, n, out=cells[t + 1])
            torch.tanh(cells[t + 1], out=curved[t])
            h = torch.mul(o, curved[t], out=outputs[t])
        ctx.save_for_backward(gates.detach(), cells, curved, v)
        return outputs, cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        opened, cells, curved, v = ctx.saved_tensors
        dh, dc = torch.zeros_like(cells[0]), slopes[1].clone()
        gates, one = torch.empty_like(opened), opened.new_ones(())
        for t in range(len(opened) - 1, -1, -1):
            i, f, n, o = opened[t].chunk(4, 1)
            dh = slopes[0][t] if t == len(opened) - 1 else dh.add_(slopes[0][t])
            dc.addcmul_(dh * o, torch.addcmul(one, curved[t], curved[t], value=-1))
            inner = torch.addcmul(opened[t], opened[t], opened[t], value=-1)  # s (1 - s)
            torch.addcmul(one, n, n, value=-1, out=inner.chunk(4, 1)[2])  # 1 - n^2
            pairs = (n, dc), (cells[t], dc), (i, dc), (curved[t], dh)  # before the slopes of the gates' activations
            for part, (a, b) in zip(gates[t].chunk(4, 1), pairs, strict=True):
                torch.mul(a, b, out=part)
            gates[t].mul_(inner)
            dh, dc = gates[t] @ v, dc.mul_(f)
        return gates, None, dh, dc, None


def _gru(tape: Tape, of: _Weights, x: Tensor, start: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a GRU over time: r, z = sigmoid;  n = tanh(W x + r (V h));  h_t = (1 - z) n + z h_{t-1}."""
    (h,), outputs = start, []
    for part in linear(tape, x, of.w, of.b, axis=1):
        first, second = part.chunk(3, 1), linear(tape, h, of.v, of.c).chunk(3, 1)
        r, z = torch.sigmoid(first[0] + second[0]), torch.sigmoid(first[1] + second[1])
        n = torch.tanh(first[2] + r * second[2])
        h = n + z * (h - n)
        outputs.append(h)
    return torch.stack(outputs), (h,)


def _plain(
    act: Callable[[Tensor], Tensor], tape: Tape, of: _Weights, x: Tensor, start: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (h,), outputs = start, []
    for part in linear(tape, x, of.w, of.b, axis=1):
        h = act(part + linear(tape, h, of.v, of.c))
        outputs.append(h)
    return torch.stack(outputs), (h,)
