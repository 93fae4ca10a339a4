"""Promises of who holds what: a server no record, a silo its own, a simulation all; and a plan is checked on each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.silos import SIZES, planned, silos
from tests.tiny import clients, mlp, noise, plan, task
from torch import Tensor

import sordino as so
from sordino.data.records import Partitioner
from sordino.engines.inprocess import InProcess
from sordino.errors import DataError
from sordino.loop import check
from sordino.runs.writer import Fingerprint
from sordino.task import Task


def test_a_servers_task_holds_no_record_and_passes_every_check() -> None:
    for held, wanted in ((task(), plan()), (silos(), planned())):
        server = held.as_server()
        assert (len(server.clients.records), len(server.clients.index)) == (0, 0)
        check(wanted, server, InProcess())
        assert Fingerprint.of(server, "00" * 32).changed(server) == []
        assert Fingerprint.of(server, "00" * 32).changed(held) != []


def test_a_server_needs_no_public_records() -> None:
    server = Task.server(mlp(), 6)
    check(plan(), server, InProcess())
    assert server.evaluate(server.layout.flatten(server.model)) == {}


def test_public_records_on_a_server_must_fit_the_model() -> None:
    with pytest.raises(DataError, match="class"):
        Task.server(mlp(), 6, test=(noise(5, 4), torch.full((5,), 9)))


def test_a_silos_task_holds_its_own_records_and_no_others() -> None:
    whole = task()
    for client, (x, y) in enumerate(clients()):
        for own in (whole.as_silo(client), Task.silo(mlp(), client, 6, (x, y))):
            assert torch.equal(own.clients.records.x, x)
            assert torch.equal(own.clients.records.y, y)
            assert [own.clients.size(i) for i in range(6)] == [len(x) if i == client else 0 for i in range(6)]
            assert own.test is None
            assert own.public is None
    assert whole.as_silo(1).clients.records.x.data_ptr() != whole.clients.records.x.data_ptr()


def test_a_silo_is_checked_against_its_own_declared_size_alone() -> None:
    whole = silos()
    for silo in range(len(SIZES)):
        check(planned(), whole.as_silo(silo), InProcess())
    short = whole.as_silo(1)
    short = replace(short, clients=replace(short.clients, offsets=np.array([0, 0, 3, 3]), index=np.arange(3)))
    with pytest.raises(DataError, match="silo 1 with 3 records, while the plan declares 4"):
        check(planned(), short, InProcess())


def test_a_silo_that_the_population_does_not_have_is_refused() -> None:
    with pytest.raises(DataError, match="silo 6 of 6"):
        Task.silo(mlp(), 6, 6, clients()[0])


# ---- one data set, cut by a partition --------------------------------------------------------------------------------


def labelled(count: int = 60) -> tuple[Tensor, Tensor]:
    return torch.arange(count * 4.0).reshape(count, 4) / count, torch.arange(count) % 3


@pytest.mark.parametrize(
    "partition",
    [so.Iid(6), so.Dirichlet(clients=6, alpha=0.3), so.Shards(6, per_client=2), so.SortedTarget(6)],
    ids=lambda part: str(part.kind),
)
def test_a_partition_cuts_one_data_set_into_clients(partition: Partitioner) -> None:
    x, y = labelled()
    forms = [(x, y), (x.numpy(), y.numpy()), torch.utils.data.TensorDataset(x, y)]
    tasks = [Task.of(torch.nn.Linear(4, 3), whole, partition=partition, seed=5) for whole in forms]
    split = partition.split(y.numpy(), None, so.Seeded(5).at(0, "partition"))
    for made in tasks:
        assert made.clients.population == 6
        assert torch.equal(made.clients.records.x, x)
        for client in range(6):
            assert np.array_equal(made.clients.rows(client), split.of(client))


def test_a_named_data_set_brings_its_test_and_its_natural_clients() -> None:
    heart = so.Dataset(
        x=np.ones((6, 4), np.float32), y=np.zeros(6, np.int64), test_x=np.ones((2, 4), np.float32),
        test_y=np.zeros(2, np.int64), groups=np.array([0, 1, 1, 0, 2, 2]), classes=3,
    )  # fmt: skip
    made = so.Task.of(torch.nn.Linear(4, 3), heart)
    assert [made.clients.rows(client).tolist() for client in range(3)] == [[0, 3], [1, 2], [4, 5]]
    assert made.test is not None
    assert len(made.test) == 2
    with pytest.raises(DataError, match="without groups"):
        so.Task.of(torch.nn.Linear(4, 3), replace(heart, groups=None))


def test_one_data_set_without_a_partition_is_refused_with_the_remedy() -> None:
    x, y = labelled()
    for whole in ((x, y), torch.utils.data.TensorDataset(x, y), {"x": x, "labels": y}):
        with pytest.raises(DataError, match=r"no partition; .*partition=so\.Iid"):
            so.Task.of(torch.nn.Linear(4, 3), whole)


def test_a_rule_on_labels_refuses_sequences_of_labels() -> None:
    with pytest.raises(DataError, match="one label per record"):
        so.Dirichlet(clients=2, alpha=1.0).split(np.zeros((4, 3), np.int64), None, np.random.default_rng(0))
