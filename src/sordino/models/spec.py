"""An architecture as a value, and how a module is made of it."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from sordino.codec import Part
from sordino.errors import ConfigError

Shape = tuple[int, ...]  # of ONE record, without the batch axis
LARGEST = 10**9  # parameters


class Spec(Part):
    """An architecture as a value: `build` makes a module from [b, *shape] to [b, outputs]."""

    weighed: ClassVar[bool] = True  # whether it may be built on the meta device first, to count its parameters

    @abstractmethod
    def build(self, shape: Shape, outputs: int) -> nn.Module:
        """A module for records of this shape."""


def build_seeded(spec: Spec, shape: Shape, outputs: int, seed: int) -> nn.Module:
    """`spec.build` with weights that depend on `seed` alone; the global torch generator is left as it was.

    Initial weights are public, so a plain torch generator serves; it reads the low 32 bits of `seed`.
    """
    if spec.weighed:
        _check_size(spec, shape, outputs)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return spec.build(shape, outputs)


def _check_size(spec: Spec, shape: Shape, outputs: int) -> None:
    """Refuse a net that no memory holds; built on the meta device, where a tensor is a shape and nothing else."""
    name = type(spec).__name__
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in spec.build(shape, outputs).parameters())
    except RuntimeError as error:  # a shape beyond 64 bits
        raise ConfigError(f"{name} for records of shape {list(shape)} ({error})", "a net that can be") from None
    if count > LARGEST:
        raise ConfigError(f"{name} of {count:,} parameters", f"at most {LARGEST:,}", "make its layers narrower")
