"""The command around the search: read a file, print and draw the curves, write the tuned file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.calibration import check_new
from sordino.config import load_config
from sordino.errors import ConfigError
from sordino.privacy.certificate import headline
from sordino.tuning.search import Tuned, tune

SOURCES = ("public", "synthetic")


def tune_config(
    file: Path, *, epsilons: list[float], source: str, trials: int, out: Path | None, plot: Path | None
) -> dict[str, Any]:
    """A proposal for every epsilon (default: the file's own forecast); the first one is written to `out`."""
    if source not in SOURCES:
        raise ConfigError(f"--data {source}", "public or synthetic", codec.nearest(source, list(SOURCES)))
    for path in (out, plot):
        if path is not None:
            check_new(path)
    config = load_config(file)
    wanted = epsilons or [_own(config.plan.bill().of("models"), config.delta)]
    task = config.build()
    public = config.task.declared(task)
    found = [
        tune(config.plan, task, epsilon=e, delta=config.delta, source=source, trials=trials, public=public)  # type: ignore[arg-type]
        for e in wanted
    ]
    if out is not None:
        out.write_text(codec.to_toml(replace(config, plan=found[0].plan)), encoding="utf-8")
    if plot is not None:
        draw(found, plot)
    files = {"out": str(out) if out else None, "plot": str(plot) if plot else None}
    return {"tuned": [one.entry for one in found], **files}


def _own(lines: Any, delta: float) -> float:
    spent = headline(lines, delta)["epsilon"]
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
    curves(panels, "value", "loss", path, ylabel="loss on stand-in data", log=True)


def text(found: dict[str, Any]) -> str:
    """The proposals, the curves they come from, and what the search cost."""
    lines: list[str] = []
    for one in found["tuned"]:
        knobs = ", ".join(f"{name} {_short(value)}" for name, value in one["proposal"].items())
        lines += [f"epsilon {one['epsilon']:.4g}, delta {one['delta']:.3g}: {knobs}", f"  first guess: {one['rule']}"]
        lines += [f"  loss by {name}: {_curve(name, rows)}" for name, rows in one["curves"].items()]
        lines.append(f"  privacy cost of the search: {one['privacy_cost']}")
    return "\n".join([*lines, *(f"written: {found[key]}" for key in ("out", "plot") if found[key])])


def _curve(name: str, rows: list[dict[str, float]]) -> str:
    return ", ".join(f"{_short(row[name])} -> {_short(row['loss'])}" for row in rows)


def _short(value: float) -> str:
    return f"{value:.4g}"
