"""A task: a model, a loss, the clients' records, and public test records."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.data.fit import check_labels, check_losses, check_slope, outputs_of, refuse_statistics
from sordino.errors import DataError
from sordino.layout import Layout
from sordino.parts.losses import Loss, LossFunction, keeps_apart, loss_of


@dataclass(frozen=True)
class Records:
    """Aligned records: x [n, ...], y [n, ...]."""

    x: Tensor
    y: Tensor
    lazy: bool = False  # mapped from files: not read before it is used, so not checked at the start

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Clients:
    """All clients' records in one table; client i holds rows index[offsets[i] : offsets[i + 1]].

    Nothing is kept per client but one offset, so a million clients cost eight megabytes.
    """

    records: Records
    index: NDArray[np.int64]
    offsets: NDArray[np.int64]

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
class Task:
    """What is trained, on whose data; `test` and `public` are declared public."""

    model: nn.Module
    clients: Clients
    test: Records | None = None
    loss: str | Loss | LossFunction = "cross_entropy"  # a kind, a part, or (outputs, targets) -> one value per record
    public: Records | None = None  # declared public: a server may train on them

    @classmethod
    def of(
        cls,
        model: nn.Module,
        clients: Sequence[Any],
        test: Any = None,
        loss: str | Loss | LossFunction = "cross_entropy",
        public: Any = None,
    ) -> Task:
        """From a module and a list with one data set per client: (x, y) tensors or map-style data sets."""
        known = [None if data is None else _records(data, name) for data, name in ((test, "test"), (public, "public"))]
        return cls(model, Clients.of(clients), known[0], loss, known[1])

    def __post_init__(self) -> None:
        loss_of(self.loss)
        wide = next((n for n, p in self.model.named_parameters() if p.dtype != torch.float32), None)
        if wide is not None:
            raise DataError(f"a model whose {wide} is not float32", "a float32 model", "call model.float()")
        _finite(self.clients.records, "the clients' data")
        for records, name in ((self.test, "the test data"), (self.public, "the public data")):
            if records is not None:
                _finite(records, name)
        self._check_fit()

    def _check_fit(self) -> None:
        """One loss per record, labels that the model has a class for, no statistics that noise would break."""
        refuse_statistics(self.model)
        records = self.clients.records
        pair = torch.from_numpy(np.resize(self.clients.index[:2], 2))
        x, y = records.x[pair].to(self.device), records.y[pair].to(self.device)
        outputs = outputs_of(self.model, x)
        scores = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.dim() > 1 else 0
        classes = self.losses.classes(scores)
        for part, name in (
            (records, "the clients' data"),
            (self.test, "the test data"),
            (self.public, "the public data"),
        ):
            if classes and part is not None and not part.lazy:
                check_labels(part.y, classes, name)
        name = f"loss {self.losses.kind!r}" if self.losses.kind else "a loss"
        check_losses(self.losses, outputs, y, name)
        if self.losses.has_slope and not keeps_apart(self.losses):
            check_slope(self.losses, outputs, y, name)

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
        """Mean loss on the whole test set; accuracy for classes, root mean square error for numbers."""
        if self.test is None:
            return {}
        model = copy.deepcopy(self.model)
        self.layout.load(model, vector)
        return evaluate(model.eval(), self.test, self.losses, batch)


def evaluate(model: nn.Module, test: Records, losses: Loss, batch: int = 2048) -> dict[str, float]:
    """Metrics of a model in eval mode over all of `test`."""
    total, figure = 0.0, 0.0
    with torch.no_grad():
        for x, y in zip(torch.split(test.x, batch), torch.split(test.y, batch), strict=True):
            out = model(x)
            total += float(losses(out, y).double().sum())
            figure += float(_hits(out, y) if _is_label(y) else (out.reshape(y.shape) - y).square().double().sum())
    mean = figure / len(test)
    named = {"accuracy": mean} if _is_label(test.y) else {"rmse": mean**0.5}
    return {"loss": total / len(test), **named}


def _is_label(y: Tensor) -> bool:
    return not y.is_floating_point()


def _hits(out: Tensor, y: Tensor) -> Tensor:
    labels = out.argmax(-1) if out.dim() > 1 and out.shape[-1] > 1 else (out.reshape(y.shape) > 0)
    return (labels == y).sum()


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
