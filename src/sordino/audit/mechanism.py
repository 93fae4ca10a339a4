"""The mechanism audit: is one round as private as the cost says? No data, no model, seconds.

Two worlds differ in one client (or in one record: `records`) as the cost's relation allows. The worst messages that fit
through the plan's own encode steps are summed, noised and divided by the plan's own objects many times over; whoever
tells the worlds apart better than the certificate allows has found a bug (PRIVACY.md, "Auditing, in layers", layer 1).

Guarantee: with probability `CONFIDENCE` over the audit's own coins every lower bound is below the truth, so correct
code fails at most one audit in a thousand. It can prove that a bug is there, never that none is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.composition import ADVERSARIES, Adversary, Line, Participation
from sordino.accounting.events import GaussianNoise, Relation
from sordino.audit.record_attack import Proved, audit_preparation, audit_records
from sordino.audit.tradeoff import Array, Limit, Rates, at_least_zero, choose, choose_steadily, not_finite, separation
from sordino.audit.worst_case import Attack, Found, Pipeline, audit_sequence, crowds, resized, worst_messages
from sordino.errors import UserError
from sordino.plan import Plan
from sordino.rng import Seeded, Streams

__all__ = ["CONFIDENCE", "MechanismAudit", "Pipeline", "audit_mechanism"]

CONFIDENCE = 0.999  # of all bounds of one audit together
PILOT = 10  # one trial in so many, and not these ones, goes into choosing the attack
_CHUNK, _DRAWS = 1 << 21, 1000  # numbers noised, and cohorts drawn, at once


@dataclass(frozen=True)
class MechanismAudit:
    """One adversary, one round: what an attack proved, beside what the certificate allows.

    lower_mu          Phi^-1(power) - Phi^-1(false alarms), at their Clopper-Pearson bounds
    upper_mu          the same at the certificate's limit for that rate of false alarms; for Gaussian noise, its mu
    lower_epsilon     log((power - delta) / false alarms), for the test that is best at that: assumes nothing
    gaussian_epsilon  epsilon at delta of a Gaussian release with lower_mu: what lower_mu means if noise is Gaussian
    movement          how far the worst message moved, in the bound's norm: at most 1, or 2 if replaced
    passed            both lower bounds are below their upper ones: nothing here contradicts the certificate
    """

    adversary: Adversary
    relation: Relation
    trials: int  # of each world
    delta: float
    attack: str
    movement: float
    lower_mu: float
    upper_mu: float
    lower_epsilon: float
    upper_epsilon: float
    gaussian_epsilon: float | None
    passed: bool
    examined: bool = True  # False: a part does not state what the attack needs; `attack` says what


def audit_mechanism(
    plan: Plan, *, delta: float, trials: int = 200_000, seed: int = 0, pipeline: Pipeline | None = None
) -> list[MechanismAudit]:
    """Attack one round for every adversary to whom the cost promises something; `trials` rounds of each world.

    `pipeline` is what runs (by default the plan itself); the promise is always the plan's. What is released of columns
    before the first round is attacked by itself.
    """
    if plan.prepare:
        alone, alpha = replace(plan, prepare=()), (1 - CONFIDENCE) / (8 * len(plan.prepare))
        before = [audit_preparation(plan, part, delta, trials, alpha, seed) for part in plan.prepare]
        rounds = audit_mechanism(alone, delta=delta, trials=trials, seed=seed, pipeline=pipeline)
        return [*(_of_record(found, "one unit's column; shift") for found in before), *rounds]
    if plan.release.correlated:
        return _of_sequence(plan, delta, trials, seed, pipeline or Pipeline(plan))
    cost = plan.cost(Participation(releases=1, max_participations=1))
    if cost.unit == "record":
        return [_of_record(found) for found in audit_records(plan, delta, trials, (1 - CONFIDENCE) / 8, seed)]
    lines = [cost.line(who, _weakest(plan)) for who in ADVERSARIES]  # where clients differ: the least noised
    promised = [line for line in lines if all(event.protects for event, _ in line.entries)]
    effort = _Effort(trials, delta, (1 - CONFIDENCE) / (4 * max(len(promised), 1)), count(seed << 32))
    done: dict[Line, MechanismAudit] = {}
    for line in promised:
        # where hidden coins earn the models line nothing, it claims what the cohort line does: the same attack serves
        seen = replace(line, adversary="cohort")
        claim = seen if line.adversary == "models" and seen == cost.line("cohort", _weakest(plan)) else line
        if claim not in done:  # a shuffled round draws the noise of every report, so it gets fewer trials
            reports = max(event.messages for event, _ in claim.entries)
            fewer = replace(effort, trials=max(effort.trials // reports, 1000))
            done[claim] = _audit(pipeline or Pipeline(plan), claim, fewer)
        done[line] = replace(done[claim], adversary=line.adversary)
    return [done[line] for line in promised]


def _of_sequence(plan: Plan, delta: float, trials: int, seed: int, pipeline: Pipeline) -> list[MechanismAudit]:
    """Noise that rounds share: all rounds of a sequence at once, against the cost of those rounds."""
    sequence = pipeline.sequence
    if plan.release.noise_matrix(sequence.rounds) is None:
        cost = sequence.cost
        lines = cost.line("models"), cost.line("cohort")
        return [_not_attacked(line, delta, plan.release.kind) for line in lines]
    movement = 1.0 if plan.cost().line("cohort").relation != "replace_one" else 2.0
    if plan.unit == "client":
        movement = worst_messages(pipeline, sequence.cost.line("cohort").relation, False)[0].movement
    attacked = audit_sequence(sequence, movement, delta, trials, (1 - CONFIDENCE) / 8, seed)
    words = "{} rounds at once; whitened and projected"
    return [_of_attack(one, delta, words.format(one.rounds), one.movement, False) for one in attacked]


def _of_attack(found: Found | Proved, delta: float, attack: str, movement: float, gaussian: bool) -> MechanismAudit:
    """What an attack proved, beside the certificate; `gaussian`: also as the epsilon of Gaussian noise."""
    return MechanismAudit(
        adversary=found.line.adversary,
        relation=found.line.relation,
        trials=found.trials,
        delta=delta,
        attack=attack,
        movement=movement,
        lower_mu=found.lower,
        upper_mu=found.allowed,
        lower_epsilon=found.lower_epsilon,
        upper_epsilon=found.upper_epsilon,
        gaussian_epsilon=gaussian_epsilon_at(found.lower, delta) if gaussian else None,
        passed=found.lower <= found.allowed and found.lower_epsilon <= found.upper_epsilon,
    )


def _not_attacked(line: Line, delta: float, kind: str) -> MechanismAudit:
    """A line of rounds that share noise, of which the release does not say how."""
    why = f"not examined: release {kind!r}, whose rounds share noise, states no noise_matrix"
    nothing = Proved(line, 0, delta, 0.0, math.nan, 0.0, _epsilon(line, delta))
    return replace(_of_attack(nothing, delta, why, math.nan, False), passed=False, examined=False)


def _of_record(found: Proved, attack: str = "one record; shift") -> MechanismAudit:
    """An attack on one record, in the same words."""
    most = 1.0 if found.line.relation == "add_remove" else 2.0
    mu = accountant.gaussian_mu(found.line.entries, found.line.relation)
    return _of_attack(found, found.delta, attack, most, mu is not None and found.lower > 0)


def _weakest(plan: Plan) -> int:
    """Whom the least noise protects, where clients have noise of their own."""
    own = plan.release.noise_multipliers
    return int(np.argmin(own)) if own else 0


@lru_cache(maxsize=64)
def _epsilon(line: Line, delta: float) -> float:
    return accountant.epsilon(line.entries, line.relation, delta).value


@dataclass(frozen=True)
class _Effort:
    """How many trials, at which delta, how sure each bound (four per line), and the seeds not used yet."""

    trials: int
    delta: float
    alpha: float
    seeds: Iterator[int]

    def streams(self) -> Streams:
        """Coins never used before in this audit."""
        return Seeded(next(self.seeds))


def _audit(pipeline: Pipeline, line: Line, effort: _Effort) -> MechanismAudit:
    """Choose the attack on a pilot, the tests on one half of the trials; judge them on the other half."""
    hidden = line.adversary == "models"
    attacks = worst_messages(pipeline, line.relation, hidden)
    if math.isinf(attacks[0].movement):
        return _result(line, effort, attacks[0], "any test", (math.inf, 0.0, math.inf))
    delta = max(effort.delta, 1e-9)
    limit = Limit.of(line, _epsilon(line, delta), delta)

    def share(rates: Rates) -> Array:
        return rates.share(limit)

    stages = [_Stage(each, line, effort) for each in (crowds(pipeline) if hidden else [pipeline])]
    stage, attack = _best(stages, attacks, share, effort)
    there, gone = stage.features(attack, stage.worlds(effort.trials, attack.instead is None))
    if not_finite(there, gone):
        return _result(line, effort, attack, "what is released is no number", (math.inf, 0.0, math.inf))
    half = effort.trials // 2
    guess = choose_steadily(there[:half], gone[:half], share, effort.alpha)
    sharp = choose_steadily(there[:half], gone[:half], lambda rates: rates.epsilon(effort.delta), effort.alpha)
    rates, tail = (test.rates(there[half:], gone[half:], effort.alpha) for test in (guess, sharp))
    upper = float(separation(limit.most(rates.false), rates.false)[0])
    figures = at_least_zero(rates.mu()[0]), upper, at_least_zero(tail.epsilon(effort.delta)[0])
    return _result(line, effort, attack, guess.name, figures)


def _best(
    stages: list[_Stage], attacks: list[Attack], worth: Callable[[Rates], Array], effort: _Effort
) -> tuple[_Stage, Attack]:
    """The attack that did best on a pilot of its own trials."""
    tried: list[tuple[float, _Stage, Attack]] = []
    for stage in stages:
        few = stage.worlds(max(effort.trials // PILOT, min(4000, effort.trials)), attacks[0].instead is None)
        pilots = [choose(*stage.features(attack, few), worth, effort.alpha).worth for attack in attacks]
        best = int(np.argmax(pilots))
        tried.append((pilots[best], stage, attacks[best]))
    return max(tried, key=lambda one: one[0])[1:]


def _result(
    line: Line, effort: _Effort, attack: Attack, test: str, figures: tuple[float, float, float]
) -> MechanismAudit:
    found = Proved(line, effort.trials, effort.delta, *figures, _epsilon(line, effort.delta))
    gaussian = accountant.gaussian_mu(line.entries, line.relation) is not None and 0 < found.lower < math.inf
    return _of_attack(found, effort.delta, f"{attack.name}; {test}", attack.movement, gaussian)


def gaussian_epsilon_at(mu: float, delta: float) -> float:
    """epsilon at delta of a Gaussian release with this mu."""
    return accountant.bound(((GaussianNoise(1 / mu), 1),), "zero_out", delta).value


@codec.hides_values
@dataclass(frozen=True)
class _World:
    """Trials of one world: how many clients came, and whether ours was among them."""

    sizes: NDArray[np.int64]
    present: NDArray[np.bool_]


class _Stage:
    """The worlds of one line of the cost, through its adversary's eyes."""

    def __init__(self, pipeline: Pipeline, line: Line, effort: _Effort) -> None:
        self.pipeline, self.line, self.effort = pipeline, line, effort
        # Whom to attack: the least noised where clients differ, else one that a first draw of this round picked. With
        # secret coins a first draw says nothing of the next ones; with public coins they all are that draw.
        if pipeline.plan.release.noise_multipliers:
            self.client = _weakest(pipeline.plan)
        else:
            drawn = pipeline.cohort(effort.streams().at(pipeline.t, "cohort"))
            self.client = int(drawn[0]) if len(drawn) else 0

    def worlds(self, trials: int, absent: bool) -> tuple[_World, _World]:
        """With our client; and without it (`absent`) or, the same cohorts again, with another message of it.

        Hidden cohorts are drawn anew in every trial. Of seen ones the worst is the smallest that is accepted, since the
        others may drop out or tell the adversary their noise.
        """
        plan = self.pipeline.plan
        if self.line.adversary == "models":
            there = self._draws(self.pipeline, trials)
        else:
            sizes = (k for k in range(1, plan.clients.population) if plan.release.accepts(k))
            there = _World(np.full(trials, next(sizes, plan.clients.population)), np.ones(trials, dtype=np.bool_))
        return there, self._without(there) if absent else there

    def _without(self, there: _World) -> _World:
        """Our client was never in the population. Independent coins: the others' cohort stays; a cap: drawn anew."""
        clients, nobody = self.pipeline.plan.clients, np.zeros_like(there.present)
        without, law = _World(there.sizes - there.present, nobody), clients.law()
        if self.line.adversary != "models" or (law is not None and law.independent and law.cap is None):
            return without
        try:
            return _World(self._draws(resized(self.pipeline, clients.population - 1), len(nobody)).sizes, nobody)
        except UserError:  # a sampler that cannot do with one client less: the others are drawn as before
            return without

    def _draws(self, pipeline: Pipeline, trials: int) -> _World:
        """Successive draws from one stream: independent, as those of different rounds are."""
        rng = self.effort.streams().at(pipeline.t, "cohort")
        sizes, present = np.empty(trials, dtype=np.int64), np.zeros(trials, dtype=np.bool_)
        for part in np.array_split(np.arange(trials), math.ceil(trials / _DRAWS)):
            drawn = [pipeline.cohort(rng) for _ in part]
            sizes[part] = [len(cohort) for cohort in drawn]
            present[np.repeat(part, sizes[part])[np.concatenate(drawn) == self.client]] = True
        return _World(sizes, present)

    def features(self, attack: Attack, worlds: tuple[_World, _World]) -> tuple[Array, Array]:
        """Both worlds: (shift along the moved direction, spread across it) of what is seen, [n, 2] each."""
        instead = attack.sent if attack.instead is None else attack.instead
        return self._look(worlds[0], attack, attack.sent), self._look(worlds[1], attack, instead)

    def _look(self, world: _World, attack: Attack, sent: Tensor) -> Array:
        """Trials with equal cohort sizes, and ours in or out alike, have equal messages: they are noised together."""
        seen, step = np.empty((len(world.sizes), 2)), max(1, _CHUNK // len(attack.sent))
        kinds = 2 * world.sizes + world.present
        for kind in np.unique(kinds).tolist():
            where, size, present = np.flatnonzero(kinds == kind), kind // 2, bool(kind % 2)
            for part in np.array_split(where, math.ceil(len(where) / step)):
                seen[part] = self._trials(sent, attack, size, present, len(part))
        return seen

    def _trials(self, sent: Tensor, attack: Attack, size: int, present: bool, copies: int) -> Array:
        pipeline, streams = self.pipeline, self.effort.streams()
        if self.line.adversary == "messages":
            return _features(pipeline.message(sent, self.client, copies, streams), attack.moved)
        messages = torch.cat([sent.expand(int(present), -1), attack.crowd.expand(size - present, -1)])
        others = np.setdiff1d(np.arange(size + 1), [self.client])[: size - present]
        cohort = np.concatenate([[self.client] if present else [], others]).astype(np.int64)  # ours first, if present
        return _features(pipeline.released(messages, cohort, copies, streams), attack.moved)


def _features(seen: Tensor, moved: Tensor) -> Array:
    """(<x, w>, root mean square of x - <x, w> w) for w = moved / ||moved||: all that isotropic noise leaves to know."""
    x, w = seen.double(), moved.double() / torch.linalg.vector_norm(moved.double())
    shift = x @ w
    rest = (x.square().sum(1) - shift.square()).clamp(min=0.0) / max(x.shape[1] - 1, 1)
    return torch.stack([shift, rest.sqrt() + 1e-30], dim=1).numpy()
