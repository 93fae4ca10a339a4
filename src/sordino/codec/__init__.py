"""One codec for every value of a plan: dataclasses <-> TOML, JSON, hash.

A *family* (Sampler, Step, Release, ...) is a direct subclass of `Part`; a concrete part names its `kind`:

    @dataclass(frozen=True)
    class Poisson(Sampler, kind="poisson"): ...

Wherever a family is the declared type, the written form is a table with that `kind`. Reading follows the declared
types and is strict: an unknown key, an unknown kind or a wrong type is a `ConfigError` that names the nearest word.
Writing is strict too: only a part of exactly the registered type has a written form, and so a hash (`check_parts`).

A part of another package stands beside ours: `codec.plugins` brings it in, `foreign` names it.
"""

from __future__ import annotations

from sordino.codec import plugins
from sordino.codec.part import DEEPEST, Foreign, Part, check_parts, family_of, foreign, nested_values, package_of
from sordino.codec.serialization import (
    call,
    check_plain,
    digest,
    dump,
    read,
    to_json,
    to_toml,
)
from sordino.codec.short_repr import hides_values
from sordino.codec.spelling import check_keywords, nearest

__all__ = [
    "DEEPEST",
    "Foreign",
    "Part",
    "call",
    "check_keywords",
    "check_parts",
    "check_plain",
    "digest",
    "dump",
    "family_of",
    "foreign",
    "hides_values",
    "nearest",
    "nested_values",
    "package_of",
    "plugins",
    "read",
    "to_json",
    "to_toml",
]
