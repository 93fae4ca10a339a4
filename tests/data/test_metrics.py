"""Metrics: what scikit-learn says of the whole test set, however it is cut; accuracy never stands alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from tests.commands import arrays, federation, lines, sordino
from tests.tiny import clients, mlp, noise, plan, seeded
from torch import Tensor, nn

import sordino as so
from sordino.data.clients import Records
from sordino.data.metrics import LOWER, Metric, Predictions, evaluation_sums, figures, metrics_of
from sordino.errors import ConfigError, DataError
from sordino.outcome import DIAGNOSTIC
from sordino.parts.losses import IGNORED, CrossEntropy, Logistic, Mse
from sordino.task import Task, evaluate, sums_of

SKEWED = np.random.default_rng(0).choice(3, size=500, p=[0.85, 0.1, 0.05])
SCORES = noise(500, 3, seed=1) + 1.5 * torch.eye(3)[torch.from_numpy(SKEWED)]
RIGHT = torch.from_numpy(SKEWED)
SAID = SCORES.argmax(1).numpy()


def seen(outputs: Tensor, targets: Tensor, losses: Any = None, **more: Any) -> Predictions:
    return Predictions(outputs, targets, losses or CrossEntropy(), **more)


def value(kind: Any, what: Predictions) -> dict[str, float]:
    (metric,) = metrics_of([kind])
    return metric.values(what)


class Echo(nn.Module):
    """Says of a record what the record is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_balanced_accuracy_stands_beside_accuracy_and_is_scikit_learns() -> None:
    found = evaluate(Echo(), Records(SCORES, RIGHT), CrossEntropy(), batch=64)
    assert found["accuracy"] == pytest.approx(oracle.accuracy_score(SKEWED, SAID))
    assert found["balanced_accuracy"] == pytest.approx(oracle.balanced_accuracy_score(SKEWED, SAID))
    assert set(found) == {"loss", "accuracy", "balanced_accuracy"}
    assert abs(found["balanced_accuracy"] - found["accuracy"]) > 0.005  # they are not the same figure


def test_a_model_that_says_one_class_only_is_named() -> None:
    """On skewed classes accuracy .83 meant that no positive was ever predicted."""
    constant = torch.tensor([5.0, 0.0, 0.0]).expand(500, 3)
    found = evaluate(Echo(), Records(constant, RIGHT), CrossEntropy())
    assert found["only_class"] == 0
    assert found["accuracy"] > 0.8
    assert found["balanced_accuracy"] == pytest.approx(1 / 3)
    alone = evaluate(Echo(), Records(constant, torch.zeros(500, dtype=torch.int64)), CrossEntropy())
    assert "only_class" not in alone  # of one class there is nothing to tell apart


def test_a_class_that_the_test_lacks_has_no_share() -> None:
    wide = torch.cat([SCORES, torch.full((500, 2), -9.0)], 1)
    found = evaluate(Echo(), Records(wide, RIGHT), CrossEntropy())
    assert found["balanced_accuracy"] == pytest.approx(oracle.balanced_accuracy_score(SKEWED, SAID))


@pytest.mark.parametrize("cut", [1, 7, 250, 499])
def test_parts_of_a_test_set_add_up_to_the_whole(cut: int) -> None:
    whole, parts = Records(SCORES, RIGHT), [slice(cut), slice(cut, None)]
    added = sum(sums_of(Echo(), Records(SCORES[part], RIGHT[part]), CrossEntropy()) for part in parts)
    assert isinstance(added, Tensor)
    assert figures(added) == pytest.approx(evaluate(Echo(), whole, CrossEntropy()))


def test_two_sides_are_classes_whether_they_are_written_as_numbers_or_not() -> None:
    scores, y = noise(200, 1, seed=3), (noise(200, seed=4) > 1).long()
    whole = evaluate(Echo(), Records(scores, y[:, None]), Logistic())
    assert evaluate(Echo(), Records(scores, y[:, None].float()), Logistic()) == pytest.approx(whole)
    wanted = oracle.balanced_accuracy_score(y.numpy(), (scores[:, 0] > 0).numpy())
    assert whole["balanced_accuracy"] == pytest.approx(wanted)


def test_auc_is_that_of_each_class_against_the_rest() -> None:
    chances = torch.softmax(SCORES.double(), 1).numpy()
    wanted = oracle.roc_auc_score(SKEWED, chances, multi_class="ovr", average="macro")
    assert value("auc", seen(SCORES, RIGHT)) == pytest.approx({"auc": wanted})
    each = value({"kind": "auc", "each": True}, seen(SCORES, RIGHT))
    assert each["auc/2"] == pytest.approx(oracle.roc_auc_score(SKEWED == 2, chances[:, 2]))


def test_auc_of_two_classes_is_the_same_from_one_score_or_two() -> None:
    y = (noise(300, seed=5) > 0.8).long()
    pair = noise(300, 2, seed=6) + torch.eye(2)[y]
    one = (pair[:, 1:] - pair[:, :1]).contiguous()
    wanted = oracle.roc_auc_score(y.numpy(), one[:, 0].numpy())
    assert value("auc", seen(pair, y))["auc"] == pytest.approx(wanted)
    assert value("auc", seen(one, y, Logistic()))["auc"] == pytest.approx(wanted)
    assert value("auc", seen(one, y[:, None].float(), Logistic()))["auc"] == pytest.approx(wanted)


def test_many_labels_have_an_auc_and_a_precision_each() -> None:
    y = (noise(300, 4, seed=7) > 1).long()
    scores = noise(300, 4, seed=8) + y
    what = seen(scores, y, Logistic())
    assert value("auc", what)["auc"] == pytest.approx(oracle.roc_auc_score(y.numpy(), scores.numpy()))
    found = value({"kind": "average_precision", "each": True}, what)
    assert found["average_precision"] == pytest.approx(oracle.average_precision_score(y.numpy(), scores.numpy()))
    assert found["average_precision/3"] == pytest.approx(
        oracle.average_precision_score(y[:, 3].numpy(), scores[:, 3].numpy())
    )


def test_tokens_are_counted_one_by_one_and_padding_is_not() -> None:
    y = torch.from_numpy(np.random.default_rng(9).integers(4, size=(50, 6)))
    y[:, 4:] = IGNORED
    y[7] = IGNORED  # a record of padding alone
    scores = noise(50, 6, 4, seed=10)
    real = (y != IGNORED).numpy()
    true, said = y.numpy()[real], scores.argmax(-1).numpy()[real]

    def mean_loss(out: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(out.mT, labels, reduction="none").mean(1)

    sums = evaluation_sums(Echo(), [(scores[:20], y[:20]), (scores[20:], y[20:])], so.Task.of(
        Echo(), [(scores, y)], loss=mean_loss).losses)  # fmt: skip
    assert figures(sums)["accuracy"] == pytest.approx(oracle.accuracy_score(true, said))
    assert figures(sums)["balanced_accuracy"] == pytest.approx(oracle.balanced_accuracy_score(true, said))
    assert value("token_accuracy", seen(scores, y))["token_accuracy"] == pytest.approx(float((true == said).mean()))
    assert value("f1", seen(scores, y))["f1"] == pytest.approx(oracle.f1_score(true, said, average="macro"))


def test_f1_balanced_accuracy_and_numbers_are_scikit_learns() -> None:
    for average in ("macro", "micro", "weighted"):
        found = value({"kind": "f1", "average": average}, seen(SCORES, RIGHT))
        assert found["f1"] == pytest.approx(oracle.f1_score(SKEWED, SAID, average=average))
    assert value("balanced_accuracy", seen(SCORES, RIGHT))["balanced_accuracy"] == pytest.approx(
        oracle.balanced_accuracy_score(SKEWED, SAID)
    )
    out, y = noise(90, 1, seed=11), noise(90, seed=12)
    numbers = seen(out, y, Mse())
    assert value("r2", numbers)["r2"] == pytest.approx(oracle.r2_score(y.numpy(), out[:, 0].numpy()))
    assert value("mae", numbers)["mae"] == pytest.approx(oracle.mean_absolute_error(y.numpy(), out[:, 0].numpy()))


def test_every_group_has_its_accuracy_and_the_worst_is_named() -> None:
    groups = np.array(["north", "south", "west"])[np.arange(500) % 3]
    task = Task.of(Echo(), [(SCORES, RIGHT)], test=(SCORES, RIGHT), metrics=["group_accuracy"], groups=groups)
    found = task.evaluate(torch.ones(1))
    wanted = {g: float((SKEWED == SAID)[groups == g].mean()) for g in ("north", "south", "west")}
    assert {g: found[f"accuracy/{g}"] for g in wanted} == pytest.approx(wanted)
    assert found["worst_group"] == pytest.approx(min(wanted.values()))
    with pytest.raises(DataError, match="groups"):
        Task.of(Echo(), [(SCORES, RIGHT)], test=(SCORES, RIGHT), metrics=["group_accuracy"]).evaluate(torch.ones(1))
    with pytest.raises(DataError, match="a group for each"):
        Task.of(Echo(), [(SCORES, RIGHT)], test=(SCORES, RIGHT), groups=groups[:9])


def test_a_function_of_ones_own_is_a_metric_and_its_failure_one_sentence() -> None:
    def top_two(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.topk(2, 1).indices == targets[:, None]).any(1).float().mean()

    both = {"top_two": top_two, "several": lambda out, y: {"first": 1, "second": 2.5}}
    task = Task.of(Echo(), [(SCORES, RIGHT)], test=(SCORES, RIGHT), metrics=both)
    found = task.evaluate(torch.ones(1), batch=100)
    assert found["top_two"] == pytest.approx(float(top_two(SCORES, RIGHT)))
    assert (found["first"], found["second"]) == (1.0, 2.5)
    broken = Task.of(Echo(), [(SCORES, RIGHT)], test=(SCORES, RIGHT), metrics={"odd": lambda out, y: "high"})
    with pytest.raises(DataError, match="metric 'odd' that fails"):
        broken.evaluate(torch.ones(1))


@pytest.mark.parametrize("name", ["round", DIAGNOSTIC, "accuracy"])
def test_a_function_cannot_speak_for_what_the_history_says_itself(name: str) -> None:
    """A metric called `round` was the number of the round."""
    with pytest.raises(DataError, match="which is already a name in the history"):
        Task.of(mlp(), clients(), test=clients()[0], metrics={name: lambda out, y: 7.0}).evaluate(torch.zeros(67))


def test_what_a_function_writes_into_its_arguments_no_other_reads() -> None:
    def spoils(out: Tensor, y: Tensor) -> float:
        return float(out.zero_().sum() + y.zero_().sum())

    both = Task.of(mlp(), clients(), test=clients()[4], metrics={"spoils": spoils, "sum": lambda out, y: y.sum()})
    assert both.evaluate(torch.zeros(67))["sum"] == float(clients()[4][1].sum()) > 0


def test_a_metric_that_does_not_fit_the_targets_says_so() -> None:
    with pytest.raises(DataError, match="needed real-valued targets"):
        value("r2", seen(SCORES, RIGHT))
    with pytest.raises(DataError, match="needed class labels"):
        value("auc", seen(noise(9, 1), noise(9), Mse()))
    with pytest.raises(DataError, match="one class only"):
        value("auc", seen(SCORES, torch.zeros(500, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="did you mean 'auc'"):
        metrics_of(["aucc"])


def test_every_metric_of_which_less_is_better_is_known_for_it() -> None:
    assert set(LOWER) - {"loss", "rmse"} <= set(Metric.members)


def test_a_file_names_metrics_and_the_history_has_them(tmp_path: Path) -> None:
    data = arrays() | {"test_groups": np.arange(30) % 2, "groups": np.arange(240) % 60}
    asked = '[run]\nmetrics = ["auc", { kind = "f1", average = "weighted" }, "group_accuracy"]'
    file = federation(tmp_path, ("[run]", asked), data=data)
    said = sordino("run", file, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    assert "balanced_accuracy " in said.out
    for line in lines(tmp_path / "run" / "history.jsonl"):
        assert {"auc", "f1", "worst_group", "accuracy/0", "accuracy/1", "balanced_accuracy"} <= set(line)
    assert sordino("certify", tmp_path / "run").code == 0
    wrong = federation(tmp_path, ("[run]", '[run]\nmetrics = ["aucc"]'))
    assert "did you mean 'auc'?" in sordino("plan", wrong).sentence


def test_metrics_change_nothing_of_what_is_released() -> None:
    task = Task.of(mlp(), clients(), test=clients()[0])
    asked = Task.of(mlp(), clients(), test=clients()[0], metrics=["f1"])
    plain, more = (so.train(plan(), one, allow_large_delta=True) for one in (task, asked))
    assert plain.certificate["model_sha256"] == more.certificate["model_sha256"]
    assert "f1" in more.history[-1]
    assert "f1" not in plain.history[-1]


def test_the_trained_module_is_not_touched_by_an_evaluation() -> None:
    module = seeded(nn.Linear(4, 3))
    before = [p.clone() for p in module.parameters()]
    Task.of(module, clients(), test=clients()[0], metrics=["f1"]).evaluate(torch.zeros(15))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_token_labels_of_plain_tensors_cost_the_mean_of_a_record_and_padding_nothing() -> None:
    """A record's loss is the mean over its own tokens: what is padded, and how far, changes no gradient."""
    x, y = noise(12, 5, 4, seed=20), torch.from_numpy(np.random.default_rng(21).integers(3, size=(12, 5)))
    y[:, 3:] = IGNORED
    module = seeded(nn.Linear(4, 3))
    task = Task.of(module, [(x, y)], test=(x, y))
    wanted = torch.stack([nn.functional.cross_entropy(module(a[:3]), b[:3]) for a, b in zip(x, y, strict=True)])
    assert torch.allclose(task.losses(module(x), y), wanted)
    shorter = Task.of(module, [(x[:, :3], y[:, :3])])
    quiet = plan(rounds=1, clients=so.Everyone(1), release=so.parts.NoNoise())
    long, short = (so.train(quiet, one, allow_large_delta=True).model.state_dict() for one in (task, shorter))
    assert all(torch.allclose(long[name], short[name], atol=1e-6) for name in long)
