"""The writer of a run's folder: charges, history, checkpoints, certificate. Called while a run goes on.

Order within a round: the charge and its second copy are on disk before noise is drawn; history, then the checkpoint,
after the step. So a killed run continues from its last checkpoint, and whatever was charged stays charged. The writer
knows the head of the charge log and the length of every file, so a change by somebody else is noticed.
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
from sordino.certificate.certificate_file import text_of
from sordino.certificate.earlier_runs import EarlierRun
from sordino.codec import durable_files
from sordino.config import Config
from sordino.engines.base import Receipt
from sordino.errors import BudgetError, ConfigError, StorageError
from sordino.loop import RoundReceipts
from sordino.outcome import releasable
from sordino.parts.samplers import Cohort
from sordino.plan import State
from sordino.rng import Mode
from sordino.runs import admission, charge_log, receipts
from sordino.runs.charge_log import ChargeLog, GrowingFile, digest
from sordino.runs.checkpoint import Checkpoint, Fingerprint, software
from sordino.runs.folder import Header, RunFolder
from sordino.task import Task
from sordino.version import versions

HISTORY, ENGINE = "history.jsonl", "engine.jsonl"


@dataclass
class RunWriter:
    """What a running run writes to; also the place where its rounds are charged."""

    folder: RunFolder
    config: Config
    header: Header
    log: ChargeLog  # the charges that were there when this process began
    head: str
    charges: GrowingFile
    charged_copy: GrowingFile
    history: GrowingFile
    engine: GrowingFile
    receipts: GrowingFile
    charged: int  # how often
    admission: admission.Admission | None = None  # to the ledger that the run is charged to

    @classmethod
    def after(
        cls,
        folder: RunFolder,
        config: Config,
        header: Header,
        log: ChargeLog,
        history: bytes = b"",
        engine: bytes = b"",
    ) -> RunWriter:
        """Continues the files of a folder after what they hold."""
        path, lines = folder.path, b"".join(charge.line() + b"\n" for charge in log.charges)
        copies = "".join(f"{head}\n" for head in log.heads).encode()
        files = (
            GrowingFile(path / charge_log.NAME, lines),
            GrowingFile(folder.private / "charged", copies),
            GrowingFile(path / HISTORY, history),
            GrowingFile(path / ENGINE, engine),
            GrowingFile(path / receipts.NAME, receipts.whole(receipts.read(path) or b"") if log.charges else b""),
        )
        return cls(folder, config, header, log, log.head, *files, len(log.charges))

    def charge(self, t: int, cohort: Cohort | None) -> None:
        """Write one release down before any of its noise exists: twice here, and in the ledger it is charged to.

        Who took part is written only where that is visible.
        """
        line = charge_log.next_charge(t, cohort, self.header.config, self.head).line()
        self.charges.append(line)
        self.charged += 1
        self.head = digest(line)
        self.charged_copy.append(self.head.encode())
        if self.admission is not None:
            self.admission.note(t + 1, self.head)

    def settle(self, refused: tuple[int, ...], paid: tuple[Receipt, ...]) -> None:
        """The silos' receipts of the last charge."""
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
        """The checkpoint: it binds the charges up to here, and history."""
        Checkpoint(state, self.head, self.history.prefix, self.engine.prefix).save(self.folder.private)

    def refuse(self, config: Config, error: BudgetError) -> None:
        """A budget has ended the run: which cohort it refused."""
        receipts.write_refusal(self.folder.path, config.plan, error.refused, self.header.config, self.head)

    def finish(self, model: bytes, sign: Callable[[Path], None] | None = None) -> dict[str, Any]:
        """Model and certificate, from what the folder says happened; signed if there is a key."""
        durable_files.write(self.folder.path / "model.safetensors", model)
        admission.write_standing(self.folder)
        made = self.folder.certificate()
        durable_files.write(self.folder.path / "certificate.json", text_of(made).encode())
        if sign is not None:
            sign(self.folder.path)
        return made


# ---- a new folder ---------------------------------------------------------------------------------------------------


@contextmanager
def created(
    path: Path, config: Config, task: Task, earlier: tuple[EarlierRun, ...] = (), run: str = ""
) -> Iterator[RunWriter]:
    """A new folder and its lock; it is built beside its place and moved there whole, and never replaces another.

    `run` is the id of a run that was kept in memory so far; else it is drawn. `earlier`: runs its weights come from.
    """
    if path.exists() or path.is_symlink():
        found = f"{path}, which exists"
        raise ConfigError(found, "a new folder", "choose another --out, or add --resume (resume=True)")
    with _beside(path) as made:
        try:
            header = _fill(made, config, task, earlier, run or secrets.token_hex(16))
            durable_files.move(made, path)
        except (OSError, StorageError) as error:
            raise _unusable(path, error) from None
        yield RunWriter.after(RunFolder(path, config), config, header, ChargeLog(header.root))


def _unusable(path: Path, error: OSError | StorageError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else error.found
    fix = "nothing was charged; choose another --out"
    return ConfigError(f"{path}, which cannot be made ({reason})", "a folder to write to", fix)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A folder under another name, locked while it is built (and after it is moved), removed if building fails."""
    for left in path.parent.glob(f".{path.name}.*{durable_files.PARTIAL}"):
        # Remove what a killed run left of a folder that was never moved to its place; one being built is locked
        with suppress(OSError):
            lock = os.open(left / "checkpoint" / "lock", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(lock)
        if left.is_dir() and not (left / "checkpoint").exists():
            shutil.rmtree(left, ignore_errors=True)
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}{durable_files.PARTIAL}")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mkdir(made)
            os.mkdir(made / "checkpoint", 0o700)
        except OSError as error:
            raise _unusable(path, error) from None
        with RunFolder(made).locked():
            yield made
    except (Exception, KeyboardInterrupt):
        shutil.rmtree(made, ignore_errors=True)
        raise


def _fill(made: Path, config: Config, task: Task, earlier: tuple[EarlierRun, ...], run: str) -> Header:
    """Everything that a run needs to be continued, with no round done."""
    data, plan = Fingerprint.of(task).to_bytes(), codec.to_toml(config).encode()
    hashes = codec.digest(config), digest(plan), digest(data)
    header = Header(run, *hashes, task.declared_public, software(config), earlier)
    durable_files.write(made / "checkpoint" / "data.json", data, durable_files.PRIVATE)
    durable_files.write(made / "checkpoint" / "charged", b"", durable_files.PRIVATE)
    durable_files.write(made / "plan.toml", plan)
    durable_files.write(made / "run.json", header.to_bytes())
    durable_files.write(made / charge_log.NAME, b"")
    for name in (HISTORY, ENGINE):
        durable_files.write(made / name, b"", durable_files.PRIVATE)
    durable_files.sync(made)
    return header
