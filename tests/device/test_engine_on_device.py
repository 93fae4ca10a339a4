"""Promise: the federated engine runs every recipe where the model is, and ends with the CPU's numbers to 1e-5."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contracts.test_extensions_engines import Ditto
from tests.device import sim
from tests.device.loops import CLASSES, DEVICE, NETS, net
from tests.engines.cases import CASES
from tests.recipes.test_recipes import OWN, built, data
from tests.tiny import plan
from torch import Tensor

import sordino as so
from sordino.engines.base import device_of
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError
from sordino.loop import run
from sordino.parts import (
    Adam,
    Adaptive,
    Banded,
    BufferedToeplitz,
    CentralNoise,
    Clip,
    CorrelatedNoise,
    Everyone,
    FixedSize,
    Gaussian,
    JamesStein,
    Laplace,
    LaplacianSmoothing,
    LocalNoise,
    LocalSgd,
    PublicMask,
    ReleasedMask,
    RoundRobin,
    Sam,
    SoftThreshold,
    SparsifyUpdate,
    Tree,
)
from sordino.parts.encoding import Public
from sordino.parts.local_solvers import Scaffold
from sordino.plan import Plan
from sordino.recipes import RECIPES
from sordino.rng import Seeded
from sordino.task import Task

SIZES = (5, 3, 6, 4, 7, 4)


def device_engine(each: InProcess | None = None) -> InProcess:
    return replace(each or InProcess(), device=str(DEVICE))


def end_of(plan: Plan, task: Task, engine: InProcess, **asked: Any) -> tuple[Tensor, dict[str, Any]]:
    """The model that a run ends with, and its last figures; all vectors of the server are on the engine's device."""
    last = list(run(plan, task, engine=engine, streams=Seeded(5), **asked))[-1]
    held = [*last.state.memory.values(), *last.state.noise.values()]
    assert {one.device.type for one in held if one.dim()} == {torch.device(engine.device).type}
    figures = {**last.metrics, **last.diagnostics}
    figures.pop("clipped_fraction", None)  # SCAFFOLD's messages lie on the ball itself: rounding decides their side
    return plan.server.result(last.state.memory).cpu(), figures


def check_equal(plan: Plan, task: Task, each: InProcess | None = None, **asked: Any) -> None:
    cpu, figures = end_of(plan, task, each or InProcess(), **asked)
    device, there = end_of(plan, task, device_engine(each), **asked)
    assert not torch.equal(cpu, task.layout.flatten(task.model))
    assert float((cpu - device).abs().max()) <= 1e-5
    assert there == pytest.approx(figures, abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_ends_on_the_device_as_on_the_cpu(name: str) -> None:
    for own in OWN[name]:
        check_equal(built(name, own), data(own))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.streams.mode == "simulation"])
def test_a_case_of_the_engines_ends_on_the_device_as_on_the_cpu(name: str) -> None:
    case = CASES[name]
    if "Dropout" in str(case.task.model):
        pytest.skip("dropout draws from the generator of the device: other masks than on the CPU")
    check_equal(case.plan, case.task, case.each)


def federation(name: str) -> Task:
    torch.manual_seed(6)
    clients = [(NETS[name][1](size), torch.randint(CLASSES, (size,))) for size in SIZES]
    return Task.of(net(name), clients, test=(NETS[name][1](20), torch.randint(CLASSES, (20,))))


LOCAL, QUIET = LocalSgd(lr=0.1, epochs=2, batch=3), CentralNoise(Gaussian(0.01))
PLANS: dict[str, Plan] = {
    "average": plan(local=LOCAL),
    "sam": plan(local=replace(LOCAL, gradient=Sam(0.05))),
    "adaptive": plan(local=LOCAL, encode=(Clip(Adaptive(0.5)),)),
    "scaffold": plan(local=Scaffold(lr=0.1, steps=3, batch=3)),
    "james stein": plan(local=LOCAL, postprocess=(JamesStein(),)),
    "soft threshold": plan(local=LOCAL, release=QUIET, postprocess=(LaplacianSmoothing(1.0), SoftThreshold())),
    "mask": plan(local=LOCAL, encode=(PublicMask(0.5, ReleasedMask()), Clip(1.0)), postprocess=(SoftThreshold(),)),
    "top-k of each tensor": plan(local=LOCAL, encode=(SparsifyUpdate(0.3, per="tensor"), Clip(1.0))),
    "local noise": plan(local=LOCAL, release=LocalNoise(Laplace(1.0)), encode=(Clip(1.0, norm=1),)),
    "fixed size": plan(local=LOCAL, clients=FixedSize(len(SIZES), 3)),
    "banded": plan(
        rounds=4, local=LOCAL, clients=RoundRobin(len(SIZES), 3), release=CorrelatedNoise(Gaussian(1.0), Banded(2))
    ),
}


@pytest.mark.parametrize("path", ["sequential", "batched"])
@pytest.mark.parametrize("local", PLANS)
@pytest.mark.parametrize("name", ["conv", "group_norm", "lstm", "embedding"])
def test_nets_and_solvers_end_on_the_device_as_on_the_cpu(name: str, local: str, path: Any) -> None:
    if name == "lstm" and path == "batched":
        pytest.skip("a recurrent layer has no rule for clients side by side, on any device")
    if name == "group_norm" and local.startswith("top-k"):
        pytest.skip("two entries at the threshold of top-k differ by less than the rounding of its forward pass")
    task = federation(name)
    check_equal(PLANS[local].fitted(), task, InProcess(path))


@pytest.mark.parametrize("strategy", [Banded(2), BufferedToeplitz(2), Tree()], ids=["banded", "buffered", "tree"])
def test_the_memory_of_correlated_noise_is_where_the_model_is(strategy: Any) -> None:
    local, release = plan().local, CorrelatedNoise(Gaussian(1.0), strategy)
    correlated = plan(rounds=4, local=local, clients=RoundRobin(len(SIZES), 3), release=release).fitted()
    check_equal(correlated, federation("mlp"))


def test_noise_of_every_client_and_figures_of_the_clients_own_records() -> None:
    own = InProcess(own_noise=True)
    check_equal(plan(local=LOCAL, release=LocalNoise(Gaussian(1.0))), federation("conv"), own, train_metrics=True)


def test_metrics_and_personal_models_are_computed_where_the_model_is() -> None:
    torch.manual_seed(6)
    some = [(NETS["mlp"][1](size), torch.randint(CLASSES, (size,))) for size in SIZES]
    test = (NETS["mlp"][1](20), torch.arange(20) % CLASSES)
    task = Task.of(net("mlp"), some, test=test, metrics=["f1"], client_test=some)
    check_equal(plan(local=Ditto(lr=0.1, steps=3, batch=3)), task, train_metrics=True)


@pytest.mark.parametrize("norm", [1, 2])
def test_clipped_rows_of_any_size_are_those_of_the_cpu(norm: Any) -> None:
    """Norms whose float32 squares overflow or vanish, and rows that are not finite, without a read of the device."""
    sizes = torch.tensor([1e-40, 1e-30, 1e-8, 1.0, 1e8, 1e19, 1e37, torch.inf, torch.nan])
    rows = torch.randn(len(sizes), 5000, generator=torch.Generator().manual_seed(1)) * sizes[:, None]
    clip, public = Clip(1e-35, norm=norm), Public(t=0, clip_norm=1e-35)
    cpu = clip.encode(rows, public)
    if DEVICE.type == "sim":
        with sim.counted() as found:
            device = clip.encode(rows.to(DEVICE), public)
        assert not found["stalls"]
    device = clip.encode(rows.to(DEVICE), public)
    assert float(torch.linalg.vector_norm(device.cpu().double(), ord=norm, dim=1).max()) <= 1
    assert torch.allclose(device.cpu(), cpu, rtol=1e-5, atol=1e-9)


@pytest.mark.simulated
def test_evaluation_runs_where_the_model_is() -> None:
    task, quiet = federation("conv"), plan(local=LOCAL)
    with sim.counted() as found:
        end_of(quiet, task, device_engine())
    with sim.counted() as without:
        end_of(quiet, replace(task, test=None), device_engine())
    assert found["operations"] - without["operations"] > 10


def counts_of_a_round(name: str, clients: int, path: Any, **changes: Any) -> dict[str, int]:
    """What the device does in one round more; the figures of the round are read, nothing is evaluated."""
    torch.manual_seed(6)
    records = [(NETS[name][1](4), torch.randint(CLASSES, (4,))) for _ in range(clients)]
    task, many = Task.of(net(name), records), plan(**{"local": LOCAL, "rounds": 3, **changes})
    many = replace(many, clients=Everyone(clients))
    totals = []
    for last in (2, 3):
        with sim.counted() as found:
            end_of(replace(many, rounds=last), task, device_engine(InProcess(path)))
        totals.append(found)
    return {name: totals[1][name] - totals[0][name] for name in totals[1]}


@pytest.mark.simulated
@pytest.mark.parametrize("denoise", [(), (JamesStein(),), (SoftThreshold(),)], ids=["plain", "james", "soft"])
def test_a_round_of_batched_clients_waits_four_times(denoise: Any) -> None:
    few, many = (counts_of_a_round("mlp", clients, "batched", postprocess=denoise)["stalls"] for clients in (4, 16))
    assert few == many <= 4


@pytest.mark.simulated
@pytest.mark.parametrize("local", ["average", "sam", "adaptive", "scaffold", "top-k of each tensor"])
def test_a_round_of_single_clients_waits_at_most_once_for_each(local: str) -> None:
    changes = {"local": PLANS[local].local, "encode": PLANS[local].encode}
    for name in ("linear", "conv", "transformer"):
        few, many = (counts_of_a_round(name, clients, "sequential", **changes)["stalls"] for clients in (4, 16))
        assert many - few <= (12 if local == "scaffold" else 0)  # the state of a client goes back to the host


@pytest.mark.simulated
@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_a_round_copies_less_than_one_model_to_the_host(path: Any) -> None:
    size = sum(p.numel() for p in net("grouped_conv" if path == "sequential" else "mlp").parameters())
    found = counts_of_a_round("grouped_conv" if path == "sequential" else "mlp", 4, path)
    assert 0 < found["bytes to host"] < 4 * size


# ---- the name of a device --------------------------------------------------------------------------------------------


def test_auto_is_the_accelerator_and_the_header_records_it(tmp_path: Path) -> None:
    """The model, the checkpoint and the result are on the CPU as ever."""
    task = federation("mlp")
    made, cpu = (so.train(plan(), task, device=name, out=tmp_path / name, progress=False) for name in ("auto", "cpu"))
    header = json.loads((tmp_path / "auto" / "engine.jsonl").read_text("utf-8"))
    assert torch.device(header["device"]).type == DEVICE.type
    assert "guess" in header["path_rule"]
    for one, other in zip(made.model.parameters(), cpu.model.parameters(), strict=True):
        assert one.device.type == "cpu"
        assert torch.allclose(one, other, atol=1e-5)


def test_a_checkpoint_of_a_device_is_continued_on_the_cpu(tmp_path: Path) -> None:
    task, adam = federation("mlp"), plan(rounds=4, server=Adam(0.1))
    whole = so.train(adam, task, progress=False)
    with pytest.raises(KeyboardInterrupt):
        so.train(adam, task, device=str(DEVICE), out=tmp_path / "run", progress=False, on_round=_interrupt)
    rest = so.train(adam, task, out=tmp_path / "run", resume=True, progress=False)
    pairs = zip(whole.model.parameters(), rest.model.parameters(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def _interrupt(line: dict[str, Any]) -> None:
    if line["round"] == 2:
        raise KeyboardInterrupt


def test_auto_without_an_accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert device_of("auto") == torch.device("cpu")


def test_a_device_without_float64_is_refused_and_never_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "mps":
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return torch.zeros(*size, dtype=dtype, device=device)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no float64"):
        device_of("mps")


def test_under_torchrun_every_process_has_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        asked.append(device)
        return torch.zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name in ("auto", str(DEVICE.type), f"{DEVICE.type}:0", "cpu"):
        device_of(name)
    assert [str(one) for one in asked] == [f"{DEVICE.type}:1", f"{DEVICE.type}:1", f"{DEVICE.type}:0", "cpu"]
