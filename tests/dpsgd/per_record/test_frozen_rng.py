"""Coins that stand still give the same answer twice, by whatever way torch draws them."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import vmap

from sordino.dpsgd.batch_independence import frozen_rng


def test_dropout_under_vmap_stands_still() -> None:
    layer, x = nn.Dropout(0.2), torch.randn(4, 3)
    with frozen_rng():
        alone, together = (vmap(layer, randomness="different")(part) for part in (x[:2], x))
    torch.testing.assert_close(together[:2], alone)
    torch.testing.assert_close(alone, x[:2] / 0.8)
