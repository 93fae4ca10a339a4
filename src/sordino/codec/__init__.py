"""Codec for every value of a plan: dataclasses <-> TOML, JSON and SHA-256. Called by all packages.

A *family* (Sampler, Step, Release, ...) is a direct subclass of `Part`; a concrete part names its `kind`:

    @dataclass(frozen=True)
    class Poisson(Sampler, kind="poisson"): ...

Wherever a family is the declared type, the written form is a table with that `kind`. Reading follows the declared
types and is strict: an unknown key, an unknown kind or a wrong type is a `ConfigError` that names the nearest word.
Writing is strict too: only a part of exactly the registered type has a written form, and so a hash (`check_parts`).
Parts of other packages are loaded by `load_plugins` and `load_parts_file`; `foreign` lists those inside a value.
"""

from __future__ import annotations

from sordino.codec.part import (
    DEEPEST,
    Foreign,
    Part,
    check_parts,
    family_of,
    foreign,
    hides_values,
    load_parts_file,
    load_plugins,
    named_failures,
    nested_values,
    package_of,
    plugins_installed,
)  # fmt: skip
from sordino.codec.serialization import (
    call,
    check_keywords,
    check_plain,
    digest,
    dump,
    find_function,
    function_origin,
    nearest,
    parse_setting,
    put,
    read,
    read_options,
    read_toml,
    register_function,
    to_json,
    to_toml,
)  # fmt: skip

__all__ = [
    "DEEPEST", "Foreign", "Part", "call", "check_keywords", "check_parts", "check_plain", "digest", "dump", "family_of",
    "find_function", "foreign", "function_origin", "hides_values", "load_parts_file", "load_plugins", "named_failures",
    "nearest", "nested_values", "package_of", "parse_setting", "plugins_installed", "put", "read", "read_options",
    "read_toml", "register_function", "to_json", "to_toml",
]  # fmt: skip
