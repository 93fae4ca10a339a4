"""One round made of a plan's own objects, and the worst messages that fit through it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import Bound
from sordino.accounting.events import Relation
from sordino.audit.sequence import Sequence
from sordino.engines.base import Collected
from sordino.loop import noised_mean
from sordino.parts.encoding import Public
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Streams

TENSORS, WIDTH = 4, 12  # the audited message: so many tensors of so many entries
SCALES = (1 - 1e-6, 1e4, 1e30)  # of updates, in clip norms: just inside, far out, and where float32 squares overflow


@dataclass(frozen=True)
class Pipeline:
    """One round between the clients' updates and what is seen of it, by the objects of `plan` and the loop's own code.

    The seam of the audit: a test subclasses it to break one step and sees the audit fail. What is seen is the noised
    mean as it is released, still encoded: decoding and post-processing are public functions of it.
    `copies` independent rounds are noised in one call, as one long vector: every release draws its noise independently
    per coordinate, so n copies of d coordinates are n*d coordinates, equal in law to n calls.
    """

    plan: Plan
    t: int = 0

    @property
    def public(self) -> Public:
        """What everybody knows; an update on public records, where a mask asks for one, is anything."""
        size = TENSORS * WIDTH
        known = self.plan.public(self.t, size, update=lambda: torch.arange(1.0, size + 1))
        return replace(known, tensors=(WIDTH,) * TENSORS)

    @property
    def sequence(self) -> Sequence:
        """Several rounds, where they share their noise."""
        return Sequence(self.plan)

    def cohort(self, rng: np.random.Generator) -> Cohort:
        """Who takes part."""
        return self.plan.clients.draw(self.t, rng)

    def encode(self, rows: Tensor) -> Tensor:
        """On the clients: updates [m, d] -> messages [m, d']."""
        slopes, public = torch.ones_like(rows), self.public
        for step in self.plan.encode:
            rows = step.encode(rows, public, slopes)
        return rows

    def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
        """The noised mean of messages [m, d'] of a cohort: `copies` independent draws [n, d']."""
        totals = messages.sum(0, dtype=torch.float64).repeat(copies)
        noised, _ = noised_mean(self.plan, Collected(totals, len(cohort)), cohort, streams, self.t, {})
        return noised.view(copies, -1)

    def message(self, message: Tensor, client: int, copies: int, streams: Streams) -> Tensor:
        """What leaves one client, [n, d']: the noised sum over a cohort of that client alone."""
        alone = np.array([client], dtype=np.int64)
        totals = message.double().repeat(copies)
        return self.plan.release.in_sum(totals, alone, streams.at(self.t, "client noise", client)).view(copies, -1)


def resized(pipeline: Pipeline, population: int) -> Pipeline:
    """The same pipeline over another population, where the sampler is Poisson."""
    clients = replace(pipeline.plan.clients, population=population)  # type: ignore[type-var]
    return replace(pipeline, plan=replace(pipeline.plan, clients=clients))


def crowds(pipeline: Pipeline) -> list[Pipeline]:
    """The same round over the populations that hide one client least, where the release works with their cohorts."""
    plan = pipeline.plan
    few = [few for few in plan.clients.worst_populations() if few.size is None or plan.release.accepts(few.size)]
    return [replace(pipeline, plan=replace(plan, clients=clients)) for clients in few] or [pipeline]


@codec.hides_values
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
    """Updates by family: mass on one coordinate, mass over all tensors, and what must never get through."""
    eye, size = torch.eye(TENSORS * WIDTH), TENSORS * WIDTH
    signs = 1.0 - 2.0 * (torch.arange(size) % 2)
    broken = torch.ones(3, size)
    broken[:, 1] = torch.tensor([math.nan, math.inf, -math.inf])
    return {
        "one coordinate": eye,
        "all tensors": torch.stack([torch.ones(size), signs, eye[::WIDTH].sum(0)]),
        "not finite": broken,
    }


def worst_messages(pipeline: Pipeline, relation: Relation, hidden: bool) -> list[Attack]:
    """Per family the row that moves the message most; families that move it clearly less than the best are dropped.

    movement = ||encode(x) - encode(-cx)|| (replace) or ||encode(x)|| (zero out, add or remove), in the bound's norm.
    Where the cohort is hidden the crowd is silent or, against a denominator that follows the cohort, opposed.
    """
    found = [_worst(pipeline, relation, name, rows) for name, rows in directions().items()]
    most = max(attack.movement for attack in found)
    best = [attack for attack in found if attack.movement >= 0.99 * most]
    return best if not hidden or math.isinf(most) else [crowded for attack in best for crowded in _crowds(attack)]


def _worst(pipeline: Pipeline, relation: Relation, name: str, rows: Tensor) -> Attack:
    """The best of the family's rows at all scales; if replaced, by its opposite at any scale."""
    bound, clip_norm = pipeline.plan.bound, pipeline.public.clip_norm
    assert isinstance(bound, Bound)
    scales = [times * (clip_norm if math.isfinite(clip_norm) else 1.0) for times in SCALES]
    lengths = torch.linalg.vector_norm(rows, ord=bound.norm, dim=1, keepdim=True)
    rows = rows / torch.where(lengths.isfinite(), lengths, 1.0)
    sent = torch.stack([pipeline.encode(rows * scale) for scale in scales])  # [scales, rows, d']
    instead = torch.stack([pipeline.encode(-rows * scale) for scale in scales])
    if relation != "replace_one":
        instead = torch.zeros_like(sent[:1])
    moved = sent[:, None].double() - instead[None].double()  # [scales, scales or 1, rows, d']
    sizes = torch.linalg.vector_norm(moved, ord=bound.norm, dim=-1).nan_to_num(nan=math.inf)
    mine, other, row = np.unravel_index(int(sizes.argmax()), sizes.shape)
    movement, first, second = float(sizes.max()), sent[mine, row], instead[other, row]
    return Attack(name, first, None if relation == "add_remove" else second, torch.zeros_like(first), movement)


def _crowds(attack: Attack) -> Iterator[Attack]:
    yield attack
    yield replace(attack, name=f"{attack.name}, crowd opposed", crowd=-attack.sent)
