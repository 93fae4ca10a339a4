"""An architecture as a value, and how a module is made of it.

Modules of the user's own in a file: model = { kind = "own", name = "my_net", options = { width = 32 } }."""

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
    """An architecture as a value: `build` makes a module from [b, *shape] to [b, outputs]."""

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
    """Refuse a net that no memory holds; built on the meta device, where a tensor is a shape and nothing else."""
    name = type(spec).__name__
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in spec.build(shape, outputs).parameters())
    except RuntimeError as error:  # a shape beyond 64 bits
        raise ConfigError(f"{name} for records of shape {list(shape)} ({error})", "a net that can be") from None
    if count > LARGEST:
        raise ConfigError(f"{name} of {count:,} parameters", f"at most {LARGEST:,}", "make its layers narrower")


Build = Callable[..., nn.Module]  # (shape of one record, how many outputs, **options) -> a module
_OURS = 2  # of its arguments


@dataclass(frozen=True)
class RegisteredModel(Architecture, kind="own"):
    """A module that the function of `sordino.add_model(name)` makes; `options` are its further arguments."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weighed: ClassVar[bool] = False  # a stranger's code may do on a real device what it cannot on a meta one

    def __post_init__(self) -> None:
        self._arguments()

    def _arguments(self) -> dict[str, Any]:
        return plugins.arguments(plugins.find("model", self.name), self.options, _OURS, f"model {self.name}")

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        function, options = plugins.find("model", self.name), self._arguments()
        try:
            made = function(tuple(shape), outputs, **options)
        except UserError:
            raise
        except Exception as error:  # whatever a stranger's function raises
            what = f"{type(error).__name__}: {(str(error).strip() or 'no word').splitlines()[0][:200]}"
            found = f"model {self.name!r}, which fails for records {list(shape)} and {outputs} outputs ({what})"
            raise ConfigError(found, "a function of (shape, outputs) that returns a torch.nn.Module") from None
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model {self.name!r}, which returns a {type(made).__name__}", "a torch.nn.Module")
        return made

    def rests_on(self) -> tuple[Foreign, ...]:
        return (plugins.origin("model", self.name),)


def add_model(name: str) -> Callable[[Build], Build]:
    """A decorator: a function of (shape of one record, outputs, further options) that returns a torch.nn.Module.

    A file names it: model = { kind = "own", name = ..., options = { ... } }. `outputs` is the number of classes, or 1.
    """

    def keep(function: Build) -> Build:
        plugins.add("model", name, function)
        return function

    return keep
