"""Promise: a server that follows the protocol sees the sum of at least `at_least` silos, and no row of any of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from sordino.accounting import secure_sums
from sordino.config import FederationSpec
from sordino.data.clients import Records
from sordino.engines.base import ClientJob, Collected
from sordino.engines.inprocess import InProcess
from sordino.engines.messages import Job
from sordino.errors import DataError, EngineError, QuorumError
from sordino.federation import keys, secagg
from sordino.federation.keys import Signer
from sordino.federation.secagg import SecAggClient, SecAggEngine, SecAggMessage
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.releases import NoiseShares
from sordino.parts.samplers import Everyone
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

SILOS, AT_LEAST = 4, 3
SHARE = 2.0 / math.sqrt(AT_LEAST)
RUN = "ab" * 16


def plan(**changes: Any) -> Plan:
    base = Plan(
        rounds=5,
        clients=Everyone(SILOS),
        local=LocalSgd(lr=0.5, epochs=1),
        encode=(Clip(1.0),),
        release=NoiseShares(2.0, AT_LEAST),
        server=Sgd(),
    )
    return replace(base, **changes)


def task(inputs: int = 30) -> Task:
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    silos = [(torch.randn(12, inputs, generator=rng), torch.arange(12) % 2) for _ in range(SILOS)]
    return Task.of(nn.Linear(inputs, 2), [Records(*pair) for pair in silos])


@dataclass
class Wire:
    """Members in this process; `silent` says who does not answer which stage. It keeps all that passed."""

    members: dict[int, SecAggClient]
    silent: Callable[[str, int], bool] = lambda stage, client: False
    offers: frozenset[str] = frozenset()
    name: str = "wire"
    seen: list[SecAggMessage] = field(default_factory=list)
    charged: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def of(
        cls, whole: Task, silent: Callable[[str, int], bool] | None = None, signers: Sequence[Signer] | None = None
    ) -> Wire:
        wire = cls({}, silent or (lambda stage, client: False))
        for client in range(SILOS):
            own = Signer() if signers is None else signers[client]

            def pay(job: Job, session: str, client: int = client) -> int:
                wire.charged.append((client, session))
                return sum(1 for who, _ in wire.charged if who == client)

            wire.members[client] = SecAggClient(client, whole.as_silo(client), lambda job: None, pay, time.time, own)
        return wire

    def exchange(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]:
        for client, body in bodies.items():
            if not self.silent(SecAggMessage.of_bytes(body).stage, client):
                made = self.members[client].reply(body)
                self.seen += [SecAggMessage.of_bytes(body), SecAggMessage.of_bytes(made)]
                yield client, made

    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterator[tuple[int, bytes]]:
        raise AssertionError("admission is not asked here")


def worker(wire: Wire, whole: Task, **changes: Any) -> Any:
    asked: dict[str, Any] = {"quorum": 1, "tries": 2, "timeout": 60.0, "admission": False}
    return SecAggEngine(wire, RUN, **asked).prepare(plan(**changes), whole.as_server(), Seeded(7))


def job(whole: Task, t: int = 0) -> ClientJob:
    start = whole.layout.flatten(whole.model)
    return ClientJob(plan().public(t, len(start)), start, np.arange(SILOS))


def collect(silent: Callable[[str, int], bool] | None = None, t: int = 0) -> tuple[Collected, Wire, Task]:
    whole = task()
    wire = Wire.of(whole, silent)
    return worker(wire, whole).collect(job(whole, t)), wire, whole


def expected(whole: Task, clients: list[int], t: int = 0) -> torch.Tensor:
    """The same noised rows, in steps of the grid, added by hand."""
    start = whole.layout.flatten(whole.model)
    total = np.zeros(len(start), dtype=np.int64)
    for client in clients:
        asked = Job(RUN, plan(), client, "simulation", 7, public=plan().public(t, len(start)), start=start)
        alone = InProcess(own_noise=True).prepare(plan(), whole.as_silo(client), Seeded(7))
        total += secagg.noised_steps(asked, secagg.clean_row(alone, asked))
    return torch.from_numpy(total.astype(np.float64)) * secagg.grid_of(plan()).step


def test_the_sum_is_exact() -> None:
    found, wire, whole = collect()
    assert torch.equal(found.total, expected(whole, [0, 1, 2, 3]))
    assert [receipt.charges for receipt in found.receipts] == [1, 1, 1, 1]
    plain = InProcess(own_noise=True).prepare(plan(), whole, Seeded(7)).collect(job(whole)).total
    assert float((found.total - plain).abs().max()) <= SILOS / 2 * secagg.grid_of(plan()).step + 1e-5
    assert len(wire.charged) == 4
    [rows] = [{len(m.body) for m in wire.seen if m.stage == "mask" and "charges" in m.fields}]
    assert rows == {2 * len(found.total)}  # words of 16 bits


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_is_the_same_in_longer_words(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short = secagg.grid_of(plan())
    monkeypatch.setattr(secure_sums, "WORDS", (bits,))
    monkeypatch.setattr(secure_sums, "FINEST", round(math.log2(SHARE / short.ratio / short.step)) + 9)
    found, _, whole = collect()
    assert secagg.grid_of(plan()).bits == bits
    assert torch.equal(found.total, expected(whole, [0, 1, 2, 3]))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_masks_cancel_in_words_of_every_size_also_beyond_their_range(bits: int) -> None:
    """Sums modulo 2^bits: of the largest and smallest words, with masks of three members."""
    ends = np.array([-(1 << (bits - 1)), (1 << (bits - 1)) - 1, -1, 1, 0], dtype=np.int64).astype(f"u{bits // 8}")
    own = [secagg.mask_words(bytes([i]) * 32, 5, bits) for i in range(3)]
    pairs = {(i, j): secagg.mask_words(bytes([i, j]) * 16, 5, bits) for i in range(3) for j in range(i + 1, 3)}
    total = np.zeros(5, dtype=ends.dtype)
    for i in range(3):
        sent = ends + own[i]
        for (a, b), mask in pairs.items():
            sent = sent + mask if a == i else sent - mask if b == i else sent
        assert sent.dtype == ends.dtype
        total = total + sent
    for mask in own:
        total = total - mask
    assert total.tolist() == [(3 * int(word)) % (1 << bits) for word in ends]


def test_who_dies_after_masking_is_in_the_sum() -> None:
    found, _, whole = collect(lambda stage, client: stage == "unmask" and client == 2)
    assert found.received == 4
    assert torch.equal(found.total, expected(whole, [0, 1, 2, 3]))


@pytest.mark.parametrize("stage", ["keys", "shares", "mask"])
def test_who_dies_before_masking_is_not_and_the_survivors_sum_is_exact(stage: str) -> None:
    found, wire, whole = collect(lambda at, client: at == stage and client == 1)
    assert found.reported is not None
    assert found.reported.tolist() == [0, 2, 3]
    assert torch.equal(found.total, expected(whole, [0, 2, 3]))
    assert 1 not in {client for client, _ in wire.charged}


@pytest.mark.parametrize("stage", ["keys", "shares", "mask", "unmask"])
def test_fewer_than_at_least_open_nothing(stage: str) -> None:
    with pytest.raises(QuorumError, match="fewer than 3 members"):
        collect(lambda at, client: at == stage and client in (1, 2))


def test_a_session_that_is_asked_again_draws_and_pays_anew() -> None:
    tries: list[str] = []

    def silent(stage: str, client: int) -> bool:
        tries.extend([stage] if stage == "mask" and client == 0 else [])
        return stage == "mask" and client in (2, 3) and len(tries) < 2

    found, wire, _ = collect(silent)
    assert found.received == 4
    assert len({session for _, session in wire.charged}) == 2
    assert sum(client == 0 for client, _ in wire.charged) == 2


# ---- what a silo refuses ---------------------------------------------------------------------------------------------


def stages(whole: Task) -> tuple[Wire, dict[str, dict[int, SecAggMessage]]]:
    """A session as the server asks for it: the messages of each stage."""
    found, wire, _ = collect()
    assert found.received == SILOS
    asked: dict[str, dict[int, SecAggMessage]] = {}
    for message, _ in zip(wire.seen[::2], wire.seen[1::2], strict=True):
        asked.setdefault(message.stage, {})[len(asked.get(message.stage, {}))] = message
    return wire, asked


def refusal(member: SecAggClient, message: SecAggMessage) -> str:
    return str(SecAggMessage.of_bytes(member.reply(message.to_bytes())).fields.get("refused", ""))


def test_a_sum_is_opened_once_and_never_below_the_threshold() -> None:
    wire, asked = stages(task())
    silo, message = wire.members[0], asked["unmask"][0]
    assert "one request per session" in refusal(silo, message)
    session = silo.sessions[message.session]
    session.opened = False
    assert "at least 3" in refusal(silo, replace(message, fields={"sent": [0, 1]}))
    assert "at least 3" in refusal(silo, replace(message, fields={"sent": [0, 1, 9]}))
    assert session.opened is False


def test_never_both_shares_of_one_member() -> None:
    """Own mask and key of one member together would open its row."""
    _, wire, _ = collect(lambda stage, client: stage == "mask" and client == 1)
    given = [message.fields["shares"] for message in wire.seen if "shares" in message.fields]
    sessions = [next(iter(silo.sessions.values())) for silo in wire.members.values()]
    for shares in given:
        for name, share in shares.items():
            kinds = {("mask", "key")[i] for one in sessions for i in (0, 1) if name_share(one, int(name), i) == share}
            assert kinds == ({"key"} if name == "1" else {"mask"})


def name_share(session: secagg.ClientSession, other: int, kind: int) -> str:
    return session.shares[other][kind].hex() if other in session.shares else ""


def test_another_threshold_a_late_job_and_a_second_row_are_refused() -> None:
    whole = task()
    wire = Wire.of(whole)
    silo, message = wire.members[0], stages(whole)[1]["mask"][0]
    with pytest.raises(DataError, match="an unknown session"):
        silo.reply(message.to_bytes())
    wire, asked = stages(whole)
    charged = len(wire.charged)
    assert "or a second one" in refusal(wire.members[0], asked["mask"][0])
    session = wire.members[0].sessions[asked["mask"][0].session]
    session.sent, session.threshold = False, 2
    assert "the plan's at_least = 3" in refusal(wire.members[0], asked["mask"][0])
    session.threshold = 3
    late = replace(wire.members[0], now=lambda: time.time() + 1e6)
    assert "past its deadline" in refusal(late, asked["mask"][0])
    assert len(wire.charged) == charged


# ---- members whose keys are pinned -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signers(tmp_path_factory: pytest.TempPathFactory) -> list[Signer]:
    """Each silo's own key, and the pinned keys of all."""
    folder, names = tmp_path_factory.mktemp("keys"), tuple(f"silo{i}" for i in range(SILOS))
    for name in names:
        keys.write_node_key(folder / name)
    spec = FederationSpec(silos=names, keys={name: keys.public_text(folder / f"{name}.pub") for name in names})
    return [keys.signer_of(spec, folder / name) for name in names]


def asked_for_shares(wire: Wire) -> tuple[dict[str, list[str]], str]:
    """The members' table as an honest server makes it, after stage `keys`; and the session."""
    session = "5e" * 16
    table = {}
    for client, silo in wire.members.items():
        said = SecAggMessage.of_bytes(silo.reply(SecAggMessage("keys", session).to_bytes())).fields
        table[str(client)] = [said["encryption"], said["masking"], said["signature"]]
    return table, session


def test_members_that_have_signed_their_keys_sum_as_before(signers: list[Signer]) -> None:
    whole = task()
    wire = Wire.of(whole, signers=signers)
    found = worker(wire, whole).collect(job(whole))
    assert torch.allclose(found.total, expected(whole, list(range(SILOS))), atol=1e-9)


@pytest.mark.parametrize("attack", ["invented", "exchanged", "replaced", "unsigned", "of another session"])
def test_a_server_that_invents_or_exchanges_members_gets_no_share_and_nobody_pays(
    attack: str, signers: list[Signer]
) -> None:
    wire = Wire.of(task(), signers=signers)
    table, session = asked_for_shares(wire)
    own, _ = asked_for_shares(Wire.of(task()))  # keys whose private halves the server knows
    honest = {"members": dict(table), "threshold": 3}
    table |= {
        "invented": {str(SILOS): own["1"]},
        "exchanged": {"1": table["2"], "2": table["1"]},
        "replaced": {"1": [*own["1"][:2], table["1"][2]]},
        "unsigned": {"1": [*table["1"][:2], ""]},
        "of another session": {"1": asked_for_other(wire.members[1])},
    }[attack]
    told = SecAggMessage("shares", session, {"members": table, "threshold": 3})
    assert "that its silo did not sign" in refusal(wire.members[0], told)
    assert wire.charged == []
    assert refusal(wire.members[0], replace(told, fields=honest)) == ""


def asked_for_other(silo: SecAggClient) -> list[str]:
    """Keys that a silo has signed in another session."""
    said = SecAggMessage.of_bytes(replace(silo).reply(SecAggMessage("keys", "a1" * 16).to_bytes())).fields
    return [said[name] for name in ("encryption", "masking", "signature")]


def test_a_silo_without_pinned_keys_gives_no_row_for_release() -> None:
    wire, asked = stages(task())
    message = asked["mask"][0]
    wire.members[0].sessions[message.session].sent = False
    held = Job.from_bytes(message.body, task().layout.size)
    secure = replace(message, body=replace(held, mode="secure", seed=None).to_bytes())
    assert "without the other members' pinned keys" in refusal(wire.members[0], secure)


def test_bad_messages_are_one_sentence() -> None:
    silo = Wire.of(task()).members[0]
    good = SecAggMessage("keys", "s").to_bytes()
    for bad in (b"", good[:-3], good.replace(b'"keys"', b'"code"'), good.replace(b'"fields": {}', b'"fields": []')):
        with pytest.raises(DataError):
            silo.reply(bad)
    silo.reply(good)
    for told in ({}, {"members": 3}, {"members": {"0": ["zz", ""]}, "threshold": 2}, {"members": {}, "threshold": "x"}):
        assert "found" in refusal(silo, SecAggMessage("shares", "s", told))


@given(st.data())
def test_no_message_makes_a_silo_stumble_or_pay(data: st.DataObject) -> None:
    """A message of any stage with bytes changed, dropped or put in: a sentence, or an answer; a row is never made."""
    wire, messages = known_messages()
    body = bytearray(data.draw(st.sampled_from(messages)).to_bytes())
    place = data.draw(st.integers(0, len(body) - 1))
    stop = data.draw(st.integers(place, min(len(body), place + 8)))
    body[place:stop] = data.draw(st.binary(max_size=8))
    with suppress(DataError):
        wire.members[0].reply(bytes(body))
    assert wire.charged == []


@cache
def known_messages() -> tuple[Wire, list[SecAggMessage]]:
    """The messages of one whole session, and silos that were in none."""
    _, asked = stages(task())
    return Wire.of(task()), [message for stage in asked.values() for message in stage.values()]


def test_a_plan_that_a_secure_sum_cannot_hold_is_refused() -> None:
    whole = task()
    with pytest.raises(EngineError, match="at_least of 2 or more"):
        worker(Wire.of(whole), whole, release=NoiseShares(2.0, 1))


# ---- the grid --------------------------------------------------------------------------------------------------------


def at_edges(whole: Task) -> Any:
    """A plan's grid, and rows whose coordinates lie on the grid, half a step and a quarter above it."""
    grid = secagg.grid_of(plan())
    size = len(whole.layout.flatten(whole.model))
    return grid, [(np.arange(size) % 4 / 4 + np.arange(size) // 4) * grid.step for _ in range(SILOS)]


def mean_of_sums(monkeypatch: pytest.MonkeyPatch, sums: int, coarse: int, first: bool = False) -> tuple[Any, float]:
    """Mean error of sums of rows at the edges of cells, on a coarse grid, in its own deviations."""
    monkeypatch.setattr(secure_sums, "FINEST", coarse)
    monkeypatch.setattr(secure_sums, "COARSEST", coarse)
    whole = task(3)
    grid, rows = at_edges(whole)
    monkeypatch.setattr(secagg, "clean_row", lambda worker, job: rows[job.client])
    if first:  # sabotage: the row is rounded before its noise is added
        rows = [np.ceil(row / grid.step) * grid.step for row in rows]
    truth, found = sum(at_edges(whole)[1]), []
    for t in range(sums):
        engine = SecAggEngine(Wire.of(whole), RUN, 1, 2, 60.0, False)
        summed = engine.prepare(plan(), whole.as_server(), Seeded(2000 + t)).collect(job(whole, t % 5))
        found.append(summed.total.numpy() - truth)
    std = math.sqrt(SILOS) * math.sqrt(SHARE**2 + grid.step**2 / 12)
    return np.mean(found) / std * math.sqrt(np.size(found)), grid.step


def test_rows_at_the_edges_of_cells_are_summed_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    bias, step = mean_of_sums(monkeypatch, 20, 0)
    assert step == 1.0
    assert abs(bias) < 4.5


def test_rounding_rows_before_their_noise_would_bias_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    bias, _ = mean_of_sums(monkeypatch, 20, 0, first=True)
    assert abs(bias) > 4.5


# ---- the noise -------------------------------------------------------------------------------------------------------


def noise_of_sums(sums: int, factor: float = 1.0) -> np.ndarray[Any, Any]:
    """The noise of that many opened sums, in deviations of what the plan promises for who came."""
    whole, found = task(4), []
    release = NoiseShares(2.0 * factor, AT_LEAST)
    clean = InProcess(own_noise=False).prepare(plan(), whole, Seeded(7))
    for t in range(sums):
        wire = Wire.of(whole)
        engine = SecAggEngine(wire, RUN, 1, 2, 60.0, False)
        summed = engine.prepare(plan(release=release), whole.as_server(), Seeded(1000 + t)).collect(job(whole, t % 5))
        found.append((summed.total - clean.collect(job(whole, t % 5)).total).numpy())
    return np.concatenate(found) / (2.0 * math.sqrt(SILOS / AT_LEAST))


def chi_square(noise: np.ndarray[Any, Any]) -> float:
    return float(2 * min(stats.chi2.cdf((noise**2).sum(), len(noise)), stats.chi2.sf((noise**2).sum(), len(noise))))


def test_the_noise_of_two_hundred_sums_is_the_plans_and_half_of_it_is_not() -> None:
    assert chi_square(noise_of_sums(200)) > 1e-3
    assert chi_square(noise_of_sums(20, 0.5)) < 1e-6


# ---- the masks -------------------------------------------------------------------------------------------------------


def test_a_masked_row_looks_like_chance_and_tells_nothing_of_the_clean_one() -> None:
    _, wire, _ = collect()
    rows = [
        np.frombuffer(message.body, np.uint8)
        for message in wire.seen
        if message.stage == "mask" and "charges" in message.fields
    ]
    counts = np.bincount(np.concatenate(rows), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
