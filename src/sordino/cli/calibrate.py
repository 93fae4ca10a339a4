"""`sordino calibrate`: a file in, a file with one number changed out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino import codec
from sordino.cli.app import Changes, ConfigFile, JsonFlag, Own, Seed, app, bring, changed, say
from sordino.errors import ConfigError

if TYPE_CHECKING:
    from sordino.plan import Plan

FREE = ("multiplier", "rounds", "cohort")


@app.command()
def calibrate(
    file: ConfigFile,
    epsilon: Annotated[float, typer.Option(help="The target.")],
    delta: Annotated[float | None, typer.Option(help="Default: the file's.")] = None,
    free: Annotated[str, typer.Option(help="multiplier | rounds | cohort")] = "multiplier",
    out: Annotated[Path | None, typer.Option(help="Write the calibrated file here.")] = None,
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the multiplier, rounds or cohort that cost a target epsilon."""
    bring(own)
    changes = changed(values, seed)
    found = calibrate_config(file, epsilon=epsilon, delta=delta, free=free, out=out, changes=changes)
    say(as_json, found, calibrated_text(found))


def calibrate_config(
    file: Path, *, epsilon: float, delta: float | None, free: str, out: Path | None, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """The number found, what it costs, and the file it was written to."""
    from sordino.config import load_config
    from sordino.privacy.calibrated import calibrated
    from sordino.privacy.certificate import headline
    from sordino.privacy.delta import check_delta

    if free not in FREE:
        raise ConfigError(f"--free {free}", "multiplier, rounds or cohort", codec.nearest(free, list(FREE)))
    if out is not None:
        check_new(out)
    config = load_config(file, changes)
    delta = config.delta if delta is None else delta
    check_delta(delta, config.plan.units, config.privacy.allow_large_delta)
    plan = calibrated(config.plan, epsilon=epsilon, delta=delta, free=free)
    changed = replace(config, plan=plan, privacy=replace(config.privacy, delta=delta))
    if out is not None:
        out.write_text(codec.to_toml(changed), encoding="utf-8")
    cost = headline(plan.bill().of("models"), delta)
    return {"free": free, "value": _value(plan, free), **cost, "out": str(out) if out else None}


def check_new(out: Path) -> None:
    """A file that can be written and is not there yet."""
    if out.exists():
        raise ConfigError(f"{out}, which exists", "a new file", "choose another --out")
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise ConfigError(f"no folder {out.parent} to write to", "an --out in a folder that exists")
    with open(out, "xb"):  # what only the system knows, as that /proc takes no file: before the work, not after it
        out.unlink()


def _value(plan: Plan, free: str) -> float:
    if free == "rounds":
        return plan.rounds
    if free == "cohort":
        return plan.clients.expected
    release = codec.dump(plan.local if plan.release.kind == "forward" else plan.release)
    return float(release.get("multiplier") or release["mechanism"]["multiplier"])


def calibrated_text(found: dict[str, Any]) -> str:
    """The answer of a calibration."""
    from sordino.privacy.rounding import upto

    where = f"; written to {found['out']}" if found["out"] else ""
    cost = f"epsilon {upto(found['epsilon'], 4)} at delta {upto(found['delta'])}"
    return f"{found['free']} = {found['value']:.6g}: {cost}{where}"
