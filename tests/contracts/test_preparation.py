"""Promise: what is read off private columns before the first round is noised, charged first, kept, and on every cost.

Each test of a guarantee has its sabotage beside it: the wrong version is caught.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.faults import Killed, dying
from torch import Tensor

import sordino as so
from sordino.accounting import accountant
from sordino.accounting.calibration import Budget, calibrate
from sordino.accounting.events import LaplaceNoise, Relation, Unprotected, sensitivity
from sordino.audit.attacks import audit_preparation
from sordino.audit.training_attacks import audit_membership
from sordino.config import Config, load_config, parse
from sordino.data.clients import Records
from sordino.engines import checks
from sordino.engines.distributed import Distributed
from sordino.errors import CertificateError, ConfigError, DataError, EngineError
from sordino.ledger.budget import client_filter
from sordino.outcome import load_weights
from sordino.parts.mechanisms import Histogram, Preparation, Values
from sordino.plan import Plan, State
from sordino.rng import Seeded, Streams
from sordino.runs import writer
from sordino.runs.execution import execute
from sordino.runs.folder import RunFolder
from sordino.task import Task
from sordino.tuning.search_space import Sweep
from sordino.tuning.sweep import sweep

SITES = {"A": 300, "B": 200}
HISTOGRAM = {"epsilon": 0.5, "within": [0, 1000], "bins": 32}
COLUMNS = {
    "amount": {"quantiles": [0.05, 0.95], "missing": "median", "histogram": HISTOGRAM},
    "flag": {"range": [0, 1]},
}


def _rows(count: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    amount = np.clip(rng.normal(300, 60, count), 0, 1000)
    label = (amount > 300).astype(int)
    return [
        ["" if i % 50 == 7 else f"{a:.3f}", str(i % 2), str(y)]
        for i, (a, y) in enumerate(zip(amount, label, strict=True))
    ]


def _table(folder: Path, **recipe: Any) -> dict[str, Any]:
    for k, (name, count) in enumerate(SITES.items()):
        (folder / "sites").mkdir(exist_ok=True)
        with (folder / "sites" / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["amount", "flag", "late"], *_rows(count, k)])
    options = {"files": str(folder / "sites" / "*.csv"), "target": "late", "classes": 2, "columns": COLUMNS}
    made = recipe or {"name": "silo", "sizes": SITES, "epsilons": {"A": 2.0, "B": 4.0}, "rounds": 3, "lr": 4.0}
    return {"task": {"dataset": "csv", "options": options}, "recipe": made, "privacy": {"noise": "simulation"}}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _table(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def config(table: dict[str, Any]) -> Config:
    return parse(table)


BEST = {"name": "best", "population": 2, "epsilon": 4.0, "rounds": 5, "rate": 0.5}
NOISE = {"kind": "local_noise", "mechanism": {"kind": "gaussian", "noise_multiplier": 9.0}}
EVERYONE = {"kind": "everyone", "population": 2}
LOCAL = {"name": "dp_fed_avg", "rounds": 3, "lr": 0.1, "clip_norm": 1.0, "epochs": 1} | {
    "clients": EVERYONE,
    "release": NOISE,
}


# ---- the mechanism ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    first=st.lists(st.floats(-1, 2), max_size=6),
    second=st.lists(st.floats(-1, 2), max_size=6),
    grid=st.sampled_from(["even", "log"]),
)
def test_one_unit_moves_a_histogram_by_no_more_than_is_billed(
    first: list[float], second: list[float], grid: Any
) -> None:
    """A client's whole column moves it by 1 from nothing and by 2 from anything; so does one record of a silo."""
    part = Histogram("a", 1.0, 0.0, 1.0, 16, grid)
    messages = [part.message(np.array(values, dtype=np.float64), "client") for values in (first, second)]
    assert all(np.abs(message).sum() <= 1 + 1e-12 for message in messages)
    assert np.abs(messages[0] - messages[1]).sum() <= sensitivity("replace_one") + 1e-12
    if first and second:
        others = np.array([0.2, 0.7])
        swapped = [part.message(np.append(others, values[0]), "record") for values in (first, second)]
        assert np.abs(swapped[0] - swapped[1]).sum() <= sensitivity("replace_one")
        assert np.abs(swapped[0] - part.message(others, "record")).sum() <= sensitivity("add_remove")


def test_without_noise_the_histogram_tells_numpys_quantiles() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 20_000) / 50
    for grid, slack in (("even", 2 / 256), ("log", 0.02)):
        part = Histogram("a", 1.0, 0.0, 1.0, 256, grid)  # type: ignore[arg-type]
        total = part.message(values, "record")
        for level in (0.05, 0.5, 0.95):
            assert part.quantile(total, level) == pytest.approx(np.quantile(np.clip(values, 0, 1), level), abs=slack)
        assert part.mean(total) == pytest.approx(np.clip(values, 0, 1).mean(), abs=slack)


@settings(max_examples=60, deadline=None)
@given(total=st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=8), low=st.floats(0, 0.5), high=st.floats(0.5, 1))
def test_whatever_the_noise_does_there_is_a_range_to_scale_by(total: list[float], low: float, high: float) -> None:
    part, found = Histogram("a", 0.01, 0.0, 1.0, 8), np.array(total)
    first, last = part.span(found, (low, high))
    assert 0 <= first < last <= 1
    assert 0 <= part.mean(found) <= 1
    assert 0 <= part.quantile(found, 0.5) <= 1


def _like(part: Preparation, epsilon: float, bins: int) -> Histogram:
    assert isinstance(part, Histogram)
    return replace(part, epsilon=epsilon, bins=bins)


def _less_noise(plan: Plan, part: Preparation, held: Iterable[Values], streams: Streams) -> Tensor:
    total = sum(part.message(shares, plan.unit) for shares in held)
    return torch.from_numpy(total + part.noise("add_remove").sample(np.size(total), streams.at(0, "x")) * 0.4)


def _not_divided(plan: Plan, part: Preparation, held: Iterable[Values], streams: Streams) -> Tensor:
    """A client's three values count three times."""
    thrice = (np.repeat(shares, 3) for shares in held)
    total = sum(part.message(shares, "record") for shares in thrice)
    return torch.from_numpy(
        total + part.noise(plan.forecast.lines[0].relation).sample(np.size(total), streams.at(0, "x"))
    )


@pytest.mark.parametrize("recipe", [{}, BEST])
def test_an_attack_on_a_column_stays_below_the_bill_and_comes_near(tmp_path: Path, recipe: dict[str, Any]) -> None:
    plan = parse(_table(tmp_path, **recipe)).plan
    (part,) = plan.prepare
    sharp = replace(plan, prepare=(_like(part, 1.5, 4),))
    found = audit_preparation(sharp, sharp.prepare[0], 1e-5, trials=60_000)
    assert 0.85 * 1.5 < found.lower_epsilon <= found.upper_epsilon <= 1.5
    assert found.lower_mu <= found.upper_mu


@pytest.mark.parametrize(("recipe", "broken"), [({}, _less_noise), (BEST, _less_noise), (BEST, _not_divided)])
def test_an_attack_finds_too_little_noise_and_a_client_that_counts_thrice(
    tmp_path: Path, recipe: dict[str, Any], broken: Callable[..., Tensor]
) -> None:
    plan = parse(_table(tmp_path, **recipe)).plan
    part = _like(plan.prepare[0], 1.0, 4)
    found = audit_preparation(replace(plan, prepare=(part,)), part, 1e-5, trials=60_000, release=broken)
    assert found.lower_epsilon > 1.2 * found.upper_epsilon


# ---- the cost --------------------------------------------------------------------------------------------------------


def test_every_line_of_the_bill_has_the_columns_once(config: Config) -> None:
    plan, bare = config.plan, replace(config.plan, prepare=())
    event = LaplaceNoise(2 / 0.5)  # replace one: a record moves two bins
    for line, alone in zip(plan.forecast.lines, bare.forecast.lines, strict=True):
        assert line.entries == (*alone.entries, (event, 1))
    assert event.pure("replace_one") == 0.5


def test_a_recipe_that_is_given_an_epsilon_pays_for_columns_out_of_it(table: dict[str, Any], tmp_path: Path) -> None:
    for made, targets in ((parse(table), (2.0, 4.0)), (parse(_table(tmp_path, **BEST)), (4.0,))):
        plan, bare = made.plan, replace(made.plan, prepare=())
        for k, target in enumerate(targets):
            line, alone = plan.forecast.line("models", k), bare.forecast.line("models", k)
            delta = made.deltas[k] if made.deltas else made.delta
            spent = accountant.bound(line.entries, line.relation, delta).value
            assert target * 0.99 <= spent <= target
            assert accountant.bound(alone.entries, alone.relation, delta).value < 0.97 * target


def test_calibration_counts_columns(config: Config) -> None:
    found = calibrate(config.plan, epsilon=3.0, delta=1e-4)
    line = found.forecast.line("models", 1)
    assert accountant.bound(line.entries, line.relation, 1e-4).value <= 3.0
    assert found.prepare == config.plan.prepare


def test_who_noises_decides_who_is_promised_something(tmp_path: Path) -> None:
    """A curator sees the clean histograms of clients; where everybody noises its messages, everybody noises these."""
    central, local = (parse(_table(tmp_path, **recipe)) for recipe in (BEST, LOCAL))
    assert (Unprotected(), 1) in central.plan.forecast.line("messages").entries
    assert (LaplaceNoise(2.0), 1) in central.plan.forecast.line("models").entries  # add or remove: moves by 1
    for line in local.plan.forecast.lines:
        assert (LaplaceNoise(4.0), 1) in line.entries
    said = [so.train(made.plan, made.build()).certificate["prepared"][0]["noised_by"] for made in (central, local)]
    assert said == ["whoever sums the messages", "each client, or silo, on its own"]


def test_budgets_of_clients_count_columns(tmp_path: Path) -> None:
    """With a budget that pays for the rounds alone, the last of them is refused."""
    made = parse(_table(tmp_path, **LOCAL))
    bare = replace(made.plan, prepare=())
    line = bare.forecast.line("cohort")
    budget = accountant.bound(line.entries, line.relation, 1e-3).value * 1.01
    with_columns, without = (client_filter(plan, Budget(budget, 1e-3)) for plan in (made.plan, bare))
    assert int(without.allowed[0]) == 3
    assert int(with_columns.allowed[0]) < 3


# ---- a run -----------------------------------------------------------------------------------------------------------


def _charged(out: Path) -> list[int]:
    return [json.loads(line)["round"] for line in (out / "charges.jsonl").read_text().splitlines()]


def test_a_run_is_charged_for_columns_before_it_draws_and_scales_by_what_it_released(
    config: Config, tmp_path: Path
) -> None:
    done = execute(config, tmp_path / "run")
    assert _charged(tmp_path / "run") == [0, 1, 2, 3]
    assert RunFolder.open(tmp_path / "run").certify() == done.certificate
    said = json.loads((tmp_path / "run" / "prepared.json").read_text())["amount"]
    assert 150 < said["range"][0] < said["missing"] < said["range"][1] < 600
    entries = done.certificate["adversaries"][0]["silos"][0]["events"]
    assert {"count": 1, "event": {"kind": "laplace", "noise_multiplier": 4.0}} in entries
    assert done.certificate["prepared"][0]["release"]["column"] == "amount"


def test_the_rounds_see_columns_scaled_and_imputed_by_the_release_alone(config: Config) -> None:
    task = config.build()
    state = State.initial(config.plan, task.layout.flatten(task.model))
    charged: list[int] = []
    ready, after = checks.prepare_columns(config.plan, task, Seeded(0), lambda t, _: charged.append(t), state)
    assert charged == [checks.BEFORE]
    (waiting,) = task.waiting
    low, high, _ = waiting._estimate(checks.released_histograms(after)["amount"])
    shares, x = task.clients.records.x[:, 0].double(), ready.clients.records.x[:, 0].double()
    there = shares >= 0
    assert torch.allclose(x[there], (2 * (shares[there] - low) / (high - low) - 1).clamp(-1, 1), atol=1e-5)
    assert len(set(x[~there].tolist())) == 1
    again, same = checks.prepare_columns(config.plan, task, Seeded(1), lambda t, _: charged.append(t), after)
    assert charged == [checks.BEFORE]  # what is remembered is neither drawn nor charged again
    assert torch.equal(again.clients.records.x, ready.clients.records.x)
    assert same is after


def test_a_release_that_nobody_is_billed_for_cannot_run(config: Config) -> None:
    """The sabotage: the same task, and a plan without its columns; and the other way round."""
    task, bare = config.build(), replace(config.plan, prepare=())
    with pytest.raises(DataError, match="column 'amount', whose histogram the plan does not charge"):
        so.train(bare, task)
    with pytest.raises(ConfigError, match="columns that need 1 histograms, and a plan that releases 0 others"):
        replace(config, plan=bare)
    cheap = replace(config.plan, prepare=(_like(config.plan.prepare[0], 0.01, 32),))
    with pytest.raises(DataError, match="in another form"):
        so.train(cheap, task)
    with pytest.raises(DataError, match="does not need"):
        so.train(config.plan, replace(task, waiting=()))


def test_a_charge_of_columns_that_was_dropped_or_added_breaks_the_chain(config: Config, tmp_path: Path) -> None:
    execute(config, tmp_path / "run")
    file = tmp_path / "run" / "charges.jsonl"
    first, *others = file.read_bytes().splitlines(keepends=True)
    for spoilt in (others, [first, first, *others], [*others, first]):
        file.write_bytes(b"".join(spoilt))
        with pytest.raises(CertificateError):
            RunFolder.open(tmp_path / "run").certify()
    file.write_bytes(b"".join([first, *others]))
    (tmp_path / "run" / "prepared.json").write_text("{}\n")
    with pytest.raises(CertificateError, match="prepared_sha256"):
        RunFolder.open(tmp_path / "run").certify()


def test_a_run_that_is_killed_anywhere_around_its_columns_goes_on_and_bills_what_it_charged(
    config: Config, tmp_path: Path
) -> None:
    whole = execute(config, tmp_path / "whole")
    times = set()
    for at in range(20, 75, 3):
        out = tmp_path / f"{at}"
        with pytest.raises(Killed), dying(at, "after"):
            execute(config, out)
        done = execute(config, out, resume=True)
        again = _charged(out).count(0)
        times.add(again)
        (entry,) = [
            e for e in done.certificate["adversaries"][0]["silos"][0]["events"] if e["event"]["kind"] == "laplace"
        ]
        assert entry["count"] == again
        assert RunFolder.open(out).certify() == done.certificate
        assert (out / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()
    assert times == {1, 2}  # kept once it is saved; drawn, and paid for, again where the kill came before that


def test_a_budget_does_not_pay_for_columns_twice(table: dict[str, Any], tmp_path: Path) -> None:
    budgets = {"privacy": {"silos": {"A": {"epsilon": 2.0}, "B": {"epsilon": 4.0}}}}
    recipe = {key: value for key, value in table["recipe"].items() if key != "epsilons"}
    made = parse({**table, "recipe": recipe, **budgets})

    def dies(*_: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.RunWriter, "save", dies)
        with pytest.raises(Killed):
            execute(made, tmp_path / "run")
    with pytest.raises(ConfigError, match="histograms that were charged and then lost by a kill"):
        execute(made, tmp_path / "run", resume=True)


def test_noise_for_release_is_drawn_anew_and_on_the_public_grid(table: dict[str, Any], tmp_path: Path) -> None:
    made = parse({**table, "privacy": {"noise": "secure"}})
    found = []
    for name in ("a", "b"):
        execute(made, tmp_path / name)
        found.append(json.loads((tmp_path / name / "prepared.json").read_text())["amount"]["noised_histogram"])
    assert found[0] != found[1]
    grid = 2.0 ** (math.floor(math.log2(math.sqrt(2) * 4.0)) - 20)
    assert all(value / grid == round(value / grid) for value in found[0])


def test_several_processes_and_records_elsewhere_are_refused(config: Config) -> None:
    with pytest.raises(EngineError, match="'histogram' on an engine without preparation"):
        so.train(config.plan, config.build(), engine=Distributed())


def test_a_written_plan_has_its_columns_and_reads_back_the_same(config: Config, tmp_path: Path) -> None:
    from sordino import codec

    (tmp_path / "plan.toml").write_text(codec.to_toml(config))
    assert load_config(tmp_path / "plan.toml") == config


def test_a_ledger_is_charged_for_columns(table: dict[str, Any]) -> None:
    from sordino.runs.admission import ledger_request, planned_facts

    config = parse(table)
    asked = ledger_request(config, planned_facts(config))
    assert {item.silo for item in asked.items if isinstance(item.event, LaplaceNoise)} == {"A", "B"}
    again = ledger_request(config, planned_facts(config, prepared=2))
    assert [item.count for item in again.items if isinstance(item.event, LaplaceNoise)] == [2, 2]


def test_the_relation_of_the_noise_is_that_of_the_bill(config: Config) -> None:
    relations: list[Relation] = [line.relation for line in config.plan.forecast.lines]
    assert set(relations) == {"replace_one"}
    task: Task = config.build()
    assert {waiting.release for waiting in task.waiting} == set(config.plan.prepare)


def test_the_statement_counts_columns_among_the_releases(config: Config) -> None:
    made = so.train(config.plan, config.build()).certificate
    assert made["statement"]["releases"].startswith("this certificate covers 4: ")  # three rounds and a column
    assert made["statement"]["releases"].endswith("and 1 of columns before the first")


def test_a_sweep_reports_its_winner_on_rows_prepared_as_the_winners_were(tmp_path: Path) -> None:
    table = _table(tmp_path)
    with (tmp_path / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["amount", "flag", "late"], *_rows(200, 9)])
    table["task"]["options"]["test"] = str(tmp_path / "test.csv")
    asked = Sweep.of({**table, "sweep": {"grid": {"recipe.lr": [4.0]}}})
    told = sweep(asked, tmp_path / "a", workers=1, resume=False, own=[], progress=lambda *_: None)
    (folder,) = (tmp_path / "a" / "runs").iterdir()
    kept = json.loads((folder / "prepared.json").read_text())
    totals = {name: np.asarray(one["noised_histogram"]) for name, one in kept.items()}
    task = checks.scaled(asked.config({"recipe.lr": 4.0}, validation=False).build(), totals)
    load_weights(task.model, load_file(folder / "model.safetensors"))
    assert told["reported"]["accuracy"] == task.evaluate(task.layout.flatten(task.model))["accuracy"] > 0.6


def test_an_audit_of_a_result_attacks_rows_as_the_rounds_saw_them(config: Config, tmp_path: Path) -> None:
    """As they were read they are shares of a range: a loss on those tells of another model than was trained."""
    rows = _rows(60, 9)
    values = np.array([[float(a or "nan"), float(f)] for a, f, _ in rows], dtype=np.float32)
    built, labels = config.build(), torch.tensor([int(y) for *_, y in rows])
    shares = torch.from_numpy(np.stack([np.nan_to_num(values[:, 0] / 1000, nan=-1.0), 2 * values[:, 1] - 1], 1))
    task = replace(built, test=Records(shares, labels))
    seen = []
    for out in (None, tmp_path / "run"):
        result = so.train(config.plan, task, out=out)
        (told,) = json.loads((result.save(tmp_path / f"kept {out is None}") / "prepared.json").read_text()).values()
        trained = checks.scaled(task, {"amount": np.asarray(told["noised_histogram"])})
        wanted = audit_membership(result.model, trained)
        seen.append((result.audit()["membership"]["auc"], wanted.auc))
    assert all(found == wanted for found, wanted in seen)
    assert result.audit("canaries")["canaries"]
