"""Promises of the studies on papers 000 and 004: choices never see the test images, and the closed forms are right."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.papers.test_tables import small
from torch import nn
from torch.nn.functional import cross_entropy

from sordino.data.clients import Clients, Records
from sordino.models import SmallCnn
from sordino.parts.encoding import smooth_cycle
from sordino.task import Task
from sordino_papers import (
    paper_000,
    paper_000_lstm,
    paper_000_orders,
    paper_000_small,
    paper_000_spectra,
    paper_000_tuning,
    paper_004_cnn,
    rounding,
)
from sordino_papers import paper_004_protocol as protocol
from sordino_papers.cells import Job
from sordino_papers.paper_004 import Setting
from sordino_papers.studies import Row, gathered

needs_data = pytest.mark.skipif("SORDINO_DATA" not in os.environ, reason="needs the data sets ($SORDINO_DATA)")


def images(count: int, seed: int) -> Records:
    coins = torch.Generator().manual_seed(seed)
    return Records(torch.rand(count, 1, 14, 14, generator=coins), torch.randint(0, 10, (count,), generator=coins))


def bench(test: Any) -> paper_004_cnn.Bench:
    parts = images(40, 0), images(20, 1)
    return paper_004_cnn.Bench(
        "tiny", Setting(records=40, batch=20, epochs=1, clip_norm=0.5), (8.0,), lambda: parts, test
    )


class LookedAtTheTestError(Exception):
    pass


def refused() -> Records:
    raise LookedAtTheTestError


def test_choosing_a_step_never_reads_the_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paper_004_cnn.BENCHES, "tiny", bench(refused))
    row = paper_004_cnn.tried("tiny", 8.0, "DP-LSSGD", 1.0)
    assert 0 <= row["validation"] <= 100
    with pytest.raises(LookedAtTheTestError):  # the run that is reported does
        paper_004_cnn.reported("tiny", 8.0, "DP-LSSGD", 1.0, 0)


def test_the_step_of_a_method_is_the_one_that_validated_best_for_it() -> None:
    found = {("DP-SGD", 4.0): 80.0, ("DP-SGD", 8.0): 70.0, ("DP-LSSGD", 4.0): 60.0, ("DP-LSSGD", 8.0): 65.0}
    rows = [{"epsilon": 2.0, "method": m, "step": s, "validation": v} for (m, s), v in found.items()]
    assert paper_004_cnn.best_step(rows, 2.0, "DP-SGD") == 4.0
    assert paper_004_cnn.best_step(rows, 2.0, "DP-LSSGD") == 8.0


def test_the_sigma_of_table_2_is_chosen_on_validation_images_against_the_test() -> None:
    held, tested = {1: 80.0, 2: 82.0, 3: 81.0}, {1: 99.0, 2: 1.0, 3: 50.0}
    results = {
        f"x-sigma{s}": {"values": [tested[s]], "ours": tested[s], "figures": {"validation": [None, held[s]]}}
        for s in held
    }
    assert paper_000.best_sigma(results, "x-sigma") == 2


@needs_data
def test_no_client_of_the_small_cnn_holds_a_validation_image() -> None:
    train, held, _ = paper_000_small.images()
    seen = {row.numpy().tobytes() for row in train.x}
    assert not any(row.numpy().tobytes() in seen for row in held.x)
    assert sorted(paper_000_small.small_task(0).clients.index.tolist()) == list(range(len(train)))


def test_the_paper_s_protocol_smooths_as_our_part_does() -> None:
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.0, 1.0, 3.0])
    found = protocol.smoothed(rows, sigma)
    for r in range(3):
        wanted = smooth_cycle(rows[r], float(sigma[r])) if sigma[r] else rows[r]
        torch.testing.assert_close(found[r], wanted, atol=1e-5, rtol=1e-5)


def test_the_gradients_of_many_models_are_those_of_autograd() -> None:
    coins = torch.Generator().manual_seed(1)
    x, y = torch.randn(7, 5, generator=coins), torch.randint(0, 10, (7,), generator=coins)
    w, c = torch.randn(2, 10, 5, generator=coins), torch.randn(2, 10, generator=coins)
    made_w, made_c = protocol.gradients(w, c, x, y)
    for r in range(2):
        one_w, one_c = w[r].clone().requires_grad_(), c[r].clone().requires_grad_()
        wanted = torch.autograd.grad(cross_entropy(x @ one_w.T + one_c, y), (one_w, one_c))
        torch.testing.assert_close((made_w[r], made_c[r]), wanted, atol=1e-6, rtol=1e-5)


def test_a_clipped_mean_bounds_no_record_which_is_why_the_protocol_is_not_private() -> None:
    """Of 128 records one changes: clipping each would allow 2 C / 128; the clipped mean moves by more than C."""
    still = torch.zeros(127, 3)
    means = [torch.cat([still, one[None]]).mean(0, keepdim=True) for one in (torch.eye(3) * 1e4)[:2]]
    moved = float((protocol.clipped(means[0]) - protocol.clipped(means[1])).norm())
    assert moved > protocol.RADIUS > 2 * protocol.RADIUS / 128


def test_a_wave_stands_in_the_band_of_its_frequency() -> None:
    wave = torch.sin(2 * torch.pi * 40 * torch.arange(1000, dtype=torch.float64) / 1000)
    sizes = dict(paper_000_spectra.bands(wave))
    top = max(sizes, key=lambda frequency: sizes[frequency])
    assert 30 < top < 55
    assert all(size < 1e-9 for frequency, size in sizes.items() if frequency != top)


def test_an_impulse_has_the_flat_spectrum_of_white_noise() -> None:
    impulse = torch.zeros(400, dtype=torch.float64)
    impulse[0] = 0.3 * 20
    assert [size for _, size in paper_000_spectra.bands(impulse)] == pytest.approx([0.3] * 12)


def test_smoothing_a_sine_pays_where_noise_is_large_and_costs_where_it_is_small() -> None:
    assert paper_000_spectra.reduced(3.0, 0.01, 0)["reduction"] < 0
    assert paper_000_spectra.reduced(3.0, 1.0, 0)["reduction"] > paper_000_spectra.reduced(0.5, 1.0, 0)["reduction"] > 0


def test_a_bench_reports_the_validation_images_on_the_way() -> None:
    tiny = replace(bench(refused))
    assert tiny.task(0).test is tiny.held()[1]


class Untouched:
    """Stands where test data would, and cannot be read."""

    def __getattr__(self, name: str) -> Any:
        raise LookedAtTheTestError


def test_choosing_a_step_of_the_lstm_never_reads_the_test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    coins = torch.Generator().manual_seed(0)
    text = [Records(torch.randint(0, 80, (2, 80), generator=coins), torch.randint(0, 80, (2,))) for _ in range(100)]
    monkeypatch.setattr(paper_000_lstm, "windows", lambda: (Clients.of(text), text[0], Untouched()))
    monkeypatch.setattr(paper_000_lstm, "ROUNDS", 2)
    assert 0 <= paper_000_tuning.lstm_tried(0.5, 1.0, 0)["validation"] <= 100
    with pytest.raises(LookedAtTheTestError):  # the run that is reported does
        paper_000_tuning.lstm_reported(0.5, 1.0, 0)
    with pytest.raises(LookedAtTheTestError):
        paper_000_lstm.trained("uniform", 1.0, 0.0, 0)


def test_choosing_the_setting_of_the_small_cnn_never_reads_the_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = images(400, 0), images(20, 1), Untouched()
    monkeypatch.setattr(paper_000_small, "images", lambda: parts)
    monkeypatch.setattr(paper_000_small, "start", lambda *_: SmallCnn(channels=(2, 2)).build((1, 14, 14), 10))
    monkeypatch.setattr(paper_000_small, "ROUNDS", 2)
    assert 0 <= paper_000_tuning.cnn_tried(0.3, 0.1, 1, 5, 1.0, 0)["validation"] <= 100
    with pytest.raises(LookedAtTheTestError):  # the run that is reported does
        paper_000_tuning.cnn_reported(0.3, 0.1, 1, 5, 1.0, 0)


def test_what_validated_best_is_reported_whatever_the_test_would_say() -> None:
    found = {(0.0, 1.0): 60.0, (0.0, 2.0): 70.0, (0.0, 3.0): 65.0, (1.0, 1.0): 80.0, (1.0, 2.0): 50.0, (1.0, 3.0): 81.0}
    rows: list[Row] = [{"sigma": s, "step": step, "validation": v, "repeats": 2} for (s, step), v in found.items()]
    chosen = [(place, row["sigma"], row["step"]) for place, row in paper_000_tuning.finalists(rows)]
    assert chosen == [(1, 0.0, 2.0), (2, 0.0, 3.0), (1, 1.0, 3.0), (2, 1.0, 1.0)]
    tested = {1: {0.0: 5.0, 1.0: 4.0}, 2: {0.0: 9.0, 1.0: 99.0}}
    rows += [
        {"place": place, "sigma": s, "step": 0.0, "test": one, "values": [one, one + 0.1, one - 0.1]}
        for place, pair in tested.items()
        for s, one in pair.items()
    ]
    assert [row["verdict"] for row in paper_000_tuning.table_h10_claims(rows)] == ["no", "yes"]


def test_white_noise_is_flat_in_every_order_and_a_smoothed_update_is_not() -> None:
    noise = torch.randn(3200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, turned in paper_000_orders.ways(noise).items():
        assert torch.equal(turned.sort().values, noise.sort().values), name  # every weight once
        assert abs(paper_000_orders.height(turned)) < 0.25
    assert paper_000_orders.share(noise, 800) == pytest.approx(0.5, abs=0.05)
    smooth = smooth_cycle(noise, 3.0)
    assert paper_000_orders.height(smooth) > 0.5
    assert paper_000_orders.share(smooth, 800) > 0.9


def test_a_nudge_moves_every_weight_by_a_millionth_at_most() -> None:
    net = torch.nn.Linear(30, 20)
    before = [one.detach().clone() for one in net.parameters()]
    job = rounding.nudged(Job(None, Task(net, Clients.of([Records(torch.ones(1, 30), torch.ones(1).long())])), 0.1))  # type: ignore[arg-type]
    after = [one.detach() for one in job.task.model.parameters()]
    moved = torch.cat([(a / b - 1).abs().flatten() for a, b in zip(after, before, strict=True)])
    assert 1e-7 < float(moved.max()) <= 1.2e-6  # and what float32 rounds


def test_a_model_that_starts_at_zero_is_moved_too() -> None:
    """A millionth of zero is zero: two equal runs would show nothing."""
    net = nn.Linear(30, 2)
    for one in net.parameters():
        nn.init.zeros_(one)
    clients = Clients.of([Records(torch.ones(1, 30), torch.ones(1).long())])
    job = rounding.started(Job(None, Task(net, clients), 0.1), 0)  # type: ignore[arg-type]
    before = job.task.layout.flatten(job.task.model).clone()
    assert bool((before != 0).all())
    after = job.task.layout.flatten(rounding.nudged(job).task.model)
    assert 0 < float((after - before).abs().max()) <= 1.01e-6 * float(before.abs().max())


def test_a_model_that_rounding_moves_far_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: where a millionth is a half, both models' accuracies move and the claim about each is a no."""
    monkeypatch.setattr(rounding, "BUILT", {"a net": small})
    monkeypatch.setattr(rounding, "PART", 1.0)
    rows = gathered([row for seed in range(3) for row in rounding.moved("a net", seed)], ("model", "round"), "apart")
    (found,) = rounding.claims(rows)
    assert found["verdict"] == "no"
    monkeypatch.setattr(rounding, "PART", 0.0)
    rows = gathered([row for seed in range(3) for row in rounding.moved("a net", seed)], ("model", "round"), "apart")
    assert rounding.claims(rows)[0]["verdict"] == "yes"
