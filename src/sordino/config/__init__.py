"""Configuration file of a run (TOML): task, plan (written out, or a recipe), privacy, run and federation settings."""

from sordino.config.file import Config as Config
from sordino.config.file import from_recipe as from_recipe
from sordino.config.file import load_config as load_config
from sordino.config.file import overridden as overridden
from sordino.config.file import parse as parse
from sordino.config.file import read_table as read_table
from sordino.config.sections import FederationSpec as FederationSpec
from sordino.config.sections import PrivacySpec as PrivacySpec
from sordino.config.sections import RunSpec as RunSpec
from sordino.config.sections import SiloBudget as SiloBudget
from sordino.config.sections import TaskSpec as TaskSpec
