"""Promise: with `users=` a step clips all records of a user together, and the certificate is for one user."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.commands import sordino
from tests.dpsgd.loops import QUIET, Loss, Parts, private, train, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from sordino.accounting import accountant
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.dpsgd.account import certify
from sordino.dpsgd.memory import LiveTensors, parse_bytes
from sordino.dpsgd.users import Owners
from sordino.errors import CertificateError, ConfigError, DataError, SordinoError
from sordino.features import Standardise
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Limit
from sordino.parts.encoding import Adaptive
from sordino.parts.strategies import Banded
from sordino.rng import Seeded

COUNTS = (1, 1, 1, 2, 3, 4, 5, 7, 8, 11)  # records of each user
IDS = [f"user {u}" for u, n in enumerate(COUNTS) for _ in range(n)]
ORDER = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(5)).tolist()
IDS = [IDS[row] for row in ORDER]  # the records of one user are anywhere in the data set
CLIP = 0.3


class Tied(nn.Module):
    """An LSTM whose input and output embedding are one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.out = nn.Linear(6, 11)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.lstm(self.table(x))[0][:, -1])
        return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    first = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, padding=1)
    return nn.Sequential(*first, nn.ReLU(), nn.Conv2d(6, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], TensorDataset]]] = {
    "mlp": (mlp, lambda coins: rows((4,), coins)),
    "cnn": (cnn, lambda coins: rows((2, 8, 8), coins)),
    "tied lstm": (Tied, lambda coins: words(5, coins)),
    "long tied lstm": (Tied, lambda coins: words(40, coins)),
}


def rows(shape: tuple[int, ...], coins: torch.Generator) -> TensorDataset:
    n = len(IDS)
    return TensorDataset(torch.randn(n, *shape, generator=coins), torch.randint(3, (n,), generator=coins))


def words(length: int, coins: torch.Generator) -> TensorDataset:
    n = len(IDS)
    return TensorDataset(torch.randint(11, (n, length), generator=coins), torch.randint(11, (n,), generator=coins))


def loop(net: str, *, batch: int = len(COUNTS), **settings: Any) -> Parts:
    build, make = NETS[net]
    torch.manual_seed(2)
    settings = {"users": IDS, "clip_norm": CLIP, "noise_multiplier": QUIET, "steps": 3, "epochs": None, **settings}
    if "epsilon" in settings:
        settings.pop("noise_multiplier")
    return private(build(), make(torch.Generator().manual_seed(3)), batch=batch, **settings)


def by_users(model: nn.Module, x: Tensor, y: Tensor, drawn: list[str], loss: Loss = F.cross_entropy) -> list[Tensor]:
    """sum_u g_u min(1, C / ||g_u||), g_u the mean of the gradients of a user's records, by autograd alone."""
    own = copy.deepcopy(model)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in own.parameters()]
    for user in drawn:
        mine = [row for row, owner in enumerate(IDS) if owner == user]
        slopes = torch.autograd.grad(loss(own(x[mine]), y[mine]), list(own.parameters()))
        norm = float(torch.cat([s.double().reshape(-1) for s in slopes]).norm())
        for held, slope in zip(total, slopes, strict=True):
            held += slope.double() * min(1.0, CLIP / norm)
    return total


def drawn_users(parts: Parts, t: int) -> list[str]:
    settings, names = parts[1].account.settings, list(dict.fromkeys(IDS))
    drawn = settings.records.draw(t, 0, settings.records.size(0), Seeded(settings.seed).at(t, "batches"))
    return [names[user] for user in drawn]


def distance(net: str, steps: int = 3, lr: float = 0.1, **settings: Any) -> float:
    """The largest distance of a loop's weights from those of the loop over users."""
    parts = loop(net, **settings)
    twin, (x, y) = copy.deepcopy(parts[0]), parts[2].dataset.tensors  # type: ignore[attr-defined]
    count = parts[1].account.settings.records.count
    reduction = settings.get("reduction", "mean")
    for t in range(steps):
        slopes = by_users(twin, x, y, drawn_users(parts, t))
        with torch.no_grad():
            for p, slope in zip(twin.parameters(), slopes, strict=True):
                p.sub_((lr * slope / count).to(p.dtype))
    while parts[1].steps < steps:
        train(parts, lambda out, target: F.cross_entropy(out, target, reduction=reduction))
    assert parts[1].steps == steps
    return float((weights(parts[0]) - weights(twin)).abs().max())


# ---- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, 9, 1])
@pytest.mark.parametrize("net", NETS)
def test_a_step_is_that_of_a_loop_over_users(net: str, physical: int | None) -> None:
    assert distance(net, max_physical_batch_size=physical) < 1e-5


@pytest.mark.parametrize("physical", [None, 4])
def test_users_are_drawn_by_poisson_and_bring_all_records(physical: int | None) -> None:
    assert distance("cnn", steps=4, batch=4, max_physical_batch_size=physical) < 1e-5
    parts, sizes = loop("mlp", batch=4), list[int]()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(y))
        return F.cross_entropy(out, y)

    for _ in range(20):
        train(parts, loss)
    drawn = [drawn_users(parts, t) for t in range(parts[1].steps)]
    assert sizes == [sum(IDS.count(name) for name in step) for step in drawn]
    assert np.mean([len(step) for step in drawn]) == pytest.approx(4, abs=1)
    assert len({len(step) for step in drawn}) > 3


def test_a_loss_that_is_a_sum_gives_the_same_step() -> None:
    assert distance("mlp", reduction="sum", max_physical_batch_size=9) < 1e-5


def test_groups_of_parameters_are_clipped_by_users() -> None:
    whole, parts = loop("cnn", clip="per_layer"), loop("cnn", clip="per_layer", max_physical_batch_size=3)
    train(whole, epochs=3)
    train(parts, epochs=3)
    assert float((weights(whole[0]) - weights(parts[0])).abs().max()) < 1e-6


def test_records_that_are_clipped_by_themselves_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owners, "merge", lambda self, piece, keep: keep(piece))
    monkeypatch.setattr(Owners, "units", property(lambda self: sum(self.counts)))
    assert distance("mlp") > 1e-2


class WithoutCrossTerms:
    """A piece of users whose norms add up squares of records: |g_1|^2 + |g_2|^2 for |g_1 + g_2|^2."""

    def __init__(self, right: Any, squares: Tensor) -> None:
        self.right, self.squares = right, lambda: squares

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_norms_without_cross_terms_are_noticed(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merge = Owners.merge

    def spoilt(self: Owners, piece: Any, keep: Any) -> Any:
        owner = torch.arange(self.units).repeat_interleave(torch.tensor(self.counts))
        each = piece.rows().flatten(1).double().square().sum(1) * self._shares.double().square()
        return WithoutCrossTerms(merge(self, piece, keep), each.new_zeros(self.units).index_add_(0, owner, each))

    monkeypatch.setattr(Owners, "merge", spoilt)
    assert distance(net) > 1e-4


def first_sum(net: str, **settings: Any) -> Tensor:
    """The clipped sum of the first step, of all users."""
    parts = loop(net, steps=1, reduction="sum", **settings)
    train(parts, lambda out, y: F.cross_entropy(out, y, reduction="sum"))
    return torch.cat([p.grad.reshape(-1) for p in parts[0].parameters() if p.grad is not None]) * len(COUNTS)


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("value", [1e6, float("inf"), float("nan")])
def test_whatever_one_users_records_hold_the_sum_changes_by_at_most_one_clip_norm(
    value: float, physical: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, make = first_sum("cnn", max_physical_batch_size=physical), NETS["cnn"][1]

    def odd(coins: torch.Generator) -> TensorDataset:
        found = make(coins)
        found.tensors[0][[row for row, owner in enumerate(IDS) if owner == "user 9"]] = value
        return found

    monkeypatch.setitem(NETS, "cnn", (cnn, odd))
    moved = first_sum("cnn", max_physical_batch_size=physical) - usual
    assert 0 < float(moved.norm()) <= 2 * CLIP * (1 + 1e-6)  # of this user: what it added before, and what it adds now
    assert bool(usual.isfinite().all())


@pytest.mark.parametrize("settings", [{"strategy": Banded(2)}, {"clip_norm": Adaptive(0.5)}, {"smoothing": 1.0}])
def test_other_settings_of_a_loop_work_with_users(settings: dict[str, Any]) -> None:
    both = [
        loop("mlp", batch=5, epochs=2, steps=None, noise_multiplier=1.0, max_physical_batch_size=size, **settings)
        for size in (None, 4)
    ]
    for parts in both:
        train(parts, epochs=2)
    assert float((weights(both[0][0]) - weights(both[1][0])).abs().max()) < 1e-5
    assert both[0][1].certificate()["unit"] == "user"


def test_an_order_of_other_users_is_no_resume_under_correlated_noise() -> None:
    before = loop("mlp", batch=5, epochs=2, steps=None, noise_multiplier=1.0, strategy=Banded(2))
    train(before)
    after = loop("mlp", batch=5, epochs=2, steps=None, noise_multiplier=1.0, strategy=Banded(2), users=IDS[::-1])
    with pytest.raises(ConfigError, match="other rows"):
        after[1].load_state_dict(before[1].state_dict())


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["300 KB", "1 MB"])
@pytest.mark.parametrize("counts", [(50,), (1,) * 50, (17, 17, 16), (5,) * 10, (33, 3, 3, 3, 3, 3, 1, 1)])
def test_live_tensors_of_every_physical_batch_take_at_most_the_memory(memory: str, counts: tuple[int, ...]) -> None:
    ids = [u for u, n in enumerate(counts) for _ in range(n)]
    torch.manual_seed(0)
    records = TensorDataset(torch.randn(50, 2, 12, 12), torch.randint(3, (50,)))
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(576, 3))
    bounded = private(net, records, batch=len(counts), users=ids, memory=memory)
    most, sizes = 0, list[int]()
    for x, y in bounded[2]:
        with LiveTensors(bounded[0]) as live:
            F.cross_entropy(bounded[0](x), y).backward()  # type: ignore[no-untyped-call]
            bounded[1].step()
        most, sizes = max(most, live.most), [*sizes, len(y)]
    assert bounded[1].steps == 1
    assert sum(sizes) == 50
    assert most <= parse_bytes(memory)
    assert bounded[2].pieces.max_size is not None
    assert max(sizes) <= bounded[2].pieces.max_size


# ---- the certificate -------------------------------------------------------------------------------------------------


def test_epsilon_and_delta_are_those_of_users() -> None:
    parts = loop("mlp", batch=4, epochs=3, steps=None, noise_multiplier=1.1)
    train(parts)
    found, steps = parts[1].certificate(), 3 * round(len(COUNTS) / 4)
    event = PoissonSampled(4 / len(COUNTS), GaussianNoise(1.1))
    assert found["delta"] == min(len(COUNTS) ** -1.1, 1e-3)
    known = accountant.epsilon(((event, steps),), "add_remove", found["delta"]).value
    assert found["epsilon"] == pytest.approx(known, rel=1e-6)
    assert found["epsilon"] >= known
    assert (found["unit"], found["relation"]) == ("user", "add_remove")
    assert found["records"]["sizes"] == [len(COUNTS)]
    assert found["statement"]["unit_of_privacy"] == "user level: all records of one user"
    assert found["assumptions"][0].startswith("all records of one user are one unit")
    assert not any("one row of the data set" in text for text in found["assumptions"])


def test_a_target_epsilon_is_met_over_users() -> None:
    parts = loop("mlp", batch=4, epochs=3, steps=None, epsilon=2.0)
    train(parts, epochs=3)
    assert 1.99 < parts[1].certificate()["epsilon"] <= 2.0


def test_a_saved_certificate_says_user_and_an_edited_unit_is_refused(tmp_path: Path) -> None:
    parts = loop("mlp", batch=4, epochs=3, steps=None, noise_multiplier=1.1)
    train(parts)
    file = tmp_path / "certificate.json"
    parts[1].save_certificate(file)
    assert certify(file).certificate["unit"] == "user"
    said = sordino("explain", file).out
    assert "What is protected is everything that one user, by all records, contributed" in said
    assert "adding or removing all records of one user" in said
    text = file.read_text()
    edits = [('"unit": "user"', '"unit": "record"'), ('"users": true', '"users": false')]
    for found, instead in [*edits, ('"kind": "poisson_records"', '"kind": "fixed_records"')]:
        assert found in text
        file.write_text(text.replace(found, instead, 1))
        with pytest.raises(CertificateError):
            certify(file)
    records = private(epochs=3, noise_multiplier=1.1)
    train(records)
    records[1].save_certificate(file)
    file.write_text(file.read_text().replace('"unit": "record"', '"unit": "user"', 1))
    with pytest.raises(CertificateError):
        certify(file)


def test_a_ledger_of_users_is_charged_and_one_of_records_refuses(tmp_path: Path) -> None:
    path = tmp_path / "ours.ledger"
    with Ledger.open(path, create=True) as ledger:
        ledger.limit("ours", Limit(50.0, 1e-2, "user", "add_remove"))
        ledger.limit("rows", Limit(50.0, 1e-2, "record", "add_remove"))
    parts = loop("mlp", batch=4, noise_multiplier=1.0, ledger=path, named="ours")
    train(parts)
    assert parts[1].certificate()["ledger"]["unit"] == "user"
    with pytest.raises(SordinoError, match="record"):
        loop("mlp", batch=4, noise_multiplier=1.0, ledger=path, named="rows")


def test_a_resume_without_users_is_refused() -> None:
    before = loop("mlp", batch=4, noise_multiplier=1.0)
    train(before)
    torch.manual_seed(2)
    after = private(mlp(), rows((4,), torch.Generator().manual_seed(3)), batch=4, steps=3, epochs=None, clip_norm=CLIP)
    with pytest.raises(ConfigError, match="settings of the saved run"):
        after[1].load_state_dict(before[1].state_dict())


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.zeros(len(IDS), 2, dtype=torch.int64), "assign each record to one user"),
        ([[0, 1]] * len(IDS), "assign each record to one user"),
        (np.zeros((len(IDS), 1), dtype=np.int64), "assign each record to one user"),
        (torch.zeros(len(IDS)), "users of type float"),
        ([0.0] * len(IDS), "users of type float"),
        ([*IDS[1:], None], "users of type None and str"),
        ([*IDS[1:], 3], "users of type int and str"),
        ([True] * len(IDS), "users of type bool"),
        (IDS[1:], f"users for {len(IDS) - 1} of {len(IDS)} records"),
        ("user", f"users for 0 of {len(IDS)} records"),
        (7, f"users for 0 of {len(IDS)} records"),
    ],
)
def test_ids_that_name_no_one_user_of_each_record_are_refused(ids: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as refused:
        loop("mlp", users=ids, batch=1)
    assert str(refused.value).count(".") <= 1


@pytest.mark.parametrize("ids", [torch.arange(len(IDS)) % 7, np.arange(len(IDS)) % 7, [n % 7 for n in range(len(IDS))]])
def test_ids_may_be_a_tensor_an_array_or_a_list(ids: Any) -> None:
    assert loop("mlp", users=ids, batch=7)[1].account.settings.records.sizes == (7,)


def test_more_users_in_a_batch_than_there_are_is_refused() -> None:
    with pytest.raises(DataError, match=f"a batch_size of 11 for {len(COUNTS)} users"):
        loop("mlp", batch=11)


def test_a_large_delta_is_refused_by_the_number_of_users() -> None:
    with pytest.raises(ConfigError, match=r"users\^-1.1"):
        loop("mlp", batch=4, delta=len(COUNTS) ** -1.0)


def test_moments_of_records_are_refused_with_users() -> None:
    with pytest.raises(ConfigError, match="users= with prepare="):
        loop("mlp", prepare=Standardise(channels=4))
