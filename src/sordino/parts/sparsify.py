"""Sparsification of a client's update (top-k under dense noise, or a public mask), and of the noised mean.

Engines call `encode`, the loop calls `decode` and `SparsifyMean.apply`, and the plan asks a mask source for scores.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sordino.accounting.bounds import Bound
from sordino.codec import Part
from sordino.codec.boundary import returns, tensor
from sordino.errors import PlanError
from sordino.parts.encoding import Noised, NoiseStd, Postprocess, Public, Step
from sordino.parts.schedules import require, require_values, share
from sordino.rng import Seeded


def keep_largest(rows: Tensor, scores: Tensor, keep: float) -> Tensor:
    """Return rows [m, d] in which all but the ceil(keep * d) entries of largest score are set to zero."""
    where = scores.topk(math.ceil(keep * rows.shape[-1]), dim=-1, sorted=False).indices
    return torch.zeros_like(rows).scatter_(-1, where, rows.gather(-1, where))


def keep_largest_of_each(rows: Tensor, scores: Tensor, keep: float, sizes: Sequence[int]) -> Tensor:
    """Return rows [m, d] after `keep_largest` on each tensor; a row holds tensors of these sizes, one after another."""
    parts = zip(torch.split(rows, list(sizes), -1), torch.split(scores, list(sizes), -1), strict=True)
    return torch.cat([keep_largest(part, score, keep) for part, score in parts], -1)


def _check_keep(keep: float) -> None:
    fix = "set keep = 0.4, for example, to keep 40% of the coordinates"
    require_values(share(keep), "sparsity", "a fraction in (0, 1]", fix, keep=keep)


@dataclass(frozen=True)
class SparsifyUpdate(Step, kind="sparsify_update"):
    """Top-k of a client's own update, by magnitude or by influence |gradient * update| (LUS).

    `keep` is the share of entries that stay, of the whole update or, with per = "tensor", of every tensor.
    Guarantee: the norm does not grow, so a client-level bound still holds. The remaining entries depend on the data, so
    noise is added to ALL coordinates, and record-level plans are refused: one record can change the whole support.
    """

    keep: float
    by: Literal["magnitude", "influence"] = "magnitude"
    per: Literal["tensor"] | None = None  # None: one share of the whole message

    def __post_init__(self) -> None:
        _check_keep(self.keep)

    @property
    def needs_slopes(self) -> bool:  # type: ignore[override]
        return self.by == "influence"

    @property
    def needs_tensors(self) -> bool:  # type: ignore[override]
        return self.per == "tensor"

    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        scores = rows.abs()
        if slopes is not None and self.by == "influence":
            masked = public.mask is not None and rows.shape != slopes.shape  # a PublicMask came before
            scores = (rows * (slopes[:, public.mask] if masked else slopes)).abs()
        if self.per is None:
            return keep_largest(rows, scores, self.keep)
        return keep_largest_of_each(rows, scores, self.keep, _sizes_sent(public, rows.shape[-1]))

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        return mean

    def bound(self, before: Bound) -> Bound:
        found = "a client's own top-k under unit record"
        require(before.unit != "record", "record bound", found, "a Lipschitz step", "use PublicMask")
        return before

    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        return std


def _sizes_sent(public: Public, length: int) -> list[int]:
    """Return the number of entries of each tensor in a message, which a mask may have shortened."""
    if sum(public.tensors) == length:
        return list(public.tensors)
    ends = torch.tensor(public.tensors).cumsum(0)
    if public.mask is None or not len(ends) or len(public.mask) != length:
        found = f"a message of {length} numbers for a model of {sum(public.tensors)} parameters"
        raise PlanError("sparsity", found, "a message of one number per parameter", 'drop per = "tensor"')
    upto = torch.searchsorted(public.mask.cpu(), ends)  # the mask ascends
    return torch.diff(upto, prepend=upto.new_zeros(1)).tolist()


class MaskSource(Part):
    """Base class of public masks, which score all coordinates; those with the largest scores are sent."""

    needs_public_data: ClassVar[bool] = False

    def remember(self, before: Tensor | None, mean: Tensor) -> Tensor | None:
        """Return the argument `released` of `scores` in the next round, from its value `before` and a released mean."""
        return None

    @abstractmethod
    @returns(lambda found, part, t, size, *_, **__: tensor(found, (size,), torch.empty(0)))
    def scores(self, t: int, size: int, released: Tensor | None, update: Tensor | None) -> Tensor:
        """Return one public score per coordinate [size]; coordinates with the largest scores are sent."""


@dataclass(frozen=True)
class RandomMask(MaskSource, kind="random"):
    """Random public mask, which the server draws anew in each round (Fed-SMP-rand_k)."""

    seed: int = 0

    def scores(self, t: int, size: int, released: Tensor | None, update: Tensor | None) -> Tensor:
        return torch.from_numpy(Seeded(self.seed).at(t, "public mask").permutation(size)).to(torch.float32)


@dataclass(frozen=True)
class PublicDataMask(MaskSource, kind="public_data"):
    """Public mask of the largest entries of an update that the server computes on PUBLIC records (Fed-SMP-top_k)."""

    needs_public_data: ClassVar[bool] = True

    def scores(self, t: int, size: int, released: Tensor | None, update: Tensor | None) -> Tensor:
        assert update is not None
        return update.abs()


@dataclass(frozen=True)
class ReleasedMask(MaskSource, kind="released"):
    """Public mask of the largest entries of a moving average of released updates; random in the first round.

    A share `explore` of ALL coordinates is drawn at random, so that omitted coordinates can return; it must be below
    the share of coordinates that are sent.
    """

    seed: int = 0
    explore: float = 0.2
    fade: ClassVar[float] = 0.9  # per round

    def __post_init__(self) -> None:
        require_values(0 <= self.explore < 1, "sparsity", "a fraction in [0, 1)", explore=self.explore)

    def remember(self, before: Tensor | None, mean: Tensor) -> Tensor | None:
        return mean if before is None else self.fade * before + mean

    def scores(self, t: int, size: int, released: Tensor | None, update: Tensor | None) -> Tensor:
        random = RandomMask(self.seed).scores(t, size, None, None)
        if released is None or not bool(released.any()):
            return random
        explored = random >= (1 - self.explore) * size
        return torch.where(explored, torch.full_like(random, math.inf), released.abs())


@dataclass(frozen=True)
class PublicMask(Step, kind="public_mask"):
    """Encoding step that sends only the coordinates of a public mask; only these are clipped and noised.

    Guarantee: dropping coordinates increases no distance, so bounds per client and per record still hold.
    """

    keep: float
    source: MaskSource = field(default_factory=RandomMask)

    def __post_init__(self) -> None:
        _check_keep(self.keep)
        explore = self.source.explore if isinstance(self.source, ReleasedMask) else -1.0
        found = f"explore = {explore} of all coordinates with keep = {self.keep}"
        require(explore < self.keep, "sparsity", found, "explore below keep", "lower explore, or keep more")

    def choose(self, scores: Tensor) -> Tensor:
        """Return the indices of the coordinates that are sent, ascending."""
        return scores.topk(math.ceil(self.keep * len(scores))).indices.sort().values

    def length(self, before: int) -> int:
        return math.ceil(self.keep * before)

    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        assert public.mask is not None
        return rows[:, public.mask]

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        assert public.mask is not None
        return mean.new_zeros(public.size).index_copy_(0, public.mask, mean)

    def bound(self, before: Bound) -> Bound:
        return before

    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        """Return the noise's standard deviation [d], which is 0 in coordinates that are not sent."""
        assert public.mask is not None
        each = std if isinstance(std, Tensor) else torch.full((len(public.mask),), std, device=public.mask.device)
        return self.decode(each, public)


@dataclass(frozen=True)
class SparsifyMean(Postprocess, kind="sparsify_mean"):
    """Top-k of the noised mean, which is post-processing and has no privacy cost.

    `keep` is the share of entries that stay, of the whole mean or, with per = "tensor", of every tensor.
    """

    keep: float
    per: Literal["tensor"] | None = None  # None: one share of the whole mean

    def __post_init__(self) -> None:
        _check_keep(self.keep)

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        if self.per is None:
            return keep_largest(mean[None], mean.abs()[None], self.keep)[0]
        return keep_largest_of_each(mean, mean.abs(), self.keep, known.layout.sizes)
