"""Rows of the board, how a row is run and kept, and what is read back."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import sordino as so
from sordino import codec
from sordino.certificate.certificate_file import text_of
from sordino.certificate.facts import Facts
from sordino.data.records import Dirichlet, Iid, Natural
from sordino.dpsgd import account
from sordino.errors import ConfigError
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.runs.folder import RunFolder
from sordino_papers import kept
from sordino_papers.board import Problem, Published, Row, Run, Settings, interval, run, without_privacy
from sordino_papers.board_choosing import CLOTHES, DIGITS, KEPT, TABLE, key, settings, stored

SEEDS = 5
LITE0 = so.features.pretrained("lite0", size=160, precision="bfloat16")
_SCATTERNET = "Tramer and Boneh 2021"
_TRANSFER = Published(92.7, 2.0, _SCATTERNET, "features of a far larger net, SimCLR on ImageNet")
_WRITERS, _ADULT, _LOANS = (Problem("mnist_writers", DIGITS, Natural()), Problem("adult", TABLE),
                            Problem("dear_loans", TABLE))  # fmt: skip


def _dirichlet(alpha: float, goals: tuple[float, float, float]) -> tuple[Row, ...]:
    problem, words = Problem("cifar10", LITE0, Dirichlet(500, alpha)), f"CIFAR-10, 500 clients, Dirichlet {alpha:g}"
    return tuple(
        Row(f"cifar10-dirichlet{alpha:g}-eps{epsilon:g}", words, problem, epsilon, "fashion-624-clients", goal)
        for epsilon, goal in zip((1.0, 2.0, 8.0), goals, strict=True)
    )


ROWS: tuple[Row, ...] = (
    Row("mnist-record-eps1", "MNIST", Problem("mnist", DIGITS), 1.0, "fashion-scattering", 98.0),
    Row("mnist-record-eps3", "MNIST", Problem("mnist", DIGITS), 3.0, "fashion-scattering", 98.6,
        Published(98.7, 3.0, _SCATTERNET)),
    Row("fashion-record-eps3", "Fashion-MNIST", Problem("fashion_mnist", CLOTHES), 3.0, "mnist-scattering", 89.4,
        Published(89.7, 3.0, _SCATTERNET)),
    Row("cifar10-record-eps1", "CIFAR-10", Problem("cifar10", LITE0), 1.0, "fashion-624", 85.0),
    Row("cifar10-record-eps2", "CIFAR-10", Problem("cifar10", LITE0), 2.0, "fashion-624", 86.0, _TRANSFER),
    Row("cifar10-record-eps8", "CIFAR-10", Problem("cifar10", LITE0), 8.0, "fashion-624", 87.0),
    Row("cifar10-scattering-eps3", "CIFAR-10, no public data", Problem("cifar10", CLOTHES), 3.0, "fashion-scattering",
        None, Published(69.3, 3.0, _SCATTERNET, "a small CNN on scattering features")),
    *(Row(f"writers-eps{epsilon:g}", "MNIST by writer, 539 clients", _WRITERS, epsilon, "fashion-539-clients", goal)
      for epsilon, goal in ((1.0, 93.5), (2.0, 95.0), (8.0, 97.0))),
    *_dirichlet(0.1, (71.0, 76.0, 82.0)),
    *_dirichlet(0.3, (74.0, 78.0, 83.0)),
    Row("femnist-eps8", "FEMNIST, 105 writers", Problem("femnist", CLOTHES, Natural()), 8.0, "mnist-105-writers"),
    Row("adult-record-eps1", "UCI Adult", _ADULT, 1.0, "loans-record"),
    Row("adult-clients-eps1", "UCI Adult, 1,000 clients", replace(_ADULT, partition=Iid(1000)), 1.0, "loans-1000"),
    Row("loans-record-eps1", "Loans above 12 percent", _LOANS, 1.0, "adult-record"),
    Row("loans-clients-eps1", "Loans, 1,000 clients", replace(_LOANS, partition=Iid(1000)), 1.0, "adult-1000"),
)  # fmt: skip
BY_ID = {row.id: row for row in ROWS}


def found_row(name: str) -> Row:
    """The row of an id; refuses another name."""
    if name not in BY_ID:
        raise ConfigError(f"a row {name!r}", f"one of {', '.join(BY_ID)}", "sordino board list")
    return BY_ID[name]


def results(folder: Path = KEPT) -> dict[str, dict[str, Any]]:
    """Kept results by row, in the board's order."""
    files = {row.id: folder / "results" / f"{row.id}.json" for row in ROWS}
    return {name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.is_file()}


def certificate_path(name: str, folder: Path = KEPT) -> Path:
    """The certificate of a row's first seed: a file for records, the folder of a run for clients."""
    there = folder / "certificates" / name
    return there / "certificate.json" if BY_ID[name].problem.partition is None else there


def measure(row: Row, folder: Path = KEPT, seeds: int = SEEDS) -> dict[str, Any]:
    """Run a row and keep its result; a row that is kept is refused: it runs once."""
    if row.id in results(folder):
        raise ConfigError(f"a result of {row.id}, which is kept", "a row that has not run", "--check computes it again")
    if key(row.stand_in, row.epsilon) not in stored(folder):
        fix = f"sordino board choose {row.stand_in}"
        raise ConfigError(f"no settings for {row.id}", f"a choice on the stand-in {row.stand_in}", fix)
    chosen = settings(row.stand_in, row.epsilon, folder)
    runs = [run(row.problem, row.epsilon, chosen, seed) for seed in range(seeds)]
    values = [round(one.accuracy, 3) for one in runs]
    middle, half = interval(values)
    repeatable = run(row.problem, row.epsilon, chosen, 0, noise="simulation").accuracy
    found = {
        "id": row.id, "values": values, "mean": round(middle, 3), "half_width": round(half, 3),
        "repeatable": round(repeatable, 3), "without_privacy": _plain(row, folder),
        "cpu_seconds": round(mean(one.seconds for one in runs), 1), "settings": asdict(chosen),
        "stand_in": row.stand_in, "code": kept.code(), **_facts(row, runs[0]),
    }  # fmt: skip
    _keep(row, runs[0], found, folder)
    return found


def _facts(row: Row, first: Run) -> dict[str, Any]:
    made, data = first.certificate, row.problem.dataset()
    facts = {name: made[name] for name in ("epsilon", "delta", "unit", "relation")}
    public = [one["by"] for one in made["declared_public"] if one["what"] != "test rows"]
    size = {"records": len(data.y), "test_records": len(data.test_y), "features": data.x.shape[1]}
    return {**facts, "noise": made["noise"]["mode"], "public": public, **size, "classes": data.classes}


def _plain(row: Row, folder: Path) -> float:
    """Accuracy without clip and noise, of a kept row with the same records and features where there is one."""
    for name, found in results(folder).items():
        other = BY_ID[name].problem
        if (other.features, _same(other.data)) == (row.problem.features, _same(row.problem.data)):
            return float(found["without_privacy"])
    return round(without_privacy(row.problem), 3)


def _same(data: str) -> str:
    return data.removesuffix("_writers")


def _keep(row: Row, first: Run, found: dict[str, Any], folder: Path) -> None:
    there = folder / "certificates" / row.id
    shutil.rmtree(there, ignore_errors=True)
    if row.problem.partition is None:
        there.mkdir(parents=True)
    else:
        there.parent.mkdir(parents=True, exist_ok=True)
    first.save(there)
    file = folder / "results" / f"{row.id}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def check(row: Row, folder: Path = KEPT) -> tuple[float, float]:
    """The kept accuracy of the first seed with repeatable noise, and the same computed again."""
    known = results(folder).get(row.id)
    if known is None:
        raise ConfigError(f"no kept result of {row.id}", "a row that has run", f"sordino board run {row.id}")
    again = run(row.problem, row.epsilon, Settings(**known["settings"]), 0, noise="simulation")
    return float(known["repeatable"]), round(again.accuracy, 3)


def reissue(row: Row, folder: Path = KEPT) -> bool:
    """Write a kept certificate anew from its plan and charges, after a change of the format; False if it is as it was.

    Refuses where epsilon, delta, unit or relation would differ from the kept result.
    """
    path, known = certificate_path(row.id, folder), results(folder)[row.id]
    file = path if path.is_file() else path / "certificate.json"
    before, new = file.read_text("utf-8"), file.with_name("certificate.new.json")
    held = json.loads(before)
    if path.is_file():
        made = account.save_certificate(new, codec.read(Plan, held["plan"]), codec.read(Facts, held["facts"]))
    else:
        made = RunFolder.open(path).certificate(held["run"]["checkpoint_sha256"])
        new.write_text(text_of(made), encoding="utf-8")
    wrong = next((name for name in ("epsilon", "delta", "unit", "relation") if made[name] != known[name]), None)
    if wrong is not None:
        new.unlink()
        found = f"{row.id} with {wrong} {made[wrong]} in place of {known[wrong]}"
        raise ConfigError(found, "the certificate of the kept result", "delete the result and run the row again")
    new.replace(file)
    return file.read_text("utf-8") != before


def export(row: Row, out: Path, folder: Path = KEPT) -> None:
    """Write features, clients and settings of a kept row for benchmarks/board/peers.py; they are private data."""
    known = results(folder).get(row.id)
    if known is None:
        raise ConfigError(f"no kept result of {row.id}", "a row that has run", f"sordino board run {row.id}")
    out.mkdir(mode=0o700, parents=True)
    data, facts = row.problem.dataset(), ("features", "classes", "delta")
    for name in ("x", "y", "test_x", "test_y"):
        np.save(out / f"{name}.npy", getattr(data, name))
    given = {"row": row.id, **known["settings"], **{name: known[name] for name in facts}}
    if row.problem.partition is None:
        plan = json.loads(certificate_path(row.id, folder).read_text("utf-8"))["plan"]
        given["batch"] = plan["local"]["records"]["batch"]
    else:
        plan = tomllib.loads((certificate_path(row.id, folder) / "plan.toml").read_text("utf-8"))["plan"]
        split = row.problem.partition.split(data.y, data.groups, Seeded(0).at(0, "partition"))
        given |= {"index": split.index.tolist(), "offsets": split.offsets.tolist()}
    given["noise_multiplier"] = plan["release"]["mechanism"]["noise_multiplier"]
    (out / "settings.json").write_text(json.dumps(given) + "\n", encoding="utf-8")
