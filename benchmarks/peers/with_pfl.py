"""FedAvg by pfl's own loop: SimulatedBackend with a centrally applied Gaussian mechanism, one process.

pfl reads a client's records in their order, without a shuffle, which is less work than the others do.
"""

from __future__ import annotations

import contextlib
import tempfile
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from federations import MULTIPLIER, RADIUS, RATE, Federation, Grid, Work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.ftrl_mechanism import BandedMatrixFactorizationMechanism
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import Tensor, nn

VERSIONS = {"pfl": version("pfl"), "torch": torch.__version__}
Mark = Callable[[], None]
Loss = Callable[[Tensor, Tensor], Tensor]


class EachRound(TrainingProcessCallback):
    """Marks the end of every central iteration."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.mark()
        return False, Metrics()


class Counting:
    """The loss of a module as pfl wants it, which counts its steps and records."""

    def __init__(self, loss: Loss) -> None:
        self.function, self.steps, self.records = loss, 0, 0

    def loss(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.steps, self.records = self.steps + 1, self.records + len(y)
        return self.function(module(x), y)

    def metrics(self, module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            return {"loss": Weighted(self.function(module(x), y).item(), 1)}

    def on(self, module: nn.Module, step: float = 1.0) -> PyTorchModel:
        module.loss = types.MethodType(lambda net, x, y: self.loss(net, x, y), module)  # type: ignore[assignment]
        module.metrics = types.MethodType(lambda net, x, y: self.metrics(net, x, y), module)  # type: ignore[assignment]
        central = torch.optim.SGD(module.parameters(), lr=step)
        return PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=central)


def banded(rounds: int, apart: int, clip_norm: float, noise_multiplier: Callable[[int], float]) -> GaussianMechanism:
    """pfl's banded matrix mechanism; `noise_multiplier` of the most rounds that one client is in."""
    given = lambda most: types.SimpleNamespace(cohort_noise_parameter=noise_multiplier(most))  # noqa: E731
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it leaves its matrix where it stands
        return BandedMatrixFactorizationMechanism(clip_norm, rounds, apart, given)


def backend(users: FederatedDataset, mechanism: GaussianMechanism | None = None) -> SimulatedBackend:
    noise = CentrallyAppliedPrivacyMechanism(mechanism or GaussianMechanism(RADIUS, MULTIPLIER))
    return SimulatedBackend(training_data=users, val_data=users, postprocessors=[noise])


class Unevaluated(FederatedAveraging):
    """pfl evaluates every client in a run's first round, which nobody else does: not here."""

    def get_next_central_contexts(self, *given: Any, **named: Any) -> Any:
        contexts, model, metrics = super().get_next_central_contexts(*given, **named)
        if contexts is not None:
            contexts = tuple(replace(context, do_evaluation=False) for context in contexts)
        return contexts, model, metrics


def fed_avg(
    model: PyTorchModel,
    users: FederatedDataset,
    local: dict[str, Any],
    rounds: int,
    cohort: int,
    mark: Mark | None,
    mechanism: GaussianMechanism | None = None,
) -> None:
    """One run."""
    params = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=1 << 30, train_cohort_size=cohort, val_cohort_size=None
    )
    Unevaluated().run(
        backend=backend(users, mechanism),
        model=model,
        algorithm_params=params,
        model_train_params=NNTrainHyperParams(**{"local_learning_rate": RATE, **local}),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[EachRound(mark)] if mark else [],
        send_metrics_to_platform=False,
    )


def federation(work: Federation, rounds: int, mark: Mark, shared: bool = False) -> Work:
    x, y = work.data()
    users = [Dataset([x[i], y[i]], user_id=str(i)) for i in range(work.clients)]
    sampler = get_user_sampler("minimize_reuse", list(range(work.clients)))
    counting = Counting(nn.functional.cross_entropy)
    local = {"local_num_epochs": work.epochs, "local_batch_size": work.batch}
    data, noise = FederatedDataset(users.__getitem__, sampler), None
    if shared:
        noise = banded(rounds, work.clients // work.cohort, RADIUS, lambda most: MULTIPLIER)
    fed_avg(counting.on(work.model()), data, local, rounds, work.cohort, mark, noise)
    return Work(counting.steps, counting.records)


def minibatch(x: Tensor, y: Tensor, batch: int, silo: int) -> Dataset:
    """A random batch of one silo's records."""
    rows = torch.from_numpy(np.random.choice(x.shape[1], batch, replace=False))
    return Dataset([x[silo].index_select(0, rows), y[silo].index_select(0, rows)], user_id=str(silo))


def grid(work: Grid, runs: int, mark: Mark) -> Work:
    """`runs` of the runs, one mark each: the time of all is taken from them."""
    x, y = work.data()
    counting = Counting(lambda out, y: nn.functional.binary_cross_entropy_with_logits(out[:, 0], y))
    local = {"local_num_epochs": 1, "local_batch_size": work.batch}
    for _ in range(runs):
        sampler = get_user_sampler("minimize_reuse", list(range(work.silos)))
        users = FederatedDataset(partial(minibatch, x, y, work.batch), sampler)
        fed_avg(counting.on(work.model()), users, local, work.rounds, work.silos, None)
        mark()
    return Work(counting.steps, counting.records, 1 / work.runs)


def simulated(work: Federation | Grid, rounds: int, mark: Mark) -> Work:
    return grid(work, rounds, mark) if isinstance(work, Grid) else federation(work, rounds, mark)


METHODS = {"FedAvg": simulated, "FedAvg, banded": partial(federation, shared=True)}
