"""Releases, which turn the clients' messages into a noised sum, with noise of the server, of the clients, or none.

The loop and the engines call a release; accounting reads its events. `Release.sees` is what the least trusted party
sees by design: "mean", "sum", "cohort", "messages". `Release.needs` lists the features that an engine must have for
this: "secure_sum", "shuffler".
"""

from __future__ import annotations

import bisect
import itertools
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sordino.accounting.bounds import AlreadyPrivate, Bound
from sordino.accounting.events import Event, GaussianNoise, Relation, Shuffled, Unprotected
from sordino.accounting.kept_bins import kept_bins
from sordino.accounting.secure_sums import SumGrid
from sordino.codec import Part
from sordino.codec.boundary import number, of_type, returns, tensor, tensors
from sordino.errors import PlanError
from sordino.parts.mechanisms import Gaussian, Mechanism
from sordino.parts.schedules import require, require_values

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.accounting.sensitivity import Floats, Patterns
    from sordino.parts.record_samplers import RecordSampler
    from sordino.parts.samplers import Cohort, Sampler

Sees = frozenset[str]


def _same_shape(found: object, part: Release, total: Tensor, *_: object) -> str:
    return tensor(found, tuple(total.shape), total, finite=True)


def _sum_and_memory(found: object, part: Release, total: Tensor, *_: object) -> str:
    if not (isinstance(found, tuple) and len(found) == 2):
        return "the noised sum, and a dict of tensors"
    return _same_shape(found[0], part, total) or tensors(found[1])


class Release(Part):
    """Base class of releases, which turn the clients' messages of a round into a noised sum.

    A subclass declares by `client_noise`, `server_noise`, `correlated`, `scheduled` and `remembers` which methods it
    overrides.
    """

    sees: ClassVar[Sees]
    needs: ClassVar[Sees] = frozenset()
    relation: ClassVar[Relation | None] = None  # of the event, if the adversary sees the cohort; None: any relation
    amplified: ClassVar[bool] = True  # False: sampling of records does not amplify the event of the sum
    noise_multipliers: tuple[float, ...] = ()  # one per client, where clients differ
    local: ClassVar[bool] = False  # True: messages are private when they leave a client, so a round is charged before
    client_noise: ClassVar[bool] = False  # True: every client adds noise to its message, by `on_client`
    server_noise: ClassVar[bool] = False  # True: the server adds noise to the sum, by `on_server`
    correlated: ClassVar[bool] = False  # True: rounds share their noise, and `run_events` states what a run costs
    scheduled: ClassVar[bool] = False  # True: the noise multiplier changes from round to round, by `at` and `events`
    remembers: ClassVar[bool] = False  # True: later rounds need noise of earlier ones, whose memory begins with `init`

    def __init_subclass__(cls, kind: str = "") -> None:
        """Raise an error for a subclass that overrides noise or cost methods without declaring it."""
        super().__init_subclass__(kind)
        methods = {"client_noise": "on_client", "server_noise": "on_server", "correlated": "run_events"}
        methods |= {"remembers": "init", "scheduled": "events"}
        for old in ("check_sampler", "check_records"):
            found = f"release {cls.__name__} with a method {old}, which nothing calls"
            require(not hasattr(cls, old), "release", found, "check(bound, clients, records)", f"move {old} into check")
        for declared, method in methods.items():
            written = getattr(cls, method) is not getattr(Release, method)
            found = f"release {cls.__name__} with {declared} = {getattr(cls, declared)} and "
            found += f"{'its own' if written else 'no'} {method}"
            true = written == getattr(cls, declared)
            require(true, "release", found, "a declaration that agrees with the methods", f"set {declared} = {written}")
        found = f"release {cls.__name__} with in_sum and no noise of single clients"
        sound = cls.in_sum is Release.in_sum or cls.client_noise
        require(sound, "release", found, "on_client, and client_noise = True", "write on_client, or drop in_sum")

    @property
    def sees_cohort(self) -> bool:
        """Whether the least trusted party of this release sees who takes part."""
        return bool({"cohort", "messages"} & self.sees)

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        """Raise an error if this release has no guarantee for a message bound and samplers.

        `records` samples records; it is None if the privacy unit is a client."""

    @returns(_same_shape)
    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        """Return one client's message (a vector) with the client's noise, before anybody else sees the message."""
        return row

    @returns(_same_shape)
    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        """Return the sum with the noise of all clients of a cohort, distributed as if each had called `on_client`."""
        for client in cohort:
            total = self.on_client(total, int(client), rng)
        return total

    @returns(_same_shape)
    def on_server(self, total: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the sum with the server's noise."""
        return total

    def init(self, length: int) -> dict[str, Tensor]:
        """Return the noise state before round 1, by name; it is secret, and the checkpoint stores it."""
        return {}

    @returns(_sum_and_memory)
    def noised(
        self, total: Tensor, cohort: Cohort, stream: Callable[[str], np.random.Generator], memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum with all its noise, and the new noise state.

        `cohort` holds the clients whose noise is still to be drawn (none if clients have noised their own messages);
        `stream` opens a random generator by name, and is called only for generators that are drawn from.
        """
        if self.client_noise:
            total = self.in_sum(total, cohort, stream("client noise"))
        if self.server_noise:
            total = self.on_server(total, stream("server noise"))
        return total, dict(memory)

    def accepts(self, received: int) -> bool:
        """Return whether a round with so many received messages is released; if not, the round releases nothing."""
        return True

    @returns(lambda found, *_: number(found, 0.0, above=True))
    def denominator(self, expected: float, received: int) -> float:
        """Return the denominator of the mean: the expected cohort, or the received messages where all are visible."""
        return expected

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...] | None:
        """Return the mechanisms whose independent noise is added to this cohort's sum; None if they are not stated.

        `sordino audit` compares the noise of trial rounds with them.
        """
        return None

    def noise_matrix(self, rounds: int) -> Floats | None:
        """Return the matrix B [rounds, rounds] such that the noise of all rounds is B Z, with independent rows of Z.

        B is the identity for independent noise; None means that a `correlated` release does not state it.
        """
        return None if self.correlated else np.eye(rounds)

    @abstractmethod
    @returns(of_type(Event))
    def event(self) -> Event:
        """Return the privacy event of one round for an adversary who sees the sum; messages have sensitivity 1."""

    def at(self, t: int) -> Release:
        """Return the release of round t, with the noise multiplier of that round."""
        return self

    def events(self, rounds: range) -> tuple[tuple[Event, int], ...]:
        """Return the privacy events of these rounds, each with its number of rounds."""
        return ((self.event(), len(rounds)),)

    def run_events(self, allowed: Patterns) -> tuple[tuple[Event, int], ...]:
        """Return the privacy events, each with its count, of all rounds that one client may be in."""
        return ((self.event(), allowed.max_participations),)

    def kept_bins_event(self, bins: int, rounds: int) -> Event | None:
        """Return the event of a run in which each client keeps one secret bin of `bins`; None: no amplification is
        proved.
        """
        return None

    def repeated_event(self, allowed: Patterns) -> Event:
        """Return the privacy event of a round that is run again with fresh noise; correlated noise gives no bound."""
        return Unprotected() if self.correlated else self.event()

    def independent(self, clients: Sampler, allowed: Patterns) -> Release | None:
        """Return a release with independent noise in every round at the same privacy cost; None if there is none."""
        return None

    def fitted(self, allowed: Callable[[], Patterns], work: Callable[[], Floats]) -> Release:
        """Return this release with its noise strategy optimised for participation patterns and a server workload."""
        return self

    def is_fitted(self, rounds: int) -> bool:
        """Return whether the noise strategy has coefficients for `rounds` rounds, as `Plan.fitted` computes them."""
        return True

    def hides_cohort(self, clients: Sampler) -> bool:
        """Return whether the released values, noise included, reveal neither the cohort nor its size."""
        return "cohort" not in self.sees

    @abstractmethod
    @returns(of_type(Event))
    def message_event(self) -> Event:
        """Return the event of one round for an adversary who sees the message of the client with the least noise."""

    @returns(of_type(Event))
    def own_event(self, client: int) -> Event:
        """Return the event of one round for an adversary who sees the message of this client."""
        return self.message_event()

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        """Return the same release with another noise multiplier, the same for all clients."""
        found = f"release {self.kind!r}, which has no noise multiplier"
        raise PlanError("calibration", found, "a release with noise", "use central_noise")

    def with_noise_multipliers(self, noise_multipliers: tuple[float, ...]) -> Release:
        """Return the same release with a noise multiplier for every client."""
        found = f"budgets per silo with release {self.kind!r}, which has one noise multiplier for all"
        needed, fix = "a release or a local solver with noise per client", "use local_noise or noisy_local_sgd"
        raise PlanError("calibration", found, needed, fix)

    @abstractmethod
    @returns(lambda found, *_: number(found, 0.0))
    def noise_std(self, cohort: Cohort, t: int) -> float:
        """Return the exact standard deviation of the noise in one coordinate of this cohort's sum in round t."""


def need_bound(bound: Bound | AlreadyPrivate, mechanism: Mechanism) -> None:
    """Raise an error for a message without the norm bound that the noise of `mechanism` needs."""
    if isinstance(bound, AlreadyPrivate):
        found = "noise on messages that the local solver has already noised"
        raise PlanError("spent", found, "a release without noise", "use release Forward()")
    if not bound.finite:
        found = "noise on a message without a norm bound"
        raise PlanError("bound", found, "a Clip step", "add Clip(clip_norm) to encode")
    if bound.norm > mechanism.norm:
        found = f"an L{bound.norm} bound under {mechanism.kind} noise"
        raise PlanError("norm", found, f"an L{mechanism.norm} bound", "set norm = 1 in Clip")


def on_grid(noised: Tensor, std: float) -> Tensor:
    """Round a noised sum to the grid 2^-20 * 2^floor(log2 std), because the low bits of floating-point noise leak."""
    if not std:
        return noised
    import torch

    if noised.dtype != torch.float64:  # rounded to float32 before: the grid would then distinguish clean sums
        found = f"a noised sum in {str(noised.dtype).removeprefix('torch.')} with noise for release"
        needed = "float64 from the noise sampler to the rounding"
        raise PlanError("secure noise", found, needed, "add noise to total.double()")
    grid = 2.0 ** (math.floor(math.log2(std)) - 20)
    return (noised / grid).round_() * grid


def on_grid_rows(noised: Tensor, stds: Tensor) -> Tensor:
    """Return noised messages [m, d], each rounded to the grid of `on_grid` for its standard deviation [m, 1]."""
    grids = 2.0 ** (stds.log2().floor() - 20)
    return (noised / grids).round_() * grids


def own_message(
    release: Release, row: Tensor, client: int, t: int, rng: np.random.Generator, *, secure: bool
) -> Tensor:
    """Return a client's message as it leaves the client: with the client's noise, rounded by `on_grid` if `secure`.

    Rounding after the noise is post-processing. A message to which the client adds no noise is returned unchanged.
    """
    if not release.client_noise:
        return row
    noised = release.on_client(row.double(), client, rng)
    return (on_grid(noised, release.noise_std(np.array([client]), t)) if secure else noised).to(row.dtype)


def _add(total: Tensor, mechanism: Mechanism, rng: np.random.Generator) -> Tensor:
    import torch  # here, so that privacy calculators do not load torch

    noise = torch.from_numpy(mechanism.sample(total.numel(), rng)).to(total.device)
    return total + (noise if total.dim() == 1 else noise.view_as(total))


@dataclass(frozen=True)
class CentralNoise(Release, kind="central_noise"):
    """Central DP: the trusted server adds noise to the sum of unit-ball messages.

    Only the noised mean is released; messages, cohort and its size stay with the server.
    """

    mechanism: Mechanism
    sees: ClassVar[Sees] = frozenset({"mean"})
    server_noise: ClassVar[bool] = True

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        need_bound(bound, self.mechanism)

    def on_server(self, total: Tensor, rng: np.random.Generator) -> Tensor:
        return _add(total, self.mechanism, rng)

    def event(self) -> Event:
        return self.mechanism.event()

    def kept_bins_event(self, bins: int, rounds: int) -> Event | None:
        """Return the event of one allocation at the noise of all passes together: C = I."""
        if not self.event().is_gaussian:
            return None
        return kept_bins(np.eye(bins) * float(-(-rounds // bins)), self.mechanism.noise_multiplier)

    def message_event(self) -> Event:
        return Unprotected()

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return CentralNoise(self.mechanism.with_noise_multiplier(noise_multiplier))

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...]:
        return (self.mechanism,)

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return self.mechanism.std


@dataclass(frozen=True)
class ScheduledNoise(Release, kind="scheduled_noise"):
    """Central DP with a noise schedule: step t has noise N(0, z_t^2 I), z_t = scale * noise_multiplier[i].

    i is the part of the run that step t is in: part i has `steps[i]` steps, and the last part never ends. Only the loop
    of `make_private` runs this release. Guarantee: step t is one release of Gaussian(z_t); the schedule is public and
    fixed before the run, so the steps compose.
    """

    noise_multiplier: tuple[float, ...]
    steps: tuple[int, ...]
    scale: float = 1.0
    sees: ClassVar[Sees] = frozenset({"mean"})
    server_noise: ClassVar[bool] = True
    scheduled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        found = f"{len(self.noise_multiplier)} noise multipliers for {len(self.steps)} parts of a run"
        fits = 0 < len(self.noise_multiplier) == len(self.steps) and all(count >= 1 for count in self.steps)
        needed = "one noise multiplier and at least one step for each part"
        require(fits, "scheduled noise", found, needed, "make noise_multiplier and steps equally long")
        for noise_multiplier in self.noise_multiplier:
            Gaussian(noise_multiplier * self.scale)

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        need_bound(bound, Gaussian(1.0))
        found, needed = "scheduled noise outside a loop of make_private", "a record that may be in every batch"
        fits = records is not None and not records.disjoint and not clients.random
        require(fits, "scheduled noise", found, needed, "use central_noise")

    def _mechanism(self, t: int) -> Gaussian:
        part = bisect.bisect_right(list(itertools.accumulate(self.steps[:-1])), t)
        return Gaussian(self.scale * self.noise_multiplier[part])

    def at(self, t: int) -> Release:
        return CentralNoise(self._mechanism(t))

    def on_server(self, total: Tensor, rng: np.random.Generator) -> Tensor:
        found = "noise drawn without the number of a step"
        raise PlanError("scheduled noise", found, "the release of step t", "call release.at(t).on_server")

    def events(self, rounds: range) -> tuple[tuple[Event, int], ...]:
        found: Counter[Event] = Counter()
        ends = [*itertools.accumulate(self.steps[:-1]), max(rounds.stop, sum(self.steps))]
        for start, stop in zip([0, *ends], ends, strict=False):
            count = min(stop, rounds.stop) - max(start, rounds.start)
            if count > 0:
                found[self._mechanism(start).event()] += count
        return tuple(found.items())

    def event(self) -> Event:
        """Return the privacy event of the step with the least noise."""
        return Gaussian(self.scale * min(self.noise_multiplier)).event()

    def message_event(self) -> Event:
        return Unprotected()

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        """Return the same schedule with `scale` set to this number."""
        return replace(self, scale=noise_multiplier)

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return self._mechanism(t).std


class _ClientNoise(Release):
    local: ClassVar[bool] = True
    client_noise: ClassVar[bool] = True

    @abstractmethod
    def mechanism_of(self, client: int) -> Mechanism:
        """Return the mechanism whose noise one client adds to its message."""

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        need_bound(bound, self.mechanism_of(0))

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        return _add(row, self.mechanism_of(client), rng)

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        if len(cohort) and isinstance(self.mechanism_of(0), Gaussian):  # a sum of Gaussians in one draw
            return _add(total, Gaussian(self.noise_std(cohort, 0)), rng)
        return super().in_sum(total, cohort, rng)

    def message_event(self) -> Event:
        return self.mechanism_of(0).event()

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...]:
        return tuple(self.mechanism_of(int(client)) for client in cohort)

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return self.mechanism_of(0).std * math.sqrt(len(cohort))


class _WithVoidRounds(_ClientNoise):
    at_least: int  # a round with fewer messages releases nothing

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        super().check(bound, clients, records)
        found = f"at_least = {self.at_least} reports where a round expects {clients.expected:g}"
        fix = "lower at_least, since rounds with fewer reports release nothing"
        require(self.at_least <= clients.expected, "void rounds", found, "at most the expected cohort", fix)

    def accepts(self, received: int) -> bool:
        return received >= self.at_least


@dataclass(frozen=True)
class NoiseShares(_WithVoidRounds, kind="noise_shares"):
    """Distributed DP: each client adds noise N(0, noise_multiplier^2 / at_least) under secure aggregation.

    A round with fewer than `at_least` messages releases nothing, so the total noise is never below the noise
    multiplier, and the event does not depend on dropouts. The server sees the cohort; neighbours zero out one client.
    """

    noise_multiplier: float
    at_least: int
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})
    needs: ClassVar[Sees] = frozenset({"secure_sum"})

    def __post_init__(self) -> None:
        Gaussian(self.noise_multiplier)
        fix = "set at_least to the fewest reports of a valid round"
        require_values(self.at_least >= 1, "noise shares", "at least 1 report", fix, at_least=self.at_least)

    @property
    def share(self) -> Gaussian:
        """Mechanism of one client's noise share."""
        return Gaussian(self.noise_multiplier / math.sqrt(self.at_least))

    def mechanism_of(self, client: int) -> Gaussian:
        return self.share

    def sum_grid(self, clients: Sampler, records: RecordSampler | None) -> SumGrid:
        """Return the fixed-point grid of secure sums, for the largest norm that a message may have."""
        most = 1.0
        if records is not None:
            laws = [(records.law(silo), records.size(silo)) for silo in range(len(records.sizes))]
            most = 1.001 * max(size if law is None or law.size is None else law.size for law, size in laws)
        return SumGrid(self.share.std, clients.size or clients.population, most)

    def hides_cohort(self, clients: Sampler) -> bool:
        return clients.size == self.at_least  # else the variance of the noise reveals the cohort size

    def event(self) -> Event:
        return GaussianNoise(self.noise_multiplier)

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return replace(self, noise_multiplier=noise_multiplier)


@dataclass(frozen=True)
class LocalNoise(_ClientNoise, kind="local_noise"):
    """Local DP: every client noises its own message; `noise_multipliers` are per client.

    Neither the server nor other clients are trusted. At client level neighbours replace one client (sensitivity 2).
    """

    mechanism: Mechanism
    noise_multipliers: tuple[float, ...] = ()
    sees: ClassVar[Sees] = frozenset({"messages", "cohort", "sum", "mean"})

    def __post_init__(self) -> None:
        for noise_multiplier in self.noise_multipliers:
            self.mechanism.with_noise_multiplier(noise_multiplier)

    def mechanism_of(self, client: int) -> Mechanism:
        if not self.noise_multipliers:
            return self.mechanism
        return self.mechanism.with_noise_multiplier(self.noise_multipliers[client])

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        super().check(bound, clients, records)
        found = f"{len(self.noise_multipliers)} noise multipliers for {clients.population} clients"
        fits = len(self.noise_multipliers) in (0, clients.population)
        require(fits, "local noise", found, "one noise multiplier per client", "give each client one, or drop them")

    def denominator(self, expected: float, received: int) -> float:
        return float(max(received, 1))

    def event(self) -> Event:
        """Return the privacy event of one round for the client with the least noise."""
        least = min(self.noise_multipliers or (self.mechanism.noise_multiplier,))
        return self.mechanism.with_noise_multiplier(least).event()

    def message_event(self) -> Event:
        return self.event()

    def own_event(self, client: int) -> Event:
        return self.mechanism_of(client).event()

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return LocalNoise(self.mechanism.with_noise_multiplier(noise_multiplier))

    def with_noise_multipliers(self, noise_multipliers: tuple[float, ...]) -> Release:
        return replace(self, noise_multipliers=noise_multipliers)

    def noise_std(self, cohort: Cohort, t: int) -> float:
        if not self.noise_multipliers:
            return super().noise_std(cohort, t)
        return math.sqrt(sum(self.mechanism_of(int(client)).std ** 2 for client in cohort))


@dataclass(frozen=True)
class ShuffledNoise(_WithVoidRounds, kind="shuffled_noise"):
    """Shuffle model: clients noise their own messages, and a shuffler hides who sent which one (Feldman et al. 2021).

    A round with fewer than `at_least` messages releases nothing, so amplification is accounted for `at_least` messages.
    """

    mechanism: Mechanism
    at_least: int
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})
    needs: ClassVar[Sees] = frozenset({"shuffler"})
    relation: ClassVar[Relation | None] = "replace_one"
    amplified: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fix = "set at_least to the fewest reports of a valid round"
        require_values(self.at_least >= 1, "shuffling", "at least 1 report", fix, at_least=self.at_least)

    def mechanism_of(self, client: int) -> Mechanism:
        return self.mechanism

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        super().check(bound, clients, records)
        if records is not None and not (records.fixed and records.count == 1):
            found = f"shuffled messages of {records.count:g} records each"
            fix = "set batch = 1, or use local_noise: docs/privacy.md#shuffle has the reason"
            raise PlanError("shuffle", found, "one record per message, as the amplification theorem requires", fix)

    def denominator(self, expected: float, received: int) -> float:
        return float(max(received, 1))

    def event(self) -> Event:
        return Shuffled(self.at_least, self.mechanism.event())

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return replace(self, mechanism=self.mechanism.with_noise_multiplier(noise_multiplier))


class _WithoutNoise(Release):
    def event(self) -> Event:
        return Unprotected()

    def message_event(self) -> Event:
        return Unprotected()

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...]:
        return ()

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Forward(_WithoutNoise, kind="forward"):
    """Release of messages that the local solver has already noised (`AlreadyPrivate`), at the solver's cost."""

    sees: ClassVar[Sees] = frozenset({"messages", "cohort", "sum", "mean"})
    local: ClassVar[bool] = True

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        private, found = isinstance(bound, AlreadyPrivate), "release forward for messages to which no client adds noise"
        require(private, "forward", found, "a local solver that adds the noise", "use local solver noisy_local_sgd")

    def denominator(self, expected: float, received: int) -> float:
        return float(max(received, 1))


@dataclass(frozen=True)
class MaskedNoise(_WithoutNoise, kind="masked_noise"):
    """Unsound release, which every plan refuses: each client masks its noised update by its own top-k mask.

    The mask depends on the data and removes noise. For k of d coordinates, where Eq. 16 of the DP-FedSAM paper states
    epsilon 8.51, the true epsilon is at least 39.6 (d = 5, k = 2) or 258 (d = 2, k = 1); see
    docs/privacy.md#mask-after-noise.
    """

    noise_multiplier: float
    keep: float
    sees: ClassVar[Sees] = frozenset({"sum", "cohort"})

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        found, needed = "a client's own mask applied to its noised update", "noise on all coordinates, or a public mask"
        fix = "put sparsify_update before clip, or sparsify_mean after the sum; docs/privacy.md#mask-after-noise has "
        raise PlanError("mask after noise", found, needed, f"{fix}the counterexample")


@dataclass(frozen=True)
class NoNoise(_WithoutNoise, kind="no_noise"):
    """Release without noise, for baselines; the certificate says that nothing is guaranteed."""

    sees: ClassVar[Sees] = frozenset({"mean"})

    def hides_cohort(self, clients: Sampler) -> bool:
        return False
