"""The spectrum is exact: the response of the smoothing itself, and the update that was really released."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tiny import noise

from sordino.layout import Layout
from sordino.parts.encoding import LaplacianSmoothing, Noised, smooth_cycle
from sordino.plan import State
from sordino.report.comparison import Last, Subject
from sordino.report.data import _periodogram, _update_spectrum, smoothing_gain, spectrum
from sordino_papers.theory.smoothing import smoothing_beta


def test_the_gain_is_the_response_of_the_smoothing_to_an_impulse() -> None:
    impulse = torch.zeros(64, dtype=torch.float64)
    impulse[0] = 1.0
    response = np.abs(np.fft.fft(smooth_cycle(impulse, 1.5).numpy())) ** 2
    assert smoothing_gain(1.5, np.abs(np.fft.fftfreq(64))) == pytest.approx(response, rel=1e-9)
    assert smoothing_gain(1.5, np.abs(np.fft.fftfreq(64))).mean() == pytest.approx(
        smoothing_beta(strength=1.5, dimension=64)
    )


def test_the_noise_level_is_the_variance_that_the_run_added(runs: dict[str, Subject]) -> None:
    found = spectrum(runs["smooth"])
    assert found is not None
    expected = (2.0 * 1.0 / 30.0) ** 2  # noise multiplier, clip norm, 0.5 of 60 clients
    assert found["noise"]["before"] == pytest.approx([expected] * len(found["noise"]["before"]))
    assert found["noise"]["after"][0] == pytest.approx(expected)
    assert found["noise"]["after"][-1] == pytest.approx(expected / (1 + 4 * 1.5) ** 2)


def test_the_update_before_smoothing_is_what_smoothing_was_given(runs: dict[str, Subject]) -> None:
    one = runs["smooth"]
    smoothing, last = one.plan.postprocess[0], one.last
    assert isinstance(smoothing, LaplacianSmoothing)
    assert last is not None
    model = torch.nn.Linear(40, 30)
    layout = Layout.of(model)
    mean, start = noise(layout.size, seed=1).double(), noise(layout.size, seed=2).double()
    end = start - 0.7 * smoothing.apply(mean, Noised(layout, 1.0, 3))
    tensors = {name: end[s.start : s.stop].view(s.shape) for name, s in zip("ba", layout.slots, strict=True)}
    made = Last(State(3, {"params": start}), State(4, {"params": end}), dict(sorted(tensors.items())))
    found = _update_spectrum(Subject(one.name, one.certificate, one.plan, one.facts, last=made), smoothing)
    assert found is not None
    parts = [_periodogram(mean[s.start : s.stop], s.shape, ()) for s in layout.slots]
    where, power = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    first = where * 2 * 16 < 1
    assert found["before"][0] == pytest.approx(power[first].mean(), rel=1e-6)
    assert found["after"][0] == pytest.approx((power * smoothing_gain(1.5, where))[first].mean(), rel=1e-6)


def test_a_real_run_has_its_last_update_from_its_checkpoints(runs: dict[str, Subject]) -> None:
    found = spectrum(runs["smooth"])
    assert found is not None
    assert found["update"]["round"] == 4
    step = runs["smooth"].last
    assert step is not None
    moved = (step.before.memory["params"] - step.after.memory["params"]).double() / 0.7
    sizes = [18, 3]  # Linear(6, 3): what Parseval says of each tensor, and so of their sum
    powers = [_periodogram(part, part.shape, ())[1] for part in torch.split(moved, sizes)]
    assert sum(power.sum() for power in powers) == pytest.approx(float(moved.square().sum()))


def test_without_checkpoints_the_noise_alone_is_shown(runs: dict[str, Subject]) -> None:
    one = runs["smooth"]
    found = spectrum(Subject(one.name, one.certificate, one.plan, one.facts))
    assert found is not None
    assert found["update"] is None
    assert spectrum(runs["central"]) is None


def test_tensors_are_found_by_their_values_whatever_their_names(runs: dict[str, Subject]) -> None:
    last = runs["smooth"].last
    assert last is not None
    assert last.shapes(last.after.memory["params"]) == [torch.Size([3, 6]), torch.Size([3])]
    assert last.shapes(last.before.memory["params"]) is None
