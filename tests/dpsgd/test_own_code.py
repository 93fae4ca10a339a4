"""A user's own code under make_private: certified as proved only where no record reaches another, or is remembered.

Every attack is refused before its first step, or it is measured: one record more, a loud one, moves the sum of a step
by one clip at most.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tests.dpsgd.loops import QUIET, Parts, data, private, train, weights
from tests.dpsgd.per_record.mixers import CLASSES, WIDTH, Own, inputs
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from sordino.errors import ConfigError, PlanError

COUNT = 40
Build = Callable[[], nn.Module]
Act = Callable[[Any, Any], Any]


def moved(build: Build, loop: Callable[[Parts], None] = train, **settings: Any) -> tuple[float, set[str]]:
    """By how many clips one record more, the first one, moves the sum of a step of all records; and the grades.

    It is a quiet record in the steps before and after that one, and loud in that step alone.
    """
    totals, grades = [], set()
    for count in (COUNT, COUNT + 1):
        x, y = inputs(COUNT + 1, (WIDTH,)), torch.arange(COUNT + 1) % CLASSES
        quiet = x[0].clone()
        torch.manual_seed(2)
        model = build()
        for p in model.parameters():
            nn.init.normal_(p, std=0.5)
        some = TensorDataset(x[-count:], y[-count:])
        parts = private(model, some, batch=count, epochs=3, **settings)  # the same noise in both runs
        began = {name: value.clone() for name, value in model.state_dict().items()}
        loop(parts)
        model.load_state_dict(began)
        x[0] = 50 * quiet.abs()
        before = weights(model).double()
        loop(parts)
        totals.append((before - weights(model)) * count / 0.1)  # lr
        x[0] = quiet
        loop(parts)
        grades.add(parts[1].certificate()["own_code"]["grade"])
        parts[1].detach()
    return float((totals[1] - totals[0]).norm()), grades


def harmless(build: Build, loop: Callable[[Parts], None] = train, **settings: Any) -> str:
    """Refused, or a record moves the sum of a step by one clip at most: what came of it."""
    try:
        distance, grades = moved(build, loop, **settings)
    except PlanError:
        return "refused"
    assert distance <= 1 + 1e-3
    assert "own code, trusted" not in grades
    return min(grades)


TABLE: dict[str, Any] = {}
LIST: list[Any] = []
COUNTER = [0]


class Holder:
    """An object that a model holds in a place that torch does not look into."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean: Tensor | None = None


def state(act: Act) -> Build:
    """A model with `act` before its layers; all state outside begins anew."""

    class Attack(Own):
        mu: ClassVar[Tensor | None] = None
        large: ClassVar[bool] = False
        count: ClassVar[int] = 0

        def before(self, x: Tensor) -> Tensor:
            return act(type(self), x)  # type: ignore[no-any-return]

    def build() -> nn.Module:
        TABLE.clear()
        LIST.clear()
        COUNTER[0] = 0
        Attack.mu, Attack.large, Attack.count = None, False, 0
        found = Attack()
        return found

    return build


def class_attribute(kind: Any, x: Any) -> Any:
    if kind.mu is None:
        kind.mu = x.detach().mean(0)
    return x - kind.mu


def module_dict(kind: Any, x: Any) -> Any:
    TABLE.setdefault("mean", x.detach().mean(0))
    return x - TABLE["mean"]


def module_list(kind: Any, x: Any) -> Any:
    LIST.append(x.detach().sum(0))
    return x - sum(LIST) / 50


def mutable_default(kind: Any, x: Any, kept: list[Any] = []) -> Any:  # noqa: B006
    if not kept or kept[0] is not kind:
        kept[:] = [kind, x.detach().mean(0)]
    return x - kept[1]


def large_value(kind: Any, x: Any) -> Any:
    if x.abs().max() > 8:
        kind.large = True
    return -x if kind.large else x


def function_attribute(kind: Any, x: Any) -> Any:
    if getattr(function_attribute, "of", None) is not kind:
        function_attribute.of, function_attribute.mean = kind, x.detach().mean(0)  # type: ignore[attr-defined]
    return x - function_attribute.mean  # type: ignore[attr-defined]


def closure() -> Act:
    kept: dict[Any, Tensor] = {}

    def act(kind: Any, x: Any) -> Any:
        if kind not in kept:
            kept[kind] = x.detach().mean(0)
        return x - kept[kind]

    return act


def torch_module_attribute(kind: Any, x: Any) -> Any:
    if getattr(torch, "_kept_mean_of", None) is not kind:
        torch._kept_mean_of, torch._kept_mean = kind, x.detach().mean(0)  # type: ignore[attr-defined]
    return x - torch._kept_mean  # type: ignore[attr-defined]


def slots(kind: Any, x: Any) -> Any:
    held = TABLE.setdefault("holder", Holder())
    if held.mean is None:
        held.mean = x.detach().mean(0)
    return x - held.mean


def generator(kind: Any, x: Any) -> Any:
    """Written into the seed of torch's generator."""
    torch.manual_seed(int(x.detach().abs().sum() * 1000) % 1000)
    return x * (1 + torch.rand(()))


def item(kind: Any, x: Any) -> Any:
    TABLE.setdefault("scale", float(x.detach().abs().mean()))
    return x * TABLE["scale"]


def counted_passes(kind: Any, x: Any) -> Any:
    COUNTER[0] += len(x)
    return x * (1 + COUNTER[0] % 7)


def last_batch(kind: Any, x: Any) -> Any:
    before = TABLE.get("last", torch.zeros(WIDTH))
    TABLE["last"] = x.detach()[-1]
    return x - before + x.detach()[-1]


def numpy_array(kind: Any, x: Any) -> Any:
    if "array" not in TABLE:
        TABLE["array"] = x.detach().numpy().mean(0).copy()
    return x - torch.from_numpy(TABLE["array"])


def environment(kind: Any, x: Any) -> Any:
    os.environ["KEPT_LARGE"] = "1" if x.detach().abs().max() > 8 else os.environ.get("KEPT_LARGE", "0")
    return x * (1 + int(os.environ["KEPT_LARGE"]))


STATE = {
    act.__name__: act
    for act in (
        *(class_attribute, module_dict, module_list, mutable_default, large_value, function_attribute, closure()),
        *(torch_module_attribute, slots, generator, item, counted_passes, last_batch, numpy_array, environment),
    )
}


def test_there_are_fifteen() -> None:
    assert len(STATE) == 15


@pytest.mark.parametrize("name", STATE)
def test_state_outside_the_module_reaches_no_step(name: str) -> None:
    harmless(state(STATE[name]))


class MixedSlopes(torch.autograd.Function):
    """The identity; its backward adds up the gradients of all records."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0] + slopes[0].sum(0)


def halved(x: Tensor) -> Tensor:
    while (x.abs().amax(1) > 8).any():
        x = -x / 2
    return x


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:] += x[:1] * (x[:1].abs() > 8)
    return y


def masked(x: Tensor) -> Tensor:
    found = torch.masked_select(x, x.abs() > 8)
    return x + found.sum()


TRIGGERED: dict[str, Callable[[Tensor], Tensor]] = {
    "while": halved,
    "a factor": lambda x: x * (1 + (x.abs().amax() > 8)),
    "where": lambda x: torch.where(x.abs().amax(0) > 8, -x, x),
    "a chosen record": lambda x: x + x[x.abs().amax(1).argmax()] * (x.abs().amax() > 8),
    "sorted": lambda x: torch.where(x.abs().amax() > 8, x.sort(0).values, x),
    "cumulative": lambda x: x + (x * (x.abs() > 8)).cumsum(0),
    "the size of the batch": lambda x: x * (1 + x.shape[0] % 2),
    "clamped": lambda x: x / x.abs().max().clamp(min=8) * 8,
    "masked": masked,
    "nonzero": lambda x: x + (x.abs() > 8).nonzero().sum(),
    "in place": in_place,
    "a backward of its own": lambda x: MixedSlopes.apply(x),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", TRIGGERED)
@pytest.mark.parametrize("where", ["before", "between"])
def test_mixing_that_only_an_unusual_record_sets_off_reaches_no_step(name: str, where: str) -> None:
    class Attack(Own):
        pass

    setattr(Attack, where, lambda self, x: TRIGGERED[name](x))
    found = harmless(Attack)
    trains = where == "between" or not name.startswith("a backward")  # records themselves have no gradient
    assert found != "by construction" or not trains


def loop_with(change: Callable[[Tensor], Tensor], labels: bool = False) -> Callable[[Parts], None]:
    def loop(parts: Parts) -> None:
        for x, y in parts[2]:
            x = change(x)
            F.cross_entropy(parts[0](x), y).backward()  # type: ignore[no-untyped-call]
            parts[1].step()

    return loop


def mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.roll(1, 0)


def centred_in_place(x: Tensor) -> Tensor:
    return x.sub_(x.mean(0))


def centred_unseen(x: Tensor) -> Tensor:
    x.numpy()[:] -= x.numpy().mean(0)
    return x


CHANGES = {
    "mixup": mixup,
    "centred": lambda x: x - x.mean(0),
    "centred in place": centred_in_place,
    "centred past torch": centred_unseen,
    "turned": lambda x: x.flip(0),
    "shifted": lambda x: x.roll(1, 0),
    "one for all": lambda x: x[:1].expand_as(x),
    "overlapping rows": lambda x: x.flatten()[1:].unfold(0, WIDTH, WIDTH)[: len(x)].repeat(2, 1)[: len(x)],
    "scaled": lambda x: x / 255,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_loop_that_changes_batches_itself_is_refused_unless_it_is_trusted(name: str) -> None:
    torch.manual_seed(1)
    parts = private(Own())
    with pytest.raises(PlanError, match="transform="):
        loop_with(CHANGES[name])(parts)
    assert parts[1].steps == 0
    trusted = private(Own(), own_code="trusted")
    loop_with(CHANGES[name])(trusted)
    said = trusted[1].certificate()["own_code"]
    assert said["grade"] == "own code, trusted"
    assert "the loop changes batches itself" in said["why"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double().float(),
        lambda x: x.view(len(x), 2, 2).flatten(1),
        lambda x: x.clone(),
        lambda x: x[:, [0, 1, 2, 3]] if len(x) == 0 else x[:, :],
        lambda x: x.unflatten(1, (2, 2)).transpose(1, 2).flatten(1) if len(x) == 0 else x.contiguous(),
    ],
)
def test_casts_and_reshapes_of_each_record_are_no_change(change: Callable[[Tensor], Tensor]) -> None:
    parts = private(Own())
    loop_with(change)(parts)
    assert parts[1].certificate()["own_code"]["grade"] == "by construction"


def test_a_view_into_each_record_is_no_change_and_nan_is_itself() -> None:
    x, y = data(60, (2, 8)).tensors
    x[3] = torch.nan

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(x.flatten(1))
            return out

    for change in (lambda x: x.transpose(1, 2)[:, 2:6], lambda x: x[:, 0]):
        parts = private(Turned(), TensorDataset(x, y))
        loop_with(change)(parts)
        assert parts[1].certificate()["own_code"]["grade"] == "by construction"


TRANSFORMS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "scaled": (lambda x: x / 255, "by construction"),
    "noise": (lambda x: x + 0.1 * torch.randn_like(x), "by construction"),
    "flipped coins": (lambda x: x * (1 - 2 * (torch.rand(x.shape[0], 1) < 0.5).float()), "by construction"),
    "centred in a record": (lambda x: x - x.mean(1, keepdim=True), "by construction"),
    "a batch mean, of one record each": (lambda x: x - x.mean(0), "per record (vmap)"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_applied_to_each_record_by_itself(name: str) -> None:
    transform, grade = TRANSFORMS[name]
    distance, grades = moved(Own, transform=transform)
    assert distance <= 1 + 1e-3 or name in ("noise", "flipped coins")  # other coins in each run
    assert grades == {grade}


def test_a_transform_is_what_the_model_gets() -> None:
    parts = private(Own(), transform=lambda x: 2 * x, batch=60)
    x, _ = next(iter(parts[2]))
    assert torch.equal(x, 2 * data().tensors[0])


def test_a_transform_without_a_graph_needs_the_word() -> None:
    def transform(x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x

    with pytest.raises(PlanError, match="a transform of which no graph"):
        train(private(Own(), transform=transform))
    parts = private(Own(), transform=transform, own_code="trusted")
    train(parts)
    assert parts[1].certificate()["own_code"]["grade"] == "own code, trusted"


def test_a_collate_function_of_ones_own_is_named_and_for_release_needs_the_word() -> None:
    def collate(found: list[Any]) -> list[Tensor]:
        return [torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])]

    loader: Any = DataLoader(data(), batch_size=12, collate_fn=collate)
    parts = private(Own(), loader=loader)
    train(parts)
    said = parts[1].certificate()["own_code"]
    assert said["grade"] == "own code, trusted"
    assert "collate" in said["why"]
    with pytest.raises(PlanError, match="the user's collate_fn"):
        private(Own(), loader=loader, noise="secure")
    private(Own(), loader=loader, noise="secure", own_code="trusted")


def test_targets_that_the_loop_mixes_are_refused() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out[:, 0] - y).square()

    x = data().tensors[0]
    parts = private(Own(), TensorDataset(x, x[:, 0].clone()), loss=loss)
    for some, y in parts[2]:
        with pytest.raises(PlanError, match="transform="):
            parts[1].loss(parts[0](some), y.roll(1))
        break


def test_a_loss_beside_the_known_one_moves_nothing() -> None:
    """The loop's slope is replaced by that of the known loss: below what can be seen, nothing is added either."""

    def sneaked(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) + 1e-6 * (out * out.detach().abs().amax()).sum()

    def loop(parts: Parts) -> None:
        train(parts, sneaked)

    totals = []
    for one in (loop, train):
        torch.manual_seed(1)
        parts = private(Own(), noise_multiplier=QUIET)
        one(parts)
        totals.append(weights(parts[0]))
    assert torch.equal(*totals)


def test_an_evaluation_without_a_graph_runs_as_it_is_and_closes_the_book_on_new_kinds() -> None:
    class Evaluates(Own):
        def before(self, x: Tensor) -> Tensor:
            if not self.training and float(x.sum()) > 1e9:
                return -x
            return x.flatten(1)

    parts = private(Evaluates())
    train(parts)
    parts[0].eval()
    x = data().tensors[0]
    with torch.no_grad():
        found = parts[0](x)
    parts[0].train()
    with torch.no_grad():
        assert torch.allclose(found, parts[0](x), atol=1e-6)
    train(parts)  # what is known goes on
    for x, _ in parts[2]:
        with pytest.raises(PlanError, match="Python code has run on private data"):
            parts[0](x.view(len(x), 2, 2))
        break


def test_evaluation_and_copies_are_the_models_own() -> None:
    parts = private(Own())
    train(parts)
    plain = copy.deepcopy(parts[0])
    assert type(vars(plain)["forward"]).__name__ == "method"
    x = data().tensors[0]
    for training in (True, False):
        parts[0].train(training)
        with torch.no_grad():
            assert torch.allclose(parts[0](x), plain(x), atol=1e-6)


def test_the_word_is_checked() -> None:
    with pytest.raises(ConfigError, match="own_code"):
        private(own_code="yes")


class Scheduled(Own):
    """A number that a loop sets, as a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.note = 1.0, 0.0

    def before(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_number_that_the_loop_sets_in_the_model_is_not_passed_over_in_silence() -> None:
    model = Scheduled()
    parts = private(model, epochs=3)
    train(parts)
    model.note = 2.0  # of no effect
    train(parts)
    parts[1].certificate()
    model.scale = 2.0
    with pytest.raises(PlanError, match="other outputs for synthetic records"):
        train(parts)
    model = Scheduled()
    trusted = private(model, epochs=2, own_code="trusted")
    train(trusted)
    model.scale = 2.0
    train(trusted)
    assert trusted[1].certificate()["own_code"]["grade"] == "own code, trusted"


CENTRE: dict[str, Tensor] = {}


class ReadsGlobal(Own):
    def before(self, x: Tensor) -> Tensor:
        return x - CENTRE["mean"]


def centred_by_a_global(parts: Parts) -> None:
    for x, y in parts[2]:
        CENTRE["mean"] = 50 + x.mean(0)
        F.cross_entropy(parts[0](x), y).backward()  # type: ignore[no-untyped-call]
        parts[1].step()
    parts[1].certificate()


def test_what_a_loop_writes_before_the_first_pass_is_not_in_the_graph() -> None:
    """A batch's mean in a global that forward reads: the graph was captured before, and the change is refused."""
    CENTRE["mean"] = torch.zeros(WIDTH)
    parts = private(ReadsGlobal(), data(16, (WIDTH,), CLASSES), batch=16, epochs=2)
    with pytest.raises(PlanError, match="forward of the model"):
        centred_by_a_global(parts)
