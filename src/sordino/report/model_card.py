"""A model card as Hugging Face reads it: a YAML head with the figures, and a page that a person reads."""

from __future__ import annotations

from typing import Any

from sordino.data.scores import ONLY_CLASS
from sordino.privacy.rounding import upto
from sordino.report.explain import page
from sordino.report.registry import OPEN, About
from sordino.report.yaml import dumped

TASKS = {"accuracy": "classification", "rmse": "regression"}  # by the figure that a run has
WARNING = (
    "> **Not private to publish.** The noise of this run came from a repeatable generator: the numbers below are those "
    "of a run with secure noise, not of this model."
)
CHECK = "`sordino certify` computes the certificate beside this model again from the run's folder; exit code 1 says no."


def card(made: dict[str, Any], explained: dict[str, Any], about: About, dataset: str) -> str:
    """The whole README.md of a model."""
    parts = [
        f"# {about.name}",
        about.description,
        *([] if made["noise"]["mode"] == "secure" else [WARNING]),
        f"## Intended use\n\n{about.intended_use}",
        f"## Training data\n\n{about.data}\n\nData set, by the name of its loader: `{dataset}`.",
        f"## Privacy\n\n{_guarantee(made)}\n\n{page(explained)}",
        f"## Evaluation\n\n{_figures(made['utility'] or {})}",
        f"## How to check it\n\n{CHECK}",
        f"## Hashes\n\n- plan `{made['plan_sha256']}`\n- model `{made['model_sha256']}`",
    ]
    body = "\n\n".join(parts)
    return f"---\n{dumped(_head(made, about, dataset))}---\n\n{body}\n"


def _head(made: dict[str, Any], about: About, dataset: str) -> dict[str, Any]:
    tags = ["differential-privacy", "federated-learning", "sordino", f"dp-unit-{made['unit']}"]
    return {
        **({} if about.license is None else {"license": about.license}),
        "library_name": "sordino",
        "tags": tags,
        **({} if about.name == OPEN or not made["utility"] else {"model-index": [_index(made, about, dataset)]}),
    }


def _index(made: dict[str, Any], about: About, dataset: str) -> dict[str, Any]:
    kind = next((task for name, task in TASKS.items() if name in made["utility"]), "other")
    figures = [{"type": name, "value": value} for name, value in _quantities(made["utility"]).items()]
    data = {"name": dataset, "type": dataset}
    return {"name": about.name, "results": [{"task": {"type": kind}, "dataset": data, "metrics": figures}]}


def _figures(found: dict[str, float | None]) -> str:
    rows = [f"| {name} | {value:.4g} |" for name, value in _quantities(found).items()]
    if not rows:
        return "Not evaluated: no row was declared public."
    told = "On rows that are declared public; the model of the last round that was evaluated.\n"
    if found.get(ONLY_CLASS) is not None:
        told += f"\n**It predicts class {found[ONLY_CLASS]:g} for every one of them:** it tells nobody apart.\n"
    return "\n".join([told, "| figure | value |", "|---|---|", *rows])


def _quantities(found: dict[str, float | None]) -> dict[str, float]:
    """The figures that are numbers of something; a class is none."""
    return {name: value for name, value in found.items() if value is not None and name != ONLY_CLASS}


def _guarantee(made: dict[str, Any]) -> str:
    if made["epsilon"] is None:
        return "**No guarantee**: no noise was added."
    return (
        f"**epsilon {upto(made['epsilon'], 4)} at delta {upto(made['delta'])}**, unit {made['unit']}, relation "
        f"{made['relation']}, to one who sees every released model."
    )
