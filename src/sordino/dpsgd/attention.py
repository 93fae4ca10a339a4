"""`nn.MultiheadAttention` as four recorded linear maps around scaled dot products."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino.dpsgd.layer_rules import linear
from sordino.dpsgd.pieces import Outer, OutputGradients, Rows
from sordino.dpsgd.tape import Pieces, Tape, UnrecordableError


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
    _refuse_extras(module, query, is_causal and attn_mask is None)
    first = query.transpose(0, 1) if not module.batch_first else query
    same = query is key and key is value
    others = (key, value) if module.batch_first else (key.transpose(0, 1), value.transpose(0, 1))
    q, k, v = (_heads(part, module) for part in _projections(tape, module, first, *others, same=same))
    bias = _bias(attn_mask, key_padding_mask, q, k)
    dropout = module.dropout if module.training else 0.0
    if need_weights:
        mixed, weights = _explicit(q, k, v, bias, dropout)
        shown = weights.mean(1) if average_attn_weights else weights
    else:
        mixed, shown = F.scaled_dot_product_attention(q, k, v, bias, dropout), None
    out = linear(tape, mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)  # type: ignore[arg-type]
    return (out if module.batch_first else out.transpose(0, 1)), shown


def _refuse_extras(module: nn.MultiheadAttention, query: Tensor, unmasked: bool) -> None:
    if unmasked:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch says
    if module.bias_k is not None or module.add_zero_attn or query.dim() != 3:
        raise UnrecordableError("an attention with bias_k, add_zero_attn or without a batch")


def _projections(
    tape: Tape, module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *, same: bool
) -> tuple[Tensor, ...]:
    """q, k and v, [b, T, E] each; one product where all three are the same tensor."""
    bias: nn.Parameter | None = module.in_proj_bias
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return _parts(tape, (query, key, value), weights, bias, None)
    if same:
        return linear(tape, query, module.in_proj_weight, bias).chunk(3, 2)
    weights = module.in_proj_weight.chunk(3)
    return _parts(tape, (query, key, value), weights, bias, module.in_proj_weight)


def _parts(
    tape: Tape,
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    bias: nn.Parameter | None,
    whole: nn.Parameter | None,
) -> tuple[Tensor, ...]:
    """Three maps; a shared weight `whole` and the bias are three blocks of one parameter, so rows padded with zeros."""
    offsets = None if bias is None else bias.detach().chunk(3)
    return tuple(
        _part(tape, x, weight, None if offsets is None else offsets[n], (n, bias, whole))
        for n, (x, weight) in enumerate(zip(inputs, weights, strict=True))
    )


def _part(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    offset: Tensor | None,
    place: tuple[int, nn.Parameter | None, nn.Parameter | None],
) -> Tensor:
    (n, bias, whole), inputs = place, tape.records(x, 0, 2)

    def use(slope: Tensor) -> Pieces:
        block = (n * slope.shape[2], (2 - n) * slope.shape[2])
        if whole is None:
            yield weight, Outer(inputs, OutputGradients(slope))  # type: ignore[misc]
        else:
            yield whole, Outer(inputs, OutputGradients(F.pad(slope, block)))
        if bias is not None:
            yield bias, Rows(F.pad(slope.sum(1), block))

    flat = F.linear(x.reshape(-1, x.shape[2]), weight.detach(), offset)
    return tape.watch(flat, use, inputs, shape=(*x.shape[:2], len(weight)))


def _heads(x: Tensor, module: nn.MultiheadAttention) -> Tensor:
    """[b, T, E] -> [b, heads, T, E / heads]."""
    return x.view(*x.shape[:2], module.num_heads, -1).transpose(1, 2)


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


def _explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    weights = torch.softmax(scores if bias is None else scores + bias, 3)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights
