"""`[privacy] ledger`: ten runs on the same data are ten costs, and the certificate says what they come to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.commands import ROUNDS, federation, sordino

from sordino.accounting import accountant
from sordino.accounting.composition import Line
from sordino.accounting.events import Event, GaussianNoise, PoissonSampled
from sordino.accounting.rounding import upward
from sordino.certificate.certificate_file import schema
from sordino.config import load_config
from sordino.errors import CertificateError, ConfigError
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Account, Item, Run, RunEntry, total
from sordino.runs import admission, execution, rounds
from sordino.runs.folder import RunFolder

EVENT, DELTA = PoissonSampled(0.5, GaussianNoise(2.0)), 1e-4


def epsilon(runs: int) -> float:
    return accountant.epsilon(((EVENT, ROUNDS * runs),), "add_remove", DELTA).value


def paying(folder: Path, *changes: tuple[str, str], runs: float = 2.0) -> Path:
    """A federation that pays from a ledger with room for so many runs."""
    limit = epsilon(int(runs)) * 1.01
    words = ("--epsilon", limit, "--delta", DELTA, "--unit", "client", "--relation", "add_remove")
    assert sordino("ledger", "limit", folder / "ours.ledger", "digits", *words).code == 0
    spec = f'[privacy]\nledger = "{folder / "ours.ledger"}"\ndataset = "digits"\n[run]'
    return federation(folder, ("[run]", spec), *changes)


def spent(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = sordino("ledger", "show", folder / "ours.ledger", "digits", "--json").json["datasets"][0]
    return found


def test_every_run_is_a_bill_and_the_certificate_says_what_they_come_to(tmp_path: Path) -> None:
    file = paying(tmp_path)
    for run in (1, 2):
        done = sordino("run", file, "--out", tmp_path / f"{run}")
        assert done.code == 0, done.err
        assert f"in {run} run" in done.out
        made = json.loads((tmp_path / f"{run}" / "certificate.json").read_text())
        jsonschema.Draft202012Validator(schema()).validate(made)
        assert made["ledger"]["epsilon"] == upward(epsilon(run))
        assert made["ledger"]["runs"] == run
        assert sordino("certify", tmp_path / f"{run}").code == 0
        assert "has spent epsilon" in sordino("explain", tmp_path / f"{run}").out
    third = sordino("run", file, "--out", tmp_path / "3")
    assert third.code == 1
    assert "'digits' would have spent epsilon" in third.err
    assert not (tmp_path / "3").exists()
    assert spent(tmp_path)["spent"] == upward(epsilon(2))


def test_a_ledger_that_forgets_the_other_run_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: what a run asks for stands in the place of all that was spent before it."""

    def forgetful(self: Account, line: RunEntry) -> None:
        self.charged = total(line.items)
        self.runs[line.run] = Run(line, total(line.items))

    monkeypatch.setattr(Account, "admit", forgetful)
    with pytest.raises(AssertionError):
        test_every_run_is_a_bill_and_the_certificate_says_what_they_come_to(tmp_path)


def test_a_run_that_is_continued_does_not_pay_twice(tmp_path: Path) -> None:
    file = paying(tmp_path, runs=1)
    for resume in ((), ("--resume",), ("--resume",)):
        done = sordino("run", file, "--out", tmp_path / "a", *resume)
        assert done.code == 0, done.err
        assert sordino("certify", tmp_path / "a").code == 0
    assert [item["count"] for item in spent(tmp_path)["events"]] == [ROUNDS]


def test_a_run_that_stopped_gets_nothing_back_and_pays_for_what_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the charge of round 2: continued, it runs round 2 again, and five releases are paid for."""
    config = load_config(paying(tmp_path))
    keep = rounds.keep_round

    def kill(book: Any, done: Any, *more: Any) -> Any:
        if done.t == 1:
            raise KeyboardInterrupt
        return keep(book, done, *more)

    monkeypatch.setattr(rounds, "keep_round", kill)
    with pytest.raises(KeyboardInterrupt):
        execution.execute(config, tmp_path / "a")
    assert [item["count"] for item in spent(tmp_path)["events"]] == [ROUNDS]
    monkeypatch.setattr(rounds, "keep_round", keep)
    made = execution.execute(config, tmp_path / "a", resume=True).certificate
    assert made["counts"]["rounds_accounted"] == ROUNDS + 1
    assert [item["count"] for item in spent(tmp_path)["events"]] == [ROUNDS + 1]
    assert RunFolder.open(tmp_path / "a").certify()["ledger"]["events"][0]["count"] == ROUNDS + 1


def test_two_runs_that_race_for_the_last_of_a_budget_cannot_both_have_it(tmp_path: Path) -> None:
    """Both have looked and found room before either has paid."""
    config = load_config(paying(tmp_path, runs=1))
    admission.check_affordable(config)
    execution.execute(config, tmp_path / "a")
    words = [sys.executable, "-m", "sordino", "run", str(tmp_path / "fed.toml"), "--out"]
    lost = subprocess.run([*words, str(tmp_path / "b")], capture_output=True, text=True, check=False)
    assert lost.returncode == 1
    assert spent(tmp_path)["runs"] == 1
    with Ledger.open(tmp_path / "ours.ledger") as ledger, pytest.raises(Exception, match="would have spent"):
        ledger.admit("late", "digits", admission.ledger_request(config, admission.planned_facts(config)), whole=True)


@pytest.mark.parametrize("runs", [4])
def test_processes_that_race_get_as_many_runs_as_there_is_room_for(tmp_path: Path, runs: int) -> None:
    file = paying(tmp_path)
    words = [sys.executable, "-m", "sordino", "run", str(file), "--out"]
    racers = [subprocess.Popen([*words, str(tmp_path / f"{k}")], stderr=subprocess.DEVNULL) for k in range(runs)]
    assert sorted(racer.wait() for racer in racers) == [0, 0, *[1] * (runs - 2)]
    assert spent(tmp_path)["runs"] == 2


def test_what_is_noted_of_the_ledger_pays_for_the_run_or_is_refused(tmp_path: Path) -> None:
    """Less than the cost, another data set, no note at all: the certificate does not stand."""
    sordino("run", paying(tmp_path), "--out", tmp_path / "a")
    note = (tmp_path / "a" / "ledger.json").read_text()
    for found, instead in ((f'"count": {ROUNDS}', '"count": 1'), ('"digits"', '"other"'), ('"runs": 1', '"runs": 2')):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        (tmp_path / "b" / "ledger.json").write_text(note.replace(found, instead))
        with pytest.raises(CertificateError):
            RunFolder.open(tmp_path / "b").certify()
        shutil.rmtree(tmp_path / "b")
    (tmp_path / "a" / "ledger.json").unlink()
    with pytest.raises(CertificateError, match=r"ledger\.json is missing"):
        RunFolder.open(tmp_path / "a").certify()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ('ledger = "{}/ours.ledger"', "ledger without dataset"),
        ('dataset = "x"', "dataset without ledger"),
        ('ledger = "{}/none"\ndataset = "digits"', "which does not exist"),
        ('ledger = "{}/ours.ledger"\ndataset = "digit"', "did you mean 'digits'"),
        ('ledger = "{}/fed.toml"\ndataset = "digits"', "is not a ledger"),
    ],
)
def test_a_ledger_that_cannot_be_charged_is_one_sentence_and_nothing_runs(tmp_path: Path, spec: str, said: str) -> None:
    paying(tmp_path)
    file = federation(tmp_path, ("[run]", f"[privacy]\n{spec.format(tmp_path)}\n[run]"))
    assert said in sordino("run", file, "--out", tmp_path / "a").sentence
    assert not (tmp_path / "a").exists()
    assert spent(tmp_path)["runs"] == 0


def test_a_relation_that_the_limit_cannot_price_is_one_sentence(tmp_path: Path) -> None:
    file = paying(
        tmp_path, ('{ kind = "poisson", population = 60, rate = 0.5 }', '{ kind = "everyone", population = 60 }')
    )
    assert "differ by replace_one" in sordino("run", file, "--out", tmp_path / "a").sentence


def line(event: Event, count: int, *silos: int) -> Line:
    return Line("models", "replace_one", ((event, count),), silos)


def test_silos_with_names_are_charged_by_name_and_others_must_be_alike() -> None:
    loud, quiet = GaussianNoise(1.0), GaussianNoise(2.0)
    named = admission._items((line(loud, 3, 0, 2), line(quiet, 4, 1)), ("va", "basel", "bern"))
    assert named == (Item(loud, 3, silo="va"), Item(loud, 3, silo="bern"), Item(quiet, 4, silo="basel"))
    assert admission._items((line(loud, 3),), ("va", "basel")) == (
        Item(loud, 3, silo="va"),
        Item(loud, 3, silo="basel"),
    )
    assert admission._items((line(loud, 3, 0), line(loud, 5, 1)), ()) == (Item(loud, 5),)
    with pytest.raises(ConfigError, match=r"silos without names that differ"):
        admission._items((line(loud, 3, 0), line(quiet, 3, 1)), ())
