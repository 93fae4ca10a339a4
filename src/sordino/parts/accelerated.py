"""Accelerated servers: AC-SA, and servers that follow one another in stages (paper 001, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import PlanError
from sordino.parts.schedules import natural, positive
from sordino.parts.server_optimizers import Memory, ServerOptimizer, check_extras, project


@dataclass(frozen=True)
class Accelerated(ServerOptimizer, kind="accelerated"):
    """AC-SA (Ghadimi and Lan 2012): three sequences, md (where clients start), w, and ag (the result).

        alpha_r = 2/(r+1),   eta_r = 4v/(r(r+1)),   m = mu + weight_decay,   r = 1, 2, ...
        md_r = (1-s) ag_{r-1} + s w_{r-1},     s = alpha_r [(1-alpha_r) m + eta_r] / [eta_r + (1-alpha_r^2) m]
        g_r  = mean_r + weight_decay md_r
        w_r  = argmin over W of alpha_r [<g_r, w> + m/2 ||md_r - w||^2] + [(1-alpha_r) m + eta_r]/2 ||w_{r-1} - w||^2
             = P(w_{r-1} - alpha_r/(m + eta_r) [g_r + m (w_{r-1} - md_r)])
        ag_r = alpha_r w_r + (1-alpha_r) ag_{r-1}

    The mean message must be a gradient. v -> curvature, at least 2 beta in theory for a beta-smooth loss; mu -> the
    modulus of strong convexity of the clients' loss; weight_decay -> the regulariser lambda/2 ||w||^2, which adds
    lambda to that modulus; W and P -> the L2 ball of clip norm `ball` around the model that the run began with, and the
    projection on it: the argmin is a distance, so projecting its centre is exact. r counts the rounds that were
    released. Without noise F(ag_r) - F* <= 2 v ||w_0 - w*||^2 / (r(r+1)). Free of privacy cost. Paper 001, Algorithm 2.
    """

    v: float
    mu: float = 0.0
    weight_decay: float = 0.0
    ball: float | None = None

    def __post_init__(self) -> None:
        if not positive(self.v):
            found = f"an accelerated server with v = {self.v}"
            raise PlanError("server", found, "a positive finite v", "take twice the smoothness of the loss")
        if not natural(self.mu):
            raise PlanError("server", f"mu = {self.mu}", "a finite number of at least 0", "0 for a convex loss")
        check_extras(self.weight_decay, self.ball)

    def init(self, params: Tensor) -> Memory:
        center = {} if self.ball is None else {"center": params.clone()}
        count = torch.zeros((), dtype=torch.int64)
        return {"params": params.clone(), "prox": params.clone(), "count": count, **center}

    @property
    def modulus(self) -> float:
        """m, the strong convexity of the regularised loss."""
        return self.mu + self.weight_decay

    def rates(self, memory: Memory) -> tuple[float, float]:
        """alpha_r and eta_r of the round that comes next."""
        r = int(memory["count"]) + 1
        return 2.0 / (r + 1), 4.0 * self.v / (r * (r + 1))

    def query(self, memory: Memory) -> Tensor:
        """md, between ag and w."""
        (alpha, eta), m = self.rates(memory), self.modulus
        share = alpha * ((1 - alpha) * m + eta) / (eta + (1 - alpha**2) * m)
        return torch.lerp(memory["params"], memory["prox"], share)

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        (alpha, eta), m = self.rates(memory), self.modulus
        md, before = self.query(memory), memory["prox"]
        slope = mean + self.weight_decay * md + m * (before - md) if m else mean
        moved = before - alpha / (m + eta) * slope
        if self.ball is not None:
            moved = project(moved, memory["center"], self.ball)
        ag = torch.lerp(memory["params"], moved, alpha)
        return {**memory, "params": ag, "prox": moved, "count": memory["count"] + 1}


@dataclass(frozen=True)
class Stage:
    """`rounds` rounds of one server."""

    rounds: int
    server: ServerOptimizer

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise PlanError("server", f"a stage of {self.rounds} rounds", "at least 1 round", "leave the stage out")


@dataclass(frozen=True)
class Stages(ServerOptimizer, kind="stages"):
    """Servers one after another: stage k starts from the result of stage k-1, with a fresh memory.

        q_k = result of rounds_k rounds of server_k, begun at q_{k-1}

    Rounds are counted from 0 in every stage, so schedules start again; only the centre of a ball stays that of the
    run. A round that was void does not count. Multi-stage AC-SA: paper 001, Appendix E.5.1 (Ghadimi and Lan 2013).
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("server", "no stages", "at least one stage", "add a stage with rounds and a server")

    @property
    def rounds(self) -> int:
        """Rounds of all the stages: what the plan's rounds must be."""
        return sum(stage.rounds for stage in self.stages)

    def check_rounds(self, rounds: int) -> None:
        if rounds != self.rounds:
            raise PlanError("server", f"stages of {self.rounds} rounds in a plan of {rounds}", "as many rounds in both")

    def init(self, params: Tensor) -> Memory:
        balls = any("center" in stage.server.init(params[:0]) for stage in self.stages)
        center = {"center": params.clone()} if balls else {}
        return _wrapped(center, self.stages[0].server.init(params), stage=0, done=0)

    def query(self, memory: Memory) -> Tensor:
        return self._server(memory).query(_inner(memory))

    def result(self, memory: Memory) -> Tensor:
        return self._server(memory).result(_inner(memory))

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        stage, done = int(memory["stage"]), int(memory["done"])
        inner = self._server(memory).step(_inner(memory), mean, done)
        if done + 1 < self.stages[stage].rounds or stage + 1 == len(self.stages):
            return _wrapped(memory, inner, stage=stage, done=done + 1)
        ended = self.stages[stage].server.result(inner)
        return _wrapped(memory, self.stages[stage + 1].server.init(ended), stage=stage + 1, done=0)

    def _server(self, memory: Memory) -> ServerOptimizer:
        return self.stages[int(memory["stage"])].server


def _wrapped(outer: Mapping[str, Tensor], inner: Memory, *, stage: int, done: int) -> Memory:
    """The memory of a stage under a prefix; the centre is kept once, outside, and stays."""
    counts = {"stage": torch.tensor(stage), "done": torch.tensor(done)}
    center = {"center": outer["center"]} if "center" in outer else {}
    return counts | center | {f"inner.{name}": tensor for name, tensor in inner.items() if name != "center"}


def _inner(memory: Memory) -> Memory:
    """The memory that the server of the stage knows."""
    center = {"center": memory["center"]} if "center" in memory else {}
    return center | {name.removeprefix("inner."): memory[name] for name in memory if name.startswith("inner.")}
