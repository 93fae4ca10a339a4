"""The head of a row by Opacus (records) or pfl (clients), on the features that Sordino's row had.

    sordino board export ROW --to FOLDER              with Sordino: features, clients, steps, noise multiplier
    python benchmarks/board/peers.py FOLDER [SEEDS]   with the peer's own environment (../peers/opacus.txt, pfl.txt)

The first writes features of private rows: keep FOLDER to yourself, and delete it. The second prints one JSON object for
peers.json. Same model, steps, falling step size, clip norm, momentum, expected batch and noise multiplier.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn

T975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's quantiles by number of seeds


def linear(given):
    model = nn.Linear(given["features"], given["classes"], bias=False)
    nn.init.zeros_(model.weight)
    return model


def opacus(x, y, given, seed):
    """One DP-SGD run; returns the model and Opacus's epsilon."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    model, steps = linear(given), given["steps"]
    inner = torch.optim.SGD(model.parameters(), lr=given["step"] / given["clip_norm"], momentum=0.9)
    batches = round(len(x) / given["batch"])  # Opacus samples at 1 / the number of batches: it must be Sordino's rate
    loader, engine = DataLoader(TensorDataset(x, y), batch_size=-(-len(x) // batches)), PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=inner, data_loader=loader, noise_multiplier=given["noise_multiplier"],
        max_grad_norm=given["clip_norm"],
    )  # fmt: skip
    falling, done = torch.optim.lr_scheduler.LambdaLR(inner, lambda t: max(0.0, 1 - t / steps)), 0
    while done < steps:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=500, optimizer=optimizer) as parts:
            for inputs, targets in parts:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                if not optimizer._is_last_step_skipped:
                    falling.step()
                    done += 1
                if done == steps:
                    break
    return model, engine.get_epsilon(given["delta"])


def pfl(x, y, given, seed):
    """One FedAvg run with everybody in every round; returns the model and pfl's epsilon."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    np.random.seed(seed)
    torch.manual_seed(seed)
    index, offsets, steps = np.array(given["index"]), given["offsets"], given["steps"]
    rows = [torch.from_numpy(index[a:b]) for a, b in itertools.pairwise(offsets)]
    users = [Dataset([x[mine], y[mine]], user_id=str(i)) for i, mine in enumerate(rows)]
    model = linear(given)
    model.loss = types.MethodType(lambda net, a, b: nn.functional.cross_entropy(net(a), b), model)
    model.metrics = types.MethodType(lambda net, a, b: {}, model)
    central = torch.optim.SGD(model.parameters(), lr=given["step"] / given["clip_norm"])
    falling = torch.optim.lr_scheduler.LambdaLR(central, lambda t: max(0.0, 1 - t / steps))
    own = PyTorchModel(model, torch.optim.SGD, central, central_learning_rate_scheduler=falling)
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(given["clip_norm"], given["noise_multiplier"]))
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(len(users)))))
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=data, val_data=None, postprocessors=[noise]), model=own,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=steps, evaluation_frequency=1 << 30, train_cohort_size=len(users),
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(local_learning_rate=1.0, local_num_epochs=1, local_batch_size=None),
        model_eval_params=NNEvalHyperParams(local_batch_size=None), callbacks=[], send_metrics_to_platform=False,
    )  # fmt: skip
    spent = PLDPrivacyAccountant(
        num_compositions=steps, sampling_probability=1.0, mechanism="gaussian", delta=given["delta"],
        noise_parameter=given["noise_multiplier"],
    )  # fmt: skip
    return model, spent.epsilon


def main(folder: Path, seeds: int) -> None:
    torch.set_num_threads(1)
    names = ("x", "y", "test_x", "test_y")
    x, y, test_x, test_y = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in names)
    given = json.loads((folder / "settings.json").read_text("utf-8"))
    train, name = (pfl, "pfl") if "offsets" in given else (opacus, "opacus")
    values, spent, epsilon = [], [], 0.0
    for seed in range(seeds):
        started = time.process_time()
        model, epsilon = train(x, y, given, seed)
        spent.append(time.process_time() - started)
        with torch.no_grad():
            values.append(round(100 * float((model(test_x).argmax(1) == test_y).double().mean()), 3))
    half = T975[seeds] * statistics.stdev(values) / math.sqrt(seeds) if seeds > 1 else float("nan")
    print(json.dumps({
        "row": given["row"], "library": f"{name} {version(name)}", "values": values,
        "mean": round(statistics.mean(values), 3), "half_width": round(half, 3), "epsilon": round(float(epsilon), 4),
        "cpu_seconds": round(statistics.mean(spent), 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
