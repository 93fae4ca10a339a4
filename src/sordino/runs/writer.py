"""The hand that writes a run down: it knows the chain's head and the length of every file, so a stranger's is noticed.

Order within a round: the charge, and its second note, are on disk before noise is drawn; history, then the checkpoint,
after the step. So a killed run continues from its last checkpoint, and whatever was charged stays charged.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.certificate.earlier_runs import EarlierRun
from sordino.certificate.facts import Declared
from sordino.certificate.schema import text_of
from sordino.codec import durable_files
from sordino.config import Config
from sordino.engines.base import Receipt
from sordino.errors import BudgetError, ConfigError, StorageError
from sordino.loop import RoundReceipts
from sordino.outcome import releasable
from sordino.parts.samplers import Cohort
from sordino.plan import State
from sordino.rng import Mode
from sordino.runs import admission, charge_log, logs, receipts
from sordino.runs.charge_log import ChargeLog
from sordino.runs.checkpoint import Checkpoint
from sordino.runs.fingerprint import Fingerprint, software
from sordino.runs.folder import Header, RunFolder, plan_toml
from sordino.runs.logs import GrowingFile
from sordino.version import versions


@dataclass
class RunWriter:
    """What a running run writes to; also the place where its rounds are charged."""

    folder: RunFolder
    config: str
    head: str
    charges: GrowingFile
    noted: GrowingFile
    history: GrowingFile
    engine: GrowingFile
    receipts: GrowingFile
    charged: int  # how often
    admission: admission.Admission | None = None  # to the ledger that the run pays from

    @classmethod
    def at(cls, folder: RunFolder, config: str, found: ChargeLog, history: bytes, engine: bytes) -> RunWriter:
        """After what is there already."""
        path = folder.path
        lines = b"".join(charge.line() + b"\n" for charge in found.charges)
        notes = "".join(f"{head}\n" for head in found.heads).encode()
        logs = GrowingFile(path / charge_log.NAME, lines), GrowingFile(folder.private / "charged", notes)
        grown = GrowingFile(path / "history.jsonl", history), GrowingFile(path / "engine.jsonl", engine)
        paid = GrowingFile(path / receipts.NAME, receipts.whole(receipts.read(path) or b""))
        return cls(folder, config, found.head, *logs, *grown, paid, len(found.charges))

    def charge(self, t: int, cohort: Cohort | None) -> None:
        """One release, written down before any of its noise exists: twice here, and in the ledger that pays for it.

        Who took part is written only where that is seen.
        """
        line = charge_log.next_charge(t, cohort, self.config, self.head).line()
        self.charges.append(line)
        self.charged += 1
        self.head = charge_log.digest(line)
        self.noted.append(self.head.encode())
        if self.admission is not None:
            self.admission.note(t + 1, self.head)

    def settle(self, refused: tuple[int, ...], paid: tuple[Receipt, ...]) -> None:
        """What became of the last charge, by those who paid it."""
        if not self.receipts.file.exists():
            durable_files.write(self.receipts.file, b"")
        self.receipts.append(receipts.line(RoundReceipts(self.charged, refused, paid)))

    def announce(self, rounds: int, header: dict[str, str | int]) -> None:
        """How the rounds from here on are computed: one line each time the run is started or continued."""
        self.engine.append(json.dumps({"after_round": rounds, "versions": versions(), **header}).encode())

    def record(self, line: dict[str, Any], noise: Mode) -> None:
        """One line of history, as far as it may be written."""
        self.history.append(json.dumps(releasable(line, noise)).encode())

    def save(self, state: State) -> None:
        """The checkpoint: it binds the chain up to here, and history."""
        Checkpoint(state, self.head, self.history.mark, self.engine.mark).save(self.folder.private)

    def refuse(self, config: Config, error: BudgetError) -> None:
        """A budget has ended the run: which cohort it refused."""
        logs.write_refusal(self.folder.path, config.plan, error.refused, self.config, self.head)

    def finish(self, model: bytes, sign: Callable[[Path], None] | None = None) -> dict[str, Any]:
        """Model and certificate, from what the folder says happened; signed if somebody signs."""
        durable_files.write(self.folder.path / "model.safetensors", model)
        admission.write_standing(self.folder)
        made = self.folder.certificate()
        durable_files.write(self.folder.path / "certificate.json", text_of(made).encode())
        if sign is not None:
            sign(self.folder.path)
        return made


# ---- a new folder ---------------------------------------------------------------------------------------------------


def create_folder(
    path: Path,
    config: Config,
    data: Fingerprint,
    public: tuple[Declared, ...] = (),
    run: str = "",
    earlier: tuple[EarlierRun, ...] = (),
) -> RunFolder:
    """A new folder, built beside its place and moved there whole; an existing one is never touched.

    `run` is the id of a run that was kept in memory so far; else it is drawn. `earlier`: what its weights come from.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(
            f"{path}, which exists", "a new folder", "choose another --out, or add --resume (resume=True)"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _beside(path) as made:
            _fill(made, config, data, _Begun(run or secrets.token_hex(16), public, earlier))
            durable_files.move(made, path)
    except (OSError, StorageError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.found
        raise ConfigError(
            f"{path}, which cannot be made ({reason})",
            "a folder to write to",
            "nothing was charged; choose another --out",
        ) from None
    return RunFolder(path, config)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A folder under another name, locked while it is built, and gone again if that fails."""
    for left in path.parent.glob(f".{path.name}.*{durable_files.PARTIAL}"):
        _clear(left)
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}{durable_files.PARTIAL}")
    try:
        os.mkdir(made)
        os.mkdir(made / "checkpoint", 0o700)
        with RunFolder(made).locked():
            yield made
    except (Exception, KeyboardInterrupt):
        shutil.rmtree(made, ignore_errors=True)
        raise


def _clear(left: Path) -> None:
    """What a killed run left of a folder that never had its name; one that is being built is locked."""
    with suppress(OSError):
        lock = os.open(left / "checkpoint" / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        finally:
            os.close(lock)
    if left.is_dir() and not (left / "checkpoint").exists():
        shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True)
class _Begun:
    """What is known of a run before its first round, beside configuration and data."""

    run: str
    public: tuple[Declared, ...]
    earlier: tuple[EarlierRun, ...]


def _fill(made: Path, config: Config, data: Fingerprint, begun: _Begun) -> None:
    """Everything a run needs to be continued, with not a round done."""
    kept = data.to_bytes()
    plan = plan_toml(config)
    hashes = codec.digest(config), charge_log.digest(plan), charge_log.digest(kept)
    header = Header(begun.run, *hashes, begun.public, software(config), begun.earlier)
    durable_files.write(made / "checkpoint" / "data.json", kept, durable_files.PRIVATE)
    durable_files.write(made / "checkpoint" / "charged", b"", durable_files.PRIVATE)
    durable_files.write(made / "plan.toml", plan)
    durable_files.write(made / "run.json", header.to_bytes())
    durable_files.write(made / charge_log.NAME, b"")
    for name in ("history.jsonl", "engine.jsonl"):
        durable_files.write(made / name, b"", durable_files.PRIVATE)
    durable_files.sync(made)
