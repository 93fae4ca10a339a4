"""`Plan`, an algorithm as one frozen value, and `State`, the checkpoint between two rounds.

Recipes and configuration files build a plan; the loop runs it and accounting computes its cost, both from this value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import AlreadyPrivate, Bound, Unit
from sordino.accounting.composition import (
    Cost,
    Participation,
    client_cost,
    reads_of,
    record_cost,
    record_patterns,
    with_preparations,
)
from sordino.accounting.events import has_bound, no_bound
from sordino.accounting.sensitivity import Patterns
from sordino.codec import check_parts, digest
from sordino.errors import PlanError, brief_repr
from sordino.parts.encoding import Clip, Noised, Postprocess, Public, Step
from sordino.parts.local_solvers import LocalSolver
from sordino.parts.mechanisms import Preparation
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.releases import Release
from sordino.parts.samplers import Sampler
from sordino.parts.schedules import Schedule, at, finite, positive
from sordino.parts.server_optimizers import Memory, ServerOptimizer
from sordino.parts.sparsify import PublicMask

LONGEST = 10**9  # rounds
BROADCAST = "broadcast."  # in `State.public_state`: what the local solvers of the next round receive
PREPARED = "prepared."  # there too: noised histograms of columns, released before the first round
PASS_KEY = "pass key"  # in `State.secret_state`: of the random allocation of the present pass
NOISE = "noise."  # in `State.secret_state`: what the release remembers of its noise


class _Cache:
    __slots__ = ("_forecast",)
    _forecast: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(_Cache):
    """A federated algorithm and its privacy mechanism, composed of parts.

    `rounds` times: draw clients, solve locally, encode, release the noised sum, decode, post-process, step.

    A plan that could not be certified cannot be built: `PlanError` names the broken rule. A noise strategy that is
    optimised for the rounds, the participation and the server of a plan gets its coefficients from `plan.fitted()`;
    without them the plan has no cost and does not run.
    """

    rounds: int
    clients: Sampler
    local: LocalSolver
    encode: tuple[Step, ...] = ()
    release: Release
    postprocess: tuple[Postprocess, ...] = ()
    server: ServerOptimizer
    prepare: tuple[Preparation, ...] = ()  # what is released of columns before the first round

    def __post_init__(self) -> None:
        check_parts(self, "plan")
        if not 1 <= self.rounds <= LONGEST:
            needed = f"at least 1, and at most {LONGEST:,}"
            raise PlanError("rounds", f"rounds = {brief_repr(self.rounds)}", needed, "change rounds")
        self._check_schedules()
        self.local.check_rounds(self.rounds)
        self.release.check(self.bounds[-1], self.clients, self.local.reads)
        shares = self.release.correlated and not self.clients.keeps_bins
        if self.clients.pass_rounds > 1 and (shares or not self.release.hides_cohort(self.clients)):
            found = f"sampler {self.clients.kind!r} with release {self.release.kind!r}"
            needed = "a release that adds independent noise in every round and hides who takes part"
            raise PlanError("sampling", found, needed, "use release central_noise, or sampler roundrobin")
        if self.local.reads is not None:
            self._check_records(self.local.reads)
        if self.server.rounds not in (None, self.rounds):
            found = f"server {self.server.kind!r} for {self.server.rounds} rounds in a plan of {self.rounds} rounds"
            raise PlanError("server", found, "the same number of rounds in both", f"set rounds = {self.server.rounds}")
        self._check_steps()
        bare = self.release.correlated and not self.release.is_fitted(self.rounds)
        lines = () if bare else self.forecast.lines
        for event, relation in ((event, line.relation) for line in lines for event, _ in line.entries):
            if not has_bound(event, relation):
                raise no_bound(event, relation)
        if self.local.project and not self.clips:
            found, needed = "project = true without a Clip step", "a clip norm to project on"
            raise PlanError("projection", found, needed, "add Clip(clip_norm) to encode")

    def fitted(self) -> Plan:
        """Return the plan with the coefficients of its noise strategy optimised for its rounds, clients and server.

        Coefficients that are set stay. A plan without correlated noise is returned unchanged.
        """
        if not self.release.correlated:
            return self
        release = self.release.fitted(lambda: self.patterns, lambda: self.server.workload(self.rounds))
        return self if release == self.release else replace(self, release=release)

    def check_fitted(self) -> None:
        """Refuse a correlated noise strategy whose coefficients are not optimised for the plan's rounds."""
        if self.release.correlated and not self.release.is_fitted(self.rounds):
            found = f"release {self.release.kind!r} whose strategy is not fitted to {self.rounds} rounds"
            raise PlanError("correlated noise", found, "a fitted strategy", "plan = plan.fitted()")

    @property
    def patterns(self) -> Patterns:
        """Sets of rounds in which one client may take part, or one record of silo 0 may be read."""
        planned = Participation.planned(self.clients, self.rounds)
        if self.local.reads is None:
            return planned.patterns(self.clients)
        times = reads_of(self.clients, self.local, self.release, planned.if_always_sampled, 0)
        return record_patterns(self.clients, self.local, self.rounds, times, 0)

    def _check_schedules(self) -> None:
        clip_norms = [*(clip.clip_norm for clip in self.clips), *self.local.clip_norms]
        scheduled = [clip_norm for clip_norm in clip_norms if isinstance(clip_norm, Schedule)]
        for clip_norm in scheduled:
            low, high = clip_norm.span(self.rounds)
            if not positive(low, high):
                found = f"a clip norm from {low:g} to {high:g} in {self.rounds} rounds"
                needed = "a positive finite clip norm in every round"
                raise PlanError("clip", found, needed, "change the schedule of the clip norm")
        learned = any(clip_norm.learned for clip_norm in scheduled)
        if learned and self.clips != self.encode[-1:]:
            found = "an adaptive clip norm, whose Clip is not the last encode step or is not the only Clip"
            raise PlanError("adaptive clip", found, "one Clip, as the last step", "put it at the end of encode")
        if learned and self.local.project:
            found = "an adaptive clip norm with project = true, under which no update exceeds the clip norm"
            raise PlanError("adaptive clip", found, "updates that are not projected", "set project = false")
        for where, schedule in codec.nested_values(self):
            if isinstance(schedule, Schedule) and not finite(*schedule.span(self.rounds)):
                low, high = schedule.span(self.rounds)
                found = f"{where} from {low:g} to {high:g} in {self.rounds} rounds"
                needed = "numbers within the range of float32 in every round"
                raise PlanError("schedule", found, needed, f"change the schedule {where}")

    def _check_records(self, reads: RecordSampler) -> None:
        most = reads.max_rounds()
        if self.keeps_client_state:
            found = f"{self.local.kind!r}, whose clients keep a state of what they read in earlier rounds"
            needed = "messages that depend on the records of their own round alone"
            raise PlanError("records", found, needed, "use batch_gradient")
        reads.check(self.clients.population)
        self.local.check_population(self.clients.population)
        spent = self.local.bound()
        batches = self.rounds * (spent.count if isinstance(spent, AlreadyPrivate) else 1)
        if most is not None and batches > most:
            found = f"{batches} disjoint batches, while the smallest silo has records for {most}"
            raise PlanError("one pass", found, "batches that are disjoint in all rounds", "lower rounds or batch")
        if reads.pass_rounds > 1 and (self.release.correlated or self.clients.random):
            found = f"record sampler {reads.kind!r}, release {self.release.kind!r} and clients {self.clients.kind!r}"
            needed = "noise that is independent from round to round, and silos that are not drawn at random"
            raise PlanError("records", found, needed, "use poisson_records, or clients everyone with central_noise")
        if reads.pass_rounds > 1 and isinstance(spent, AlreadyPrivate):
            found, fix = f"record sampler {reads.kind!r} in several local steps of a round", "use batch_gradient"
            raise PlanError("records", found, "one batch per round", fix)
        if self.encode:
            found = f"{self.encode[0].kind} as an encode step after per-record clipping"
            raise PlanError("records", found, "no encode steps", "drop encode: the local solver bounds the message")

    def _check_steps(self) -> None:
        asking = [step for step in self.postprocess if step.needs_noise]
        if asking and isinstance(self.bound, AlreadyPrivate):
            found = f"{asking[0].kind} on messages whose noise was added in local steps, so that its scale is unknown"
            fix = "drop the denoiser, or use a release that adds the noise"
            raise PlanError("denoising", found, "noise of known standard deviation", fix)
        nonlinear = next((i for i, step in enumerate(self.postprocess) if not step.linear), len(self.postprocess))
        late = next((step for step in self.postprocess[nonlinear + 1 :] if step.needs_noise), None)
        if late is not None:
            found = f"{late.kind} after {self.postprocess[nonlinear].kind}, where the scale of the noise is unknown"
            fix = f"put {late.kind} first, or drop one of the two"
            raise PlanError("denoising", found, "linear post-processing before the denoiser", fix)
        coordinates = (step for step in self.encode if step.needs_slopes or step.needs_tensors or step is self.mask)
        looks = next(coordinates, None)
        if looks is not None and self.local.length(1) != 1:
            found = f"{looks.kind} on messages of {self.local.kind}, which contain more than the model's update"
            raise PlanError("sparsity", found, "messages of one number per parameter", f"drop {looks.kind}")
        names = [part.column for part in self.prepare]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            found = f"two releases of column {twice!r} in prepare"
            raise PlanError("preparation", found, "one release for each column", "drop one of the two")

    @property
    def unit(self) -> Unit:
        """Unit of privacy: what two neighbouring data sets differ in."""
        return "client" if self.local.reads is None else "record"

    @property
    def units(self) -> int:
        """Number of clients, or of records of the largest silo; delta must be small against 1 / units."""
        return self.clients.population if self.local.reads is None else max(self.local.reads.sizes)

    @property
    def bound(self) -> Bound | AlreadyPrivate:
        """Norm bound of one client's message after all encode steps."""
        return self.bounds[-1]

    @property
    def bounds(self) -> tuple[Bound | AlreadyPrivate, ...]:
        """Norm bounds of one client's message after the local solver and after each encode step, in this order."""
        chain: list[Bound | AlreadyPrivate] = [self.local.bound()]
        for step in self.encode:
            before = chain[-1]
            if isinstance(before, AlreadyPrivate):
                found = f"{step.kind} on a message that is already noised"
                raise PlanError("spent", found, "no encode steps", "drop encode")
            chain.append(step.bound(before))
        return tuple(chain)

    @property
    def clip(self) -> Clip | None:
        """The first `Clip` among the encode steps, which gives the message its bound; None if there is none."""
        return next(iter(self.clips), None)

    @property
    def clips(self) -> tuple[Clip, ...]:
        return tuple(step for step in self.encode if isinstance(step, Clip))

    def public(
        self, t: int, size: int = 0, public_state: Mapping[str, Tensor] | None = None,
        update: Callable[[], Tensor] | None = None,
    ) -> Public:  # fmt: skip
        """Return the public values of round t: clip norm, coordinates (of `size`) that are sent, and broadcast vectors.

        `public_state` was computed from earlier releases. `update` computes a model update on public records, which
        some masks choose their coordinates by.
        """
        known = public_state or {}
        learned = {name: float(held) for name, held in known.items() if "." not in name and not held.dim()}
        broadcast = {name.removeprefix(BROADCAST): held for name, held in known.items() if name.startswith(BROADCAST)}
        clip_norm = self.clip.clip_norm_at(t, learned.get("clip_norm")) if self.clip else math.inf
        if self.local.adaptive is not None:
            clip_norm = learned.get("clip_norm", self.local.adaptive.at(t))
        mask = None
        if self.mask is not None and size:
            source = self.mask.source
            made = update() if source.needs_public_data and update is not None else None
            mask = self.mask.choose(source.scores(t, size, known.get("released"), made))
        return Public(t, clip_norm, size, mask, broadcast, state=learned)

    def signal_norm(self, public: Public) -> float:
        """Return an upper bound on the norm of the mean before noise: the clip norm of an update or record gradient."""
        if self.local.adaptive is not None:
            return public.clip_norm
        return min(public.clip_norm, *(at(clip_norm, public.t) for clip_norm in (math.inf, *self.local.clip_norms)))

    def length(self, size: int) -> int:
        """Return the length of an encoded message for a model of `size` numbers."""
        length = self.local.length(size)
        for step in self.encode:
            length = step.length(length)
        return length

    @property
    def keeps_client_state(self) -> bool:
        """Whether clients store a state between their rounds, as in SCAFFOLD."""
        return bool(self.local.client_state(torch.zeros(1)))

    @property
    def needs(self) -> frozenset[str]:
        """Names of the features that an engine must offer to run this plan, such as "secure_sum"."""
        own = {"client_state": bool(self.local.client_state(torch.zeros(1))), "preparation": bool(self.prepare)}
        own["a loop of PyTorch"] = self.local.needs_loop or self.release.scheduled
        return self.release.needs | self.server.needs | {name for name, needed in own.items() if needed}

    @property
    def cohort_is_public(self) -> bool:
        """Whether logs may name the clients of a round, since the cohort is public or part of the release."""
        return not self.clients.random or self.release.sees_cohort

    @property
    def mask(self) -> PublicMask | None:
        """The encode step that sends only some coordinates; None if there is none."""
        return next((step for step in self.encode if isinstance(step, PublicMask)), None)

    def learn(self, encoded: Tensor, mean: Tensor, public: Public, state: State) -> dict[str, Tensor]:
        """Return the public state after a round, which encode steps and the mask compute from the noised mean."""
        learned: dict[str, float] = {}
        for step in self.encode:
            found = step.learn(encoded, public)
            twice = next((name for name in found if name in learned or "." in name), None)
            if twice is not None:
                stored, needed = f"{step.kind!r} stores the public state {twice!r}", "a dotless name of one step"
                raise PlanError("learn", stored, needed, "rename what `learn` of the step returns")
            learned |= found
        after = {name: torch.tensor(value, dtype=torch.float64) for name, value in learned.items()}
        before = state.public_state.get("released")
        remembered = None if self.mask is None else self.mask.source.remember(before, mean.cpu())  # masks: on the CPU
        return after if remembered is None else after | {"released": remembered}

    def cost(self, participation: Participation | None = None, only: int | None = None) -> Cost:
        """Return the privacy cost of a run with this participation, for all clients or for client `only`.

        Without a participation, return the forecast for a run that goes as planned."""
        return self.forecast if participation is None else self.cost_with(participation, only)

    def cost_with(
        self, participation: Participation | None = None, only: int | None = None, *,
        local: LocalSolver | None = None, release: Release | None = None,
    ) -> Cost:  # fmt: skip
        """Return the privacy cost of this plan with another local solver or release; calibration calls it."""
        if self.release.correlated:
            self.check_fitted()
        local, release = local or self.local, release or self.release
        participation = participation or Participation.planned(self.clients, self.rounds)
        if self.unit == "record":
            rounds = record_cost(self.clients, local, release, participation, only)
        else:
            rounds = client_cost(self.clients, release, participation, only)
        return with_preparations(rounds, self.prepare, release, participation.prepared) if self.prepare else rounds

    @property
    def forecast(self) -> Cost:
        """Privacy cost of a run that goes as planned; it is computed once."""
        if not hasattr(self, "_forecast"):
            object.__setattr__(self, "_forecast", self.cost_with())
        return self._forecast

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        """Return the noised mean with the encode steps undone, in reverse order."""
        for step in reversed(self.encode):
            mean = step.decode(mean, public)
        unit = self.local.unit(public)
        return mean if unit == 1.0 else mean * unit

    def split(self, mean: Tensor, public: Public) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the model's update and the vectors broadcast in the next round, both parts of the decoded mean."""
        return self.local.split(mean, public, self.clients.expected / self.clients.population)

    def refine(self, mean: Tensor, known: Noised) -> Tensor:
        """Apply all post-processing steps in order, each with the current standard deviation of the noise."""
        for i, step in enumerate(self.postprocess):
            mean = step.apply(mean, known)
            if any(later.needs_noise for later in self.postprocess[i + 1 :]):
                known = replace(known, std=step.decoded_noise_std(known))
        return mean

    @property
    def hash(self) -> str:
        """SHA-256 of the plan's canonical JSON."""
        return digest(self)


@codec.hides_values
@dataclass(frozen=True)
class State:
    """State of a run between two rounds, as a checkpoint stores it."""

    t: int
    memory: Memory
    public_state: dict[str, Tensor] = field(default_factory=dict)  # computed from earlier releases
    secret_state: dict[str, Tensor] = field(default_factory=dict)  # of the noise and of clients: never released

    @classmethod
    def initial(cls, plan: Plan, params: Tensor) -> State:
        memory = plan.release.init(plan.length(len(params))) if plan.release.remembers else {}
        noise = {f"{NOISE}{name}": held for name, held in memory.items()}
        return cls(0, plan.server.init(params.to("cpu", torch.float32)), secret_state=noise)

    def on(self, device: torch.device) -> State:
        """Return the state with the server's vectors, noise and broadcasts on `device`.

        Counters, the state of a mask and the clients' states stay on the CPU.
        """

        def moved(held: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
            return {n: v.to(device) if v.dim() and n.startswith(prefix) else v for n, v in held.items()}

        public, secret = moved(self.public_state, BROADCAST), moved(self.secret_state, NOISE)
        return State(self.t, moved(self.memory), public, secret)

    @property
    def noise(self) -> dict[str, Tensor]:
        """Earlier noise that a correlated release combines with new noise, by name."""
        return {name.removeprefix(NOISE): held for name, held in self.secret_state.items() if name.startswith(NOISE)}
