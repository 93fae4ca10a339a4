"""`sordino examples`: the examples that are installed with the package, copied to where they can be changed."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.app import JsonFlag, app, say
from sordino.errors import ConfigError

PLACES = (  # of a wheel, and of a checkout
    Path(sysconfig.get_path("data")) / "share" / "sordino" / "examples",
    Path(__file__).parents[3] / "examples",
)


@app.command()
def examples(
    to: Annotated[Path | None, typer.Option(help="A new folder to copy them into.")] = None, as_json: JsonFlag = False
) -> None:
    """List the examples, or copy them with --to."""
    home = next((place for place in PLACES if (place / "demo.py").is_file()), None)
    if home is None:
        raise ConfigError("an installation without its examples", f"{PLACES[0]}", "install sordino from its wheel")
    names = sorted(str(file.relative_to(home)) for file in home.rglob("*") if _shown(file, home))
    if to is not None:
        if to.exists():
            raise ConfigError(f"--to {to}, which is there already", "a new folder")
        for name in names:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(home / name, to / name)
    say(as_json, {"examples": names, "to": None if to is None else str(to)}, "\n".join(names))


def _shown(file: Path, home: Path) -> bool:
    above = file.relative_to(home).parts[:-1]
    hidden = any(part.startswith((".", "__")) or part.endswith(".egg-info") for part in above)
    return file.is_file() and not hidden and file.suffix in (".py", ".toml", ".md")
