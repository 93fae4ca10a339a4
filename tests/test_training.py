"""Promises of `sordino.train`: a user's module and data in a few lines; the certificate is true of what ran."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import SIZES, clients, mlp, plan, seeded, task
from torch import nn

import sordino
from sordino.accounting import accountant
from sordino.accounting.accountant import default_delta
from sordino.engines.base import ClientJob, Collected, Engine, Worker
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.engines.objectives import choose_path
from sordino.errors import ConfigError, DataError, EngineError
from sordino.loop import Tally, run
from sordino.parts.encoding import Clip, LaplacianSmoothing
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, NoNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin
from sordino.parts.server_optimizers import Adam, Sgd
from sordino.plan import Plan
from sordino.report.text_table import History
from sordino.rng import Seeded
from sordino.task import Task


def my_own_training(model: nn.Module, hospitals: list[Any], test: Any) -> sordino.Result:
    plan = sordino.recipes.dp_fed_avg(
        rounds=10,
        clients=sordino.Everyone(len(hospitals)),
        lr=0.5,
        epochs=2,
        clip_norm=2.0,
        noise_multiplier=2.0,
        batch=10,
    )
    result = sordino.train(plan, sordino.Task.of(model, hospitals, test), delta=1e-3)
    print(result.certificate["epsilon"], result.history[-1]["accuracy"])
    return result


class Mine(nn.Module):
    """A module that sordino has never seen."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(x)))  # type: ignore[no-any-return]


def test_a_users_own_module_and_clients_train_in_under_fifteen_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(inspect.getsource(my_own_training).splitlines()) < 15
    rng = np.random.default_rng(0)
    xs = [torch.from_numpy(rng.standard_normal((20, 2)).astype(np.float32)) for _ in range(61)]
    data = [(x, (x[:, 0] > x[:, 1]).long()) for x in xs]
    torch.manual_seed(0)
    model = Mine()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = my_own_training(model, data[:60], data[60])
    assert result.history[-1]["accuracy"] >= 0.9
    assert isinstance(result.model, Mine)
    assert not result.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())  # theirs is untouched
    assert not torch.equal(result.model.hidden.weight, model.hidden.weight)
    assert str(result.certificate["epsilon"]) in capsys.readouterr().out


@pytest.mark.parametrize("sampler", [Everyone(6), Poisson(6, 0.5), FixedSize(6, 3), RoundRobin(6, 2)], ids=str)
def test_the_certificate_says_what_the_plan_forecast(sampler: Everyone) -> None:
    planned = plan(clients=sampler)
    line = planned.cost().line("models")
    found = sordino.train(planned, task()).certificate
    wanted = accountant.epsilon(line.entries, line.relation, default_delta(6)).value
    assert found["epsilon"] == pytest.approx(wanted, abs=2e-6)
    assert found["epsilon"] >= wanted
    assert (found["relation"], found["delta"]) == (line.relation, default_delta(6))
    assert found["counts"]["rounds_charged"] == planned.rounds
    assert found["plan_sha256"] == planned.hash


def test_epsilon_is_the_same_with_and_without_smoothing_but_the_model_is_not() -> None:
    rough = sordino.train(plan(), task())
    smooth = sordino.train(plan(postprocess=(LaplacianSmoothing(1.0),)), task())
    assert rough.certificate["epsilon"] == smooth.certificate["epsilon"]
    assert rough.certificate["adversaries"] == smooth.certificate["adversaries"]
    assert rough.certificate["model_sha256"] != smooth.certificate["model_sha256"]


def test_the_adam_server_learns_and_costs_nothing_more() -> None:
    free = plan(rounds=20, release=NoNoise(), server=Adam(lr=0.1))
    data = Task.of(mlp(), clients(), test=(torch.cat([x for x, _ in clients()]), torch.cat([y for _, y in clients()])))
    history = sordino.train(free, data).history
    assert history[-1]["loss"] < 0.6 * history[0]["loss"]
    private = plan(server=Adam(lr=0.1))
    assert sordino.train(private, task()).certificate["epsilon"] == sordino.train(plan(), task()).certificate["epsilon"]


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    planned = plan(clients=Poisson(6, 0.5), local=LocalSgd(lr=0.1, epochs=1, batch=2))
    first, again, other = (sordino.train(planned, task(), seed=seed).certificate for seed in (1, 1, 2))
    assert first == again
    assert first["model_sha256"] != other["model_sha256"]
    first.pop("model_sha256")
    other.pop("model_sha256")
    assert first == other  # nothing else in it depends on the coins


def test_secure_noise_never_repeats_and_the_certificate_tells() -> None:
    first, again = (sordino.train(plan(), task(), noise="secure").certificate for _ in range(2))
    assert first["model_sha256"] != again["model_sha256"]
    assert first["noise"]["mode"] == "secure"


def test_void_rounds_leave_the_model_unchanged_and_are_still_charged() -> None:
    """Six clients at rate .5 and at least three: some rounds are void."""
    shares = plan(rounds=12, clients=Poisson(6, 0.5), release=NoiseShares(1.0, at_least=3))
    tally, data, before = Tally(), task(), None
    voids = 0
    for done in run(shares, data, streams=Seeded(3), charges=tally):
        cohort = shares.clients.draw(done.t, Seeded(3).at(done.t, "cohort"))
        params = done.state.memory["params"]
        assert done.void == (len(cohort) < 3)
        if before is not None:
            assert torch.equal(params, before) == done.void
        before, voids = params, voids + done.void
    assert 0 < voids < 12
    assert tally.rounds == list(range(12))
    result = sordino.train(shares, data, seed=3)
    assert sum(line.get("void", False) for line in result.history) == voids
    most = int(np.bincount(np.concatenate(tally.cohorts)).max())
    assert result.certificate["counts"]["max_participations"] == most


class Watch(Engine):
    """An engine that writes down when it is asked for messages."""

    offers = frozenset({"secure_sum"})

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def prepare(self, plan: Plan, task: Task, streams: Any) -> Worker:
        log = self.log

        class Watched(InProcessWorker):
            def collect(self, job: ClientJob) -> Collected:
                log.append("messages leave the clients")
                return super().collect(job)

        return Watched(plan, task, streams, choose_path(plan, task, "batched"), 8)


class Diary(Tally):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def charge(self, t: int, cohort: Any) -> None:
        self.log.append("charged" if cohort is None else "charged with its cohort")
        super().charge(t, cohort)


@pytest.mark.parametrize(
    ("release", "order"),
    [
        (CentralNoise(Gaussian(1.0)), ["messages leave the clients", "charged", "noise"]),
        (NoiseShares(1.0, 2), ["charged with its cohort", "messages leave the clients", "noise"]),
        (LocalNoise(Gaussian(1.0)), ["charged with its cohort", "messages leave the clients", "noise"]),
    ],
    ids=str,
)
def test_a_round_is_charged_before_its_noise_is_drawn(
    release: CentralNoise, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    draw = Gaussian.sample

    def noted(self: Gaussian, size: int, rng: np.random.Generator) -> Any:
        log.append("noise")
        return draw(self, size, rng)

    monkeypatch.setattr(Gaussian, "sample", noted)
    list(run(plan(release=release), task(), engine=Watch(log), charges=Diary(log)))
    assert log == order * 2


def test_a_secret_cohort_enters_no_certificate_and_no_public_figure() -> None:
    """Under Poisson and central noise the realised count is secret: two runs differ only in what is marked private."""
    planned = plan(clients=Poisson(6, 0.5), rounds=3)
    result = sordino.train(planned, task())
    assert "max_participations" not in result.certificate["counts"]
    for line in result.history:
        public = {name for name in line if not name.startswith("not_private/")}
        assert public <= {
            "round",
            "loss",
            "accuracy",
            "balanced_accuracy",
            "rmse",
        }  # not even how long it took: that counts the cohort
        json.dumps(line)


def test_diagnostics_are_marked_as_not_private() -> None:
    for line in sordino.train(plan(), task()).history:
        names = {"nonfinite_updates", "update_norm_mean", "clipped_fraction"}
        assert {f"not_private/{name}" for name in names} <= set(line)
        assert not names & set(line)


def test_on_round_sees_every_round_as_it_ends() -> None:
    seen: list[dict[str, Any]] = []
    assert sordino.train(plan(rounds=3), task(), on_round=seen.append).history == History.of(seen)
    assert [line["round"] for line in seen] == [1, 2, 3]


def test_other_tensors_than_at_first_are_not_trained_in_the_middle_of_a_run() -> None:
    """Of the same shape, they were given the weights of the others without a word."""
    model: Any = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)))
    model[0].requires_grad_(False)

    def swap(line: dict[str, Any]) -> None:
        model[0].requires_grad_(True)
        model[1].requires_grad_(False)

    with pytest.raises(DataError, match=r"requires_grad.*changed between two rounds"):
        sordino.train(plan(rounds=2), Task.of(model, clients()), allow_large_delta=True, on_round=swap)


def test_a_population_that_does_not_match_the_data_is_said_plainly() -> None:
    for population in (3, 60):
        with pytest.raises(DataError, match=f"plan for {population} clients and data of {len(SIZES)}"):
            sordino.train(plan(clients=Everyone(population)), task())


def test_a_large_delta_is_refused_unless_overridden() -> None:
    with pytest.raises(ConfigError, match="delta"):
        sordino.train(plan(), task(), delta=0.5)
    assert sordino.train(plan(), task(), delta=0.5, allow_large_delta=True).certificate["delta"] == 0.5


def test_an_engine_that_cannot_keep_the_promise_is_refused() -> None:
    class Open(InProcess):
        offers = frozenset[str]()

    with pytest.raises(EngineError, match="secure_sum"):
        sordino.train(plan(release=NoiseShares(1.0, 2)), task(), engine=Open())


@pytest.mark.parametrize("server", [Sgd(momentum=0.9), Adam()], ids=str)
def test_a_run_continued_from_its_state_is_bit_exact(server: Sgd) -> None:
    planned = plan(rounds=4, clients=Poisson(6, 0.5), server=server, local=LocalSgd(lr=0.1, epochs=1, batch=2))
    whole = list(run(planned, task(), streams=Seeded(1)))
    rest = list(run(planned, task(), streams=Seeded(1), state=whole[1].state))
    assert [done.t for done in rest] == [2, 3]
    assert torch.equal(rest[-1].state.memory["params"], whole[-1].state.memory["params"])


def test_calibrated_plans_cost_what_was_asked() -> None:
    planned = plan(rounds=5, clients=RoundRobin(100, 30), encode=(Clip(1.0),))
    target = sordino.calibrate(planned, epsilon=2.0, delta=1e-3)
    line = target.cost().line("models")
    assert 1.98 <= accountant.epsilon(line.entries, line.relation, 1e-3).value <= 2.0
    assert replace(target, release=planned.release) == planned  # nothing else was touched


def test_history_is_a_flat_table_with_a_readable_repr() -> None:
    history = sordino.train(plan(rounds=30), task()).history
    assert isinstance(history, list)
    assert not any(isinstance(value, dict | list) for row in history for value in row.values())
    lines = repr(history).splitlines()
    assert lines[0].split()[0] == "round"
    assert len(lines) == 1 + 11 + 1
    assert "not_private/" not in repr(history)
    assert lines[-1].startswith("30 rounds; ")


def test_history_becomes_a_data_frame_or_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History.of([{"round": 1, "loss": 2.0}, {"round": 2}])
    made: dict[str, Any] = {}
    pandas = ModuleType("pandas")
    pandas.DataFrame = lambda rows, columns: made.update(rows=rows, columns=columns)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    history.to_pandas()
    assert made == {"rows": history, "columns": ["round", "loss"]}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        history.to_pandas()


def test_a_result_is_plotted_and_reported(tmp_path: Path) -> None:
    tested = Task.of(mlp(), clients(), test=(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)))
    for out in (None, tmp_path / "run"):
        result = sordino.train(plan(), tested, out=out, allow_large_delta=True)
        axes = result.plot().axes
        assert [one.get_ylabel() for one in axes][-1] == "epsilon so far"
        assert len(axes) >= 2
        text = result.report(tmp_path / "a.html").read_text("utf-8")
        assert text.startswith("<!doctype html>")
        assert result.certificate["plan_sha256"] in text


def test_a_bar_is_shown_on_a_terminal_and_never_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    sordino.train(plan(), task())
    assert capsys.readouterr() == ("", "")


def test_a_device_is_the_engine_s_if_there_is_one() -> None:
    assert sordino.train(plan(), task(), device="cpu").history
    with pytest.raises(ConfigError, match="device"):
        sordino.train(plan(), task(), device="no such device")
    with pytest.raises(ConfigError, match="together with an engine"):
        sordino.train(plan(), task(), device="cuda", engine=InProcess())
