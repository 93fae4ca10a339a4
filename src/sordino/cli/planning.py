"""`sordino plan`, `epsilon`, `calibrate`, `tune` and `sweep`: what a configuration costs, and which to choose."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from sordino import codec
from sordino.accounting.delta import check_delta
from sordino.accounting.profiles import in_words
from sordino.accounting.rounding import upto
from sordino.cli.console import Changes, ConfigFile, JsonFlag, Own, Seed, app, bring, changed, say, working
from sordino.errors import ConfigError

if TYPE_CHECKING:
    from sordino.accounting.bounds import AlreadyPrivate, Bound
    from sordino.config import Config
    from sordino.plan import Plan

CERTIFIED = (
    "epsilon", "delta", "unit", "relation", "own_code", "adversaries", "sampler", "trust", "silos", "clip",
    "denominator", "plan_sha256",
)  # fmt: skip
SMOOTHING_PAYS = 15.0  # noise to signal from which Laplacian smoothing gains accuracy on CNNs: docs/papers.md


@app.command()
def plan(
    file: ConfigFile, values: Changes = None, seed: Seed = None, own: Own = None, as_json: JsonFlag = False
) -> None:
    """Parts, bound chain and forecast epsilon per adversary; touches no data."""
    bring(own)
    from sordino.config import load_config

    found = forecast(load_config(file, changed(values, seed)))
    say(as_json, found, forecast_text(found))


def forecast(config: Config) -> dict[str, Any]:
    """What a run of this file would be certified with, and how its messages come to be bounded."""
    from sordino.certificate.build import certificate
    from sordino.certificate.facts import Facts

    plan = config.plan
    notes = (*config.check_task(), *_of_few(config))
    config.check_budget()
    facts = Facts(config.delta, config.privacy.noise, plan.rounds, **config.facts, own_code=config.own_code())
    promised = certificate(plan, facts)
    names = [plan.local.kind, *(step.kind for step in plan.encode)]
    chain = [{"after": name, "bound": _bound(bound)} for name, bound in zip(names, plan.bounds, strict=True)]
    return {
        **{key: promised[key] for key in CERTIFIED},
        "rounds": plan.rounds,
        "bounds": chain,
        "noise_of_models": _noise(plan),
        "noise_to_signal": noise_to_signal(config),
        "plan": codec.dump(plan),
        **({"notes": list(notes)} if notes else {}),
    }


def _of_few(config: Config) -> tuple[str, ...]:
    """What delta means, where it is large or there are few units: to the smallest silo, if each has its own."""
    from sordino.accounting.delta import LARGEST_DEFAULT, few, meaning_of_delta

    plan, reads = config.plan, config.plan.local.reads
    sizes = (plan.units,) if reads is None else reads.sizes
    deltas = config.deltas or (config.delta,) * len(sizes)
    delta, size = max(zip(deltas, sizes, strict=False), key=lambda pair: (pair[0], -pair[1]))
    if plan.release.kind == "no_noise" or (delta <= LARGEST_DEFAULT and not few(size)):
        return ()
    return (meaning_of_delta(delta, size, plan.unit),)


def _noise(plan: Plan) -> dict[str, float] | None:
    """Of noise that rounds share: what is left of it in the models, in units of the clip, beside independent noise."""
    from sordino.parts.correlated_noise import noise_of_models

    alone = plan.release.independent(plan.clients, plan.patterns) if plan.release.correlated else None
    if alone is None:
        return None
    work = plan.server.workload(plan.rounds)
    found = (noise_of_models(release, work) or 0.0 for release in (plan.release, alone))
    return dict(zip(("correlated", "independent"), (each / plan.clients.expected for each in found), strict=True))


def noise_to_signal(config: Config) -> dict[str, float] | None:
    """z sqrt(d) / S: the norm of the noise in the mean of a cohort of S updates of clip norm 1 with d coordinates.

    S is the expected cohort (for records: their expected number in a round). None where the model's dimension is not
    known before the data is read, where there is no noise, or where local steps add it.
    """
    from sordino.accounting.bounds import AlreadyPrivate

    plan, trial = config.plan, config.trial_task()
    if trial is None or plan.release.kind == "no_noise" or isinstance(plan.bound, AlreadyPrivate):
        return None
    parameters, cohort = trial.layout.size, np.arange(max(1, round(plan.clients.expected)), dtype=np.int64)
    summed = plan.release.denominator(plan.clients.expected, len(cohort))
    summed *= 1.0 if plan.local.reads is None else plan.local.reads.count
    ratio = plan.release.noise_std(cohort, 0) * math.sqrt(plan.length(parameters)) / summed
    return {"ratio": ratio, "parameters": parameters, "smoothing_pays_above": SMOOTHING_PAYS}


def _noise_lines(found: dict[str, float] | None) -> list[str]:
    if found is None:
        return []
    line = f"  {found['correlated']:.4g} clips; {found['independent']:.4g} with independent noise at equal privacy"
    return ["noise of one coordinate of the models, root mean square over rounds", line]


def _bound(bound: Bound | AlreadyPrivate) -> str:
    from sordino.accounting.bounds import AlreadyPrivate

    if isinstance(bound, AlreadyPrivate):
        return f"private already, per {bound.unit}"
    words = f"L{bound.norm} norm of one {bound.unit}'s message at most 1, in units of the clip norm"
    return words if bound.finite else "none"


def forecast_text(found: dict[str, Any]) -> str:
    """The forecast as a page."""
    plan = found["plan"]
    parts = [("prepare", part) for part in plan.get("prepare", [])]
    parts += [("clients", plan["clients"]), ("local", plan["local"])]
    parts += [("encode", step) for step in plan.get("encode", [])] + [("release", plan["release"])]
    parts += [("postprocess", step) for step in plan.get("postprocess", [])] + [("server", plan["server"])]
    lines = [
        f"{found['rounds']} rounds",
        *(f"  {name:<12} {_part(part)}" for name, part in parts),
        "bound of a message",
    ]
    lines += [f"  after {entry['after']:<20} {entry['bound']}" for entry in found["bounds"]]
    lines += _noise_lines(found["noise_of_models"])
    if (signal := found["noise_to_signal"]) is not None:
        lines += [
            f"noise to signal of an update, z sqrt(d) / S: {signal['ratio']:.3g} with d = {signal['parameters']:,}",
            f"  Laplacian smoothing pays above about {signal['smoothing_pays_above']:g}",
        ]
    lines += ["code that runs on private records", f"  {_code(found['own_code'])}"]
    notes = [f"note: {note}" for note in found.get("notes", [])]
    return "\n".join([*lines, "forecast", *_adversary_lines(found), *silo_lines(found), *notes])


def _code(own: dict[str, str] | None) -> str:
    if own is None:
        return "not examined yet: the shape of a record is not known before the data is read"
    return f"{own['grade']}: {own['why']}"


def _part(part: dict[str, Any]) -> str:
    values = [f"{key}={_part(v) if isinstance(v, dict) else v}" for key, v in part.items() if key != "kind"]
    return f"{part.get('kind', '')}({', '.join(values)})"  # a mean of iterates has no kind


def silo_lines(found: dict[str, Any]) -> list[str]:
    """Each silo's own guarantee against one who reads its messages, where silos have names."""
    own = found["adversaries"][-1].get("silos", []) if found["silos"] else []
    pairs = sorted(((silo, entry) for entry in own for silo in entry["silos"]), key=lambda pair: pair[0])
    return [f"  {_epsilon(entry)}  of {found['silos'][silo]}" for silo, entry in pairs]


def _adversary_lines(found: dict[str, Any]) -> list[str]:
    return [text for line in found["adversaries"] for text in _adversary_text(line)]


def _adversary_text(line: dict[str, Any]) -> list[str]:
    told = line.get("by_participations")
    first = f"  {_epsilon(line)}  {line['relation']:<12} to one who {line['description']}"
    return [first, *([f"    {in_words(told)}"] if told else [])]


def _epsilon(line: dict[str, Any]) -> str:
    if line["epsilon"] is None:
        return f"{'no guarantee':<32}"
    return f"epsilon {upto(line['epsilon'], 4):<9} delta {upto(line['delta']):<8}"


@app.command()
def epsilon(
    sampler: Annotated[str, typer.Option(help="poisson | fixed | full | roundrobin | shuffle")],
    population: Annotated[int, typer.Option(help="How many clients there are (shuffle: how many reports).")],
    rounds: Annotated[int, typer.Option(help="How many rounds.")] = 1,
    delta: Annotated[float | None, typer.Option(help="Default: population ** -1.1, at most 1e-3")] = None,
    cohort: Annotated[float | None, typer.Option(help="Clients per round; for poisson on average.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise scale / clip norm.")] = None,
    mechanism: Annotated[str, typer.Option(help="gaussian | laplace")] = "gaussian",
    epsilon0: Annotated[float | None, typer.Option(help="shuffle: epsilon of one message.")] = None,
    cap: Annotated[int | None, typer.Option(help="poisson: most clients a round keeps.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """The calculator: what a sampler, a noise and a number of rounds cost."""
    from sordino.cli import calculator

    question = calculator.Question(
        sampler=sampler, population=population, cohort=cohort, rounds=rounds, noise_multiplier=noise_multiplier,
        delta=delta, mechanism=mechanism, epsilon0=epsilon0, cap=cap,
    )  # fmt: skip
    found = calculator.answer(question)
    say(as_json, found, calculator.text(found))


FREE = ("noise_multiplier", "rounds", "cohort")


@app.command()
def calibrate(
    file: ConfigFile,
    epsilon: Annotated[float | None, typer.Option(help="The target; without it, every silo's own budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: the file's.")] = None,
    free: Annotated[str, typer.Option(help="noise_multiplier | rounds | cohort")] = "noise_multiplier",
    out: Annotated[Path | None, typer.Option(help="Write the calibrated file here, its recipe kept.")] = None,
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Solve the noise multiplier, rounds or cohort for a target epsilon, or each silo's noise for its own budget."""
    bring(own)
    changes = changed(values, seed)
    found = calibrate_config(file, epsilon=epsilon, delta=delta, free=free, out=out, changes=changes)
    say(as_json, found, calibrated_text(found))


def calibrate_config(
    file: Path, *, epsilon: float | None, delta: float | None, free: str, out: Path | None, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """The number found, what it costs, and the file it was written to."""
    from sordino.certificate.build import headline
    from sordino.config import overridden, parse, read_table
    from sordino.tuning.calibrated_file import calibrated_file, multipliers

    if free not in FREE:
        raise ConfigError(f"--free {free}", "noise_multiplier, rounds or cohort", codec.nearest(free, list(FREE)))
    if out is not None:
        check_new(out)
    table = overridden(read_table(file), dict(map(codec.parse_setting, changes)))
    config = parse(table)
    check_delta(config.delta if delta is None else delta, config.plan.units, config.privacy.allow_large_delta)
    found = calibrated_file(file.read_text("utf-8"), table, epsilon=epsilon, delta=delta, free=free)
    if out is not None:
        out.write_text(found.text, encoding="utf-8")
    plan, solved = found.config.plan, found.config
    each = multipliers(plan) if free == "noise_multiplier" else ()
    cost = headline(plan.cost().of("messages" if each else "models"), solved.delta, solved.deltas)
    number: dict[str, Any] = {"value": _value(plan, free)} if not each else {"values": list(each)}
    names = {"names": list(solved.task.silos)} if each else {}
    return {"free": free, **number, **names, **cost, "recipe_kept": found.recipe_kept, "out": str(out) if out else None}


def check_new(out: Path) -> None:
    """A file that can be written and is not there yet."""
    if out.exists():
        raise ConfigError(f"{out}, which exists", "a new file", "choose another --out")
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise ConfigError(f"no folder {out.parent} to write to", "an --out in a folder that exists")
    with open(out, "xb"):  # what only the system knows, as that /proc takes no file: before the work, not after it
        out.unlink()


def _value(plan: Plan, free: str) -> float:
    if free == "rounds":
        return plan.rounds
    if free == "cohort":
        return plan.clients.expected
    release = codec.dump(plan.local if plan.release.kind == "forward" else plan.release)
    return float(release.get("noise_multiplier") or release["mechanism"]["noise_multiplier"])


def calibrated_text(found: dict[str, Any]) -> str:
    """The answer of a calibration: one line, or one for every silo that has its own noise."""
    where = f"; written to {found['out']}" if found["out"] else ""
    written_out = "" if found.get("recipe_kept", True) else "; the recipe has no key for it, so the plan is written out"
    cost = f"epsilon {upto(found['epsilon'], 4)} at delta {upto(found['delta'])}"
    if "values" not in found:
        return f"{found['free']} = {found['value']:.6g}: {cost}{where}{written_out}"
    groups = found.get("silos") or [{**found, "silos": range(len(found["values"]))}]
    own = {silo: group for group in groups for silo in group["silos"]}
    lines = [
        f"{found['names'][silo] if found['names'] else f'silo {silo}'}: {found['free']} = {value:.6g}, "
        f"epsilon {upto(own[silo]['epsilon'], 4)} at delta {upto(own[silo]['delta'])}"
        for silo, value in enumerate(found["values"])
    ]
    return "\n".join([*lines, *([f"{where}{written_out}".removeprefix("; ")] if where or written_out else [])])


LAW = "negative_binomial"


@app.command()
def tune(
    file: ConfigFile,
    epsilon: Annotated[list[float] | None, typer.Option(help="A budget; several give a curve each.")] = None,
    data: Annotated[str, typer.Option(help="public | synthetic: the data that the search reads.")] = "public",
    seeds: Annotated[int, typer.Option(help="Simulations per candidate, each with its own seed.")] = 3,
    out: Annotated[Path | None, typer.Option(help="A new folder: the trials and tuned.toml, or the best run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search in --out.")] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Run trials on the private data; release the best alone.")
    ] = False,
    over: Annotated[
        list[str] | None, typer.Option(help="--private: what to try, as in 'recipe.lr=[0.1, 0.3]'; may be repeated.")
    ] = None,
    trials: Annotated[float, typer.Option(help="--private: how many trials on average.")] = 10.0,
    law: Annotated[str, typer.Option(help="--private: negative_binomial | poisson, the law of their number.")] = LAW,
    shape: Annotated[float, typer.Option(help="--private: eta of the negative binomial; 1 is geometric.")] = 1.0,
    metric: Annotated[str, typer.Option(help="--private: the metric that chooses.")] = "",
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Local steps, rounds, batch and step size for a budget, on public data; or on private data, the cost certified."""
    bring(own)
    import torch

    from sordino.cli import tune_output

    torch.set_num_threads(1)
    changes = changed(values, seed)
    if private:
        number = tune_output.read_trials(trials, law, shape)
        asked = tune_output.private_tuning(file, changes, over or [], number, epsilon or [], metric)
        return tune_output.run_private(asked, out, as_json)
    if over:
        raise ConfigError("--over without --private", "both", "sordino sweep compares settings on public data")
    known: dict[str, Any] = {"source": data, "seeds": seeds, "changes": changes, "quiet": as_json}
    found = tune_output.tune_config(file, epsilons=epsilon or [], out=out, resume=resume, **known)
    say(as_json, found, tune_output.text(found))
    return None


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file with [sweep]: grid, random, recipe, epsilon.")],
    out: Annotated[Path | None, typer.Option(help="A new folder for all runs.")] = None,
    workers: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in --out.")] = False,
    forecast: Annotated[bool, typer.Option("--plan", help="Say what would run, and what it would cost.")] = False,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Runs over a grid, random settings or whole recipes, at one epsilon if asked; one table with its privacy cost."""
    bring(own)
    from sordino.tuning import sweep as sweeping
    from sordino.tuning.search_space import Sweep

    asked = Sweep.read(file)
    if forecast:
        planned, text = sweeping.forecast(asked)
        return say(as_json, planned, text)
    if out is None:
        raise ConfigError("a sweep without --out", "a new folder for its runs", "add --out sweeps/a")
    with working("sweep", quiet=as_json) as progress:
        found = sweeping.sweep(asked, out, workers=workers, resume=resume, own=own or [], progress=progress)
    say(as_json, found, (out / "table.txt").read_text("utf-8").rstrip("\n"))
    return None
