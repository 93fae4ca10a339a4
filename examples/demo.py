"""Train DP-Fed-LS on the bundled digits: what `make demo` runs."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path

HERE = Path(__file__).resolve().parent
out = next(path for i in count(1) if not (path := Path("runs") / f"demo-{i}").exists())
command = [str(Path(sys.executable).parent / "sordino"), "run", str(HERE / "fed.toml"), "--out", str(out)]
sys.exit(subprocess.call(command))
