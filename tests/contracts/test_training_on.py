"""Promise: a run that begins with the weights of an earlier run says so, and what both cost together.

On 45ab98c `Task.of(result.model)` on the same data certified the same epsilon again, without a word of the first.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file
from tests.dpsgd import loops
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino as so
from sordino.accounting import accountant
from sordino.certificate.certificate_file import schema
from sordino.dpsgd import account
from sordino.errors import CertificateError, DataError
from sordino.parts.strategies import Banded
from sordino.runs.folder import RunFolder

DELTA = 1e-3
Result = so.Result


def records(seed: int = 0) -> tuple[Tensor, Tensor]:
    coins = torch.Generator().manual_seed(seed)
    return torch.randn(80, 3, generator=coins), torch.randint(2, (80,), generator=coins)


def task(model: nn.Module | None = None, seed: int = 0, **settings: Any) -> so.Task:
    x, y = records(seed)
    torch.manual_seed(0)
    return so.Task.of(model or nn.Linear(3, 2), [(x[i : i + 4], y[i : i + 4]) for i in range(0, 80, 4)], **settings)


def plan(rounds: int = 3, clients: so.parts.Sampler | None = None) -> so.Plan:
    return so.recipes.dp_fed_avg(
        clients=clients or so.Poisson(20, 0.5),
        rounds=rounds,
        epochs=1,
        batch=4,
        lr=0.1,
        clip_norm=1.0,
        noise_multiplier=1.5,
    )


def trained(model: nn.Module | None = None, rounds: int = 3, **settings: Any) -> Result:
    return so.train(plan(rounds), task(model), delta=DELTA, **settings)


def composed(*certificates: dict[str, Any]) -> float:
    """Of the events that certificates name, by the accountant."""
    from sordino.accounting.events import Event
    from sordino.codec import read

    entries = [
        (read(Event, one["event"], "event"), one["count"])
        for made in certificates
        for one in made["adversaries"][0]["events"]
    ]
    return accountant.epsilon(entries, certificates[0]["relation"], DELTA).value


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(out=tmp_path_factory.mktemp("first") / "run")


def check_says_both(result: Result, first: Result) -> None:
    said = result.certificate["earlier"]
    (before,) = said["runs"]
    assert before["run"] == first.certificate["run"]["id"]
    assert (before["epsilon"], before["same_data"]) == (first.certificate["epsilon"], True)
    assert said["together"]["with"] == [before["run"]]
    assert said["together"]["epsilon"] == pytest.approx(composed(first.certificate, result.certificate), rel=1e-5)
    assert said["together"]["epsilon"] > 1.2 * result.certificate["epsilon"]
    assert "Together with the run" in result.explain()
    assert before["run"] in result.explain()


def through_a_state_dict(model: nn.Module) -> nn.Module:
    file, fresh = io.BytesIO(), nn.Linear(3, 2)
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


def in_a_larger_model(model: nn.Module) -> nn.Module:
    larger = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    larger[0].load_state_dict(model.state_dict())
    return larger


def changed_by_hand(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    return copied


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "state_dict": through_a_state_dict,
    "part of a larger model": in_a_larger_model,
    "changed by hand": changed_by_hand,
    "wrapped": lambda model: nn.Sequential(nn.Identity(), model),
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_a_run_are_known_again(first: Result, way: str) -> None:
    check_says_both(trained(WAYS[way](first.model)), first)


def test_state_dict_shows_nothing_new(first: Result) -> None:
    assert set(first.model.state_dict()) == set(nn.Linear(3, 2).state_dict())


def test_a_folder_says_it_too_and_certifies(first: Result, tmp_path: Path) -> None:
    second = trained(first.model, out=tmp_path / "second")
    check_says_both(second, first)
    assert RunFolder.open(tmp_path / "second").certify() == second.certificate
    jsonschema.Draft202012Validator(schema()).validate(second.certificate)
    header = tmp_path / "second" / "run.json"
    table = json.loads(header.read_bytes())
    del table["earlier_runs"]
    header.write_bytes(json.dumps(table, indent=2).encode() + b"\n")
    with pytest.raises(CertificateError):
        RunFolder.open(tmp_path / "second").certify()


def test_a_run_in_memory_is_saved_with_it(first: Result, tmp_path: Path) -> None:
    second = trained(first.model)
    stored = RunFolder.open(second.save(tmp_path / "second")).certify()
    assert stored["earlier"] == second.certificate["earlier"]


def test_three_generations_are_composed(first: Result) -> None:
    second = trained(first.model, rounds=2)
    third = trained(second.model, rounds=1)
    said = third.certificate["earlier"]
    assert [one["same_data"] for one in said["runs"]] == [True, True]
    all_three = composed(first.certificate, second.certificate, third.certificate)
    assert said["together"]["epsilon"] == pytest.approx(all_three, rel=1e-5)


def test_new_weights_and_the_same_seed_come_from_no_run(first: Result) -> None:
    assert first.certificate["earlier"] is None
    assert trained().certificate["earlier"] is None


def test_other_data_are_not_said_to_be_the_same(first: Result) -> None:
    other = so.train(plan(), task(first.model, seed=1), delta=DELTA)
    said = other.certificate["earlier"]
    assert said["runs"][0]["same_data"] is False
    assert said["together"]["epsilon"] > other.certificate["epsilon"]
    assert "a client that is in all" in other.explain()


def test_epsilons_of_different_relations_are_not_added(first: Result) -> None:
    other = so.train(plan(clients=so.Everyone(20)), task(first.model), delta=DELTA)
    assert other.certificate["relation"] != first.certificate["relation"]
    assert other.certificate["earlier"]["together"] is None
    assert "are not added: both hold" in other.explain()


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_file_in_its_folder_names_the_run_exactly(first: Result) -> None:
    assert first.path is not None
    check_says_both(so.train(plan(), task(init=first.path / "model.safetensors"), delta=DELTA), first)


OTHER_PROCESS = """
import json, sys
from tests.contracts.test_training_on import DELTA, plan, task
import sordino as so
print(json.dumps([so.train(plan(), task(init=file), delta=DELTA).certificate["earlier"] for file in sys.argv[1:]]))
"""


def test_another_process_knows_it_by_the_file(first: Result, tmp_path: Path) -> None:
    """From its folder with the data's key exactly; from the file alone as planned."""
    assert first.path is not None
    alone = shutil.copy(first.path / "model.safetensors", tmp_path / "weights.safetensors")
    asked = [sys.executable, "-c", OTHER_PROCESS, str(alone), str(first.path / "model.safetensors")]
    found = subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    said = json.loads(found.stdout or found.stderr)
    (planned,), (exact,) = (one["runs"] for one in said)
    assert (exact["run"], exact["same_data"]) == (first.certificate["run"]["id"], True)
    assert planned["run"] == f"plan {first.certificate['plan_sha256'][:16]}"
    assert (planned["epsilon"], planned["same_data"]) == (first.certificate["epsilon"], False)
    assert said[0]["together"]["epsilon"] == said[1]["together"]["epsilon"] > 1.2 * exact["epsilon"]


def test_equal_runs_leave_equal_files_with_nothing_secret_in_them(first: Result, tmp_path: Path) -> None:
    assert first.path is not None
    again = trained(out=tmp_path / "again")
    files = [(folder / "model.safetensors").read_bytes() for folder in (first.path, tmp_path / "again")]
    assert files[0] == files[1]
    key = json.loads((first.path / "checkpoint" / "data.json").read_bytes())["key"]
    assert key.encode() not in files[0]
    assert first.certificate["model_sha256"] == again.certificate["model_sha256"]
    assert load_file(first.path / "model.safetensors").keys() == first.model.state_dict().keys()


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"runs": 3}', '{"runs": [{"run": 1}]}', "{" * 5])
def test_a_spoilt_note_is_one_sentence(first: Result, tmp_path: Path, note: str) -> None:
    from safetensors.torch import save_file

    save_file(dict(first.model.state_dict()), tmp_path / "w.safetensors", metadata={"sordino_runs": note})
    with pytest.raises(DataError, match="metadata on earlier runs"):
        task(init=tmp_path / "w.safetensors")


# ---- loops ----------------------------------------------------------------------------------------------------------


def private_loop(model: nn.Module, seed: int = 0, **settings: Any) -> loops.Parts:
    parts = loops.private(model, TensorDataset(*records(seed)), batch=16, delta=DELTA, **{"epochs": 2, **settings})
    loops.train(parts, epochs=2)
    return parts


@pytest.mark.parametrize("way", ["itself", "deepcopy", "state_dict"])
def test_a_loop_after_a_loop_says_both(way: str) -> None:
    one = private_loop(nn.Linear(3, 2))
    before = one[1].certificate()
    model = WAYS[way](one[1].detach() if way == "itself" else one[0])
    other = private_loop(model)[1].certificate()
    assert before["earlier"] is None
    assert [run["same_data"] for run in other["earlier"]["runs"]] == [True]
    assert other["earlier"]["together"]["epsilon"] == pytest.approx(composed(before, other), rel=1e-5)


def test_steps_beyond_the_plan_are_in_what_a_loop_has_cost() -> None:
    one = private_loop(nn.Linear(3, 2))
    copied = copy.deepcopy(one[0])  # before them
    loops.train(one, epochs=3)
    other = private_loop(copied)[1].certificate()
    assert other["earlier"]["together"]["epsilon"] == pytest.approx(composed(one[1].certificate(), other), rel=1e-5)


def test_a_loop_that_took_no_step_cost_nothing() -> None:
    parts = loops.private(nn.Linear(3, 2), TensorDataset(*records()), batch=16)
    assert private_loop(parts[1].detach())[1].certificate()["earlier"] is None


def test_a_loop_after_a_run_and_a_run_after_a_loop_name_both(first: Result, tmp_path: Path) -> None:
    parts = private_loop(copy.deepcopy(first.model))
    made = parts[1].save_certificate(tmp_path / "loop.json")
    assert account.certify(tmp_path / "loop.json").certificate == made
    assert made["earlier"]["together"] is None  # one record, and one client
    assert made["earlier"]["runs"][0]["same_data"] is True
    after = trained(parts[1].detach()).certificate["earlier"]
    assert {run["unit"] for run in after["runs"]} == {"client", "record"}
    assert after["together"]["with"] == [first.certificate["run"]["id"]]


@pytest.mark.parametrize("strategy", [None, Banded(5)])
def test_a_checkpoint_keeps_the_runs_before_it(strategy: so.parts.Strategy | None) -> None:
    one = private_loop(nn.Linear(3, 2))
    two = private_loop(one[1].detach(), strategy=strategy)
    state, data = two[1].state_dict(), TensorDataset(*records())
    three = loops.private(nn.Linear(3, 2), data, batch=16, delta=DELTA, epochs=2, strategy=strategy)
    three[1].load_state_dict(state)
    assert three[1].certificate()["earlier"] == two[1].certificate()["earlier"] is not None


def test_a_loop_that_goes_on_is_not_its_own_earlier_run() -> None:
    one = private_loop(nn.Linear(3, 2), epochs=4)
    state, model = one[1].state_dict(), one[1].detach()
    parts = loops.private(model, TensorDataset(*records()), batch=16, delta=DELTA, epochs=4)
    parts[1].load_state_dict(state)
    assert parts[1].certificate()["earlier"] is None
