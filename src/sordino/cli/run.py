"""`sordino run`: train into a folder, or continue what is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli.certificates import guarantee
from sordino.cli.console import Changes, ConfigFile, JsonFlag, Own, Seed, app, bring, changed, listened, say
from sordino.cli.planning import silo_lines
from sordino.errors import ConfigError
from sordino.runs import launch

if TYPE_CHECKING:
    from sordino.config import Config
    from sordino.report.trackers import Tracker
    from sordino.runs.execution import Executed

NO_TEST = "not evaluated, as no row is declared public (task.options: test or public_test_fraction)"


@app.command()
def run(
    file: ConfigFile,
    out: Annotated[Path, typer.Option(help="A new folder for the run.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    engine: Annotated[
        str | None,
        typer.Option(help="inprocess | distributed (--workers, torchrun) | flower (here) | one of your own."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the clients of a round.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 1,
    device: Annotated[str, typer.Option(help="Where clients train: cpu, cuda, cuda:1, ...")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Seconds that one worker waits for another.")] = 3600.0,
    sign: Annotated[Path | None, typer.Option(help="Sign the certificate with this Ed25519 key (PEM).")] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="tensorboard | mlflow | wandb, into OUT.track or where they are set up.")
    ] = None,
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Train; writes plan.toml, certificate.json, history.jsonl, model.safetensors and checkpoint/ into --out."""
    started = launch.choose_engine(engine, workers)
    if started.workers:
        words = [str(file), "--out", str(out), "--engine", "distributed", "--threads", str(threads)]
        words += ["--device", device, "--timeout", str(timeout)] + ["--resume"] * resume + ["--json"] * as_json
        words += [] if sign is None else ["--sign", str(sign)]
        words += [word for path in own or [] for word in ("--with", str(path))]
        words += [word for name in track or [] for word in ("--track", name)]
        words += [word for value in changed(values, seed) for word in ("--set", value)]
        raise typer.Exit(launch.launch(["-P", "-m", "sordino", "run", *words], started.workers, threads))
    launch.follow_watcher()
    if own:
        bring(own)
    from sordino.config import load_config
    from sordino.engines.registry import engine_named
    from sordino.runs.execution import execute

    config = load_config(file, changed(values, seed))
    flower = started.engine == "flower"
    if flower:
        config.check_alone()
        _refuse_for_flower({"--sign": sign, "--device": device != "cpu", "--threads": threads != 1})
        from sordino.federation.local_federation import run_locally
    chosen = None if flower else engine_named(started.engine, threads=threads, timeout=timeout, device=device)
    leads = chosen is None or chosen.leads
    with progress(config.plan.rounds, quiet=as_json or not leads) as show, ExitStack() as held:
        trackers = _open_trackers(track, config, out, held) if track and leads else []

        def on_round(line: dict[str, Any]) -> None:
            with listened(sys.stdout):
                show(line)
            for tracker in trackers:
                tracker(line)

        if flower:
            done = run_locally(config, out, resume=resume, on_round=on_round)
        else:
            done = execute(config, out, resume=resume, engine=chosen, on_round=on_round, sign=sign)
        for tracker in trackers:
            tracker.finish(done.certificate)
    where = track_folder(out)
    said = f"{result_text(done)}\ntracked: {where}" if track and where.exists() else result_text(done)
    say(as_json, result(done), said)


def _refuse_for_flower(given: dict[str, Any]) -> None:
    """Options of a run in this process: over Flower the server's process and every silo have settings of their own."""
    refused = next((option for option, value in given.items() if value), None)
    if refused is not None:
        found = f"{refused} with --engine flower"
        raise ConfigError(found, "an option that every silo's process takes", f"drop {refused}")


def track_folder(out: Path) -> Path:
    """Where trackers that keep files write: beside the run."""
    return out.with_name(f"{out.name}.track")


def _open_trackers(kinds: list[str], config: Config, out: Path, held: ExitStack) -> list[Tracker]:
    from sordino.report.trackers import Tracker

    folder, noise = track_folder(out), config.privacy.noise
    return [held.enter_context(Tracker(kind, folder, config, noise)) for kind in dict.fromkeys(kinds)]


def result(done: Executed) -> dict[str, Any]:
    """A finished run as plain data."""
    notes = {"notes": list(done.notes)} if done.notes else {}
    return {"out": str(done.path), "last": done.history[-1], "certificate": done.certificate, **notes}


def result_text(done: Executed) -> str:
    """A finished run in a few lines."""
    last = done.history[-1]
    figures = ", ".join(f"{name} {last[name]:.4f}" for name in public(last))
    tested = f"{figures} on the whole test set" if figures else NO_TEST
    lines = [f"round {last['round']}: {tested}", guarantee(done.certificate), *silo_lines(done.certificate)]
    lines.append(f"noise: {done.certificate['noise']['mode']} ({done.certificate['noise']['note']})")
    if done.certificate["ledger"] is not None:
        from sordino.certificate.explain import in_all

        lines.append(f"ledger: {in_all(done.certificate['ledger'])}")
    lines += [f"note: {note}" for note in done.notes]
    return "\n".join([*lines, f"files: {done.path}/{{plan.toml, certificate.json, history.jsonl, model.safetensors}}"])


@contextmanager
def progress(rounds: int, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on a terminal, plain lines in a pipe, nothing beside JSON."""
    if quiet:
        yield lambda line: None
    elif not sys.stdout.isatty():
        yield lambda line: print(_plain(line, rounds), flush=True)
    else:
        from sordino.runs.rounds import terminal_bar

        with terminal_bar(rounds) as on_round:
            yield on_round


def _plain(line: dict[str, Any], rounds: int) -> str:
    from sordino.outcome import DIAGNOSTIC
    from sordino.runs.rounds import warnings

    figures = " ".join(f"{name}={line[name]:.4f}" for name in public(line))
    seconds = line.get(DIAGNOSTIC, {}).get("seconds")
    took = "" if seconds is None else f" {seconds:.2f}s"
    return f"round {line['round']}/{rounds} {figures}{took}{warnings(line)}"


def public(line: dict[str, Any]) -> list[str]:
    """The figures of a line of history, accuracy first and loss last; those of single classes and groups left out."""
    found = [name for name, value in line.items() if isinstance(value, float)]
    return sorted((name for name in found if "/" not in name), key=lambda name: (name == "loss", name != "accuracy"))
