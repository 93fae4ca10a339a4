"""Promises of noise that every client draws itself: once, for all, on its own grid, and never by the server too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.engines.cases import STILL, wide
from tests.tiny import final, plan, task
from torch import Tensor

from sordino.engines.base import ClientJob, Collected
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.errors import PlanError
from sordino.loop import Round, run
from sordino.parts.encoding import Clip
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, NoNoise, Release, ShuffledNoise, own_message
from sordino.plan import Plan
from sordino.rng import Secure, Seeded, Streams

OWN = InProcess(own_noise=True)
OWNERS = (0.5, 1.0, 2.0, 4.0)
RELEASES: dict[str, Release] = {
    "shares": NoiseShares(3.0, 2),
    "gaussian": LocalNoise(Gaussian(3.0)),
    "one each": LocalNoise(Gaussian(1.0), OWNERS),
    "laplace": LocalNoise(Laplace(3.0)),
    "shuffled": ShuffledNoise(Gaussian(3.0), 2),
}


def still(release: Release) -> Plan:
    """One round of four clients whose messages are zero: what is released is noise."""
    norm: Any = 1 if isinstance(release, LocalNoise) and isinstance(release.mechanism, Laplace) else 2
    return replace(STILL, release=release, encode=(Clip(1.0, norm),))


def noise_of(plan: Plan, engine: InProcess, streams: Streams) -> Tensor:
    """The sum's noise, read off the model after the round."""
    held = wide()
    done: Round = next(run(plan, held, engine=engine, streams=streams))
    moved = held.layout.flatten(held.model) - plan.server.result(done.state.memory)
    return moved.double() * plan.release.denominator(plan.clients.expected, 4)


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize("streams", [Seeded(3), Secure()], ids=["simulation", "secure"])
def test_the_sum_of_own_draws_has_the_deviation_that_is_billed(name: str, streams: Streams) -> None:
    wanted = still(RELEASES[name])
    found = float(noise_of(wanted, OWN, streams).std())
    assert found == pytest.approx(wanted.release.noise_std(np.arange(4), 0), rel=0.06)


def test_every_clients_noise_is_of_the_stream_of_its_round_and_number() -> None:
    release, streams = LocalNoise(Gaussian(1.0), OWNERS), Seeded(3)
    worker = OWN.prepare(still(release), wide(), streams)
    rows = worker.sent(np.arange(4), torch.zeros(4, 3030), 7)
    for client, row in enumerate(rows):
        drawn = streams.at(7, "client noise", client).standard_normal(3030) * OWNERS[client]
        assert torch.equal(row, torch.from_numpy(drawn).float())


def test_in_a_release_the_message_lies_on_its_own_grid() -> None:
    row = own_message(LocalNoise(Gaussian(1.0), OWNERS), torch.zeros(1000), 3, 0, Secure().at(0, "x", 3), secure=True)
    assert torch.equal(row * 2.0**18, (row * 2.0**18).round())  # 4 = 2^2, so 2^(2 - 20)
    coins = Seeded(0).at(0, "x", 3)
    plain = own_message(LocalNoise(Gaussian(1.0), OWNERS), torch.zeros(1000), 3, 0, coins, secure=False)
    assert not torch.equal(plain * 2.0**18, (plain * 2.0**18).round())


@pytest.mark.parametrize("release", [CentralNoise(Gaussian(1.0)), NoNoise()], ids=["central", "none"])
def test_where_clients_draw_nothing_the_two_ways_are_one(release: Release) -> None:
    wanted = plan(rounds=3, release=release)
    assert torch.equal(final(wanted, task()), final(wanted, task(), OWN))


def test_no_figure_of_a_sum_that_is_noised_already_is_called_clean() -> None:
    done = list(run(still(NoiseShares(3.0, 2)), wide(), engine=OWN, streams=Seeded(0)))
    assert "signal_to_noise" not in done[0].diagnostics


@dataclass(frozen=True)
class Alone(NoNoise, kind="alone_in_a_test"):
    """A stranger's: clients add noise, and nobody has written the shortcut."""

    client_noise: ClassVar[bool] = True

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        return row + torch.from_numpy(Gaussian(1.0 + client).sample(len(row), rng))

    def noise_std(self, cohort: Any, t: int) -> float:
        return float(np.sqrt(((1.0 + cohort) ** 2).sum()))


def test_a_strangers_release_without_a_shortcut_is_noised_in_a_simulation_too() -> None:
    wanted = still(Alone())
    for engine in (InProcess(), OWN):
        assert float(noise_of(wanted, engine, Seeded(1)).std()) == pytest.approx(30**0.5, rel=0.06)


def test_a_release_that_adds_noise_otherwise_than_it_declares_cannot_be_defined() -> None:
    """Noise that nobody would draw, or that exists in a sum only, so that single clients would add none."""
    mine = {"__module__": "my_pkg"}
    with pytest.raises(PlanError, match="set client_noise = True"):
        type("Own", (NoNoise,), {**mine, "on_client": lambda self, row, client, rng: row + 1})
    with pytest.raises(PlanError, match="set server_noise = True"):
        type("Own", (NoNoise,), {**mine, "on_server": lambda self, total, rng: total + 1})
    with pytest.raises(PlanError, match="set server_noise = False"):
        type("Own", (NoNoise,), {**mine, "server_noise": True})
    with pytest.raises(PlanError, match="set correlated = True"):
        type("Own", (NoNoise,), {**mine, "run_events": lambda self, allowed: ()})
    with pytest.raises(PlanError, match="on_client, and client_noise = True"):
        type("Own", (NoNoise,), {**mine, "in_sum": lambda self, total, cohort, rng: total + 1})


# ---- sabotage -------------------------------------------------------------------------------------------------------


def twice(self: InProcessWorker, clients: Any, rows: Tensor, t: int, honest: Any = InProcessWorker.sent) -> Tensor:
    once: Tensor = honest(self, clients, rows, t)
    return honest(self, clients, once, t + 1)  # type: ignore[no-any-return]


def never(self: InProcessWorker, clients: Any, rows: Tensor, t: int) -> Tensor:
    return rows


def by_the_server_too(self: InProcessWorker, job: ClientJob, honest: Any = InProcessWorker.collect) -> Any:
    return replace(honest(self, job), noised=False)


SABOTAGE: dict[str, tuple[str, Callable[..., Any]]] = {
    "drawn twice": ("sent", twice),
    "not drawn": ("sent", never),
    "drawn by the server too": ("collect", by_the_server_too),
}


@pytest.mark.parametrize("how", SABOTAGE)
@pytest.mark.parametrize("name", RELEASES)
def test_the_wrong_noise_has_another_deviation(how: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, instead = SABOTAGE[how]
    monkeypatch.setattr(InProcessWorker, where, instead)
    monkeypatch.setattr(Collected, "check", lambda *_: None)  # the deviation must tell by itself
    wanted = still(RELEASES[name])
    found = float(noise_of(wanted, OWN, Seeded(3)).std())
    assert found != pytest.approx(wanted.release.noise_std(np.arange(4), 0), rel=0.06)
