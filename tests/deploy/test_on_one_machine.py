"""Promise: `sordino run fed.toml --engine flower` is the whole federation on one machine, as docs/deploy.md begins."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.pages import machine

from sordino.federation.local_federation import flower_command
from sordino.runs.folder import RunFolder

FILE = """
[task]
dataset = "digits"
partition = { kind = "iid", clients = 2 }

[recipe]
name = "silo"
rounds = 2
sizes = [719, 719]
epsilons = [4.0, 8.0]

[privacy]
noise = "secure"

[federation]
silos = ["north", "south"]
inputs = [1, 8, 8]
classes = 10
"""


def test_the_two_commands_that_the_page_begins_with(tmp_path: Path) -> None:
    (tmp_path / "fed.toml").write_text(FILE)
    for script, stays in machine("on this machine"):
        words = [flower_command("sordino"), *script.split()[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, stays) == (0, False), f"{script}\n{done.stdout}\n{done.stderr}"
    made = RunFolder.open(tmp_path / "runs" / "a").certify()
    assert made["counts"]["charges_per_silo"] == [2, 2]
    assert made["noise"]["mode"] == "secure"
    assert (tmp_path / "hospitals" / "silos" / "south" / "policy.toml").is_file()
