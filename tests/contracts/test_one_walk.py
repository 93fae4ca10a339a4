"""Promise: the way from a file to its certificate is short, and nothing on it is done twice.

One Plan is built, and its cost computed once before the run and once after; before the first round a run enters at
most `FUNCTIONS` functions of this package in `FILES` files.
"""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import pkgutil
import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.commands import federation, sordino, spelt_out
from tests.silos import planned

from sordino import codec
from sordino import plan as plans
from sordino.errors import CertificateError
from sordino.plan import Plan
from sordino.runs.folder import RunFolder


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many Plans were built, and how many costs really computed, in this process."""
    found: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            found[name] += 1
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(Plan, "__post_init__", counted("plans", Plan.__post_init__))
    for name in ("client_cost", "record_cost"):
        monkeypatch.setattr(plans, name, counted("costs", getattr(plans, name)))
    return found


DP_SGD = 'name = "dp_sgd"\nrecords = { kind = "poisson_records", batch = 24, sizes = [240] }'
RECORDS = (
    ("clients = 60 }", "clients = 1 }"),
    ('clients = { kind = "poisson", population = 60, rate = 0.5 }\n', ""),
    ('name = "dp_fed_avg"', DP_SGD),
)


@pytest.mark.parametrize("written_as", ["recipe", "plan", "records"])
def test_a_run_builds_one_plan_and_bills_it_once_before_and_once_after(
    tmp_path: Path, counts: Counter[str], written_as: str
) -> None:
    file = spelt_out(tmp_path) if written_as == "plan" else federation(tmp_path, *RECORDS * (written_as == "records"))
    assert sordino("run", file, "--out", tmp_path / "run").code == 0
    assert counts == {"plans": 1, "costs": 2}


def test_make_private_builds_at_most_three_plans_to_solve_for_epsilon(counts: Counter[str]) -> None:
    from tests.dpsgd.loops import private

    optimizer = private(epsilon=2.0, noise_multiplier=None, epochs=3)[1]
    assert counts["plans"] <= 3
    assert optimizer.certificate()["epsilon"] <= 2.0


def test_a_budget_asks_the_same_plan(tmp_path: Path, counts: Counter[str]) -> None:
    shares = ('mechanism = { kind = "gaussian", noise_multiplier = 2.0 }', "noise_multiplier = 2.0, at_least = 1")
    limit = ("[run]", "[privacy]\nclient_epsilon = 9.0\n\n[run]")
    file = spelt_out(tmp_path, ("central_noise", "noise_shares"), shares, limit)
    assert sordino("run", file, "--out", tmp_path / "run").code == 0
    assert counts["plans"] == 1


def test_what_was_written_is_what_runs_or_it_is_read_again(tmp_path: Path) -> None:
    """A folder that knows its configuration believes its own memory only where the file says the same."""
    from sordino.config import load_config

    first, other = load_config(federation(tmp_path)), load_config(federation(tmp_path, ("seed = 3", "seed = 4")))
    assert sordino("run", tmp_path / "fed.toml", "--out", tmp_path / "run").code == 0
    found = RunFolder.open(tmp_path / "run", first).config()
    assert found == other
    assert found is not other
    assert RunFolder.open(tmp_path / "run", other).config() is other
    (tmp_path / "run" / "plan.toml").write_bytes(codec.to_toml(first).encode())
    for known in (None, first, other):
        with pytest.raises(CertificateError, match=r"plan\.toml"):
            RunFolder.open(tmp_path / "run", known).config()


def test_a_plan_has_no_room_for_what_is_set_by_hand() -> None:
    plan = planned()
    for twin in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert twin == plan
        assert twin.forecast == plan.forecast == plan.cost()
    with pytest.raises(AttributeError):
        object.__setattr__(plan, "cost", lambda: None)


def test_every_hop_of_the_walk_is_where_the_page_says() -> None:
    page = (Path(plans.__file__).parents[2] / "docs" / "concepts.md").read_text()
    diagram = page.split("## From the file to the certificate")[1].split("```")[1]
    named = set(re.findall(r"[a-z_]+/(?:[a-z_]+\.py)?|[a-z_]+\.py", diagram))
    assert {"cli/run.py", "config/file.py", "plan.py", "accounting/composition.py", "loop.py", "runs/folder.py"} < named
    assert [name for name in named if not (Path(plans.__file__).parent / name).exists()] == []


FUNCTIONS, FILES = 250, 45
EXAMPLE = Path(plans.__file__).parents[2] / "examples" / "fed.toml"


class FirstRound(BaseException):
    """The first round is about to start."""


def functions_before_the_first_round(file: Path, out: Path) -> Counter[tuple[str, str]]:
    """(file, qualified name) of every function of this package that `sordino run` enters, and how often it does.

    Counted are named functions, methods and properties, each once however often it is called. Not counted: bodies of
    modules and classes (everything is imported before), comprehensions, generator expressions and lambdas, and what
    `dataclass` generates. On commit 45ab98c this gives 449 functions in 84 files.
    """
    root = str(Path(plans.__file__).parent) + os.sep
    for module in pkgutil.walk_packages([root], "sordino."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root):
            return
        if code.co_name == "one_round":
            sys.setprofile(None)
            raise FirstRound
        if not code.co_name.startswith("<"):
            found[code.co_filename.removeprefix(root), code.co_qualname] += 1

    sys.setprofile(note)
    try:
        sordino("run", file, "--out", out)
    except FirstRound:
        return found
    finally:
        sys.setprofile(None)
    raise AssertionError("no round was run")


def test_a_newcomer_reads_few_functions_before_the_first_round(tmp_path: Path) -> None:
    file = tmp_path / "fed.toml"
    file.write_text(re.sub(r"(?m)^rounds = \d+", "rounds = 2", EXAMPLE.read_text()))
    found = functions_before_the_first_round(file, tmp_path / "run")
    assert len(found) <= FUNCTIONS
    assert len({name for name, _ in found}) <= FILES
    checks = {"check", "check_needs", "check_run", "check_prepared"}
    once = [name for name in found if name[1] in checks and found[name] > 1]
    assert once == []
    assert ("runs/execution.py", "resumed") not in found
