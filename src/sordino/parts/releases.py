"""Releases: noise added by the server, in shares by the clients, by each client, behind a shuffler, or not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sordino.accounting.bounds import AlreadyPrivate, Bound
from sordino.accounting.events import Event, GaussianNoise, Relation, Shuffled, Unprotected
from sordino.errors import PlanError
from sordino.parts.mechanisms import Gaussian, Mechanism
from sordino.parts.release_base import Release, Sees, need_bound

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.parts.record_samplers import RecordSampler
    from sordino.parts.samplers import Cohort, Sampler


def _reachable(at_least: int, clients: Sampler) -> None:
    if at_least > clients.expected:
        found = f"at_least = {at_least} reports where a round expects {clients.expected:g}"
        needed = "at most the expected cohort"
        raise PlanError("void rounds", found, needed, "lower at_least: most rounds would be void")


def _add(total: Tensor, mechanism: Mechanism, rng: np.random.Generator) -> Tensor:
    import torch  # loaded by then; the calculators of epsilon do without

    noise = torch.from_numpy(mechanism.sample(total.numel(), rng))
    return total + (noise if total.dim() == 1 else noise.view_as(total))


@dataclass(frozen=True)
class CentralNoise(Release, kind="central_noise"):
    """The trusted server adds mechanism noise to the sum of unit-ball messages.

    Only the noised mean is ever seen: messages, cohort and counts stay with the server.
    """

    mechanism: Mechanism
    sees: ClassVar[Sees] = frozenset({"mean"})
    server_noise: ClassVar[bool] = True

    def check(self, bound: Bound | AlreadyPrivate) -> None:
        need_bound(bound, self.mechanism)

    def on_server(self, total: Tensor, rng: np.random.Generator) -> Tensor:
        return _add(total, self.mechanism, rng)

    def event(self) -> Event:
        return self.mechanism.event()

    def message_event(self) -> Event:
        return Unprotected()

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return CentralNoise(self.mechanism.with_noise_multiplier(noise_multiplier))

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...]:
        return (self.mechanism,)

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return self.mechanism.std


@dataclass(frozen=True)
class NoiseShares(Release, kind="noise_shares"):
    """Each client adds a share N(0, noise multiplier^2 / at_least); a secure sum shows the server only their total.

    A round with fewer than `at_least` reports is void, so the total noise is never below the noise multiplier and the
    event does not depend on who came. The server sees the cohort; neighbours zero out one client.
    """

    noise_multiplier: float
    at_least: int
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})
    needs: ClassVar[Sees] = frozenset({"secure_sum"})
    local: ClassVar[bool] = True
    client_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Gaussian(self.noise_multiplier)
        if self.at_least < 1:
            found = f"at_least = {self.at_least}"
            raise PlanError("noise shares", found, "at least 1 report", "use the fewest clients a round accepts")

    def check_sampler(self, clients: Sampler) -> None:
        _reachable(self.at_least, clients)

    @property
    def share(self) -> Gaussian:
        """What one client adds."""
        return Gaussian(self.noise_multiplier / math.sqrt(self.at_least))

    def check(self, bound: Bound | AlreadyPrivate) -> None:
        need_bound(bound, self.share)

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        return _add(row, self.share, rng)

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        if len(cohort) == 0:
            return total
        return _add(total, Gaussian(self.share.noise_multiplier * math.sqrt(len(cohort))), rng)

    def accepts(self, received: int) -> bool:
        return received >= self.at_least

    def hides_cohort(self, clients: Sampler) -> bool:
        return clients.size == self.at_least  # else the noise's variance tells how many came

    def event(self) -> Event:
        return GaussianNoise(self.noise_multiplier)

    def message_event(self) -> Event:
        return self.share.event()

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return replace(self, noise_multiplier=noise_multiplier)

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...]:
        return (self.share,) * len(cohort)

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return self.share.noise_multiplier * math.sqrt(len(cohort))


class _ClientNoise(Release):
    """Every client adds the mechanism's noise to its own message; the mean is that of the messages received."""

    mechanism: Mechanism
    local: ClassVar[bool] = True
    client_noise: ClassVar[bool] = True

    def of(self, client: int) -> Mechanism:
        """The noise of one client."""
        return self.mechanism

    def check(self, bound: Bound | AlreadyPrivate) -> None:
        need_bound(bound, self.mechanism)

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        return _add(row, self.of(client), rng)

    def denominator(self, expected: float, received: int) -> float:
        return float(max(received, 1))

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...]:
        return tuple(self.of(int(client)) for client in cohort)

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return self.mechanism.std * math.sqrt(len(cohort))


@dataclass(frozen=True)
class LocalNoise(_ClientNoise, kind="local_noise"):
    """Every client noises its own message before anybody sees it; `noise_multipliers` gives each client its own.

    No trust in the server or in the other clients. At client level neighbours replace one client (sensitivity 2).
    """

    mechanism: Mechanism
    noise_multipliers: tuple[float, ...] = ()
    sees: ClassVar[Sees] = frozenset({"messages", "cohort", "sum", "mean"})

    def __post_init__(self) -> None:
        for noise_multiplier in self.noise_multipliers:
            self.mechanism.with_noise_multiplier(noise_multiplier)

    def of(self, client: int) -> Mechanism:
        if not self.noise_multipliers:
            return self.mechanism
        return self.mechanism.with_noise_multiplier(self.noise_multipliers[client])

    def check_sampler(self, clients: Sampler) -> None:
        if self.noise_multipliers and len(self.noise_multipliers) != clients.population:
            found = f"{len(self.noise_multipliers)} noise multipliers for {clients.population} clients"
            raise PlanError("local noise", found, "one noise multiplier per client")

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        if not self.noise_multipliers and isinstance(self.mechanism, Gaussian) and len(cohort):
            return _add(total, Gaussian(self.mechanism.std * math.sqrt(len(cohort))), rng)
        noises = [self.of(int(client)) for client in cohort]
        if noises and all(isinstance(noise, Gaussian) for noise in noises):
            return _add(total, Gaussian(math.sqrt(sum(noise.std**2 for noise in noises))), rng)
        return super().in_sum(total, cohort, rng)

    def event(self) -> Event:
        return self.weakest.event()

    def message_event(self) -> Event:
        return self.weakest.event()

    def own_event(self, client: int) -> Event:
        return self.of(client).event()

    @property
    def weakest(self) -> Mechanism:
        """The least noise of any client: what a single line of the cost rests on."""
        return self.mechanism.with_noise_multiplier(min(self.noise_multipliers or (self.mechanism.noise_multiplier,)))

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return LocalNoise(self.mechanism.with_noise_multiplier(noise_multiplier))

    def with_noise_multipliers(self, noise_multipliers: tuple[float, ...]) -> Release:
        return replace(self, noise_multipliers=noise_multipliers)

    def noise_std(self, cohort: Cohort, t: int) -> float:
        if not self.noise_multipliers:
            return super().noise_std(cohort, t)
        return math.sqrt(sum(self.of(int(client)).std ** 2 for client in cohort))


@dataclass(frozen=True)
class ShuffledNoise(_ClientNoise, kind="shuffled_noise"):
    """Clients noise their own messages; a shuffler strips who sent which; the bag is seen (Feldman et al. 2021).

    A round with fewer than `at_least` reports is void, so the amplification never rests on a luckier crowd.
    """

    mechanism: Mechanism
    at_least: int
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})
    needs: ClassVar[Sees] = frozenset({"shuffler"})
    relation: ClassVar[Relation | None] = "replace_one"
    amplified: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.at_least < 1:
            raise PlanError("shuffling", f"at_least = {self.at_least}", "at least 1 report")

    def check_sampler(self, clients: Sampler) -> None:
        _reachable(self.at_least, clients)

    def check_records(self, records: RecordSampler) -> None:
        if not (records.fixed and records.count == 1):
            found = f"shuffled messages of {records.count:g} records each"
            fix = "set batch = 1, or use local_noise: docs/privacy.md#shuffle has the reason"
            raise PlanError("shuffle", found, "one record per message: silos differ in all their records", fix)

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        return LocalNoise(self.mechanism).in_sum(total, cohort, rng)

    def accepts(self, received: int) -> bool:
        return received >= self.at_least

    def event(self) -> Event:
        return Shuffled(self.at_least, self.mechanism.event())

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return replace(self, mechanism=self.mechanism.with_noise_multiplier(noise_multiplier))

    def message_event(self) -> Event:
        return self.mechanism.event()


class _Bare(Release):
    """Adds nothing, so that by itself it protects nothing."""

    def event(self) -> Event:
        return Unprotected()

    def message_event(self) -> Event:
        return Unprotected()

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...]:
        return ()

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Forward(_Bare, kind="forward"):
    """Messages that are private already (`AlreadyPrivate`), passed on unchanged at the cost their solver states."""

    sees: ClassVar[Sees] = frozenset({"messages", "cohort", "sum", "mean"})
    local: ClassVar[bool] = True

    def check(self, bound: Bound | AlreadyPrivate) -> None:
        if not isinstance(bound, AlreadyPrivate):
            raise PlanError("forward", "messages without noise of their own", "a local solver that is private already")

    def denominator(self, expected: float, received: int) -> float:
        return float(max(received, 1))


@dataclass(frozen=True)
class MaskedNoise(_Bare, kind="masked_noise"):
    """Noise on each client's update, then that client's own top-k mask, then the sum: exists only to be refused.

    The mask is chosen by the data and thins the noise with it: where Eq. 16 of the paper says 8.51, the true epsilon
    is at least 39.6 with d = 5, k = 2 and at least 258 with d = 2, k = 1 (docs/privacy.md#mask-after-noise).
    """

    noise_multiplier: float
    keep: float
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})

    def check(self, bound: Bound | AlreadyPrivate) -> None:
        raise PlanError(
            "mask after noise",
            "a client's own mask applied to its noised update",
            "noise on all coordinates, or a public mask",
            "put sparsify_update before clip, or sparsify_mean after the sum; docs/privacy.md#mask-after-noise has the "
            "counterexample",
        )


@dataclass(frozen=True)
class NoNoise(_Bare, kind="no_noise"):
    """Nothing is added and nothing is guaranteed: the certificate says so. For baselines."""

    sees: ClassVar[Sees] = frozenset({"mean"})

    def hides_cohort(self, clients: Sampler) -> bool:
        return False
