"""SGD without privacy: what the privacy costs."""

from __future__ import annotations

from functools import partial

import torch
from loops import Loop, Make
from torch import Tensor
from workloads import RATE, Workload

VERSIONS = {"torch": torch.__version__}


def plain(work: Workload) -> Loop:
    model = work.model()
    return Loop(model, torch.optim.SGD(model.parameters(), lr=RATE), work.loader())


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def channels_last(work: Workload, tuned: bool = False) -> Loop:
    """The faster layout for images; `tuned` with the allocator's thresholds raised, as sordino does for itself."""
    if tuned:
        from sordino.version import tune_allocator

        tune_allocator()
    model = work.model().to(memory_format=torch.channels_last)
    return Loop(model, torch.optim.SGD(model.parameters(), lr=RATE), work.loader(), prepare=last)


METHODS: dict[str, Make] = {
    "SGD": plain,
    "SGD, channels last": channels_last,
    "SGD, channels last, allocator tuned": partial(channels_last, tuned=True),
}
