"""Model architectures: the papers' nets as frozen values, registered functions, and modules that a script passes.

    ARCHITECTURES["dp_mnist_cnn"]().build((1, 28, 28), 10)       [b, 1, 28, 28] -> [b, 10]
    build_seeded(SmallCnn(groups=8), (3, 32, 32), 10, seed=7)

`config` and `training` call this module. No net here mixes records or has hidden state (no batch norm, no dropout, no
in-place step), so a record's gradient is a function of that record alone, as per-record clipping needs. All run under
`torch.func.functional_call`, and all but `CharLstm` under `torch.func.vmap` over stacked parameters.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sordino import codec
from sordino.codec import Foreign, Part, package_of
from sordino.data.clients import NamedFieldsModel, unwrapped_model
from sordino.data.metrics import FunctionMetric
from sordino.errors import ConfigError, UserError, brief_repr
from sordino.layout import Layout
from sordino.parts.losses import Loss
from sordino.rng import forked_rng
from sordino.task import Task

Shape = tuple[int, ...]  # of ONE record, without the batch axis
LARGEST = 10**9  # parameters


class Architecture(Part):
    """Model architecture as a value, from which `build` makes a torch module."""

    weighed: ClassVar[bool] = True  # whether it may be built on the meta device first, to count its parameters

    @abstractmethod
    def build(self, shape: Shape, outputs: int) -> nn.Module:
        """Return a new module that maps a batch of records [b, *shape] to [b, outputs]."""


class EachRow(nn.Module):
    """Module that applies a model to each row of records with several rows: [b, rows, ...] -> [b, rows, outputs]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.model(x[:, row]) for row in range(x.shape[1])], 1)


def build_seeded(spec: Architecture, shape: Shape, outputs: int, seed: int, rows: int = 1) -> nn.Module:
    """Return the module of `spec.build` with initial weights drawn from `seed`, without the global generator.

    Initial weights are public, so a plain torch generator suffices; it reads the low 32 bits of `seed`. With several
    `rows`, `shape` begins with them, and the model reads each row of a record by itself (`EachRow`).
    """
    if rows > 1:
        return EachRow(build_seeded(spec, shape[1:], outputs, seed))
    if spec.weighed:  # count the parameters on the meta device, which allocates nothing
        name = type(spec).__name__
        try:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in spec.build(shape, outputs).parameters())
        except RuntimeError as error:  # a shape beyond 64 bits
            found = f"{name} for records of shape {list(shape)} ({error})"
            raise ConfigError(found, "a net for this shape", "choose a smaller net") from None
        if count > LARGEST:
            raise ConfigError(f"{name} of {count:,} parameters", f"at most {LARGEST:,}", "make its layers narrower")
    with forked_rng(), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return spec.build(shape, outputs)


Build = Callable[..., nn.Module]  # (shape of one record, how many outputs, **options) -> a module
_POSITIONAL = 2  # arguments that Sordino passes


@dataclass(frozen=True)
class RegisteredModel(Architecture, kind="own"):
    """Model built by the function that `sordino.add_model(name)` registered; `options` are its further arguments."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weighed: ClassVar[bool] = False  # third-party code may not run on the meta device

    def __post_init__(self) -> None:
        self._arguments()

    def _arguments(self) -> dict[str, Any]:
        function = codec.find_function("model", self.name)
        return codec.read_options(function, self.options, _POSITIONAL, f"model {self.name}")

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        try:
            module = codec.find_function("model", self.name)(tuple(shape), outputs, **self._arguments())
        except UserError:
            raise
        except Exception as error:  # whatever the user's function raises
            what = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"
            found = f"model {self.name!r}, which fails for records {list(shape)} and {outputs} outputs ({what})"
            needed = "a function of (shape, outputs) that returns a torch.nn.Module"
            raise ConfigError(found, needed, "repair the function, or choose another model") from None
        if not isinstance(module, nn.Module):
            found = f"model {self.name!r}, which returns a {type(module).__name__}"
            raise ConfigError(found, "a torch.nn.Module", "return the module from the function")
        return module

    def rests_on(self) -> tuple[Foreign, ...]:
        return (codec.function_origin("model", self.name),)


def add_model(name: str) -> Callable[[Build], Build]:
    """Return a decorator that registers a function of (shape of one record, outputs, options) as a model.

    The function returns a torch.nn.Module; `outputs` is the number of classes, or 1. A configuration file names it by
    model = { kind = "own", name = ..., options = { ... } }.
    """
    return codec.register_function("model", name)


NAME = "in_memory"  # of the data set
_KNOWN = ("torch", "sordino", "builtins")  # whose modules need no name on a certificate


@dataclass(frozen=True)
class InMemoryModel(Architecture, kind="in_memory"):
    """Identity of a module that a Python script passes: its class, layout and shapes; no file can build it."""

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
        """Return the identity of a task's model, loss and metrics, for configuration and certificate."""
        model = unwrapped_model(task.model)
        name = str(getattr(task.loss, "__qualname__", type(task.loss).__name__))
        loss = "" if has_written_form(task.losses) else name
        classes: dict[str, type[nn.Module]] = {}  # the outermost class of each package
        for part in model.modules():
            classes.setdefault(type(part).__module__.partition(".")[0], type(part))
        own = {Foreign(*package_of(m.__module__), "Module", m.__name__) for m in classes.values()}
        home = str(getattr(task.loss, "__module__", type(task.loss).__module__) or "builtins")
        own |= {Foreign(*package_of(home), "Loss", loss)} if loss else set()
        foreign = tuple(sorted(part for part in own if part.package not in _KNOWN))
        records, public = task.clients.records, task.model.public if isinstance(task.model, NamedFieldsModel) else None
        shapes = (tuple(records.x.shape[1:]), tuple(records.y.shape[1:])) if public is None else (public, ())
        metrics = tuple(one.name for one in task.metrics if isinstance(one, FunctionMetric))
        return cls(type(model).__name__, layout_sha256(task.layout), *shapes, loss, metrics, foreign)

    def differs(self, other: InMemoryModel) -> list[str]:
        """Return the names of the properties in which this model differs from another."""
        words = {"name": "the module's class", "layout": "the module's parameters", "inputs": "the records' shape"}
        words |= {"targets": "the targets' shape", "loss": "the loss", "metrics": "the metrics"}
        words |= {"packages": "the packages that they come from, or their versions"}
        return [word for name, word in words.items() if getattr(self, name) != getattr(other, name)]

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        raise self.missing()

    def missing(self) -> ConfigError:
        """Return the error for a run folder that is used without the script which passed the module."""
        found = f"a run whose data and module ({self.name}) were passed in Python"
        fix = 'call so.train(plan, task, out="...", resume=True) in that script, and .audit() of its result'
        return ConfigError(found, "the script that passes them", fix)

    def rests_on(self) -> tuple[Foreign, ...]:
        return self.packages

    @property
    def certificate_entry(self) -> dict[str, Any]:
        """Entry of the certificate on this model."""
        return {"model": self.name, "layout_sha256": self.layout, "inputs": list(self.inputs), "loss": self.loss}


def layout_sha256(layout: Layout) -> str:
    """Return the SHA-256 of names and shapes of all parameters, in order, and which of them are trained."""
    slots = [[slot.name, list(slot.shape), slot.trainable] for slot in layout.slots]
    return hashlib.sha256(json.dumps(slots).encode()).hexdigest()


def has_written_form(loss: Loss) -> bool:
    """Return whether a configuration file can name this loss."""
    return bool(loss.kind) and Loss.members.get(loss.kind) is type(loss)


WIDEST, DEEPEST = 10**6, 1000  # of one layer, and how many
Layers = list[tuple[str, nn.Module]]


# ---- linear models and perceptrons ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logistic(Architecture, kind="logistic"):
    """Logistic regression W x + c on the flattened record x.

    It has 7,850 parameters for 28x28 and 10 classes. The loss is convex, so by default (`zero`) weights start at 0.
    """

    zero: bool = True

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        _check(self, shape, outputs)
        linear = nn.Linear(math.prod(shape), outputs)
        for parameter in linear.parameters() if self.zero else ():
            nn.init.zeros_(parameter)
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc1=linear))


@dataclass(frozen=True, slots=True)
class Linear(Logistic, kind="linear"):
    """Linear regression W x + c on the flattened record x; 11 parameters for 10 features."""


@dataclass(frozen=True, slots=True)
class Mlp(Architecture, kind="mlp"):
    """Multilayer perceptron with ReLU and layers of `hidden` units; 50,890 parameters for 28x28 and 10 classes."""

    hidden: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        _positive(self, hidden=self.hidden)

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        _check(self, shape, outputs)
        return _named([("flatten", nn.Flatten()), *_dense(math.prod(shape), self.hidden, outputs)])


# ---- convolutional nets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SvhnCnn(Architecture, kind="svhn_cnn"):
    """CNN of the DP-Fed-LS paper, Section 5: two 5x5 convolutions with 2x2 pools, dense layers of 384 and 192.

    It has 3,431,754 parameters for 3x32x32 and 10 classes, the paper's "about 3.4M", which needs 128 channels in the
    second convolution; `channels=(64, 64)` has 1,756,426. The authors' local response norm is omitted.
    """

    channels: tuple[int, int] = (64, 128)

    def __post_init__(self) -> None:
        _positive(self, channels=self.channels)

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return _conv_net(self, shape, outputs, kernels=(5, 5), channels=self.channels, hidden=(384, 192))


@dataclass(frozen=True, slots=True)
class EmnistCnn(Architecture, kind="emnist_cnn"):
    """CNN of the DP-FedSAM paper, Section 6: 5x5 convolutions of 32 and 64 channels, 2x2 pools, a dense layer of 512.

    It has 1,690,046 parameters for 28x28 and 62 classes; 1,663,370 for 10, the net of the FedAvg paper.
    """

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return _conv_net(self, shape, outputs, kernels=(5, 5), channels=(32, 64), hidden=(512,))


@dataclass(frozen=True, slots=True)
class FemnistCnn(Architecture, kind="femnist_cnn"):
    """CNN for FEMNIST: 7x7 convolution of 32 channels, 3x3 of 64, 2x2 pools, one dense layer.

    It has 214,590 parameters for 28x28 and 62 classes, as published in paper 002 of docs/papers.md, Section VI.
    """

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        return _conv_net(self, shape, outputs, kernels=(7, 3), channels=(32, 64), hidden=())


@dataclass(frozen=True, slots=True)
class SmallCnn(Architecture, kind="small_cnn"):
    """Small CNN for quick runs: per entry of `channels` a convolution, group norm, ReLU and pool, then a dense layer.

    It has 55,338 parameters for 28x28 and 10 classes, 70,986 for 3x32x32; group norm (`groups` > 0) adds 96.
    """

    channels: tuple[int, ...] = (16, 32)
    hidden: int = 32
    kernel: int = 3
    groups: int = 0

    def __post_init__(self) -> None:
        _positive(self, channels=self.channels, hidden=(self.hidden,), kernel=(self.kernel,))
        if not self.channels:
            raise ConfigError("SmallCnn with channels = []", "at least one convolution", "write channels = [16, 32]")
        if self.kernel % 2 == 0:
            raise ConfigError(f"SmallCnn with kernel = {self.kernel}", "an odd kernel", f"write {self.kernel + 1}")
        _divides(self, self.groups, self.channels)

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        kernels = (self.kernel,) * len(self.channels)
        return _conv_net(self, shape, outputs, kernels, self.channels, (self.hidden,), self.groups)


@dataclass(frozen=True, slots=True)
class DpMnistCnn(Architecture, kind="dp_mnist_cnn"):
    """CNN of the DP-SGD tutorial and the DP-LSSGD paper, Section 4; 26,010 parameters for 28x28 and 10 classes.

    Its layers: convolution 16@8x8 stride 2 padding 3, pool 2 stride 1, convolution 32@4x4 stride 2, pool 2 stride 1,
    dense 32.
    """

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = _image(self, shape, outputs, least=14)
        layers: Layers = [("conv1", nn.Conv2d(channels, 16, 8, stride=2, padding=3)), ("conv_relu1", nn.ReLU())]
        layers += [("pool1", nn.MaxPool2d(2, stride=1)), ("conv2", nn.Conv2d(16, 32, 4, stride=2))]
        layers += [("conv_relu2", nn.ReLU()), ("pool2", nn.MaxPool2d(2, stride=1)), ("flatten", nn.Flatten())]
        sides = [((side + 2 * 3 - 8) // 2 - 4) // 2 for side in (height, width)]  # 28 -> 14 -> 13 -> 5 -> 4
        return _named(layers + _dense(32 * math.prod(sides), (32,), outputs))


@dataclass(frozen=True, slots=True)
class ResNet18(Architecture, kind="resnet18"):
    """ResNet-18 with group norm and a first 3x3 convolution for small images (DP-FedSAM paper, Section 6).

    It has 11,173,962 parameters for 3x32x32, width 64 and 10 classes; 11,220,132 for 100. `groups` must divide `width`.
    """

    groups: int = 32
    width: int = 64

    def __post_init__(self) -> None:
        _positive(self, groups=(self.groups,), width=(self.width,))
        _divides(self, self.groups, (self.width,))

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        widths = [self.width * scale for scale in (1, 1, 1, 2, 2, 4, 4, 8, 8)]  # of the stem, then of the eight blocks
        stem = nn.Conv2d(_image(self, shape, outputs, least=8)[0], self.width, 3, padding=1, bias=False)
        layers: Layers = [("conv1", stem), ("norm1", nn.GroupNorm(self.groups, self.width)), ("relu1", nn.ReLU())]
        layers += [(f"block{i}", _Residual(a, b, self.groups)) for i, (a, b) in enumerate(pairwise(widths), 1)]
        layers += [("mean", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
        return _named(layers + _dense(widths[-1], (), outputs))


class _Residual(nn.Module):
    """Residual block relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)); if the width grows, the image size halves."""

    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, after)
        self.shortcut = nn.Sequential()
        if before != after:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride=stride, bias=False))
            self.shortcut.append(nn.GroupNorm(groups, after))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(images)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


# ---- a recurrent net ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CharLstm(Architecture, kind="char_lstm"):
    """LSTM of the DP-Fed-LS paper: predicts the next of `outputs` characters from a window of 80 characters (int64).

    It has an embedding of 8, two LSTM layers of 256, and a dense layer on the last position; each window starts from a
    zero state. It has 819,920 parameters for a vocabulary of 80, and engines run it one client at a time, without vmap.
    """

    embed: int = 8
    hidden: int = 256
    layers: int = 2

    def __post_init__(self) -> None:
        _positive(self, embed=(self.embed,), hidden=(self.hidden,), layers=(self.layers,))

    def build(self, shape: Shape, outputs: int) -> nn.Module:
        _check(self, shape, outputs)
        if len(shape) != 1:
            found = f"records of shape {list(shape)} for CharLstm"
            needed = "a window of character numbers, [length]"
            raise ConfigError(found, needed, "cut the text into windows, such as [80], or choose another model")
        return _CharLstm(self.embed, self.hidden, self.layers, outputs)


class _CharLstm(nn.Module):
    def __init__(self, embed: int, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, embed)
        self.lstm = nn.LSTM(embed, hidden, layers, batch_first=True)
        self.fc1 = nn.Linear(hidden, vocabulary)

    def forward(self, windows: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(windows))  # [b, length, hidden]
        scores: Tensor = self.fc1(states[:, -1])
        return scores


# ---- layers shared by the specs -------------------------------------------------------------------------------------


def _named(layers: Layers) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))


def _dense(inputs: int, hidden: Iterable[int], outputs: int) -> Layers:
    layers: Layers = []
    for i, (before, after) in enumerate(pairwise((inputs, *hidden, outputs)), 1):
        layers += [(f"fc{i}", nn.Linear(before, after)), (f"fc_relu{i}", nn.ReLU())]
    return layers[:-1]


def _conv_net(
    spec: Architecture, shape: Shape, outputs: int, kernels: tuple[int, ...], channels: tuple[int, ...],
    hidden: tuple[int, ...], groups: int = 0,
) -> nn.Module:  # fmt: skip
    """Return a CNN with a padded convolution, group norm, ReLU and 2x2 pool per kernel, then dense layers."""
    shrink = 2 ** len(kernels)
    first, height, width = _image(spec, shape, outputs, least=shrink)
    layers: Layers = []
    for i, (kernel, (before, after)) in enumerate(zip(kernels, pairwise((first, *channels)), strict=True), 1):
        layers.append((f"conv{i}", nn.Conv2d(before, after, kernel, padding=kernel // 2)))
        layers += [(f"norm{i}", nn.GroupNorm(groups, after))] if groups else []
        layers += [(f"conv_relu{i}", nn.ReLU()), (f"pool{i}", nn.MaxPool2d(2))]
    inputs = channels[-1] * (height // shrink) * (width // shrink)
    return _named([*layers, ("flatten", nn.Flatten()), *_dense(inputs, hidden, outputs)])


# ---- what a spec refuses --------------------------------------------------------------------------------------------


def _check(spec: Architecture, shape: Shape, outputs: int) -> None:
    if not shape or min(shape) < 1:
        found = f"records of shape {list(shape)} for {type(spec).__name__}"
        needed = "at least one axis, every axis of at least 1"
        raise ConfigError(found, needed, "give each record one axis or more, such as [784] or [1, 28, 28]")
    if outputs < 1:
        found = f"outputs = {outputs} for {type(spec).__name__}"
        raise ConfigError(found, "at least 1 output", "give the number of classes, or 1 for regression")


def _image(spec: Architecture, shape: Shape, outputs: int, least: int) -> tuple[int, int, int]:
    _check(spec, shape, outputs)
    if len(shape) != 3 or min(shape[1:]) < least:
        found = f"records of shape {list(shape)} for {type(spec).__name__}"
        fix = "reshape the records, such as [1, 28, 28], or choose logistic or mlp, which take any shape"
        raise ConfigError(found, f"images [channels, height, width] of at least {least}x{least} pixels", fix)
    return shape[0], shape[1], shape[2]


def _positive(spec: object, **options: tuple[int, ...]) -> None:
    for option, values in options.items():
        most = DEEPEST if option == "layers" else WIDEST
        if any(not 1 <= value <= most for value in values) or len(values) > DEEPEST:
            found = f"{option} = {', '.join(map(brief_repr, values))} for {type(spec).__name__}"
            needed = f"whole numbers of at least 1 and at most {most:,}, no more than {DEEPEST} of them"
            raise ConfigError(found, needed, f"raise or lower {option}, or leave it out for the default")


def _divides(spec: object, groups: int, channels: tuple[int, ...]) -> None:
    if groups < 0 or (groups and any(count % groups for count in channels)):
        found = f"groups = {groups} for {type(spec).__name__} with {', '.join(map(str, channels))} channels"
        needed = "a number of groups that divides every number of channels"
        raise ConfigError(found, needed, f"write groups = {math.gcd(*channels)} or a divisor of it")
