"""Output of `sordino tune`: reads the file, prints and draws the curves, writes the tuned file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.accounting.calibration import Budget
from sordino.accounting.rounding import upto
from sordino.accounting.trials import Trials
from sordino.certificate.build import headline
from sordino.cli.console import say, working
from sordino.cli.planning import check_new
from sordino.codec import toml
from sordino.config import Config, load_config, overridden, read_table
from sordino.errors import ConfigError
from sordino.outcome import declared_public
from sordino.tuning.private_selection import Tuning, tune_private
from sordino.tuning.private_selection import text as private_text
from sordino.tuning.spec import Sweep, axes
from sordino.tuning.tune import Tuned, tune

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
    known: dict[str, Any] = {"source": source, "trials": trials, "public": declared_public(task), "silos": silos}
    known |= {"delta": config.delta, "seed": config.run.seed}
    found: list[Tuned] = []
    for epsilon in wanted:
        with working(f"tune, epsilon {upto(epsilon, 4)}", quiet) as told:
            found.append(tune(config.plan, task, epsilon=epsilon, on_tried=told, **known))
    if out is not None:
        out.write_text(codec.to_toml(replace(config, plan=found[0].plan)), encoding="utf-8")
    if plot is not None:
        draw(found, plot)
    files = {"out": str(out) if out else None, "plot": str(plot) if plot else None}
    return {"tuned": [one.entry for one in found], **files}


def tries_of(mean: float, law: str, shape: float) -> Trials:
    """The law of the number of tries, as the options say."""
    found: Trials = codec.read(Trials, {"mean": mean, "law": law, "shape": shape}, "--law")
    return found


def private_tuning(
    file: Path, changes: Sequence[str], over: Sequence[str], tries: Trials, epsilons: Sequence[float], metric: str
) -> Tuning:
    """What `tune --private` asks: a file and --over, or the file of a sweep."""
    if len(epsilons) > 1:
        raise ConfigError("several --epsilon with --private", "one: each tuning is a release of its own")
    data = read_table(file)
    given = dict(map(toml.read, over))
    if not given and "sweep" not in data:
        raise ConfigError("--private without --over", "what to try", "--over 'recipe.lr=[0.1, 0.3, 1.0]'")
    said = data.get("sweep", {}) if not given else {"random": given}
    asked = Sweep.of({**data, "sweep": {**said, **({"metric": metric} if metric else {})}}, file.parent)
    asked = replace(asked, table=overridden(asked.table, dict(map(toml.read, changes))))
    table = asked.spec.grid or {k: v for k, v in asked.spec.random.items() if k not in ("trials", "seed")}
    return Tuning(asked, axes(table), tries, next(iter(epsilons), None))


def run_private(asked: Tuning, out: Path | None, as_json: bool) -> None:
    """Tune, and say what may be said."""
    if out is None:
        raise ConfigError("--private without --out", "a new folder for the run that wins", "add --out runs/best")
    said = tune_private(asked, out, (lambda line: None) if as_json else (lambda line: say(False, {}, line)))
    say(as_json, said, private_text(said))


def own_budgets(config: Config) -> tuple[Budget, ...]:
    """What every silo spends, where they differ: as the file says, or by the noise that each has now."""
    plan = config.plan
    if config.budgets or not any(getattr(part, "noise_multipliers", ()) for part in (plan.release, plan.local)):
        return config.budgets
    line = headline(plan.cost().of("messages"), config.delta, config.deltas)
    if "silos" not in line:
        return ()
    each = {silo: Budget(entry["epsilon"], entry["delta"]) for entry in line["silos"] for silo in entry["silos"]}
    return tuple(each[silo] for silo in range(plan.clients.population))


def _own(config: Config) -> float:
    spent = headline(config.plan.cost().of("models"), config.delta, config.deltas)["epsilon"]
    if spent is None:
        raise ConfigError("a plan without a guarantee and no --epsilon", "a budget to tune for", "give --epsilon")
    return float(spent)


def draw(found: list[Tuned], path: Path) -> None:
    """One panel per knob, one line per epsilon."""
    from sordino.report.figures import curves

    names = list(found[0].curves)
    panels = {
        name: {
            f"epsilon {upto(one.epsilon)}": [{**row, "value": row[name]} for row in one.curves[name]] for one in found
        }
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
        return "every silo's own epsilon (" + ", ".join(upto(silo["epsilon"]) for silo in one["silos"]) + ")"
    return f"epsilon {upto(one['epsilon'], 4)}, delta {upto(one['delta'])}"


def _curve(name: str, rows: list[dict[str, float]]) -> str:
    return ", ".join(f"{_short(row[name])} -> {_short(row['loss'])}" for row in rows)


def _short(value: float) -> str:
    return f"{value:.4g}"
