"""A run on disk, read back: every file is checked against the others before anything is believed.

    run.json          which run this is: a random number, hashes of configuration and private part, which rows are
                      declared public; root of the chain
    plan.toml         the configuration                 charges.jsonl   the chain of charges
    history.jsonl     one line per round (owner only)   engine.jsonl    how it was computed (owner only)
    receipts.jsonl    who refused and what each silo has paid, where clients are elsewhere and the cohort is no secret
    refused.json      where a budget ended the run      certificate.sig optional
    prepared.json     what was released of columns before the first round: new rows are scaled by it as the model's were
    ledger.json       what the data set had spent in all when this run was charged, where a ledger is named
    model.safetensors, certificate.json
    checkpoint/       owner only, never released: the state and the one before it, the keyed fingerprint of the data, a
                      second note of every charge, a lock

A copy without checkpoint/ is what may be released; it certifies, and cannot be continued.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sordino import codec
from sordino.certificate.build import certificate
from sordino.certificate.certificate_file import compare_text, parse
from sordino.certificate.facts import Declared, EarlierRun, Facts, OwnCode
from sordino.codec import durable_files
from sordino.config import Config, load_config
from sordino.errors import BudgetError, CertificateError, ConfigError, UserError
from sordino.outcome import facts_of_charges, last_figures
from sordino.parts.samplers import Cohort
from sordino.runs import admission, charge_log, checkpoint, receipts
from sordino.runs.charge_log import ChargeLog, PrefixHash
from sordino.runs.checkpoint import Checkpoint, Fingerprint, TornError
from sordino.version import __version__

PREPARED = "prepared.json"
MEMORY = "in memory"  # engine.jsonl of a run that was written down after its end
UNLOADED = ("a known kind", "one that was added")  # what a file of somebody's own parts would have brought


_EARLIER = tuple[EarlierRun, ...]


@dataclass(frozen=True)
class Header:
    """run.json: written once, before the folder has its name; the chain of charges begins at its hash."""

    run: str
    config: str
    plan: str  # of the bytes of plan.toml
    private: str
    public: tuple[Declared, ...] = ()  # the rows of the data that are declared public, and by whom
    sordino: str = __version__
    earlier: tuple[EarlierRun, ...] = ()  # runs that the first weights come from

    def to_bytes(self) -> bytes:
        hashes = {"config_sha256": self.config, "plan_toml_sha256": self.plan, "private_sha256": self.private}
        said = {"declared_public": [one.as_dict() for one in self.public], "sordino": self.sordino}
        before = {"earlier_runs": codec.dump(self.earlier)} if self.earlier else {}
        return json.dumps({"format": 2, "run": self.run, **hashes, **said, **before}, indent=2).encode() + b"\n"

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
        raise CertificateError("run.json", "run.json is not a header as this program writes one")

    @property
    def root(self) -> str:
        return charge_log.digest(self.to_bytes())


@dataclass(frozen=True)
class Contents:
    """Header, configuration and charges of a folder: they agree."""

    header: Header
    config: Config
    log: ChargeLog

    @property
    def cohorts(self) -> list[Cohort]:
        return self.log.cohorts(self.config.plan)


@dataclass(frozen=True)
class RunFolder:
    """One run's files."""

    path: Path
    known: Config | None = None  # what runs here now: plan.toml is compared with it, and not read a second time

    @classmethod
    def open(cls, path: Path, known: Config | None = None) -> RunFolder:
        """A folder that a run has made."""
        there = [(path / name).is_file() for name in ("plan.toml", "run.json")]
        if not any(there):
            whole = (path / "sweep.json").is_file()
            fix = f"give one of {path}/cells" if whole else "give the --out of 'sordino run'"
            raise ConfigError(f"no plan.toml in {path}", "the folder of a run", fix)
        if not all(there):
            gone = "run.json" if there[0] else "plan.toml"
            raise CertificateError(gone, f"{gone} is missing in {path}: it was removed, or an earlier version ran here")
        return cls(path, known)

    @property
    def private(self) -> Path:
        return self.path / "checkpoint"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time runs in this folder; the lock dies with its process."""
        try:
            lock = os.open(self.private / "lock", os.O_RDWR | os.O_CREAT, durable_files.PRIVATE)
        except FileNotFoundError:
            raise CertificateError("checkpoint", f"checkpoint/ is missing in {self.path}: start anew") from None
        except OSError as error:
            raise durable_files.trouble(self.private / "lock", error) from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                found = f"{self.path}, in which a run is going on"
                raise ConfigError(found, "a folder at rest", "wait for it") from None
            yield
        finally:
            os.close(lock)

    # ---- what it holds ----------------------------------------------------------------------------------------------

    def _read(self, name: str) -> bytes:
        return durable_files.read(self.path / name)

    def config(self) -> Config:
        """The configuration that the run was started with; an edited one is refused."""
        return self._config(Header.of_bytes(self._read("run.json")))

    def _config(self, header: Header) -> Config:
        text = self._read("plan.toml")
        if charge_log.digest(text) != header.plan:
            raise CertificateError(
                "plan.toml", "plan.toml is not what the run was started with: it was changed after run.json was written"
            )
        known = self.known
        if known is not None and codec.digest(known) == header.config and text == codec.to_toml(known).encode():
            return known
        try:
            found = load_config(self.path / "plan.toml")
        except UserError as error:
            if error.needed in UNLOADED:  # the bytes are those of the run, so it is a part of somebody's own
                fix = "install its package, or name its file: --with my_parts.py"
                raise ConfigError(f"{error.found}, which is not loaded", "the part that ran", fix) from None
            raise CertificateError("plan.toml", f"plan.toml is not what ran: {error}") from None
        if codec.digest(found) != header.config:
            raise CertificateError("plan.toml", "plan.toml does not have the hash that run.json gives it")
        return found

    def contents(self) -> Contents:
        """Header, configuration and charges, checked against each other."""
        header = Header.of_bytes(self._read("run.json"))
        config = self._config(header)
        log = charge_log.parse(self._read(charge_log.NAME), header.root, header.config, config.plan)
        return Contents(header, config, log)

    def fingerprint(self, header: Header) -> Fingerprint:
        """The data's, in the private part."""
        data = durable_files.read(self.private / "data.json")
        if charge_log.digest(data) != header.private:
            raise CertificateError("checkpoint/data.json", "checkpoint/data.json is not what the run was started with")
        return Fingerprint.of_bytes(data)

    def history(self) -> list[dict[str, Any]]:
        """One entry per round."""
        return charge_log.read_lines(self._read("history.jsonl"), "history.jsonl")

    def facts(self, held: Contents | None = None) -> Facts:
        """What a certificate needs beside the plan."""
        held = held or self.contents()
        config, header, model = held.config, held.header, self.path / "model.safetensors"
        digest = hashlib.sha256(model.read_bytes()).hexdigest() if model.is_file() else ""
        known = Facts(config.delta, config.privacy.noise, 0, None, digest, header.config)
        known = replace(known, **config.facts, public=header.public, earlier=header.earlier)
        known = replace(known, stopped=self.refusal(held) is not None, prepared=held.log.prepared)
        settled = receipts.parse(receipts.read(self.path) or b"", config.plan, len(held.log.charges))
        ran = charge_log.read_lines(self._read("engine.jsonl"), "engine.jsonl")  # a line each time the run was started
        versions: list[dict[str, str]] = []
        for line in ran:
            versions += [line["versions"]] * ("versions" in line and line["versions"] not in versions)
        known = replace(known, environment=tuple(versions), utility=last_figures(self.history()))
        after = any(line.get("kept") == MEMORY for line in ran)
        known = replace(known, early=self.ended(held), in_memory=after, own_code=OwnCode.of_headers(ran))
        found = facts_of_charges(config.plan, held.log.rounds, held.cohorts, known, settled)
        return replace(found, ledger=admission.read_standing(self.path, config, found))

    def refusal(self, held: Contents) -> BudgetError | None:
        """Why the run is over before its last round, if a budget ended it."""
        return receipts.read_refusal(self.path, held.log, held.config, held.header.config)

    def ended(self, held: Contents) -> str:
        """What stopped the run early, in words, by its own rule and the figures in its history; empty: nothing did."""
        stop, rounds = held.config.run.stop, held.config.plan.rounds
        last = None if stop is None else stop.ends(self.history())
        return "" if stop is None or last is None or last == rounds else stop.words

    # ---- the certificate --------------------------------------------------------------------------------------------

    def certificate(self, last: str | None = None) -> dict[str, Any]:
        """Computed from everything in this folder; `last` is the sha256 of the checkpoint, where that is not here."""
        held = self.contents()
        last = self._at_rest(held) if last is None else last
        bound: dict[str, Any] = {
            "id": held.header.run,
            "header_sha256": held.header.root,
            "charges_sha256": held.log.head,
            "history_sha256": PrefixHash.of(self._read("history.jsonl")).sha256,
            "engine_sha256": PrefixHash.of(self._read("engine.jsonl")).sha256,
            "checkpoint_sha256": last,
        }
        if held.config.plan.prepare:
            bound["prepared_sha256"] = PrefixHash.of(self._read(PREPARED)).sha256
        paid = receipts.read(self.path)
        if paid is not None:
            if receipts.whole(paid) != paid:
                raise CertificateError(receipts.NAME, f"{receipts.NAME} ends in half a line")
            bound["receipts_sha256"] = PrefixHash.of(paid).sha256
        made = {**certificate(held.config.plan, self.facts(held)), "run": bound}
        return dict(json.loads(json.dumps(made)))

    def _at_rest(self, held: Contents) -> str:
        """sha256 of the last checkpoint, with which charges, their second note, history and engine agree."""
        if held.log.torn:
            raise CertificateError(charge_log.NAME, f"{charge_log.NAME} ends in half a line")
        self.fingerprint(held.header)
        charge_log.check_second_copy(durable_files.read(self.private / "charged"), held.log, at_rest=True)
        last = self._last(held)
        for name, mark in (("history.jsonl", last and last.history), ("engine.jsonl", last and last.engine)):
            if PrefixHash.of(self._read(name)) != (mark or PrefixHash()):
                raise CertificateError(name, f"{name} is not what the checkpoint was written after")
        stop, rounds = held.config.run.stop, held.config.plan.rounds
        end = rounds if stop is None else stop.ends(self.history()) or rounds
        if self.refusal(held) is None and (last is None or last.state.t != end):
            raise CertificateError("checkpoint", "the checkpoint is not of the last round, and no budget ended the run")
        return "" if last is None else last.sha256

    def _last(self, held: Contents) -> Checkpoint | None:
        """The checkpoint itself; at rest there is no falling back."""
        file = self.private / checkpoint.STATE
        if not file.exists() and all(charge.round == 1 for charge in held.log.charges):
            return None  # a budget that allowed no round
        before = self.private / checkpoint.BEFORE
        try:
            found = Checkpoint.of_bytes(durable_files.read(file))
            found.check(held.log)
            if before.exists():
                Checkpoint.of_bytes(durable_files.read(before)).check(held.log, fallback=True)
        except TornError as error:
            raise CertificateError("checkpoint", f"a checkpoint is damaged ({error})") from None
        return found

    def certify(self) -> dict[str, Any]:
        """The stored certificate, if it is what this folder gives; else `CertificateError` names the field."""
        if not (self.path / "certificate.json").is_file():
            found = f"no certificate.json in {self.path}"
            raise ConfigError(found, "a finished run", "finish it: sordino run --resume")
        text = self._read("certificate.json")
        try:
            stored = parse(text)
            last = None if self.private.exists() else str(stored["run"]["checkpoint_sha256"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CertificateError("certificate.json", f"certificate.json is not a certificate ({error})") from None
        computed = self.certificate(last)
        compare_text(stored, text.decode(), computed)
        return computed
