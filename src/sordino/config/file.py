"""Configuration file of a run (TOML): task, plan (written out, or a recipe), privacy, run and federation settings.

Called by `cli`, `runs`, `federation`, `tuning` and scripts. Values by silo name (`silos.NY = { epsilon = 1 }`,
`sizes = { NY = 300, LA = 120 }`) become lists in the order of `[task] silos`, in which the data is cut into clients.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sordino import codec
from sordino.accounting.accountant import check_deltas, default_delta, silo_deltas
from sordino.accounting.calibration import Budget
from sordino.certificate.facts import OwnCode
from sordino.config.sections import FederationSpec, PrivacySpec, RunSpec, SiloBudget, TaskSpec, check_names
from sordino.data import datasets
from sordino.data.clients import Clients
from sordino.data.program import PLAIN
from sordino.data.records import Natural
from sordino.engines.checks import check_layers
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError
from sordino.graph import BY_CONSTRUCTION
from sordino.ledger.budget import Filter, check_affordable, client_filter
from sordino.loop import check_needs, check_population, check_train_metrics
from sordino.models import ARCHITECTURES, InMemoryModel, build_seeded
from sordino.parts.losses import CrossEntropy, Loss, Mse, Tokens, is_record_wise
from sordino.parts.mechanisms import Preparation
from sordino.plan import Plan
from sordino.recipes import RECIPES
from sordino.rng import Secure, Seeded, Streams
from sordino.task import Task

EXAMPLE = "see 'sordino recipes show dp_fed_ls'"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run, in the sections of its TOML file."""

    task: TaskSpec = field(default_factory=TaskSpec)
    plan: Plan
    privacy: PrivacySpec = field(default_factory=PrivacySpec)
    run: RunSpec = field(default_factory=RunSpec)
    federation: FederationSpec | None = None

    def __post_init__(self) -> None:
        privacy, run = self.privacy, self.run
        if (privacy.ledger is None) != (privacy.dataset is None):
            found, lacks = ("ledger", "dataset") if privacy.dataset is None else ("dataset", "ledger")
            raise ConfigError(f"{found} without {lacks} in [privacy]", "both, or neither", f"add {lacks} = ...")
        if privacy.selected is not None and privacy.limited:
            found, needed = "both `selected` and a budget in [privacy]", "private trials that no budget ends early"
            raise ConfigError(found, needed, "drop the budget")
        for name, number in (("seed", run.seed), ("draw_seed", run.draw_seed or 0)):
            if not -(2**63) <= number < 2**63:
                raise ConfigError(f"{name} = {number}", "a whole number of at most 64 bits", f"use a smaller {name}")
        if run.eval_every < 1:
            raise ConfigError(f"eval_every = {run.eval_every}", "at least 1", "set 1 to evaluate after every round")
        check_deltas(self.plan, self.delta, self.deltas, privacy.allow_large_delta)
        if self.federation is not None or self.task.silos or self.task.named:
            self._check_silos()
        if "person" in self.task.options and self.plan.unit == "client":
            found = "a person column in a plan whose privacy unit is a client with all its rows"
            fix = 'drop person, or make every person a client: groups = "..."'
            raise ConfigError(found, "a plan whose privacy unit is a record, such as recipe silo", fix)
        released = self.plan.prepare
        asked = self.task.preparations if self.task.options else ()
        if asked != released and not isinstance(self.task.model, InMemoryModel):  # `parse` takes them from the columns
            found = f"columns that need {len(asked)} histograms, and a plan that releases {len(released)} others"
            fix = "drop plan.prepare, which is then taken from [task.options.columns]"
            raise ConfigError(found, "a plan that releases the histograms of the columns", fix)
        if run.train_metrics:
            check_train_metrics(True, privacy.noise)

    def _check_silos(self) -> None:
        names, population, federation = self.task.silos, self.plan.clients.population, self.federation
        if federation is not None and self.task.features is not None:
            fix = "let each silo compute its features itself, and set [federation] inputs to their number"
            found = "both [task.features] and [federation] in one file"
            raise ConfigError(found, "silos whose records are already features", fix)
        if names and len(names) != population:
            found = f"{len(names)} names of silos in a plan for {population} silos"
            raise ConfigError(found, "a name for every silo", "change [task] silos, or the plan's population")
        if not names and self.task.named:
            local, own = self.plan.local, self.privacy.silos or self.privacy.deltas
            lists = (getattr(local.reads, "sizes", ()), self.plan.release.noise_multipliers, local.noise_multipliers)
            if own or any(len(set(values)) > 1 for values in lists):
                found = "a list with a value for every silo, while nothing in this file states their order"
                fix = "write silos.NAME = { epsilon = ... }, sizes = { NAME = ... }, or name the order: "
                raise ConfigError(found, "values by the silos' names", fix + "[task] silos = [...]")
        if federation is not None and len(federation.silos) != population:
            found = f"{len(federation.silos)} silos in [federation] and a plan for {population} clients"
            raise ConfigError(found, "one silo per client", "change [federation] silos, or the plan's population")
        if federation is not None and names and federation.silos != names:
            found = f"[federation] silos = {list(federation.silos)} and values for {list(names)}"
            raise ConfigError(found, "the same names in the same order", f"write silos = {list(names)}")

    @property
    def delta(self) -> float:
        """Delta of the run's certificate."""
        return default_delta(self.plan.units) if self.privacy.delta is None else self.privacy.delta

    @property
    def deltas(self) -> tuple[float, ...]:
        """Delta of every silo, from the file or by the silo's size; empty if one delta holds for all."""
        if self.privacy.silos:
            return tuple(budget.delta for budget in self.budgets)
        by_size = self.plan.local.reads is not None and self.privacy.delta is None
        return self.privacy.deltas or (silo_deltas(self.plan) if by_size else ())

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Privacy budgets of the silos, in the plan's order of clients."""
        reads, common, population = self.plan.local.reads, self.privacy.delta, self.plan.clients.population
        found = []
        for silo, own in enumerate(self.privacy.silos):
            units = self.plan.units if reads is None or silo >= population else reads.size(silo)
            delta = own.delta if own.delta is not None else common
            found.append(Budget(own.epsilon, default_delta(units) if delta is None else delta))
        return tuple(found)

    @property
    def budget(self) -> Filter | None:
        """Privacy filter that enforces `client_epsilon` and the silos' own budgets; None without a budget."""
        limit = self.privacy.client_epsilon
        if limit is None and not self.privacy.silos:
            return None
        own = dict(enumerate(self.budgets))
        return client_filter(self.plan, Budget(limit, self.delta) if limit is not None else own[0], own)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the certificate that this file states, beside plan, delta and noise."""
        known: dict[str, Any] = {"deltas": self.deltas, "names": self.task.silos, "filtered": self.privacy.limited}
        person = self.task.person if "person" in self.task.options else None
        known |= {} if person is None else {"user_rows": person.rows}
        given = {"given": self.task.model.certificate_entry} if isinstance(self.task.model, InMemoryModel) else {}
        return {**known, **given, "foreign": self.foreign, "selection": self.privacy.selected}

    def check_alone(self) -> None:
        """Refuse a file of `sordino tune --private`: another run of it would be a release that is not accounted."""
        if self.privacy.selected is not None:
            found = "a file with the best of many private trials, of which another run is another release"
            raise ConfigError(found, "a file of one run", "drop [privacy.selected]")

    @property
    def streams(self) -> Streams:
        """Random streams of a run, for sampling, batches and noise."""
        seed = self.run.seed if self.run.draw_seed is None else self.run.draw_seed
        return Seeded(seed) if self.privacy.noise == "simulation" else Secure()

    @property
    def foreign(self) -> tuple[codec.Foreign, ...]:
        """Third-party parts in the plan, the model, the partition and the data set."""
        return tuple(sorted({*codec.foreign(self), *datasets.foreign(self.task.dataset)}))

    def check_task(self) -> tuple[str, ...]:
        """Return notes for the data's owner; raise an error for an invalid task before any data is read."""
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
        """Return warnings about the data, found in the names and headers of its tables; no row is read."""
        task = self.task
        seen = datasets.preview(task.dataset, task.options)
        natural = task.partition is None or (isinstance(task.partition, Natural) and task.partition.clients is None)
        if natural and seen.names and task.silos:
            check_names(list(task.silos), list(seen.names), "[task] silos", "the data")
        population = len(seen.names) or None if natural else getattr(task.partition, "clients", None)
        if population is not None:
            check_population(self.plan, population)
        return seen.notes

    def own_code(self) -> OwnCode | None:
        """Return the grade of record independence of model and loss; None if the shape of a record is not known yet."""
        trial = self.trial_task()
        if trial is not None:
            return trial.program.of(self.plan.unit)
        model, loss = self.task.model, self.task.loss
        ours = type(model) in ARCHITECTURES.values() and (loss is None or is_record_wise(loss))
        return OwnCode(BY_CONSTRUCTION, PLAIN) if ours and self.plan.unit == "client" else None

    def trial_task(self) -> Task | None:
        """Return a task with synthetic records; None if their shape and classes are not known without the data."""
        spec = self.federation
        if isinstance(self.task.model, InMemoryModel):
            return None
        known = datasets.record_of(self.task.dataset) if spec is None else self.record
        if known is None or not known[0] or self.task.features is not None:  # features are known once they are computed
            return None
        shape, classes = known
        model, loss, targets = self.model_and_loss(shape, classes)
        y = torch.zeros(2, *targets, dtype=torch.int64 if classes else torch.float32)
        held = Clients.of([(torch.zeros(2, *shape), y)])
        trial = Task(model, held, loss=loss, own_code=self.task.own_code)
        if self.plan.local.reads is not None:
            check_layers(model)
        return trial

    @property
    def record(self) -> tuple[tuple[int, ...], int]:
        """Shape of one record and number of classes (0: real targets), as the server knows them without records.

        They are stated in [federation], or by the columns of [task.options]; both must agree. An empty shape is
        unknown.
        """
        spec, encoding = self.federation, self.task.encoding
        assert spec is not None
        if encoding is None or spec.simulated:
            return spec.inputs, 2 if spec.classes is None else spec.classes
        rows = () if encoding.person is None or encoding.person.rows == 1 else (encoding.person.rows,)
        shape, classes = (*rows, encoding.width), encoding.classes or 0
        if spec.inputs not in ((), shape, shape[-1:]):
            found = f"[federation] inputs = {list(spec.inputs)}, and declared columns of {encoding.width} coordinates"
            fix = "declare every column that the model reads, and drop inputs"
            raise ConfigError(found, "the same shape of a record in both", fix)
        if spec.classes not in (None, classes):
            found = f"[federation] classes = {spec.classes}, and {classes} classes in [task.options]"
            raise ConfigError(found, "the same number of classes in both", "drop classes from [federation]")
        return shape, classes

    def model_and_loss(self, shape: tuple[int, ...], classes: int) -> tuple[nn.Module, Loss, tuple[int, ...]]:
        """Return the model with seeded initial weights (the same on every machine), its loss, and a target's shape.

        The default loss is cross-entropy for classes and squared error for real targets; for a person with several rows
        it is the mean over the rows.
        """
        person, usual = self.task.person, CrossEntropy() if classes else Mse()
        rows = 1 if person is None else person.rows
        model = build_seeded(self.task.model, shape, classes or 1, self.run.seed, rows)
        return model, self.task.loss or (Tokens() if rows > 1 else usual), (rows,) if rows > 1 else ()

    def check_budget(self) -> None:
        """Raise an error if the plan exceeds a privacy budget of this configuration."""
        budget = self.budget
        if budget is not None:
            check_affordable(self.plan, budget, self.task.silos)

    def build(self) -> Task:
        return self.task.build(self.plan.clients.population, self.run.seed, self.run.metrics)


def load_config(path: Path, changes: Sequence[str] = ()) -> Config:
    """Return the configuration of a file, with single values changed by settings such as `recipe.lr=0.5`."""
    table = codec.read_toml(path, EXAMPLE)
    return parse(overridden(table, dict(map(codec.parse_setting, changes))) if changes else table)


def read_table(path: Path) -> dict[str, Any]:
    """Return the TOML table of a configuration file without checking its keys."""
    return codec.read_toml(path, EXAMPLE)


def overridden(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration table with changed values; a key such as plan.rounds changes the plan of a recipe."""
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


PER_SILO = {"recipe": ("sizes", "epsilons", "deltas", "noise_multipliers"), "privacy": ("silos", "deltas")}


def resolve_silo_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration table with values by silo name as lists, in the order of `[task] silos`, or sorted."""
    data, tables = dict(table), dict[str, Mapping[str, Any]]()
    open_tables = [(part, part, data[part]) for part in PER_SILO if isinstance(data.get(part), Mapping)]
    for part, where, inside in open_tables:  # grows while it is read: tables at any depth
        for key, value in inside.items():
            if isinstance(value, Mapping) and key in PER_SILO[part]:
                tables[f"{where}.{key}"] = value
            elif isinstance(value, Mapping):
                open_tables.append((part, f"{where}.{key}", value))
    if not tables:
        return data
    task = dict(data["task"]) if isinstance(data.get("task"), Mapping) else {}
    listed, first = task.get("silos"), next(iter(tables))
    names = [str(name) for name in listed] if isinstance(listed, list) else sorted(tables[first])
    for where, by_name in tables.items():
        check_names(list(by_name), names, where, "[task] silos" if isinstance(listed, list) else first)
        data = codec.put(data, where, [by_name[name] for name in names])
    return data | {"task": {**task, "silos": names}}


def parse(table: Mapping[str, Any]) -> Config:
    """Return the configuration of a TOML table, in which a [recipe] is replaced by the plan that it builds."""
    codec.check_plain(table)
    codec.load_plugins()
    data = resolve_silo_names(table)
    task = data.get("task")
    prepare: tuple[Preparation, ...] = ()
    if isinstance(task, Mapping) and isinstance(task.get("options"), Mapping):
        prepare = datasets.preparations(str(task.get("dataset")), task["options"])
    if "recipe" in data:
        if "plan" in data:
            fix = "drop [recipe] if the plan is written out"
            raise ConfigError("both [recipe] and [plan]", "either [recipe] or [plan]", fix)
        recipe, privacy = data.pop("recipe"), data.get("privacy")
        if isinstance(privacy, Mapping) and privacy.get("silos"):
            recipe = _with_budgets(recipe, privacy)
        data["plan"] = from_recipe(recipe, prepare)
    elif "plan" not in data:
        raise ConfigError("neither [recipe] nor [plan]", "a table [recipe] or [plan]", "see 'sordino recipes list'")
    elif isinstance(data["plan"], Mapping):
        written = {"prepare": [codec.dump(part) for part in prepare], **data["plan"]}
        plan: Plan = codec.read(Plan, written, "plan")
        data["plan"] = plan.fitted()
    config: Config = codec.read(Config, data)
    return config


def _with_budgets(recipe: Any, privacy: Mapping[str, Any]) -> Any:
    if not isinstance(recipe, Mapping) or recipe.get("name") != "silo" or "epsilons" in recipe:
        return recipe
    budgets: tuple[SiloBudget, ...] = codec.read(tuple[SiloBudget, ...], privacy["silos"], "privacy.silos")
    deltas = [budget.delta for budget in budgets if budget.delta is not None]
    common = [privacy["delta"]] if "delta" in privacy else []
    if deltas and len(deltas) < len(budgets):
        fix = "set delta in every entry of privacy.silos"
        raise ConfigError("a delta for some silos, and none for others", "a delta for every silo, or for none", fix)
    return {**recipe, "epsilons": [budget.epsilon for budget in budgets], "deltas": deltas or common}


def from_recipe(table: Any, prepare: tuple[Preparation, ...] = ()) -> Plan:
    """Return the plan of a [recipe] table: `name` picks the recipe, the other keys are its arguments.

    A recipe that is calibrated to an epsilon gets the releases in `prepare`, which are part of the cost.
    """
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        fix = f"set name to one of: {', '.join(RECIPES)}"
        raise ConfigError("[recipe] without a name", "the name of a recipe", fix)
    name = table["name"]
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r}", "a known recipe", codec.nearest(name, list(RECIPES)))
    arguments = {key: value for key, value in table.items() if key != "name"}
    if prepare and "prepare" in inspect.signature(RECIPES[name]).parameters:
        arguments["prepare"] = prepare
    plan: Plan = codec.call(RECIPES[name], arguments, "recipe")
    return plan if plan.prepare == prepare else replace(plan, prepare=prepare)
