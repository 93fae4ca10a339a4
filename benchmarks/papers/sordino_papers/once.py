"""Runs that are kept one by one, so that a long study can be stopped and taken up again.

Where SORDINO_PAPERS_RUNS names a folder, a run that is there is read and one that is not is added; else nothing is
kept. A run is known by its arguments, not by the code that made it: after a change, begin with an empty folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FOLDER = "SORDINO_PAPERS_RUNS"


def once(work: Callable[..., Row], *job: Any) -> Row:
    """work(*job), computed at most once per folder."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return work(*job)
    name = f"{work.__module__}.{work.__qualname__}{job!r}"
    path = Path(folder) / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
    if not path.exists():
        found = json.dumps({"job": name, "row": work(*job)})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8")
    row: Row = json.loads(path.read_text(encoding="utf-8"))["row"]
    return row
