"""Promise: silos whose columns mean different things never train one model; the silo and the column are named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.wires import Wires

from sordino.config import Config, parse
from sordino.engines.remote import Remote, Silo
from sordino.errors import ConfigError, EngineError
from sordino.federation.app import server_task
from sordino.federation.silo_service import SiloSpec, silo_task
from sordino.runs.execution import execute

NAMES = ("north", "south")
OPTIONS: dict[str, Any] = {
    "path": "rows.csv",
    "target": "ill",
    "classes": ["no", "yes"],
    "columns": {"sex": {"categories": ["F", "M"]}, "age": {"range": [0, 100]}},
}


def folder_of(folder: Path, name: str) -> Path:
    """A silo's folder with its rows; the columns of the files are in another order in every silo."""
    rng, there = np.random.default_rng(NAMES.index(name)), folder / name
    there.mkdir(exist_ok=True)
    rows = [(("F", "M")[rng.integers(2)], str(rng.integers(100)), ("no", "yes")[rng.integers(2)]) for _ in range(40)]
    order = [0, 1, 2] if name == "north" else [2, 1, 0]
    lines = [[("sex", "age", "ill")[place] for place in order], *([row[place] for place in order] for row in rows)]
    (there / "rows.csv").write_text("\n".join(",".join(line) for line in lines) + "\n")
    return there


def federation(options: dict[str, Any] = OPTIONS, **spec: Any) -> Config:
    plan = {
        "rounds": 2,
        "clients": {"kind": "everyone", "population": 2},
        "local": {"kind": "local_sgd", "lr": 0.1, "epochs": 1, "batch": 8},
        "encode": [{"kind": "clip", "clip_norm": 1.0}],
        "release": {"kind": "local_noise", "mechanism": {"kind": "gaussian", "noise_multiplier": 2.0}},
        "server": {"kind": "sgd"},
    }
    task, privacy = {"dataset": "csv", "options": options}, {"noise": "secure", "delta": 1e-3}
    return parse({"task": task, "plan": plan, "privacy": privacy, "federation": {"silos": list(NAMES), **spec}})


def changed(name: str, **values: Any) -> dict[str, Any]:
    found = copy.deepcopy(OPTIONS)
    found["columns"][name] |= values
    return found


def silos(folder: Path, south: dict[str, Any], of: Config) -> Wires:
    """North as the file says, south with its own options and, as it would have to be, its own copy of the file."""
    specs = [SiloSpec("north", "csv", options=OPTIONS), SiloSpec("south", "csv", options=south)]
    configs = [federation(), of]
    pairs = enumerate(zip(specs, configs, strict=True))
    return Wires({place: Silo(silo_task(own, spec, folder_of(folder, spec.name))) for place, (spec, own) in pairs})


def test_files_with_other_orders_of_columns_train_together_and_no_file_is_needed_on_the_server(tmp_path: Path) -> None:
    wires = silos(tmp_path, OPTIONS, federation())
    done = execute(federation(), tmp_path / "run", engine=Remote(wires, quorum=2), task=server_task(federation()))
    assert done.certificate["epsilon"] > 0


OTHERS = {
    "swapped categories": changed("sex", categories=["M", "F"]),
    "another range": changed("age", range=[0, 1000]),
    "another map": changed("sex", map={"m": "F"}),
    "swapped classes": {**OPTIONS, "classes": ["yes", "no"]},
    "another order": {**OPTIONS, "columns": dict(reversed(OPTIONS["columns"].items()))},
}


@pytest.mark.parametrize("own", OTHERS.values(), ids=OTHERS)
def test_a_silo_that_reads_its_rows_differently_is_refused_by_name(own: dict[str, Any], tmp_path: Path) -> None:
    wires = silos(tmp_path, own, federation(own))
    with pytest.raises(EngineError, match=r"client 1, which refuses this plan .*encoding of records"):
        execute(federation(), tmp_path / "run", engine=Remote(wires, quorum=2), task=server_task(federation()))
    assert wires.silos[1].store.paid == {}  # type: ignore[attr-defined]


def test_a_server_that_knows_no_columns_compares_the_silos_with_each_other(tmp_path: Path) -> None:
    wires = silos(tmp_path, OTHERS["swapped categories"], federation(OTHERS["swapped categories"]))
    bare = parse({**federation_table(), "task": {"dataset": "npz", "options": {"path": "rows.npz"}}})
    with pytest.raises(
        EngineError, match=r"an encoding of records that differs from that of most silos .*client 1 has"
    ):
        execute(bare, tmp_path / "run", engine=Remote(wires, quorum=2), task=server_task(bare))


def federation_table() -> dict[str, Any]:
    from sordino import codec

    table: dict[str, Any] = codec.dump(federation(inputs=[3], classes=2))
    return table


def test_a_silo_says_at_its_start_which_column_differs_from_the_federations_file(tmp_path: Path) -> None:
    spec = SiloSpec("south", "csv", options=OTHERS["another range"])
    with pytest.raises(ConfigError, match=r"range of column 'age' is .*100\.0.* in one and .*1000"):
        silo_task(federation(), spec, folder_of(tmp_path, "south"))


@pytest.mark.parametrize(("spec", "says"), [({"inputs": [5]}, "inputs"), ({"classes": 3}, "classes")])
def test_inputs_and_classes_are_compared_with_the_columns(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[federation\] {says}"):
        server_task(federation(**spec))


def test_public_rows_may_be_a_table(tmp_path: Path) -> None:
    (tmp_path / "public.csv").write_text("ill,age,sex\nyes,50,M\nno,0,F\n")
    task = server_task(federation(test=str(tmp_path / "public.csv")))
    assert task.test is not None
    assert task.test.x.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, -1.0]]
    assert task.test.y.tolist() == [1, 0]
