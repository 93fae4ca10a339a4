"""`sordino certify`: an untouched run passes; whatever is changed is named, with exit code 1."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.commands import federation, sordino, spelt_out
from tests.runs.test_folder import SHARES, run

from sordino.errors import CertificateError
from sordino.runs.folder import RunFolder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(federation(tmp_path_factory.mktemp("fed")), "kept")


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    """A finished run to spoil."""
    return Path(shutil.copytree(kept, tmp_path / "copy"))


@pytest.fixture
def quick(copy: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The same, its certificate computed once."""
    made = RunFolder.open(copy).certificate()
    monkeypatch.setattr(RunFolder, "certificate", lambda *_: made)
    return RunFolder.open(copy)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value that is no table and no list."""
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        yield from (leaf for key, item in pairs for leaf in leaves(item, (*path, key)))
    else:
        yield path


def written(path: tuple[Any, ...]) -> str:
    """A path as an error names it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def changed(value: Any) -> Any:
    """Nearly the same value."""
    match value:
        case str():
            return value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x"
        case float():
            return value * (1 + 1e-12) or 1e-12
        case int():
            return value + 1
    return 0 if value is None else ["x"]


def put(table: Any, path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        table = table[step]
    table[path[-1]] = value


def taken(table: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        table = table[step]
    return table


def field_of(folder: RunFolder) -> str:
    with pytest.raises(CertificateError) as caught:
        folder.certify()
    assert caught.value.field in str(caught.value)
    return caught.value.field


def failure(out: Path) -> str:
    """What the command says of a run that fails."""
    said = sordino("certify", out)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("sordino: ")
    assert said.err.count("\n") == 1
    return said.err


def test_an_untouched_run_is_certified(kept: Path) -> None:
    found = sordino("certify", kept, "--json").json
    stored = json.loads((kept / "certificate.json").read_text())
    assert found == {"certified": True, **stored}
    assert set(stored) >= {"epsilon", "delta", "unit", "relation", "adversaries"}
    assert sordino("certify", kept).out.startswith("certified: epsilon")


def test_every_value_that_changes_is_named(quick: RunFolder) -> None:
    file = quick.path / "certificate.json"
    text = file.read_text()
    paths = list(leaves(json.loads(text)))
    assert len(paths) > 50
    for path in paths:
        table = json.loads(text)
        put(table, path, changed(taken(table, path)))
        file.write_text(json.dumps(table))
        assert field_of(quick) == written(path)


def test_every_digit_that_changes_is_noticed(quick: RunFolder) -> None:
    file = quick.path / "certificate.json"
    text = file.read_text()
    places = [i for i, letter in enumerate(text) if letter.isdigit()]
    assert len(places) > 100
    for place in places:
        for step in (1, 9):
            digit = str((int(text[place]) + step) % 10)
            file.write_text(text[:place] + digit + text[place + 1 :])
            assert field_of(quick)


def test_a_value_left_out_put_in_or_said_twice_is_named(quick: RunFolder) -> None:
    file = quick.path / "certificate.json"
    text = file.read_text()
    for path in leaves(json.loads(text)):
        if isinstance(path[-1], str):
            table = json.loads(text)
            del taken(table, path[:-1])[path[-1]]
            file.write_text(json.dumps(table))
            assert field_of(quick) == written(path)
    file.write_text(json.dumps({**json.loads(text), "approved": True}))
    assert field_of(quick) == "approved"
    file.write_text(text.replace('"format"', '"epsilon": 0.001,\n  "format"'))
    assert field_of(quick) == "epsilon"
    file.write_text(text[:-10])
    assert field_of(quick) == "certificate.json"


def test_one_digit_of_epsilon_fails_the_real_command(copy: Path) -> None:
    file = copy / "certificate.json"
    text = file.read_text()
    place = text.index('"epsilon": ') + len('"epsilon": ')
    file.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    command = [str(Path(sys.executable).parent / "sordino"), "certify", str(copy), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("sordino: epsilon is ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("noise_multiplier = 2.0", "noise_multiplier = 1.9"),
        ("rate = 0.5", "rate = 0.4"),
        ("lr = 0.5", "lr = 0.6"),
        ("clip_norm = 1.0", "clip_norm = 1.5"),
        ("rate = 0.5", "rate = 5.0"),
        ("rate = 0.5", "rate = "),
        ("seed = 3", "seed = 4"),
        ('noise = "simulation"', 'noise = "secure"'),
    ],
)
def test_a_changed_plan_is_noticed(found: str, instead: str, copy: Path) -> None:
    text = (copy / "plan.toml").read_text()
    assert text.count(found) == 1
    (copy / "plan.toml").write_text(text.replace(found, instead))
    assert failure(copy).startswith("sordino: plan.toml ")


@pytest.mark.parametrize(
    "text",
    [
        '{"round": 1}\n{"round": 2}\n{"round": 3}\n',
        "".join(f'{{"round": {t}}}\n' for t in range(1, 6)),
        "",
        "round 1\n",
        "1\n2\n3\n4\n",
        "{}\n{}\n{}\n{}\n",
    ],
)
def test_changed_charges_are_noticed(text: str, copy: Path) -> None:
    (copy / "charges.jsonl").write_text(text)
    assert failure(copy).startswith("sordino: charges.jsonl ")


def test_a_changed_model_is_noticed(copy: Path) -> None:
    model = copy / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    assert failure(copy).startswith("sordino: model_sha256 ")
    model.unlink()
    assert failure(copy).startswith("sordino: model_sha256 ")


def test_changed_cohorts_are_noticed(tmp_path: Path) -> None:
    out = run(spelt_out(tmp_path, *SHARES), "a")
    charges = out / "charges.jsonl"
    every = [json.loads(line) for line in charges.read_text().splitlines()]
    busy = {client for client in range(60) if all(client in line["cohort"] for line in every)}
    alone = [{**line, "cohort": [c for c in line["cohort"] if c not in busy]} for line in every]
    for spoilt in (alone, [{**line, "cohort": "all"} for line in every]):
        charges.write_text("".join(json.dumps(line) + "\n" for line in spoilt))
        assert failure(out).startswith("sordino: charges.jsonl ")
