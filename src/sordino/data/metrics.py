"""Metrics of a released model on public test records, at no privacy cost. Called by `task` and the configuration.

Loss, accuracy and balanced accuracy follow from sums over records, so that the sums of parts of a test set can be
added. Of class c, present_c test records are there and right_c of them are predicted correctly:

    accuracy = sum_c right_c / sum_c present_c      balanced_accuracy = mean of right_c / present_c over present classes

Accuracy alone misleads on skewed classes: a model that always predicts the larger class has that class's share. Further
metrics are parts (`Metric`), computed by scikit-learn; a mean over classes leaves out classes without test records.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import codec
from sordino.codec import Foreign, Part, read
from sordino.codec.boundary import numbers_by_name, returns
from sordino.errors import DataError
from sordino.parts.losses import IGNORED, Loss

ONLY_CLASS = "only_class"  # metric: the class that a model predicts for every record, if there is one
HEAD = 4  # entries before those of the classes: records, summed loss, summed squares, labels


def evaluation_sums(
    model: nn.Module,
    pairs: Iterable[tuple[Tensor, Tensor]],
    losses: Loss,
    keep: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Return sums over all records: [records, loss, squared errors, labels, right_c, present_c, predicted_c].

    For class labels the last three are vectors over the classes c: records of class c predicted correctly, records of
    class c, and records predicted as class c. A label outside the classes counts in no class, and padding does not
    count. `keep` is called with the outputs and targets of each batch.
    """
    records, classes, sums, seen = 0, 0, list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for x, y in pairs:
            out, labels = model(x), labels_of(y, losses)
            records, both = records + len(y), [losses(out, y).double().sum()]
            if labels is None:
                both.append((out.reshape(y.shape) - y).square().double().sum())
            else:
                found, classes = predicted_classes(out, labels)
                seen.append(torch.stack([labels.flatten(), found.flatten()]))
            sums.append(torch.stack(both))
            if keep is not None:
                keep(out, y)
    each = torch.stack(sums).T.tolist() if sums else [[]]  # read once: every read waits for an accelerator
    loss, squares = sum(each[0]), sum(each[1]) if len(each) > 1 else 0.0
    if not seen:
        return torch.tensor([records, loss, squares, 0.0], dtype=torch.float64)
    labels, found = torch.cat(seen, 1).cpu()
    labels, found = labels[labels != IGNORED], found[labels != IGNORED]
    places = (labels.clamp(-1, classes) + 1) * 2 + (labels == found)
    missed, right = torch.bincount(places.long(), minlength=2 * classes + 4)[2:-2].view(-1, 2).T.double()
    predicted = torch.bincount(found, minlength=classes).double()
    head = torch.tensor([records, loss, squares, len(labels)], dtype=torch.float64)
    return torch.cat([head, right, missed + right, predicted])


def labels_of(y: Tensor, losses: Loss) -> Tensor | None:
    """Return targets as class numbers; None for real targets. For a binary loss, targets 0.0 and 1.0 are classes."""
    if not y.is_floating_point():
        return y
    return (y > 0.5).long() if losses.targets == "side" else None


def predicted_classes(out: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the predicted class for each label, and the number of classes.

    A model has one score per class, or one score for two classes, whose sign decides.
    """
    if has_class_scores(out, labels):
        return out.argmax(-1), out.shape[-1]
    return (out.reshape(labels.shape) > 0).long(), 2


def has_class_scores(out: Tensor, labels: Tensor) -> bool:
    return out.dim() == labels.dim() + 1 and out.shape[-1] > 1  # else one score for two classes


def figures(sums: Tensor) -> dict[str, float]:
    """Return the metrics that follow from `evaluation_sums`: loss, and rmse for real targets.

    For class labels: loss, accuracy, balanced accuracy, and the only class if the model predicts no other.
    """
    records, loss, squares, labels = sums[:HEAD].tolist()
    if len(sums) == HEAD:
        return {"loss": loss / records, "rmse": (squares / records) ** 0.5}
    right, count, predicted = sums[HEAD:].view(3, -1)
    present = count > 0
    recall = float((right[present] / count[present]).mean()) if bool(present.any()) else 0.0
    found = {"loss": loss / records, "accuracy": float(right.sum()) / max(labels, 1.0), "balanced_accuracy": recall}
    one = int((predicted > 0).sum()) == 1 and int(present.sum()) > 1
    return {**found, **({ONLY_CLASS: int(predicted.argmax())} if one else {})}


Array = NDArray[Any]
MetricFunction = Callable[[Tensor, Tensor], Any]  # (outputs [n, ...], targets [n, ...]) -> a number, or numbers by name
SHARES = ("accuracy", "balanced_accuracy", "auc", "average_precision", "f1", "token_accuracy", "worst_group")  # [0, 1]
LOWER = ("loss", "rmse", "mae")  # the smaller the better
HISTORY = ("round", "void", "diagnostic, not private", "loss", "accuracy", "balanced_accuracy", "rmse", ONLY_CLASS)


@codec.hides_values
@dataclass(frozen=True)
class Predictions:
    """Outputs of a model on all test records, their targets, and the public group of each record."""

    outputs: Tensor
    targets: Tensor
    losses: Loss
    groups: Tensor | None = None
    names: tuple[str, ...] = ()

    @property
    def labels(self) -> Tensor:
        """Targets as class numbers; raises for real targets."""
        found = labels_of(self.targets, self.losses)
        if found is None:
            raise DataError("real-valued targets", "class labels for this metric", "use the metrics r2 or mae")
        return found

    @property
    def numbers(self) -> tuple[Array, Array]:
        """Real targets and their predictions; raises for class labels."""
        if labels_of(self.targets, self.losses) is not None:
            fix = "use the metrics auc, f1 or balanced_accuracy"
            raise DataError("class labels as targets", "real-valued targets for this metric", fix)
        return self.targets.double().numpy(), self.outputs.reshape(self.targets.shape).double().numpy()

    @property
    def pairs(self) -> tuple[Array, Array]:
        """True and predicted classes of all labels except padding."""
        labels = self.labels
        predicted, counted = predicted_classes(self.outputs, labels)[0], labels != IGNORED
        return labels[counted].numpy(), predicted[counted].numpy()

    @property
    def one_vs_rest(self) -> tuple[Array, Array]:
        """Binary targets of each class against the rest, and the scores of the classes, both [records, classes]."""
        present, scores = self.labels, self.outputs
        if has_class_scores(scores, present):
            counted = present != IGNORED
            scores = torch.softmax(scores[counted].double(), -1)
            present = torch.nn.functional.one_hot(present[counted].long(), scores.shape[-1])
            first = 1 if present.shape[1] == 2 else 0  # of two classes the second suffices
            present, scores = present[:, first:], scores[:, first:]
        size = len(present)
        return present.reshape(size, -1).numpy(), scores.reshape(size, -1).double().numpy()


class Metric(Part):
    """Metric of a model on public test records, with one value or several values by name."""

    @property
    def called(self) -> str:
        """Name of the metric in the history."""
        return self.kind

    @abstractmethod
    @returns(lambda found, *_: numbers_by_name(found))
    def values(self, seen: Predictions) -> dict[str, float]:
        """Return the metric's values by name, computed from the model's predictions."""


def _score(name: str, true: Array, predicted: Array, **options: Any) -> float:
    """Call a function of sklearn.metrics, imported here because the import is slow."""
    return float(getattr(importlib.import_module("sklearn.metrics"), name)(true, predicted, **options))


def _each_class(seen: Predictions, name: str, score: str, each: bool) -> dict[str, float]:
    """Return the mean of a score over classes with positive and negative records, and with `each` every class's."""
    present, scores = seen.one_vs_rest
    columns = [c for c in range(present.shape[1]) if 0 < present[:, c].sum() < len(present)]
    if not columns:
        only = f"test records of one class only, for {name}"
        raise DataError(only, "test records of at least two classes", f"add test records, or drop {name}")
    found = {c: _score(score, present[:, c], scores[:, c]) for c in columns}
    own = {f"{name}/{c}": value for c, value in found.items()} if each and len(found) > 1 else {}
    return {name: float(np.mean(list(found.values()))), **own}


@dataclass(frozen=True)
class Auc(Metric, kind="auc"):
    """Area under the ROC curve; for several classes the mean of one class against the rest.

    With `each`, the area of each class is reported too.
    """

    each: bool = False

    def values(self, seen: Predictions) -> dict[str, float]:
        return _each_class(seen, self.called, "roc_auc_score", self.each)


@dataclass(frozen=True)
class AveragePrecision(Metric, kind="average_precision"):
    """Average precision (suited to rare classes), as the mean over classes; with `each`, each class's too."""

    each: bool = False

    def values(self, seen: Predictions) -> dict[str, float]:
        return _each_class(seen, self.called, "average_precision_score", self.each)


@dataclass(frozen=True)
class BalancedAccuracy(Metric, kind="balanced_accuracy"):
    """Balanced accuracy, the mean recall over classes; always reported for class labels."""

    def values(self, seen: Predictions) -> dict[str, float]:
        true, predicted = seen.pairs
        return {self.called: _score("recall_score", true, predicted, labels=np.unique(true), average="macro")}


@dataclass(frozen=True)
class F1(Metric, kind="f1"):
    """F1 score, the harmonic mean of precision and recall.

    `average` is "binary" for the score of class 1, or scikit-learn's way to average over classes.
    """

    average: Literal["macro", "micro", "weighted", "binary"] = "macro"

    def values(self, seen: Predictions) -> dict[str, float]:
        return {self.called: _score("f1_score", *seen.pairs, average=self.average, zero_division=0.0)}


@dataclass(frozen=True)
class TokenAccuracy(Metric, kind="token_accuracy"):
    """Share of tokens that are predicted correctly; padding does not count."""

    def values(self, seen: Predictions) -> dict[str, float]:
        return {self.called: _score("accuracy_score", *seen.pairs)}


@dataclass(frozen=True)
class GroupAccuracy(Metric, kind="group_accuracy"):
    """Accuracy on the test records of each public group, and the lowest of these accuracies."""

    def values(self, seen: Predictions) -> dict[str, float]:
        if seen.groups is None:
            fix = "pass them with Task.of(..., groups=...)"
            raise DataError("test records without groups", "the public group of each test record", fix)
        right = predicted_classes(seen.outputs, seen.labels)[0] == seen.labels
        shares = {}
        for group in np.unique(seen.groups.numpy()).tolist():
            own = seen.groups == group
            name = seen.names[group] if group < len(seen.names) else str(group)
            shares[name] = float(right[own][(seen.labels != IGNORED)[own]].double().mean())
        return {**{f"accuracy/{group}": share for group, share in shares.items()}, "worst_group": min(shares.values())}


@dataclass(frozen=True)
class R2(Metric, kind="r2"):
    """R^2 of real targets: 1 - (sum of squared errors) / (sum of squared deviations of the targets from their mean)."""

    def values(self, seen: Predictions) -> dict[str, float]:
        return {self.called: _score("r2_score", *seen.numbers)}


@dataclass(frozen=True)
class Mae(Metric, kind="mae"):
    """Mean absolute error of real targets."""

    def values(self, seen: Predictions) -> dict[str, float]:
        return {self.called: _score("mean_absolute_error", *seen.numbers)}


@dataclass(frozen=True)
class RegisteredMetric(Metric, kind="own"):
    """Metric by a function that `sordino.add_metric(name)` registered.

    The function takes (outputs, targets) and returns a number, or numbers by name.
    """

    name: str

    def __post_init__(self) -> None:
        codec.find_function("metric", self.name)

    @property
    def called(self) -> str:
        return self.name

    def values(self, seen: Predictions) -> dict[str, float]:
        return _call_metric(self.name, codec.find_function("metric", self.name), seen)

    def rests_on(self) -> tuple[Foreign, ...]:
        return (codec.function_origin("metric", self.name),)


@dataclass(frozen=True)
class FunctionMetric(Metric):
    """Metric by a function of (outputs, targets) that a script passed with a name."""

    name: str
    function: MetricFunction

    @property
    def called(self) -> str:
        return self.name

    def values(self, seen: Predictions) -> dict[str, float]:
        return _call_metric(self.name, self.function, seen)


def _call_metric(name: str, function: MetricFunction, seen: Predictions) -> dict[str, float]:
    try:
        found = function(seen.outputs.clone(), seen.targets.clone())  # it may write into its copies
        numbers = found if isinstance(found, Mapping) else {name: found}
        values = {str(key): float(value) for key, value in numbers.items()}
    except Exception as error:  # whatever the user's function raises
        what = f"metric {name!r} that fails ({type(error).__name__}: {str(error).strip()[:200]})"
        needed = "a function of (outputs, targets) that returns a number, or numbers by name"
        raise DataError(what, needed, "repair the function") from None
    taken = next((key for key in values if key in HISTORY), None)
    if taken is not None:
        found = f"metric {name!r} that returns {taken!r}, which is already a name in the history"
        raise DataError(found, "a name that the history does not use", f'rename the metric, such as "my_{taken}"')
    return values


def metrics_of(asked: Mapping[str, MetricFunction] | Iterable[Any] | None) -> tuple[Metric, ...]:
    """Return `Metric` parts for functions by name, or for a list whose entries are `Metric`s or names of kinds."""
    if isinstance(asked, Mapping):
        return tuple(FunctionMetric(str(name), function) for name, function in asked.items())
    listed = [asked] if isinstance(asked, str) else asked or ()
    return tuple(one if isinstance(one, Metric) else read(Metric, one, "metrics") for one in listed)


def add_metric(name: str) -> Callable[[MetricFunction], MetricFunction]:
    """Return a decorator that registers a function of (outputs, targets) as the metric `name`.

    A configuration uses the metric by { kind = "own", name = ... }.
    """
    return codec.register_function("metric", name)
