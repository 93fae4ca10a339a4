"""Federated tasks of transformers' models: what is sent is what is trained, a base stays where it is and is named."""

from __future__ import annotations

import copy
import hashlib
import logging
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from tests.hugging import ADAPTED, EVERY, FAMILIES, adapted, bert, built, by_the_model, gpt2, records, rows
from torch import Tensor, nn

import sordino as so
from sordino.data.clients import NamedFieldsModel
from sordino.engines.checks import check_records
from sordino.errors import DataError, PlanError
from sordino.models.nets import InMemoryModel
from sordino.outcome import load_weights, model_bytes
from sordino.parts.record_solvers import BatchGradient
from sordino.runs.writer import Fingerprint
from sordino.task import Task

CLIENTS, EACH = 4, 6


def task_of(name: str, model: nn.Module | None = None, **options: Any) -> so.Task:
    every = rows(records(name, CLIENTS * EACH + 4))
    own = [every[i * EACH : (i + 1) * EACH] for i in range(CLIENTS)]
    return so.Task.of(built(name) if model is None else model, own, test=every[-4:], **options)


def averaged(noise_multiplier: float = 1e-9, rounds: int = 1, lr: float = 0.1) -> so.Plan:
    return so.Plan(
        rounds=rounds, clients=so.Everyone(CLIENTS), local=so.parts.LocalSgd(epochs=1, batch=EACH, lr=lr),
        encode=(so.parts.Clip(10.0),), release=so.parts.CentralNoise(so.parts.Gaussian(noise_multiplier)),
        server=so.parts.Sgd(lr=1.0),
    )  # fmt: skip


def by_hand(name: str, lr: float = 0.1) -> dict[str, Tensor]:
    """One step of every client by transformers' own loss, record by record, and the mean of the steps."""
    model = built(name)
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    moved = {key: torch.zeros_like(p) for key, p in named.items()}
    for row in rows(records(name, CLIENTS * EACH + 4))[: CLIENTS * EACH]:
        loss = by_the_model(model, {field: value[None] for field, value in row.items()})
        slopes = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for key, slope in zip(named, slopes, strict=True):
            moved[key] += 0 if slope is None else slope * lr / (CLIENTS * EACH)
    return {key: p.detach() - moved[key] for key, p in named.items()}


@pytest.mark.parametrize("name", EVERY)
def test_a_round_is_the_mean_of_the_clients_own_steps(name: str) -> None:
    result = so.train(averaged(), task_of(name), delta=0.1)
    assert type(result.model) is type(built(name))
    wanted = by_hand(name)
    for key, parameter in result.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), wanted[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_where_a_record_is_the_unit_each_is_clipped(name: str) -> None:
    """A clip norm far above all norms gives the plain mean: the fast way, and its looks, hold for these models."""
    plan = so.Plan(
        rounds=1, clients=so.Everyone(CLIENTS), release=so.parts.LocalNoise(so.parts.Gaussian(1e-9)),
        server=so.parts.Sgd(lr=0.1),
        local=BatchGradient(so.parts.AllRecords((EACH,) * CLIENTS), clip_norm=100.0),
    )  # fmt: skip
    result, wanted = so.train(plan, task_of(name), delta=0.1), by_hand(name)
    for key, parameter in result.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), wanted[key], rtol=1e-3, atol=1e-5)


def test_records_are_clipped_under_gradient_checkpointing_too() -> None:
    plan = so.Plan(
        rounds=1, clients=so.Everyone(CLIENTS), release=so.parts.LocalNoise(so.parts.Gaussian(1e-9)),
        server=so.parts.Sgd(lr=0.1),
        local=BatchGradient(so.parts.AllRecords((EACH,) * CLIENTS), clip_norm=100.0),
    )  # fmt: skip
    model: Any = built("llama")
    model.gradient_checkpointing_enable()
    result, wanted = so.train(plan, task_of("llama", model), delta=0.1), by_hand("llama")
    for key, parameter in result.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), wanted[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_message_is_the_trained_parameters_each_once_and_no_constant(name: str) -> None:
    task = task_of(name)
    assert task.layout.size == task.layout.trainable == sum(p.numel() for p in task.model.parameters())


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_alone_are_sent_and_stored(name: str, tmp_path: Path) -> None:
    task = task_of(name)
    trained = {key: p.numel() for key, p in task.model.model.named_parameters() if p.requires_grad}  # type: ignore[union-attr]
    assert task.layout.size == sum(trained.values()) < 0.2 * sum(p.numel() for p in task.model.parameters())
    result = so.train(averaged(noise_multiplier=1.0), task, delta=0.1)
    stored = load(model_bytes(result.model))
    assert stored.keys() == trained.keys()
    assert result.certificate["model_sha256"] == hashlib.sha256(model_bytes(result.model)).hexdigest()
    again = task_of(name)
    load_weights(again.model, stored)
    for mine, theirs in zip(again.model.parameters(), result.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    result.model.save_pretrained(tmp_path)  # type: ignore[operator]
    kept = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in kept.values()) == task.layout.size


@pytest.mark.parametrize("name", ADAPTED)
def test_the_base_is_public_by_the_users_word_and_named_by_its_hash(name: str) -> None:
    task, other = task_of(name), built(name)
    (line,) = [one for one in so.train(averaged(), task, delta=0.1).certificate["declared_public"] if "sha256" in one]
    assert line["what"] == "frozen weights"
    fixed = next(p for p in other.parameters() if not p.requires_grad)
    with torch.no_grad():
        fixed[0] += 1e-3
    changed = task_of(name, other)
    (its,) = [one for one in so.train(averaged(), changed, delta=0.1).certificate["declared_public"] if "sha256" in one]
    assert its["sha256"] != line["sha256"]
    print_of = Fingerprint.of(task)
    assert print_of.changed(task) == []
    assert print_of.changed(changed) == ["the frozen weights"]


def test_weights_of_another_model_are_not_loaded() -> None:
    with pytest.raises(DataError, match="do not fit the model at"):
        load_weights(built("bert with lora"), load(model_bytes(built("gpt2 with lora"))))


def test_dropout_is_off_where_a_model_is_judged_and_leaves_records_apart() -> None:
    task = task_of("bert", bert(dropout=0.3))
    vector = task.layout.flatten(task.model)
    assert task.evaluate(vector) == task.evaluate(vector)
    plan = so.Plan(
        rounds=1, clients=so.Everyone(CLIENTS), release=so.parts.LocalNoise(so.parts.Gaussian(1.0)),
        server=so.parts.Sgd(lr=0.1),
        local=BatchGradient(so.parts.AllRecords((EACH,) * CLIENTS), clip_norm=1.0),
    )  # fmt: skip
    check_records(plan, task)
    assert so.train(plan, task, delta=0.1).certificate["unit"] == "record"


class Unread(nn.Module):
    """Adapters beside the forward pass: nothing that is trained is in the answer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.lora_B = inner.requires_grad_(False), nn.Linear(3, 2, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


def test_adapters_that_no_gradient_reaches_are_refused() -> None:
    with pytest.raises(DataError, match="depends on none of its 1 tensors"):
        so.train(averaged(), task_of("bert", Unread(bert())), delta=0.1)


def test_frozen_adapters_are_refused_with_the_fix() -> None:
    model = adapted(bert(), ["query"], inference_mode=True)
    with pytest.raises(DataError, match=r"no trainable parameter.*is_trainable=True"):
        so.train(averaged(), task_of("bert", model), delta=0.1)


def test_tensors_that_get_noise_and_nothing_else_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = bert()
    model.spare = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, "sordino"):
        so.train(averaged(), task_of("bert", model), delta=0.1)
    assert "model.spare.weight" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "sordino"):
        so.train(averaged(), task_of("bert"), delta=0.1)
        so.train(averaged(), task_of("gpt2 with lora"), delta=0.1)
    assert caplog.text == ""


def test_a_run_in_which_nothing_learns_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sordino"):
        so.train(averaged(noise_multiplier=1.0, lr=1e-60), task_of("vit"), delta=0.1)
    assert "noise alone changed the weights" in caplog.text


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"torch\.compile has compiled"):
        task_of("bert", torch.compile(built("bert"), backend="eager"))  # type: ignore[arg-type]


def test_a_mixer_inside_is_refused_where_a_record_is_the_unit() -> None:
    class Centred(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out - out.mean(0)

    model: Any = gpt2()
    model.transformer.h[0].mlp.c_fc = Centred(model.transformer.h[0].mlp.c_fc)
    plan = so.Plan(
        rounds=1, clients=so.Everyone(CLIENTS), release=so.parts.LocalNoise(so.parts.Gaussian(1.0)),
        server=so.parts.Sgd(lr=0.1),
        local=BatchGradient(so.parts.AllRecords((EACH,) * CLIENTS), clip_norm=1.0),
    )  # fmt: skip
    with pytest.raises(PlanError, match="depends on the other records"):
        so.train(plan, task_of("gpt2", model), delta=0.1)


def test_padding_is_no_part_of_a_record() -> None:
    """A longer record elsewhere pads all others: what they say stays as it was."""
    for name in ("bert", "gpt2", "llama"):
        short, long = task_of(name), task_of(name, length=13)
        for task in (short, long):
            task.model.eval()
        with torch.no_grad():
            alone, padded = (task.losses(task.model(task.test.x), task.test.y) for task in (short, long))  # type: ignore[union-attr]
        torch.testing.assert_close(alone, padded)


def test_the_task_keeps_the_users_model_as_it_is() -> None:
    model = built("bert")
    before = copy.deepcopy(model.state_dict())
    task = task_of("bert", model)
    so.train(averaged(noise_multiplier=1.0), task, delta=0.1)
    assert isinstance(task.model, NamedFieldsModel)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_the_example_of_federated_lora_runs_on_a_made_up_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path))
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "dp_lora.py"))["main"]
    (found,) = main("--steps", "2", "--rounds", "1", "--cohort", "5")
    assert found.keys() == {"before", "after", "without noise"}
    assert "unit client; sent: 4608 numbers" in capsys.readouterr().out


def test_no_certificate_tells_how_long_the_longest_record_is() -> None:
    """Padding is to the longest of all records; before, one client's long text changed what the certificate says."""
    short, long = [3, 4, 5], [3, 4, 5, 6, 7]
    told = []
    for texts, length in (([short, short], None), ([short, long], None), ([short, long], 8)):
        silos = [{"input_ids": [text], "labels": [1]} for text in texts]
        told.append(InMemoryModel.of(Task.of(built("bert"), silos, length=length)))
    assert told[0] == told[1]
    assert [one.inputs for one in told] == [(), (), (8,)]
    assert told[2].targets == ()
