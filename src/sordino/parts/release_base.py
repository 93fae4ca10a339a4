"""`Release`, the base of all releases: who draws the noise, who sees what, and what one release costs.

`sees` is what the least trusted party of this release sees by design: "mean", "sum", "cohort", "messages".
`needs` is what an engine must offer for that to be true: "secure_sum", "shuffler".
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sordino.accounting.bounds import AlreadyPrivate, Bound
from sordino.accounting.events import Event, Relation, Unprotected
from sordino.codec import Part
from sordino.codec.boundary import number, of_type, returns, tensor, tensors
from sordino.errors import PlanError
from sordino.parts.mechanisms import Mechanism

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.accounting.sensitivity import Floats, Patterns
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
