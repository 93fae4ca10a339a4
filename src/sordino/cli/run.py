"""Command `sordino run`: train into a folder, or continue a stopped run."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import console
from sordino.cli.console import Changes, ConfigFile, JsonFlag, Own, Seed, app
from sordino.cli.planning import silo_lines
from sordino.cli.results import guarantee
from sordino.errors import ConfigError
from sordino.runs import launch
from sordino.version import RENDEZVOUS

if TYPE_CHECKING:
    from sordino.config import Config
    from sordino.report.trackers import Tracker
    from sordino.runs.execution import Executed
    from sordino.runs.rounds import OnRound

NO_TEST = "not evaluated, as no row is declared public (task.options: test or public_test_fraction)"


Engine = Annotated[
    str | None, typer.Option(help="inprocess | distributed (--workers, torchrun) | flower (here) | one of your own.")
]
Track = Annotated[
    list[str] | None, typer.Option(help="tensorboard | mlflow | wandb, into OUT.track or where they are set up.")
]


@app.command()
def run(
    file: ConfigFile,
    out: Annotated[Path, typer.Option(help="A new folder for the run.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    engine: Engine = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the clients of a round.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 1,
    device: Annotated[str, typer.Option(help="Where clients train: cpu, auto (an accelerator), cuda:1, ...")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Seconds that one worker waits for another.")] = 3600.0,
    sign: Annotated[Path | None, typer.Option(help="Sign the certificate with this Ed25519 key (PEM).")] = None,
    track: Track = None, values: Changes = None, seed: Seed = None, own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Train, and write plan.toml, certificate.json, history.jsonl, model.safetensors and checkpoint/ into --out."""
    name, count = launch.choose_engine(engine, workers)
    changes = console.changed(values, seed) if values or seed is not None else []
    if count:
        words = [str(file), "--out", str(out), "--engine", "distributed", "--threads", str(threads)]
        words += ["--device", device, "--timeout", str(timeout)] + ["--resume"] * resume + ["--json"] * as_json
        words += [] if sign is None else ["--sign", str(sign)]
        repeated = {"--with": map(str, own or []), "--track": track or [], "--set": changes}
        words += [word for option, each in repeated.items() for value in each for word in (option, value)]
        raise typer.Exit(launch.launch(["-P", "-m", "sordino", "run", *words], count, threads))
    if RENDEZVOUS in os.environ:
        launch.follow_watcher()
    if own:
        console.load_own_parts(own)
    from sordino.config import load_config
    from sordino.engines.base import engine_named
    from sordino.runs.execution import execute
    from sordino.runs.rounds import terminal_bar

    config, flower = load_config(file, changes), name == "flower"
    if flower:
        _check_flower(config, {"--sign": sign, "--device": device != "cpu", "--threads": threads != 1})
    chosen = None if flower else engine_named(name, threads=threads, timeout=timeout, device=device)
    leads, folder = chosen is None or chosen.leads, out.with_name(f"{out.name}.track")
    shows = leads and not as_json
    with ExitStack() as held:
        trackers: list[Tracker] = []
        if track and leads:
            from sordino.report.trackers import Tracker

            noise, kinds = config.privacy.noise, dict.fromkeys(track)
            trackers = [held.enter_context(Tracker(kind, folder, config, noise)) for kind in kinds]
        bar = held.enter_context(terminal_bar(config.plan.rounds)) if shows and sys.stdout.isatty() else None
        show = bar or (partial(_print_round, rounds=config.plan.rounds) if shows else None)
        on_round = partial(_show_round, show, trackers)
        if chosen is None:
            from sordino.federation.local_federation import run_locally

            done = run_locally(config, out, resume=resume, on_round=on_round)
        else:
            done = execute(config, out, resume=resume, engine=chosen, on_round=on_round, sign=sign)
        for tracker in trackers:
            tracker.finish(done.certificate)
    notes = {"notes": list(done.notes)} if done.notes else {}
    found = {"out": str(done.path), "last": done.history[-1], "certificate": done.certificate, **notes}
    console.output(as_json, found, result_text(done) + (f"\ntracked: {folder}" if track and folder.exists() else ""))


def _check_flower(config: Config, given: dict[str, Any]) -> None:
    """Refuse options that do not reach the server and silos which --engine flower starts."""
    config.check_alone()
    refused = next((option for option, value in given.items() if value), None)
    if refused is not None:
        needed = "an option that --engine flower supports"
        raise ConfigError(f"{refused} with --engine flower", needed, f"remove {refused}")


def _show_round(show: OnRound | None, trackers: list[Tracker], line: dict[str, Any]) -> None:
    if show is not None:
        with console.tolerate_closed_pipe(sys.stdout):
            show(line)
    for tracker in trackers:
        tracker(line)


def _print_round(line: dict[str, Any], rounds: int) -> None:
    from sordino.outcome import DIAGNOSTIC
    from sordino.runs.rounds import warnings

    figures = " ".join(f"{name}={line[name]:.4f}" for name in _figures(line))
    seconds = line.get(DIAGNOSTIC, {}).get("seconds")
    took = "" if seconds is None else f" {seconds:.2f}s"
    print(f"round {line['round']}/{rounds} {figures}{took}{warnings(line)}", flush=True)


def _figures(line: dict[str, Any]) -> list[str]:
    found = [name for name, value in line.items() if isinstance(value, float) and "/" not in name]
    return sorted(found, key=lambda name: (name == "loss", name != "accuracy"))


def result_text(done: Executed) -> str:
    last, made = done.history[-1], done.certificate
    figures = ", ".join(f"{name} {last[name]:.4f}" for name in _figures(last))
    tested = f"{figures} on the whole test set" if figures else NO_TEST
    lines = [f"round {last['round']}: {tested}", guarantee(made), *silo_lines(made)]
    lines.append(f"noise: {made['noise']['mode']} ({made['noise']['note']})")
    if made["ledger"] is not None:
        from sordino.certificate.explain import in_all

        lines.append(f"ledger: {in_all(made['ledger'])}")
    lines += [f"note: {note}" for note in done.notes]
    return "\n".join([*lines, f"files: {done.path}/{{plan.toml, certificate.json, history.jsonl, model.safetensors}}"])
