"""A federation as one TOML file: the task, the plan (written out, or a recipe), privacy and run settings."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino import codec
from sordino.codec import override, plugins, toml
from sordino.data import datasets
from sordino.data.datasets import Dataset, declared_by, load, names_silos
from sordino.data.halves import Half
from sordino.data.initial import begun
from sordino.data.metrics import Metric
from sordino.data.naming import check_names, resolved
from sordino.data.partition import Iid, Natural, Partitioner
from sordino.data.stopping import EarlyStopping
from sordino.data.task import Clients, Records, Task
from sordino.engines.checks import check_layers
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError
from sordino.models import Given, Logistic, Spec, build_seeded
from sordino.outcome import declared_by_caller, declared_weights
from sordino.parts.losses import CrossEntropy, Loss, Mse
from sordino.parts.preparation import Preparation
from sordino.plan import Plan
from sordino.privacy.budget import Budget, Filter, check_affordable, client_filter
from sordino.privacy.delta import check_deltas, default_delta, silo_deltas
from sordino.privacy.facts import Declared
from sordino.privacy.selection import Selection
from sordino.recipes import RECIPES
from sordino.rng import Mode, Seeded, Streams, streams
from sordino.run import check_early, check_train_metrics


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Which data, cut how, and which model. Without a partition: the data's natural clients, else iid.

    `init` is a safetensors file with the model's first weights. They are declared public by whoever writes this file:
    what they were trained on is not protected by the run, and the certificate says so, with the file's hash.
    """

    dataset: str = "digits"
    options: dict[str, Any] = field(default_factory=dict)
    partition: Partitioner | None = None
    model: Spec = field(default_factory=Logistic)
    loss: Loss | None = None
    silos: tuple[str, ...] = ()  # names of the natural clients, in the order in which the plan counts them
    init: str | None = None  # a safetensors file of weights to begin with, declared public
    half: Half | None = None  # the part of the test rows that a run is judged by, where the others report

    @property
    def preparations(self) -> tuple[Preparation, ...]:
        """What must be released of the data's columns before the first round."""
        return datasets.preparations(self.dataset, self.options)

    @property
    def named(self) -> bool:
        """Whether the silos of this data have names, known without reading it."""
        return (self.partition is None or isinstance(self.partition, Natural)) and names_silos(
            self.dataset, self.options
        )

    def build(self, population: int, seed: int, metrics: tuple[Metric, ...] = ()) -> Task:
        """Load the data, cut it, build the model; coins of the cut come from the run's seed."""
        data = self._load()
        clients = self._clients(data, population, seed)
        model = build_seeded(self.model, data.x.shape[1:], data.classes or 1, seed)
        model, init = (model, None) if self.init is None else begun(model, self.init)
        test = _records(data.test_x, data.test_y) if len(data.test_y) else None
        groups, names = (None, ()) if test is None else _test_groups(data)
        loss, waiting = self.loss or _loss(data), data.waiting
        task = Task(
            model, clients, test, loss, init=init, metrics=metrics, groups=groups, group_names=names, waiting=waiting
        )
        _try_loss(task)
        return task if self.half is None else self.half.of(task)

    def declared(self, task: Task) -> tuple[Declared, ...]:
        """The rows of the built task, and the weights, that are public, and by whose word."""
        if isinstance(self.model, Given):
            return declared_by_caller(task)
        what, by = declared_by(self.dataset, self.options)
        what = what if self.half is None else f"{what}, {self.half.words}"
        rows = () if task.test is None else (Declared(len(task.test), what, by),)
        values = datasets.declared_values(
            self.dataset, self.options, labels=not task.clients.records.y.is_floating_point()
        )
        return (*rows, *(Declared(*one) for one in values), *declared_weights(task))

    def _clients(self, data: Dataset, population: int, seed: int) -> Clients:
        if data.offsets is not None:
            if self.partition is not None:
                raise ConfigError("a partition of mapped data", "none", "clients.npy says who holds which rows")
            records = replace(_records(data.x, data.y), lazy=True)
            return Clients(records, np.arange(len(data.x), dtype=np.int64), data.offsets)
        cut = self.partition or (Natural() if data.groups is not None else Iid(population))
        split = cut.split(data.y, self._groups(data, cut), Seeded(seed).at(0, "partition"))
        return Clients(_records(data.x, data.y), split.index, split.offsets)

    def _groups(self, data: Dataset, cut: Partitioner) -> NDArray[np.int64] | None:
        """The natural client of every record, counted in the order of `silos` where that is given."""
        if not self.silos or data.groups is None:
            if self.silos:
                raise ConfigError("names of silos, and data without natural silos", "a list without names")
            return data.groups
        if not isinstance(cut, Natural) or cut.clients is not None or not data.names:
            raise ConfigError("names of silos, and a partition that has none", "all natural silos, or no names")
        check_names(list(self.silos), list(data.names), "[task] silos", "the data")
        place = np.array([self.silos.index(name) for name in data.names])
        return np.asarray(place[np.unique(data.groups, return_inverse=True)[1]], dtype=np.int64)

    def _load(self) -> Dataset:
        if isinstance(self.model, Given):
            raise self.model.missing()
        try:
            return load(self.dataset, **self.options)
        except TypeError as error:  # a value of the wrong type, or a name that is not an option
            raise ConfigError(f"task.options = {self.options} ({error})", f"options of {self.dataset}") from None


def _records(x: Any, y: Any) -> Records:
    return Records(torch.from_numpy(x), torch.from_numpy(y))


def _test_groups(data: Dataset) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """The natural client of every test record, by name where clients have names: public, as the record is."""
    if data.test_groups is None:
        return None, ()
    known = [] if data.groups is None else np.unique(data.groups).tolist()
    names = dict(zip(known, data.names, strict=False))
    numbers, places = np.unique(data.test_groups, return_inverse=True)
    return torch.from_numpy(places.reshape(-1)), tuple(names.get(number, str(number)) for number in numbers.tolist())


def _try_loss(task: Task) -> None:
    """A record of zeros through model and loss: they must fit before anything is written."""
    like = task.clients.records
    x, y = (
        torch.zeros((1, *like.x.shape[1:]), dtype=like.x.dtype),
        torch.zeros((1, *like.y.shape[1:]), dtype=like.y.dtype),
    )
    try:
        task.losses(copy.deepcopy(task.model).eval()(x), y)
    except (RuntimeError, ValueError, IndexError) as error:
        needed = "a model and a loss that fit the data"
        raise ConfigError(f"loss {task.losses.kind!r} that fails on a record of its shape ({error})", needed) from None


def _loss(data: Dataset) -> Loss:
    return CrossEntropy() if data.classes else Mse()


@dataclass(frozen=True)
class SiloBudget:
    """What one silo may spend; delta defaults to the file's, else to size^-1.1 of the silo."""

    epsilon: float
    delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrivacySpec:
    """delta (default population^-1.1), where the noise comes from, and what one client may spend at most.

    `client_epsilon` stops the run before a round in which somebody would spend more, to one who sees the cohort.
    `silos` gives every silo its own budget and delta, by name, or in order where silos have no names; a round that
    would cost one more is not run. `ledger` is a file that all runs on the same data are charged to, before the first
    round; `dataset` is the name that the data have in it. `selected` is what `sordino tune --private` writes: the run
    is the best of many, and is billed so.
    """

    delta: float | None = None
    allow_large_delta: bool = False
    noise: Mode = "simulation"
    client_epsilon: float | None = None
    silos: tuple[SiloBudget, ...] = ()
    ledger: str | None = None
    dataset: str | None = None
    selected: Selection | None = None
    deltas: tuple[float, ...] = ()  # one for every silo, in the plan's order

    def __post_init__(self) -> None:
        if (self.ledger is None) != (self.dataset is None):
            found, lacks = ("ledger", "dataset") if self.dataset is None else ("dataset", "ledger")
            raise ConfigError(f"{found} without {lacks} in [privacy]", "both or neither", f"add {lacks} = ...")
        if self.selected is not None and (self.silos or self.client_epsilon is not None):
            raise ConfigError("the best of many tries under a budget in [privacy]", "tries that end by themselves")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What does not change the guarantee. `coins` seeds a simulation's cohorts, batches and noise; default: `seed`."""

    seed: int = 0
    coins: int | None = None
    eval_every: int = 1
    train_metrics: bool | None = None  # evaluate on the clients' own records too: a diagnostic, NOT private
    metrics: tuple[Metric, ...] = ()  # of the test records, beside loss and accuracy
    stop: EarlyStopping | None = None  # end early by public figures; all planned rounds are billed

    def __post_init__(self) -> None:
        for name, number in (("seed", self.seed), ("coins", self.coins or 0)):
            if not -(2**63) <= number < 2**63:
                raise ConfigError(f"{name} = {number}", "a whole number of at most 64 bits")
        if self.eval_every < 1:
            raise ConfigError(f"eval_every = {self.eval_every}", "at least 1", "1 evaluates after every round")


@dataclass(frozen=True, kw_only=True)
class FederationSpec:
    """Who takes part over a network; nothing of it changes the guarantee.

    `silos` are the names under which nodes are registered, in the order in which the plan counts its clients. A round
    of fewer than `quorum` reports (default: all that it asks) is asked again, `tries` times in all, each `timeout`
    seconds long. The server has no records: `inputs` and `classes` say what the model reads and tells apart (0: a
    number), and `test` names a file of public rows (.npz with x and y), if there is one.
    """

    silos: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    classes: int = 2
    test: str | None = None
    quorum: int | None = None
    timeout: float = 60.0
    tries: int = 3
    port: int = 8000

    def __post_init__(self) -> None:
        wrong = next((name for name in self.silos if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name)), None)
        if wrong is not None:
            raise ConfigError(f"silo {wrong!r} in [federation]", "letters, digits, - and _, at most 64 of them")
        if len(set(self.silos)) != len(self.silos) or not self.silos:
            raise ConfigError(f"[federation] silos = {list(self.silos)}", "at least one name, and each once")
        if self.tries < 1 or not 0 < self.timeout < math.inf or not 0 < self.port < 2**16:
            found = f"[federation] tries = {self.tries}, timeout = {self.timeout:g}, port = {self.port}"
            raise ConfigError(found, "at least one try, seconds above 0, a port below 65536")
        if self.quorum is not None and not 1 <= self.quorum <= len(self.silos):
            raise ConfigError(
                f"[federation] quorum = {self.quorum} of {len(self.silos)} silos", "from 1 to all of them"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole file."""

    task: TaskSpec = field(default_factory=TaskSpec)
    plan: Plan
    privacy: PrivacySpec = field(default_factory=PrivacySpec)
    run: RunSpec = field(default_factory=RunSpec)
    federation: FederationSpec | None = None

    def __post_init__(self) -> None:
        check_deltas(self.plan, self.delta, self.deltas, self.privacy.allow_large_delta)
        self._check_names()
        self._check_federation()
        self._check_prepare()
        check_train_metrics(self.run.train_metrics, self.privacy.noise)

    def _check_prepare(self) -> None:
        """What columns wait for is what the plan releases, and bills: `parse` takes the one from the other."""
        asked = self.task.preparations
        if asked != self.plan.prepare and not isinstance(self.task.model, Given):
            found = (
                f"columns that ask for {len(asked)} histograms, and a plan that releases other {len(self.plan.prepare)}"
            )
            raise ConfigError(found, "the same in both", "drop plan.prepare: it is taken from [task.options.columns]")

    def _check_federation(self) -> None:
        """The federation's silos are the plan's clients, one by one."""
        if self.federation is None:
            return
        names, population = self.federation.silos, self.plan.clients.population
        if len(names) != population:
            raise ConfigError(f"{len(names)} silos in [federation] and a plan for {population}", "one silo per client")
        if self.task.silos and names != self.task.silos:
            found = f"[federation] silos = {list(names)} and values for {list(self.task.silos)}"
            raise ConfigError(found, "the same names in the same order", f"silos = {list(self.task.silos)}")

    def _check_names(self) -> None:
        """A list has an order, and the data's order of named silos is nobody's choice: values of theirs have names."""
        names, population = self.task.silos, self.plan.clients.population
        if names and len(names) != population:
            raise ConfigError(f"{len(names)} names of silos in a plan for {population}", "a name for every silo")
        if not names and self.task.named and (self.privacy.silos or self.privacy.deltas or _differ(self.plan)):
            found = "a list with a value for every silo, whose order is not that of anything in this file"
            fix = (
                "write silos.NAME = { epsilon = ... }, sizes = { NAME = ... }, or name the order: [task] silos = [...]"
            )
            raise ConfigError(found, "values by the silos' names", fix)

    @property
    def delta(self) -> float:
        """The delta that the certificate will state."""
        given = self.privacy.delta
        return default_delta(self.plan.units) if given is None else given

    @property
    def deltas(self) -> tuple[float, ...]:
        """The delta of every silo, where each has its own: given, or by its size."""
        given = tuple(budget.delta for budget in self.budgets)
        own = given or self.privacy.deltas
        return own or (silo_deltas(self.plan) if self.privacy.delta is None else ())

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Every silo's own, in the plan's order."""
        reads, common = self.plan.local.reads, self.privacy.delta

        def delta(silo: int, own: SiloBudget) -> float:
            sizes = reads is not None and silo < self.plan.clients.population
            by_size = default_delta(reads.size(silo) if sizes and reads is not None else self.plan.units)
            return next(value for value in (own.delta, common, by_size) if value is not None)

        return tuple(Budget(own.epsilon, delta(silo, own)) for silo, own in enumerate(self.privacy.silos))

    @property
    def budgeted(self) -> bool:
        """Whether a budget may end the run."""
        return self.privacy.client_epsilon is not None or bool(self.privacy.silos)

    @property
    def budget(self) -> Filter | None:
        """The filter of `client_epsilon` and of the silos' own budgets, with nothing spent yet."""
        if not self.budgeted:
            return None
        limit, own = self.privacy.client_epsilon, dict(enumerate(self.budgets))
        return client_filter(self.plan, Budget(limit, self.delta) if limit is not None else own[0], own)

    @property
    def facts(self) -> dict[str, Any]:
        """What a certificate takes from this file beside the plan, delta and noise."""
        known = {"deltas": self.deltas, "names": self.task.silos, "filtered": self.budgeted}
        given = {"given": self.task.model.told} if isinstance(self.task.model, Given) else {}
        return {**known, **given, "foreign": self.foreign, "selection": self.privacy.selected}

    def check_alone(self) -> None:
        """Refuse what is the best of many tries: it was paid for with them, and to run it again is another release."""
        if self.privacy.selected is not None:
            found = "a file that holds the best of many private tries"
            raise ConfigError(found, "a file of one run", "drop [privacy.selected]: another run is another release")

    @property
    def streams(self) -> Streams:
        """Where the coins of a run come from."""
        own = self.run.seed if self.run.coins is None else self.run.coins
        return streams(self.privacy.noise, own)

    @property
    def foreign(self) -> tuple[codec.Foreign, ...]:
        """What is not Sordino's own in this file: parts of the plan, the model, the partition, the data set."""
        return tuple(sorted({*codec.foreign(self), *datasets.foreign(self.task.dataset)}))

    def check_task(self) -> None:
        """Refuse, before any data is read, what a run of this file would refuse."""
        self.look()

    def look(self) -> tuple[str, ...]:
        """`check_task`, and what its owner should know; of own tables the files' names and headers are looked at."""
        task = self.task
        if isinstance(task.model, Given):
            return ()
        datasets.check_known(task.dataset, task.options)
        seen = datasets.look(task.dataset, task.options)
        natural = task.partition is None or task.partition == Natural()
        if natural and seen.names and task.silos:
            check_names(list(task.silos), list(seen.names), "[task] silos", "the data")
        found = len(seen.names) or None if natural else getattr(task.partition, "clients", None)
        check_early(self.plan, found, False, InProcess())
        self._try_model()
        self._check_stop()
        return seen.notes

    def _try_model(self) -> None:
        """Made-up records through model and loss, where shape and classes are known without the data."""
        spec = self.federation
        known = datasets.record_of(self.task.dataset) if spec is None else (spec.inputs, spec.classes)
        if known is None or not known[0]:
            return
        (shape, classes), loss = known, self.task.loss
        model = build_seeded(self.task.model, shape, classes or 1, self.run.seed)
        y = torch.zeros(2, dtype=torch.int64 if classes else torch.float32)
        Task(model, Clients.of([(torch.zeros(2, *shape), y)]), loss=loss or (CrossEntropy() if classes else Mse()))
        if self.plan.local.reads is not None:
            check_layers(model)

    def _check_stop(self) -> None:
        """A figure to stop by that no evaluation gives; of metrics with names of their own nothing is known."""
        stop, asked = self.run.stop, [one.called for one in self.run.metrics]
        if stop is not None and not {"own", "group_accuracy"} & {one.kind for one in self.run.metrics}:
            stop.check_name(["loss", "accuracy", "balanced_accuracy", "rmse", *asked])

    def check_budget(self) -> None:
        """Refuse a plan that must overspend a budget of its own file."""
        budget = self.budget
        if budget is not None:
            check_affordable(self.plan, budget, self.task.silos)

    def build(self) -> Task:
        """The task of this file."""
        return self.task.build(self.plan.clients.population, self.run.seed, self.run.metrics)


def _differ(plan: Plan) -> bool:
    """Whether the plan has a list with different values for different silos."""
    held = (
        getattr(plan.local.reads, "sizes", ()),
        *(getattr(p, "multipliers", ()) for p in (plan.release, plan.local)),
    )
    return any(len(set(values)) > 1 for values in held)


def load_config(path: Path, changes: Sequence[str] = ()) -> Config:
    """Read a file, with single values changed (`recipe.lr=0.5`); every mistake in it is one sentence."""
    return parse(overridden(read_table(path), dict(map(override.read, changes))))


def read_table(path: Path) -> dict[str, Any]:
    """What a file says, before anything of it is understood."""
    return toml.table(path, "see 'sordino recipes show dp_fed_ls'")


def overridden(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table with other values at some places; those of a plan that a recipe builds are changed in what it built."""
    known = ["recipe", *(part.name for part in fields(Config))]
    later = [key for key in changes if key.startswith("plan.") and "recipe" in table]
    data = dict(table)
    for key in sorted(changes, key=lambda key: key in later):
        if (first := key.partition(".")[0]) not in known:
            raise ConfigError(f"unknown key {key}", "a known table", codec.nearest(first, known))
        if key in later and "recipe" in data:
            data = codec.dump(parse(data))
        data = override.put(data, key, changes[key])
    return data


def parse(table: Mapping[str, Any]) -> Config:
    """The configuration that a table describes; `[recipe]` stands for the plan it builds."""
    codec.check_plain(table)
    plugins.load()
    data = resolved(table)
    if "recipe" in data:
        if "plan" in data:
            raise ConfigError("both [recipe] and [plan]", "one of them", "drop [recipe] if the plan is written out")
        data["plan"] = from_recipe(_with_budgets(data.pop("recipe"), data.get("privacy")), _asked(data))
    elif "plan" not in data:
        raise ConfigError("neither [recipe] nor [plan]", "one of them", "see 'sordino recipes list'")
    elif isinstance(data["plan"], Mapping) and "prepare" not in data["plan"]:
        data["plan"] = {**data["plan"], "prepare": [codec.dump(part) for part in _asked(data)]}
    config: Config = codec.read(Config, data)
    return config


def _with_budgets(recipe: Any, privacy: Any) -> Any:
    """A recipe that asks for epsilons takes those of `[privacy] silos`, unless it has its own."""
    own = privacy.get("silos") if isinstance(privacy, Mapping) else None
    if not own or not isinstance(recipe, Mapping) or recipe.get("name") != "silo" or "epsilons" in recipe:
        return recipe
    budgets: tuple[SiloBudget, ...] = codec.read(tuple[SiloBudget, ...], own, "privacy.silos")
    deltas = [budget.delta for budget in budgets if budget.delta is not None]
    common = [privacy["delta"]] if "delta" in privacy else []
    if deltas and len(deltas) < len(budgets):
        raise ConfigError("a delta for some silos", "one for all of them, or for none", "set it in privacy.silos")
    return {**recipe, "epsilons": [budget.epsilon for budget in budgets], "deltas": deltas or common}


def _asked(data: Mapping[str, Any]) -> tuple[Preparation, ...]:
    """What the columns of the data ask the plan to release before its first round."""
    task = data.get("task")
    known = isinstance(task, Mapping) and isinstance(task.get("options"), Mapping)
    return datasets.preparations(str(task.get("dataset")), task["options"]) if known and task is not None else ()


def from_recipe(table: Any, prepare: tuple[Preparation, ...] = ()) -> Plan:
    """`name` picks the function, the other keys are its arguments; one that solves for a budget is told `prepare`."""
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError("[recipe] without a name", 'name = "..."', f"known: {', '.join(RECIPES)}")
    arguments = {key: value for key, value in table.items() if key != "name"}
    name = table["name"]
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r}", "a known recipe", codec.nearest(name, list(RECIPES)))
    told = {"prepare": prepare} if prepare and "prepare" in inspect.signature(RECIPES[name]).parameters else {}
    plan: Plan = codec.call(RECIPES[name], {**arguments, **told}, "recipe")
    return plan if plan.prepare == prepare else replace(plan, prepare=prepare)
