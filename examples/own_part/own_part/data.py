"""A data set: two rings, one around the other."""

from __future__ import annotations

import numpy as np

from sordino import Dataset, add_dataset


def rings(records: int = 400, seed: int = 0) -> Dataset:
    """Points of two rings of clip norm 1 and 2; a fifth more of them, made the same way, are the public test."""
    rng = np.random.default_rng(seed)
    count = records + records // 5
    y = rng.integers(2, size=count)
    angle = rng.uniform(0, 2 * np.pi, count)
    clip_norm = 1.0 + y + 0.1 * rng.standard_normal(count)
    x = np.stack([clip_norm * np.cos(angle), clip_norm * np.sin(angle)], axis=1).astype(np.float32)
    return Dataset(x=x[:records], y=y[:records], test_x=x[records:], test_y=y[records:], classes=2)


add_dataset("rings", rings, description="two rings, made up", licence="public domain")
