"""One round made of a plan's own objects, the worst messages that fit through it, and attacks on several rounds.

Where rounds share their noise, `audit_sequence` makes the best linear test of the whole sequence. One unit moves the
sums y of its rounds by x; the rounds' noise has covariance L L^T, so L^-1 y is L^-1 x in white noise, and
<L^-1 x, L^-1 y> / ||L^-1 x||  is the likelihood ratio. It separates the worlds by  movement * ||C x|| / z, which the
sensitivity of the cost bounds over all patterns of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.linalg import solve_triangular
from torch import Tensor

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.bounds import Bound
from sordino.accounting.composition import Cost, Line, Participation
from sordino.accounting.events import Relation
from sordino.audit.tradeoff import Array, Limit, Rates, at_least_zero, not_finite, separation, thresholds
from sordino.engines.base import Collected
from sordino.loop import noised_mean
from sordino.parts.encoding import Public
from sordino.parts.releases import Release
from sordino.parts.samplers import Cohort, Sampler, separation_guard
from sordino.plan import Plan
from sordino.rng import Seeded, Streams

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
    if not hidden or math.isinf(most):
        return best
    opposed = (replace(one, name=f"{one.name}, crowd opposed", crowd=-one.sent) for one in best)
    return [attack for pair in zip(best, opposed, strict=True) for attack in pair]


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


LONGEST, FEW = 64, 20_000  # rounds of a sequence; trials where every one draws coins of its own


@dataclass(frozen=True)
class Found:
    """One line of the cost of so many rounds, and what the attack proved of it."""

    line: Line
    trials: int
    rounds: int
    movement: float
    lower: float
    allowed: float
    lower_epsilon: float
    upper_epsilon: float


def whitening(release: Release, rounds: int) -> Array | None:
    """L^-1, where L L^T is the covariance of the rounds' noise for Z of variance 1; of a Toeplitz strategy, C.

    None where the release does not state how its rounds share their noise.
    """
    made = release.noise_matrix(rounds)
    if made is None:
        return None
    return np.asarray(solve_triangular(np.linalg.cholesky(made @ made.T), np.eye(rounds), lower=True))


@dataclass(frozen=True)
class Sequence:
    """The first rounds of a plan, between the sums and what is released of them: the seam of this audit."""

    plan: Plan

    @property
    def rounds(self) -> int:
        """Some turns of one client, where they fit."""
        reads = self.plan.local.reads
        apart = max(self.plan.clients.min_separation or 1, 1 if reads is None else reads.min_separation(0) or 1)
        return min(self.plan.rounds, LONGEST, max(3 * apart, 8))

    @property
    def cost(self) -> Cost:
        """Of these rounds alone."""
        return self.plan.cost(Participation.planned(self.plan.clients, self.rounds))

    def drawn(self, most: int) -> Cost:
        """Of these rounds, to one who sees that a client was in `most` of them."""
        return self.plan.cost(Participation(self.rounds, most))

    def patterns(self, streams: Streams) -> Array:
        """Who comes to which round, or which records of silo 0 are read: [rounds, units], as in a run."""
        clients, reads = self.plan.clients, self.plan.local.reads
        rest = separation_guard(clients, self.plan.release, self.plan.rounds, streams, 0)
        found = np.zeros((self.rounds, clients.population if reads is None else reads.size(0)))
        for t in range(self.rounds):
            drawn = clients.draw(t, streams.at(t, "cohort"))
            came = drawn if rest is None else rest.admit(t, drawn)
            if reads is None:
                found[t, came] = 1.0
            elif 0 in came:
                found[t, reads.draw(t, 0, reads.size(0), streams.at(t, "batches", 0))] = 1.0
        return found

    def released(self, sums: Array, streams: Streams) -> Array:
        """Sums [rounds, n] of n independent runs, noised by the loop's own code, round by round."""
        count = self.plan.clients.expected
        memory, seen, nobody = self.plan.release.init(sums.shape[1]), [], np.zeros(0, dtype=np.int64)
        for t, total in enumerate(sums):
            kept = Collected(torch.from_numpy(total), 0)
            mean, memory = noised_mean(self.plan, kept, nobody, streams, t, memory)
            seen.append(mean.double().numpy() * count)
        return np.stack(seen)


def audit_sequence(
    sequence: Sequence, movement: float, delta: float, trials: int, alpha: float, seed: int
) -> Iterator[Found]:
    """Both worlds, for one who sees models and one who sees cohorts too; each bound fails with probability alpha."""
    plan, seeds = sequence.plan, iter(range(seed << 32, (seed + 1) << 32))
    white = whitening(plan.release, sequence.rounds)
    if white is None:
        return
    there = sequence.patterns(Seeded(next(seeds)))
    worst = there[:, int(np.argmax(np.linalg.norm(white @ there, axis=0)))]
    cohort = sequence.drawn(int(worst.sum())).line("cohort")
    for line in (sequence.cost.line("models"), cohort):
        amplified = line.entries != cohort.entries
        count = min(trials, FEW) if amplified else trials
        x = _coins(plan.clients, sequence.rounds, count, Seeded(next(seeds))) if amplified else worst[:, None]
        mark = white @ (x.max(axis=1))
        scores = [
            (mark / np.linalg.norm(mark)) @ white @ sequence.released(sums, Seeded(next(seeds)))
            for sums in (movement * x + np.zeros((1, count)), np.zeros((sequence.rounds, count)))
        ]
        yield _compare(line, scores[0], scores[1], delta, alpha, sequence.rounds, movement)


def _coins(clients: Sampler, rounds: int, count: int, streams: Streams) -> Array:
    """Whether client 0 came, [rounds, n], by the sampler's own coins; of groups one member is enough."""
    few = clients.for_one_client()
    found, law = np.zeros((rounds, count)), few.law()
    for t in (t for t in range(rounds) if law is None or law.inclusions(t)[0] > 0):
        rng = streams.at(t, "cohort")
        found[t] = [float(len(cohort) > 0 and cohort[0] == 0) for cohort in (few.draw(t, rng) for _ in range(count))]
    return found


def _compare(line: Line, there: Array, gone: Array, delta: float, alpha: float, rounds: int, movement: float) -> Found:
    """Cuts are chosen on one half of the trials and judged on the other."""
    upper_epsilon = accountant.epsilon(line.entries, line.relation, delta).value
    if not_finite(there, gone):
        return Found(line, len(there), rounds, movement, math.inf, 0.0, math.inf, upper_epsilon)
    limit, half = Limit.of(line, upper_epsilon, delta), len(there) // 2
    cuts = thresholds(there[:half], gone[:half])
    pilot = Rates.of(there[:half], gone[:half], cuts, alpha)
    best = [cuts[[int(np.argmax(worth))]] for worth in (pilot.share(limit), pilot.epsilon(delta))]
    rates, tail = (Rates.of(there[half:], gone[half:], cut, alpha) for cut in best)
    allowed = float(separation(limit.most(rates.false), rates.false)[0])
    lower, epsilon = at_least_zero(rates.mu()[0]), at_least_zero(tail.epsilon(delta)[0])
    return Found(line, len(there), rounds, movement, lower, allowed, epsilon, upper_epsilon)
