"""Metrics of a released model on public test records, beside loss and accuracy; scikit-learn computes them.

They look at nothing else, so they cost nothing. A class that the test records do not have has no share in a mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.codec import Foreign, Part, added, read
from sordino.codec.boundary import figures, returns
from sordino.data.scores import ONLY_CLASS, by_class, labels_of, said_of
from sordino.errors import DataError
from sordino.parts.losses import IGNORED, Loss

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
class Seen:
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
        said, counted = said_of(self.outputs, labels)[0], labels != IGNORED
        return labels[counted].numpy(), said[counted].numpy()

    @property
    def sides(self) -> tuple[Array, Array]:
        """Each class against the rest: is it there [k, classes], and how likely is it said to be."""
        labels = self.labels
        if not by_class(self.outputs, labels):
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
    @returns(lambda found, *_: figures(found))
    def values(self, seen: Seen) -> dict[str, float]:
        """Every figure with its name."""


def _each(seen: Seen, name: str, score: Callable[[Array, Array], float], each: bool) -> dict[str, float]:
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

    def values(self, seen: Seen) -> dict[str, float]:
        from sklearn.metrics import roc_auc_score

        return _each(seen, self.called, roc_auc_score, self.each)


@dataclass(frozen=True)
class AveragePrecision(Metric, kind="average_precision"):
    """Average precision, for rare classes and many labels: the mean over classes or labels; `each` shows them."""

    each: bool = False

    def values(self, seen: Seen) -> dict[str, float]:
        from sklearn.metrics import average_precision_score

        return _each(seen, self.called, average_precision_score, self.each)


@dataclass(frozen=True)
class BalancedAccuracy(Metric, kind="balanced_accuracy"):
    """The mean over classes of the share that is found; reported for classes even if it is not asked for."""

    def values(self, seen: Seen) -> dict[str, float]:
        from sklearn.metrics import recall_score

        true, said = seen.pairs
        return {self.called: float(recall_score(true, said, labels=np.unique(true), average="macro"))}


@dataclass(frozen=True)
class F1(Metric, kind="f1"):
    """Harmonic mean of precision and recall: of class 1 (`binary`), or over classes (`macro`, `micro`, `weighted`)."""

    average: Literal["macro", "micro", "weighted", "binary"] = "macro"

    def values(self, seen: Seen) -> dict[str, float]:
        from sklearn.metrics import f1_score

        true, said = seen.pairs
        return {self.called: float(f1_score(true, said, average=self.average, zero_division=0.0))}


@dataclass(frozen=True)
class TokenAccuracy(Metric, kind="token_accuracy"):
    """The share of tokens whose label is found, padding left out; `accuracy` of sequences is the same."""

    def values(self, seen: Seen) -> dict[str, float]:
        from sklearn.metrics import accuracy_score

        return {self.called: float(accuracy_score(*seen.pairs))}


@dataclass(frozen=True)
class GroupAccuracy(Metric, kind="group_accuracy"):
    """Accuracy on the test records of each public group, and the lowest of them."""

    def values(self, seen: Seen) -> dict[str, float]:
        if seen.groups is None:
            raise DataError("test records without groups", "a public group of each", "Task.of(..., groups=...)")
        right = said_of(seen.outputs, seen.labels)[0] == seen.labels
        shares = {
            self._called(int(group), seen): self._share(right, seen, seen.groups == group)
            for group in np.unique(seen.groups.numpy())
        }
        return {**{f"accuracy/{group}": share for group, share in shares.items()}, "worst_group": min(shares.values())}

    def _share(self, right: Tensor, seen: Seen, own: Tensor) -> float:
        counted = (seen.labels != IGNORED)[own]
        return float(right[own][counted].double().mean())

    def _called(self, group: int, seen: Seen) -> str:
        return seen.names[group] if group < len(seen.names) else str(group)


@dataclass(frozen=True)
class R2(Metric, kind="r2"):
    """1 - sum of squared errors / sum of squared deviations from the mean, for numbers: 0 is what the mean gets."""

    def values(self, seen: Seen) -> dict[str, float]:
        from sklearn.metrics import r2_score

        return {self.called: float(r2_score(*seen.numbers))}


@dataclass(frozen=True)
class Mae(Metric, kind="mae"):
    """Mean absolute error, for numbers."""

    def values(self, seen: Seen) -> dict[str, float]:
        from sklearn.metrics import mean_absolute_error

        return {self.called: float(mean_absolute_error(*seen.numbers))}


@dataclass(frozen=True)
class Own(Metric, kind="own"):
    """A function that `sordino.add_metric(name)` has added: (outputs, targets) -> a number, or numbers by name."""

    name: str

    def __post_init__(self) -> None:
        added.find("metric", self.name)

    @property
    def called(self) -> str:
        return self.name

    def values(self, seen: Seen) -> dict[str, float]:
        return _told(self.name, added.find("metric", self.name), seen)

    def rests_on(self) -> tuple[Foreign, ...]:
        return (added.origin("metric", self.name),)


@dataclass(frozen=True)
class Given(Metric):
    """A function of a script, by the name that the script gives it."""

    name: str
    function: MetricFunction

    @property
    def called(self) -> str:
        return self.name

    def values(self, seen: Seen) -> dict[str, float]:
        return _told(self.name, self.function, seen)


def _told(name: str, function: MetricFunction, seen: Seen) -> dict[str, float]:
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
        return tuple(Given(str(name), function) for name, function in asked.items())
    if isinstance(asked, str):
        asked = [asked]
    return tuple(one if isinstance(one, Metric) else read(Metric, one, "metrics") for one in asked)


def add_metric(name: str) -> Callable[[MetricFunction], MetricFunction]:
    """A decorator: a function of (outputs, targets) that a file may name, metrics = [{ kind = "own", name = ... }]."""

    def keep(function: MetricFunction) -> MetricFunction:
        added.add("metric", name, function)
        return function

    return keep
