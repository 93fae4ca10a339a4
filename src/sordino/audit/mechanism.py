"""Mechanism audit (`sordino audit --mechanism`): attacks on one round, compared with its cost; it needs no data.

Two data sets differ in one client, or in one record (`attacks`), as the cost's relation allows. The worst messages that
the plan's encode steps can produce are summed, noised and divided many times by the plan's own objects. A test that
separates the two data sets better than the certificate allows proves a bug (PRIVACY.md, "Auditing, in layers").

Guarantee: with probability `CONFIDENCE` over the audit's randomness all lower bounds are correct, so that correct code
fails at most one audit in a thousand. The audit can prove that there is a bug, never that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import Bound
from sordino.accounting.composition import ADVERSARIES, Line
from sordino.accounting.events import Relation
from sordino.audit import attacks
from sordino.audit.attacks import MechanismAudit, Sequence, weakest_client
from sordino.audit.tradeoff import Array, Rates, choose, choose_steadily, not_finite
from sordino.engines.base import Collected
from sordino.errors import UserError
from sordino.loop import noised_mean
from sordino.parts.encoding import Public
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Seeded, Streams

CONFIDENCE = 0.999  # of all bounds of one audit together
PILOT = 10  # this fraction 1 / PILOT of the trials is drawn in addition, to choose the attack
TENSORS, WIDTH = 4, 12  # tensors of the audited message, and entries of each
SCALES = (1 - 1e-6, 1e4, 1e30)  # of updates, in clip norms: just inside, far out, and where float32 squares overflow
_CHUNK, _DRAWS = 1 << 21, 1000  # numbers noised at once, and cohorts drawn at once


def audit_mechanism(
    plan: Plan, *, delta: float, trials: int = 200_000, seed: int = 0, pipeline: Pipeline | None = None
) -> list[MechanismAudit]:
    """Attack one round as each adversary that has a privacy cost, with `trials` rounds of each data set.

    `pipeline` is the attacked code, by default that of the plan; the claimed cost is always the plan's. Histograms that
    are released before round 1 are attacked separately, and rounds with correlated noise are attacked together.
    """
    alpha = (1 - CONFIDENCE) / 8
    if plan.prepare:
        own, alone = alpha / len(plan.prepare), replace(plan, prepare=())
        columns = [attacks.audit_preparation(plan, part, delta, trials, own, seed) for part in plan.prepare]
        return [*columns, *audit_mechanism(alone, delta=delta, trials=trials, seed=seed, pipeline=pipeline)]
    pipeline = pipeline or Pipeline(plan)
    if plan.release.correlated:
        return _audit_sequence(plan, delta, trials, seed, pipeline)
    cost = plan.cost(attacks.ONE_ROUND)
    if cost.unit == "record":
        return attacks.audit_records(plan, delta, trials, alpha, seed)
    lines = [cost.line(who, weakest_client(plan)) for who in ADVERSARIES]
    promised = [line for line in lines if all(event.protects for event, _ in line.entries)]
    alpha, seeds = (1 - CONFIDENCE) / (4 * max(len(promised), 1)), count(seed << 32)  # four bounds for each line
    done: dict[Line, MechanismAudit] = {}
    for line in promised:
        # without amplification the models line claims the same as the cohort line: one attack serves both
        seen = replace(line, adversary="cohort")
        claim = seen if line.adversary == "models" and seen == cost.line("cohort", weakest_client(plan)) else line
        if claim not in done:  # a trial of a shuffled round draws the noise of every message
            messages = max(event.messages for event, _ in claim.entries)
            done[claim] = _audit_line(pipeline, claim, max(trials // messages, 1000), delta, alpha, seeds)
        done[line] = replace(done[claim], adversary=line.adversary)
    return [done[line] for line in promised]


def _audit_sequence(plan: Plan, delta: float, trials: int, seed: int, pipeline: Pipeline) -> list[MechanismAudit]:
    sequence = Sequence(pipeline.plan)
    white, cost = attacks.whitening(plan.release, sequence.rounds), sequence.cost
    if white is None:
        why = f"not examined: release {plan.release.kind!r}, whose rounds share noise, states no noise_matrix"
        nothing = (0.0, math.nan, 0.0)
        found = [MechanismAudit.of(cost.line(who), 0, delta, why, math.nan, nothing) for who in ("models", "cohort")]
        return [replace(one, passed=False, examined=False) for one in found]
    relation = plan.cost().line("cohort").relation
    movement = 2.0 if relation == "replace_one" else 1.0
    if plan.unit == "client":
        movement = worst_messages(pipeline, cost.line("cohort").relation, False)[0].movement
    return attacks.audit_sequence(sequence, white, movement, delta, trials, (1 - CONFIDENCE) / 8, seed)


# ---- one round, and its worst messages
@dataclass(frozen=True)
class Pipeline:
    """Round from the clients' updates to the released mean, by the plan's parts and the loop's own code.

    Tests override one method to sabotage it. The released mean is still encoded, since decoding and post-processing are
    public functions of it. `copies` independent rounds are noised in one call as one long vector: releases draw their
    noise independently per coordinate, so this equals `copies` calls in distribution.
    """

    plan: Plan
    t: int = 0

    @property
    def public(self) -> Public:
        """Public values of the round. Masks that need an update on public records get an arbitrary vector."""
        size = TENSORS * WIDTH
        known = self.plan.public(self.t, size, update=lambda: torch.arange(1.0, size + 1))
        return replace(known, tensors=(WIDTH,) * TENSORS)

    def cohort(self, rng: np.random.Generator) -> Cohort:
        return self.plan.clients.draw(self.t, rng)

    def encode(self, rows: Tensor) -> Tensor:
        """Encode updates [m, d] into messages [m, d'] by the plan's encode steps."""
        slopes, public = torch.ones_like(rows), self.public
        for step in self.plan.encode:
            rows = step.encode(rows, public, slopes)
        return rows

    def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
        """Return `copies` independent draws [n, d'] of the noised mean of a cohort's messages [m, d']."""
        totals = messages.sum(0, dtype=torch.float64).repeat(copies)
        noised, _ = noised_mean(self.plan, Collected(totals, len(cohort)), cohort, streams, self.t, {})
        return noised.view(copies, -1)

    def message(self, message: Tensor, client: int, copies: int, streams: Streams) -> Tensor:
        """Return `copies` independent draws [n, d'] of one client's noised message."""
        alone = np.array([client], dtype=np.int64)
        totals = message.double().repeat(copies)
        return self.plan.release.in_sum(totals, alone, streams.at(self.t, "client noise", client)).view(copies, -1)


@codec.hides_values
@dataclass(frozen=True)
class Attack:
    """Messages of the attacked client: `sent` in one data set, `instead` in the neighbouring data set."""

    name: str
    sent: Tensor  # [d']
    instead: Tensor | None  # [d'], or None where the client is absent
    crowd: Tensor  # [d'], what every other client sends; the adversary knows it
    movement: float

    @property
    def moved(self) -> Tensor:
        """Difference of the client's two messages, [d']."""
        return self.sent if self.instead is None else self.sent - self.instead


def worst_messages(pipeline: Pipeline, relation: Relation, hidden: bool) -> list[Attack]:
    """Return the attacks with the largest movement, one for each family of updates that is within 1% of the best.

    The movement of an update x is ||encode(x) - encode(-c x)|| under replace-one, where c is a scale, and ||encode(x)||
    under zero-out and add-or-remove, in the norm of the message's bound. If the cohort is hidden, all other clients
    send zero or, in a further attack, the opposite message, which reveals a denominator that depends on the cohort.
    """
    eye, size = torch.eye(TENSORS * WIDTH), TENSORS * WIDTH
    signs = 1.0 - 2.0 * (torch.arange(size) % 2)
    broken = torch.ones(3, size)
    broken[:, 1] = torch.tensor([math.nan, math.inf, -math.inf])
    spread = torch.stack([torch.ones(size), signs, eye[::WIDTH].sum(0)])
    families = {"one coordinate": eye, "all tensors": spread, "not finite": broken}
    found = [_worst_message(pipeline, relation, name, rows) for name, rows in families.items()]
    most = max(attack.movement for attack in found)
    best = [attack for attack in found if attack.movement >= 0.99 * most]
    if not hidden or math.isinf(most):
        return best
    opposed = (replace(one, name=f"{one.name}, crowd opposed", crowd=-one.sent) for one in best)
    return [attack for pair in zip(best, opposed, strict=True) for attack in pair]


def _worst_message(pipeline: Pipeline, relation: Relation, name: str, rows: Tensor) -> Attack:
    """Return the attack with the largest movement over all updates `rows` * scale."""
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


# ---- attack of one adversary
def _audit_line(
    pipeline: Pipeline, line: Line, trials: int, delta: float, alpha: float, seeds: Iterator[int]
) -> MechanismAudit:
    """Attack as one adversary: a pilot chooses the messages, half of the trials the tests, and the rest the bounds."""
    hidden = line.adversary == "models"
    messages = worst_messages(pipeline, line.relation, hidden)
    absent = messages[0].instead is None

    def result(attack: Attack, test: str, bounds: tuple[float, float, float]) -> MechanismAudit:
        name = f"{attack.name}; {test}"
        return MechanismAudit.of(line, trials, delta, name, attack.movement, bounds)

    if math.isinf(messages[0].movement):
        return result(messages[0], "any test", attacks.UNBOUNDED)
    limit = attacks.certified_limit(line, delta)

    def share(rates: Rates) -> Array:
        return rates.share(limit)

    plan, pipelines = pipeline.plan, [pipeline]
    if hidden:  # over the populations that hide one client least, where the release accepts their cohorts
        few = [few for few in plan.clients.worst_populations() if few.size is None or plan.release.accepts(few.size)]
        pipelines = [replace(pipeline, plan=replace(plan, clients=clients)) for clients in few] or pipelines
    best: tuple[float, _Stage, Attack] | None = None
    for each in [_Stage(each, line, seeds) for each in pipelines]:
        pilot = each.trials(max(trials // PILOT, min(4000, trials)), absent)
        worths = [choose(*each.features(attack, pilot), share, alpha).worth for attack in messages]
        place = int(np.argmax(worths))
        if best is None or worths[place] > best[0]:
            best = worths[place], each, messages[place]
    assert best is not None
    _, stage, attack = best
    there, gone = stage.features(attack, stage.trials(trials, absent))
    if not_finite(there, gone):
        return result(attack, "the release has NaN or infinity", attacks.UNBOUNDED)
    half = trials // 2
    guess = choose_steadily(there[:half], gone[:half], share, alpha)
    sharp = choose_steadily(there[:half], gone[:half], lambda rates: rates.epsilon(delta), alpha)
    rates, tail = (test.rates(there[half:], gone[half:], alpha) for test in (guess, sharp))
    return result(attack, guess.name, attacks.proved_bounds(rates, tail, limit, delta))


@codec.hides_values
@dataclass(frozen=True)
class _Cohorts:
    """Cohorts of all trials with one data set: their sizes, and whether the attacked client is in each."""

    sizes: NDArray[np.int64]
    present: NDArray[np.bool_]


class _Stage:
    """Simulator of rounds that returns two features of what one adversary observes."""

    def __init__(self, pipeline: Pipeline, line: Line, seeds: Iterator[int]) -> None:
        self.pipeline, self.line, self.seeds = pipeline, line, seeds
        # The attacked client has the least noise or, where noise is equal, is in a first draw of this round: with
        # secret sampling that draw says nothing of the next ones; with public sampling all draws are that one.
        self.client = weakest_client(pipeline.plan)
        if not pipeline.plan.release.noise_multipliers:
            drawn = pipeline.cohort(Seeded(next(seeds)).at(pipeline.t, "cohort"))
            self.client = int(drawn[0]) if len(drawn) else 0

    def trials(self, trials: int, absent: bool) -> tuple[_Cohorts, _Cohorts]:
        """Return the cohorts of both data sets; they differ if the attacked client is `absent` in the second one.

        Hidden cohorts are drawn anew in every trial. A visible cohort is the smallest one that the release accepts,
        since all other clients may drop out or reveal their noise.
        """
        plan = self.pipeline.plan
        if self.line.adversary == "models":
            there = self._draw(self.pipeline, trials)
        else:
            sizes = (k for k in range(1, plan.clients.population) if plan.release.accepts(k))
            there = _Cohorts(np.full(trials, next(sizes, plan.clients.population)), np.ones(trials, dtype=np.bool_))
        return there, self._without(there) if absent else there

    def _without(self, there: _Cohorts) -> _Cohorts:
        """Return cohorts without the attacked client: with the same other clients if these are drawn independently."""
        plan, nobody = self.pipeline.plan, np.zeros_like(there.present)
        without, law = _Cohorts(there.sizes - there.present, nobody), plan.clients.law()
        if self.line.adversary != "models" or (law is not None and law.independent and law.cap is None):
            return without
        try:
            clients = replace(plan.clients, population=plan.clients.population - 1)  # type: ignore[type-var]
            smaller = replace(self.pipeline, plan=replace(plan, clients=clients))
            return _Cohorts(self._draw(smaller, len(nobody)).sizes, nobody)
        except UserError:  # a sampler that refuses one client less: the others are drawn as before
            return without

    def _draw(self, pipeline: Pipeline, trials: int) -> _Cohorts:
        rng = Seeded(next(self.seeds)).at(pipeline.t, "cohort")
        sizes, present = np.empty(trials, dtype=np.int64), np.zeros(trials, dtype=np.bool_)
        for part in np.array_split(np.arange(trials), math.ceil(trials / _DRAWS)):
            drawn = [pipeline.cohort(rng) for _ in part]
            sizes[part] = [len(cohort) for cohort in drawn]
            present[np.repeat(part, sizes[part])[np.concatenate(drawn) == self.client]] = True
        return _Cohorts(sizes, present)

    def features(self, attack: Attack, both: tuple[_Cohorts, _Cohorts]) -> tuple[Array, Array]:
        """Return two features of each trial's release, [n, 2] for each data set.

        They are the shift along the direction in which the data sets differ, and the spread across it.
        """
        instead = attack.sent if attack.instead is None else attack.instead
        return self._features(both[0], attack, attack.sent), self._features(both[1], attack, instead)

    def _features(self, cohorts: _Cohorts, attack: Attack, sent: Tensor) -> Array:
        """Return the features [n, 2] of one data set; trials with equal sums are noised together."""
        seen, step = np.empty((len(cohorts.sizes), 2)), max(1, _CHUNK // len(attack.sent))
        w = attack.moved.double() / torch.linalg.vector_norm(attack.moved.double())
        kinds = 2 * cohorts.sizes + cohorts.present
        for kind in np.unique(kinds).tolist():
            where, size, present = np.flatnonzero(kinds == kind), kind // 2, bool(kind % 2)
            for part in np.array_split(where, math.ceil(len(where) / step)):
                streams = Seeded(next(self.seeds))
                if self.line.adversary == "messages":
                    x = self.pipeline.message(sent, self.client, len(part), streams).double()
                else:
                    messages = torch.cat([sent.expand(int(present), -1), attack.crowd.expand(size - present, -1)])
                    others = np.setdiff1d(np.arange(size + 1), [self.client])[: size - present]
                    cohort = np.concatenate([[self.client] if present else [], others]).astype(np.int64)
                    x = self.pipeline.released(messages, cohort, len(part), streams).double()
                shift = x @ w
                rest = (x.square().sum(1) - shift.square()).clamp(min=0.0) / max(x.shape[1] - 1, 1)
                seen[part] = torch.stack([shift, rest.sqrt() + 1e-30], dim=1).numpy()
        return seen
