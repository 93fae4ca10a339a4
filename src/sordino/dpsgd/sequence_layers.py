"""Rules of sequence layers: nn.MultiheadAttention as recorded linear maps, LSTM, GRU and RNN written out over time.

a_t = W x_t + b + V h_{t-1} + c      so   dW_j = sum_t g_jt (x) x_jt,   dV_j = sum_t g_jt (x) h_j,t-1

Over time, so that the gradient of every gate before its activation is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map

from sordino.dpsgd.layer_rules import linear
from sordino.dpsgd.pieces import Outer, OutputGradients, Pieces, Rows, Tape, UnrecordableError
from sordino.errors import PlanError


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
    """softmax(q k^T / sqrt(d)) v per head, with q, k, v and the output linear; as the module returns it."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch says
    if module.bias_k is not None or module.add_zero_attn or query.dim() != 3:
        raise UnrecordableError("an attention with bias_k, add_zero_attn or without a batch")
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
        mixed, shown = weights @ v, weights.mean(1) if average_attn_weights else weights
    else:
        mixed, shown = F.scaled_dot_product_attention(q, k, v, bias, dropout), None
    out = linear(tape, mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)  # type: ignore[arg-type]
    return (out if module.batch_first else out.transpose(0, 1)), shown


def _projections(
    tape: Tape, module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *, same: bool
) -> tuple[Tensor, ...]:
    """q, k and v, [b, T, E] each; one product where all three are the same tensor.

    Else three maps; a shared weight `whole` and the bias are three blocks of one parameter, so rows padded with zeros.
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
    """Both masks as one additive mask that broadcasts to [b, heads, T, S]."""
    total: Tensor | None = None
    if attn_mask is not None:
        mask = _additive(attn_mask, q)
        total = mask.view(len(q), -1, *mask.shape[1:]) if mask.dim() == 3 else mask
    if padding is not None:
        hidden = _additive(padding, q)[:, None, None, :]
        total = hidden if total is None else total + hidden
    return None if total is None else total.expand(len(q), -1, q.shape[2], k.shape[2])


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """True means hidden."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


Cell = Callable[[Tape, "_Weights", Tensor, tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]]


class _Weights:
    """One layer in one direction: W, V and their biases, if any."""

    def __init__(self, module: nn.RNNBase, layer: int, backward: bool) -> None:
        suffix = f"_l{layer}" + ("_reverse" if backward else "")
        self.w: nn.Parameter = getattr(module, "weight_ih" + suffix)
        self.v: nn.Parameter = getattr(module, "weight_hh" + suffix)
        self.b: nn.Parameter | None = getattr(module, "bias_ih" + suffix, None)
        self.c: nn.Parameter | None = getattr(module, "bias_hh" + suffix, None)


def recurrence(
    tape: Tape, module: nn.RNNBase, axis: int, input: Tensor, hx: Any = None
) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    """What `nn.LSTM`, `nn.GRU` and `nn.RNN` return."""
    if not isinstance(input, Tensor):
        raise PlanError("per-record", "a packed sequence", "padded records", "pad the windows to one length")
    if torch.is_autocast_enabled(input.device.type):
        with torch.autocast(input.device.type, enabled=False):  # the loop over time is written out in one type
            own = next(module.parameters()).dtype
            return recurrence(tape, module, axis, input.to(own), tree_map(lambda h: h if h is None else h.to(own), hx))
    tape.check(input, 0 if module.batch_first else 1, 3)
    x = input.transpose(0, 1) if module.batch_first else input  # [T, b, I]
    states, ends = _start(module, x, hx), []
    for layer in range(module.num_layers):
        if layer and module.dropout and module.training:
            x = F.dropout(x, module.dropout)
        x, last = _layer(tape, module, layer, x, states)
        ends += last
    final = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x.transpose(0, 1) if module.batch_first else x), (final if len(final) > 1 else final[0])


def _start(module: nn.RNNBase, x: Tensor, hx: Any) -> tuple[Tensor, ...]:
    """The initial states, each [layers * directions, b, H]."""
    parts = 2 if isinstance(module, nn.LSTM) else 1
    if hx is None:
        many = module.num_layers * (2 if module.bidirectional else 1)
        return (x.new_zeros(many, x.shape[1], module.hidden_size),) * parts
    return tuple(hx) if parts == 2 else (hx,)


def _layer(
    tape: Tape, module: nn.RNNBase, layer: int, x: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """One layer, in both directions if so: outputs [T, b, D H] and the last states."""
    ways = (False, True) if module.bidirectional else (False,)
    outputs, ends = [], []
    for way in ways:
        start = tuple(state[layer * len(ways) + way] for state in states)
        out, end = _cell(module)(tape, _Weights(module, layer, way), x.flip(0) if way else x, start)
        outputs.append(out.flip(0) if way else out)
        ends.append(end)
    return (torch.cat(outputs, 2) if len(ways) == 2 else outputs[0]), ends


def _cell(module: nn.RNNBase) -> Cell:
    if isinstance(module, nn.LSTM):
        return _lstm
    if isinstance(module, nn.GRU):
        return _gru
    return partial(_plain, torch.relu if getattr(module, "nonlinearity", "tanh") == "relu" else torch.tanh)


def _lstm(tape: Tape, of: _Weights, x: Tensor, start: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """i, f, o = sigmoid;  c_t = f c_{t-1} + i tanh(.);  h_t = o tanh(c_t)."""
    inputs, before = tape.records(x, 1, 2), [start[0].detach()]

    def use(slope: Tensor) -> Pieces:
        gates = OutputGradients(tape.records(slope, 1, 2))
        yield of.w, Outer(inputs, gates)
        yield of.v, Outer(before[0].transpose(0, 1), gates)
        sums = Rows(gates.value.sum(1))
        yield of.b, sums
        yield of.c, sums

    bias = None if of.b is None or of.c is None else (of.b + of.c).detach()
    flat = F.linear(x.reshape(-1, x.shape[2]), of.w.detach(), bias)
    gates = tape.watch(flat, use, inputs, 1, (*x.shape[:2], len(of.w)))
    outputs, last = _LstmLoop.apply(gates, of.v.detach(), *start)  # type: ignore[no-untyped-call]
    before[0] = torch.cat([start[0].detach()[None], outputs.detach()[:-1]])
    return outputs, (outputs[-1], last)


class _LstmLoop(torch.autograd.Function):
    """The recurrence over time, from the gates' input part [T, b, 4 H]; the backward is written out."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, v: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        steps, size = len(gates), h.shape[1]
        cells = gates.new_empty(steps + 1, *c.shape)
        outputs, curved = gates.new_empty(steps, *h.shape), gates.new_empty(steps, *c.shape)
        cells[0] = c
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
        return gates, None, dh, dc


def _gru(tape: Tape, of: _Weights, x: Tensor, start: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """r, z = sigmoid;  n = tanh(W x + r (V h));  h_t = (1 - z) n + z h_{t-1}."""
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
