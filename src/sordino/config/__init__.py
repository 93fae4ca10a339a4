"""A federation as one TOML file: the task, the plan (written out, or a recipe), privacy and run settings."""

from sordino.config.file import Config, from_recipe, load_config, overridden, parse, read_table
from sordino.config.sections import FederationSpec, PrivacySpec, RunSpec, SiloBudget, TaskSpec

__all__ = [
    "Config",
    "FederationSpec",
    "PrivacySpec",
    "RunSpec",
    "SiloBudget",
    "TaskSpec",
    "from_recipe",
    "load_config",
    "overridden",
    "parse",
    "read_table",
]
