"""Records as tensors, and the clients that hold them: one table, and the rows of each client.

Called by `task`, which turns the user's entries into `Records`, and by the engines. An entry is a pair (x, y), a
map-style data set of pairs, or a data set with named fields, as Hugging Face tokenizers give them. The named fields of
a record become rows of one tensor, x [n, fields, T] of integers, padded on the right to one length; a single field
(pixel_values) is x itself, and `labels` are y. `NamedFieldsModel` passes them to the model by name.

    field          is padded with
    input_ids      pad, the tokenizer's id; its value has no effect, since the attention_mask hides it
    labels         -100, which the loss ignores
    any other      0; if a record is padded and has no attention_mask, one is made
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sordino import codec
from sordino.data.records import Ints, Partitioner
from sordino.errors import DataError
from sordino.parts.losses import IGNORED
from sordino.rng import Seeded


@codec.hides_values
@dataclass(frozen=True)
class Records:
    """Inputs x [n, ...] and targets y [n, ...] of n records."""

    x: Tensor
    y: Tensor
    lazy: bool = False  # memory-mapped: read when used, so not checked at the start

    def __len__(self) -> int:
        return len(self.x)


@codec.hides_values
@dataclass(frozen=True)
class Clients:
    """All clients' records in one table; client i holds rows index[offsets[i] : offsets[i + 1]].

    Per client only one offset is stored, so a million clients take eight megabytes. `here` lists the clients whose
    records this process holds: all in a simulation, one in a silo, none on a server.
    """

    records: Records
    index: Ints
    offsets: Ints
    here: tuple[int, ...] | None = None  # None: all of them
    names: tuple[str, ...] = ()  # of the clients, where they have any

    @classmethod
    def of(cls, clients: Sequence[Any]) -> Clients:
        """Build clients from a list with one entry each: (x, y), `Records`, or a map-style data set of (x, y) pairs."""
        if len(clients) == 0:
            raise DataError("an empty list of clients", "at least one client", "pass one data set per client")
        parts = [records_of(entry, f"client {i}") for i, entry in enumerate(clients)]
        full = [part for part in parts if len(part)]
        if not full:
            raise DataError(
                f"{len(parts)} clients without any record", "at least one record in all", "check the list of clients"
            )
        table = Records(torch.cat([part.x for part in full]), torch.cat([part.y for part in full]))
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return cls(table, np.arange(offsets[-1], dtype=np.int64), offsets)

    @classmethod
    def cut(cls, records: Records, partition: Partitioner, groups: Any = None, seed: int = 0) -> Clients:
        """Cut one table of records into clients by a partition, whose random draws follow from the public `seed`."""
        split = partition.split(records.y.numpy(), groups, Seeded(seed).at(0, "partition"))
        return cls(records, split.index, split.offsets)

    @classmethod
    def elsewhere(cls, population: int, like: Records | None = None) -> Clients:
        """Return clients whose records are on other machines; `like` are public records of the same shape."""
        sides = (torch.empty(0), torch.empty(0)) if like is None else (like.x, like.y)
        x, y = (side.new_empty(0, *side.shape[1:]) for side in sides)
        return cls(Records(x, y), np.zeros(0, dtype=np.int64), np.zeros(population + 1, dtype=np.int64), ())

    @classmethod
    def alone(cls, client: int, population: int, own: Records) -> Clients:
        """Return one client of a population, with its own records and no others."""
        if not 0 <= client < population:
            raise DataError(f"silo {client} of {population}", f"a number from 0 to {population - 1}")
        offsets = np.zeros(population + 1, dtype=np.int64)
        offsets[client + 1 :] = len(own)
        return cls(own, np.arange(len(own), dtype=np.int64), offsets, (client,))

    def name(self, client: int) -> str:
        """Return a client's name, quoted, or its number."""
        return repr(self.names[client]) if self.names else str(client)

    @property
    def held(self) -> Ints:
        """Numbers of the clients whose records this process holds."""
        return np.arange(self.population) if self.here is None else np.asarray(self.here, dtype=np.int64)

    @property
    def population(self) -> int:
        return len(self.offsets) - 1

    def size(self, client: int) -> int:
        """Return how many records a client holds."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def rows(self, client: int) -> Ints:
        """Return the rows of the table that a client holds."""
        return self.index[self.offsets[client] : self.offsets[client + 1]]


def records_of(entry: Any, name: str) -> Records:
    """Return a user's (x, y) pair or map-style data set as records; `name` is what errors call it."""
    if isinstance(entry, Records):
        return entry
    if not (isinstance(entry, tuple | list) and len(entry) == 2):
        if isinstance(entry, Mapping) or not (hasattr(entry, "__len__") and hasattr(entry, "__getitem__")):
            raise DataError(f"{name} of type {type(entry).__name__}", "(x, y) tensors or a map-style data set")
        pairs = [entry[i] for i in range(len(entry))]
        if not pairs:
            return Records(torch.empty(0), torch.empty(0, dtype=torch.int64))
        xs, ys = zip(*pairs, strict=True)
        entry = torch.stack([torch.as_tensor(x) for x in xs]), cast(Any, ys)
    try:
        x, y = torch.as_tensor(entry[0]), torch.as_tensor(entry[1])
    except (TypeError, ValueError, RuntimeError) as error:
        needed = "(x, y) tensors or a data set"
        raise DataError(f"{name} that cannot be converted to tensors ({error})", needed) from None
    x, y = (side.float() if side.dtype == torch.float64 else side for side in (x, y))
    if len(x) != len(y):
        raise DataError(f"{name} with {len(x)} inputs and {len(y)} targets", "one target for every input")
    return Records(x, y)


def check_finite(records: Records, name: str) -> None:
    """Refuse NaN and infinity; memory-mapped records are not read."""
    if records.lazy:
        return
    for side, tensor in (("x", records.x), ("y", records.y)):
        if tensor.is_floating_point() and not all(bool(part.isfinite().all()) for part in torch.split(tensor, 65536)):
            count = int((~tensor.isfinite()).sum())
            found = f"{count} NaN or infinite values in {side} of {name}"
            raise DataError(found, "finite numbers", "drop or impute them first")


# ---- records with named fields ---------------------------------------------------------------------------------------

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
ALIASES = ("label", "label_ids")  # what data sets call `labels`, and collators of transformers rename
Columns = dict[str, list[Tensor]]  # by field, one tensor per record


class NamedFieldsModel(nn.Module):
    """Wraps a model that takes named inputs as a function of one tensor that returns the logits.

    Of a causal model the last token's logits are dropped, since they have no label; y begins with the second token.
    `public` is the publishable part of a record's shape: for sequences the length that the caller gave, since the
    longest length depends on private records; None: the shape of every record is public.
    """

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], causal: bool, public: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.model, self.names, self.causal, self.public = model, names, causal, public

    def forward(self, x: Tensor) -> Tensor:
        fields = (x,) if len(self.names) == 1 else x.unbind(1)
        answer = self.model(**dict(zip(self.names, fields, strict=True)))
        logits: Tensor = answer if isinstance(answer, Tensor) else answer.logits
        return logits[:, :-1] if self.causal else logits


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the user's model inside a `NamedFieldsModel`; any other model is returned as it is."""
    return model.model if isinstance(model, NamedFieldsModel) else model


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is from transformers, or wraps one (peft): it returns more than a tensor."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def is_causal(model: nn.Module) -> bool:
    """Return whether the model is a causal language model: the label of a token is the next token."""
    return re.search("(CausalLM|LMHeadModel)$", type(_base_model(model)).__name__) is not None


def _base_model(model: nn.Module) -> nn.Module:
    """Return the model inside a peft wrapper."""
    own: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return own


def has_named_fields(entry: Any) -> bool:
    """Return whether an entry is a mapping of columns or a data set of mappings."""
    if isinstance(entry, Mapping):
        return True
    listed = hasattr(entry, "__len__") and hasattr(entry, "__getitem__") and not isinstance(entry, Tensor)
    return listed and len(entry) > 0 and isinstance(entry[0], Mapping)


def tabulate_fields(
    model: nn.Module, entries: Sequence[tuple[Any, str]], pad: int | None = None, length: int | None = None
) -> tuple[NamedFieldsModel, list[Records]]:
    """Return the wrapped model, and the records of all entries; each entry comes with its name for errors.

    `length` is the number of tokens of a record, by default that of the longest.
    """
    causal, tables = is_causal(model), [(_columns(model, entry, name), name) for entry, name in entries]
    names = _field_names(tables)
    found = pad if pad is not None else getattr(getattr(model, "config", None), "pad_token_id", None)
    fields = chain.from_iterable(table[name] for table, _ in tables if table for name in names)
    sizes = {len(value) for value in fields if value.dim() == 1}  # of all sequences
    longest = max(sizes, default=0)
    if length is not None and longest > length:
        fix = f"raise length, or tokenize with truncation=True, max_length={length}"
        needed = f"records of at most {length} tokens"
        raise DataError(f"a record of {longest} tokens and length = {length}", needed, fix)
    ragged = len(sizes | ({length} if length is not None and sizes else set())) > 1
    all_names = (*names, MASK) if ragged and IDS in names and MASK not in names else names
    size = longest if length is None else length
    packed = [_pack(table, name, all_names, causal, found or 0, size) for table, name in tables]
    public = () if length is None else (length,)
    return NamedFieldsModel(model, all_names, causal, public if sizes else None), packed


def _pack(table: Columns, name: str, fields: tuple[str, ...], causal: bool, pad: int, length: int) -> Records:
    """Pack the columns of named fields into x and y; a causal model's labels are by default the tokens themselves."""
    if not table:
        return Records(torch.empty(0), torch.empty(0, dtype=torch.int64))
    held = {**table, MASK: table.get(MASK) or [torch.ones_like(ids) for ids in table.get(IDS, ())]}
    columns = {one: _stacked(held[one], pad if one == IDS else 0, length, f"{one} of {name}") for one in fields}
    if LABELS in table:
        labels = table[LABELS]
    else:
        hidden = columns[MASK] == 0 if MASK in columns else torch.zeros_like(columns[IDS], dtype=torch.bool)
        labels = list(columns[IDS].masked_fill(hidden, IGNORED))
    tokens = bool(labels) and not labels[0].is_floating_point()  # numbers are no labels of tokens
    y = _stacked(labels, IGNORED, length if tokens else 0, f"{LABELS} of {name}")
    x = [columns[field] for field in fields]
    if any(part.shape != x[0].shape or part.dtype != x[0].dtype or part.dim() != 2 for part in x) and len(x) > 1:
        found = ", ".join(f"{field} {list(part.shape[1:])}" for field, part in zip(fields, x, strict=True))
        needed = "fields of numbers with one type and one shape [records, length], or a single field"
        raise DataError(
            f"{name} with the fields {found}", needed, "keep one field, or wrap the model so that it takes one tensor"
        )
    return Records(x[0] if len(x) == 1 else torch.stack(x, 1), y[:, 1:].contiguous() if causal else y)


def _columns(model: nn.Module, entry: Any, name: str) -> Columns:
    """Return one list of tensors per field; text columns are dropped."""
    if isinstance(entry, tuple | list) and len(entry) == 2 and not has_named_fields(entry):
        entry = {model.main_input_name: entry[0], LABELS: entry[1]}
    if not isinstance(entry, Mapping):
        rows = [entry[i] for i in range(len(entry))]
        if not rows:
            return {}
        entry = {field: [row[field] for row in rows] for field in rows[0]}
    columns: Columns = {}
    for field, column in entry.items():
        if not isinstance(column, Tensor) and len(column) and isinstance(column[0], str | bytes | None):
            continue
        field = LABELS if field in ALIASES else field
        try:
            values = [torch.as_tensor(value) for value in column]
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{field} of {name}, which is no list of numbers ({error})", "numbers") from None
        columns[field] = [value.float() if value.is_floating_point() else value.long() for value in values]
    _check_columns(model, columns, name)
    return columns


def _check_columns(model: nn.Module, columns: Columns, name: str) -> None:
    taken = list(inspect.signature(type(_base_model(model)).forward).parameters.values())[1:]
    known = [parameter.name for parameter in taken if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    wrong = next((field for field in columns if known and field not in known and field != LABELS), None)
    if wrong is not None:
        needed = f"fields among {', '.join(known[:3])}, ..."
        raise DataError(f"a field {wrong!r} in {name}, which the model does not take", needed, "remove it")
    if LABELS not in columns and not (is_causal(model) and IDS in columns):
        raise DataError(f"{name} with the fields {', '.join(columns) or 'none'}", "a field `labels`")
    lengths = {field: len(column) for field, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{name} with {lengths} records", "the same number of records in every field")


def _field_names(tables: Sequence[tuple[Columns, str]]) -> tuple[str, ...]:
    """Return the names of the input fields, in the first entry's order; every entry must have the same."""
    full = [(table, name) for table, name in tables if table]
    if not full:
        raise DataError(f"{len(tables)} data sets without a record", "at least one record")
    first, first_name = full[0]
    for table, name in full:
        if table.keys() != first.keys():
            needed = f"those of {first_name}: {', '.join(first)}"
            raise DataError(f"{name} with the fields {', '.join(table)}", needed)
    if not first.keys() - {LABELS}:
        raise DataError(f"{first_name} with labels and no inputs", "input fields of the model beside the labels")
    return tuple(field for field in first if field != LABELS)


def _stacked(column: Sequence[Tensor], fill: int, length: int, where: str) -> Tensor:
    """Return a column as one tensor: [n, length] for sequences, padded with `fill`; [n, ...] for other fields."""
    if not column:
        return torch.empty(0, length, dtype=torch.int64)
    if column[0].dim() == 1 and length:
        column = [nn.functional.pad(value, (0, length - len(value)), value=fill) for value in column]
    try:
        return torch.stack(list(column))
    except RuntimeError as error:
        raise DataError(f"{where} of different shapes ({error})", "one shape") from None
