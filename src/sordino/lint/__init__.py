"""Checks of other libraries' privacy settings: what they claim, what is proved of what runs, and one change that mends.

`known_calls` reads settings from numbers, TOML, JSON and Python files (parsed, never run), `library_prices` has what
each library accounts and what our accountant proves of it, `library_rules` the known differences. Called by `sordino
lint`.
"""

from __future__ import annotations

from sordino.lint.known_calls import Settings as Settings
from sordino.lint.known_calls import read_file as read_file
from sordino.lint.known_calls import stated as stated
from sordino.lint.library_rules import RULES as RULES
from sordino.lint.library_rules import Rule as Rule
from sordino.lint.library_rules import check as check
from sordino.lint.library_rules import text as text
