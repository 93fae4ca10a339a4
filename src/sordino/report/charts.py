"""Charts of the report, made from the data of `sordino report --json`. Called by report/page.py and `Result.plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sordino.accounting.rounding import atleast, upto
from sordino.data.metrics import SHARES
from sordino.report.figures import MAX_LEGEND, MAX_SERIES, Axis, Bars, Chart, Series
from sordino.report.text_table import Estimate, is_number, mean_curve

Run = dict[str, Any]
ADVERSARY_WORDS = {"models": "released models", "cohort": "also who took part", "messages": "every message"}
_ROUND = Axis("round", whole=True)


def _series(name: str, xs: Sequence[float], ys: Sequence[float], tone: int = 0) -> Series:
    return Series(name, tuple(map(float, xs)), tuple(map(float, ys)), tone)


def _first_of(count: int) -> str:
    return "" if count <= MAX_SERIES else f"The first {MAX_SERIES} of {count} settings. "


def _runs_by_setting(found: dict[str, Any]) -> list[tuple[str, list[Run]]]:
    by_name = {run["name"]: run for run in found["runs"]}
    return [(row["name"], [by_name[name] for name in row["runs"]]) for row in found["comparison"]["rows"]]


def one_of_each(found: dict[str, Any]) -> list[Run]:
    """Return one run of every setting, that with the largest epsilon, under the setting's name."""
    groups = _runs_by_setting(found)
    return [{**max(runs, key=lambda run: run["answer"]["epsilon"] or math.inf), "name": name} for name, runs in groups]


# ---- metrics
def metrics(found: dict[str, Any]) -> list[Chart]:
    """Return a chart of every metric by round: for each setting the mean over seeds, with a 95% band."""
    settings = _runs_by_setting(found)
    names = dict.fromkeys(name for run in found["runs"] for name in run["metrics"] if "/" not in name)
    charts = []
    for place, name in enumerate(names):
        series: list[Series] = []
        ends = []
        for tone, (label, runs) in enumerate(settings[:MAX_SERIES]):
            own = [run["metrics"][name] for run in runs if name in run["metrics"]]
            if own:
                curves = [dict(zip(one["round"], one["value"], strict=True)) for one in own]
                series += mean_line(label, mean_curve(curves), tone)
                (*_, last), (*_, value) = series[-1].xs, series[-1].ys
                is_end = last == max(run["answer"]["evaluated_after"] for run in runs)
                when = "ends at" if is_end else f"was last evaluated after round {last:g}, at"
                ends.append(f"{label} {when} {value:.4g}")
        bands = any(one.kind == "band" for one in series)
        intervals = "Lines are means over seeds, bands their 95% intervals. " if bands else ""
        says = f"On rows that are declared public. {_first_of(len(settings))}{intervals}{'; '.join(ends)}."
        title = name.replace("_", " ")
        title = f"{title[0].upper()}{title[1:]} by round"
        charts.append(Chart(f"metric-{place}", title, says, _ROUND, metric_axis(name), tuple(series)))
    return charts


def mean_line(label: str, curve: Sequence[tuple[float, Estimate]], tone: int) -> list[Series]:
    """Return a line of means by round, preceded by the band of their 95% intervals if they have intervals."""
    line = _series(label, [t for t, _ in curve], [one.mean for _, one in curve], tone)
    if not curve or curve[0][1].half_width is None:
        return [line]
    low, high = (tuple(one.mean + side * (one.half_width or 0.0) for _, one in curve) for side in (-1, 1))
    return [Series(f"{label}, 95%", line.xs, low, tone, "band", high), line]


def metric_axis(name: str) -> Axis:
    """Return the axis of a metric, which for a share ends at 0 and 1, and for R2 at 1."""
    kind = name.partition("/")[0]
    least, most = (0.0, 1.0) if kind in SHARES else (None, 1.0 if kind == "r2" else None)
    return Axis(kind.replace("_", " "), least=least, most=most)


def groups(run: Run, place: int) -> Chart | None:
    """Return a chart of a metric by round and public group, such as accuracy/north; of many groups the lowest."""
    found = {name: series for name, series in run["metrics"].items() if "/" in name and series["value"]}
    if not found:
        return None
    worst = sorted(found, key=lambda name: found[name]["value"][-1])[:MAX_SERIES]
    lines = tuple(
        _series(name.partition("/")[2], found[name]["round"], found[name]["value"], k) for k, name in enumerate(worst)
    )
    axis = metric_axis(worst[0])
    some = f"The {len(lines)} lowest of {len(found)} groups. " if len(found) > len(lines) else ""
    says = f"{some}On public groups of rows that are declared public; lowest at the end: {lines[0].name}."
    title = f"{axis.label[0].upper()}{axis.label[1:]} by group: {run['name']}"
    return Chart(f"groups-{place}", title, says, _ROUND, axis, lines)


def utility(found: dict[str, Any]) -> Chart | None:
    """Return a chart of every setting's final metric against its epsilon, with the 95% interval over seeds."""
    rows, metric = found["comparison"]["rows"], found["comparison"]["metric"]
    placed = [(tone, row) for tone, row in enumerate(rows) if row["epsilon"]["models"] is not None]
    if len(placed) < 2 or metric is None:
        return None
    relations = {row["relations"]["models"] for _, row in placed}
    dots, values = [], []
    for tone, row in placed:
        own = row["metrics"][metric]
        low, high = (own["mean"] + side * (own["half_width"] or 0.0) for side in (-1, 1))
        values += [low, high]
        name = row["name"] if len(relations) == 1 else f"{row['name']} ({row['relations']['models'].replace('_', ' ')})"
        dots.append(Series(name, (float(row["epsilon"]["models"]),), (low,), tone % MAX_SERIES, "dots", (high,)))
    says = "One dot for each setting, at the epsilon to one who sees released models; bars: 95% intervals over seeds."
    if len(relations) > 1:
        says += " Relations differ: an epsilon for one change of the data does not compare with one for another."
    axis = metric_axis(metric)
    y, middle = replace(axis, label=f"{axis.label} at the end"), (min(values) + max(values)) / 2
    if axis.least is not None and axis.most is not None and max(values) - min(values) <= 0.08:
        # a range of at least 0.1, so that a difference of 0.01 between shares does not look large
        y = replace(y, low=max(middle - 0.05, axis.least), high=min(middle + 0.05, axis.most))
    return Chart("utility", "Privacy and utility", says, Axis("epsilon", low=0.0, bound="upper"), y, tuple(dots))


# ---- privacy
def privacy(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of epsilon by round, the best attack, and delta by epsilon of each run, on common axes."""
    lasts = [[one["epsilon"][-1] for one in run["epsilon_by_round"] if one["epsilon"] is not None] for run in runs]
    most = [found for values in lasts if (found := max(values, default=0.0))]
    common = max(most) if len(most) > 1 and max(most) <= 4 * min(most) else None
    end, far = (None, None) if common is None else (1.04 * common, 1.6 * common)
    rows = [(epsilons(run, at, end), trade_offs(run, at), deltas(run, at, far)) for at, run in enumerate(runs)]
    return [one for row in rows for one in row if one is not None]


def epsilons(run: Run, place: int, end: float | None = None) -> Chart | None:
    """Return a chart of epsilon by round, one line per adversary; None without a guarantee."""
    guaranteed = [one for one in run["epsilon_by_round"] if one["epsilon"] is not None]
    if not guaranteed:
        return None
    lines = tuple(_series(one["label"], one["round"], one["epsilon"], tone) for tone, one in enumerate(guaranteed))
    ends = "; ".join(f"{one.name} {upto(one.ys[-1])}" for one in lines)
    without = [one["adversaries"] for one in run["epsilon_by_round"] if one["epsilon"] is None]
    who = " or ".join(ADVERSARY_WORDS[name] for names in without for name in names)
    gone = f" To one who sees {who}, nothing is guaranteed: no line." if who else ""
    says = f"Epsilon of the releases so far, at the certificate's delta; in the end {ends}.{gone}"
    x, y = Axis("rounds released", low=0.0, whole=True), Axis("epsilon so far", low=0.0, high=end, bound="upper")
    return Chart(f"epsilon-{place}", f"Epsilon by round: {run['name']}", says, x, y, lines)


def trade_offs(run: Run, place: int) -> Chart | None:
    """Return a chart of the largest true-positive rate that the certificate allows, by false-positive rate."""
    guaranteed = [one for one in run["trade_off"] if min(one["true_positive_rate"]) < 1]
    if not guaranteed:
        return None
    lines = []
    for tone, one in enumerate(guaranteed):
        name = one["label"] if one["gdp"] is None else f"{one['label']}, μ {upto(one['gdp']['mu'])}"
        name = name if len(name) <= MAX_LEGEND else one["label"]
        lines.append(_series(name, one["false_positive_rate"], one["true_positive_rate"], tone))
    rates = guaranteed[0]["false_positive_rate"]
    at = rates.index(min(rates, key=lambda a: abs(a - 0.01)))
    found = "; ".join(f"{one['label']} {upto(100 * one['true_positive_rate'][at])}%" for one in guaranteed)
    says = f"No attack is above its curve. At 1% false positives, at most this share of the members is found: {found}."
    guess = Series("guessing", (0.0, 1.0), (0.0, 1.0), quiet=True)
    x = Axis("false-positive rate", low=0.0, high=1.0, bound="lower")
    y = Axis("true-positive rate", low=0.0, high=1.0, bound="upper")
    return Chart(f"attack-{place}", f"The best attack: {run['name']}", says, x, y, (*lines, guess))


def deltas(run: Run, place: int, end: float | None = None) -> Chart | None:
    """Return a chart of delta by epsilon, with the certificate's delta as a dashed line."""
    if not run["delta_curve"]:
        return None
    delta = float(run["answer"]["delta"])
    floor = max(delta, 1e-9) * 1e-2
    lines = tuple(_series(one["label"], one["epsilon"], one["delta"], k) for k, one in enumerate(run["delta_curve"]))
    level = Series("", (0.0, end or max(one.xs[-1] for one in lines)), (delta, delta), quiet=True)
    says = f"Every pair on a line holds at once; the certificate names the one at delta {upto(delta)} (dashed)."
    pairs = (pair for one in lines for pair in zip(one.xs, one.ys, strict=True))
    reach = max([x for x, y in pairs if y >= floor] or [1.0])  # where the last line leaves the figure
    x = Axis("epsilon", low=0.0, high=end or reach, bound="upper")
    y = Axis("delta (log scale)", log=True, low=floor, high=1.0, bound="upper")
    return Chart(f"delta-{place}", f"Delta by epsilon: {run['name']}", says, x, y, (*lines, level))


def silos(run: Run, place: int) -> Bars | None:
    """Return a bar chart of every silo's own epsilon; None for one silo or more than 40."""
    guaranteed = [one for one in run["silos"] if one["epsilon"] is not None]
    rows = tuple((one["silo"], float(one["epsilon"]), upto(one["epsilon"])) for one in guaranteed)
    if not 1 < len(rows) <= 40:
        return None
    says = "To one who reads every message of the silo; a neighbour changes one record of one silo."
    return Bars(f"silos-{place}", f"Each silo's own epsilon: {run['name']}", says, "epsilon", rows)


def audits(run: Run, place: int) -> Bars | None:
    """Return a bar chart of the attacks' lower bounds on epsilon, with the certified upper bounds as marks."""
    found = []
    for one in run["audit"].get("mechanism", {}).get("mechanism", []):
        rounds, _, several = one["attack"].partition(" rounds at once")
        who = ADVERSARY_WORDS.get(one["adversary"], one["adversary"])
        what = f"{f'{rounds} rounds' if several else 'one round'}, sees {who}"
        found.append((what, one["lower_epsilon"], one["upper_epsilon"]))
    c = run["audit"].get("canaries", {}).get("canaries")
    if c is not None:
        found.append((f"the whole run, {c['canaries']} canaries", c["lower_epsilon"], c["upper_epsilon"]))
        found.append(("the same, if the release is as good as Gaussian", c["gaussian_epsilon"], c["upper_epsilon"]))
    found = [row for row in found if is_number(row[1]) and is_number(row[2])]
    if not found:
        return None
    says = "Bar: an attack has shown that epsilon is at least this. Mark: it is certified to be at most that."
    rows = tuple((what, max(low, 0.0), f"≥ {atleast(low)}, ≤ {upto(high)}") for what, low, high in found)
    marks, axis = tuple(high for _, _, high in found), "epsilon: proved from below, certified from above"
    return Bars(f"audit-{place}", f"Attacked: {run['name']}", says, axis, rows, marks)


# ---- how a run went
def norms(run: Run, place: int) -> Chart | None:
    """Return a chart of percentiles of update norms, and of the clip norm, by round; a diagnostic, NOT private."""
    found = run["diagnostics"]
    if found is None:
        return None
    low, middle, high = found["norms"].values()
    median = _series("median", middle["round"], middle["value"])
    band = Series("10th to 90th percentile", median.xs, tuple(low["value"]), 0, "band", tuple(high["value"]))
    clip = found["clip_norm"]
    clip_line = [] if clip is None else [_series("clip_norm", clip["round"], clip["value"], 1)]
    says = "Band: from the tenth to the ninetieth of a hundred clients; line: the median."
    more = found["no_clip_norm"] or "What is above the clip norm is clipped."
    y, lines = Axis("norm of an update", low=0.0), (band, median, *clip_line)
    return Chart(f"norms-{place}", f"Size of updates: {run['name']}", f"{says} {more}", _ROUND, y, lines)


def clipped(runs: Sequence[Run]) -> Chart | None:
    """Return a chart of the share of updates that were clipped, by round; a diagnostic, NOT private."""
    lines = tuple(
        _series(run["name"], found["round"], found["value"], tone)
        for tone, run in enumerate(runs[:MAX_SERIES])
        if run["diagnostics"] is not None and (found := run["diagnostics"]["clipped_fraction"])
    )
    if not lines:
        return None
    says = f"{_first_of(len(runs))}The share of a cohort's updates that were longer than the clip norm."
    y = Axis("share of updates clipped", low=0.0, high=1.0)
    return Chart("clipped", "Clipped share by round", says, _ROUND, y, lines)


def spectra(run: Run, place: int) -> Chart | None:
    """Return a chart of the power of noise and released update by frequency, before and after smoothing."""
    found = run["spectrum"]
    if found is None:
        return None
    noise, update = found["noise"], found["update"]
    lines = [_series(f"noise {when}", noise["frequency"], noise[when], k) for k, when in enumerate(("before", "after"))]
    of_update = "The update needs the checkpoints of the run, and a server that only subtracts it."
    if update is not None:
        at = update["frequency"]
        lines += [_series(f"update {when}", at, update[when], k) for k, when in ((2, "before"), (3, "after"))]
        of_update = f"The update is round {update['round']}'s as it was released, noise included."
    says = f"Strength {found['strength']:g}. The noise is exact. {of_update}"
    x, y = Axis("frequency, cycles per coordinate", low=0.0, high=0.5), Axis("power (log scale)", log=True)
    return Chart(f"spectrum-{place}", f"What smoothing leaves: {run['name']}", says, x, y, tuple(lines))


def participations(run: Run, place: int) -> Bars | None:
    """Return a bar chart of how many clients took part in how many rounds; None if cohorts are secret."""
    found = run["participation"]
    each = found["rounds_of_each"]
    if each is None or len(set(each)) == 1:
        return None
    width = 1 if len(set(each)) <= 12 else -(-(max(each) - min(each) + 1) // 10)
    rows = []
    for low in range(min(each), max(each) + 1, width) if width > 1 else sorted(set(each)):
        count = sum(low <= rounds < low + width for rounds in each)
        name = f"{low} to {low + width - 1} rounds" if width > 1 else f"{low} round{'s' * (low != 1)}"
        rows.append((name, float(count), str(count)))
    says = f"{found['population']} clients in {found['rounds']} rounds; who took part is seen by design, or public."
    return Bars(f"turns-{place}", f"Rounds of a client: {run['name']}", says, "clients", tuple(rows))
