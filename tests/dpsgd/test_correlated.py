"""Promise: steps of a loop may share their noise; the order is fixed, and no noise is lost or drawn twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tests.dpsgd.loops import Parts, data, mlp, private, train
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from typer.testing import CliRunner

from sordino.accounting.events import GaussianNoise
from sordino.cli import app
from sordino.dpsgd import make_private
from sordino.dpsgd.settings import checksum
from sordino.errors import BudgetError, ConfigError, PlanError
from sordino.parts import strategies
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.record_samplers import RecordsInTurn
from sordino.parts.strategies import Banded, BandedSquareRoot, BufferedToeplitz, Identity, Strategy, Tree

EPOCHS, STEPS, WIDTH = 3, 5, 2000  # per epoch; parameters of the loop that only moves by its noise
Patch = pytest.MonkeyPatch


def still(strategy: Strategy, **more: Any) -> Parts:
    """A loop whose gradients are zero, so that its model is a sum of noise: lr 1, batches of 2 of 10 records."""
    model = nn.Linear(WIDTH, 1, bias=False)
    nn.init.zeros_(model.weight)
    dataset = TensorDataset(torch.zeros(10, WIDTH), torch.zeros(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)  # the batch: a step moves by the noise itself
    settings: dict[str, Any] = {"epochs": EPOCHS, "noise_multiplier": 1.0, "strategy": strategy, "reduction": "sum"}
    return make_private(model, optimizer, DataLoader(dataset, batch_size=2), **{**settings, **more})


def moves(parts: Parts, epochs: int) -> list[np.ndarray]:
    """What every step adds to the model."""
    model, optimizer, loader = parts
    weight, found = next(model.parameters()), []
    for _ in range(epochs):
        for x, y in loader:
            before = weight.detach().clone()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y, reduction="sum").backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append((before - weight.detach()).numpy().ravel())
    return found


def resumed(strategy: Strategy, spoil: Callable[[dict[str, Any]], None] = lambda _: None) -> np.ndarray:
    """The noise of a loop that was stopped after its first epoch and taken up by another process's objects."""
    first = still(strategy)
    found = moves(first, 1)
    kept, weights = first[1].state_dict(), {k: v.clone() for k, v in first[0].state_dict().items()}
    spoil(kept["sordino"]["secret"])
    kept["sordino"]["checksum"] = checksum(kept["sordino"])  # whoever spoils it writes that anew
    second = still(strategy)
    second[0].load_state_dict(weights)
    second[1].load_state_dict(kept)
    return np.stack([*found, *moves(second, EPOCHS - 1)])


def white(strategy: Strategy, noise: np.ndarray) -> bool:
    """Whether C (noise) is Z: every step's energy, and every two steps' product, as independent normals have them."""
    fitted = still(strategy)[1].account.settings.plan.release
    assert isinstance(fitted, CorrelatedNoise)
    made = fitted.strategy.noise_matrix(len(noise))
    z = np.linalg.solve(np.linalg.cholesky(made @ made.T), noise)
    energy = np.sum(z**2, axis=1)
    low, high = chi2.ppf([1e-6, 1 - 1e-6], WIDTH)
    off = np.abs(np.triu(z @ z.T, 1)).max() / np.sqrt(WIDTH)
    return bool(energy.min() > low and energy.max() < high and off < 5.5)


@pytest.mark.parametrize("strategy", [Banded(5), BandedSquareRoot(4), BufferedToeplitz(2), Tree(), Identity()])
def test_the_noise_of_a_loop_is_that_of_its_strategy_over_a_resume(strategy: Strategy) -> None:
    assert white(strategy, resumed(strategy))


def forgotten(secret: dict[str, Any]) -> None:
    secret["past"].zero_()


def turned(secret: dict[str, Any]) -> None:
    secret["past"].neg_()


@pytest.mark.parametrize("spoil", [forgotten, turned])
def test_bands_that_are_lost_or_turned_at_a_resume_are_seen(spoil: Callable[[dict[str, Any]], None]) -> None:
    assert not white(Banded(5), resumed(Banded(5), spoil))


def test_independent_noise_that_is_billed_as_correlated_is_seen(monkeypatch: Patch) -> None:
    monkeypatch.setattr(strategies._Banded, "step", lambda self, fresh, memory: (fresh(), dict(memory)))
    assert not white(Banded(5), resumed(Banded(5)))


def test_a_checkpoint_without_its_noise_is_refused() -> None:
    parts = still(Banded(5))
    moves(parts, 1)
    kept = parts[1].state_dict()
    for lost in ({}, {"drawn": 5}, {**kept["sordino"]["secret"], "drawn": 4}):
        other, spoilt = still(Banded(5)), {**kept["sordino"], "secret": lost}
        with pytest.raises(ConfigError, match="checksum"):
            other[1].load_state_dict({**kept, "sordino": spoilt})
        with pytest.raises(ConfigError, match="draws of correlated noise"):
            other[1].load_state_dict({**kept, "sordino": {**spoilt, "checksum": checksum(spoilt)}})
        moves(other, 1)  # nothing of it was taken


def test_noise_does_not_go_back_to_an_older_checkpoint() -> None:
    parts = still(Banded(5))
    moves(parts, 1)
    old = parts[1].state_dict()
    past = old["sordino"]["secret"]["past"].clone()
    moves(parts, 1)
    assert torch.equal(past, old["sordino"]["secret"]["past"])  # later steps do not write into a checkpoint
    with pytest.raises(ConfigError, match="5 draws of correlated noise and 10 charged steps"):
        parts[1].load_state_dict(old)


def test_one_checkpoint_is_not_continued_twice() -> None:
    """Two loops that go on from it would share the noise of the steps before it."""
    first = still(Banded(5))
    moves(first, 1)
    kept, twins = first[1].state_dict(), (still(Banded(5)), still(Banded(5)))
    twins[0][1].load_state_dict(kept)
    moves(twins[0], 1)
    with pytest.raises(ConfigError, match="5 draws of correlated noise and 10 charged steps"):
        twins[1][1].load_state_dict(kept)


def test_a_step_whose_noise_was_lost_stops_the_loop(monkeypatch: Patch) -> None:
    parts = still(Banded(5))
    moves(parts, 1)
    parts[1].account.charge()  # as a step does that is interrupted before its noise
    with pytest.raises(PlanError, match="step 7 of correlated noise after 5 draws"):
        moves(parts, 1)


def test_every_record_once_an_epoch_in_one_order() -> None:
    dataset = TensorDataset(torch.arange(62.0).view(62, 1).repeat(1, 4), torch.zeros(62, dtype=torch.int64))
    parts = private(dataset=dataset, batch=12, epochs=3, strategy=Banded(5))
    seen: list[list[float]] = []
    for _ in range(3):
        for x, y in parts[2]:
            seen.append(x[:, 0].tolist())
            parts[1].zero_grad()
            nn.functional.cross_entropy(parts[0](x), y).backward()  # type: ignore[no-untyped-call]
            parts[1].step()
    assert seen[:5] == seen[5:10] == seen[10:]
    assert len({record for batch in seen for record in batch}) == 60  # a rest of 2 fills no batch
    assert seen[0] != sorted(seen[0])


def test_batches_that_are_shuffled_anew_between_epochs_are_refused(monkeypatch: Patch) -> None:
    monkeypatch.setattr(RecordsInTurn, "order", lambda self, epoch: epoch)
    parts = private(epochs=3, strategy=Banded(5))
    with pytest.raises(PlanError, match="a record that is read twice within 5 steps"):
        train(parts, epochs=3)
    assert parts[1].steps < 10  # within the second epoch, before anything of that batch was computed


def test_the_order_is_kept_over_a_resume_in_the_middle_of_an_epoch() -> None:
    whole, halves = private(epochs=2, strategy=Banded(5)), private(epochs=2, strategy=Banded(5))
    train(whole, epochs=2)
    model, optimizer, loader = halves
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number == 2:
            break
    other = private(epochs=2, strategy=Banded(5))
    other[0].load_state_dict(model.state_dict())
    other[1].load_state_dict(optimizer.state_dict())
    for x, y in (batch for _ in range(2) for batch in other[2]):
        other[1].zero_grad()
        nn.functional.cross_entropy(other[0](x), y).backward()  # type: ignore[no-untyped-call]
        other[1].step()
        if other[1].steps == 10:
            break
    for a, b in zip(whole[0].parameters(), other[0].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_rows_that_change_places_between_epochs_are_refused() -> None:
    dataset = data()
    parts = private(dataset=dataset, epochs=2, strategy=Banded(5))
    train(parts)
    for rows in dataset.tensors:
        rows.copy_(rows.flip(0))
    with pytest.raises(PlanError, match="rows or their order changed"):
        train(parts)


def test_a_checkpoint_does_not_go_on_over_another_split() -> None:
    splits = [Subset(data(80), np.random.default_rng(k).permutation(80)[:60].tolist()) for k in (0, 0, 1)]
    first, same, other = (private(dataset=split, epochs=2, strategy=Banded(5)) for split in splits)
    train(first)
    with pytest.raises(ConfigError, match="over other rows, or over the same rows in another order"):
        other[1].load_state_dict(first[1].state_dict())
    same[1].load_state_dict(first[1].state_dict())
    train(same)


def test_no_step_is_taken_after_the_planned_ones() -> None:
    parts = private(epochs=1, strategy=Banded(5))
    train(parts)
    with pytest.raises(BudgetError, match="step 6"):
        train(parts)


def test_the_certificate_is_one_event_of_the_whole_loop_and_certify_finds_it_again(tmp_path: Path) -> None:
    parts = private(epochs=4, epsilon=2.0, strategy=Banded(5), smoothing=1.0)
    train(parts, epochs=4)
    made = parts[1].save_certificate(tmp_path / "loop.json")
    assert made["epsilon"] == pytest.approx(2.0, rel=1e-2)
    assert made["relation"] == "replace_one"
    release = parts[1].account.settings.plan.release
    assert isinstance(release, CorrelatedNoise)
    ((event, count),) = parts[1].account.settings.plan.cost().line("models").entries
    sensitivity = 2.0 * float(np.linalg.norm(release.strategy.column(20)))  # type: ignore[attr-defined]
    assert event == GaussianNoise(release.mechanism.noise_multiplier / sensitivity)  # sqrt(4 epochs) = 2
    assert count == 1
    found = CliRunner().invoke(app, ["certify", str(tmp_path / "loop.json")])
    assert found.exit_code == 0, found.output
    (tmp_path / "bad.json").write_text((tmp_path / "loop.json").read_text("utf-8").replace('"ends": 20', '"ends": 40'))
    assert CliRunner().invoke(app, ["certify", str(tmp_path / "bad.json")]).exit_code == 1


def test_correlated_noise_leaves_less_in_the_model_at_the_same_epsilon() -> None:
    def spread(strategy: Strategy) -> float:
        parts = still(strategy, epochs=20, noise_multiplier=None, epsilon=2.0, allow_large_delta=True, delta=1e-3)
        return float(np.sqrt(np.mean(np.cumsum(moves(parts, 20), axis=0) ** 2)))

    assert spread(Banded(5)) < 0.55 * spread(Identity())


def test_pieces_of_a_batch_change_nothing_and_momentum_is_in_the_bands() -> None:
    runs = [private(epochs=2, strategy=Banded(5), max_physical_batch_size=size) for size in (None, 5)]
    for parts in runs:
        train(parts, epochs=2)
    for a, b in zip(*(parts[0].parameters() for parts in runs), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    heavy = private(epochs=2, strategy=Banded(5), optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    assert heavy[1].account.settings.plan.release != runs[0][1].account.settings.plan.release


def test_secure_noise_is_shared_over_steps_too() -> None:
    noise = np.stack(moves(still(Banded(5), noise="secure"), EPOCHS))
    assert white(Banded(5), noise)


def test_a_model_learns_under_correlated_noise() -> None:
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    parts = private(mlp(), TensorDataset(x, y), batch=60, epochs=20, epsilon=4.0, strategy=Banded(10))
    train(parts, epochs=20)
    with torch.no_grad():
        assert float((parts[0](x).argmax(1) == y).float().mean()) > 0.8
