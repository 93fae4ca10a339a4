"""A file to start from for every recipe: it runs as it is, on data that is bundled, and learns something."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field

from sordino.recipes import RECIPES


@dataclass(frozen=True)
class Starter:
    """The `[task]` of an example, and the arguments that are not left at their defaults."""

    task: str
    values: dict[str, str] = field(default_factory=dict)


MANY = Starter(  # a hundred clients of 14 or 15 digits each
    'dataset = "digits"\npartition = { kind = "iid", clients = 100 }',
    {
        "rounds": "60",
        "clients": '{ kind = "poisson", population = 100, rate = 0.3 }',
        "lr": '{ kind = "decay", start = 0.5, factor = 0.99 }',
        "radius": "1.0",
        "multiplier": "2.0",
        "epochs": "5",
        "batch": "5",
        "population": "100",
        "epsilon": "4.0",
    },
)
SILOS = Starter(  # ten silos of 140 digits each
    'dataset = "digits"\noptions = { train = 1400 }\npartition = { kind = "iid", clients = 10 }',
    {
        "rounds": "60",
        "clients": '{ kind = "everyone", population = 10 }',
        "sizes": "[140, 140, 140, 140, 140, 140, 140, 140, 140, 140]",
        "epsilons": "[4.0]",
        "radius": "1.0",
        "multiplier": "3.0",
        "batch": "40",
        "lr": "1.0",
        "steps": "3",
        "v": "20.0",
    },
)
HOLDER = Starter(  # one holder of all 1,438 digits; a batch is about a hundred of them
    'dataset = "digits"\npartition = { kind = "iid", clients = 1 }',
    {"rounds": "100", "records": "1438", "batch": "100", "lr": "2.0", "radius": "1.0", "multiplier": "2.0"},
)
ADAM = Starter(HOLDER.task, {**HOLDER.values, "lr": "0.05"})
LOCAL = Starter(  # noise on every upload is heavy: few parameters, short steps, everybody in every round
    'dataset = "breast_cancer"\npartition = { kind = "iid", clients = 100 }',
    {
        "rounds": "20",
        "population": "100",
        "cohort": "100",
        "lr": "0.5",
        "steps": "5",
        "radius": "0.5",
        "multiplier": "4.0",
        "mechanism": '"gaussian"',
    },
)
STARTERS = {
    "client_side_fed_avg": LOCAL,
    "scaffold": Starter(MANY.task, {**MANY.values, "lr": "1.0", "steps": "10", "radius": "0.5"}),
    "dp_sgd": HOLDER,
    "dp_ls_sgd": HOLDER,
    "dp_adam": ADAM,
    "dp_ls_adam": ADAM,
    "noisy_local_sgd": Starter(SILOS.task, {**SILOS.values, "lr": "0.5", "batch": "20"}),
}


def starter(name: str) -> Starter:
    """The example of a recipe: its own, or that of its kind."""
    return STARTERS.get(name, SILOS if "sizes" in inspect.signature(RECIPES[name]).parameters else MANY)


def example(name: str) -> str:
    """A whole file that runs: required arguments with sample values, the others with their defaults."""
    chosen, lines = starter(name), [f'name = "{name}"']
    for p in inspect.signature(RECIPES[name]).parameters.values():
        if p.default is p.empty or p.name in ("epochs", "steps", "batch", "mechanism"):
            lines.append(f"{p.name} = {chosen.values.get(p.name, '... # yours')}")
        elif isinstance(p.default, str | int | float | list | tuple):
            lines.append(f"{p.name} = {json.dumps(p.default)}")
    head = f"# {(inspect.getdoc(RECIPES[name]) or '').splitlines()[0]}"
    return "\n\n".join([head, f"[task]\n{chosen.task}", "\n".join(["[recipe]", *lines]), "[run]\nseed = 0"])
