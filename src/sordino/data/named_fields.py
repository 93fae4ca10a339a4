"""Records with named fields, as Hugging Face tokenizers and data sets give them, packed into tensors. Called by `task`.

The fields of a record become rows of one tensor, x [n, fields, T] of integers, padded on the right to one length; a
single field (pixel_values) is x itself, and `labels` are y. `NamedFieldsModel` passes them to the model by name.

    field          is padded with
    input_ids      pad, the tokenizer's id; any number will do, for the attention_mask hides it
    labels         -100, which costs nothing
    any other      0; where a record is padded and there is no attention_mask, one is made
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import DataError
from sordino.parts.losses import IGNORED

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
ALIASES = ("label", "label_ids")  # what data sets call `labels`, and collators of transformers rename
_TABLE = "numbers of one type and one shape [records, length] in every field, or one field alone"

Columns = dict[str, list[Tensor]]  # by field, one tensor per record


class NamedFieldsModel(nn.Module):
    """Wraps a model that takes named inputs as a function of one tensor that returns the logits.

    A causal model's logits of the last token have no label and are left out; y begins with the second token.
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
    """The user's own model."""
    return model.model if isinstance(model, NamedFieldsModel) else model


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is from transformers, or wraps one (peft): it returns more than a tensor."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def is_causal(model: nn.Module) -> bool:
    """Whether the model is a causal language model: the label of a token is the next token."""
    return re.search("(CausalLM|LMHeadModel)$", type(base_model(model)).__name__) is not None


def base_model(model: nn.Module) -> nn.Module:
    """The model inside a peft wrapper."""
    own: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return own


def has_named_fields(entry: Any) -> bool:
    """Whether an entry is a mapping of columns or a data set of mappings."""
    if isinstance(entry, Mapping):
        return True
    listed = hasattr(entry, "__len__") and hasattr(entry, "__getitem__") and not isinstance(entry, Tensor)
    return listed and len(entry) > 0 and isinstance(entry[0], Mapping)


def tabulate_fields(
    model: nn.Module, entries: Sequence[tuple[Any, str]], pad: int | None = None, length: int | None = None
) -> tuple[NamedFieldsModel, list[tuple[Tensor, Tensor]]]:
    """The wrapped model, and tensors x and y of all entries; each entry comes with its name for errors.

    `length` is the number of tokens of a record, by default that of the longest.
    """
    causal, tables = is_causal(model), [_columns(model, entry, name) for entry, name in entries]
    names = _names(tables, entries)
    found = pad if pad is not None else getattr(getattr(model, "config", None), "pad_token_id", None)
    fields = chain.from_iterable(table[name] for table in tables if table for name in names)
    sizes = {len(value) for value in fields if value.dim() == 1}  # of all sequences
    longest = max(sizes, default=0)
    if length is not None and longest > length:
        fix = f"raise length, or tokenize with truncation=True, max_length={length}"
        raise DataError(f"a record of {longest} tokens and length = {length}", "no record longer than that", fix)
    ragged = len(sizes | ({length} if length is not None and sizes else set())) > 1
    packing = _Packing(names, causal, found or 0, longest if length is None else length, ragged)
    packed = [packing(table, name) for table, (_, name) in zip(tables, entries, strict=True)]
    public = () if length is None else (length,)
    return NamedFieldsModel(model, packing.fields, causal, public if sizes else None), packed


@dataclass(frozen=True)
class _Packing:
    """How the columns of named fields become one tensor."""

    names: tuple[str, ...]
    causal: bool
    pad: int
    length: int
    masked: bool  # whether a mask has to be made where there is none

    @property
    def fields(self) -> tuple[str, ...]:
        own = self.masked and IDS in self.names and MASK not in self.names
        return (*self.names, MASK) if own else self.names

    def __call__(self, table: Columns, name: str) -> tuple[Tensor, Tensor]:
        if not table:
            return torch.empty(0), torch.empty(0, dtype=torch.int64)
        fills = {field: self.pad if field == IDS else 0 for field in self.names}
        columns = {field: _stacked(table[field], fills[field], self.length, f"{field} of {name}") for field in fills}
        if MASK in self.fields and MASK not in columns:
            columns[MASK] = _stacked([torch.ones_like(ids) for ids in table[IDS]], 0, self.length, MASK)
        labels = self._labels(table, columns)
        tokens = bool(labels) and not labels[0].is_floating_point()  # numbers are no labels of tokens
        y = _stacked(labels, IGNORED, self.length if tokens else 0, f"{LABELS} of {name}")
        x = [columns[field] for field in self.fields]
        return self._joined(x, name), y[:, 1:].contiguous() if self.causal else y

    def _labels(self, table: Columns, columns: Mapping[str, Tensor]) -> list[Tensor]:
        """The labels; where there are none, the tokens themselves (causal models)."""
        if LABELS in table:
            return table[LABELS]
        hidden = columns[MASK] == 0 if MASK in columns else torch.zeros_like(columns[IDS], dtype=torch.bool)
        return list(columns[IDS].masked_fill(hidden, IGNORED))

    def _joined(self, x: list[Tensor], name: str) -> Tensor:
        if len(x) == 1:
            return x[0]
        if any(part.shape != x[0].shape or part.dtype != x[0].dtype or part.dim() != 2 for part in x):
            found = ", ".join(f"{field} {list(part.shape[1:])}" for field, part in zip(self.fields, x, strict=True))
            raise DataError(f"{name} with the fields {found}", _TABLE, "give the model one of them, or wrap it")
        return torch.stack(x, 1)


def _columns(model: nn.Module, entry: Any, name: str) -> Columns:
    """One list of tensors per field; text columns are dropped."""
    if isinstance(entry, tuple | list) and len(entry) == 2 and not has_named_fields(entry):
        entry = {model.main_input_name: entry[0], LABELS: entry[1]}
    if not isinstance(entry, Mapping):
        rows = [entry[i] for i in range(len(entry))]
        entry = {field: [row[field] for row in rows] for field in (rows[0] if rows else ())}
        if not rows:
            return {}
    entry = {LABELS if field in ALIASES else field: column for field, column in entry.items()}
    words = str | bytes | None
    text = [f for f, c in entry.items() if not isinstance(c, Tensor) and len(c) and isinstance(c[0], words)]
    entry = {field: column for field, column in entry.items() if field not in text}
    columns = {field: [_tensor(value, f"{field} of {name}") for value in column] for field, column in entry.items()}
    _check_columns(model, columns, name)
    return columns


def _tensor(value: Any, where: str) -> Tensor:
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}, which is no list of numbers ({error})", "numbers") from None
    return found.float() if found.is_floating_point() else found.long()


def _check_columns(model: nn.Module, columns: Columns, name: str) -> None:
    taken = list(inspect.signature(type(base_model(model)).forward).parameters.values())[1:]
    known = [parameter.name for parameter in taken if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    wrong = next((field for field in columns if known and field not in known and field != LABELS), None)
    if wrong is not None:
        needed = f"fields among {', '.join(known[:3])}, ..."
        raise DataError(f"a field {wrong!r} in {name}, which the model does not take", needed, "remove it")
    if LABELS not in columns and not (is_causal(model) and IDS in columns):
        raise DataError(f"{name} with the fields {', '.join(columns) or 'none'}", "labels among them")
    lengths = {field: len(column) for field, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{name} with {lengths} records", "as many in every field")


def _names(tables: Sequence[Columns], entries: Sequence[tuple[Any, str]]) -> tuple[str, ...]:
    """Names of the input fields, in the first entry's order; every entry must have the same."""
    full = [(table, name) for table, (_, name) in zip(tables, entries, strict=True) if table]
    if not full:
        raise DataError(f"{len(tables)} data sets without a record", "at least one record")
    first, whose = full[0]
    for table, name in full:
        if table.keys() != first.keys():
            needed = f"those of {whose}: {', '.join(first)}"
            raise DataError(f"{name} with the fields {', '.join(table)}", needed)
    if not first.keys() - {LABELS}:
        raise DataError(f"{whose} with labels alone", "inputs of the model beside them")
    return tuple(field for field in first if field != LABELS)


def _stacked(column: Sequence[Tensor], fill: int, length: int, where: str) -> Tensor:
    """[n, length] of sequences, padded; [n, ...] of anything else."""
    if not column:
        return torch.empty(0, length, dtype=torch.int64)
    if column[0].dim() == 1 and length:
        column = [torch.nn.functional.pad(value, (0, length - len(value)), value=fill) for value in column]
    try:
        return torch.stack(list(column))
    except RuntimeError as error:
        raise DataError(f"{where} of different shapes ({error})", "one shape") from None
