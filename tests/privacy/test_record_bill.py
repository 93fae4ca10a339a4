"""Promises of a record-level bill: records' coins amplify, silos' never do, each silo pays for what it sent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.commands import arrays, lines, sordino
from tests.silos import SIZES, planned, silos
from tests.tiny import plan as client_plan

from sordino.config import load_config
from sordino.errors import BudgetError, ConfigError, PlanError
from sordino.execute import execute
from sordino.explain import ceilings
from sordino.folder import RunFolder
from sordino.parts.records import AllRecords, FixedRecords, OnePass, PoissonRecords, RecordSampler
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin, Sampler
from sordino.parts.silo import BatchGradient, NoisyLocalSgd
from sordino.plan import Plan
from sordino.privacy import accounting
from sordino.privacy.bill import ADVERSARIES, Bill, Participation
from sordino.privacy.budget import Budget, client_filter
from sordino.privacy.certificate import Facts, certificate, headline, participation
from sordino.privacy.events import (
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Shuffled,
    Unprotected,
)
from sordino.privacy.mechanisms import Gaussian, Laplace
from sordino.privacy.release import CentralNoise, Forward, LocalNoise, NoiseShares, NoNoise, Release, ShuffledNoise
from sordino.recipes import noisy_local_sgd, noisy_minibatch_sgd, silo
from sordino.recipes.silo import budgets
from sordino.training import calibrated, calibrated_silos, counted, train

ROUNDS, N = 6, 30
Z = GaussianNoise(2.0)
EVERYONE, FIXED, POISSON = Everyone(4), FixedSize(4, 2), Poisson(4, 0.5)
LOCAL = LocalNoise(Gaussian(2.0))
SAMPLERS: list[tuple[RecordSampler, Relation, Event, int]] = [
    (AllRecords((N,)), "replace_one", Z, ROUNDS),
    (FixedRecords(3, (N,)), "replace_one", FixedSampled(N, 3, Z), ROUNDS),
    (PoissonRecords(3.0, (N,)), "add_remove", PoissonSampled(0.1, Z), ROUNDS),
    (OnePass(3, (N,)), "replace_one", Z, 1),
]


def made(
    reads: RecordSampler, release: Release = LOCAL, clients: Sampler = EVERYONE, rounds: int = ROUNDS, norm: Any = 2
) -> Plan:
    return planned(rounds=rounds, clients=clients, local=BatchGradient(reads, 1.0, norm), release=release)


def entries(bill: Bill, adversary: Any = "models", silo: int = 0) -> tuple[Event, int]:
    (entry,) = bill.line(adversary, silo).entries
    return entry


def cost(event: Event, count: int, relation: Relation = "replace_one", delta: float = 1e-5) -> float:
    return accounting.epsilon(((event, count),), relation, delta).value


# ---- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reads", "relation", "event", "count"), SAMPLERS, ids=lambda v: str(v))
def test_local_noise_is_billed_alike_to_everybody(
    reads: RecordSampler, relation: Relation, event: Event, count: int
) -> None:
    bill = made(reads).bill()
    assert bill.unit == "record"
    for who in ADVERSARIES:
        line = bill.line(who)
        assert (line.relation, line.entries, line.silos) == (relation, ((event, count),), ())


@pytest.mark.parametrize(("reads", "relation", "event", "count"), SAMPLERS, ids=lambda v: str(v))
def test_central_noise_protects_what_is_released_and_no_message(
    reads: RecordSampler, relation: Relation, event: Event, count: int
) -> None:
    bill = made(reads, CentralNoise(Gaussian(2.0))).bill()
    assert entries(bill, "models") == entries(bill, "cohort") == (event, count)
    assert entries(bill, "messages") == (Unprotected(), count)
    assert bill.line("models").relation == relation


def test_noise_shares_are_their_total_to_the_server_and_a_share_to_one_who_reads_messages() -> None:
    bill = made(FixedRecords(3, (N,)), NoiseShares(2.0, at_least=4)).bill()
    assert entries(bill, "cohort") == (FixedSampled(N, 3, Z), ROUNDS)
    assert entries(bill, "messages") == (FixedSampled(N, 3, GaussianNoise(1.0)), ROUNDS)


@pytest.mark.parametrize("release", [LOCAL, CentralNoise(Gaussian(2.0)), NoiseShares(2.0, 1)], ids=str)
@pytest.mark.parametrize("clients", [FIXED, POISSON, RoundRobin(4, 1)], ids=str)
def test_coins_that_choose_silos_never_amplify(clients: Sampler, release: Release) -> None:
    bill = made(FixedRecords(3, (N,)), release, clients).bill()
    event, count = entries(bill)
    assert event == FixedSampled(N, 3, Z)
    hidden = isinstance(release, CentralNoise) and clients.random
    assert count == (ROUNDS if hidden else clients.most(ROUNDS))


def test_no_noise_promises_nothing_whatever_the_coins() -> None:
    for reads, *_ in SAMPLERS:
        for line in made(reads, NoNoise()).bill().lines:
            assert isinstance(line.entries[0][0], Unprotected)


def test_noise_in_local_steps_is_billed_step_by_step() -> None:
    for reads, _, event, count in SAMPLERS:
        local = NoisyLocalSgd(reads, 1.0, 2.0, 0.1, steps=2 if reads.once else 5)
        bill = planned(rounds=ROUNDS if not reads.once else 5, clients=EVERYONE, local=local, release=Forward()).bill()
        assert entries(bill) == (event, count if reads.once else 5 * ROUNDS)


def test_laplace_needs_an_l1_clip_and_a_sampler_with_a_proof() -> None:
    laplace = LocalNoise(Laplace(2.0))
    assert entries(made(AllRecords((N,)), laplace, norm=1).bill()) == (LaplaceNoise(2.0), ROUNDS)
    assert entries(made(PoissonRecords(3.0, (N,)), laplace, norm=1).bill())[0] == PoissonSampled(0.1, LaplaceNoise(2.0))
    for reads, norm, rule in ((AllRecords((N,)), 2, "norm"), (FixedRecords(3, (N,)), 1, "accounting")):
        with pytest.raises(PlanError) as refused:
            made(reads, laplace, norm=norm)
        assert refused.value.rule == rule


# ---- shuffling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reads", [FixedRecords(2, (N,)), OnePass(5, (N,)), AllRecords((N,)), PoissonRecords(1.0, (N,))], ids=str
)
def test_shuffled_messages_of_several_records_are_refused(reads: RecordSampler) -> None:
    with pytest.raises(PlanError) as refused:
        made(reads, ShuffledNoise(Gaussian(2.0), 2))
    assert refused.value.rule == "shuffle"
    assert "docs/privacy.md#shuffle" in str(refused.value)


def test_shuffled_messages_of_one_record_are_amplified_by_the_crowd_alone() -> None:
    bill = made(FixedRecords(1, (N,)), ShuffledNoise(Gaussian(2.0), 3)).bill()
    assert entries(bill, "cohort") == (Shuffled(3, Z), ROUNDS)  # never by the record's own coin as well
    assert entries(bill, "messages") == (FixedSampled(N, 1, Z), ROUNDS)
    once = made(OnePass(1, (N,)), ShuffledNoise(Gaussian(2.0), 3)).bill()
    assert entries(once, "cohort") == (Shuffled(3, Z), 1)


# ---- one pass --------------------------------------------------------------------------------------------------------


def test_one_pass_is_one_release_and_one_more_for_every_round_that_ran_again() -> None:
    plan = made(OnePass(3, (N,)), rounds=10)
    for repeats in (0, 1, 3):
        bill = plan.bill(Participation(releases=10 + repeats, most=10 + repeats, repeats=repeats))
        assert entries(bill) == (Z, 1 + repeats)
    assert entries(plan.bill(Participation(releases=1, most=1, repeats=4)))[1] == 1


@pytest.mark.parametrize(("sizes", "rounds"), [((30,), 11), ((30, 40, 50, 29), 10)])
def test_more_rounds_than_disjoint_batches_are_refused(sizes: tuple[int, ...], rounds: int) -> None:
    with pytest.raises(PlanError) as refused:
        made(OnePass(3, sizes), rounds=rounds)
    assert refused.value.rule == "one pass"
    made(OnePass(3, sizes), rounds=rounds - 1)


def test_the_steps_of_a_local_solver_count_as_batches_of_the_pass() -> None:
    local = NoisyLocalSgd(OnePass(3, (N,)), 1.0, 2.0, 0.1, steps=5)
    planned(rounds=2, clients=EVERYONE, local=local, release=Forward())
    with pytest.raises(PlanError, match="15 disjoint batches where the smallest silo has 10"):
        planned(rounds=3, clients=EVERYONE, local=local, release=Forward())


# ---- each silo for itself --------------------------------------------------------------------------------------------


def test_silos_that_differ_have_a_line_each_and_the_worst_is_the_headline() -> None:
    bill = made(FixedRecords(3, (30, 60, 30, 90))).bill()
    assert [line.silos for line in bill.of("models")] == [(0, 2), (1,), (3,)]
    found = headline(bill.of("models"), 1e-5)
    assert found["epsilon"] == pytest.approx(cost(FixedSampled(30, 3, Z), ROUNDS), abs=2e-6)
    assert [entry["silos"] for entry in found["silos"]] == [[0, 2], [1], [3]]
    assert max(entry["epsilon"] for entry in found["silos"]) == found["epsilon"]


def test_every_silo_has_its_own_noise_and_its_own_delta() -> None:
    own = LocalNoise(Gaussian(1.0), (2.0, 4.0, 4.0, 8.0))
    bill = made(AllRecords((N,)), own).bill()
    assert [entries(bill, "messages", each)[0] for each in range(4)] == [GaussianNoise(z) for z in (2.0, 4.0, 4.0, 8.0)]
    deltas = (1e-3, 1e-5, 1e-6, 1e-4)
    found = headline(bill.of("models"), 1e-5, deltas)
    each = {tuple(entry["silos"]): entry for entry in found["silos"]}
    assert set(each) == {(0,), (1,), (2,), (3,)}
    for index, z in enumerate((2.0, 4.0, 4.0, 8.0)):
        exact = cost(GaussianNoise(z), ROUNDS, delta=deltas[index])
        assert each[(index,)]["delta"] == deltas[index]
        assert exact <= each[(index,)]["epsilon"] <= exact + 2e-6
    assert (found["epsilon"], found["delta"]) == (max(e["epsilon"] for e in each.values()), 1e-3)


def test_a_silo_without_a_guarantee_is_the_worst() -> None:
    bill = Bill("record", (*made(AllRecords((N,))).bill().lines, *made(AllRecords((N,)), NoNoise()).bill().lines))
    assert headline(bill.of("models"), 1e-5)["epsilon"] is None


def test_a_silo_is_billed_for_the_rounds_it_was_in() -> None:
    plan = made(AllRecords((N,)), clients=FIXED)
    cohorts = [np.array(pair) for pair in ([0, 1], [0, 2], [0, 1], [0, 2], [0, 1], [0, 1])]
    facts = counted(plan, list(range(ROUNDS)), cohorts, Facts(1e-5, "simulation", 0))
    assert facts.each == (6, 4, 2, 0)
    bill = plan.bill(participation(plan, facts))
    assert [entries(bill, "messages", each)[1] for each in range(4)] == [6, 4, 2, 0]
    made_of = certificate(plan, facts)
    assert made_of["counts"]["rounds_of_each_silo"] == [6, 4, 2, 0]
    assert [entry["epsilon"] for entry in made_of["adversaries"][0]["silos"]][-1] == 0.0
    assert set(ceilings(plan, facts)) == set(ADVERSARIES)


def test_a_run_that_was_cut_is_billed_as_planned_for_every_silo() -> None:
    plan = made(FixedRecords(3, (N,)), clients=FIXED)
    facts = counted(plan, [0], [np.array([0, 1])], Facts(1e-5, "simulation", 0))
    bill = plan.bill(participation(plan, facts))
    assert [entries(bill, "messages", each)[1] for each in range(4)] == [FIXED.most(ROUNDS)] * 4
    whole = made(FixedRecords(3, (N,)))
    cut = counted(whole, [0, 1], [], Facts(1e-5, "simulation", 0))
    assert entries(whole.bill(participation(whole, cut)))[1] == ROUNDS


@pytest.mark.parametrize("again", [0, 1, 5])
def test_a_public_cohort_that_ran_again_pays_though_the_run_was_cut(again: int) -> None:
    """Ten rounds planned, each client in two; round 1 ran again `again` times and the run stopped after it."""
    turns = client_plan(rounds=10, clients=RoundRobin(10, 2))
    facts = counted(turns, [0] * (1 + again), [], Facts(1e-5, "simulation", 0))
    assert participation(turns, facts).most == 2 + again


def test_a_hidden_cohort_is_never_counted() -> None:
    plan = made(FixedRecords(3, (N,)), CentralNoise(Gaussian(2.0)), FIXED)
    facts = counted(plan, list(range(ROUNDS)), [], Facts(1e-5, "simulation", 0))
    assert (facts.most, facts.each) == (None, ())
    assert "rounds_of_each_silo" not in certificate(plan, facts)["counts"]


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["all", "fixed", "one_pass"])
def test_every_silo_spends_its_own_budget_and_hardly_less(sampling: Any) -> None:
    base = noisy_minibatch_sgd(
        rounds=5,
        clients=Everyone(3),
        sizes=(30, 60, 60),
        batch=5,
        radius=1.0,
        multiplier=1.0,
        lr=0.1,
        sampling=sampling,
    )
    asked = [Budget(1.0, 1e-4), Budget(2.0, 1e-5), Budget(1.0, 1e-5)]
    bill = calibrated_silos(base, asked).bill()
    for index, budget in enumerate(asked):
        event, count = entries(bill, "messages", index)
        assert 0.99 * budget.epsilon <= cost(event, count, delta=budget.delta) <= budget.epsilon


def test_local_sgd_and_the_silo_recipe_meet_their_budgets_too() -> None:
    local = noisy_local_sgd(
        rounds=3, clients=Everyone(2), sizes=(30, 60), batch=3, radius=1.0, multiplier=1.0, lr=0.1, steps=2
    )
    ready = silo(sizes=(30, 60), epsilons=(1.0, 3.0), rounds=4)
    for plan, asked in (
        (calibrated_silos(local, budgets((30, 60), (1.0, 3.0))), (1.0, 3.0)),
        (ready, (1.0, 3.0)),
    ):
        for index, (size, epsilon) in enumerate(zip((30, 60), asked, strict=True)):
            spent = cost(*entries(plan.bill(), "messages", index), delta=size**-1.1)
            assert 0.99 * epsilon <= spent <= epsilon


def test_one_multiplier_for_all_is_solved_for_the_silo_that_pays_most() -> None:
    plan = calibrated(made(FixedRecords(3, (90, 30, 60, 60))), epsilon=1.0, delta=1e-5)
    assert 0.99 <= headline(plan.bill().of("models"), 1e-5)["epsilon"] <= 1.0


def test_rounds_are_solved_for_the_silo_that_pays_most() -> None:
    own = LocalNoise(Gaussian(1.0), (9.0, 60.0, 30.0, 45.0))
    plan = calibrated(made(AllRecords((90, 30, 60, 60)), own), epsilon=2.0, delta=1e-5, free="rounds")
    assert headline(plan.bill().of("models"), 1e-5)["epsilon"] <= 2.0
    clients = client_plan(clients=Everyone(3), release=LocalNoise(Gaussian(1.0), (60.0, 9.0, 30.0)))
    found = calibrated(clients, epsilon=2.0, delta=1e-5, free="rounds")
    assert headline(found.bill().of("models"), 1e-5)["epsilon"] <= 2.0


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_of_nothing_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigError, match="epsilon above 0"):
        silo(sizes=(30, 60), epsilons=(1.0, epsilon))


def test_budgets_that_do_not_fit_the_silos_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 epsilons for 3 silos"):
        silo(sizes=(30, 60, 90), epsilons=(1.0, 2.0))
    with pytest.raises(ConfigError, match="2 deltas for 3 silos"):
        silo(sizes=(30, 60, 90), epsilons=(1.0,), deltas=(1e-5, 1e-5))
    with pytest.raises(PlanError, match="2 budgets for 4 silos"):
        calibrated_silos(made(AllRecords((N,))), [Budget(1.0, 1e-5)] * 2)


def test_multipliers_of_the_silos_own_are_refused_where_somebody_else_adds_the_noise() -> None:
    usual: Any = {"rounds": 2, "clients": Everyone(2), "sizes": (30,), "batch": 3, "radius": 1.0, "lr": 0.1}
    for trust in ("server", "secure_sum", "shuffler"):
        with pytest.raises(PlanError) as refused:
            noisy_minibatch_sgd(**usual, multiplier=1.0, multipliers=(1.0, 2.0), trust=trust)
        assert refused.value.rule == "local noise"


def test_delta_is_small_against_the_records_of_a_silo() -> None:
    plan, task = planned(local=BatchGradient(AllRecords(SIZES), 1.0)), silos()
    assert plan.units == max(SIZES)
    found = train(plan, task).certificate["adversaries"][-1]
    assert {entry["delta"] for entry in found["silos"]} == {size**-1.1 for size in SIZES}
    assert found["delta"] == min(SIZES) ** -1.1
    assert train(plan, task, delta=1e-3).certificate["delta"] == 1e-3
    with pytest.raises(ConfigError, match=r"population\^-1.1"):
        train(plan, task, delta=0.5)


# ---- in a folder -----------------------------------------------------------------------------------------------------

SILOS = """
[task]
dataset = "npz"
options = {{ path = "{data}" }}
partition = {{ kind = "iid", clients = 4 }}

[recipe]
name = "noisy_minibatch_sgd"
rounds = 4
clients = {clients}
sizes = [60]
batch = 6
radius = 1.0
multiplier = 8.0
lr = 0.5
sampling = "{sampling}"

[privacy]
{privacy}

[run]
seed = 5
"""
ALL, SOME = '{ kind = "everyone", population = 4 }', '{ kind = "fixed", population = 4, cohort = 2 }'


def written(folder: Path, clients: str = ALL, sampling: str = "fixed", privacy: str = "") -> Path:
    np.savez(folder / "data.npz", **arrays())
    file = folder / "fed.toml"
    file.write_text(SILOS.format(data=folder / "data.npz", clients=clients, sampling=sampling, privacy=privacy))
    return file


def own_budgets(*epsilons: float, delta: float = 1e-3) -> str:
    return f"silos = [{', '.join(f'{{ epsilon = {e}, delta = {delta} }}' for e in epsilons)}]"


def killed_in(round_: int, file: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until the checkpoint of a round would be written: it was charged, and its release may have been seen."""
    save = RunFolder.save

    def dies(folder: RunFolder, state: Any) -> None:
        if state.t == round_:
            raise KeyboardInterrupt
        save(folder, state)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            execute(load_config(file), out)


def test_a_pass_that_ran_a_round_again_after_a_kill_is_billed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = written(tmp_path, sampling="one_pass"), tmp_path / "a"
    killed_in(2, file, out, monkeypatch)
    found = execute(load_config(file), out, resume=True).certificate
    assert [line["round"] for line in lines(out / "charges.jsonl")] == [1, 2, 2, 3, 4]
    assert found["counts"]["rounds_charged_again"] == 1
    assert found["adversaries"][0]["events"][0]["count"] == 2
    exact = cost(GaussianNoise(8.0), 2, delta=60**-1.1)
    assert exact <= found["epsilon"] <= exact + 2e-6
    assert RunFolder.open(out).certify() == found


def test_a_budget_worth_one_pass_refuses_the_round_that_would_read_a_block_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = cost(GaussianNoise(8.0), 1, delta=1e-3) * 1.05
    file = written(tmp_path, sampling="one_pass", privacy=own_budgets(9.0, once, 9.0, 9.0))
    whole = execute(load_config(file), tmp_path / "whole").certificate
    assert whole["counts"]["rounds_charged"] == 4  # uninterrupted, one release per record is all it costs
    killed_in(2, file, tmp_path / "a", monkeypatch)
    with pytest.raises(BudgetError, match="first client 1"):
        execute(load_config(file), tmp_path / "a", resume=True)
    assert [line["round"] for line in lines(tmp_path / "a" / "charges.jsonl")] == [1, 2]


def test_lines_repeated_in_the_charges_are_noticed_and_billed(tmp_path: Path) -> None:
    file, out = written(tmp_path, sampling="one_pass"), tmp_path / "a"
    single = execute(load_config(file), out).certificate
    charges = out / "charges.jsonl"
    charges.write_text(charges.read_text() + charges.read_text().splitlines()[0] + "\n")
    assert RunFolder.open(out).certificate()["epsilon"] > single["epsilon"]
    assert sordino("certify", out).code == 1


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which half of the silos came to each round."""
    folder = tmp_path_factory.mktemp("some")
    execute(load_config(written(folder, SOME)), folder / "run")
    return folder / "run"


def test_a_run_of_silos_is_certified_and_explained_silo_by_silo(some: Path) -> None:
    found = sordino("certify", some, "--json").json
    counts = [line["cohort"] for line in lines(some / "charges.jsonl")]
    each = [sum(index in cohort for cohort in counts) for index in range(4)]
    assert found["counts"]["rounds_of_each_silo"] == each
    assert found["unit"] == "record"
    said = sordino("explain", some, "--json").json
    assert "single record of a silo" in said["protected"]
    assert len(said["silos"]) == len(set(each))
    assert "Each silo's own guarantee" in sordino("explain", some).out


@pytest.mark.parametrize("place", [0, 3])
def test_a_silos_rounds_that_were_touched_are_noticed(some: Path, tmp_path: Path, place: int) -> None:
    copy = Path(shutil.copytree(some, tmp_path / "copy"))
    file = copy / "certificate.json"
    table = json.loads(file.read_text())
    table["counts"]["rounds_of_each_silo"][place] -= 1
    file.write_text(json.dumps(table, indent=2) + "\n")
    for command in ("certify", "explain"):
        said = sordino(command, copy)
        assert said.code == 1
        assert f"counts.rounds_of_each_silo[{place}]" in said.err


def test_a_charge_that_hides_a_silo_is_noticed(some: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(some, tmp_path / "copy"))
    kept = [{**line, "cohort": line["cohort"][1:]} for line in lines(copy / "charges.jsonl")]
    (copy / "charges.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert sordino("certify", copy).code == 1


def test_a_silos_budget_stops_the_round_that_would_overspend_it(tmp_path: Path) -> None:
    two = cost(FixedSampled(60, 6, GaussianNoise(8.0)), 2, delta=1e-3) * 1.02
    file = written(tmp_path, privacy=own_budgets(9.0, 9.0, two, 9.0))
    config = load_config(file)
    assert config.budget is not None
    assert config.budget.allowed[2] == 2 < config.budget.allowed[0]
    said = sordino("run", file, "--out", tmp_path / "a")
    assert said.code == 1
    assert "first client 2" in said.err
    assert len(lines(tmp_path / "a" / "charges.jsonl")) == 2
    assert sordino("certify", tmp_path / "a").code == 0


def test_a_budget_of_local_steps_is_worth_whole_rounds() -> None:
    local = NoisyLocalSgd(AllRecords((N,)), 1.0, 8.0, 0.1, steps=3)
    plan = planned(rounds=9, clients=EVERYONE, local=local, release=Forward())
    for releases, rounds in ((2, 0), (3, 1), (8, 2)):
        spent = cost(GaussianNoise(8.0), releases) * 1.001
        assert client_filter(plan, Budget(spent, 1e-5)).allowed.tolist() == [rounds] * 4


def test_the_forecast_of_silos_with_their_own_deltas_is_their_certificate(tmp_path: Path) -> None:
    file = written(tmp_path, privacy=own_budgets(9.0, 9.0, 9.0, 9.0, delta=1e-4))
    forecast = sordino("plan", file, "--json").json
    found = execute(load_config(file), tmp_path / "a").certificate
    assert (forecast["epsilon"], forecast["delta"]) == (found["epsilon"], found["delta"])
    assert forecast["delta"] == 1e-4
    assert forecast["adversaries"] == found["adversaries"]


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (own_budgets(9.0, 0.0, 9.0, 9.0), "epsilon above 0"),
        (own_budgets(9.0, -2.0, 9.0, 9.0), "epsilon above 0"),
        (own_budgets(9.0, 9.0), "2 deltas for 4 silos"),
        (own_budgets(9.0, 9.0, 9.0, 9.0, delta=0.4), "at most population^-1.1"),
    ],
)
def test_a_budget_that_means_nothing_is_the_users_mistake(tmp_path: Path, privacy: str, said: str) -> None:
    assert said in sordino("run", written(tmp_path, privacy=privacy), "--out", tmp_path / "a").sentence
    assert not (tmp_path / "a").exists()


def test_an_epsilon_of_nothing_in_the_silo_recipe_is_exit_code_two(tmp_path: Path) -> None:
    file = tmp_path / "fed.toml"
    file.write_text('[recipe]\nname = "silo"\nsizes = [30, 60]\nepsilons = [1.0, 0.0]\n')
    assert "epsilon above 0" in sordino("plan", file).sentence
    file.write_text('[recipe]\nname = "silo"\nsizes = [30, 60, 90]\nepsilons = [1.0, 2.0]\n')
    assert "2 epsilons for 3 silos" in sordino("plan", file).sentence


def test_sizes_that_are_not_the_silos_are_the_users_mistake(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace("sizes = [60]", "sizes = [60, 60, 60, 59]"))
    assert "silo 3 with 60 records" in sordino("run", file, "--out", tmp_path / "a").sentence


def test_a_delta_of_a_small_silo_is_measured_by_its_own_size() -> None:
    """size^-1.1 of each silo, as the silo recipe takes it, passes though one silo is larger."""
    from sordino.config import Config, PrivacySpec

    plan = silo(sizes=(20, 400), epsilons=(2.0,), rounds=3)
    own = tuple(budgets((20, 400), (2.0,)))
    config = Config(plan=plan, privacy=PrivacySpec(silos=own))
    assert config.deltas == (20**-1.1, 400**-1.1)
    assert config.budget is not None
    assert config.budget.allowed.min() >= 3  # and the run it was calibrated for is not stopped
    with pytest.raises(ConfigError):
        Config(plan=plan, privacy=PrivacySpec(silos=own[::-1]))
