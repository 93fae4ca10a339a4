"""Example configuration files of all recipes, on bundled data. `sordino recipes show` and the docs call this module."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from sordino.codec import Part
from sordino.recipes import RECIPES


@dataclass(frozen=True)
class Starter:
    """Values of an example configuration file: its section [task], and arguments of the recipe."""

    task: str
    values: dict[str, str] = field(default_factory=dict)


# fmt: off
MANY = Starter(  # a hundred clients of 14 or 15 digits each
    'dataset = "digits"\npartition = { kind = "iid", clients = 100 }', {
        "rounds": "60", "clients": '{ kind = "poisson", population = 100, rate = 0.3 }',
        "lr": '{ kind = "decay", start = 0.5, factor = 0.99 }', "clip_norm": "1.0", "noise_multiplier": "2.0",
        "epochs": "5", "batch": "5", "population": "100", "epsilon": "4.0",
    },
)
SILOS = Starter(  # ten silos of 140 digits each
    'dataset = "digits"\noptions = { train = 1400 }\npartition = { kind = "iid", clients = 10 }', {
        "rounds": "60", "clients": '{ kind = "everyone", population = 10 }',
        "sizes": "[140, 140, 140, 140, 140, 140, 140, 140, 140, 140]",
        "records": '{ kind = "fixed_records", batch = 40, sizes = [140] }', "epsilons": "[4.0]", "clip_norm": "1.0",
        "noise_multiplier": "3.0", "lr": "1.0", "steps": "3", "v": "20.0",
    },
)
HOLDER = Starter(  # one holder of all 1,438 digits; a batch is about a hundred of them
    'dataset = "digits"\npartition = { kind = "iid", clients = 1 }', {
        "rounds": "100", "records": '{ kind = "poisson_records", batch = 100, sizes = [1438] }', "lr": "2.0",
        "clip_norm": "1.0", "noise_multiplier": "2.0",
    },
)
ADAM = Starter(HOLDER.task, {**HOLDER.values, "lr": "0.05"})
LOCAL = Starter(  # noise on every upload is heavy: few parameters, short steps, everybody in every round
    'dataset = "breast_cancer"\npartition = { kind = "iid", clients = 100 }', {
        "rounds": "20", "population": "100", "cohort": "100", "lr": "0.5", "steps": "5", "clip_norm": "0.5",
        "mechanism": '{ kind = "gaussian", noise_multiplier = 5.0 }',
    },
)
TURNS = {"clients": '{ kind = "roundrobin", population = 100, cohort = 20 }', "noise_multiplier": "6.0"}
FEWER = {"lr": "0.5", "records": '{ kind = "fixed_records", batch = 20, sizes = [140] }'}
STARTERS = {
    "dp_ftrl": Starter(MANY.task, {**MANY.values, **TURNS}),
    "band_mf": Starter(MANY.task, {**MANY.values, "groups": "3", "cohort": "20.0", "noise_multiplier": "3.0"}),
    "client_side_fed_avg": LOCAL,
    "scaffold": Starter(MANY.task, {**MANY.values, "lr": "1.0", "steps": "10", "clip_norm": "0.5"}),
    "dp_sgd": HOLDER, "dp_ls_sgd": HOLDER, "dp_adam": ADAM, "dp_ls_adam": ADAM,
    "noisy_minibatch_sgd": SILOS, "accelerated_minibatch_sgd": SILOS, "silo": SILOS,
    "noisy_local_sgd": Starter(SILOS.task, {**SILOS.values, **FEWER}),
}
# fmt: on
CHOSEN = ("epochs", "steps", "batch", "noise_multiplier")  # written to the file although they have defaults


def example(name: str) -> str:
    """Return an example configuration file of a recipe, with sample values for required arguments."""
    chosen, lines = STARTERS.get(name, MANY), [f'name = "{name}"']
    for p in inspect.signature(RECIPES[name]).parameters.values():
        if p.default is p.empty or (p.name in CHOSEN and p.name in chosen.values):
            lines.append(f"{p.name} = {chosen.values.get(p.name, '... # yours')}")
        elif isinstance(p.default, str | int | float | Part):
            lines.append(f"{p.name} = {toml_value(p.default)}")
    head = f"# {(inspect.getdoc(RECIPES[name]) or '').splitlines()[0]}"
    return "\n\n".join([head, f"[task]\n{chosen.task}", "\n".join(["[recipe]", *lines]), "[run]\nseed = 0"])


def toml_value(value: Any) -> str:
    """Return a value as TOML text; a part is written as its kind and the fields that differ from their defaults."""
    if not isinstance(value, Part):
        return json.dumps(value)
    keys: dict[str, Any] = {}
    for f in fields(value):  # type: ignore[arg-type]
        default = f.default if f.default_factory is MISSING else f.default_factory()
        keys |= {f.name: getattr(value, f.name)} if getattr(value, f.name) != default else {}
    inside = [f"{key} = {toml_value(item)}" for key, item in {"kind": value.kind, **keys}.items()]
    return f"{{ {', '.join(inside)} }}"
