"""Promises of clients that are elsewhere: the model of a simulation, noise of their own, one cost, no round lost."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.cases import STILL, wide, with_test
from tests.engines.wires import Wires, instead, lost
from tests.silos import planned, silos
from tests.tiny import mlp, plan
from torch import Tensor

from sordino.engines.base import ClientJob, Collected
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.engines.messages import Job, Reply
from sordino.engines.remote import InMemoryReplyStore, Remote, RemoteWorker, Silo, noised_reply, worker_of
from sordino.errors import BudgetError, ConfigError, DataError, EngineError, QuorumError
from sordino.loop import Tally, run
from sordino.parts.encoding import Adaptive, Clip, Public
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, NoNoise, Release
from sordino.parts.samplers import Poisson, RoundRobin
from sordino.parts.sparsify import PublicDataMask, PublicMask
from sordino.plan import Plan
from sordino.recipes import scaffold
from sordino.rng import Secure, Seeded, Streams
from sordino.task import Task

RUN = "0123456789abcdef" * 2
OWN, SEED = InProcess(own_noise=True), Seeded(5)
SGD = LocalSgd(lr=0.3, epochs=2, batch=2, momentum=0.5)


def remote(wires: Wires, **settings: Any) -> Remote:
    return Remote(wires, RUN, **settings)


def model(plan: Plan, task: Task, engine: Any, streams: Streams = SEED, tally: Tally | None = None) -> Tensor:
    done = list(run(plan, task, engine=engine, streams=streams, charges=tally, eval_every=plan.rounds))
    return plan.server.result(done[-1].state.memory)


TEN = plan(rounds=10, local=SGD)
SILO_SIZES = (6, 4, 9)
CASES: dict[str, tuple[Plan, Task]] = {
    "no noise": (replace(TEN, release=NoNoise()), with_test(mlp())),
    "central noise": (replace(TEN, clients=Poisson(6, 0.7)), with_test(mlp())),
    "local noise": (replace(TEN, release=LocalNoise(Gaussian(1.0), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))), with_test(mlp())),
    "laplace": (replace(TEN, encode=(Clip(1.0, 1),), release=LocalNoise(Laplace(2.0))), with_test(mlp())),
    "noise shares": (replace(TEN, release=NoiseShares(1.0, 2)), with_test(mlp())),
    "round robin": (replace(TEN, clients=RoundRobin(6, 2), release=LocalNoise(Gaussian(1.0))), with_test(mlp())),
    "records": (planned(rounds=10), silos()),
    "noise of the solver's own": (
        planned(rounds=10, local=NoisyLocalSgd(FixedRecords(2, SILO_SIZES), 1.0, 2.0, 0.3, 3), release=Forward()),
        silos(),
    ),
    "adaptive clip norm": (replace(TEN, encode=(Clip(Adaptive(0.5)),)), with_test(mlp())),
    "mask from public records": (replace(TEN, encode=(PublicMask(0.3, PublicDataMask()), Clip(0.7))), with_test(mlp())),
}


@pytest.mark.parametrize("name", CASES)
def test_ten_rounds_elsewhere_end_as_ten_rounds_here(name: str) -> None:
    wanted, task = CASES[name]
    here = model(wanted, task, OWN)
    there = model(wanted, task.as_server(), remote(Wires.of(task)))
    assert float((here - there).abs().max()) <= 1e-5


def test_what_a_silo_computes_is_bit_for_bit_the_row_of_the_engine() -> None:
    wanted, task = CASES["local noise"]
    worker = InProcess(own_noise=True, chunk=1).prepare(wanted, task, SEED)
    start = task.layout.flatten(task.model)
    public = wanted.public(3, len(start))
    for client in range(6):
        total = worker.fold(ClientJob(public, start, np.array([client])))[0]
        job = Job(RUN, wanted, client, "simulation", 5, public=public, start=start)
        reply = noised_reply(worker_of(wanted, task.as_silo(client), SEED), job, lambda _: 1)
        assert reply.row is not None
        assert torch.equal(reply.row.double(), total)


# ---- noise -----------------------------------------------------------------------------------------------------------

RELEASES: dict[str, Release] = {
    "shares": NoiseShares(3.0, 2),
    "local": LocalNoise(Gaussian(3.0), (0.5, 1.0, 2.0, 4.0)),
    "central": CentralNoise(Gaussian(3.0)),
}


def deviation(release: Release) -> float:
    """Of the noise in the sum of four clients whose messages are zero, for release."""
    wanted, task = replace(STILL, release=release), wide()
    moved = task.layout.flatten(task.model) - model(wanted, task.as_server(), remote(Wires.of(task)), Secure())
    return float(moved.double().std()) * release.denominator(4.0, 4)


@pytest.mark.parametrize("name", RELEASES)
def test_noise_for_release_has_the_deviation_that_is_billed(name: str) -> None:
    assert deviation(RELEASES[name]) == pytest.approx(RELEASES[name].noise_std(np.arange(4), 0), rel=0.06)


@dataclass(frozen=True)
class Bare:
    """`honest` with one thing wrong."""

    where: Any
    name: str
    wrong: Any


def doubled(self: InProcessWorker, clients: Any, rows: Tensor, t: int, honest: Any = InProcessWorker.sent) -> Any:
    return honest(self, clients, honest(self, clients, rows, t), t)


def by_the_server(self: RemoteWorker, job: ClientJob, honest: Any = RemoteWorker.collect) -> Any:
    return replace(honest(self, job), noised=False)


SABOTAGE = {
    "drawn twice": Bare(InProcessWorker, "sent", doubled),
    "not drawn": Bare(InProcessWorker, "sent", lambda self, clients, rows, t: rows),
    "by the server too": Bare(RemoteWorker, "collect", by_the_server),
}


@pytest.mark.parametrize("how", SABOTAGE)
@pytest.mark.parametrize("name", ["shares", "local"])
def test_the_wrong_noise_is_noticed(how: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = SABOTAGE[how]
    monkeypatch.setattr(bare.where, bare.name, bare.wrong)
    monkeypatch.setattr(Collected, "check", lambda *_: None)  # the deviation must tell by itself
    assert deviation(RELEASES[name]) != pytest.approx(RELEASES[name].noise_std(np.arange(4), 0), rel=0.06)


def test_the_message_on_the_wire_is_noised_and_on_its_grid_and_the_clean_row_is_not_there() -> None:
    wanted, task = replace(STILL, release=LocalNoise(Gaussian(2.0))), wide()
    wires = Wires.of(task)
    model(wanted, task.as_server(), remote(wires), Secure())
    rows = [body.partition(b"\n")[2] for ask, _, body in wires.heard if ask == 2]
    assert len(rows) == 4
    for raw in rows:
        row = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        assert float(row.std()) == pytest.approx(2.0, rel=0.06)
        assert torch.equal(row * 2.0**19, (row * 2.0**19).round())
        assert b"\0" * 32 not in raw  # 32 bytes of the clean message


def test_a_job_for_release_holds_no_seed_and_no_other_clients_name() -> None:
    wires, seen = Wires.of(wide()), list[bytes]()

    def tap(ask: int, job: Job, body: bytes) -> list[bytes]:
        seen.append(job.to_bytes())
        return [body]

    wires.faults.append(tap)
    model(STILL, wide().as_server(), remote(wires), Secure())
    heads = [json.loads(body.partition(b"\n")[0]) for body in seen]
    words = ("format", "kind", "run", "client", "mode", "seed", "deadline", "paid", "encoding", "plan", "arrays")
    known = {*words, "t", "clip_norm", "size", "state"}
    assert len(heads) == 8
    assert all(set(head) <= known and head["seed"] is None for head in heads)


# ---- who came --------------------------------------------------------------------------------------------------------

LOCAL = plan(rounds=3, release=LocalNoise(Gaussian(1.0)))
SHARES = plan(rounds=3, release=NoiseShares(1.0, 4))


def collected(wanted: Plan, wires: Wires, **settings: Any) -> Collected:
    task = with_test(mlp())
    worker = remote(wires, **settings).prepare(wanted, task.as_server(), SEED)
    start = task.layout.flatten(task.model)
    return worker.collect(ClientJob(wanted.public(0, len(start)), start, np.arange(6)))


def refusing(task: Task, *clients: int) -> Wires:
    """Silos of which some have nothing left to spend."""
    wires = Wires.of(task)

    class Empty(InMemoryReplyStore):
        def charge(self, job: Job) -> int:
            raise BudgetError("nothing is left of this silo's budget")

    for client in clients:
        wires.silos[client] = Silo(task.as_silo(client), Empty())
    return wires


def test_a_round_names_who_reported_and_who_refused_and_what_each_has_paid() -> None:
    wires = refusing(with_test(mlp()), 2, 4)
    wires.faults.append(lost(5))
    found = collected(LOCAL, wires)
    assert found.reported is not None
    assert found.reported.tolist() == [0, 1, 3]
    assert found.received == 3
    assert set(found.refused) == {2, 4}
    assert "nothing is left" in found.refused[2]
    assert [(receipt.client, receipt.charges) for receipt in found.receipts] == [(0, 1), (1, 1), (3, 1)]
    assert found.noised
    assert found.diagnostics == {}


def test_a_mean_over_those_who_came_and_noise_of_those_who_came() -> None:
    """Three of six report: the deviation that a denoiser is told is theirs."""
    from sordino.loop import mean_std

    found = collected(LOCAL, Wires.of(with_test(mlp()), lost(0, 1, 2)))
    std = mean_std(LOCAL, found.participants(np.arange(6)), found.received, Public(t=0))
    assert std == pytest.approx(math.sqrt(3) / 3)


def test_whoever_is_missing_is_asked_again_with_the_same_job_and_pays_once() -> None:
    task = with_test(mlp())
    wires = Wires.of(task, lost(3, 4, 5, asks=(2,)))
    found = collected(LOCAL, wires, quorum=6)
    assert found.received == 6
    assert [client for ask, client, _ in wires.heard if ask == 3] == [5, 4, 3]
    again = {client: body for ask, client, body in wires.heard if ask == 3}
    assert all(body == again[client] for ask, client, body in wires.heard if ask == 2 and client in again)
    assert [silo.store.paid[RUN] for silo in wires.silos.values()] == [1] * 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(("wanted", "quorum"), [(LOCAL, 4), (SHARES, 1)], ids=["quorum", "too few shares"])
def test_a_round_that_stays_short_stops_the_run_after_three_tries(wanted: Plan, quorum: int) -> None:
    wires = Wires.of(with_test(mlp()), lost(0, 1, 2))
    with pytest.raises(QuorumError, match=r"fewer clients .*3 did.*--resume") as caught:
        collected(wanted, wires, quorum=quorum)
    assert wires.asks == 4  # one of them for admission
    assert caught.value.collected.received == 3


def test_an_empty_round_of_local_noise_does_not_step_on() -> None:
    tally, task = Tally(), with_test(mlp())
    with pytest.raises(QuorumError):
        model(LOCAL, task.as_server(), remote(Wires.of(task, lost(*range(6)))), tally=tally)
    assert tally.rounds == [0]  # messages may have left: it is accounted


def test_a_cohort_that_was_drawn_too_small_is_not_asked() -> None:
    few = plan(rounds=1, clients=RoundRobin(6, 2), release=NoiseShares(1.0, 2))
    object.__setattr__(few, "release", NoiseShares(1.0, 3))
    task = with_test(mlp())
    wires = Wires.of(task)
    done = list(run(few, task.as_server(), engine=remote(wires, admission=False), streams=SEED))
    assert (wires.asks, done[0].void) == (0, True)


def test_a_secret_cohort_is_in_no_sentence() -> None:
    wires = Wires.of(with_test(mlp()), lost(0, 1, 2))
    with pytest.raises(QuorumError) as caught:
        collected(plan(clients=Poisson(6, 0.5)), wires, quorum=4)
    said = str(caught.value)
    assert "client 0" not in said
    assert "3" not in said.replace(RUN, "")


def test_a_run_that_stopped_goes_on_where_it_was_and_what_was_said_is_said_again_for_free() -> None:
    task = with_test(mlp())
    wires = Wires.of(task, lost(0, asks=(3, 4, 5)))
    going = run(LOCAL, task.as_server(), engine=remote(wires, quorum=6), streams=SEED)
    first = next(going).state
    with pytest.raises(QuorumError):
        next(going)
    rest = list(run(LOCAL, task.as_server(), engine=remote(wires, quorum=6), streams=SEED, state=first))
    assert [silo.store.paid[RUN] for silo in wires.silos.values()] == [3] * 6  # type: ignore[attr-defined]
    whole = model(LOCAL, task, OWN)
    assert float((LOCAL.server.result(rest[-1].state.memory) - whole).abs().max()) <= 1e-5


BAD: dict[str, tuple[Any, str]] = {
    "NaN": (lambda body: [body[:-4] + b"\x00\x00\xc0\x7f"], "NaN"),
    "cut short": (lambda body: [body[:-2]], "all of its"),
    "empty": (lambda body: [b""], "no line"),
    "two nodes": (lambda body: [body, body[:-1] + bytes([body[-1] ^ 1])], "two nodes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_reply_that_cannot_be_used_is_nobodys_and_the_round_goes_on_or_says_why(name: str) -> None:
    change, words = BAD[name]
    task = with_test(mlp())
    found = collected(LOCAL, Wires.of(task, instead(4, change)))
    assert found.reported is not None
    assert found.reported.tolist() == [0, 1, 2, 3, 5]
    with pytest.raises(QuorumError, match=words):
        collected(LOCAL, Wires.of(task, instead(4, change)), quorum=6)


def test_the_same_answer_twice_is_one() -> None:
    found = collected(LOCAL, Wires.of(with_test(mlp()), instead(4, lambda body: [body, body])))
    assert found.received == 6


# ---- a silo ----------------------------------------------------------------------------------------------------------


def job_of(wanted: Plan, task: Task, client: int = 1, **changes: Any) -> Job:
    start = task.layout.flatten(task.model)
    job = Job(RUN, wanted, client, "simulation", 5, public=wanted.public(0, len(start)), start=start)
    return replace(job, **changes)


def test_a_silo_says_the_same_again_and_pays_nothing_even_past_the_deadline() -> None:
    task, till = with_test(mlp()), InMemoryReplyStore()
    silo = Silo(task.as_silo(1), till, now=lambda: 100.0)
    first = silo.reply(job_of(LOCAL, task, deadline=200.0).to_bytes())
    assert silo.reply(job_of(LOCAL, task, deadline=50.0).to_bytes()) == first
    assert till.paid == {RUN: 1}


def test_a_job_past_its_deadline_is_not_computed_and_costs_nothing() -> None:
    task, till = with_test(mlp()), InMemoryReplyStore()
    silo = Silo(task.as_silo(1), till, now=lambda: 100.0)
    with pytest.raises(DataError, match="past its deadline"):
        silo.reply(job_of(LOCAL, task, deadline=50.0).to_bytes())
    assert till.paid == {}


@pytest.mark.parametrize(
    ("wanted", "order"),
    [
        (LOCAL, ["solve", "charge", "noise", "store"]),
        (CASES["noise of the solver's own"][0], ["charge", "solve", "noise", "store"]),
    ],
    ids=["noise on the message", "noise of the solver's own"],
)
def test_a_message_is_charged_before_its_noise_and_stored_before_it_is_sent(
    wanted: Plan, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, log = with_test(mlp()) if wanted is LOCAL else silos(), list[str]()

    class Diary(InMemoryReplyStore):
        def charge(self, job: Job) -> int:
            log.append("charge")
            return super().charge(job)

        def store(self, job: Job, reply: bytes) -> None:
            log.append("store")
            super().store(job, reply)

    for name, word in (("solve", "solve"), ("sent", "noise")):
        honest = getattr(InProcessWorker, name)

        def noted(self: Any, *given: Any, honest: Any = honest, word: str = word) -> Any:
            log.append(word)
            return honest(self, *given)

        monkeypatch.setattr(InProcessWorker, name, noted)
    Silo(task.as_silo(1), Diary()).reply(job_of(wanted, task).to_bytes())
    assert log == order


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"client": 2}, "this silo's client number"),
        ({"plan": replace(LOCAL, clients=RoundRobin(7, 3))}, "a plan for 7 clients"),
    ],
    ids=["another's", "another population"],
)
def test_a_silo_refuses_what_is_not_its_own_and_pays_nothing(changes: dict[str, Any], words: str) -> None:
    task, till = with_test(mlp()), InMemoryReplyStore()
    job = job_of(LOCAL, task, **changes)
    reply = Reply.from_bytes(Silo(task.as_silo(1), till).reply(job.to_bytes()), job, task.layout.size)
    assert words in reply.refused
    assert till.paid == {}


def test_a_policy_refuses_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(job: Job) -> None:
        raise DataError("a plan that this silo's policy does not name")

    monkeypatch.setattr(InProcessWorker, "solve", None)
    task, till = with_test(mlp()), InMemoryReplyStore()
    wires = Wires.of(task)
    wires.silos[3] = Silo(task.as_silo(3), till, no)
    with pytest.raises(EngineError, match=r"client 3, which refuses this plan \(.*policy"):
        remote(wires).prepare(LOCAL, task.as_server(), SEED)
    assert till.paid == {}


# ---- what cannot start -----------------------------------------------------------------------------------------------


def test_a_transport_without_a_secure_sum_runs_no_noise_shares() -> None:
    task = with_test(mlp())
    wires = Wires.of(task)
    wires.offers = frozenset()
    with pytest.raises(EngineError, match="secure_sum"):
        model(SHARES, task.as_server(), remote(wires))


@pytest.mark.parametrize("settings", [{"quorum": 0}, {"tries": 0}, {"timeout": 0.0}, {"timeout": math.nan}], ids=str)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        remote(Wires({}), **settings)


def test_a_quorum_above_the_population_and_a_run_without_a_name_are_refused() -> None:
    task = with_test(mlp())
    with pytest.raises(ConfigError, match="quorum = 7"):
        model(LOCAL, task.as_server(), remote(Wires.of(task), quorum=7))
    with pytest.raises(EngineError, match="id"):
        model(LOCAL, task.as_server(), Remote(Wires.of(task)))


def test_clients_that_remember_are_refused_by_the_server_and_by_the_silo() -> None:
    """SCAFFOLD's control variates would have to outlive a silo's process."""
    task = with_test(mlp())
    memory = scaffold(clients=Poisson(6, 0.5), steps=2, batch=2, lr=0.1, clip_norm=1.0, noise_multiplier=1.0, rounds=2)
    with pytest.raises(EngineError, match="on an engine without client_state"):
        model(memory, task.as_server(), remote(Wires.of(task)))
    till = InMemoryReplyStore()
    job = Job(RUN, memory, 1, "simulation", 5)
    reply = Reply.from_bytes(Silo(task.as_silo(1), till).reply(job.to_bytes()), job, task.layout.size)
    assert "a silo, which stores no client state between rounds" in reply.refused
    assert till.paid == {}


def test_no_malformed_job_is_charged() -> None:
    task, till = with_test(mlp()), InMemoryReplyStore()
    silo, whole = Silo(task.as_silo(1), till), job_of(LOCAL, task).to_bytes()
    for body in (whole[:-1], whole + b"x", b"", whole.replace(b'"round"', b'"erase"'), whole.replace(b"1", b"2", 1)):
        with pytest.raises(DataError):
            silo.reply(body)
    assert till.paid == {}
