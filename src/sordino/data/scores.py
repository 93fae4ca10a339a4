"""What a model gets right, as sums over records: parts of a test set are added, and the figures follow from the whole.

    accuracy = sum_c right_c / sum_c there_c        balanced_accuracy = mean of right_c / there_c over classes there

On skewed classes the first alone misleads: a model that always says the larger class has the larger class's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from sordino.parts.losses import IGNORED, Loss

ONLY_CLASS = "only_class"  # a figure's name: the one class that a model predicts for every record, if it does
HEAD = 4  # entries before those of the classes: records, summed loss, summed squares, labels
Keep = Callable[[Tensor, Tensor], None]


def judged(model: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]], losses: Loss, keep: Keep | None = None) -> Tensor:
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
                found, classes = said_of(out, labels)
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


def said_of(out: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The class that a model says, for every label, and how many it can say: one score per class, or one for two."""
    if by_class(out, labels):
        return out.argmax(-1), out.shape[-1]
    return (out.reshape(labels.shape) > 0).long(), 2


def by_class(out: Tensor, labels: Tensor) -> bool:
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
