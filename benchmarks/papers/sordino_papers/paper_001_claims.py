"""Paper 001: what Figures 3, 5 and 6 are said to show, judged by our runs, and the plots."""

from __future__ import annotations

from pathlib import Path

from sordino_papers import paper_001 as digits
from sordino_papers import paper_001_rounds as rounds
from sordino_papers.choosing import only, turned, within
from sordino_papers.panels import curves
from sordino_papers.paper_001_silos import SILOS, odd_even
from sordino_papers.studies import Row, Study, claim, picked
from sordino_papers.verdicts import verdict

HELD = "step size: 7,750 other training images, for each split, epsilon and algorithm"
LABELS = {
    "minibatch": "minibatch SGD",
    "accelerated": "accelerated",
    "local": "Local SGD",
    "local, large batches": "Local SGD, large batches",
}


def _cell(rows: list[Row], algorithm: str, cohort: int, epsilon: float | None) -> Row:
    return only(picked(rows, algorithm=algorithm, cohort=cohort, epsilon=epsilon))


def _below(text: str, one: Row, other: Row) -> Row:
    return verdict(f"001: {text}", turned(one), turned(other), HELD, unit="of error")


def figure3_claims(rows: list[Row]) -> list[Row]:
    """Against private Local SGD at every epsilon, against NON-private Local SGD from 12 on, and the price at 18."""
    judged = []
    for cohort in digits.COHORTS:
        for other in digits.LOCAL:
            judged += [
                _below(
                    f"digits, M = {cohort}, epsilon {epsilon:g}: noisy minibatch SGD is below noisy {LABELS[other]}",
                    _cell(rows, "minibatch", cohort, epsilon),
                    _cell(rows, other, cohort, epsilon),
                )
                for epsilon in digits.EPSILONS
            ]
        judged += _free(rows, cohort)
        loud, quiet = (_cell(rows, "minibatch", cohort, epsilon)["values"] for epsilon in (18.0, None))
        text = f"001: digits, M = {cohort}: at epsilon 18 minibatch SGD is as good as without noise"
        gaps = [a - b for a, b in zip(loud, quiet, strict=True)]
        judged.append(within(text, gaps, 0.005, HELD, "of error"))
    return [*judged, _less_noise(rows)]


def _free(rows: list[Row], cohort: int) -> list[Row]:
    return [
        _below(
            f"digits, M = {cohort}, epsilon {epsilon:g}: noisy {LABELS[one]} is below NON-private {LABELS[other]}",
            _cell(rows, one, cohort, epsilon),
            _cell(rows, other, cohort, None),
        )
        for one, other in (("minibatch", "local"), ("accelerated", "local"), ("accelerated", "local, large batches"))
        for epsilon in (12.0, 18.0)
    ]


def _less_noise(rows: list[Row]) -> Row:
    shares = [row["ours"] / row["paper"] for row in picked(rows, algorithm="noise")]
    text = "001: at the same epsilon our noise is below the paper's formula (its L is twice the Lipschitz constant)"
    return claim(text, f"{min(shares):.2f} to {max(shares):.2f} of it", max(shares) < 1)


def figure5_claims(rows: list[Row]) -> list[Row]:
    """Silos that are alike: the two algorithms are about the same, but for epsilon up to 1.5."""
    judged = []
    for other in digits.LOCAL:
        for epsilon in digits.ALIKE_EPSILONS:
            one, rival = (_cell(rows, name, 12, epsilon) for name in ("minibatch", other))
            place = f"digits, silos alike, M = 12, epsilon {epsilon:g}"
            if epsilon <= 1.5:
                judged.append(_below(f"{place}: noisy minibatch SGD is below noisy {LABELS[other]}", one, rival))
            else:
                gaps = [a - b for a, b in zip(one["values"], rival["values"], strict=True)]
                text = f"001: {place}: noisy minibatch SGD and noisy {LABELS[other]} are the same"
                judged.append(within(text, gaps, 0.01, HELD, "of error"))
    return judged


def draw_figure3(rows: list[Row], path: Path) -> None:
    """One panel per cohort."""
    _draw({f"M = {cohort}": cohort for cohort in digits.COHORTS}, (*digits.CENTRAL, *digits.LOCAL), rows, path)


def draw_figure5(rows: list[Row], path: Path) -> None:
    """One panel."""
    _draw({"silos alike, M = 12": 12}, digits.ALIKE, rows, path)


def _draw(panels: dict[str, int], names: tuple[str, ...], rows: list[Row], path: Path) -> None:
    lines = {
        title: {LABELS[name]: picked(rows, algorithm=name, cohort=cohort) for name in names}
        for title, cohort in panels.items()
    }
    label = "epsilon of every silo (dashed: no noise)"
    curves(lines, "epsilon", "error", path, xlabel=label, ylabel="test error", log=True)


def race_claims(rows: list[Row]) -> list[Row]:
    """With the same few rounds, and the same epsilon."""
    return [
        _below(
            f"digits, epsilon 12, {count} rounds: accelerated is below plain minibatch SGD",
            only(picked(rows, algorithm="accelerated", rounds=count)),
            only(picked(rows, algorithm="minibatch", rounds=count)),
        )
        for count in rounds.SHORT
    ]


def draw_race(rows: list[Row], path: Path) -> None:
    """One panel."""
    panel = {LABELS[name]: picked(rows, algorithm=name) for name in rounds.ALGORITHMS}
    label = "rounds, noise for epsilon 12 in all of them"
    curves({f"M = {SILOS}": panel}, "rounds", "error", path, xlabel=label, ylabel="test error", log=True)


def _quick3() -> Row:
    """Split 0 of minibatch SGD, M = 12, epsilon 12."""
    return _quick(12, 12.0, False)


def _quick5() -> Row:
    """Split 0 of minibatch SGD, silos alike, epsilon 3."""
    return _quick(12, 3.0, True)


def _quick(cohort: int, epsilon: float, alike: bool) -> Row:
    task, held = odd_even(0, alike)
    error, _ = digits.best_of(digits.plans("minibatch", cohort, epsilon), task, held, 0)
    return {"algorithm": "minibatch", "cohort": cohort, "epsilon": epsilon, "error": error}


def _quick_race() -> Row:
    """Split 0 of the shortest accelerated run."""
    task, held = odd_even(0)
    error, _ = digits.best_of(digits.plans("accelerated", SILOS, 12.0, rounds.SHORT[0]), task, held, 0)
    return {"algorithm": "accelerated", "rounds": rounds.SHORT[0], "error": error}


ABOUT = (
    "R = 35, delta = n^-2, n = 1238, all records of a silo in every round; Local SGD takes 100 steps of one record, or "
    "10 of a tenth of them (large batches). 50 plain principal components of public images, scaled to a mean length of "
    "1. Five step sizes each; no epsilon here accounts for the choice. No momentum anywhere."
)
STUDIES = (
    Study(
        "001-figure3",
        "Figures 3 and 6: odd against even digits, 25 heterogeneous silos",
        f"{ABOUT} Epsilon 0.75, 3, 12 of the paper's six (18 for the central algorithms), M = 25 and 12. Of the kept "
        "rows the first two splits let NON-private Local SGD choose among steps up to 0.25 (9 with large batches), the "
        "others up to 2 (30); all of them took one of the largest.",
        digits.figure3,
        figure3_claims,
        draw_figure3,
        chosen=HELD,
        quick=_quick3,
        measure="error",
    ),
    Study(
        "001-figure5",
        "Figure 5: odd against even digits, 25 silos that are alike",
        f"{ABOUT} The images of Figure 3 dealt out at random, M = 12.",
        digits.figure5,
        figure5_claims,
        draw_figure5,
        chosen=HELD,
        quick=_quick5,
        measure="error",
    ),
    Study(
        "001-rounds",
        "Acceleration: error against rounds at epsilon 12",
        "The task of Figure 3, M = 25; the noise is calibrated for each number of rounds.",
        rounds.race,
        race_claims,
        draw_race,
        chosen=HELD,
        quick=_quick_race,
        measure="error",
    ),
)
