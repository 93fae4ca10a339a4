"""The task of a run: model, loss, clients' records, public test records. Called by `train`, engines and the loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import codec
from sordino.certificate.facts import WEIGHTS, Declared
from sordino.data.clients import (
    Clients,
    Records,
    check_finite,
    has_named_fields,
    is_transformers_model,
    records_of,
    tabulate_fields,
    unwrapped_model,
)
from sordino.data.lineage import InitialWeights, declared_frozen, load_initial
from sordino.data.metrics import Metric, MetricFunction, Predictions, evaluation_sums, figures, metrics_of
from sordino.data.program import FAILURES, Program, Trust, check_labels, check_loss, refuse_layers, trial_outputs
from sordino.data.records import Dataset, Natural, Partitioner
from sordino.data.tables import Encoding, PendingColumn
from sordino.errors import ConfigError, DataError, PlanError
from sordino.layout import Layout
from sordino.parts.losses import IGNORED, Loss, LossFunction, Tokens, loss_of

AnyLoss = str | Loss | LossFunction  # a kind, a part, or (outputs, targets) -> one value per record


@dataclass(frozen=True)
class PublicSource:
    """Origin of the public test rows, for the certificate: what they are, and `by` whom they are declared public.

    `values` are public values, such as ranges of columns, by which records were encoded.
    """

    rows: str = "test rows"
    by: str = "the caller: test of the task"
    values: tuple[Declared, ...] = ()


@codec.hides_values
@dataclass(frozen=True)
class Task:
    """What is trained: a model, a loss and the clients' records; `test` and `public` are records declared public."""

    model: nn.Module
    clients: Clients
    test: Records | None = None
    loss: AnyLoss = "cross_entropy"
    public: Records | None = None  # declared public: a server may train on them
    init: InitialWeights | None = None  # the public file that the model's weights were read from
    metrics: tuple[Metric, ...] = ()  # beside loss and accuracy, of the test records
    groups: Tensor | None = None  # of the test records: which public group each belongs to, [n]
    group_names: tuple[str, ...] = ()
    waiting: tuple[PendingColumn, ...] = ()  # columns to be scaled by histograms that the plan releases
    encoding: Encoding | None = None  # of a table: what the coordinates of its records mean
    source: PublicSource = field(default=PublicSource(), repr=False)
    own_code: Trust | None = None  # "trusted": the user's code runs on the records as it is
    client_test: Clients | None = None  # rows of each client that do not train: personal models are evaluated on them
    _program: Program | None = field(default=None, compare=False)
    _layout: tuple[Any, Layout] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, model: nn.Module, clients: Any, test: Any = None, loss: AnyLoss = "cross_entropy", public: Any = None,
        init: str | Path | None = None, pad: int | None = None, length: int | None = None,
        metrics: Mapping[str, MetricFunction] | Iterable[Any] | None = None, groups: Any = None,
        own_code: Trust | None = None, partition: Partitioner | None = None, seed: int = 0,
        client_test: Sequence[Any] | None = None,
    ) -> Task:  # fmt: skip
        """Build a task from a module and the clients' records.

        `clients` is a list with one data set per client: (x, y) tensors or arrays, or a map-style data set. With a
        `partition`, such as so.Dirichlet(clients=100, alpha=0.3), it is ONE data set, cut into clients by the public
        `seed`; a `Dataset` of so.data.load brings its own test records, and its natural clients (so.Natural()).
        A model of transformers takes dicts too, {input_ids, attention_mask, labels}, ragged or not: they are padded to
        `length` tokens with `pad` (by default the longest of all, and the model's pad_token_id).
        `init` is a safetensors file of initial weights. It is declared public: what it was trained on is not protected
        by this run, and the certificate says so. `metrics` are names of metrics, or {name: function of (outputs,
        targets)}; `groups` gives the public group of each test record.
        Model and loss train as graphs, captured on synthetic records. `own_code="trusted"` runs code that cannot be
        captured as a graph: the user vouches that no information of one client, or record, reaches another in it.
        `client_test` is one data set per client of rows that do not train, for personal models in simulations.
        """
        model, source = (model, None) if init is None else load_initial(model, init)
        data = clients if isinstance(clients, Dataset) else None
        if data is not None:
            partition, clients = partition or Natural(), (data.x, data.y)
            test = (data.test_x, data.test_y) if test is None and len(data.test_y) else test
        elif partition is None:
            pair = isinstance(clients, tuple) and len(clients) == 2 and all(hasattr(side, "shape") for side in clients)
            if pair or isinstance(clients, Mapping | torch.utils.data.Dataset):
                found = f"one data set ({type(clients).__name__}) for all clients, and no partition"
                fix = "pass such a list, or add partition=so.Iid(clients=100)"
                raise DataError(found, "a list with one data set per client", fix)
        own, first = (clients, "client 0") if partition is None else ([clients], "the data set")
        count, rest = len(own), list(client_test or ())
        model, (*own, test, public), loss = _read_inputs(model, [*own, *rest, test, public], loss, pad, length, first)
        own, rest = own[:count], own[count:]
        held = Clients.of(own) if partition is None else Clients.cut(own[0], partition, data and data.groups, seed)
        words, numbers = (None, None) if groups is None else np.unique(np.asarray(groups), return_inverse=True)
        tested, asked = Clients.of(rest) if rest else None, metrics_of(metrics)
        each = None if numbers is None else torch.from_numpy(numbers.reshape(-1))
        names = () if words is None else tuple(str(name) for name in words)
        origin = PublicSource(values=() if data is None else data.declared)
        return cls(model, held, test, loss, public, source, asked, each, names, source=origin, own_code=own_code,
                   client_test=tested)  # fmt: skip

    @classmethod
    def server(
        cls, model: nn.Module, population: int, test: Any = None, loss: AnyLoss = "cross_entropy", public: Any = None,
        pad: int | None = None, length: int | None = None, own_code: Trust | None = None,
    ) -> Task:  # fmt: skip
        """Build the server's task from a model, the number of clients and public records, without clients' records."""
        model, (test, public), loss = _read_inputs(model, [test, public], loss, pad, length)
        held = Clients.elsewhere(population, test if test is not None else public)
        return cls(model, held, test, loss, public, own_code=own_code)

    @classmethod
    def silo(
        cls, model: nn.Module, client: int, population: int, own: Any, loss: AnyLoss = "cross_entropy",
        pad: int | None = None, length: int | None = None, own_code: Trust | None = None,
    ) -> Task:  # fmt: skip
        """Build one silo's task from the model and the silo's own records; `client` is its number in the plan.

        For text, `length` must be the same in all silos.
        """
        model, (own, _, _), loss = _read_inputs(model, [own, None, None], loss, pad, length, f"silo {client}")
        return cls(model, Clients.alone(client, population, own), None, loss, own_code=own_code)

    @property
    def encoding_sha256(self) -> str:
        """SHA-256 of the encoding of records (what coordinates and classes mean), which all silos must share.

        For records that are not read from a table, only their shape and the type of their target are hashed.
        """
        if self.encoding is not None:
            return self.encoding.sha256
        x, y = self.clients.records.x, self.clients.records.y
        return codec.digest([list(x.shape[1:]), self.losses.targets, list(y.shape[1:])])

    def as_server(self) -> Task:
        """Return a copy of the task without clients' records."""
        away = Clients.elsewhere(self.clients.population, self.clients.records)
        return replace(self, clients=away, client_test=None)

    def as_silo(self, client: int) -> Task:
        """Return a copy of the task with one client's records, without test and public records."""
        rows, records = torch.from_numpy(self.clients.rows(client)), self.clients.records
        own = Records(records.x[rows], records.y[rows])
        alone = Clients.alone(client, self.clients.population, own)
        return replace(self, clients=alone, test=None, public=None, metrics=(), groups=None, client_test=None)

    def __post_init__(self) -> None:
        loss_of(self.loss)
        if self.own_code not in (None, "trusted"):
            raise ConfigError(f"own_code = {self.own_code!r}", '"trusted" or None', "drop own_code")
        wide = next((n for n, p in self.model.named_parameters() if p.dtype != torch.float32), None)
        if wide is not None:
            raise DataError(f"a model whose {wide} is not float32", "a float32 model", "call model.float()")
        check_finite(self.clients.records, "the clients' data")
        for records, name in ((self.test, "the test data"), (self.public, "the public data")):
            if records is not None:
                check_finite(records, name)
        if self.client_test is not None and self.client_test.population != self.clients.population:
            found = f"client_test of {self.client_test.population} clients and data of {self.clients.population}"
            raise DataError(found, "one data set in client_test per client", "pass empty ones where there is none")
        if self.groups is not None and (self.test is None or len(self.groups) != len(self.test)):
            found, count = f"`groups` of length {len(self.groups)}", 0 if self.test is None else len(self.test)
            raise DataError(found, f"a group for each of the {count} test records", f"pass {count} groups")
        self._check_fit()

    def _check_fit(self) -> None:
        """Refuse a model with batch statistics, a loss not computed per record, and labels without an output."""
        refuse_layers(self.model)
        if len(self.clients.index) == 0:  # a server: the public records are checked
            known = self.test if self.test is not None else self.public
            if known is not None and len(known):
                Task(self.model, Clients.of([known]), self.test, self.loss, self.public, own_code=self.own_code)
            return
        records, refusal = self.clients.records, None
        x = torch.ones((2, *records.x.shape[1:]), dtype=records.x.dtype, device=self.device)  # synthetic records
        y = torch.zeros((2, *records.y.shape[1:]), dtype=records.y.dtype, device=self.device)
        try:  # before any call of the model, which may change its state
            self.program.check("client")
        except PlanError as error:
            refusal = error
        except FAILURES:  # of torch's own layers, on records that do not fit them
            pass
        try:
            outputs, tokens = trial_outputs(self.model, x), self.losses.targets == "token"
            scores = outputs.shape[-1 if tokens else 1] if isinstance(outputs, Tensor) and outputs.dim() > 1 else 0
            classes = {"class": scores, "token": scores, "side": 2, "number": 0}[self.losses.targets]
            parts = ((records, "the clients' data"), (self.test, "the test data"), (self.public, "the public data"))
            for part, name in parts:
                if classes and part is not None and not part.lazy:
                    check_labels(part.y.masked_fill(part.y == IGNORED, 0) if tokens else part.y, classes, name)
            name = f"loss {self.losses.kind!r}" if self.losses.kind else "a loss"
            check_loss(self.losses, outputs, y, name)
        except DataError:
            raise
        except Exception:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal

    @property
    def program(self) -> Program:
        """Model and loss as they run on records: as captured graphs, torch.nn layers, or trusted user code."""
        x, y, losses, found = self.clients.records.x, self.clients.records.y, self.losses, self._program
        if found is not None:
            old, new = ([(one.shape[1:], one.dtype) for one in pair] for pair in ((found.x, found.y), (x, y)))
            same = found.model is self.model and found.loss == losses and found.trust == self.own_code
            if old == new and same and found.x.device == self.device:
                return found
        made = Program(self.model, losses, x, y, self.own_code)
        object.__setattr__(self, "_program", made)
        return made

    @property
    def knows_shapes(self) -> bool:
        """Whether the shape of a record is known; a server that holds no records may not know it."""
        return len(self.clients.index) > 0 or self.clients.records.x.dim() > 1

    @property
    def layout(self) -> Layout:
        """Layout of the model's flat vector, computed again if a parameter's requires_grad has changed."""
        model = self.model
        key = tuple((id(p), p.shape, p.requires_grad) for p in (*model.parameters(), *model.buffers()))
        if self._layout is None or self._layout[0] != key:
            object.__setattr__(self, "_layout", (key, Layout.of(model)))
        assert self._layout is not None
        return self._layout[1]

    @property
    def device(self) -> torch.device:
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def on(self, device: torch.device) -> Task:
        """Return a copy of the task with model and records on a device; memory-mapped records stay in files."""
        if device == self.device:
            return self

        def moved(held: Records) -> Records:
            return held if held.lazy else Records(held.x.to(device), held.y.to(device), lazy=True)  # checked

        test, public = (None if held is None else moved(held) for held in (self.test, self.public))
        clients = replace(self.clients, records=moved(self.clients.records))
        return replace(self, model=copy.deepcopy(self.model).to(device), clients=clients, test=test, public=public)

    @property
    def losses(self) -> Loss:
        """The loss function as a part of the plan, which returns one value per record."""
        return loss_of(self.loss)

    def evaluate(self, vector: Tensor, batch: int = 2048) -> dict[str, float]:
        """Return the test metrics of a model vector: loss, accuracies or root mean square error, and `metrics`."""
        if self.test is None:
            return {}
        model, losses = self.at(vector), self.program.losses
        if not self.metrics:
            return evaluate(model, self.test, losses, batch)
        pairs: list[tuple[Tensor, Tensor]] = []
        sums = evaluation_sums(model, _batches(model, self.test, batch), losses, lambda out, y: pairs.append((out, y)))
        outputs, targets = (torch.cat([pair[side] for pair in pairs]).cpu() for side in (0, 1))
        seen = Predictions(outputs, targets, self.losses, self.groups, self.group_names)
        return {**figures(sums), **{name: value for one in self.metrics for name, value in one.values(seen).items()}}

    @property
    def declared_public(self) -> tuple[Declared, ...]:
        """Rows, values and weights that the user declares public; the certificate lists them."""
        sides = (self.test, self.source.rows, self.source.by), (self.public, "rows", "the caller: public of it")
        rows = [Declared(len(rows), what, by) for rows, what, by in sides if rows is not None]
        init = self.init
        first = () if init is None else (Declared(init.numbers, WEIGHTS, f"the user: init = {init.file}", init.sha256),)
        return (*rows, *self.source.values, *first, *declared_frozen(unwrapped_model(self.model)))

    def at(self, vector: Tensor) -> nn.Module:
        """Return a copy of the module with the weights of a flat vector, in eval mode."""
        model = self.program.evaluation_model()
        self.layout.load(model, vector)
        return model

    def evaluate_clients(self, vector: Tensor, batch: int = 2048) -> dict[str, float]:
        """Return metrics of all clients' records, as train_loss, ...: they are NOT private, for simulation only."""
        records, held, model = self.clients.records, torch.from_numpy(self.clients.index), self.program.training_model()
        self.layout.load(model, vector)
        split = torch.split(held, _batch_size(records, batch))
        placed = (rows.to(records.x.device) for rows in split)
        pairs = ((records.x[rows].to(self.device), records.y[rows].to(self.device)) for rows in placed)
        found = figures(evaluation_sums(model.eval(), pairs, self.program.losses))
        return {f"train_{name}": value for name, value in found.items()}


def evaluate(model: nn.Module, test: Records, losses: Loss, batch: int = 2048) -> dict[str, float]:
    return figures(sums_of(model, test, losses, batch))


def sums_of(model: nn.Module, test: Records, losses: Loss, batch: int = 2048) -> Tensor:
    """Return the sums over test records that metrics are computed from, to which batches contribute additively."""
    return evaluation_sums(model, _batches(model, test, batch), losses)


def _batches(model: nn.Module, test: Records, labels: int) -> Iterable[tuple[Tensor, Tensor]]:
    size, device = _batch_size(test, labels), next((p.device for p in model.parameters()), test.x.device)
    for x, y in zip(torch.split(test.x, size), torch.split(test.y, size), strict=True):
        yield x.to(device), y.to(device)


def _batch_size(records: Records, labels: int) -> int:
    return max(1, labels // max(1, records.y[:1].numel()))  # a text has many labels, and large outputs


def _read_inputs(
    model: nn.Module, entries: Sequence[Any], loss: AnyLoss, pad: int | None, length: int | None,
    first: str = "client 0",
) -> tuple[nn.Module, list[Any], AnyLoss]:  # fmt: skip
    """Convert the user's entries (clients, test, public) to records; a transformers model is wrapped."""
    calls = [first, *(f"client {i}" for i in range(1, len(entries) - 2)), "test", "public"][-len(entries) :]
    transformer = is_transformers_model(model)
    entries = [(entry.x, entry.y) if isinstance(entry, Records) and transformer else entry for entry in entries]
    there = [(entry, name) for entry, name in zip(entries, calls, strict=True) if entry is not None]
    if transformer or any(has_named_fields(entry) for entry, _ in there):
        model, packed = tabulate_fields(model, there, pad, length)
        found = iter(packed)
    else:
        found = iter([records_of(entry, name) for entry, name in there])
    records = [None if entry is None else next(found) for entry in entries]
    sequences = any(part is not None and part.y.dim() > 1 and not part.y.is_floating_point() for part in records)
    return model, records, Tokens() if sequences and loss == "cross_entropy" else loss  # mean over a record's tokens
