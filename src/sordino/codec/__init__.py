"""Codec of plans: conversion of dataclasses to and from TOML and JSON, and their SHA-256. Called by all packages.

A *family* (Sampler, Step, Release, ...) is a direct subclass of `Part`; a concrete part states its `kind`:

    @dataclass(frozen=True)
    class Poisson(Sampler, kind="poisson"): ...

A field whose declared type is a family is written as a table with that `kind`. Reading follows the declared types and
is strict: an unknown key, an unknown kind or a wrong type is a `ConfigError` that suggests the nearest known word.
Writing is strict too: only a part of exactly the registered type can be written and hashed (`check_parts`).
Parts of other packages are loaded by `load_plugins` and `load_parts_file`; `foreign` lists those inside a value.
"""

from __future__ import annotations

from sordino.codec.part import DEEPEST as DEEPEST
from sordino.codec.part import Foreign as Foreign
from sordino.codec.part import Part as Part
from sordino.codec.part import check_parts as check_parts
from sordino.codec.part import family_of as family_of
from sordino.codec.part import foreign as foreign
from sordino.codec.part import hides_values as hides_values
from sordino.codec.part import load_parts_file as load_parts_file
from sordino.codec.part import load_plugins as load_plugins
from sordino.codec.part import named_failures as named_failures
from sordino.codec.part import nested_values as nested_values
from sordino.codec.part import package_of as package_of
from sordino.codec.part import plugins_installed as plugins_installed
from sordino.codec.serialization import call as call
from sordino.codec.serialization import check_keywords as check_keywords
from sordino.codec.serialization import check_plain as check_plain
from sordino.codec.serialization import digest as digest
from sordino.codec.serialization import dump as dump
from sordino.codec.serialization import find_function as find_function
from sordino.codec.serialization import function_origin as function_origin
from sordino.codec.serialization import nearest as nearest
from sordino.codec.serialization import parse_setting as parse_setting
from sordino.codec.serialization import put as put
from sordino.codec.serialization import read as read
from sordino.codec.serialization import read_options as read_options
from sordino.codec.serialization import read_toml as read_toml
from sordino.codec.serialization import register_function as register_function
from sordino.codec.serialization import to_json as to_json
from sordino.codec.serialization import to_toml as to_toml
