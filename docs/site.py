"""Hooks of the site: links that leave docs/ become names of files, since a page on a server has no such file."""

from __future__ import annotations

import re
from typing import Any

UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """[text](../src/x.py) -> text (`src/x.py`), where that is outside of docs/."""
    deep = page.file.src_uri.count("/")

    def named(match: re.Match[str]) -> str:
        text, ups, path = match.groups()
        if ups.count("../") <= deep:
            return match[0]
        return text if path in text else f"{text} (`{path}`)"

    return UPWARDS.sub(named, markdown)
