"""Commands for operators: `sordino ledger`, `federation`, `silo serve` and `doctor`; `ledger` does not load torch."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli.console import JsonFlag, Own, app, load_own_parts, output
from sordino.version import __version__

if TYPE_CHECKING:
    from sordino.ledger.totals import Entry, Statement

ledger_app = typer.Typer(no_args_is_help=True, help="The budget of a data set over all runs.", rich_markup_mode=None)
federation = typer.Typer(no_args_is_help=True, help="A plan across machines, over Flower.")
silo = typer.Typer(no_args_is_help=True, help="One silo of a federation.")
app.add_typer(ledger_app, name="ledger")
app.add_typer(federation, name="federation")
app.add_typer(silo, name="silo")
LedgerFile = Annotated[Path, typer.Argument(help="The file of the ledger.")]
StatusAt = Annotated[str, typer.Option("--status", help="HOST:PORT of /status, /metrics and /health; default: none.")]
Dataset = Annotated[str, typer.Argument(help="The name that its operator gave the data set.")]


@ledger_app.command("show")
def ledger_show(
    file: LedgerFile, dataset: Annotated[str | None, typer.Argument(help="One data set; default: all.")] = None,
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Print the epsilon that each data set has spent over all runs, and its limit."""
    load_own_parts(own)
    from sordino.ledger.ledger import Ledger

    with Ledger.open(file) as ledger:
        found = [ledger.statement(name) for name in ([dataset] if dataset is not None else ledger.names)]
    text = "\n".join(map(_statement_text, found)) or "no data set has a limit yet"
    output(as_json, {"ledger": str(file), "datasets": [_statement(one) for one in found]}, text)


@ledger_app.command("limit")
def ledger_limit(
    file: LedgerFile,
    dataset: Dataset,
    epsilon: Annotated[float, typer.Option(help="The most that all runs together may spend.")],
    delta: Annotated[float, typer.Option(help="At this delta.")],
    unit: Annotated[str, typer.Option(help="What one neighbour may change: client | record")],
    relation: Annotated[str, typer.Option(help="replace_one | add_remove | zero_out")] = "replace_one",
    as_json: JsonFlag = False,
) -> None:
    """Set, raise or lower the limit of a data set; creates the ledger if there is none."""
    from sordino import codec
    from sordino.ledger.ledger import Ledger
    from sordino.ledger.totals import Limit

    asked = {"epsilon": epsilon, "delta": delta, "unit": unit, "relation": relation}
    limit: Limit = codec.read(Limit, asked, "--")
    with Ledger.open(file, create=True) as ledger:
        ledger.limit(dataset, limit)
        found = ledger.statement(dataset)
    output(as_json, {"ledger": str(file), **_statement(found)}, _statement_text(found))


@ledger_app.command("history")
def ledger_history(file: LedgerFile, dataset: Dataset, own: Own = None, as_json: JsonFlag = False) -> None:
    """Print all ledger entries of one data set: limits, runs with their project, rounds, and epsilon after each."""
    load_own_parts(own)
    from sordino import codec
    from sordino.accounting.rounding import upward
    from sordino.ledger.ledger import Ledger
    from sordino.ledger.totals import RunEntry, name_of, running_epsilons

    with Ledger.open(file) as ledger:
        found = ledger.history(dataset)
    spent = [None if one is None else upward(one) for one in running_epsilons(found)]
    lines = [
        {"line": name_of(entry), "spent": own, **codec.dump(entry)} for entry, own in zip(found, spent, strict=True)
    ]
    projects = {entry.run: entry.project for entry in found if isinstance(entry, RunEntry)}
    said = [_entry_text(entry, own, projects) for entry, own in zip(found, spent, strict=True)]
    output(as_json, {"ledger": str(file), "dataset": dataset, "lines": lines}, "\n".join(said))


@ledger_app.command("backup")
def ledger_backup(
    file: LedgerFile, to: Annotated[Path, typer.Argument(help="A new file for the backup.")], as_json: JsonFlag = False
) -> None:
    """Copy a ledger to a backup file, also while silos use it; nothing can be charged to a backup."""
    from sordino.ledger.ledger import Ledger

    with Ledger.open(file) as ledger:
        head = ledger.backup(to)
    found = {"ledger": str(file), "backup": str(to), "lines": head.lines, "sha256": head.digest}
    output(as_json, found, f"{to}: {head.lines} lines of {file}, the last with sha256 {head.digest}")


@ledger_app.command("restore")
def ledger_restore(
    backup: Annotated[Path, typer.Argument(help="A file of 'sordino ledger backup', or another copy of the ledger.")],
    file: Annotated[Path, typer.Argument(help="The ledger that is missing, damaged or old.")],
    as_json: JsonFlag = False,
) -> None:
    """Replace a ledger by a backup; if the backup lacks charges, every limit must be lowered before the next charge."""
    from sordino.ledger.ledger import restore

    lost = restore(backup, file)
    words = "no line is missing"
    if lost != 0:
        words = f"lost: {'an unknown number of' if lost is None else lost} lines"
        words += "; nothing is charged before each limit is lowered (sordino ledger limit)"
    output(as_json, {"ledger": str(file), "backup": str(backup), "lines_lost": lost}, f"{file}: restored, {words}")


def _statement(found: Statement) -> dict[str, Any]:
    from sordino import codec
    from sordino.accounting.rounding import upward

    limit, events = codec.dump(found.limit), [codec.dump(item) for item in found.items]
    counts: dict[str, Any] = {"runs": found.runs, "charges": found.charges}
    if found.restored is not None:
        counts["restored"] = codec.dump(found.restored)
    return {"dataset": found.dataset, "spent": upward(found.epsilon), "limit": limit, **counts, "events": events}


def _statement_text(found: Statement) -> str:
    from sordino.accounting.rounding import upto

    limit, spent = found.limit, upto(found.epsilon, 4)
    lost = "" if found.restored is None else "; restored without its last lines: lower the limit"
    return (
        f"{found.dataset}: epsilon {spent} of {upto(limit.epsilon, 6)} spent, delta {upto(limit.delta, 6)}, "
        f"unit {limit.unit}, relation {limit.relation}; runs {found.runs}, jobs charged {found.charges}{lost}"
    )


def _entry_text(entry: Entry, spent: float | None, projects: dict[str, str]) -> str:
    from sordino.accounting.rounding import upto
    from sordino.ledger.totals import LimitEntry, RestoreEntry, RoundEntry, RunEntry

    match entry:
        case LimitEntry(limit=limit):
            most = f"epsilon {upto(limit.epsilon, 6)}, delta {upto(limit.delta, 6)}"
            text = f"limit  {most}, unit {limit.unit}, relation {limit.relation}"
        case RestoreEntry():
            text = f"restored from a backup without {'unknown' if entry.lost is None else entry.lost} lines"
        case RoundEntry():
            text = f"round  {entry.round} of {entry.run}, chain {entry.head[:12]}"
        case _:
            cost = ", ".join(f"{item.count} x {item.event}" for item in entry.items) or "nothing"
            round = "" if isinstance(entry, RunEntry) or entry.round is None else f"round {entry.round + 1}, "
            what = f"run    {entry.run}" if isinstance(entry, RunEntry) else f"job    {round}{entry.job} of {entry.run}"
            whose = f", project {projects[entry.run]!r}" if projects.get(entry.run) else ""
            text = f"{what}{whose}: {cost}"
    return f"{entry.at}  {text}" + ("" if spent is None else f"; epsilon so far {upto(spent, 4)}")


@federation.command()
def new(
    folder: Annotated[Path, typer.Argument(help="A new folder: one for the server, and one for every silo.")],
    file: Annotated[Path, typer.Option("--from", help="A TOML file with a [federation] that names the silos.")],
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Write the server's folder, and for every silo a policy, a key script and service units."""
    load_own_parts(own)
    from sordino.federation.new_federation import new_federation

    names = new_federation(folder, file)
    steps = f"{folder}/server; {folder}/silos/{{{', '.join(names)}}}: one for each silo (docs/deploy.md)"
    output(as_json, {"folder": str(folder), "silos": names}, steps)


@federation.command()
def pin(
    file: Annotated[Path, typer.Argument(help="The federation's file, of the server or of a silo.")],
    public: Annotated[list[Path] | None, typer.Argument(help="NAME.pub of silos; none: only print.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Pin silos' public keys in a federation's file, and print the fingerprints of all pinned keys.

    In the server's folder the keys are also registered with the SuperLink, which then admits the silos' nodes.
    """
    from sordino.config import load_config
    from sordino.federation.app import Server
    from sordino.federation.keys import pin

    found = pin(file, public or [])
    if public and (file.parent / "link.secret").exists():
        Server(file.parent).register(load_config(file))
    output(as_json, found, "\n".join(f"{name:<16} {text}" for name, text in found.items()) or "no key is pinned")


@federation.command()
def gate(
    folder: Annotated[Path, typer.Argument(help="The server's folder: fed.toml, ca.crt, server.crt, server.key.")],
    host: Annotated[str, typer.Option(help="Address on which silos reach this machine.")] = "0.0.0.0",
    port: Annotated[int | None, typer.Option(help="Default: port of [federation].")] = None,
    link: Annotated[str, typer.Option(help="Where the SuperLink listens. Default: 127.0.0.1, the next port.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Forward requests of silos' nodes to the SuperLink on this machine, and refuse all others, until stopped."""
    from sordino.config import load_config
    from sordino.federation.app import silos_of
    from sordino.federation.gate import serve_gate

    if port is None:
        config = load_config(folder / "fed.toml")
        assert silos_of(config)
        assert config.federation is not None
        port = config.federation.port
    link = link or f"127.0.0.1:{port + 1}"
    text = f"gate: {host}:{port} passes what silos' nodes send to the SuperLink at {link}"
    output(as_json, {"host": host, "port": port, "superlink": link}, text)
    serve_gate(folder, host, port, link)


@federation.command("run")
def federation_run(
    folder: Annotated[Path, typer.Argument(help="The server's folder: fed.toml, ca.crt, link.secret.")],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that stopped.")] = False,
    link: Annotated[str, typer.Option(help="Where the SuperLink listens. Default: 127.0.0.1, the next port.")] = "",
    status: StatusAt = "", own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Train with the silos of fed.toml, through the SuperLink on this machine, and write the certificate."""
    load_own_parts(own)
    from sordino.federation.app import Server

    show = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    done = Server(folder, link).run(out, resume=resume, show=show, status=status)
    output(as_json, {"out": str(done.path), "certificate": done.certificate}, f"{done.path}/certificate.json")


@federation.command("status")
def federation_status(
    folder: Annotated[Path, typer.Argument(help="The folder of a server, of one of its runs, or of a silo.")],
    watch: Annotated[bool, typer.Option("--watch", help="Print it again every two seconds, until stopped.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 unless the newest process runs and is healthy.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the state of a federation: connected silos, round, silos without a reply, metrics, refusals and budget."""
    from sordino.federation.status import in_words, read_status, status_files

    while True:
        found = [read_status(file) for file in status_files(folder)]
        if watch and not as_json:
            print("\033[2J\033[H", end="")
        output(as_json, {"processes": found}, "\n".join(map(in_words, found)))
        if not watch:
            break
        time.sleep(2)
    if check and not found[-1]["healthy"]:
        raise typer.Exit(1)


@silo.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="The silo's folder: silo.toml, fed.toml, policy.toml, ledger.db.")],
    node: Annotated[str | None, typer.Option(help="Where the node's Runtime API is; silo.toml says it too.")] = None,
    secret: Annotated[Path | None, typer.Option(help="The node's --superexec-auth-secret-file.")] = None,
    key: Annotated[Path | None, typer.Option(help="The node's private key; silo.toml says it too.")] = None,
    status: StatusAt = "", own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Compute the jobs that arrive at this silo's Flower node, within the silo's policy and budget, until stopped."""
    load_own_parts(own)
    from sordino.federation.silo_service import serve_silo

    serve_silo(folder, node, secret, key, as_json, status)


EXTRAS = {
    "fast": ("numba", "compiled inner loops: up to several times faster on small models"),
    "sign": ("cryptography", "signed certificates"),
    "flower": ("flwr", "a federation across machines"),
    "transformers": ("transformers", "models of Hugging Face, with peft for adapters"),
    "parquet": ("pyarrow", "data in Parquet files"),
    "onnx": ("onnxscript", "`sordino export`, models for other programs"),
    "tensorboard": ("tensorboard", "--track tensorboard"),
    "mlflow": ("mlflow-skinny", "--track mlflow"),
    "wandb": ("wandb", "--track wandb"),
}
Finding = tuple[str, str, str]  # ok, note or trouble; what was found; how to repair it


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Print which software and hardware this machine has for Sordino; exit code 1 if something required is missing."""
    found = [*_software(), *_machine()]
    entries = [dict(zip(("state", "what", "fix"), one, strict=True)) for one in found]
    text = "\n".join(f"{state:<8} {what}" + (f": {fix}" if fix else "") for state, what, fix in found)
    output(as_json, {"sordino": __version__, "findings": entries}, text)
    if any(state == "trouble" for state, _, _ in found):
        raise typer.Exit(1)


def _software() -> Iterator[Finding]:

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    here = f"sordino {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "ok" if sys.version_info >= (3, 11) else "trouble", here, ""
    for name in ("torch", "numpy", "scipy", "randomgen"):
        has = installed(name)
        yield ("ok", f"{name} {has}", "") if has else ("trouble", f"no {name}", f"pip install {name}")
    for extra, (package, use) in EXTRAS.items():
        has = installed(package) or (installed("mlflow") if extra == "mlflow" else None)
        lacks = ("note", f"no {package} ({use})", f"pip install 'sordino[{extra}]'")
        yield ("ok", f"{package} {has} ({use})", "") if has else lacks
    from sordino.codec.part import PLUGINS, load_plugins
    from sordino.errors import ConfigError

    try:
        load_plugins()
        names = sorted({point.dist.name for point in entry_points(group=PLUGINS) if point.dist is not None})
        yield from (("ok", f"parts of {name}, named on every certificate that uses them", "") for name in names)
    except ConfigError as error:
        yield "trouble", str(error), ""


def _machine() -> Iterator[Finding]:
    import torch

    from sordino.data.files import cache_folder

    threads = torch.get_num_threads()
    yield "ok", f"{os.cpu_count() or 1} cores, vector code {torch.backends.cpu.get_cpu_capability()}", ""
    if threads > 1 and "OMP_NUM_THREADS" not in os.environ:
        fix = "'sordino run' uses one thread; in Python call torch.set_num_threads(1), which is often far faster"
        yield "note", f"torch would use {threads} threads", fix
    yield ("ok", "CUDA is available", "") if torch.cuda.is_available() else ("note", "no CUDA: CPU only", "")
    named, where = os.environ.get("SORDINO_DATA"), cache_folder()
    if named:
        there = Path(named).is_dir()
        fix = "" if there else "correct the variable, or unset it"
        yield "ok" if there else "trouble", f"SORDINO_DATA = {named}", fix
    above = next(folder for folder in (where, *where.parents) if folder.exists())
    writable, free = os.access(above, os.W_OK), shutil.disk_usage(above).free / 2**30
    yield "ok" if writable else "trouble", f"cache {where}", "" if writable else "set SORDINO_CACHE"
    yield "ok" if free > 1 else "note", f"{free:.0f} GiB free there", ""
