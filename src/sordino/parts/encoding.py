"""Encoding steps between local training and noise: the clip, and the base of all steps. Engines call `encode`."""

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
from sordino.errors import PlanError, brief_repr
from sordino.layout import Layout
from sordino.parts.clipping import SLACK, factors, row_norms, scaled
from sordino.parts.schedules import Schedule, at, natural, positive


@codec.hides_values
@dataclass(frozen=True)
class Public:
    """What everybody may know in round t: nothing here depends on unreleased data."""

    t: int
    clip_norm: float = math.inf
    size: int = 0  # d, the length of a message before any step
    mask: Tensor | None = None  # coordinates that are sent, where a PublicMask chose them
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)  # what `LocalSolver.split` read off releases, [d]
    tensors: tuple[int, ...] = ()  # sizes of the model's tensors, in the order of the message
    state: Mapping[str, float] = field(default_factory=dict)  # what `Step.learn` read off earlier releases

    def on(self, device: torch.device) -> Public:
        """The same, with its tensors there."""
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, mask=mask, broadcast={name: held.to(device) for name, held in self.broadcast.items()})


NoiseStd = float | Tensor  # standard deviation of the noise: one number for all coordinates, or one for each [d]


def decoded(found: object, step: Step, mean: Tensor) -> str:
    """A vector that `encode` makes one of the length of `mean` of."""
    fits = isinstance(found, Tensor) and found.dim() == mean.dim() and step.length(found.shape[-1]) == mean.shape[-1]
    needed = f"a floating tensor of which encode makes {mean.shape[-1]} numbers"
    return tensor(found, tuple(found.shape), mean) if fits and isinstance(found, Tensor) else needed


class Step(Part):
    """One client step: effect, its undoing after the noise, and what it does to the bound and to the noise."""

    @property
    def needs_slopes(self) -> bool:
        """Whether `encode` wants the clients' gradients at the round's start."""
        return False

    @property
    def needs_tensors(self) -> bool:
        """Whether `encode` looks at where one tensor of the model ends and the next begins."""
        return False

    @abstractmethod
    @returns(lambda found, part, rows, *_, **__: tensor(found, (*rows.shape[:-1], part.length(rows.shape[-1])), rows))
    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        """On the client: rows [m, d] -> [m, d']."""

    def length(self, before: int) -> int:
        """How many numbers `encode` makes of so many."""
        return before

    def learn(self, mean: Tensor, public: Public) -> dict[str, float]:
        """Public numbers for later rounds (`Public.state`), read off the noised mean before it is decoded."""
        return {}

    @abstractmethod
    @returns(lambda found, part, mean, public: decoded(found, part, mean))
    def decode(self, mean: Tensor, public: Public) -> Tensor:
        """On the server, after the noise: [d'] -> [d]."""

    @abstractmethod
    @returns(of_type(Bound))
    def bound(self, before: Bound) -> Bound:
        """The bound after this step."""

    @abstractmethod
    @returns(of_type(float, int, Tensor))
    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        """The noise's standard deviation after `decode`, where it was `std` before."""


@dataclass(frozen=True)
class Adaptive(Schedule, kind="adaptive"):
    """A clip norm that follows the `quantile` of update norms (Andrew, Thakkar, McMahan, Ramaswamy 2021).

        message = (sqrt(1 - share^2) * x / clip norm,  share * b),  b = +1 if ||x|| <= clip norm else -1
        clip norm <- clip norm * exp(-rate * (fraction inside - quantile)),  read off the noised mean

    The bit is one coordinate of the same unit-ball message, under the same noise: it costs no epsilon of its own, and
    the factor sqrt(1 - share^2) is its price in signal.
    """

    learned: ClassVar[bool] = True
    start: float
    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.1
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (positive(self.start, self.rate) and 0 < self.quantile < 1 and 0 < self.share < 1):
            found = f"start {self.start}, quantile {self.quantile}, rate {self.rate}, share {self.share}"
            raise PlanError("adaptive clip", found, "start and rate above 0, quantile and share in (0, 1)")

    def at(self, t: int) -> float:
        return self.start

    def join(self, rows: Tensor, inside: Tensor) -> Tensor:
        """[m, d] -> [m, d + 1], still in the unit ball."""
        bits = torch.where(inside, self.share, -self.share).to(rows.dtype) * (1.0 - SLACK)
        return torch.cat([rows * self.kept, bits[:, None]], dim=1)

    def part(self, mean: Tensor) -> Tensor:
        """The update's share of a noised mean, or of its noise per coordinate."""
        return mean[:-1] / self.kept

    @property
    def kept(self) -> float:
        """sqrt(1 - share^2): what of the unit ball is left for the update."""
        return math.sqrt(1 - self.share**2)

    def next(self, mean: Tensor, clip_norm: float) -> float:
        """The next clip norm, kept within a factor of 1000 of the first."""
        fraction = min(1.0, max(0.0, (float(mean[-1]) / self.share + 1) / 2))
        moved = clip_norm * math.exp(-self.rate * (fraction - self.quantile))
        return min(self.start * 1e3, max(self.start * 1e-3, moved))


@dataclass(frozen=True)
class Clip(Step, kind="clip"):
    """x / clip norm, pulled into the unit ball: x * min(1 / clip norm, 1 / ||x||).

    One norm over the whole message. A row with a non-finite entry becomes zero. clip_norm = inf leaves x alone and
    bounds nothing. An `Adaptive` clip norm sends one more coordinate: whether x was inside (Andrew et al. 2021).
    Guarantee: ||encode(x)|| <= 1 exactly, in float32, for any x; so sensitivity is 1 (zero out) or 2 (replace).
    """

    clip_norm: float | Schedule
    norm: Norm = 2

    def __post_init__(self) -> None:
        if isinstance(self.clip_norm, Adaptive) and self.norm != 2:
            raise PlanError("clip", "an adaptive clip norm in the L1 norm", "norm = 2")
        if self.clip_norm != math.inf and not positive(self.clip_norm):
            found = f"clip_norm {brief_repr(self.clip_norm)}"
            raise PlanError("clip", found, "a positive number", "use a clip norm near the typical update norm")

    @property
    def finite(self) -> bool:
        """Whether this clip bounds anything."""
        return isinstance(self.clip_norm, Schedule) or math.isfinite(self.clip_norm)

    def clip_norm_at(self, t: int, learnt: float | None = None) -> float:
        """The public clip norm of round t; `learnt` is what an adaptive one has become."""
        return at(self.clip_norm, t) if learnt is None else learnt

    def _clip_norm(self, public: Public) -> float:
        """What the plan says of this round, or what an adaptive clip norm has become."""
        return public.clip_norm if isinstance(self.clip_norm, Adaptive) else self.clip_norm_at(public.t)

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
        if not self.finite:
            return mean
        return (self.clip_norm.part(mean) if isinstance(self.clip_norm, Adaptive) else mean) * self._clip_norm(public)

    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        if not self.finite:
            return std
        if isinstance(self.clip_norm, Adaptive):
            std = self.clip_norm.part(std) if isinstance(std, Tensor) else std / self.clip_norm.kept
        return std * self._clip_norm(public)

    def learn(self, mean: Tensor, public: Public) -> dict[str, float]:
        if not isinstance(self.clip_norm, Adaptive):
            return {}
        return {"clip_norm": self.clip_norm.next(mean, self._clip_norm(public))}

    def bound(self, before: Bound) -> Bound:
        if before.unit == "record":
            found = "Clip on the message of a record-level plan"
            raise PlanError("record bound", found, "clipping of each record", "drop Clip: BatchGradient clips records")
        return Bound(unit=before.unit, norm=self.norm, finite=self.finite)


def finite_rows(rows: Tensor, norms: Tensor) -> Tensor:
    """Rows with a non-finite entry (so a non-finite norm) count as zero: they never reach the sum."""
    bad = ~norms.isfinite()
    return torch.where(bad[:, None], torch.zeros_like(rows), rows) if bool(bad.any()) else rows


@dataclass(frozen=True)
class Noised:
    """What is publicly known of a noised mean beside its value."""

    layout: Layout
    std: NoiseStd  # exact standard deviation of the noise in every coordinate of the mean
    t: int
    clip_norm: float = math.inf  # of a client's update, or of a record's gradient: the mean is no longer than that

    @property
    def noise_to_signal(self) -> float:
        """The norm of the noise over the largest norm of the mean: z sqrt(d) / S for S clients, or records."""
        return float(self.each().square().sum().sqrt()) / self.clip_norm

    def each(self) -> Tensor:
        """The deviation of every coordinate [d], float64."""
        if isinstance(self.std, Tensor):
            return self.std.double()
        return torch.full((self.layout.size,), self.std, dtype=torch.float64)


class Postprocess(Part):
    """A public map of the noised mean. `linear`: the noise after it is known, by `spread`; else nobody can say."""

    needs_noise: ClassVar[bool] = False  # True: `apply` reads known.std, so what comes before must be linear
    linear: ClassVar[bool] = False

    @abstractmethod
    @returns(lambda found, part, mean, *_: tensor(found, tuple(mean.shape), mean))
    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        """The mean [d], changed."""

    def decoded_noise_std(self, known: Noised) -> NoiseStd:
        """The noise's standard deviation after `apply`; asked of linear maps only."""
        raise NotImplementedError(f"{self.kind} does not say what noise is left")


@dataclass(frozen=True)
class LaplacianSmoothing(Postprocess, kind="laplacian_smoothing"):
    """u = (I + strength * L)^-1 mean, L the Laplacian of a cycle, tensor by tensor (papers 000 and 004).

    A tensor is flattened in parameter order; `order` permutes the axes of 4-dimensional ones first, such as
    (0, 2, 3, 1) for O,H,W,I (paper 000, Table 5). The inverse factors into two one-sided recursive filters,
    c / ((1 - r z^-1)(1 - r z)), applied by doubling.
    Guarantee: a public invertible linear map; the certificate is the same with and without it.
    """

    strength: float
    order: tuple[int, ...] = ()
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not natural(self.strength):
            raise PlanError("smoothing", f"strength {self.strength}", "a finite number of at least 0")
        if self.order and sorted(self.order) != [0, 1, 2, 3]:
            raise PlanError("smoothing", f"order {list(self.order)}", "a permutation of 0, 1, 2, 3")

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        return self._tensors(mean, known.layout, smooth_cycle)

    def decoded_noise_std(self, known: Noised) -> NoiseStd:
        """sqrt(h^2 * nu^2), h the response to a single one, * round the cycle of each tensor."""
        return self._tensors(known.each().square(), known.layout, _variances).sqrt()

    def _tensors(self, vector: Tensor, layout: Layout, of_cycle: Callable[[Tensor, float], Tensor]) -> Tensor:
        """`of_cycle` of every trained tensor, flattened in its order."""
        if self.strength == 0:
            return vector
        made = torch.empty_like(vector)
        for slot in layout.slots:
            part = vector[slot.start : slot.stop]
            made[slot.start : slot.stop] = self._tensor(part, slot.shape, of_cycle) if slot.trainable else part
        return made

    def _tensor(self, part: Tensor, shape: torch.Size, of_cycle: Callable[[Tensor, float], Tensor]) -> Tensor:
        if not self.order or len(shape) != 4:
            return of_cycle(part, self.strength)
        back = sorted(range(4), key=self.order.__getitem__)
        turned = part.view(shape).permute(self.order)
        return of_cycle(turned.reshape(-1), self.strength).view(turned.shape).permute(back).reshape(-1)


def _variances(variances: Tensor, strength: float) -> Tensor:
    """Of independent noise after smoothing: h^2 * nu^2 round the cycle."""
    impulse = torch.zeros_like(variances)
    impulse[0] = 1.0
    weights = smooth_cycle(impulse, strength).square()
    if bool((variances == variances[0]).all()):
        return variances * weights.sum()
    product = torch.fft.rfft(weights) * torch.fft.rfft(variances)
    round_the_cycle: Tensor = torch.fft.irfft(product, len(variances))
    return round_the_cycle.clamp(min=0.0)


def smooth_cycle(signal: Tensor, strength: float) -> Tensor:
    """(I + s L)^-1 v on a cycle of any length, exact to rounding, in O(d).

    With S the cyclic shift, r = 2s / (1 + 2s + sqrt(1 + 4s)) (no digits lost for small s) and c = r / s:
    (I + s L)^-1 = c (1 - r S)^-1 (1 - r S^-1)^-1.
    """
    half = 1 + 2 * strength + math.sqrt(1 + 4 * strength)
    r = 2 * strength / half
    return _geometric(_geometric(signal, r, 1), r, -1) * (2 / half)


def _geometric(signal: Tensor, r: float, way: int) -> Tensor:
    """sum_k r^k S^k v = prod_j (1 + r^(2^j) S^(2^j)) v, cut where r^(2^j) is below rounding."""
    floor = 1e-9 if signal.dtype == torch.float32 else 1e-18
    y, power, shift = signal, r, way
    while power > floor:
        y = torch.roll(y, shift).mul_(power).add_(y)
        power, shift = power * power, shift * 2
    return y


@dataclass(frozen=True)
class JamesStein(Postprocess, kind="james_stein"):
    """(1 - (d - 2) / sum_i (y_i / nu_i)^2) y, tensor by tensor; with `positive` the factor is never below 0.

    d counts the coordinates with noise, nu_i is theirs; those without stay as they are, and so does a tensor with one
    or two of them: nothing beats the raw estimate there.
    """

    positive: bool = True
    needs_noise: ClassVar[bool] = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        shrunk, each = mean.clone(), known.each()
        for slot in known.layout.slots:
            part, std = shrunk[slot.start : slot.stop], each[slot.start : slot.stop]
            noisy = std > 0
            power = float((part[noisy].double() / std[noisy]).square().sum())
            factor = 1 - max(0, int(noisy.sum()) - 2) / power if power > 0 else 1.0
            part[noisy] *= max(0.0, factor) if self.positive else factor
        return shrunk


@dataclass(frozen=True)
class SoftThreshold(Postprocess, kind="soft_threshold"):
    """sign(y) max(0, |y| - nu sqrt(2 ln d)), tensor by tensor, d noisy coordinates (Donoho & Johnstone 1994)."""

    needs_noise: ClassVar[bool] = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        shrunk, each = mean.clone(), known.each().to(mean.dtype)
        for slot in known.layout.slots:
            part, std = shrunk[slot.start : slot.stop], each[slot.start : slot.stop]
            level = std * math.sqrt(2 * math.log(max(int((std > 0).sum()), 2)))
            part.copy_(part.sign() * (part.abs() - level).clamp(min=0.0))
        return shrunk


@dataclass(frozen=True)
class WhenNoisy(Postprocess, kind="when_noisy"):
    """`denoiser` in a round whose noise-to-signal ratio z sqrt(d) / S is above `above`; else the mean as it is.

    z is the noise multiplier, d the number of parameters, S the expected cohort (or batch). Laplacian smoothing wins
    above a ratio of about 15 and loses below it. The ratio is public: it depends on the plan and the model alone.
    """

    denoiser: Postprocess
    above: float = 15.0
    needs_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not natural(self.above):
            raise PlanError("denoising", f"above = {self.above}", "a finite number of at least 0")

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        return self.denoiser.apply(mean, known) if known.noise_to_signal > self.above else mean
