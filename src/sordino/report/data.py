"""The data of a page, plain: what `--json` prints, and all that the page is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sordino.certificate.explain import ALL, CHANGE, ceilings, explain
from sordino.data.metrics import ONLY_CLASS
from sordino.outcome import DIAGNOSTIC
from sordino.parts.schedules import Schedule
from sordino.report.comparison import compare
from sordino.report.curves import delta_curve, over_rounds, trade_off
from sordino.report.spectrum import spectrum
from sordino.report.subject import Subject
from sordino.version import __version__

NORMS = ("update_norm_p10", "update_norm_p50", "update_norm_p90")


LEARNT = "The clip norm is learnt as the run goes, and not kept round by round."
RECORDS = "Every record is clipped by itself; an update has no clip norm of its own."
UNBOUNDED = "Nothing is clipped."


def collected(subjects: Sequence[Subject], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Everything of every run; `notes` are what there is to say of several of them together."""
    found = compare(subjects)
    return {"sordino": __version__, "notes": list(notes), **found, "runs": [told(one) for one in subjects]}


def told(subject: Subject) -> dict[str, Any]:
    """One run."""
    made, reach = subject.certificate, ceilings(subject.plan, subject.facts)
    return {
        "name": subject.name,
        "loop": subject.is_loop,
        "answer": answer(subject, reach["models"].true_positives),
        "metrics": subject.metrics,
        "epsilon_by_round": over_rounds(subject),
        "trade_off": trade_off(subject),
        "delta_curve": delta_curve(subject),
        "silos": silos(made),
        "participation": participation(subject),
        "diagnostics": diagnostics(subject),
        "spectrum": spectrum(subject),
        "audit": subject.audit,
        "words": explain(made, reach),
        "certificate": made,
    }


def answer(subject: Subject, found: float) -> dict[str, Any]:
    """What is asked first."""
    made, figures = subject.certificate, subject.evaluated
    main = subject.main_metric
    return {
        **{key: made[key] for key in ("epsilon", "delta", "unit", "relation")},
        "change": CHANGE[made["relation"]].format(unit=made["unit"], all=ALL[made["unit"]]),
        "noise": made["noise"]["mode"],
        "for_release": made["noise"]["mode"] != "simulation" and made["epsilon"] is not None,
        "metric": main,
        "value": None if main is None else figures[main],
        "evaluated_after": subject.evaluated_after,
        "only_class": figures.get(ONLY_CLASS),
        "rows": [f"{one['rows']:,} {one['what']}" for one in made["declared_public"] if "rows" in one["what"]],
        "chose": subject.facts.selection is not None,
        "rounds": made["counts"]["rounds_accounted"],
        "members_found_at_1_percent": found,
    }


def silos(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Each silo's own epsilon, against one who reads its messages, where they differ."""
    entries, names = made["adversaries"][-1].get("silos", []), made["silos"]
    pairs = sorted(((silo, one) for one in entries for silo in one["silos"]), key=lambda pair: pair[0])
    return [
        {"silo": names[silo] if names else f"silo {silo}", "epsilon": one["epsilon"], "delta": one["delta"]}
        for silo, one in pairs
    ]


def participation(subject: Subject) -> dict[str, Any]:
    """Who took part: as it was where cohorts are public or seen by design, else in expectation alone."""
    clients, counts = subject.plan.clients, subject.certificate["counts"]
    rounds = counts["rounds_accounted"] if subject.is_loop else counts["rounds_charged"]
    known = {"population": clients.population, "expected": clients.expected, "rounds": rounds}
    if subject.is_loop or not subject.cohorts:
        return {**known, "seen": False, "most": clients.max_participations(rounds), "rounds_of_each": None}
    each = np.bincount(np.concatenate(subject.cohorts), minlength=clients.population)
    return {**known, "seen": True, "most": int(each.max()), "rounds_of_each": each.tolist()}


def diagnostics(subject: Subject) -> dict[str, Any] | None:
    """Figures of unreleased data, marked so; None where a run kept none."""
    if not any(subject.diagnostic(name)["round"] for name in NORMS):
        return None
    norms = {name: subject.diagnostic(name) for name in NORMS}
    clip, clients = subject.plan.clip, subject.plan.unit == "client"
    learnt = clip is not None and isinstance(clip.clip_norm, Schedule) and clip.clip_norm.learned
    at = norms[NORMS[1]]["round"]
    clip_norm = [clip.clip_norm_at(int(t) - 1) for t in at] if clip is not None and clip.finite and not learnt else None
    return {
        "private": False,
        "note": DIAGNOSTIC,
        "norms": norms,
        "clip_norm": {"round": at, "value": clip_norm} if clients and clip_norm else None,
        "no_clip_norm": None if clients and clip_norm else LEARNT if learnt else RECORDS if not clients else UNBOUNDED,
        "clipped_fraction": subject.diagnostic("clipped_fraction") if clients and (clip_norm or learnt) else None,
        "signal_to_noise": subject.diagnostic("signal_to_noise"),
    }
