"""Shared by all tests: one thread per process, coins of their own, and a visible skip where real data is absent."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("suite", max_examples=500, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=10_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
if "SORDINO_DATA" not in os.environ and _BESIDE.is_dir():
    os.environ["SORDINO_DATA"] = str(_BESIDE)


def _coins_of(name: str) -> None:
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _own_coins(request: pytest.FixtureRequest) -> None:
    """What ran before a test, or in which process, changes nothing of what it draws (but for `Secure`'s coins)."""
    _coins_of(request.node.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """The same for what tests share."""
    if fixturedef.argname != "_own_coins":
        _coins_of(f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets; the test is skipped, visibly, where it is absent."""
    folder = os.environ.get("SORDINO_DATA", "")
    if not Path(folder).is_dir() or not folder:
        pytest.skip("SORDINO_DATA does not name a folder of real data")
    return Path(folder)
