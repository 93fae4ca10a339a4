"""Every layer's clipped sum equals a loop over records, and so does every way of running it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.dpsgd.per_record.oracle import assert_equal, clipped_loop, middle_clip_norm, squared
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino.dpsgd import ClippedGradient
from sordino.dpsgd.pieces import Lookup, Outer, OutputGradients, Rows, row_squares
from sordino.models import CharLstm, DpMnistCnn, ResNet18

BATCH, LENGTH = 5, 4


class First(nn.Module):
    """A layer that returns a tuple, as the sum of what matters in it."""

    def __init__(self, inner: nn.Module, time_first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.inner, self.time_first, self.last = inner, time_first, last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        out, end = self.inner(x.transpose(0, 1) if self.time_first else x)
        out = out.transpose(0, 1) if self.time_first else out
        if self.last:
            ends = end if isinstance(end, tuple) else (end,)
            out = out + sum(e.sum((0, 2)) for e in ends)[:, None, None]
        return out


class Attend(nn.Module):
    """Attention to itself or to another sequence, with a causal or a padding mask."""

    def __init__(self, inner: nn.MultiheadAttention, other: int = 0, mask: bool = False, weights: bool = False) -> None:
        super().__init__()
        self.inner, self.other, self.mask, self.weights = inner, other, mask, weights

    def forward(self, x: Tensor) -> Tensor:
        key = F.pad(x, (0, self.other - x.shape[2])) if self.other else x
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1) if self.mask else None
        padding = (x[..., 0] > 2.0) if self.mask else None
        value = key * 1.5 if self.other else key
        out: Tensor = self.inner(x, key, value, attn_mask=mask, key_padding_mask=padding, need_weights=self.weights)[0]
        return out


class Encoder(nn.Module):
    """torch's own transformer; with `batch_first=False` the records lie along axis 1."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        self.inner = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x if self.batch_first else x.transpose(0, 1))
        return out if self.batch_first else out.transpose(0, 1)


def vector() -> Tensor:
    return torch.randn(BATCH, 8)


def series(width: int = 8, length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, width)


def words() -> Tensor:
    return torch.randint(3, (BATCH, 6))


def image(channels: int = 4, side: int = 9) -> Tensor:
    return torch.randn(BATCH, channels, side, side)


def signal() -> Tensor:
    return torch.randn(BATCH, 4, 11)


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
TRANSFORMERS: dict[str, Case] = {
    "attention": (lambda: Attend(nn.MultiheadAttention(8, 2, batch_first=True)), series),
    "attention with masks": (lambda: Attend(nn.MultiheadAttention(8, 2, batch_first=True), mask=True), series),
    "attention with weights": (lambda: Attend(nn.MultiheadAttention(8, 2, batch_first=True), weights=True), series),
    "attention to others": (
        lambda: Attend(nn.MultiheadAttention(8, 2, kdim=9, vdim=9, batch_first=True), other=9),
        series,
    ),
    "attention to another": (
        lambda: Attend(nn.MultiheadAttention(8, 2, bias=False, batch_first=True), other=8),
        series,
    ),
    "transformer": (lambda: Encoder(True), series),
    "transformer, time first": (lambda: Encoder(False), series),
    "transformer, as long as the batch": (lambda: Encoder(False), lambda: series(length=BATCH)),
}
RECURRENT: dict[str, Case] = {
    f"{kind.__name__} {flags}": (
        lambda kind=kind, flags=flags: First(kind(8, 5, **flags), not flags.get("batch_first"), last=True),  # type: ignore[misc]
        series,
    )
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for flags in (
        {"batch_first": True, "num_layers": 2},
        {"bidirectional": True, "num_layers": 2},
        {"bias": False},
    )
}
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(8, 3), vector),
    "linear without bias": (lambda: nn.Linear(8, 3, bias=False), vector),
    "linear over time": (lambda: nn.Linear(8, 3), series),
    "linear over a long time": (lambda: nn.Linear(8, 3), lambda: series(length=40)),
    "linear over a grid": (lambda: nn.Linear(9, 3), image),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), signal),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), image),
    "conv2d after a layer": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 5, (3, 2), (2, 1), 1)),
        image,
    ),
    "conv2d in groups": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 6, 3, groups=2)), image),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False, dilation=2), image),
    "conv2d same": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 6, 5, padding="same", dilation=2)), image),
    "conv2d circular": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular")),
        image,
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), lambda: torch.randn(BATCH, 2, 3, 4, 5)),
    "embedding": (lambda: nn.Embedding(3, 4), words),
    "embedding with padding": (lambda: nn.Embedding(3, 4, padding_idx=1), words),
    "large embedding": (lambda: nn.Embedding(300, 4), words),
    "layer norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), series),
    "layer norm over two": (lambda: nn.LayerNorm((LENGTH, 8)), series),
    "layer norm without bias": (lambda: nn.LayerNorm(8, bias=False), series),
    "rms norm": (lambda: nn.RMSNorm(8), series),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6)), image),
    "group norm of vectors": (lambda: nn.GroupNorm(2, 8), vector),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), image),
    "any module": (lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(4), nn.Linear(8, 2)), series),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), image),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), series),
    "weight norm without bias": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3, bias=False)), series),
    "the tutorial's net": (lambda: DpMnistCnn().build((1, 28, 28), 10), lambda: image(1, 28)),
    "a residual net": (lambda: ResNet18(groups=2, width=4).build((1, 8, 8), 3), lambda: image(1, 8)),
    "a character net": (lambda: CharLstm(hidden=16).build((6,), 3), words),
    **RECURRENT,
    **TRANSFORMERS,
}


def prepared(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(7)
    build, draw = CASES[name]
    return build(), draw(), torch.linspace(-2, 2, BATCH)


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_a_loop_over_records(name: str) -> None:
    model, x, y = prepared(name)
    clip_norm = middle_clip_norm(clipped_loop(model, squared, x, y, 1.0)[1])
    engine = ClippedGradient(model, squared)
    assert_equal(engine.sum(x, y, clip_norm), *clipped_loop(model, squared, x, y, clip_norm))
    assert not engine.whole


@pytest.mark.parametrize("name", ["linear over time", "conv2d after a layer", "embedding", "LSTM {'bias': False}"])
def test_the_l1_norm_clips_too(name: str) -> None:
    model, x, y = prepared(name)
    clip_norm = middle_clip_norm(clipped_loop(model, squared, x, y, 1.0, order=1)[1])
    got = ClippedGradient(model, squared).sum(x, y, clip_norm, norm=1)
    assert_equal(got, *clipped_loop(model, squared, x, y, clip_norm, order=1))


def outer(t: int, i: int, o: int) -> Outer:
    torch.manual_seed(1)
    return Outer(torch.randn(BATCH, t, i), OutputGradients(torch.randn(BATCH, t, o)))


@pytest.mark.parametrize(("t", "i", "o"), [(2, 30, 30), (40, 3, 4), (7, 8, 8)])
@pytest.mark.parametrize("way", ["by Gram matrices", "materialised and kept", "materialised twice"])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_gram_and_materialised_gradients_agree(
    t: int, i: int, o: int, way: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = outer(t, i, o).rows()
    monkeypatch.setattr("sordino.dpsgd.pieces.CHUNK", chunk)
    monkeypatch.setattr("sordino.dpsgd.pieces.GRAM", 0.0 if way == "by Gram matrices" else 1e9)
    piece = outer(t, i, o)
    if way == "materialised twice":  # what is kept of the inputs is small, as an image is beside its patches
        whole, piece.inputs = piece.inputs, torch.arange(BATCH)
        piece.cut = lambda index: whole[index]
    found, weights = piece.compact(), torch.rand(BATCH)
    torch.testing.assert_close(found.squares(), row_squares(rows), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.weighted(weights), torch.einsum("j,joi->oi", weights, rows), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.at(torch.tensor([1, 2])).rows(), rows[1:3])


@pytest.mark.parametrize(
    ("t", "i", "o", "kept"), [(8, 16, 16, True), (7, 16, 16, False), (1, 2, 2, False), (200, 16, 16, True)]
)
def test_what_is_kept_of_a_layer_is_the_smaller_of_gradient_and_factors(
    t: int, i: int, o: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sordino.dpsgd.pieces.GRAM", 1e9)
    found = outer(t, i, o).compact()
    assert isinstance(found, Rows) == kept
    entries = found.value[0].numel() if isinstance(found, Rows) else t * (i + o)
    assert entries == min(i * o, t * (i + o))


def test_repeated_words_are_added_before_the_norm() -> None:
    lookup = Lookup(torch.tensor([[2, 2, 0]]), torch.tensor([[[1.0], [1.0], [3.0]]]), 4)
    assert lookup.squares().tolist() == [13.0]


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize(("gram", "kept"), [(0.0, 0), (1e9, 0), (1e9, 1 << 22)], ids=["ghost", "smaller", "kept"])
def test_every_way_to_keep_gradients_a_few_records_at_a_time_gives_the_same(
    name: str, gram: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = prepared(name)
    whole = ClippedGradient(model, squared).sum(x, y, 0.5)
    for constant, value in {"CHUNK": 50, "GRAM": gram, "KEPT": kept}.items():
        monkeypatch.setattr(f"sordino.dpsgd.pieces.{constant}", value)
    expected = {name: part.double() for name, part in whole.total.items()}
    assert_equal(ClippedGradient(model, squared).sum(x, y, 0.5), expected, whole.norms)
