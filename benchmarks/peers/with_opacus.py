"""DP-SGD by Opacus's PrivacyEngine, each of its ways to per-record gradients, as shipped."""

from __future__ import annotations

from functools import partial

import opacus
import torch
from loops import Loop, Make
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn
from workloads import CLIP, MULTIPLIER, RATE, Parts, Workload

VERSIONS = {"opacus": opacus.__version__, "torch": torch.__version__}


def attention(width: int, heads: int, batch_first: bool) -> nn.Module:
    return DPMultiheadAttention(width, heads, batch_first=batch_first)


PARTS = Parts(DPLSTM, attention)


def private(work: Workload, mode: str) -> Loop:
    model = work.model(PARTS)
    made = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=work.loader(),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=MULTIPLIER,
        max_grad_norm=CLIP,
        poisson_sampling=True,
        grad_sample_mode=mode,
    )
    if mode == "ghost":
        model, optimizer, criterion, loader = made
        return Loop(model, optimizer, loader, criterion)
    return Loop(*made)


METHODS: dict[str, Make] = {mode: partial(private, mode=mode) for mode in ("hooks", "functorch", "ew", "ghost")}
