"""What OpenDP's registry of deployments asks of an entry, read off its schema in November 2026, in our words."""

from __future__ import annotations

from typing import Any


def _table(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


def _one_of(*names: str | int) -> dict[str, Any]:
    return {"enum": list(names)}


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT, "minItems": 1}
NUMBER: dict[str, Any] = {"type": "number"}
PRODUCTS = ("Summary statistics", "Machine learning model", "Dataset", "Synthetic data")  # and others, not ours
SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
BASIC = "name data_curators description intended_use data_product_type data_product_region publication_date"
SCHEMA = _table(
    "url_slug status tier deployment",
    url_slug={"type": "string", "pattern": "^[a-z0-9-]+$"},
    status=_one_of("Converted", "Draft", "Pending", "Changes Required", "Approved"),
    tier=_one_of(1, 2, 3),
    deployment=_table(
        "basic",
        basic=_table(
            BASIC,
            **dict.fromkeys(("name", "intended_use", "data_product_region", "description"), TEXT),
            data_curators=TEXTS,
            data_product_type=_one_of(*PRODUCTS),
            data_product_sector=_one_of(*SECTORS),
            publication_date={"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
        ),
        dp_variant=_table(
            "",
            variant_name=_one_of("Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"),
            data_domain=TEXT,
            unprotected_quantities=TEXT,
        ),
        privacy_loss=_table(
            "",
            **dict.fromkeys(("privacy_unit", "privacy_unit_details", "privacy_parameters_details"), TEXT),
            privacy_parameters=_table("", epsilon=NUMBER, delta={"type": ["number", "string"]}, rho=NUMBER),
        ),
        deployment_model=_table(
            "",
            model_name=_one_of("Local", "Central", "Shuffle", "Federated", "Varies"),
            release_type=_one_of("One release", "Many releases"),
            data_source_type=_one_of("Static", "Dynamic"),
            access_type=_one_of("Interactive", "Non-interactive"),
            **dict.fromkeys(("model_name_details", "actors", "release_type_details"), TEXT),
        ),
        accounting=_table("", post_processing=TEXT, composition=TEXT),
        implementation=_table(
            "", **dict.fromkeys(("preprocessing_and_hyperparameter_tuning", "mechanisms", "justification"), TEXT)
        ),
        administrative=_table("registry_authors", sources=TEXT, notes=TEXT, registry_authors=TEXTS),
    ),
)
