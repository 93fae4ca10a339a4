"""A run's model card as Hugging Face reads it, and its entry in OpenDP's registry of deployments; both with YAML.

The registry (github.com/opendp/deployments-registry-data) takes a YAML file in three tiers: who published what (basic),
the guarantee and the trust model, and the details. The second and third are the certificate's; the first is nobody's
but the curator's: what `about` leaves out is marked, and the entry stays a draft."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

import yaml

from sordino.accounting.rounding import upto
from sordino.certificate.explain import page, sentence
from sordino.data.metrics import ONLY_CLASS
from sordino.errors import ConfigError


class _Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML states no types
    """Blocks for text of several lines; the rest as PyYAML has it."""


def _text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def dumped(data: dict[str, Any]) -> str:
    """A table as YAML; never folded."""
    return str(yaml.dump(data, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=1_000_000))


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
    head = {
        **({} if about.license is None else {"license": about.license}),
        "library_name": "sordino",
        "tags": ["differential-privacy", "federated-learning", "sordino", f"dp-unit-{made['unit']}"],
        **({} if about.name == OPEN or not made["utility"] else {"model-index": [_index(made, about, dataset)]}),
    }
    return "---\n{}---\n\n{}\n".format(dumped(head), "\n\n".join(parts))


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


OPEN = "TO BE WRITTEN by the curator"
KINDS = {"central": "Central", "local": "Local", "shuffle": "Shuffle", "distributed": "Federated"}
Sector = Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"]


@dataclass(frozen=True, kw_only=True)
class About:
    """What no program knows of a deployment (a TOML file of these keys); empty: to be written."""

    name: str = OPEN
    curators: tuple[str, ...] = (OPEN,)
    description: str = OPEN
    intended_use: str = OPEN
    region: str = OPEN
    published: str = field(default_factory=lambda: date.today().isoformat())
    sector: Sector | None = None
    authors: tuple[str, ...] = (OPEN,)  # of the entry
    sources: str | None = None
    data: str = OPEN  # whose data, and which
    data_grow: bool = False  # whether new data come in over time
    justification: str = OPEN  # of epsilon, unit and trust model
    license: str | None = None  # of the model, as its card names it

    def __post_init__(self) -> None:
        try:
            date.fromisoformat(self.published)
        except ValueError:
            raise ConfigError(f"published = {self.published!r}", "a date as 2026-01-31") from None

    @property
    def open(self) -> list[str]:
        """What is still to be written."""
        return [name for name, value in vars(self).items() if OPEN in (value if isinstance(value, tuple) else (value,))]


def entry(made: dict[str, Any], about: About) -> dict[str, Any]:
    """The entry; refused where nothing is guaranteed, or where the noise was repeatable."""
    if made["epsilon"] is None:
        raise ConfigError("a run without a guarantee", "one with noise", "there is nothing to register")
    if made["noise"]["mode"] != "secure":
        found = f"noise = {made['noise']['mode']!r}, which is for experiments"
        raise ConfigError(found, "a run for release", 'set noise = "secure" under [privacy] and run again')
    steps, how = ", ".join(step["kind"] for step in made["postprocess"]) or "none", made["accountant"]
    body = {
        "basic": _basic(about),
        "dp_variant": {
            "variant_name": "Approximate DP" if made["delta"] > 0 else "Pure DP",
            "data_domain": about.data,
            "unprotected_quantities": made["statement"]["not_protected"],
        },
        "privacy_loss": _loss(made),
        "deployment_model": _model(made, about),
        "accounting": {
            "post_processing": f"Of the noised mean: {steps}; then the server's {made['server']['kind']}.",
            "composition": f"All rounds, by {how['library']}: {how['first']}; second opinion {how['second']}.",
        },
        "implementation": _implementation(made, about),
        "administrative": {
            **({} if about.sources is None else {"sources": about.sources}),
            "notes": f"Written by sordino {made['sordino']} from certificate.json (plan {made['plan_sha256'][:12]}).",
            "registry_authors": list(about.authors),
        },
    }
    return {"url_slug": slug(about), "status": "Draft", "tier": 3, "deployment": body}


def slug(about: About) -> str:
    """name, curators and year, in small letters and dashes."""
    words = (about.name, "-".join(about.curators), about.published[:4])
    return "-".join(re.sub(r"[\W_]+", "-", word.lower()) for word in words)


def _basic(about: About) -> dict[str, Any]:
    return {
        "name": about.name,
        "data_curators": list(about.curators),
        "intended_use": about.intended_use,
        "data_product_type": "Machine learning model",
        "data_product_region": about.region,
        "description": about.description,
        "publication_date": about.published,
        **({} if about.sector is None else {"data_product_sector": about.sector}),
    }


def _loss(made: dict[str, Any]) -> dict[str, Any]:
    first = made["adversaries"][0]
    other = [f"epsilon {upto(one['epsilon'], 4)} at delta {upto(one['delta'])}" for one in first["other_deltas"]]
    gdp = first["gdp"]
    lines = []
    for line in made["adversaries"]:
        bound = f"epsilon {upto(line['epsilon'], 4)} at delta {upto(line['delta'])}"
        held = "nothing is guaranteed" if line["epsilon"] is None else bound
        lines.append(f"- To one who {line['description']}: {held}.")
    mu = [] if gdp is None else [f"mu {upto(gdp['mu'], 4)} (Gaussian DP, regret {upto(gdp['regret'], 2)})"]
    return {
        "privacy_unit": made["statement"]["unit_of_privacy"],
        "privacy_unit_details": f"Neighbours: {made['statement']['neighbours']}. {sentence(made['assumptions'][0])}",
        "privacy_parameters": {"epsilon": made["epsilon"], "delta": made["delta"]},
        "privacy_parameters_details": "\n".join([*lines, f"- The first also: {'; '.join(other + mu)}."]),
    }


def _model(made: dict[str, Any], about: About) -> dict[str, Any]:
    said = made["statement"]
    return {
        "model_name": KINDS[said["trust_model"]],
        "model_name_details": f"Federated learning; {said['trust_model']} noise.",
        "actors": "\n".join(
            f"- {who}: {said[key]}." for who, key in (("Subject", "data_subject"), ("Curator", "data_curator"),
                                                       ("Consumer", "data_consumer"))
        ),
        "release_type": "One release" if made["counts"]["rounds_accounted"] == 1 else "Many releases",
        "release_type_details": f"Releases: {said['releases']}. Of the same data otherwise: {said['other_releases']}.",
        "data_source_type": "Dynamic" if about.data_grow else "Static",
        "access_type": "Non-interactive",
    }  # fmt: skip


def _implementation(made: dict[str, Any], about: About) -> dict[str, Any]:
    ran = "; ".join(", ".join(f"{name} {value}" for name, value in one.items()) for one in made["environment"])
    clip = f"{made['clip']['scope']}, clip norm {made['clip']['clip_norm']}, L{made['clip']['norm']}"
    mechanisms = (
        f"Release {made['trust']['release']}; clip: {clip}; noise: {made['noise']['note']}.",
        f"Side channels: {made['statement']['side_channels']}.",
        f"Software: {ran}." if ran else "Software: not recorded.",
    )
    return {
        "preprocessing_and_hyperparameter_tuning": f"Tuning: {made['statement']['tuning']}.",
        "mechanisms": "\n".join(f"- {text}" for text in mechanisms),
        "justification": about.justification,
    }
