"""Stopping by public figures saves time, not epsilon: every planned round is accounted; less would be false."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from tests.commands import federation, lines, sordino
from tests.tiny import clients, mlp, plan

import sordino as so
from sordino.certificate.build import line_entry
from sordino.certificate.facts import Facts, participation
from sordino.errors import CertificateError, ConfigError
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, NoiseShares
from sordino.parts.samplers import FixedSize
from sordino.runs import rounds
from sordino.runs.folder import RunFolder
from sordino.task import Task

STOP = so.EarlyStopping(metric="accuracy", patience=2)
TEST = (torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))


def told(*values: float, name: str = "accuracy") -> list[dict[str, Any]]:
    return [{"round": t, name: value} for t, value in enumerate(values, start=1)]


def test_it_ends_after_so_many_evaluations_that_were_not_better() -> None:
    assert STOP.ends(told(0.1, 0.2, 0.2, 0.1)) == 4
    assert STOP.ends(told(0.1, 0.2, 0.2, 0.3, 0.3)) is None
    assert so.EarlyStopping(metric="loss", patience=1).ends(told(3.0, 2.0, 2.5, name="loss")) == 3  # less is better
    assert so.EarlyStopping(metric="mine", lower=True, patience=1).ends(told(1.0, 2.0, name="mine")) == 2
    assert so.EarlyStopping(metric="accuracy", patience=2, margin=0.1).ends(told(0.1, 0.15, 0.19)) == 3
    assert STOP.ends([{"round": 1}, *told(0.5)]) is None  # rounds that were not evaluated say nothing


def stopped(out: Path | None = None, **more: Any) -> so.Result:
    """Thirty rounds on test rows that are all of one class and all zeros: accuracy soon moves no more."""
    task = Task.of(mlp(), clients(), test=TEST)
    return so.train(plan(rounds=30), task, allow_large_delta=True, stop=STOP, out=out, **more)


def test_all_planned_rounds_are_billed_and_the_certificate_says_why(tmp_path: Path) -> None:
    whole = so.train(plan(rounds=30), Task.of(mlp(), clients(), test=TEST), allow_large_delta=True).certificate
    for out in (None, tmp_path / "run"):
        made = stopped(out).certificate
        ran = made["counts"]["rounds_charged"]
        assert ran < 30
        assert (made["counts"]["rounds_planned"], made["counts"]["rounds_accounted"]) == (30, 30)
        assert made["epsilon"] == whole["epsilon"]
        assert made["adversaries"] == whole["adversaries"]
        assert "early stopping on public rows: accuracy" in made["counts"]["stopped_by"]
        assert "all planned rounds are accounted" in made["counts"]["stopped_by"]
    assert "The run ended by early stopping" in sordino("explain", tmp_path / "run").out
    assert sordino("certify", tmp_path / "run").code == 0


def test_the_rounds_that_ran_would_be_too_small_a_bill() -> None:
    """Sabotage: a rule of released models that stops when much was learnt, accounted for the rounds until then.

    Of Gaussian rounds the log ratio of neighbours after t of them is a walk L_t with steps N(mu^2/2, mu^2), and a
    function of the released models. (epsilon, delta) asks E[1 - exp(epsilon - L)]+ <= delta of what is released. With
    epsilon of all rounds that holds for every rule; with epsilon of the rounds that ran it fails for this one.
    """
    mu, delta, last, runs = 0.3, 0.01, 100, 40_000
    noisy = plan(rounds=last, release=CentralNoise(Gaussian(2 / mu)))  # replace one: twice the clip norm

    def gap(epsilon: float, m: float) -> float:
        return float(norm.cdf(-epsilon / m + m / 2) - np.exp(epsilon) * norm.cdf(-epsilon / m - m / 2)) - delta

    costs = np.array([brentq(gap, 0, 50, args=(mu * t**0.5,)) for t in range(1, last + 1)])
    ours = line_entry(noisy.cost().line("cohort"), delta)  # what a certificate says of all rounds
    assert ours["epsilon"] == pytest.approx(costs[-1], rel=1e-4)
    rng, walk, running = np.random.default_rng(0), np.zeros(runs), np.ones(runs, dtype=bool)
    small = large = 0.0
    for t in range(last):
        walk[running] += mu * rng.standard_normal(int(running.sum())) + mu**2 / 2
        over = running & ((walk > costs[t] + mu / 2) | (t == last - 1))
        small += float(np.maximum(0, 1 - np.exp(costs[t] - walk[over])).sum()) / runs
        large += float(np.maximum(0, 1 - np.exp(costs[-1] - walk[over])).sum()) / runs
        running &= ~over
    assert small > 4 * delta
    assert large < delta


def test_a_killed_run_stops_where_it_would_have_and_one_that_stopped_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stopped(tmp_path / "whole")
    keep = rounds.keep_round

    def kill(book: Any, done: Any, *more: Any) -> Any:
        if done.t == 1:
            raise KeyboardInterrupt
        return keep(book, done, *more)

    monkeypatch.setattr(rounds, "keep_round", kill)
    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path / "killed")
    monkeypatch.setattr(rounds, "keep_round", keep)
    again = stopped(tmp_path / "killed", resume=True)
    assert len(again.history) == len(whole.history) < 30
    assert again.certificate["model_sha256"] == whole.certificate["model_sha256"]
    assert again.certificate["counts"]["rounds_charged"] == whole.certificate["counts"]["rounds_charged"] + 1
    before = (tmp_path / "killed" / "charges.jsonl").read_bytes()
    assert stopped(tmp_path / "killed", resume=True).certificate == again.certificate
    assert (tmp_path / "killed" / "charges.jsonl").read_bytes() == before


def test_a_folder_that_stopped_without_reason_is_not_certified(tmp_path: Path) -> None:
    """Sabotage: history says that accuracy was still rising, or the rule was never there."""
    out = stopped(tmp_path / "run").path
    assert out is not None
    text = (out / "history.jsonl").read_text()
    changed = [{**line, "accuracy": line["round"] / 100} for line in lines(out / "history.jsonl")]
    (out / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    with pytest.raises(CertificateError, match=r"history\.jsonl"):
        RunFolder.open(out).certify()
    (out / "history.jsonl").write_text(text)
    assert RunFolder.open(out).certify()
    made = json.loads((out / "certificate.json").read_text())
    made["counts"]["rounds_accounted"] = made["counts"]["rounds_charged"]
    (out / "certificate.json").write_text(json.dumps(made, indent=2) + "\n")
    with pytest.raises(CertificateError, match="rounds_accounted"):
        RunFolder.open(out).certify()


def test_what_nobody_computes_or_no_public_row_shows_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        so.train(
            plan(), Task.of(mlp(), clients(), test=TEST), stop=so.EarlyStopping(metric="acuracy"), out=tmp_path / "a"
        )
    with pytest.raises(ConfigError, match="without public test rows"):
        so.train(plan(), Task.of(mlp(), clients()), stop=STOP, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="patience"):
        so.EarlyStopping(patience=0)
    file = federation(tmp_path, ("[run]", '[run]\nstop = { metric = "acuracy" }'))
    assert "did you mean 'accuracy'?" in sordino("plan", file).sentence


def test_a_file_stops_too(tmp_path: Path) -> None:
    file = federation(tmp_path, ("[run]", '[run]\nstop = { metric = "accuracy", patience = 1, margin = 1.0 }'))
    done = sordino("run", file, "--out", tmp_path / "run", "--json").json
    assert done["certificate"]["counts"]["rounds_charged"] == 2
    assert done["certificate"]["counts"]["rounds_accounted"] == 4
    assert sordino("certify", tmp_path / "run").code == 0


def test_rounds_that_were_run_again_do_not_pay_for_those_that_a_rule_left_out() -> None:
    """Six rounds were planned, a rule stopped after three, and each of these ran twice: six charges, no full run."""
    seen = plan(rounds=6, clients=FixedSize(6, 2), release=NoiseShares(2.0, at_least=2))
    facts = Facts(1e-3, "simulation", 6, max_participations=2, repeats=3, early=STOP.words)
    found = participation(seen, facts)
    assert (found.max_participations, found.sampled_rounds) == (
        2,
        6,
    )  # the rounds that were drawn, and the coins of a whole run
    whole = participation(seen, replace(facts, early=""))  # sabotage: charges alone look like a whole run
    assert (whole.max_participations, whole.sampled_rounds) == (2, 0)
