"""Paper 002 on loans: what its figures are said to show, judged by our runs, and the plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from sordino_papers import paper_002 as loans
from sordino_papers.choosing import least, only
from sordino_papers.claims import settled
from sordino_papers.panels import curves
from sordino_papers.studies import Row, Study, picked
from sordino_papers.verdicts import fact, in_all, verdict

HELD_LOANS = "T, E and rules: 1,000 loans that are neither trained on nor reported; step 0.05 and clip 1: nobody"
THEORY = "E = T^(2/3)"


def loans_claims(rows: list[Row]) -> list[Row]:
    """Figures 1, 3, 5 and 7 (and the tables that list their best points)."""
    checks = (_path_claims, _total_claims, _steps_claims, _rule_claims)
    return [row for check in checks for row in settled(check, rows)]


def _path_claims(rows: list[Row]) -> list[Row]:
    """Figure 1: the noise is felt the more the smaller epsilon is."""
    ends = {e: only(picked(rows, figure="1", epsilon=loans.named(e), k=100)) for e in loans.EPSILONS}
    pairs = [(1.0, 3.0), (3.0, 5.0)]
    return [
        verdict(
            f"002: loans, Figure 1: after 100 iterations the loss at epsilon {small:g} is above that at {large:g}",
            _logs(ends[small]),
            _logs(ends[large]),
            HELD_LOANS,
            unit="(log of the loss)",
        )
        for small, large in pairs
    ]


def _logs(row: Row) -> list[float]:
    return [math.log(float(one)) for one in row["values"]]


def _total_claims(rows: list[Row]) -> list[Row]:
    """Figure 3, Table II: T* is inside and grows with epsilon."""
    mine = {e: picked(rows, figure="3", epsilon=loans.named(e)) for e in loans.EPSILONS}
    best, judged = {e: least(found) for e, found in mine.items()}, list[Row]()
    for epsilon in (1.0, 3.0, 5.0):
        last = only(picked(rows, figure="3", epsilon=epsilon, T=loans.TOTALS[-1]))
        first = only(picked(rows, figure="3", epsilon=epsilon, T=loans.TOTALS[0]))
        for other, where in ((last, "after more"), (first, "before")):
            text = f"002: loans, epsilon {epsilon:g}: T* = {best[epsilon]['T']} is below T = {other['T']} ({where})"
            judged.append(_lower(text, best[epsilon], other))
    text = "002: loans, the best T grows with epsilon (1, 3, 5, none; the paper 10, 30, 30, 100)"
    return [*judged, Trend("T", True, _fewer, HELD_LOANS, "(log of the loss)").judged(text, mine, best)]


def _lower(text: str, one: Row, other: Row) -> Row:
    """By the logs of the losses: a noisy loss is many times, not so much, larger."""
    return verdict(text, _fewer(one), _fewer(other), HELD_LOANS, unit="(log of the loss)")


def _fewer(row: Row) -> list[float]:
    return [-loss for loss in _logs(row)]


@dataclass(frozen=True)
class Trend:
    """A claim that the best number of `axis` grows (or falls) with epsilon, decided at the two ends of epsilon.

    Yes: at either end the number chosen there is above the one chosen at the other end, both by a paired interval. No:
    the same with the numbers in the wrong order, or one end clearly against it. Undecided where one number is best at
    both ends: there is nothing to compare.
    """

    axis: str
    grows: bool
    score: Callable[[Row], list[float]]  # seed by seed, more is better
    chosen: str
    unit: str

    def judged(self, text: str, found: Mapping[float, Sequence[Row]], best: Mapping[float, Row]) -> Row:
        """The row of the claim; `found` and `best` by epsilon, of which the infinite one is shown only."""
        first, *_, last = sorted(epsilon for epsilon in found if math.isfinite(epsilon))
        shown = f"{self.axis}* = {[int(best[e][self.axis]) for e in sorted(found)]}"
        here, there = best[first][self.axis], best[last][self.axis]
        if here == there:
            return {**fact(text, shown, True, best[first]["repeats"], self.chosen), "verdict": "undecided"}
        pairs = {
            f"epsilon {e:g}, {self.axis} {best[e][self.axis]} against {other}": self._pair(found[e], best[e], other)
            for e, other in ((first, there), (last, here))
        }
        row = in_all(text, pairs, self.chosen, unit=self.unit)
        turned = {"yes": "no"}.get(row["verdict"], "undecided")
        answer = row["verdict"] if (here < there) == self.grows else turned
        return {**row, "measured": f"{shown}; {row['measured']}", "verdict": answer}

    def _pair(self, found: Sequence[Row], best: Row, other: int) -> tuple[list[float], list[float]]:
        return self.score(best), self.score(only(picked(found, **{self.axis: other})))


def _steps_claims(rows: list[Row]) -> list[Row]:
    """Figure 5, Table III: smaller epsilon wants larger E."""
    mine = {e: picked(rows, figure="5", epsilon=loans.named(e)) for e in loans.EPSILONS}
    best, judged = {e: least(found) for e, found in mine.items()}, list[Row]()
    for epsilon in (1.0, 3.0, 5.0):
        one = only(picked(rows, figure="5", epsilon=epsilon, E=1))
        text = f"002: loans, T = 120, epsilon {epsilon:g}: E* = {best[epsilon]['E']} is below E = 1"
        judged.append(_lower(text, best[epsilon], one))
    text = "002: loans, smaller epsilon wants larger E (1, 3, 5, none)"
    return [*judged, Trend("E", False, _fewer, HELD_LOANS, "(log of the loss)").judged(text, mine, best)]


def _rule_claims(rows: list[Row]) -> list[Row]:
    """Figure 7: E = T^(2/3) has the lowest losses, and moves least with T; everybody in every round, and in turns."""
    whose = ((loans.CLIENTS, "b = N"), (loans.MANY, "b = N"), (loans.TURN, "b = N/10 in turns"))
    return [
        row for cohort, who in whose if picked(rows, figure="7", cohort=cohort) for row in _rules(rows, cohort, who)
    ]


def _rules(rows: list[Row], cohort: int, who: str) -> list[Row]:
    mine = {rule: _later(rows, cohort, rule) for rule in loans.RULES}
    rivals = [rule for rule in loans.RULES if rule != THEORY]
    rival = min(rivals, key=lambda rule: mean(math.log(row["validation"]) for row in mine[rule]))
    held = {rule: _flatness([row["validation"] for row in mine[rule]]) for rule in rivals}
    flat, place = min(held, key=lambda rule: held[rule]), f"002: loans, Figure 7, {who}: {THEORY}"
    low = f"{place} has lower losses over T >= 10 than the best other rule, {rival}"
    still = f"{place} moves less over T >= 10 than the flattest other rule, {flat}"
    one = f"{place} has lower losses over T >= 10 than E = 1"
    unit = "(mean log of the loss)"
    return [
        verdict(low, _height(mine[THEORY]), _height(mine[rival]), HELD_LOANS, unit=unit),
        verdict(one, _height(mine[THEORY]), _height(mine["E = 1"]), HELD_LOANS, unit=unit),
        verdict(still, _steady(mine[THEORY]), _steady(mine[flat]), HELD_LOANS, unit="(log of worst over best loss)"),
        _ratios(mine, who, flat),
    ]


def _later(rows: list[Row], cohort: int, rule: str) -> list[Row]:
    return [row for row in picked(rows, figure="7", cohort=cohort, rule=rule) if row["T"] >= 10]


def _ratios(mine: dict[str, list[Row]], who: str, flat: str) -> Row:
    """Worst over best MEAN loss, as the paper's figure shows it; its interval is the jackknife's over seeds."""
    ratios = {rule: math.exp(_flatness([row["loss"] for row in found])) for rule, found in mine.items()}
    shown = ", ".join(f"{rule}: {ratio:.2f}" for rule, ratio in ratios.items())
    text = f"002: loans, Figure 7, {who}: {THEORY} has a smaller worst over best MEAN loss than {flat}"
    row = verdict(text, _without(mine[THEORY]), _without(mine[flat]), HELD_LOANS, unit="(its log, jackknife)")
    return {**row, "measured": f"{row['measured']}; {shown}"}


def _without(found: list[Row]) -> list[float]:
    """Pseudo-values n s - (n - 1) s_{-i} of s, minus the log of worst over best mean loss; s_{-i} is without seed i."""
    seeds = list(zip(*(row["values"] for row in found), strict=True))
    rest = [_of_means([*seeds[:i], *seeds[i + 1 :]]) for i in range(len(seeds))]
    return [len(seeds) * _of_means(seeds) - (len(seeds) - 1) * one for one in rest]


def _of_means(seeds: Sequence[Sequence[float]]) -> float:
    return -_flatness([mean(losses) for losses in zip(*seeds, strict=True)])


def _flatness(losses: list[float]) -> float:
    return math.log(max(losses) / min(losses))


def _height(found: list[Row]) -> list[float]:
    """Minus the mean log loss over T, seed by seed."""
    return [-mean(math.log(one) for one in seed) for seed in zip(*(row["values"] for row in found), strict=True)]


def _steady(found: list[Row]) -> list[float]:
    """Minus the log of worst over best loss, seed by seed."""
    return [-_flatness(list(seed)) for seed in zip(*(row["values"] for row in found), strict=True)]


def draw_loans(rows: list[Row], path: Path) -> None:
    """Figures 1, 3, 5, and 7 twice."""
    labels = {loans.named(e): f"epsilon {e:g}" if math.isfinite(e) else "no noise" for e in loans.EPSILONS}
    shown = {"Figure 1": "k", "Figure 3": "T", "Figure 5": "E"}
    panels = {
        title: {label: by(picked(rows, figure=title[-1], epsilon=e), axis) for e, label in labels.items()}
        for title, axis in shown.items()
    }
    for cohort, who in ((loans.CLIENTS, "b = N"), (loans.MANY, "b = N"), (loans.TURN, "b = N/10")):
        if not picked(rows, figure="7", cohort=cohort):
            continue
        lines = {rule: by(picked(rows, figure="7", cohort=cohort, rule=rule), "T") for rule in loans.RULES}
        panels[f"Figure 7, {who}"] = lines
    names = {"Figure 1": "iteration k (T = 100, E = 1)", "Figure 3": "total iterations T (E = 1)"}
    names["Figure 5"] = "local iterations a round E (T = 120)"
    names |= {title: "total iterations T (epsilon 3)" for title in panels if title not in names}
    panels = {title: lines for title, lines in panels.items() if any(lines.values())}
    curves(panels, "place", "loss", path, xlabel=names, ylabel="test loss", log=True, log_y=True)


def by(rows: list[Row], axis: str) -> list[Row]:
    return [{**row, "place": row[axis]} for row in rows]


def _quick_loans() -> Row:
    """Seed 0 of one point of Figure 7, everybody in every round."""
    place = {"figure": "7", "cohort": loans.CLIENTS, "rule": "E = T", "T": 10, "E": 10}
    (row,) = loans.point(place, 3.0, 1)
    return {key: one for key, one in row.items() if key != "validation"}


def many_claims(rows: list[Row]) -> list[Row]:
    """Figures 3, 5 and 7 of 5,000 silos."""
    said = [row for check in (_total_claims, _steps_claims, _rule_claims) for row in settled(check, rows)]
    return [{**row, "text": row["text"].replace("002: loans", "002: 5,000 silos")} for row in said]


def _quick_many() -> Row:
    """Seed 0 of one point of Figure 7."""
    place = {"figure": "7", "cohort": loans.MANY, "rule": "E = T", "T": 10, "E": 10}
    (row,) = loans.point(place, 3.0, 1, loans.MANY)
    return {key: one for key, one in row.items() if key != "validation"}


STUDIES = (
    Study(
        "002-loans",
        "Local and global iterations: interest rates of loans, Laplace noise",
        "8,000 loans in 1,000 silos by sorted rate (the paper 5,000 silos of 80); pure epsilon over all rounds of a "
        "client, replace-one (twice the paper's sensitivity). Figures 1, 3 and 5: a tenth of the silos in each round, "
        "in turns, in a public random order. Figure 7: all in every round, as in the paper, ten seeds; and in turns. "
        "Without noise all seeds are one run. The paper publishes no learning rates: shapes are compared, not losses.",
        loans.figure_loans,
        loans_claims,
        draw_loans,
        repeats=10,
        chosen=HELD_LOANS,
        quick=_quick_loans,
        measure="loss",
    ),
    Study(
        "002-loans-5000",
        "Local and global iterations: loans with the paper's 5,000 silos, 500 a round",
        "As 002-loans with 5,000 silos of one or two loans (the paper: 80 each), 500 in each round in turns: its "
        "noise-to-signal ratio, but for the factor 2 that the sound sensitivity costs. Figure 7: all in every round.",
        loans.figure_many,
        many_claims,
        draw_loans,
        repeats=loans.MANY_REPEATS,
        chosen=HELD_LOANS,
        quick=_quick_many,
        measure="loss",
    ),
)
