"""Promises of clients that remember: SCAFFOLD is the paper's, memories are each client's own, secret, and survive."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.tiny import SIZES, clients, final, mlp, plan, rounds, task
from torch import Tensor, nn

from sordino.config import Config, PrivacySpec
from sordino.engines.distributed import Distributed
from sordino.engines.inprocess import IDS, InProcess, InProcessWorker
from sordino.errors import ConfigError, EngineError, PlanError
from sordino.loop import check, run
from sordino.parts.encoding import Clip, LaplacianSmoothing
from sordino.parts.local_solvers import Scaffold
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, NoNoise
from sordino.parts.samplers import Everyone, Poisson, RoundRobin, Sampler
from sordino.parts.sparsify import PublicMask, SparsifyUpdate
from sordino.plan import Plan
from sordino.rng import Seeded, Streams
from sordino.runs.charge_log import PrefixHash
from sordino.runs.execution import check_noise
from sordino.runs.writer import Checkpoint
from sordino.task import Task
from sordino_papers.grid import run_grid

CONTROLS = "clients.control"
LR, STEPS, ROUNDS = 0.2, 3, 5
PATHS: tuple[Literal["batched", "sequential"], ...] = ("batched", "sequential")
LOCAL = Scaffold(lr=LR, steps=STEPS, batch=2)
FREE = plan(rounds=ROUNDS, local=LOCAL, encode=(Clip(math.inf),), release=NoNoise())


def reference(data: Task, local: Scaffold, sampler: Sampler) -> Tensor:
    """Algorithm 1 of Karimireddy et al. with option II, in float64 and torch alone."""
    model = copy.deepcopy(data.model).double()
    w = nn.utils.parameters_to_vector(model.parameters()).detach()
    control, own = torch.zeros_like(w), torch.zeros(sampler.population, len(w), dtype=torch.float64)
    for t in range(ROUNDS):
        moves, shifts = [], []
        cohort = sampler.draw(t, np.random.default_rng(0))
        for client in cohort.tolist():
            end = _descended(model, w, data, local, t, client, control - own[client])
            held = data.clients.size(client) > 0
            after = own[client] - control + (w - end) / (STEPS * LR) if held else own[client]
            moves.append(end - w)
            shifts.append(after - own[client])
            own[client] = after
        w = w + torch.stack(moves).mean(0)
        control = control + len(cohort) / sampler.population * torch.stack(shifts).mean(0)
    return w


def _descended(
    model: nn.Module, start: Tensor, data: Task, local: Scaffold, t: int, client: int, pull: Tensor
) -> Tensor:
    rows, w = data.clients.rows(client), start.clone()
    for picks in local.indices(len(rows), Seeded(0).at(t, "batches", client)):
        step = torch.from_numpy(rows[picks[picks >= 0]])
        nn.utils.vector_to_parameters(w, model.parameters())
        loss = F.cross_entropy(model(data.clients.records.x[step].double()), data.clients.records.y[step])
        slope = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        w = w - LR * (slope + pull)
    return w


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("sampler", [Everyone(6), RoundRobin(6, 4)], ids=str)
def test_without_clip_and_noise_it_is_the_papers_algorithm(
    sampler: Sampler, path: Literal["batched", "sequential"]
) -> None:
    data = task()
    wanted = reference(data, LOCAL, sampler)
    ours = final(replace(FREE, clients=sampler), data, InProcess(path=path))
    assert torch.allclose(ours.double(), wanted, atol=2e-5)
    forgetful = final(replace(FREE, clients=sampler, local=replace(LOCAL, steps=STEPS)), data, _Forgets(path=path))
    assert not torch.allclose(forgetful.double(), wanted, atol=1e-3)  # the sabotage: controls that are lost


class _Forgets(InProcess):
    def prepare(self, plan: Plan, task: Task, streams: Streams) -> InProcessWorker:
        worker = super().prepare(plan, task, streams)
        object.__setattr__(worker.client_states, "put", lambda clients, states, start: None)
        return worker


def test_a_convolution_keeps_its_controls_in_the_models_own_order() -> None:
    """One at a time convolutions lie channels last inside the engine; what is kept and sent does not."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    data = Task.of(net, clients(SIZES, (2, 4, 4)))
    free = replace(FREE, clients=RoundRobin(6, 3))
    paths = [rounds(free, data, InProcess(path=path))[-1].state for path in PATHS]
    for name in ("params",):
        assert torch.allclose(paths[0].memory[name], paths[1].memory[name], atol=1e-5)
    assert torch.allclose(paths[0].secret_state[CONTROLS], paths[1].secret_state[CONTROLS], atol=1e-4)


def test_the_bill_is_that_of_one_clipped_message_a_round() -> None:
    private = plan(rounds=7, local=LOCAL, clients=Poisson(6, 0.5))
    assert private.cost() == plan(rounds=7, clients=Poisson(6, 0.5)).cost()


def test_both_halves_of_the_message_share_one_ball() -> None:
    data, private = task(), plan(local=LOCAL, encode=(Clip(0.01),))
    worker, start = InProcess().prepare(private, data, Seeded(0)), data.layout.flatten(data.model)
    public = private.public(0, len(start))
    rows = worker.solve(np.arange(6), public, start)
    assert rows.shape[1] == private.length(len(start)) == 2 * len(start)
    assert bool((rows[0, : len(start)].norm() > 0.005) & (rows[0, len(start) :].norm() > 0.005))
    norms = Clip(0.01).encode(rows, public).double().norm(dim=1)
    assert 0.999 < float(norms.max()) <= 1.0


def test_controls_move_by_what_is_sent_so_clipping_does_not_stop_the_run() -> None:
    """The server's control is the mean of the clients' own, clipped or not; the sabotage clips after they moved."""
    data, tight = task(), replace(FREE, encode=(Clip(0.05),), rounds=6)
    last = rounds(tight, data)[-1].state
    assert torch.allclose(last.public_state["broadcast.control"], last.secret_state[CONTROLS].mean(0), atol=1e-5)
    late = replace(LOCAL, lr=LR)
    worker = InProcess().prepare(replace(tight, local=late, encode=(Clip(math.inf),)), data, Seeded(0))
    public, start = replace(tight.public(0, 67), clip_norm=math.inf), data.layout.flatten(data.model)
    worker.solve(np.arange(6), public, start)
    assert float(worker.client_states.of(np.arange(6), start)["control"].norm(dim=1).max()) * STEPS * LR > 0.05


def test_what_clients_remember_is_secret_and_what_the_server_learnt_is_public() -> None:
    last = rounds(replace(FREE, clients=RoundRobin(6, 3)), task())[-1].state
    assert set(last.secret_state) == {IDS, CONTROLS}
    assert set(last.public_state) == {"broadcast.control"}
    assert last.secret_state[IDS].tolist() == [0, 1, 2, 3, 4, 5]
    assert not torch.equal(last.secret_state[CONTROLS][0], last.secret_state[CONTROLS][1])


def test_a_run_that_is_continued_remembers(tmp_path: Path) -> None:
    """Through the bytes of a checkpoint; the sabotage is a checkpoint without its secret part."""
    data, free = task(), replace(FREE, clients=RoundRobin(6, 3))
    done = rounds(free, data)
    stored = Checkpoint(done[1].state, "", PrefixHash(0, ""), PrefixHash(0, "")).to_bytes()
    again = Checkpoint.of_bytes(stored).state
    ended = list(run(free, data, streams=Seeded(0), state=again))[-1].state
    assert torch.equal(ended.memory["params"], done[-1].state.memory["params"])
    assert torch.equal(ended.secret_state[CONTROLS], done[-1].state.secret_state[CONTROLS])
    lost = list(run(free, data, streams=Seeded(0), state=replace(again, secret_state={})))[-1].state
    assert not torch.allclose(lost.memory["params"], ended.memory["params"], atol=1e-4)


def test_controls_take_out_the_bias_of_many_local_steps() -> None:
    """Two clients pull one number to 0 and to 1 with unlike force: FedAvg settles elsewhere than the pooled optimum."""
    data = [(torch.full((1, 1), force), torch.tensor([force * goal])) for force, goal in ((0.3, 0.0), (1.0, 1.0))]
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    unlike = Task.of(model, data, loss="mse")
    optimum = 1.0 / (1.0 + 0.3**2)
    many = Scaffold(lr=0.2, steps=20)
    scaffold, fedavg = (
        float(final(replace(FREE, rounds=80, clients=Everyone(2), local=local), unlike)[0])
        for local in (many, many._plain())
    )
    assert abs(scaffold - optimum) < 1e-3
    assert abs(fedavg - optimum) > 0.05


def test_smoothing_works_on_the_update_alone() -> None:
    smooth = final(replace(FREE, postprocess=(LaplacianSmoothing(1.0),)), task())
    assert torch.isfinite(smooth).all()
    assert not torch.equal(smooth, final(FREE, task()))


def test_an_engine_whose_clients_cannot_remember_is_refused() -> None:
    with pytest.raises(EngineError, match="client_state"):
        check(plan(local=LOCAL), task(), Distributed())
    with pytest.raises(PlanError, match="remember"):
        run_grid([plan(local=LOCAL)], Task.of(nn.Linear(4, 3), clients()), [0])


@pytest.mark.parametrize("step", [PublicMask(0.5), SparsifyUpdate(0.5, by="influence")], ids=str)
def test_steps_that_look_at_the_models_coordinates_are_refused(step: PublicMask | SparsifyUpdate) -> None:
    with pytest.raises(PlanError, match="more than the model's update"):
        plan(local=LOCAL, encode=(step, Clip(1.0)))


@dataclass(frozen=True)
class Remembering(CentralNoise, kind="remembering_in_a_test"):
    """Noise of round t takes half of round t - 1's back: what correlated noise needs of a release."""

    seen: ClassVar[list[Tensor]] = []
    remembers: ClassVar[bool] = True

    def init(self, length: int) -> dict[str, Tensor]:
        return {"last": torch.zeros(length, dtype=torch.float64)}

    def noised(self, total, cohort, coins, memory):  # type: ignore[no-untyped-def]
        fresh = torch.from_numpy(self.mechanism.sample(len(total), coins("server noise")))
        self.seen.append(fresh - 0.5 * memory["last"])
        return total + self.seen[-1], {"last": fresh}


def test_noise_may_remember_earlier_noise_and_a_checkpoint_keeps_it() -> None:
    data, private = task(), plan(rounds=4, release=Remembering(Gaussian(1.0)))
    done = rounds(private, data)
    assert set(done[0].state.secret_state) == {"noise.last"}
    whole = [found.clone() for found in Remembering.seen]
    Remembering.seen.clear()
    list(run(private, data, streams=Seeded(0), state=done[1].state))
    assert all(torch.equal(a, b) for a, b in zip(Remembering.seen, whole[2:], strict=True))
    assert private.length(mlp_size()) == mlp_size()


def test_noise_that_a_kill_has_lost_is_not_drawn_anew() -> None:
    """In simulation the same streams give the same noise; coins of the operating system do not come back."""
    remembers = plan(rounds=4, release=Remembering(Gaussian(1.0)))
    secure = Config(plan=remembers, privacy=PrivacySpec(noise="secure", delta=1e-3))
    check_noise(secure, [0, 1], 2)
    with pytest.raises(ConfigError, match="round 3, whose noise"):
        check_noise(secure, [0, 1, 2], 2)
    check_noise(replace(secure, privacy=PrivacySpec(delta=1e-3)), [0, 1, 2], 2)
    check_noise(replace(secure, plan=plan(rounds=4)), [0, 1, 2], 2)  # nothing remembered: accounted again


def mlp_size() -> int:
    return sum(p.numel() for p in mlp().parameters())


def test_the_length_of_a_message_is_known_before_any_client_runs() -> None:
    from sordino.parts.encoding import Adaptive

    for chain, wanted in (((Clip(1.0),), 100), ((PublicMask(0.3), Clip(1.0)), 30), ((Clip(Adaptive(1.0)),), 101)):
        assert plan(encode=chain).length(100) == wanted
    assert plan(local=LOCAL).length(100) == 200
