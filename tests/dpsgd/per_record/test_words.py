"""What models of language do beside layers in a row: shared positions, tied tables, biases under two names."""

from __future__ import annotations

import pytest
import torch
from tests.dpsgd.per_record.oracle import assert_equal, clipped_loop, middle_clip_norm, squared
from torch import Tensor, nn

from sordino.dpsgd import ClippedGradient
from sordino.dpsgd.pieces import Lookup, Outer, OutputGradients, Tied, merge_pieces, row_squares

BATCH, LENGTH, WORDS = 6, 4, 7


class Positions(nn.Module):
    """Positions are looked up once for all records: [1, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.out = nn.Embedding(WORDS, 5), nn.Embedding(LENGTH, 5), nn.Linear(5, 2)

    def places(self) -> Tensor:
        found: Tensor = self.place(torch.arange(LENGTH)[None])
        return found

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.word(x) + self.places()))
        return out


class FirstPlace(Positions):
    """Takes the one row that there is: by a rule that makes a row for each record, all would share the first's."""

    def places(self) -> Tensor:
        return super().places()[0]


class LastPlace(Positions):
    def places(self) -> Tensor:
        return super().places()[-1]


class MeanPlace(Positions):
    def places(self) -> Tensor:
        return super().places().mean(0)


class TiedTable(nn.Module):
    """The table of the words is the last layer's weight too, and its bias has two names."""

    def __init__(self, inner: bool = True) -> None:
        super().__init__()
        self.word, self.inner = nn.Embedding(WORDS, 5, padding_idx=0), nn.Linear(5, 5)
        self.out = nn.Linear(5, WORDS)
        self.out.weight = self.word.weight
        self.bias = self.out.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.inner(self.word(x))))
        return out


@pytest.mark.parametrize("kind", [Positions, FirstPlace, LastPlace, MeanPlace, TiedTable])
def test_a_clipped_sum_equals_a_loop_over_records(kind: type[nn.Module]) -> None:
    torch.manual_seed(2)
    model, x, y = kind(), torch.randint(0, WORDS, (BATCH, LENGTH)), torch.randn(BATCH)
    _, norms = clipped_loop(model, squared, x, y, 1e9)
    clip_norm = middle_clip_norm(norms)
    fast = ClippedGradient(model, squared)
    assert_equal(fast.sum(x, y, clip_norm), *clipped_loop(model, squared, x, y, clip_norm))
    assert fast.whole is (kind not in (Positions, TiedTable))


def table(seed: int) -> tuple[Outer, Lookup]:
    coins = torch.Generator().manual_seed(seed)
    inputs, slopes = torch.randn(BATCH, 3, 5, generator=coins), torch.randn(BATCH, 3, WORDS, generator=coins)
    index = torch.randint(WORDS, (BATCH, LENGTH), generator=coins)
    return Outer(inputs, OutputGradients(slopes)), Lookup(index, torch.randn(BATCH, LENGTH, 5, generator=coins), WORDS)


@pytest.mark.parametrize("order", [1, -1])
def test_a_tied_table_has_the_norms_and_sums_of_its_gradients(order: int) -> None:
    piece = merge_pieces(table(3)[::order])
    assert isinstance(piece, Tied)
    rows, weights = piece.rows(), torch.rand(BATCH)
    torch.testing.assert_close(piece.squares(), row_squares(rows), rtol=1e-5, atol=0)
    torch.testing.assert_close(piece.weighted(weights), torch.einsum("b,bvd->vd", weights, rows))
    some = torch.tensor([1, 4])
    torch.testing.assert_close(piece.at(some).rows(), rows[some])


def test_a_tied_table_whose_uses_cancel_is_in_doubt() -> None:
    index = torch.arange(BATCH)[:, None]
    slopes = torch.nn.functional.one_hot(index, WORDS).float()
    outputs = torch.randn(BATCH, 1, 5)
    piece = merge_pieces([Outer(-outputs, OutputGradients(slopes)), Lookup(index, outputs, WORDS)])
    squares, doubt = piece.squares(), piece.doubt()
    assert isinstance(doubt, Tensor)
    assert bool((squares <= doubt).all())
