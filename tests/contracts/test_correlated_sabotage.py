"""Promise: of noise that rounds share, the audit finds what is lost, turned or left out; correct code passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino import loop as loop
from sordino.audit import attacks
from sordino.audit.mechanism import audit_mechanism
from sordino.audit.noise_test import failures, unexamined
from sordino.audit.summary import audit_behaviour
from sordino.parts import strategies
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import RecordsInTurn
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.samplers import CyclicPoisson, Everyone, RoundRobin, Sampler
from sordino.parts.server_optimizers import Sgd
from sordino.parts.strategies import Banded, BandedSquareRoot, BufferedToeplitz, Strategy, Tree
from sordino.plan import Plan
from sordino.runs.writer import Checkpoint

Patch = pytest.MonkeyPatch
ROUNDS, TRIALS = 64, 20_000


def plan(strategy: Strategy, clients: Sampler | None = None) -> Plan:
    return Plan(
        rounds=16,
        clients=clients or RoundRobin(32, 8),
        local=LocalSgd(lr=0.1, steps=1),
        encode=(Clip(0.7),),
        release=CorrelatedNoise(Gaussian(1.0), strategy),
        server=Sgd(),
    ).fitted()


BANDS = plan(BandedSquareRoot(4))
DRIFT = plan(Banded(4, (1.0, 0.8, 0.6, 0.5), ends=16, drift=(0.0, -0.7, -0.6, -0.5)))
GROUPS = plan(Banded(3), CyclicPoisson(60, 3, 0.4))
RECORDS = Plan(
    rounds=16,
    clients=Everyone(1),
    local=BatchGradient(RecordsInTurn(8, (32,)), 0.7),
    release=CorrelatedNoise(Gaussian(1.0), BandedSquareRoot(4)),
    server=Sgd(),
)


def forgets(patch: Patch) -> None:
    """A checkpoint without the bands."""
    whole = Checkpoint.of_bytes

    def read(data: bytes) -> Checkpoint:
        found = whole(data)
        lost = {name: torch.zeros_like(held) for name, held in found.state.secret_state.items()}
        return replace(found, state=replace(found.state, secret_state=lost))

    patch.setattr(Checkpoint, "of_bytes", staticmethod(read))


def wrong_sign(patch: Patch) -> None:
    whole = strategies._Banded.step

    def step(self: Any, fresh: Callable[[], Tensor], memory: Mapping[str, Tensor]) -> Any:
        turned = {**memory, "past": -memory["past"]}
        noise, kept = whole(self, fresh, turned)
        return noise, {**kept, "past": _but(kept["past"], -kept["past"], int(memory["at"]) % len(kept["past"]))}

    patch.setattr(strategies._Banded, "step", step)


def _but(row: Tensor, others: Tensor, place: int) -> Tensor:
    """All rows turned back, but for the new one."""
    found = others.clone()
    found[place] = row[place]
    return found


def independent(patch: Patch) -> None:
    patch.setattr(strategies._Banded, "step", lambda self, fresh, memory: (fresh(), dict(memory)))


def steady(patch: Patch) -> None:
    """Bands that should drift, and do not."""
    patch.setattr(Banded, "row", lambda self, t: self.column(99))


def unscaled(patch: Patch) -> None:
    """Columns of C as they come, not of one length."""
    patch.setattr(Banded, "scale", lambda self, t: 1.0)


def hasty(patch: Patch) -> None:
    """The first client comes to every round, and nobody is left out."""
    whole = RoundRobin.draw

    def draw(self: RoundRobin, t: int, rng: np.random.Generator) -> Any:
        return np.union1d(whole(self, t, rng)[1:], [0])

    patch.setattr(RoundRobin, "draw", draw)
    for module in (loop, attacks):
        patch.setattr(module, "separation_guard", lambda *_: None)


BROKEN = {
    "bands lost at a resume": (BANDS, forgets, "noise of each round"),
    "noise correlated with the wrong sign": (BANDS, wrong_sign, "noise of two rounds"),
    "separation not kept": (BANDS, hasty, "trial rounds, cohort: separation"),
    "the identity, accounted as C": (BANDS, independent, "noise of two rounds"),
    "bands that do not drift as accounted": (DRIFT, steady, "noise of two rounds"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_run_as_planned_is_caught(name: str, monkeypatch: Patch) -> None:
    planned, breaks, question = BROKEN[name]
    breaks(monkeypatch)
    assert question in {found.question for found in failures(audit_behaviour(planned, rounds=ROUNDS))}


@pytest.mark.parametrize(
    ("planned", "least"),
    [
        (BANDS, 0.85),
        (DRIFT, 0.85),
        (GROUPS, 0.4),
        (RECORDS, 0.85),
        (plan(BufferedToeplitz(2)), 0.85),
        (plan(Tree()), 0.4),
    ],
    ids=["bands", "drift", "groups", "records", "buffers", "tree"],
)
def test_the_correct_code_runs_as_planned_and_stays_below_its_certificate(planned: Plan, least: float) -> None:
    found = audit_behaviour(planned, rounds=ROUNDS, seed=1)
    assert failures(found) == []
    assert unexamined(found) == []
    for audit in audit_mechanism(planned, delta=1e-5, trials=TRIALS):
        assert audit.passed, audit
        assert audit.lower_mu > least * audit.upper_mu  # not vacuous: the attack comes near


def test_a_client_that_does_not_rest_beats_the_certificate(monkeypatch: Patch) -> None:
    hasty(monkeypatch)
    found = audit_mechanism(BANDS, delta=1e-5, trials=TRIALS)
    assert not any(audit.passed for audit in found)


def test_columns_longer_than_billed_beat_the_certificate(monkeypatch: Patch) -> None:
    """Bands that drift upwards, every column to be brought to the length of the first."""
    rising = plan(Banded(4, (1.0, 0.1, 0.1, 0.1), ends=16, drift=(0.0, 0.9, 0.9, 0.9)))
    assert all(audit.passed for audit in audit_mechanism(rising, delta=1e-5, trials=TRIALS))
    unscaled(monkeypatch)
    assert not any(audit.passed for audit in audit_mechanism(rising, delta=1e-5, trials=TRIALS))


def test_half_the_noise_beats_the_certificate(monkeypatch: Patch) -> None:
    whole = Gaussian.sample
    monkeypatch.setattr(Gaussian, "sample", lambda self, size, rng: whole(self, size, rng) / 2)
    assert not any(audit.passed for audit in audit_mechanism(BANDS, delta=1e-5, trials=TRIALS))
