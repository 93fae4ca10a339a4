"""Records as tensors, and the clients that hold them: one table, and the rows of each client.

Called by `task`, which turns the user's data sets into `Records`, and by the engines. A data set is a pair (x, y), a
map-style data set of pairs, or a data set with named fields, as Hugging Face tokenizers return them. The named fields
of n records become one integer tensor x [n, fields, T], padded on the right to T tokens; a single field (pixel_values)
is x itself, and the field `labels` is y. `NamedFieldsModel` passes the fields to the model by name.

    field          is padded with
    input_ids      the tokenizer's padding id; its value has no effect, since the attention_mask hides it
    labels         -100, which the loss ignores
    any other      0; if a record is padded and has no attention_mask, one is added
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
        """Build clients from a list with one data set each: (x, y), `Records`, or a map-style data set of pairs."""
        if len(clients) == 0:
            raise DataError("an empty list of clients", "at least one client", "pass one data set per client")
        parts = [records_of(entry, f"client {i}") for i, entry in enumerate(clients)]
        full = [part for part in parts if len(part)]
        if not full:
            found = f"{len(parts)} clients without any record"
            raise DataError(found, "a record of at least one client", "check the data sets in the list")
        table = Records(torch.cat([part.x for part in full]), torch.cat([part.y for part in full]))
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return cls(table, np.arange(offsets[-1], dtype=np.int64), offsets)

    @classmethod
    def cut(cls, records: Records, partition: Partitioner, groups: Any = None, seed: int = 0) -> Clients:
        """Partition one table of records over clients; the partition's random draws follow from the public `seed`."""
        split = partition.split(records.y.numpy(), groups, Seeded(seed).at(0, "partition"))
        return cls(records, split.index, split.offsets)

    @classmethod
    def elsewhere(cls, population: int, like: Records | None = None) -> Clients:
        """Return clients whose records are on other machines; `like` is public records with the shape of theirs."""
        sides = (torch.empty(0), torch.empty(0)) if like is None else (like.x, like.y)
        x, y = (side.new_empty(0, *side.shape[1:]) for side in sides)
        return cls(Records(x, y), np.zeros(0, dtype=np.int64), np.zeros(population + 1, dtype=np.int64), ())

    @classmethod
    def alone(cls, client: int, population: int, own: Records) -> Clients:
        """Return a population of which this process holds the records of one client only."""
        if not 0 <= client < population:
            needed = f"a number from 0 to {population - 1}"
            raise DataError(f"silo {client} of {population}", needed, "correct the number of the silo")
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
        """Return the number of records of a client."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def rows(self, client: int) -> Ints:
        """Return the rows of the table that a client holds."""
        return self.index[self.offsets[client] : self.offsets[client + 1]]


_DATA_NEEDED = "a pair (x, y) of tensors, or a map-style data set of such pairs"
_DATA_FIX = "pass (x, y), or a torch.utils.data.TensorDataset(x, y)"


def records_of(entry: Any, name: str) -> Records:
    """Return a user's pair (x, y) or map-style data set as records; error messages call it `name`."""
    if isinstance(entry, Records):
        return entry
    if not (isinstance(entry, tuple | list) and len(entry) == 2):
        if isinstance(entry, Mapping) or not (hasattr(entry, "__len__") and hasattr(entry, "__getitem__")):
            raise DataError(f"{name} of type {type(entry).__name__}", _DATA_NEEDED, _DATA_FIX)
        pairs = [entry[i] for i in range(len(entry))]
        if not pairs:
            return Records(torch.empty(0), torch.empty(0, dtype=torch.int64))
        xs, ys = zip(*pairs, strict=True)
        entry = torch.stack([torch.as_tensor(x) for x in xs]), cast(Any, ys)
    try:
        x, y = torch.as_tensor(entry[0]), torch.as_tensor(entry[1])
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"{name} that cannot be converted to tensors ({error})"
        raise DataError(found, _DATA_NEEDED, _DATA_FIX) from None
    x, y = (side.float() if side.dtype == torch.float64 else side for side in (x, y))
    if len(x) != len(y):
        found = f"{name} with {len(x)} inputs and {len(y)} targets"
        raise DataError(found, "one target for every input", "cut the longer of the two")
    return Records(x, y)


def check_finite(records: Records, name: str) -> None:
    """Refuse records with NaN or infinity; memory-mapped records are not read and not checked."""
    if records.lazy:
        return
    for side, tensor in (("x", records.x), ("y", records.y)):
        if tensor.is_floating_point() and not all(bool(part.isfinite().all()) for part in torch.split(tensor, 65536)):
            count = int((~tensor.isfinite()).sum())
            found = f"{count} NaN or infinite values in {side} of {name}"
            raise DataError(found, "finite numbers", "drop the records, or impute the values before training")


# ---- records with named fields ---------------------------------------------------------------------------------------

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
ALIASES = ("label", "label_ids")  # what data sets call `labels`, and collators of transformers rename
Columns = dict[str, list[Tensor]]  # by field, one tensor per record


class NamedFieldsModel(nn.Module):
    """Wrapper of a model with named inputs: takes one tensor with all fields and returns the logits.

    For a causal model the last token's logits are dropped, since they have no label; y begins with the second token.
    `public` is the part of a record's shape that may be published. None means the whole shape. For sequences it is the
    length that the caller passed, or () if the caller passed none, since the longest length depends on private records.
    """

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], causal: bool, public: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.model, self.names, self.causal, self.public = model, names, causal, public

    def forward(self, x: Tensor) -> Tensor:
        fields = (x,) if len(self.names) == 1 else x.unbind(1)
        output = self.model(**dict(zip(self.names, fields, strict=True)))
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits[:, :-1] if self.causal else logits


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the user's model inside a `NamedFieldsModel`; any other model is returned as it is."""
    return model.model if isinstance(model, NamedFieldsModel) else model


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is of the package transformers, or of peft, so that it returns more than a tensor."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def is_causal(model: nn.Module) -> bool:
    """Return whether the model is a causal language model, in which the label of a token is the next token."""
    return re.search("(CausalLM|LMHeadModel)$", type(_base_model(model)).__name__) is not None


def _base_model(model: nn.Module) -> nn.Module:
    own: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return own


def has_named_fields(entry: Any) -> bool:
    """Return whether a user's data set has named fields: a mapping of columns, or a sequence of mappings."""
    if isinstance(entry, Mapping):
        return True
    listed = hasattr(entry, "__len__") and hasattr(entry, "__getitem__") and not isinstance(entry, Tensor)
    return listed and len(entry) > 0 and isinstance(entry[0], Mapping)


def tabulate_fields(
    model: nn.Module, entries: Sequence[tuple[Any, str]], pad: int | None = None, length: int | None = None
) -> tuple[NamedFieldsModel, list[Records]]:
    """Return the wrapped model, and each data set with named fields as records.

    `entries` are pairs of a data set and its name in error messages. `pad` is the padding id of input_ids, by default
    that of the model's configuration; `length` is the number of tokens of a record, by default that of the longest.
    """
    causal, tables = is_causal(model), [(_columns(model, entry, name), name) for entry, name in entries]
    names = _field_names(tables)
    found = pad if pad is not None else getattr(getattr(model, "config", None), "pad_token_id", None)
    fields = chain.from_iterable(table[name] for table, _ in tables if table for name in names)
    sizes = {len(value) for value in fields if value.dim() == 1}  # of all sequences
    longest = max(sizes, default=0)
    if length is not None and longest > length:
        fix = f"raise length, or tokenize with truncation=True, max_length={length}"
        raise DataError(f"a record of {longest} tokens", f"at most length = {length} tokens", fix)
    ragged = len(sizes | ({length} if length is not None and sizes else set())) > 1
    all_names = (*names, MASK) if ragged and IDS in names and MASK not in names else names
    size = longest if length is None else length
    packed = [_pack(table, name, all_names, causal, found or 0, size) for table, name in tables]
    public = () if length is None else (length,)
    return NamedFieldsModel(model, all_names, causal, public if sizes else None), packed


def _pack(table: Columns, name: str, fields: tuple[str, ...], causal: bool, pad: int, length: int) -> Records:
    """Return x and y of the columns; a causal model's labels are by default its input tokens."""
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
        fix = "remove all fields but one, or wrap the model so that it takes one tensor"
        raise DataError(f"{name} with the fields {found}", needed, fix)
    return Records(x[0] if len(x) == 1 else torch.stack(x, 1), y[:, 1:].contiguous() if causal else y)


def _columns(model: nn.Module, entry: Any, name: str) -> Columns:
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
            continue  # text
        field = LABELS if field in ALIASES else field
        try:
            values = [torch.as_tensor(value) for value in column]
        except (TypeError, ValueError, RuntimeError) as error:
            found = f"field {field} of {name}, which is no list of numbers ({error})"
            raise DataError(found, "numbers for every record", "remove the field, or convert it to numbers") from None
        columns[field] = [value.float() if value.is_floating_point() else value.long() for value in values]
    _check_columns(model, columns, name)
    return columns


def _check_columns(model: nn.Module, columns: Columns, name: str) -> None:
    taken = list(inspect.signature(type(_base_model(model)).forward).parameters.values())[1:]
    known = [parameter.name for parameter in taken if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    wrong = next((field for field in columns if known and field not in known and field != LABELS), None)
    if wrong is not None:
        needed = f"fields among {', '.join(known[:3])}, ..."
        found = f"a field {wrong!r} in {name}, which the model does not take"
        raise DataError(found, needed, "remove the field from the data set")
    if LABELS not in columns and not (is_causal(model) and IDS in columns):
        found = f"{name} with the fields {', '.join(columns) or 'none'}"
        raise DataError(found, "a field `labels`", "rename the column of the targets to labels")
    lengths = {field: len(column) for field, column in columns.items()}
    if len(set(lengths.values())) > 1:
        needed = "the same number of records in every field"
        raise DataError(f"{name} with {lengths} records", needed, "cut the longer fields")


def _field_names(tables: Sequence[tuple[Columns, str]]) -> tuple[str, ...]:
    full = [(table, name) for table, name in tables if table]
    if not full:
        found = f"{len(tables)} data sets without a record"
        raise DataError(found, "at least one record", "pass data sets with records")
    first, first_name = full[0]
    for table, name in full:
        if table.keys() != first.keys():
            needed = f"the fields of {first_name}: {', '.join(first)}"
            raise DataError(f"{name} with the fields {', '.join(table)}", needed, "add or remove fields")
    if not first.keys() - {LABELS}:
        found = f"{first_name} with labels and no inputs"
        raise DataError(found, "input fields of the model beside the labels", "add input_ids or pixel_values")
    return tuple(field for field in first if field != LABELS)


def _stacked(column: Sequence[Tensor], fill: int, length: int, where: str) -> Tensor:
    """Return a column as one tensor: [n, length] for sequences, [n, ...] for any other field."""
    if not column:
        return torch.empty(0, length, dtype=torch.int64)
    if column[0].dim() == 1 and length:
        column = [nn.functional.pad(value, (0, length - len(value)), value=fill) for value in column]
    try:
        return torch.stack(list(column))
    except RuntimeError as error:
        fix = "pad or resize the records"
        raise DataError(f"{where} of different shapes ({error})", "one shape for all records", fix) from None
