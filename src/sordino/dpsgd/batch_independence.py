"""Checks that a model's output for a record does not depend on the other records of the batch; alarms, not the proof.

The proof is the model's graph (`sordino.graph`). These checks look at code without a graph, which its owner vouches
for, and at `ClippedGradient`: some records run once in the whole batch and once by themselves, with torch's random
numbers frozen, and f(batch)[some] is compared with f(batch[some]). Where they agree, the clipped sum with a record and
without it differ by that record's own clipped gradient, so by at most the clip norm.

A model is checked at its first batch, there also with perturbed parameters, so that mixing behind a weight of zero
shows, and in later batches chosen by random numbers that it does not see: half a percent of the work. Layers that are
known to mix the records of a batch are refused beforehand. Each layer of `_WHEN` maps every slice of the first axis by
itself, whatever its parameters are, and so does a chain of them: nothing has to be checked again while it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.dpsgd.pieces import HALF
from sordino.dpsgd.tape import UnrecordableError
from sordino.errors import PlanError
from sordino.layout import copied
from sordino.rng import Secure

SOME = 8  # records that are run by themselves
FEW = 16  # records of a small batch, enough for most checks
WORK = 0.005  # of the records of a run are run once more
WHOLE = 0.25  # of the later checks take the whole batch, and check gradients too
ROUNDING, COARSE = 1e-5, 3e-3  # of values: above the first, compare in float64 too; above the second, float32 is enough
HALVED = 0.1  # the same as COARSE, of models in half precision
SAME = 1e-6  # of values of one pass run twice: equal, but for a library that adds up in another order

Forward = Callable[[Any], Any]
_aten = torch.ops.aten


class FrozenRng(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which torch's random numbers are constants: 0.5, Bernoulli draws 1, indices the smallest there are.

    Dropout keeps every entry, and a random permutation becomes a shift by one, so that mixing by it still shows.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is _aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if packet in (_aten.rrelu_with_noise, _aten.rrelu_with_noise_):
            args[1].copy_(torch.where(args[0] > 0, 1.0, (args[2] + args[3]) / 2))  # the slopes that its backward takes
            return args[0] * args[1]
        if func is _aten.bernoulli.p:  # how vmap writes dropout: the tensor is only a shape
            return torch.ones_like(args[0])
        if packet in (_aten.bernoulli, _aten.normal) and isinstance(args[0], Tensor):
            return args[0].clone()
        return _constant(func(*args, **(kwargs or {})), packet, args)


def _constant(drawn: Any, packet: Any, args: Any) -> Any:
    if not isinstance(drawn, Tensor):
        return drawn
    if packet is _aten.randperm:
        return drawn.copy_(torch.arange(len(drawn)).roll(1))
    if packet is _aten.bernoulli_ or drawn.dtype == torch.bool:
        return drawn.fill_(1)
    if drawn.is_floating_point():
        return drawn.fill_(0.5)
    bounds = [a for a in args if isinstance(a, int)]
    return drawn.fill_(bounds[0] if packet is _aten.randint and len(bounds) > 1 else 0)


@contextmanager
def frozen_rng(random: bool = True) -> Iterator[None]:
    """Gradients on, random numbers frozen (where there are any: `random`), torch's generator as it was afterwards."""
    mode = FrozenRng() if random else nullcontext()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), mode:
        yield


@dataclass(frozen=True)
class BatchPass:
    """One forward pass over a batch, which can be repeated for some of its records.

    Every tensor of length `size` in `inputs` has one slice for each record, but for those at the places `constants`:
    they are as long by coincidence.
    """

    forward: Forward
    inputs: Any
    size: int
    random: bool = True  # whether random numbers have to be frozen
    constants: frozenset[int] = frozenset()

    def gap(self, some: Tensor) -> tuple[float, bool]:
        """How far `some` records' values are from those alone, relative to their size; whether it drew random numbers.

        The smaller distance where some inputs seem to be no records.
        """
        together, drew = self._values(self.inputs, self.size, some)
        readings = [frozenset[int](), self.constants] if self.constants else [self.constants]
        return min(self._distance_alone(together, some, whole) for whole in readings), drew

    def repeats(self) -> bool:
        """Whether the same pass gives the same values twice; random numbers from elsewhere than torch do not."""
        first, second = (self._values(self.inputs, self.size, torch.arange(self.size))[0] for _ in range(2))
        return relative_distance(first, second) <= ROUNDING

    def few(self, some: Tensor) -> BatchPass:
        """The pass over some of the records."""
        return replace(self, inputs=select_records(self.inputs, self.size, some, self.constants), size=len(some))

    def _distance_alone(self, together: list[Tensor], some: Tensor, whole: frozenset[int]) -> float:
        try:
            inputs = select_records(self.inputs, self.size, some, whole)
            alone, _ = self._values(inputs, len(some), torch.arange(len(some)))
        except UnrecordableError:
            raise
        except (RuntimeError, ValueError, IndexError):  # it runs on the whole batch only
            return float("inf")
        return relative_distance(together, alone)

    def _values(self, inputs: Any, size: int, some: Tensor) -> tuple[list[Tensor], bool]:
        with frozen_rng(self.random):
            before = torch.get_rng_state()
            leaves = [y for y in tree_flatten(self.forward(inputs))[0] if has_records(y, size)]
            drew = not torch.equal(before, torch.get_rng_state())
            return [y.detach()[some].clone() for y in leaves if y.is_floating_point()], drew


def has_records(item: Any, size: int) -> bool:
    """Whether the first axis of a tensor may be the records'."""
    return isinstance(item, Tensor) and item.dim() > 0 and len(item) == size


def select_records(inputs: Any, size: int, some: Tensor, constants: Collection[int] = ()) -> Any:
    """The inputs of some records; what stands at the places `constants` is no record's, and is left as it is."""
    leaves, form = tree_flatten(inputs)
    own = [has_records(x, size) and i not in constants for i, x in enumerate(leaves)]
    return tree_unflatten([x[some] if cut else x for x, cut in zip(leaves, own, strict=True)], form)


def constant_inputs(before: Sequence[Any], now: Any, size: int) -> frozenset[int]:
    """Places of tensors that are as long as the batch and no records of it: a batch of other records had the same."""

    def equal(a: Any, b: Any) -> bool:
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)

    leaves = tree_flatten(now)[0]
    long = [i for i, x in enumerate(leaves) if has_records(x, size)]
    if len(before) != len(leaves) or not long or equal(before[long[0]], leaves[long[0]]):
        return frozenset()
    return frozenset(i for i in long[1:] if equal(before[i], leaves[i]))


def relative_distance(together: list[Tensor], alone: list[Tensor]) -> float:
    """The largest difference over the largest value; infinite where shapes, or places that are not finite, differ."""
    if len(together) != len(alone) or any(a.shape != b.shape for a, b in zip(together, alone, strict=True)):
        return float("inf")
    gaps = [0.0]
    for a, b in zip(together, alone, strict=True):
        finite = a.isfinite() & b.isfinite()
        if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            return float("inf")
        a, b = a[finite].double(), b[finite].double()
        gaps.append(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if len(a) else 0.0)
    return max(gaps)


@contextmanager
def perturbed_parameters(model: nn.Module, rng: np.random.Generator) -> Iterator[None]:
    """Public noise on every trained parameter, so that nothing hides behind a weight of zero; then as before."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.data for p in parameters]  # put back as they are: a graph that somebody holds stays whole
    for p in parameters:
        scale = 0.05 + 0.5 * float(p.data.std(correction=0)) if p.numel() else 0.0
        p.data = p.data + torch.as_tensor(rng.normal(size=tuple(p.shape)) * scale).to(p.dtype)
    try:
        yield
    finally:
        for p, kept in zip(parameters, before, strict=True):
            p.data = kept


def mixing_error() -> PlanError:
    return PlanError(
        "mixing",
        "a model whose output for one record depends on the other records of the batch",
        "layers and losses that keep the records of a batch apart",
        "normalise within a record, as nn.GroupNorm and nn.LayerNorm do, and compare no record with another in forward",
    )


class IndependenceChecks:
    """Schedule and execution of the checks of one model; `of(model)` is the forward pass of it, or of a copy."""

    def __init__(self, model: nn.Module, of: Callable[[nn.Module], Forward], rng: np.random.Generator | None) -> None:
        self.model, self.of = model, of
        self.rng = Secure().at(0, "mixing") if rng is None else rng
        self.count = 0  # of comparisons so far
        self.random = False  # whether a pass has drawn random numbers from torch

    def due(self, size: int, expected: float) -> bool:
        """Whether this pass is checked, at random; `expected` is the public size of a batch."""
        work = WHOLE + (1 - WHOLE) * min(1.0, FEW / expected) + min(1.0, SOME / expected)
        return self.rng.random() < WORK / work and size > 1

    def needed(self) -> bool:
        """Whether the model could mix records in a later pass: not if it is made of layers that never do."""
        return not keeps_records_apart(self.model)

    def start(self, batch: BatchPass) -> None:
        """Check the first batch as it is, then a few of its records with perturbed parameters."""
        self.compare(batch, min(SOME, batch.size - 1))
        self._compare_perturbed(self._few(batch))

    def again(self, batch: BatchPass) -> bool:
        """Check a later batch; whether it was the whole batch, of which the caller then checks gradients too."""
        whole = bool(self.rng.random() < WHOLE)
        batch = batch if whole else self._few(batch)
        try:
            self.compare(batch, int(self.rng.integers(1, min(SOME, batch.size - 1) + 1)))
        except UnrecordableError:
            raise mixing_error() from None
        return whole

    def compare(self, batch: BatchPass, count: int) -> None:
        """Refuse values that depend on the batch; `UnrecordableError` where random numbers are not torch's."""
        some = self._subset(batch.size, count)
        gap, drew = replace(batch, random=self.random).gap(some)
        if drew and not self.random:
            self.random = True
            gap, _ = replace(batch, random=True).gap(some)
        self.count += 1
        if gap > ROUNDING and self._confirmed(batch, some, gap):
            if not replace(batch, random=self.random).repeats():
                raise UnrecordableError("a model with random numbers that are not torch's")
            raise mixing_error()

    def _few(self, batch: BatchPass) -> BatchPass:
        return batch if batch.size <= FEW else batch.few(self._subset(batch.size, FEW))

    def _subset(self, size: int, count: int) -> Tensor:
        return torch.from_numpy(np.sort(self.rng.choice(size, count, replace=False)))

    def _confirmed(self, batch: BatchPass, some: Tensor, gap: float) -> bool:
        """What float32 may have rounded is compared again in float64."""
        half = torch.is_autocast_enabled("cpu") or any(p.dtype in HALF for p in self.model.parameters())
        if gap > (HALVED if half else COARSE):
            return True
        exact = self._in_float64(batch, some)
        return exact is not None and exact > ROUNDING

    def _in_float64(self, batch: BatchPass, some: Tensor) -> float | None:
        """The distance of values of a copy in float64; None where there is none, or it does not run."""

        def double(item: Any) -> Any:
            return item.double() if isinstance(item, Tensor) and item.is_floating_point() else item

        try:
            forward, inputs = self.of(copied(self.model).double()), tree_map(double, batch.inputs)
            return replace(batch, forward=forward, inputs=inputs, random=self.random).gap(some)[0]
        except (RuntimeError, TypeError, AttributeError, ValueError, NotImplementedError):
            return None

    def _compare_perturbed(self, few: BatchPass) -> None:
        """Refuse what shows with perturbed parameters: in float32, and in float64 where that may be rounding."""
        some = self._subset(few.size, (few.size + 1) // 2)
        plain = replace(few, forward=self.of(self.model), random=self.random)
        with perturbed_parameters(self.model, self.rng):
            try:
                gap: float | None = plain.gap(some)[0]
                if gap is not None and (gap <= ROUNDING or not plain.repeats()):
                    return
            except (RuntimeError, ValueError, NotImplementedError):
                gap = None
            exact = self._in_float64(few, some)
        if (gap is not None and gap > COARSE) if exact is None else (exact > ROUNDING):
            raise mixing_error()


_ENTRIES: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
    *(nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.LogSigmoid),
    *(nn.Softshrink, nn.Hardshrink, nn.Threshold, nn.Dropout, nn.AlphaDropout, nn.PReLU),
)


_IMAGES: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d),
    *(nn.GroupNorm, nn.Dropout2d, nn.ZeroPad2d),
)


_WHEN: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.Flatten: lambda layer: layer.start_dim >= 1,
    nn.LayerNorm: lambda layer: len(layer.normalized_shape) == 1,
    nn.RMSNorm: lambda layer: len(layer.normalized_shape) == 1,
    nn.Softmax: lambda layer: layer.dim in (1, -1),
    nn.LogSoftmax: lambda layer: layer.dim in (1, -1),
    nn.Embedding: lambda layer: layer.max_norm is None and not layer.scale_grad_by_freq,
    **dict.fromkeys((nn.Linear, *_ENTRIES, *_IMAGES), lambda layer: True),
}


def keeps_records_apart(model: nn.Module) -> bool:
    """Whether no record can reach another in this model, by what it is made of."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    return not _hooked(model) and _in_order(model)


def _in_order(model: nn.Module) -> bool:
    if type(model) is nn.Sequential:
        return all(not _hooked(part) and "forward" not in vars(part) and _in_order(part) for part in model)
    known = _WHEN.get(type(model))
    return known is not None and known(model)


def _hooked(module: nn.Module) -> bool:
    """Whether other code runs beside the layer's (hooks), or computes its weights."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return bool(hooks) or hasattr(module, "parametrizations")


def refuse_mixing(model: nn.Module) -> None:
    """Raise where a layer mixes the records of a batch: clipping a record would not bound what it moves."""
    for name, module in model.named_modules():
        why = _mixes(module)
        if why is not None:
            found, fix = why
            where = f"layer '{name}'" if name else "the model"
            raise PlanError("mixing", f"{where}, {found}", "layers that keep the records of a batch apart", fix)


def has_mixing_layer(model: nn.Module) -> bool:
    """Whether a layer is known to mix the records of a batch."""
    return any(_mixes(module) is not None for module in model.modules())


def _mixes(module: nn.Module) -> tuple[str, str] | None:
    kind = type(module).__name__
    if isinstance(module, _InstanceNorm):
        if module.track_running_stats:
            return f"{kind} with running statistics", "set track_running_stats=False, or use nn.GroupNorm"
        return None
    if isinstance(module, _BatchNorm):
        width = module.num_features
        groups = next((g for g in (32, 16, 8, 4, 2) if width and width % g == 0), 1)
        return f"{kind}({width})", f"replace it by nn.GroupNorm({groups}, {width})"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return f"{kind} with scale_grad_by_freq", "set scale_grad_by_freq=False"
    return None
