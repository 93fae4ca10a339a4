"""How a sum leaves the clients: who draws the noise, who sees what, and what one release costs.

`sees` is what the least trusted party of this release sees by design: "mean", "sum", "cohort", "messages".
`needs` is what an engine must offer for that to be true: "secure_sum", "shuffler".
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sordino.codec import Part
from sordino.errors import EngineError, PlanError
from sordino.parts.bounds import Bound, Spent
from sordino.parts.events import Event, GaussianNoise, Shuffled, Unprotected
from sordino.parts.mechanisms import Gaussian, Mechanism

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.matrix.patterns import Patterns
    from sordino.matrix.toeplitz import Floats
    from sordino.parts.samplers import Cohort, Sampler

Sees = frozenset[str]


class Release(Part):
    """The step from private messages to something that may be looked at."""

    sees: ClassVar[Sees]
    needs: ClassVar[Sees] = frozenset()
    local: ClassVar[bool] = False  # True: clients draw the noise, so the round is charged before they start

    def check(self, bound: Bound | Spent) -> None:
        """Refuse what this release cannot certify."""

    def suits(self, clients: Sampler) -> None:
        """Refuse a cohort that this release cannot work with."""

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        """What one client adds to its own message [d'] before anybody else sees it; in a deployment the only way."""
        return row

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        """The noise of a cohort at once: equal in law to the sum of what each adds itself; a simulation's shortcut."""
        for client in cohort:
            total = self.on_client(total, int(client), rng)
        return total

    def on_server(self, total: Tensor, rng: np.random.Generator) -> Tensor:
        """What the server adds."""
        return total

    def init(self, length: int) -> dict[str, Tensor]:
        """What the noise of later rounds must know of earlier noise, before the first: secret, in the checkpoint."""
        return {}

    def noised(
        self, total: Tensor, cohort: Cohort, coins: Callable[[str], np.random.Generator], memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum with all its noise, and what is remembered of it; a stream is opened only for those who draw.

        `cohort` are those whose noise is still to be drawn: nobody, where every client has noised its own message.
        """
        if self.noises_sums or self.noises_messages:
            total = self.in_sum(total, cohort, coins("client noise"))
        if type(self).on_server is not Release.on_server:
            total = self.on_server(total, coins("server noise"))
        return total, dict(memory)

    @property
    def noises_messages(self) -> bool:
        """Whether clients draw noise, each its own."""
        return type(self).on_client is not Release.on_client

    @property
    def noises_sums(self) -> bool:
        """Whether their noise can be drawn in one go."""
        return type(self).in_sum is not Release.in_sum

    def check_own_noise(self) -> None:
        """Refuse a release whose clients' noise exists in a sum only: alone they would add none."""
        if self.noises_sums and not self.noises_messages:
            found = f"release {self.kind!r}, whose clients' noise is drawn for all of them at once"
            raise EngineError(found, "on_client, which one client calls for its own message", "add it to the release")

    def accepts(self, received: int) -> bool:
        """Whether a round with this many reports counts; a void round releases nothing and moves nothing."""
        return True

    def denominator(self, expected: float, received: int) -> float:
        """A constant of the plan, unless every message is seen anyway."""
        return expected

    @abstractmethod
    def event(self) -> Event:
        """One round, for a movement of 1 of one message, to one who sees the sum."""

    def over(self, allowed: Patterns) -> tuple[tuple[Event, int], ...]:
        """All rounds that one client may be in: the event of one, counted, unless one stands for the whole run."""
        return ((self.event(), allowed.most),)

    @property
    def joint(self) -> bool:
        """Whether rounds share their noise, so that one event stands for all of them."""
        return type(self).over is not Release.over

    def fitted(self, allowed: Callable[[], Patterns], work: Callable[[], Floats]) -> Release:
        """With what it can only know from the plan: the rounds of one client, what the server makes of a round."""
        return self

    def hides(self, clients: Sampler) -> bool:
        """Whether what is released, noise included, tells neither who came nor how many."""
        return "cohort" not in self.sees

    @abstractmethod
    def message_event(self) -> Event:
        """One round, to one who sees the message itself."""

    def with_multiplier(self, multiplier: float) -> Release:
        """The same release with another multiplier, the same for all."""
        raise PlanError("calibration", f"release {self.kind!r}, which has no multiplier", "a release with noise")

    def with_multipliers(self, multipliers: tuple[float, ...]) -> Release:
        """The same release with a multiplier for every client."""
        raise PlanError(
            "calibration", f"release {self.kind!r} and a budget per silo", "local_noise, or noisy_local_sgd"
        )

    @abstractmethod
    def noise_std(self, cohort: Cohort) -> float:
        """Exact standard deviation of the noise in one coordinate of this cohort's sum."""


def need_bound(bound: Bound | Spent, mechanism: Mechanism) -> None:
    """Refuse noise on a message that it does not protect."""
    if isinstance(bound, Spent):
        raise PlanError("spent", "noise on messages that are private already", "release Forward()", "drop the noise")
    if not bound.finite:
        raise PlanError("bound", "noise on a message without a bound", "a Clip step", "add Clip(radius) to encode")
    if bound.norm > mechanism.norm:
        raise PlanError(
            "norm",
            f"an L{bound.norm} bound under {mechanism.kind} noise",
            f"an L{mechanism.norm} bound",
            "set norm = 1 in Clip",
        )


def _reachable(at_least: int, clients: Sampler) -> None:
    if at_least > clients.expected:
        found = f"at_least = {at_least} reports where a round expects {clients.expected:g}"
        raise PlanError(
            "void rounds", found, "at most the expected cohort", "lower at_least: most rounds would be void"
        )


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

    def check(self, bound: Bound | Spent) -> None:
        need_bound(bound, self.mechanism)

    def on_server(self, total: Tensor, rng: np.random.Generator) -> Tensor:
        return _add(total, self.mechanism, rng)

    def event(self) -> Event:
        return self.mechanism.event()

    def message_event(self) -> Event:
        return Unprotected()

    def with_multiplier(self, multiplier: float) -> Release:
        return CentralNoise(self.mechanism.with_multiplier(multiplier))

    def noise_std(self, cohort: Cohort) -> float:
        return self.mechanism.std


def on_grid(noised: Tensor, std: float) -> Tensor:
    """Round to the public grid 2^-20 * 2^floor(log2 std): the low bits of a double say where it came from."""
    if not std:
        return noised
    grid = 2.0 ** (math.floor(math.log2(std)) - 20)
    return (noised / grid).round_() * grid


def own_message(release: Release, row: Tensor, client: int, rng: np.random.Generator, *, secure: bool) -> Tensor:
    """The message [d'], float32, as it leaves a client: with its own noise, and for release rounded to that grid.

    A row to which the client adds nothing leaves as it is. What is rounded after the noise is post-processing.
    """
    if not release.noises_messages:
        return row
    noised = release.on_client(row.double(), client, rng)
    return (on_grid(noised, release.noise_std(np.array([client]))) if secure else noised).to(row.dtype)


def on_grid_rows(noised: Tensor, stds: Tensor) -> Tensor:
    """`on_grid` for rows [m, d], each with its own standard deviation [m, 1]."""
    grids = 2.0 ** (stds.log2().floor() - 20)
    return (noised / grids).round_() * grids


@dataclass(frozen=True)
class NoiseShares(Release, kind="noise_shares"):
    """Each client adds a share N(0, multiplier^2 / at_least); a secure sum shows the server only their total.

    A round with fewer than `at_least` reports is void, so the total noise is never below the multiplier and the
    event does not depend on who came. The server sees the cohort; neighbours zero out one client.
    """

    multiplier: float
    at_least: int
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})
    needs: ClassVar[Sees] = frozenset({"secure_sum"})
    local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Gaussian(self.multiplier)
        if self.at_least < 1:
            raise PlanError(
                "noise shares",
                f"at_least = {self.at_least}",
                "at least 1 report",
                "use the fewest clients a round accepts",
            )

    def suits(self, clients: Sampler) -> None:
        _reachable(self.at_least, clients)

    @property
    def share(self) -> Gaussian:
        """What one client adds."""
        return Gaussian(self.multiplier / math.sqrt(self.at_least))

    def check(self, bound: Bound | Spent) -> None:
        need_bound(bound, self.share)

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        return _add(row, self.share, rng)

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        if len(cohort) == 0:
            return total
        return _add(total, Gaussian(self.share.multiplier * math.sqrt(len(cohort))), rng)

    def accepts(self, received: int) -> bool:
        return received >= self.at_least

    def hides(self, clients: Sampler) -> bool:
        return clients.size == self.at_least  # else the noise's variance tells how many came

    def event(self) -> Event:
        return GaussianNoise(self.multiplier)

    def message_event(self) -> Event:
        return self.share.event()

    def with_multiplier(self, multiplier: float) -> Release:
        return replace(self, multiplier=multiplier)

    def noise_std(self, cohort: Cohort) -> float:
        return self.share.multiplier * math.sqrt(len(cohort))


@dataclass(frozen=True)
class LocalNoise(Release, kind="local_noise"):
    """Every client noises its own message before anybody sees it; `multipliers` gives each client its own.

    No trust in the server or in the other clients. At client level neighbours replace one client's data (movement 2).
    """

    mechanism: Mechanism
    multipliers: tuple[float, ...] = ()
    sees: ClassVar[Sees] = frozenset({"messages", "cohort", "sum", "mean"})
    local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for multiplier in self.multipliers:
            self.mechanism.with_multiplier(multiplier)

    def check(self, bound: Bound | Spent) -> None:
        need_bound(bound, self.mechanism)

    def of(self, client: int) -> Mechanism:
        """The noise of one client."""
        if not self.multipliers:
            return self.mechanism
        return self.mechanism.with_multiplier(self.multipliers[client])

    def suits(self, clients: Sampler) -> None:
        if self.multipliers and len(self.multipliers) != clients.population:
            found = f"{len(self.multipliers)} multipliers for {clients.population} clients"
            raise PlanError("local noise", found, "one multiplier per client")

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        return _add(row, self.of(client), rng)

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        if not self.multipliers and isinstance(self.mechanism, Gaussian) and len(cohort):
            return _add(total, Gaussian(self.mechanism.std * math.sqrt(len(cohort))), rng)
        noises = [self.of(int(client)) for client in cohort]
        if noises and all(isinstance(noise, Gaussian) for noise in noises):
            return _add(total, Gaussian(math.sqrt(sum(noise.std**2 for noise in noises))), rng)
        return super().in_sum(total, cohort, rng)

    def denominator(self, expected: float, received: int) -> float:
        return float(max(received, 1))

    def event(self) -> Event:
        return self.weakest.event()

    def message_event(self) -> Event:
        return self.weakest.event()

    @property
    def weakest(self) -> Mechanism:
        """The least noise of any client: what a single line of a bill rests on."""
        return self.mechanism.with_multiplier(min(self.multipliers or (self.mechanism.multiplier,)))

    def with_multiplier(self, multiplier: float) -> Release:
        return LocalNoise(self.mechanism.with_multiplier(multiplier))

    def with_multipliers(self, multipliers: tuple[float, ...]) -> Release:
        return replace(self, multipliers=multipliers)

    def noise_std(self, cohort: Cohort) -> float:
        if not self.multipliers:
            return self.mechanism.std * math.sqrt(len(cohort))
        return math.sqrt(sum(self.of(int(client)).std ** 2 for client in cohort))


@dataclass(frozen=True)
class ShuffledNoise(Release, kind="shuffled_noise"):
    """Clients noise their own messages; a shuffler strips who sent which; the bag is seen (Feldman et al. 2021).

    A round with fewer than `at_least` reports is void, so the amplification never rests on a luckier crowd.
    """

    mechanism: Mechanism
    at_least: int
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})
    needs: ClassVar[Sees] = frozenset({"shuffler"})
    local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.at_least < 1:
            raise PlanError("shuffling", f"at_least = {self.at_least}", "at least 1 report")

    def check(self, bound: Bound | Spent) -> None:
        need_bound(bound, self.mechanism)

    def suits(self, clients: Sampler) -> None:
        _reachable(self.at_least, clients)

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        return _add(row, self.mechanism, rng)

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        return LocalNoise(self.mechanism).in_sum(total, cohort, rng)

    def accepts(self, received: int) -> bool:
        return received >= self.at_least

    def denominator(self, expected: float, received: int) -> float:
        return float(max(received, 1))

    def event(self) -> Event:
        return Shuffled(self.at_least, self.mechanism.event())

    def with_multiplier(self, multiplier: float) -> Release:
        return replace(self, mechanism=self.mechanism.with_multiplier(multiplier))

    def message_event(self) -> Event:
        return self.mechanism.event()

    def noise_std(self, cohort: Cohort) -> float:
        return self.mechanism.std * math.sqrt(len(cohort))


@dataclass(frozen=True)
class Forward(Release, kind="forward"):
    """Messages are private already (`Spent`): they are passed on as they are, and billed as their solver says."""

    sees: ClassVar[Sees] = frozenset({"messages", "cohort", "sum", "mean"})
    local: ClassVar[bool] = True

    def check(self, bound: Bound | Spent) -> None:
        if not isinstance(bound, Spent):
            raise PlanError("forward", "messages without noise of their own", "a local solver that is private already")

    def denominator(self, expected: float, received: int) -> float:
        return float(max(received, 1))

    def event(self) -> Event:
        return Unprotected()

    def message_event(self) -> Event:
        return Unprotected()

    def noise_std(self, cohort: Cohort) -> float:
        return 0.0


@dataclass(frozen=True)
class MaskedNoise(Release, kind="masked_noise"):
    """Noise on each client's update, then that client's own top-k mask, then the sum: exists only to be refused.

    The mask is chosen by the data and thins the noise with it: where 8.57 is claimed, the true epsilon is at least
    39.6 with d = 5, k = 2 and at least 258 with d = 2, k = 1 (docs/privacy.md#mask-after-noise).
    """

    multiplier: float
    keep: float
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})

    def check(self, bound: Bound | Spent) -> None:
        raise PlanError(
            "mask after noise",
            "a client's own mask applied to its noised update",
            "noise on all coordinates, or a public mask",
            "put sparsify_update before clip, or sparsify_mean after the sum; docs/privacy.md#mask-after-noise has the "
            "counterexample",
        )

    def event(self) -> Event:
        return Unprotected()

    def message_event(self) -> Event:
        return Unprotected()

    def noise_std(self, cohort: Cohort) -> float:
        return 0.0


@dataclass(frozen=True)
class NoNoise(Release, kind="no_noise"):
    """Nothing is added and nothing is guaranteed: the certificate says so. For baselines."""

    sees: ClassVar[Sees] = frozenset({"mean"})

    def hides(self, clients: Sampler) -> bool:
        return False

    def event(self) -> Event:
        return Unprotected()

    def message_event(self) -> Event:
        return Unprotected()

    def noise_std(self, cohort: Cohort) -> float:
        return 0.0
