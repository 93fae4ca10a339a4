"""The epsilon that a peer library itself states for given settings, and the facts that the rules of `sordino lint` use.

benchmarks/peers/.venv-NAME/bin/python benchmarks/peers/lint_claims.py NAME      opacus, pfl, flwr, jax, fl4health
python3 benchmarks/peers/lint_claims.py      asks each in its own environment and writes lint.json (make bench-lint)

Nothing of Sordino is imported. tests/lint/test_lint_page.py compares lint.json with docs/lint.md and with what
`sordino lint` computes.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")


def opacus() -> dict[str, Any]:
    """Rate and denominator of two neighbours; the accountants with and without Poisson sampling."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    def private(records: int, batch: int, **options: Any) -> tuple[Any, Any, Any]:
        engine = PrivacyEngine(accountant=options.pop("accountant", "prv"))
        net = torch.nn.Linear(2, 2)
        data = TensorDataset(torch.zeros(records, 2), torch.zeros(records, dtype=torch.long))
        made = engine.make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=batch), noise_multiplier=1.0, max_grad_norm=1.0, **options,
        )  # fmt: skip
        return engine, made[1], made[2]

    def epsilon(steps: int, **options: Any) -> float:
        engine, optimizer, loader = private(1000, 100, **options)
        optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=1 / len(loader)))
        for _ in range(steps):
            engine.accountant.step(noise_multiplier=1.0, sample_rate=1 / len(loader))
        return float(engine.get_epsilon(1e-5))

    sizes = {n: private(n, 100) for n in (1000, 1001)}
    return {
        "version": version("opacus"),
        "denominators": {n: made[1].expected_batch_size for n, made in sizes.items()},
        "rates": {n: 1 / len(made[2]) for n, made in sizes.items()},
        "poisson": epsilon(50),
        "shuffled": epsilon(50, poisson_sampling=False),
        "gdp": epsilon(50, accountant="gdp"),
    }


def pfl() -> dict[str, Any]:
    """Accountants of pfl, the noise of one iteration, and how its sampler draws a cohort."""
    from pfl.data.sampling import get_user_sampler
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_accountant import PLDPrivacyAccountant, PRVPrivacyAccountant

    known = {"num_compositions": 100, "sampling_probability": 0.1, "mechanism": "gaussian", "delta": 1e-5}
    scaled = PLDPrivacyAccountant(**known, noise_parameter=2.0, noise_scale=0.5)
    sampler = get_user_sampler("random", [str(n) for n in range(10)])
    return {
        "version": version("pfl"),
        "pld": float(PLDPrivacyAccountant(**known, noise_parameter=2.0).epsilon),
        "prv": float(PRVPrivacyAccountant(**known, noise_parameter=2.0).epsilon),
        "scaled": float(scaled.epsilon),
        "scaled_noise": float(scaled.cohort_noise_parameter),
        "single_iteration_noise": float(
            GaussianMechanism.construct_single_iteration(1.0, 2.0, 1e-5).relative_noise_stddev
        ),
        "repeats_in_a_cohort_of_ten": len({sampler() for _ in range(10)}) < 10,
    }


def flwr() -> dict[str, Any]:
    """RdpAccountant with and without sampling; noise of the adaptive wrapper; LocalDpMod's noise."""
    import numpy as np
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
    from flwr.supercore.privacy_accounting import (
        GaussianPrivacyEvent,
        NeighboringRelation,
        PrivacyConfig,
        SamplingMethod,
    )
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    def spent(relation: str, sampling: str, sizes: tuple[int, int], z: float, rounds: int, delta: float) -> float:
        config = PrivacyConfig(delta, sizes[1], NeighboringRelation[relation], SamplingMethod[sampling])
        accountant = RdpAccountant(config)
        accountant.compose(GaussianPrivacyEvent(z, *sizes), rounds)
        return accountant.get_privacy_spent().epsilon

    return {
        "version": version("flwr"),
        "fixed_cohort": spent("ADD_OR_REMOVE_ONE", "NO_AMPLIFICATION", (10, 20), 4.0, 40, 1e-5),
        "without_replacement": spent("REPLACE_ONE", "WITHOUT_REPLACEMENT", (100, 2000), 1.8, 200, 2000**-1.1),
        "adaptive": _adaptive(DifferentialPrivacyServerSideAdaptiveClipping, FedAvg, np),
    }


def _adaptive(wrapper: Any, inner: Any, np: Any) -> dict[str, float]:
    """Noise of one round / (multiplier * the norm that clipped it / n), all updates clipped: 1 if they agree; and the
    new norm over the old one.

    The wrapper's own `aggregate_train` runs on replies of ten clients, all longer than the norm.
    """
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # of a run, as a SuperLink sets
    np.random.seed(0)
    size, clients = 200_000, 10
    made = wrapper(inner(), noise_multiplier=0.5, num_sampled_clients=clients, clipped_count_stddev=1.0)
    before = made.clipping_norm
    made.current_arrays = ArrayRecord({"w": Array(np.zeros(size))})
    replies = []
    for client in range(clients):
        content = RecordDict({"arrays": ArrayRecord({"w": Array(np.full(size, 1.0))})})
        content["metrics"] = MetricRecord({"num-examples": 1.0})
        message = Message(content, dst_node_id=client + 1, message_type="train")
        replies.append(message)
    noised, _ = made.aggregate_train(1, replies)
    added = noised.to_numpy_ndarrays()[0] - before / math.sqrt(size)  # all replies are equal: their mean is known
    noise = float(added.std() / (made.noise_multiplier * before / clients))
    return {"noise_over_needed": noise, "new_norm_over_old": made.clipping_norm / before}


def jax() -> dict[str, Any]:
    """DpsgdTrainingAccountant; which multipliers DPKerasConfig accepts for an epsilon when it accumulates gradients."""
    import ast
    from importlib.util import find_spec

    from jax_privacy.accounting import accountants, analysis

    made = analysis.DpsgdTrainingAccountant(dp_accountant_config=accountants.PldAccountantConfig())

    def epsilon(batch: int, method: Any = analysis.SamplingMethod.POISSON) -> float:
        params = analysis.DpParams(
            noise_multipliers=1.8, num_samples=2000, delta=2000**-1.1, batch_size=batch, sampling_method=method
        )
        return float(made.compute_epsilon(200, params))

    origin = find_spec("jax_privacy").origin.replace("__init__.py", "keras_api.py")
    with open(origin) as file:  # keras need not be installed: which batch size the check of a multiplier takes
        tree = ast.parse(file.read())
    (check,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_validate_params")
    sizes = [k.value for n in ast.walk(check) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "batch_size"]
    (config,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "DPKerasConfig")
    stated = [n for n in config.body if isinstance(n, ast.AnnAssign) and n.value]
    defaults = {ast.unparse(n.target): ast.unparse(n.value) for n in stated}
    return {
        "version": version("jax-privacy"),
        "poisson": epsilon(100),
        "poisson_accumulated": epsilon(10),
        "fixed_batch": epsilon(100, analysis.SamplingMethod.FIXED_BATCH_SIZE),
        "keras_checks_with": [ast.unparse(size) for size in sizes],
        "keras_poisson_default": defaults["poisson_sampling_in_fit"],
    }


def fl4health() -> dict[str, Any]:
    """Accountants of FL4Health: record level, and client level without replacement."""
    from fl4health.privacy.fl_accountants import (
        FlClientLevelAccountantFixedSamplingNoReplacement,
        FlInstanceLevelAccountant,
    )

    records = FlInstanceLevelAccountant(0.1, 0.8, 1, [10], [1000])
    clients = FlClientLevelAccountantFixedSamplingNoReplacement(2000, 100, 1.8)
    return {
        "version": version("fl4health"),
        "records": float(records.get_epsilon(10, 1e-5)),
        "without_replacement": float(clients.get_epsilon(200, 2000**-1.1)),
    }


PEERS: dict[str, Callable[[], dict[str, Any]]] = {
    "opacus": opacus, "pfl": pfl, "flwr": flwr, "jax": jax, "fl4health": fl4health,
}  # fmt: skip


def collect() -> None:
    """Ask every peer in its environment; fl4health is installed beside flwr."""
    here, found = Path(__file__).parent, {}
    for name in PEERS:
        python = here / f".venv-{'flwr' if name == 'fl4health' else name}" / "bin" / "python"
        quiet = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stderr": subprocess.DEVNULL}
        found |= json.loads(subprocess.check_output([str(python), __file__, name], **quiet))
    (here / "lint.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    if len(sys.argv) == 1:
        return collect()
    with contextlib.redirect_stdout(io.StringIO()):
        found = {name: PEERS[name]() for name in sys.argv[1:]}
    print(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    main()
