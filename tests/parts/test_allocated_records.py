"""Random allocation of records in silos: once a pass, secret and fresh; a pass that a kill cut short is charged too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.dpsgd.loops import data, mlp

from sordino.accounting.composition import Participation
from sordino.accounting.events import Allocated, GaussianNoise
from sordino.audit.noise_test import failures
from sordino.audit.sampling_and_sensitivity import Draws, batch_tests, sampling_tests
from sordino.engines.distributed import Distributed
from sordino.engines.inprocess import InProcess
from sordino.errors import EngineError, PlanError
from sordino.ledger.policy import Policy
from sordino.loop import check_needs, run
from sordino.parts.local_solvers import LocalSolver
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllocatedRecords, batch_stream
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, Release, ScheduledNoise
from sordino.parts.samplers import Everyone, Poisson, RoundRobin, Sampler
from sordino.parts.server_optimizers import Sgd
from sordino.plan import PASS_KEY, Plan
from sordino.rng import Secure, Seeded
from sordino.task import Task

SIZES = (12, 20)
STREAMS = (Seeded(4), Secure())


def planned(
    rounds: int = 6,
    clients: Sampler | None = None,
    release: Release | None = None,
    local: LocalSolver | None = None,
    bins: int = 3,
) -> Plan:
    return Plan(
        rounds=rounds,
        clients=clients or Everyone(2),
        local=local or BatchGradient(AllocatedRecords(bins, SIZES), 1.0),
        release=release or LocalNoise(Gaussian(1.0)),
        server=Sgd(),
    )


def task() -> Task:
    x, y = data(32).tensors
    return Task.of(mlp(), [(x[:12], y[:12]), (x[12:], y[12:])])


def test_a_pass_is_the_price_and_a_cut_or_repeated_one_is_paid() -> None:
    event, plan = GaussianNoise(1.0), planned(7)
    assert [line.entries for line in plan.cost().lines] == [((Allocated(3, event), 3),)] * len(plan.cost().lines)
    assert {line.relation for line in plan.cost().lines} == {"add_remove"}
    for repeated, count in (((4,), 4), ((4, 4), 5), ((3, 4), 5), ((0, 6), 5)):
        again = plan.cost(Participation.planned(plan.clients, 7, repeated))
        assert again.line("messages").entries == ((Allocated(3, event), count),)
    central = planned(7, release=CentralNoise(Gaussian(2.0))).cost()
    assert central.line("models").entries == ((Allocated(3, GaussianNoise(2.0)), 3),)
    assert not central.line("messages").entries[0][0].protects
    assert plan.local.unit(plan.public(0)) == 1 / (16 / 3)  # a constant: the mean batch of the plan


def test_it_is_refused_where_its_proof_does_not_hold() -> None:
    for change, says in (
        ({"release": ScheduledNoise((2.0, 1.0), (3, 3))}, "scheduled noise"),
        ({"clients": Poisson(2, 0.5)}, "silos that are not drawn at random"),
        (
            {"local": NoisyLocalSgd(AllocatedRecords(3, SIZES), 1.0, 1.0, 0.1, 2), "release": Forward()},
            "one batch per round",
        ),
    ):
        with pytest.raises(PlanError, match=says):
            planned(**change)
    with pytest.raises(PlanError, match="bins = 1"):
        AllocatedRecords(1, SIZES)

    with pytest.raises(EngineError, match="on an engine of several processes"):
        check_needs(planned(), False, Distributed(InProcess()))
    policy = Policy(dataset="a", epsilon=9.0, delta=0.1, unit="record", releases=("local_noise",))
    assert policy.check(planned(), noise="secure") == "silos keep no allocation of records by pass"
    with pytest.raises(PlanError, match="without a key of the current pass"):
        batch_stream(AllocatedRecords(3, SIZES), Secure(), 1, 0)


def test_silos_in_turn_pay_for_the_passes_that_they_are_in() -> None:
    plan = planned(12, clients=RoundRobin(2, 1))
    assert plan.cost().line("messages").entries[0][1] == 4  # rounds of one silo: 6, in 4 passes


def test_the_audit_passes_it_and_finds_kept_bins_and_independent_rounds() -> None:
    plan = planned(32, local=BatchGradient(AllocatedRecords(4, (60, 70)), 1.0))
    assert failures(batch_tests(plan)) == []
    assert failures(batch_tests(replace(plan, rounds=30))) == []
    records, law = AllocatedRecords(4, (60,)), AllocatedRecords(4, (60,)).law(0)
    streams = [Seeded(seed) for seed in range(8)]
    kept = [[records.draw(t, 0, 60, own.at(0, "batches")) for t in range(32)] for own in streams]
    loose = [[records.draw(t, 0, 60, own.at(t, "batches")) for t in range(32)] for own in streams]
    assert {one.question for one in failures(sampling_tests(Draws("batch", law, kept)))} == {"batch: secrecy"}
    assert {one.question for one in failures(sampling_tests(Draws("batch", law, loose)))} == {"batch: once a pass"}


@pytest.mark.parametrize("streams", STREAMS, ids=("seeded", "secure"))
def test_a_run_that_goes_on_in_the_middle_of_a_pass_keeps_its_allocation(streams: Any) -> None:
    read: list[dict[int, list[int]]] = []

    class Seen(InProcess):
        def prepare(self, plan: Plan, task: Task, own: Any) -> Any:
            worker = super().prepare(plan, task, own)
            solve = worker.solve

            def record(clients: Any, public: Any, start: Any) -> Any:
                rngs = {int(c): batch_stream(plan.local.reads, worker.streams, public.t, int(c)) for c in clients}
                drawn = {c: plan.local.indices(SIZES[c], rng, public.t, c) for c, rng in rngs.items()}
                read.append({c: rows[rows >= 0].tolist() for c, rows in drawn.items()})
                return solve(clients, public, start)

            worker.solve = record  # type: ignore[method-assign]
            return worker

    plan, state = planned(), None
    for _ in range(6):  # stopped after every round
        state = next(run(plan, task(), engine=Seen(), streams=streams, state=state)).state
        secret = PASS_KEY in state.secret_state
        assert secret == (state.t % 3 != 0 and streams.mode == "secure")  # a finished pass leaves no key
    assert len(read) == 6
    for silo, size in enumerate(SIZES):
        bins = [[row for rounds in read[k : k + 3] for row in rounds[silo]] for k in (0, 3)]
        assert [sorted(one) for one in bins] == [list(range(size))] * 2
        assert read[0][silo] != read[3][silo]
    if streams.mode == "secure" and state is not None:
        with pytest.raises(PlanError, match="without the pass's key"):
            next(run(plan, task(), streams=streams, state=replace(state, t=1, secret_state={})))


def test_a_repeated_round_of_a_release_draws_another_pass() -> None:
    import torch

    plan, first = planned(), None
    first = next(run(plan, task(), streams=Secure(), state=None)).state
    emptied = replace(first, secret_state={**first.secret_state, PASS_KEY: torch.zeros(0, dtype=torch.int64)})
    again = next(run(plan, task(), streams=Secure(), state=emptied)).state
    kept = next(run(plan, task(), streams=Secure(), state=first)).state
    assert torch.equal(kept.secret_state[PASS_KEY], first.secret_state[PASS_KEY])
    assert not torch.equal(again.secret_state[PASS_KEY], first.secret_state[PASS_KEY])


def test_batches_are_binomial_and_cover_a_silo() -> None:
    records = AllocatedRecords(10, (1000,))
    drawn = [records.draw(t, 0, 1000, Seeded(0).at(0, "batches")) for t in range(10)]
    assert sorted(np.concatenate(drawn).tolist()) == list(range(1000))
    assert len({len(rows) for rows in drawn}) > 3
