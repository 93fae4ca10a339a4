"""`Release`, the base of all releases: who draws the noise, who sees what, and what one release costs.

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

from sordino.accounting.bounds import AlreadyPrivate, Bound
from sordino.accounting.events import Event, GaussianNoise, Relation, Shuffled, Unprotected
from sordino.codec import Part
from sordino.codec.boundary import number, of_type, returns, tensor, tensors
from sordino.errors import PlanError
from sordino.parts.mechanisms import Gaussian, Mechanism

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.accounting.matrix.sensitivity import Patterns
    from sordino.accounting.matrix.toeplitz import Floats
    from sordino.parts.record_samplers import RecordSampler
    from sordino.parts.samplers import Cohort, Sampler


Sees = frozenset[str]


def _sum_and_memory(found: object, total: Tensor) -> str:
    if not (isinstance(found, tuple) and len(found) == 2):
        return "the noised sum, and a dict of tensors"
    return tensor(found[0], tuple(total.shape), total, finite=True) or tensors(found[1])


class Release(Part):
    """The release of a round: from the clients' messages to a noised sum.

    What it does is declared (`client_noise`, `server_noise`, `correlated`) beside the methods that do it.
    """

    sees: ClassVar[Sees]
    needs: ClassVar[Sees] = frozenset()
    relation: ClassVar[Relation | None] = None  # what its event is proved for where who takes part is seen; None: any
    amplified: ClassVar[bool] = True  # False: sampling of records does not amplify the event of the sum
    noise_multipliers: tuple[float, ...] = ()  # one for each client, where they differ
    local: ClassVar[bool] = False  # True: messages are private when they leave a client, so a round is charged before
    client_noise: ClassVar[bool] = False  # True: every client adds noise to its own message, by `on_client`
    server_noise: ClassVar[bool] = False  # True: the server adds noise to the sum, by `on_server`
    correlated: ClassVar[bool] = False  # True: rounds share their noise, and `run_events` states what a run costs

    def __init_subclass__(cls, kind: str = "") -> None:
        """Refuse a class whose methods add noise, or cost a run, in another way than it declares."""
        super().__init_subclass__(kind)
        methods = {"client_noise": "on_client", "server_noise": "on_server", "correlated": "run_events"}
        for declared, method in methods.items():
            written = getattr(cls, method) is not getattr(Release, method)
            if written != getattr(cls, declared):
                found = f"release {cls.__name__} with {declared} = {getattr(cls, declared)} and "
                found += f"{'its own' if written else 'no'} {method}"
                raise PlanError("release", found, "a declaration that is true", f"set {declared} = {written}")
        if cls.in_sum is not Release.in_sum and not cls.client_noise:
            found = f"release {cls.__name__} with in_sum and no noise of single clients"
            raise PlanError("release", found, "on_client, and client_noise = True")

    @property
    def sees_cohort(self) -> bool:
        """Whether the least trusted party of this release sees who takes part."""
        return bool({"cohort", "messages"} & self.sees)

    def check(self, bound: Bound | AlreadyPrivate) -> None:
        """Refuse what this release cannot certify."""

    def check_sampler(self, clients: Sampler) -> None:
        """Refuse a cohort that this release cannot work with."""

    def check_records(self, records: RecordSampler) -> None:
        """Refuse batches of records that this release cannot work with, where one record is the unit."""

    @returns(lambda found, part, row, *_: tensor(found, tuple(row.shape), row, finite=True))
    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        """What one client adds to its own message [d'] before anybody else sees it; in a deployment the only way."""
        return row

    @returns(lambda found, part, total, *_: tensor(found, tuple(total.shape), total, finite=True))
    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        """The noise of a cohort at once: equal in law to the sum of what each adds itself; a simulation's shortcut."""
        for client in cohort:
            total = self.on_client(total, int(client), rng)
        return total

    @returns(lambda found, part, total, *_: tensor(found, tuple(total.shape), total, finite=True))
    def on_server(self, total: Tensor, rng: np.random.Generator) -> Tensor:
        """What the server adds."""
        return total

    def init(self, length: int) -> dict[str, Tensor]:
        """What the noise of later rounds must know of earlier noise, before the first: secret, in the checkpoint."""
        return {}

    @returns(lambda found, part, total, *_: _sum_and_memory(found, total))
    def noised(
        self, total: Tensor, cohort: Cohort, coins: Callable[[str], np.random.Generator], memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum with all its noise, and what is remembered of it; a stream is opened only for those who draw.

        `cohort` are those whose noise is still to be drawn: nobody, where every client has noised its own message.
        """
        if self.client_noise:
            total = self.in_sum(total, cohort, coins("client noise"))
        if self.server_noise:
            total = self.on_server(total, coins("server noise"))
        return total, dict(memory)

    def accepts(self, received: int) -> bool:
        """Whether a round with this many reports counts; a void round releases nothing and moves nothing."""
        return True

    @returns(lambda found, *_: number(found, 0.0, above=True))
    def denominator(self, expected: float, received: int) -> float:
        """A constant of the plan, unless every message is seen anyway."""
        return expected

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...] | None:
        """The independent draws whose sum is the noise in the sum of this cohort's messages; None: not stated.

        `sordino audit` compares the noise of trial rounds with it.
        """
        return None

    def noise_matrix(self, rounds: int) -> Floats | None:
        """B [rounds, rounds], where the noise of the rounds is B Z and Z is independent from round to round.

        The identity, unless rounds share their noise (`joint`), which must state it; None: not stated.
        """
        return None if self.correlated else np.eye(rounds)

    @abstractmethod
    @returns(of_type(Event))
    def event(self) -> Event:
        """One round, for a sensitivity of 1 of one message, to one who sees the sum."""

    def run_events(self, allowed: Patterns) -> tuple[tuple[Event, int], ...]:
        """All rounds that one client may be in: the event of one, counted, unless one stands for the whole run."""
        return ((self.event(), allowed.max_participations),)

    def repeated_event(self, allowed: Patterns) -> Event:
        """One round that is run again with fresh noise, where rounds share their noise: infinite unless proved."""
        return Unprotected() if self.correlated else self.event()

    def independent(self, clients: Sampler, allowed: Patterns) -> Release | None:
        """Noise of every round's own at the same cost, where rounds share their noise; None: not stated."""
        return None

    def fitted(self, allowed: Callable[[], Patterns], work: Callable[[], Floats]) -> Release:
        """The same release, its strategy optimised for the plan's participation patterns and server workload."""
        return self

    def is_fitted(self, rounds: int) -> bool:
        """Whether it has all its coefficients for a run of so many rounds: else `Plan.fitted` must be called."""
        return True

    def hides_cohort(self, clients: Sampler) -> bool:
        """Whether what is released, noise included, tells neither who came nor how many."""
        return "cohort" not in self.sees

    @abstractmethod
    @returns(of_type(Event))
    def message_event(self) -> Event:
        """One round, to one who sees the message itself; where clients differ, that of the least noise."""

    @returns(of_type(Event))
    def own_event(self, client: int) -> Event:
        """One round, to one who sees the message of this client."""
        return self.message_event()

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        """The same release with another noise multiplier, the same for all."""
        raise PlanError("calibration", f"release {self.kind!r}, which has no noise multiplier", "a release with noise")

    def with_noise_multipliers(self, noise_multipliers: tuple[float, ...]) -> Release:
        """The same release with a noise multiplier for every client."""
        found = f"release {self.kind!r} and a budget per silo"
        raise PlanError("calibration", found, "local_noise, or noisy_local_sgd")

    @abstractmethod
    @returns(lambda found, *_: number(found, 0.0))
    def noise_std(self, cohort: Cohort, t: int) -> float:
        """Exact standard deviation of the noise in one coordinate of this cohort's sum in round t (from 0)."""


def need_bound(bound: Bound | AlreadyPrivate, mechanism: Mechanism) -> None:
    """Refuse noise on a message that it does not protect."""
    if isinstance(bound, AlreadyPrivate):
        raise PlanError("spent", "noise on messages that are private already", "release Forward()", "drop the noise")
    if not bound.finite:
        raise PlanError("bound", "noise on a message without a bound", "a Clip step", "add Clip(clip_norm) to encode")
    if bound.norm > mechanism.norm:
        found = f"an L{bound.norm} bound under {mechanism.kind} noise"
        raise PlanError("norm", found, f"an L{mechanism.norm} bound", "set norm = 1 in Clip")


def on_grid(noised: Tensor, std: float) -> Tensor:
    """Round to the public grid 2^-20 * 2^floor(log2 std): the low bits of a double say where it came from."""
    if not std:
        return noised
    import torch

    if noised.dtype != torch.float64:  # rounded to float32 on its way: the grid would tell clean sums apart
        found = f"a noised sum in {str(noised.dtype).removeprefix('torch.')} where noise is for release"
        raise PlanError("secure noise", found, "float64 from the sampler to the grid", "add noise to total.double()")
    grid = 2.0 ** (math.floor(math.log2(std)) - 20)
    return (noised / grid).round_() * grid


def own_message(
    release: Release, row: Tensor, client: int, t: int, rng: np.random.Generator, *, secure: bool
) -> Tensor:
    """The message [d'], float32, as it leaves a client: with its own noise, and for release rounded to that grid.

    A row to which the client adds nothing leaves as it is. What is rounded after the noise is post-processing.
    """
    if not release.client_noise:
        return row
    noised = release.on_client(row.double(), client, rng)
    return (on_grid(noised, release.noise_std(np.array([client]), t)) if secure else noised).to(row.dtype)


def on_grid_rows(noised: Tensor, stds: Tensor) -> Tensor:
    """`on_grid` for rows [m, d], each with its own standard deviation [m, 1]."""
    grids = 2.0 ** (stds.log2().floor() - 20)
    return (noised / grids).round_() * grids


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
