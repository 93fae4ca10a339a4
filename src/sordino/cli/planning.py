"""Commands `sordino plan`, `epsilon`, `calibrate`, `tune` and `sweep`: what a configuration costs, which to choose."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from sordino import codec
from sordino.accounting.accountant import check_delta
from sordino.accounting.profiles import participations_in_words as in_words
from sordino.accounting.rounding import upto
from sordino.cli.console import Changes, ConfigFile, JsonFlag, Own, Seed, app, bring, changed, say, working
from sordino.errors import ConfigError

if TYPE_CHECKING:
    from sordino.config import Config
    from sordino.parts.samplers import Sampler
    from sordino.plan import Plan

CERTIFIED = (
    "epsilon", "delta", "unit", "relation", "own_code", "adversaries", "sampler", "trust", "silos", "clip",
    "denominator", "plan_sha256",
)  # fmt: skip
SAMPLERS = ("poisson", "fixed", "full", "roundrobin", "shuffle")
FREE = ("noise_multiplier", "rounds", "cohort")
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
    """Return what a run of this file would be certified with, and how its messages are bounded."""
    from sordino.accounting.bounds import AlreadyPrivate
    from sordino.certificate.build import certificate
    from sordino.certificate.facts import Facts

    plan = config.plan
    notes = (*config.check_task(), *_large_delta(config))
    config.check_budget()
    facts = Facts(config.delta, config.privacy.noise, plan.rounds, **config.facts, own_code=config.own_code())
    promised = certificate(plan, facts)
    chain = []
    for name, bound in zip([plan.local.kind, *(step.kind for step in plan.encode)], plan.bounds, strict=True):
        if isinstance(bound, AlreadyPrivate):
            words = f"private already, per {bound.unit}"
        else:
            words = f"L{bound.norm} norm of one {bound.unit}'s message at most 1, in units of the clip norm"
            words = words if bound.finite else "none"
        chain.append({"after": name, "bound": words})
    return {
        **{key: promised[key] for key in CERTIFIED},
        "rounds": plan.rounds,
        "bounds": chain,
        "noise_of_models": _noise_of_models(plan),
        "noise_to_signal": noise_to_signal(config),
        "plan": codec.dump(plan),
        **({"notes": list(notes)} if notes else {}),
    }


def _large_delta(config: Config) -> tuple[str, ...]:
    """Return a note on what delta means where it is large or units are few: for the smallest silo, if each has one."""
    from sordino.accounting.accountant import LARGEST_DEFAULT, few, meaning_of_delta

    plan, reads = config.plan, config.plan.local.reads
    sizes = (plan.units,) if reads is None else reads.sizes
    deltas = config.deltas or (config.delta,) * len(sizes)
    delta, size = max(zip(deltas, sizes, strict=False), key=lambda pair: (pair[0], -pair[1]))
    if plan.release.kind == "no_noise" or (delta <= LARGEST_DEFAULT and not few(size)):
        return ()
    return (meaning_of_delta(delta, size, plan.unit),)


def _noise_of_models(plan: Plan) -> dict[str, float] | None:
    """Return the noise of the models in units of the clip norm, for correlated noise and independent noise instead."""
    from sordino.parts.correlated_noise import noise_of_models

    alone = plan.release.independent(plan.clients, plan.patterns) if plan.release.correlated else None
    if alone is None:
        return None
    work = plan.server.workload(plan.rounds)
    found = (noise_of_models(release, work) or 0.0 for release in (plan.release, alone))
    return dict(zip(("correlated", "independent"), (each / plan.clients.expected for each in found), strict=True))


def noise_to_signal(config: Config) -> dict[str, float] | None:
    """Return z sqrt(d) / S: the norm of the noise in the mean of a cohort of S updates of clip norm 1 and dimension d.

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


def forecast_text(found: dict[str, Any]) -> str:
    """Return the forecast as a page of text."""
    plan, own = found["plan"], found["own_code"]
    lines = [f"{found['rounds']} rounds"]
    for name in ("prepare", "clients", "local", "encode", "release", "postprocess", "server"):
        parts = plan.get(name, [])
        lines += [f"  {name:<12} {_part(part)}" for part in (parts if isinstance(parts, list) else [parts])]
    lines += ["bound of a message", *(f"  after {one['after']:<20} {one['bound']}" for one in found["bounds"])]
    if (noise := found["noise_of_models"]) is not None:
        beside = f"{noise['independent']:.4g} with independent noise at equal privacy"
        lines.append("noise of one coordinate of the models, root mean square over rounds")
        lines.append(f"  {noise['correlated']:.4g} clips; {beside}")
    if (signal := found["noise_to_signal"]) is not None:
        ratio, size = f"{signal['ratio']:.3g}", f"{signal['parameters']:,}"
        lines.append(f"noise to signal of an update, z sqrt(d) / S: {ratio} with d = {size}")
        lines.append(f"  Laplacian smoothing pays above about {signal['smoothing_pays_above']:g}")
    unknown = "not examined yet: the shape of a record is not known before the data is read"
    code = unknown if own is None else f"{own['grade']}: {own['why']}"
    lines += ["code that runs on private records", f"  {code}", "forecast"]
    for line in found["adversaries"]:
        lines.append(f"  {_epsilon(line)}  {line['relation']:<12} to one who {line['description']}")
        if "by_participations" in line:
            lines.append(f"    {in_words(line['by_participations'])}")
    return "\n".join([*lines, *silo_lines(found), *(f"note: {note}" for note in found.get("notes", []))])


def _part(part: dict[str, Any]) -> str:
    values = [f"{key}={_part(v) if isinstance(v, dict) else v}" for key, v in part.items() if key != "kind"]
    return f"{part.get('kind', '')}({', '.join(values)})"  # a mean of iterates has no kind


def silo_lines(found: dict[str, Any]) -> list[str]:
    """Return each silo's own guarantee against one who reads its messages, where silos have names."""
    own = found["adversaries"][-1].get("silos", []) if found["silos"] else []
    pairs = sorted(((silo, entry) for entry in own for silo in entry["silos"]), key=lambda pair: pair[0])
    return [f"  {_epsilon(entry)}  of {found['silos'][silo]}" for silo, entry in pairs]


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
    from sordino.accounting.accountant import default_delta

    for option, value in (("population", population), ("rounds", rounds)):
        if value < 1:
            raise ConfigError(f"--{option} {value}", "at least 1")
    delta = default_delta(population) if delta is None else delta
    check_delta(delta, population, override=True)
    found = epsilon_of(sampler, population, rounds, delta, cohort, noise_multiplier, mechanism, epsilon0, cap)
    say(as_json, found, epsilon_text(found))


def epsilon_of(
    sampler: str,
    population: int,
    rounds: int,
    delta: float,
    cohort: float | None = None,
    noise_multiplier: float | None = None,
    mechanism: str = "gaussian",
    epsilon0: float | None = None,
    cap: int | None = None,
) -> dict[str, Any]:
    """Return epsilon against one who sees the released models, and against one who also sees the cohort.

    With the sampler `shuffle`, clients randomise messages themselves: by pure `epsilon0`, or by a mechanism's noise.
    """
    from sordino.accounting import accountant
    from sordino.accounting.composition import Line, Participation, client_cost
    from sordino.accounting.events import Approximate, Event, Shuffled
    from sordino.certificate.build import line_entry
    from sordino.parts.mechanisms import Gaussian, Laplace
    from sordino.parts.releases import CentralNoise

    kinds = {"gaussian": Gaussian, "laplace": Laplace}
    if sampler not in SAMPLERS:
        raise ConfigError(f"--sampler {sampler}", "a known sampler", codec.nearest(sampler, list(SAMPLERS)))
    if mechanism not in kinds:
        raise ConfigError(f"--mechanism {mechanism}", "gaussian or laplace", codec.nearest(mechanism, list(kinds)))
    noise = None if noise_multiplier is None else kinds[mechanism](noise_multiplier)
    if sampler == "shuffle":
        if epsilon0 is not None:
            local: Event = Approximate(epsilon0)
        elif noise is not None:
            local = noise.event()
        else:
            found = "neither --epsilon0 nor --noise-multiplier"
            raise ConfigError(found, "how private one message is before the shuffler")
        lines = [Line("models", "replace_one", ((Shuffled(population, local), rounds),))]
    elif noise is None:
        raise ConfigError("no --noise-multiplier", "the noise's scale over the clip norm")
    else:
        clients = _sampler(sampler, population, cohort, cap)
        cost = client_cost(clients, CentralNoise(noise), Participation.planned(clients, rounds))
        lines = [cost.line("models"), cost.line("cohort")]
    each = [{"adversary": line.adversary, **line_entry(line, delta)} for line in lines]
    return {**each[0], "unit": "client", "accountant": accountant.VERSION, "adversaries": each}


def _sampler(name: str, population: int, cohort: float | None, cap: int | None) -> Sampler:
    from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin

    if name == "full":
        return Everyone(population)
    if cohort is None:
        raise ConfigError("no --cohort", "how many clients a round has (for poisson: on average)")
    if name == "poisson":
        return Poisson(population, cohort / population, cap)
    if not float(cohort).is_integer():
        raise ConfigError(f"--cohort {cohort}", f"a whole number for --sampler {name}")
    return FixedSize(population, int(cohort)) if name == "fixed" else RoundRobin(population, int(cohort))


def epsilon_text(found: dict[str, Any]) -> str:
    """Return the answer of `sordino epsilon` in words."""
    who = {"models": "sees the released models", "cohort": "also sees who took part"}
    lines = []
    for line in found["adversaries"]:
        epsilon, rdp = ("-" if line[key] is None else upto(line[key], 4) for key in ("epsilon", "epsilon_rdp"))
        cost = f"epsilon {epsilon} (RDP {rdp}), delta {upto(line['delta'])}, {line['relation']}"
        lines.append(f"{cost}: to one who {who[line['adversary']]}")
        if "by_participations" in line:
            lines.append(f"  {in_words(line['by_participations'])}")
    grid = "none" if found["grid"] is None else f"{found['grid']:.3g}"
    return "\n".join([*lines, f"unit {found['unit']}; {found['accountant']}, {found['method']}, grid {grid}"])


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
    from sordino.certificate.build import headline
    from sordino.config import overridden, parse, read_table
    from sordino.tuning.calibrated_file import calibrated_file, multipliers

    if free not in FREE:
        raise ConfigError(f"--free {free}", "noise_multiplier, rounds or cohort", codec.nearest(free, list(FREE)))
    if out is not None:
        _check_new(out)
    table = overridden(read_table(file), dict(map(codec.parse_setting, changed(values, seed))))
    config = parse(table)
    check_delta(config.delta if delta is None else delta, config.plan.units, config.privacy.allow_large_delta)
    written = calibrated_file(file.read_text("utf-8"), table, epsilon=epsilon, delta=delta, free=free)
    if out is not None:
        out.write_text(written.text, encoding="utf-8")
    plan, solved = written.config.plan, written.config
    each = multipliers(plan) if free == "noise_multiplier" else ()
    cost = headline(plan.cost().of("messages" if each else "models"), solved.delta, solved.deltas)
    number: dict[str, Any] = {"value": _value(plan, free)} if not each else {"values": list(each)}
    names = {"names": list(solved.task.silos)} if each else {}
    where = str(out) if out else None
    found = {"free": free, **number, **names, **cost, "recipe_kept": written.recipe_kept, "out": where}
    say(as_json, found, calibrated_text(found))


def _check_new(out: Path) -> None:
    """Refuse a path that exists or cannot be written."""
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
    """Return the result of a calibration in one line, or in one for every silo that has its own noise."""
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
    law: Annotated[
        str, typer.Option(help="--private: negative_binomial | poisson, the law of their number.")
    ] = "negative_binomial",
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
        number = {"mean": trials, "law": law, "shape": shape}
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
