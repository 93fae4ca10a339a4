"""One round made of a plan's own objects, and the worst messages that fit through it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sordino.parts.samplers import Cohort, FixedSize, Poisson
from sordino.plan import Plan
from sordino.privacy.bounds import Bound
from sordino.privacy.events import Relation
from sordino.rng import Streams

TENSORS, WIDTH = 4, 12  # the audited message: so many tensors of so many entries
SCALES = (1.0, 1e4, 1e30)  # raw messages, in radii: at the edge, far out, and where float32 squares overflow
SMALL = 200  # larger populations are audited at the same rate with fewer clients


@dataclass(frozen=True)
class Pipeline:
    """One round between the clients' messages and what is seen: sum, noise, denominator, decode of `plan`.

    The seam of the audit: a test subclasses it to break one step and sees the audit fail.
    `copies` independent rounds are noised in one call, as one long vector: every release draws its noise independently
    per coordinate, so n copies of d coordinates are n*d coordinates, equal in law to n calls.
    """

    plan: Plan
    t: int = 0

    def cohort(self, rng: np.random.Generator) -> Cohort:
        """Who takes part."""
        return self.plan.clients.draw(self.t, rng)

    def encode(self, rows: Tensor) -> Tensor:
        """On the clients: rows [m, d] -> messages [m, d']."""
        for step in self.plan.encode:
            rows = step.encode(rows, self.plan.public(self.t))
        return rows

    def noised(self, totals: Tensor, cohort: Cohort, streams: Streams) -> Tensor:
        """The clients' noise and the server's, on a long vector of totals."""
        totals = self.plan.release.in_sum(totals, cohort, streams.at(self.t, "client noise"))
        return self.plan.release.on_server(totals, streams.at(self.t, "server noise"), streams.mode)

    def denominator(self, received: int) -> float:
        """What the sum is divided by."""
        return self.plan.release.denominator(self.plan.clients.expected, received)

    def decode(self, means: Tensor) -> Tensor:
        """On the server: [n, d'] -> [n, d]; all at once where that equals one by one, else one by one."""
        public, few = self.plan.public(self.t), means[:2]
        singly = torch.stack([self.plan.decode(mean, public) for mean in few])
        try:
            together = torch.equal(self.plan.decode(few, public), singly)
        except (RuntimeError, IndexError):
            together = False
        return (
            self.plan.decode(means, public)
            if together
            else torch.stack([self.plan.decode(mean, public) for mean in means])
        )

    def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
        """The mean that a round releases for messages [m, d'] of a cohort: `copies` independent draws [n, d]."""
        total = messages.sum(0, dtype=torch.float64)
        noised = self.noised(total.repeat(copies), cohort, streams).view(copies, -1)
        return self.decode((noised / self.denominator(len(cohort))).to(torch.float32))

    def message(self, message: Tensor, client: int, copies: int, streams: Streams) -> Tensor:
        """What leaves one client, [n, d']: the noised sum over a cohort of that client alone."""
        alone = np.array([client], dtype=np.int64)
        totals = message.double().repeat(copies)
        return self.plan.release.in_sum(totals, alone, streams.at(self.t, "client noise", client)).view(copies, -1)


def resized(pipeline: Pipeline, population: int) -> Pipeline:
    """The same pipeline over another population, where the sampler is Poisson."""
    clients = replace(pipeline.plan.clients, population=population)  # type: ignore[type-var]
    return replace(pipeline, plan=replace(pipeline.plan, clients=clients))


def smaller(pipeline: Pipeline) -> Pipeline:
    """A large population at the same rate with fewer clients: what is billed is the rate, and a draw costs its size."""
    clients = pipeline.plan.clients
    if clients.population <= SMALL:
        return pipeline
    if isinstance(clients, Poisson) and clients.cap is None:
        return resized(pipeline, SMALL // 2)
    if isinstance(clients, FixedSize) and pipeline.plan.release.accepts(1):
        shared = math.gcd(clients.population, clients.cohort)
        fewer = FixedSize(clients.population // shared, clients.cohort // shared)
        return replace(pipeline, plan=replace(pipeline.plan, clients=fewer))
    return pipeline


@dataclass(frozen=True)
class Attack:
    """Encoded messages of a worst case: our client sends `sent` or, in the other world, `instead` (None: is absent)."""

    name: str
    sent: Tensor  # [d']
    instead: Tensor | None
    crowd: Tensor  # [d'], what every other client sends; the adversary knows it
    movement: float

    @property
    def moved(self) -> Tensor:
        """The difference of the two worlds, [d']."""
        return self.sent if self.instead is None else self.sent - self.instead


def directions() -> dict[str, Tensor]:
    """Raw rows by family: mass on one coordinate, in one tensor, over all tensors; and what must never get through."""
    eye, size = torch.eye(TENSORS * WIDTH), TENSORS * WIDTH
    blocks = torch.eye(TENSORS).repeat_interleave(WIDTH, dim=1)
    signs = 1.0 - 2.0 * (torch.arange(size) % 2)
    broken = torch.ones(3, size)
    broken[:, 1] = torch.tensor([math.nan, math.inf, -math.inf])
    return {
        "one coordinate": eye,
        "one tensor": blocks,
        "all tensors": torch.stack([torch.ones(size), signs, eye[::WIDTH].sum(0)]),
        "not finite": broken,
    }


def worst_messages(pipeline: Pipeline, relation: Relation, hidden: bool) -> list[Attack]:
    """Per family the row that moves the message most; families that move it clearly less than the best are dropped.

    movement = ||encode(x) - encode(-x)|| (replace) or ||encode(x)|| (zero out, add or remove), in the bound's norm.
    Where the cohort is hidden the crowd is silent or, against a denominator that follows the cohort, opposed.
    """
    found = [_worst(pipeline, relation, name, rows) for name, rows in directions().items()]
    most = max(attack.movement for attack in found)
    best = [attack for attack in found if attack.movement >= 0.99 * most]
    return best if not hidden or math.isinf(most) else [crowded for attack in best for crowded in _crowds(attack)]


def _worst(pipeline: Pipeline, relation: Relation, name: str, rows: Tensor) -> Attack:
    public = pipeline.plan.public(pipeline.t)
    scale = public.radius if math.isfinite(public.radius) else 1.0
    raw = torch.cat([rows * (scale * times) for times in SCALES])
    sent, against = pipeline.encode(raw), pipeline.encode(-raw)
    instead = {"replace_one": against, "zero_out": torch.zeros_like(sent)}.get(relation)
    bound = pipeline.plan.bound
    assert isinstance(bound, Bound)
    moved = sent.double() if instead is None else sent.double() - instead.double()
    sizes = torch.linalg.vector_norm(moved, ord=bound.norm, dim=1).nan_to_num(nan=math.inf)
    at = int(sizes.argmax())
    return Attack(
        name, sent[at], None if instead is None else instead[at], torch.zeros_like(sent[at]), float(sizes[at])
    )


def _crowds(attack: Attack) -> Iterator[Attack]:
    yield attack
    yield replace(attack, name=f"{attack.name}, crowd opposed", crowd=-attack.sent)
