"""`sordino doctor`: what this machine has and lacks, each with its fix."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Literal

import typer

from sordino.cli.app import JsonFlag, app, say
from sordino.version import __version__

EXTRAS = {
    "fast": ("numba", "inner loops in machine code: up to several times faster on small models"),
    "sign": ("cryptography", "signed certificates"),
    "flower": ("flwr", "a federation across machines"),
    "transformers": ("transformers", "models of Hugging Face, with peft for adapters"),
    "parquet": ("pyarrow", "data in Parquet files"),
    "tensorboard": ("tensorboard", "--track tensorboard"),
    "mlflow": ("mlflow-skinny", "--track mlflow"),
    "wandb": ("wandb", "--track wandb"),
}


@dataclass(frozen=True)
class Finding:
    """One line: fine, a note that something could be had, or trouble."""

    state: Literal["ok", "note", "trouble"]
    what: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.state:<8} {self.what}" + (f": {self.fix}" if self.fix else "")


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """What this machine has and lacks for Sordino; exit code 1 if something will not work."""
    found = [*_software(), *_extras(), *_machine(), *_data(), *_strangers()]
    entries = [{"state": one.state, "what": one.what, "fix": one.fix} for one in found]
    say(as_json, {"sordino": __version__, "findings": entries}, "\n".join(one.line() for one in found))
    if any(one.state == "trouble" for one in found):
        raise typer.Exit(1)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _software() -> list[Finding]:
    said = f"sordino {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    found = [Finding("ok" if sys.version_info >= (3, 11) else "trouble", said, "")]
    for name in ("torch", "numpy", "scipy", "randomgen"):
        has = _installed(name)
        found.append(Finding("ok", f"{name} {has}") if has else Finding("trouble", f"no {name}", f"pip install {name}"))
    return found


def _extras() -> list[Finding]:
    """Optional packages: what each is for, and how to get it."""
    found = []
    for extra, (package, use) in EXTRAS.items():
        has = _installed(package) or (_installed("mlflow") if extra == "mlflow" else None)
        lacks = Finding("note", f"no {package} ({use})", f"pip install 'sordino[{extra}]'")
        found.append(Finding("ok", f"{package} {has} ({use})") if has else lacks)
    return found


def _machine() -> list[Finding]:
    import torch

    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    found = [Finding("ok", f"{cores} cores, vector code {torch.backends.cpu.get_cpu_capability()}")]
    if threads > 1 and "OMP_NUM_THREADS" not in os.environ:
        fix = "'sordino run' sets one; in Python call torch.set_num_threads(1): two that fight are far slower"
        found.append(Finding("note", f"torch would take {threads} threads", fix))
    found.append(Finding("ok", "CUDA is there") if torch.cuda.is_available() else Finding("note", "no CUDA: CPU only"))
    return found


def _data() -> list[Finding]:
    """Where data sets are looked for, and whether the cache can be written."""
    from sordino.data.sources import cache_folder

    named, where = os.environ.get("SORDINO_DATA"), cache_folder()
    found = []
    if named:
        there = Path(named).is_dir()
        fix = "" if there else "correct the variable, or unset it"
        found.append(Finding("ok" if there else "trouble", f"SORDINO_DATA = {named}", fix))
    above = next(folder for folder in (where, *where.parents) if folder.exists())
    writable = os.access(above, os.W_OK)
    found.append(Finding("ok" if writable else "trouble", f"cache {where}", "" if writable else "set SORDINO_CACHE"))
    free = shutil.disk_usage(above).free / 2**30
    return [*found, Finding("ok" if free > 1 else "note", f"{free:.0f} GiB free there")]


def _strangers() -> list[Finding]:
    """Packages that bring parts of their own."""
    from sordino.codec.plugins import GROUP, load
    from sordino.errors import ConfigError

    names = sorted({point.dist.name for point in entry_points(group=GROUP) if point.dist is not None})
    try:
        load()
    except ConfigError as error:
        return [Finding("trouble", str(error))]
    return [Finding("ok", f"parts of {name}, named on every certificate that uses them") for name in names]
