"""YAML as a person writes it: keys in their order, text of several lines as a block."""

from __future__ import annotations

from typing import Any

import yaml


class _Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML states no types
    """Blocks for text of several lines; the rest as PyYAML has it."""


def _text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def dumped(data: dict[str, Any]) -> str:
    """A table as YAML; never folded."""
    written: str = yaml.dump(data, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=1_000_000)
    return written
