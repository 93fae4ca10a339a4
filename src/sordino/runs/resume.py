"""Continuing a run from its folder: everything that is there must agree before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sordino import codec
from sordino.codec import durable_files
from sordino.config import Config
from sordino.errors import CertificateError, ConfigError, DataError
from sordino.models import InMemoryModel
from sordino.runs import charge_log, checkpoint, receipts
from sordino.runs.charge_log import PrefixHash
from sordino.runs.checkpoint import Checkpoint, software
from sordino.runs.folder import Contents, Header, RunFolder
from sordino.runs.rounds import RunStart
from sordino.runs.writer import ENGINE, HISTORY, RunWriter
from sordino.task import Task
from sordino.version import versions


@contextmanager
def resumed(path: Path, config: Config, task: Task) -> Iterator[tuple[RunWriter, RunStart]]:
    """The run in a folder, under its lock, where it stands: what a kill leaves (half a line, a torn checkpoint) is
    repaired once everything else was found to agree.
    """
    folder = RunFolder.open(path, config)
    with folder.locked():
        held = folder.contents()
        # A task that was made in Python must be of the same kind as the one before; its data are compared apart
        kept, given = held.config.task.model, config.task.model
        differ = kept.differs(given) if isinstance(kept, InMemoryModel) and isinstance(given, InMemoryModel) else []
        if differ:
            found = f"another task than {path} was started with: {', '.join(differ)}"
            raise DataError(found, "the same module, data and loss for a whole run", "bring them back, or start anew")
        _check_same(folder, held.header, config, task)
        if (path / "certificate.json").exists():
            folder.certify()
        charge_log.check_second_copy(durable_files.read(folder.private / "charged"), held.log, at_rest=False)
        last, why = checkpoint.latest(folder.private, held.log)
        check_noise(config, held.log.rounds, 0 if last is None else last.state.t)
        history, engine = (_bound(folder, name, last) for name in (HISTORY, ENGINE))
        notes = _other_versions(engine)
        if last is not None and why:
            back = f"the run goes on from the one before it, after round {last.state.t}"
            notes.insert(0, f"checkpoint/{checkpoint.STATE} {why}; {back}, and what is run again is charged again")
        _repair(folder, held, len(history), len(engine), why)
        writer = RunWriter.after(folder, config, held.header, held.log, history, engine)
        state, lines = None if last is None else last.state, tuple(folder.history())
        yield writer, RunStart(writer, state, lines, refused=folder.refusal(held), notes=tuple(notes))


def _check_same(folder: RunFolder, header: Header, config: Config, task: Task) -> None:
    """The configuration, the version and the data that the run was started with."""
    path, now = folder.path, software(config)
    if codec.digest(config) != header.config:
        found = f"a configuration that is not the one {path} was started with"
        raise ConfigError(found, "the same one", f"resume with {path / 'plan.toml'}, or start anew in another --out")
    if header.sordino != now:
        found = f"sordino {now} where {path} was started with sordino {header.sordino}"
        needed = "one version for a whole run: another may draw or account otherwise"
        raise ConfigError(found, needed, f"install sordino=={header.sordino}, or start anew in another --out")
    changed = folder.fingerprint(header).changed(task)
    if not changed and task.declared_public != header.public:
        changed = ["what is declared public of them, or the weights that are not trained"]
    if changed:
        found = f"other data than {path} was started with: {', '.join(changed)}"
        raise DataError(found, "the same data for a whole run", "bring them back, or start anew in another --out")


def check_noise(config: Config, charged: Sequence[int], t: int) -> None:
    """Noise that remembers, lost with a round that was charged: drawn anew it would be another than is accounted."""
    lost = next((round for round in charged if round >= t), None)
    if lost is not None and config.privacy.noise == "secure" and config.plan.release.init(1):
        found = f"round {lost + 1}, whose noise {config.plan.release.kind!r} must remember and a kill has lost"
        needed = "all noise that was drawn, or none of its round"
        raise ConfigError(found, needed, "start anew in another --out: what was charged stays spent")


def _bound(folder: RunFolder, name: str, last: Checkpoint | None) -> bytes:
    """What the checkpoint binds of a file; what was written after it will be written again."""
    bound = {} if last is None else {HISTORY: last.history, ENGINE: last.engine}
    return bound.get(name, PrefixHash()).check(durable_files.read(folder.path / name), name)


def _other_versions(engine: bytes) -> list[str]:
    """What has changed under the run since it was started or last continued; the certificate names both."""
    lines = charge_log.read_lines(engine, ENGINE)
    before, now = (lines[-1].get("versions") if lines else None), versions()
    if before is None:
        return []
    if not isinstance(before, dict):
        raise CertificateError(ENGINE, f"{ENGINE} holds a line without versions")
    changed = [f"{name} {now[name]} where it was {before.get(name)}" for name in now if before.get(name) != now[name]]
    return [f"other versions than before, named on the certificate: {', '.join(changed)}"] if changed else []


def _repair(folder: RunFolder, held: Contents, history: int, engine: int, why: str) -> None:
    """Drop what a kill left half done; every step may itself be killed and is then done again."""
    path, private = folder.path, folder.private
    durable_files.cut(path / charge_log.NAME, held.log.size)
    notes = "".join(f"{head}\n" for head in held.log.heads).encode()
    if durable_files.read(private / "charged") != notes:
        durable_files.write(private / "charged", notes, durable_files.PRIVATE)
    durable_files.cut(path / HISTORY, history)
    durable_files.cut(path / ENGINE, engine)
    paid = receipts.read(path)
    if paid is not None:
        durable_files.cut(path / receipts.NAME, len(receipts.whole(paid)))
    if why:
        durable_files.move(private / checkpoint.BEFORE, private / checkpoint.STATE)
    for left in [*path.glob(f"*{durable_files.PARTIAL}"), *private.glob(f"*{durable_files.PARTIAL}")]:
        durable_files.remove(left)
