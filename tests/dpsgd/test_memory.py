"""make_private(..., memory=): the physical batch size from a bound on memory, by public shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino.dpsgd import make_private
from sordino.dpsgd.clipped_sum import ClippedGradient
from sordino.dpsgd.memory import MOST, LiveTensors, largest_batch, parse_bytes
from sordino.errors import ConfigError

RECORDS = 96


def net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(8 * 256, 4))


def data(seed: int = 0, scale: float = 1.0) -> TensorDataset:
    torch.manual_seed(seed)
    return TensorDataset(scale * torch.randn(RECORDS, 3, 16, 16), torch.randint(4, (RECORDS,)))


def private(dataset: Dataset[Any] | None = None, collate: Any = None, **settings: Any) -> tuple[Any, Any, Any]:
    model = net()
    loader = DataLoader(dataset or data(), batch_size=RECORDS, collate_fn=collate)
    return make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, noise_multiplier=1.0, **settings
    )


def run(model: Any, optimizer: Any, loader: Any) -> list[int]:
    sizes = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sizes.append(len(y))
    return sizes


@pytest.mark.parametrize(("memory", "most"), [("2 MB", RECORDS - 1), ("1 GB", RECORDS)])
def test_pieces_stay_within_the_memory_and_the_step_is_that_of_the_whole_batch(memory: str, most: int) -> None:
    whole, bounded = private(), private(memory=memory)
    size = bounded[2].pieces.max_size
    assert 1 <= size <= most
    assert run(*bounded)[0] == size
    assert len(run(*whole)) == 1
    for a, b in zip(whole[0].parameters(), bounded[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert whole[1].certificate()["epsilon"] == bounded[1].certificate()["epsilon"]


@pytest.mark.parametrize("memory", ["2 MB", "4 MB"])
def test_live_tensors_of_a_step_take_at_most_the_memory(memory: str) -> None:
    model, optimizer, loader = private(memory=memory)
    (x, y), live = next(iter(loader)), LiveTensors(model)
    with live:
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert live.most <= parse_bytes(memory)
    assert live.most >= parse_bytes(memory) / 4  # and most of it is used


def test_the_size_depends_on_no_value_of_a_record() -> None:
    odd = data(1, 1e6)
    odd.tensors[0][0] = float("nan")
    assert private(odd, memory="2 MB")[2].pieces.max_size == private(memory="2 MB")[2].pieces.max_size


class Computed(Dataset[Any]):
    """Records that are no tensors of a TensorDataset."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, row: int) -> Any:
        return data()[row]


def test_a_data_set_that_computes_its_records_gives_the_same_size() -> None:
    assert private(Computed(), memory="2 MB")[2].pieces.max_size == private(memory="2 MB")[2].pieces.max_size


def test_the_model_is_as_before_the_trial() -> None:
    torch.manual_seed(3)
    model, before = private(memory="2 MB")[0], torch.get_rng_state()
    torch.manual_seed(3)
    private(memory="2 MB")
    assert torch.equal(before, torch.get_rng_state())
    for (name, a), b in zip(model.named_parameters(), net().parameters(), strict=True):
        assert torch.equal(a, b), name
        assert (a.grad, a.requires_grad) == (None, True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"memory": "10 KB"}, "one record takes"),
        ({"memory": "2"}, 'memory="2 GB"'),
        ({"memory": "-2 GB"}, 'memory="2 GB"'),
        ({"memory": 0}, 'memory="2 GB"'),
        ({"memory": "2 GB", "max_physical_batch_size": 3}, "one of the two"),
        ({"memory": "2 GB", "transform": lambda x: x}, "max_physical_batch_size"),
        ({"memory": "2 GB", "collate": lambda rows: torch.utils.data.default_collate(rows)}, "max_physical_batch_size"),
    ],
)
def test_a_memory_that_cannot_be_kept_is_refused_in_one_sentence(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        private(**settings)


@pytest.mark.parametrize(
    ("memory", "most", "size"), [(1000, 500, 90), (109, 500, 0), (110, 500, 1), (10**6, 500, 500), (10**6, 3, 3)]
)
def test_the_largest_batch_of_a_linear_peak(memory: int, most: int, size: int) -> None:
    asked: list[int] = []

    def peak(n: int) -> int:
        asked.append(n)
        return 100 + 10 * n

    assert largest_batch(peak, memory, most) in range(size - (size > 8), size + 1)
    assert max(asked) <= MOST


def test_units_are_decimal_or_binary() -> None:
    assert [parse_bytes(text) for text in ("2 GB", "1.5MB", "1 GiB", 7)] == [2 * 10**9, 1_500_000, 2**30, 7]


def test_calls_drop_their_inputs_in_the_backward_pass() -> None:
    model, optimizer, loader = private()
    x, y = next(iter(loader))
    loss = nn.functional.cross_entropy(model(x), y)
    calls = list(optimizer.recording.tape.calls)
    loss.backward()  # type: ignore[no-untyped-call]
    assert calls
    assert all(call.use is None and call.kept is None and call.found for call in calls)
    optimizer.step()
    assert not any(call.found for call in calls)  # though the loss is alive


def test_a_check_of_slices_keeps_no_output_gradients() -> None:
    model, (x, y) = net(), data().tensors
    engine, peaks = ClippedGradient(model, nn.CrossEntropyLoss(reduction="none")), []
    for _ in range(2):  # the first batch is checked
        with LiveTensors(model) as live:
            engine.sum(x, y, 1.0)
        peaks.append(live.most)
    assert peaks[0] <= 1.25 * peaks[1]
