"""Promises of the tables at the papers' own size: a plan and a cost without any data, and the hours they take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sordino.certificate.build import headline
from sordino.plan import Plan
from sordino_papers import full, runner, tables
from sordino_papers.full import Full


@pytest.fixture(autouse=True)
def nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No data folder and an empty cache."""
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    yield
    assert not list(tmp_path.iterdir())  # nothing was read or downloaded


def cells() -> list[tuple[str, Full]]:
    return [(cell.id, cell.build.__self__) for table in full.TABLES for cell in table.cells]  # type: ignore[attr-defined]


def epsilon(plan: Plan, delta: float) -> float:
    return float(headline(plan.forecast.of("models"), delta)["epsilon"])


def test_every_plan_is_built_and_billed_without_its_data() -> None:
    """Costs that are the same are priced once: smoothing and masks cost nothing."""
    found = [(name, one, one.plan()) for name, one in cells()]
    assert len(found) == 32 + 32 + 3 * 21 + 4
    assert all(0.1 < epsilon(plan, one.delta) < 100 for _, one, plan in found)


@pytest.mark.parametrize(
    ("start", "true"),
    [
        ("000-table3-poisson", {2.4: 0.94, 2.2: 1.06, 2.0: 1.20, 1.8: 1.39}),
        ("000-table3-uniform", {2.4: 3.06, 2.2: 3.59, 2.0: 4.31, 1.8: 5.36}),
        ("000-table4-poisson", {1.4: 6.38, 1.2: 8.19, 1.0: 11.22, 0.8: 17.08}),
    ],
)
def test_paper_000_costs_what_its_noise_is_worth(start: str, true: dict[float, float]) -> None:
    """The values of PRIVACY's table, not those that were published."""
    for z, wanted in true.items():
        (one,) = [one for name, one in cells() if name == f"{start}-z{z:g}-sigma1"]
        assert epsilon(one.plan(), one.delta) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(("data", "true"), [("emnist", 7.30), ("cifar10", 9.37), ("cifar100", 9.37)])
def test_every_method_of_paper_003_costs_the_same(data: str, true: float) -> None:
    """z = 0.95, q = 0.1, delta = 1/500, drawn by coins."""
    found = {epsilon(one.plan(), one.delta) for name, one in cells() if name.startswith(f"003-{data}-")}
    assert len(found) == 1
    assert found.pop() == pytest.approx(true, rel=0.01)


def test_paper_004_bills_its_four_optimizers_alike() -> None:
    assert len({epsilon(full.record_plan(method), 1e-5) for method in full.OPTIMIZERS}) == 1


def test_they_are_listed_with_their_hours_and_no_part_of_all() -> None:
    for table in full.TABLES:
        assert table.full
        assert "hours a run on one GPU" in table.hours
        assert table in tables.TABLES
        assert table not in runner.wanted("all", full=True)[0]
        assert runner.wanted(table.id, full=True)[0] == (table,)


def test_the_models_are_the_papers() -> None:
    sizes = {
        "emnist": (full.IMAGES["emnist"][0]["model"], (1, 28, 28), 62, 1_690_046),
        "cifar10": (full.IMAGES["cifar10"][0]["model"], (3, 32, 32), 10, 11_173_962),
        "cifar100": (full.IMAGES["cifar100"][0]["model"], (3, 32, 32), 100, 11_220_132),
    }
    for model, shape, classes, wanted in sizes.values():
        assert sum(p.numel() for p in model.build(shape, classes).parameters()) == wanted
