"""Promises of the papers' tables: every published number is there, ours is what it says, and the page shows both."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.commands import sordino
from tests.tiny import SIZES, clients, mlp, plan

from sordino.accounting.accountant import default_delta
from sordino.data.clients import Records
from sordino.errors import ConfigError
from sordino.loop import run
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.samplers import FixedSize, Poisson
from sordino.recipes import dp_fed_avg
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers import kept, page, runner, sections, tables
from sordino_papers.cells import Cell, Job, Table, index
from sordino_papers.paper_000 import STRENGTHS, sampler, table2_plan, theorem_multiplier
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
    assert table2_plan(how, 1.5, 1.0).release.noise_std(np.arange(25), 0) == 1.5


def test_table_2_runs_the_papers_settings() -> None:
    assert sampler("uniform") == FixedSize(1000, 50)
    assert sampler("poisson") == Poisson(500, 0.05)
    planned = table2_plan("poisson", 1.0, 2.0)
    local = planned.local
    assert isinstance(local, LocalSgd)
    assert (planned.rounds, local.epochs, local.batch, local.weight_decay, local.project) == (30, 5, 10, 4e-5, True)
    assert planned.public(0).clip_norm == 0.4


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
    planned = dp_fed_avg(rounds=3, clients=plan().clients, lr=0.3, clip_norm=1.0, noise_multiplier=2.0)
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
    "nobody",
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
    assert found["figures"]["update_norm"] == last.diagnostics["update_norm_p50"]
    assert found["figures"]["loss"] == last.metrics["loss"]
    assert "protocol" not in found["figures"]
    assert found["figures"]["seconds"] > 0


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
    assert found["figures"]["protocol"] == 100 * next(own for score, own in scored if score == best)
    assert found["accuracy"] == scored[-1][1]


def test_a_summary_has_mean_spread_and_both_epsilons() -> None:
    runs = [
        {"accuracy": a, "figures": {"protocol": p, "update_norm": n, "seconds": 1.0}, "code": "here"}
        for a, p, n in ((0.8, 70.0, 1.0), (0.9, 90.0, 3.0), (0.85, None, 2.0))
    ]
    found = runner.summary(FAKE.cells[0], runs)
    assert (found["ours"], found["spread"], found["values"]) == (85.0, 5.0, [80.0, 90.0, 85.0])
    assert (found["published"], found["epsilon_claimed"], found["seeds"]) == (90.0, 6.0, 3)
    assert (kept.middle(found, "protocol"), kept.middle(found, "update_norm")) == (80.0, 2.0)
    assert found["figures"]["protocol"] == [70.0, 90.0, None]  # in the order of seeds, for pairs
    assert found["relation"] == "replace_one"
    assert found["epsilon"] == pytest.approx(gaussian_epsilon(found["delta"]), rel=1e-2)
    assert runner.summary(FAKE.cells[1], runs[:1])["spread"] is None


def test_a_job_may_read_further_figures_off_its_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(seed: int) -> Job:
        return replace(small(seed), figures=lambda last: {"rounds": float(last.t + 1)}, train=True)

    cell = Cell("000-more", "more", build)
    monkeypatch.setattr(runner, "TABLES", (Table("000-extra", "extra", (cell,)),))
    found = runner.summary(cell, [runner.one_seed("000-more", seed) for seed in (0, 1)])
    assert found["figures"]["rounds"] == [3.0, 3.0]
    assert len(found["figures"]["train_accuracy"]) == 2


def nobody(seed: int) -> Job:
    job = small(seed)
    return replace(job, plan=replace(job.plan, clients=Poisson(len(SIZES), 1e-9)))


def test_a_last_round_without_clients_leaves_no_figure_that_json_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Cell("000-empty", "empty", nobody)
    monkeypatch.setattr(runner, "TABLES", (Table("000-none", "none", (empty,)),))
    found = runner.summary(empty, [runner.one_seed("000-empty", 0)])
    assert found["figures"]["update_norm"] == [None]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def gaussian_epsilon(delta: float) -> float:
    """Of three releases of noise multiplier 2 and movement 2: mu = sqrt(3), by bisection on the exact curve."""

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
    assert [kept.keep(result, tmp_path / "results") for result in found] == [None, None]
    read = kept.stored(tmp_path / "results")
    assert read == {result["id"]: json.loads(json.dumps(result)) for result in found}
    text = page.pages(read)["papers/000.md"]
    assert "## A fake table" in text
    assert "`sordino papers run 000-fake`. Nothing real. Chosen by: nobody." in text
    rows = [line for line in text.splitlines() if line.startswith("| one |")]
    assert len(rows) == 1
    assert f"| 90.00 | **{found[0]['ours']:.2f}** | {found[0]['spread']:.2f} | - | 6.00 |" in rows[0]
    table = [line for line in text.partition("## A fake table")[2].splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {11}  # ten columns in every row, and in the rule below the head
    said = sordino(
        "papers", "page", "--results", tmp_path / "results", "--out", tmp_path / "new" / "papers.md", "--json"
    )
    assert said.json == {"written": str(tmp_path / "new" / "papers.md")}
    assert (tmp_path / "new" / "papers" / "000.md").read_text("utf-8") == text
    assert "(papers/000.md)" in (tmp_path / "new" / "papers.md").read_text("utf-8")


def test_a_table_without_results_is_left_out_of_the_page(fake: Table) -> None:
    assert list(page.pages({})) == ["papers.md"]
    assert page.pages({})["papers.md"].startswith("# The papers' tables")


def test_the_papers_protocol_has_a_column_only_where_it_was_followed(fake: Table) -> None:
    one, two = ({**runner.summary(cell, [runner.one_seed(cell.id, 0)])} for cell in fake.cells)
    assert "| paper's protocol |" in sections.table_text(fake, {one["id"]: one, two["id"]: two})
    assert "| paper's protocol |" not in sections.table_text(fake, {one["id"]: one})


# ---- what is kept ----------------------------------------------------------------------------------------------------


def ask(folder: Path, **asked: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the first fake cell here rather than in other processes, and keep it."""
    wanted = runner.Ask(folder=folder, **asked)
    found = list(runner.run_cells(FAKE.cells[:1], wanted, pool=Here()))
    told = [kept.keep(result, folder) for result in found]
    return found, [*wanted.notes, *(one for one in told if one)]


class Here:
    """A pool that works at once and counts."""

    done: ClassVar[list[int]] = []

    def submit(self, work: Callable[..., Any], name: str, seed: int, device: str) -> Future[Any]:
        Here.done.append(seed)
        future: Future[Any] = Future()
        future.set_result(work(name, seed, device))
        return future


@pytest.fixture
def seeds_run() -> list[int]:
    Here.done.clear()
    return Here.done


def test_a_result_grows_seed_by_seed(fake: Table, tmp_path: Path, seeds_run: list[int]) -> None:
    (first,), _ = ask(tmp_path, seeds=2)
    (longer,), notes = ask(tmp_path, seeds=4)
    assert (seeds_run, notes) == ([0, 1, 2, 3], [])
    assert longer["values"][:2] == first["values"]
    assert longer["figures"]["loss"][:2] == first["figures"]["loss"]
    ask(tmp_path, seeds=4, again=True)
    assert seeds_run == [0, 1, 2, 3] * 2
    assert kept.stored(tmp_path)["000-fake-one"]["seeds"] == 4


def test_a_longer_result_wins(fake: Table, tmp_path: Path, seeds_run: list[int]) -> None:
    ask(tmp_path, seeds=3)
    before = (tmp_path / "000-fake-one.json").read_bytes()
    ask(tmp_path, seeds=1)  # nothing to run: all seeds are there
    assert seeds_run == [0, 1, 2]
    _, (said,) = ask(tmp_path, seeds=1, again=True)
    assert "3 seeds is kept" in said
    assert "--results" in said
    assert (tmp_path / "000-fake-one.json").read_bytes() == before


def test_a_result_of_other_settings_is_noticed_and_replaced(
    fake: Table, tmp_path: Path, seeds_run: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(tmp_path, seeds=2)
    other = replace(small(0).plan, rounds=2)
    changed = Cell("000-fake-one", "one", lambda seed: replace(small(seed), plan=other))
    monkeypatch.setattr(runner, "TABLES", (replace(FAKE, cells=(changed,)),))
    wanted = runner.Ask(folder=tmp_path, seeds=2)
    (found,) = runner.run_cells((changed,), wanted, pool=Here())
    assert "other settings" in wanted.notes[0]
    assert seeds_run == [0, 1, 0, 1]
    assert kept.keep(found, tmp_path) is None
    assert kept.stored(tmp_path)["000-fake-one"]["settings"] == changed.build(0).settings != small(0).settings


def test_the_last_digits_of_what_was_solved_for_are_no_other_setting() -> None:
    job = small(0)
    noisier = [
        replace(job, plan=replace(job.plan, release=job.plan.release.with_noise_multiplier(z)))
        for z in (2, 2 + 1e-11, 2.001)
    ]
    first, same, other = (one.settings for one in noisier)
    assert first == same != other
    assert noisier[0].plan.hash != noisier[1].plan.hash


def test_a_result_from_before_settings_were_kept_is_run_anew(fake: Table, tmp_path: Path, seeds_run: list[int]) -> None:
    (found,), _ = ask(tmp_path, seeds=2)
    old = {name: one for name, one in found.items() if name not in ("settings", "figures", "code")}
    (tmp_path / "000-fake-one.json").write_text(json.dumps(old))
    _, (said,) = ask(tmp_path, seeds=2)
    assert "does not say its settings" in said
    assert "settings" in kept.stored(tmp_path)["000-fake-one"]


def test_a_study_of_fewer_repeats_replaces_none_of_more(tmp_path: Path) -> None:
    many, few = ({"id": "s", "rows": [{"x": 1, "repeats": n}], "repeats": n} for n in (5, 2))
    assert kept.keep({name: one for name, one in many.items() if name != "repeats"}, tmp_path) is None  # as once kept
    assert "5 seeds" in str(kept.keep(few, tmp_path))
    assert kept.keep(many, tmp_path) is None


# ---- claims ----------------------------------------------------------------------------------------------------------


def every_result(ours: float) -> dict[str, dict[str, Any]]:
    """The same figures for every cell there is."""
    same = {"ours": ours, "spread": 0.0, "seeds": 5, "values": [ours] * 5, "figures": {"update_norm": [1.0] * 5}}
    return {name: {"title": cell.title, "published": cell.published, **same} for name, cell in CELLS.items()}


def judged(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for rows in page.judged(results).values() for row in rows]


def test_once_every_cell_has_run_every_claim_is_judged() -> None:
    """A cell that was renamed would make its claim vanish without a word."""
    results = every_result(85.0)
    found = [row for table in TABLES for row in table.claims(results)]
    assert {row["verdict"] for row in found} <= {"yes", "no", "undecided"}
    assert len({row["text"] for row in found}) == len(found)
    assert all(row["chosen"] for row in found)
    assert judged({}) == []


def test_every_table_says_who_chose() -> None:
    assert [table.id for table in TABLES if not table.chosen] == []


def shifted(results: dict[str, dict[str, Any]], name: str, by: float) -> None:
    """Another mean, with seeds that differ a little."""
    values = [85.0 + by + 0.01 * seed for seed in range(5)]
    results[name] |= {"ours": 85.0 + by, "values": values}


def test_a_claim_holds_only_where_the_numbers_say_so() -> None:
    def answer(results: dict[str, dict[str, Any]], word: str) -> str:
        (found,) = [row for row in judged(results) if word in row["text"]]
        return str(found["verdict"])

    results = every_result(85.0)
    assert (
        answer(results, "000: Table 2: smoothing (sigma 1) beats none in every column") == "undecided"
    )  # equal is not above
    assert answer(results, "reaches 90") == "no"
    for name in results:
        if name.startswith("000-table2-") and name.endswith("sigma1"):
            shifted(results, name, 1.0)
    assert answer(results, "000: Table 2: smoothing (sigma 1) beats none in every column") == "yes"
    assert answer(results, "Table 2 reproduces") == "yes"
    shifted(results, "000-table2-uniform-eps6-sigma0", 2.0)
    assert answer(results, "000: Table 2: smoothing (sigma 1) beats none in every column") == "no"
    results["000-table2-uniform-eps6-sigma0"]["values"] = [82.87 - 2.6 - 0.01 * seed for seed in range(5)]
    assert answer(results, "Table 2 reproduces") == "no"
    text = sections.claims_table(judged(results))
    assert "| **no** |" in text
    assert "| undecided |" in text


def test_claims_of_cells_that_have_not_run_are_left_out() -> None:
    some = {name: one for name, one in every_result(85.0).items() if not name.startswith("000-table2-uniform")}
    assert not any("Table 2 reproduces" in row["text"] for row in judged(some))
    assert any("reaches 90" in row["text"] for row in judged(some))
