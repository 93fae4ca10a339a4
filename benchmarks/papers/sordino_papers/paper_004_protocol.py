"""Paper 004, Table 2 and Figures 1, 3 and 4 as the authors ran them. NOT PRIVATE: the mean is clipped, no record is.

    w <- w - (a / t) A_sigma^-1 (clip(mean gradient) + N(0, nu^2)),   nu as published for each epsilon

One record may move the clipped mean by as much as the whole clip norm, so no epsilon follows from nu: these rows stand
beside our own Table 2 (004-table2) to show what the published figures measure. All settings of a seed are run as one
batch of models: same minibatches, same normal draws, so they are paired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, softmax

from sordino.data.clients import Records
from sordino.data.datasets import load
from sordino_papers.panels import curves
from sordino_papers.paper_004 import PUBLISHED
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import in_all, verdict

NOISE = {0.30: 0.1162, 0.25: 0.1393, 0.20: 0.1739, 0.15: 0.2316, 0.10: 0.3471}  # on the clipped mean, as published
SIGMAS = (0.0, 1.0, 2.0, 3.0)
STEPS = (0.5, 1.0, 2.0, 3.0)  # of the paper's six
BATCH, EPOCHS, DECAY, RADIUS = 128, 10, 1e-4, 1.0
ALL_EPOCHS = 50  # the paper's; its noise was computed for ten
WATCHED = 2000  # images that losses are measured on


@dataclass(frozen=True)
class Models:
    """Many linear models at once: model r has the noise, smoothing and step of entry r."""

    noise: Tensor  # [R]
    sigma: Tensor  # [R]
    step: Tensor  # [R], the a of a / t

    @classmethod
    def of(cls, settings: list[tuple[float, float, float]]) -> Models:
        return cls(*(torch.tensor(column) for column in zip(*settings, strict=True)))


@cache
def mnist() -> tuple[Records, Records, Records]:
    """50,000 images to train on, 10,000 to validate on, 10,000 to test on; standardised and flat."""
    data, test = load("mnist", train=50_000, validation=True, standard=True), load("mnist", standard=True)
    return _flat(data.x, data.y), _flat(data.test_x, data.test_y), _flat(test.test_x, test.test_y)


def _flat(x: object, y: object) -> Records:
    return Records(torch.as_tensor(x).flatten(1), torch.as_tensor(y))


def smoothed(rows: Tensor, sigma: Tensor) -> Tensor:
    """(I + sigma_r L)^-1 of every row [R, d], on a cycle, by Fourier: 1 + 2 sigma (1 - cos(2 pi k / d))."""
    d = rows.shape[1]
    waves = 1 - torch.cos(2 * torch.pi * torch.arange(d // 2 + 1) / d)
    made: Tensor = torch.fft.irfft(torch.fft.rfft(rows) / (1 + 2 * sigma[:, None] * waves), d)
    return made


def clipped(rows: Tensor) -> Tensor:
    """Every row [R, d] cut to the clip norm: the mean gradient of a tensor, which bounds no record's part in it."""
    sizes: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / (sizes / RADIUS).clamp(min=1.0)


def gradients(w: Tensor, c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean gradients of the cross-entropy of all models: weights [R, 10, p] and offsets [R, 10]."""
    off = (softmax(_scores(w, c, x), -1) - one_hot(y, 10)[:, None]) / len(x)  # [b, R, 10]
    return (off.flatten(1).T @ x).view_as(w), off.sum(0)


def _scores(w: Tensor, c: Tensor, x: Tensor) -> Tensor:
    return (x @ w.flatten(0, 1).T).view(len(x), *c.shape) + c  # [b, R, 10]


def minibatches(seed: int, epochs: int) -> Iterator[Tensor]:
    """Epochs of shuffled minibatches of 128."""
    coins = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(mnist()[0]), generator=coins)
        yield from torch.split(order[: len(order) // BATCH * BATCH], BATCH)


def descended(models: Models, seed: int, epochs: int = EPOCHS) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The models after every step, (t, weights [R, 10, p], offsets [R, 10])."""
    train, coins = mnist()[0], torch.Generator().manual_seed(10_000 + seed)
    w, c = torch.zeros(len(models.noise), 10, train.x.shape[1]), torch.zeros(len(models.noise), 10)
    for t, batch in enumerate(minibatches(seed, epochs), 1):
        mean_w, mean_c = gradients(w, c, train.x[batch], train.y[batch])
        for part, mean in ((w, mean_w), (c, mean_c)):
            rows = clipped((mean + DECAY * part).flatten(1))
            rows = rows + models.noise[:, None] * torch.randn(rows.shape[1], generator=coins)
            part -= (models.step / t).view(-1, *(1,) * (part.dim() - 1)) * smoothed(rows, models.sigma).view_as(part)
        yield t, w, c


def loss(w: Tensor, c: Tensor, data: Records) -> list[float]:
    """Cross-entropy of every model on the first images."""
    scores, y = _scores(w, c, data.x[:WATCHED]), data.y[:WATCHED]
    return [float(cross_entropy(scores[:, r], y)) for r in range(len(w))]


def accuracy(w: Tensor, c: Tensor, data: Records) -> list[float]:
    """Percent right of every model, on all images."""
    right = (_scores(w, c, data.x).argmax(-1) == data.y[:, None]).float().mean(0)
    return [100 * float(one) for one in right]


def settings(table: bool) -> list[tuple[float, float, float]]:
    """(epsilon, sigma, a): Table 2 with a = 1 and a run without noise (epsilon 0), or Figure 4's other steps."""
    if table:
        return [(0.0, 0.0, 1.0), *((epsilon, s, 1.0) for epsilon in NOISE for s in SIGMAS)]
    return [(e, s, a) for e in (0.1, 0.2) for s in (0.0, 1.0, 3.0) for a in STEPS if a != 1.0]


def one_seed(seed: int, table: bool, epochs: int = EPOCHS) -> list[Row]:
    """All settings of one seed: losses along the way, accuracy at the end."""
    asked = settings(table)
    models = Models.of([(NOISE.get(epsilon, 0.0), s, a) for epsilon, s, a in asked])
    steps = epochs * (len(mnist()[0]) // BATCH)
    marks = {max(1, round(steps * share)) for share in (0.002, 0.01, 0.03, 0.1, 0.4, 1.0)}
    found: list[Row] = []
    for t, w, c in descended(models, seed, epochs):
        if t in marks:
            pairs = zip(asked, loss(w, c, mnist()[0]), loss(w, c, mnist()[1]), strict=True)
            found += [{**_named(one), "step": t, "train loss": a, "validation loss": b} for one, a, b in pairs]
    ends = zip(asked, accuracy(w, c, mnist()[1]), accuracy(w, c, mnist()[2]), strict=True)
    return [*found, *({**_named(one), "validation": a, "accuracy": b} for one, a, b in ends)]


def _named(one: tuple[float, float, float]) -> Row:
    return {"epsilon": one[0], "sigma": one[1], "a": one[2]}


def protocol(repeats: int, workers: int) -> list[Row]:
    """Every figure over the seeds; of Table 2 also what was published."""
    jobs = [(seed, table) for table in (True, False) for seed in range(repeats)]
    rows = [row for one in side_by_side(one_seed, jobs, workers) for row in one]
    keys = ("epsilon", "sigma", "a")
    drawn = [row for row in rows if "step" in row and _drawn(row)]
    ends = _both([row for row in rows if "accuracy" in row], keys, "accuracy", "validation")
    return [{**row, **_published(row)} for row in ends] + _both(drawn, (*keys, "step"), "validation loss", "train loss")


def all_epochs(repeats: int, workers: int) -> list[Row]:
    """Table 2 with the paper's 50 epochs."""
    found = side_by_side(one_seed, [(seed, True, ALL_EPOCHS) for seed in range(repeats)], workers)
    ends = [row for one in found for row in one if "accuracy" in row]
    return [{**row, **_published(row)} for row in _both(ends, ("epsilon", "sigma", "a"), "accuracy", "validation")]


def _both(rows: list[Row], keys: tuple[str, ...], figure: str, beside: str) -> list[Row]:
    """`gathered`, with the mean of a second figure in the same row."""
    pairs = zip(gathered(rows, keys, figure), gathered(rows, keys, beside), strict=True)
    return [{**row, beside: other[beside]} for row, other in pairs]


def _drawn(row: Row) -> bool:
    """Whether Figures 1 and 3 have this curve."""
    return row["a"] == 1.0 and (row["sigma"] == 0.0 or (row["epsilon"] in (0.1, 0.2) and row["sigma"] != 2.0))


def _published(row: Row) -> Row:
    known = "accuracy" in row and row["epsilon"] and row["a"] == 1.0
    return {"published": PUBLISHED[row["epsilon"]][int(row["sigma"])]} if known else {}


def protocol_claims(rows: list[Row]) -> list[Row]:
    """Smoothing against none in every column of Table 2, and at every step of Figure 4."""
    found = table_claims(rows, "the paper's protocol (not private)")
    for epsilon in (0.1, 0.2):
        pairs = {f"a = {a:g}": (_test(rows, epsilon, 3.0, a), _test(rows, epsilon, 0.0, a)) for a in STEPS}
        who = f"004: Figure 4 (not private), noise of epsilon {epsilon:g}"
        text = f"{who}: smoothing (sigma 3) beats none at every step a / t"
        found.append(in_all(text, pairs, "nothing"))
    return found


def table_claims(rows: list[Row], protocol: str) -> list[Row]:
    """Smoothing against none in every column of Table 2."""
    found = []
    for epsilon in NOISE:
        s = best_sigma(rows, epsilon)
        text = f"004: {protocol}, noise of epsilon {epsilon:g}: smoothing (sigma {s:g}) beats none"
        found.append(verdict(text, _test(rows, epsilon, s), _test(rows, epsilon, 0.0), "sigma: validation images"))
    return found


def best_sigma(rows: list[Row], epsilon: float) -> float:
    """The sigma above 0 with the best mean accuracy on validation images."""
    held = [row for row in picked(rows, epsilon=epsilon, a=1.0) if "validation" in row and row["sigma"]]
    return float(max(held, key=lambda row: float(row["validation"]))["sigma"])


def _test(rows: list[Row], epsilon: float, s: float, a: float = 1.0) -> list[float]:
    (row,) = [row for row in picked(rows, epsilon=epsilon, sigma=s, a=a) if "accuracy" in row]
    return list(row["values"])


def draw_protocol(rows: list[Row], path: Path) -> None:
    """Validation loss by step (Figures 1 and 3), beside the accuracy by step size (Figure 4)."""
    held = [row for row in rows if "validation loss" in row]
    label = {0.0: "no noise", **{e: f"epsilon {e:g}" for e in NOISE}}
    panels = {"DP-SGD (Figure 1)": {label[e]: picked(held, epsilon=e, sigma=0.0, a=1.0) for e in (0.0, 0.3, 0.2, 0.1)}}
    for e in (0.2, 0.1):
        panels[f"epsilon {e:g} (Figure 3)"] = {
            f"sigma {s:g}": picked(held, epsilon=e, sigma=s, a=1.0) for s in (0.0, 1.0, 3.0)
        }
    curves(
        panels, "step", "validation loss", path, xlabel="steps taken", ylabel="validation loss", log=True, log_y=True
    )
    ends = [row for row in rows if "accuracy" in row]
    figure4 = {
        f"noise of epsilon {e:g}": {f"sigma {s:g}": _by_a(ends, e, s) for s in (0.0, 1.0, 3.0)} for e in (0.1, 0.2)
    }
    beside = path.with_stem(f"{path.stem}-steps")
    curves(figure4, "a", "accuracy", beside, xlabel="a of the step a / t", ylabel="test accuracy, %")


def draw_table(rows: list[Row], path: Path) -> None:
    """Accuracy by the published epsilon, ours and the paper's."""
    ours = {f"sigma {s:g}": sorted(picked(rows, sigma=s, a=1.0), key=lambda row: float(row["epsilon"])) for s in SIGMAS}
    ours = {label: [row for row in line if row["epsilon"]] for label, line in ours.items()}
    theirs = {
        label: [{**row, "accuracy": row["published"], "spread": None} for row in line] for label, line in ours.items()
    }
    curves({"ours, 50 epochs": ours, "published": theirs}, "epsilon", "accuracy", path,
           xlabel="epsilon as published", ylabel="test accuracy, %")  # fmt: skip


def _by_a(rows: list[Row], epsilon: float, s: float) -> list[Row]:
    return sorted(picked(rows, epsilon=epsilon, sigma=s), key=lambda row: float(row["a"]))


def _quick(epochs: int = EPOCHS) -> Row:
    """Seed 0 of DP-SGD at the noise of epsilon 0.1."""
    (row,) = [row for row in picked(one_seed(0, True, epochs), epsilon=0.1, sigma=0.0) if "accuracy" in row]
    return {key: row[key] for key in ("epsilon", "sigma", "a", "accuracy")}


STUDIES = (
    Study(
        "004-protocol",
        "Table 2 and Figures 1, 3, 4 by the paper's own protocol (NOT private)",
        "The mean gradient is clipped at 1, tensor by tensor, so no record is bounded and no epsilon follows; "
        '"epsilon" only names the published noise (0: none). Step a / t, L2 0.0001, batches of 128, 10 epochs: those '
        "the published noise was computed for (the paper trains for 50). "
        "Our private runs are 004-table2. [Figure 4 is drawn apart](../figures/004-protocol-steps.png).",
        protocol,
        protocol_claims,
        draw_protocol,
        5,
        "a = 1 and everything else by the paper",
        _quick,
        "accuracy",
    ),
    Study(
        "004-protocol-50",
        "Table 2 by the paper's own protocol with its 50 epochs (NOT private)",
        "As 004-protocol, Table 2 alone, with the 50 epochs that the paper trains for at noise computed for ten.",
        all_epochs,
        partial(table_claims, protocol="the paper's protocol, 50 epochs (not private)"),
        draw_table,
        5,
        "a = 1 and everything else by the paper",
        partial(_quick, ALL_EPOCHS),
        "accuracy",
    ),
)
