"""Private mean and scale of records, for `make_private(prepare=...)`: two noised sums before the first step.

    m   = C1 / n ( sum_i clip(x_i, C1) / C1 + N(0, z^2 I) )                     [d], clip(v, C) = v min(1, C / ||v||)
    v   = C2 / n ( sum_i clip(s(x_i - m), C2) / C2 + N(0, z^2 I) )              [channels], s(u)_c = sum of u_k^2 in c
    x'  = (x - m) / sqrt(d v / coordinates of a channel)

x_i are the n records of d numbers, m is their mean, v the mean square of every channel c, and C1, C2 are clip norms.
One record changes each sum by at most 1 (2 if it is replaced), so each is a Gaussian mechanism with noise multiplier z,
accounted with the steps. n is a constant of the plan. Everything computed from m and v is post-processing. The sums are
charged before their noise is drawn, at the first batch; a checkpoint has m and v, so that a resumed loop does not
release them again. Called by dpsgd/private_loop.py, loader.py and optimizer.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sordino.errors import ConfigError, DataError, PlanError
from sordino.parts.mechanisms import Moment
from sordino.parts.releases import on_grid
from sordino.rng import Streams

LEAST = 1e-2  # smallest mean square of a channel over the average of all channels: noise may push it below 0
ROWS = 4096  # records that are summed at once


@dataclass(frozen=True)
class Standardise:
    """Settings of the private mean and scale of records.

    Records are clipped to `norm`, a public bound above the norm of most records (features of `so.features` have a norm
    of about 1). All coordinates of a channel share a scale; without `channels` each coordinate has its own.
    """

    noise_multiplier: float = 15.0
    norm: float = 1.0
    channels: int | None = None

    def parts(self, length: int) -> tuple[Moment, Moment]:
        """Return the releases of mean and scale, for records of `length` numbers."""
        channels = length if self.channels is None else self.channels
        if not 0 < channels <= length or length % channels:
            found, needed = f"channels = {channels} for records of {length} numbers", f"a divisor of {length}"
            raise ConfigError(found, needed, "set channels to the number of channels of a record")
        if not 0 < self.norm < math.inf:
            raise ConfigError(f"norm = {self.norm}", "a positive finite clip norm of the records", "set norm=1.0")
        spread = 2 * self.norm**2 / math.sqrt(channels)  # twice the norm of s(u) where ||u|| = norm in equal parts
        mean = Moment("mean of the records", self.noise_multiplier, float(self.norm), length)
        return mean, Moment("scale of the records", self.noise_multiplier, spread, channels)


class Standardiser:
    """Standardiser of a loop's batches: mean and scale of the records are released at the first batch."""

    def __init__(self, parts: tuple[Moment, Moment], x: Tensor, account: Any, streams: Streams) -> None:
        self.parts, self.x, self.account, self.streams = parts, x, account, streams
        self.known: dict[str, Tensor] = {}

    @classmethod
    def of(cls, account: Any, records: tuple[Tensor, ...], streams: Streams) -> Standardiser | None:
        """Return the standardiser of a loop whose plan releases mean and scale; None for other plans."""
        parts = account.settings.plan.prepare
        return cls(parts, records[0], account, streams) if parts else None

    @staticmethod
    def parts_of(
        prepare: Standardise | None, records: tuple[Tensor, ...], others: bool
    ) -> tuple[()] | tuple[Moment, Moment]:
        """Return the releases of mean and scale, for tensors; `others`: the loop has a transform or several ranks."""
        if prepare is None:
            return ()
        if not isinstance(prepare, Standardise):
            found = f"prepare = {type(prepare).__name__}"
            raise ConfigError(found, "an object of class Standardise", "pass prepare=Standardise(...)")
        if len(records) != 2 or not records[0].is_floating_point():
            found = "prepare= with a data set that is no TensorDataset(x, y)"
            raise DataError(found, "float records in one tensor", "load the records into TensorDataset(x, y)")
        if others:
            found, needed = "prepare= with transform= or several ranks", "one process without a transform"
            fix = "apply the transform to the data set first; run in one process"
            raise PlanError("preparation", found, needed, fix)
        return prepare.parts(records[0][0].numel())

    def __call__(self, batch: Any) -> Any:
        """Return a batch with standardised inputs."""
        mean, inverse = self.moments()
        x = batch[0]
        return [((x.flatten(1) - mean.to(x)) * inverse.to(x)).view_as(x), *batch[1:]]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and inverse scale of every coordinate; the first call charges and releases them."""
        if not self.known:
            self.account.charge_preparation()
            rows, (mean, scale) = self.x.detach().flatten(1), self.parts
            centre = self._released(mean, (part.double() for part in torch.split(rows, ROWS)), len(rows))
            width = rows.shape[1] // scale.size
            squares = (
                (part.double() - centre).square().view(len(part), -1, width).sum(2) for part in torch.split(rows, ROWS)
            )
            spread = self._released(scale, squares, len(rows))
            spread = spread.clamp_min(LEAST * max(float(spread.clamp_min(0).mean()), 1e-12))
            inverse = (spread * (rows.shape[1] / width)).rsqrt().repeat_interleave(width)
            self.known = {"mean": centre, "inverse": inverse}
        return self.known["mean"], self.known["inverse"]

    def _released(self, part: Moment, messages: Any, count: int) -> Tensor:
        """Return the noised mean of clipped messages; a message with NaN or infinity counts as zero."""
        total = torch.zeros(part.size, dtype=torch.float64)
        for message in messages:
            total += part.clipped(message).sum(0).cpu()
        noise = part.noise("add_remove").sample(part.size, self.streams.at(0, f"preparation: {part.column}"))
        noised = total + torch.from_numpy(noise)
        if self.streams.mode == "secure":
            noised = on_grid(noised, part.noise_multiplier)
        return noised * (part.clip_norm / count)

    def state(self) -> dict[str, Any]:
        """Return mean and scale for a checkpoint; both are released already."""
        return {"moments": {name: held.clone() for name, held in self.known.items()}} if self.known else {}

    def check(self, stored: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another mean and scale than this loop has released."""
        held = {name: part for name, part in stored.items() if isinstance(part, Tensor)}
        wrong = held and any(held[k].shape != (self.parts[0].size,) for k in held)
        if wrong or set(held) not in (set(), {"mean", "inverse"}) or len(held) != len(stored):
            found, needed = "a checkpoint without a mean and scale of these records", "the checkpoint of this loop"
            raise ConfigError(found, needed, "load the checkpoint of a run over the same records")
        if self.known and not all(k in held and torch.equal(held[k], self.known[k]) for k in self.known):
            found = "a checkpoint of another mean and scale, after this loop has released its own"
            raise ConfigError(found, "the checkpoint loaded before the first batch", "call load_state_dict first")

    def load(self, stored: Mapping[str, Tensor]) -> None:
        """Continue with the mean and scale of a checkpoint, after `check`."""
        self.known = {name: held.clone() for name, held in stored.items()} or self.known
