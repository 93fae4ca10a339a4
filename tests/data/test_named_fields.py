"""Records whose fields have names: packed into one table, padded, and handed to the model by name again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import sordino as so
from sordino.data.clients import NamedFieldsModel
from sordino.errors import DataError
from sordino.parts.losses import IGNORED, Tokens, is_record_wise, loss_of


class Bag(nn.Module):
    """Averages the words that the mask keeps; its answer is an object with logits."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        words = self.embed(input_ids) * mask[..., None]
        out: Tensor = self.out(words.sum(1) / mask.sum(1, keepdim=True))
        return out


class Tagger(nn.Module):
    """A label for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.out(self.embed(input_ids))
        return out


class TinyCausalLM(Tagger):
    """Transformers' models of language shift the labels: known by the name of the class."""


RAGGED = [[3, 4], [5, 6, 7, 8], [9]]


def rows(labels: Any = (0, 2, 1)) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": label} for ids, label in zip(RAGGED, labels, strict=True)]


def test_ragged_records_are_padded_to_the_longest_and_masked() -> None:
    task = so.Task.of(Bag(), [rows()[:2], rows()[2:]], pad=10)
    x, y = task.clients.records.x, task.clients.records.y
    assert x[:, 0].tolist() == [[3, 4, 10, 10], [5, 6, 7, 8], [9, 10, 10, 10]]
    assert x[:, 1].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert (y.tolist(), task.clients.offsets.tolist()) == ([0, 2, 1], [0, 2, 3])
    assert isinstance(task.model, NamedFieldsModel)
    assert task.model.names == ("input_ids", "attention_mask")


@pytest.mark.parametrize("length", [4, 9])
def test_padding_does_not_change_what_the_model_says(length: int) -> None:
    torch.manual_seed(0)
    model = Bag()
    task = so.Task.of(model, [rows()], length=length)
    for ids, answer in zip(RAGGED, task.model(task.clients.records.x), strict=True):
        torch.testing.assert_close(answer[None], model(torch.tensor([ids])))


def test_columns_data_sets_and_pairs_of_tensors_give_the_same_records() -> None:
    ids, labels = torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1])
    mask = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    listed = [{"input_ids": ids[i].tolist(), "attention_mask": [1, 1], "label": int(labels[i])} for i in range(2)]
    lists = {"input_ids": ids.tolist(), "attention_mask": mask.tolist(), "labels": labels.tolist(), "text": ["a", "b"]}
    first, *others = (so.Task.of(Bag(), [entry]).clients.records for entry in (columns, listed, lists))
    for other in others:
        assert torch.equal(first.x, other.x)
        assert torch.equal(first.y, other.y)


def test_labels_of_tokens_are_padded_with_what_costs_nothing() -> None:
    torch.manual_seed(1)
    labels = [[0, 1], [2, 3, IGNORED, 1], [2]]
    task = so.Task.of(Tagger(), [rows(labels)])
    x, y = task.clients.records.x, task.clients.records.y
    assert y[0].tolist() == [0, 1, IGNORED, IGNORED]
    assert task.losses == Tokens()
    for j, (ids, own) in enumerate(zip(RAGGED, labels, strict=True)):
        wanted = F.cross_entropy(task.model.model(torch.tensor([ids]))[0], torch.tensor(own))  # type: ignore[operator]
        torch.testing.assert_close(task.losses(task.model(x), y)[j], wanted)


def test_a_record_without_a_label_that_counts_costs_nothing() -> None:
    outputs, labels = torch.randn(2, 3, 4, requires_grad=True), torch.tensor([[IGNORED] * 3, [0, 1, 2]])
    values = Tokens()(outputs, labels)
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert float(values[0].detach()) == 0.0
    assert outputs.grad is not None
    assert not bool(outputs.grad[0].any())
    assert is_record_wise(loss_of("tokens"))


def test_a_causal_model_is_asked_for_the_next_token_and_padding_is_no_target() -> None:
    task = so.Task.of(TinyCausalLM(), [[{"input_ids": ids} for ids in ([1, 2, 3], [0, 3])]], length=4)
    assert task.clients.records.y.tolist() == [[2, 3, IGNORED], [3, IGNORED, IGNORED]]


def test_token_accuracy_counts_the_labels_that_count() -> None:
    task = so.Task.of(Tagger(), [rows([[0, 1], [2, 3, 1, 1], [2]])], test=rows([[0, 1], [2, 3, 1, 1], [2]]))
    assert task.test is not None
    right = int((task.model(task.test.x).argmax(-1) == task.test.y).sum())
    assert task.evaluate(task.layout.flatten(task.model))["accuracy"] == pytest.approx(right / 7)


def test_an_empty_client_is_one_without_records() -> None:
    task = so.Task.of(Bag(), [rows(), []])
    assert [task.clients.size(i) for i in range(2)] == [3, 0]


def test_server_and_silos_hold_the_same_table_where_they_name_one_length() -> None:
    model = Bag()
    server = so.Task.server(model, 2, test=rows(), length=6)
    silo = so.Task.silo(model, 1, 2, rows()[2:], length=6)
    assert server.clients.records.x.shape[1:] == silo.clients.records.x.shape[1:] == (2, 6)


MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an unknown field": (
        [{"input_ids": [1], "attention_masks": [1], "labels": 0}],
        {},
        "'attention_masks' in client 0",
    ),
    "no labels": ([{"input_ids": [1]}], {}, "a field `labels`"),
    "too long": (rows(), {"length": 3}, "a record of 4 tokens; needed at most length = 3"),
    "columns of different length": (
        {"input_ids": [[1], [2]], "labels": [0]},
        {},
        "the same number of records in every field",
    ),
    "labels alone": ([{"labels": 0}], {}, "labels and no inputs"),
    "no number": ([{"input_ids": [object()], "labels": 0}], {}, "no list of numbers"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str) -> None:
    entry, options, said = MISTAKES[name]
    with pytest.raises(DataError, match=said):
        so.Task.of(Bag(), [entry], **options)


def test_clients_with_other_fields_are_refused() -> None:
    with pytest.raises(DataError, match="the fields of client 0: input_ids, labels"):
        so.Task.of(Bag(), [rows(), {"input_ids": [[1]], "attention_mask": [[1]], "labels": [0]}])


def test_what_is_handed_over_is_the_users_own_module() -> None:
    plan = so.Plan(
        rounds=1, clients=so.Everyone(2), local=so.parts.LocalSgd(epochs=1, batch=2, lr=0.1),
        encode=(so.parts.Clip(1.0),),
        release=so.parts.CentralNoise(so.parts.Gaussian(1.0)), server=so.parts.Sgd(lr=1.0),
    )  # fmt: skip
    result = so.train(plan, so.Task.of(Bag(), [rows(), rows()]), delta=0.1)
    assert type(result.model) is Bag
