"""Runs on disk as a report sees them: the folder of a run, or the file of a loop, certified before it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch

from sordino import codec
from sordino.codec import durable_files
from sordino.dpsgd import account
from sordino.errors import ConfigError
from sordino.report.comparison import Last, Subject
from sordino.runs import checkpoint
from sordino.runs.checkpoint import Checkpoint, TornError
from sordino.runs.folder import RunFolder

AUDIT = "audit.json"


def subjects(targets: list[Path]) -> list[Subject]:
    """One of each, under names that tell them apart."""
    if not targets:
        raise ConfigError("no run", "the folder of a run, or several", "give the --out of 'sordino run'")
    names = _names(targets)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} twice", "every run once")
    return [subject(target, name) for target, name in zip(targets, names, strict=True)]


def _names(targets: list[Path]) -> list[str]:
    """The last word of every path, or as many more as it takes."""
    paths = [target.resolve().parts for target in targets]
    for words in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-words:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return ["/".join(parts) for parts in paths]


def subject(target: Path, name: str) -> Subject:
    """A run's folder, if every file of it agrees with its certificate; or a loop's file, likewise."""
    if not target.exists():
        raise ConfigError(f"{target}, which does not exist", "the folder of a run, or the file of a loop")
    if target.is_file():
        loop = account.certify(target)
        return Subject(name, loop.certificate, loop.plan, loop.facts)
    folder = RunFolder.open(target)
    certificate, held = folder.certify(), folder.contents()
    known: dict[str, Any] = {"history": folder.history(), "rounds": held.log.rounds, "cohorts": held.cohorts}
    known |= {"settings": codec.dump(held.config), "audit": audits(target, held.header.run), "last": _last(folder)}
    return Subject(name, certificate, held.config.plan, folder.facts(held), **known)


def _last(folder: RunFolder) -> Last | None:
    """The last round's two states, where the checkpoints are here."""
    try:
        files = (folder.private / checkpoint.BEFORE, folder.private / checkpoint.STATE)
        before, after = (Checkpoint.of_bytes(file.read_bytes()).state for file in files)
        model = safetensors.torch.load((folder.path / "model.safetensors").read_bytes())
    except (OSError, TornError):
        return None
    return Last(before, after, model) if after.t == before.t + 1 else None


# ---- what audits have found -----------------------------------------------------------------------------------------


def audits(folder: Path, run: str) -> dict[str, Any]:
    """What `sordino audit` has found of this very run, by layer."""
    file = folder / AUDIT
    if not file.exists():
        return {}
    try:
        found = json.loads(durable_files.read(file))
        found = {"run": run, "layers": {"canaries": found}} if "canaries" in found else found  # as it once was
        layers = found["layers"] if found["run"] == run else {}
        if isinstance(layers, dict) and all(isinstance(one, dict) for one in layers.values()):
            return layers
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(f"{file}, which 'sordino audit' has not written", "its findings", "remove it, and audit again")


def keep_audit(folder: Path, layer: str, found: dict[str, Any]) -> None:
    """What a layer found stands beside the run, for its owner; no other file of the run is touched."""
    run = RunFolder.open(folder).contents().header.run
    layers = {**audits(folder, run), layer: found}
    text = json.dumps({"run": run, "layers": layers}, indent=2) + "\n"
    durable_files.write(folder / AUDIT, text.encode(), durable_files.PRIVATE)
