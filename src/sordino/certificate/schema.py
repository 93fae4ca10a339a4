"""Certificates as text: written in one way, read strictly, compared field by field. Runs and `certify` call it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from sordino.errors import CertificateError


def schema() -> dict[str, Any]:
    """The JSON Schema of a certificate, of whatever ran."""
    file = resources.files("sordino.certificate").joinpath("certificate.schema.json")
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def text_of(made: dict[str, Any]) -> str:
    """A certificate as it is written."""
    return json.dumps(made, indent=2) + "\n"


def parse(text: str | bytes, name: str = "certificate.json") -> Any:
    """What a text says, if no name stands twice in it: of two equal ones a reader may take either."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [word for word, _ in pairs]
        twice = next((word for word in names if names.count(word) > 1), None)
        if twice is not None:
            raise CertificateError(twice, f"{twice} stands twice in {name}")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def compare_text(stored: Any, text: str, computed: dict[str, Any], name: str = "certificate.json") -> None:
    """Values first; then numbers as they are spelt, since two spellings of 17 digits can be one float."""
    compare(stored, computed)
    spelt, needed = (json.loads(one, parse_float=str, parse_int=str) for one in (text, text_of(computed)))
    compare(spelt, needed)
    if text != text_of(computed):
        raise CertificateError(name, f"{name} is not written as this program writes it")


def compare(stored: Any, computed: Any, field: str = "") -> None:
    """Raise `CertificateError` at the first field where the stored certificate differs from the computed one."""
    name = field or "certificate.json"
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        for key in [*computed, *(key for key in stored if key not in computed)]:
            if key not in stored or key not in computed:
                raise CertificateError(
                    _join(field, key), f"{_join(field, key)} is {'missing' if key in computed else 'not ours'}"
                )
            compare(stored[key], computed[key], _join(field, key))
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        for i, (one, other) in enumerate(zip(stored, computed, strict=True)):
            compare(one, other, f"{field}[{i}]")
    elif type(stored) is not type(computed) or stored != computed:
        raise CertificateError(name, f"{name} says {stored!r}, but what ran gives {computed!r}")


def _join(field: str, key: str) -> str:
    return f"{field}.{key}" if field else str(key)
