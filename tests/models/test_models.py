"""Promises of the nets: counts as published, shapes, seeds, and batching over clients that changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from sordino.errors import ConfigError
from sordino.models import (
    ARCHITECTURES,
    Architecture,
    CharLstm,
    DpMnistCnn,
    EmnistCnn,
    FemnistCnn,
    Linear,
    Logistic,
    Mlp,
    ResNet18,
    Shape,
    SmallCnn,
    SvhnCnn,
    build_seeded,
)

DIGIT, COLOUR = (1, 28, 28), (3, 32, 32)
COUNTS: list[tuple[Architecture, Shape, int, int]] = [
    (Logistic(), DIGIT, 10, 7_850),
    (Linear(), (10,), 1, 11),
    (Mlp(), DIGIT, 10, 50_890),
    (SvhnCnn(), COLOUR, 10, 3_431_754),
    (SvhnCnn(channels=(64, 64)), COLOUR, 10, 1_756_426),
    (EmnistCnn(), DIGIT, 62, 1_690_046),
    (EmnistCnn(), DIGIT, 10, 1_663_370),
    (FemnistCnn(), DIGIT, 62, 214_590),
    (SmallCnn(), DIGIT, 10, 55_338),
    (SmallCnn(), COLOUR, 10, 70_986),
    (SmallCnn(groups=8), COLOUR, 10, 71_082),
    (DpMnistCnn(), DIGIT, 10, 26_010),
    (ResNet18(), COLOUR, 10, 11_173_962),
    (ResNet18(), COLOUR, 100, 11_220_132),
    (CharLstm(), (80,), 80, 819_920),
]
# One spec of every kind, small enough to differentiate in a moment.
CASES: list[tuple[Architecture, Shape, int]] = [
    (Logistic(zero=False), (4, 3), 5),
    (Linear(zero=False), (6,), 1),
    (Mlp((7, 6)), (9,), 4),
    (SvhnCnn(channels=(4, 6)), (3, 9, 8), 5),
    (EmnistCnn(), (1, 6, 6), 5),
    (FemnistCnn(), (1, 9, 11), 5),
    (SmallCnn(channels=(4, 6, 8)), (2, 8, 9), 5),
    (SmallCnn(channels=(4, 6), groups=2), (3, 7, 7), 5),
    (DpMnistCnn(), (1, 16, 15), 5),
    (ResNet18(groups=2, width=4), (3, 9, 8), 5),
]
RECURRENT: tuple[Architecture, Shape, int] = (CharLstm(embed=3, hidden=5), (11,), 13)


def kind(value: object) -> str | None:
    return type(value).__name__ if type(value).__name__ in {cls.__name__ for cls in ARCHITECTURES.values()} else None


def records(spec: Architecture, shape: Shape, outputs: int, *batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(spec, CharLstm):
        return torch.randint(outputs, (*batch, *shape), generator=generator)
    return torch.randn((*batch, *shape), generator=generator)


def scale(module: nn.Module) -> dict[str, Tensor]:
    return {name: 1.5 * parameter.detach() + 0.01 for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("spec", "shape", "outputs", "count"), COUNTS, ids=kind)
def test_the_parameter_count_is_the_published_one(spec: Architecture, shape: Shape, outputs: int, count: int) -> None:
    with torch.device("meta"):
        module = spec.build(shape, outputs)
    assert sum(parameter.numel() for parameter in module.parameters()) == count
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert not list(module.buffers())


@pytest.mark.parametrize(("spec", "shape", "outputs"), [*CASES, RECURRENT], ids=kind)
def test_a_batch_of_records_becomes_a_batch_of_outputs(spec: Architecture, shape: Shape, outputs: int) -> None:
    module = build_seeded(spec, shape, outputs, seed=0)
    scores = module(records(spec, shape, outputs, 3))
    assert scores.shape == (3, outputs)
    assert scores.dtype == torch.float32


@pytest.mark.parametrize(("spec", "shape", "outputs", "count"), COUNTS, ids=kind)
def test_the_papers_own_sizes_run(spec: Architecture, shape: Shape, outputs: int, count: int) -> None:
    module = build_seeded(spec, shape, outputs, seed=0)
    with torch.no_grad():
        assert module(records(spec, shape, outputs, 1)).shape == (1, outputs)


@pytest.mark.parametrize(("spec", "shape", "outputs"), [*CASES, RECURRENT], ids=kind)
def test_a_record_is_scored_alone(spec: Architecture, shape: Shape, outputs: int) -> None:
    module = build_seeded(spec, shape, outputs, seed=0)
    batch = records(spec, shape, outputs, 4)
    torch.testing.assert_close(module(batch)[1:2], module(batch[1:2]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module.train()(batch), module.eval()(batch), rtol=0, atol=0)


@pytest.mark.parametrize(("spec", "shape", "outputs"), [*CASES, RECURRENT], ids=kind)
def test_the_seed_alone_decides_the_weights(spec: Architecture, shape: Shape, outputs: int) -> None:
    torch.manual_seed(5)
    first = build_seeded(spec, shape, outputs, seed=3).state_dict()
    torch.manual_seed(6)
    again = build_seeded(spec, shape, outputs, seed=3).state_dict()
    other = build_seeded(spec, shape, outputs, seed=4).state_dict()
    assert list(first) == list(again)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_building_leaves_the_global_generator_as_it_was() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    build_seeded(Mlp(), (4,), 2, seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_a_refused_build_leaves_the_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        build_seeded(SvhnCnn(), (64,), 2, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("spec", [Logistic(), Linear()], ids=kind)
def test_convex_models_start_at_zero(spec: Architecture) -> None:
    assert all(not parameter.any() for parameter in spec.build((5,), 3).parameters())


def loss_of(module: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def loss(parameters: dict[str, Tensor], batch: Tensor) -> Tensor:
        scores: Tensor = functional_call(module, parameters, (batch,))
        return torch.logsumexp(scores, dim=1).mean() + scores.square().mean()

    return loss


@pytest.mark.parametrize(("spec", "shape", "outputs"), CASES, ids=kind)
def test_vmap_over_clients_equals_a_loop(spec: Architecture, shape: Shape, outputs: int) -> None:
    modules = [build_seeded(spec, shape, outputs, seed) for seed in range(3)]
    stacked, _ = stack_module_state(modules)
    batches = records(spec, shape, outputs, 3, 2)
    together = vmap(grad(loss_of(modules[0])))(stacked, batches)
    for client, module in enumerate(modules):
        alone = autograd(module, batches[client])
        for name, gradient in alone.items():
            torch.testing.assert_close(together[name][client], gradient, rtol=1e-5, atol=1e-5)


def autograd(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The gradient of the same loss, by the module's own parameters."""
    scores = module(batch)
    loss = torch.logsumexp(scores, dim=1).mean() + scores.square().mean()
    named = dict(module.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize(("spec", "shape", "outputs"), CASES, ids=kind)
def test_vmap_over_records_gives_each_records_gradient(spec: Architecture, shape: Shape, outputs: int) -> None:
    module = build_seeded(spec, shape, outputs, seed=0)
    batch = records(spec, shape, outputs, 3, 1)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    rows = vmap(grad(loss_of(module)), in_dims=(None, 0))(parameters, batch)
    for name, gradient in autograd(module, batch[2]).items():
        torch.testing.assert_close(rows[name][2], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("spec", "shape", "outputs"), [*CASES, RECURRENT], ids=kind)
def test_functional_call_uses_the_weights_it_is_given(spec: Architecture, shape: Shape, outputs: int) -> None:
    module, loaded = (build_seeded(spec, shape, outputs, seed=0) for _ in range(2))
    weights = {name: weight.requires_grad_() for name, weight in scale(module).items()}
    loaded.load_state_dict(weights)
    batch = records(spec, shape, outputs, 2)
    loss = loss_of(module)(weights, batch)
    torch.testing.assert_close(loss, loss_of(loaded)(dict(loaded.named_parameters()), batch), rtol=1e-6, atol=1e-6)
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    for name, gradient in autograd(loaded, batch).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def test_the_lstm_keeps_no_memory_between_windows() -> None:
    spec, shape, outputs = RECURRENT
    module = build_seeded(spec, shape, outputs, seed=0)
    windows = records(spec, shape, outputs, 2)
    first = module(windows)
    module(windows.flip(0))
    assert torch.equal(module(windows), first)
    changed = windows.clone()
    changed[:, 0] = (changed[:, 0] + 1) % outputs
    assert not torch.equal(module(changed), first)


def test_a_cnn_can_learn() -> None:
    module = build_seeded(SmallCnn(channels=(8,), hidden=8, groups=4), (1, 8, 8), 2, seed=0)
    images, labels = records(SmallCnn(), (1, 8, 8), 2, 16), torch.arange(16) % 2
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(module(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize("spec", [SvhnCnn(), EmnistCnn(), FemnistCnn(), SmallCnn(), DpMnistCnn(), ResNet18()], ids=kind)
@pytest.mark.parametrize("shape", [(64,), (28, 28), (1, 3, 28), (1, 28, 3), (2, 1, 28, 28)], ids=str)
def test_an_image_net_refuses_what_is_not_an_image(spec: Architecture, shape: Shape) -> None:
    sentence = (
        f"found records of shape {list(shape)} for {type(spec).__name__}; needed images [channels, height, width]"
    )
    with pytest.raises(ConfigError, match=re.escape(sentence) + r".*; fix: reshape the records"):
        spec.build(shape, 10)


@pytest.mark.parametrize(("spec", "least"), [(EmnistCnn(), 4), (SmallCnn((4,)), 2), (DpMnistCnn(), 14)], ids=kind)
def test_the_smallest_image_named_in_the_sentence_is_the_smallest_that_runs(spec: Architecture, least: int) -> None:
    with pytest.raises(ConfigError, match=f"at least {least}x{least} pixels"):
        spec.build((1, least - 1, least), 3)
    assert spec.build((1, least, least), 3)(torch.zeros(2, 1, least, least)).shape == (2, 3)


def test_the_lstm_refuses_what_is_not_a_window() -> None:
    with pytest.raises(
        ConfigError, match=r"found records of shape \[80, 3\] for CharLstm; needed .*; fix: cut the text"
    ):
        CharLstm().build((80, 3), 80)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_spec_refuses_no_outputs_and_empty_records(name: str) -> None:
    with pytest.raises(ConfigError, match=r"found records of shape \[\]"):
        ARCHITECTURES[name]().build((), 10)
    with pytest.raises(ConfigError, match=r"found records of shape \[3, 0, 32\]"):
        ARCHITECTURES[name]().build((3, 0, 32), 10)
    with pytest.raises(ConfigError, match=r"found outputs = 0 .*; needed at least 1 output; fix: give the number"):
        ARCHITECTURES[name]().build(COLOUR, 0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Mlp((64, 0)), "found hidden = 64, 0 for Mlp; needed whole numbers"),
        (lambda: SvhnCnn(channels=(0, 4)), "found channels = 0, 4 for SvhnCnn"),
        (lambda: SmallCnn(channels=()), "at least one convolution"),
        (lambda: SmallCnn(kernel=4), "found SmallCnn with kernel = 4; needed an odd kernel; fix: write 5"),
        (lambda: SmallCnn(groups=5), "found groups = 5 for SmallCnn with 16, 32 channels"),
        (lambda: SmallCnn(groups=-1), "fix: write groups = 16 or a divisor of it"),
        (lambda: ResNet18(width=16), "found groups = 32 for ResNet18 with 16 channels"),
        (lambda: ResNet18(groups=0), "found groups = 0 for ResNet18"),
        (lambda: CharLstm(layers=0), "found layers = 0 for CharLstm"),
    ],
)
def test_an_impossible_option_is_refused_when_it_is_written(make: Callable[[], Architecture], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make()


def test_the_registry_names_every_spec_once_and_specs_are_values() -> None:
    for name, cls in ARCHITECTURES.items():
        assert cls.__name__.lower() == name.replace("_", "")
        assert cls() == cls()
        assert hash(cls()) == hash(cls())
    with pytest.raises(FrozenInstanceError):
        Mlp().hidden = (3,)  # type: ignore[misc]
    assert [field.name for field in fields(Linear)] == ["zero"]
