"""Server optimizers, which compute the next model from the noised mean message. The loop calls them.

The state (`memory`) of an optimizer is a dict of tensors, stored in checkpoints. Its steps are post-processing of
releases, so they have no privacy cost.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.accounting.matrix import workload
from sordino.codec import Part
from sordino.codec.boundary import of_type, returns, tensors
from sordino.errors import PlanError
from sordino.parts.clipping import row_norms
from sordino.parts.schedules import Schedule, at, finite, natural, positive, require, require_values

Memory = dict[str, Tensor]
_DENSE = 4096  # rounds up to which a server with a changing step has its own matrix


class ServerOptimizer(Part):
    """Base class of server optimizers, which compute the next model from the noised mean of the clients' messages."""

    needs: ClassVar[frozenset[str]] = frozenset()  # what an engine must offer
    rounds: int | None = None  # number of rounds that the plan must have; None: any

    @property
    def by_coordinate(self) -> bool:
        """Whether a step computes each coordinate separately; then the states of several runs can be stacked."""
        return False

    def init(self, params: Tensor) -> Memory:
        """Return the optimizer's state before the first round."""
        return {"params": params.clone()}

    def workload(self, rounds: int) -> NDArray[np.float64]:
        """Return the workload A of w_t = sum_s A_ts (mean of round s): all of A, or its first column if Toeplitz."""
        return np.ones(rounds)

    def plain_lr(self, t: int) -> float | None:
        """Return lr if the step of round t is exactly w <- w - lr * mean; else None."""
        return None

    @returns(of_type(Tensor))
    def query(self, memory: Memory) -> Tensor:
        """Return the model that is sent to the clients."""
        return memory["params"]

    @returns(of_type(Tensor))
    def result(self, memory: Memory) -> Tensor:
        """Return the model that the run returns."""
        return memory["params"]

    @abstractmethod
    @returns(lambda found, part, memory, *_: tensors(found, memory))
    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        """Return the optimizer's state after round t, in which the clients' noised mean message was `mean`."""


@dataclass(frozen=True)
class Average:
    """Weighted average of the models w_r that were sent to clients: sum_r growth^r w_r / sum_r growth^r.

    growth = 1 is the plain mean; 1/(1 - mu lr) is the weight gamma_r = (1 - mu lr)^-(r+1) for a mu-strongly convex loss
    (ISRL-DP paper, Algorithm 1, Theorem 2.1). The first `after` rounds are omitted; until then the average is the last
    model that was sent. As in the paper, the model after the last step is not in the average.
    """

    growth: float = 1.0
    after: int = 0

    def __post_init__(self) -> None:
        fix = "set growth = 1 for the plain mean"
        require_values(1 <= self.growth < math.inf, "server", "a number of at least 1", fix, growth=self.growth)
        require_values(self.after >= 0, "server", "at least 0 omitted rounds", after=self.after)

    def share(self, count: int) -> float:
        """Return the newest model's weight growth^count / (growth + ... + growth^count), without overflow."""
        rate = math.log(self.growth)
        return math.expm1(-rate) / math.expm1(-count * rate) if rate else 1.0 / count

    def init(self, params: Tensor) -> Memory:
        """Return the state before the first round; the average is float64, since 10^5 small steps are added to it."""
        return {"average": params.to(torch.float64, copy=True), "count": torch.zeros((), dtype=torch.int64)}

    def fold(self, memory: Memory) -> Memory:
        """Return the state with this round's model added to the average."""
        count = memory["count"] + 1
        share = self.share(max(int(count) - self.after, 1))
        return {"average": torch.lerp(memory["average"], memory["params"].double(), share), "count": count}


def project(params: Tensor, center: Tensor, radius: float) -> Tensor:
    """Return the point nearest to `params` in the L2 ball of `radius` around `center`."""
    away = params - center
    norm = float(row_norms(away[None])[0])
    return params if norm <= radius else center + away * (radius / norm)


def _check_lr(lr: float | Schedule) -> None:
    require_values(finite(lr), "server", "a number in the range of float32", "set lr = 1.0, as in FedAvg", lr=lr)


def _check_momentum(momentum: float) -> None:
    require_values(0 <= momentum < 1, "server", "a number in [0, 1)", momentum=momentum)


def _check_extras(weight_decay: float, ball: float | None) -> None:
    require_values(natural(weight_decay), "server", "a finite number of at least 0", weight_decay=weight_decay)
    require_values(positive(ball), "server", "a positive finite radius", "drop ball for no projection", ball=ball)


@dataclass(frozen=True)
class Sgd(ServerOptimizer, kind="sgd"):
    """Server SGD: v <- momentum * v + mean + weight_decay * w; w <- P(w - lr_t * v). The defaults are FedAvg.

    weight_decay is lambda of the regulariser lambda/2 ||w||^2; P projects on the L2 ball of radius `ball` around the
    initial model; `average` returns an average of the models instead of the last one. All of it is post-processing of
    releases, so it has no privacy cost.
    """

    lr: float | Schedule = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    ball: float | None = None
    average: Average | None = None

    def __post_init__(self) -> None:
        _check_momentum(self.momentum)
        _check_lr(self.lr)
        _check_extras(self.weight_decay, self.ball)

    @property
    def by_coordinate(self) -> bool:
        """Whether a step computes each coordinate separately: True without a ball or an average."""
        return type(self).step is Sgd.step and self.ball is None and self.average is None

    def init(self, params: Tensor) -> Memory:
        memory = {"params": params.clone()}
        if self.momentum:
            memory["velocity"] = torch.zeros_like(params)
        if self.ball is not None:
            memory["center"] = params.clone()
        return memory | self.average.init(params) if self.average else memory

    def result(self, memory: Memory) -> Tensor:
        return memory["average"].to(memory["params"].dtype) if self.average else memory["params"]

    def plain_lr(self, t: int) -> float | None:
        more = self.momentum or self.weight_decay or self.ball is not None
        return None if more else at(self.lr, t)

    def workload(self, rounds: int) -> NDArray[np.float64]:
        """Return the workload A, whose row t has the weights of the rounds' means in w after round t.

        If lr is constant, return the first column of A / lr. The ball and the average are ignored.
        """
        if not isinstance(self.lr, Schedule):
            return workload(rounds, self.momentum, self.lr * self.weight_decay)
        if rounds > _DENSE:
            return workload(rounds, self.momentum)
        found, speed = np.zeros((rounds + 1, rounds)), np.zeros(rounds)
        for t, unit in enumerate(np.eye(rounds)):
            speed = self.momentum * speed + unit - self.weight_decay * found[t]
            found[t + 1] = found[t] + self.lr.at(t) * speed
        return found[1:]

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        params = memory["params"]
        slope = mean + self.weight_decay * params if self.weight_decay else mean
        if self.momentum:
            slope = self.momentum * memory["velocity"] + slope
        moved = params - at(self.lr, t) * slope
        after = {**memory, "params": moved if self.ball is None else project(moved, memory["center"], self.ball)}
        if self.momentum:
            after["velocity"] = slope
        return after | self.average.fold(memory) if self.average else after


class _Moments(ServerOptimizer):
    """Adaptive server: w <- w - lr * m / (sqrt(v) + floor), m <- beta1 m + (1 - beta1) g (Reddi et al. 2021).

    g is the noised mean, and v a running estimate of g^2, which subclasses define."""

    lr: float | Schedule
    beta1: float
    floor: float

    def init(self, params: Tensor) -> Memory:
        zeros, count = torch.zeros_like(params), torch.zeros((), dtype=torch.int64)
        return {"params": params.clone(), "first": zeros, "second": zeros.clone(), "count": count}

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        betas = [self.beta1, *([self.beta2] if isinstance(self, Adam | Yogi) else [])]
        fits = all(0 <= beta < 1 for beta in betas) and positive(self.floor)
        require_values(fits, "server", "betas in [0, 1), floor > 0", betas=betas, floor=self.floor)

    @abstractmethod
    def second_moment(self, second: Tensor, squares: Tensor) -> Tensor:
        """Return the second moment v after one more round, from v before it and the squared means g^2."""

    def bias(self, count: int) -> tuple[float, float]:
        """Return the divisors for bias correction of the first and the second moment after `count` rounds."""
        return 1.0, 1.0

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        count = memory["count"] + 1
        first = self.beta1 * memory["first"] + (1 - self.beta1) * mean
        second = self.second_moment(memory["second"], mean.square())
        by_first, by_second = self.bias(int(count))
        scale = (second / by_second).sqrt() + self.floor
        moved = at(self.lr, t) * (first / by_first) / scale
        return {"params": memory["params"] - moved, "first": first, "second": second, "count": count}


@dataclass(frozen=True)
class Adam(_Moments, kind="adam"):
    """FedAdam: w <- w - lr m / (sqrt(v) + floor) with moments m of the noised mean g, and v of g^2 (Reddi et al. 2021).

    m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2; both are bias-corrected (Kingma, Ba 2015)."""

    lr: float | Schedule = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float = 1e-3

    def second_moment(self, second: Tensor, squares: Tensor) -> Tensor:
        return self.beta2 * second + (1 - self.beta2) * squares

    def bias(self, count: int) -> tuple[float, float]:
        return 1 - self.beta1**count, 1 - self.beta2**count


@dataclass(frozen=True)
class Yogi(_Moments, kind="yogi"):
    """FedYogi: `Adam` with v <- v - (1 - beta2) g^2 sign(v - g^2), without bias correction (Reddi et al. 2021).

    g is the noised mean; v changes by at most (1 - beta2) g^2 per round."""

    lr: float | Schedule = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float = 1e-3

    def second_moment(self, second: Tensor, squares: Tensor) -> Tensor:
        return second - (1 - self.beta2) * squares * torch.sign(second - squares)


@dataclass(frozen=True)
class Adagrad(_Moments, kind="adagrad"):
    """FedAdagrad: `Adam` with v <- v + g^2 for noised means g, without bias correction (Reddi et al. 2021)."""

    lr: float | Schedule = 0.1
    beta1: float = 0.0
    floor: float = 1e-3

    def second_moment(self, second: Tensor, squares: Tensor) -> Tensor:
        return second + squares


@dataclass(frozen=True)
class TorchOptimizer(ServerOptimizer, kind="torch_optimizer"):
    """Placeholder for the PyTorch optimizer of a user's training loop (`make_private`); the plan only stores its name.

    The optimizer works on noised gradients, so it has no privacy cost; no engine can run it. Correlated noise is
    optimised for `momentum`.
    """

    name: str
    momentum: float | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"a loop of PyTorch"})

    def __post_init__(self) -> None:
        _check_momentum(self.momentum or 0.0)

    def workload(self, rounds: int) -> NDArray[np.float64]:
        return workload(rounds, self.momentum or 0.0)

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        found = f"a step of {self.name}, which runs only in a PyTorch loop"
        raise PlanError("server", found, "a server that engines run", "use sgd or adam, or make_private for a loop")


@dataclass(frozen=True)
class Accelerated(ServerOptimizer, kind="accelerated"):
    """Accelerated SGD, AC-SA (Ghadimi, Lan 2012), with sequences md (the query), w and ag (the result).

        alpha_r = 2/(r+1),   eta_r = 4v/(r(r+1)),   m = mu + weight_decay,   r = 1, 2, ...
        md_r = (1-s) ag_{r-1} + s w_{r-1},     s = alpha_r [(1-alpha_r) m + eta_r] / [eta_r + (1-alpha_r^2) m]
        g_r  = mean_r + weight_decay md_r
        w_r  = argmin over W of alpha_r [<g_r, w> + m/2 ||md_r - w||^2] + [(1-alpha_r) m + eta_r]/2 ||w_{r-1} - w||^2
             = P(w_{r-1} - alpha_r/(m + eta_r) [g_r + m (w_{r-1} - md_r)])
        ag_r = alpha_r w_r + (1-alpha_r) ag_{r-1}

    The mean message must be a gradient. v -> curvature, at least 2 beta in theory for a beta-smooth loss; mu -> the
    modulus of strong convexity of the clients' loss; weight_decay -> the regulariser lambda/2 ||w||^2, which adds
    lambda to that modulus; W and P -> the L2 ball of radius `ball` around the initial model, and the projection on it
    (exact, since the objective of the argmin is a squared distance). r counts the released rounds. Without noise
    F(ag_r) - F* <= 2 v ||w_0 - w*||^2 / (r(r+1)). Steps are post-processing, without privacy cost.
    """

    v: float
    mu: float = 0.0
    weight_decay: float = 0.0
    ball: float | None = None

    def __post_init__(self) -> None:
        fix = "set v to twice the smoothness of the loss"
        require_values(positive(self.v), "server", "a positive finite number", fix, v=self.v)
        fix = "set mu = 0 for a convex loss"
        require_values(natural(self.mu), "server", "a finite number of at least 0", fix, mu=self.mu)
        _check_extras(self.weight_decay, self.ball)

    def init(self, params: Tensor) -> Memory:
        center = {} if self.ball is None else {"center": params.clone()}
        count = torch.zeros((), dtype=torch.int64)
        return {"params": params.clone(), "prox": params.clone(), "count": count, **center}

    def rates(self, memory: Memory) -> tuple[float, float, float]:
        """Return the AC-SA parameters alpha_r and eta_r of the next round r, and the strong convexity m."""
        r = int(memory["count"]) + 1
        return 2.0 / (r + 1), 4.0 * self.v / (r * (r + 1)), self.mu + self.weight_decay

    def query(self, memory: Memory) -> Tensor:
        """Return the model at which clients compute gradients: md, between the AC-SA sequences ag and w."""
        alpha, eta, m = self.rates(memory)
        share = alpha * ((1 - alpha) * m + eta) / (eta + (1 - alpha**2) * m)
        return torch.lerp(memory["params"], memory["prox"], share)

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        alpha, eta, m = self.rates(memory)
        md, before = self.query(memory), memory["prox"]
        slope = mean + self.weight_decay * md + m * (before - md) if m else mean
        moved = before - alpha / (m + eta) * slope
        if self.ball is not None:
            moved = project(moved, memory["center"], self.ball)
        ag = torch.lerp(memory["params"], moved, alpha)
        return {**memory, "params": ag, "prox": moved, "count": memory["count"] + 1}


@dataclass(frozen=True)
class Stage:
    """One stage of the server optimizer `Stages`: `rounds` rounds of one server optimizer."""

    rounds: int
    server: ServerOptimizer

    def __post_init__(self) -> None:
        found = f"a stage of {self.rounds} rounds"
        require(self.rounds >= 1, "server", found, "at least 1 round", "drop the stage")


@dataclass(frozen=True)
class Stages(ServerOptimizer, kind="stages"):
    """Sequence of server optimizers: stage k starts from the result of stage k-1, with a new state.

        q_k = result of rounds_k rounds of server_k, begun at q_{k-1}

    Rounds are counted from 0 in every stage, so schedules start again; the centre of a ball is always the run's initial
    model. A round without a release does not count. Multi-stage AC-SA: Ghadimi, Lan 2013.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        fix = "add a stage with rounds and a server"
        require(len(self.stages) > 0, "server", "no stages", "at least one stage", fix)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return sum(stage.rounds for stage in self.stages)

    def init(self, params: Tensor) -> Memory:
        balls = any("center" in stage.server.init(params[:0]) for stage in self.stages)
        center = {"center": params.clone()} if balls else {}
        return _wrapped(center, self.stages[0].server.init(params), stage=0, done=0)

    def query(self, memory: Memory) -> Tensor:
        return self._server(memory).query(_inner(memory))

    def result(self, memory: Memory) -> Tensor:
        return self._server(memory).result(_inner(memory))

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        stage, done = int(memory["stage"]), int(memory["done"]) + 1
        server = self._server(memory)
        inner = server.step(_inner(memory), mean, done - 1)
        if done == self.stages[stage].rounds and stage + 1 < len(self.stages):
            stage, done, inner = stage + 1, 0, self.stages[stage + 1].server.init(server.result(inner))
        return _wrapped(memory, inner, stage=stage, done=done)

    def _server(self, memory: Memory) -> ServerOptimizer:
        return self.stages[int(memory["stage"])].server


def _center(memory: Mapping[str, Tensor]) -> Memory:
    return {"center": memory["center"]} if "center" in memory else {}


def _wrapped(outer: Mapping[str, Tensor], inner: Memory, *, stage: int, done: int) -> Memory:
    counts = {"stage": torch.tensor(stage), "done": torch.tensor(done)}
    return counts | _center(outer) | {f"inner.{name}": held for name, held in inner.items() if name != "center"}


def _inner(memory: Memory) -> Memory:
    held = {name.removeprefix("inner."): value for name, value in memory.items() if name.startswith("inner.")}
    return _center(memory) | held
