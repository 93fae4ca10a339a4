"""Models of transformers in a private loop: every step is the sum over records, each clipped, as a loop gives it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import QUIET, Parts
from tests.hugging import ADAPTED, EVERY, FAMILIES, built, by_the_model, kind_of_loss, lora_bert, records, rows
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from sordino.dpsgd import account, make_private
from sordino.dpsgd.rule_table import rule_of
from sordino.errors import PlanError

CLIP = 0.3
BATCH = 10


def private(name: str, model: nn.Module | None = None, **settings: Any) -> Parts:
    model = built(name) if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = {"epochs": 1, "noise_multiplier": QUIET, "clip_norm": CLIP, "loss": kind_of_loss(name), **settings}
    loader: DataLoader[Any] = DataLoader(rows(records(name)), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    return make_private(model, torch.optim.SGD(trained, lr=0.1), loader, **settings)


def looped(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """sum_j g_j min(1, clip / ||g_j||): each record alone, with the loss that transformers computes of its labels."""
    own = copy.deepcopy(model)
    named = {name: p for name, p in own.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    for j in range(len(batch["labels"])):
        value = by_the_model(own, {field: column[j : j + 1] for field, column in batch.items()})
        slopes = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        known = {n: s.double() for n, s in zip(named, slopes, strict=True) if s is not None}
        norm = float(torch.stack([s.square().sum() for s in known.values()]).sum().sqrt())
        for name, slope in known.items():
            total[name] += slope * min(1.0, CLIP / norm)
    return total


def step(parts: Parts, batch: dict[str, Tensor]) -> None:
    model, optimizer, _ = parts
    inputs = {field: column for field, column in batch.items() if field != "labels"}
    optimizer.loss(model(**inputs), batch["labels"]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@pytest.mark.parametrize("name", EVERY)
def test_a_step_is_the_sum_of_a_loop_over_records(name: str) -> None:
    parts = private(name)
    batch = next(iter(parts[2]))
    wanted = looped(parts[0], batch)
    step(parts, batch)
    moved = {n: p for n, p in parts[0].named_parameters() if p.requires_grad}
    assert moved.keys() == wanted.keys()
    for key, parameter in moved.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), wanted[key] / BATCH, rtol=0, atol=1e-5)
    way = parts[1].recording.graph_pass
    assert way is not None
    assert not way.whole  # by the layers, not one copy per record
    assert parts[1].certificate()["own_code"]["grade"] == "by construction"


@pytest.mark.parametrize("name", ADAPTED)
def test_only_adapters_are_clipped_and_moved_and_the_base_is_named_by_its_hash(name: str, tmp_path: Any) -> None:
    parts = private(name, noise_multiplier=1.0)
    before = {key: tensor.clone() for key, tensor in parts[0].state_dict().items()}
    for batch in parts[2]:
        step(parts, batch)
    trained = {key for key, p in parts[0].named_parameters() if p.requires_grad}
    moved = {key for key, tensor in parts[0].state_dict().items() if not torch.equal(tensor, before[key])}
    assert moved == trained
    (line,) = parts[1].certificate()["declared_public"]
    frozen = sum(p.numel() for p in parts[0].parameters() if not p.requires_grad)
    assert (line["what"], line["rows"], len(line["sha256"])) == ("frozen weights", frozen, 64)
    parts[1].save_certificate(tmp_path / "certificate.json")
    assert account.certify(tmp_path / "certificate.json").certificate["declared_public"] == [line]


@pytest.mark.parametrize("name", FAMILIES)
def test_dropout_keeps_records_apart_by_construction(name: str) -> None:
    torch.manual_seed(5)
    parts = private(name, FAMILIES[name](dropout=0.2).train(), noise_multiplier=1.0)
    for batch in parts[2]:
        step(parts, batch)
    assert parts[1].certificate()["own_code"]["grade"] == "by construction"


class Centred(nn.Module):
    """A head that subtracts the mean over the batch: records mix."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out - out.mean(0)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_mixer_inside_is_still_refused(name: str) -> None:
    model = built(name)
    inside: Any = model
    block = inside.bert.encoder.layer[0].intermediate if name == "bert" else inside.model.layers[0].mlp
    setattr(block, "dense" if name == "bert" else "up_proj", Centred(block.dense if name == "bert" else block.up_proj))
    parts = private(name, model)
    with pytest.raises(PlanError, match="depends on the other records"):
        step(parts, next(iter(parts[2])))


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_labels_inside_the_model_are_refused_with_the_fix(name: str) -> None:
    parts = private(name, loss=None)
    with pytest.raises(PlanError, match=r"labels given to the model.*optimizer\.loss\(model\(\*\*inputs\), labels\)"):
        parts[0](**next(iter(parts[2])))


def test_labels_are_taken_where_nothing_is_trained() -> None:
    parts = private("bert")
    with torch.no_grad():
        assert by_the_model(parts[0], records("bert")).isfinite()


def test_a_mean_over_records_outside_the_model_is_recognised() -> None:
    parts = private("bert", loss=None, noise_multiplier=1.0)
    for batch in parts[2]:
        labels = batch.pop("labels")
        F.cross_entropy(parts[0](**batch).logits, labels).backward()  # type: ignore[no-untyped-call]
        parts[1].step()
    assert parts[1].steps == 3


def test_a_mean_over_all_tokens_of_a_batch_is_refused() -> None:
    parts = private("gpt2", loss=None)
    batch = next(iter(parts[2]))
    labels = batch.pop("labels")
    logits = parts[0](**batch).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(PlanError, match="one term per record"):
        parts[1].step()


def test_an_empty_batch_of_a_collator_of_transformers_is_empty() -> None:
    from tests.hugging import transformers

    def collate(found: list[dict[str, Tensor]]) -> Any:
        return transformers.BatchEncoding({key: torch.stack([one[key] for one in found]) for key in found[0]})

    held: Any = rows(records("bert"))
    loader: DataLoader[Any] = DataLoader(held, batch_size=1, collate_fn=collate)
    model = built("bert")
    parts = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, noise_multiplier=1.0, loss="cross_entropy"
    )
    sizes = []
    for batch in parts[2]:
        sizes.append(len(batch["labels"]))
        step(parts, batch)
    assert 0 in sizes


def test_a_compiled_module_is_named_in_its_refusal() -> None:
    with pytest.raises(PlanError, match=r"a model that torch.compile has compiled.*_orig_mod"):
        private("bert", torch.compile(built("bert"), backend="eager"))  # type: ignore[arg-type]
    inside: Any = built("bert")
    inside.bert.encoder.compile(backend="eager")
    with pytest.raises(PlanError, match=r"layer 'bert.encoder' that torch.compile has compiled"):
        private("bert", inside)


def test_gradient_checkpointing_is_refused_with_the_fix() -> None:
    model: Any = built("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(PlanError, match=r"gradient checkpointing.*gradient_checkpointing_disable"):
        private("llama", model)


def test_rules_are_taken_for_what_they_compute_and_not_for_a_name() -> None:
    class RMSNorm(nn.Module):
        """Gemma's: one is added to the weight."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(4)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, (4,), None, self.eps) * (1 + self.weight)

    norms = [part for part in built("llama").modules() if type(part).__name__ == "LlamaRMSNorm"]
    assert all(rule_of(part) is not None for part in norms)
    assert rule_of(RMSNorm()) is None


def test_adapters_that_are_saved_are_those_that_were_trained(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    parts = private("bert", lora_bert().train(), noise_multiplier=1.0)
    for batch in parts[2]:
        step(parts, batch)
    model: Any = parts[1].detach()
    model.save_pretrained(tmp_path)
    kept = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in kept.values()) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_tensors_that_noise_alone_would_move_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = built("bert")
    model.spare = nn.Linear(2, 2)
    parts = private("bert", model, noise_multiplier=1.0)
    with caplog.at_level(logging.WARNING, "sordino"):
        for batch in parts[2]:
            step(parts, batch)
    assert caplog.text.count("spare.weight") == 1
