"""Model cards for Hugging Face (`sordino model-card`) and entries for OpenDP's registry (`sordino certify --registry`).

The registry (github.com/opendp/deployments-registry-data) has three tiers: publication, guarantee with trust model, and
details. The certificate fills the second and third tier. `About`, written by the curator, fills the first; its missing
fields are marked, and the entry stays a draft.
"""

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

OPEN = "TO BE WRITTEN by the curator"
TASKS = {"accuracy": "classification", "rmse": "regression"}  # Hugging Face's task by the metric of a run
TRUST_MODELS = {"central": "Central", "local": "Local", "shuffle": "Shuffle", "distributed": "Federated"}
WARNING = (
    "> **Not private to publish.** The noise of this run came from a repeatable generator: the guarantee below is that "
    "of a run with secure noise, not of this model."
)
CHECK = "`sordino certify` recomputes this model's certificate from the run's folder; exit code 1 means a mismatch."
Certificate = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts of a deployment that only its curator knows, read from a TOML file with these keys."""

    name: str = OPEN
    curators: tuple[str, ...] = (OPEN,)
    description: str = OPEN
    intended_use: str = OPEN
    region: str = OPEN
    published: str = field(default_factory=lambda: date.today().isoformat())
    sector: Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"] | None = None
    authors: tuple[str, ...] = (OPEN,)  # of the registry entry
    sources: str | None = None
    data: str = OPEN  # whose data, and which
    data_grow: bool = False  # whether new data arrive over time
    justification: str = OPEN  # of epsilon, unit and trust model
    license: str | None = None  # of the model, as its card names it

    def __post_init__(self) -> None:
        try:
            date.fromisoformat(self.published)
        except ValueError:
            raise ConfigError(f"published = {self.published!r}", "a date", 'write it as "2026-01-31"') from None

    @property
    def open(self) -> list[str]:
        """Names of the fields that the curator has not written yet."""
        return [name for name, value in vars(self).items() if OPEN in (value if isinstance(value, tuple) else (value,))]


def to_yaml(data: dict[str, Any]) -> str:
    """Return a dict as YAML without folded lines; text of several lines becomes a block."""

    class BlockDumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML states no types
        def represent_str(self, text: str) -> Any:
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    BlockDumper.add_representer(str, BlockDumper.represent_str)
    return str(yaml.dump(data, Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=1_000_000))


# ---- data protection impact assessment

BLANK = "**[ to be written: {} ]**"
ASKED = {  # headings of Article 35(7) GDPR, and what only people know under each
    "Purpose and legal basis": ("the purpose of the processing", "the legal basis (Articles 6 and 9 GDPR)"),
    "Necessity and proportionality": (
        "why this model is needed, and why less data would not do",
        "how data subjects are informed",
    ),
    "Risks to the persons": ("how severe it would be for a person if it were known that they are in the data",),
    "Measures and sign-off": ("who may start runs and raise limits", "data protection officer's opinion, name, date"),
}


def dpia(made: Certificate, explained: dict[str, Any], columns: list[str], policies: dict[str, dict[str, Any]]) -> str:
    """Return a draft of a data protection impact assessment (Article 35 GDPR) in Markdown.

    Facts come from the certificate `made`; everything else is a marked blank. `columns` are the columns that the model
    reads; `policies` are the contents of silos' policy.toml, by data set.
    """
    purpose, needed, risks, measures = ASKED
    blanks = {head: "\n".join(f"- {BLANK.format(what)}" for what in asked) for head, asked in ASKED.items()}
    terms = made["statement"]
    policy_rows = []
    for name, table in policies.items():
        texts = [table.get(key) or BLANK.format(key) for key in ("purpose", "retention")]
        limits = [f"{table['epsilon']} over all runs", table.get("expires") or "never"]
        policy_rows.append(f"| {' | '.join([name, *texts, *limits])} |")
    head = ["| data set | purpose | retention | limit of epsilon | policy expires |", "|---|---|---|---|---|"]
    about = "\n".join([*head, *policy_rows]) if policies else f"- {BLANK.format('retention of data and of the model')}"
    read = ", ".join(f"`{name}`" for name in columns) or BLANK.format("which fields of a record the model reads")
    subject = f"- data subject: {terms['data_subject']}\n- unit of privacy: {terms['unit_of_privacy']}"
    parts = [
        "# Data protection impact assessment: a draft",
        f"Facts are from the certificate of plan `{made['plan_sha256'][:16]}`; fill in everything marked **[ ]**.",
        *([] if made["noise"]["mode"] == "secure" else [WARNING]),
        f"## {purpose}\n\n{blanks[purpose]}\n\n{about}",
        f"## Description of the processing\n\n{subject}\n- columns that the model reads: {read}\n"
        f"- who adds the noise: {terms['data_curator']}\n- who receives results: {terms['data_consumer']}\n"
        f"- not protected: {terms['not_protected']}\n- other releases of the data: {terms['other_releases']}",
        f"## {needed}\n\n{blanks[needed]}",
        f"## {risks}\n\n{_guarantee(made)}\n\n{_epsilons(made)}\n\n{page(explained)}\n\n{blanks[risks]}",
        "## What is not covered\n\n" + "\n".join(f"- {text}" for text in made["not_covered"]),
        f"## {measures}\n\n"
        + "\n".join(f"- assumption: {text}" for text in made["assumptions"])
        + f"\n{blanks[measures]}",
    ]
    return "\n\n".join(parts) + "\n"


def _epsilons(made: Certificate) -> str:
    line = made["adversaries"][-1]
    entries = [(silo, one) for one in line.get("silos", []) for silo in one["silos"]]
    if not entries:
        return ""
    names = made["silos"]
    entries.sort(key=lambda entry: entry[0])
    rows = [f"| {names[silo] if names else silo} | {_bound(one)} |" for silo, one in entries]
    head = [f"Against an adversary who {line['description']}:", "", "| silo | guarantee |", "|---|---|"]
    return "\n".join([*head, *rows])


# ---- model card
def model_card(made: Certificate, explained: dict[str, Any], about: About, dataset: str) -> str:
    """Return a Hugging Face model card: YAML metadata, then certificate and the curator's text as Markdown."""
    parts = [
        f"# {about.name}",
        about.description,
        *([] if made["noise"]["mode"] == "secure" else [WARNING]),
        f"## Intended use\n\n{about.intended_use}",
        f"## Training data\n\n{about.data}\n\nData set, by the name of its loader: `{dataset}`.",
        f"## Privacy\n\n{_guarantee(made)}\n\n{page(explained)}",
        f"## Evaluation\n\n{_evaluation(made['utility'] or {})}",
        f"## How to check it\n\n{CHECK}",
        f"## Hashes\n\n- plan `{made['plan_sha256']}`\n- model `{made['model_sha256']}`",
    ]
    head: dict[str, Any] = {} if about.license is None else {"license": about.license}
    head["library_name"] = "sordino"
    head["tags"] = ["differential-privacy", "federated-learning", "sordino", f"dp-unit-{made['unit']}"]
    if about.name != OPEN and made["utility"]:
        kind = next((task for name, task in TASKS.items() if name in made["utility"]), "other")
        figures = [{"type": name, "value": value} for name, value in _metrics(made["utility"]).items()]
        result = {"task": {"type": kind}, "dataset": {"name": dataset, "type": dataset}, "metrics": figures}
        head["model-index"] = [{"name": about.name, "results": [result]}]
    return "---\n{}---\n\n{}\n".format(to_yaml(head), "\n\n".join(parts))


def _evaluation(found: dict[str, float | None]) -> str:
    rows = [f"| {name} | {value:.4g} |" for name, value in _metrics(found).items()]
    if not rows:
        return "Not evaluated: no row was declared public."
    text = "On rows that are declared public; the model of the last round that was evaluated.\n"
    if found.get(ONLY_CLASS) is not None:
        text += f"\n**The model predicts class {found[ONLY_CLASS]:g} for every row.**\n"
    return "\n".join([text, "| figure | value |", "|---|---|", *rows])


def _metrics(found: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in found.items() if value is not None and name != ONLY_CLASS}


def _guarantee(made: Certificate) -> str:
    if made["epsilon"] is None:
        return "**No guarantee**: no noise was added."
    terms = f"unit {made['unit']}, relation {made['relation']}"
    return f"**{_bound(made)}**, {terms}, against an adversary who sees every released model."


def _bound(line: dict[str, Any]) -> str:
    return f"epsilon {upto(line['epsilon'], 4)} at delta {upto(line['delta'])}"


# ---- registry entry
def registry_entry(made: Certificate, about: About) -> dict[str, Any]:
    """Return a run's entry for OpenDP's registry; refuse a run without a guarantee or with repeatable noise."""
    if made["epsilon"] is None:
        raise ConfigError("a run without a guarantee", "a run with a finite epsilon", "run a plan that adds noise")
    if made["noise"]["mode"] != "secure":
        found = f"noise = {made['noise']['mode']!r}, which is for experiments"
        raise ConfigError(found, "secure noise", 'set noise = "secure" under [privacy] and run again')
    steps, how = ", ".join(step["kind"] for step in made["postprocess"]) or "none", made["accountant"]
    body = {
        "basic": {
            "name": about.name, "data_curators": list(about.curators), "intended_use": about.intended_use,
            "data_product_type": "Machine learning model", "data_product_region": about.region,
            "description": about.description, "publication_date": about.published,
            **({} if about.sector is None else {"data_product_sector": about.sector}),
        },
        "dp_variant": {
            "variant_name": "Approximate DP" if made["delta"] > 0 else "Pure DP",
            "data_domain": about.data,
            "unprotected_quantities": made["statement"]["not_protected"],
        },
        "privacy_loss": _privacy_loss(made),
        "deployment_model": _deployment_model(made, about),
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
    }  # fmt: skip
    words = (about.name, "-".join(about.curators), about.published[:4])
    slug = "-".join(re.sub(r"[\W_]+", "-", word.lower()) for word in words)
    return {"url_slug": slug, "status": "Draft", "tier": 3, "deployment": body}


def _privacy_loss(made: Certificate) -> dict[str, Any]:
    first = made["adversaries"][0]
    lines = []
    for line in made["adversaries"]:
        bound = "nothing is guaranteed" if line["epsilon"] is None else _bound(line)
        lines.append(f"- To one who {line['description']}: {bound}.")
    others, gdp = [_bound(one) for one in first["other_deltas"]], first["gdp"]
    if gdp is not None:
        others.append(f"mu {upto(gdp['mu'], 4)} (Gaussian DP, regret {upto(gdp['regret'], 2)})")
    return {
        "privacy_unit": made["statement"]["unit_of_privacy"],
        "privacy_unit_details": f"Neighbours: {made['statement']['neighbours']}. {sentence(made['assumptions'][0])}",
        "privacy_parameters": {"epsilon": made["epsilon"], "delta": made["delta"]},
        "privacy_parameters_details": "\n".join([*lines, f"- The first also: {'; '.join(others)}."]),
    }


def _deployment_model(made: Certificate, about: About) -> dict[str, Any]:
    terms = made["statement"]
    releases = f"Releases: {terms['releases']}. Of the same data otherwise: {terms['other_releases']}."
    actors = {"Subject": "data_subject", "Curator": "data_curator", "Consumer": "data_consumer"}
    return {
        "model_name": TRUST_MODELS[terms["trust_model"]],
        "model_name_details": f"Federated learning; {terms['trust_model']} noise.",
        "actors": "\n".join(f"- {who}: {terms[key]}." for who, key in actors.items()),
        "release_type": "One release" if made["counts"]["rounds_accounted"] == 1 else "Many releases",
        "release_type_details": releases,
        "data_source_type": "Dynamic" if about.data_grow else "Static",
        "access_type": "Non-interactive",
    }


def _implementation(made: Certificate, about: About) -> dict[str, Any]:
    software = "; ".join(", ".join(f"{name} {value}" for name, value in one.items()) for one in made["environment"])
    clip = f"{made['clip']['scope']}, clip norm {made['clip']['clip_norm']}, L{made['clip']['norm']}"
    mechanisms = (
        f"Release {made['trust']['release']}; clip: {clip}; noise: {made['noise']['note']}.",
        f"Side channels: {made['statement']['side_channels']}.",
        f"Software: {software or 'not recorded'}.",
    )
    return {
        "preprocessing_and_hyperparameter_tuning": f"Tuning: {made['statement']['tuning']}.",
        "mechanisms": "\n".join(f"- {text}" for text in mechanisms),
        "justification": about.justification,
    }
