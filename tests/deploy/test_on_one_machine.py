"""Promise: `sordino run fed.toml --engine flower` is the whole federation on one machine, as docs/deploy.md begins."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.deploy import hospitals
from tests.pages import machine

from sordino.federation.local_federation import descendants, flower_command, kill_all
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


def processes_in(folder: Path) -> set[int]:
    """Processes that work in the folder, or were told of it; a process that nobody has waited for does neither."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            inside = Path(os.readlink(place / "cwd")).is_relative_to(folder)
            if inside or str(folder).encode() in (place / "cmdline").read_bytes():
                found.add(int(place.name))
    return found


def test_no_process_outlives_a_run_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "fed.toml").write_text(FILE.replace("rounds = 2", "rounds = 100"))
    words = [flower_command("sordino"), "run", "fed.toml", "--engine", "flower", "--out", "runs/a"]
    run = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        history = tmp_path / "runs" / "a" / "history.jsonl"
        hospitals.until("a round", lambda: history.exists() and history.stat().st_size > 0)
        family = {run.pid, *descendants(run.pid), *processes_in(tmp_path)}
        assert len(family) >= 8  # with its lifeline; SuperLink, its executor, ServerApp; two nodes, two silos
        run.kill()
        run.wait()
        hospitals.until("the end of all processes", lambda: not processes_in(tmp_path) and not living(family))
    finally:
        run.kill()
        kill_all([*processes_in(tmp_path)])
        run.wait()


def living(processes: set[int]) -> set[int]:
    """Those that have not ended; a zombie has."""
    found = set()
    for one in processes:
        with suppress(OSError):
            if Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                found.add(one)
    return found
