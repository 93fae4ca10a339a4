"""Promise: TF32 products, which a user may allow for the model, never make the norm of a record's gradient too small.

Rounded to TF32 the norms are off by up to 1e-4 and a clipped gradient is longer than the clip norm.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.device.loops import BATCH, DEVICE, NETS, private, records
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

QUIET = 1e-9


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def released_sum(name: str) -> tuple[Tensor, int]:
    """The sum of clipped gradients that one step releases, in units of the clip norm, and how many records it has.

    All records are the same, so their clipped gradients add up to the number of records times a vector of length 1.
    """
    clip, x, y = 1e-3, *records(name).tensors
    same = TensorDataset(x[:1].expand_as(x).clone(), y[:1].expand_as(y).clone())
    model, optimizer, loader = private(name, DEVICE, dataset=same, noise_multiplier=QUIET, clip_norm=clip)
    for some, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(some.to(DEVICE)), labels.to(DEVICE)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        break
    released = torch.cat([p.grad.reshape(-1).double().cpu() for p in model.parameters() if p.grad is not None])
    return released * BATCH / clip, len(some)


@pytest.mark.parametrize("name", NETS)
def test_no_clipped_gradient_is_longer_than_the_clip_norm_under_tf32(tf32: None, name: str) -> None:
    total, count = released_sum(name)
    assert count * (1 - 1e-4) <= float(total.norm()) <= count * (1 + 1e-6)
