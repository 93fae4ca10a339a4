"""A loss has a term of its own for every record: seen to be so, or computed so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import QUIET, Parts, batch_of, clipped_sum, data, mlp, private, train, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from sordino.dpsgd.own_code import LossCheck
from sordino.errors import ConfigError, DataError, PlanError

WORDS, LENGTH, COUNT = 7, 5, 40


class Next(nn.Module):
    """A small language model: [b, T] -> [b, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.out = nn.Embedding(WORDS, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.read(self.embed(x))[0])
        return out


def texts(padded: bool = True, count: int = COUNT) -> TensorDataset:
    coins = torch.Generator().manual_seed(0)
    x, y = (torch.randint(WORDS, (count, LENGTH), generator=coins) for _ in range(2))
    if padded:
        y[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (count, 1), generator=coins)] = -100
    return TensorDataset(x, y)


def token_mean(out: Tensor, y: Tensor) -> Tensor:
    """What everybody writes: the mean over the tokens that count."""
    return F.cross_entropy(out.view(-1, WORDS), y.view(-1), ignore_index=-100)


def per_record(out: Tensor, y: Tensor) -> Tensor:
    """Each text's own mean."""
    losses = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    return losses.sum(1) / (y != -100).sum(1).clamp(min=1)


def steps(parts: Parts, epochs: int = 1) -> None:
    model, optimizer, loader = parts
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            optimizer.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def language(**settings: Any) -> Parts:
    torch.manual_seed(1)
    return private(Next(), **{"dataset": texts(), "batch": 10, **settings})


def test_a_mean_over_the_tokens_that_count_is_refused() -> None:
    parts = language()
    with pytest.raises(PlanError, match=r"not -100.*loss=f"):
        train(parts, token_mean)
    assert parts[1].steps == 0


def test_ignored_tokens_that_come_late_are_refused_when_they_come() -> None:
    x, y = texts(padded=False).tensors
    parts = language(dataset=TensorDataset(x, y), epochs=6)
    train(parts, token_mean, epochs=3)  # recognised: each text has as many tokens
    assert parts[1].check.found.startswith("recognised")
    y[:, -1] = -100
    y[::2, -2] = -100
    with pytest.raises(PlanError, match="not -100"):
        train(parts, token_mean)


def movement(run: Callable[[Parts], None], **settings: Any) -> float:
    """How many clips one long text more moves the sum, beside twenty short ones that are all alike."""
    x, y = texts(padded=False, count=21).tensors
    x[1:], y[1:] = x[1], y[1]
    y[1:, 1:] = -100
    torch.manual_seed(1)
    model = Next()
    alone = torch.autograd.grad(token_mean(model(x[1:2]), y[1:2]), list(model.parameters()))
    clip = float(torch.cat([slope.flatten() for slope in alone]).double().norm())
    sums = []
    for first in (0, 1):
        part = TensorDataset(x[first:], y[first:])
        parts = language(dataset=part, batch=len(part), noise_multiplier=QUIET, clip_norm=clip, **settings)
        before = weights(parts[0]).double()
        run(parts)
        sums.append((before - weights(parts[0])) * len(part) / 0.1)
    return float((sums[0] - sums[1]).norm()) / clip


def test_without_the_check_a_token_mean_moves_the_sum_by_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossCheck, "check", lambda *_: None)
    assert movement(lambda parts: train(parts, token_mean)) > 1.5
    assert movement(steps, loss=per_record) <= 1 + 1e-3


def test_a_loss_per_record_is_clipped_as_in_a_loop_over_records() -> None:
    parts = language(loss=per_record, clip_norm=0.2, noise_multiplier=QUIET)
    x, y = next(iter(parts[2]))
    model, before = parts[0], weights(parts[0]).clone()
    rows = batch_of(parts, 0)
    wide, narrow = texts().tensors
    wanted = clipped_sum(model, wide[rows], narrow[rows], 0.2, lambda o, t: per_record(o, t).sum())
    value = parts[1].loss(model(x), y)
    assert float(value.detach()) == pytest.approx(float(per_record(model(x), y).mean().detach()), rel=1e-4)
    value.backward()  # type: ignore[no-untyped-call]
    parts[1].step()
    flat = torch.cat([part.reshape(-1) for part in wanted.values()])
    assert torch.allclose((before - weights(model)).double() * 10 / 0.1, flat, atol=1e-4)


def coupled(out: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).sum(1)
    return losses / (y != -100).sum()


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    flat = out.flatten(1)
    return F.cross_entropy(flat @ flat.T, torch.arange(len(out)), reduction="none")


@pytest.mark.parametrize("loss", [coupled, contrastive], ids=lambda f: f.__name__)
def test_a_loss_that_counts_or_compares_records_is_refused(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(PlanError, match=r"depends on the other records|no graph can be captured"):
        steps(language(loss=loss))


class Counting:
    """A loss that weighs a record by what all records before it had; or, if asked, by a number of its owner's."""

    def __init__(self, counts: bool) -> None:
        self.counts, self.weight = counts, 1e5

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        if self.counts:
            self.weight += float((y != -100).sum())
        return per_record(out, y) * self.weight / 1e5


def test_a_loss_that_remembers_records_is_refused_and_one_that_its_owner_sets_needs_the_word() -> None:
    with pytest.raises(PlanError, match="stores no records"):
        steps(language(loss=Counting(True)))
    for word in (None, "trusted"):
        own = Counting(False)
        parts = language(loss=own, epochs=2, own_code=word)
        steps(parts)
        own.weight *= 0.5
        if word is None:
            with pytest.raises(PlanError, match="other outputs for synthetic records"):
                steps(parts)
        else:
            steps(parts)
            assert parts[1].certificate()["own_code"]["grade"] == "own code, trusted"


def test_a_contrastive_loss_in_an_ordinary_loop_is_refused() -> None:
    with pytest.raises(PlanError, match="loss=f"):
        train(private(), lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out))))


def test_a_loss_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(DataError, match="one value per record"):
        steps(language(loss=lambda out, y: per_record(out, y).mean()))
    with pytest.raises(ConfigError, match="reduction"):
        language(loss=per_record, reduction="sum")


def test_only_the_loss_that_was_given_makes_a_step() -> None:
    parts = language(loss=per_record)
    with pytest.raises(PlanError, match=r"optimizer\.loss"):
        train(parts, token_mean)

    def more(parts: Parts) -> None:
        for x, y in parts[2]:
            out = parts[0](x)
            (parts[1].loss(out, y) + out.square().mean()).backward()
            parts[1].step()

    with pytest.raises(PlanError, match=r"optimizer\.loss"):
        more(language(loss=per_record))

    def other(parts: Parts) -> None:
        for x, y in parts[2]:
            out = parts[0](x)
            parts[1].loss(out - out.mean(0), y)

    with pytest.raises(PlanError, match="the unchanged output"):
        other(language(loss=per_record))
    with pytest.raises(PlanError, match="make_private"):
        private()[1].loss(torch.zeros(1), torch.zeros(1))


def test_a_loss_per_record_equals_the_plain_loop() -> None:
    results = []
    for own in (True, False):
        settings: dict[str, Any] = {"loss": _cross_entropy} if own else {}
        parts = private(mlp(), data(), epochs=2, **settings)
        steps(parts, 2) if own else train(parts, epochs=2)
        results.append(weights(parts[0]))
    assert torch.allclose(results[0], results[1], atol=1e-6)


def _cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def test_the_certificate_says_how_the_loss_is_kept_apart() -> None:
    parts = language(loss=per_record)
    steps(parts)
    assert "record's output alone" in parts[1].certificate()["loop"]["loss"]["check"]


def smoothed(smoothing: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, y: F.cross_entropy(out, y, label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.01, 0.1, 0.5])
def test_label_smoothing_is_recognised_and_clipped_as_in_a_loop_over_records(smoothing: float) -> None:
    parts = private(clip_norm=0.4, noise_multiplier=QUIET)
    before = weights(parts[0]).clone()
    x, y = data().tensors
    rows = batch_of(parts, 0)
    wanted = clipped_sum(parts[0], x[rows], y[rows], 0.4, smoothed(smoothing))
    found = next(iter(parts[2]))
    smoothed(smoothing)(parts[0](found[0]), found[1]).backward()  # type: ignore[no-untyped-call]
    parts[1].step()
    flat = torch.cat([part.reshape(-1) for part in wanted.values()])
    torch.testing.assert_close((before - weights(parts[0])).double() / 0.1, flat / 12, rtol=0, atol=1e-5)
    assert parts[1].check.found == f"recognised: cross_entropy with label smoothing {smoothing}"


def test_label_smoothing_is_recognised_after_scores_of_zero_and_of_tokens() -> None:
    model = mlp()
    for parameter in model[2].parameters():  # type: ignore[index]
        nn.init.zeros_(parameter)
    parts = private(model, epochs=2)
    train(parts, smoothed(0.1), epochs=2)
    assert parts[1].check.found.endswith("smoothing 0.1")
    parts = language(dataset=texts(padded=False))
    train(parts, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=0.1))
    assert parts[1].check.found == "recognised: cross_entropy of tokens with label smoothing 0.1"


@pytest.mark.parametrize("other", [0.0, 0.2])
def test_label_smoothing_that_the_loop_chooses_by_its_batch_is_refused(other: float) -> None:
    parts, taken = private(), []

    def chosen(out: Tensor, y: Tensor) -> Tensor:
        taken.append(1)
        return smoothed(0.1 if len(taken) < 3 else other)(out, y)

    with pytest.raises(PlanError, match="a loss that differs"):
        train(parts, chosen)
    assert parts[1].steps == 2


def test_a_smoothed_mean_over_the_tokens_that_count_is_refused() -> None:
    parts = language()
    with pytest.raises(PlanError, match=r"not -100.*loss=f"):
        train(parts, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=0.1))
    assert parts[1].steps == 0
