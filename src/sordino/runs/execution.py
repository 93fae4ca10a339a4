"""Execution of a configuration in a new or resumed run folder. Called by `sordino run` and `train`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from sordino import codec
from sordino.certificate import certificate_file
from sordino.certificate.facts import EarlierRun
from sordino.codec import durable_files
from sordino.config import Config
from sordino.data import lineage
from sordino.data.clients import unwrapped_model
from sordino.data.files import CsvFormat
from sordino.engines.base import Engine
from sordino.engines.checks import column_scales, released_histograms, scaled
from sordino.engines.inprocess import InProcess
from sordino.errors import BudgetError, CertificateError, ConfigError, DataError, StorageError
from sordino.loop import check
from sordino.models import InMemoryModel
from sordino.outcome import final_model, model_bytes
from sordino.plan import PASS_KEY, State
from sordino.runs import admission, charge_log
from sordino.runs.charge_log import CHARGES, RECEIPTS, PrefixHash
from sordino.runs.folder import PREPARED, Contents, RunFolder
from sordino.runs.rounds import OnRound, RunStart, check_run, run_rounds, single_class_note
from sordino.runs.writer import BEFORE, ENGINE, HISTORY, STATE, RunWriter, created, latest, locked, software
from sordino.task import Task
from sordino.version import versions

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@codec.hides_values
@dataclass(frozen=True)
class Executed:
    """Finished run: its folder, history, certificate, notes for the user, and the model."""

    path: Path
    history: list[dict[str, Any]]
    certificate: dict[str, Any]
    notes: tuple[str, ...] = ()
    model: nn.Module | None = None


def execute(
    config: Config, path: Path, *, resume: bool = False, engine: Engine | None = None, on_round: OnRound | None = None,
    sign: Path | None = None, task: Task | None = None, tried: bool = False,
) -> Executed:  # fmt: skip
    """Run a configuration and write the run folder `path`; invalid input is refused before anything is written.

    In a distributed run, ranks other than 0 serve rank 0 and never return. `task` replaces the task of the
    configuration; a server passes one without records. `tried` is set by a private tuning, which was charged for this
    run as one of its trials.
    """
    if config.privacy.selected is not None and not tried:
        config.check_alone()
    engine = engine or InProcess()
    notes = () if task is not None or isinstance(config.task.model, InMemoryModel) else config.look()
    task = task or config.build()
    if not engine.leads:
        check(config.plan, task, engine)
        engine.prepare(config.plan, task, config.streams)
    check_run(config, task, engine)
    key = None if sign is None else certificate_file.private_key(sign)
    with ExitStack() as held:
        if resume and path.exists():
            writer, start = held.enter_context(resumed(path, config, task))
        else:
            if config.privacy.ledger is not None:
                admission.check_affordable(config)
            writer = held.enter_context(created(path, config, task, earlier_runs(task)))
            start = RunStart(writer)
        try:
            if config.privacy.ledger is not None:
                prepares = start.state is None or not released_histograms(start.state)
                t = 0 if start.state is None else start.state.t
                admitted = admission.admit(config, writer.header.run, writer.log, t, prepares=prepares)
                writer.admission = held.enter_context(admitted)
            budget = config.budget if config.privacy.limited else None
            if budget is not None:  # earlier rounds of a resumed run count against the clients' budgets
                budget = charge_log.filter_after_charges(path, config.plan, budget, writer.log, engine.deployed)
                start = replace(start, budget=budget)
            if engine.deployed:
                engine = engine.for_run(writer.header.run, charge_log.last_counts(path, config.plan, writer.log))
            state, refused = run_rounds(config, task, start, engine, on_round)
            return _finish(config, task, writer, state, refused, (*notes, *start.notes), key)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(word in str(error) for word in _NO_MEMORY):
                raise
            found = f"no memory left ({str(error).splitlines()[0] if str(error) else 'MemoryError'})"
            fix = f"free memory, or use a smaller model or cohort, and add --resume: {durable_files.SAFE}"
            raise StorageError(found, "memory for the clients of one batch", fix) from None


def _finish(
    config: Config, task: Task, writer: RunWriter, state: State, refused: BudgetError | None, notes: tuple[str, ...],
    key: Ed25519PrivateKey | None,
) -> Executed:  # fmt: skip
    folder, before = RunFolder(writer.path, config), writer.header.earlier
    model = final_model(config.plan, task, state)
    attach_lineage(model, config, before)
    if config.plan.prepare:
        write_preparations(folder.path, task, state)
    if task.encoding is not None and not isinstance(config.task.model, InMemoryModel):
        write_bundle(folder.path, config, task, state)
    made = folder.finish(model_bytes(model), None if key is None else partial(certificate_file.sign, key=key))
    register_lineage(model, task, (*before, EarlierRun.of_certificate(made, writer.header.run, lineage.IN_PROCESS)))
    if refused is not None:
        raise BudgetError(f"stopped after round {state.t}: {refused}; model and certificate are in {folder.path}")
    if writer.admission is not None and writer.admission.elsewhere:
        count = writer.admission.elsewhere
        notes += (f"{count} releases of this run came from another copy of its folder; the ledger charged both",)
    history = folder.history()
    return Executed(folder.path, history, made, (*notes, *single_class_note(history)), model)


def earlier_runs(task: Task) -> lineage.Runs:
    """Return the private runs that trained a task's initial weights, as its module or weights file records them."""
    clients, others = task.clients, () if task.init is None else task.init.earlier
    here = () if clients.here is not None else (clients.records.x, clients.records.y)
    return lineage.runs_of_model(task.model, here, others)


def attach_lineage(model: nn.Module, config: Config, before: lineage.Runs) -> None:
    """Attach the earlier runs and this run's planned cost to a model, so that they are saved with it."""
    plan = config.plan
    cost = replace(plan.forecast, unit="user") if "user_rows" in config.facts else plan.forecast
    planned = EarlierRun.of_cost(cost, config.delta, f"plan {plan.hash[:16]}", lineage.IN_FILE)
    lineage.attach_lineage(model, (*before, planned), lineage.lineage_note(planned, before))


def register_lineage(model: nn.Module, task: Task, runs: lineage.Runs) -> None:
    """Attach finished runs to a model, and register its weights and data, which this process then recognises."""
    clients = task.clients
    records = () if clients.here is not None else (clients.records.x, clients.records.y)
    lineage.attach_lineage(model, runs, lineage.file_metadata(model)[lineage.FILE_KEY])
    lineage.register_run(model, lineage.tensor_hashes(unwrapped_model(task.model)), runs, records)


def write_preparations(path: Path, task: Task, state: State) -> None:
    """Write prepared.json, the noised histograms released before round 1 that scale the columns."""
    durable_files.write(path / PREPARED, json.dumps(column_scales(task, state), indent=1).encode() + b"\n")


def write_bundle(path: Path, config: Config, task: Task, state: State) -> None:
    """Write bundle.json, with which `sordino predict` scores raw rows."""
    from sordino.runs.bundle import Bundle, with_released_ranges

    assert task.encoding is not None
    encoding = with_released_ranges(task.encoding, column_scales(task, state)) if task.waiting else task.encoding
    written = codec.read(CsvFormat, config.task.options.get("format", {}), "task.options.format")
    Bundle(encoding=encoding, model=config.task.model, seed=config.run.seed, csv=written).write(path)


def with_released_columns(task: Task, folder: Path) -> Task:
    """Return the task with its columns scaled by the histograms in a run's prepared.json."""
    if not task.waiting:
        return task
    released = json.loads(durable_files.read(folder / PREPARED))
    return scaled(task, {name: np.asarray(one["noised_histogram"]) for name, one in released.items()})


# ---- continuing a run
@contextmanager
def resumed(path: Path, config: Config, task: Task) -> Iterator[tuple[RunWriter, RunStart]]:
    """Lock a run's folder, and yield its writer and its state at the last checkpoint.

    All files must agree. Only damage by a kill, an incomplete line or checkpoint, is repaired.
    """
    folder = RunFolder.open(path, config)
    with locked(path):
        held = folder.contents()
        _check_same(folder, held, config, task)
        if (path / "certificate.json").exists():
            folder.certify()
        charge_log.check_second_copy(durable_files.read(folder.private / "charged"), held.log, at_rest=False)
        last, why = latest(folder.private, held.log)
        check_noise(config, held.log.rounds, 0 if last is None else last.state.t)
        bound = (PrefixHash(), PrefixHash()) if last is None else (last.history, last.engine)
        contents = []
        for name, prefix in zip((HISTORY, ENGINE), bound, strict=True):  # later lines will be written again
            contents.append(durable_files.read(path / name)[: prefix.size])
            if PrefixHash.of(contents[-1]) != prefix:
                raise CertificateError(name, f"{name} does not have the hash in the checkpoint{charge_log.RESTORE}")
        history, engine = contents
        notes = _other_versions(engine)
        if last is not None and why:
            back = f"the run continues from the checkpoint before it, after round {last.state.t}"
            notes.insert(0, f"checkpoint/{STATE} {why}; {back}, and repeated rounds are charged again")
        _repair(folder, held, history, engine, why)
        writer = RunWriter(path, config, held.header, held.log, history, engine)
        state, lines = None if last is None else last.state, tuple(folder.history())
        redrawn = not config.plan.clients.keeps_bins  # kept bins stay: a repeated round has the same clients
        if redrawn and state is not None and state.t in held.log.rounds and PASS_KEY in state.secret_state:
            # a repeated round is charged as another pass, so the rest of this pass is drawn anew
            state = replace(state, secret_state={**state.secret_state, PASS_KEY: torch.zeros(0, dtype=torch.int64)})
        yield writer, RunStart(writer, state, lines, refused=folder.refusal(held), notes=tuple(notes))


def _check_same(folder: RunFolder, held: Contents, config: Config, task: Task) -> None:
    path, now, header = folder.path, software(config), held.header
    before, given = held.config.task.model, config.task.model
    differ = before.differs(given) if isinstance(before, InMemoryModel) and isinstance(given, InMemoryModel) else []
    if differ:  # a task made in Python must have the same module, shapes and loss; its data are compared below
        found = f"another task than {path} was started with: {', '.join(differ)}"
        raise DataError(found, "the same module, data and loss for a whole run", "restore them, or start a new run")
    if codec.digest(config) != header.config:
        found = f"another configuration than {path} was started with"
        fix = f"resume with {path / 'plan.toml'}, or start a new run in another --out"
        raise ConfigError(found, "the same configuration for a whole run", fix)
    if header.sordino != now:
        found = f"sordino {now}, but {path} was started with sordino {header.sordino}"
        needed = "one version for a whole run, since another may draw other noise or account differently"
        raise ConfigError(found, needed, f"install sordino=={header.sordino}, or start a new run in another --out")
    changed = folder.fingerprint(header).changed(task)
    if not changed and task.declared_public != header.public:
        changed = ["the rows that are declared public, or the frozen weights"]
    if changed:
        found = f"other data than {path} was started with: {', '.join(changed)}"
        fix = "restore the data, or start a new run in another --out"
        raise DataError(found, "the same data for a whole run", fix)


def check_noise(config: Config, charged: Sequence[int], t: int) -> None:
    """Refuse to resume a run from round t if a kill has lost the correlated noise of a charged round.

    Secure noise cannot be drawn again, and the accounting of correlated noise does not cover a second, different draw.
    """
    lost = next((round for round in charged if round >= t), None)
    if lost is not None and config.privacy.noise == "secure" and config.plan.release.remembers:
        found = f"round {lost + 1}, whose noise was lost by a kill and is needed by {config.plan.release.kind!r}"
        needed = "a checkpoint with the noise of every charged round"
        raise ConfigError(found, needed, "start a new run in another --out; charged rounds stay charged")


def _other_versions(engine: bytes) -> list[str]:
    lines = charge_log.read_lines(engine, ENGINE)
    before, now = (lines[-1].get("versions") if lines else None), versions()
    if before is None:
        return []
    if not isinstance(before, dict):
        raise CertificateError(ENGINE, f"{ENGINE} has a line without versions{charge_log.RESTORE}")
    changed = [f"{name} from {before.get(name)} to {now[name]}" for name in now if before.get(name) != now[name]]
    return [f"library versions changed, as the certificate will state: {', '.join(changed)}"] if changed else []


def _repair(folder: RunFolder, held: Contents, history: bytes, engine: bytes, why: str) -> None:
    """Remove incomplete writes of a killed run; it may be killed itself and repeated."""
    path, private = folder.path, folder.private
    paid = charge_log.whole_lines(charge_log.read_receipts(path) or b"")
    hashes = "".join(f"{head}\n" for head in held.log.heads[1:]).encode()
    if durable_files.read(private / "charged") != hashes:
        durable_files.write(private / "charged", hashes, durable_files.PRIVATE)
    sizes = {CHARGES: held.log.size, HISTORY: len(history), ENGINE: len(engine), RECEIPTS: len(paid)}
    for name, size in sizes.items():
        if (path / name).exists():
            durable_files.cut(path / name, size)
    if why:
        durable_files.move(private / BEFORE, private / STATE)
    for left in [*path.glob(f"*{durable_files.PARTIAL}"), *private.glob(f"*{durable_files.PARTIAL}")]:
        durable_files.remove(left)
