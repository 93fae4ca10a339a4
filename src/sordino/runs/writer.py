"""Writer of a run's folder: creation, lock, charges, history and checkpoints. Called by `execute`.

In each round the charge and its second copy are on disk before noise is drawn; the history line and then the checkpoint
are written after the server's step. So a killed run resumes from its last checkpoint with all its charges. The writer
stores the last hash of the charge log and the length of every file, and so detects changes by another process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from sordino import codec
from sordino.certificate.facts import Declared, EarlierRun
from sordino.codec import durable_files
from sordino.codec.durable_files import PARTIAL, PRIVATE
from sordino.config import Config
from sordino.data.clients import unwrapped_model
from sordino.data.lineage import declared_frozen, keyed_hash, sampled_hash
from sordino.engines.base import Receipt
from sordino.engines.checks import model_answers, same_answers
from sordino.errors import BudgetError, CertificateError, ConfigError, StorageError, UserError
from sordino.loop import RoundReceipts
from sordino.outcome import releasable
from sordino.parts.samplers import Cohort
from sordino.plan import State
from sordino.rng import Mode
from sordino.runs import charge_log
from sordino.runs.charge_log import CHARGES, RECEIPTS, RESTORE, ChargeLog, PrefixHash
from sordino.task import Task
from sordino.version import __version__, versions

if TYPE_CHECKING:
    from sordino.runs.admission import Admission

HISTORY, ENGINE = "history.jsonl", "engine.jsonl"
STATE, BEFORE = "state.safetensors", "before.safetensors"  # the checkpoint, and the one before it
_SIDES = ("memory", "public_state", "secret_state")
_ANSWERS = "the outputs of module and loss on synthetic records, so the module or the loss has changed"
_EARLIER = tuple[EarlierRun, ...]


@dataclass(frozen=True)
class Fingerprint:
    """Keyed hashes (HMAC-SHA256) of each part of the data, as in checkpoint/data.json; the key is never released.

    `words` are the outputs of module and loss on synthetic records, which detect changed code of the user.
    """

    key: str
    parts: dict[str, str]
    words: tuple[float, ...] = ()

    @classmethod
    def of(cls, task: Task, key: str = "") -> Fingerprint:
        key, clients = key or secrets.token_hex(32), task.clients
        cut = [torch.from_numpy(np.ascontiguousarray(side)) for side in (clients.index, clients.offsets)]
        parts = {}
        held = {"the clients' records": clients.records, "the test records": task.test}
        for name, records in {**held, "the public records": task.public}.items():
            hash_of = sampled_hash if records is not None and records.lazy else keyed_hash
            parts[name] = "none" if records is None else hash_of(key, records.x, records.y)
        parts["who holds which record"] = keyed_hash(key, *([] if clients.records.lazy else cut[:1]), cut[1])
        if task.init is not None:
            parts["the initial weights"] = task.init.sha256
        fixed = declared_frozen(unwrapped_model(task.model))
        if fixed:
            parts["the frozen weights"] = str(fixed[0].sha256)
        return cls(key, parts, model_answers(task))

    def changed(self, task: Task) -> list[str]:
        """Return the names of the parts of a task that differ from the fingerprint."""
        now = Fingerprint.of(task, self.key)
        other = [name for name, before in self.parts.items() if now.parts.get(name) != before]
        return other or ([] if same_answers(self.words, now.words) else [_ANSWERS])

    @classmethod
    def of_bytes(cls, data: bytes) -> Fingerprint:
        try:
            table: dict[str, Any] = json.loads(data)
            return cls(str(table["key"]), dict(table["parts"]), tuple(map(float, table.get("words", ()))))
        except (ValueError, TypeError, KeyError, RecursionError):
            name = "checkpoint/data.json"
            raise CertificateError(name, f"{name} is not a fingerprint of the data{RESTORE}") from None


@dataclass(frozen=True)
class Header:
    """Content of run.json, written once when the folder is created; its hash begins the hash chain of charges."""

    run: str
    config: str
    plan: str  # sha256 of the bytes of plan.toml
    private: str  # sha256 of the bytes of checkpoint/data.json
    public: tuple[Declared, ...] = ()  # rows that are declared public, and by whom
    sordino: str = __version__
    earlier: tuple[EarlierRun, ...] = ()  # private runs in which the initial weights were trained

    def to_bytes(self) -> bytes:
        hashes = {"config_sha256": self.config, "plan_toml_sha256": self.plan, "private_sha256": self.private}
        declared = {"declared_public": codec.dump(self.public), "sordino": self.sordino}
        before = {"earlier_runs": codec.dump(self.earlier)} if self.earlier else {}
        return json.dumps({"format": 2, "run": self.run, **hashes, **declared, **before}, indent=2).encode() + b"\n"

    @classmethod
    def of_bytes(cls, data: bytes) -> Header:
        try:
            table = json.loads(data)
            public = tuple(Declared(**one) for one in table["declared_public"])
            config, plan, private = (table[f"{name}_sha256"] for name in ("config", "plan_toml", "private"))
            earlier: tuple[EarlierRun, ...] = codec.read(_EARLIER, table.get("earlier_runs", []), "earlier_runs")
            found = cls(table["run"], config, plan, private, public, table["sordino"], earlier)
            if found.to_bytes() == data:
                return found
        except (ValueError, TypeError, KeyError, RecursionError, UserError):
            pass
        raise CertificateError("run.json", f"run.json is not a header in the format of this program{RESTORE}")


def software(config: Config) -> str:
    """Return the version of Sordino and of the packages whose parts the configuration uses."""
    others = sorted({f" and {part.package} {part.version}" for part in config.foreign})
    return "".join([__version__, *others])


# ---- checkpoints
class TornError(Exception):
    """Raised for a checkpoint file that is incomplete or does not match its checksum."""


@codec.hides_values
@dataclass(frozen=True)
class Checkpoint:
    """State after a round, with the last hash of the charge log and the hashes of history.jsonl and engine.jsonl."""

    state: State
    head: str
    history: PrefixHash
    engine: PrefixHash

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        named = {f"{side}.{name}": one for side in _SIDES for name, one in getattr(self.state, side).items()}
        logs = {"history": [self.history.size, self.history.sha256], "engine": [self.engine.size, self.engine.sha256]}
        bound = {"t": self.state.t, "head": self.head, **logs}
        return bound, {name: named[name].cpu().contiguous() for name in sorted(named)}

    @property
    def sha256(self) -> str:
        """SHA-256 of the checkpoint's tensors, round number, last hash of the charge log, and file hashes."""
        bound, named = self._content()
        found = hashlib.sha256(json.dumps(bound).encode())
        for name, tensor in named.items():
            found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def to_bytes(self) -> bytes:
        bound, named = self._content()
        return safetensors.torch.save(named, metadata={"sordino": json.dumps({**bound, "sha256": self.sha256})})

    @classmethod
    def of_bytes(cls, data: bytes) -> Checkpoint:
        """Parse a checkpoint from the bytes of `to_bytes`; raise `TornError` if they are damaged."""
        try:
            bound = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["sordino"])
            named = safetensors.torch.load(data)
            parts = [
                {name.removeprefix(f"{side}."): one for name, one in named.items() if name.startswith(f"{side}.")}
                for side in _SIDES
            ]
            files = [PrefixHash(*bound[name]) for name in ("history", "engine")]
            found = cls(State(bound["t"], *parts), bound["head"], *files)
            whole = type(found.state.t) is int and found.sha256 == bound["sha256"]
        except Exception as error:  # whatever a damaged file makes its readers raise
            raise TornError(str(error)) from None
        if not whole:
            raise TornError("its bytes do not match its checksum")
        return found

    def save(self, folder: Path) -> None:
        """Write the checkpoint beside the one before it, so that at any time one of the two is undamaged."""
        durable_files.stage(folder / STATE, self.to_bytes(), durable_files.PRIVATE)
        if (folder / STATE).exists():
            durable_files.move(folder / STATE, folder / BEFORE)
        durable_files.move(folder / f"{STATE}{durable_files.PARTIAL}", folder / STATE)

    def check(self, log: ChargeLog, *, fallback: bool = False) -> None:
        """Refuse a checkpoint of another charge log, or one after which more than one round was charged.

        If `fallback`, the checkpoint is the one before the last, after which two rounds may have been charged.
        """
        t, heads, wrong = self.state.t, log.heads[1:], ""
        if self.head not in heads:
            wrong = "belongs to another run, or charges that it follows are missing"
        else:
            place = heads.index(self.head)
            later = {charge.round - t for charge in log.charges[place + 1 :]}
            if log.charges[place].round != t:
                wrong = f"is of round {t}, and the charge that it follows is of another round"
            elif not later <= ({1, 2} if fallback else {1}):
                wrong = f"is of round {t}, and later rounds were charged and saved"
        if wrong:
            raise CertificateError("checkpoint", f"the checkpoint {wrong}{RESTORE}")


def latest(folder: Path, log: ChargeLog) -> tuple[Checkpoint | None, str]:
    """Return the last undamaged checkpoint (None if there is none yet), and why a later one was not used.

    A damaged checkpoint is replaced by the one before it, whose next round is run and charged again. An undamaged
    checkpoint that disagrees with the charges is refused: no kill can cause that.
    """
    why = "is missing"
    if (folder / STATE).exists():
        try:
            found = Checkpoint.of_bytes(durable_files.read(folder / STATE))
            found.check(log)
            return found, ""
        except TornError as error:
            why = f"is damaged ({error})"
    if (folder / BEFORE).exists():
        try:
            older = Checkpoint.of_bytes(durable_files.read(folder / BEFORE))
        except TornError as error:
            what = f"checkpoint/{STATE} {why}, and the one before it is damaged too ({error}); fix: start a new run"
            raise CertificateError("checkpoint", what) from None
        older.check(log, fallback=True)
        return older, why
    if why != "is missing" or any(charge.round > 1 for charge in log.charges):
        what = f"checkpoint/{STATE} {why}, and there is none before it; fix: start a new run"
        raise CertificateError("checkpoint", what)
    return None, ""


# ---- writing
@dataclass
class GrowingFile:
    """Append-only file of lines, with its size and hash."""

    file: Path
    size: int
    sha: hashlib._Hash

    def append(self, line: bytes) -> None:
        """Append one line and sync it to disk."""
        durable_files.append(self.file, line + b"\n", self.size)
        self.size += len(line) + 1
        self.sha.update(line + b"\n")

    @property
    def prefix(self) -> PrefixHash:
        return PrefixHash(self.size, self.sha.hexdigest())


class RunWriter:
    """Writer of a run's folder: charges before noise is drawn, receipts, history lines and checkpoints."""

    def __init__(
        self, path: Path, config: Config, header: Header, log: ChargeLog, history: bytes = b"", engine: bytes = b""
    ) -> None:
        self.path, self.config, self.header = path, config, header
        self.log = log  # charges before this process
        self.head, self.charged = log.heads[-1], len(log.charges)
        self.admission: Admission | None = None  # where the run is charged to a ledger
        paid = charge_log.whole_lines(charge_log.read_receipts(path) or b"") if log.charges else b""
        self.charges, self.charged_copy, self.history, self.engine, self.receipts = (
            GrowingFile(path / name, len(data), hashlib.sha256(data))
            for name, data in (
                (CHARGES, b"".join(charge.line() + b"\n" for charge in log.charges)),
                ("checkpoint/charged", "".join(f"{head}\n" for head in log.heads[1:]).encode()),
                (HISTORY, history),
                (ENGINE, engine),
                (RECEIPTS, paid),
            )
        )

    def charge(self, t: int, cohort: Cohort | None) -> None:
        """Write the charge of round t (from 0) to both copies in the folder, and to the ledger if there is one.

        `cohort` is None if the release does not reveal the cohort.
        """
        line = charge_log.next_charge(t, cohort, self.header.config, self.head)
        self.charges.append(line)
        self.charged += 1
        self.head = hashlib.sha256(line).hexdigest()
        self.charged_copy.append(self.head.encode())
        if self.admission is not None:
            self.admission.note(t + 1, self.head)

    def settle(self, refused: tuple[int, ...], paid: tuple[Receipt, ...]) -> None:
        """Write which silos refused the last charged round, and the receipts of the others."""
        if not self.receipts.file.exists():
            durable_files.write(self.receipts.file, b"")
        self.receipts.append(charge_log.receipt_line(RoundReceipts(self.charged, refused, paid)))

    def announce(self, rounds: int, header: dict[str, str | int]) -> None:
        """Write a line with engine and library versions, at each start or resume after `rounds` rounds."""
        self.engine.append(json.dumps({"after_round": rounds, "versions": versions(), **header}).encode())

    def record(self, line: dict[str, Any], noise: Mode) -> None:
        """Write one history line, without diagnostics that must not be released under this noise mode."""
        self.history.append(json.dumps(releasable(line, noise)).encode())

    def save(self, state: State) -> None:
        """Write the checkpoint of a state, with the hashes of charges, history and engine lines so far."""
        Checkpoint(state, self.head, self.history.prefix, self.engine.prefix).save(self.path / "checkpoint")

    def refuse(self, config: Config, error: BudgetError) -> None:
        """Write refused.json: the round that a budget refused, with its cohort if the release reveals cohorts."""
        t, cohort = error.refused
        seen = cohort if charge_log.cohort_is_visible(config.plan) else None
        line = charge_log.next_charge(t, seen, self.header.config, self.head)
        durable_files.write(self.path / charge_log.REFUSED, line + b"\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a run's folder against other processes; the lock ends with this process."""
    file = path / "checkpoint" / "lock"
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, PRIVATE)
    except FileNotFoundError:
        raise CertificateError("checkpoint", f"checkpoint/ is missing in {path}; fix: start a new run") from None
    except OSError as error:
        raise durable_files.trouble(file, error) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found, fix = f"{path}, which another process uses", "wait until that process has ended"
            raise ConfigError(found, "a folder that no process uses", fix) from None
        yield
    finally:
        os.close(lock)


@contextmanager
def created(
    path: Path, config: Config, task: Task, earlier: tuple[EarlierRun, ...] = (), run: str = ""
) -> Iterator[RunWriter]:
    """Create and lock a run's folder, under a temporary name until it is complete.

    An existing folder is never replaced. `run` is the id of the run, by default a random one; `earlier` are the runs
    that trained the initial weights.
    """
    if path.exists() or path.is_symlink():
        found = f"{path}, which exists already"
        raise ConfigError(found, "a new folder", "choose another --out, or add --resume (resume=True)")
    for left in path.parent.glob(f".{path.name}.*{PARTIAL}"):
        _remove_unfinished(left)
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    data, plan = json.dumps(vars(Fingerprint.of(task)), indent=2).encode() + b"\n", codec.to_toml(config).encode()
    hashes = [hashlib.sha256(one).hexdigest() for one in (plan, data)]
    origin = (task.declared_public, software(config), earlier)
    header = Header(run or secrets.token_hex(16), codec.digest(config), hashes[0], hashes[1], *origin)
    text, built = header.to_bytes(), False
    private = {"checkpoint/data.json": data, "checkpoint/charged": b"", HISTORY: b"", ENGINE: b""}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(made)
        os.mkdir(made / "checkpoint", 0o700)
        with locked(made):
            for name, content in {**private, "plan.toml": plan, "run.json": text, CHARGES: b""}.items():
                durable_files.write(made / name, content, PRIVATE if name in private else durable_files.PUBLIC)
            durable_files.sync(made)
            durable_files.move(made, path)
            built = True
            yield RunWriter(path, config, header, ChargeLog((hashlib.sha256(text).hexdigest(),)))
    except (OSError, StorageError) as error:
        if built:
            raise
        shutil.rmtree(made, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error.found
        fix = "nothing was charged; choose another --out"
        raise ConfigError(f"{path}, which cannot be created ({reason})", "a writable folder", fix) from None
    except (Exception, KeyboardInterrupt):
        shutil.rmtree(made, ignore_errors=True)
        raise


def _remove_unfinished(left: Path) -> None:
    """Remove the temporary folder of a killed process; a folder that is being built is locked, and is left."""
    with suppress(OSError):
        lock = os.open(left / "checkpoint" / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        finally:
            os.close(lock)
    if left.is_dir() and not (left / "checkpoint").exists():
        shutil.rmtree(left, ignore_errors=True)
