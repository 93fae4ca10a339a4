"""Whatever a configuration holds: an answer or one sentence. 500 of them here, 10,000 by `make nightly`.

By night every input has five seconds of processor time (a training of moments: thirty, as its machine code may have to
be compiled), and the process a gigabyte beyond what it began with.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tests import mutants
from tests.commands import sordino

from sordino.cli.console import json_safe
from sordino.cli.planning import forecast, forecast_text
from sordino.config import Config, load_config
from sordino.errors import LONGEST, UserError
from sordino.plan import Plan

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
SECONDS, TRAINING, MEMORY = 5, 30, 1 << 30
RUNS = 0.5 if NIGHTLY else 0.1  # of those that are accepted and short
BASES = mutants.bases()


@pytest.fixture(scope="module", autouse=True)
def _memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if NIGHTLY:
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
        resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """By night: an error, with the place in its traceback, after so many seconds of this process's own time."""

    def ring(*_: Any) -> None:
        raise AssertionError(f"no answer in {seconds} seconds")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds if NIGHTLY else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def planned(file: Path) -> Config | None:
    """What `sordino plan` does: the file has a forecast, or the reason why not is one sentence."""
    said, config = "", None
    try:
        with in_time(SECONDS):
            config = load_config(file)
            found = forecast(config)
            json.dumps(json_safe(found), allow_nan=False)
            forecast_text(found)
    except UserError as error:
        said = str(error)
    assert len(said) < 4 * LONGEST
    return None if said else config


def ran(file: Path, out: Path) -> None:
    """`sordino run` ends well, or with one sentence and the code that says whose mistake it was."""
    with in_time(TRAINING):
        said = sordino("run", file, "--out", out)
    assert said.code in (0, 1, 2)
    assert said.err.count("\n") == (said.code > 0)


def test_every_base_is_sound(tmp_path: Path) -> None:
    for name, text in BASES.items():
        (tmp_path / "a.toml").write_text(text)
        assert planned(tmp_path / "a.toml"), name


@settings(suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**64))
def test_any_configuration_gets_an_answer_or_one_sentence(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    coins = Random(seed)
    text, folder = mutants.mutated(BASES[coins.choice(sorted(BASES))], coins), tmp_path_factory.mktemp("any")
    (folder / "a.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    note(text)
    config = planned(folder / "a.toml")
    if config is not None and _small(config.plan) and coins.random() < RUNS:
        ran(folder / "a.toml", folder / "run")


def _small(plan: Plan) -> bool:
    """A run of moments."""
    work = (getattr(plan.local, "epochs", None) or 1) * (getattr(plan.local, "steps", None) or 1)
    return plan.rounds <= 10 and plan.clients.population <= 1000 and work <= 100
