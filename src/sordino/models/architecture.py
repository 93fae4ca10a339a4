"""Architectures: model specifications in a plan's file, and how a module is built from one. Called by `config`.

A registered module in a file: model = { kind = "own", name = "my_net", options = { width = 32 } }.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from sordino.codec import Foreign, Part, plugins
from sordino.errors import ConfigError, UserError

Shape = tuple[int, ...]  # of ONE record, without the batch axis
LARGEST = 10**9  # parameters


class Architecture(Part):
    """Model architecture as a value: `build` makes a module from [b, *shape] to [b, outputs]."""

    weighed: ClassVar[bool] = True  # whether it may be built on the meta device first, to count its parameters

    @abstractmethod
    def build(self, shape: Shape, outputs: int) -> nn.Module:
        """A module for records of this shape."""


def build_seeded(spec: Architecture, shape: Shape, outputs: int, seed: int) -> nn.Module:
    """`spec.build` with weights that depend on `seed` alone; the global torch generator is left as it was.

    Initial weights are public, so a plain torch generator serves; it reads the low 32 bits of `seed`.
    """
    if spec.weighed:
        _check_size(spec, shape, outputs)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return spec.build(shape, outputs)


def _check_size(spec: Architecture, shape: Shape, outputs: int) -> None:
    """Refuse a net of too many parameters, counted on the meta device, which allocates nothing."""
    name = type(spec).__name__
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in spec.build(shape, outputs).parameters())
    except RuntimeError as error:  # a shape beyond 64 bits
        raise ConfigError(f"{name} for records of shape {list(shape)} ({error})", "a smaller net") from None
    if count > LARGEST:
        raise ConfigError(f"{name} of {count:,} parameters", f"at most {LARGEST:,}", "make its layers narrower")


Build = Callable[..., nn.Module]  # (shape of one record, how many outputs, **options) -> a module
_POSITIONAL = 2  # arguments that Sordino passes


@dataclass(frozen=True)
class RegisteredModel(Architecture, kind="own"):
    """A module made by the function registered as `sordino.add_model(name)`; `options` are its further arguments."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weighed: ClassVar[bool] = False  # third-party code may not run on the meta device

    def __post_init__(self) -> None:
        self._arguments()

    def _arguments(self) -> dict[str, Any]:
        return plugins.arguments(plugins.find("model", self.name), self.options, _POSITIONAL, f"model {self.name}")

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        function, options = plugins.find("model", self.name), self._arguments()
        try:
            made = function(tuple(shape), outputs, **options)
        except UserError:
            raise
        except Exception as error:  # whatever the user's function raises
            what = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"
            found = f"model {self.name!r}, which fails for records {list(shape)} and {outputs} outputs ({what})"
            raise ConfigError(found, "a function of (shape, outputs) that returns a torch.nn.Module") from None
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model {self.name!r}, which returns a {type(made).__name__}", "a torch.nn.Module")
        return made

    def rests_on(self) -> tuple[Foreign, ...]:
        return (plugins.origin("model", self.name),)


def add_model(name: str) -> Callable[[Build], Build]:
    """Decorator that registers a function of (shape of one record, outputs, options) returning a torch.nn.Module.

    A file names it: model = { kind = "own", name = ..., options = { ... } }. `outputs` is the number of classes, or 1.
    """
    return plugins.registers("model", name)
