"""Promises of the in-process engine: one result on every path, nothing not finite in the sum, memory of one chunk."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.tiny import SIZES, clients, final, mlp, noise, plan, rounds, seeded, task
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.data.clients import Clients, Records
from sordino.engines.base import ClientJob
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.engines.objectives import OneClient, choose_path
from sordino.errors import ConfigError, PlanError
from sordino.loop import run
from sordino.parts.encoding import Adaptive, Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone, Poisson, RoundRobin
from sordino.rng import Seeded
from sordino.task import Task

BATCHED, SEQUENTIAL = InProcess(path="batched"), InProcess(path="sequential")
RAGGED = LocalSgd(lr=0.3, epochs=2, batch=2)
HEAVY = LocalSgd(lr=0.3, epochs=2, batch=3, momentum=0.9, weight_decay=0.1)
PROJECTED = LocalSgd(lr=0.3, steps=5, batch=2, momentum=0.5, project=True)


def linear() -> nn.Module:
    return seeded(nn.Linear(4, 3))


def conv_net() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)))


def group_net() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (mlp, (4,)),
    "conv": (conv_net, (1, 6, 6)),
    "group norm": (group_net, (1, 6, 6)),
}


@pytest.mark.parametrize("local", [RAGGED, HEAVY, PROJECTED], ids=["plain", "momentum and decay", "projected"])
@pytest.mark.parametrize("name", MODELS)
def test_batched_and_sequential_clients_give_one_result(name: str, local: LocalSgd) -> None:
    build, shape = MODELS[name]
    data, same = task(model=build(), shape=shape), plan(rounds=3, local=local, encode=(Clip(0.5),))
    one, other = final(same, data, BATCHED), final(same, data, SEQUENTIAL)
    assert float((one - data.layout.flatten(data.model)).norm()) > 0.1
    assert torch.allclose(one, other, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_the_chunk_size_does_not_change_the_result(chunk: int) -> None:
    same = plan(rounds=3, local=HEAVY)
    assert torch.allclose(final(same, task(), InProcess("batched", chunk)), final(same, task(), BATCHED), atol=1e-5)


def test_the_sequential_path_takes_one_client_at_a_time() -> None:
    with pytest.raises(PlanError, match="chunk"):
        final(plan(), task(), InProcess("sequential", 2))


@pytest.mark.parametrize("engine", [InProcess(), BATCHED, SEQUENTIAL], ids=str)
def test_the_same_seed_is_bit_exact_and_another_is_not(engine: InProcess) -> None:
    same = plan(rounds=3, clients=Poisson(len(SIZES), 0.5), local=RAGGED)
    assert torch.equal(final(same, task(), engine, seed=1), final(same, task(), engine, seed=1))
    assert not torch.equal(final(same, task(), engine, seed=1), final(same, task(), engine, seed=2))


def test_small_models_are_batched_and_models_with_coins_or_changing_buffers_are_not() -> None:
    def path(model: nn.Module, shape: tuple[int, ...] = (4,)) -> Any:
        return InProcess().prepare(plan(), task(model=model, shape=shape), Seeded(0)).header["path"]

    assert path(mlp()) == "batched"
    assert path(conv_net(), (1, 6, 6)) == "batched"
    assert path(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))) == "sequential"
    assert path(buffer_net()) == "sequential"


@pytest.mark.parametrize("encode", [(Clip(1.0),), (Clip(math.inf),), ()], ids=["clip", "infinite clip", "no clip"])
@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_an_update_that_is_not_finite_counts_as_zero_and_is_reported(
    encode: tuple[Clip, ...], path: Literal["batched", "sequential"]
) -> None:
    broken, empty = clients(), clients()
    broken[4][0][:] = 3e38  # its loss overflows, so its gradient is NaN
    empty[4] = (torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    free = plan(encode=encode, release=NoNoise(), local=RAGGED)
    with_bad = rounds(free, Task.of(linear(), broken), InProcess(path=path))
    with_zero = rounds(free, Task.of(linear(), empty), InProcess(path=path))
    params = with_bad[-1].state.memory["params"]
    assert bool(params.isfinite().all())
    assert torch.allclose(params, with_zero[-1].state.memory["params"], rtol=0.0, atol=1e-6)
    assert [done.diagnostics["nonfinite_updates"] for done in with_bad] == [1.0, 1.0]
    assert [done.diagnostics["nonfinite_updates"] for done in with_zero] == [0.0, 0.0]


@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_clients_without_records_send_zero(path: Literal["batched", "sequential"]) -> None:
    nobody = Task.of(mlp(), [(torch.empty(0, 4), torch.empty(0, dtype=torch.int64))] * 3 + clients((1,)))
    still = plan(clients=RoundRobin(4, 3), release=NoNoise(), local=HEAVY, rounds=1)  # 0, 1 and 2
    assert torch.equal(final(still, nobody, InProcess(path=path)), nobody.layout.flatten(nobody.model))


@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_an_empty_cohort_still_releases_noise(path: Literal["batched", "sequential"]) -> None:
    rare = plan(rounds=2, clients=Poisson(len(SIZES), 1e-9))
    done = rounds(rare, task(), InProcess(path=path))
    start = task().layout.flatten(task().model)
    moved = done[0].state.memory["params"] - start
    assert not any(one.void for one in done)
    assert float(moved.std()) == pytest.approx(
        1.0 / rare.clients.expected, rel=0.3
    )  # noise multiplier * clip norm / expected
    assert not torch.equal(done[0].state.memory["params"], done[1].state.memory["params"])


@pytest.mark.parametrize("clip_norm", [1.0, Adaptive(1.0)], ids=["fixed", "adaptive"])
def test_the_sum_over_nobody_is_zero(clip_norm: float | Adaptive) -> None:
    """The bit of an adaptive clip norm too: nobody is neither inside nor outside."""
    alone, data = plan(encode=(Clip(clip_norm),)), task()
    job = ClientJob(alone.public(0), data.layout.flatten(data.model), np.arange(0))
    collected = InProcess().prepare(alone, data, Seeded(0)).collect(job)
    assert collected.received == 0
    assert not collected.total.any()


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most entries of any tensor made while it watches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and not func.is_view:
                self.entries = max(self.entries, tensor.numel())
        return out


@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_a_million_clients_cost_no_more_than_their_cohort(path: Literal["batched", "sequential"]) -> None:
    population, cohort = 1_000_000, 200
    records = Records(noise(1000, 4).repeat(1000, 1), torch.arange(population) % 3)
    million = Task(mlp(), Clients(records, np.arange(population), np.arange(population + 1)))
    large = plan(rounds=2, clients=Poisson(population, cohort / population))
    with Largest():  # torch imports half of itself when operations are watched for the first time
        final(plan(rounds=1), task(), InProcess(path=path))
    largest = Largest()
    tracemalloc.start()
    with largest:
        params = final(large, million, InProcess(path=path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not torch.equal(params, million.layout.flatten(million.model))
    assert largest.entries <= 64 * million.layout.size  # one chunk of messages
    assert peak < 20e6  # bytes: a few offsets per client at most, while one message each would take 268e6


class Averages(nn.Module):
    """A running mean of its inputs, in a float buffer: a part of the message."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def buffer_net() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 8), Averages(), nn.Linear(8, 3)))


def test_float_buffers_are_part_of_the_message() -> None:
    data = task((6, 4, 8), buffer_net())
    assert [slot.name for slot in data.layout.slots][-1] == "1.mean"
    free = plan(rounds=1, clients=Everyone(3), encode=(), release=NoNoise(), local=LocalSgd(lr=0.0, epochs=1))
    views = data.layout.views(final(free, data))
    linear = data.model.get_submodule("0")
    means = [linear(x).mean(0).detach() for x, _ in clients((6, 4, 8))]
    assert torch.allclose(views["1.mean"], 0.1 * torch.stack(means).mean(0), atol=1e-6)
    clipped = plan(rounds=1, clients=Everyone(3), encode=(Clip(1e-3),), release=NoNoise(), local=free.local)
    moved = final(clipped, data) - data.layout.flatten(data.model)
    assert 0 < float(moved.norm()) <= 1e-3 * (1 + 1e-3)  # buffers are inside the one norm


def test_a_model_that_mixes_records_sees_no_padding() -> None:
    """Batch statistics without running buffers: padded records would enter them on the batched path."""
    model = seeded(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten(), nn.Linear(48, 3))
    )
    data, same = task(model=model, shape=(1, 6, 6)), plan(rounds=2, local=RAGGED, encode=(Clip(0.5),))
    assert torch.allclose(final(same, data), final(same, data, SEQUENTIAL), rtol=0.0, atol=1e-5)


def test_dropout_is_reproducible_by_seed_and_leaves_the_global_generator_alone() -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    data, free = task(model=model), plan(release=NoNoise(), local=LocalSgd(lr=0.3, epochs=1))
    before = torch.random.get_rng_state()
    first = final(free, data, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(999)
    assert torch.equal(final(free, data, seed=1), first)
    assert not torch.equal(final(free, data, seed=2), first)
    torch.random.set_rng_state(before)


@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_frozen_parameters_stay_and_are_not_sent(path: Literal["batched", "sequential"]) -> None:
    model = mlp()
    for parameter in model.get_submodule("0").parameters():
        parameter.requires_grad_(False)
    data = task(model=model)
    assert data.layout.size == 8 * 3 + 3
    params = final(plan(local=HEAVY), data, InProcess(path=path))
    assert params.shape == (27,)
    assert torch.equal(data.model.get_submodule("0").state_dict()["weight"], mlp().get_submodule("0").weight)  # type: ignore[arg-type]
    assert not torch.equal(params, data.layout.flatten(data.model))


def test_diagnostics_say_how_many_updates_were_clipped() -> None:
    free = plan(rounds=1, encode=(Clip(1e-6),), local=RAGGED)
    figures = rounds(free, task())[0].diagnostics
    assert figures["clipped_fraction"] == pytest.approx(5 / 6)  # all but the client without records
    assert figures["update_norm_mean"] > 0.1


# ---- where and how it runs -------------------------------------------------------------------------------------------


def test_a_device_that_is_not_there_is_refused_in_one_sentence() -> None:
    for name in ("cuda:7", "nonsense"):
        with pytest.raises(ConfigError, match=f"device '{name}'"):
            InProcess(device=name).prepare(plan(), task(), Seeded(0))


def test_the_run_is_told_how_it_is_computed() -> None:
    told: list[dict[str, str | int]] = []
    assert len([*run(plan(), task(), announce=told.append)]) == plan().rounds
    assert told[0]["path"] in ("batched", "sequential")
    assert told[0]["device"] == "cpu"
    chosen: list[dict[str, str | int]] = []
    next(run(plan(), task(), engine=InProcess(path="sequential"), announce=chosen.append))
    assert chosen[0]["path"] == "sequential"


def test_everything_follows_the_device_of_the_model() -> None:
    """On a device without numbers ("meta") shapes and places are all there is: a tensor left behind would raise."""
    moved = task().on(torch.device("meta"))
    assert moved.device.type == "meta"
    assert moved.clients.records.x.device.type == "meta"
    objective = OneClient(moved)
    start = objective.inward(torch.zeros(moved.layout.size, device="meta"))
    worker = InProcessWorker(plan(), moved, Seeded(0), choose_path(plan(), moved, "sequential"), 1)
    batch = next(iter(worker.reader.batches(np.zeros(1, dtype=np.int64), [np.zeros((1, 2), dtype=np.int64)])))
    slope = objective.gradient(objective.place(start, 1), batch)
    assert slope.device.type == "meta"


@pytest.mark.parametrize("engine", [BATCHED, SEQUENTIAL], ids=["batched", "sequential"])
@pytest.mark.parametrize("model", [linear, mlp])
def test_plain_steps_with_weight_decay_are_those_of_the_general_loop(engine: InProcess, model: Any) -> None:
    """A momentum of 1e-12 is none, but takes the loop that knows no shortcut; clients are ragged."""
    plain, general = (LocalSgd(lr=0.3, epochs=2, batch=2, weight_decay=0.5, momentum=m) for m in (0.0, 1e-12))
    first, second = (final(plan(local=local), task(model=model()), engine=engine) for local in (plain, general))
    assert torch.allclose(first, second, atol=1e-5)
