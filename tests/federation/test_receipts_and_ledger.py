"""A silo's ledger beside what its server knows: rounds that are run again pay, and an older ledger is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import plan as client_plan

from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.certificate.facts import OwnCode
from sordino.engines.messages import Job
from sordino.errors import ConfigError
from sordino.federation.silo_service import LedgerReplyStore
from sordino.ledger.ledger import Ledger
from sordino.ledger.policy import Policy
from sordino.ledger.totals import Item
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, LocalNoise
from sordino.parts.samplers import CyclicPoisson, Poisson
from sordino.plan import Plan

RUN = "0" * 32
HIDDEN = client_plan(clients=Poisson(6, 0.5), rounds=8, release=CentralNoise(Gaussian(2.0)))
IN_TURN = replace(HIDDEN, clients=CyclicPoisson(6, 4, 0.5))
LOCAL = client_plan(rounds=8, release=LocalNoise(Gaussian(3.0)))


def served(folder: Path, **changes: Any) -> LedgerReplyStore:
    known = {"dataset": "own", "epsilon": 1e3, "delta": 1e-5, "unit": "client", "relation": "add_remove", **changes}
    policy = Policy(**{"releases": ("central_noise", "local_noise"), "noise": ("secure",), **known})
    ledger = Ledger.open(folder / "l", create=True)
    ledger.limit("own", policy.limit)
    return LedgerReplyStore(ledger, policy, 2, "", lambda line: None, lambda unit: OwnCode("by construction", "a test"))


def job(plan: Plan, t: int, start: float, paid: int = 0) -> Job:
    """Round t from a model that says where it came from."""
    return Job(RUN, plan, 2, "secure", public=plan.public(t, 4), start=torch.full((4,), start), paid=paid)


def released(till: LedgerReplyStore, asked: Job) -> int:
    till.allows(asked)
    charges = till.charge(asked)
    till.store(asked, b"reply")
    return charges


def spent(till: LedgerReplyStore) -> dict[Any, int]:
    return {item.event: item.count for item in till.ledger.statement("own").items}


def test_a_round_that_is_run_again_is_not_among_those_that_the_run_has_paid_for(tmp_path: Path) -> None:
    """The server was killed, or its folder copied: round 4 comes again, from another model, as another job."""
    till = served(tmp_path, adversary="models")
    whole: dict[Any, int] = {PoissonSampled(0.5, GaussianNoise(2.0)): 8}
    for t in (1, 4):
        released(till, job(HIDDEN, t, 0.0))
    assert spent(till) == whole
    released(till, job(HIDDEN, 4, 1.0))
    assert spent(till) == {**whole, GaussianNoise(2.0): 1}
    assert sum(item.count for item in till.ledger.statement(run=RUN).own) == 9


def test_a_session_of_a_secure_sum_that_is_tried_again_pays(tmp_path: Path) -> None:
    till = served(tmp_path, adversary="models")
    till.allows(job(HIDDEN, 0, 0.0))
    for session in ("a", "b", "c"):
        till.charge(job(HIDDEN, 0, 0.0), session)
    assert spent(till)[GaussianNoise(2.0)] == 2


def test_of_groups_in_turn_a_silo_has_paid_for_its_own_rounds_alone(tmp_path: Path) -> None:
    """Eight rounds of four groups: two of them may take this silo; a third job is none of the plan's."""
    till = served(tmp_path, adversary="models")
    for t in (2, 6, 7):
        released(till, job(IN_TURN, t, 0.0))
    assert spent(till) == {PoissonSampled(0.5, GaussianNoise(2.0)): 2, GaussianNoise(2.0): 1}


def test_a_silo_whose_ledger_was_rolled_back_is_told_by_the_receipts_that_its_server_holds(tmp_path: Path) -> None:
    """Database and head file rolled back together, between two rounds and between two processes of the server."""
    till = served(tmp_path, relation="replace_one")
    charges = released(till, job(LOCAL, 0, 0.0))
    for name in ("l", "l.head"):
        shutil.copy(tmp_path / name, tmp_path / f"old.{name}")
    charges = released(till, job(LOCAL, 1, 0.0, paid=charges))
    assert charges == 2
    till.ledger.close()
    for name in ("l", "l.head"):
        shutil.copy(tmp_path / f"old.{name}", tmp_path / name)
    again = served(tmp_path, relation="replace_one")
    for asked in (job(LOCAL, 2, 0.0, paid=charges), Job(RUN, LOCAL, 2, "secure", paid=charges)):
        with pytest.raises(
            ConfigError, match="1 charges of this run in the silo's ledger, but 2 in the silo's replies"
        ):
            again.allows(asked)
    assert again.ledger.statement("own").items == (Item(GaussianNoise(3.0)),)
