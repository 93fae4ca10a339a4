"""Architectures: model specifications in a plan's file, and how a module is built from one. Called by `config`.
`InMemoryModel` is the identity of a module and data that a script passed in memory, as a run folder stores it.

A registered module in a file: model = { kind = "own", name = "my_net", options = { width = 32 } }.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from sordino import codec
from sordino.codec import Foreign, Part, package_of
from sordino.data.metrics import FunctionMetric as GivenMetric
from sordino.data.named_fields import NamedFieldsModel, unwrapped_model
from sordino.errors import ConfigError, UserError
from sordino.layout import Layout
from sordino.parts.losses import Loss
from sordino.task import Task

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
        # Refuse a net of too many parameters, counted on the meta device, which allocates nothing
        name = type(spec).__name__
        try:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in spec.build(shape, outputs).parameters())
        except RuntimeError as error:  # a shape beyond 64 bits
            raise ConfigError(f"{name} for records of shape {list(shape)} ({error})", "a smaller net") from None
        if count > LARGEST:
            raise ConfigError(f"{name} of {count:,} parameters", f"at most {LARGEST:,}", "make its layers narrower")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return spec.build(shape, outputs)


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
        return codec.read_options(
            codec.find_function("model", self.name), self.options, _POSITIONAL, f"model {self.name}"
        )

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        function, options = codec.find_function("model", self.name), self._arguments()
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
        return (codec.function_origin("model", self.name),)


def add_model(name: str) -> Callable[[Build], Build]:
    """Decorator that registers a function of (shape of one record, outputs, options) returning a torch.nn.Module.

    A file names it: model = { kind = "own", name = ..., options = { ... } }. `outputs` is the number of classes, or 1.
    """
    return codec.register_function("model", name)


NAME = "in_memory"  # of the data set
_KNOWN = ("torch", "sordino", "builtins")  # whose modules need no name on a certificate


@dataclass(frozen=True)
class InMemoryModel(Architecture, kind="in_memory"):
    """A module passed by a Python script, identified by class, layout and shapes; no file can build it."""

    name: str  # of its class
    layout: str  # sha256 of names, shapes and order of what is trained
    inputs: tuple[int, ...] = ()  # shape of one record, as far as it is public
    targets: tuple[int, ...] = ()  # shape of one record's target, likewise
    loss: str = ""  # of a function; a loss with a kind stands in the file itself
    metrics: tuple[str, ...] = ()  # the same
    packages: tuple[Foreign, ...] = ()  # what is not torch's or ours in module and loss
    weighed: ClassVar[bool] = False

    @classmethod
    def of(cls, task: Task) -> InMemoryModel:
        """The identity of a task's model, loss and metrics."""
        model = unwrapped_model(task.model)
        loss = "" if has_written_form(task.losses) else _called(task.loss)
        own = {Foreign(*package_of(m.__module__), "Module", m.__name__) for m in _classes(model)}
        home = str(getattr(task.loss, "__module__", type(task.loss).__module__) or "builtins")
        own |= {Foreign(*package_of(home), "Loss", loss)} if loss else set()
        foreign = tuple(sorted(part for part in own if part.package not in _KNOWN))
        shapes = _shapes(task)
        metrics = tuple(one.name for one in task.metrics if isinstance(one, GivenMetric))
        return cls(type(model).__name__, layout_sha256(task.layout), *shapes, loss, metrics, foreign)

    def differs(self, other: InMemoryModel) -> list[str]:
        """What differs in another task, in words."""
        words = {"name": "the module's class", "layout": "the module's parameters", "inputs": "the records' shape"}
        words |= {"targets": "the targets' shape", "loss": "the loss", "metrics": "the metrics"}
        words |= {"packages": "the packages that they come from, or their versions"}
        return [said for field, said in words.items() if getattr(self, field) != getattr(other, field)]

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        raise self.missing()

    def missing(self) -> ConfigError:
        """The error of a run folder whose module only the script has."""
        found = f"a run whose data and module ({self.name}) were given in Python"
        fix = 'in that script: so.train(plan, task, out="...", resume=True), and .audit() of what it returns'
        return ConfigError(found, "the script that has them", fix)

    def rests_on(self) -> tuple[Foreign, ...]:
        return self.packages

    @property
    def certificate_entry(self) -> dict[str, Any]:
        """Its entry on a certificate."""
        return {"model": self.name, "layout_sha256": self.layout, "inputs": list(self.inputs), "loss": self.loss}


def _shapes(task: Task) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a record and its target; of sequences only the length that the caller gave."""
    records, public = task.clients.records, task.model.public if isinstance(task.model, NamedFieldsModel) else None
    if public is not None:
        return public, ()
    return tuple(records.x.shape[1:]), tuple(records.y.shape[1:])


def layout_sha256(layout: Layout) -> str:
    """sha256 of names and shapes of all parameters, in order, and which of them are trained."""
    slots = [[slot.name, list(slot.shape), slot.trainable] for slot in layout.slots]
    return hashlib.sha256(json.dumps(slots).encode()).hexdigest()


def has_written_form(loss: Loss) -> bool:
    """Whether a loss has a written form."""
    return bool(loss.kind) and Loss.members.get(loss.kind) is type(loss)


def _classes(model: nn.Module) -> list[type[nn.Module]]:
    """Classes of a module and its submodules, the outermost of each package."""
    first: dict[str, type[nn.Module]] = {}
    for part in model.modules():
        first.setdefault(type(part).__module__.partition(".")[0], type(part))
    return list(first.values())


def _called(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
