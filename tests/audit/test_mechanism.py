"""A correct round lands just below what it is accounted; the audit sees every adversary who was promised something."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.accounting.bounds import Norm
from sordino.accounting.composition import Line
from sordino.accounting.events import GaussianNoise, LaplaceNoise
from sordino.audit.attacks import MechanismAudit
from sordino.audit.mechanism import TENSORS, WIDTH, Pipeline, audit_mechanism, worst_messages
from sordino.audit.tradeoff import Limit, at_least, at_most, separation
from sordino.parts.encoding import Adaptive, Clip, Step
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian, Laplace, Mechanism
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, NoNoise, Release, ShuffledNoise
from sordino.parts.samplers import Cohort, Everyone, FixedSize, Poisson, RoundRobin, Sampler
from sordino.parts.schedules import Decay
from sordino.parts.server_optimizers import Sgd
from sordino.parts.sparsify import PublicDataMask, PublicMask, SparsifyUpdate
from sordino.plan import Plan
from sordino.rng import Seeded, Streams

DELTA = 1e-5


def plan(clients: Sampler, release: Release, norm: Norm = 2) -> Plan:
    local = LocalSgd(lr=0.1, steps=1)
    return Plan(rounds=3, clients=clients, local=local, encode=(Clip(0.7, norm),), release=release, server=Sgd(lr=1.0))


def audits(planned: Plan, trials: int, pipeline: Pipeline | None = None) -> dict[str, MechanismAudit]:
    found = audit_mechanism(planned, delta=DELTA, trials=trials, pipeline=pipeline)
    return {audit.adversary: audit for audit in found}


def test_a_correct_gaussian_lands_just_below_its_mu() -> None:
    found = audits(plan(RoundRobin(20, 5), CentralNoise(Gaussian(1.0))), 200_000)
    assert set(found) == {"models", "cohort"}  # a trusted server's messages were promised nothing
    for audit in found.values():
        assert audit.passed
        assert audit.relation == "zero_out"
        assert audit.upper_mu == pytest.approx(1.0)
        assert 0.93 <= audit.lower_mu <= 1.0
        assert audit.movement == pytest.approx(1.0, abs=1e-4)
        assert 2.0 < audit.lower_epsilon < audit.upper_epsilon == pytest.approx(4.377, abs=0.001)
        assert audit.gaussian_epsilon is not None
        assert audit.lower_epsilon < audit.gaussian_epsilon < audit.upper_epsilon


CERTAIN = {
    "everyone, replaced": (plan(Everyone(6), CentralNoise(Gaussian(2.0))), "cohort", 1.0),
    "noise shares, fewest reports": (plan(RoundRobin(20, 8), NoiseShares(1.0, at_least=4)), "cohort", 1.0),
    "noise shares, one message": (plan(RoundRobin(20, 8), NoiseShares(1.0, at_least=4)), "messages", 4.0),
    "local noise, one message": (plan(Everyone(6), LocalNoise(Gaussian(2.0))), "messages", 1.0),
    "local noise, the sum": (plan(Everyone(6), LocalNoise(Gaussian(2.0))), "models", 1.0),
    "the least noised client": (plan(Everyone(3), LocalNoise(Gaussian(9.0), (4.0, 2.0, 3.0))), "messages", 1.0),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_without_secret_coins_nearly_all_of_mu_is_found(name: str) -> None:
    planned, adversary, mu = CERTAIN[name]
    found = audits(planned, 60_000)
    assert all(audit.passed for audit in found.values())
    assert found[adversary].upper_mu == pytest.approx(mu)
    assert 0.9 * mu <= found[adversary].lower_mu <= mu


@pytest.mark.parametrize("release", [CentralNoise(Laplace(1.0)), LocalNoise(Laplace(2.0))], ids=["central", "local"])
def test_laplace_spends_nearly_all_of_its_pure_epsilon(release: Release) -> None:
    clients = RoundRobin(20, 5) if isinstance(release, CentralNoise) else Everyone(4)
    for audit in audits(plan(clients, release, norm=1), 40_000).values():
        assert audit.passed
        assert audit.upper_epsilon == pytest.approx(1.0, abs=1e-3)
        assert 0.8 <= audit.lower_epsilon <= 1.0
        assert audit.gaussian_epsilon is None
        assert "one coordinate" in audit.attack  # L1: any other split of the norm tells less


HIDDEN = {
    "poisson, laplace": (plan(Poisson(50, 0.3), CentralNoise(Laplace(0.4)), norm=1), "add_remove"),
    "poisson, capped": (plan(Poisson(12, 0.3, cap=5), CentralNoise(Gaussian(0.7))), "add_remove"),
    "poisson, a large population": (plan(Poisson(1_000_000, 0.3), CentralNoise(Gaussian(0.7))), "add_remove"),
    "fixed size": (plan(FixedSize(60, 20), CentralNoise(Gaussian(1.4))), "replace_one"),
    "fixed size, noise shares": (plan(FixedSize(12, 4), NoiseShares(1.4, at_least=4)), "replace_one"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_with_secret_coins_much_of_the_limit_is_found_and_none_above(name: str) -> None:
    planned, relation = HIDDEN[name]
    found = audits(planned, 20_000)
    assert all(audit.passed for audit in found.values())
    models, cohort = found["models"], found["cohort"]
    assert models.relation == relation
    assert 0.6 <= models.lower_mu / models.upper_mu <= 1.0
    assert models.lower_mu < cohort.lower_mu  # the coins are worth something only to those who do not see them


def test_correct_code_never_fails_over_many_audits() -> None:
    planned = plan(Poisson(20, 0.3), NoiseShares(1.0, at_least=2))
    for seed in range(6):
        assert all(audit.passed for audit in audit_mechanism(planned, delta=DELTA, trials=4000, seed=seed))


def test_an_audit_is_repeatable_and_follows_its_seed() -> None:
    planned = plan(Everyone(3), CentralNoise(Gaussian(1.0)))
    first, again, other = (audit_mechanism(planned, delta=DELTA, trials=4000, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_nothing_is_audited_where_nothing_is_promised() -> None:
    assert audit_mechanism(plan(Everyone(3), NoNoise()), delta=DELTA, trials=1000) == []


def test_at_delta_zero_a_gaussian_is_still_audited_in_mu() -> None:
    found = audit_mechanism(plan(Everyone(3), CentralNoise(Gaussian(2.0))), delta=0.0, trials=20_000)
    assert [audit.upper_epsilon for audit in found] == [math.inf, math.inf]
    assert all(audit.passed and 0.8 < audit.lower_mu <= 1.0 for audit in found)


def test_forgotten_noise_is_found() -> None:
    class Silent(Pipeline):
        def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
            return messages.sum(0).repeat(copies, 1) / 3

    planned = plan(Everyone(3), CentralNoise(Gaussian(1.0)))
    assert not any(audit.passed for audit in audits(planned, 2000, Silent(planned)).values())


def test_a_message_that_is_not_a_number_is_found() -> None:
    class Trusting(Pipeline):
        def encode(self, rows: Tensor) -> Tensor:
            return torch.where(rows.isfinite(), super().encode(rows.nan_to_num(0.0)), rows)

    planned = plan(Everyone(3), CentralNoise(Gaussian(1.0)))
    for audit in audits(planned, 4000, Trusting(planned)).values():
        assert not audit.passed
        assert audit.lower_mu == math.inf
        assert "not finite" in audit.attack


def test_noise_that_follows_the_cohort_is_found_by_its_spread() -> None:
    """Noise shares under add or remove: the variance tells the count (PRIVACY.md rule 3)."""

    class Following(Pipeline):
        def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
            clean = messages.sum(0) / self.plan.clients.expected
            share = math.sqrt(max(len(cohort), 1) / self.plan.clients.expected)
            return clean + share * (super().released(messages, cohort, copies, streams) - clean)

    planned = plan(Poisson(50, 0.2), CentralNoise(Gaussian(3.0)))
    found = audits(planned, 20_000, Following(planned))["models"]
    assert not found.passed
    assert "spread" in found.attack


@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace_one"])
def test_the_worst_message_reaches_the_edge_of_the_ball_and_no_further(relation: str) -> None:
    planned = plan(Everyone(3), CentralNoise(Gaussian(1.0)))
    attacks = worst_messages(Pipeline(planned), relation, hidden=False)  # type: ignore[arg-type]
    assert {attack.name for attack in attacks} == {"one coordinate", "all tensors"}
    for attack in attacks:
        most = 2.0 if relation == "replace_one" else 1.0
        assert most * (1 - 1e-4) < attack.movement <= most
        assert len(attack.sent) == TENSORS * WIDTH


def test_the_copies_of_one_round_are_independent_draws_of_its_noise() -> None:
    pipeline = Pipeline(plan(RoundRobin(8, 4), NoiseShares(2.0, at_least=2)))
    messages = pipeline.encode(torch.ones(4, 3))
    means = pipeline.released(messages, np.arange(4), 100_000, Seeded(5)).double()
    assert torch.allclose(means.mean(0), torch.full((3,), 1 / math.sqrt(3), dtype=torch.float64), atol=0.01)
    variance = (2.0 * math.sqrt(4 / 2) / 4) ** 2  # four shares of 2 / sqrt(2), over four clients
    assert torch.allclose(torch.cov(means.T), torch.eye(3, dtype=torch.float64) * variance, atol=0.02 * variance)


MORE_STEPS: dict[str, tuple[Step, ...]] = {
    "a public mask": (PublicMask(0.3), Clip(0.7)),
    "a mask from public data": (PublicMask(0.3, PublicDataMask()), Clip(0.7)),
    "a client's own top-k": (SparsifyUpdate(0.2), Clip(0.7)),
    "a top-k by influence": (SparsifyUpdate(0.2, "influence"), Clip(0.7)),
    "an adaptive clip norm": (Clip(Adaptive(0.7)),),
    "a decaying clip norm": (Clip(Decay(0.7, 0.9)),),
}


@pytest.mark.parametrize("name", MORE_STEPS)
def test_every_step_keeps_the_worst_message_at_the_edge_of_the_ball(name: str) -> None:
    planned = replace(plan(Everyone(6), CentralNoise(Gaussian(2.0))), encode=MORE_STEPS[name])
    for audit in audits(planned, 20_000).values():
        assert audit.passed
        assert 2.0 * (1 - 1e-4) < audit.movement <= 2.0
        assert 0.85 <= audit.lower_mu <= 1.0


@pytest.mark.parametrize("mechanism", [Gaussian(4.0), Laplace(4.0)])
def test_a_shuffled_round_is_audited_too(mechanism: Mechanism) -> None:
    norm: Norm = 2 if isinstance(mechanism, Gaussian) else 1
    found = audits(plan(Everyone(200), ShuffledNoise(mechanism, at_least=100), norm), 20_000)
    assert all(audit.passed for audit in found.values())
    assert found["messages"].lower_mu > 0.6 * found["messages"].upper_mu


def test_clopper_pearson_covers() -> None:
    rng, n, p, alpha = np.random.default_rng(0), 400, 0.03, 0.01
    hits = rng.binomial(n, p, 20_000).astype(np.float64)
    assert (at_most(hits, n, alpha) < p).mean() <= alpha
    assert (at_least(hits, n, alpha) > p).mean() <= alpha
    edges = np.array([0.0, n])
    assert at_most(edges, n, alpha).tolist() == pytest.approx([1 - alpha ** (1 / n), 1.0])
    assert at_least(edges, n, alpha).tolist() == pytest.approx([0.0, alpha ** (1 / n)])


def test_the_limit_of_a_gaussian_is_its_mu_everywhere() -> None:
    limit = Limit.of(Line("cohort", "replace_one", ((GaussianNoise(2.0), 4),)), 1.0, DELTA)
    rates = np.array([1e-4, 0.1, 0.5, 0.9])
    assert separation(limit.most(rates), rates) == pytest.approx(2.0)


def test_the_limit_of_laplace_is_its_tradeoff() -> None:
    """F(a) = exp(eps) a below exp(-eps)/2, exp(-eps)/(4a) off 1 in the middle, 1 - exp(-eps) (1 - a) above 1/2."""
    limit = Limit.of(Line("cohort", "zero_out", ((LaplaceNoise(1.0), 1),)), 1.0, 0.0)
    rates, e = np.array([0.01, 0.1, 0.3, 0.45, 0.7, 0.9]), math.e
    exact = np.where(rates < 0.5 / e, e * rates, np.where(rates < 0.5, 1 - 1 / (4 * e * rates), 1 - (1 - rates) / e))
    assert np.all(limit.most(rates) >= exact - 1e-9)
    assert limit.most(rates) == pytest.approx(exact, rel=2e-3)


def test_a_weaker_pipeline_is_held_to_the_stronger_promise() -> None:
    promised = plan(Everyone(3), CentralNoise(Gaussian(2.0)))
    weaker = replace(promised, release=CentralNoise(Gaussian(1.5)))
    assert all(audit.passed for audit in audits(weaker, 20_000).values())
    assert not any(audit.passed for audit in audits(promised, 20_000, Pipeline(weaker)).values())
