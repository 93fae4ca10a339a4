"""DP-SGD by `sordino.dpsgd.make_private`, everything at its default but the smoothing, which no peer has."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from loops import Loop, Make
from workloads import CLIP, MULTIPLIER, RATE, Workload

from sordino import kernels
from sordino.dpsgd import make_private
from sordino.version import __version__

VERSIONS = {"sordino": __version__, "torch": torch.__version__}


def private(work: Workload, **others: Any) -> Loop:
    model = work.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    settings: dict[str, Any] = {"epochs": 100, "noise_multiplier": MULTIPLIER, "clip_norm": CLIP, "smoothing": 0.0}
    return Loop(*make_private(model, optimizer, work.loader(), **settings, **others))


def not_compiled(work: Workload) -> Loop:
    """As without numba."""
    kernels.AVAILABLE = False
    return private(work)


METHODS: dict[str, Make] = {
    "make_private": private,
    "make_private, not compiled": not_compiled,
    "make_private, memory=": partial(private, memory="128 MB"),
}
