"""Promises of sparse messages: a client's own top-k keeps dense noise, a public mask is public, no bound changes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.tiny import SIZES, clients, final, mlp, noise, plan, rounds, seeded, task
from torch import Tensor, nn

from sordino.accounting.bounds import Bound, Unit
from sordino.engines.inprocess import InProcess
from sordino.errors import DataError, PlanError
from sordino.loop import run
from sordino.parts.encoding import Clip, Public, Step
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone
from sordino.parts.sparsify import PublicDataMask, PublicMask, RandomMask, ReleasedMask, SparsifyUpdate, keep_largest
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.runs.charge_log import PrefixHash
from sordino.runs.writer import STATE, Checkpoint
from sordino.task import Task

Way = Literal["batched", "sequential"]

# ---- a client's own top-k -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "d"), [(0.4, 10), (0.4, 11), (0.01, 10), (0.999, 10), (1.0, 7), (0.3, 1)])
def test_exactly_the_largest_scores_are_kept(keep: float, d: int) -> None:
    rows, scores = noise(3, d, seed=1) + 5, noise(3, d, seed=2)
    kept = keep_largest(rows, scores, keep)
    for row, score, left in zip(rows, scores, kept, strict=True):
        best = sorted(range(d), key=lambda i: -float(score[i]))[: math.ceil(keep * d)]
        wanted = [float(row[i]) if i in best else 0.0 for i in range(d)]
        assert left.tolist() == wanted


@pytest.mark.parametrize("by", ["magnitude", "influence"])
def test_the_norm_of_an_update_never_grows(by: Literal["magnitude", "influence"]) -> None:
    rows = torch.cat([noise(20, 9) * 1e3, torch.zeros(1, 9), torch.eye(9)])
    kept = SparsifyUpdate(0.3, by).encode(rows, Public(0), noise(30, 9, seed=3))
    assert bool(((kept == rows) | (kept == 0)).all())
    assert bool((kept.double().norm(dim=1) <= rows.double().norm(dim=1)).all())


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.5, math.nan])
def test_a_share_outside_zero_to_one_is_refused(keep: float) -> None:
    for step in (SparsifyUpdate, PublicMask):
        with pytest.raises(PlanError, match="keep"):
            step(keep)


def test_a_clients_own_top_k_keeps_a_client_bound_and_bounds_no_record() -> None:
    assert SparsifyUpdate(0.4).bound(Bound("client")) == Bound("client")
    with pytest.raises(PlanError, match="record bound"):
        SparsifyUpdate(0.4).bound(Bound("record", finite=True))


def test_a_clients_own_top_k_leaves_the_noise_on_every_coordinate() -> None:
    data, sparse = task(), plan(rounds=1, local=LocalSgd(lr=0.0, epochs=1), encode=(SparsifyUpdate(0.1), Clip(1.0)))
    assert bool((final(sparse, data) != data.layout.flatten(data.model)).all())


def two_sided() -> Task:
    """Two weights (10, 0) under squared error, and three clients whose slopes are (0, -2), (-1, 0) and none.

    With lr .1 and weight decay 1 the updates are (1, -.2), (.9, 0) and none. For the first client magnitude keeps the
    first weight, which only decays; influence keeps the second, the only one that its own loss depends on.
    """
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[10.0, 0.0]]))
    first, second = (
        (torch.tensor([[0.0, 1.0]]), torch.tensor([1.0])),
        (torch.tensor([[1.0, 0.0]]), torch.tensor([10.5])),
    )
    return Task.of(model, [first, second, (torch.empty(0, 2), torch.empty(0))], loss="mse")


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize(("by", "wanted"), [("magnitude", (-1.9 / 3, 0.0)), ("influence", (-0.9 / 3, 0.2 / 3))])
def test_influence_is_read_off_the_clients_own_data(
    by: Literal["magnitude", "influence"], wanted: tuple[float, float], path: Way
) -> None:
    local = LocalSgd(lr=0.1, steps=1, weight_decay=1.0)
    sparse = plan(
        rounds=1, clients=Everyone(3), local=local, encode=(SparsifyUpdate(0.5, by), Clip(99.0)), release=NoNoise()
    )
    moved = final(sparse, two_sided(), InProcess(path=path)) - torch.tensor([10.0, 0.0])
    assert torch.allclose(moved, torch.tensor(wanted), atol=1e-5)


@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_a_clients_top_k_of_what_a_public_mask_left(path: Way) -> None:
    steps = (PublicMask(0.5), SparsifyUpdate(0.2, "influence"), Clip(1.0))
    alone = plan(rounds=1, encode=steps, release=NoNoise())
    moved = final(alone, task(), InProcess(path=path)) - task().layout.flatten(task().model)
    mask = alone.public(0, len(moved)).mask
    assert mask is not None
    assert 0 < len(moved.nonzero()) <= len(SIZES) * math.ceil(0.2 * len(mask))
    assert set(moved.nonzero()[:, 0].tolist()) <= set(mask.tolist())


# ---- masks that everybody knows -------------------------------------------------------------------------------------


def masked(source: Any, keep: float = 0.3, **changes: Any) -> Plan:
    return plan(rounds=3, encode=(PublicMask(keep, source), Clip(0.5)), **changes)


def other_data(public: bool = True) -> Task:
    """The population of `with_public`, with other records."""
    mine = [(x.flip(0) * 3 + 1, y.flip(0)) for x, y in clients()]
    return Task.of(mlp(), mine, public=clients((9,))[0] if public else None)


def with_public() -> Task:
    return Task.of(mlp(), clients(), public=clients((9,))[0])


def moved(planned: Plan, data: Task, seed: int = 0, state: Any = None) -> list[list[int]]:
    """Round by round, which coordinates the noise fell on."""
    before = data.layout.flatten(data.model) if state is None else state.memory["params"]
    found = []
    for done in run(planned, data, streams=Seeded(seed), state=state):
        after = done.state.memory["params"]
        found.append((after != before).nonzero()[:, 0].tolist())
        before = after
    return found


def test_encode_shortens_every_client_by_the_same_mask_and_decode_scatters() -> None:
    step, rows = PublicMask(0.4), noise(5, 10)
    public = plan(encode=(step, Clip(1.0))).public(0, 10)
    assert public.mask is not None
    assert public.mask.tolist() == sorted(set(public.mask.tolist()))
    sent = step.encode(rows, public)
    assert sent.shape == (5, 4)
    assert all(torch.equal(sent[i], rows[i, public.mask]) for i in range(5))
    back = step.decode(sent[2], public)
    assert torch.equal(back[public.mask], rows[2, public.mask])
    assert int((back != 0).sum()) == 4


@pytest.mark.parametrize("source", [RandomMask(), PublicDataMask(), ReleasedMask()], ids=lambda s: s.kind)
def test_noise_falls_on_the_mask_and_nowhere_else(source: Any) -> None:
    still = masked(source, local=LocalSgd(lr=1e-9, epochs=1))  # so all that moves is noise
    size = mlp_size()
    for where in moved(still, with_public()):
        assert len(where) == math.ceil(0.3 * size)


def mlp_size() -> int:
    return task().layout.size


def test_a_random_mask_is_fresh_every_round_and_depends_on_public_numbers_alone() -> None:
    first, second, third = moved(masked(RandomMask()), with_public())
    assert first != second != third != first
    assert moved(masked(RandomMask()), other_data()) == [first, second, third]  # other records, the same coordinates
    assert moved(masked(RandomMask()), with_public(), seed=5) == [first, second, third]  # other noise
    assert moved(masked(RandomMask(seed=1)), with_public()) != [first, second, third]
    counts = np.bincount(np.concatenate([_mask(RandomMask(), t, 20) for t in range(400)]), minlength=20)
    assert np.all(np.abs(counts - 400 * 0.3) < 50)  # every coordinate has its turn


def _mask(source: Any, t: int, size: int, learnt: dict[str, Tensor] | None = None) -> list[int]:
    mask = masked(source).public(t, size, learnt).mask
    assert mask is not None
    found: list[int] = mask.tolist()
    return found


def test_a_mask_from_public_data_is_the_top_k_of_the_plans_own_update_on_it() -> None:
    data = with_public()
    assert data.public is not None
    model = copy.deepcopy(data.model)
    F.cross_entropy(model(data.public.x), data.public.y).backward()  # type: ignore[no-untyped-call]
    slope = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    wanted = slope.abs().topk(math.ceil(0.3 * len(slope))).indices.sort().values.tolist()
    local = LocalSgd(lr=0.1, epochs=1)
    first = moved(masked(PublicDataMask(), local=local), data)[0]
    assert first == wanted
    assert moved(masked(PublicDataMask(), local=local), other_data())[0] == wanted  # whatever the clients hold


def test_a_mask_from_public_data_needs_public_data() -> None:
    with pytest.raises(DataError, match="public"):
        rounds(masked(PublicDataMask()), other_data(public=False))


def test_a_released_mask_is_a_function_of_what_was_released() -> None:
    planned, data = masked(ReleasedMask(explore=0.0)), task()
    seen: dict[str, Tensor] = {}
    before = data.layout.flatten(data.model)
    for done in rounds(planned, data):
        after = done.state.memory["params"]
        where = (after != before).nonzero()[:, 0].tolist()
        assert where == _mask(ReleasedMask(explore=0.0), done.t, len(after), seen)
        mean = before - after  # server lr 1: what was released in this round, as everybody sees it
        seen = {"released": mean if not seen else 0.9 * seen["released"] + mean}
        assert torch.allclose(done.state.public_state["released"], seen["released"], atol=1e-6)
        seen, before = done.state.public_state, after
    assert where == sorted(seen["released"].abs().topk(len(where)).indices.tolist())  # the largest stay


def test_a_released_mask_explores() -> None:
    learnt = {"released": torch.arange(100.0)}
    fixed, curious = ([_mask(ReleasedMask(explore=e), t, 100, learnt) for t in (1, 2)] for e in (0.0, 0.1))
    assert fixed == [list(range(70, 100))] * 2
    assert curious[0] != curious[1]
    assert all(len(mask) == 30 and min(mask) < 70 and len(set(mask) & set(range(70, 100))) >= 20 for mask in curious)


@pytest.mark.parametrize("source", [RandomMask(), ReleasedMask()], ids=lambda s: s.kind)
def test_a_run_that_is_resumed_from_its_checkpoint_takes_the_same_masks(source: Any, tmp_path: Path) -> None:
    planned, data = masked(source), task()
    done = rounds(planned, data)
    Checkpoint(done[0].state, "", PrefixHash(), PrefixHash()).save(tmp_path)
    state = Checkpoint.of_bytes((tmp_path / STATE).read_bytes()).state
    assert moved(planned, data, state=state) == moved(planned, data)[1:]
    last = list(run(planned, data, streams=Seeded(0), state=state))[-1].state
    assert torch.equal(last.memory["params"], done[-1].state.memory["params"])


@pytest.mark.parametrize("unit", ["client", "record"])
def test_a_public_mask_leaves_every_bound_as_it_is(unit: Unit) -> None:
    for before in (Bound(unit), Bound(unit, norm=1, finite=True)):
        assert PublicMask(0.4).bound(before) == before


def test_no_sparse_form_changes_the_bill() -> None:
    steps: list[Step] = [SparsifyUpdate(0.4), SparsifyUpdate(0.4, "influence"), PublicMask(0.4)]
    steps += [PublicMask(0.4, PublicDataMask()), PublicMask(0.4, ReleasedMask())]
    for step in steps:
        changed = plan(encode=(step, Clip(1.0)))
        assert changed.cost() == plan().cost()
        assert changed.bound == plan().bound


def test_a_public_mask_is_clipped_by_the_norm_of_what_is_sent() -> None:
    """The clip comes after the mask: what the mask drops takes nothing of the clip norm."""
    data, wide = task(model=seeded(nn.Linear(4, 3))), LocalSgd(lr=5.0, epochs=1)
    alone = replace(masked(RandomMask(), local=wide, release=NoNoise(), clients=Everyone(1)), rounds=1)
    one = Task.of(data.model, clients((6,)))
    assert float((final(alone, one) - one.layout.flatten(one.model)).norm()) == pytest.approx(0.5, rel=1e-4)


# ---- tensor by tensor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["magnitude", "influence"])
def test_top_k_of_each_tensor_is_top_k_of_each_alone(by: Literal["magnitude", "influence"]) -> None:
    sizes, rows, slopes = [5, 1, 12], noise(4, 18, seed=1), noise(4, 18, seed=2)
    found = SparsifyUpdate(0.4, by, per="tensor").encode(rows, Public(0, tensors=tuple(sizes)), slopes)
    alone = [
        SparsifyUpdate(0.4, by).encode(part, Public(0), slope)
        for part, slope in zip(torch.split(rows, sizes, 1), torch.split(slopes, sizes, 1), strict=True)
    ]
    assert torch.equal(found, torch.cat(alone, 1))
    assert [int(part.count_nonzero(1)[0]) for part in torch.split(found, sizes, 1)] == [2, 1, 5]
    whole = SparsifyUpdate(0.4, by).encode(rows, Public(0), slopes)
    assert not torch.equal(found, whole)


def test_top_k_of_each_tensor_behind_a_public_mask_counts_what_the_mask_left() -> None:
    mask = torch.tensor([0, 2, 3, 7, 8, 9, 17])  # 3 of the first five, none of the sixth, 4 of the last twelve
    rows = noise(3, 18, seed=1)
    known = Public(0, size=18, mask=mask, tensors=(5, 1, 12))
    found = SparsifyUpdate(0.5, per="tensor").encode(rows[:, mask], known)
    assert [int(part.count_nonzero(1)[0]) for part in torch.split(found, [3, 4], 1)] == [2, 2]


@pytest.mark.parametrize("way", ["batched", "sequential"])
def test_a_run_sparsifies_every_tensor_of_its_model(way: Way) -> None:
    own = plan(rounds=1, encode=(SparsifyUpdate(0.25, per="tensor"), Clip(1e3)), release=NoNoise())
    one = Task.of(mlp(), clients((6,)))
    own = replace(own, clients=Everyone(1))
    moved = one.layout.flatten(one.model) - final(own, one, InProcess(path=way))
    left = [int(moved[slot.start : slot.stop].count_nonzero()) for slot in one.layout.slots]
    assert left == [math.ceil(0.25 * size) for size in one.layout.sizes]


def test_top_k_of_each_tensor_of_the_mean_is_post_processing() -> None:
    from sordino.parts.encoding import Noised
    from sordino.parts.sparsify import SparsifyMean

    layout = task().layout
    mean = noise(layout.size, seed=5)
    kept = SparsifyMean(0.25, per="tensor").apply(mean, Noised(layout, 1.0, 0))
    left = [int(kept[slot.start : slot.stop].count_nonzero()) for slot in layout.slots]
    assert left == [math.ceil(0.25 * size) for size in layout.sizes]
    assert plan(postprocess=(SparsifyMean(0.25, per="tensor"),)).forecast == plan().forecast


def test_a_share_of_each_tensor_has_the_bill_of_a_share_of_all_and_the_old_form_stays() -> None:
    from sordino import codec

    one, other = (plan(encode=(SparsifyUpdate(0.4, per=per), Clip(1.0))) for per in (None, "tensor"))
    assert one.forecast == other.forecast
    assert codec.dump(SparsifyUpdate(0.4)) == {"kind": "sparsify_update", "keep": 0.4, "by": "magnitude"}


def test_a_message_of_more_than_a_model_has_no_tensors() -> None:
    from sordino.parts.local_solvers import Scaffold

    with pytest.raises(PlanError, match="more than the model's update"):
        plan(local=Scaffold(lr=0.1, steps=1), encode=(SparsifyUpdate(0.4, per="tensor"), Clip(1.0)))
