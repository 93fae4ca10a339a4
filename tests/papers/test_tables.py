"""Promises of the papers' tables: every published number is there, ours is what it says, and the page shows both."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.commands import sordino
from tests.tiny import SIZES, clients, mlp, plan

from sordino.data.task import Records, Task
from sordino.errors import ConfigError
from sordino.parts.local import LocalSgd
from sordino.parts.samplers import FixedSize, Poisson
from sordino.privacy.certificate import default_delta
from sordino.recipes import dp_fed_avg
from sordino.rng import Seeded
from sordino.run import run
from sordino_papers import claims, page, runner, tables
from sordino_papers.cells import Cell, Job, Table, index
from sordino_papers.paper_000 import STRENGTHS, sampler, table2_plan, theorem_multiplier
from sordino_papers.paper_003 import METHODS, SETTINGS
from sordino_papers.tables import TABLES

CELLS = {cell.id: cell for table in TABLES for cell in table.cells}
TABLE_2 = {  # paper 000, sigma 0 and 1 in full
    ("uniform", 0): (82.87, 84.67, 84.99, 85.41),
    ("uniform", 1): (84.77, 85.90, 86.32, 86.63),
    ("poisson", 0): (83.94, 85.45, 86.30, 86.53),
    ("poisson", 1): (85.64, 86.51, 86.61, 86.95),
}


# ---- what is listed --------------------------------------------------------------------------------------------------


def test_every_id_is_unique_and_a_word() -> None:
    ids = [table.id for table in TABLES] + [cell.id for table in TABLES for cell in table.cells]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    assert all(name == name.lower() and re.fullmatch(r"[a-z0-9._-]+", name) for name in ids)
    assert len(index(TABLES)) == len(ids)


def test_table_2_is_there_with_every_published_value() -> None:
    for (how, strength), row in TABLE_2.items():
        for epsilon, value in zip((6, 7, 8, 9), row, strict=True):
            for table in ("000-table2", "000-table2-tight"):
                cell = CELLS[f"{table}-{how}-eps{epsilon}-sigma{strength}"]
                assert (cell.published, cell.claimed) == (value, epsilon)
    for id_, value in {"uniform-eps9-sigma3": 86.42, "poisson-eps9-sigma2": 87.23}.items():
        assert CELLS[f"000-table2-{id_}"].published == value
    whole = next(table for table in TABLES if table.id == "000-table2")
    assert len(whole.cells) == 2 * 4 * len(STRENGTHS) == 32
    assert all(cell.published is not None for cell in whole.cells)


def test_best_is_compared_with_the_best_of_its_column() -> None:
    assert CELLS["000-best-uniform-eps6"].published == 84.77
    assert CELLS["000-best-poisson-eps9"].published == 87.23


@pytest.mark.parametrize(("how", "std"), [("uniform", 1.0774), ("poisson", 0.4544)])
def test_the_papers_noise_at_epsilon_six(how: Any, std: float) -> None:
    assert theorem_multiplier(how, 6.0) == pytest.approx(std / 0.4, rel=1e-3)
    assert table2_plan(how, 1.5, 1.0).release.noise_std(np.arange(25)) == 1.5


def test_table_2_runs_the_papers_settings() -> None:
    assert sampler("uniform") == FixedSize(1000, 50)
    assert sampler("poisson") == Poisson(500, 0.05)
    planned = table2_plan("poisson", 1.0, 2.0)
    local = planned.local
    assert isinstance(local, LocalSgd)
    assert (planned.rounds, local.epochs, local.batch, local.weight_decay, local.project) == (30, 5, 10, 4e-5, True)
    assert planned.public(0).radius == 0.4


def test_every_method_of_paper_003_is_compared_at_the_same_cost() -> None:
    for _, _, shared in SETTINGS.values():
        bills = [recipe(**shared, lr=0.1, **own).bill() for recipe, own in METHODS.values()]
        assert all(bill == bills[0] for bill in bills)
    names = " ".join(METHODS)
    assert all(word in names for word in ("DP-FedAvg", "DP-FedSAM", "ASAM", "rand_k", "Fed-SMP-top_k", "BLUR", "LUS"))


def test_papers_list_names_every_table_and_cell() -> None:
    tables = sordino("papers", "list", "--json").json["tables"]
    assert [(table["id"], len(table["cells"])) for table in tables] == [(t.id, len(t.cells)) for t in TABLES]
    assert {cell["id"]: cell["published"] for table in tables for cell in table["cells"]} == {
        cell.id: cell.published for cell in CELLS.values()
    }
    text = sordino("papers", "list")
    assert text.code == 0
    assert all(table.id in text.out for table in TABLES)


def test_an_unknown_id_is_refused_with_the_nearest_one() -> None:
    said = sordino("papers", "run", "000-tabel2")
    assert "000-table2" in said.sentence
    for option in ("--seeds", "--workers"):
        assert f"{option} 0" in sordino("papers", "run", "000-table2", option, 0).sentence
    with pytest.raises(ConfigError, match=r"did you mean '000-table2-poisson-eps6-sigma\d'"):
        runner.chosen("000-table2-poisson-eps6-sigma")


def test_an_id_is_a_cell_or_all_cells_of_a_table() -> None:
    assert [cell.id for cell in runner.chosen("000-table2-poisson-eps6-sigma1")] == ["000-table2-poisson-eps6-sigma1"]
    assert len(runner.chosen("000-table2")) == 32


# ---- a cell that runs in no time -------------------------------------------------------------------------------------


def small(seed: int, validation: bool = False) -> Job:
    task = Task.of(mlp(), clients(), test=clients((30,))[0])
    planned = dp_fed_avg(rounds=3, clients=plan().clients, lr=0.3, radius=1.0, multiplier=2.0)
    some = clients((12,))[0]
    return Job(planned, task, default_delta(len(SIZES)), Records(*some) if validation else None)


FAKE = Table(
    "000-fake",
    "A fake table",
    (
        Cell("000-fake-one", "one", small, published=90.0, claimed=6.0),
        Cell("000-fake-two", "two", partial(small, validation=True)),
    ),
    "Nothing real.",
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Table:
    for module in (tables, runner, page):
        monkeypatch.setattr(module, "TABLES", (FAKE,))
    return FAKE


def test_one_seed_is_the_last_round_on_the_whole_test_set(fake: Table) -> None:
    found, job = runner.one_seed("000-fake-one", 4), small(4)
    last = list(run(job.plan, job.task, streams=Seeded(4)))[-1]
    assert found["seed"] == 4
    assert found["accuracy"] == last.metrics["accuracy"]
    assert found["update_norm"] == last.diagnostics["update_norm_p50"]
    assert found["protocol"] is None
    assert found["seconds"] > 0


def test_the_papers_protocol_takes_the_round_with_the_best_validation(fake: Table) -> None:
    found, job = runner.one_seed("000-fake-two", 1), small(1, validation=True)
    assert job.validation is not None
    assert job.task.test is not None
    scored = []
    for done in run(job.plan, job.task, streams=Seeded(1)):
        own, other = (
            Task(job.task.model, job.task.clients, test=records).evaluate(done.state.memory["params"])["accuracy"]
            for records in (job.task.test, job.validation)
        )
        scored.append((other, own))
    best = max(score for score, _ in scored)
    assert found["protocol"] == next(own for score, own in scored if score == best)
    assert found["accuracy"] == scored[-1][1]


def test_a_summary_has_mean_spread_and_both_epsilons() -> None:
    runs = [
        {"accuracy": a, "protocol": p, "update_norm": n, "seconds": 1.0}
        for a, p, n in ((0.8, 0.7, 1.0), (0.9, 0.9, 3.0), (0.85, None, 2.0))
    ]
    found = runner.summary(FAKE.cells[0], runs)
    assert (found["ours"], found["spread"], found["values"]) == (85.0, 5.0, [80.0, 90.0, 85.0])
    assert (found["published"], found["epsilon_claimed"], found["seeds"], found["seconds"]) == (90.0, 6.0, 3, 3.0)
    assert (found["paper_protocol"], found["update_norm"]) == (80.0, 2.0)
    assert found["relation"] == "replace_one"
    assert found["epsilon"] == pytest.approx(gaussian_epsilon(found["delta"]), rel=1e-2)
    assert runner.summary(FAKE.cells[1], runs[:1])["spread"] is None


def nobody(seed: int) -> Job:
    job = small(seed)
    return replace(job, plan=replace(job.plan, clients=Poisson(len(SIZES), 1e-9)))


def test_a_last_round_without_clients_leaves_no_figure_that_json_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Cell("000-empty", "empty", nobody)
    monkeypatch.setattr(runner, "TABLES", (Table("000-none", "none", (empty,)),))
    found = runner.summary(empty, [runner.one_seed("000-empty", 0)])
    assert found["update_norm"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def gaussian_epsilon(delta: float) -> float:
    """Of three releases of multiplier 2 and movement 2: mu = sqrt(3), by bisection on the exact curve."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    mu, low, high = math.sqrt(3), 0.0, 50.0
    for _ in range(80):
        e = (low + high) / 2
        spent = phi(mu / 2 - e / mu) - math.exp(e) * phi(-mu / 2 - e / mu)
        low, high = (e, high) if spent > delta else (low, e)
    return high


def test_results_are_kept_and_read_back_and_shown_beside_the_published(fake: Table, tmp_path: Path) -> None:
    found = [runner.summary(cell, [runner.one_seed(cell.id, seed) for seed in (0, 1)]) for cell in fake.cells]
    runner.store(found, tmp_path / "results")
    kept = runner.stored(tmp_path / "results")
    assert kept == {result["id"]: json.loads(json.dumps(result)) for result in found}
    text = page.page(kept)
    assert "## A fake table" in text
    assert "`sordino papers run 000-fake`. Nothing real." in text
    rows = [line for line in text.splitlines() if line.startswith("| one |")]
    assert len(rows) == 1
    assert f"| 90.00 | **{found[0]['ours']:.2f}** | {found[0]['spread']:.2f} | - | 6.00 |" in rows[0]
    table = [line for line in text.partition("## A fake table")[2].splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {11}  # ten columns in every row, and in the rule below the head
    said = sordino(
        "papers", "page", "--results", tmp_path / "results", "--out", tmp_path / "new" / "papers.md", "--json"
    )
    assert said.json == {"written": str(tmp_path / "new" / "papers.md")}
    assert (tmp_path / "new" / "papers.md").read_text("utf-8") == text


def test_a_table_without_results_is_left_out_of_the_page(fake: Table) -> None:
    assert "fake" not in page.page({})
    assert page.page({}).startswith("# The papers' tables")


# ---- claims ----------------------------------------------------------------------------------------------------------


def every_result(ours: float) -> dict[str, dict[str, Any]]:
    """The same figures for every cell there is."""
    same = {"ours": ours, "spread": 0.5, "update_norm": 1.0}
    return {name: {"title": cell.title, "published": cell.published, **same} for name, cell in CELLS.items()}


def test_once_every_cell_has_run_every_claim_is_judged() -> None:
    """A cell that was renamed would make its claim vanish without a word."""
    found = claims.claims(every_result(85.0))
    words = ["Table 2 reproduces", "beats none", "tight accounting", "reaches 90", "CNN", "LSTM", "James-Stein"]
    words += ["femnist: DP-FedSAM beats", "mnist: the best sound top_k", "smaller updates", "adult", "writers"]
    assert [word for word in words if not any(word in claim.text for claim in found)] == []
    assert len({claim.text for claim in found}) == len(found)
    assert claims.claims({}) == []


def test_a_claim_holds_only_where_the_numbers_say_so() -> None:
    def verdict(results: dict[str, dict[str, Any]], word: str) -> bool:
        (found,) = [claim for claim in claims.claims(results) if word in claim.text]
        return found.holds

    results = every_result(85.0)
    assert not verdict(results, "beats none in every column")  # equal is not above
    assert not verdict(results, "reaches 90")
    assert verdict(results, "femnist: the best sound top_k")  # equal is no worse
    for name in results:
        if name.startswith("000-table2-") and name.endswith("sigma1"):
            results[name]["ours"] = 86.0
    assert verdict(results, "beats none in every column")
    assert verdict(results, "Table 2 reproduces")
    results["000-table2-uniform-eps6-sigma0"]["ours"] = 82.87 - 2.6
    assert not verdict(results, "Table 2 reproduces")
    assert "| **no** |" in page.claims_text(results)
