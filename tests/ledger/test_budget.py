"""Promises of the filter: the round that would overspend is the first that is refused, and nothing of it exists."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accounting import oracles
from tests.commands import contents, federation, lines, sordino, spelt_out
from tests.tiny import plan, task

from sordino import plan as plans
from sordino.accounting.calibration import Budget
from sordino.accounting.composition import Participation, client_cost
from sordino.config import load_config
from sordino.engines.inprocess import InProcess
from sordino.errors import BudgetError, PlanError
from sordino.ledger.budget import Filter, client_filter
from sordino.loop import Tally, run
from sordino.parts.encoding import Clip
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, NoNoise
from sordino.parts.samplers import FixedSize, Poisson, RoundRobin
from sordino.plan import State
from sordino.rng import Seeded
from sordino.runs.execution import execute
from sordino.runs.folder import RunFolder
from sordino.runs.writer import RunWriter

DELTA = 1e-5


def worth(noise_multiplier: float, epsilon: float, moved: float = 1.0) -> int:
    """The most Gaussian rounds within (epsilon, DELTA), by the closed form of mpmath alone."""
    rounds = 0
    while oracles.gaussian_delta(epsilon, moved * math.sqrt(rounds + 1) / noise_multiplier) <= DELTA:
        rounds += 1
    return rounds


def seen(**changes: Any) -> Any:
    """A plan whose cohort is seen: half of six clients on average, noise shares."""
    return plan(**{"clients": Poisson(6, 0.5), "release": NoiseShares(20.0, at_least=1), "rounds": 50, **changes})


# ---- what a budget is worth -----------------------------------------------------------------------------------------


@given(noise_multiplier=st.floats(1.0, 30.0), epsilon=st.floats(0.2, 8.0))
@settings(max_examples=25, deadline=None)
def test_a_budget_is_worth_the_rounds_of_the_closed_form(noise_multiplier: float, epsilon: float) -> None:
    found = client_filter(seen(release=NoiseShares(noise_multiplier, at_least=1)), Budget(epsilon, DELTA))
    assert found.allowed.tolist() == [worth(noise_multiplier, epsilon)] * 6
    assert found.spent.tolist() == [0] * 6


def test_replacing_a_client_is_worth_fewer_rounds_than_zeroing_it() -> None:
    everyone = client_filter(plan(release=CentralNoise(Gaussian(20.0))), Budget(2.0, DELTA))
    local = client_filter(seen(release=LocalNoise(Gaussian(20.0))), Budget(2.0, DELTA))
    assert everyone.allowed[0] == local.allowed[0] == worth(20.0, 2.0, moved=2.0)
    assert client_filter(seen(), Budget(2.0, DELTA)).allowed[0] == worth(20.0, 2.0) > everyone.allowed[0]


def test_a_pure_budget_is_worth_its_whole_rounds() -> None:
    laplace = plan(encode=(Clip(1.0, norm=1),), release=LocalNoise(Laplace(8.0)))  # 2/8 each, when replaced
    assert client_filter(laplace, Budget(1.0, 0.0)).allowed[0] == 4
    assert client_filter(laplace, Budget(0.99, 0.0)).allowed[0] == 3
    assert client_filter(laplace, Budget(0.2, 0.0)).allowed[0] == 0


def test_sampling_is_worth_nothing_to_one_who_sees_the_cohort() -> None:
    rare, often = (client_filter(seen(clients=Poisson(6, rate)), Budget(2.0, DELTA)) for rate in (0.2, 0.9))
    assert rare.allowed.tolist() == often.allowed.tolist()


def test_single_clients_may_have_budgets_of_their_own() -> None:
    found = client_filter(seen(), Budget(2.0, DELTA), own={1: Budget(0.5, DELTA), 4: Budget(1e-4, 1e-12)})
    common, small = worth(20.0, 2.0), worth(20.0, 0.5)
    assert found.allowed.tolist() == [common, small, common, common, 0, common]
    assert 0 < small < common


def test_clients_with_more_noise_of_their_own_may_come_more_often() -> None:
    own = (10.0, 20.0, 20.0, 40.0, 10.0, 10.0)
    found = client_filter(seen(release=LocalNoise(Gaussian(1.0), own)), Budget(3.0, DELTA))
    assert found.allowed.tolist() == [worth(noise_multiplier, 3.0, moved=2.0) for noise_multiplier in own]


def test_a_budget_is_worth_what_the_bill_says_of_so_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the k-th round of a client costs k releases: what one round costs, times n, would be too little."""

    def growing(clients: Any, release: Any, counted: Participation, *only: Any) -> Any:
        return client_cost(
            clients,
            release,
            replace(counted, max_participations=counted.max_participations * (counted.max_participations + 1) // 2),
            *only,
        )

    monkeypatch.setattr(plans, "client_cost", growing)
    allowed = int(client_filter(seen(rounds=7), Budget(2.0, DELTA)).allowed[0])
    releases = worth(20.0, 2.0)
    assert allowed * (allowed + 1) // 2 <= releases < (allowed + 1) * (allowed + 2) // 2


@pytest.mark.parametrize("sampler", [Poisson(6, 0.5), FixedSize(6, 3)])
def test_a_budget_is_refused_where_the_cohort_is_secret(sampler: Any) -> None:
    with pytest.raises(PlanError) as refused:
        client_filter(plan(clients=sampler), Budget(1.0, DELTA))
    assert refused.value.rule == "client budget"
    assert client_filter(plan(clients=RoundRobin(6, 3)), Budget(30.0, DELTA)).allowed[0] > 0


def test_without_noise_no_round_is_within_any_budget() -> None:
    assert client_filter(plan(release=NoNoise()), Budget(1e6, DELTA)).allowed.tolist() == [0] * 6


# ---- the filter -----------------------------------------------------------------------------------------------------


def counts(allowed: Sequence[int]) -> Filter:
    return Filter(np.asarray(allowed, dtype=np.int64), np.zeros(len(allowed), dtype=np.int64))


@given(
    allowed=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    cohorts=st.lists(st.sets(st.integers(0, 2)), max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_exactly_the_cohorts_that_fit_are_let_through(allowed: list[int], cohorts: list[set[int]]) -> None:
    gate, spent = counts(allowed), [0, 0, 0]
    for members in cohorts:
        cohort = np.asarray(sorted(members), dtype=np.int64)
        if any(spent[i] >= allowed[i] for i in members):
            with pytest.raises(BudgetError):
                gate.charge(cohort)
        else:
            gate.charge(cohort)
            spent = [spent[i] + (i in members) for i in range(3)]
        assert gate.spent.tolist() == spent


def test_a_refusal_names_the_client_and_what_its_budget_is_worth() -> None:
    gate = counts([5, 1, 5])
    gate.charge(np.asarray([1, 2]))
    with pytest.raises(BudgetError, match=r"1 client\(s\), first client 1, whose budget allows 1 round"):
        gate.charge(np.asarray([0, 1, 2]))


# ---- in a run -------------------------------------------------------------------------------------------------------


class Watching(InProcess):
    """An engine that counts the rounds whose clients were asked for anything."""

    asked = 0

    def prepare(self, *arguments: Any) -> Any:
        worker = super().prepare(*arguments)
        collect = worker.collect

        def counted(job: Any) -> Any:
            self.asked += 1
            return collect(job)

        object.__setattr__(worker, "collect", counted)
        return worker


def test_a_run_stops_before_anything_of_the_refused_round_exists() -> None:
    one = plan(rounds=9, release=CentralNoise(Gaussian(20.0)))
    budget, tally, engine = client_filter(one, Budget(0.8, DELTA)), Tally(), Watching()
    allowed = worth(20.0, 0.8, moved=2.0)
    assert 1 < allowed < 9
    rounds = run(one, task(), engine=engine, streams=Seeded(0), charges=tally, budget=budget)
    assert [next(rounds).t for _ in range(allowed)] == list(range(allowed))
    with pytest.raises(BudgetError, match="was not run"):
        next(rounds)
    assert len(tally.rounds) == engine.asked == allowed
    assert budget.spent.tolist() == [allowed] * 6


def test_a_budget_that_is_never_exceeded_changes_nothing() -> None:
    one = plan(rounds=3, release=CentralNoise(Gaussian(20.0)))
    free = [entry.state.memory for entry in run(one, task(), streams=Seeded(0))]
    gated = list(run(one, task(), streams=Seeded(0), budget=client_filter(one, Budget(50.0, DELTA))))
    for a, b in zip(free, gated, strict=True):
        assert all(bool((a[name] == b.state.memory[name]).all()) for name in a)


def test_random_cohorts_stop_at_the_first_client_that_has_nothing_left() -> None:
    one, tally = seen(release=NoiseShares(5.0, at_least=1)), Tally()
    allowed = worth(5.0, 1.5)
    with pytest.raises(BudgetError):
        list(run(one, task(), streams=Seeded(0), charges=tally, budget=client_filter(one, Budget(1.5, DELTA))))
    spent = np.bincount(np.concatenate(tally.cohorts), minlength=6)
    assert spent.max() == allowed
    following = one.clients.draw(len(tally.rounds), Seeded(0).at(len(tally.rounds), "cohort"))
    assert (spent[following] == allowed).any()


# ---- on disk --------------------------------------------------------------------------------------------------------

DRAWN = 'clients = { kind = "fixed", population = 60, cohort = 30 }'
IN_TURN = 'clients = { kind = "roundrobin", population = 60, cohort = 30 }'
ALL = 'clients = { kind = "everyone", population = 60 }'


def budgeted(folder: Path, rounds: int, clients: str = DRAWN) -> Path:
    """Half of sixty clients, noise multiplier 2, nine rounds, and a budget worth so many of them for every client."""
    mu, delta = (2.0 if clients == ALL else 1.0) * math.sqrt(rounds) / 2, 1e-3
    enough = (e for e in np.arange(0.05, 40, 0.01) if not rounds or oracles.gaussian_delta(e, mu) <= delta)
    central = '{ kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }'
    return spelt_out(
        folder,
        ("rounds = 4", "rounds = 9"),
        ('clients = { kind = "poisson", population = 60, rate = 0.5 }', clients),
        (central, '{ kind = "noise_shares", noise_multiplier = 2.0, at_least = 1 }'),
        ("[run]", f"[privacy]\nclient_epsilon = {next(enough)}\n\n[run]"),
    )


def test_a_run_that_is_stopped_leaves_its_model_and_certificate(tmp_path: Path) -> None:
    config, out = load_config(budgeted(tmp_path, 5)), tmp_path / "run"
    assert config.budget is not None
    assert config.budget.allowed.tolist() == [5] * 60
    with pytest.raises(BudgetError, match=r"stopped after round [5-8]:.*model and certificate"):
        execute(config, out)
    charged = len(lines(out / "charges.jsonl"))
    assert 5 <= charged == len(lines(out / "history.jsonl")) < 9
    assert (out / "model.safetensors").is_file()
    made = RunFolder.open(out).certify()
    assert made == json.loads((out / "certificate.json").read_text())
    assert made["counts"]["rounds_charged"] == made["counts"]["rounds_accounted"] == charged
    most = int(np.bincount(np.concatenate([line["cohort"] for line in lines(out / "charges.jsonl")])).max())
    assert made["epsilon"] == pytest.approx(epsilon_of(math.sqrt(most) / 2, config.delta), abs=2e-6)
    assert "ended by a budget" in sordino("explain", out).out


def epsilon_of(mu: float, delta: float) -> float:
    """Of Gaussian noise, by halving the closed form of mpmath."""
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if oracles.gaussian_delta(middle, mu) > delta else (low, middle)
    return high


@pytest.mark.parametrize("change", ["gone", "fits", "earlier"])
def test_an_end_that_no_budget_asked_for_is_noticed(tmp_path: Path, change: str) -> None:
    """A run that somebody stopped after a look at its model is not one that a budget ended, whatever a file says."""
    file, out = budgeted(tmp_path, 5), tmp_path / "run"
    assert sordino("run", file, "--out", out).code == 1
    refused = json.loads((out / "refused.json").read_text())
    spent = np.bincount(np.concatenate([line["cohort"] for line in lines(out / "charges.jsonl")]), minlength=60)
    if change == "gone":
        (out / "refused.json").unlink()
    elif change == "fits":
        free = np.flatnonzero(spent < 5)[:30].tolist()
        (out / "refused.json").write_text(json.dumps({**refused, "cohort": free}) + "\n")
    else:
        (out / "refused.json").write_text(json.dumps({**refused, "before": lines(out / "charges.jsonl")[-1]["before"]}))
    assert sordino("certify", out).code == 1


def test_a_run_that_a_budget_ended_is_over_even_with_new_coins(tmp_path: Path) -> None:
    """With secure noise another cohort would be drawn, and whoever has seen the model would choose whether to go on."""
    file, out = budgeted(tmp_path, 5), tmp_path / "run"
    file.write_text(file.read_text().replace("[privacy]", '[privacy]\nnoise = "secure"'))
    while sordino("run", file, "--out", out).code == 0:  # the coins are fresh: nine rounds may be within the budget
        shutil.rmtree(out)
    before = contents(out)
    for _ in range(3):
        assert sordino("run", file, "--out", out, "--resume").code == 1
    assert contents(out) == before


def test_what_was_spent_stays_spent_when_a_run_is_resumed(tmp_path: Path) -> None:
    file, out = budgeted(tmp_path, 5), tmp_path / "run"
    assert sordino("run", file, "--out", out).code == 1
    before = contents(out)
    again = sordino("run", file, "--out", out, "--resume")
    assert again.code == 1
    assert "would exceed the budget" in again.err
    assert contents(out) == before


def test_a_round_that_was_charged_and_lost_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = budgeted(tmp_path, 5), tmp_path / "run"
    config = load_config(file)

    def dying(self: RunWriter, state: State) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            execute(config, out)
    with pytest.raises(BudgetError):
        execute(config, out, resume=True)
    charges = lines(out / "charges.jsonl")
    assert [line["round"] for line in charges].count(1) == 2
    assert np.bincount(np.concatenate([line["cohort"] for line in charges])).max() == 5
    assert RunFolder.open(out).certify()["counts"]["rounds_accounted"] == 9 + 1  # a kill may have looked at the model


@pytest.mark.parametrize(("clients", "worth"), [(IN_TURN, 4), (DRAWN, 0), (ALL, 8)])
def test_a_plan_that_must_overspend_its_budget_is_refused_when_planned(
    tmp_path: Path, clients: str, worth: int
) -> None:
    """Nine rounds in turn are five for some; a run would have stopped after the budget was spent."""
    file = budgeted(tmp_path, worth, clients)
    for words in (("plan", file), ("run", file, "--out", tmp_path / "run")):
        said = sordino(*words).sentence
        assert "[client budget] 9 rounds, " in said
        assert f"whose budget allows {worth}" in said
    assert not (tmp_path / "run").exists()
    enough = budgeted(tmp_path, {4: 5, 0: 5, 8: 9}[worth], clients)
    assert sordino("plan", enough).code == 0


def test_a_budget_that_cannot_be_kept_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    file = federation(tmp_path, ("[run]", "[privacy]\nclient_epsilon = 1.0\n\n[run]"))
    refused = sordino("run", file, "--out", tmp_path / "run")
    assert "[client budget]" in refused.sentence
    assert not (tmp_path / "run").exists()
