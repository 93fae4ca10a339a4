"""Coins that stand still: while this mode is on, every random operation of torch gives constants.

A record's forward pass can then be compared with the same pass in other company: dropout keeps every entry in both, and
what differs comes from the records. A random permutation becomes a turn by one, so that mixing by it still shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SEEDED = torch.Tag.nondeterministic_seeded
_aten = torch.ops.aten


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random numbers are 0.5, coins 1, random indices the smallest there are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _SEEDED not in func.tags:
            return func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is _aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if packet in (_aten.rrelu_with_noise, _aten.rrelu_with_noise_):
            args[1].copy_(torch.where(args[0] > 0, 1.0, (args[2] + args[3]) / 2))  # the slopes that its backward takes
            return args[0] * args[1]
        if func is _aten.bernoulli.p:  # how vmap writes dropout: the tensor is only a shape
            return torch.ones_like(args[0])
        if packet in (_aten.bernoulli, _aten.normal) and isinstance(args[0], Tensor):
            return args[0].clone()
        return _constant(func(*args, **(kwargs or {})), packet, args)


def _constant(drawn: Any, packet: Any, args: Any) -> Any:
    if not isinstance(drawn, Tensor):
        return drawn
    if packet is _aten.randperm:
        return drawn.copy_(torch.arange(len(drawn)).roll(1))
    if packet is _aten.bernoulli_ or drawn.dtype == torch.bool:
        return drawn.fill_(1)
    if drawn.is_floating_point():
        return drawn.fill_(0.5)
    bounds = [a for a in args if isinstance(a, int)]
    return drawn.fill_(bounds[0] if packet is _aten.randint and len(bounds) > 1 else 0)


@contextmanager
def still(random: bool = True) -> Iterator[None]:
    """Gradients on, coins standing still (if there are any: `random`), torch's own generator left as it was."""
    mode = Still() if random else nullcontext()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), mode:
        yield
