"""Paper 002 on loans: what its figures are said to show, judged by our runs, and the plots."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

from sordino.report.figures import curves
from sordino_papers import paper_002 as loans
from sordino_papers.choosing import least, only
from sordino_papers.claims import settled
from sordino_papers.studies import Row, Study, picked
from sordino_papers.verdicts import fact, verdict

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
    best = {e: least(picked(rows, figure="3", epsilon=loans.named(e))) for e in loans.EPSILONS}
    judged = []
    for epsilon in (1.0, 3.0, 5.0):
        last = only(picked(rows, figure="3", epsilon=epsilon, T=loans.TOTALS[-1]))
        first = only(picked(rows, figure="3", epsilon=epsilon, T=loans.TOTALS[0]))
        for other, where in ((last, "after more"), (first, "before")):
            text = f"002: loans, epsilon {epsilon:g}: T* = {best[epsilon]['T']} is below T = {other['T']} ({where})"
            judged.append(_lower(text, best[epsilon], other))
    stars = [int(best[e]["T"]) for e in loans.EPSILONS]
    text = "002: loans, the best T grows with epsilon (1, 3, 5, none; the paper 10, 30, 30, 100)"
    return [*judged, trend(text, f"T* = {stars}", stars[:-1], best[1.0]["repeats"], HELD_LOANS)]


def _lower(text: str, one: Row, other: Row) -> Row:
    """By the logs of the losses: a noisy loss is many times, not so much, larger."""
    ours, theirs = ([-loss for loss in _logs(row)] for row in (one, other))
    return verdict(text, ours, theirs, HELD_LOANS, unit="(log of the loss)")


def trend(text: str, measured: str, growing: list[int], seeds: int, chosen: str) -> Row:
    """Yes if the best numbers grow from the first to the last and never fall, undecided if all are one."""
    found = fact(text, measured, growing == sorted(growing), seeds, chosen)
    return {**found, "verdict": "undecided"} if len(set(growing)) == 1 else found


def _steps_claims(rows: list[Row]) -> list[Row]:
    """Figure 5, Table III: smaller epsilon wants larger E."""
    best = {e: least(picked(rows, figure="5", epsilon=loans.named(e))) for e in loans.EPSILONS}
    judged = []
    for epsilon in (1.0, 3.0, 5.0):
        one = only(picked(rows, figure="5", epsilon=epsilon, E=1))
        text = f"002: loans, T = 120, epsilon {epsilon:g}: E* = {best[epsilon]['E']} is below E = 1"
        judged.append(_lower(text, best[epsilon], one))
    stars = [int(best[e]["E"]) for e in loans.EPSILONS]
    text = "002: loans, smaller epsilon wants larger E (1, 3, 5, none)"
    return [*judged, trend(text, f"E* = {stars}", stars[-2::-1], best[1.0]["repeats"], HELD_LOANS)]


def _rule_claims(rows: list[Row]) -> list[Row]:
    """Figure 7: E = T^(2/3) has the lowest losses, and moves least with T; everybody in every round, and in turns."""
    whose = ((loans.CLIENTS, "b = N"), (loans.TURN, "b = N/10 in turns"))
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
        _ratios(mine, who),
    ]


def _later(rows: list[Row], cohort: int, rule: str) -> list[Row]:
    return [row for row in picked(rows, figure="7", cohort=cohort, rule=rule) if row["T"] >= 10]


def _ratios(mine: dict[str, list[Row]], who: str) -> Row:
    """Worst over best mean loss of every rule, as the paper's figure shows it."""
    ratios = {rule: math.exp(_flatness([row["loss"] for row in found])) for rule, found in mine.items()}
    shown = ", ".join(f"{rule}: {ratio:.2f}" for rule, ratio in ratios.items())
    flattest = min(ratios, key=lambda rule: ratios[rule])
    text = f"002: loans, Figure 7, {who}: {THEORY} has the least worst over best MEAN loss"
    return fact(text, shown, flattest == THEORY, mine[THEORY][0]["repeats"], HELD_LOANS)


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
    for cohort, who in ((loans.CLIENTS, "b = N"), (loans.TURN, "b = N/10")):
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


# ---- FEMNIST ---------------------------------------------------------------------------------------------------------


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
)
