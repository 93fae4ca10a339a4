"""Tests (not a proof) that a model's output for a record does not depend on the other records of the batch.

The proof is the model's graph (`sordino.graph`). These tests are for trusted code without a graph, and for
`ClippedGradient`: some records run once in the whole batch and once in a small batch, with torch's random numbers
frozen, and outputs f(batch)[some] are compared with f(batch[some]). If they agree, the clipped sums with and without a
record differ by that record's own clipped gradient, so by at most the clip norm.

A model is tested at its first batch, also with perturbed parameters (so that a weight of zero cannot hide mixing), and
in later batches chosen by random numbers that the model cannot read, which takes half a percent of the work. Layer
types that mix the records of a batch are refused before training. Used by dpsgd/clipped_sum.py and recording.py, and by
engines/checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.dpsgd.pieces import HALF, UnrecordableError
from sordino.errors import PlanError
from sordino.layout import copied
from sordino.rng import Secure, forked_rng, torch_rng_states

SOME = 8  # records that run in a batch of their own
FEW = 16  # records of a small batch, enough for most tests
WORK = 0.005  # share of a run's records that run once more for tests
WHOLE = 0.25  # share of the later tests that take the whole batch, and test gradients too
ROUNDING, COARSE = 1e-5, 3e-3  # relative differences: equal below the first, different above the second, else float64
HALVED = 0.1  # as COARSE, for models in half precision
SAME = 1e-6  # relative difference below which two runs of one pass are equal

Forward = Callable[[Any], Any]
_aten = torch.ops.aten


class FrozenRng(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch mode with constant random numbers: uniform draws are 0.5, Bernoulli draws 1, random integers the smallest.

    Dropout drops no entry, and a random permutation becomes a shift by one, so that mixing by permutation is found.
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
        drawn = func(*args, **(kwargs or {}))
        if not isinstance(drawn, Tensor):
            return drawn
        if packet is _aten.randperm:
            return drawn.copy_(torch.arange(len(drawn)).roll(1))
        if packet is _aten.bernoulli_ or drawn.dtype == torch.bool:
            return drawn.fill_(1)
        bounds = [a for a in args if isinstance(a, int)]
        least = bounds[0] if packet is _aten.randint and len(bounds) > 1 else 0
        return drawn.fill_(0.5 if drawn.is_floating_point() else least)


@contextmanager
def frozen_rng(random: bool = True) -> Iterator[None]:
    """Context with gradients enabled in which, if `random`, every random function of torch returns constants.

    The state of torch's generators is restored at its end.
    """
    mode = FrozenRng() if random else nullcontext()  # type: ignore[no-untyped-call]
    with forked_rng(), torch.enable_grad(), mode:
        yield


@dataclass(frozen=True)
class BatchPass:
    """Forward pass over a batch of `size` records, which can be repeated for some of the records.

    `records` marks the tensors of `inputs` with one slice per record; by default those of length `size`.
    """

    forward: Forward
    inputs: Any
    size: int
    random: bool = True  # whether random numbers have to be frozen
    records: Sequence[bool] | None = None

    def gap(self, some: Tensor) -> tuple[float, bool]:
        """Return how much outputs of some records differ between batch and alone, and if random numbers were drawn."""
        together, drew = self._values(self.inputs, self.size, some)
        try:
            alone, _ = self._values(self.few(some).inputs, len(some), torch.arange(len(some)))
        except UnrecordableError:
            raise
        except (RuntimeError, ValueError, IndexError):  # it runs on the whole batch only
            return float("inf"), drew
        return relative_distance(together, alone), drew

    def repeats(self) -> bool:
        """Return whether the pass gives the same outputs twice, as it does if all its random numbers are torch's."""
        first, second = (self._values(self.inputs, self.size, torch.arange(self.size))[0] for _ in range(2))
        return relative_distance(first, second) <= ROUNDING

    def few(self, some: Tensor) -> BatchPass:
        """Return the forward pass over some of the records only."""
        leaves, form = tree_flatten(self.inputs)
        own = [has_records(x, self.size) for x in leaves] if self.records is None else self.records
        inputs = tree_unflatten([x[some] if cut else x for x, cut in zip(leaves, own, strict=True)], form)
        return replace(self, inputs=inputs, size=len(some))

    def _values(self, inputs: Any, size: int, some: Tensor) -> tuple[list[Tensor], bool]:
        with frozen_rng(self.random):
            before = torch_rng_states()
            leaves = [y for y in tree_flatten(self.forward(inputs))[0] if has_records(y, size)]
            drew = not all(torch.equal(one, now) for one, now in zip(before, torch_rng_states(), strict=True))
            return [y.detach()[some].clone() for y in leaves if y.is_floating_point()], drew


def has_records(item: Any, size: int) -> bool:
    """Return whether the first axis of a tensor may be that of `size` records."""
    return isinstance(item, Tensor) and item.dim() > 0 and len(item) == size


def trained_outputs(output: Any, size: int, needed: bool = True) -> list[Tensor]:
    """Return the differentiable output tensors with one slice per record; if `needed`, refuse an output without any."""
    found = [y for y in tree_flatten(output)[0] if has_records(y, size) and y.requires_grad]
    if needed and not found:
        raise no_output()
    return found


def no_output() -> PlanError:
    needed = "an output tensor with one slice per record, from which the loss is computed"
    fix = "return outputs whose first axis is that of the records"
    return PlanError("per-record", "a model whose output has no slice per record", needed, fix)


def relative_distance(together: list[Tensor], alone: list[Tensor]) -> float:
    """Return the largest difference relative to the largest entry: max |a - b| / max |b| over all pairs of tensors.

    It is infinite if shapes differ, or if NaN or infinity are at different places.
    """
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
    """Context in which random numbers are added to all trained parameters, so that zero weights cannot hide mixing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.data for p in parameters]  # restored without a write: autograd graphs that hold them stay valid
    for p in parameters:
        scale = 0.05 + 0.5 * float(p.data.std(correction=0)) if p.numel() else 0.0
        p.data = p.data + torch.as_tensor(rng.normal(size=tuple(p.shape)) * scale).to(p.device, p.dtype)
    try:
        yield
    finally:
        for p, data in zip(parameters, before, strict=True):
            p.data = data


def mixing_error() -> PlanError:
    found = "a model whose output for one record depends on the other records of the batch"
    needed = "layers and losses that compute each record independently of the others"
    fix = "normalise within a record, as nn.GroupNorm and nn.LayerNorm do, and use no other record in forward"
    return PlanError("mixing", found, needed, fix)


class IndependenceChecks:
    """Tests, in batches chosen at random, that a model's output for one record does not depend on other records.

    `of(model)` returns the forward pass that is tested.
    """

    def __init__(self, model: nn.Module, of: Callable[[nn.Module], Forward], rng: np.random.Generator | None) -> None:
        self.model, self.of = model, of
        self.rng = Secure().at(0, "mixing") if rng is None else rng
        self.count = 0  # number of comparisons so far
        self.random = False  # whether a pass has drawn random numbers from torch

    def due(self, size: int, expected: float) -> bool:
        """Draw at random whether this pass is tested; `expected` is the public expected size of a batch."""
        work = WHOLE + (1 - WHOLE) * min(1.0, FEW / expected) + min(1.0, SOME / expected)
        return self.rng.random() < WORK / work and size > 1

    def start(self, batch: BatchPass) -> None:
        """Test the first batch with the model's parameters, then a few of its records with perturbed parameters."""
        self.compare(batch, min(SOME, batch.size - 1))
        few = self._few(batch)
        some = self._subset(few.size, (few.size + 1) // 2)
        plain = replace(few, forward=self.of(self.model), random=self.random)
        with perturbed_parameters(self.model, self.rng):
            try:
                gap: float | None = plain.gap(some)[0]
                if gap is not None and (gap <= ROUNDING or not plain.repeats()):
                    return
            except (RuntimeError, ValueError, NotImplementedError):
                gap = None
            exact = self._gap_in_float64(few, some)
        if (gap is not None and gap > COARSE) if exact is None else (exact > ROUNDING):
            raise mixing_error()

    def again(self, batch: BatchPass) -> bool:
        """Test a later batch; return True if the whole batch was tested, so that its gradients must be tested too."""
        whole = bool(self.rng.random() < WHOLE)
        batch = batch if whole else self._few(batch)
        try:
            self.compare(batch, int(self.rng.integers(1, min(SOME, batch.size - 1) + 1)))
        except UnrecordableError:
            raise mixing_error() from None
        return whole

    def compare(self, batch: BatchPass, count: int) -> None:
        """Refuse a model whose outputs for `count` random records depend on the rest of the batch.

        Raise `UnrecordableError` if outputs differ between two runs of the same batch.
        """
        some = self._subset(batch.size, count)
        gap, drew = replace(batch, random=self.random).gap(some)
        if drew and not self.random:
            self.random = True
            gap, _ = replace(batch, random=True).gap(some)
        self.count += 1
        half = any(p.dtype in HALF or torch.is_autocast_enabled(p.device.type) for p in self.model.parameters())
        if gap <= ROUNDING:
            return
        if gap <= (HALVED if half else COARSE):  # float32 may have rounded
            exact = self._gap_in_float64(batch, some)
            if exact is None or exact <= ROUNDING:
                return
        if not replace(batch, random=self.random).repeats():
            raise UnrecordableError("a model with random numbers that are not torch's")
        raise mixing_error()

    def _few(self, batch: BatchPass) -> BatchPass:
        return batch if batch.size <= FEW else batch.few(self._subset(batch.size, FEW))

    def _subset(self, size: int, count: int) -> Tensor:
        return torch.from_numpy(np.sort(self.rng.choice(size, count, replace=False)))

    def _gap_in_float64(self, batch: BatchPass, some: Tensor) -> float | None:
        """Return the difference of outputs in a batch and alone for a float64 copy of the model; None if it fails."""

        def double(item: Any) -> Any:
            return item.double() if isinstance(item, Tensor) and item.is_floating_point() else item

        try:
            forward, inputs = self.of(copied(self.model).double()), tree_map(double, batch.inputs)
            return replace(batch, forward=forward, inputs=inputs, random=self.random).gap(some)[0]
        except (RuntimeError, TypeError, AttributeError, ValueError, NotImplementedError):
            return None


def refuse_mixing(model: nn.Module) -> None:
    """Refuse a model with a layer that mixes the records of a batch, so that clipping would not bound a record."""
    for name, module in model.named_modules():
        why = _mixes(module)
        if why is not None:
            found, fix = why
            where = f"layer '{name}'" if name else "the model"
            raise PlanError("mixing", f"{where}, {found}", "layers that compute each record independently", fix)


def has_mixing_layer(model: nn.Module) -> bool:
    """Return whether the model has a layer of a type that mixes the records of a batch."""
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
