"""Calibration of a configuration file to a privacy budget, for `sordino calibrate`, `sweep` and `tune`."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import tomli_w

from sordino import codec
from sordino.accounting.calibration import Budget, calibrate, calibrate_silos
from sordino.config import Config, parse
from sordino.errors import ConfigError, UserError
from sordino.plan import Plan
from sordino.recipes import RECIPES

NOISE = "noise_multiplier"
REPLACED = ("noise_multiplier", "release")  # keys of a recipe that a calibrated release replaces


def solve(config: Config, *, epsilon: float | None, delta: float | None = None, free: str = NOISE) -> Plan:
    """Return the plan of a file with the number `free` (the noise, by default) calibrated to `epsilon`.

    With budgets in the file, every silo's noise is calibrated to its own budget. If silos have their own deltas, a
    common noise multiplier is calibrated at the smallest delta, which is valid for every silo.
    """
    if config.budgets:
        if epsilon is not None or free != NOISE:
            found = "a budget for every silo, and " + ("--epsilon" if epsilon is not None else f"--free {free}")
            fix = "remove the option: every silo's noise is calibrated to its own budget"
            raise ConfigError(found, "either budgets or the option", fix)
        return calibrate_silos(config.plan, config.budgets)
    if epsilon is None:
        raise ConfigError("no --epsilon, and no budgets under [privacy] silos", "a target epsilon", "add --epsilon 4")
    deltas = config.deltas if delta is None else ()
    lowest = min(deltas or (config.delta if delta is None else delta,))
    if free == NOISE and multipliers(config.plan):
        each = deltas or (lowest,) * config.plan.clients.population
        return calibrate_silos(config.plan, [Budget(epsilon, own) for own in each])
    return calibrate(config.plan, epsilon=epsilon, delta=lowest, free=free)


def multipliers(plan: Plan) -> tuple[float, ...]:
    """Return the noise multipliers of all silos if each silo has its own; else an empty tuple."""
    each = (getattr(part, "noise_multipliers", ()) for part in (plan.release, plan.local))
    return next((tuple(own) for own in each if own), ())


@dataclass(frozen=True)
class CalibratedFile:
    """Result of a calibration: the configuration, its TOML text, and whether the text has the input's [recipe]."""

    text: str
    config: Config
    recipe_kept: bool


def calibrated_file(
    text: str, table: Mapping[str, Any], *, epsilon: float | None, delta: float | None, free: str
) -> CalibratedFile:
    """Calibrate a configuration file to its budget; `table` is the parsed `text`, with values changed by --set.

    The calibrated number is written into the input's `[recipe]` if the recipe has a key for it; otherwise the whole
    plan is written. The result is checked as `sordino plan` does.
    """
    config, given = parse(table), dict(table)
    plan = solve(config, epsilon=epsilon, delta=delta, free=free)
    if delta is not None:
        given["privacy"] = {**given.get("privacy", {}), "delta": delta}
    with_recipe = _with_recipe(given, plan, epsilon, free)
    if with_recipe is None:
        privacy = config.privacy if delta is None else replace(config.privacy, delta=delta)
        solved = replace(config, plan=plan, privacy=privacy)
        text = codec.to_toml(solved)
    else:
        solved, text = parse(with_recipe), _edited(text, with_recipe)
    solved.check_budget()
    return CalibratedFile(text, solved, with_recipe is not None or "recipe" not in table)


def _with_recipe(table: Mapping[str, Any], plan: Plan, epsilon: float | None, free: str) -> dict[str, Any] | None:
    """Return the table with those recipe values that build `plan`; None if there are none."""
    recipe = table.get("recipe")
    if not isinstance(recipe, Mapping):
        return None
    takes = inspect.signature(RECIPES[recipe["name"]]).parameters
    for keys in _candidates(plan, epsilon, table.get("privacy", {}).get("delta"), free):
        if keys.keys() <= takes.keys():
            rest = {key: value for key, value in recipe.items() if key not in REPLACED or not keys or free != NOISE}
            made = {**table, "recipe": {**rest, **keys}}
            builds = bool({"epsilon", "epsilons"} & keys.keys())  # such a recipe solves its own noise
            with suppress(UserError):
                builds = builds or parse(made).plan == plan
            if builds:
                return made
    return None


def _candidates(plan: Plan, epsilon: float | None, delta: float | None, free: str) -> Iterator[dict[str, Any]]:
    """Yield tables of recipe keys that may set the calibrated number."""
    yield {}
    if free == "rounds":
        yield {"rounds": plan.rounds}
    if free == "cohort":
        clients = codec.dump(plan.clients)
        yield {"clients": clients}
        yield from ({key: clients[key]} for key in ("rate", "cohort") if key in clients)
    if free != NOISE:
        return
    if epsilon is not None:
        yield {"epsilon": epsilon, **({} if delta is None else {"delta": delta})}
        yield {"epsilons": [epsilon], **({} if delta is None else {"deltas": [delta]})}
    noisy = codec.dump(plan.local if plan.release.kind == "forward" else plan.release)
    own = {"noise_multipliers": list(multipliers(plan))} if multipliers(plan) else {}
    number = noisy.get(NOISE, noisy.get("mechanism", {}).get(NOISE))
    yield {NOISE: number, **own}
    yield {"mechanism": noisy.get("mechanism")}
    yield {"release": codec.dump(plan.release)}


def _edited(text: str, table: dict[str, Any]) -> str:
    """Return the input text with one number changed, so that comments stay; failing that, `table` as new TOML."""
    if tomllib.loads(text) == table:
        return text
    recipe = table["recipe"]
    inside = [pair for part in recipe.values() if isinstance(part, Mapping) for pair in part.items()]
    for key, value in [*recipe.items(), *inside]:
        if isinstance(value, int | float):
            made = re.sub(rf"(?<![\w.-])({re.escape(key)}\s*=\s*)[-+0-9.eE_]+", rf"\g<1>{value!r}", text)
            if tomllib.loads(made) == table:
                return made
    return tomli_w.dumps(table)
