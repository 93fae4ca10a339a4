"""Which figures a page has, from its data: what each shows, what to read off it, axes in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sordino.accounting.rounding import upto
from sordino.data.metrics import SHARES
from sordino.report.aggregate import Estimate
from sordino.report.figures import LONGEST, SERIES_MOST, Axis, Bars, Chart, Series

Run = dict[str, Any]
WORDS = {"models": "released models", "cohort": "also who took part", "messages": "every message"}


def plain(values: Sequence[float]) -> tuple[float, ...]:
    """Numbers as a figure has them."""
    return tuple(float(value) for value in values)


def first_of(count: int) -> str:
    """What is left out where settings are more than lines can be told apart."""
    return "" if count <= SERIES_MOST else f"The first {SERIES_MOST} of {count} settings. "


def by_setting(found: dict[str, Any]) -> list[tuple[str, list[Run]]]:
    """The runs of every setting, under its name."""
    known = {run["name"]: run for run in found["runs"]}
    return [(row["name"], [known[name] for name in row["runs"]]) for row in found["comparison"]["rows"]]


def one_of_each(found: dict[str, Any]) -> list[Run]:
    """For every setting the run with the largest epsilon, under the setting's name."""
    groups = by_setting(found)
    return [{**max(runs, key=lambda run: run["answer"]["epsilon"] or math.inf), "name": name} for name, runs in groups]


def metrics(found: dict[str, Any]) -> list[Chart]:
    """One figure for each metric, a line for each setting: of several seeds their mean, in a band of its interval."""
    settings = by_setting(found)
    names = dict.fromkeys(name for run in found["runs"] for name in run["metrics"] if "/" not in name)
    charts = []
    for place, name in enumerate(names):
        series: list[Series] = []
        ends = []
        for tone, (label, runs) in enumerate(settings[:SERIES_MOST]):
            known = [run["metrics"][name] for run in runs if name in run["metrics"]]
            if known:
                series += _mean_line(label, known, tone)
                (*_, last), (*_, value) = series[-1].xs, series[-1].ys
                ended = last == max(run["answer"]["evaluated_after"] for run in runs)  # else later ones lack it
                ends.append(f"{label} {'ends at' if ended else f'was last known after round {last:g}, at'} {value:.4g}")
        word, bands = name.replace("_", " "), any(one.kind == "band" for one in series)
        said = "Lines are means over seeds, bands their 95% intervals. " if bands else ""
        says = f"On rows that are declared public. {first_of(len(settings))}{said}{'; '.join(ends)}."
        title = f"{word[0].upper()}{word[1:]} by round"
        charts.append(Chart(f"metric-{place}", title, says, Axis("round", whole=True), axis_of(name), tuple(series)))
    return charts


def _mean_line(label: str, known: Sequence[dict[str, list[float]]], tone: int) -> list[Series]:
    """The mean over runs in the rounds that all of them have, above its band where there are seeds enough for one."""
    columns = [dict(zip(one["round"], one["value"], strict=True)) for one in known]
    rounds = sorted(set.intersection(*map(set, columns)))
    found = [Estimate.of([column[t] for column in columns]) for t in rounds]
    xs, means = plain(rounds), tuple(one.mean for one in found)
    if not found or found[0].half_width is None:
        return [Series(label, xs, means, tone)]
    low, high = (tuple(one.mean + side * (one.half_width or 0.0) for one in found) for side in (-1, 1))
    return [Series(f"{label}, 95%", xs, low, tone, "band", high), Series(label, xs, means, tone)]


def axis_of(name: str) -> Axis:
    """An axis for a metric: one that is a share ends at 0 and at 1, and R2 at 1."""
    kind = name.partition("/")[0]
    least, most = (0.0, 1.0) if kind in SHARES else (None, 1.0 if kind == "r2" else None)
    return Axis(kind.replace("_", " "), least=least, most=most)


def groups(run: Run, place: int) -> Chart | None:
    """A metric of public groups, such as accuracy/north: a line for each, the worst ones if they are many."""
    found = {name: series for name, series in run["metrics"].items() if "/" in name and series["value"]}
    if not found:
        return None
    worst = sorted(found, key=lambda name: found[name]["value"][-1])[:SERIES_MOST]
    lines = tuple(
        Series(name.partition("/")[2], plain(found[name]["round"]), plain(found[name]["value"]), tone)
        for tone, name in enumerate(worst)
    )
    axis = axis_of(worst[0])
    some = f"The {len(lines)} lowest of {len(found)} groups. " if len(found) > len(lines) else ""
    says = f"{some}Of public groups of the rows that are declared public; lowest at the end: {lines[0].name}."
    title = f"{axis.label[0].upper()}{axis.label[1:]} by group: {run['name']}"
    return Chart(f"groups-{place}", title, says, Axis("round", whole=True), axis, lines)


def shared(mosts: Sequence[float]) -> float | None:
    """Where the axes of several runs end: at the same place, unless one would dwarf the other."""
    return 1.04 * max(mosts) if len(mosts) > 1 and max(mosts) <= 4 * min(mosts) else None


def curves(runs: Sequence[Run]) -> list[Chart]:
    """Epsilon over rounds, the best attack, delta over epsilon: a row for each run, with the axes of the others."""
    lasts = [[one["epsilon"][-1] for one in run["epsilon_by_round"] if one["epsilon"] is not None] for run in runs]
    most = [found for values in lasts if (found := max(values, default=0.0))]
    end = shared(most)
    far = None if end is None else 1.6 * max(most)
    rows = [(epsilons(run, at, end), trade_offs(run, at), deltas(run, at, far)) for at, run in enumerate(runs)]
    return [one for row in rows for one in row if one is not None]


def epsilons(run: Run, place: int, end: float | None = None) -> Chart | None:
    """What the rounds so far cost to each adversary."""
    known = [one for one in run["epsilon_by_round"] if one["epsilon"] is not None]
    if not known:
        return None
    lines = tuple(
        Series(one["label"], plain(one["round"]), plain(one["epsilon"]), tone) for tone, one in enumerate(known)
    )
    ends = "; ".join(f"{one.name} {upto(one.ys[-1])}" for one in lines)
    silent = [WORDS[who] for one in run["epsilon_by_round"] if one["epsilon"] is None for who in one["adversaries"]]
    gone = f" To one who sees {' or '.join(silent)}, nothing is guaranteed: no line." if silent else ""
    says = f"Epsilon of the releases so far, at the certificate's delta; in the end {ends}.{gone}"
    x, y = Axis("rounds released", low=0.0, whole=True), Axis("epsilon so far", low=0.0, high=end, bound="upper")
    return Chart(f"epsilon-{place}", f"Epsilon by round: {run['name']}", says, x, y, lines)


def trade_offs(run: Run, place: int) -> Chart | None:
    """The best attack that the certificate leaves possible."""
    known = [one for one in run["trade_off"] if min(one["true_positive_rate"]) < 1]
    if not known:
        return None
    lines = [
        Series(_with_mu(one), plain(one["false_positive_rate"]), plain(one["true_positive_rate"]), tone)
        for tone, one in enumerate(known)
    ]
    at = known[0]["false_positive_rate"].index(min(known[0]["false_positive_rate"], key=lambda a: abs(a - 0.01)))
    found = "; ".join(f"{one['label']} {upto(100 * one['true_positive_rate'][at])} in 100" for one in known)
    says = f"No attack is above its line. Accusing 1 in 100 strangers, it finds at most, of the members: {found}."
    guess = Series("guessing", (0.0, 1.0), (0.0, 1.0), quiet=True)
    x = Axis("strangers accused (false positives)", low=0.0, high=1.0, bound="lower")
    y = Axis("members found (true positives)", low=0.0, high=1.0, bound="upper")
    return Chart(f"attack-{place}", f"The best attack: {run['name']}", says, x, y, (*lines, guess))


def _with_mu(one: dict[str, Any]) -> str:
    whole = one["label"] if one["gdp"] is None else f"{one['label']}, μ {upto(one['gdp']['mu'])}"
    return whole if len(whole) <= LONGEST else str(one["label"])


def deltas(run: Run, place: int, end: float | None = None) -> Chart | None:
    """delta at every epsilon."""
    if not run["delta_curve"]:
        return None
    delta = float(run["answer"]["delta"])
    floor = max(delta, 1e-9) * 1e-2
    lines = tuple(
        Series(one["label"], plain(one["epsilon"]), plain(one["delta"]), tone)
        for tone, one in enumerate(run["delta_curve"])
    )
    level = Series("", (0.0, end or max(one.xs[-1] for one in lines)), (delta, delta), quiet=True)
    says = f"Every pair on a line holds at once; the certificate names the one at delta {upto(delta)} (dashed)."
    reach = max([x for one in lines for x, y in one.points if y >= floor] or [1.0])  # the last line leaves the figure
    x = Axis("epsilon", low=0.0, high=end or reach, bound="upper")
    y = Axis("delta (log scale)", log=True, low=floor, high=1.0, bound="upper")
    return Chart(f"delta-{place}", f"Delta by epsilon: {run['name']}", says, x, y, (*lines, level))


def utility(found: dict[str, Any]) -> Chart | None:
    """What every setting reached against what it cost: a dot, with the 95% interval over its seeds."""
    made = found["comparison"]
    placed = [(tone, row) for tone, row in enumerate(made["rows"]) if row["epsilon"]["models"] is not None]
    if len(placed) < 2 or made["metric"] is None:
        return None
    axis, relations = axis_of(made["metric"]), {row["relations"]["models"] for _, row in placed}
    dots, values = [], []
    for tone, row in placed:
        own = row["metrics"][made["metric"]]
        low, high = own["mean"] - (own["half_width"] or 0.0), own["mean"] + (own["half_width"] or 0.0)
        values += [low, high]
        name = row["name"] if len(relations) == 1 else f"{row['name']} ({row['relations']['models'].replace('_', ' ')})"
        dots.append(Series(name, (float(row["epsilon"]["models"]),), (low,), tone % SERIES_MOST, "dots", (high,)))
    says = "One dot for each setting, at the epsilon to one who sees released models; bars: 95% intervals over seeds."
    if len(relations) > 1:
        says += " Relations differ: an epsilon for one change of the data does not compare with one for another."
    reached, middle = replace(axis, label=f"{axis.label} at the end"), (min(values) + max(values)) / 2
    if axis.least is not None and axis.most is not None and max(values) - min(values) <= 0.08:
        # of shares, ends that do not make a hundredth look like a world
        reached = replace(reached, low=max(middle - 0.05, axis.least), high=min(middle + 0.05, axis.most))
    return Chart("utility", "Privacy and utility", says, Axis("epsilon", low=0.0, bound="upper"), reached, tuple(dots))


def silos(run: Run, place: int) -> Bars | None:
    """Every silo's own epsilon."""
    known = [one for one in run["silos"] if one["epsilon"] is not None]
    rows = tuple((one["silo"], float(one["epsilon"]), upto(one["epsilon"])) for one in known)
    if not 1 < len(rows) <= 40:
        return None
    says = "To one who reads every message of the silo; a neighbour changes one record of one silo."
    return Bars(f"silos-{place}", f"Each silo's own epsilon: {run['name']}", says, "epsilon", rows)
