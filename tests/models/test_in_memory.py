"""A task made in Python has what a file's has: folder, resume, certificate, audit; another one is not gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tests.commands import lines, sordino
from tests.tiny import clients, mlp, plan, seeded
from torch import Tensor, nn

import sordino as so
from sordino.certificate.certificate_file import schema
from sordino.data import datasets
from sordino.errors import ConfigError, DataError
from sordino.outcome import DIAGNOSTIC
from sordino.runs import rounds
from sordino.runs.folder import keep_audit
from sordino.task import Task

TEST = clients((20,))[0]


class Mine(nn.Module):
    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def task(model: nn.Module | None = None, data: list[Any] | None = None, **more: Any) -> Task:
    return Task.of(model or seeded(Mine()), data or clients(), test=TEST, **more)


def train(out: Path | None, one: Task | None = None, **more: Any) -> so.Result:
    return so.train(plan(rounds=4), one or task(), allow_large_delta=True, out=out, **more)


def test_a_folder_and_memory_give_the_same_model_and_guarantee(tmp_path: Path) -> None:
    memory, folder = train(None), train(tmp_path / "run")
    different = ("config_sha256", "run", "assumptions")
    one, other = ({k: v for k, v in r.certificate.items() if k not in different} for r in (memory, folder))
    assert one == other
    assert set(memory.certificate["assumptions"]) - set(folder.certificate["assumptions"]) == {
        "the rounds were counted in memory by the process that ran them: no file proves that there were no others"
    }
    assert [line["loss"] for line in memory.history] == [line["loss"] for line in folder.history]
    assert memory.explain() != ""
    assert isinstance(folder.model, Mine)


def test_commands_read_the_folder_and_say_where_the_data_are(tmp_path: Path) -> None:
    made = train(tmp_path / "run").certificate
    jsonschema.validate(made, schema())
    assert made["given"]["model"] == "Mine"
    assert {"package": "tests", "version": "", "family": "Module", "kind": "Mine"} in made["foreign_parts"]
    assert sordino("certify", tmp_path / "run").code == 0
    assert "Mine" in sordino("explain", tmp_path / "run").out
    assert sordino("plan", tmp_path / "run" / "plan.toml").code == 0
    assert "passed in Python" in sordino("audit", tmp_path / "run").sentence
    assert "passed in Python" in sordino("run", tmp_path / "run" / "plan.toml", "--out", tmp_path / "x").sentence


def test_a_killed_run_goes_on_to_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, keep = train(None), rounds.keep_round

    def kill(book: Any, done: Any, *more: Any) -> Any:
        if done.t == 2:
            raise KeyboardInterrupt
        return keep(book, done, *more)

    monkeypatch.setattr(rounds, "keep_round", kill)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    monkeypatch.setattr(rounds, "keep_round", keep)
    again = train(tmp_path / "run", resume=True)
    assert again.certificate["model_sha256"] == whole.certificate["model_sha256"]
    assert again.certificate["counts"]["rounds_accounted"] == 5  # what ran again is a new release
    assert train(tmp_path / "run", resume=True).certificate == again.certificate
    with pytest.raises(ConfigError, match="which exists"):
        train(tmp_path / "run")


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: task(seeded(Mine(7))), "the module's parameters"),
        (lambda: task(mlp()), "the module's class"),
        (lambda: task(loss=own_loss), "the loss"),
        (lambda: task(metrics={"mine": lambda out, y: 1.0}), "the metrics"),
        (lambda: task(data=clients((5, 3, 0, 1, 7, 4), classes=2)), "the clients' records"),
        (lambda: Task.of(seeded(Mine()), clients()), "the test records"),
    ],
    ids=["layout", "class", "loss", "metrics", "data", "test"],
)
def test_another_task_is_not_gone_on_with(other: Any, what: str, tmp_path: Path) -> None:
    train(tmp_path / "run")
    before = (tmp_path / "run" / "charges.jsonl").read_bytes()
    with pytest.raises(DataError, match=what):
        train(tmp_path / "run", other(), resume=True)
    assert (tmp_path / "run" / "charges.jsonl").read_bytes() == before


def renamed(loss: Any) -> Any:
    """Every function of a script may be called <lambda>."""
    loss.__qualname__ = "<lambda>"
    return loss


class Turned(Mine):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def test_a_function_or_a_module_of_the_same_name_is_known_by_what_it_says(tmp_path: Path) -> None:
    train(tmp_path / "loss", task(loss=renamed(own_loss)))
    train(tmp_path / "loss", task(seeded(Mine(), 5), loss=renamed(own_loss)), resume=True)  # other first weights
    with pytest.raises(DataError, match="the outputs of module and loss on synthetic records"):
        train(tmp_path / "loss", task(loss=renamed(lambda out, y: out.square().sum(1))), resume=True)
    train(tmp_path / "module", task())
    Turned.__name__ = Turned.__qualname__ = "Mine"
    with pytest.raises(DataError, match="the outputs of module and loss on synthetic records"):
        train(tmp_path / "module", task(seeded(Turned())), resume=True)


def test_what_is_saved_certifies_and_holds_nothing_private(tmp_path: Path) -> None:
    for name, result in (("memory", train(None, noise="secure")), ("folder", train(tmp_path / "run", noise="secure"))):
        if name == "folder":
            keep_audit(tmp_path / "run", "membership", result.audit())  # an attack with the private records
        out = result.save(tmp_path / name)
        assert not (out / "checkpoint").exists()
        assert not (out / "audit.json").exists()
        assert sordino("certify", out).code == 0
        assert all(DIAGNOSTIC not in line for line in lines(out / "history.jsonl"))
        stored = json.loads((out / "certificate.json").read_text())
        assert stored["epsilon"] == result.certificate["epsilon"]
        assert stored["model_sha256"] == result.certificate["model_sha256"]
        with pytest.raises(ConfigError, match="which exists"):
            result.save(out)


def test_the_result_is_audited_with_its_own_task(tmp_path: Path) -> None:
    found = train(tmp_path / "run").audit()["membership"]
    assert (found["members"], found["strangers"]) == (20, 20)


def test_a_metric_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metric 'bad' that fails"):
        train(tmp_path / "run", metrics={"bad": lambda out, y: 1 / 0})
    assert not (tmp_path / "run").exists()


# ---- by name, in a file ----------------------------------------------------------------------------------------------

NETS = """
import torch, sordino as so

@so.add_model("net_of_mine")
def net(shape, outputs, width: int = 8, odd: bool = False):
    side = torch.Size(shape).numel() + odd
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(side, width), torch.nn.Linear(width, outputs))

@so.add_model("no_net")
def no_net(shape, outputs):
    return 3

@so.add_model("normed")
def normed(shape, outputs):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, outputs))

class Branching(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.fc = torch.nn.Linear(64, outputs)

    def forward(self, x):
        return self.fc(x.flatten(1) if x.sum() > 0 else -x.flatten(1))

@so.add_model("branching")
def branching(shape, outputs):
    return Branching(outputs)

@so.add_loss("loss_of_mine")
def loss(out, y):
    return torch.nn.functional.cross_entropy(out, y, reduction="none")
"""
FILE = """
[task]
dataset = "digits"
partition = { kind = "iid", clients = 60 }
model = MODEL
loss = { kind = "own", name = "loss_of_mine" }

[recipe]
name = "dp_fed_avg"
rounds = 2
clients = { kind = "poisson", population = 60, rate = 0.5 }
lr = 0.5
clip_norm = 1.0
noise_multiplier = 2.0
"""


def written(folder: Path, model: str) -> tuple[Path, Path]:
    (folder / "fed.toml").write_text(FILE.replace("MODEL", model))
    (folder / "nets_of_mine.py").write_text(NETS)
    return folder / "fed.toml", folder / "nets_of_mine.py"


def test_a_model_by_name_runs_and_is_named_as_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, nets = written(tmp_path, '{ kind = "own", name = "net_of_mine", options = { width = 5 } }')
    done = sordino("run", file, "--out", tmp_path / "run", "--with", nets, "--json").json
    named = {(part["package"], part["kind"]) for part in done["certificate"]["foreign_parts"]}
    assert named == {("nets_of_mine.py", "net_of_mine"), ("nets_of_mine.py", "loss_of_mine")}
    assert sordino("certify", tmp_path / "run", "--with", nets).code == 0
    assert sordino("audit", tmp_path / "run", "--with", nets).code == 0
    monkeypatch.setattr("sordino.codec.serialization._FUNCTIONS", {})
    said = sordino("explain", tmp_path / "run").sentence
    assert "of kind own, which is not loaded" in said
    assert "pass its file: --with" in said


def test_the_grade_of_own_code_is_said_by_every_command(tmp_path: Path) -> None:
    """`plan` before any data is read, the certificate, `explain` and the report."""
    cases = [("net_of_mine", "", "by construction"), ("branching", '\nown_code = "trusted"', "own code, trusted")]
    for name, word, grade in cases:
        folder = tmp_path / name
        folder.mkdir()
        file, nets = written(folder, f'{{ kind = "own", name = "{name}" }}{word}')
        page = sordino("plan", file, "--with", nets).out
        assert f"code that runs on private records\n  {grade}: " in page
        made = sordino("run", file, "--out", folder / "run", "--with", nets, "--json").json["certificate"]
        assert made["own_code"]["grade"] == grade
        assert list(made).index("own_code") == 5
        assert sordino("certify", folder / "run", "--with", nets).code == 0
        assert f"model and loss: {grade}." in sordino("explain", folder / "run", "--with", nets).out
        sordino("report", folder / "run", "--out", folder / "page.html", "--with", nets)
        assert f"Code that ran on private records: {grade}." in (folder / "page.html").read_text()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ('{ kind = "own", name = "net_of_min" }', "did you mean 'net_of_mine'?"),
        ('{ kind = "own", name = "net_of_mine", options = { widht = 5 } }', "did you mean 'width'?"),
        ('{ kind = "own", name = "net_of_mine", options = { width = "5" } }', "a whole number"),
        ('{ kind = "own", name = "net_of_mine", options = { odd = true } }', "fails on records of shape [1, 8, 8]"),
        ('{ kind = "own", name = "no_net" }', "torch.nn.Module"),
        ('{ kind = "own", name = "normed" }', "GroupNorm"),
        ('{ kind = "own", name = "branching" }', 'own_code = "trusted"'),
    ],
)
def test_plan_finds_what_a_run_would_refuse(model: str, says: str, tmp_path: Path) -> None:
    file, nets = written(tmp_path, model)
    assert says in sordino("plan", file, "--with", nets).sentence


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "diabetes", "wine"])
def test_what_is_known_of_a_set_without_reading_it_is_true(name: str) -> None:
    data, known = datasets.load(name), datasets.record_of(name)
    assert known == (data.x.shape[1:], data.classes or 0)
