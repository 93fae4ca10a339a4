"""The command around the search: read a file, print and draw the curves, write the tuned file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.cli.calibrate import check_new
from sordino.cli.progress import working
from sordino.config import Config, load_config
from sordino.errors import ConfigError
from sordino.privacy.budget import Budget
from sordino.privacy.certificate import headline
from sordino.tuning.search import Tuned, tune

SOURCES = ("public", "synthetic")
AXES = {"pace": "factor on the step size", "steps": "local steps", "rounds": "rounds", "batch": "records per batch"}


def tune_config(
    file: Path,
    *,
    epsilons: list[float],
    source: str,
    trials: int,
    out: Path | None,
    plot: Path | None,
    changes: Sequence[str] = (),
    quiet: bool = True,
) -> dict[str, Any]:
    """A proposal for every epsilon (default: the file's own forecast); the first one is written to `out`."""
    if source not in SOURCES:
        raise ConfigError(f"--data {source}", "public or synthetic", codec.nearest(source, list(SOURCES)))
    for path in (out, plot):
        if path is not None:
            check_new(path)
    config = load_config(file, changes)
    silos = own_budgets(config)
    if silos and epsilons:
        found_own = "--epsilon, and silos that have budgets of their own"
        raise ConfigError(found_own, "one of them", "drop --epsilon: every silo keeps its budget")
    wanted = epsilons or [_own(config)]
    task = config.build()
    known: dict[str, Any] = {"source": source, "trials": trials, "public": config.task.declared(task), "silos": silos}
    known |= {"delta": config.delta, "seed": config.run.seed}
    found: list[Tuned] = []
    for epsilon in wanted:
        with working(f"tune, epsilon {epsilon:.4g}", quiet) as told:
            found.append(tune(config.plan, task, epsilon=epsilon, on_tried=told, **known))
    if out is not None:
        out.write_text(codec.to_toml(replace(config, plan=found[0].plan)), encoding="utf-8")
    if plot is not None:
        draw(found, plot)
    files = {"out": str(out) if out else None, "plot": str(plot) if plot else None}
    return {"tuned": [one.entry for one in found], **files}


def own_budgets(config: Config) -> tuple[Budget, ...]:
    """What every silo spends, where they differ: as the file says, or by the noise that each has now."""
    plan = config.plan
    if config.budgets or not any(getattr(part, "multipliers", ()) for part in (plan.release, plan.local)):
        return config.budgets
    line = headline(plan.bill().of("messages"), config.delta, config.deltas)
    if "silos" not in line:
        return ()
    each = {silo: Budget(entry["epsilon"], entry["delta"]) for entry in line["silos"] for silo in entry["silos"]}
    return tuple(each[silo] for silo in range(plan.clients.population))


def _own(config: Config) -> float:
    spent = headline(config.plan.bill().of("models"), config.delta, config.deltas)["epsilon"]
    if spent is None:
        raise ConfigError("a plan without a guarantee and no --epsilon", "a budget to tune for", "give --epsilon")
    return float(spent)


def draw(found: list[Tuned], path: Path) -> None:
    """One panel per knob, one line per epsilon."""
    from sordino.report.figures import curves

    names = list(found[0].curves)
    panels = {
        name: {f"epsilon {one.epsilon:.3g}": [{**row, "value": row[name]} for row in one.curves[name]] for one in found}
        for name in names
    }
    words = {name: AXES[name] for name in names}
    curves(panels, "value", "loss", path, xlabel=words, ylabel="loss on stand-in data", log=True)


def text(found: dict[str, Any]) -> str:
    """The proposals, the curves they come from, and what the search cost."""
    lines: list[str] = []
    for one in found["tuned"]:
        knobs = ", ".join(f"{name} {_short(value)}" for name, value in one["proposal"].items())
        lines += [f"{_budget(one)}: {knobs}", f"  first guess: {one['rule']}"]
        lines += [f"  loss by {name}: {_curve(name, rows)}" for name, rows in one["curves"].items()]
        lines.append(f"  privacy cost of the search: {one['privacy_cost']}")
    return "\n".join([*lines, *(f"written: {found[key]}" for key in ("out", "plot") if found[key])])


def _budget(one: dict[str, Any]) -> str:
    if "silos" in one:
        return "every silo's own epsilon (" + ", ".join(f"{silo['epsilon']:.3g}" for silo in one["silos"]) + ")"
    return f"epsilon {one['epsilon']:.4g}, delta {one['delta']:.3g}"


def _curve(name: str, rows: list[dict[str, float]]) -> str:
    return ", ".join(f"{_short(row[name])} -> {_short(row['loss'])}" for row in rows)


def _short(value: float) -> str:
    return f"{value:.4g}"
