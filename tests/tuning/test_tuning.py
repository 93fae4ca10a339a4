"""Promises of `sordino tune`: candidates meet the budget, private records are never read, the rule comes first."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import sordino

from sordino.certificate.build import headline
from sordino.cli.tune_output import own_budgets
from sordino.config import Config, TaskSpec, load_config
from sordino.data.clients import Clients, Records
from sordino.data.records import Iid
from sordino.errors import DataError, PlanError
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.samplers import Everyone
from sordino.parts.schedules import Linear
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.recipes import client_side_fed_avg, dp_fed_avg, noisy_minibatch_sgd, silo
from sordino.task import Task
from sordino.tuning import tune
from sordino.tuning.tune import (
    CoordinateSearch,
    Hyperparameters,
    first_guess,
    hyperparameters,
    tuning_task,
    with_hyperparameters,
)

FILE = """
[task]
dataset = "digits"
partition = { kind = "iid", clients = 20 }
[recipe]
name = "client_side_fed_avg"
rounds = 4
population = 20
cohort = 20
lr = 0.3
steps = 2
clip_norm = 1.0
mechanism = { kind = "gaussian", noise_multiplier = 1.0 }
"""


def digits(clients: int = 20) -> Task:
    return TaskSpec(dataset="digits", partition=Iid(clients)).build(clients, seed=0)


def client_side(**changes: object) -> Plan:
    settings = {"rounds": 4, "population": 20, "cohort": 20, "lr": 0.3, "steps": 2, "clip_norm": 1.0}
    return client_side_fed_avg(**{**settings, "mechanism": Gaussian(1.0), **changes})  # type: ignore[arg-type]


def test_the_proposal_meets_the_budget_and_says_what_the_search_cost() -> None:
    found = tune(client_side(), digits(), epsilon=50.0, delta=0.01, seeds=1)
    spent = headline(found.plan.cost().of("models"), 0.01)["epsilon"]
    assert 0.9 * 50 < spent <= 50
    assert found.cost.startswith("nothing")
    assert set(found.curves) == {"lr_factor", "steps", "rounds"}
    assert all(math.isfinite(row["loss"]) for rows in found.curves.values() for row in rows)
    assert hyperparameters(found.plan).rounds == found.chosen.rounds
    assert hyperparameters(found.plan).steps == found.chosen.steps


def test_the_chosen_candidate_is_the_best_of_what_was_tried() -> None:
    found = tune(client_side(), digits(), epsilon=50.0, delta=0.01, seeds=1)
    least = min(row["loss"] for rows in found.curves.values() for row in rows)
    (last,) = [row["loss"] for row in found.curves["lr_factor"] if row["lr_factor"] == found.chosen.lr_factor]
    assert last == least


@pytest.mark.parametrize("source", ["public", "synthetic"])
def test_private_records_are_never_read(source: str) -> None:
    task = digits()
    poisoned = replace(
        task,
        clients=Clients(
            Records(torch.full_like(task.clients.records.x, 1e30), task.clients.records.y),
            task.clients.index,
            task.clients.offsets,
        ),
    )
    honest, spoilt = (tuning_task(client_side(), data, source, 3) for data in (task, poisoned))  # type: ignore[arg-type]
    assert torch.equal(honest.clients.records.x, spoilt.clients.records.x)
    assert float(spoilt.clients.records.x.abs().max()) < 100
    assert honest.test is not None
    assert not _share_a_row(honest.clients.records, honest.test)


def _share_a_row(one: Records, other: Records) -> bool:
    seen = {row.numpy().tobytes() for row in one.x}
    return any(row.numpy().tobytes() in seen for row in other.x)


def test_the_papers_rules_are_the_first_guess() -> None:
    laplace = client_side(rounds=27, steps=1, mechanism=Laplace(1.0))
    assert first_guess(laplace)[1] == Hyperparameters(rounds=3, steps=9)
    assert first_guess(client_side(rounds=25, steps=1))[1] == Hyperparameters(rounds=5, steps=5)
    silos = _silos()
    assert first_guess(silos)[1].batch == 30


def _silos() -> Plan:
    reads = FixedRecords(10, (30, 40, 50))
    return noisy_minibatch_sgd(
        rounds=4, clients=Everyone(3), records=reads, clip_norm=1.0, noise_multiplier=1.0, lr=Linear(1.0, 0.1, 4)
    )


def test_a_hyperparameter_changes_what_depends_on_it() -> None:
    longer = with_hyperparameters(client_side(), Hyperparameters(rounds=8, steps=6, lr_factor=0.5))
    assert longer.clip is not None
    assert longer.clip.clip_norm_at(0) == pytest.approx(0.3 * 0.5 * 6 * 1.0)  # lr * steps * zeta
    silos = with_hyperparameters(_silos(), Hyperparameters(rounds=8, batch=20, lr_factor=2.0))
    assert isinstance(silos.server, Sgd)
    assert silos.local.reads == FixedRecords(20, (30, 40, 50))
    assert [silos.server.lr.at(t) for t in (0, 8)] == pytest.approx([2.0, 0.2])  # type: ignore[union-attr]


def test_silos_are_tuned_too_and_keep_their_sizes() -> None:
    plan = silo(sizes=(30, 40, 50), epsilons=(5.0,), rounds=3)
    task = TaskSpec(dataset="digits", partition=Iid(3)).build(3, seed=0)
    made = tuning_task(plan, task, "public", 0)
    assert [made.clients.size(i) for i in range(3)] == [30, 40, 50]
    found = tune(plan, made, epsilon=5.0, delta=0.01, seeds=1)
    assert "batch" not in found.curves  # all records: no batch to tune


def test_a_plan_without_public_records_is_told_so() -> None:
    bare = replace(digits(), test=None)
    with pytest.raises(DataError, match="synthetic"):
        tune(client_side(), bare, epsilon=5.0, delta=0.01)


def test_a_solver_without_hyperparameters_is_refused() -> None:
    class Other:
        kind = "other"

    plan = dp_fed_avg(rounds=2, clients=Everyone(3), lr=0.1, clip_norm=1.0, noise_multiplier=1.0)
    object.__setattr__(plan, "local", Other())
    with pytest.raises(PlanError, match="other"):
        hyperparameters(plan)


def test_the_command_prints_curves_writes_a_file_that_loads_and_draws(tmp_path: Path) -> None:
    (tmp_path / "fed.toml").write_text(FILE)
    out = tmp_path / "tuned"
    words = ["tune", tmp_path / "fed.toml", "--epsilon", 40, "--seeds", 1]
    found = sordino(*words, "--out", out, "--json").json["tuned"][0]
    assert hyperparameters(load_config(out / "tuned.toml").plan).rounds == found["proposal"]["rounds"]
    assert (out / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert "exists" in sordino(*words, "--out", out).sentence
    assert "public" in sordino(*words, "--data", "private").sentence
    assert "--seeds 0" in sordino(*words[:-1], 0).sentence
    text = sordino(*words)
    assert "privacy cost of the search: nothing" in text.out
    assert "loss by steps" in text.out


SILOS = """
[task]
dataset = "heart_disease"
[recipe]
name = "silo"
rounds = 2
sizes = { cleveland = 243, hungarian = 236, switzerland = 99, va = 160 }
[privacy]
silos.cleveland = { epsilon = 1.0 }
silos.hungarian = { epsilon = 2.0 }
silos.switzerland = { epsilon = 4.0 }
silos.va = { epsilon = 8.0 }
"""


def test_silos_keep_budgets_of_their_own(tmp_path: Path, real_data: Path) -> None:
    """The tuned plan had one noise for all: the silo with the smallest budget would have spent the largest."""
    file, out = tmp_path / "fed.toml", tmp_path / "tuned"
    file.write_text(SILOS)
    found = sordino("tune", file, "--seeds", 1, "--data", "synthetic", "--out", out, "--json").json["tuned"][0]
    assert [silo["epsilon"] for silo in found["silos"]] == [1.0, 2.0, 4.0, 8.0]
    tuned = load_config(out / "tuned.toml")
    assert tuned.task.silos == ("cleveland", "hungarian", "switzerland", "va")
    assert [budget.epsilon for budget in tuned.budgets] == [1.0, 2.0, 4.0, 8.0]
    own = headline(tuned.plan.cost().of("messages"), tuned.delta, tuned.deltas)["silos"]
    spent = {silo: entry["epsilon"] for entry in own for silo in entry["silos"]}
    for place, budget in enumerate(tuned.budgets):
        assert 0.97 * budget.epsilon < spent[place] <= budget.epsilon
    assert "a budget for every silo" in sordino("tune", file, "--epsilon", 3).sentence


def test_silos_with_noise_of_their_own_keep_what_each_spends() -> None:
    plan = silo(sizes=(30, 40, 50), epsilons=(1.0, 2.0, 4.0), rounds=2)
    config = Config(task=TaskSpec(dataset="digits", partition=Iid(3)), plan=plan)
    assert [budget.epsilon for budget in own_budgets(config)] == pytest.approx([1.0, 2.0, 4.0], rel=0.02)


# ---- the edge of the search, and a search that was stopped -----------------------------------------------------------


def with_losses(monkeypatch: pytest.MonkeyPatch, loss: Any) -> list[Hyperparameters]:
    """Trials of made-up losses; the candidates that were really run."""
    ran: list[Hyperparameters] = []

    def losses(self: CoordinateSearch, wanted: Hyperparameters) -> tuple[float, ...]:
        if wanted not in self.trials:
            ran.append(wanted)
            self.trials[wanted] = tuple(loss(wanted) + seed for seed in (0.0, 0.1, 0.3))
            if self.on_trial is not None:
                self.on_trial(wanted, self.trials[wanted])
        return self.trials[wanted]

    monkeypatch.setattr(CoordinateSearch, "losses", losses)
    return ran


def test_the_search_goes_on_beyond_an_edge_and_says_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with_losses(monkeypatch, lambda one: abs(math.log(one.lr_factor / 27)) + 1 / one.rounds)
    found = tune(client_side(), digits(), epsilon=50.0, delta=0.01)
    assert found.chosen.lr_factor == pytest.approx(27)  # the first values end at 3
    assert "lr_factor" not in found.at_edge
    assert "rounds" in found.at_edge  # more is always better: bounded, and said
    assert found.chosen.rounds == 9 * 4 * 2**3  # nine rounds of one step, four times as many, doubled three times
    assert all(row["half_width"] > 0 for rows in found.curves.values() for row in rows)


def test_a_search_that_was_stopped_goes_on_without_repeating_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fed.toml").write_text(FILE)
    words = ["tune", tmp_path / "fed.toml", "--epsilon", 40, "--json", "--out"]
    ran = with_losses(monkeypatch, lambda one: abs(math.log(one.lr_factor)) + abs(one.rounds - 4) / 9)
    whole = sordino(*words, tmp_path / "whole").json
    count = len(ran)
    out = tmp_path / "stopped"
    assert sordino(*words, out).code == 0
    lines = (out / "trials.jsonl").read_text().splitlines(keepends=True)
    (out / "trials.jsonl").write_text("".join(lines[:5]) + lines[5][:9])  # killed while it wrote the sixth
    (out / "tuned.toml").unlink()
    ran.clear()
    again = sordino(*words, out, "--resume").json
    assert len(ran) == count - 5
    assert again["tuned"] == whole["tuned"]
    assert (out / "tuned.toml").read_bytes() == (tmp_path / "whole" / "tuned.toml").read_bytes()
    assert "which exists" in sordino(*words, out).sentence
    other = [words[0], words[1], "--epsilon", 41, *words[4:]]
    assert "which has" in sordino(*other, out, "--resume").sentence


def test_the_text_has_intervals_and_names_the_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fed.toml").write_text(FILE)
    with_losses(monkeypatch, lambda one: 1 / one.rounds)
    text = sordino("tune", tmp_path / "fed.toml", "--epsilon", 40).out
    assert "at the edge of what was tried: rounds" in text
    assert " +- " in text
