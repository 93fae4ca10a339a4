"""Promises of extensions written outside, by public names alone: FedDyn, Ditto, a personal head, a process pool."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import SIZES, clients, final, mlp, noise, plan, rounds, task
from torch import Tensor, nn
from typer.testing import CliRunner

import sordino as so
from sordino.cli import app
from sordino.errors import ConfigError, EngineError, PartError, PlanError
from sordino.loop import run
from sordino.runs.charge_log import PrefixHash
from sordino.runs.writer import Checkpoint

PATHS = ["batched", "sequential"]


# ---- clients with a state --------------------------------------------------------------------------------------------


def busy(batch: so.parts.Batch) -> Tensor | float:
    """[m, 1]: 0 for a client of the chunk that has no step left to do."""
    return 1.0 if batch.active is None else batch.active[:, None]


@dataclass(frozen=True)
class FedDyn(so.parts.LocalSgd, kind="test_fed_dyn"):
    """grad f(w) - h_i + alpha (w - w_t);  h_i <- h_i - alpha (w_i - w_t): Acar et al. 2021. h_i begins at zero."""

    alpha: float = 0.1

    def client_state(self, start: Tensor) -> dict[str, Tensor]:
        return {"dual": torch.zeros_like(start)}

    def solve(self, work: so.parts.Work) -> Tensor:
        w, dual = work.objective.place(work.start, work.m), work.state["dual"]
        for batch in work.batches:
            slope = work.objective.gradient(w, batch) - dual + self.alpha * (w - work.start)
            w.sub_(slope * busy(batch), alpha=float(self.lr))  # type: ignore[arg-type]
        work.state["dual"] = dual - self.alpha * (w - work.start)
        return work.start - w

    def split(self, mean: Tensor, public: so.parts.Public, rate: float) -> tuple[Tensor, dict[str, Tensor]]:
        h = public.broadcast.get("h", torch.zeros_like(mean)) + self.alpha * rate * mean
        return mean + h / self.alpha, {"h": h}


@dataclass(frozen=True)
class Ditto(so.parts.LocalSgd, kind="test_ditto"):
    """Beside the shared model a whole model of one's own: v <- v - lr (grad f(v) + pull (v - w_t)): Li et al. 2021."""

    pull: float = 0.1

    def client_state(self, start: Tensor) -> dict[str, Tensor]:
        return {"model": start.clone()}

    def solve(self, work: so.parts.Work) -> Tensor:
        message, own = super().solve(work), work.state["model"]
        for batch in work.batches:
            slope = work.objective.gradient(own, batch) + self.pull * (own - work.start)
            own = own - float(self.lr) * slope * busy(batch)  # type: ignore[arg-type]
        work.state["model"] = own
        return message

    def personal_model(self, model: Tensor, state: Mapping[str, Tensor], layout: so.parts.Layout) -> Tensor:
        return state["model"]


@dataclass(frozen=True)
class OwnHead(so.parts.LocalSgd, kind="test_own_head"):
    """The last layer stays with its client: it is trained there, and its coordinates are never sent (FedPer)."""

    head: str = "2."

    def client_state(self, start: Tensor) -> dict[str, Tensor]:
        return {"model": start.clone()}

    def _views(self, layout: so.parts.Layout, rows: Tensor) -> list[Tensor]:
        return [part for name, part in layout.views(rows).items() if name.startswith(self.head)]

    def solve(self, work: so.parts.Work) -> Tensor:
        layout, w = work.objective.layout, work.objective.place(work.start, work.m)
        for here, own in zip(self._views(layout, w), self._views(layout, work.state["model"]), strict=True):
            here.copy_(own)
        for batch in work.batches:
            w.sub_(work.objective.gradient(w, batch) * busy(batch), alpha=float(self.lr))  # type: ignore[arg-type]
        work.state["model"], message = w.clone(), work.start - w
        for part in self._views(layout, message):
            part.zero_()
        return message

    def personal_model(self, model: Tensor, state: Mapping[str, Tensor], layout: so.parts.Layout) -> Tensor:
        made = model.clone()
        for here, own in zip(self._views(layout, made), self._views(layout, state["model"]), strict=True):
            here.copy_(own)
        return made


def two_unlike_clients() -> so.Task:
    """They pull one number to 0 and to 1 with unlike force; the pooled optimum is 1 / (1 + 0.3^2)."""
    data = [(torch.full((1, 1), force), torch.tensor([force * goal])) for force, goal in ((0.3, 0.0), (1.0, 1.0))]
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return so.Task.of(model, data, loss="mse")


def free(local: so.parts.LocalSolver, population: int, count: int) -> so.Plan:
    return plan(
        rounds=count, clients=so.Everyone(population), local=local, encode=(so.parts.Clip(1e6),),
        release=so.parts.CentralNoise(so.parts.Gaussian(1e-12)),
    )  # fmt: skip


def test_fed_dyn_takes_out_the_bias_of_many_local_steps() -> None:
    unlike, optimum = two_unlike_clients(), 1.0 / (1.0 + 0.3**2)
    plain = so.parts.LocalSgd(lr=0.2, steps=20)
    dual = FedDyn(lr=0.2, steps=20, alpha=1.0)
    found, usual = (float(final(free(local, 2, 150), unlike)[0]) for local in (dual, plain))
    assert abs(found - optimum) < 1e-2
    assert abs(usual - optimum) > 0.05


def opposed(personal: so.parts.LocalSolver, count: int = 6, **changes: Any) -> tuple[so.Plan, so.Task]:
    """Six clients of one rule, but every second has its labels the other way round: no shared model fits all."""
    x = noise(6 * 40, 4)
    y = (x[:, 0] > 0).long() ^ (torch.arange(len(x)) // 40 % 2)
    parts = list(zip(torch.split(x, 40), torch.split(y, 40), strict=True))
    train, held = [(a[:30], b[:30]) for a, b in parts], [(a[30:], b[30:]) for a, b in parts]
    return plan(rounds=count, local=personal, **changes), so.Task.of(mlp(4, 8, 2), train, client_test=held)


@pytest.mark.parametrize("personal", [Ditto(lr=0.5, epochs=5, pull=0.01), OwnHead(lr=0.5, epochs=20)], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_personal_models_fit_clients_that_no_shared_model_fits(path: Any, personal: so.parts.LocalSolver) -> None:
    done = rounds(*opposed(personal, count=12), so.engines.InProcess(path=path))
    assert done[-1].diagnostics["personal_accuracy"] > 0.8
    assert "personal_accuracy" not in done[-1].metrics  # of private rows: a diagnostic, not private
    other = rounds(*opposed(so.parts.LocalSgd(lr=0.5, epochs=5)))
    assert "personal_accuracy" not in other[-1].diagnostics


def test_a_personal_head_never_leaves_its_client() -> None:
    """The coordinates of the head in the released mean are the server's noise alone: without noise they stay."""
    wanted, data = opposed(OwnHead(lr=0.5, epochs=5), release=so.parts.NoNoise(), encode=(so.parts.Clip(1.0),))
    before, after = data.layout.flatten(data.model), final(wanted, data)
    moved = {name: not torch.equal(a, b) for (name, a), b in zip(
        data.layout.views(before).items(), data.layout.views(after).values(), strict=True)}  # fmt: skip
    assert moved == {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False}


@pytest.mark.parametrize("local", [FedDyn(lr=0.2, epochs=2), Ditto(lr=0.2, epochs=2)], ids=str)
def test_states_are_the_same_on_every_path_and_survive_a_checkpoint(local: so.parts.LocalSolver) -> None:
    wanted = plan(rounds=4, clients=so.RoundRobin(6, 3), local=local)
    one, other = (rounds(wanted, task(), so.engines.InProcess(path=path)) for path in ("batched", "sequential"))
    for name, held in one[-1].state.secret_state.items():
        assert torch.allclose(held.double(), other[-1].state.secret_state[name].double(), atol=1e-4)
    stored = Checkpoint(one[1].state, "", PrefixHash(0, ""), PrefixHash(0, "")).to_bytes()
    again = list(run(wanted, task(), state=Checkpoint.of_bytes(stored).state, engine=so.engines.InProcess("batched")))
    assert torch.equal(again[-1].state.memory["params"], one[-1].state.memory["params"])


@dataclass(frozen=True)
class Renames(Ditto, kind="test_renames_its_state"):
    def solve(self, work: so.parts.Work) -> Tensor:
        message = super().solve(work)
        work.state["other"] = work.state.pop("model")
        return message


def test_a_solver_that_leaves_another_state_than_it_declared_is_named() -> None:
    with pytest.raises(PartError, match="test_renames_its_state"):
        rounds(plan(local=Renames(lr=0.1, epochs=1)), task())


@dataclass(frozen=True)
class RemembersRecords(so.parts.BatchGradient, kind="test_remembers_records"):
    def client_state(self, start: Tensor) -> dict[str, Tensor]:
        return {"mean": torch.zeros_like(start)}


def test_a_state_is_refused_where_one_record_is_the_unit() -> None:
    """What a silo remembers of a record would be in messages of rounds that do not read it."""
    local = RemembersRecords(so.parts.FixedRecords(2, tuple(max(size, 2) for size in SIZES)), clip_norm=1.0)
    with pytest.raises(PlanError, match="keep a state"):
        plan(local=local, encode=(), release=so.parts.LocalNoise(so.parts.Gaussian(1.0)))


def test_a_held_out_table_of_another_population_is_refused() -> None:
    with pytest.raises(so.errors.UserError, match="client_test of 2 clients"):
        so.Task.of(mlp(), clients(), client_test=clients()[:2])


# ---- an engine of one's own ------------------------------------------------------------------------------------------

POOL = '''
import multiprocessing
from dataclasses import replace

import numpy as np
import torch

import sordino as so

_HERE = []


def _ready(plan, task, streams):
    torch.set_num_threads(1)
    _HERE[:] = [so.engines.InProcess().prepare(plan, task, streams)]


def _share(job):
    return _HERE[0].collect(job)


class Pool(so.engines.Engine):
    """Every process computes its share of the cohort."""

    offers = frozenset({"secure_sum", "shuffler"})

    def __init__(self, threads=1):
        self.processes = threads

    def prepare(self, plan, task, streams):
        return PoolWorker(self.processes, plan, task, streams)


class PoolWorker(so.engines.Worker):
    def __init__(self, processes, *given):
        self.pool = multiprocessing.get_context("fork").Pool(processes, _ready, given)
        self.processes = processes

    def collect(self, job):
        shares = [replace(job, cohort=part) for part in np.array_split(job.cohort, self.processes)]
        found = self.pool.map(_share, shares)
        return so.engines.Collected(sum(one.total for one in found), sum(one.received for one in found))

    def close(self):
        self.pool.terminate()
        self.pool.join()
'''
REGISTERED = POOL + '\n\nso.engines.add("pool", Pool)\n'


@pytest.fixture(scope="module")
def pool() -> dict[str, Any]:
    """The names of the file, in a module that its own processes can import."""
    import sys
    from types import ModuleType

    module = sys.modules["pool_of_a_test"] = ModuleType("pool_of_a_test")
    exec(compile(POOL, "pool_of_a_test", "exec"), module.__dict__)
    return module.__dict__


def test_a_process_pool_is_an_engine_of_forty_lines(pool: dict[str, Any]) -> None:
    assert sum(bool(line.strip()) for line in POOL.splitlines()) <= 45
    wanted = plan(rounds=3, local=so.parts.LocalSgd(lr=0.3, epochs=2, batch=2))
    apart = final(wanted, task(), pool["Pool"](threads=2)) - final(wanted, task())
    assert float(apart.abs().max()) < 1e-6
    assert not multiprocessing.active_children()


def test_a_pool_without_client_state_is_refused_before_it_starts(pool: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="without client_state"):
        rounds(plan(local=Ditto(lr=0.1, epochs=1)), task(), pool["Pool"]())


FILE = """
[task]
dataset = "digits"
partition = {{ kind = "iid", clients = 6 }}
model = {{ kind = "logistic" }}

[recipe]
name = "dp_fed_avg"
rounds = 2
clients = {{ kind = "everyone", population = 6 }}
epochs = 1
batch = 10
lr = 0.1
clip_norm = 1.0
noise_multiplier = 1.0

[privacy]
delta = 1e-3
"""


def test_a_stranger_s_engine_is_found_by_name_through_with_and_through_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, config = tmp_path / "pool.py", tmp_path / "fed.toml"
    own.write_text(REGISTERED)
    config.write_text(FILE.format())
    last = {}
    for name, extra in (("inprocess", []), ("pool", ["--with", str(own), "--threads", "2"])):
        words = ["run", str(config), "--out", str(tmp_path / name), "--engine", name, "--json", *extra]
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 0, said.output
        last[name] = json.loads(said.stdout)["last"]["accuracy"]
    assert last["pool"] == pytest.approx(last["inprocess"])
    (tmp_path / "installed_pool.py").write_text(POOL)
    info = tmp_path / "installed_pool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-pool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sordino.engines]\ninstalled = installed_pool:Pool\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = so.train(plan(), task(), engine="installed", seed=0)
    assert torch.allclose(nn.utils.parameters_to_vector(result.model.parameters()), final(plan(), task()), atol=1e-6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "pol"], "one of inprocess, distributed"),
        (["--engine", "flower", "--sign", "key.pem"], "--sign with --engine flower"),
        (["--engine", "flower", "--device", "cuda"], "--device with --engine flower"),
        (["--engine", "flower", "--threads", "2"], "--threads with --engine flower"),
        (["--engine", "small", "--device", "meta"], "--device with --engine small"),
    ],
    ids=str,
)
def test_no_option_is_dropped_without_a_word(words: list[str], sentence: str, tmp_path: Path) -> None:
    config, own = tmp_path / "fed.toml", tmp_path / "small.py"
    config.write_text(FILE.format())
    own.write_text(POOL + '\n\nso.engines.add("small", lambda: Pool(1))\n')
    said = CliRunner().invoke(app, ["run", str(config), "--out", str(tmp_path / "out"), "--with", str(own), *words])
    assert said.exit_code != 0
    assert sentence in str(said.exception or "") + said.output
    assert not (tmp_path / "out").exists()


# ---- engines that count wrongly --------------------------------------------------------------------------------------


class Counts(so.engines.Engine):
    """An engine whose sum is changed by `lie`."""

    def __init__(self, lie: Any) -> None:
        self.lie = lie

    offers = frozenset({"secure_sum"})

    def prepare(self, plan: so.Plan, task: so.Task, streams: Any) -> so.engines.Worker:
        return LyingWorker(so.engines.InProcess().prepare(plan, task, streams), self.lie)


class LyingWorker(so.engines.Worker):
    def __init__(self, honest: so.engines.Worker, lie: Any) -> None:
        self.honest, self.lie = honest, lie

    def collect(self, job: so.engines.ClientJob) -> so.engines.Collected:
        return self.lie(self.honest, job)  # type: ignore[no-any-return]


def twice_in_the_sum(honest: so.engines.Worker, job: so.engines.ClientJob) -> so.engines.Collected:
    more = honest.collect(replace(job, cohort=job.cohort[:1]))
    found = honest.collect(job)
    return replace(found, total=found.total + more.total)


def twice_in_the_report(honest: so.engines.Worker, job: so.engines.ClientJob) -> so.engines.Collected:
    return replace(honest.collect(job), reported=np.append(job.cohort[:-1], job.cohort[0]))


def a_stranger(honest: so.engines.Worker, job: so.engines.ClientJob) -> so.engines.Collected:
    return replace(honest.collect(job), reported=job.cohort + 1)


def too_many(honest: so.engines.Worker, job: so.engines.ClientJob) -> so.engines.Collected:
    return replace(honest.collect(job), received=len(job.cohort) + 1)


def too_short(honest: so.engines.Worker, job: so.engines.ClientJob) -> so.engines.Collected:
    found = honest.collect(job)
    return replace(found, total=found.total[1:])


def same_clients() -> so.Task:
    """Six clients of the same records: their clipped messages are one unit vector, so the sum's length counts them."""
    return so.Task.of(mlp(), [clients((7,))[0]] * 6)


@pytest.mark.parametrize("lie", [twice_in_the_sum, twice_in_the_report, a_stranger, too_many, too_short])
def test_an_engine_that_counts_wrongly_is_refused_where_the_sum_shows_it(lie: Any) -> None:
    loud = plan(local=so.parts.LocalSgd(lr=5.0, epochs=3))
    rounds(loud, same_clients(), Counts(lambda honest, job: honest.collect(job)))
    with pytest.raises(EngineError):
        rounds(loud, same_clients(), Counts(lie))


def test_an_engine_that_drops_a_client_and_says_so_is_reported() -> None:
    done = rounds(plan(), task(), Counts(lambda honest, job: honest.collect(replace(job, cohort=job.cohort[1:]))))
    assert done[0].diagnostics["missing_clients"] == 1.0


def test_add_refuses_a_name_that_is_taken() -> None:
    with pytest.raises(ConfigError, match="a second engine with the name 'inprocess'"):
        so.engines.add("inprocess", so.engines.InProcess)
