"""Build a release, check it in an empty environment, write its notes and tag it. Called by `make release`.

1. the working tree is clean, and pyproject.toml, version.py, CITATION.cff and CHANGELOG.md name the same version;
2. sdist and wheel are built and pass `twine check --strict`;
3. the wheel alone is installed into a new venv outside the checkout, and the demo, a run with its certificate, a
   private loop and the installed examples work from there;
4. dist/notes.md holds this version's section of CHANGELOG.md, and the commit is tagged vVERSION (--no-tag: not).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOP = """
import torch, sordino as so
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(200, 5); y = (x[:, 0] > 0).long()
model = torch.nn.Linear(5, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(x, y), batch_size=20)
model, optimizer, loader = so.make_private(model, optimizer, loader, epochs=1, epsilon=2.0)
for a, b in loader:
    optimizer.zero_grad(); torch.nn.functional.cross_entropy(model(a), b).backward(); optimizer.step()
assert 0 < optimizer.certificate()["epsilon"] <= 2.0, optimizer.certificate()["epsilon"]
"""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a command; stops the release where it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    found = subprocess.run(words, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(f"release: {' '.join(words)} failed:\n{found.stdout}{found.stderr}")
    return found.stdout


def version() -> str:
    """The version that every file names; stops where they disagree."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    places = {
        "src/sordino/version.py": f'__version__ = "{named}"',
        "CITATION.cff": f"version: {named}",
        "CHANGELOG.md": f"## [{named}]",
    }
    for place, text in places.items():
        if text not in (ROOT / place).read_text("utf-8"):
            sys.exit(f"release: {place} does not say {text!r}; pyproject.toml has version {named}")
    return str(named)


def notes(named: str) -> str:
    """This version's section of the changelog."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    section = re.search(rf"^## \[{re.escape(named)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.DOTALL | re.MULTILINE)
    if section is None or not section[1].strip():
        sys.exit(f"release: CHANGELOG.md has no section for {named}")
    return section[1].strip() + "\n"


def build(dist: Path) -> Path:
    """The wheel; the sdist lies beside it, and both pass twine's check."""
    for old in dist.glob("sordino-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", dist)
    built = sorted(dist.glob("sordino-*"))
    print(run(sys.executable, "-m", "twine", "check", "--strict", *built), end="")
    return next(file for file in built if file.suffix == ".whl")


def check(wheel: Path, named: str) -> None:
    """The wheel in an empty venv, outside the checkout: version, demo, certificate, private loop, examples."""
    torch = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        run(sys.executable, "-m", "venv", home / "venv", cwd=home)
        binary = home / "venv" / "bin"
        run(binary / "pip", "install", "--quiet", torch[0] if torch else "torch", cwd=home)
        run(binary / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=home)
        if named not in run(binary / "sordino", "--version", cwd=home):
            sys.exit(f"release: the installed command does not report version {named}")
        run(binary / "sordino", "examples", "--to", home / "examples", cwd=home)
        print(run(binary / "python", home / "examples" / "demo.py", cwd=home), end="")
        print(run(binary / "sordino", "certify", next((home / "runs").glob("demo-*")), cwd=home), end="")
        run(binary / "python", "-c", LOOP, cwd=home)
        count = len(list((home / "examples").rglob("*.ipynb")))
    print(f"release: {wheel.name} works from an empty environment; {count} notebooks among its examples")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--no-tag", action="store_true", help="build and check only; a dirty tree is fine")
    tags = not asked.parse_args().no_tag
    if tags and run("git", "status", "--porcelain"):
        sys.exit("release: uncommitted changes; commit them, or use --no-tag to try")
    named, dist = version(), ROOT / "dist"
    dist.mkdir(exist_ok=True)
    text = notes(named)
    check(build(dist), named)
    (dist / "notes.md").write_text(text, encoding="utf-8")
    if tags:
        run("git", "tag", "-a", f"v{named}", "-F", dist / "notes.md")
    print(f"release: dist/ has {named}" + (f", tagged v{named}; push the tag to publish" if tags else "; not tagged"))


if __name__ == "__main__":
    main()
