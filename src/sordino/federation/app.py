"""Server process of a federation, `sordino federation run DIR`: runs the plan's loop over the local SuperLink."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sordino.config import Config, FederationSpec, load_config
from sordino.data.files import PARQUET, CsvFormat
from sordino.data.lineage import load_initial
from sordino.data.tables import encoded_rows
from sordino.engines.remote import Remote
from sordino.errors import ConfigError, EngineError, SordinoError
from sordino.federation.delivery import deliver
from sordino.federation.flower_api import FlowerTransport, Link
from sordino.federation.keys import check_pinned, registered_form, signer_of
from sordino.federation.secagg import SecAggEngine
from sordino.federation.status import NAME, StatusBoard, rotating_log, stamp
from sordino.runs.execution import Executed, execute
from sordino.task import PublicSource, Task


@dataclass(frozen=True)
class Server:
    """Server of a federation: its `folder` with fed.toml, ca.crt and link.secret, and the SuperLink's local address."""

    folder: Path
    link: str = ""

    def run(
        self, out: Path, *, resume: bool = False, show: Callable[[str], None] = lambda line: None, status: str = ""
    ) -> Executed:
        """Run the plan of fed.toml with its silos, into the run folder `out`; log lines go to OUT.log and to `show`.

        OUT.status.json has what `sordino federation status` prints; `status` is HOST:PORT of its HTTP endpoint. No code
        that a Flower run contains is executed: this process starts a run at the SuperLink, takes the run's task itself,
        and runs the installed package. A run is finished if `out` has a certificate.
        """
        config = load_config(self.folder / "fed.toml")
        watch = Watch.of(config, out, show)
        server = None if not status else watch.board.serve(status)
        try:
            with self._grid(config, out) as grid:
                engine, task = engine_of(config, grid, watch), server_task(config)
                done = execute(config, out, resume=resume, engine=engine, task=task, on_round=watch.round)
                watch.log(f"sordino: {done.path}/certificate.json")
                if config.federation is not None and not config.federation.simulated:
                    deliver_to_all(config.federation, done.path, engine.transport, watch.log)
            watch.board.update(state="done", awaited=None)
        except (SordinoError, KeyboardInterrupt) as error:  # Flower interrupts a process whose run it has ended
            ended = EngineError("a run that was interrupted", "a run until its last round", "continue it with --resume")
            wrong = error if isinstance(error, SordinoError) else ended
            watch.log(f"sordino: {' '.join(str(wrong).split())}", "ERROR")
            watch.board.update(state="stopped", awaited=None)
            raise wrong from None
        finally:
            if server is not None:
                server.shutdown()
                server.server_close()
        return done

    def register(self, config: Config) -> Link:
        """Register the silos' pinned keys at the SuperLink, and return a client of the SuperLink."""
        silos_of(config)
        assert config.federation is not None
        try:
            ca, secret = ((self.folder / name).read_bytes() for name in ("ca.crt", "link.secret"))
        except OSError as error:
            found = f"{error.filename}, which cannot be read ({error.strerror})"
            needed = "the folder of a server whose SuperLink runs"
            raise ConfigError(found, needed, "start the SuperLink with superlink.sh") from None
        link = Link(self.link or f"127.0.0.1:{config.federation.port + 1}", ca, secret)
        for name, key in config.federation.keys.items():
            link.register(registered_form(key), name)
        return link

    @contextmanager
    def _grid(self, config: Config, out: Path) -> Iterator[Any]:
        """Start a run at the SuperLink, take its task, and yield its grid; stop the earlier run of this folder.

        A lock lets one process at a time do this, since a process that gets a task of another run stops that run.
        """
        link = self.register(config)
        note = out.with_name(f"{out.name}.flower")  # the number of this folder's last run at the SuperLink
        with open(self.folder / "link.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if note.exists() and note.read_text().isdigit():
                link.stop_run(int(note.read_text()))
            run = link.start_run()
            note.write_text(str(run))
            token = link.take(run)
        with link.grid(token) as grid:
            yield grid


@dataclass
class Watch:
    """Log and status of a server's run: rounds, who is connected, awaited or refused."""

    board: StatusBoard
    silos: tuple[str, ...]
    rounds: int
    show: Callable[[str], None]
    write: Callable[[str, str], None]

    @classmethod
    def of(cls, config: Config, out: Path, show: Callable[[str], None]) -> Watch:
        """Begin the log and status files beside `out`."""
        spec, plan = config.federation, config.plan
        write = rotating_log(out.with_name(f"{out.name}.log"))
        board = StatusBoard(out.with_name(f"{out.name}.{NAME}"))
        project = "" if spec is None else spec.project
        board.update(role="server", name=out.name, project=project, plan=plan.hash, rounds=plan.rounds, state="started")
        return cls(board, () if spec is None else spec.silos, plan.rounds, show, write)

    def log(self, line: str, level: str = "INFO") -> None:
        self.show(line)
        self.write(line, level)
        self.board.update(last=line)

    def round(self, line: dict[str, Any]) -> None:
        """Log the figures of a finished round."""
        found = {name: line[name] for name in ("loss", "accuracy", "rmse") if name in line}
        self.board.update(round=line["round"], metrics=found, awaited=None, state="training")
        self.log(f"round {line['round']}/{self.rounds} " + " ".join(f"{name}={found[name]:.4f}" for name in found))

    def nodes(self, online: Collection[int], unanswered: Sequence[int], since: float) -> None:
        """Note who is connected, and whose answer is awaited since when."""
        awaited = {"silos": [self.silos[silo] for silo in unanswered], "since": stamp(since)} if unanswered else None
        there = {name: number in online for number, name in enumerate(self.silos)}
        if (there, awaited) != (self.board.facts.get("connected"), self.board.facts.get("awaited")):
            self.board.update(connected=there, awaited=awaited)
        self.board.beat()

    def refused(self, why: Mapping[int, str]) -> None:
        """Log who refused, all at once, and why."""
        known = dict(self.board.facts.get("refusals", {}))
        for silo, reason in why.items():
            name = self.silos[silo]
            known[name] = {"count": known.get(name, {}).get("count", 0) + 1, "why": reason, "at": stamp(time.time())}
        self.board.update(refusals=known)
        self.log("refused by " + "; ".join(f"{self.silos[silo]}: {why[silo]}" for silo in sorted(why)), "WARNING")


def deliver_to_all(spec: FederationSpec, folder: Path, transport: Any, log: Callable[[str], None]) -> None:
    """Send model and certificate to all silos, and log which silos accepted them."""
    took = [spec.silos[place] for place in deliver(folder, len(spec.silos), transport, spec.timeout)]
    others = [name for name in spec.silos if name not in took]
    missed = f"; not to {', '.join(others)}: run again with --resume" if others else ""
    log(f"model and certificate were delivered to {', '.join(took) or 'nobody'}{missed}")


def engine_of(config: Config, grid: Any, watch: Watch) -> Remote:
    """Return the engine over a Flower grid, with secure aggregation if the release needs it.

    Silos are recognised by their pinned keys.
    """
    silos, spec = silos_of(config), config.federation
    assert spec is not None
    if config.privacy.noise == "secure":
        check_pinned(spec)
    kind = SecAggEngine if "secure_sum" in config.plan.needs else Remote
    limits: dict[str, Any] = {"quorum": spec.quorum or len(silos), "tries": spec.tries, "timeout": spec.timeout}
    nodes = {silos.index(name): registered_form(key) for name, key in spec.keys.items()}
    seen = (watch.log, watch.nodes, watch.refused)
    return kind(FlowerTransport(grid, silos, nodes, signer_of(spec).answer_of, *seen), **limits)


def silos_of(config: Config) -> tuple[str, ...]:
    """Return the silo names in the order of the plan's clients; refuse a file without [federation]."""
    if config.federation is None:
        fix = 'add [federation] silos = ["...", "..."], one name per client, in the order of the plan'
        raise ConfigError("a TOML file without [federation]", "a [federation] section with the silos' names", fix)
    return config.federation.silos


def server_task(config: Config) -> Task:
    """Return the server's task, with the model and public test rows, and without any silo's records."""
    spec, encoding = config.federation, config.task.encoding
    if spec is None or not config.record[0]:
        return config.build().as_server()
    test, (shape, classes) = None, config.record
    if spec.test is not None and encoding is not None and Path(spec.test).suffix in (".csv", *PARQUET):
        given = CsvFormat(**config.task.options.get("format", {}))
        test = encoded_rows(encoding, Path(spec.test), given)
    elif spec.test is not None:
        try:
            with np.load(Path(spec.test), allow_pickle=False) as held:
                test = held["x"], held["y"]
        except (OSError, ValueError, KeyError) as error:
            found = f"{spec.test}, which cannot be read ({error})"
            needed = "an .npz file of public rows x and y, or a table (.csv)"
            raise ConfigError(found, needed, "correct test in [federation], or write the file again") from None
    model, loss, _ = config.model_and_loss(shape, classes)
    model, init = (model, None) if config.task.init is None else load_initial(model, config.task.init)
    task = Task.server(model, len(spec.silos), test, loss, own_code=config.task.own_code)
    # [task] names the silos' private rows; what it declares of columns (ranges, categories) is public all the same
    values = config.task.source(labels=False).values
    source = PublicSource(f"rows of {Path(spec.test or '').name}", "the configuration: [federation] test", values)
    return replace(task, init=init, metrics=config.run.metrics, source=source, encoding=encoding)
