"""Promise: five hospitals with tables as their systems export them end with certificates, models and scores, as told.

Everything that the page docs/hospital-tables.md has people write or type is taken from the page; the processes between
(SuperLink, nodes, keys) are those of docs/deploy.md, which test_across_hosts.py types.
"""

from __future__ import annotations

import csv
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from tests.commands import sordino
from tests.deploy import hospitals
from tests.pages import ROOT, blocks, titled

from sordino.federation import keys
from sordino.federation.local_federation import LocalFederation
from sordino.ledger.ledger import Ledger

PAGE = "docs/hospital-tables.md"
GERMAN = {"delimiter": ";", "decimal": ",", "dates": "%d.%m.%Y", "na": ["k.A."]}
CHANGES: dict[str, dict[str, Any]] = {  # what the five operators write into silo.toml
    "aachen": {"format": GERMAN},
    "basel": {"format": {**GERMAN, "encoding": "latin-1"}},
    "calais": {},
    "derby": {"format": {"dates": "%d/%m/%Y"}},
    "essen": {"ignore": ["internal"]},
}


def visits(name: str, persons: int, seed: int) -> list[dict[str, str]]:
    """Rows of one hospital, in its own words: one to six visits of each person, in no order."""
    rng, found = np.random.default_rng(seed), []
    german = name in ("aachen", "basel")
    for person in range(persons):
        for _ in range(int(rng.integers(1, 7))):
            age, day = round(float(rng.uniform(18, 95)), 1), np.datetime64("2016-01-01") + int(rng.integers(3000))
            crp = "" if rng.random() < 0.1 else f"{rng.uniform(1, 200):.1f}"
            ill = age + rng.normal(0, 10) > 60
            year, month, date = str(day).split("-")
            dates = {"derby": f"{date}/{month}/{year}"}.get(name, f"{date}.{month}.{year}" if german else str(day))
            row = {
                "patient": f"{name[0].upper()}-{person}",
                "sex": (("weiblich", "männlich") if german else ("female", "male"))[int(rng.integers(2))],
                "age": str(age).replace(".", ",") if german else str(age),
                "crp": (crp.replace(".", ",") or "k.A.") if german else crp,
                "admitted": dates,
                "smoker": ("no", "yes", "")[int(rng.integers(3))],
                "readmitted": (("nein", "ja") if german else ("0", "1"))[int(ill)],
            }
            if name == "calais":
                del row["smoker"]
            found.append(row | ({"internal": str(person * 7)} if name == "essen" else {}))
    order = rng.permutation(len(found))
    return [found[place] for place in order]


def write(file: Path, name: str, rows: list[dict[str, str]]) -> None:
    encoding = {"aachen": "utf-8-sig", "basel": "latin-1"}.get(name, "utf-8")
    names = list(rows[0]) if name != "derby" else list(reversed(rows[0]))
    with file.open("w", encoding=encoding, newline="") as stream:
        writer = csv.DictWriter(stream, names, delimiter=";" if name in ("aachen", "basel") else ",")
        writer.writeheader()
        writer.writerows(rows)


def typed(title: str) -> list[str]:
    """Commands of a block of the page, typed here; what they said."""
    said = []
    for line in titled(PAGE, title).text.splitlines():
        done = sordino(*line.split()[1:])
        assert done.code == 0, f"{line}\n{done.out}\n{done.err}"
        said.append(done.out)
    return said


def test_five_hospitals_from_messy_tables_to_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = next(block.text for block in blocks(ROOT / PAGE) if block.language == "toml")
    (tmp_path / "fed.toml").write_text(text.replace("rounds = 10", "rounds = 2"))
    sizes = tomllib.loads(text)["recipe"]["sizes"]
    monkeypatch.chdir(tmp_path)
    typed("tables: on the server")
    for place, name in enumerate(sizes):
        own = tmp_path / "hospitals" / "silos" / name
        write(own / "patients.csv", name, visits(name, sizes[name], place))
        write(own / "heldout.csv", name, visits(name, 30, 100 + place))
        new = visits(name, 5, 200 + place)
        write(own / "new.csv", name, [{k: v for k, v in row.items() if k != "readmitted"} for row in new])
        spec = tomllib.loads((own / "silo.toml").read_text())
        spec["options"] |= CHANGES[name]
        (own / "silo.toml").write_text(tomli_w.dumps(spec | {"heldout": "heldout.csv"}))
    home, out = tmp_path / "home", tmp_path / "runs" / "a"
    home.mkdir()
    write(home / "public.csv", "calais", visits("calais", 60, 300))
    with LocalFederation(tmp_path / "hospitals", tuple(sizes), home) as federation:
        agreed = tmp_path / "hospitals" / "server" / "fed.toml"
        keys.pin(agreed, [home / f"{name}.pub" for name in sizes])
        for name in sizes:
            shutil.copy(agreed, tmp_path / "hospitals" / "silos" / name)
        federation.up()
        federation.submit(out)
        made = hospitals.finished(federation, out)
        models = [tmp_path / "hospitals" / "silos" / name / "model" for name in sizes]
        hospitals.until("the models", lambda: all((model / "evaluation.json").exists() for model in models))
    assert (made["unit"], made["counts"]["charges_per_silo"]) == ("user", [2] * 5)
    assert made["declared_public"][0]["what"] == "rows of public.csv"
    budgets = {name: own["epsilon"] for name, own in tomllib.loads(text)["privacy"]["silos"].items()}
    lines = made["adversaries"][-1]["silos"]
    spent = {made["silos"][silo]: entry["epsilon"] for entry in lines for silo in entry["silos"]}
    assert all(spent[name] <= budgets[name] for name in sizes)
    for name in sizes:
        own = tmp_path / "hospitals" / "silos" / name
        monkeypatch.chdir(own)
        said = typed("tables: in every silo, at the end")
        assert "unit user" in said[0]
        with (own / "scores.csv").open() as stream:
            scores = list(csv.DictReader(stream))
        assert {one["patient"] for one in scores} == {f"{name[0].upper()}-{person}" for person in range(5)}
        assert (own / "model" / "certificate.json").read_bytes() == (out / "certificate.json").read_bytes()
        assert json.loads((own / "model" / "evaluation.json").read_text()).keys() >= {"rows", "accuracy", "auc"}
        with Ledger.open(own / "ledger.db") as held:
            assert sum(held.charges(made["run"]["id"]).values()) == 2
