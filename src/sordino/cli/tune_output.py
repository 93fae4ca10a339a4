"""Options and output of `sordino tune`: runs the search, writes the tuned file, draws and prints losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.accounting.calibration import Budget
from sordino.accounting.renyi import Trials
from sordino.accounting.rounding import upto
from sordino.certificate.build import headline
from sordino.cli.console import working
from sordino.codec import durable_files
from sordino.config import Config, load_config, overridden, read_table
from sordino.errors import ConfigError
from sordino.tuning.calibrated_file import multipliers
from sordino.tuning.private_selection import PrivateTuning
from sordino.tuning.search_space import Sweep, read_space
from sordino.tuning.tune import TrialLog, Tuned, tune
from sordino.version import __version__

SOURCES = ("public", "synthetic")
FILES = "{tuned.toml, tune.png, trials.jsonl}"
AXES = {"lr_factor": "factor on step size", "steps": "local steps", "rounds": "rounds", "batch": "records per batch"}


def tune_config(
    file: Path, *, epsilons: list[float], source: str, seeds: int, out: Path | None, resume: bool = False,
    changes: Sequence[str] = (), quiet: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Search hyperparameters for every epsilon (default: the file's forecast); results are written to folder `out`."""
    if source not in SOURCES:
        raise ConfigError(f"--data {source}", "public or synthetic", codec.nearest(source, list(SOURCES)))
    config = load_config(file, changes)
    silos = own_budgets(config)
    if silos and epsilons:
        both = "--epsilon together with a budget for every silo"
        raise ConfigError(both, "either --epsilon or budgets", "remove --epsilon: every silo keeps its budget")
    wanted = epsilons
    if not wanted:
        spent = headline(config.plan.cost().of("models"), config.delta, config.deltas)["epsilon"]
        if spent is None:
            raise ConfigError("a plan without a guarantee and no --epsilon", "a target epsilon", "add --epsilon 4")
        wanted = [float(spent)]
    asked = {"config": codec.dump(config), "epsilons": wanted, "data": source, "seeds": seeds, "sordino": __version__}
    task = config.build()
    log = None if out is None else TrialLog(out, asked, resume)
    options: dict[str, Any] = {"source": source, "seeds": seeds, "public": task.declared_public, "silos": silos}
    options |= {"delta": config.delta, "seed": config.run.seed}
    found: list[Tuned] = []
    for epsilon in wanted:
        if log is not None:
            options |= {"done": log.trials(epsilon), "on_trial": partial(log.append, epsilon)}
        with working(f"tune, epsilon {upto(epsilon, 4)}", quiet) as progress:
            found.append(tune(config.plan, task, epsilon=epsilon, progress=progress, **options))
    if out is not None:
        durable_files.write(out / "tuned.toml", codec.to_toml(replace(config, plan=found[0].plan)).encode())
        draw(found, out / "tune.png")
    return {"tuned": [one.entry for one in found], "out": None if out is None else str(out)}


def private_tuning(
    file: Path, changes: Sequence[str], over: Sequence[str], law: dict[str, Any], epsilons: Sequence[float], metric: str
) -> PrivateTuning:
    """Build the private search of `tune --private` from a file with --over, or from a sweep's file."""
    trials: Trials = codec.read(Trials, law, "--law")
    if len(epsilons) > 1:
        fix = "search once for every epsilon: each search is a separate release"
        raise ConfigError("several --epsilon with --private", "one --epsilon", fix)
    data = read_table(file)
    given = dict(map(codec.parse_setting, over))
    if not given and "sweep" not in data:
        raise ConfigError("--private without --over", "values to try", "add --over 'recipe.lr=[0.1, 0.3, 1.0]'")
    space = data.get("sweep", {}) if not given else {"random": given}
    sweep = Sweep.of({**data, "sweep": {**space, **({"metric": metric} if metric else {})}}, file.parent)
    if sweep.spec.recipe or sweep.spec.epsilon:
        found, needed = "[sweep] recipe or epsilon with --private", "[sweep.grid] or [sweep.random] only"
        raise ConfigError(found, needed, """use --over 'recipe.name=["a", "b"]', and --epsilon""")
    sweep = replace(sweep, table=overridden(sweep.table, dict(map(codec.parse_setting, changes))))
    table = sweep.spec.grid or {k: v for k, v in sweep.spec.random.items() if k not in ("trials", "seed")}
    return PrivateTuning(sweep, read_space(table), trials, next(iter(epsilons), None))


def own_budgets(config: Config) -> tuple[Budget, ...]:
    """Return every silo's budget, from the file or, if silos differ in noise, from the forecast; () without silos."""
    plan = config.plan
    if config.budgets or not multipliers(plan):
        return config.budgets
    line = headline(plan.cost().of("messages"), config.delta, config.deltas)
    if "silos" not in line:
        return ()
    each = {silo: Budget(entry["epsilon"], entry["delta"]) for entry in line["silos"] for silo in entry["silos"]}
    return tuple(each[silo] for silo in range(plan.clients.population))


def draw(found: list[Tuned], path: Path) -> None:
    """Draw the losses of a search, one panel per hyperparameter and one line per epsilon."""
    from sordino.report.figures import Axis, Chart, Series, chart_figure, save_figure

    charts = []
    for name in found[0].curves:
        lines = []
        for tone, one in enumerate(found):
            rows = [(float(row[name]), float(row["loss"])) for row in one.curves[name]]
            xs, ys = zip(*rows, strict=True)
            lines.append(Series(f"epsilon {upto(one.epsilon)}", xs, ys, tone))
        y = Axis("loss on the tuning data")
        charts.append(Chart(name, name, "", Axis(AXES[name], log=True), y, tuple(lines)))
    save_figure(chart_figure(*charts), path)


def text(found: dict[str, Any]) -> str:
    """Return the result of a search as text: best hyperparameters, all losses, and the search's privacy cost."""
    lines: list[str] = []
    for one in found["tuned"]:
        proposal = ", ".join(f"{name} {value:.4g}" for name, value in one["proposal"].items())
        budget = f"epsilon {upto(one['epsilon'], 4)}, delta {upto(one['delta'])}"
        if "silos" in one:
            budget = "every silo's own epsilon (" + ", ".join(upto(silo["epsilon"]) for silo in one["silos"]) + ")"
        lines += [f"{budget}: {proposal}", f"  first guess: {one['rule']}"]
        for name, rows in one["curves"].items():
            widths = ["" if row["half_width"] is None else f" +- {row['half_width']:.2g}" for row in rows]
            points = [f"{row[name]:.4g} -> {row['loss']:.4g}{w}" for row, w in zip(rows, widths, strict=True)]
            lines.append(f"  loss by {name}: {', '.join(points)}")
        lines += [f"  at the edge of what was tried: {name}; values beyond may be better" for name in one["at_edge"]]
        lines.append(f"  privacy cost of the search: {one['privacy_cost']}")
    return "\n".join([*lines, *([f"written: {found['out']}/{FILES}"] if found["out"] else [])])
