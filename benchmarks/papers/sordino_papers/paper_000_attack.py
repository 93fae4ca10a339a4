"""Paper 000, Figure 7 (scaled): loss-threshold membership inference against models with and without noise."""

from __future__ import annotations

from pathlib import Path

from sordino.accounting.accountant import largest_delta
from sordino.accounting.profiles import ceiling
from sordino.audit.training_attacks import audit_membership
from sordino.config import TaskSpec
from sordino.data.records import Iid
from sordino.models import Mlp
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.samplers import Poisson
from sordino.plan import Plan
from sordino.recipes import dp_fed_ls
from sordino.task import Task
from sordino.training import train
from sordino_papers.panels import curves
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import in_all, verdict

CLIENTS, RECORDS, ROUNDS = 100, 500, 60
MULTIPLIERS = (0.0, 1.0, 2.0, 4.0)
STRENGTHS = (0.0, 1.0)
AS_PUBLISHED = (1.0, 2.0)  # of them those within a factor of two of the paper's noise-to-signal ratio
CHOSEN = "by hand, before the attack was run: a model that learns its records by heart"


def task(seed: int) -> Task:
    """500 MNIST images over 100 clients, a perceptron with 64 hidden units: a model that can learn them by heart."""
    spec = TaskSpec(dataset="mnist", options={"train": RECORDS}, partition=Iid(CLIENTS), model=Mlp((64,)))
    return spec.build(CLIENTS, seed)


def plan(noise_multiplier: float, strength: float) -> Plan:
    """DP-Fed-LS, Poisson 0.1; without noise the clip is wide, as in the paper's non-private model."""
    clip_norm = 0.5 if noise_multiplier else 20.0
    return dp_fed_ls(
        rounds=ROUNDS, clients=Poisson(CLIENTS, 0.1), lr=0.2, clip_norm=clip_norm, noise_multiplier=noise_multiplier,
        epochs=10, batch=5,
        denoiser=LaplacianSmoothing(strength),
    )  # fmt: skip


def attacked(seed: int, noise_multiplier: float, strength: float) -> Row:
    """One model, and what the attack makes of it."""
    planned, data = plan(noise_multiplier, strength), task(seed)
    done = train(planned, data, delta=largest_delta(CLIENTS), seed=seed, eval_every=ROUNDS)
    found = audit_membership(done.model, data)
    return {
        "noise_multiplier": noise_multiplier,
        "sigma": strength,
        "epsilon": done.certificate["epsilon"],
        "ceiling": round(ceiling(planned.cost().line("models")).auc, 4),
        "accuracy": done.history[-1]["accuracy"],
        "auc": found.auc,
        "tpr_at_0.001": found.true_positives["0.001"],
        "tpr_at_0.01": found.true_positives["0.01"],
    }


def figure7(repeats: int, workers: int) -> list[Row]:
    """AUC, true positives and accuracy by noise and smoothing; `figures` has the accuracies seed by seed."""
    jobs = [(seed, z, s) for z in MULTIPLIERS for s in STRENGTHS if z or not s for seed in range(repeats)]
    found = side_by_side(attacked, jobs, workers)
    keys = ("noise_multiplier", "sigma", "epsilon", "ceiling")
    rows = gathered(found, keys, "auc")
    for figure in ("accuracy", "tpr_at_0.001", "tpr_at_0.01"):
        for row, other in zip(rows, gathered(found, keys, figure), strict=True):
            row[figure] = other[figure]
            row.setdefault("figures", {})[figure] = other["values"]
    return rows


def figure7_claims(rows: list[Row]) -> list[Row]:
    """Noise against none, smoothing against none at the same noise, the attack against its ceiling; seed by seed."""
    (bare,) = picked(rows, noise_multiplier=0.0, sigma=0.0)
    noisy = {f"z = {row['noise_multiplier']:g}, sigma {row['sigma']:g}": row for row in rows if row["noise_multiplier"]}
    near = {name: row for name, row in noisy.items() if row["noise_multiplier"] in AS_PUBLISHED}
    lower = {name: (bare["values"], row["values"]) for name, row in near.items()}
    below = {name: ([row["ceiling"]] * len(row["values"]), row["values"]) for name, row in noisy.items()}
    pairs = {f"z = {z:g}": _smoothing(rows, z) for z in MULTIPLIERS if z}
    leaks = {z: (none["values"], smooth["values"]) for z, (none, smooth) in pairs.items()}
    told = {f"z = {z:g}": leaks[f"z = {z:g}"] for z in AS_PUBLISHED}
    what = "000: Figure 7 scaled, "
    return [
        in_all(f"{what}the AUC of the attack is higher without noise by more than 0.02", lower, CHOSEN, 0.02, "of AUC"),
        in_all(f"{what}smoothing leaks no more than none, to 0.005", told, CHOSEN, -0.005, "of AUC less"),
        *(
            verdict(f"{what}{z}: smoothing leaks less than none", *pair, CHOSEN, 0.0, "of AUC")
            for z, pair in leaks.items()
        ),
        in_all(f"{what}every attack is below its certified ceiling", below, CHOSEN, 0.0, "of AUC below"),
        *(_accuracy(z, *pair) for z, pair in pairs.items()),
    ]


def _smoothing(rows: list[Row], z: float) -> tuple[Row, Row]:
    """The rows of one noise without and with smoothing."""
    none, smooth = (picked(rows, noise_multiplier=z, sigma=s)[0] for s in STRENGTHS)
    return none, smooth


def _accuracy(z: str, none: Row, smooth: Row) -> Row:
    """Table H.12: the accuracies of the models attacked."""
    text = f"000: Table H.12 scaled, {z}: smoothing (sigma 1) beats none"
    up, down = ([100 * one for one in row["figures"]["accuracy"]] for row in (smooth, none))
    return verdict(text, up, down, CHOSEN)


def draw_figure7(rows: list[Row], path: Path) -> None:
    """AUC against the noise."""
    lines = {f"sigma {s:g}": picked(rows, sigma=s) for s in STRENGTHS}
    curves({"membership attack": lines}, "noise_multiplier", "auc", path, xlabel="noise multiplier z",
           ylabel="area under the ROC of the attack (guessing: 0.5)")  # fmt: skip


def _quick() -> Row:
    """Seed 0 without noise."""
    found = attacked(0, 0.0, 0.0)
    return {key: found[key] for key in ("noise_multiplier", "sigma", "auc")}


STUDIES = (
    Study(
        "000-figure7",
        "Figure 7: membership attack against models with and without noise (scaled)",
        "500 MNIST images over 100 clients, a perceptron of 50,890 parameters, T = 60, E = 10; attacked with all "
        "members and 10,000 strangers. noise multiplier 0: no noise.",
        figure7,
        figure7_claims,
        draw_figure7,
        10,
        CHOSEN,
        _quick,
        "auc",
    ),
)
