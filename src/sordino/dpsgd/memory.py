"""Physical batch size from a bound on memory: `make_private(..., memory="2 GB")`. Called by dpsgd/private_loop.py.

A training pass (forward, backward, clipped sum) is run on n synthetic records of the data set's shape, and bytes(n) of
the tensors that are live at a time is measured. Every further record adds the same number of bytes, so

    size = n + (memory - bytes(n)) / (bytes(n) - bytes(n / 2)) * (n / 2)

No record is read, so the size is public.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from sordino.errors import ConfigError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
MOST = 64  # synthetic records of the largest trial


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch mode that measures peak memory: `most` is the largest number of bytes of new tensors live at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self.seen: Any = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self.seen[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self.seen:
                self.seen[leaf.untyped_storage()] = leaf.untyped_storage().nbytes()
        self.most = max(self.most, sum(self.seen.values()))
        return output


def parse_bytes(memory: str | int) -> int:
    """Return the number of bytes in a text such as "2 GB" (10^9 bytes each), or "2 GiB" (2^30)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", str(memory), re.IGNORECASE)
    if found is not None and float(found[1]) > 0:
        return int(float(found[1]) * _UNITS[found[2].upper()])
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    raise ConfigError(f"memory = {memory!r}", "a number of bytes with its unit", 'write it as memory="2 GB"')


def largest_batch(peak: Callable[[int], int], memory: int, most: int) -> int:
    """Return the largest batch size n <= `most` with peak(n) <= memory bytes; 0 if there is none.

    `peak` is called for 1, 2, 4, ... up to `MOST` records, or until a quarter of the memory is used; beyond that it is
    extrapolated linearly.
    """
    size, before, now = 1, 0, peak(1)
    while now <= memory // 4 and 2 * size <= min(MOST, most):
        size, before, now = 2 * size, now, peak(2 * size)
    if now > memory:
        return size // 2
    each = max(1.0, (now - before) / max(1, size // 2) if before else float(now))
    return min(most, size + int((memory - now) / each))
