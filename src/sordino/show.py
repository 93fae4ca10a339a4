"""What the command line prints: every function returns plain data or text, none of them computes a guarantee."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sordino import codec, starters
from sordino.config import Config
from sordino.errors import ConfigError
from sordino.privacy.bounds import Bound, Spent
from sordino.privacy.certificate import Facts, certificate
from sordino.recipes import RECIPES
from sordino.runs.execution import Executed
from sordino.training import DIAGNOSTIC


def forecast(config: Config) -> dict[str, Any]:
    """What a run of this file would be certified with, and how its messages come to be bounded."""
    plan = config.plan
    config.check_budget()
    promised = certificate(plan, Facts(config.delta, config.privacy.noise, plan.rounds, **config.facts))
    names = [plan.local.kind, *(step.kind for step in plan.encode)]
    chain = [{"after": name, "bound": _bound(bound)} for name, bound in zip(names, plan.bounds, strict=True)]
    keys = (
        "epsilon",
        "delta",
        "unit",
        "relation",
        "adversaries",
        "sampler",
        "trust",
        "silos",
        "clip",
        "denominator",
        "plan_sha256",
    )
    return {
        **{key: promised[key] for key in keys},
        "rounds": plan.rounds,
        "bounds": chain,
        "plan": codec.dump(plan),
    }


def _bound(bound: Bound | Spent) -> str:
    if isinstance(bound, Spent):
        return f"private already, per {bound.unit}"
    return f"L{bound.norm} norm of one {bound.unit}'s message at most 1" if bound.finite else "none"


def forecast_text(found: dict[str, Any]) -> str:
    """The forecast as a page."""
    plan = found["plan"]
    parts = [("clients", plan["clients"]), ("local", plan["local"])]
    parts += [("encode", step) for step in plan.get("encode", [])] + [("release", plan["release"])]
    parts += [("postprocess", step) for step in plan.get("postprocess", [])] + [("server", plan["server"])]
    lines = [
        f"{found['rounds']} rounds",
        *(f"  {name:<12} {_part(part)}" for name, part in parts),
        "bound of a message",
    ]
    lines += [f"  after {entry['after']:<20} {entry['bound']}" for entry in found["bounds"]]
    return "\n".join([*lines, "forecast", *_adversary_lines(found), *_silo_lines(found)])


def _silo_lines(found: dict[str, Any]) -> list[str]:
    """Each silo's own guarantee against one who reads its messages, where silos have names."""
    own = found["adversaries"][-1].get("silos", []) if found["silos"] else []
    pairs = sorted(((silo, entry) for entry in own for silo in entry["silos"]), key=lambda pair: pair[0])
    return [f"  {_epsilon(entry)}  of {found['silos'][silo]}" for silo, entry in pairs]


def _part(part: dict[str, Any]) -> str:
    values = [f"{key}={_part(v) if isinstance(v, dict) else v}" for key, v in part.items() if key != "kind"]
    return f"{part.get('kind', '')}({', '.join(values)})"  # a mean of iterates has no kind


def _adversary_lines(found: dict[str, Any]) -> list[str]:
    return [
        f"  {_epsilon(line)}  {line['relation']:<12} to one who {line['description']}" for line in found["adversaries"]
    ]


def _epsilon(line: dict[str, Any]) -> str:
    if line["epsilon"] is None:
        return f"{'no guarantee':<32}"
    return f"epsilon {line['epsilon']:<9.4g} delta {line['delta']:<8.3g}"


def guarantee(made: dict[str, Any]) -> str:
    """The certificate's first line in words."""
    if made["epsilon"] is None:
        return f"no guarantee (unit {made['unit']}, relation {made['relation']})"
    return f"epsilon {made['epsilon']:.4g}, delta {made['delta']:.3g}, unit {made['unit']}, relation {made['relation']}"


def calibrated_text(found: dict[str, Any]) -> str:
    """The answer of a calibration."""
    where = f"; written to {found['out']}" if found["out"] else ""
    return (
        f"{found['free']} = {found['value']:.6g}: epsilon {found['epsilon']:.4g} at delta {found['delta']:.3g}{where}"
    )


NO_TEST = "not evaluated, as no row is declared public (task.options: test or public_test_fraction)"


def result(done: Executed) -> dict[str, Any]:
    """A finished run as plain data."""
    notes = {"notes": list(done.notes)} if done.notes else {}
    return {"out": str(done.path), "last": done.history[-1], "certificate": done.certificate, **notes}


def result_text(done: Executed) -> str:
    """A finished run in a few lines."""
    last = done.history[-1]
    figures = ", ".join(f"{name} {last[name]:.4f}" for name in ("accuracy", "rmse", "loss") if name in last)
    tested = f"{figures} on the whole test set" if figures else NO_TEST
    lines = [f"round {last['round']}: {tested}", guarantee(done.certificate)]
    lines.append(f"noise: {done.certificate['noise']['mode']} ({done.certificate['noise']['note']})")
    lines += [f"note: {note}" for note in done.notes]
    return "\n".join([*lines, f"files: {done.path}/{{plan.toml, certificate.json, history.jsonl, model.safetensors}}"])


@contextmanager
def progress(rounds: int, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on a terminal, plain lines in a pipe, nothing beside JSON."""
    if quiet:
        yield lambda line: None
    elif not sys.stdout.isatty():
        yield lambda line: print(_plain(line, rounds), flush=True)
    else:
        with _bar(rounds) as on_round:
            yield on_round


def _plain(line: dict[str, Any], rounds: int) -> str:
    figures = " ".join(f"{name}={line[name]:.4f}" for name in ("loss", "accuracy", "rmse") if name in line)
    return f"round {line['round']}/{rounds} {figures} {line[DIAGNOSTIC]['seconds']:.2f}s{_alarm(line)}"


def _alarm(line: dict[str, Any]) -> str:
    bad = int(line.get(DIAGNOSTIC, {}).get("nonfinite_updates", 0))
    return f"  {bad} update(s) with NaN or infinity counted as zero" if bad else ""


@contextmanager
def _bar(rounds: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("rounds"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as bar:
        job = bar.add_task("", total=rounds)

        def on_round(line: dict[str, Any]) -> None:
            figures = " ".join(f"{name} {line[name]:.3f}" for name in ("accuracy", "rmse", "loss") if name in line)
            bar.update(job, completed=line["round"], description=figures + _alarm(line))

        yield on_round


def recipes() -> list[dict[str, str]]:
    """Every recipe and its paper."""
    return [{"name": name, "summary": _summary(function)} for name, function in RECIPES.items()]


def _summary(function: Callable[..., Any]) -> str:
    module = inspect.getmodule(function)
    return (inspect.getdoc(module) or "").splitlines()[0]


def recipe(name: str) -> dict[str, Any]:
    """One recipe: its arguments and an example file."""
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r}", "a known recipe", codec.nearest(name, list(RECIPES)))
    parameters = inspect.signature(RECIPES[name]).parameters.values()
    arguments = {p.name: {"type": str(p.annotation), "required": p.default is p.empty} for p in parameters}
    return {
        "name": name,
        "equation": inspect.getdoc(RECIPES[name]),
        "arguments": arguments,
        "example": starters.example(name),
    }
