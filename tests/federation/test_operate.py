"""Promise: what docs/operate.md tells an operator to type works, in the order of the page."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tests.commands import federation as one_run
from tests.commands import sordino
from tests.pages import ROOT, blocks, titled

from sordino.accounting.events import GaussianNoise
from sordino.config import load_config
from sordino.federation import keys
from sordino.federation.status import StatusBoard
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Item

FED = """
[task]
dataset = "npz"
options = {{ path = "rows.npz", classes = 2 }}

[recipe]
name = "silo"
rounds = 3
sizes = {sizes}

[privacy]
delta = 1e-3
noise = "secure"
{budgets}

[federation]
silos = {silos}
inputs = [4]
classes = 2
project = "{project}"
"""


def write_fed(file: Path, *names: str, project: str = "heart 2026") -> None:
    sizes = "{ " + ", ".join(f"{name} = 40" for name in names) + " }"
    budgets = "\n".join(f"silos.{name} = {{ epsilon = 2.0 }}" for name in names)
    file.write_text(FED.format(sizes=sizes, budgets=budgets, silos=json.dumps(list(names)), project=project))


def follow(title: str) -> list[str]:
    """Do what a block of the page says; return what its commands print."""
    said = []
    for line in titled("docs/operate.md", f"operate: {title}").text.splitlines():
        command = line.split("  #")[0].strip()
        if command.startswith("sordino "):
            found = sordino(*shlex.split(command)[1:])
            assert found.code == 0, (command, found)
            said.append(found.out)
        else:
            done = subprocess.run(["bash", "-ec", command], check=False, capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stderr)
            said.append(done.stdout)
    return said


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A federation of two hospitals with keys, certificates and a ledger, in the folder of the page."""
    monkeypatch.chdir(tmp_path)
    write_fed(tmp_path / "fed.toml", "cleveland", "va")
    assert sordino("federation", "new", "hospitals", "--from", "fed.toml").code == 0
    server = tmp_path / "hospitals" / "server"
    for name in ("ca.crt", "server.crt", "server.key"):
        (server / name).write_text(name)
    for name in ("cleveland", "va"):
        silo = tmp_path / "hospitals" / "silos" / name
        subprocess.run([str(silo / "key.sh")], check=True, capture_output=True)
        (server / f"{name}.pub").write_bytes((silo / "node.pub").read_bytes())
    assert sordino("federation", "pin", server / "fed.toml", server / "cleveland.pub", server / "va.pub").code == 0
    charge(tmp_path, "a" * 32, "heart 2026")
    StatusBoard(tmp_path / "hospitals" / "silos" / "va" / "status.json").update(role="silo", name="va", state="serving")
    StatusBoard(server / "runs.a.status.json").update(role="server", name="a", rounds=3)
    return tmp_path


def charge(place: Path, run: str, project: str) -> None:
    silo = place / "hospitals" / "silos" / "va"
    policy = tomllib.loads((silo / "policy.toml").read_text())
    with Ledger.open(silo / "ledger.db", create=True) as ledger:
        if policy["dataset"] not in ledger.names:
            known = {name: policy[name] for name in ("epsilon", "delta", "unit", "relation")}
            options = [word for name, value in known.items() for word in (f"--{name}", str(value))]
            ledger.close()
            assert sordino("ledger", "limit", silo / "ledger.db", "va", *options).code == 0
    with Ledger.open(silo / "ledger.db") as ledger:
        asked = Request(policy["unit"], policy["relation"], (Item(GaussianNoise(9.0)),), run[:8])
        ledger.admit(run, "va", asked, whole=True, jobs=1, project=project)


def pinned(file: Path) -> dict[str, str]:
    found = load_config(file).federation
    assert found is not None
    return found.keys


def test_every_block_of_the_page_is_followed_here() -> None:
    text = Path(__file__).read_text()
    titles = [block.title.removeprefix("operate: ") for block in blocks(ROOT / "docs" / "operate.md")]
    assert len(titles) == 8
    assert all(f'follow("{title}")' in text for title in titles)
    assert len((ROOT / "docs" / "operate.md").read_text().splitlines()) <= 150


def test_look(place: Path) -> None:
    server, silo, _, history = follow("look")
    assert "server a: running" in server
    assert json.loads(silo)["processes"][0]["healthy"] is True
    assert "project 'heart 2026'" in history
    assert "epsilon so far" in history


def test_add_a_hospital(place: Path) -> None:
    write_fed(place / "fed.toml", "basel", "cleveland", "va")
    before = load_config(place / "hospitals" / "server" / "fed.toml").plan.hash
    *_, last = follow("add a hospital")
    assert [line.split()[0] for line in last.splitlines()] == ["basel", "cleveland", "va"]
    policy = tomllib.loads((place / "next" / "silos" / "va" / "policy.toml").read_text())
    assert policy["plans"] == [load_config(place / "next" / "server" / "fed.toml").plan.hash] != [before]


def test_take_a_hospital_out(place: Path) -> None:
    write_fed(place / "fed.toml", "cleveland")
    follow("take a hospital out")
    assert set(pinned(place / "without" / "server" / "fed.toml")) == {"cleveland"}


def test_a_second_project_spends_the_same_budget(place: Path) -> None:
    write_fed(place / "second.toml", "cleveland", "va", project="stroke 2027")
    *_, before = follow("a second project")
    spec = tomllib.loads((place / "second" / "silos" / "va" / "silo.toml").read_text())
    ledger = place / "second" / "silos" / "va" / spec["ledger"]
    assert ledger.resolve() == (place / "hospitals" / "silos" / "va" / "ledger.db").resolve()
    charge(place, "b" * 32, "stroke 2027")
    after = sordino("ledger", "show", ledger).out
    assert "runs 1" in before
    assert "runs 2" in after
    history = sordino("ledger", "history", ledger, "va").out
    assert "project 'heart 2026'" in history
    assert "project 'stroke 2027'" in history


def test_rotate_a_silos_key(place: Path) -> None:
    old = pinned(place / "hospitals" / "server" / "fed.toml")
    follow("rotate a silo's key")
    new = pinned(place / "hospitals" / "server" / "fed.toml")
    assert new["va"] == keys.public_text(place / "hospitals" / "silos" / "va" / "node.pub") != old["va"]
    assert new["cleveland"] == old["cleveland"]
    assert pinned(place / "hospitals" / "silos" / "cleveland" / "fed.toml") == new


def test_back_up_and_restore_a_ledger(place: Path) -> None:
    before = sordino("ledger", "show", place / "hospitals" / "silos" / "va" / "ledger.db").out
    _, _, restored, after = follow("back up and restore a ledger")
    assert "no line is missing" in restored
    assert after == before


def test_a_backup_that_lacks_charges_charges_nothing_before_the_limit_is_lowered(place: Path) -> None:
    file = place / "hospitals" / "silos" / "va" / "ledger.db"
    assert sordino("ledger", "backup", file, "va.old").code == 0
    charge(place, "b" * 32, "")
    file.unlink()
    assert "lost: 1 lines" in sordino("ledger", "restore", "va.old", file).out
    with Ledger.open(file) as ledger, pytest.raises(Exception, match="lower"):
        ledger.admit("c" * 32, "va", Request("record", "replace_one", (Item(GaussianNoise(9.0)),)), whole=True)


def test_upgrade(place: Path) -> None:
    *_, pins = follow("upgrade")
    assert pins == "no key is pinned\n" or "va" in pins


def test_sign_together(place: Path) -> None:
    one_run(place)
    assert sordino("run", place / "fed.toml", "--out", "runs/a").code == 0
    for name in ("cleveland", "va"):
        for words in (
            f"genpkey -algorithm ed25519 -out {name}.pem",
            f"pkey -in {name}.pem -pubout -out {name}-public.pem",
        ):
            subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    said = follow("sign together")
    assert "signed with 2 of 2 keys" in said[2]
    assert "Verified Successfully" in said[4]
    assert said[5].startswith("consistent, and signed")
    assert np.isfinite(json.loads(sordino("certify", "runs/a", "--json").out)["epsilon"])
