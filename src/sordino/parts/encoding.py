"""Encoding steps of messages before the noise (`Step`, `Clip`), and post-processing of the noised mean.

Engines call `encode` on clients; the loop calls `decode` and `apply` on the server. Post-processing has no privacy
cost; denoisers get the exact noise level, because the plan sets it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import Bound, Norm
from sordino.codec import Part
from sordino.codec.boundary import of_type, returns, tensor
from sordino.errors import brief_repr
from sordino.layout import Layout
from sordino.parts.clipping import SLACK, factors, row_norms, scaled
from sordino.parts.schedules import Schedule, at, natural, positive, require, require_values


@codec.hides_values
@dataclass(frozen=True)
class Public:
    """Public values of round t, none of which depends on unreleased data."""

    t: int
    clip_norm: float = math.inf
    size: int = 0  # d, the length of a message before any step
    mask: Tensor | None = None  # coordinates that are sent, where a PublicMask chose them
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)  # from `LocalSolver.split` of a release, [d]
    tensors: tuple[int, ...] = ()  # sizes of the model's tensors, in the order of the message
    state: Mapping[str, float] = field(default_factory=dict)  # from `Step.learn` of earlier releases

    def on(self, device: torch.device) -> Public:
        """Return the same values with their tensors on `device`."""
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, mask=mask, broadcast={name: held.to(device) for name, held in self.broadcast.items()})


FARTHEST = 1e3  # factor between the first value of an adaptive clip norm and any later one
RAMP = 0.1  # of the clip norm: where bits of an adaptive clip norm in a loop fall from 1 to -1
NoiseStd = float | Tensor  # standard deviation of the noise: one number for all coordinates, or one for each [d]


def _check_decoded(found: object, step: Step, mean: Tensor, public: Public) -> str:
    fits = isinstance(found, Tensor) and found.dim() == mean.dim() and step.length(found.shape[-1]) == mean.shape[-1]
    needed = f"a floating tensor of which encode makes {mean.shape[-1]} numbers"
    return tensor(found, tuple(found.shape), mean) if fits and isinstance(found, Tensor) else needed


class Step(Part):
    """Base class of encoding steps, which clients apply to messages and the server undoes after the noise."""

    needs_slopes: bool = False  # True: `encode` uses the clients' gradients at the start of the round
    needs_tensors: bool = False  # True: `encode` uses the sizes of the model's tensors

    @abstractmethod
    @returns(lambda found, part, rows, *_, **__: tensor(found, (*rows.shape[:-1], part.length(rows.shape[-1])), rows))
    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        """Return messages [m, d] encoded as [m, d'], on the client; `slopes` [m, d] are gradients, if needed."""

    def length(self, before: int) -> int:
        """Return the length of an encoded message whose length was `before`."""
        return before

    def learn(self, mean: Tensor, public: Public) -> dict[str, float]:
        """Return public numbers for later rounds (`Public.state`), computed from the noised mean before `decode`."""
        return {}

    @abstractmethod
    @returns(_check_decoded)
    def decode(self, mean: Tensor, public: Public) -> Tensor:
        """Return the noised mean [d'] decoded to [d], on the server."""

    @abstractmethod
    @returns(of_type(Bound))
    def bound(self, before: Bound) -> Bound:
        """Return the norm bound of the message after this step, from the bound before it."""

    @abstractmethod
    @returns(of_type(float, int, Tensor))
    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        """Return the standard deviation of the noise after `decode`, given `std` before it."""


@dataclass(frozen=True)
class Adaptive(Schedule, kind="adaptive"):
    """Adaptive clip norm C that follows the `quantile` of update norms (Andrew, Thakkar, McMahan, Ramaswamy 2021).

    message = (sqrt(1 - share^2) * x / C,  share * b),  x the update, clipped to C;  b = +1 if ||x|| <= C, else -1
    C <- C * exp(-rate * (fraction of updates within C - quantile)),  the fraction estimated from the noised mean

    The bit b is one coordinate of the same unit-ball message, under the same noise: it costs no extra epsilon, but
    shrinks the update by the factor sqrt(1 - share^2). In `make_private` x is the gradient of one record.
    """

    learned: ClassVar[bool] = True
    start: float
    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.1
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fits = positive(self.start, self.rate) and 0 < self.quantile < 1 and 0 < self.share < 1
        values = {"start": self.start, "quantile": self.quantile, "rate": self.rate, "share": self.share}
        require_values(fits, "adaptive clip", "start and rate above 0, quantile and share in (0, 1)", **values)

    def at(self, t: int) -> float:
        return self.start

    def join(self, rows: Tensor, inside: Tensor) -> Tensor:
        """Return messages [m, d + 1]: clipped updates [m, d], each with a bit whether it was within the clip norm."""
        bits = torch.where(inside, self.share, -self.share).to(rows.dtype) * (1.0 - SLACK)
        return torch.cat([rows * self.update_norm, bits[:, None]], dim=1)

    @property
    def update_norm(self) -> float:
        """Largest norm sqrt(1 - share^2) of the update's part of a message."""
        return math.sqrt(1 - self.share**2)

    def bits(self, norms: Tensor, clip_norm: float) -> Tensor:
        """Return the clip bits b of records with these norms [m]: 1 below, -1 above the clip norm, 0 if not finite.

        Within `RAMP` of the clip norm b falls linearly, because one record more in a batch changes how norms are
        rounded, and would otherwise switch bits of norms near the clip norm.
        """
        ramp = ((1.0 - norms / clip_norm) / RAMP).clamp(-1.0, 1.0)
        return torch.where(norms.isfinite(), ramp, torch.zeros_like(ramp))

    @property
    def rounding(self) -> float:
        """Largest change of a message per relative change of its gradient: sqrt(1 - share^2 + (share / RAMP)^2)."""
        return math.hypot(self.update_norm, self.share / RAMP)

    def next(self, mean: Tensor, clip_norm: float) -> float:
        """Return the next round's clip norm, which stays within a factor of 1000 of the first."""
        fraction = min(1.0, max(0.0, (float(mean[-1]) / self.share + 1) / 2))
        moved = clip_norm * math.exp(-self.rate * (fraction - self.quantile))
        return min(self.start * FARTHEST, max(self.start / FARTHEST, moved))

    def allows(self, clip_norm: float) -> bool:
        """Return whether `next` can return this clip norm."""
        return self.start / FARTHEST <= clip_norm <= self.start * FARTHEST


@dataclass(frozen=True)
class ClipNorms(Schedule, kind="clip_norms"):
    """Clip norms per layer: the part x_l of a record's gradient x that belongs to group l is clipped by itself.

        x_l <- x_l * min(1, C_l / ||x_l||),   ||x|| <= C = sqrt(sum_l C_l^2)

    `names` are layers, or prefixes of the names of parameters, and `clip_norms` are C_l; the value of the schedule is
    C in every round. Only `make_private` clips so. Guarantee: that of one clip norm C, by which the noise is scaled.
    """

    names: tuple[str, ...]
    clip_norms: tuple[float, ...]
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        found = f"clip norms {brief_repr(dict(zip(self.names, self.clip_norms, strict=False)))}"
        fits = 0 < len(self.names) == len(self.clip_norms) == len(set(self.names)) and positive(*self.clip_norms)
        needed = "a positive finite clip norm for each group of parameters"
        require(fits, "clip", found, needed, "give each name one clip norm")

    def __str__(self) -> str:
        each = ", ".join(f"{name!r} {own:.6g}" for name, own in zip(self.names, self.clip_norms, strict=True))
        return f"{each}; of all together at most {self.at(0):.6g}, by which the noise is scaled"

    def at(self, t: int) -> float:
        return math.hypot(*self.clip_norms)


@dataclass(frozen=True)
class Clip(Step, kind="clip"):
    """Clipping of a message x into the unit ball: x * min(1 / clip_norm, 1 / ||x||).

    The norm is that of the whole message. A message with a non-finite entry becomes zero. clip_norm = inf does not clip
    and gives no bound. An `Adaptive` clip norm sends one more coordinate: whether ||x|| <= clip_norm.
    Guarantee: ||encode(x)|| <= 1 exactly, in float32, for any x; so sensitivity is 1 (zero out) or 2 (replace).
    """

    clip_norm: float | Schedule
    norm: Norm = 2

    def __post_init__(self) -> None:
        found = "a clip norm per layer of a client's message"
        fits = not isinstance(self.clip_norm, ClipNorms)
        require(fits, "clip", found, "one clip norm for the whole message", "set one number, or use make_private")
        fits = self.norm == 2 or not isinstance(self.clip_norm, Adaptive)
        require(fits, "clip", "an adaptive clip norm in the L1 norm", "the L2 norm", "set norm = 2")
        found, fix = f"clip_norm {brief_repr(self.clip_norm)}", "use a clip norm near the typical update norm"
        fits = self.clip_norm == math.inf or positive(self.clip_norm)
        require(fits, "clip", found, "a positive number", fix)

    @property
    def finite(self) -> bool:
        """Whether this step bounds the message: False for clip_norm = inf."""
        return self.clip_norm != math.inf

    def clip_norm_at(self, t: int, learned: float | None = None) -> float:
        """Return the public clip norm of round t; `learned` is the current value of an adaptive clip norm."""
        return at(self.clip_norm, t) if learned is None else learned

    def _clip_norm(self, public: Public) -> float:
        return public.clip_norm if isinstance(self.clip_norm, Adaptive) else at(self.clip_norm, public.t)

    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        norms = row_norms(rows, self.norm)
        sound = finite_rows(rows, norms)
        if not self.finite:
            return sound
        clip_norm = self._clip_norm(public)
        inside = scaled(sound, factors(norms, clip_norm, unit=True))
        return self.clip_norm.join(inside, norms <= clip_norm) if isinstance(self.clip_norm, Adaptive) else inside

    def length(self, before: int) -> int:
        return before + isinstance(self.clip_norm, Adaptive)

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        if isinstance(self.clip_norm, Adaptive):
            mean = mean[:-1] / self.clip_norm.update_norm
        return mean * self._clip_norm(public) if self.finite else mean

    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        if isinstance(self.clip_norm, Adaptive):
            std = (std[:-1] if isinstance(std, Tensor) else std) / self.clip_norm.update_norm
        return std * self._clip_norm(public) if self.finite else std

    def learn(self, mean: Tensor, public: Public) -> dict[str, float]:
        if not isinstance(self.clip_norm, Adaptive):
            return {}
        return {"clip_norm": self.clip_norm.next(mean, self._clip_norm(public))}

    def bound(self, before: Bound) -> Bound:
        found, fix = "Clip on the message of a record-level plan", "drop Clip: BatchGradient clips records"
        require(before.unit != "record", "record bound", found, "clipping of each record", fix)
        return Bound(unit=before.unit, norm=self.norm, finite=self.clip_norm != math.inf)


def finite_rows(rows: Tensor, norms: Tensor) -> Tensor:
    """Return rows [m, d] in which rows with a non-finite norm are set to zero."""
    bad = ~norms.isfinite()
    if rows.device.type == "cpu" and not bool(bad.any()):
        return rows
    return rows.masked_fill(bad[:, None], 0.0)


@dataclass(frozen=True)
class Noised:
    """Public facts about a noised mean, which post-processing may use: layout, noise level, round and clip norm."""

    layout: Layout
    std: NoiseStd  # exact standard deviation of the noise in every coordinate of the mean
    t: int
    clip_norm: float = math.inf  # of a client's update, or of a record's gradient: bounds the norm of the mean

    @property
    def noise_to_signal(self) -> float:
        """Ratio of the noise's norm to the largest norm of the mean: z sqrt(d) / S.

        z is the noise multiplier, d the number of parameters and S the expected number of clients, or records."""
        return float(self.each().square().sum().sqrt()) / self.clip_norm

    def each(self, device: torch.device | None = None) -> Tensor:
        """Return the standard deviation of the noise in every coordinate: [d], float64."""
        if isinstance(self.std, Tensor):
            return self.std.to(device or self.std.device, torch.float64)
        return torch.full((self.layout.size,), self.std, dtype=torch.float64, device=device)


class Postprocess(Part):
    """Base class of post-processing of the noised mean."""

    needs_noise: ClassVar[bool] = False  # True: `apply` reads known.std, so steps before it must be linear
    linear: ClassVar[bool] = False  # True: a linear map, after which `decoded_noise_std` is the noise level

    @abstractmethod
    @returns(lambda found, part, mean, *_: tensor(found, tuple(mean.shape), mean))
    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        """Return the post-processed mean [d]; `known` has the noise level of `mean`."""

    def decoded_noise_std(self, known: Noised) -> NoiseStd:
        """Return the standard deviation of the noise after `apply`; called for linear maps only."""
        raise NotImplementedError(f"linear post-processing {self.kind} must define decoded_noise_std")


@dataclass(frozen=True)
class LaplacianSmoothing(Postprocess, kind="laplacian_smoothing"):
    """Laplacian smoothing (I + strength * L)^-1 of the noised mean per tensor, L the Laplacian of a cycle (DP-Fed-LS).

    A tensor is flattened in parameter order; `order` first permutes the axes of 4-dimensional tensors, such as
    (0, 2, 3, 1) for O,H,W,I (DP-Fed-LS, Table 5). Guarantee: this is a public linear map, without privacy cost.
    """

    strength: float
    order: tuple[int, ...] = ()
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_values(natural(self.strength), "smoothing", "a finite number of at least 0", strength=self.strength)
        fits = sorted(self.order) in ([], [0, 1, 2, 3])
        require(fits, "smoothing", f"order {list(self.order)}", "a permutation of 0, 1, 2, 3", "drop order")

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        return self._per_tensor(mean, known.layout, smooth_cycle)

    def decoded_noise_std(self, known: Noised) -> NoiseStd:
        """Return the noise's standard deviation after smoothing, sqrt(h^2 * nu^2).

        h is the impulse response of the smoothing, nu the standard deviation before it, and * circular convolution."""
        return self._per_tensor(known.each().square(), known.layout, _smoothed_variances).sqrt()

    def _per_tensor(self, vector: Tensor, layout: Layout, of_cycle: Callable[[Tensor, float], Tensor]) -> Tensor:
        if self.strength == 0:
            return vector
        result = vector.clone()
        for slot in layout.slots:
            part = vector[slot.start : slot.stop]
            if not slot.trainable:
                continue
            if self.order and len(slot.shape) == 4:
                back, turned = sorted(range(4), key=self.order.__getitem__), part.view(slot.shape).permute(self.order)
                smooth = of_cycle(turned.reshape(-1), self.strength).view(turned.shape).permute(back).reshape(-1)
            else:
                smooth = of_cycle(part, self.strength)
            result[slot.start : slot.stop] = smooth
        return result


def _smoothed_variances(variances: Tensor, strength: float) -> Tensor:
    impulse = torch.zeros_like(variances)
    impulse[0] = 1.0
    weights = smooth_cycle(impulse, strength).square()
    if bool((variances == variances[0]).all()):
        return variances * weights.sum()
    product = torch.fft.rfft(weights) * torch.fft.rfft(variances)
    round_the_cycle: Tensor = torch.fft.irfft(product, len(variances))
    return round_the_cycle.clamp(min=0.0)


def smooth_cycle(signal: Tensor, strength: float) -> Tensor:
    """Return (I + s L)^-1 v for strength s, signal v and the Laplacian L of a cycle, exact up to rounding.

    With S the cyclic shift, r = 2s / (1 + 2s + sqrt(1 + 4s)) and c = r / s it is c (1 - r S)^-1 (1 - r S^-1)^-1 v.
    """
    half = 1 + 2 * strength + math.sqrt(1 + 4 * strength)
    r = 2 * strength / half
    return _geometric(_geometric(signal, r, 1), r, -1) * (2 / half)


def _geometric(signal: Tensor, r: float, shift: int) -> Tensor:
    """Return sum_k r^k S^k v = prod_j (1 + r^(2^j) S^(2^j)) v for signal v and the cyclic shift S by `shift`."""
    floor = 1e-9 if signal.dtype == torch.float32 else 1e-18  # smaller factors are omitted
    y, power = signal, r
    while power > floor:
        y = torch.roll(y, shift).mul_(power).add_(y)
        power, shift = power * power, shift * 2
    return y


@dataclass(frozen=True)
class JamesStein(Postprocess, kind="james_stein"):
    """James-Stein shrinkage (1 - (d - 2) / sum_i (y_i / nu_i)^2) y of each tensor y of the noised mean.

    d is the number of coordinates with noise and nu_i its standard deviation; `positive` clamps the factor at 0.
    Coordinates without noise do not change, nor do tensors with at most two noisy coordinates, for which no estimator
    dominates the raw mean.
    """

    positive: bool = True
    needs_noise: ClassVar[bool] = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        shrunk, each = mean.clone(), known.each(mean.device)
        for slot in known.layout.slots:
            part, std = shrunk[slot.start : slot.stop], each[slot.start : slot.stop]
            noisy = std > 0
            power = torch.where(noisy, part.double() / std, 0.0).square().sum()
            factor = torch.where(power > 0, 1 - (noisy.sum() - 2).clamp(min=0) / power, 1.0)
            factor = factor.clamp(min=0.0) if self.positive else factor
            part.copy_(torch.where(noisy, part * factor, part))
        return shrunk


@dataclass(frozen=True)
class SoftThreshold(Postprocess, kind="soft_threshold"):
    """Soft thresholding sign(y) max(0, |y| - nu sqrt(2 ln d)) of each tensor y of the noised mean.

    nu is the noise's standard deviation, d the number of noisy coordinates (Donoho, Johnstone 1994).
    """

    needs_noise: ClassVar[bool] = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        shrunk, each = mean.clone(), known.each(mean.device).to(mean.dtype)
        for slot in known.layout.slots:
            part, std = shrunk[slot.start : slot.stop], each[slot.start : slot.stop]
            level = std * (2 * (std > 0).sum().clamp(min=2).double().log()).sqrt()
            part.copy_(part.sign() * (part.abs() - level).clamp(min=0.0))
        return shrunk


@dataclass(frozen=True)
class WhenNoisy(Postprocess, kind="when_noisy"):
    """Conditional denoising: `denoiser` is applied in rounds whose noise-to-signal ratio z sqrt(d) / S is > `above`.

    z is the noise multiplier, d the number of parameters, S the expected cohort (or batch). Laplacian smoothing helps
    above a ratio of about 18 and harms below it. The ratio is public: it depends on the plan and the model alone.
    """

    denoiser: Postprocess
    above: float = 18.0
    needs_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_values(natural(self.above), "denoising", "a finite number of at least 0", above=self.above)

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        return self.denoiser.apply(mean, known) if known.noise_to_signal > self.above else mean
