"""What a model gets right, as sums over records: parts of a test set are added, and the figures follow from the whole.

    accuracy = sum_c right_c / sum_c there_c        balanced_accuracy = mean of right_c / there_c over classes there

On skewed classes the first alone misleads: a model that always says the larger class has the larger class's share.

Metrics of a released model on public test records, beside loss and accuracy; scikit-learn computes them.

They look at nothing else, so they cost nothing. A class that the test records do not have has no share in a mean."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import codec
from sordino.codec import Foreign, Part, plugins, read
from sordino.codec.boundary import numbers_by_name, returns
from sordino.errors import DataError
from sordino.parts.losses import IGNORED, Loss

ONLY_CLASS = "only_class"  # a figure's name: the one class that a model predicts for every record, if it does
HEAD = 4  # entries before those of the classes: records, summed loss, summed squares, labels
Keep = Callable[[Tensor, Tensor], None]


def evaluation_sums(
    model: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]], losses: Loss, keep: Keep | None = None
) -> Tensor:
    """Sums over all records: [records, loss, squares, labels, right_c, there_c, said_c]; numbers have no classes c.

    `keep` is handed every part's outputs and targets.
    """
    records, loss, squares, classes, told = 0, 0.0, 0.0, 0, list[tuple[Tensor, Tensor]]()
    with torch.no_grad():
        for x, y in pairs:
            out, labels = model(x), labels_of(y, losses)
            records, loss = records + len(y), loss + float(losses(out, y).double().sum())
            if labels is None:
                squares += float((out.reshape(y.shape) - y).square().double().sum())
            else:
                found, classes = predicted_classes(out, labels)
                told.append((labels.flatten(), found.flatten()))
            if keep is not None:
                keep(out, y)
    return _summed([records, loss, squares], told, classes)


def _summed(head: list[float], told: list[tuple[Tensor, Tensor]], classes: int) -> Tensor:
    """The sums as one vector; a label that no class stands for is in none, and padding is not counted at all."""
    if not told:
        return torch.tensor([*head, 0.0], dtype=torch.float64)
    labels, found = (torch.cat([pair[side] for pair in told]).cpu() for side in (0, 1))
    if bool((labels == IGNORED).any()):
        counted = labels != IGNORED
        labels, found = labels[counted], found[counted]
    places = (labels.clamp(-1, classes) + 1) * 2 + (labels == found)
    missed, right = torch.bincount(places.long(), minlength=2 * classes + 4)[2:-2].view(-1, 2).T.double()
    said = torch.bincount(found, minlength=classes).double()
    return torch.cat([torch.tensor([*head, len(labels)], dtype=torch.float64), right, missed + right, said])


def labels_of(y: Tensor, losses: Loss) -> Tensor | None:
    """Targets as class numbers; None where they are numbers. Of a loss for two sides, 0.0 and 1.0 are classes too."""
    if not y.is_floating_point():
        return y
    return (y > 0.5).long() if losses.targets == "side" else None


def predicted_classes(out: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The class that a model says, for every label, and how many it can say: one score per class, or one for two."""
    if has_class_scores(out, labels):
        return out.argmax(-1), out.shape[-1]
    return (out.reshape(labels.shape) > 0).long(), 2


def has_class_scores(out: Tensor, labels: Tensor) -> bool:
    """Whether every label has one score per class; else one score says which of two it is."""
    return out.dim() == labels.dim() + 1 and out.shape[-1] > 1


def figures(sums: Tensor) -> dict[str, float]:
    """Loss; for classes accuracy and its mean over classes, and the only class that is ever said; for numbers rmse."""
    records, loss, squares, labels = sums[:HEAD].tolist()
    if len(sums) == HEAD:
        return {"loss": loss / records, "rmse": (squares / records) ** 0.5}
    right, there, said = sums[HEAD:].view(3, -1)
    present = there > 0
    recall = float((right[present] / there[present]).mean()) if bool(present.any()) else 0.0
    found = {"loss": loss / records, "accuracy": float(right.sum()) / max(labels, 1.0), "balanced_accuracy": recall}
    one = int((said > 0).sum()) == 1 and int(present.sum()) > 1
    return {**found, **({ONLY_CLASS: int(said.argmax())} if one else {})}


Array = NDArray[Any]
MetricFunction = Callable[[Tensor, Tensor], Any]  # (outputs [n, ...], targets [n, ...]) -> a number, or numbers by name
SHARES = (  # between 0 and 1
    *("accuracy", "balanced_accuracy", "auc", "average_precision", "f1", "token_accuracy", "worst_group"),
)
LOWER = ("loss", "rmse", "mae")  # the smaller the better
TAKEN = (  # what a line of history holds anyway
    *("round", "void", "diagnostic, not private"),
    *("loss", "accuracy", "balanced_accuracy", "rmse", ONLY_CLASS),
)


@codec.hides_values
@dataclass(frozen=True)
class Predictions:
    """What a model says of all test records, and what is true of them; `groups` says which group each belongs to."""

    outputs: Tensor
    targets: Tensor
    losses: Loss
    groups: Tensor | None = None
    names: tuple[str, ...] = ()

    @property
    def labels(self) -> Tensor:
        """Targets as classes, or a sentence."""
        found = labels_of(self.targets, self.losses)
        if found is None:
            raise DataError("targets that are numbers", "classes", "use r2 or mae")
        return found

    @property
    def numbers(self) -> tuple[Array, Array]:
        """True and said numbers, or a sentence."""
        if labels_of(self.targets, self.losses) is not None:
            raise DataError("targets that are classes", "numbers", "use auc, f1 or balanced_accuracy")
        return self.targets.double().numpy(), self.outputs.reshape(self.targets.shape).double().numpy()

    @property
    def pairs(self) -> tuple[Array, Array]:
        """True and said classes, one by one; padding is left out."""
        labels = self.labels
        said, counted = predicted_classes(self.outputs, labels)[0], labels != IGNORED
        return labels[counted].numpy(), said[counted].numpy()

    @property
    def sides(self) -> tuple[Array, Array]:
        """Each class against the rest: is it there [k, classes], and how likely is it said to be."""
        labels = self.labels
        if not has_class_scores(self.outputs, labels):
            return _columns(labels), _columns(self.outputs.reshape(labels.shape).double())
        counted = labels != IGNORED
        chances = torch.softmax(self.outputs[counted].double(), -1)
        there = torch.nn.functional.one_hot(labels[counted].long(), chances.shape[-1])
        pair = there.shape[1] == 2  # of two classes one side says it all
        return _columns(there[:, 1:] if pair else there), _columns(chances[:, 1:] if pair else chances)


def _columns(side: Tensor) -> Array:
    return side.reshape(len(side), -1).numpy()


class Metric(Part):
    """A figure of a model, or several by name; of public records only."""

    @property
    def called(self) -> str:
        """What the figure is called in the history."""
        return self.kind

    @abstractmethod
    @returns(lambda found, *_: numbers_by_name(found))
    def values(self, seen: Predictions) -> dict[str, float]:
        """Every figure with its name."""


def _each(seen: Predictions, name: str, score: Callable[[Array, Array], float], each: bool) -> dict[str, float]:
    """The mean of a score over classes or labels that are sometimes there and sometimes not; on request one by one."""
    there, chances = seen.sides
    columns = [c for c in range(there.shape[1]) if 0 < there[:, c].sum() < len(there)]
    if not columns:
        raise DataError(f"test records of one class only, for {name}", "at least two")
    found = {c: float(score(there[:, c], chances[:, c])) for c in columns}
    own = {f"{name}/{c}": value for c, value in found.items()} if each and len(found) > 1 else {}
    return {name: float(np.mean(list(found.values()))), **own}


@dataclass(frozen=True)
class Auc(Metric, kind="auc"):
    """Area under the ROC curve; of several classes (each against the rest) or labels their mean. `each` shows them."""

    each: bool = False

    def values(self, seen: Predictions) -> dict[str, float]:
        from sklearn.metrics import roc_auc_score

        return _each(seen, self.called, roc_auc_score, self.each)


@dataclass(frozen=True)
class AveragePrecision(Metric, kind="average_precision"):
    """Average precision, for rare classes and many labels: the mean over classes or labels; `each` shows them."""

    each: bool = False

    def values(self, seen: Predictions) -> dict[str, float]:
        from sklearn.metrics import average_precision_score

        return _each(seen, self.called, average_precision_score, self.each)


@dataclass(frozen=True)
class BalancedAccuracy(Metric, kind="balanced_accuracy"):
    """The mean over classes of the share that is found; reported for classes even if it is not asked for."""

    def values(self, seen: Predictions) -> dict[str, float]:
        from sklearn.metrics import recall_score

        true, said = seen.pairs
        return {self.called: float(recall_score(true, said, labels=np.unique(true), average="macro"))}


@dataclass(frozen=True)
class F1(Metric, kind="f1"):
    """Harmonic mean of precision and recall: of class 1 (`binary`), or over classes (`macro`, `micro`, `weighted`)."""

    average: Literal["macro", "micro", "weighted", "binary"] = "macro"

    def values(self, seen: Predictions) -> dict[str, float]:
        from sklearn.metrics import f1_score

        true, said = seen.pairs
        return {self.called: float(f1_score(true, said, average=self.average, zero_division=0.0))}


@dataclass(frozen=True)
class TokenAccuracy(Metric, kind="token_accuracy"):
    """The share of tokens whose label is found, padding left out; `accuracy` of sequences is the same."""

    def values(self, seen: Predictions) -> dict[str, float]:
        from sklearn.metrics import accuracy_score

        return {self.called: float(accuracy_score(*seen.pairs))}


@dataclass(frozen=True)
class GroupAccuracy(Metric, kind="group_accuracy"):
    """Accuracy on the test records of each public group, and the lowest of them."""

    def values(self, seen: Predictions) -> dict[str, float]:
        if seen.groups is None:
            raise DataError("test records without groups", "a public group of each", "Task.of(..., groups=...)")
        right = predicted_classes(seen.outputs, seen.labels)[0] == seen.labels
        shares = {
            self._called(int(group), seen): self._share(right, seen, seen.groups == group)
            for group in np.unique(seen.groups.numpy())
        }
        return {**{f"accuracy/{group}": share for group, share in shares.items()}, "worst_group": min(shares.values())}

    def _share(self, right: Tensor, seen: Predictions, own: Tensor) -> float:
        counted = (seen.labels != IGNORED)[own]
        return float(right[own][counted].double().mean())

    def _called(self, group: int, seen: Predictions) -> str:
        return seen.names[group] if group < len(seen.names) else str(group)


@dataclass(frozen=True)
class R2(Metric, kind="r2"):
    """1 - sum of squared errors / sum of squared deviations from the mean, for numbers: 0 is what the mean gets."""

    def values(self, seen: Predictions) -> dict[str, float]:
        from sklearn.metrics import r2_score

        return {self.called: float(r2_score(*seen.numbers))}


@dataclass(frozen=True)
class Mae(Metric, kind="mae"):
    """Mean absolute error, for numbers."""

    def values(self, seen: Predictions) -> dict[str, float]:
        from sklearn.metrics import mean_absolute_error

        return {self.called: float(mean_absolute_error(*seen.numbers))}


@dataclass(frozen=True)
class RegisteredMetric(Metric, kind="own"):
    """A function that `sordino.add_metric(name)` has added: (outputs, targets) -> a number, or numbers by name."""

    name: str

    def __post_init__(self) -> None:
        plugins.find("metric", self.name)

    @property
    def called(self) -> str:
        return self.name

    def values(self, seen: Predictions) -> dict[str, float]:
        return _told(self.name, plugins.find("metric", self.name), seen)

    def rests_on(self) -> tuple[Foreign, ...]:
        return (plugins.origin("metric", self.name),)


@dataclass(frozen=True)
class FunctionMetric(Metric):
    """A function of a script, by the name that the script gives it."""

    name: str
    function: MetricFunction

    @property
    def called(self) -> str:
        return self.name

    def values(self, seen: Predictions) -> dict[str, float]:
        return _told(self.name, self.function, seen)


def _told(name: str, function: MetricFunction, seen: Predictions) -> dict[str, float]:
    """What a user's function says; its failure is one sentence."""
    try:
        found = function(seen.outputs.clone(), seen.targets.clone())  # whatever it writes there, it alone reads
        numbers = found if isinstance(found, Mapping) else {name: found}
        told = {str(key): float(value) for key, value in numbers.items()}
    except Exception as error:  # whatever a stranger's function raises
        what = f"metric {name!r} that fails ({type(error).__name__}: {str(error).strip()[:200]})"
        raise DataError(what, "a function of (outputs, targets) that returns a number, or numbers by name") from None
    taken = next((key for key in told if key in TAKEN), None)
    if taken is not None:
        found = f"metric {name!r} that says something of {taken!r}, which the history has already"
        raise DataError(found, "a name of its own", f'for one "my_{taken}"')
    return told


def metrics_of(asked: Mapping[str, MetricFunction] | Iterable[Any] | None) -> tuple[Metric, ...]:
    """Metrics as parts: functions by name, or kinds and parts in a list."""
    if asked is None:
        return ()
    if isinstance(asked, Mapping):
        return tuple(FunctionMetric(str(name), function) for name, function in asked.items())
    if isinstance(asked, str):
        asked = [asked]
    return tuple(one if isinstance(one, Metric) else read(Metric, one, "metrics") for one in asked)


def add_metric(name: str) -> Callable[[MetricFunction], MetricFunction]:
    """A decorator: a function of (outputs, targets) that a file may name, metrics = [{ kind = "own", name = ... }]."""

    def keep(function: MetricFunction) -> MetricFunction:
        plugins.add("metric", name, function)
        return function

    return keep
