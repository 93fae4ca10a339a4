"""Hooks of the site: notebooks become pages, and links that leave docs/ become names of files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(?:#[^)]*)?\)")
NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """A page for every notebook of the examples."""
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=markdown_of(notebook)))
    return files


def markdown_of(notebook: Path) -> str:
    """Text cells as they are, code cells as blocks, each with the text that it printed."""
    parts = []
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join("".join(out.get("text", ())) for out in cell.get("outputs", ()))
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed.strip() else []
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """[text](../src/x.py) -> text (`src/x.py`), where that is outside of docs/; a notebook's link goes to its page."""
    deep = page.file.src_uri.count("/")

    def inside(match: re.Match[str]) -> str:
        text, ups, path = match.groups()
        if ups.count("../") <= deep:
            return match[0]
        if path.startswith("examples/notebooks/") and path.endswith(".ipynb"):
            return f"[{text}]({'../' * deep}notebooks/{Path(path).stem}.md)"
        return text if path in text else f"{text} (`{path}`)"

    return UPWARDS.sub(inside, markdown)
