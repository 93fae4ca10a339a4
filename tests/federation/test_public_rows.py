"""Promise: the certificate of a federation names as public what [federation] test names, and no silo's private file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.wires import Wires

from sordino.config import Config, parse
from sordino.engines.remote import Remote, Silo
from sordino.federation.app import server_task
from sordino.federation.silo_service import SiloSpec, silo_task
from sordino.runs.execution import Executed, execute
from sordino.runs.folder import RunFolder

NAMES = ("north", "south")


def private_rows(folder: Path, kind: str) -> str:
    """A file of one silo's private rows: a table, or arrays."""
    rng, file = np.random.default_rng(0), folder / f"rows.{kind}"
    x, y = rng.uniform(-1, 1, (40, 2)).round(3), np.arange(40) % 2
    if kind == "npz":
        np.savez(file, x=x, y=y)
    else:
        lines = ["a,b,label", *(f"{a},{b},{label}" for (a, b), label in zip(x.tolist(), y.tolist(), strict=True))]
        file.write_text("\n".join(lines) + "\n")
    return str(file)


def federation(folder: Path, kind: str, options: dict[str, Any], test: bool = True) -> Config:
    """Two silos, whose rows no server reads, and perhaps seven public rows."""
    np.savez(folder / "public.npz", x=np.zeros((7, 2), dtype=np.float32), y=np.arange(7) % 2)
    plan = {
        "rounds": 2,
        "clients": {"kind": "everyone", "population": 2},
        "local": {"kind": "local_sgd", "lr": 0.1, "epochs": 1, "batch": 8},
        "encode": [{"kind": "clip", "clip_norm": 1.0}],
        "release": {"kind": "local_noise", "mechanism": {"kind": "gaussian", "noise_multiplier": 2.0}},
        "server": {"kind": "sgd"},
    }
    spec = {"silos": list(NAMES), "inputs": [2], "classes": 2}
    spec |= {"test": str(folder / "public.npz")} if test else {}
    task = {"dataset": kind, "options": {"path": private_rows(folder, kind), **options}}
    privacy = {"noise": "secure", "delta": 1e-3}
    return parse({"task": task, "plan": plan, "privacy": privacy, "federation": spec})


def ran(config: Config, out: Path) -> Executed:
    """The server's own task and the silos' own tasks, with bytes between them."""
    specs = [SiloSpec(name, config.task.dataset, options=config.task.options) for name in NAMES]
    wires = Wires({place: Silo(silo_task(config, spec)) for place, spec in enumerate(specs)})
    return execute(config, out, engine=Remote(wires), task=server_task(config))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("csv", {"target": "label", "classes": 2, "public_test_fraction": 0.2}),
        ("csv", {"target": "label", "classes": 2, "ranges": {"a": [-1, 1], "b": [-1, 1]}}),
        ("npz", {"public_test_fraction": 0.2}),
        ("npz", {}),
    ],
    ids=["a table's own fraction", "ranges of columns", "arrays' own fraction", "arrays"],
)
def test_the_certificate_names_the_public_file_and_no_private_one(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    config = federation(tmp_path, kind, options)
    done = ran(config, tmp_path / "run")
    rows = [one for one in done.certificate["declared_public"] if "rows" in one["what"]]
    assert rows == [{"rows": 7, "what": "rows of public.npz", "by": "the configuration: [federation] test"}]
    assert f"rows.{kind}" not in json.dumps(done.certificate)
    assert done.certificate["statement"]["not_protected"].startswith("7 rows that are declared public")
    values = [one["what"] for one in done.certificate["declared_public"][1:]]
    assert values == (["ranges, categories and constants of columns"] if "ranges" in options else [])
    assert RunFolder.open(tmp_path / "run").certify() == done.certificate


def test_without_a_public_file_no_row_is_named(tmp_path: Path) -> None:
    done = ran(federation(tmp_path, "csv", {"target": "label", "classes": 2}, test=False), tmp_path / "run")
    assert done.certificate["declared_public"] == []
    assert any("no row of the data is" in text for text in done.certificate["assumptions"])


def test_the_same_file_in_one_process_names_the_rows_that_it_evaluates_on(tmp_path: Path) -> None:
    options = {"target": "label", "classes": 2, "public_test_fraction": 0.2}
    done = execute(federation(tmp_path, "csv", options), tmp_path / "run")
    assert [(one["rows"], one["what"]) for one in done.certificate["declared_public"]] == [(8, "test rows of rows.csv")]
