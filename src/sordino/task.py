"""A task: a model, a loss, the clients' records, and public test records."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import codec
from sordino.certificate.facts import Declared
from sordino.data.columns import PendingColumn
from sordino.data.compatibility import (
    check_labels,
    check_losses,
    check_slope,
    refuse_compiled,
    refuse_statistics,
    trial_outputs,
)
from sordino.data.initial_weights import InitialWeights, load_initial
from sordino.data.metrics import Metric, MetricFunction, Predictions, evaluation_sums, figures, metrics_of
from sordino.data.named_fields import has_named_fields, is_transformers_model, tabulate_fields
from sordino.data.program import Program, Trust, Unit
from sordino.errors import ConfigError, DataError
from sordino.graph.capture import made_up
from sordino.layout import Layout
from sordino.parts.losses import IGNORED, Loss, LossFunction, Tokens, keeps_apart, loss_of


@codec.hides_values
@dataclass(frozen=True)
class Records:
    """Aligned records: x [n, ...], y [n, ...]."""

    x: Tensor
    y: Tensor
    lazy: bool = False  # mapped from files: not read before it is used, so not checked at the start

    def __len__(self) -> int:
        return len(self.x)


@codec.hides_values
@dataclass(frozen=True)
class Clients:
    """All clients' records in one table; client i holds rows index[offsets[i] : offsets[i + 1]].

    Nothing is kept per client but one offset, so a million clients cost eight megabytes. `here` says whose records
    these are: everybody's in a simulation, one silo's own in that silo, nobody's on a server that holds none.
    """

    records: Records
    index: NDArray[np.int64]
    offsets: NDArray[np.int64]
    here: tuple[int, ...] | None = None  # None: everybody's
    names: tuple[str, ...] = ()  # where clients have any

    @classmethod
    def of(cls, clients: Sequence[Any]) -> Clients:
        """From a list with one entry per client: (x, y), `Records`, or any map-style Dataset of (x, y) pairs."""
        if len(clients) == 0:
            raise DataError("an empty list of clients", "at least one client", "pass one data set per client")
        parts = [_records(entry, f"client {i}") for i, entry in enumerate(clients)]
        full = [part for part in parts if len(part)]
        if not full:
            raise DataError(f"{len(parts)} clients without a record", "at least one record")
        table = Records(torch.cat([part.x for part in full]), torch.cat([part.y for part in full]))
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return cls(table, np.arange(offsets[-1], dtype=np.int64), offsets)

    @classmethod
    def elsewhere(cls, population: int, like: Records | None = None) -> Clients:
        """So many clients and none of their records; `like` are public ones of the same kind."""
        sides = (torch.empty(0), torch.empty(0)) if like is None else (like.x, like.y)
        x, y = (side.new_empty(0, *side.shape[1:]) for side in sides)
        return cls(Records(x, y), np.zeros(0, dtype=np.int64), np.zeros(population + 1, dtype=np.int64), ())

    @classmethod
    def alone(cls, client: int, population: int, own: Records) -> Clients:
        """One client of so many, with its own records and nobody else's."""
        if not 0 <= client < population:
            raise DataError(f"silo {client} of {population}", f"a number from 0 to {population - 1}")
        offsets = np.zeros(population + 1, dtype=np.int64)
        offsets[client + 1 :] = len(own)
        return cls(own, np.arange(len(own), dtype=np.int64), offsets, (client,))

    def name(self, client: int) -> str:
        """What a client is called in a sentence."""
        return repr(self.names[client]) if self.names else str(client)

    @property
    def held(self) -> NDArray[np.int64]:
        """The clients whose records are here."""
        return np.arange(self.population) if self.here is None else np.asarray(self.here, dtype=np.int64)

    @property
    def population(self) -> int:
        return len(self.offsets) - 1

    def size(self, client: int) -> int:
        """How many records a client holds."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def rows(self, client: int) -> NDArray[np.int64]:
        """Rows of the table that a client holds."""
        return self.index[self.offsets[client] : self.offsets[client + 1]]


@dataclass(frozen=True)
class PublicSource:
    """What a task's test rows are called and who declares them public; `values` are what records are encoded by.

    It travels with the rows, so a certificate names the file that the rows came from and no other.
    """

    rows: str = "test rows"
    by: str = "the caller: test of the task"
    values: tuple[Declared, ...] = ()


@codec.hides_values
@dataclass(frozen=True)
class Task:
    """What is trained, on whose data; `test` and `public` are declared public."""

    model: nn.Module
    clients: Clients
    test: Records | None = None
    loss: str | Loss | LossFunction = "cross_entropy"  # a kind, a part, or (outputs, targets) -> one value per record
    public: Records | None = None  # declared public: a server may train on them
    init: InitialWeights | None = (
        None  # the file that the model's weights were read from, declared public; `of` reads it
    )
    metrics: tuple[Metric, ...] = ()  # beside loss and accuracy, of the test records
    groups: Tensor | None = None  # of the test records: which public group each belongs to, [n]
    group_names: tuple[str, ...] = ()
    waiting: tuple[PendingColumn, ...] = ()  # coordinates that are scaled once the plan has released their histograms
    source: PublicSource = field(default=PublicSource(), repr=False)  # by whose word the test rows are public
    own_code: Trust | None = None  # "trusted": code of the user's own runs on the records as it is, if no graph can
    _program: Program | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        clients: Sequence[Any],
        test: Any = None,
        loss: str | Loss | LossFunction = "cross_entropy",
        public: Any = None,
        init: str | Path | None = None,
        pad: int | None = None,
        length: int | None = None,
        metrics: Mapping[str, MetricFunction] | Iterable[Any] | None = None,
        groups: Any = None,
        own_code: Trust | None = None,
    ) -> Task:
        """From a module and a list with one data set per client: (x, y) tensors or map-style data sets.

        A model of transformers takes dicts too, {input_ids, attention_mask, labels}, ragged or not: they are padded to
        `length` tokens with `pad` (by default the longest of all, and the model's pad_token_id).
        `init` is a safetensors file of weights to begin with. It is declared public: what it was trained on is not
        protected by this run, and the certificate says so. `metrics` are names of metrics, or {name: function of
        (outputs, targets)}; `groups` says to which public group each test record belongs.
        Model and loss train as graphs, captured on made-up records. `own_code="trusted"` lets code run that no graph
        can be captured of: whoever says so vouches that nothing of one client, or record, reaches another in it.
        """
        begun_with = None if init is None else load_initial(model, init)
        model, source = begun_with or (model, None)
        model, (*own, test, public), loss = _given(model, [*clients, test, public], loss, pad, length)
        told, names = _grouped(groups)
        held = Clients.of(own)
        return cls(model, held, test, loss, public, source, metrics_of(metrics), told, names, own_code=own_code)

    @classmethod
    def server(
        cls,
        model: nn.Module,
        population: int,
        test: Any = None,
        loss: str | Loss | LossFunction = "cross_entropy",
        public: Any = None,
        pad: int | None = None,
        length: int | None = None,
        own_code: Trust | None = None,
    ) -> Task:
        """What a server holds: the model, how many clients there are, and public records; not one of theirs."""
        model, (test, public), loss = _given(model, [test, public], loss, pad, length)
        held = Clients.elsewhere(population, test if test is not None else public)
        return cls(model, held, test, loss, public, own_code=own_code)

    @classmethod
    def silo(
        cls,
        model: nn.Module,
        client: int,
        population: int,
        own: Any,
        loss: str | Loss | LossFunction = "cross_entropy",
        pad: int | None = None,
        length: int | None = None,
        own_code: Trust | None = None,
    ) -> Task:
        """What one silo holds: the model and its own records; `client` is its number in the plan.

        Of text, `length` must be the same in all silos.
        """
        model, (own, _, _), loss = _given(model, [own, None, None], loss, pad, length, f"silo {client}")
        return cls(model, Clients.alone(client, population, own), None, loss, own_code=own_code)

    def as_server(self) -> Task:
        """This task as its server has it, where everything is on one machine."""
        return replace(self, clients=Clients.elsewhere(self.clients.population, self.clients.records))

    def as_silo(self, client: int) -> Task:
        """This task as one of its clients has it: its own records, copied, and no others."""
        rows, records = torch.from_numpy(self.clients.rows(client)), self.clients.records
        own = Records(records.x[rows], records.y[rows])
        alone = Clients.alone(client, self.clients.population, own)
        return replace(self, clients=alone, test=None, public=None, metrics=(), groups=None)

    def __post_init__(self) -> None:
        loss_of(self.loss)
        if self.own_code not in (None, "trusted"):
            raise ConfigError(f"own_code = {self.own_code!r}", '"trusted", or nothing')
        wide = next((n for n, p in self.model.named_parameters() if p.dtype != torch.float32), None)
        if wide is not None:
            raise DataError(f"a model whose {wide} is not float32", "a float32 model", "call model.float()")
        _finite(self.clients.records, "the clients' data")
        for records, name in ((self.test, "the test data"), (self.public, "the public data")):
            if records is not None:
                _finite(records, name)
        if self.groups is not None and (self.test is None or len(self.groups) != len(self.test)):
            found = f"groups of {len(self.groups)} test records"
            raise DataError(found, f"one for each of the {0 if self.test is None else len(self.test)} there are")
        self._check_fit()

    def _check_fit(self) -> None:
        """One loss per record, labels that the model has a class for, no statistics that noise would break."""
        refuse_compiled(self.model)
        refuse_statistics(self.model)
        if len(self.clients.index) == 0:
            return self._check_public()
        records = self.clients.records
        x, y = (made_up([side], [True], 2)[0].to(self.device) for side in (records.x, records.y))  # nobody's records
        y = y if y.is_floating_point() else torch.zeros_like(y)
        refusal = self.program.refusal()
        try:
            self._check_shapes(x, y)
        except DataError:
            raise
        except Exception:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal

    def _check_shapes(self, x: Tensor, y: Tensor) -> None:
        """Model, loss and labels fit each other; x and y are made up."""
        records, outputs = self.clients.records, trial_outputs(self.model, x)
        tokens = self.losses.targets == "token"
        scores = outputs.shape[-1 if tokens else 1] if isinstance(outputs, Tensor) and outputs.dim() > 1 else 0
        classes = self.losses.classes(scores)
        for part, name in (
            (records, "the clients' data"),
            (self.test, "the test data"),
            (self.public, "the public data"),
        ):
            if classes and part is not None and not part.lazy:
                check_labels(part.y.masked_fill(part.y == IGNORED, 0) if tokens else part.y, classes, name)
        name = f"loss {self.losses.kind!r}" if self.losses.kind else "a loss"
        check_losses(self.losses, outputs, y, name)
        if self.losses.has_slope and not keeps_apart(self.losses):
            check_slope(self.losses, outputs, y, name)

    def _check_public(self) -> None:
        """Without a client's record, the public ones must fit the model."""
        known = self.test if self.test is not None else self.public
        if known is not None and len(known):
            Task(self.model, Clients.of([known]), self.test, self.loss, self.public, own_code=self.own_code)

    @property
    def program(self) -> Program:
        """Model and loss as they run on records: graphs, but for what is torch's or Sordino's own, or trusted."""
        kind = (self.model, self.losses, self.clients.records.x, self.clients.records.y, self.own_code)
        if self._program is None or not self._program.fits(*kind):
            object.__setattr__(self, "_program", Program(*kind))
        assert self._program is not None
        return self._program

    def check_code(self, unit: Unit) -> None:
        """Refuse a model or a loss in which something of one unit may reach another, as far as records are known."""
        if self.knows_shapes:
            self.program.check(unit)

    @property
    def knows_shapes(self) -> bool:
        """Whether the shape of a record is known here: a server may hold none."""
        return len(self.clients.index) > 0 or self.clients.records.x.dim() > 1

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model)

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def on(self, device: torch.device) -> Task:
        """The same task with the model and the clients' records there; records that are read lazily stay in files."""
        if device == self.device:
            return self
        records = self.clients.records
        checked = True  # they have been looked at: never twice
        moved = records if records.lazy else Records(records.x.to(device), records.y.to(device), lazy=checked)
        model = copy.deepcopy(self.model).to(device)
        return replace(self, model=model, clients=replace(self.clients, records=moved))

    @property
    def losses(self) -> Loss:
        """The loss as a part: one value per record."""
        return loss_of(self.loss)

    def evaluate(self, vector: Tensor, batch: int = 2048) -> dict[str, float]:
        """Figures of the whole test set: loss; accuracy, also balanced, or root mean square error; and `metrics`."""
        if self.test is None:
            return {}
        model = self.at(vector)
        if not self.metrics:
            return evaluate(model, self.test, self.program.losses, batch)
        kept: list[tuple[Tensor, Tensor]] = []
        sums = evaluation_sums(
            model, _pairs(self.test, batch), self.program.losses, lambda out, y: kept.append((out, y))
        )
        outputs, targets = (torch.cat([pair[side] for pair in kept]).cpu() for side in (0, 1))
        seen = Predictions(outputs, targets, self.losses, self.groups, self.group_names)
        return {**figures(sums), **{name: value for one in self.metrics for name, value in one.values(seen).items()}}

    def at(self, vector: Tensor) -> nn.Module:
        """A copy of the module with these weights, in eval mode."""
        model = self.program.judging()
        self.layout.load(model, vector)
        return model

    def evaluate_clients(self, vector: Tensor, batch: int = 2048) -> dict[str, float]:
        """The same figures over all records that clients hold, as train_loss, ...: NOT private, for simulation."""
        records, held, model = self.clients.records, torch.from_numpy(self.clients.index), self.program.running()
        self.layout.load(model, vector)
        pairs = ((records.x[rows], records.y[rows]) for rows in torch.split(held, _lot(records, batch)))
        found = figures(evaluation_sums(model.eval(), pairs, self.program.losses))
        return {f"train_{name}": value for name, value in found.items()}


def evaluate(model: nn.Module, test: Records, losses: Loss, batch: int = 2048) -> dict[str, float]:
    """Figures of a model in eval mode over all of `test`."""
    return figures(sums_of(model, test, losses, batch))


def sums_of(model: nn.Module, test: Records, losses: Loss, batch: int = 2048) -> Tensor:
    """The sums that the figures follow from: those of parts of a test set may be added."""
    return evaluation_sums(model, _pairs(test, batch), losses)


def _pairs(test: Records, batch: int) -> Iterable[tuple[Tensor, Tensor]]:
    lot = _lot(test, batch)
    return zip(torch.split(test.x, lot), torch.split(test.y, lot), strict=True)


def _lot(records: Records, labels: int) -> int:
    """How many records have so many labels: a model of language gives a score for every word at each of them."""
    return max(1, labels // max(1, records.y[:1].numel()))


def _grouped(groups: Any) -> tuple[Tensor | None, tuple[str, ...]]:
    """Groups as numbers, and their names: any values that numpy can sort."""
    if groups is None:
        return None, ()
    names, numbers = np.unique(np.asarray(groups), return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1)), tuple(str(name) for name in names)


def _given(
    model: nn.Module,
    entries: Sequence[Any],
    loss: str | Loss | LossFunction,
    pad: int | None,
    length: int | None,
    first: str = "client 0",
) -> tuple[nn.Module, list[Any], str | Loss | LossFunction]:
    """The model, records of all entries (clients, test, public) and the loss; names of fields are the model's own."""
    calls = [first, *(f"client {i}" for i in range(1, len(entries) - 2)), "test", "public"][-len(entries) :]
    entries = [
        (entry.x, entry.y) if isinstance(entry, Records) and is_transformers_model(model) else entry
        for entry in entries
    ]
    there = [(entry, name) for entry, name in zip(entries, calls, strict=True) if entry is not None]
    if not is_transformers_model(model) and not any(has_named_fields(entry) for entry, _ in there):
        plain = [None if e is None else _records(e, name) for e, name in zip(entries, calls, strict=True)]
        return model, plain, _for_tokens(plain, loss)
    wrapped, packed = tabulate_fields(model, there, pad, length)
    supply = (Records(x, y) for x, y in packed)
    records = [None if entry is None else next(supply) for entry in entries]
    return wrapped, records, _for_tokens(records, loss)


def _for_tokens(records: Sequence[Records | None], loss: str | Loss | LossFunction) -> str | Loss | LossFunction:
    """Cross entropy of labels [n, tokens] is the mean over a record's own tokens."""
    sequences = any(part is not None and part.y.dim() > 1 and not part.y.is_floating_point() for part in records)
    return Tokens() if sequences and loss == "cross_entropy" else loss


def _records(entry: Any, name: str) -> Records:
    if isinstance(entry, Records):
        return entry
    pair = entry if isinstance(entry, tuple | list) and len(entry) == 2 else _collated(entry, name)
    try:
        x, y = torch.as_tensor(pair[0]), torch.as_tensor(pair[1])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} of a kind that is no tensor ({error})", "(x, y) tensors or a data set") from None
    x, y = (side.float() if side.dtype == torch.float64 else side for side in (x, y))
    if len(x) != len(y):
        raise DataError(f"{name} with {len(x)} inputs and {len(y)} targets", "as many targets as inputs")
    return Records(x, y)


def _collated(entry: Any, name: str) -> tuple[Tensor, Tensor]:
    """A map-style data set as two tensors."""
    if isinstance(entry, Mapping) or not (hasattr(entry, "__len__") and hasattr(entry, "__getitem__")):
        raise DataError(f"{name} of type {type(entry).__name__}", "(x, y) tensors or a map-style data set")
    pairs = [entry[i] for i in range(len(entry))]
    if not pairs:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    xs, ys = zip(*pairs, strict=True)
    return torch.stack([torch.as_tensor(x) for x in xs]), torch.as_tensor(cast(Any, ys))


def _finite(records: Records, name: str) -> None:
    if records.lazy:
        return
    for side, tensor in (("x", records.x), ("y", records.y)):
        if tensor.is_floating_point() and not all(bool(part.isfinite().all()) for part in torch.split(tensor, 65536)):
            count = int((~tensor.isfinite()).sum())
            raise DataError(
                f"{count} NaN or infinite values in {side} of {name}", "finite numbers", "drop or impute them first"
            )
