"""Figures of how a run went: diagnostics (NOT private), smoothing, who took part, what attacks have found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sordino.accounting.rounding import atleast, upto
from sordino.report.charts import WORDS, Run, first_of, plain
from sordino.report.figures import SERIES_MOST, Axis, Bars, Chart, Series
from sordino.report.text_table import is_number


def norms(run: Run, place: int) -> Chart | None:
    """Update norms against the clip norm. NOT private."""
    found = run["diagnostics"]
    if found is None:
        return None
    low, middle, high = found["norms"].values()
    rounds = plain(middle["round"])
    band = Series("10th to 90th percentile", rounds, plain(low["value"]), 0, "band", plain(high["value"]))
    lines = [band, Series("median", rounds, plain(middle["value"]), 0)]
    if found["clip_norm"] is not None:
        lines.append(Series("clip_norm", rounds, plain(found["clip_norm"]["value"]), 1))
    says = "Band: from the tenth to the ninetieth of a hundred clients; line: the median."
    more = found["no_clip_norm"] or "What is above the clip norm is clipped."
    x, y = Axis("round", whole=True), Axis("norm of an update", low=0.0)
    return Chart(f"norms-{place}", f"Size of updates: {run['name']}", f"{says} {more}", x, y, tuple(lines))


def clipped(runs: Sequence[Run]) -> Chart | None:
    """The share of updates that the clip shortened. NOT private."""
    lines = tuple(
        Series(run["name"], plain(found["round"]), plain(found["value"]), tone)
        for tone, run in enumerate(runs[:SERIES_MOST])
        if run["diagnostics"] is not None and (found := run["diagnostics"]["clipped_fraction"])
    )
    if not lines:
        return None
    says = f"{first_of(len(runs))}The share of a cohort's updates that were longer than the clip norm."
    x, y = Axis("round", whole=True), Axis("share of updates clipped", low=0.0, high=1.0)
    return Chart("clipped", "Clipped share by round", says, x, y, lines)


def spectra(run: Run, place: int) -> Chart | None:
    """Noise and released update by frequency, before and after smoothing."""
    found = run["spectrum"]
    if found is None:
        return None
    noise, update = found["noise"], found["update"]
    at = plain(noise["frequency"])
    lines = [Series("noise before", at, plain(noise["before"]), 0), Series("noise after", at, plain(noise["after"]), 1)]
    of_update = "The update needs the checkpoints of the run, and a server that only subtracts it."
    if update is not None:
        where = plain(update["frequency"])
        lines += [
            Series(f"update {when}", where, plain(update[when]), tone) for tone, when in ((2, "before"), (3, "after"))
        ]
        of_update = f"The update is round {update['round']}'s as it was released, noise included."
    says = f"Strength {found['strength']:g}. The noise is exact. {of_update}"
    x, y = Axis("frequency, cycles per coordinate", low=0.0, high=0.5), Axis("power (log scale)", log=True)
    return Chart(f"spectrum-{place}", f"What smoothing leaves: {run['name']}", says, x, y, tuple(lines))


def turns(run: Run, place: int) -> Bars | None:
    """In how many rounds clients were, where that is public or seen by design."""
    found = run["participation"]
    each = found["rounds_of_each"]
    if each is None or len(set(each)) == 1:
        return None
    counts = {value: each.count(value) for value in sorted(set(each))}
    if len(counts) > 12:
        wide = -(-(max(each) - min(each) + 1) // 10)
        lows = range(min(each), max(each) + 1, wide)
        groups = {f"{a} to {a + wide - 1} rounds": sum(a <= n < a + wide for n in each) for a in lows}
    else:
        groups = {f"{value} round{'s' * (value != 1)}": count for value, count in counts.items()}
    rows = [(name, float(count), str(count)) for name, count in groups.items()]
    says = f"{found['population']} clients in {found['rounds']} rounds; who took part is seen by design, or public."
    return Bars(f"turns-{place}", f"Rounds of a client: {run['name']}", says, "clients", tuple(rows))


def audits(run: Run, place: int) -> Bars | None:
    """What attacks have proved beside what is certified."""
    rows = lower_bounds(run)
    if not rows:
        return None
    says = "Bar: an attack has shown that epsilon is at least this. Mark: it is certified to be at most that."
    bars = tuple(
        (row["what"], max(row["lower"], 0.0), f"≥ {atleast(row['lower'])}, ≤ {upto(row['upper'])}") for row in rows
    )
    marks, axis = tuple(row["upper"] for row in rows), "epsilon: proved from below, certified from above"
    return Bars(f"audit-{place}", f"Attacked: {run['name']}", says, axis, bars, marks)


def lower_bounds(run: Run) -> list[dict[str, Any]]:
    """Of every audit that speaks of epsilon: what was attacked, the lower bound, the upper bound."""
    found = []
    for one in run["audit"].get("mechanism", {}).get("mechanism", []):
        rounds, _, several = one["attack"].partition(" rounds at once")
        what = f"{f'{rounds} rounds' if several else 'one round'}, sees {WORDS.get(one['adversary'], one['adversary'])}"
        found.append((what, one["lower_epsilon"], one["upper_epsilon"]))
    c = run["audit"].get("canaries", {}).get("canaries")
    if c is not None:
        found.append((f"the whole run, {c['canaries']} canaries", c["lower_epsilon"], c["upper_epsilon"]))
        found.append(("the same, if the release is as good as Gaussian", c["gaussian_epsilon"], c["upper_epsilon"]))
    rows = [dict(zip(("what", "lower", "upper"), row, strict=True)) for row in found]
    return [row for row in rows if is_number(row["lower"]) and is_number(row["upper"])]
