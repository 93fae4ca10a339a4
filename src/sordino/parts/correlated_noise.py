"""Correlated noise (matrix mechanisms), a release in which later rounds cancel a part of the noise of earlier rounds.

The loop calls it like any release. With one row per round, X the sums, Z independent noise and C a strategy matrix, the
run releases X + C^-1 Z, which is post-processing of C X + Z: one Gaussian mechanism for all rounds together, with
mu = sensitivity / noise multiplier, the sensitivity maximal over all sets of rounds in which a client may take part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sordino.accounting.bounds import AlreadyPrivate, Bound
from sordino.accounting.events import Event, GaussianNoise, Unprotected
from sordino.accounting.kept_bins import bin_rows, gram_of_bins, kept_bins
from sordino.accounting.sensitivity import Floats, Patterns
from sordino.errors import PlanError
from sordino.parts.mechanisms import Gaussian, Mechanism
from sordino.parts.releases import CentralNoise, Release, Sees, need_bound
from sordino.parts.strategies import Identity, Strategy
from sordino.rng import is_secure

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.parts.record_samplers import RecordSampler
    from sordino.parts.samplers import Cohort, Sampler


@dataclass(frozen=True)
class CorrelatedNoise(Release, kind="correlated_noise"):
    """Correlated noise (DP-FTRL, BandMF): the trusted server adds row t of C^-1 Z to the sum of round t.

    Z is independent noise of the mechanism and C the strategy's matrix. Guarantee: mu-GDP for the whole run, mu =
    sensitivity(C) / noise multiplier, if the sampler guarantees a minimum separation; amplified by sampling if the
    sampler is cyclic Poisson with at least as many groups as C has bands. For release the noise state is float64:
    rounding it changes mu by less than sqrt(d T) 2^-50 sum |c_j|, for d parameters, T rounds and entries c_j of C
    (docs/privacy.md#from-sampler-to-grid). Simulations use float32, half the memory.
    """

    mechanism: Gaussian
    strategy: Strategy
    sees: ClassVar[Sees] = frozenset({"mean"})
    correlated: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    def check(self, bound: Bound | AlreadyPrivate, clients: Sampler, records: RecordSampler | None) -> None:
        need_bound(bound, self.mechanism)
        if clients.min_separation is None:
            found = f"correlated noise and sampler {clients.kind!r}, under which a client may be in any two rounds"
            fix = "sample by roundrobin, min_separation or cyclic_poisson, or use release central_noise"
            raise PlanError("correlated noise", found, "a sampler with a minimum separation of a client's rounds", fix)
        overlap = clients.amplifies and not clients.keeps_bins
        if overlap and (self.strategy.bands is None or self.strategy.bands > clients.min_separation):
            found = f"{self.strategy.bands or 'all'} bands, and rounds of a client only {clients.min_separation} apart"
            needed = "at most as many bands as the minimum separation of a client's rounds"
            raise PlanError("correlated noise", found, needed, "lower the number of bands")
        if records is not None and records.min_separation(0) is None:
            found = f"correlated noise and {records.kind!r}, which may read a record in any two rounds"
            fix = "use records_in_turn (the same batches in every epoch), one_pass or all_records"
            raise PlanError("correlated noise", found, "batches with a minimum separation of a record's reads", fix)

    def fitted(self, allowed: Callable[[], Patterns], work: Callable[[], Floats]) -> Release:
        return replace(self, strategy=self.strategy.fitted(allowed(), work))

    def is_fitted(self, rounds: int) -> bool:
        return self.strategy.is_fitted(rounds)

    def init(self, length: int) -> dict[str, Tensor]:
        return self.strategy.init(length)

    def noised(
        self, total: Tensor, cohort: Cohort, stream: Callable[[str], np.random.Generator], memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        rng = stream("server noise")
        if is_secure(rng):
            memory = {name: held.double() if held.is_floating_point() else held for name, held in memory.items()}
        memory = {name: held.to(total.device) if held.dim() else held for name, held in memory.items()}  # no counters

        def draw() -> Tensor:
            return torch.from_numpy(self.mechanism.sample(total.numel(), rng)).to(total.device)

        noise, memory = self.strategy.step(draw, memory)
        return total + noise.view_as(total), dict(memory)

    def event(self) -> Event:
        """Return the privacy event of one client in one round; sensitivity: the strategy's largest column norm."""
        return GaussianNoise(self.mechanism.noise_multiplier / self.strategy.max_column_norm)

    def run_events(self, allowed: Patterns) -> tuple[tuple[Event, int], ...]:
        sensitivity = self.strategy.sensitivity(allowed)
        if sensitivity == 0.0:
            return ((self.event(), 0),)
        return ((GaussianNoise(self.mechanism.noise_multiplier / sensitivity), 1),)

    def kept_bins_event(self, bins: int, rounds: int) -> Event | None:
        return kept_bins(_bin_gram(self.strategy, bins, rounds), self.mechanism.noise_multiplier)

    def repeated_event(self, allowed: Patterns) -> Event:
        """Return the event of a round t that is run again with fresh noise z: one more release of (C X)_t + z.

        C is the strategy's matrix, and X has the rounds' sums as rows. A client that takes part in the rounds s changes
        (C X)_t by at most sum_s |C_ts|. If its rounds are at least `bands` apart, this is one entry of C, at most the
        largest column norm; otherwise it is at most the sensitivity of all rows together.
        """
        bands = self.strategy.bands
        if bands is not None and bands <= allowed.min_separation:
            return self.event()
        return GaussianNoise(self.mechanism.noise_multiplier / self.strategy.sensitivity(allowed))

    def message_event(self) -> Event:
        return Unprotected()

    def with_noise_multiplier(self, noise_multiplier: float) -> Release:
        return replace(self, mechanism=Gaussian(noise_multiplier))

    def noise_std(self, cohort: Cohort, t: int) -> float:
        return self.mechanism.std * self.strategy.noise_std(t)

    def noise_draws(self, cohort: Cohort) -> tuple[Mechanism, ...]:
        return (self.mechanism,)

    def noise_matrix(self, rounds: int) -> Floats:
        return self.strategy.noise_matrix(rounds)

    def independent(self, clients: Sampler, allowed: Patterns) -> CentralNoise | None:
        """Return a release with independent noise in every round at the same privacy cost, for this sampler.

        None for kept bins, where the cost depends on delta."""
        if clients.keeps_bins:
            return None
        moved, alone = self.strategy.max_column_norm, 1.0
        if not clients.amplifies:
            moved, alone = self.strategy.sensitivity(allowed), Identity().sensitivity(allowed)
        return CentralNoise(Gaussian(self.mechanism.noise_multiplier * alone / moved))


@lru_cache(maxsize=8)
def _bin_gram(strategy: Strategy, bins: int, rounds: int) -> Floats:
    inverse = strategy.noise_matrix(rounds)
    return gram_of_bins(bin_rows(np.asarray(np.linalg.solve(inverse, np.eye(rounds)), dtype=np.float64), bins))


def noise_of_models(release: Release, work: Floats) -> float | None:
    """Return the noise's standard deviation in one coordinate of a model, root mean square over the rounds' models.

    `work` is the workload A of `ServerOptimizer.workload`: models are A times the rounds' sums. The result is None if
    the noise is not added by the server.
    """
    if not isinstance(release, CorrelatedNoise | CentralNoise):
        return None
    strategy = release.strategy if isinstance(release, CorrelatedNoise) else Identity()
    if work.ndim == 1:
        squares = strategy.errors(len(work), work)
    else:
        squares = np.sum((work @ strategy.noise_matrix(len(work))) ** 2, axis=1)
    return release.mechanism.std * float(np.sqrt(np.mean(squares)))
