"""Promise: the folder of a run on a table scores raw rows, and with the certified model alone."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.commands import sordino

from sordino import codec
from sordino.config import Config, parse
from sordino.data.files import read_table
from sordino.data.tables import Encoding, encoded_rows
from sordino.runs.bundle import Bundle, Scorer, checked_model


def rows(folder: Path, name: str, *, target: bool = True, semicolons: bool = False) -> Path:
    rng, mark = np.random.default_rng(3), ";" if semicolons else ","
    lines = [["who", "sex", "age", *(["ill"] * target)]]
    for place in range(40):
        age = round(float(rng.uniform(0, 100)), 1)
        label = ["yes" if age > 50 else "no"] * target
        lines.append([f"p{place}", "FM"[place % 2], str(age).replace(".", "," if semicolons else "."), *label])
    file = folder / name
    file.write_text("\n".join(mark.join(line) for line in lines) + "\n")
    return file


def config(folder: Path, person: int = 0, model: str = "logistic") -> Config:
    columns = {"sex": {"categories": ["F", "M"]}, "age": {"range": [0, 100]}}
    options = {"path": str(rows(folder, "train.csv")), "target": "ill", "classes": ["no", "yes"], "columns": columns}
    options |= {"person": {"column": "who", "rows": person}} if person else {"ignore": ["who"]}
    recipe = {"name": "silo", "sizes": [40], "epsilons": [20.0], "rounds": 10, "lr": 4.0}
    return parse({"task": {"dataset": "csv", "options": options, "model": {"kind": model}}, "recipe": recipe})


def run(folder: Path, given: Config) -> Path:
    (folder / "fed.toml").write_text(codec.to_toml(given))
    assert sordino("run", folder / "fed.toml", "--out", folder / "run").code == 0
    return folder / "run"


def scores(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


@pytest.mark.parametrize(("person", "model"), [(0, "logistic"), (3, "mlp"), (1, "logistic")])
def test_rows_without_a_target_are_scored_as_the_trained_model_scores_them(
    tmp_path: Path, person: int, model: str
) -> None:
    out, given = run(tmp_path, config(tmp_path, person, model)), config(tmp_path, person, model)
    file = rows(tmp_path, "new.csv", target=False, semicolons=True)
    words = ("--keep", "who", "--delimiter", ";", "--decimal", ",")
    done = sordino("predict", out, file, "--out", tmp_path / "scores.csv", *words)
    assert (done.code, done.out.split()[0]) == (0, "40")
    found = scores(tmp_path / "scores.csv")
    assert [one["who"] for one in found] == [f"p{place}" for place in range(40)]
    task, bundle = given.build(), Bundle.read(out)
    module = bundle.load(checked_model(out)[0])
    assert task.encoding is not None
    x = encoded_rows(task.encoding, tmp_path / "train.csv")[0]
    outputs = module(torch.from_numpy(x.astype(np.float32)))
    wanted = torch.softmax(outputs if person < 2 else outputs[:, 0], -1)
    np.testing.assert_allclose([float(one["probability_yes"]) for one in found], wanted[:, 1].detach(), atol=1e-5)
    assert all((one["prediction"] == "yes") == (float(one["probability_yes"]) > 0.5) for one in found)


def test_numbers_come_back_in_the_unit_of_the_column(tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": str(rows(tmp_path, "train.csv")), "target": "age", "ignore": ["who", "ill"]}
    options |= {"columns": {"sex": {"categories": ["F", "M"]}, "age": {"range": [0, 100]}}}
    recipe = {"name": "silo", "sizes": [40], "epsilons": [20.0], "rounds": 3}
    out = run(tmp_path, parse({"task": {"dataset": "csv", "options": options}, "recipe": recipe}))
    assert sordino("predict", out, rows(tmp_path, "new.csv"), "--out", tmp_path / "scores.csv").code == 0
    found = [float(one["prediction"]) for one in scores(tmp_path / "scores.csv")]
    assert 0 < np.mean(found) < 100


def test_three_files_are_enough_and_other_weights_are_refused(tmp_path: Path) -> None:
    out, bundle = run(tmp_path, config(tmp_path)), tmp_path / "bundle"
    bundle.mkdir()
    for name in ("model.safetensors", "bundle.json", "certificate.json"):
        shutil.copy(out / name, bundle)
    file = rows(tmp_path, "new.csv")
    assert sordino("predict", bundle, file, "--out", tmp_path / "scores.csv").code == 0
    data = bytearray((bundle / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (bundle / "model.safetensors").write_bytes(bytes(data))
    done = sordino("predict", bundle, file, "--out", tmp_path / "scores.csv")
    assert done.code == 2
    assert "whose hash is not the one in certificate.json" in done.err


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    out, file = run(tmp_path, config(tmp_path)), tmp_path / "new.csv"
    file.write_text("who,sex\np1,F\n")
    done = sordino("predict", out, file, "--out", tmp_path / "scores.csv")
    assert done.code == 2
    assert "no column 'age'" in done.err


def test_bought_ranges_are_those_of_the_release(tmp_path: Path) -> None:
    given = config(tmp_path)
    table = codec.dump(given)
    age = {"quantiles": [0.05, 0.95], "missing": "median", "histogram": {"epsilon": 5.0, "within": [0, 200]}}
    table["task"]["options"]["columns"]["age"] = age
    del table["plan"]
    table["recipe"] = {"name": "silo", "sizes": [40], "epsilons": [20.0], "rounds": 3}
    out = run(tmp_path, parse(table))
    column = dict(zip(Bundle.read(out).encoding.names, Bundle.read(out).encoding.columns, strict=True))["age"]
    assert column.histogram is None
    assert column.range is not None
    assert sordino("predict", out, rows(tmp_path, "new.csv"), "--out", tmp_path / "scores.csv").code == 0


@pytest.mark.parametrize(("person", "model"), [(0, "logistic"), (3, "mlp")])
def test_an_onnx_file_scores_rows_as_predict_does_and_carries_the_certificate(
    tmp_path: Path, person: int, model: str
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    given = config(tmp_path, person, model)
    out = run(tmp_path, given)
    assert sordino("export", out, "--out", tmp_path / "model.onnx").code == 0
    bundle = Bundle.read(out)
    x = bundle.encoding.features(read_table(rows(tmp_path, "new.csv"), bundle.csv))
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {"features": x.astype(np.float32)})
    weights, certificate = checked_model(out)
    wanted = Scorer(bundle, bundle.load(weights)).scores(x).numpy()
    assert found.shape == wanted.shape == (40, 2)
    assert np.abs(found - wanted).max() < 1e-6
    held = {one.key: json.loads(one.value) for one in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert held["certificate"] == certificate
    assert held["classes"] == ["no", "yes"]
    assert codec.read(Encoding, held["encoding"], "encoding") == bundle.encoding


def test_only_a_file_that_is_called_onnx_is_exported(tmp_path: Path) -> None:
    out = run(tmp_path, config(tmp_path))
    done = sordino("export", out, "--out", tmp_path / "model.pt")
    assert (done.code, ".onnx" in done.err) == (2, True)
