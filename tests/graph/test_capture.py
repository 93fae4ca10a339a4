"""Promise: what is captured is a pure function: no Python state decides in it, and it answers as the module does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tests import hugging
from torch import Tensor, nn

from sordino.graph import BY_CONSTRUCTION, PER_RECORD, Tracing, UntraceableError
from sordino.graph.capture import capture

SEEN: dict[str, Tensor] = {}
LIST: list[Tensor] = []
X = torch.zeros(3, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)


class ClassAttribute(Base):
    mu: ClassVar[Tensor | None] = None

    def forward(self, x: Tensor) -> Any:
        if ClassAttribute.mu is None:
            ClassAttribute.mu = x.detach().mean(0)
        return self.fc(x - ClassAttribute.mu)


class ModuleDict(Base):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x / (1 + SEEN.setdefault("largest", x.detach().abs().amax())))


class ModuleList(Base):
    def forward(self, x: Tensor) -> Any:
        LIST.append(x.detach().mean(0))
        return self.fc(x - LIST[0])


class MutableDefault(Base):
    def forward(self, x: Tensor, kept: dict[str, Tensor] = {}) -> Any:  # noqa: B006
        return self.fc(x - kept.setdefault("mean", x.detach().mean(0)))


class Instance(Base):
    mean: Any = None

    def forward(self, x: Tensor) -> Any:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.fc(x - self.mean)


class PythonCoins(Base):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x) * random.random()


class Counter(Base):
    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Any:
        Counter.calls += 1
        return self.fc(x) * Counter.calls


class OnData(Base):
    def forward(self, x: Tensor) -> Any:
        while (x.abs().amax(1) > 8).any():
            x = -x / 2
        return self.fc(x)


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.sum(0, keepdim=True).expand_as(g)


class OwnBackward(Base):
    def forward(self, x: Tensor) -> Any:
        return MixedBackward.apply(self.fc(x))  # type: ignore[no-untyped-call]


class GradientHook(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.fc(x)
        h.register_hook(lambda g: g.sum(0, keepdim=True).expand_as(g))
        return h * 1.0


@torch.fx.wrap
def remembered(x: Tensor) -> Tensor:
    SEEN.setdefault("wrapped", x.detach().mean(0))
    return x - SEEN["wrapped"]


class Wrapped(Base):
    def forward(self, x: Tensor) -> Any:
        return self.fc(remembered(x))


STATEFUL = (Instance, ClassAttribute, ModuleDict, ModuleList, MutableDefault, PythonCoins, Counter, Wrapped)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()
    LIST.clear()


@pytest.mark.parametrize("kind", STATEFUL)
def test_python_state_that_decides_in_forward_is_refused(kind: type[Base]) -> None:
    with pytest.raises(UntraceableError):
        capture(kind(), (X,), {}, [True])


@pytest.mark.parametrize("kind", [OnData, OwnBackward, GradientHook])
def test_what_no_graph_can_hold_is_refused(kind: type[Base]) -> None:
    with pytest.raises(UntraceableError):
        capture(kind(), (X,), {}, [True])


def test_a_module_and_its_class_are_left_as_they_were() -> None:
    model = Instance()
    for refused in (model, ClassAttribute()):
        with pytest.raises(UntraceableError):
            capture(refused, (X,), {}, [True])
    assert "mean" not in vars(model)
    assert ClassAttribute.mu is None


class Centred(Base):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x - x.mean(0))


def test_a_record_that_is_answered_otherwise_alone_is_known_to_be() -> None:
    traced = Tracing(Centred()).of((X,), {}, [True])
    assert traced.grade == PER_RECORD
    assert not traced.alone


def test_no_record_is_looked_at_while_a_module_is_captured() -> None:
    seen: list[Tensor] = []

    class Spy(Base):
        def forward(self, x: Tensor) -> Any:
            seen.append(x)
            return self.fc(x)

    secret = torch.full((3, 4), 12345.0)
    Tracing(Spy()).of((secret,), {}, [True])
    assert seen
    assert not any(isinstance(x, Tensor) and bool((x == 12345.0).any()) for x in seen)


class Unusual(Base):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x * (1 + (x.abs().amax() > 8)))


def test_mixing_that_only_an_unusual_record_triggers_is_read_off_the_graph() -> None:
    traced = Tracing(Unusual()).of((X,), {}, [True])
    assert traced.reason == "amax over all entries of a batch"
    assert traced.alone  # no look at ordinary records finds it


class Frozen(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.fc(x)
        return self.fc(x) + y


class Branching(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = self.fc(x.flatten(1) if x.dim() > 2 else x)
        return {"scores": y if mask is None else y * mask, "kind": "own"}


@pytest.mark.parametrize(
    ("model", "args"),
    [(Frozen(), (X,)), (Branching(), (X,)), (Branching(), (X, torch.ones(3, 1))), (Branching(), (X.view(3, 2, 2),))],
)
def test_a_graph_answers_as_its_module_with_the_same_gradients(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    traced = Tracing(model).of(args, {}, [True] * len(args))
    batch = [torch.randn(9, *x.shape[1:]) for x in args]
    answers = []
    for run in (model, lambda *given: traced.graph(model, *given)):
        out = run(*batch)  # type: ignore[no-untyped-call]
        scores = out["scores"] if isinstance(out, dict) else out
        answers.append([scores, *torch.autograd.grad(scores.square().sum(), list(model.parameters()))])
    assert traced.grade == BY_CONSTRUCTION
    for own, graph in zip(*answers, strict=True):
        torch.testing.assert_close(graph, own)


def test_layers_of_a_graph_are_the_users_own_objects() -> None:
    model = Branching()
    graph = capture(model, (X,), {}, [True])
    before = graph(model, X + 1)["scores"]
    with torch.no_grad():
        model.fc.weight.zero_()
    assert not torch.equal(before, graph(model, X + 1)["scores"])


def test_after_own_code_has_run_on_data_no_new_graph_is_captured() -> None:
    tracing = Tracing(Branching())
    tracing.of((X,), {}, [True])
    tracing.closed = True
    tracing.of((torch.ones(7, 4),), {}, [True])
    with pytest.raises(UntraceableError, match="new shape"):
        tracing.of((X.view(3, 2, 2),), {}, [True])


TOKENS = {"input_ids": torch.ones(3, 6, dtype=torch.int64), "attention_mask": torch.ones(3, 6, dtype=torch.int64)}
IMAGES = {"pixel_values": torch.zeros(3, 1, 8, 8)}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "bert": (hugging.bert, TOKENS),
    "gpt2": (hugging.gpt2, TOKENS),
    "llama": (hugging.llama, TOKENS),
    "vit": (hugging.vit, IMAGES),
    "lora": (lambda: hugging.adapted(hugging.bert(), ["query", "value"]), TOKENS),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_keep_records_apart_by_construction(name: str) -> None:
    make, inputs = MODELS[name]
    tracing = Tracing(make().train())
    assert tracing.of((), inputs, [True] * len(inputs)).reason is None


def test_one_graph_of_a_language_model_serves_texts_of_other_lengths() -> None:
    tracing = Tracing(hugging.bert())
    graphs = set()
    for length in (6, 9, 12):
        inputs = {name: torch.ones(3, length, dtype=torch.int64) for name in TOKENS}
        graphs.add(id(tracing.of((), inputs, [True, True]).graph))
    assert len(graphs) == 1
