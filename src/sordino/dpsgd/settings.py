"""Settings of a private loop (the plan that is run and certified), and the record of charged steps in a checkpoint.

    checksum = sha256( every field of the record but the checksum, tensors by their bytes )

The checksum finds damage and careless edits: a count set to 0, a missing key, a number of another type, another plan.
It has no key and can be forged; even then the steps taken are counted by this process, if it took them, and by the
loop's ledger (dpsgd/account.py). Called by dpsgd/private_loop.py, account.py and optimizer.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from sordino import codec
from sordino.accounting import calibration
from sordino.accounting.accountant import check_delta, default_delta, largest_delta
from sordino.accounting.bounds import Protected
from sordino.accounting.composition import Cost, Participation
from sordino.accounting.rounding import atleast
from sordino.certificate.facts import EarlierRun
from sordino.errors import ConfigError, PlanError, brief_repr
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.encoding import Adaptive, ClipNorms, LaplacianSmoothing
from sordino.parts.mechanisms import Gaussian, Preparation
from sordino.parts.record_samplers import AllocatedRecords, PoissonRecords, RecordsInTurn
from sordino.parts.releases import CentralNoise, Release, ScheduledNoise
from sordino.parts.schedules import Schedule, at, positive
from sordino.parts.server_optimizers import TorchOptimizer
from sordino.parts.strategies import Strategy
from sordino.plan import Plan
from sordino.recipes.record_level import single_silo
from sordino.rng import Mode

Reduction = Literal["mean", "sum"]
Sampling = Literal["poisson", "allocation"]
Batches = PoissonRecords | RecordsInTurn | AllocatedRecords
RECORD_DELTA = 1e-5  # accepted without an override as long as number of records * delta < 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a private loop. A round of `plan` is one step, which applies the optimizer to

    g = A^-1 (sum_j g_j min(1, C / ||g_j||) + N(0, (z C)^2)) / batch

    with per-record gradients g_j, clip norm C, noise multiplier z and Laplacian smoothing A (by default none). With
    `ClipNorms` each group of parameters has its own clip norm, and C is the root of the sum of their squares. z or C
    may change from step to step. `epsilon` is the target to which z was calibrated, if any. Under correlated noise N is
    replaced by the strategy's noise of that step, and batches follow one fixed order.
    """

    plan: Plan
    delta: float
    noise: Mode
    seed: int
    reduction: Reduction
    epsilon: float | None = None
    users: bool = False  # a record of the plan is a user with all records of the data set

    @property
    def unit(self) -> Protected:
        """Unit of privacy of the loop: a user if make_private got users, else a record."""
        return "user" if self.users else "record"

    @property
    def forecast(self) -> Cost:
        """Privacy cost of all planned steps."""
        return replace(self.plan.forecast, unit=self.unit)

    @property
    def steps(self) -> int:
        """Number of planned steps."""
        return self.plan.rounds

    @property
    def records(self) -> Batches:
        """Record sampler of the plan."""
        assert isinstance(self.plan.local.reads, Batches)
        return self.plan.local.reads

    @property
    def clip_norm(self) -> float:
        """Largest norm of a record's clipped gradient over all parameters; the first one if the clip norm adapts."""
        return at(self.plan.local.clip_norms[0], 0)

    @property
    def adaptive(self) -> Adaptive | None:
        return cast(Adaptive | None, self.plan.local.adaptive)

    def clip_shares(self, named: Mapping[str, Sequence[str]]) -> list[tuple[float, tuple[str, ...]]]:
        """Return the share of the clip norm, and the parameters, of every group that has its own clip norm.

        `named` has all names of each trained parameter, by its first one.
        """
        norms = self.plan.local.clip_norms[0]
        if not isinstance(norms, ClipNorms):
            return [(1.0, tuple(named))]
        owners = group_parameters(norms.names, named)
        each = zip(norms.names, norms.clip_norms, strict=True)
        return [(clip_norm / norms.at(0), tuple(owners[group])) for group, clip_norm in each]

    @property
    def per_epoch(self) -> int:
        """Number of steps of an epoch, in which every record is read once (on average under Poisson sampling)."""
        return steps_per_epoch(self.records)

    def max_steps(self) -> float:
        """Return the largest number of steps within the target epsilon; under correlated noise the planned number."""
        if self.plan.release.correlated:
            return self.steps
        if self.epsilon is None:
            return math.inf
        cost = self.plan.cost
        allowed = calibration.rounds(lambda n: cost(Participation(n, n)).line("models"), self.epsilon, self.delta)
        return max(self.steps, allowed)


def batches(batch: int, size: int, strategy: Strategy | None, sampling: Sampling = "poisson") -> Batches:
    """Return the sampler of Poisson batches, of allocated ones or, under correlated noise, of one fixed order."""
    if sampling not in ("poisson", "allocation") or (sampling == "allocation" and strategy is not None):
        found = f"sampling = {sampling!r}" + (" with a strategy" if strategy is not None else "")
        raise ConfigError(found, 'sampling "poisson", or "allocation" without a strategy', "drop the strategy")
    if sampling == "allocation":
        if 2 * batch > size:
            found = f"sampling = 'allocation' with a batch_size of {batch} for {size} records or users"
            raise ConfigError(found, "two batches or more in a pass", "lower batch_size")
        return AllocatedRecords(round(size / batch), (size,))
    return PoissonRecords(float(batch), (size,)) if strategy is None else RecordsInTurn(batch, (size,))


def steps_per_epoch(records: Batches) -> int:
    """Return the steps of an epoch: round(1 / rate) under Poisson sampling, else the bins or the whole batches."""
    if isinstance(records, RecordsInTurn):
        return records.size(0) // records.batch
    if isinstance(records, AllocatedRecords):
        return records.bins
    return max(1, round(1 / records.rate(0)))


ClipNorm = float | Mapping[str, float] | Adaptive


def clip_norms(
    clip: Literal["flat", "per_layer"], clip_norm: ClipNorm, named: Mapping[str, Sequence[str]]
) -> float | Schedule:
    """Return the clip norm of a whole gradient, or the clip norms of its layers or of the user's groups.

    `named` has all names of each trained parameter, by its first one. A layer is a module that owns parameters; a
    parameter that two layers share belongs to the first.
    """
    if clip not in ("flat", "per_layer"):
        needed = '"flat" (one norm over all parameters) or "per_layer"'
        raise ConfigError(f"clip = {clip!r}", needed, 'set clip="flat"')
    if isinstance(clip_norm, Schedule) and clip_norm.learned and clip == "flat":
        return clip_norm
    if isinstance(clip_norm, Mapping):
        group_parameters(tuple(clip_norm), named)
        for group, own in clip_norm.items():
            _check_clip_norm(f"clip_norm[{group!r}]", own)
        return ClipNorms(tuple(clip_norm), tuple(float(own) for own in clip_norm.values()))
    if isinstance(clip_norm, Schedule):
        found, fix = f"clip_norm = {type(clip_norm).__name__} and clip = {clip!r}", 'use Adaptive with clip="flat"'
        raise ConfigError(found, "a number, a dict of numbers, or Adaptive", fix)
    _check_clip_norm("clip_norm", clip_norm)
    if clip == "flat":
        return float(clip_norm)
    layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in named))
    return ClipNorms(layers, (clip_norm / math.sqrt(len(layers)),) * len(layers))


def _check_clip_norm(what: str, clip_norm: Any) -> None:
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float) or not 0 < clip_norm < math.inf:
        raise ConfigError(f"{what} = {brief_repr(clip_norm)}", "a positive finite number", "start with 1.0")


def group_parameters(groups: Sequence[str], named: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the parameters of each clip group: those whose name is, or begins with, the name of the group.

    If several groups match, the longest name counts. A parameter with several names belongs to the group of the first
    name that is in a group.
    """
    found: dict[str, list[str]] = {group: [] for group in groups}
    for first, names in named.items():
        owners = [group for name in names for group in _owners(name, found)]
        if not owners:
            lacking, needed = f"parameter '{first}', which no group of clip_norm names", "a group for every parameter"
            raise ConfigError(lacking, needed, f"add its layer ({first.rpartition('.')[0]!r}), or '' for all others")
        found[owners[0]].append(first)
    empty = next((group for group, own in found.items() if not own), None)
    if empty is not None:
        needed = "names of layers, or prefixes of names, with a trained parameter each"
        raise ConfigError(f"clip_norm for {empty!r}, which has no trained parameter", needed, f"remove {empty!r}")
    return found


def _owners(name: str, groups: Iterable[str]) -> list[str]:
    return sorted((g for g in groups if g in ("", name) or name.startswith(f"{g}.")), key=len, reverse=True)


NoiseMultiplier = float | Sequence[float] | Callable[[int], float] | Schedule
LEVELS = 64  # largest number of different noise multipliers in a schedule: each is one more distribution to compose


def noise_schedule(
    noise_multiplier: NoiseMultiplier | None, records: Batches, epochs: int | None, steps: int | None, *, scaled: bool
) -> ScheduledNoise | None:
    """Return the release with a noise multiplier that changes from step to step; None if it is constant.

    A sequence has one entry per step or per epoch; a function takes the number of the step, from 0. If there are more
    than `LEVELS` different values, each is rounded up to one of `LEVELS` in geometric progression; the rounded values
    are used and charged. With `scaled` all values are divided by the least one.
    """
    if noise_multiplier is None or isinstance(noise_multiplier, int | float):
        return None
    check_length(epochs, steps)
    length = steps or (epochs or 0) * steps_per_epoch(records)
    values = _values_by_step(noise_multiplier, length, length if epochs is None else epochs)
    odd = next((t for t, value in enumerate(values) if not positive(value)), None)
    if odd is not None:
        found = f"a noise_multiplier of {brief_repr(values[odd])} in step {odd}"
        raise ConfigError(found, "a positive finite number in every step", "correct the schedule")
    low, high = min(values), max(values)
    if len(set(values)) > LEVELS:
        level = math.log(high / low) / (LEVELS - 1)
        values = [low * math.exp(level * math.ceil(math.log(value / low) / level - 1e-9)) for value in values]
    runs = [(value / low if scaled else value, len(list(same))) for value, same in itertools.groupby(values)]
    return ScheduledNoise(tuple(value for value, _ in runs), tuple(count for _, count in runs))


def _values_by_step(given: Sequence[float] | Callable[[int], float] | Schedule, steps: int, epochs: int) -> Any:
    if isinstance(given, Schedule) and not given.learned:
        return [float(given.at(t)) for t in range(steps)]
    if callable(given):
        return [float(given(t)) for t in range(steps)]
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) in (steps, epochs):
        return [float(given[t * len(given) // steps]) for t in range(steps)]
    length = f" of {len(given)}" if isinstance(given, Sequence) else ""
    needed = f"a number, a function of the step, or one number for each of {steps} steps or {epochs} epochs"
    raise ConfigError(f"noise_multiplier = a {type(given).__name__}{length}", needed, "correct its length or type")


def loop_plan(
    epochs: int | None,
    records: Batches,
    clip_norm: float | Schedule,
    smoothing: float,
    optimizer: Optimizer,
    strategy: Strategy | None = None,
    steps: int | None = None,
    prepare: tuple[Preparation, ...] = (),
    schedule: ScheduledNoise | None = None,
) -> Plan:
    """Return the plan of a loop of DP-SGD or its variants (recipes/record_level.py), with noise multiplier 1.

    The plan only names the PyTorch optimizer, which works on noised gradients. The strategy of correlated noise is
    optimised for its initial momentum.
    """
    learned = isinstance(clip_norm, Schedule) and clip_norm.learned
    if strategy is not None and (schedule is not None or learned):
        found = "a strategy with an adaptive clip norm or a noise_multiplier that changes"
        needed = "one noise multiplier and one clip norm, because the noise is correlated across steps"
        raise ConfigError(found, needed, "remove the strategy")
    check_length(epochs, steps)
    first, noise = optimizer.param_groups[0], Gaussian(1.0)
    momentum = first["momentum"] if isinstance(optimizer, SGD) and strategy is not None else None
    plan = single_silo(
        TorchOptimizer(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", momentum),
        rounds=steps if epochs is None else epochs * steps_per_epoch(records),  # type: ignore[arg-type]
        records=records,
        clip_norm=clip_norm,
        release=schedule or (CentralNoise(noise) if strategy is None else CorrelatedNoise(noise, strategy)),
        denoiser=LaplacianSmoothing(smoothing) if smoothing else None,
    )
    return replace(plan, prepare=prepare) if prepare else plan


def calibrate_noise(plan: Plan, epsilon: float | None, noise_multiplier: Any, delta: float) -> Plan:
    """Return the plan with `noise_multiplier`, or with the smallest noise multiplier that costs at most `epsilon`.

    If the plan has a schedule of noise multipliers (`noise_schedule`), the schedule is scaled to cost `epsilon`.
    """
    if epsilon is not None and (noise_multiplier is None or plan.release.scheduled):
        return calibration.calibrate(plan, epsilon=epsilon, delta=delta)
    if noise_multiplier is not None and epsilon is None:
        return plan if plan.release.scheduled else calibration.noisier(plan, noise_multiplier)
    found = f"epsilon = {epsilon} and noise_multiplier = {noise_multiplier}"
    raise ConfigError(found, "exactly one of the two, or epsilon and a schedule", "remove one of them")


def check_length(epochs: int | None, steps: int | None) -> None:
    """Refuse a loop length other than one whole number of epochs or of steps, of at least 1."""
    if (epochs is None) == (steps is None):
        raise ConfigError(f"epochs = {epochs} and steps = {steps}", "exactly one of them", "set epochs=10")
    for name, number in (("epochs", epochs), ("steps", steps)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigError(f"{name} = {number}", "a whole number of at least 1", f"set {name}=10")


def checked_delta(delta: float | None, population: int, allow_large: bool, units: str = "records") -> float:
    """Return delta, by default min(population^-1.1, 1e-3); refuse too large a delta unless `allow_large`.

    The largest accepted delta is population^-1.1, or 1e-5 as usual in the literature if population * 1e-5 < 1.
    """
    limit = max(largest_delta(population), RECORD_DELTA if population * RECORD_DELTA < 1 else 0.0)
    found = default_delta(population) if delta is None else delta
    check_delta(found, population, override=True)
    if found > limit * (1 + 1e-9) and not allow_large:
        fix = "lower it, or pass allow_large_delta=True"
        what = f"{units}^-1.1" if limit == largest_delta(population) else f"max({units}^-1.1, 1e-5)"
        raise ConfigError(f"delta = {found}", f"at most {what} = {atleast(limit)}", fix)
    return found


def first_difference(ours: Settings, stored: Any) -> str:
    """Return a sentence on the first setting in which a stored run differs from this one; empty if none does."""

    def text(value: Any) -> str:  # 1, 1.0 and true are three values; of an unknown type only the name counts
        return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)

    mine, other = dict(_leaves(codec.dump(ours))), dict(_leaves(stored))
    for name in [*mine, *(name for name in other if name not in mine)]:
        if text(mine.get(name)) != text(other.get(name)):
            return f"{name} = {brief_repr(other.get(name))} where this run has {brief_repr(mine.get(name))}"
    return ""


def _leaves(table: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(table, dict):
        yield where, table
        return
    for name, item in table.items():
        yield from _leaves(item, f"{where}.{name}" if where else name)


ALL = np.zeros(1, dtype=np.int64)  # the single client of the plan


class NoiseState:
    """Correlated noise of a loop, with its state, which must stay secret: it reveals noise of later steps.

    Each step draws noise once. If the numbers of charged steps and of draws differ (a step that failed half-way, a
    checkpoint of another time), the noise would not be the certified one, and the step is refused.
    """

    def __init__(self, release: Release, length: int) -> None:
        self.release, self.drawn = release, 0
        self.held: dict[str, Tensor] = release.init(length)

    def noised(self, total: Tensor, t: int, rng: Callable[[str], np.random.Generator]) -> Tensor:
        """Return the sum `total` of step t with the step's correlated noise added."""
        if self.release.correlated and self.drawn != t:
            found = f"step {t + 1} of correlated noise after {self.drawn} draws of noise"
            needed = "one draw of noise for every charged step"
            raise PlanError("correlated noise", found, needed, "load the last checkpoint into a new run")
        self.drawn = t + 1
        noised, self.held = self.release.at(t).noised(total, ALL, rng, self.held)
        return noised

    def state(self) -> dict[str, Any]:
        """Return a copy of the noise state for a checkpoint."""
        if not self.release.correlated:
            return {}
        return {"secret": {"drawn": self.drawn, **{name: held.clone() for name, held in self.held.items()}}}

    def check(self, stored: dict[str, Any], steps: int) -> None:
        """Refuse a checkpoint whose number of noise draws is not its number of charged steps."""
        if not self.release.correlated:
            return
        if _kinds(stored) != _kinds(self.held) or stored.get("drawn") != steps:
            found = f"a checkpoint with {stored.get('drawn', 'no')} draws of correlated noise and {steps} charged steps"
            fix = "load the newest checkpoint into a new run: correlated noise cannot go back to an older one"
            raise ConfigError(found, "one draw of noise for every charged step", fix)

    def load(self, stored: dict[str, Any]) -> None:
        """Continue with the noise state of a checkpoint, after `check`."""
        if self.release.correlated:
            self.drawn = int(stored["drawn"])
            self.held = {name: held.clone() for name, held in stored.items() if name != "drawn"}


def _kinds(held: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Return row length and dtype of each state tensor by name; the number of rows may change from step to step."""
    return {
        name: (part.shape[-1] if part.dim() else 0, str(part.dtype)) for name, part in held.items() if name != "drawn"
    }


FORMAT = 2
MOST_STEPS = 2**31  # largest count of steps of one process
_NEEDED = "the record that optimizer.state_dict() returned, unchanged"
_FIX = "load an unchanged copy of the checkpoint, or start a new run (charged steps stay charged)"
_FIELDS = ("format", "run", "settings", "taken", "checksum")
_OPTIONAL = ("dataset", "earlier", "secret", "order", "moments", "clip_norm")


@codec.hides_values
@dataclass(frozen=True)
class LoopRecord:
    """Record of charged steps in a checkpoint, after verification: run id, and number of steps by process."""

    run: str
    taken: dict[str, int]
    dataset: str = ""  # name of the data set in the loop's ledger
    earlier: tuple[EarlierRun, ...] = ()  # runs that the first weights come from
    secret: dict[str, Any] = field(default_factory=dict)  # state of correlated noise
    order: dict[str, str] = field(default_factory=dict)  # keyed hash of the data set's rows, under correlated noise
    moments: dict[str, Any] = field(default_factory=dict)  # released mean and scale of the records
    clip_norm: float | None = None  # of the next step, where it adapts


def write_record(settings: Settings, run: str, taken: Mapping[str, int], **others: Any) -> dict[str, Any]:
    """Return the record of charged steps as plain data, with its checksum."""
    table = {"format": FORMAT, "run": run, "settings": codec.dump(settings), "taken": dict(taken), **others}
    return {**table, "checksum": checksum(table)}


def checksum(table: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record's canonical JSON, without the field `checksum`."""
    held = {name: _canonical(item) for name, item in table.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _canonical(item: Any) -> Any:
    """Return JSON data in which a tensor is replaced by dtype, shape and the hash of its bytes."""
    if isinstance(item, Tensor):
        data = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return ["tensor", str(item.dtype), list(item.shape), hashlib.sha256(data.data).hexdigest()]
    if isinstance(item, Mapping):
        if not all(type(name) is str for name in item):
            raise TypeError("a dict key that is not a string")
        return {name: _canonical(inner) for name, inner in item.items()}
    if isinstance(item, list | tuple):
        return [_canonical(inner) for inner in item]
    if item is None or type(item) in (str, int, float, bool):
        return item
    raise TypeError(f"a value of type {type(item).__name__}")


def read_record(state: Any, settings: Settings) -> LoopRecord:
    """Return a checkpoint's record of charged steps; raise `ConfigError` for other settings or an invalid field."""
    if not isinstance(state, Mapping) or "taken" not in state:
        found = "a state_dict without a record of charged steps"
        raise ConfigError(found, "a state_dict that a private optimizer returned", "start a new run")
    if "checksum" not in state:
        _refuse("without a checksum: it was edited, or an earlier version saved it")
    try:
        whole = checksum(state)
    except (TypeError, ValueError, RecursionError, RuntimeError, NotImplementedError) as error:
        _refuse(f"that cannot be read ({str(error)[:100]})")
    if state["checksum"] != whole:
        _refuse("whose checksum is not that of its content: it was damaged or edited")
    odd = [name for name in state if name not in (*_FIELDS, *_OPTIONAL)]
    odd += [name for name in _FIELDS if name not in state]
    if odd:
        _refuse(f"in which {brief_repr(odd[0])} is {'missing' if odd[0] in _FIELDS else 'unknown'}")
    if type(state["format"]) is not int or state["format"] != FORMAT:
        _refuse(f"of format {brief_repr(state['format'])}, where this version writes {FORMAT}")
    if not _is_name(state["run"]):
        _refuse(f"of the run {brief_repr(state['run'])}, which is no id of a run")
    other = first_difference(settings, state["settings"])
    if other:
        fix = "call make_private with the saved run's settings"
        raise ConfigError(f"a checkpoint with {other}", "the settings of the saved run", fix)
    dataset, secret, order = state.get("dataset", ""), state.get("secret", {}), state.get("order", {})
    if not isinstance(dataset, str):
        _refuse(f"of the data set {brief_repr(dataset)}, which is no name")
    earlier: tuple[EarlierRun, ...] = codec.read(tuple[EarlierRun, ...], state.get("earlier", []), "earlier")
    _check_tables(state["taken"], secret, order)
    clip_norm, adaptive = state.get("clip_norm"), settings.adaptive
    possible = adaptive is not None and isinstance(clip_norm, float) and adaptive.allows(clip_norm)
    if (clip_norm is not None) != (adaptive is not None) or (adaptive is not None and not possible):
        _refuse(f"with the clip norm {brief_repr(clip_norm)}, which this run cannot have reached")
    moments = state.get("moments", {})
    if not isinstance(moments, Mapping):
        _refuse("with a mean and scale that are not a dict")
    others = dict(secret), dict(order), dict(moments), clip_norm
    return LoopRecord(state["run"], dict(state["taken"]), dataset, earlier, *others)


def _check_tables(taken: Any, secret: Any, order: Any) -> None:
    """Refuse counts that are no whole numbers >= 0, a noise state without tensors, and a row order that is no hash."""
    if not isinstance(taken, Mapping):
        _refuse(f"with taken = {brief_repr(taken)}, which is not a dict of counts")
    for name, count in taken.items():
        if not _is_name(name) or type(count) is not int or not 0 <= count <= MOST_STEPS:
            _refuse(f"with {brief_repr(count)} steps of the process {brief_repr(name)}, which is no count of steps")
    if not isinstance(secret, Mapping):
        _refuse(f"with a noise state that is {brief_repr(type(secret).__name__)}")
    for name, part in secret.items():
        if (type(part) is not int) if name == "drawn" else not isinstance(part, Tensor):
            _refuse(f"with {brief_repr(name)} of type {type(part).__name__} in the noise state")
    texts = isinstance(order, Mapping) and (not order or set(order) == {"key", "mark"})
    if not texts or not all(isinstance(text, str) and re.fullmatch("[0-9a-f]*", text) for text in order.values()):
        _refuse("with a hash of the data set's rows that is invalid")
    if order and len(order["key"]) != 32:
        _refuse("with a hash of the data set's rows that has no key")


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text) is not None


def _refuse(what: str) -> NoReturn:
    raise ConfigError(f"a checkpoint with a record of charged steps {what}", _NEEDED, _FIX)
