"""No private row is public unasked: what is evaluated on was named by the user, and the certificate says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.commands import arrays, federation, lines, sordino
from tests.tiny import clients, mlp, plan

from sordino.config import load_config
from sordino.data.datasets import write_memmap
from sordino.task import Task
from sordino.training import train

HOSPITALS = """
[task]
dataset = "csv"
options = {{ path = "{folder}/hospitals.csv", target = "sick", groups = "site", classes = 2{more} }}

[recipe]
name = "dp_fed_avg"
rounds = 2
clients = {{ kind = "everyone", population = 3 }}
lr = 0.1
clip_norm = 1.0
noise_multiplier = 2.0

[privacy]
noise = "secure"
"""


def hospitals(folder: Path, more: str = "") -> Path:
    """Three hospitals of forty patients each, as one table."""
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'ABC'[i % 3]},{int(a + b > 0)}" for i, (a, b) in enumerate(rng.normal(size=(120, 2)))]
    (folder / "hospitals.csv").write_text("\n".join(["a,b,site,sick", *rows]) + "\n")
    (folder / "public.csv").write_text("\n".join(["a,b,sick", "1.0,1.0,1", "-1.0,-1.0,0"]) + "\n")
    file = folder / "fed.toml"
    file.write_text(HOSPITALS.format(folder=folder, more=more))
    return file


def test_no_private_row_becomes_public_unasked(tmp_path: Path) -> None:
    """A fifth of the silos' rows used to be the test, with their exact loss in history.jsonl, in secure mode too."""
    file = hospitals(tmp_path)
    task = load_config(file).build()
    assert (len(task.clients.index), task.test) == (120, None)
    said = sordino("run", file, "--out", tmp_path / "run")
    assert "not evaluated, as no row is declared public" in said.out
    assert all(set(line) == {"round"} for line in lines(tmp_path / "run" / "history.jsonl"))
    made = sordino("certify", tmp_path / "run", "--json").json
    assert made["declared_public"] == []
    assert any("no row of the data is" in text for text in made["assumptions"])


@pytest.mark.parametrize(
    ("more", "rows", "what", "by"),
    [
        (", public_test_fraction = 0.2", 24, "test rows of hospitals.csv", "public_test_fraction = 0.2"),
        (', test = "{folder}/public.csv"', 2, "rows of public.csv", "test names the file"),
    ],
)
def test_the_certificate_says_how_many_rows_are_public_and_by_whom(
    tmp_path: Path, more: str, rows: int, what: str, by: str
) -> None:
    file = hospitals(tmp_path, more.format(folder=tmp_path))
    found = sordino("run", file, "--out", tmp_path / "run", "--json").json
    assert "loss" in found["last"]
    (declared,) = found["certificate"]["declared_public"]
    assert (declared["rows"], declared["what"]) == (rows, what)
    assert declared["by"] == f"the configuration: {by}"
    assert f"{rows} {what} (declared by the configuration" in sordino("explain", tmp_path / "run").out
    assert sordino("certify", tmp_path / "run").code == 0


def test_a_number_of_public_rows_that_was_edited_is_noticed(tmp_path: Path) -> None:
    sordino("run", hospitals(tmp_path, ", public_test_fraction = 0.2"), "--out", tmp_path / "run")
    for name in ("run.json", "certificate.json"):
        file = tmp_path / "run" / name
        before = file.read_text()
        file.write_text(before.replace('"rows": 24', '"rows": 4'))
        assert file.read_text() != before
        assert sordino("certify", tmp_path / "run").code == 1
        file.write_text(before)
    assert sordino("certify", tmp_path / "run").code == 0


def test_other_public_rows_before_a_resume_are_noticed(tmp_path: Path) -> None:
    file = hospitals(tmp_path, f', test = "{tmp_path}/public.csv"')
    sordino("run", file, "--out", tmp_path / "run")
    with open(tmp_path / "public.csv", "a") as more:
        more.write("0.5,0.5,1\n")
    assert "the test records" in sordino("run", file, "--out", tmp_path / "run", "--resume").sentence


def test_arrays_without_a_test_are_not_evaluated(tmp_path: Path) -> None:
    known = {name: value for name, value in arrays().items() if not name.startswith("test")}
    found = sordino("run", federation(tmp_path, data=known), "--out", tmp_path / "run", "--json").json
    assert "loss" not in found["last"]
    assert [one["what"] for one in found["certificate"]["declared_public"]] == ["number of classes"]  # read off y


def test_a_mapped_folder_without_test_files_is_not_evaluated(tmp_path: Path) -> None:
    x = np.zeros((60, 6), np.float32)
    write_memmap(tmp_path / "big", x, np.zeros(60, np.int64), np.ones(60, np.int64))
    options = (f'options = {{ path = "{tmp_path}/data.npz" }}', f'options = {{ path = "{tmp_path}/big", classes = 2 }}')
    file = federation(
        tmp_path, ('dataset = "npz"', 'dataset = "memmap"'), options, ('partition = { kind = "iid", clients = 60 }', "")
    )
    found = sordino("run", file, "--out", tmp_path / "run", "--json").json
    assert "loss" not in found["last"]
    assert found["certificate"]["declared_public"] == []


def test_a_published_set_keeps_its_test() -> None:
    from sordino.config import TaskSpec

    spec = TaskSpec(dataset="digits")
    (declared,) = spec.build(10, seed=0).declared_public
    assert (declared.rows, declared.by) == (359, "the publisher of the data set")


@pytest.mark.parametrize("given", [{}, {"test": (torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))}])
def test_a_task_made_in_python_says_what_its_caller_declared(given: dict[str, Any]) -> None:
    made = train(plan(), Task.of(mlp(), clients(), **given), allow_large_delta=True).certificate
    assert [entry["rows"] for entry in made["declared_public"]] == [5] * len(given)
    assert all(entry["by"].startswith("the caller") for entry in made["declared_public"])


def test_tuning_refuses_private_rows_and_names_the_rows_it_used(tmp_path: Path) -> None:
    words = ["--epsilon", 20, "--trials", 1, "--json"]
    assert "synthetic" in sordino("tune", hospitals(tmp_path), *words).sentence
    file = hospitals(tmp_path, ", public_test_fraction = 0.2")
    cost = sordino("tune", file, *words).json["tuned"][0]["privacy_cost"]
    assert "24 test rows of hospitals.csv" in cost
    assert "not protected" in cost
    assert "32 records" in cost  # the average size, which the search has looked at
