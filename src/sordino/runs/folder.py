"""Folder of a run, read for certificates, reports and `--resume`: all files are checked against each other.

    run.json          header: random id, hashes of configuration and private part, rows declared public; root of the
                      hash chain of charges
    plan.toml         the configuration                     charges.jsonl    the hash chain of charges
    history.jsonl     one line per round (owner only)       engine.jsonl     engine and versions (owner only)
    receipts.jsonl    refusals and charges that silos report, if the cohort is not secret
    refused.json      the round that a budget refused       certificate.sig  optional signature
    prepared.json     noised histograms of columns, released before round 1, by which new rows are scaled
    bundle.json       encoding of the columns, and the architecture, of a run on a table, for `sordino predict`
    ledger.json       statement of the data set's ledger after this run, if the run has a ledger
    model.safetensors, certificate.json
    checkpoint/       owner only, never released: the last two states, the keyed fingerprint of the data, a second copy
                      of every charge's hash, a lock

A copy without checkpoint/ may be released; it can be certified but not resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch

from sordino import codec
from sordino.certificate.build import certificate
from sordino.certificate.certificate_file import compare_text, parse, text_of
from sordino.certificate.facts import Facts, OwnCode
from sordino.codec import durable_files
from sordino.config import Config, load_config
from sordino.dpsgd import account
from sordino.errors import BudgetError, CertificateError, ConfigError, UserError
from sordino.outcome import facts_of_charges, last_figures
from sordino.parts.samplers import Cohort
from sordino.report.comparison import Last, Subject
from sordino.runs import admission, charge_log
from sordino.runs.charge_log import CHARGES, RECEIPTS, RESTORE, ChargeLog, PrefixHash
from sordino.runs.writer import BEFORE, ENGINE, HISTORY, STATE, Checkpoint, Fingerprint, Header, TornError

PREPARED, AUDIT = "prepared.json", "audit.json"
MEMORY = "in memory"  # in engine.jsonl: the run was saved to a folder after its end
UNLOADED = ("a known kind", "a registered function")  # `needed` of an error where a user's own part is not loaded


@dataclass(frozen=True)
class Contents:
    """Header, configuration and charges of a run's folder, checked against each other."""

    header: Header
    config: Config
    log: ChargeLog

    @property
    def cohorts(self) -> list[Cohort]:
        return self.log.cohorts(self.config.plan)


@dataclass(frozen=True)
class RunFolder:
    """Folder of one run, with the methods that read, check and certify its files."""

    path: Path
    known: Config | None = None  # if given, plan.toml is compared with it and not parsed again

    @classmethod
    def open(cls, path: Path, known: Config | None = None) -> RunFolder:
        """Return the folder of a run; refuse a path without plan.toml and run.json."""
        there = [(path / name).is_file() for name in ("plan.toml", "run.json")]
        if not any(there):
            whole = (path / "sweep.json").is_file()
            fix = f"pass one of the folders in {path}/cells" if whole else "pass the --out folder of 'sordino run'"
            raise ConfigError(f"no plan.toml in {path}", "the folder of a run", fix)
        if not all(there):
            gone = "run.json" if there[0] else "plan.toml"
            what = f"{gone} is missing in {path}: it was removed, or an earlier version of sordino wrote the run"
            raise CertificateError(gone, what + RESTORE)
        return cls(path, known)

    @property
    def private(self) -> Path:
        return self.path / "checkpoint"

    def _read(self, name: str) -> bytes:
        return durable_files.read(self.path / name)

    # ---- contents
    def config(self, header: Header | None = None) -> Config:
        """Return the configuration of the run; refuse a plan.toml that was changed."""
        header, text = header or Header.of_bytes(self._read("run.json")), self._read("plan.toml")
        if hashlib.sha256(text).hexdigest() != header.plan:
            raise CertificateError("plan.toml", f"plan.toml was changed after the run was started{RESTORE}")
        known = self.known
        if known is not None and codec.digest(known) == header.config and text == codec.to_toml(known).encode():
            return known
        try:
            found = load_config(self.path / "plan.toml")
        except UserError as error:
            if error.needed in UNLOADED:  # plan.toml has the right hash, so the part is a user's own
                fix = "install the part's package, or pass its file: --with my_parts.py"
                raise ConfigError(f"{error.found}, which is not loaded", "the part that ran", fix) from None
            raise CertificateError("plan.toml", f"plan.toml cannot be read: {error}{RESTORE}") from None
        if codec.digest(found) != header.config:
            raise CertificateError("plan.toml", f"plan.toml does not have the hash in run.json{RESTORE}")
        return found

    def contents(self) -> Contents:
        data = self._read("run.json")
        header = Header.of_bytes(data)
        config, root = self.config(header), hashlib.sha256(data).hexdigest()
        return Contents(header, config, charge_log.parse_charges(self._read(CHARGES), root, header.config, config.plan))

    def fingerprint(self, header: Header) -> Fingerprint:
        """Return the keyed fingerprint of the run's data, from checkpoint/data.json."""
        data = durable_files.read(self.private / "data.json")
        if hashlib.sha256(data).hexdigest() != header.private:
            name = "checkpoint/data.json"
            raise CertificateError(name, f"{name} does not have the hash in run.json{RESTORE}")
        return Fingerprint.of_bytes(data)

    def history(self) -> list[dict[str, Any]]:
        return charge_log.read_lines(self._read(HISTORY), HISTORY)

    def refusal(self, held: Contents) -> BudgetError | None:
        """Return the budget error that ended the run before its last round; None if no budget ended it."""
        return charge_log.read_refusal(self.path, held.log, held.config, held.header.config)

    def facts(self, held: Contents | None = None) -> Facts:
        """Return the facts for the certificate beside the plan: charges, metrics, versions, ledger statement."""
        held = held or self.contents()
        config, header, model, history = held.config, held.header, self.path / "model.safetensors", self.history()
        digest = hashlib.sha256(model.read_bytes()).hexdigest() if model.is_file() else ""
        settled = charge_log.parse_receipts(self.path, config.plan, len(held.log.charges))
        ran = charge_log.read_lines(self._read(ENGINE), ENGINE)  # a line each time the run was started
        versions: list[dict[str, str]] = []
        for line in ran:
            versions += [line["versions"]] * ("versions" in line and line["versions"] not in versions)
        stop = config.run.stop
        last = None if stop is None else stop.ends(history)
        known = replace(
            Facts(config.delta, config.privacy.noise, 0, None, digest, header.config),
            **config.facts,
            public=header.public,
            earlier=header.earlier,
            stopped=self.refusal(held) is not None,
            prepared=held.log.prepared,
            environment=tuple(versions),
            utility=last_figures(history),
            early="" if stop is None or last in (None, config.plan.rounds) else stop.words,
            in_memory=any(line.get("kept") == MEMORY for line in ran),
            own_code=OwnCode.of_headers(ran),
            sum_length=max((int(line.get("sum_length", 0)) for line in ran), default=0),
        )
        found = facts_of_charges(config.plan, held.log.rounds, held.cohorts, known, settled)
        return replace(found, ledger=admission.read_statement(self.path, config, found))

    # ---- the certificate
    def finish(self, model: bytes, sign: Callable[[Path], None] | None = None) -> dict[str, Any]:
        """Write model.safetensors, ledger.json and certificate.json of a finished run; return the certificate."""
        durable_files.write(self.path / "model.safetensors", model)
        held = self.contents()
        if held.config.privacy.ledger is not None and not (self.path / admission.NAME).exists():
            spent = admission.final_statement(held.config, held.header.run, self.facts(held))
            durable_files.write(self.path / admission.NAME, (json.dumps(codec.dump(spent), indent=1) + "\n").encode())
        made = self.certificate()
        durable_files.write(self.path / "certificate.json", text_of(made).encode())
        if sign is not None:
            sign(self.path)
        return made

    def certificate(self, last: str | None = None) -> dict[str, Any]:
        """Compute the certificate from all files; `last` is the checkpoint's SHA-256 if checkpoint/ is missing."""
        held = self.contents()
        last = self._check_at_rest(held) if last is None else last
        bound: dict[str, Any] = {
            "id": held.header.run,
            "header_sha256": held.log.heads[0],
            "charges_sha256": held.log.heads[-1],
            "history_sha256": PrefixHash.of(self._read(HISTORY)).sha256,
            "engine_sha256": PrefixHash.of(self._read(ENGINE)).sha256,
            "checkpoint_sha256": last,
        }
        if held.config.plan.prepare:
            bound["prepared_sha256"] = PrefixHash.of(self._read(PREPARED)).sha256
        paid = charge_log.read_receipts(self.path)
        if paid is not None:
            if charge_log.whole_lines(paid) != paid:
                raise CertificateError(RECEIPTS, f"{RECEIPTS} ends in an incomplete line{RESTORE}")
            bound["receipts_sha256"] = PrefixHash.of(paid).sha256
        made = {**certificate(held.config.plan, self.facts(held)), "run": bound}
        return dict(json.loads(json.dumps(made)))

    def _check_at_rest(self, held: Contents) -> str:
        """Return the SHA-256 of the last checkpoint; refuse a folder whose files do not agree with that checkpoint.

        A damaged checkpoint is refused: only a resumed run falls back to the checkpoint before the last.
        """
        if held.log.torn:
            raise CertificateError(CHARGES, f"{CHARGES} ends in an incomplete line{RESTORE}")
        self.fingerprint(held.header)
        charge_log.check_second_copy(durable_files.read(self.private / "charged"), held.log, at_rest=True)
        file, before, last = self.private / STATE, self.private / BEFORE, None
        if file.exists() or any(charge.round != 1 for charge in held.log.charges):  # else a budget allowed no round
            try:
                last = Checkpoint.of_bytes(durable_files.read(file))
                last.check(held.log)
                if before.exists():
                    Checkpoint.of_bytes(durable_files.read(before)).check(held.log, fallback=True)
            except TornError as error:
                raise CertificateError("checkpoint", f"a checkpoint is damaged ({error}){RESTORE}") from None
        for name, bound in ((HISTORY, last and last.history), (ENGINE, last and last.engine)):
            if PrefixHash.of(self._read(name)) != (bound or PrefixHash()):
                raise CertificateError(name, f"{name} does not have the hash in the checkpoint{RESTORE}")
        stop, rounds = held.config.run.stop, held.config.plan.rounds
        end = rounds if stop is None else stop.ends(self.history()) or rounds
        if self.refusal(held) is None and (last is None or last.state.t != end):
            what = "the checkpoint is not of the last round, and no budget ended the run"
            raise CertificateError("checkpoint", f"{what}; fix: finish the run with sordino run --resume")
        return "" if last is None else last.sha256

    def certify(self) -> dict[str, Any]:
        """Return the certificate computed from this folder; raise `CertificateError` if the stored one differs."""
        if not (self.path / "certificate.json").is_file():
            found = f"no certificate.json in {self.path}"
            raise ConfigError(found, "the folder of a finished run", "finish the run: sordino run --resume")
        text = self._read("certificate.json")
        try:
            stored = parse(text)
            last = None if self.private.exists() else str(stored["run"]["checkpoint_sha256"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"certificate.json is not a certificate ({error})"
            raise CertificateError("certificate.json", what + RESTORE) from None
        computed = self.certificate(last)
        compare_text(stored, text.decode(), computed)
        return computed


# ---- runs for reports
def subjects(targets: list[Path]) -> list[Subject]:
    """Check the certificates of runs for a report, and name each run by the shortest unique end of its path."""
    if not targets:
        raise ConfigError("no run", "the folder of at least one run", "pass the --out folder of 'sordino run'")
    paths = [target.resolve().parts for target in targets]
    twice = next((parts for parts in paths if paths.count(parts) > 1), None)
    if twice is not None:
        raise ConfigError(f"the run {'/'.join(twice)} twice", "each run once", "drop the repeated path")
    words = next(n for n in range(1, max(map(len, paths)) + 1) if len({parts[-n:] for parts in paths}) == len(paths))
    return [subject(target, "/".join(parts[-words:])) for target, parts in zip(targets, paths, strict=True)]


def subject(target: Path, name: str) -> Subject:
    """Check the certificate of a run's folder, or of a DP-SGD loop's file, and return the run's data for a report."""
    if not target.exists():
        needed = "the folder of a run, or the certificate file of a DP-SGD loop"
        raise ConfigError(f"{target}, which does not exist", needed, "correct the path")
    if target.is_file():
        loop = account.certify(target)
        return Subject(name, loop.certificate, loop.plan, loop.facts)
    folder = RunFolder.open(target)
    certificate, held = folder.certify(), folder.contents()
    try:
        before, after = (Checkpoint.of_bytes((folder.private / file).read_bytes()).state for file in (BEFORE, STATE))
        model = safetensors.torch.load((target / "model.safetensors").read_bytes())
        last = Last(before, after, model) if after.t == before.t + 1 else None
    except (OSError, TornError):  # a released copy has no checkpoint
        last = None
    known: dict[str, Any] = {"history": folder.history(), "rounds": held.log.rounds, "cohorts": held.cohorts}
    known |= {"settings": codec.dump(held.config), "audit": audits(target, held.header.run), "last": last}
    return Subject(name, certificate, held.config.plan, folder.facts(held), **known)


def audits(folder: Path, run: str) -> dict[str, Any]:
    """Return the results of `sordino audit` for this run, by audit layer, from audit.json."""
    file = folder / AUDIT
    if not file.exists():
        return {}
    try:
        found = json.loads(durable_files.read(file))
        layers = found["layers"] if found["run"] == run else {}
        if isinstance(layers, dict) and all(isinstance(one, dict) for one in layers.values()):
            return layers
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(f"{file}, which is damaged", "a file of 'sordino audit'", "remove the file and audit again")


def keep_audit(folder: Path, layer: str, found: dict[str, Any]) -> None:
    """Write the result of one audit layer into audit.json of a run's folder; no other file is changed."""
    run = RunFolder.open(folder).contents().header.run
    text = json.dumps({"run": run, "layers": {**audits(folder, run), layer: found}}, indent=2) + "\n"
    durable_files.write(folder / AUDIT, text.encode(), durable_files.PRIVATE)
