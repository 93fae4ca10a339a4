"""Random allocation of clients: once a pass, secret and fresh; a pass that a kill cut short is charged too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests import tiny
from tests.commands import federation, lines
from tests.faults import Killed, dying

from sordino.accounting.composition import Participation
from sordino.accounting.events import Allocated, GaussianNoise
from sordino.audit.noise_test import failures
from sordino.audit.sampling_and_sensitivity import Draws, cohort_tests, sampling_tests
from sordino.config import load_config
from sordino.engines.base import Engine
from sordino.engines.inprocess import InProcess
from sordino.errors import EngineError, PlanError
from sordino.loop import check_needs, run
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import LocalNoise, NoiseShares
from sordino.parts.samplers import Cohort, PassDraws, RandomAllocation
from sordino.plan import PASS_KEY
from sordino.rng import Secure, Seeded
from sordino.runs.execution import execute
from sordino.runs.folder import RunFolder

STREAMS = (Seeded(4), Secure())


def passes(clients: RandomAllocation, count: int, streams: Any) -> list[list[Cohort]]:
    draws = PassDraws(clients, streams)
    found = [draws.draw(t) for t in range(count * clients.bins)]
    return [found[k : k + clients.bins] for k in range(0, len(found), clients.bins)]


@pytest.mark.parametrize("streams", STREAMS, ids=("seeded", "secure"))
def test_every_client_is_in_exactly_one_round_of_every_pass(streams: Any) -> None:
    clients = RandomAllocation(40, 7)
    for cohorts in passes(clients, 20, streams):
        assert sorted(np.concatenate(cohorts).tolist()) == list(range(40))


@pytest.mark.parametrize("streams", STREAMS, ids=("seeded", "secure"))
def test_clients_and_passes_are_independent_and_bins_uniform(streams: Any) -> None:
    clients, rounds = RandomAllocation(60, 4), np.zeros((200, 60), dtype=np.int64)
    for row, cohorts in zip(rounds, passes(clients, 200, streams), strict=True):
        for t, cohort in enumerate(cohorts):
            row[cohort] = t
    table = np.zeros((4, 4))
    np.add.at(table, (rounds[:-1].ravel(), rounds[1:].ravel()), 1)  # a client's bins in two passes
    neighbours = np.zeros((4, 4))
    np.add.at(neighbours, (rounds[:, :-1].ravel(), rounds[:, 1:].ravel()), 1)  # two clients' bins in one pass
    for counts in (table, neighbours):
        assert stats.chisquare(counts.ravel()).pvalue > 1e-4


def test_a_pass_is_the_price_and_a_cut_or_repeated_one_is_paid() -> None:
    clients, event = RandomAllocation(100, 10), GaussianNoise(1.0)
    assert clients.amplify(event) == Allocated(10, event)
    assert [clients.amplified_rounds(rounds) for rounds in (1, 10, 11, 100)] == [1, 1, 2, 10]
    assert clients.amplified_rounds(20, (3, 3, 14)) == 5
    plan = tiny.plan(clients=RandomAllocation(6, 3), rounds=7)
    models, cohort = plan.cost().line("models"), plan.cost().line("cohort")
    assert (models.relation, models.entries) == ("add_remove", ((Allocated(3, event), 3),))
    assert (cohort.relation, cohort.entries) == ("zero_out", ((event, 3),))
    again = plan.cost(Participation.planned(plan.clients, 7, (4,)))
    assert again.line("models").entries == ((Allocated(3, event), 4),)
    assert again.line("cohort").entries == ((event, 4),)


def test_it_is_refused_where_cohorts_are_shown() -> None:
    for release in (LocalNoise(Gaussian(1.0)), NoiseShares(1.0, at_least=2)):
        with pytest.raises(PlanError, match="hides who takes part"):
            tiny.plan(clients=RandomAllocation(6, 2), release=release)

    class Elsewhere(InProcess):
        deployed = True

    engine: Engine = Elsewhere()
    with pytest.raises(EngineError, match="who is asked in which round"):
        check_needs(tiny.plan(clients=RandomAllocation(6, 2)), False, engine)
    with pytest.raises(PlanError, match="bins = 1"):
        RandomAllocation(6, 1)


def test_the_audit_passes_it_and_finds_kept_bins_and_independent_rounds() -> None:
    plan = tiny.plan(clients=RandomAllocation(60, 4), rounds=32)
    assert failures(cohort_tests(plan)) == []
    assert failures(cohort_tests(replace(plan, rounds=30))) == []

    clients, law = RandomAllocation(60, 4), RandomAllocation(60, 4).law()
    streams = [Seeded(seed) for seed in range(8)]
    kept = [[clients.draw(t, own.at(0, "cohort")) for t in range(32)] for own in streams]  # one for all passes
    loose = [[clients.draw(t, own.at(t, "cohort")) for t in range(32)] for own in streams]  # every round by itself
    assert {one.question for one in failures(sampling_tests(Draws("cohort", law, kept)))} == {"cohort: secrecy"}
    assert {one.question for one in failures(sampling_tests(Draws("cohort", law, loose)))} == {"cohort: once a pass"}


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", STREAMS, ids=("seeded", "secure"))
def test_a_run_that_goes_on_in_the_middle_of_a_pass_keeps_its_allocation(streams: Any) -> None:
    cohorts: list[Cohort] = []

    class Seen(InProcess):
        def prepare(self, *args: Any) -> Any:
            worker = super().prepare(*args)
            collect = worker.collect

            def record(job: Any) -> Any:
                cohorts.append(job.cohort)
                return collect(job)

            worker.collect = record  # type: ignore[method-assign]
            return worker

    plan, task, state = tiny.plan(clients=RandomAllocation(6, 3), rounds=6), tiny.task(), None
    for _ in range(6):  # stopped after every round
        state = next(run(plan, task, engine=Seen(), streams=streams, state=state)).state
        secret = PASS_KEY in state.secret_state
        assert secret == (state.t % 3 != 0 and streams.mode == "secure")  # a finished pass leaves no key
    assert sorted(np.concatenate(cohorts[:3]).tolist()) == list(range(6))
    assert sorted(np.concatenate(cohorts[3:]).tolist()) == list(range(6))
    if streams.mode == "secure" and state is not None:
        with pytest.raises(PlanError, match="without the pass's key"):
            next(run(plan, task, streams=streams, state=replace(state, t=1, secret_state={})))


CHANGES = (
    ("rounds = 4", "rounds = 6"),
    ('kind = "poisson", population = 60, rate = 0.5', 'kind = "random_allocation", population = 60, bins = 3'),
)


@pytest.mark.parametrize("noise", ["simulation", "secure"])
def test_a_run_killed_in_a_pass_pays_for_another_pass_and_certifies(noise: str, tmp_path: Path) -> None:
    changes = CHANGES if noise == "simulation" else (*CHANGES, ("[run]", '[privacy]\nnoise = "secure"\n\n[run]'))
    config = load_config(federation(tmp_path, *changes))
    assert isinstance(config.plan.clients, RandomAllocation)
    with dying() as system:
        whole = execute(config, tmp_path / "whole")
    assert whole.certificate["adversaries"][0]["events"][0]["count"] == 2
    paid = set()
    for at in range(system.done // 3, system.done - 20, 17):
        out = tmp_path / f"run{at}"
        with pytest.raises(Killed), dying(at, "after"):
            execute(config, out)
        done = execute(config, out, resume=True)
        assert RunFolder.open(out).certify() == done.certificate
        repeats = len(lines(out / "charges.jsonl")) - 6
        line = done.certificate["adversaries"][0]
        assert line["events"][0]["count"] == 2 + repeats
        assert (line["epsilon"] > whole.certificate["epsilon"]) == (repeats > 0)
        paid.add(repeats)
    assert 1 in paid
