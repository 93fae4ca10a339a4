"""Private loops where people already are: torch.compile, accumulated gradients, the Trainer, accelerate."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import backward, data, first_batch, mlp, private, train, weights
from tests.hugging import built, records, rows, transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import sordino as so
from sordino.dpsgd import account, make_private
from sordino.dpsgd.integrations import PrivateTrainer
from sordino.errors import BudgetError, ConfigError, PlanError

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What an example leaves, run as a script."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, str(folder / "out")])
    return runpy.run_path(str(EXAMPLES / name))


@pytest.mark.parametrize("settings", [{}, {"strategy": so.parts.Banded(3)}], ids=["poisson", "correlated"])
def test_get_epsilon_is_the_epsilon_of_the_certificate(settings: dict[str, Any]) -> None:
    parts = private(**settings)
    optimizer = parts[1]
    assert optimizer.get_epsilon() == optimizer.certificate()["epsilon"]
    train(parts)
    assert optimizer.get_epsilon() == optimizer.certificate()["epsilon"]
    assert optimizer.get_epsilon(1e-6) > optimizer.get_epsilon(1e-3)
    with pytest.raises(ConfigError, match="delta"):
        optimizer.get_epsilon(1.5)


def test_get_epsilon_grows_with_steps_beyond_the_plan() -> None:
    parts = private()
    planned = parts[1].get_epsilon()
    train(parts, epochs=2)
    assert parts[1].get_epsilon() == parts[1].certificate()["epsilon"] > planned


def test_accumulated_gradients_are_refused_with_the_fix() -> None:
    parts = private()
    batches = iter(parts[2])
    backward(parts, *next(batches))
    with pytest.raises(PlanError, match=r"gradients accumulated.*max_physical_batch_size"):
        next(batches)
    assert parts[1].steps == 0
    x, y = first_batch(parts)
    backward(parts, x, y)
    backward(parts, x, y)
    with pytest.raises(PlanError, match=r"2 backward passes.*max_physical_batch_size"):
        parts[1].step()


def test_the_fix_for_accumulated_gradients_takes_the_same_steps() -> None:
    whole, pieces = private(), private(max_physical_batch_size=4)
    train(whole)
    train(pieces)
    torch.testing.assert_close(weights(whole[0]), weights(pieces[0]))
    assert whole[1].steps == pieces[1].steps


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile itself
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled_after_make_private_trains_the_same(in_place: bool) -> None:
    plain, parts = private(), private()
    compiled: Any = parts[0]
    if in_place:
        compiled.compile(backend="aot_eager")
    else:
        compiled = torch.compile(compiled, backend="aot_eager")
    train(plain)
    train((compiled, *parts[1:]), torch.compile(F.cross_entropy, backend="aot_eager"))
    assert torch.equal(weights(plain[0]), weights(parts[0]))
    assert parts[1].certificate()["own_code"] == plain[1].certificate()["own_code"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_the_fix_for_a_model_that_is_compiled_before_make_private_is_true() -> None:
    inner = nn.Sequential(nn.Linear(4, 3))
    compiled: Any = torch.compile(inner, backend="aot_eager")
    with pytest.raises(PlanError, match=r"compiled\._orig_mod"):
        private(compiled)
    parts = private(compiled._orig_mod)
    train((compiled, *parts[1:]))
    assert parts[1].steps == 5
    whole: Any = torch.compile(parts[1].detach(), backend="aot_eager")
    assert whole(torch.zeros(2, 4)).shape == (2, 3)


def trainer(folder: Path, name: str = "bert", settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A Trainer of three epochs of three steps on 30 records."""
    arguments = {"num_train_epochs": 3, "per_device_train_batch_size": 10, "learning_rate": 1e-2, **arguments}
    fixed = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "epoch", "logging_steps": 1}
    args = transformers.TrainingArguments(output_dir=str(folder), **{**fixed, **arguments})
    chosen = {"epsilon": 3.0, **(settings or {})}
    held: Any = rows(records(name))
    return PrivateTrainer(built(name), args, train_dataset=held, eval_dataset=held, private=chosen)


class StopAt(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step == self.step


@pytest.mark.parametrize("name", ["bert", "gpt2", "bert with lora"])
def test_a_trainer_takes_private_steps_and_leaves_a_certificate(name: str, tmp_path: Path) -> None:
    own = trainer(tmp_path, name)
    before = weights(own.model).clone()
    own.train()
    assert own.private.steps == own.state.global_step == 9
    assert not torch.equal(before, weights(own.model))
    checked = account.certify(tmp_path / "certificate.json").certificate
    assert checked["epsilon"] == own.private.get_epsilon() <= 3.0
    assert checked["own_code"]["grade"] == "by construction"
    assert own.evaluate()["eval_loss"] > 0


def test_a_step_of_a_trainer_is_that_of_a_loop(tmp_path: Path) -> None:
    own = trainer(tmp_path, lr_scheduler_type="constant", optim="sgd")
    own.train()
    model = built("bert")
    loader: Any = DataLoader(rows(records("bert")), batch_size=10)  # type: ignore[arg-type]
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    parts = make_private(model, sgd, loader, epochs=3, epsilon=3.0, loss="cross_entropy")
    for _ in range(3):
        for batch in parts[2]:
            labels = batch.pop("labels")
            parts[1].loss(parts[0](**batch), labels).backward()  # type: ignore[no-untyped-call]
            parts[1].step()
    torch.testing.assert_close(weights(own.model), weights(model), rtol=0, atol=1e-6)


def test_a_trainer_takes_a_batch_in_pieces_as_one_step(tmp_path: Path) -> None:
    whole, pieces = trainer(tmp_path / "whole"), trainer(tmp_path / "pieces", settings={"max_physical_batch_size": 3})
    whole.train()
    pieces.train()
    assert pieces.private.steps == pieces.state.global_step == 9
    torch.testing.assert_close(weights(whole.model), weights(pieces.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stop", [3, 4])
def test_a_trainer_resumes_from_its_own_checkpoint(stop: int, tmp_path: Path) -> None:
    whole, first, second = trainer(tmp_path / "whole"), trainer(tmp_path / "cut"), trainer(tmp_path / "cut")
    whole.train()
    first.add_callback(StopAt(stop))
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{stop}"))
    assert second.private.steps == second.state.global_step == 9
    torch.testing.assert_close(weights(whole.model), weights(second.model))
    assert second.private.certificate()["epsilon"] == whole.private.certificate()["epsilon"]


def test_a_trainer_pays_for_steps_that_it_takes_again_or_refuses_them(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    again = trainer(tmp_path)
    with pytest.raises(BudgetError, match="step 10 would exceed"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_checkpoint_without_the_charged_steps_is_refused(tmp_path: Path) -> None:
    first = trainer(tmp_path, save_only_model=True)
    first.add_callback(StopAt(3))
    first.train()
    with pytest.raises(ConfigError, match=r"3 steps of which 0 were charged.*optimizer\.pt"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.5},
        {"bf16": True},
        {"max_steps": 5},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        {"auto_find_batch_size": True},
        {"num_train_epochs": 1.5},
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments_that_a_private_trainer_cannot_keep_are_refused_by_name(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        trainer(tmp_path, **arguments)


def test_what_a_trainer_stores_of_a_model_to_be_released_holds_no_loss_or_count_of_its_records(tmp_path: Path) -> None:
    own = trainer(tmp_path, settings={"noise": "secure"})
    result = own.train()
    assert "train_loss" not in result.metrics
    assert math.isnan(result.training_loss)
    assert "train_loss" in trainer(tmp_path / "simulated").train().metrics
    state = json.loads((tmp_path / "checkpoint-9" / "trainer_state.json").read_text())
    logged = {name for line in [*state["log_history"], *own.state.log_history] for name in line}
    assert not logged & {"loss", "train_loss", "grad_norm"}
    assert state["total_flos"] == 0
    assert "learning_rate" in logged


def test_a_collator_of_the_users_is_not_taken_for_one_of_transformers(tmp_path: Path) -> None:
    def collate(some: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([one[name] for one in some]) for name in some[0]}

    own = trainer(tmp_path)
    own.data_collator = collate
    own.train()
    assert own.private.certificate()["own_code"]["grade"] == "own code, trusted"


def test_the_example_of_a_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ran("trainer.py", tmp_path, monkeypatch)
    checked = account.certify(tmp_path / "out" / "certificate.json").certificate
    assert checked["epsilon"] == found["certificate"]["epsilon"] <= 4.0
    assert found["trainer"].private.steps == 30


def test_the_example_of_accelerate_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ran("accelerated.py", tmp_path, monkeypatch)
    assert found["certificate"]["epsilon"] <= 2.0
    assert found["private"].steps == 50
    assert found["schedule"].get_last_lr()[0] < 0.5


def accelerator(**settings: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **settings)


def test_prepare_after_make_private_takes_the_same_steps() -> None:
    plain, parts = private(), private()
    train(plain)
    model, optimizer, loader = accelerator().prepare(*parts)
    assert loader is parts[2]
    train((model, optimizer, loader))
    assert torch.equal(weights(plain[0]), weights(parts[0]))
    assert parts[1].certificate()["epsilon"] == plain[1].certificate()["epsilon"]


@pytest.mark.parametrize("prepared", [0, 1])
def test_prepare_before_make_private_is_refused_with_the_order(prepared: int) -> None:
    model = mlp()
    parts: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=12)]
    parts[prepared] = accelerator().prepare(parts[prepared])
    with pytest.raises(ConfigError, match=r"accelerator\.prepare\(\*make_private"):
        make_private(model, *parts, epochs=1, noise_multiplier=1.0)


def test_accumulation_by_accelerate_is_refused_with_the_fix() -> None:
    own = accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = own.prepare(*private())
    batches = iter(loader)
    with own.accumulate(model):
        x, y = next(batches)
        own.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    with pytest.raises(PlanError, match="max_physical_batch_size"):
        next(batches)


def test_mixed_precision_by_accelerate_is_refused_with_the_fix() -> None:
    with pytest.raises(PlanError, match=r'_original_forward.*mixed_precision="no".*torch\.autocast'):
        accelerator(mixed_precision="bf16").prepare(*private())


def test_a_closure_over_a_piece_of_a_batch_is_refused_with_the_fix() -> None:
    """Lightning passes closures, and would end an epoch after as many pieces as an epoch has batches."""
    parts = private(max_physical_batch_size=4)
    before = weights(parts[0]).clone()
    x, y = first_batch(parts)
    with pytest.raises(PlanError, match="leave max_physical_batch_size out"):
        parts[1].step(lambda: backward(parts, x, y))
    assert parts[1].steps == 0
    assert torch.equal(before, weights(parts[0]))


def test_a_closure_runs_once_and_its_step_is_that_of_a_loop() -> None:
    plain, parts, losses = private(), private(), []
    train(plain)
    for x, y in parts[2]:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            loss = F.cross_entropy(parts[0](x), y)
            parts[1].zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses.append(parts[1].step(closure))
    assert torch.equal(weights(plain[0]), weights(parts[0]))
    assert all(loss.isfinite() for loss in losses)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of lightning itself
def test_the_example_of_lightning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: its example did not run")
    found = ran("lightning_loop.py", tmp_path, monkeypatch)
    assert found["optimizer"].steps == 30
    assert found["certificate"]["epsilon"] == found["optimizer"].get_epsilon() <= 2.0
