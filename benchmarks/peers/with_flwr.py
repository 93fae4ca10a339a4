"""FedAvg by Flower's own simulation on ray: a ClientApp, a ServerApp, server-side clipping and noise.

As its tutorials have it: one virtual client per CPU at a time, a textbook PyTorch loop with a DataLoader in each.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import version
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
if "FLWR_HOME" not in os.environ:  # clients' processes inherit it
    os.environ["FLWR_HOME"] = tempfile.mkdtemp(prefix="flwr")
    atexit.register(shutil.rmtree, os.environ["FLWR_HOME"], ignore_errors=True)

import torch
from federations import FEDERATIONS, MULTIPLIER, RADIUS, RATE, Federation, Grid, Work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid as Clients
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VERSIONS = {"flwr": version("flwr"), "ray": version("ray"), "torch": torch.__version__}
Mark = Callable[[], None]


@cache
def loaded(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Model and records of a workload, once per process."""
    torch.set_num_threads(1)
    work = FEDERATIONS[name]
    return work.model(), *work.data()


def train(message: Message, context: Context, name: str) -> Message:
    """One client: its epochs of SGD from the server's parameters."""
    work, (model, x, y) = FEDERATIONS[name], loaded(name)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    loader = DataLoader(TensorDataset(x[client], y[client]), batch_size=work.batch, shuffle=True)
    steps, records = epochs(model, loader, work.epochs)
    metrics = {"num-examples": work.records, "steps": steps, "records": records}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=message)


def epochs(model: nn.Module, loader: Iterable[Any], count: int) -> tuple[int, int]:
    """The textbook loop; says how many steps and records it took."""
    optimizer, steps, records = torch.optim.SGD(model.parameters(), lr=RATE), 0, 0
    for _ in range(count):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps, records = steps + 1, records + len(y)
    return steps, records


class Marked(DifferentialPrivacyServerSideFixedClipping):
    """Marks the end of every round, and adds up what the clients did."""

    mark: Mark
    done = Work()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        kept = list(replies)
        failed = next((reply for reply in kept if reply.has_error()), None)
        if failed is not None:
            raise RuntimeError(f"a client failed: {failed.error}")
        for reply in kept:
            metrics = reply.content["metrics"]
            self.done += Work(int(metrics["steps"]), int(metrics["records"]))
        found = super().aggregate_train(server_round, kept)
        self.mark()
        return found


def server(strategy: Marked, work: Federation, rounds: int) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Clients, context: Context) -> None:
        strategy.start(grid=grid, initial_arrays=ArrayRecord(work.model().state_dict()), num_rounds=rounds)

    return app


def simulated(work: Federation | Grid, rounds: int, mark: Mark, cpus: int) -> Work:
    if isinstance(work, Grid):
        raise NotImplementedError("a grid was not tried on Flower")
    name = next(key for key, value in FEDERATIONS.items() if value is work)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    chosen = FedAvg(fraction_train=0.0, fraction_evaluate=0.0)
    chosen.fraction_train, chosen.min_train_nodes = work.cohort / work.clients, work.cohort
    strategy = Marked(chosen, MULTIPLIER, RADIUS, work.cohort)
    strategy.mark = mark
    app = ClientApp()
    app.train()(partial(train, name=name))
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cpus}}
    run_simulation(server(strategy, work, rounds), app, work.clients, backend_config=resources)
    return strategy.done


METHODS = {"simulation, 2 CPUs": partial(simulated, cpus=2), "simulation, 1 CPU": partial(simulated, cpus=1)}
