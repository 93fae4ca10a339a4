"""The section [task]: which data, cut how, and which model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.data import datasets
from sordino.data.datasets import Dataset, declared_by, load, names_silos
from sordino.data.halves import Half
from sordino.data.initial import begun
from sordino.data.metrics import Metric
from sordino.data.naming import check_names
from sordino.data.partition import Iid, Natural, Partitioner
from sordino.data.program import Word
from sordino.data.task import Clients, PublicSource, Records, Task
from sordino.errors import ConfigError
from sordino.models import Given, Logistic, Spec, build_seeded
from sordino.parts.losses import CrossEntropy, Loss, Mse
from sordino.parts.preparation import Preparation
from sordino.privacy.facts import Declared
from sordino.rng import Seeded


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Which data, cut how, and which model. Without a partition: the data's natural clients, else iid.

    `init` is a safetensors file with the model's first weights. They are declared public by whoever writes this file:
    what they were trained on is not protected by the run, and the certificate says so, with the file's hash.
    `own_code = "trusted"` vouches for a model or a loss of one's own that no graph can be captured of.
    """

    dataset: str = "digits"
    options: dict[str, Any] = field(default_factory=dict)
    partition: Partitioner | None = None
    model: Spec = field(default_factory=Logistic)
    loss: Loss | None = None
    silos: tuple[str, ...] = ()  # names of the natural clients, in the order in which the plan counts them
    init: str | None = None  # a safetensors file of weights to begin with, declared public
    own_code: Word | None = None  # "trusted": model and loss of one's own run as they are, where no graph can
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
            model, clients, test, loss, init=init, metrics=metrics, groups=groups, group_names=names, waiting=waiting,
            source=self.source(labels=not clients.records.y.is_floating_point()),
            own_code=self.own_code,
        )  # fmt: skip
        _try_loss(task)
        return task if self.half is None else self.half.of(task)

    def source(self, labels: bool) -> PublicSource:
        """Which rows of this data set are public and by whose word; `labels`: the number of classes is read off it."""
        what, by = declared_by(self.dataset, self.options)
        what = what if self.half is None else f"{what}, {self.half.words}"
        values = datasets.declared_values(self.dataset, self.options, labels=labels)
        return PublicSource(what, by, tuple(Declared(*one) for one in values))

    def _clients(self, data: Dataset, population: int, seed: int) -> Clients:
        if data.offsets is not None:
            if self.partition is not None:
                raise ConfigError("a partition of mapped data", "none", "clients.npy says who holds which rows")
            records = replace(_records(data.x, data.y), lazy=True)
            return Clients(records, np.arange(len(data.x), dtype=np.int64), data.offsets)
        cut = self.partition or (Natural() if data.groups is not None else Iid(population))
        split = cut.split(data.y, self._groups(data, cut), Seeded(seed).at(0, "partition"))
        return Clients(_records(data.x, data.y), split.index, split.offsets, names=self.silos)

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
