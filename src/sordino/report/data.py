"""Data of the report, printed by `sordino report --json` and drawn by the page, with privacy curves and spectra.

    epsilon(t)                                   epsilon of the first t releases, by the certificate's own accounting
    F(a) = min over e of exp(e) a + delta(e)     largest true-positive rate of any test with false-positive rate a
    P_after(w) = P_before(w) / (1 + 2 s (1 - cos w))^2    power at frequency w before and after Laplacian smoothing

Adversaries with the same privacy cost share one curve; if all have the same cost and silos differ, each silo has one.
Smoothing of strength s multiplies by the inverse of A = I + s L, where L is the Laplacian of a cycle of coordinates.
Spectra are functions of two released models and cost no privacy. Noise is white before smoothing, so both of its
spectra are exact; the update is the last released step, noise included, and its power before smoothing is exact
because A is invertible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.accounting import accountant, composition
from sordino.accounting.composition import ADVERSARIES, Adversary, Cost, Line, Participation
from sordino.accounting.profiles import power, protects, true_positives
from sordino.certificate.build import headline, line_entry
from sordino.certificate.explain import ALL, CHANGE, ceilings, explain
from sordino.certificate.facts import participation, run_cost
from sordino.data.metrics import ONLY_CLASS
from sordino.errors import PlanError, UserError
from sordino.loop import mean_std
from sordino.outcome import DIAGNOSTIC, facts_of_charges
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.schedules import Schedule
from sordino.plan import State
from sordino.report.comparison import Subject, compare
from sordino.version import __version__

Floats = NDArray[np.float64]
NORMS = ("update_norm_p10", "update_norm_p50", "update_norm_p90")
POINTS = 24  # rounds at which an epsilon curve is computed
MAX_CURVES = 6  # curves in one figure
BINS = 16  # frequency ranges of an update's spectrum
FALSE_ALARMS = np.union1d(np.geomspace(1e-4, 1, 41), np.linspace(0, 1, 41))
_LOSSES = np.sinh(np.linspace(-6, 6, 1201)) / 10  # epsilons within 20 of 0, dense near 0


def report_data(subjects: Sequence[Subject], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return all data of the report on these runs; `notes` are sentences on several runs together."""
    found = compare(subjects)
    return {"sordino": __version__, "notes": list(notes), **found, "runs": [_run(one) for one in subjects]}


def _run(subject: Subject) -> dict[str, Any]:
    certificate, reach = subject.certificate, ceilings(subject.plan, subject.facts)
    entries, names = certificate["adversaries"][-1].get("silos", []), certificate["silos"]
    pairs = sorted(((silo, one) for one in entries for silo in one["silos"]), key=lambda pair: pair[0])
    silos = [
        {"silo": names[silo] if names else f"silo {silo}", "epsilon": one["epsilon"], "delta": one["delta"]}
        for silo, one in pairs
    ]
    return {
        "name": subject.name, "loop": subject.is_loop, "answer": _answer(subject, reach["models"].true_positives),
        "metrics": subject.metrics, "epsilon_by_round": over_rounds(subject), "trade_off": trade_off(subject),
        "delta_curve": delta_curve(subject), "silos": silos, "participation": _participation(subject),
        "diagnostics": _diagnostics(subject), "spectrum": spectrum(subject), "audit": subject.audit,
        "words": explain(certificate, reach), "certificate": certificate,
    }  # fmt: skip


def _answer(subject: Subject, members_found: float) -> dict[str, Any]:
    certificate, figures, main = subject.certificate, subject.evaluated, subject.main_metric
    mode, unit = certificate["noise"]["mode"], certificate["unit"]
    return {
        **{key: certificate[key] for key in ("epsilon", "delta", "unit", "relation")},
        "change": CHANGE[certificate["relation"]].format(unit=unit, all=ALL[unit]),
        "noise": mode, "for_release": mode != "simulation" and certificate["epsilon"] is not None,
        "metric": main, "value": None if main is None else figures[main],
        "evaluated_after": subject.evaluated_after, "only_class": figures.get(ONLY_CLASS),
        "rows": [f"{one['rows']:,} {one['what']}" for one in certificate["declared_public"] if "rows" in one["what"]],
        "chose": subject.facts.selection is not None, "rounds": certificate["counts"]["rounds_accounted"],
        "members_found_at_1_percent": members_found,
    }  # fmt: skip


def _participation(subject: Subject) -> dict[str, Any]:
    """Return how often clients took part: as observed if cohorts are public or visible, else as planned."""
    clients, counts = subject.plan.clients, subject.certificate["counts"]
    rounds = counts["rounds_accounted"] if subject.is_loop else counts["rounds_charged"]
    planned = {"population": clients.population, "expected": clients.expected, "rounds": rounds}
    if subject.is_loop or not subject.cohorts:
        return {**planned, "seen": False, "most": clients.max_participations(rounds), "rounds_of_each": None}
    each = np.bincount(np.concatenate(subject.cohorts), minlength=clients.population)
    return {**planned, "seen": True, "most": int(each.max()), "rounds_of_each": each.tolist()}


def _diagnostics(subject: Subject) -> dict[str, Any] | None:
    """Return update norms, clipped shares and signal-to-noise ratios, which are NOT private; None if not recorded."""
    norms = {name: subject.diagnostic(name) for name in NORMS}
    if not any(series["round"] for series in norms.values()):
        return None
    clip, per_client = subject.plan.clip, subject.plan.unit == "client"
    learned = clip is not None and isinstance(clip.clip_norm, Schedule) and clip.clip_norm.learned
    at, why, values = norms[NORMS[1]]["round"], None, None
    if not per_client:
        why = "Every record's gradient is clipped; a whole update has no clip norm."
    elif learned:
        why = "The clip norm is learned during the run, and not recorded by round."
    elif clip is None or not clip.finite or not at:
        why = "Nothing is clipped."
    else:
        values = [clip.clip_norm_at(int(t) - 1) for t in at]
    return {
        "private": False, "note": DIAGNOSTIC, "norms": norms, "no_clip_norm": why,
        "clip_norm": None if values is None else {"round": at, "value": values},
        "clipped_fraction": subject.diagnostic("clipped_fraction") if per_client and (values or learned) else None,
        "signal_to_noise": subject.diagnostic("signal_to_noise"),
    }  # fmt: skip


# ---- privacy curves
@dataclass(frozen=True)
class CostGroup:
    """Group of adversaries, or of silos, with the same privacy cost; `silos` is empty for a cost of all clients."""

    adversaries: tuple[Adversary, ...]
    silos: tuple[int, ...] = ()
    label: str = ""

    def lines(self, cost: Cost) -> tuple[Line, ...]:
        who = self.adversaries[0]
        return (cost.line(who, self.silos[0]),) if self.silos else cost.of(who)

    def entry(self) -> dict[str, Any]:
        return {"label": self.label, "adversaries": list(self.adversaries)}

    def epsilon(self, subject: Subject, cost: Cost) -> float | None:
        """Return the group's certified epsilon, at the run's delta or the silos' own; None without a guarantee."""
        lines, facts = self.lines(cost), subject.facts
        if not self.silos:
            value: float | None = headline(lines, facts.delta, facts.deltas)["epsilon"]
            return value
        deltas = {facts.deltas[silo] for silo in self.silos} if facts.deltas else {facts.delta}
        values = [line_entry(lines[0], delta)["epsilon"] for delta in sorted(deltas)]
        return None if None in values else max(values)


def cost_groups(subject: Subject) -> list[CostGroup]:
    """Return one group of adversaries or silos for every distinct privacy curve of a run."""
    cost = run_cost(subject.plan, subject.facts)
    alike: dict[tuple[Any, ...], list[Adversary]] = {}
    for who in ADVERSARIES:
        alike.setdefault(tuple((one.relation, one.entries, one.silos) for one in cost.of(who)), []).append(who)
    groups = [tuple(found) for found in alike.values()]
    own = cost.of(groups[0][0])
    if len(groups) > 1 or not 1 < len(own) <= MAX_CURVES:
        return [CostGroup(who, (), "anybody" if len(groups) == 1 else " = ".join(who)) for who in groups]
    names, found = subject.certificate["silos"], []
    for silos in (line.silos for line in own):
        first = names[silos[0]] if names else f"silo {silos[0]}"
        found.append(CostGroup(groups[0], silos, first if len(silos) == 1 else f"{first} and {len(silos) - 1} more"))
    return found


def over_rounds(subject: Subject) -> list[dict[str, Any]]:
    """Return epsilon by round for every group of adversaries or silos; the last value is the certificate's."""
    last = run_cost(subject.plan, subject.facts)
    releases, selection = participation(subject.plan, subject.facts).releases, subject.facts.selection
    places = sorted({max(1, round(releases * k / POINTS)) for k in range(1, POINTS)} - {releases})
    try:
        costs = [(t, composition.cost_of_best(subject.plan.cost(_so_far(subject, t)), selection)) for t in places]
    except PlanError:
        costs = []  # correlated noise is accounted for the whole run only
    start = [] if subject.plan.prepare else [0]  # released columns are charged before the first round
    rounds, found = [*start, *(t for t, _ in costs), releases], []
    for group in cost_groups(subject):
        values = [group.epsilon(subject, cost) for cost in (*(cost for _, cost in costs), last)]
        line = None if None in values else [*map(float, start), *values]
        found.append({**group.entry(), "round": rounds, "epsilon": line})
    return found


def _so_far(subject: Subject, releases: int) -> Participation:
    """Return the participation in the first `releases` releases, as observed if cohorts are visible, else planned."""
    plan, prepared = subject.plan, max(1, subject.facts.prepared)
    if subject.facts.max_participations is None or len(subject.cohorts) < releases:
        again = composition.repeated_rounds(subject.rounds[:releases])
        return replace(Participation.planned(plan.clients, releases - len(again), again), prepared=prepared)
    facts = facts_of_charges(plan, subject.rounds[:releases], subject.cohorts[:releases], subject.facts)
    assert facts.max_participations is not None
    most, each = facts.max_participations, facts.per_client
    return Participation(releases, most, each, facts.repeats, False, prepared, facts.repeated)


def trade_off(subject: Subject) -> list[dict[str, Any]]:
    """Return the best attack's true-positive rates by false-positive rate, and mu of Gaussian DP, for every group."""
    cost, found = run_cost(subject.plan, subject.facts), []
    for group in cost_groups(subject):
        lines, gdp = group.lines(cost), None
        if group.silos:
            mu = accountant.gaussian_mu(lines[0].entries, lines[0].relation)
            gdp = None if mu is None else {"mu": mu, "regret": 0.0, "left": 0.0}
        else:
            certified = subject.certificate["adversaries"]
            gdp = next(line["gdp"] for line in certified if line["adversary"] == group.adversaries[0])
        rates = {"false_positive_rate": FALSE_ALARMS.tolist()}
        rates["true_positive_rate"] = np.max([_true_positives(line) for line in lines], axis=0).tolist()
        found.append({**group.entry(), "gdp": gdp, **rates})
    return found


def _true_positives(line: Line) -> Floats:
    """Return the best attack's true-positive rate at every false-positive rate of `FALSE_ALARMS`."""
    if not protects(line):
        return np.ones_like(FALSE_ALARMS)
    mu = accountant.gaussian_mu(line.entries, line.relation)
    if mu is not None:
        return np.asarray([power(mu, a) if 0 < a < 1 else a for a in FALSE_ALARMS])
    deltas = np.asarray(accountant.deltas_at(line.entries, line.relation, _LOSSES.tolist()))
    return true_positives(FALSE_ALARMS, _LOSSES, deltas)


def delta_curve(subject: Subject) -> list[dict[str, Any]]:
    """Return delta by epsilon, from 0 to twice the certified epsilon, for every group with a guarantee."""
    cost, found = run_cost(subject.plan, subject.facts), []
    for group in cost_groups(subject):
        certified = group.epsilon(subject, cost)
        if certified is not None:
            epsilons = np.linspace(0, 2 * certified if certified else 1.0, 61).tolist()
            each = [accountant.deltas_at(one.entries, one.relation, epsilons) for one in group.lines(cost)]
            deltas = np.max(np.asarray(each, dtype=np.float64), axis=0).tolist()
            found.append({**group.entry(), "epsilon": epsilons, "delta": deltas, "certified": certified})
    return found


# ---- spectra of smoothing
def smoothing_gain(strength: float, frequency: Floats) -> Floats:
    """Return the share of power that smoothing of strength s leaves at f cycles per coordinate.

    It is (1 + 2 s (1 - cos 2 pi f))^-2.
    """
    return np.asarray((1 + 2 * strength * (1 - np.cos(2 * np.pi * frequency))) ** -2.0)


def spectrum(subject: Subject) -> dict[str, Any] | None:
    """Return the power of noise and update by frequency, before and after smoothing; None without smoothing."""
    steps = subject.plan.postprocess
    smoothing = steps[0] if len(steps) == 1 else None
    if not isinstance(smoothing, LaplacianSmoothing) or smoothing.strength <= 0:
        return None
    frequencies, variance = np.linspace(0, 0.5, 65), _noise_variance(subject)
    level = 1.0 if variance is None else variance
    after = level * smoothing_gain(smoothing.strength, frequencies)
    return {
        "strength": smoothing.strength,
        "in_units": "1 = noise before smoothing" if variance is None else "squares of the model's own units",
        "noise": {"frequency": frequencies.tolist(), "before": [level] * len(frequencies), "after": after.tolist()},
        "update": None if variance is None else _update_spectrum(subject, smoothing),
    }


def _noise_variance(subject: Subject) -> float | None:
    """Return the noise variance per coordinate of the last round's mean; None if it is unknown or not uniform."""
    plan, t = subject.plan, subject.plan.rounds - 1
    state = State(t, {}) if subject.last is None else subject.last.before
    cohort = subject.cohorts[-1] if subject.cohorts else np.arange(max(1, round(plan.clients.expected)))
    try:
        std = mean_std(plan, cohort, len(cohort), plan.public(t, 0, state.public_state))
    except (UserError, KeyError):
        return None
    return None if isinstance(std, Tensor) or not np.isfinite(std) else float(std) ** 2


def _update_spectrum(subject: Subject, smoothing: LaplacianSmoothing) -> dict[str, Any] | None:
    """Return the spectrum of the last released step; None if the server does more than subtract the smoothed mean."""
    plan, last = subject.plan, subject.last
    lr = None if last is None else plan.server.plain_lr(last.before.t)
    if last is None or lr is None:
        return None
    shapes = last.shapes(plan.server.result(last.after.memory))
    if shapes is None:
        return None
    step = (last.before.memory["params"].double() - last.after.memory["params"].double()) / lr
    parts = torch.split(step, [shape.numel() for shape in shapes])
    periodograms = [_periodogram(one, shape, smoothing.order) for one, shape in zip(parts, shapes, strict=True)]
    where, after = (np.concatenate(each) for each in zip(*periodograms, strict=True))
    before = after / smoothing_gain(smoothing.strength, where)
    place = np.minimum((where * 2 * BINS).astype(np.int64), BINS - 1)  # equal ranges of frequency
    count = np.bincount(place, minlength=BINS)
    means = (np.bincount(place, values, BINS)[count > 0] / count[count > 0] for values in (where, before, after))
    named = zip(("frequency", "before", "after"), means, strict=True)
    return {"round": last.after.t, **{name: values.tolist() for name, values in named}}


def _periodogram(part: Tensor, shape: torch.Size, order: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Return the frequencies and the periodogram |DFT|^2 / d of a flattened tensor of d entries."""
    cycle = part.view(shape).permute(order).reshape(-1) if order and len(shape) == 4 else part
    values = np.abs(np.fft.fft(cycle.numpy())) ** 2 / len(cycle)
    return np.abs(np.fft.fftfreq(len(cycle))), np.asarray(values)
