"""Promises of a deployed run on disk: its cost is the silos' receipts, it stops and goes on, and it keeps secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tests.engines.wires import Wires, lost

from sordino.accounting import accountant
from sordino.config import Config, parse
from sordino.engines.base import Receipt
from sordino.engines.messages import Job
from sordino.engines.remote import InMemoryReplyStore, Remote, Silo
from sordino.errors import BudgetError, CertificateError, QuorumError
from sordino.loop import RoundReceipts
from sordino.outcome import count_charges
from sordino.parts.samplers import Poisson
from sordino.plan import Plan
from sordino.runs.execution import execute
from sordino.runs.folder import RunFolder

SCHEMA = json.loads(
    (Path(__file__).resolve().parents[2] / "src/sordino/certificate/certificate.schema.json").read_text("utf-8")
)
LOCAL = {"kind": "local_noise", "mechanism": {"kind": "gaussian", "noise_multiplier": 2.0}}
CENTRAL = {"kind": "central_noise", "mechanism": {"kind": "gaussian", "noise_multiplier": 2.0}}
FOUR = {"kind": "everyone", "population": 4}


def config(release: Any = LOCAL, clients: Any = FOUR, rounds: int = 3, noise: str = "secure", **privacy: Any) -> Config:
    """Four clients of the digits."""
    plan = {
        "rounds": rounds,
        "clients": clients,
        "local": {"kind": "local_sgd", "lr": 0.1, "epochs": 1, "batch": 64},
        "encode": [{"kind": "clip", "clip_norm": 1.0}],
        "release": release,
        "server": {"kind": "sgd"},
    }
    return parse({"task": {"dataset": "digits"}, "plan": plan, "privacy": {"noise": noise, "delta": 1e-3, **privacy}})


class Clumsy(InMemoryReplyStore):
    """Killed once after its first charge, before the message was stored: it pays again."""

    def charge(self, job: Job) -> int:
        if not self.paid:
            super().charge(job)
        return super().charge(job)


class Poor(InMemoryReplyStore):
    """Can pay for one message."""

    def charge(self, job: Job) -> int:
        if self.paid:
            raise BudgetError("nothing is left")
        return super().charge(job)


def federation(one: Config) -> Wires:
    return Wires.of(one.build())


def go(one: Config, path: Path, wires: Wires, *, resume: bool = False, **settings: Any) -> dict[str, Any]:
    engine = Remote(wires, **settings)
    done = execute(one, path, engine=engine, task=one.build().as_server(), resume=resume)
    assert RunFolder.open(path).certify() == done.certificate
    Draft202012Validator(SCHEMA).validate(done.certificate)
    return done.certificate


def paid(wires: Wires) -> list[int]:
    return [sum(silo.store.paid.values()) for silo in wires.silos.values()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("release", [LOCAL, CENTRAL], ids=["local noise", "central noise"])
def test_the_certificate_is_the_receipts(release: Any, tmp_path: Path) -> None:
    one = config(release)
    wires = federation(one)
    wires.silos[2].store = Clumsy()
    made = go(one, tmp_path / "a", wires)
    assert made["counts"]["charges_per_silo"] == [3, 3, 4, 3] == paid(wires)
    assert made["counts"]["max_participations"] == 4
    assert made["adversaries"][1]["events"][0]["count"] == 4


def test_who_refuses_is_not_billed_and_who_is_silent_is(tmp_path: Path) -> None:
    one = config()
    wires = federation(one)
    wires.silos[1].store = Poor()
    wires.faults.append(lost(3))
    made = go(one, tmp_path / "a", wires)
    assert made["counts"]["charges_per_silo"] == [3, 1, 3, 3]


def test_a_run_that_stopped_for_want_of_clients_goes_on_and_nobody_pays_twice(tmp_path: Path) -> None:
    one = config()
    wires = federation(one)
    wires.faults.append(lost(0, asks=(3, 4, 5)))
    with pytest.raises(QuorumError, match="--resume"):
        go(one, tmp_path / "a", wires, quorum=4)
    with pytest.raises(CertificateError):
        RunFolder.open(tmp_path / "a").certificate()
    made = go(one, tmp_path / "a", wires, quorum=4, resume=True)
    assert made["counts"]["rounds_charged"] == 4  # the round was charged twice here, and paid once there
    assert made["counts"]["charges_per_silo"] == [3, 3, 3, 3] == paid(wires)


def test_jobs_carry_the_folders_own_id(tmp_path: Path) -> None:
    one = config(rounds=1)
    wires, runs = federation(one), set[str]()

    def tap(ask: int, job: Job, body: bytes) -> list[bytes]:
        runs.add(job.run)
        return [body]

    wires.faults.append(tap)
    made = go(one, tmp_path / "a", wires)
    assert runs == {made["run"]["id"]}
    go(one, tmp_path / "b", wires)
    assert len(runs) == 2


@pytest.mark.parametrize("noise", ["secure", "simulation"])
def test_of_a_secret_cohort_nothing_is_written_and_of_no_round_a_diagnostic(noise: str, tmp_path: Path) -> None:
    one = config(CENTRAL, {"kind": "poisson", "population": 4, "rate": 0.5}, 6, noise)
    made = go(one, tmp_path / "a", federation(one))
    assert not (tmp_path / "a" / "receipts.jsonl").exists()
    assert set(made["counts"]) == {"rounds_planned", "rounds_charged", "rounds_accounted"}
    written = "".join((tmp_path / "a" / name).read_text() for name in ("history.jsonl", "engine.jsonl"))
    assert "update_norm" not in written
    assert "signal_to_noise" not in written
    assert "cohort" not in written + (tmp_path / "a" / "charges.jsonl").read_text()


def test_a_receipt_that_was_changed_is_noticed(tmp_path: Path) -> None:
    one = config()
    wires = federation(one)
    wires.silos[2].store = Clumsy()
    go(one, tmp_path / "a", wires)
    file = tmp_path / "a" / "receipts.jsonl"
    text = file.read_text()
    for other in (text.replace("[2, 4]", "[2, 3]"), text[:-3], text.replace("[2, 4]", "[9, 4]"), "{}\n"):
        file.write_text(other)
        with pytest.raises(CertificateError):
            RunFolder.open(tmp_path / "a").certify()


def test_half_a_receipt_after_a_kill_is_dropped(tmp_path: Path) -> None:
    one = config()
    wires = federation(one)
    wires.faults.append(lost(0, asks=(3, 4, 5)))
    with pytest.raises(QuorumError):
        go(one, tmp_path / "a", wires, quorum=4)
    with (tmp_path / "a" / "receipts.jsonl").open("a") as file:
        file.write('{"after": 2, "ref')
    made = go(one, tmp_path / "a", wires, quorum=4, resume=True)
    assert made["counts"]["charges_per_silo"] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("settled", "wanted"),
    [
        ([], [2, 1]),
        ([RoundReceipts(1, (0,))], [1, 1]),
        ([RoundReceipts(1, (), (Receipt(0, 5),))], [6, 1]),
        ([RoundReceipts(1, (), (Receipt(0, 5),)), RoundReceipts(2, (0,))], [5, 1]),
        ([RoundReceipts(2, (), (Receipt(0, 1),))], [1, 1]),
        ([RoundReceipts(1, (), (Receipt(0, 5),)), RoundReceipts(2, (), (Receipt(0, 3),))], [5, 1]),
    ],
    ids=[
        "nothing said",
        "refused",
        "receipt, then silence",
        "receipt, then refusal",
        "less than asked",
        "an old receipt",
    ],
)
def test_the_bill_is_the_last_receipt_and_since_then_asked_minus_refused(settled: Any, wanted: list[int]) -> None:
    plan: Plan = config(clients={"kind": "poisson", "population": 2, "rate": 0.5}).plan
    assert isinstance(plan.clients, Poisson)
    assert count_charges(plan, [0, 1], [np.array([0, 1]), np.array([0])], settled).total.tolist() == wanted


SHARES = {"kind": "noise_shares", "noise_multiplier": 2.0, "at_least": 3}


@pytest.mark.parametrize(
    ("release", "rounds", "settled", "wanted"),
    [
        (LOCAL, [0, 1, 1], [RoundReceipts(1, (), (Receipt(0, 1),))], 2),
        (LOCAL, [0, 1, 0, 1], [RoundReceipts(1, (), (Receipt(0, 1),))], 3),
        (SHARES, [0, 1, 1], [RoundReceipts(1, (), (Receipt(0, 1),))], 3),
        (CENTRAL, [0, 1, 1], [RoundReceipts(i + 1, (), (Receipt(0, min(i, 1) + 1),)) for i in range(3)], 3),
        (LOCAL, [0, 1, 2], [RoundReceipts(i + 1, (), (Receipt(0, 1),)) for i in range(3)], 3),
    ],
    ids=[
        "the same job again",
        "another job of the same round",
        "another session of a sum",
        "the server's noise anew",
        "a silo that forgets",
    ],
)
def test_a_round_again_is_a_charge_unless_the_silo_sends_the_same_bytes(
    release: Any, rounds: list[int], settled: list[RoundReceipts], wanted: int
) -> None:
    assert count_charges(config(release).plan, rounds, [], settled).total[0] == wanted


# ---- the server's own budget -----------------------------------------------------------------------------------------


def budgeted(rounds: int, worth: int) -> Config:
    """A budget of every client that pays for so many rounds and no more."""
    line = config(rounds=worth).plan.forecast.line("cohort", 0)
    enough = accountant.epsilon(line.entries, line.relation, 1e-3).value * 1.01
    made = config(rounds=rounds, client_epsilon=enough)
    assert made.budget is not None
    assert set(made.budget.allowed) == {worth}
    return made


def test_a_round_that_is_asked_again_after_a_stop_is_counted_once_in_the_servers_budget(tmp_path: Path) -> None:
    one = budgeted(3, worth=3)
    wires = federation(one)
    wires.faults.append(lost(0, asks=(3, 4, 5)))
    with pytest.raises(QuorumError):
        go(one, tmp_path / "a", wires, quorum=4)
    made = go(one, tmp_path / "a", wires, quorum=4, resume=True)
    assert made["counts"]["charges_per_silo"] == [3, 3, 3, 3] == paid(wires)


def test_a_silo_that_paid_twice_ends_the_run_before_it_overspends_the_servers_budget(tmp_path: Path) -> None:
    one = budgeted(3, worth=3)
    wires = federation(one)
    wires.silos[2].store = Clumsy()
    with pytest.raises(BudgetError, match="stopped after round 2"):
        go(one, tmp_path / "a", wires)
    assert paid(wires) == [2, 2, 3, 2]
    made = RunFolder.open(tmp_path / "a").certify()
    assert made["counts"]["charges_per_silo"] == [2, 2, 3, 2]
    line = next(line for line in made["adversaries"] if line["adversary"] == "cohort")
    assert line["epsilon"] <= (one.privacy.client_epsilon or 0.0)


def test_a_silo_may_be_asked_by_two_runs_and_keeps_them_apart() -> None:
    one = config()
    till = InMemoryReplyStore()
    silo = Silo(one.build().as_silo(0), till)
    for run in ("0" * 32, "1" * 32):
        silo.reply(Job(run, one.plan, 0, "secure").to_bytes())
    assert till.paid == {}
