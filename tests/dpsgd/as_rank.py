"""What each rank of the test's process group does: every case of a private loop, the sabotages and the refusals."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.dpsgd.loops import Parts, data, mlp, private, train, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import sordino as so
from sordino.dpsgd.optimizer import PrivateOptimizer
from sordino.dpsgd.processes import Ranks
from sordino.dpsgd.settings import NoiseState
from sordino.errors import SordinoError
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Limit
from sordino.rng import Secure

Found = dict[str, Any]
USERS = [row % 7 if row < 30 else row % 23 for row in range(60)]  # of 2 to 7 records
WIDE = 20_000  # parameters, so that the deviation of one step's noise is known to a percent


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def outcome(parts: Parts) -> Found:
    return {"weights": weights(parts[0]), "certificate": parts[1].certificate()}


def loop(epochs: int = 2, **settings: Any) -> Found:
    parts = private(epochs=epochs, **settings)
    train(parts, epochs=epochs)
    return {**outcome(parts), "state": parts[1].state_dict()["state"]}


def wrapped(folder: Path) -> Found:
    """Ranks begin with other weights, which DistributedDataParallel makes those of rank 0."""
    model: nn.Module = mlp(seed=1 + rank())
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    return loop(model=model)


def own_loss(folder: Path) -> Found:
    def each(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    model, optimizer, loader = private(loss=each)
    for x, y in loader:
        optimizer.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return outcome((model, optimizer, loader))


def resumed(folder: Path, **settings: Any) -> Found:
    """A checkpoint of rank 0 after one of two epochs, which all ranks load into new loops."""
    before = private(epochs=2, optimizer=torch.optim.Adam, **settings)
    train(before)
    file = folder / f"{'one' if not dist.is_initialized() else 'many'}{len(settings)}.pt"
    if rank() == 0:
        torch.save({"model": before[0].state_dict(), "optimizer": before[1].state_dict()}, file)
    if dist.is_initialized():
        dist.barrier()
    return continued(file, **settings)


def continued(file: Path, **settings: Any) -> Found:
    parts, stored = private(epochs=2, optimizer=torch.optim.Adam, model=mlp(9), **settings), torch.load(file)
    parts[0].load_state_dict(stored["model"])
    parts[1].load_state_dict(stored["optimizer"])
    train(parts)
    return outcome(parts)


def on_a_ledger(folder: Path) -> Found:
    """Two epochs are planned and taken; a second loop is above the budget, and refused on every rank."""
    path = folder / ("many.ledger" if dist.is_initialized() else "one.ledger")
    if rank() == 0:
        with Ledger.open(path, create=True) as ledger:
            ledger.limit("ours", Limit(4.0, 0.02, "record", "add_remove"))
    if dist.is_initialized():
        dist.barrier()
    parts = private(epochs=2, ledger=path, named="ours")
    train(parts, epochs=2)
    found = outcome(parts)
    with Ledger.open(path) as ledger:
        charges = sorted(ledger.charges(parts[1].account.run).values())
    return {**found, "charges": charges, "refused": refusal(lambda: train(parts, epochs=30))}


def with_workers(folder: Path) -> Found:
    return loop(epochs=1, loader=DataLoader(data(), batch_size=12, num_workers=1))


def not_finite(folder: Path) -> Found:
    """Six records without a finite gradient, on several ranks."""
    records = data()
    records.tensors[0][:6] = torch.nan
    parts = private(dataset=records, epochs=2)
    train(parts, epochs=2)
    return {**outcome(parts), "not_finite": parts[1].not_finite}


CASES: dict[str, Callable[[Path], Found]] = {
    "a plain model": lambda _: loop(),
    "a model in DistributedDataParallel": wrapped,
    "batches that are empty on some ranks": lambda _: loop(batch=2),
    "a batch in pieces": lambda _: loop(max_physical_batch_size=2),
    "correlated noise": lambda _: loop(strategy=so.parts.Banded(3)),
    "adam with smoothing": lambda _: loop(optimizer=torch.optim.Adam, smoothing=1.0),
    "a loss of each record": own_loss,
    "workers that load records": with_workers,
    "a resumed loop": resumed,
    "a resumed loop of correlated noise": lambda folder: resumed(folder, strategy=so.parts.Banded(3)),
    "a ledger": on_a_ledger,
    "a clip per layer": lambda _: loop(clip="per_layer", clip_norm=0.3, max_physical_batch_size=2),
    "clip norms by group": lambda _: loop(clip_norm={"0": 0.1, "2": 0.4}),
    "an adaptive clip": lambda _: loop(clip_norm=so.parts.Adaptive(0.5)),
    "a resumed loop of an adaptive clip and scheduled noise": lambda folder: resumed(
        folder, clip_norm=so.parts.Adaptive(0.5), noise_multiplier=[2.0, 1.0]
    ),
    "records that are not finite": not_finite,
    "users": lambda _: loop(batch=5, users=USERS),
    "users in pieces": lambda _: loop(batch=5, users=USERS, max_physical_batch_size=3),
}


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """The model, cut by fully_shard over all ranks where there are any: one layer by itself, then the rest."""
    if dist.is_initialized():
        for part in (*[part for part in model.children() if isinstance(part, nn.Linear)][:1], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    return model


def sharded_loop(**settings: Any) -> Found:
    parts = private(shard(mlp()), epochs=2, **settings)
    train(parts, epochs=2)
    return {**outcome(parts), "held": state_size(parts)}


def state_size(parts: Parts) -> int:
    """Numbers of the optimizer's state on this rank."""
    held = [item for state in parts[1].state.values() for item in state.values() if isinstance(item, Tensor)]
    return sum((item.to_local() if isinstance(item, DTensor) else item).numel() for item in held if item.dim())


def sharded_resume() -> Found:
    """Every rank continues with its own part of the optimizer's state, and with the whole model."""
    before = private(shard(mlp()), epochs=2, optimizer=torch.optim.Adam)
    train(before)
    parts = private(shard(mlp(9)), epochs=2, optimizer=torch.optim.Adam)
    parts[0].load_state_dict(before[0].state_dict())
    parts[1].load_state_dict(before[1].state_dict())
    train(parts)
    return {**outcome(parts), "held": state_size(parts)}


SHARDED: dict[str, Callable[[], Found]] = {
    "momentum": lambda: sharded_loop(optimizer=_momentum),
    "adam in pieces, with smoothing": lambda: sharded_loop(
        optimizer=torch.optim.Adam, smoothing=1.0, max_physical_batch_size=2
    ),
    "a clip per layer": lambda: sharded_loop(optimizer=_momentum, clip="per_layer", clip_norm=0.3),
    "correlated noise": lambda: sharded_loop(optimizer=_momentum, strategy=so.parts.Banded(3)),
    "a resumed loop": sharded_resume,
}


def _momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def sharded_later() -> None:
    parts = private()
    shard(parts[0])
    train(parts)


def other_mesh() -> None:
    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("copies", "shards")))
    private(model)


def secure_step(folder: Path, cut: Callable[[nn.Module], nn.Module] = lambda model: model) -> Found:
    """One step of a large model for release, whose moves are noise: std of the noise on the sum, in clip norms."""
    torch.manual_seed(1)
    model: nn.Module = nn.Linear(WIDE // 2, 2, bias=False)
    before = weights(model)
    model = cut(model)
    loader = DataLoader(data(60, (WIDE // 2,), 2), batch_size=60)
    parts = private(model, loader=loader, optimizer=_unit_sgd, noise="secure", noise_multiplier=2.0)
    train(parts)
    return {"weights": weights(model), "std": float((weights(model) - before).std()) * 60}


def _unit_sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def noise_on_every_rank(case: Callable[[Path], Found], folder: Path) -> Found:
    """Every rank draws noise of its own and adds it to its own sum, and the noised sums are added up."""
    noised = NoiseState.noised

    def twice(self: NoiseState, total: Tensor, *others: Any) -> Tensor:
        found = noised(self, total, *others)
        dist.all_reduce(found)
        return found

    streams = patch.object(
        Ranks, "streams", lambda self, mode, seed: Secure() if mode == "secure" else so.rng.Seeded(seed)
    )
    with streams, patch.object(NoiseState, "noised", twice), patch.object(PrivateOptimizer, "_sum_over_ranks"):
        return case(folder)


def sum_not_reduced(case: Callable[[Path], Found], folder: Path) -> Found:
    with patch.object(Ranks, "add", lambda self, total: None):
        return case(folder)


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except SordinoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rank_zero_loads() -> None:
    """Rank 0 alone continues with a checkpoint."""
    first = private(epochs=2)
    train(first)
    parts = private(epochs=2)
    if rank() == 0:
        parts[0].load_state_dict(first[0].state_dict())
        parts[1].load_state_dict(first[1].state_dict())
    train(parts)


def use_wrapper_afterwards() -> None:
    model = DistributedDataParallel(mlp())
    _, _, loader = private(model)
    model(next(iter(loader))[0])


def wrapped_afterwards() -> None:
    model, optimizer, _ = private()
    DistributedDataParallel(copy.deepcopy(model))  # a copy is an ordinary model
    try:
        DistributedDataParallel(model)
    finally:
        DistributedDataParallel(optimizer.detach())


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "settings": (lambda: private(clip_norm=1.0 + rank()), "settings on rank 1 that differ"),
    "seeds": (lambda: private(seed=rank()), "settings on rank 1 that differ"),
    "lengths": (lambda: private(dataset=data(60 + rank())), "numbers of records on rank 1 that differ"),
    "rows": (lambda: private(dataset=data(seed=rank())), "rows of the data set on rank 1 that differ"),
    "users": (lambda: private(batch=5, users=USERS[rank() :] + USERS[: rank()]), "users on rank 1 that differ"),
    "learning rates": (lambda: private(optimizer=_own_rate), "settings of the optimizer on rank 1 that differ"),
    "weights": (lambda: train(private(mlp(seed=1 + rank()))), "weights on rank 1 that differ"),
    "steps": (rank_zero_loads, "ranks that have taken 5 and 0 and 0 and 0 steps"),
    "wrapped afterwards": (wrapped_afterwards, "remove DistributedDataParallel, or wrap the model before"),
    "sharded afterwards": (sharded_later, "a private model that was sharded"),
    "another mesh": (other_mesh, "parameter '0.weight' on a mesh that is not one row of all ranks"),
    "another precision": (
        lambda: private(shard(mlp(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
        "a MixedPrecisionPolicy",
    ),
    "the wrapper used afterwards": (use_wrapper_afterwards, "the model that make_private returned"),
}


def _own_rate(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr * (1 + rank()))


def lost_rank() -> str:
    """The last rank ends before the step of the others."""
    parts = private()
    if rank() == dist.get_world_size() - 1:
        return ""
    return refusal(lambda: train(parts))


def sharded(folder: Path) -> Found:
    return {"sharded": {name: case() for name, case in SHARDED.items()}, "sharded, secure": secure_step(folder, shard)}


def everything(folder: Path) -> Found:
    one = CASES["a plain model"]
    return {
        "honest": {name: case(folder) for name, case in CASES.items()},
        **sharded(folder),
        "secure": secure_step(folder),
        "noise on every rank": noise_on_every_rank(one, folder),
        "noise on every rank, secure": noise_on_every_rank(secure_step, folder),
        "sum not reduced": sum_not_reduced(lambda _: loop(epochs=1), folder),
        "refusals": {name: refusal(call) for name, (call, _) in REFUSALS.items()},
        "lost": lost_rank(),
    }


if __name__ == "__main__":
    folder, own, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=own, world_size=size, timeout=timedelta(seconds=60))
    torch.save((everything if size > 2 else sharded)(folder), folder / f"rank{own}.pt")
