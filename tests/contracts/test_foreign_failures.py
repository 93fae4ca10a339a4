"""One boundary around code from elsewhere: a part that fails is one sentence, and charged rounds stay charged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import tiny
from tests.commands import lines, sordino, spelt_out
from torch import nn

import sordino as so
from sordino import codec
from sordino.codec import boundary, part
from sordino.data.metrics import Metric
from sordino.errors import PartError
from sordino.parts.encoding import Clip, Step
from sordino.parts.losses import Loss
from sordino.parts.mechanisms import Gaussian

HEAD = """
import os
from dataclasses import dataclass
import numpy as np
import torch
from sordino.accounting.bounds import Bound
from sordino.parts.encoding import Step
from sordino.parts.gradients import Gradient
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.encoding import Postprocess
from sordino.parts.releases import CentralNoise
from sordino.parts.samplers import Poisson
from sordino.parts.server_optimizers import Sgd

def works():
    return os.path.exists(os.environ["SORDINO_TEST_WORKS"])

"""
SAMPLER = ('clients = { kind = "poisson"', 'clients = { kind = "own"')
STEP = ("clip_norm = 1.0 }]", 'clip_norm = 1.0 }, { kind = "own" }]')
SOLVER = ('local = { kind = "local_sgd"', 'local = { kind = "own"')
GRADIENT = ("epochs = 1 }", 'epochs = 1, momentum = 0.1, gradient = { kind = "own" } }')
MECHANISM = ('kind = "gaussian"', 'kind = "own"')
RELEASE = ('kind = "central_noise"', 'kind = "own"')
SERVER = ('server = { kind = "sgd" }', 'server = { kind = "own" }')
POSTPROCESS = ('server = { kind = "sgd" }', 'server = { kind = "sgd" }\npostprocess = [{ kind = "own" }]')
# family, base, method, arguments, what it does when it works; and the change of the file
FAMILIES: dict[str, tuple[str, str, str, tuple[str, str]]] = {
    "Sampler": ("Poisson", "draw(self, t, rng)", "super().draw(t, rng)", SAMPLER),
    "Mechanism": ("Gaussian", "sample(self, size, rng)", "super().sample(size, rng)", MECHANISM),
    "Release": ("CentralNoise", "on_server(self, total, rng)", "super().on_server(total, rng)", RELEASE),
    "LocalSolver": ("LocalSgd", "solve(self, work)", "super().solve(work)", SOLVER),
    "ServerOptimizer": ("Sgd", "step(self, memory, mean, t)", "super().step(memory, mean, t)", SERVER),
    "Gradient": ("Gradient", "at(self, objective, w, batch, anchor)", "objective.gradient(w, batch)", GRADIENT),
    "Postprocess": ("Postprocess", "apply(self, mean, known)", "mean", POSTPROCESS),
    "Step": ("Step", "encode(self, rows, public, slopes=None)", "rows", STEP),
}
MORE = {
    "Step": "    def decode(self, mean, public): return mean\n    def bound(self, before): return before\n"
    "    def decoded_noise_std(self, std, public): return std\n"
}
WRONG = {
    "raises": "raise KeyError('nowhere')",
    "ends the process": "raise SystemExit(0)",
    "None": "return None",
    "a shorter one": "return FOUND[..., :-1] if not isinstance(FOUND, dict) else {}",
    "text": "return 'text'",
}


def parts(family: str, wrong: str) -> tuple[str, tuple[str, str]]:
    """A file with one part, which works until its third call and from then on if a file is there."""
    base, method, right, change = FAMILIES[family]
    body = f"""
@dataclass(frozen=True)
class Own({base}, kind="own"):
    "A part of a test."
    def {method}:
        Own.calls += 1
        found = {right}
        if Own.calls <= 2 or works():
            return found
        {wrong.replace("FOUND", "found")}
{MORE.get(family, "")}
Own.calls = 0
"""
    return HEAD + body, change


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What a test registers is gone after it."""
    families = [family for family in codec.Part.__subclasses__() if family.__module__.startswith("sordino.")]
    before = [(family.members, dict(family.members)) for family in families]
    files = dict(part.FILES)
    yield
    for members, kept in before:
        for name in members.keys() - kept.keys():
            del members[name]
    part.FILES.clear()
    part.FILES.update(files)
    codec.load_plugins.cache_clear()


CASES = [(family, "raises") for family in FAMILIES] + [
    (family, wrong) for family in ("Mechanism", "Sampler") for wrong in ("ends the process", "None", "text")
]
CASES += [(family, "None") for family in FAMILIES if family not in ("Mechanism", "Sampler")]
CASES += [
    ("Mechanism", "a shorter one"),
    ("Step", "a shorter one"),
    ("Release", "a shorter one"),
    ("ServerOptimizer", "ends the process"),
]


@pytest.mark.parametrize(("family", "wrong"), CASES, ids=[f"{family} {wrong}" for family, wrong in CASES])
def test_a_part_that_fails_in_a_run_is_one_sentence_and_the_folder_goes_on(
    family: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, change = parts(family, WRONG[wrong])
    own, out, well = tmp_path / "my_parts.py", tmp_path / "a", tmp_path / "well"
    own.write_text(text)
    monkeypatch.setenv("SORDINO_TEST_WORKS", str(well))
    file = spelt_out(tmp_path, change)
    said = sordino("run", file, "--out", out, "--with", own)
    assert (said.code, said.err.count("\n")) == (2, 1), said.err
    method = FAMILIES[family][1].partition("(")[0]
    words = (f"part 'own' ({family} of my_parts.py)", f"whose {method} ", "charged rounds stay charged")
    assert [word for word in words if word not in said.err] == [], said.err
    charged = lines(out / "charges.jsonl")
    well.touch()
    assert sordino("run", file, "--out", out, "--with", own, "--resume").code == 0
    assert lines(out / "charges.jsonl")[: len(charged)] == charged
    assert sordino("certify", out, "--with", own).code == 0
    counts = json.loads((out / "certificate.json").read_text())["counts"]
    assert counts["rounds_charged"] == len(lines(out / "charges.jsonl"))


def made(base: type, name: str, method: Any, family_kind: str = "own of a test") -> Any:
    return type("Own", (base,), {name: method, "__module__": "elsewhere"}, kind=family_kind)


def test_noise_of_one_number_is_not_spread_over_all_coordinates() -> None:
    """total + one number is a sum of the right shape: without a look at the draw it would pass, and protect nothing."""
    own = made(Gaussian, "sample", lambda self, size, rng: rng.standard_normal(1))
    with pytest.raises(PartError, match=r"returned ndarray of \(1,\) float64; needed a numpy array of shape \(67,\)"):
        so.train(tiny.plan(release=so.parts.CentralNoise(own(1.0))), tiny.task())


@pytest.mark.parametrize(
    "value",
    [lambda size: [0.0] * size, lambda size: np.full(size, np.nan), lambda size: np.zeros(size, dtype=np.float32)],
    ids=["a list", "NaN", "float32"],
)
def test_noise_of_another_kind_stops_the_run(value: Any) -> None:
    own = made(Gaussian, "sample", lambda self, size, rng: value(size))
    with pytest.raises(PartError, match="finite float64"):
        so.train(tiny.plan(release=so.parts.CentralNoise(own(1.0))), tiny.task())


def test_the_sentence_says_nothing_of_what_was_returned() -> None:
    own = made(Clip, "encode", lambda self, rows, public, slopes=None: rows[:, :3])
    with pytest.raises(PartError) as caught:
        so.train(tiny.plan(encode=(own(1.0),)), tiny.task())
    assert re.search(r"returned Tensor of \(\d+, 3\) torch.float32", str(caught.value))
    assert "tensor(" not in str(caught.value)


def test_what_a_part_raised_is_the_cause_and_keeps_its_type_on_the_way() -> None:
    def fails(self: Any, rows: Any, public: Any, slopes: Any = None) -> Any:
        raise ZeroDivisionError("by nothing")

    own = made(Clip, "encode", fails)(1.0)
    with pytest.raises(ZeroDivisionError) as raw:
        own.encode(tiny.noise(2, 3), None)
    assert any("raised in encode of part 'own of a test' (Step of elsewhere)" in note for note in raw.value.__notes__)
    with pytest.raises(PartError, match="whose encode raised ZeroDivisionError: by nothing") as caught:
        so.train(tiny.plan(encode=(own,)), tiny.task())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_callback_that_raises_keeps_its_error_and_the_folder_goes_on(tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(line: dict[str, Any]) -> None:
        raise EnoughError

    plan, task = tiny.plan(), tiny.task()
    with pytest.raises(EnoughError):
        so.train(plan, task, out=tmp_path / "a", on_round=stop)
    done = so.train(plan, task, out=tmp_path / "a", resume=True)
    assert done.certificate["counts"]["rounds_charged"] == plan.rounds


def test_a_callback_that_ends_the_process_does_not_end_it_as_if_all_were_well() -> None:
    def leave(line: dict[str, Any]) -> None:
        raise SystemExit(0)

    with pytest.raises(PartError, match="ended the process"):
        so.train(tiny.plan(), tiny.task(), on_round=leave)


@pytest.mark.parametrize(
    "error", [KeyError("nowhere"), RuntimeError("by nothing"), SystemExit(0)], ids=lambda e: type(e).__name__
)
def test_a_loss_that_fails_is_named(error: BaseException) -> None:
    def value(self: Any, outputs: Any, targets: Any) -> Any:
        calls.append(1)
        if len(calls) > 30:
            raise error
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    calls: list[int] = []
    own = made(Loss, "value", value)
    with pytest.raises(PartError, match=r"Loss of elsewhere.*, whose value raised"):
        so.train(tiny.plan(rounds=40), so.Task.of(tiny.mlp(), tiny.clients(), loss=own(), own_code="trusted"))


def test_a_metric_that_returns_nothing_is_named_before_anything_is_charged() -> None:
    own, (x, y) = made(Metric, "values", lambda self, seen: None), tiny.clients()[0]
    with pytest.raises(PartError, match=r"Metric of elsewhere.*returned None; needed a dict of numbers"):
        so.train(tiny.plan(), so.Task.of(tiny.mlp(), tiny.clients(), test=(x, y)), metrics=[own()])


def test_parts_of_ours_are_not_wrapped() -> None:
    members = [member for family in codec.Part.__subclasses__() for member in family.members.values()]
    ours = [member for member in members if member.__module__.startswith("sordino.")]
    assert len(ours) > 60
    for member in ours:
        for found in vars(member).values():
            function = found.fget if isinstance(found, property) else found
            assert not hasattr(function, boundary._WRAPPED)


def test_a_class_that_is_made_again_by_slots_is_wrapped_once() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True, slots=True)
    class Slotted(Step, kind="slotted of a test"):
        def encode(self, rows: Any, public: Any, slopes: Any = None) -> Any:
            return None

        def decode(self, mean: Any, public: Any) -> Any:
            return mean

        def bound(self, before: Any) -> Any:
            return before

        def decoded_noise_std(self, std: Any, public: Any) -> Any:
            return std

    with pytest.raises(PartError, match="slotted of a test"):
        Slotted().encode(tiny.noise(2, 3), None)
    assert not hasattr(Slotted.encode.__wrapped__, boundary._WRAPPED)  # type: ignore[attr-defined]
