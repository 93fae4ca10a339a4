"""Nothing of a record leaves in the model un-noised: whatever changed without a private step is found and refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.dpsgd.loops import Parts, data, first_batch, mlp, private, train, weights
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino.dpsgd import make_private
from sordino.dpsgd.state_guard import SMALL, StateGuard, digest
from sordino.errors import PlanError


class Keeps(nn.Module):
    """A linear model with a place for everything; `act` is what its forward pass does beside."""

    seen: Tensor
    count: Tensor
    loose: Tensor

    def __init__(self, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.out, self.act = nn.Linear(4, 3), act
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("count", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("loose", torch.zeros(4), persistent=False)
        self.memory, self.last = torch.zeros(4), None
        self.table, self.total = np.zeros(4), 0.0
        self.heap: list[Any] = []
        self.queue: deque[Any] = deque(maxlen=2)
        self.box, self.helper = SimpleNamespace(notes={"mean": torch.zeros(4)}), [nn.Linear(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.act(self, x)
        out: Tensor = self.out(x)
        return out


def hook(model: Any, x: Tensor) -> None:
    """In the backward pass, which comes after every look at the forward pass."""

    def keep(slope: Tensor) -> None:
        model.frozen.data.copy_(slope[0])

    x.requires_grad_().register_hook(keep)  # type: ignore[no-untyped-call]


def load(model: Any, x: Tensor) -> None:
    model.load_state_dict({**model.state_dict(), "seen": x[0]})


ACTS: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "integer buffer": ("buffer 'count'", lambda m, x: m.count.add_((x[0] * 1e6).long())),
    "float buffer": ("buffer 'seen'", lambda m, x: m.seen.lerp_(x[0], 0.1)),
    "buffer through .data": ("buffer 'seen'", lambda m, x: m.seen.data.add_(x[0])),
    "another buffer": ("buffer 'seen'", lambda m, x: setattr(m, "seen", x[0].clone())),
    "non-persistent buffer": ("buffer 'loose'", lambda m, x: m.loose.add_(x[0])),
    "frozen parameter": ("parameter 'frozen'", lambda m, x: m.frozen.add_(x[0])),
    "frozen through .data": ("parameter 'frozen'", lambda m, x: m.frozen.data.add_(x[0])),
    "frozen through numpy": ("parameter 'frozen'", lambda m, x: np.copyto(m.frozen.detach().numpy(), x[0].numpy())),
    "trained overwritten": ("parameter 'out.weight'", lambda m, x: m.out.weight[0].copy_(x[0])),
    "trained through .data": ("parameter 'out.weight'", lambda m, x: m.out.weight.data[0].copy_(x[0])),
    "trained, new storage": (
        "parameter 'out.weight'",
        lambda m, x: setattr(m.out.weight, "data", x[0].expand(3, 4).clone()),
    ),
    "attribute": ("attribute 'memory'", lambda m, x: m.memory.add_(x[0])),
    "new attribute": ("attribute 'mean'", lambda m, x: setattr(m, "mean", x.mean(0))),
    "attribute that was none": ("attribute 'last'", lambda m, x: setattr(m, "last", x[0])),
    "array": ("attribute 'table'", lambda m, x: np.copyto(m.table, x[0].numpy())),
    "number": ("attribute 'total'", lambda m, x: setattr(m, "total", float(x.sum()))),
    "list": ("attribute 'heap'", lambda m, x: m.heap.append(x[0])),
    "queue": ("attribute 'queue'", lambda m, x: m.queue.append(x[0])),
    "dictionary in an object": ("attribute 'box'", lambda m, x: m.box.notes.update(mean=x[0])),
    "layer in a list": ("parameter 'helper", lambda m, x: m.helper[0].bias.data.add_(x[0, :2])),
    "backward hook": ("parameter 'frozen'", hook),
    "a checkpoint loaded in the pass": ("buffer 'seen'", load),
}


@pytest.mark.parametrize("name", ACTS)
def test_state_that_would_leave_without_noise_is_refused_or_never_written(name: str) -> None:
    """What has a graph without the write runs as that graph; what has none is refused, as is a graph that writes."""
    parts = private(Keeps(ACTS[name][1]))
    before = {key: value.clone() for key, value in parts[0].state_dict().items() if not key.startswith("out.")}
    try:
        train(parts)
    except PlanError:
        assert parts[1].steps == 0
        return
    parts[1].certificate()
    assert all(torch.equal(parts[0].state_dict()[key], value) for key, value in before.items())
    model: Any = parts[0]
    assert (model.heap, len(model.queue), model.last, model.total) == ([], 0, None, 0.0)


@pytest.mark.parametrize("name", ["frozen through numpy", "array", "number", "a checkpoint loaded in the pass"])
def test_trusted_code_that_keeps_records_is_refused_by_name(name: str) -> None:
    """Its owner vouches for a forward without a graph: the alarms stay."""
    found, act = ACTS[name]
    parts = private(Keeps(act), own_code="trusted")
    with pytest.raises(PlanError, match=r"\[state\]") as refusal:
        train(parts)
    assert found in str(refusal.value)
    assert parts[1].steps == 0
    for door in (parts[0].state_dict, parts[1].state_dict, parts[1].detach):
        with pytest.raises(PlanError, match=r"\[state\]"):
            door()


def test_a_model_that_keeps_nothing_is_not_refused() -> None:
    parts = private(Keeps(lambda model, x: None))
    train(parts)
    assert parts[1].steps == 5
    assert set(parts[0].state_dict()) == {"out.weight", "out.bias", "frozen", "seen", "count"}


@pytest.mark.parametrize("name", ["frozen through numpy", "array", "number"])
def test_what_an_evaluation_without_a_graph_writes_reaches_no_certificate(name: str) -> None:
    """The model's own forward runs there, after the last step."""
    found, act = ACTS[name]
    model = Keeps(lambda model, x: None)
    parts = private(model)
    train(parts)
    model.act = act
    model.eval()
    with torch.no_grad():
        model(data().tensors[0])
    for door in (parts[1].certificate, model.state_dict, parts[1].state_dict):
        with pytest.raises(PlanError, match="state") as refusal:
            door()
        assert found in str(refusal.value)


def test_a_write_into_a_large_tensor_is_found_at_the_latest_by_the_certificate() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_buffer("table", torch.zeros(SMALL + 1))
    parts = private(model)
    train(parts)
    table: Any = model.table
    table.data[17] = 1.0
    with pytest.raises(PlanError, match="buffer 'table'"):
        parts[1].certificate()


def test_a_digest_tells_any_change_apart() -> None:
    """One bit, two words that change places, a sum that stays: in the middle of a block, and in the rest."""
    value = torch.arange(20000.0)
    same = digest(value.clone())
    assert digest(value) == same
    for at in (0, 4095, 8193, 19999):
        changed = value.clone()
        changed.view(torch.int32)[at] ^= 1
        assert digest(changed) != same
    swapped = value.clone()
    swapped[[10, 12000]] = swapped[[12000, 10]]
    moved = value.clone()
    moved[[100, 102]] += torch.tensor([1.0, -1.0])
    assert len({same, digest(swapped), digest(moved), digest(value.double()), digest(value.view(2, -1))}) == 5
    for kind in (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64):
        small = torch.ones(3, dtype=kind)
        assert digest(small) == digest(small.clone()) != digest(torch.zeros(3, dtype=kind))
    assert digest(value.view(100, 200).t()) == digest(value.view(100, 200).t().contiguous())


def test_an_attribute_that_disappears_is_found() -> None:
    model = Keeps(lambda model, x: None)
    state = StateGuard(model)
    del model.memory
    with pytest.raises(PlanError, match="attribute 'memory'"):
        state.check(full=True)


def test_the_owner_may_load_a_checkpoint_and_set_numbers_between_passes() -> None:
    parts, other = private(Keeps(lambda model, x: None)), Keeps(lambda model, x: None)
    for tau in (1.0, 0.5):
        parts[0].total = tau  # type: ignore[assignment]
        parts[0].load_state_dict(other.state_dict())
        train(parts)
    assert parts[1].steps == 10


def test_weights_that_are_swapped_for_a_while_are_no_change() -> None:
    parts = private()
    train(parts)
    kept = weights(parts[0]).clone()
    nn.utils.vector_to_parameters(torch.zeros_like(kept), parts[0].parameters())
    with pytest.raises(PlanError, match=r"parameter '0\.weight'"):
        parts[0].state_dict()
    nn.utils.vector_to_parameters(kept, parts[0].parameters())
    train(parts)
    assert parts[1].steps == 10


def test_what_the_inner_optimizer_does_to_its_weights_is_its_step() -> None:
    class Projected(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.clamp_(-0.01, 0.01)

    parts = private(optimizer=Projected)
    train(parts)
    assert float(weights(parts[0]).abs().max()) <= 0.01


def test_weights_that_a_hook_computes_from_parameters_are_no_state() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = nn.utils.weight_norm(nn.Linear(4, 8))
    model = nn.Sequential(layer, nn.Tanh(), nn.LSTM(8, 4, batch_first=True))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.out = model, nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.body(x)[0][:, -1])
            return out

    parts = private(Last(), data(shape=(5, 4)))
    train(parts)
    assert parts[1].steps == 5


def test_copies_and_pickles_of_a_guarded_model_are_ordinary() -> None:
    parts = private()
    first_batch(parts)
    for twin in (copy.deepcopy(parts[0]), pickle.loads(pickle.dumps(parts[0]))):
        twin[0].weight.data.add_(1.0)  # type: ignore[index]
        twin.load_state_dict(twin.state_dict())
        assert not torch.equal(weights(twin), weights(parts[0]))
        file = io.BytesIO()
        torch.save(twin, file)
    parts[0].state_dict()
    plain = parts[1].detach()
    plain[0].weight.data.add_(1.0)  # type: ignore[index]
    plain.state_dict()
    assert not {"forward", "state_dict", "load_state_dict"} & set(vars(plain))


def test_a_frozen_model_trains_its_head_alone() -> None:
    model = mlp()
    optimizer: Optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index]
    parts: Parts = make_private(model, optimizer, DataLoader(data(), 12), epochs=1, noise_multiplier=1.0)
    train(parts)
    assert parts[1].certificate()["counts"]["rounds_charged"] == 5
