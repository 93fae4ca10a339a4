"""Modules of the user's own in a file: model = { kind = "own", name = "my_net", options = { width = 32 } }."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from sordino.codec import Foreign, added
from sordino.errors import ConfigError, UserError
from sordino.models.spec import Shape, Spec

Build = Callable[..., nn.Module]  # (shape of one record, how many outputs, **options) -> a module
_OURS = 2  # of its arguments


@dataclass(frozen=True)
class Own(Spec, kind="own"):
    """A module that the function of `sordino.add_model(name)` makes; `options` are its further arguments."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weighed: ClassVar[bool] = False  # a stranger's code may do on a real device what it cannot on a meta one

    def __post_init__(self) -> None:
        self._arguments()

    def _arguments(self) -> dict[str, Any]:
        return added.arguments(added.find("model", self.name), self.options, _OURS, f"model {self.name}")

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        function, options = added.find("model", self.name), self._arguments()
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
        return (added.origin("model", self.name),)


def add_model(name: str) -> Callable[[Build], Build]:
    """A decorator: a function of (shape of one record, outputs, further options) that returns a torch.nn.Module.

    A file names it: model = { kind = "own", name = ..., options = { ... } }. `outputs` is the number of classes, or 1.
    """

    def keep(function: Build) -> Build:
        added.add("model", name, function)
        return function

    return keep
