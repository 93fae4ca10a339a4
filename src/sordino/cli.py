"""The command line: arguments and printing only.

Exit codes: 0 fine, 1 a certificate or audit fails or a budget is spent, 2 bad input, 3 a worker of a run died.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from sordino import launch
from sordino.errors import BudgetError, CertificateError, ConfigError, DivergedError, RankError, UserError
from sordino.version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
recipes_app = typer.Typer(no_args_is_help=True, help="Algorithms that are ready to use.", rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")


def _papers() -> typer.Typer:
    """The papers' experiments are a package of their own (benchmarks/papers); without it the command says so."""
    try:
        from sordino_papers.command import app as papers
    except ModuleNotFoundError:
        papers = typer.Typer(help="The papers' tables, ours beside theirs.", invoke_without_command=True)
        papers.callback()(_no_papers)
    return papers


def _no_papers() -> None:
    fix = "pip install ./benchmarks/papers in a checkout of Sordino"
    raise ConfigError("no package sordino_papers", "the papers' experiments", fix)


app.add_typer(_papers(), name="papers")

STOPPED = "stopped; what was charged stays charged; continue with --resume"
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # whichever click this typer carries
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
ConfigFile = Annotated[Path, typer.Argument(help="A TOML file: [task], [recipe] or [plan], [privacy], [run].")]
RunPath = Annotated[Path, typer.Argument(help="The folder of a run.")]


def main() -> None:
    """Entry point: a user's mistake is one sentence on standard error and exit code 2."""
    try:
        with launch.orderly():
            code = app(standalone_mode=False)
    except launch.Stopped as stopped:
        _stop(STOPPED, int(stopped.code or 0))
    except UserError as error:
        _stop(str(error), 2)
    except (CertificateError, BudgetError, DivergedError) as error:
        _stop(str(error), 1)
    except RankError as error:
        _stop("" if error.said else str(error), launch.code_of(error))
    except UsageError as error:
        _stop(str(error.format_message() if hasattr(error, "format_message") else error), 2)
    else:
        if code == 130:  # what typer makes of an interrupt
            _stop(STOPPED, 130)
        sys.exit(code if isinstance(code, int) else 0)


def _stop(sentence: str, code: int) -> None:
    with listened(sys.stderr):
        if sentence:
            print(f"sordino: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


@contextmanager
def listened(stream: TextIO) -> Iterator[None]:
    """Whoever reads a stream may leave (`| head`): from then on it goes nowhere, and what was running runs on."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(as_json: bool, data: dict[str, Any], text: str) -> None:
    with listened(sys.stdout):
        print(json.dumps(_finite(data), allow_nan=False) if as_json else text)


def heard(show: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """The same, for a reader who may leave."""

    def on_round(line: dict[str, Any]) -> None:
        with listened(sys.stdout):
            show(line)

    return on_round


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as words."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Differentially private federated learning, with a certificate that is true of what ran."""
    if version:
        print(f"sordino {__version__}")
        raise typer.Exit


@app.command()
def plan(file: ConfigFile, as_json: JsonFlag = False) -> None:
    """Parts, bound chain and forecast epsilon per adversary; touches no data."""
    from sordino import show
    from sordino.config import load_config

    config = load_config(file)
    forecast = show.forecast(config)
    _say(as_json, forecast, show.forecast_text(forecast))


@app.command()
def epsilon(
    sampler: Annotated[str, typer.Option(help="poisson | fixed | full | roundrobin | shuffle")],
    population: Annotated[int, typer.Option(help="How many clients there are (shuffle: how many reports).")],
    rounds: Annotated[int, typer.Option(help="How many rounds.")] = 1,
    delta: Annotated[float | None, typer.Option(help="Default: population ** -1.1")] = None,
    cohort: Annotated[float | None, typer.Option(help="Clients per round; for poisson on average.")] = None,
    multiplier: Annotated[float | None, typer.Option(help="Noise scale / clip radius.")] = None,
    mechanism: Annotated[str, typer.Option(help="gaussian | laplace")] = "gaussian",
    epsilon0: Annotated[float | None, typer.Option(help="shuffle: epsilon of one message.")] = None,
    cap: Annotated[int | None, typer.Option(help="poisson: most clients a round keeps.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """The calculator: what a sampler, a noise and a number of rounds cost."""
    from sordino import calculator

    question = calculator.Question(
        sampler=sampler,
        population=population,
        cohort=cohort,
        rounds=rounds,
        multiplier=multiplier,
        delta=delta,
        mechanism=mechanism,
        epsilon0=epsilon0,
        cap=cap,
    )
    found = calculator.answer(question)
    _say(as_json, found, calculator.text(found))


@app.command()
def calibrate(
    file: ConfigFile,
    epsilon: Annotated[float, typer.Option(help="The target.")],
    delta: Annotated[float | None, typer.Option(help="Default: the file's.")] = None,
    free: Annotated[str, typer.Option(help="multiplier | rounds | cohort")] = "multiplier",
    out: Annotated[Path | None, typer.Option(help="Write the calibrated file here.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the multiplier, rounds or cohort that cost a target epsilon."""
    from sordino import show
    from sordino.calibration import calibrate_config

    found = calibrate_config(file, epsilon=epsilon, delta=delta, free=free, out=out)
    _say(as_json, found, show.calibrated_text(found))


@app.command()
def tune(
    file: ConfigFile,
    epsilon: Annotated[list[float] | None, typer.Option(help="A budget; several give a curve each.")] = None,
    data: Annotated[str, typer.Option(help="public | synthetic: what the search may look at.")] = "public",
    trials: Annotated[int, typer.Option(help="Simulations per candidate.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the tuned file (of the first epsilon) here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Local steps, rounds, batch and step size for a budget, found without touching private data."""
    import torch

    from sordino.tuning import command

    torch.set_num_threads(1)
    found = command.tune_config(file, epsilons=epsilon or [], source=data, trials=trials, out=out, plot=plot)
    _say(as_json, found, command.text(found))


@app.command()
def run(
    file: ConfigFile,
    out: Annotated[Path, typer.Option(help="A new folder for the run.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="inprocess | distributed (--workers and torchrun mean it).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the clients of a round.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 1,
    device: Annotated[str, typer.Option(help="Where clients train: cpu, cuda, cuda:1, ...")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Seconds that one worker waits for another.")] = 3600.0,
    sign: Annotated[Path | None, typer.Option(help="Sign the certificate with this Ed25519 key (PEM).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train; writes plan.toml, certificate.json, history.jsonl, model.safetensors and checkpoint/ into --out."""
    started = launch.chosen(engine, workers)
    if started.workers:
        words = [str(file), "--out", str(out), "--engine", "distributed", "--threads", str(threads)]
        words += ["--device", device, "--timeout", str(timeout)] + ["--resume"] * resume + ["--json"] * as_json
        words += [] if sign is None else ["--sign", str(sign)]
        raise typer.Exit(launch.launch(["-P", "-m", "sordino", "run", *words], started.workers, threads))
    launch.follow()
    from sordino import show
    from sordino.config import load_config
    from sordino.runs.execution import execute, named_engine

    config = load_config(file)
    chosen = named_engine(started.engine, threads, timeout, device)
    with show.progress(config.plan.rounds, quiet=as_json or not getattr(chosen, "leads", True)) as on_round:
        done = execute(config, out, resume=resume, engine=chosen, on_round=heard(on_round), sign=sign)
    _say(as_json, show.result(done), show.result_text(done))


@app.command()
def certify(
    folder: RunPath,
    key: Annotated[Path | None, typer.Option(help="Also check the signature, with this public key (PEM).")] = None,
    sign: Annotated[Path | None, typer.Option(help="Sign what was certified with this Ed25519 key (PEM).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Recompute the certificate from everything in the folder; exit 1 on any mismatch."""
    from sordino import show
    from sordino.runs import signature
    from sordino.runs.folder import RunFolder

    owner = None if key is None else signature.public_key(key)
    signer = None if sign is None else signature.private_key(sign)
    certificate = RunFolder.open(folder).certify()
    if signer is not None:
        signature.sign(folder, signer)
    if owner is not None:
        signature.check(folder, owner)
    signed = {"signed": True} if owner is not None else {}
    said = "certified, and signed with this key: " if owner is not None else "certified: "
    _say(as_json, {"certified": True, **signed, **certificate}, said + show.guarantee(certificate))


@app.command()
def explain(folder: RunPath, as_json: JsonFlag = False) -> None:
    """The certificate in plain sentences: what is protected, against whom, how strongly, what is assumed."""
    from sordino import explain as explaining
    from sordino.runs.folder import RunFolder

    opened = RunFolder.open(folder)
    certificate = opened.certify()
    found = explaining.explain(certificate, explaining.ceilings(opened.config().plan, opened.facts()))
    _say(as_json, found, explaining.page(found))


@app.command()
def audit(
    target: Annotated[Path, typer.Argument(help="The folder of a run, or (--mechanism, --canaries) a TOML file.")],
    mechanism: Annotated[bool, typer.Option("--mechanism", help="Attack a round, test noise and coins.")] = False,
    canaries: Annotated[bool, typer.Option("--canaries", help="Train once with planted canaries.")] = False,
    landscape: Annotated[bool, typer.Option("--landscape", help="Draw the loss around the model.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the picture goes.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Lower bounds by attack beside the certified upper bound; exit 1 if one exceeds it."""
    import torch

    from sordino.audit import report

    torch.set_num_threads(1)  # two that fight over a core are slower than one
    if mechanism:
        found = report.mechanism(target)
    elif canaries:
        found = report.canaries(target)
    else:
        found = report.surface(target, out) if landscape else report.membership(target)
    _say(as_json, found, report.text(found))
    if not found["passed"]:
        raise typer.Exit(1)


@recipes_app.command("list")
def recipes_list(as_json: JsonFlag = False) -> None:
    """Names and one line each."""
    from sordino import show

    found = show.recipes()
    _say(as_json, {"recipes": found}, "\n".join(f"{entry['name']:<14} {entry['summary']}" for entry in found))


@recipes_app.command("show")
def recipes_show(name: str, as_json: JsonFlag = False) -> None:
    """Arguments of one recipe, and a file to start from."""
    from sordino import show

    found = show.recipe(name)
    _say(as_json, found, found["example"])
