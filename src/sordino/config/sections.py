"""Sections [task], [privacy], [run] and [federation] of a configuration file. Called by `config.file` and scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sordino import codec
from sordino.accounting.composition import Selection
from sordino.certificate.facts import Declared
from sordino.data import datasets
from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.lineage import load_initial
from sordino.data.metrics import LOWER, Metric
from sordino.data.program import Trust
from sordino.data.records import Dataset, Iid, Ints, Natural, Partitioner
from sordino.data.tables import Encoding, Person, declared_encoding
from sordino.errors import ConfigError, DataError
from sordino.features.extractors import Extractor
from sordino.models import Architecture, InMemoryModel, Logistic, build_seeded
from sordino.parts.losses import CrossEntropy, Loss, Mse, Tokens
from sordino.parts.mechanisms import Preparation
from sordino.rng import Mode, Seeded
from sordino.task import PublicSource, Task


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Section [task] of a configuration file: data, partition into clients, and model.

    Without a partition, clients are the data's natural clients if it has any, else iid. `init` is a safetensors file
    with initial weights, which the user declares public: the data they were trained on is not protected by the run, and
    the certificate says so, with the file's hash. `own_code = "trusted"` means that the user vouches for model or loss
    code that cannot be captured as a graph.
    """

    dataset: str = "digits"
    options: dict[str, Any] = field(default_factory=dict)
    partition: Partitioner | None = None
    model: Architecture = field(default_factory=Logistic)
    loss: Loss | None = None
    silos: tuple[str, ...] = ()  # names of the natural clients, in the order of the plan's clients
    init: str | None = None
    own_code: Trust | None = None
    half: HoldoutPart | None = None  # the part of the test rows that a run is evaluated on
    features: Extractor | None = None  # public features that the model reads in place of the records

    @property
    def preparations(self) -> tuple[Preparation, ...]:
        """Private histograms of the data's columns that must be released before the first round."""
        return datasets.preparations(self.dataset, self.options)

    @property
    def person(self) -> Person | None:
        """Column that names persons, if all rows of one person are one record; else None."""
        table = self.options.get("person") if self.dataset in datasets.TABLES else None
        found: Person | None = None if table is None else codec.read(Person, table, "task.options.person")
        return found

    def absolute(self) -> TaskSpec:
        """Return the section with absolute paths of its files, for processes that run in other folders."""

        def absolute(given: Any) -> Any:
            return [absolute(one) for one in given] if isinstance(given, list) else str(Path(given).absolute())

        files = {key: absolute(value) for key, value in self.options.items() if key in ("path", "files", "test")}
        return replace(self, options={**self.options, **files}) if self.dataset in datasets.OWN else self

    @property
    def encoding(self) -> Encoding | None:
        """Encoding of a table's columns, if the configuration declares it; None for other data."""
        declared = self.dataset in datasets.TABLES and (self.options.get("columns") or self.options.get("ranges"))
        return declared_encoding(self.options) if declared else None

    @property
    def named(self) -> bool:
        """Whether the silos of this data have names, as can be told without reading the data."""
        natural = self.partition is None or isinstance(self.partition, Natural)
        return natural and datasets.names_silos(self.dataset, self.options)

    def build(self, population: int, seed: int, metrics: tuple[Metric, ...] = ()) -> Task:
        """Load the data, cut it into clients and build the model; return the task. The seed determines all draws."""
        if isinstance(self.model, InMemoryModel):
            raise self.model.missing()
        try:
            data = load(self.dataset, **self.options)
        except TypeError as error:  # a value of the wrong type, or a name that is not an option
            found, needed = f"task.options = {self.options} ({error})", f"options of {self.dataset}"
            raise ConfigError(found, needed, "change or drop the option that the message names") from None
        data = data if self.features is None else self.features.of_dataset(data)
        records = Records(torch.from_numpy(data.x), torch.from_numpy(data.y), lazy=data.offsets is not None)
        if data.offsets is not None:
            if self.partition is not None:
                fix = "drop the partition: clients.npy says which client holds which rows"
                raise ConfigError("a partition of memory-mapped data", "no partition", fix)
            clients = Clients(records, np.arange(len(data.x), dtype=np.int64), data.offsets)
        else:
            cut = self.partition or (Natural() if data.groups is not None else Iid(population))
            owners = self._groups(data, cut) if self.silos else data.groups
            split = cut.split(data.y, owners, Seeded(seed).at(0, "partition"))
            clients = Clients(records, split.index, split.offsets, names=self.silos)
        model = build_seeded(self.model, data.x.shape[1:], data.classes or 1, seed, data.rows)
        model, init = (model, None) if self.init is None else load_initial(model, self.init)
        test = Records(torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)) if len(data.test_y) else None
        usual = Tokens() if data.rows > 1 else CrossEntropy() if data.classes else Mse()  # mean over a person's rows
        groups, names = (None, ()) if test is None or data.test_groups is None else _test_groups(data)
        task = Task(
            model, clients, test, self.loss or usual, init=init, metrics=metrics,
            groups=groups, group_names=names, waiting=data.waiting, own_code=self.own_code, encoding=data.encoding,
            source=self.source(labels=not records.y.is_floating_point(), declared=data.declared),
        )  # fmt: skip
        return task if self.half is None else self.half.of(task)

    def source(self, labels: bool, declared: tuple[Declared, ...] = ()) -> PublicSource:
        """Return which rows of the data set are declared public, and by whom; `labels` says if targets are classes."""
        rows, by, values = datasets.declarations(self.dataset, self.options, labels=labels)
        rows = rows if self.half is None else f"{rows}, {self.half.words}"
        return PublicSource(rows, by, (*(Declared(*one) for one in values), *declared))

    def _groups(self, data: Dataset, cut: Partitioner) -> Ints:
        """Return the number of every record's natural client in the order of `silos`."""
        if data.groups is None:
            found = "names of silos for data without natural silos"
            raise ConfigError(found, "values in a list, without names", "drop the names")
        if not isinstance(cut, Natural) or cut.clients is not None or not data.names:
            found, needed = "names of silos with a partition that has none", "a partition by natural silos, or no names"
            raise ConfigError(found, needed, "drop the partition or the names")
        check_names(list(self.silos), list(data.names), "[task] silos", "the data")
        place = np.array([self.silos.index(name) for name in data.names])
        return np.asarray(place[np.unique(data.groups, return_inverse=True)[1]], dtype=np.int64)


def _test_groups(data: Dataset) -> tuple[torch.Tensor, tuple[str, ...]]:
    known = [] if data.groups is None else np.unique(data.groups).tolist()
    names = dict(zip(known, data.names, strict=False))
    numbers, places = np.unique(np.asarray(data.test_groups), return_inverse=True)
    return torch.from_numpy(places.reshape(-1)), tuple(names.get(number, str(number)) for number in numbers.tolist())


def check_names(found: list[str], known: list[str], where: str, of: str) -> None:
    """Raise an error for unknown, repeated and missing names of silos."""
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"silo {twice!r} twice in {where}", "every silo once", "drop one of the two")
    unknown = next((name for name in found if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"silo {unknown!r} in {where}", f"a silo of {of}", codec.nearest(unknown, known))
    missing = next((name for name in known if name not in found), None)
    if missing is not None:
        raise ConfigError(f"no silo {missing!r} in {where}", f"every silo of {of}", f"add {where}.{missing}")


@dataclass(frozen=True)
class SiloBudget:
    """Privacy budget of one silo; delta defaults to the file's, else to min(size^-1.1, 1e-3) of the silo."""

    epsilon: float
    delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrivacySpec:
    """Section [privacy] of a configuration file: delta, kind of noise, and budgets of clients and silos.

    `delta` defaults to min(population^-1.1, 1e-3). `client_epsilon` stops the run before a round in which some client
    would exceed it, against an adversary who sees the cohort. `silos` gives every silo its own budget and delta, by
    name, or in order if silos have no names; a round that would exceed one of them is not run. `ledger` is a file to
    which all runs on the same data are charged before their first round; `dataset` is the name of the data in it.
    `selected` is written by `sordino tune --private`: the run is the best of many trials, and is accounted as such.
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

    @property
    def limited(self) -> bool:
        """Whether a privacy budget of clients or silos may end the run early."""
        return self.client_epsilon is not None or bool(self.silos)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Section [run] of a configuration file: settings that do not change the privacy guarantee.

    `draw_seed` seeds the cohorts, batches and noise of a simulation; by default `seed` does.
    """

    seed: int = 0
    draw_seed: int | None = None
    eval_every: int = 1
    train_metrics: bool | None = None  # evaluate on the clients' own records too: a diagnostic, NOT private
    metrics: tuple[Metric, ...] = ()  # of the test records, beside loss and accuracy
    stop: EarlyStopping | None = None  # end early by public figures; all planned rounds are accounted


@dataclass(frozen=True, kw_only=True)
class FederationSpec:
    """Section [federation] of a configuration file: the silos of a run over a network, and how they are asked.

    Nothing here changes the guarantee. `silos` are the names under which nodes are registered, in the order of the
    plan's clients. A round with fewer than `quorum` reports (default: all silos of the round) is tried again, `tries`
    times in all, each `timeout` seconds long. The server has no records, so `inputs` is the shape of a record and
    `classes` the number of classes (0: real targets; default: 2), unless [task.options] declares the columns of a
    table. `test` is a file of public rows: an .npz with x and y, or a table. With `simulated`, all silos' rows are
    those of [task], on this machine. `keys` are the silos' public node keys (an OpenSSH line, ECDSA): messages signed
    by another key are refused. `project` is the run's name in the silos' ledgers and logs.
    """

    silos: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    classes: int | None = None
    test: str | None = None
    simulated: bool = False
    quorum: int | None = None
    timeout: float = 60.0
    tries: int = 3
    port: int = 8000
    keys: dict[str, str] = field(default_factory=dict)
    project: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w .,:-]{0,80}", self.project):
            needed = "at most 80 letters, digits, spaces and . , : - _"
            raise ConfigError(f"[federation] project = {self.project[:90]!r}", needed, "change project")
        wrong = next((name for name in self.silos if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name)), None)
        if wrong is not None:
            needed = "a name of at most 64 letters, digits, - and _"
            raise ConfigError(f"silo {wrong!r} in [federation]", needed, "rename the silo")
        if len(set(self.silos)) != len(self.silos) or not self.silos:
            found, needed = f"[federation] silos = {list(self.silos)}", "at least one name, and no name twice"
            raise ConfigError(found, needed, "list every silo once")
        if self.tries < 1 or not 0 < self.timeout < math.inf or not 0 < self.port < 2**16:
            found = f"[federation] tries = {self.tries}, timeout = {self.timeout:g}, port = {self.port}"
            needed = "at least one try, seconds above 0, a port below 65536"
            raise ConfigError(found, needed, "change the number that is out of range")
        if self.quorum is not None and not 1 <= self.quorum <= len(self.silos):
            found = f"[federation] quorum = {self.quorum} of {len(self.silos)} silos"
            raise ConfigError(found, "a quorum from 1 to the number of silos", "lower quorum, or drop it for all silos")
        for name, key in self.keys.items():
            if name not in self.silos or not re.fullmatch(r"ecdsa-sha2-nistp(256|384|521) [A-Za-z0-9+/]+=*", str(key)):
                found = f"[federation] keys.{name} = {str(key)[:40]!r}"
                needed = "the name of a silo, and its node.pub in one line without a comment"
                raise ConfigError(found, needed, "copy the first two words of the silo's node.pub")
        if len(set(self.keys.values())) != len(self.keys):
            found = "[federation] keys with one key for two silos"
            raise ConfigError(found, "a key of its own for every silo", "let each silo create its own key")


LEAST = 2  # rows of a part


@dataclass(frozen=True)
class HoldoutPart:
    """Part of the public test rows that a run is evaluated on: `share` of the rows are validation, the rest test.

    Metrics on rows by which the best of many runs was chosen are too good. So a search evaluates on `validation` alone,
    and the winner is reported on `test`. A public seed decides which row is in which part.
    """

    part: Literal["validation", "test"]
    seed: int = 0
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"share = {self.share:g} of the test rows", "a share in (0, 1)", "set share = 0.5")

    def rows(self, count: int) -> Ints:
        """Return the row numbers of this part among `count` rows, ascending."""
        order = Seeded(self.seed).at(0, "halves of the test rows").permutation(count)
        cut = round(self.share * count)
        return np.sort(order[:cut] if self.part == "validation" else order[cut:]).astype(np.int64)

    def of(self, task: Task) -> Task:
        """Return the task with only this part of its public test rows as test rows."""
        test, groups = task.test, task.groups
        if test is None:
            fix = "name them in [task] options: test = ..., or public_test_fraction = 0.2"
            raise DataError("a task without public test rows", "rows to choose by and rows to report on", fix)
        rows = self.rows(len(test))
        if min(len(rows), len(test) - len(rows)) < LEAST:
            found, needed = f"{len(test)} public rows, cut in two parts", f"at least {LEAST} rows in each part"
            raise DataError(found, needed, "declare more public rows, or change share")
        place = torch.from_numpy(rows)
        mine = Records(test.x[place], test.y[place])
        return replace(task, test=mine, groups=None if groups is None else groups[place])

    @property
    def words(self) -> str:
        """Description of this part of the test rows, for the certificate."""
        return f"the {self.part} part, share {self.share:g}, public seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Early stopping rule: a run ends after `patience` evaluations in which `metric` did not improve by `margin`.

    `lower` says that smaller is better; by default for loss, rmse and mae. Stopping saves time, not epsilon: the rule
    reads released models and public rows alone, so a stopped run is post-processing of the run of all planned rounds,
    whose cost is charged. The cost of the rounds that ran would be no bound, since the time of stopping depends on the
    data through the models (tests/contracts/test_early_stopping.py has a counterexample).
    """

    metric: str = "loss"
    patience: int = 5
    margin: float = 0.0
    lower: bool | None = None

    def __post_init__(self) -> None:
        if self.patience < 1:
            found = f"patience = {self.patience} of early stopping"
            raise ConfigError(found, "at least one evaluation", "set patience = 5")
        if not 0 <= self.margin < float("inf"):
            raise ConfigError(f"margin = {self.margin} of early stopping", "0 or more", "set margin = 0")

    def ends(self, history: Iterable[Mapping[str, Any]]) -> int | None:
        """Return the round after which this rule ends a run with this history; None if it does not end."""
        best, since = float("inf"), 0
        sign = 1 if (self.metric in LOWER if self.lower is None else self.lower) else -1
        for line in history:
            if self.metric not in line:
                continue
            found = float(line[self.metric]) * sign
            since = 0 if found < best - self.margin else since + 1
            best = min(best, found)
            if since >= self.patience:
                return int(line["round"])
        return None

    def check(self, figures: Mapping[str, Any]) -> None:
        """Raise an error for a run without public test rows, and for a metric that no evaluation computes."""
        if not figures:
            found = f"early stopping on {self.metric!r} without public test rows"
            needed = "public test rows, since a metric of private rows costs epsilon"
            raise ConfigError(found, needed, "declare test rows in [task] options")
        self.check_name(list(figures))

    def check_name(self, known: Sequence[str]) -> None:
        """Raise an error if the metric of this rule is not among the known names."""
        if self.metric not in known:
            found = f"early stopping on {self.metric!r}"
            raise ConfigError(found, "one of " + ", ".join(sorted(known)), codec.nearest(self.metric, list(known)))

    @property
    def words(self) -> str:
        """Sentence on an early end of a run, for the certificate."""
        why = "all planned rounds are accounted, because released models decided when to stop"
        return f"early stopping on public rows: {self.metric} was not better in {self.patience} evaluations; {why}"
