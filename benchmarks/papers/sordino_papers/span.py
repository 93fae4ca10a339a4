"""Clients with few records, trained in the span of their own records: the same updates for a fraction of the work.

A client's gradient of the first layer is r^T x: it lies in the span of its n records. With x = c Q (Q [k, i] of
orthonormal rows, c [n, k] coordinates) and W = B Q + P, P the part of W that no record of the client sees,

    x W^T = c B^T;      dW = (r^T c) Q;      ||dW|| = ||r^T c||;      weight decay takes P to a multiple of P

So a step on (B, ||P_j|| per hidden unit j, the other layers) is a step on W in other coordinates, norms included. It
holds for whatever asks for gradients, sums and norms (SGD, momentum, weight decay, SAM, BLUR, FedProx), and not for
what looks at single weights (ASAM), which takes the plain way. Equal to rounding; no privacy decision is made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import kernels
from sordino.engines.base import ClientJob
from sordino.engines.batches import gather
from sordino.engines.dense_clients import DenseClients, Stage, has_written_gradient
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.parts.clipping import row_norms
from sordino.parts.encoding import Clip, Public, finite_rows
from sordino.parts.gradients import Batch, Blur, Gradient, Plain, Proximal, Sam
from sordino.parts.local_solvers import LocalSgd, Work
from sordino.parts.losses import CrossEntropy
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task


@dataclass(frozen=True)
class InSpan(InProcess):
    """`InProcess`, in the span of every client's records where plan and model allow it."""

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> InProcessWorker:
        usual = replace(InProcess(), chunk=self.chunk).prepare(plan, task, streams)
        if not (
            has_written_gradient(task, single=False) and isinstance(plan.local, LocalSgd) and turns(plan.local.gradient)
        ):
            return usual
        return SpanWorker(plan, usual.task, streams, usual.way, usual.chunk)


def turns(gradient: Gradient) -> bool:
    """Whether a turned space gives it the turned answer: it looks at inner products only."""
    if isinstance(gradient, Blur | Proximal):
        return turns(gradient.gradient)
    return isinstance(gradient, Plain) or (isinstance(gradient, Sam) and not gradient.adaptive)


class SpanWorker(InProcessWorker):
    """A chunk of clients, each in the coordinates of its own records."""

    bases: dict[int, tuple[Tensor, Tensor]] | None = None

    def fold(self, job: ClientJob) -> tuple[Tensor, list[Tensor]]:
        """The sum [d] of the cohort's messages: where they are only clipped, a norm is all that is asked of them."""
        if not all(type(step) is Clip and step.norm == 2 and step.length(1) == 1 for step in self.plan.encode):
            return super().fold(job)
        sizes = self.task.clients.offsets[job.cohort + 1] - self.task.clients.offsets[job.cohort]
        total, norms = torch.zeros(len(job.start), dtype=torch.float64), []
        order = job.cohort[np.argsort(sizes, kind="stable")]
        for chunk in (order[first : first + self.chunk] for first in range(0, len(order), self.chunk)):
            turned = self.turned(chunk, job.public, job.start)
            norms.append(row_norms(turned.rows))
            sent = self.encode(finite_rows(turned.rows, norms[-1]), job)
            total += replace(turned, rows=sent).total(job.start)
        return total, norms

    def solve(self, clients: Cohort, public: Public, start: Tensor) -> Tensor:
        """Messages [m, d] of a chunk."""
        return self.turned(clients, public, start).outward(start)

    def turned(self, clients: Cohort, public: Public, start: Tensor) -> Turned:
        """The same in the clients' own coordinates."""
        t, local, held = public.t, self.plan.local, self.task.clients
        drawn = [local.indices(held.size(int(c)), self.streams.at(t, "batches", int(c)), t, int(c)) for c in clients]
        frame = self.frame(clients)
        objective = SpanClients(self.task, frame.width)
        begin = frame.inward(start, objective)
        batches = frame.batches(drawn, [held.records.y[held.rows(int(c))] for c in clients])
        rows = local.solve(Work(objective, begin, batches, len(clients), public))
        return Turned(frame, objective, begin, rows)

    def frame(self, clients: Cohort) -> Frame:
        """The coordinates of a chunk, padded with zeros to the widest."""
        known = [self.basis(int(c)) for c in clients]
        most, widest = (max(side) for side in zip(*(c.shape for c, _ in known), strict=True))
        coordinates = torch.zeros(len(known), most, widest + 1)
        bases = torch.zeros(len(known), widest, known[0][1].shape[1])
        for i, (c, q) in enumerate(known):
            coordinates[i, : len(c), : c.shape[1]] = c
            bases[i, : len(q)] = q
        return Frame(coordinates, bases)

    def basis(self, client: int) -> tuple[Tensor, Tensor]:
        """c [n, k] and Q [k, i] with x = c Q, computed once per client."""
        self.bases = {} if self.bases is None else self.bases
        if client not in self.bases:
            x = self.task.clients.records.x[self.task.clients.rows(client)].flatten(1).double()
            q, r = torch.linalg.qr(x.T)
            self.bases[client] = (r.T.float().contiguous(), q.T.float().contiguous())
        return self.bases[client]


@dataclass(frozen=True)
class Frame:
    """Coordinates [m, n, k + 1] of the clients' records (the last is 0: what they do not see), and bases [m, k, i]."""

    coordinates: Tensor
    bases: Tensor

    @property
    def width(self) -> int:
        return int(self.coordinates.shape[2])

    def inward(self, start: Tensor, objective: SpanClients) -> Tensor:
        """The model [d] as every client sees it: rows [m, d']."""
        weight = objective.wide.of(start[None])[0]
        seen = torch.matmul(weight, self.bases.transpose(1, 2))
        unseen = (weight.square().sum(2) - seen.square().sum(2)).clamp(min=0).sqrt()
        first = torch.cat([seen, unseen[..., None]], 2).flatten(1)
        return torch.cat([first, start[objective.cut :].expand(len(first), -1)], 1)

    def batches(self, drawn: list[NDArray[np.int64]], labels: list[Tensor]) -> Iterator[Batch]:
        """Step by step, the picked records of every client; a client with fewer steps rests."""
        shape = (len(drawn), max(len(picks) for picks in drawn), max(picks.shape[1] for picks in drawn))
        picks, y = np.full(shape, -1, dtype=np.int64), torch.zeros(self.coordinates.shape[:2], dtype=torch.int64)
        for i, (own, label) in enumerate(zip(drawn, labels, strict=True)):
            picks[i, : len(own), : own.shape[1]] = own
            y[i, : len(label)] = label
        table, rows = self.coordinates.flatten(0, 1), np.arange(len(drawn))[:, None, None] * self.coordinates.shape[1]
        places, real = torch.from_numpy(rows + np.maximum(picks, 0)), torch.from_numpy(picks >= 0)
        for step in range(shape[1]):
            where, mask = places[:, step], real[:, step]
            yield Batch(gather(table, where), gather(y.flatten(), where), mask, mask.any(1).float())


@dataclass(frozen=True)
class Turned:
    """Messages [m, d'] of a chunk in its frame, from where the clients began.

    dW = (dB - s B) Q + s W,  s = d||P|| / ||P|| per hidden unit; the other layers are as they are. Linear in the rows.
    """

    frame: Frame
    objective: SpanClients
    begin: Tensor
    rows: Tensor

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """dB - s B [m, h, k], s [m, h, 1], and the other layers."""
        first = self.objective.stages[0]
        moved, seen = (first.of(side)[0] for side in (self.rows, self.begin))
        shrunk = moved[..., -1:] / seen[..., -1:].clamp(min=1e-12)
        return moved[..., :-1] - shrunk * seen[..., :-1], shrunk, self.rows[:, first.outputs * first.inputs :]

    def outward(self, start: Tensor) -> Tensor:
        """The rows [m, d], in the layout of the model."""
        (lean, shrunk, others), wide = self._parts(), self.objective.wide
        full = self.rows.new_empty(len(self.rows), len(start))
        weight = wide.of(full)[0]
        torch.mul(wide.of(start[None])[0], shrunk, out=weight)
        weight.baddbmm_(lean, self.frame.bases)
        full[:, self.objective.cut :] = others
        return full

    def total(self, start: Tensor) -> Tensor:
        """Their sum [d], without forming them."""
        (lean, shrunk, others), wide = self._parts(), self.objective.wide
        weight = lean.transpose(0, 1).flatten(1) @ self.frame.bases.flatten(0, 1)
        weight += shrunk.sum(0) * wide.of(start[None])[0][0]
        return torch.cat([weight.flatten(), others.sum(0)])


class SpanClients(DenseClients):
    """`DenseClients` whose first layer reads coordinates; the rows of clients differ from the start."""

    def __init__(self, task: Task, width: int) -> None:
        super().__init__(task)
        self.wide, *others = self.stages
        assert self.wide.weight == 0, "the first weight opens the row"
        self.cut = self.wide.outputs * self.wide.inputs
        gone = self.cut - self.wide.outputs * width
        self.size = self.layout.size - gone
        first = replace(self.wide, inputs=width)
        self.stages = [moved(first, gone, first=True), *(moved(stage, gone) for stage in others)]
        self.compiled = kernels.AVAILABLE and type(task.losses) is CrossEntropy and plain(self.stages)

    @property
    def trainable(self) -> int:
        return self.size

    def place(self, start: Tensor, clients: int) -> Tensor:
        return start.clone()

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """In machine code where there is some; a not-a-number is one there too."""
        if not self.compiled or batch.mask is None:
            return super().gradient(w, batch)
        if self.slopes.shape != w.shape:
            self.slopes = torch.empty_like(w)
        hidden, outputs = (stage.outputs for stage in self.stages)
        arrays = (side.numpy() for side in (w, batch.x, batch.y, batch.mask))
        kernel().gradient(*arrays, hidden, outputs, self.slopes.numpy())
        return self.slopes

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        return None if self.compiled else super().descend(start, batches, clients, lr, decay)


def plain(stages: list[Stage]) -> bool:
    """Whether this is W1, c1, ReLU, W2, c2, in this order in the row."""
    if len(stages) != 2 or stages[0].activation is not nn.ReLU:
        return False
    (h, i), o = (stages[0].outputs, stages[0].inputs), stages[1].outputs
    places = (stages[0].weight, stages[0].bias, stages[1].weight, stages[1].bias)
    return places == (0, h * i, h * i + h, h * i + h + o * h)


@cache
def kernel() -> ModuleType:
    """Compiled when it is first asked for."""
    from sordino_papers import span_kernel

    return span_kernel


def moved(stage: Stage, gone: int, first: bool = False) -> Stage:
    """The stage in a row that has lost `gone` numbers of its first weight."""
    weight, bias = stage.weight if first else stage.weight - gone, stage.bias
    return replace(stage, weight=weight, bias=None if bias is None else bias - gone)
