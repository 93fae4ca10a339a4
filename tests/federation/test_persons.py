"""Promise: where rows name persons, the guarantee is of one person: one clip over all rows, and the bill says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.commands import sordino

from sordino.config import Config, load_config, parse
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError
from sordino.federation.new_federation import policy_text
from sordino.ledger.policy import Policy
from sordino.parts.encoding import Public
from sordino.rng import Seeded

ROWS = 3


def visits(folder: Path, leave_out: str = "") -> Path:
    """60 persons with one to six visits each; person p0 has six, which all say the same."""
    rng, lines = np.random.default_rng(1), ["who,a,b,ill"]
    for person in range(60):
        for _ in range(6 if person == 0 else int(rng.integers(1, 6))):
            a, b = (9.0, 9.0) if person == 0 else rng.uniform(-1, 1, 2).round(3)
            if f"p{person}" != leave_out:
                lines.append(f"p{person},{a},{b},{'yes' if a + b > 0 else 'no'}")
    file = folder / f"visits{leave_out}.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def config(file: Path, rows: int = ROWS, size: int = 60, model: str = "logistic") -> Config:
    columns = {"a": {"range": [-10, 10]}, "b": {"range": [-10, 10]}}
    options: dict[str, Any] = {"path": str(file), "target": "ill", "classes": ["no", "yes"], "columns": columns}
    options |= {"person": {"column": "who", "rows": rows}} if rows else {"ignore": ["who"]}
    recipe = {"name": "silo", "sizes": [size], "epsilons": [2.0], "rounds": 4}
    return parse({"task": {"dataset": "csv", "options": options, "model": {"kind": model}}, "recipe": recipe})


def message(given: Config) -> torch.Tensor:
    """The sum of clipped gradients of all records, in units of the clip norm."""
    task = given.build()
    worker = InProcess().prepare(given.plan, task, Seeded(0))
    start = torch.zeros(task.layout.size)
    clip = given.plan.local.clip_norms[0]
    assert isinstance(clip, float)
    return worker.solve(np.array([0]), Public(0, clip, len(start)), start)[0]


@pytest.mark.parametrize("model", ["logistic", "mlp"])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_all_rows_of_a_person_move_the_message_by_at_most_one_clip_norm(tmp_path: Path, rows: int, model: str) -> None:
    both = [message(config(visits(tmp_path, out), rows, size, model)) for out, size in (("", 60), ("p0", 59))]
    assert float((both[0] - both[1]).norm()) <= 1.0001


def test_rows_as_records_would_move_it_by_more(tmp_path: Path) -> None:  # the sabotage: what a record promise is worth
    sizes = [len(visits(tmp_path, out).read_text().splitlines()) - 1 for out in ("", "p0")]
    both = [message(config(visits(tmp_path, out), 0, size)) for out, size in zip(("", "p0"), sizes, strict=True)]
    assert float((both[0] - both[1]).norm()) > 2.0


def test_certificate_and_its_sentences_say_user(tmp_path: Path) -> None:
    file = tmp_path / "fed.toml"
    from sordino import codec

    given = config(visits(tmp_path))
    file.write_text(codec.to_toml(given))
    assert load_config(file) == given
    assert sordino("run", file, "--out", tmp_path / "run").code == 0
    made = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert made["unit"] == "user"
    assert made["statement"]["unit_of_privacy"] == "user level: all rows of one user in one silo"
    assert f"at most {ROWS} are read" in made["assumptions"][0]
    assert made["records"]["sizes"] == [60]
    done = sordino("explain", tmp_path / "run")
    assert "everything that one user" in done.out
    assert sordino("certify", tmp_path / "run").code == 0


def test_a_policy_for_persons_allows_no_rows_as_records(tmp_path: Path) -> None:
    plan = config(visits(tmp_path)).plan
    policy = Policy(dataset="a", epsilon=9.0, delta=0.1, unit="user", releases=("local_noise",))
    assert policy.check(plan, noise="secure", persons=True) is None
    said = policy.check(plan, noise="secure", persons=False)
    assert said == "the plan protects one record, and the policy requires one user"


def test_a_federations_policies_are_written_for_persons(tmp_path: Path) -> None:
    given = config(visits(tmp_path))
    from dataclasses import replace

    from sordino.config import FederationSpec

    assert 'unit = "user"' in policy_text(replace(given, federation=FederationSpec(silos=("a",))), 0)


def test_a_plan_that_protects_clients_takes_no_person_column(tmp_path: Path) -> None:
    table = {"dataset": "csv", "options": {"path": "a.csv", "target": "y", "person": {"column": "w", "rows": 1}}}
    recipe = {"name": "dp_fed_avg", "clients": {"kind": "poisson", "population": 60, "rate": 0.5}, "rounds": 2}
    recipe |= {"epochs": 1, "batch": 8, "lr": 0.1, "clip_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ConfigError, match="a person column in a plan whose privacy unit is a client"):
        parse({"task": table, "recipe": recipe})
