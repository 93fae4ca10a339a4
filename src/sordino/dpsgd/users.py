"""Users as the unit of privacy of a private loop: `make_private(..., users=ids)` clips a user's records together.

    g_u = (1 / n_u) sum over the n_u records j of user u of g_j        g_j: gradient of record j
    sum_u g_u min(1, C / ||g_u||)                                      over the users that a step draws, C: clip norm

Inside the backward pass the n_u records of a user, with T positions each, become one record of n_u T positions, so the
norms computed in dpsgd/pieces.py contain the products of different records of one user. Users of a physical batch are
grouped by the power of two above their number of records; padding at most doubles the work. A user with more records
than fit in a physical batch is split over several, and the parts of its gradient are summed before it is clipped.

Guarantee: adding or removing one user with all records changes the sum by at most C. Called by dpsgd/private_loop.py,
loader.py and recording.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sordino import codec
from sordino.dpsgd.pieces import ByGroup, Keep, Lookup, Outer, OutputGradients, Piece, Rows, identity
from sordino.dpsgd.processes import Ranks
from sordino.errors import DataError

_NEEDED = "one user id per record, a whole number or a text"


@codec.hides_values
@dataclass(frozen=True)
class Owners:
    """Users of a physical batch, in which the records of a user are consecutive.

    counts  number of records of each user in this physical batch
    totals  number of all records of each user, by which its gradient is divided
    first   whether the first record of its users is in this batch; False for a later part of a user
    last    whether the last record of its users is in this batch
    widths  number of records that each user is padded to
    """

    counts: tuple[int, ...]
    totals: tuple[int, ...]
    first: bool = True
    last: bool = True
    widths: tuple[int, ...] = ()

    @property
    def units(self) -> int:
        """Number of users in the physical batch."""
        return len(self.counts)

    @cached_property
    def _shares(self) -> Tensor:
        """Weight of each record in its user's mean gradient: one over the user's number of records."""
        return torch.tensor([1.0 / n for n in self.totals]).repeat_interleave(torch.tensor(self.counts))

    @cached_property
    def _groups(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Groups of users padded to equal width: users [m], their rows [m, width], and which rows are padding."""
        widths = self.widths or tuple(1 << (count - 1).bit_length() for count in self.counts)
        counts, starts = torch.tensor(self.counts), torch.tensor(self.counts).cumsum(0) - torch.tensor(self.counts)
        found = []
        for width in sorted(set(widths)):
            members = torch.tensor([user for user, own in enumerate(widths) if own == width])
            places = torch.arange(width).expand(len(members), -1)
            padding = places >= counts[members, None]
            found.append((members, starts[members, None] + places.masked_fill(padding, 0), padding))
        return found

    def merge(self, piece: Piece, keep: Keep) -> Piece:
        """Return the gradients of users from those of their records; `keep` chooses the form that is stored."""
        if self.units == 0 or (max(self.totals) == 1 and not self.widths):
            return keep(piece)
        if not isinstance(piece, Outer | Lookup):
            return keep(self._summed(piece if isinstance(piece, Rows) else Rows(piece.rows())))
        outputs = piece.outputs.value if isinstance(piece, Outer) else piece.outputs
        shares, parts = self._shares.to(outputs.device, outputs.dtype), list[tuple[Tensor, Piece]]()
        for members, *where in self._groups:
            rows, padding = (one.to(outputs.device) for one in where)
            own = outputs[rows] * shares[rows][..., None, None]  # [m, width, T, O]
            own = own.masked_fill_(padding[..., None, None], 0.0).flatten(1, 2)
            merged = _merged_outer(piece, rows, own) if isinstance(piece, Outer) else _merged_lookup(piece, rows, own)
            parts.append((members.to(outputs.device), keep(merged)))
        return parts[0][1] if len(parts) == 1 else ByGroup(self.units, tuple(parts))

    def _summed(self, piece: Rows) -> Rows:
        """Return every user's weighted sum of its records' gradients."""
        value = piece.value.flatten(1) * self._shares.to(piece.value.device, piece.value.dtype)[:, None]
        owner = torch.arange(self.units).repeat_interleave(torch.tensor(self.counts)).to(value.device)
        total = value.new_zeros(self.units, value.shape[1]).index_add_(0, owner, value)
        return Rows(total.view(-1, *piece.value.shape[1:]), piece.reshape)


def _merged_outer(piece: Outer, rows: Tensor, outputs: Tensor) -> Outer:
    """Return the gradients of users as an `Outer` over the positions of all their records."""
    inputs, cut, product = piece.inputs[rows], piece.cut, piece.product
    if cut is identity:
        return Outer(inputs.flatten(1, 2), OutputGradients(outputs), piece.reshape)

    def cut_all(some: Tensor) -> Tensor:
        found = cut(some.flatten(0, 1))
        return found.reshape(len(some), -1, found.shape[2])

    def product_of_all(slopes: Tensor, some: Tensor) -> Tensor:
        assert product is not None
        return product(slopes.reshape(some.shape[0] * some.shape[1], -1, slopes.shape[2]), some.flatten(0, 1))

    return Outer(inputs, OutputGradients(outputs), piece.reshape, cut_all, None if product is None else product_of_all)


def _merged_lookup(piece: Lookup, rows: Tensor, outputs: Tensor) -> Lookup:
    return Lookup(piece.index[rows].flatten(1), outputs, piece.words)


Batch = tuple[list[int], Owners]  # rows of a physical batch, and their users


@codec.hides_values
class Users:
    """Users of a data set, each with its rows; `owners` has the number of every row's user, from 0."""

    def __init__(self, owners: Sequence[int]) -> None:
        self.owner = np.asarray(owners, dtype=np.int64)
        counts = np.bincount(self.owner)
        self.rows = [part.tolist() for part in np.split(np.argsort(self.owner, kind="stable"), counts.cumsum()[:-1])]

    @classmethod
    def of(cls, ids: Any, records: int) -> Users:
        """Read one user id per record; refuse records with several users, ids of other types, and other lengths."""
        values = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids
        if isinstance(values, np.ndarray) and values.ndim != 1:
            _refuse_owners(f"users of {values.ndim} dimensions, {list(values.shape)}")
        try:
            listed = [] if isinstance(values, str | bytes) else list(values)
        except TypeError:
            listed = []
        odd = next((one for one in listed if isinstance(one, list | tuple | set | frozenset | dict)), None)
        if odd is not None:
            _refuse_owners(f"a record with a {type(odd).__name__} of users")
        if len(listed) != records:
            raise DataError(f"users for {len(listed)} of {records} records", _NEEDED, "pass a tensor or list of ids")
        listed = [one.item() if isinstance(one, np.generic | Tensor) and np.ndim(one) == 0 else one for one in listed]
        kinds = {type(one) for one in listed}
        if kinds not in ({int}, {str}):
            names = " and ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))
            fix = "number the users from 0, and leave records without a user out of the data set"
            raise DataError(f"users of type {names}", _NEEDED, fix)
        known: dict[Any, int] = {}
        return cls([known.setdefault(one, len(known)) for one in listed])

    def __len__(self) -> int:
        return len(self.rows)

    def digest(self, key: bytes = b"") -> bytes:
        """Return a keyed hash of the users of all rows."""
        return hashlib.blake2b(self.owner.tobytes(), key=key, digest_size=16).digest()

    def batches(self, drawn: Sequence[int], width: int | None, ranks: Ranks) -> list[Batch]:
        """Return this rank's physical batches of a step's users, of at most `width` records each.

        Every rank has the same number of them. A user's rank is its number modulo the number of ranks. A user with more
        than `width` records has physical batches of its own.
        """
        every = [self._packed([u for u in drawn if u % ranks.size == rank], width) for rank in range(ranks.size)]
        own, most = every[ranks.rank], max(1, *map(len, every))
        return own + [([], Owners((), ()))] * (most - len(own))

    def _packed(self, drawn: Sequence[int], width: int | None) -> list[Batch]:
        found: list[Batch] = []
        open_rows, counts = list[int](), list[int]()
        for rows in [self.rows[user] for user in drawn]:
            if width is not None and counts and len(open_rows) + len(rows) > width:
                found.append((open_rows, Owners(tuple(counts), tuple(counts))))
                open_rows, counts = [], []
            if width is not None and len(rows) > width:
                found += _parts(rows, width)
            else:
                open_rows, counts = open_rows + rows, [*counts, len(rows)]
        return [*found, (open_rows, Owners(tuple(counts), tuple(counts)))] if counts else found


def _parts(rows: list[int], width: int) -> list[Batch]:
    parts = [rows[start : start + width] for start in range(0, len(rows), width)]
    ends = [(k == 0, k + 1 == len(parts)) for k in range(len(parts))]
    return [(part, Owners((len(part),), (len(rows),), *end)) for part, end in zip(parts, ends, strict=True)]


def _refuse_owners(found: str) -> NoReturn:
    fix = "assign each record to one user before make_private"
    raise DataError(found, f"{_NEEDED}: a record of several users would count for each of them", fix)


def padded(size: int, each: int) -> Owners:
    """Return synthetic users with `each` of `size` records, padded to twice their number: the most that can occur."""
    counts = tuple(min(each, size - start) for start in range(0, size, each))
    return Owners(counts, counts, widths=(2 * each,) * len(counts))
