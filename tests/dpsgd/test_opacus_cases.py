"""Opacus's own cases as facts: the cost is at most what its tightest accountant says, and its layers are clipped right.

The epsilons are those of Opacus 1.6.0, PRVAccountant with its default error of 0.01 (it reports the upper end of an
interval that is 0.02 wide), computed once. The layers are those of its tests of per-sample gradients that
tests/per_record has not: here each is compared with a loop over records.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from tests.dpsgd.loops import data, private
from tests.dpsgd.per_record.oracle import assert_equal, clipped_loop, middle_clip_norm, squared
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sordino.accounting import accountant
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.dpsgd import ClippedGradient
from sordino.errors import PlanError

BATCH = 4

# ---- the accountant --------------------------------------------------------------------------------------------------

PRV = [  # rate, noise multiplier, steps, delta -> epsilon by PRV, and by RDP
    (256 / 60000, 1.1, 14100, 1e-5, 2.395268501872555, 2.6003429386103023),
    (0.01, 1.0, 1000, 1e-5, 1.8383716376346455, 2.1013652716430564),
    (0.01, 0.7, 500, 1e-6, 4.362833098476064, 5.153498520594403),
    (0.1, 2.0, 100, 1e-5, 2.3475553164519662, 2.5805688086608938),
    (0.001, 0.8, 10000, 1e-6, 0.9572803999778272, 1.7036252805758572),
    (0.05, 1.5, 400, 1e-3, 2.3045118323772362, 2.643861966829317),
    (0.02, 4.0, 2000, 1e-5, 0.8526869883062106, 0.9231851388907973),
    (1.0, 10.0, 20, 1e-5, 1.7701680898037457, 1.9142498748403742),
    (0.01, 0.5, 100, 1e-5, 6.48680960217427, 8.030725352808414),
]
PRV_WIDTH = 0.02


@pytest.mark.parametrize(("rate", "z", "steps", "delta", "prv", "rdp"), PRV)
def test_epsilon_is_at_most_that_of_opacus(
    rate: float, z: float, steps: int, delta: float, prv: float, rdp: float
) -> None:
    ours = accountant.epsilon([(PoissonSampled(rate, GaussianNoise(z)), steps)], "add_remove", delta).value
    assert prv - PRV_WIDTH <= ours <= prv < rdp


def test_the_certificate_of_a_loop_is_at_most_what_opacus_says() -> None:
    parts = private(dataset=data(60), batch=6, epochs=10, noise_multiplier=2.0, smoothing=0.0, delta=1e-5)
    _, _, steps, delta, prv, _ = PRV[3]
    found = parts[1].certificate()
    assert (found["counts"]["rounds_accounted"], found["delta"]) == (steps, delta)
    assert prv - PRV_WIDTH <= found["epsilon"] <= prv


# ---- the layers ------------------------------------------------------------------------------------------------------


class Started(nn.Module):
    """A recurrent layer from a state of the caller's own, records along axis 1 as torch has them by default."""

    def __init__(self, inner: nn.Module, states: int) -> None:
        super().__init__()
        self.inner, self.states = inner, states

    def forward(self, x: Tensor) -> Tensor:
        start = x[:, 0, :3].expand(self.states, -1, -1).contiguous()
        given = (start, start * 0.5) if isinstance(self.inner, nn.LSTM) else start
        out: Tensor = self.inner(x.transpose(0, 1), given)[0]
        return out.transpose(0, 1)


class Packed(nn.Module):
    """Sequences of different lengths, read off the record itself, as torch packs them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 0, 1] > 0).long()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=x.shape[1])
        return out


class Attend(nn.Module):
    """Attention of a sequence to a wider and longer one, records along axis 1."""

    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        query = x.transpose(0, 1)
        others = torch.cat([query, query.flip(0)])
        key = torch.cat([others, others * 2], 2)[..., : self.inner.kdim]
        value = torch.cat([others.sin(), others.cos()], 2)[..., : self.inner.vdim]
        out: Tensor = self.inner(query, key, value)[0]
        return out.transpose(0, 1)


class SequenceBias(nn.Module):
    """One trained position at the end of every sequence: a parameter of the model's own, without a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.bias.expand(len(x), 1, -1)], 1).cumsum(1)


Case = tuple[Callable[[], nn.Module], tuple[int, ...]]  # the layer, and the shape of one record
CONVOLUTIONS: dict[str, Case] = {
    f"{kind.__name__}{(channels, out, kernel, stride, padding, dilation, groups)}": (
        lambda kind=kind, a=(channels, out, kernel, stride, padding, dilation, groups): kind(*a),  # type: ignore[misc]
        (channels, *side),
    )
    for kind, side in ((nn.Conv1d, (9,)), (nn.Conv2d, (9, 8)), (nn.Conv3d, (5, 6, 4)))
    for channels, out, groups in ((1, 2, 1), (4, 6, 2), (4, 4, 4))
    for kernel, stride, padding, dilation in product((1, 2, 3), (1, 2), (0, 2), (1, 2))
    if dilation == 1 or kernel > 1
    if dilation * (kernel - 1) < min(side) + 2 * padding
}
NORMS: dict[str, Case] = {
    **{f"layer norm over {n}": (lambda n=n: nn.LayerNorm((3, 4, 5)[3 - n :]), (3, 4, 5)) for n in (1, 2, 3)},  # type: ignore[misc]
    **{
        f"group norm of {groups} groups in {len(side)} dimensions": (lambda g=groups: nn.GroupNorm(g, 6), (6, *side))  # type: ignore[misc]
        for groups in (1, 3, 6)
        for side in ((5,), (3, 4), (2, 3, 2))
    },
    "instance norm of signals": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 6)),
    "instance norm of volumes": (lambda: nn.InstanceNorm3d(3, affine=True), (3, 2, 3, 2)),
}
RECURRENT: dict[str, Case] = {
    f"{kind.__name__} from a given state, {layers} layers, {ways} ways, bias {bias}": (
        lambda kind=kind, layers=layers, ways=ways, bias=bias: Started(  # type: ignore[misc]
            kind(5, 3, layers, bias=bias, bidirectional=ways == 2), layers * ways
        ),
        (4, 5),
    )
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for layers, ways, bias in product((1, 2), (1, 2), (True, False))
}
ATTENTION: dict[str, Case] = {
    f"attention, bias {bias}, bias_kv {kv}, zero_attn {zero}, kdim {kdim}, vdim {vdim}": (
        lambda a=(bias, kv, zero, kdim, vdim): Attend(  # type: ignore[misc]
            nn.MultiheadAttention(4, 2, bias=a[0], add_bias_kv=a[1], add_zero_attn=a[2], kdim=a[3], vdim=a[4])
        ),
        (3, 4),
    )
    for bias, kv, zero in product((True, False), (True, False), (True, False))
    for kdim, vdim in ((4, 4), (6, 4), (6, 7))
}
OTHERS: dict[str, Case] = {
    "linear over three axes": (lambda: nn.Linear(4, 3), (2, 3, 4)),
    "relu RNN": (lambda: Started(nn.RNN(5, 3, 1, "relu"), 1), (4, 5)),
    "sequence bias": (lambda: nn.Sequential(nn.Linear(5, 5), SequenceBias(5), nn.Linear(5, 2)), (3, 5)),
}
WORDS: dict[str, Case] = {
    "embedding of one word": (lambda: nn.Embedding(7, 3), ()),
    "embedding of a grid of words": (lambda: nn.Embedding(7, 3), (2, 3)),
    "bag of words": (lambda: nn.EmbeddingBag(7, 3, mode="mean"), (4,)),
}


def agrees(build: Callable[[], nn.Module], x: Tensor) -> None:
    """Both ways of running it, the direct one and an ordinary backward pass, equal the loop over records."""
    model, y = build(), torch.linspace(-2, 2, BATCH)
    clip_norm = middle_clip_norm(clipped_loop(model, squared, x, y, 1.0)[1])
    wanted = clipped_loop(model, squared, x, y, clip_norm)
    engine = ClippedGradient(model, squared)
    assert_equal(engine.sum(x, y, clip_norm), *wanted)


@pytest.mark.parametrize("name", [*CONVOLUTIONS, *NORMS, *RECURRENT, *ATTENTION, *OTHERS])
def test_layers_equal_a_loop_over_records(name: str) -> None:
    torch.manual_seed(5)
    build, shape = {**CONVOLUTIONS, **NORMS, **RECURRENT, **ATTENTION, **OTHERS}[name]
    agrees(build, torch.randn(BATCH, *shape))


@pytest.mark.parametrize("name", WORDS)
def test_layers_of_words_equal_a_loop_over_records(name: str) -> None:
    torch.manual_seed(6)
    build, shape = WORDS[name]
    agrees(build, torch.randint(7, (BATCH, *shape)))


def test_packed_sequences_are_refused_with_what_to_do() -> None:
    torch.manual_seed(5)
    model, x = Packed(nn.LSTM(5, 3, batch_first=True)), torch.randn(BATCH, 3, 5)
    with pytest.raises(PlanError, match=r"packed sequence.*pad the records"):
        ClippedGradient(model, squared).sum(x, torch.zeros(BATCH), 1.0)
