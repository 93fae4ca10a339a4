"""A federation as one TOML file: the task, the plan (written out, or a recipe), privacy and run settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from sordino import codec
from sordino.accounting.calibration import Budget
from sordino.accounting.delta import check_deltas, default_delta, silo_deltas
from sordino.certificate.facts import OwnCode
from sordino.config.sections import FederationSpec, PrivacySpec, RunSpec, SiloBudget, TaskSpec
from sordino.data import datasets
from sordino.data.clients import Clients, check_names, resolve_silo_names
from sordino.data.partition import Natural
from sordino.data.program import PLAIN
from sordino.engines.checks import check_layers
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError
from sordino.graph import BY_CONSTRUCTION
from sordino.ledger.budget import Filter, check_affordable, client_filter
from sordino.loop import check_needs, check_population, check_train_metrics
from sordino.models import ARCHITECTURES, InMemoryModel, build_seeded
from sordino.parts.losses import CrossEntropy, Mse, keeps_apart
from sordino.parts.mechanisms import Preparation
from sordino.plan import Plan
from sordino.recipes import RECIPES
from sordino.rng import Streams, streams
from sordino.task import Task

EXAMPLE = "see 'sordino recipes show dp_fed_ls'"


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
        if self.federation is not None or self.task.silos or self.task.named:
            self._check_silos()
        released = self.plan.prepare
        asked = self.task.preparations if self.task.options else ()
        if asked != released and not isinstance(self.task.model, InMemoryModel):  # `parse` takes them from the columns
            found = f"columns that ask for {len(asked)} histograms, and a plan that releases other {len(released)}"
            raise ConfigError(found, "the same in both", "drop plan.prepare: it is taken from [task.options.columns]")
        if self.run.train_metrics:
            check_train_metrics(True, self.privacy.noise)

    def _check_silos(self) -> None:
        """Silos have one order, the plan's: names of all of them, and no list of values whose order nobody states."""
        names, population, federation = self.task.silos, self.plan.clients.population, self.federation
        if names and len(names) != population:
            raise ConfigError(f"{len(names)} names of silos in a plan for {population}", "a name for every silo")
        if not names and self.task.named:
            local, own = self.plan.local, self.privacy.silos or self.privacy.deltas
            lists = (getattr(local.reads, "sizes", ()), self.plan.release.noise_multipliers, local.noise_multipliers)
            if own or any(len(set(values)) > 1 for values in lists):
                found = "a list with a value for every silo, whose order is not that of anything in this file"
                fix = "write silos.NAME = { epsilon = ... }, sizes = { NAME = ... }, or name the order: "
                raise ConfigError(found, "values by the silos' names", fix + "[task] silos = [...]")
        if federation is not None and len(federation.silos) != population:
            found = f"{len(federation.silos)} silos in [federation] and a plan for {population}"
            raise ConfigError(found, "one silo per client")
        if federation is not None and names and federation.silos != names:
            found = f"[federation] silos = {list(federation.silos)} and values for {list(names)}"
            raise ConfigError(found, "the same names in the same order", f"silos = {list(names)}")

    @property
    def delta(self) -> float:
        """The delta that the certificate will state."""
        given = self.privacy.delta
        return default_delta(self.plan.units) if given is None else given

    @property
    def deltas(self) -> tuple[float, ...]:
        """The delta of every silo, where each has its own: given, or by its size."""
        if self.privacy.silos:
            return tuple(budget.delta for budget in self.budgets)
        return self.privacy.deltas or (silo_deltas(self.plan) if self.privacy.delta is None else ())

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
    def budget(self) -> Filter | None:
        """The filter of `client_epsilon` and of the silos' own budgets, before any charge; None without a budget."""
        limit = self.privacy.client_epsilon
        if limit is None and not self.privacy.silos:
            return None
        own = dict(enumerate(self.budgets))
        return client_filter(self.plan, Budget(limit, self.delta) if limit is not None else own[0], own)

    @property
    def facts(self) -> dict[str, Any]:
        """What a certificate takes from this file beside the plan, delta and noise."""
        known = {"deltas": self.deltas, "names": self.task.silos, "filtered": self.privacy.limited}
        given = {"given": self.task.model.certificate_entry} if isinstance(self.task.model, InMemoryModel) else {}
        return {**known, **given, "foreign": self.foreign, "selection": self.privacy.selected}

    def check_alone(self) -> None:
        """Refuse what is the best of many trials: it was paid for with them, and to run it again is another release."""
        if self.privacy.selected is not None:
            found = "a file that holds the best of many private trials"
            raise ConfigError(found, "a file of one run", "drop [privacy.selected]: another run is another release")

    @property
    def streams(self) -> Streams:
        """Where the coins of a run come from."""
        return streams(self.privacy.noise, self.run.seed if self.run.coins is None else self.run.coins)

    @property
    def foreign(self) -> tuple[codec.Foreign, ...]:
        """What is not Sordino's own in this file: parts of the plan, the model, the partition, the data set."""
        return tuple(sorted({*codec.foreign(self), *datasets.foreign(self.task.dataset)}))

    def check_task(self) -> tuple[str, ...]:
        """Refuse, before any data is read, what a run of this file would refuse; what its owner should know."""
        if isinstance(self.task.model, InMemoryModel):
            return ()
        notes = self.look()
        check_needs(self.plan, False, InProcess())
        self.trial_task()
        stop, asked = self.run.stop, [one.called for one in self.run.metrics]
        if stop is not None and not {"own", "group_accuracy"} & {one.kind for one in self.run.metrics}:
            stop.check_name(["loss", "accuracy", "balanced_accuracy", "rmse", *asked])
        return notes

    def look(self) -> tuple[str, ...]:
        """Notes for the data's owner, before a row is read; of own tables the files' names and headers are read."""
        task = self.task
        datasets.check_known(task.dataset, task.options)
        seen = datasets.preview(task.dataset, task.options)
        natural = task.partition is None or (isinstance(task.partition, Natural) and task.partition.clients is None)
        if natural and seen.names and task.silos:
            check_names(list(task.silos), list(seen.names), "[task] silos", "the data")
        population = len(seen.names) or None if natural else getattr(task.partition, "clients", None)
        if population is not None:
            check_population(self.plan, population)
        return seen.notes

    def own_code(self) -> OwnCode | None:
        """What is proved of model and loss; None where it takes the shape of a record, not known without the data."""
        made = self.trial_task()
        if made is not None:
            return made.program.of(self.plan.unit)
        model, loss = self.task.model, self.task.loss
        ours = type(model) in ARCHITECTURES.values() and (loss is None or keeps_apart(loss))
        return OwnCode(BY_CONSTRUCTION, PLAIN) if ours and self.plan.unit == "client" else None

    def trial_task(self) -> Task | None:
        """The model with made-up records, where their shape and classes are known without the data; else None."""
        spec = self.federation
        if isinstance(self.task.model, InMemoryModel):
            return None
        known = datasets.record_of(self.task.dataset) if spec is None else (spec.inputs, spec.classes)
        if known is None or not known[0]:
            return None
        (shape, classes), loss = known, self.task.loss
        model = build_seeded(self.task.model, shape, classes or 1, self.run.seed)
        y = torch.zeros(2, dtype=torch.int64 if classes else torch.float32)
        held, usual = Clients.of([(torch.zeros(2, *shape), y)]), CrossEntropy() if classes else Mse()
        made = Task(model, held, loss=loss or usual, own_code=self.task.own_code)
        if self.plan.local.reads is not None:
            check_layers(model)
        return made

    def check_budget(self) -> None:
        """Refuse a plan that must overspend a budget of its own file."""
        budget = self.budget
        if budget is not None:
            check_affordable(self.plan, budget, self.task.silos)

    def build(self) -> Task:
        """The task of this file."""
        return self.task.build(self.plan.clients.population, self.run.seed, self.run.metrics)


def load_config(path: Path, changes: Sequence[str] = ()) -> Config:
    """Read a file, with single values changed (`recipe.lr=0.5`); every mistake in it is one sentence."""
    table = codec.read_toml(path, EXAMPLE)
    return parse(overridden(table, dict(map(codec.parse_setting, changes))) if changes else table)


def read_table(path: Path) -> dict[str, Any]:
    """What a file says, before anything of it is understood."""
    return codec.read_toml(path, EXAMPLE)


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
        data = codec.put(data, key, changes[key])
    return data


def parse(table: Mapping[str, Any]) -> Config:
    """The configuration that a table describes; `[recipe]` stands for the plan it builds."""
    codec.check_plain(table)
    codec.load_plugins()
    data = resolve_silo_names(table)
    task = data.get("task")
    prepare: tuple[Preparation, ...] = ()
    if isinstance(task, Mapping) and isinstance(task.get("options"), Mapping):  # what the data's columns ask for
        prepare = datasets.preparations(str(task.get("dataset")), task["options"])
    if "recipe" in data:
        if "plan" in data:
            raise ConfigError("both [recipe] and [plan]", "one of them", "drop [recipe] if the plan is written out")
        recipe, privacy = data.pop("recipe"), data.get("privacy")
        if isinstance(privacy, Mapping) and privacy.get("silos"):
            recipe = _with_budgets(recipe, privacy)
        data["plan"] = from_recipe(recipe, prepare)
    elif "plan" not in data:
        raise ConfigError("neither [recipe] nor [plan]", "one of them", "see 'sordino recipes list'")
    elif isinstance(data["plan"], Mapping):
        written = {"prepare": [codec.dump(part) for part in prepare], **data["plan"]}
        plan: Plan = codec.read(Plan, written, "plan")
        data["plan"] = plan.fitted()
    config: Config = codec.read(Config, data)
    return config


def _with_budgets(recipe: Any, privacy: Mapping[str, Any]) -> Any:
    """A recipe that asks for epsilons takes those of `[privacy] silos`, unless it has its own."""
    if not isinstance(recipe, Mapping) or recipe.get("name") != "silo" or "epsilons" in recipe:
        return recipe
    budgets: tuple[SiloBudget, ...] = codec.read(tuple[SiloBudget, ...], privacy["silos"], "privacy.silos")
    deltas = [budget.delta for budget in budgets if budget.delta is not None]
    common = [privacy["delta"]] if "delta" in privacy else []
    if deltas and len(deltas) < len(budgets):
        raise ConfigError("a delta for some silos", "one for all of them, or for none", "set it in privacy.silos")
    return {**recipe, "epsilons": [budget.epsilon for budget in budgets], "deltas": deltas or common}


def from_recipe(table: Any, prepare: tuple[Preparation, ...] = ()) -> Plan:
    """`name` picks the function, the other keys are its arguments; one that solves for a budget is told `prepare`."""
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError("[recipe] without a name", 'name = "..."', f"known: {', '.join(RECIPES)}")
    name = table["name"]
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r}", "a known recipe", codec.nearest(name, list(RECIPES)))
    arguments = {key: value for key, value in table.items() if key != "name"}
    told = {"prepare": prepare} if prepare and "prepare" in inspect.signature(RECIPES[name]).parameters else {}
    plan: Plan = codec.call(RECIPES[name], {**arguments, **told}, "recipe")
    return plan if plan.prepare == prepare else replace(plan, prepare=prepare)
