"""Commands `sordino plan`, `epsilon`, `calibrate`, `tune` and `sweep`: privacy costs, and the choice of settings."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.profiles import participations_in_words as in_words
from sordino.accounting.rounding import upto
from sordino.cli.console import Changes, ConfigFile, JsonFlag, Own, Seed, app, changed, load_own_parts, output, working
from sordino.errors import ConfigError

if TYPE_CHECKING:
    from sordino.config import Config
    from sordino.parts.releases import Release
    from sordino.parts.samplers import Sampler
    from sordino.plan import Plan

CERTIFIED = (
    "epsilon", "delta", "unit", "relation", "own_code", "adversaries", "sampler", "trust", "silos", "clip",
    "denominator", "plan_sha256",
)  # fmt: skip
SAMPLERS = ("poisson", "fixed", "full", "roundrobin", "shuffle", "allocation", "kept_bins")
FREE = ("noise_multiplier", "rounds", "cohort")
SMOOTHING_PAYS = 18.0  # noise to signal from which Laplacian smoothing gains accuracy on CNNs: docs/papers.md


@app.command()
def plan(
    file: ConfigFile, values: Changes = None, seed: Seed = None, own: Own = None, as_json: JsonFlag = False
) -> None:
    """Print the plan's parts, the norm bound of a message and the forecast epsilon per adversary; read no data."""
    load_own_parts(own)
    from sordino.config import load_config

    found = forecast(load_config(file, changed(values, seed)))
    output(as_json, found, forecast_text(found))


def forecast(config: Config) -> dict[str, Any]:
    """Return the fields that the certificate of a finished run would have, and the bounds of its messages."""
    from sordino.accounting.bounds import AlreadyPrivate
    from sordino.certificate.build import certificate
    from sordino.certificate.facts import Facts

    plan, reads = config.plan, config.plan.local.reads
    notes = list(config.check_task())
    sizes = (plan.units,) if reads is None else reads.sizes
    deltas = config.deltas or (config.delta,) * len(sizes)
    delta, size = max(zip(deltas, sizes, strict=False), key=lambda pair: (pair[0], -pair[1]))
    if plan.release.kind != "no_noise" and (delta > accountant.LARGEST_DEFAULT or accountant.few(size)):
        notes.append(accountant.meaning_of_delta(delta, size, plan.unit))
    config.check_budget()
    facts = Facts(config.delta, config.privacy.noise, plan.rounds, **config.facts, own_code=config.own_code())
    promised = certificate(plan, facts)
    chain = []
    for name, bound in zip([plan.local.kind, *(step.kind for step in plan.encode)], plan.bounds, strict=True):
        if isinstance(bound, AlreadyPrivate):
            words = f"noised by the local solver, per {bound.unit}"
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
        **({"notes": notes} if notes else {}),
    }


def _noise_of_models(plan: Plan) -> dict[str, float] | None:
    """Return the noise of the models in clip norms: of the plan's correlated noise, and of independent noise."""
    from sordino.parts.correlated_noise import noise_of_models

    alone = plan.release.independent(plan.clients, plan.patterns) if plan.release.correlated else None
    if alone is None:
        return None
    work = plan.server.workload(plan.rounds)
    found = (noise_of_models(release, work) or 0.0 for release in (plan.release, alone))
    return dict(zip(("correlated", "independent"), (each / plan.clients.expected for each in found), strict=True))


def noise_to_signal(config: Config) -> dict[str, float] | None:
    """Return the norm of the noise in a round's mean update, z sqrt(d) / S in clip norms.

    z is the noise multiplier, d the number of parameters, and S the expected number of clients (unit record: of
    records) in a round. None if d is unknown before the data are read, without noise, or if local steps add noise.
    """
    from sordino.accounting.bounds import AlreadyPrivate

    plan, trial = config.plan, config.trial_task()
    if trial is None or plan.release.kind == "no_noise" or isinstance(plan.bound, AlreadyPrivate):
        return None
    parameters = trial.layout.size
    ratio = noise_ratio(plan, parameters)
    return {"ratio": ratio, "parameters": parameters, "smoothing_pays_above": SMOOTHING_PAYS}


def noise_ratio(plan: Plan, parameters: int) -> float:
    """Return the norm of the noise in a round's mean update, in clip norms, for a model of this many parameters."""
    cohort = np.arange(max(1, round(plan.clients.expected)), dtype=np.int64)
    summed = plan.release.denominator(plan.clients.expected, len(cohort))
    summed *= 1.0 if plan.local.reads is None else plan.local.reads.count
    return plan.release.noise_std(cohort, 0) * math.sqrt(plan.length(parameters)) / summed


def forecast_text(found: dict[str, Any]) -> str:
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
    """Return one line with each named silo's guarantee against an adversary who reads its messages."""
    own = found["adversaries"][-1].get("silos", []) if found["silos"] else []
    pairs = sorted(((silo, entry) for entry in own for silo in entry["silos"]), key=lambda pair: pair[0])
    return [f"  {_epsilon(entry)}  of {found['silos'][silo]}" for silo, entry in pairs]


def _epsilon(line: dict[str, Any]) -> str:
    if line["epsilon"] is None:
        return f"{'no guarantee':<32}"
    return f"epsilon {upto(line['epsilon'], 4):<9} delta {upto(line['delta']):<8}"


@app.command()
def epsilon(
    sampler: Annotated[
        str, typer.Option(help="poisson | fixed | full | roundrobin | shuffle | allocation | kept_bins")
    ],
    population: Annotated[
        int | None, typer.Option(help="Number of clients (shuffle: number of reports; allocation: for delta alone).")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 1,
    delta: Annotated[float | None, typer.Option(help="Default: population ** -1.1, at most 1e-3")] = None,
    cohort: Annotated[float | None, typer.Option(help="Clients per round; for poisson on average.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise scale / clip norm.")] = None,
    mechanism: Annotated[str, typer.Option(help="gaussian | laplace")] = "gaussian",
    epsilon0: Annotated[float | None, typer.Option(help="shuffle: epsilon of one message.")] = None,
    cap: Annotated[int | None, typer.Option(help="poisson: most clients a round keeps.")] = None,
    bins: Annotated[
        int | None, typer.Option(help="allocation, kept_bins: rounds of a pass; each client is in one.")
    ] = None,
    passes: Annotated[
        int | None, typer.Option(help="allocation, kept_bins: number of passes, in place of --rounds.")
    ] = None,
    bands: Annotated[int | None, typer.Option(help="kept_bins: bands of the correlated noise; 1: independent.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute the epsilon of a sampler, a noise and a number of rounds."""
    if bands is not None and sampler != "kept_bins":
        given, fix = f"--bands with --sampler {sampler}", "remove it, or use --sampler kept_bins"
        raise ConfigError(given, "--bands with --sampler kept_bins only", fix)
    if sampler in ("allocation", "kept_bins"):
        if bins is None:
            raise ConfigError("no --bins", "the number of rounds in a pass", "add --bins 10")
        rounds = rounds if passes is None else passes * bins
        population = bins if population is None and delta is not None else population
    elif bins is not None or passes is not None:
        given, fix = f"--bins or --passes with --sampler {sampler}", "remove them, or use --sampler allocation"
        raise ConfigError(given, "--bins and --passes with --sampler allocation or kept_bins only", fix)
    if population is None:
        raise ConfigError("no --population", "the number of clients", "add --population 1000")
    for option, value in (("population", population), ("rounds", rounds)):
        if value < 1:
            raise ConfigError(f"--{option} {value}", "at least 1", f"correct --{option}")
    delta = accountant.default_delta(population) if delta is None else delta
    accountant.check_delta(delta, population, override=True)
    found = epsilon_of(
        sampler, population, rounds, delta, cohort, noise_multiplier, mechanism, epsilon0, cap, bins, bands
    )
    output(as_json, found, epsilon_text(found))


def epsilon_of(
    sampler: str, population: int, rounds: int, delta: float, cohort: float | None = None,
    noise_multiplier: float | None = None, mechanism: str = "gaussian", epsilon0: float | None = None,
    cap: int | None = None, bins: int | None = None, bands: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return epsilon against an adversary who sees the released models, and against one who also sees the cohorts.

    With sampler `shuffle`, clients randomise their own messages, by an `epsilon0`-DP randomiser or by added noise.
    """
    from sordino.accounting.composition import Line, Participation, client_cost
    from sordino.accounting.events import Approximate, Event, Shuffled
    from sordino.certificate.build import line_entry
    from sordino.parts.mechanisms import Gaussian, Laplace
    from sordino.parts.releases import CentralNoise

    kinds = {"gaussian": Gaussian, "laplace": Laplace}
    if sampler not in SAMPLERS:
        raise ConfigError(f"--sampler {sampler}", "the name of a sampler", codec.nearest(sampler, list(SAMPLERS)))
    if mechanism not in kinds:
        raise ConfigError(f"--mechanism {mechanism}", "gaussian or laplace", codec.nearest(mechanism, list(kinds)))
    noise = None if noise_multiplier is None else kinds[mechanism](noise_multiplier)
    if sampler == "shuffle":
        if epsilon0 is not None:
            local: Event = Approximate(epsilon0)
        elif noise is not None:
            local = noise.event()
        else:
            found, needed = "neither --epsilon0 nor --noise-multiplier", "the privacy of a message before the shuffler"
            raise ConfigError(found, needed, "add --epsilon0 or --noise-multiplier")
        lines = [Line("models", "replace_one", ((Shuffled(population, local), rounds),))]
    elif noise is None:
        raise ConfigError("no --noise-multiplier", "the ratio noise scale / clip norm", "add --noise-multiplier 1.0")
    else:
        clients = client_sampler(sampler, population, cohort, cap, bins)
        release = CentralNoise(noise) if bands is None else banded(noise.noise_multiplier, bands, clients, rounds)
        cost = client_cost(clients, release, Participation.planned(clients, rounds))
        lines = [cost.line("models"), cost.line("cohort")]
    each = [{"adversary": line.adversary, **line_entry(line, delta)} for line in lines]
    return {**each[0], "unit": "client", "accountant": accountant.VERSION, "adversaries": each}


def client_sampler(
    sampler: str, population: int, cohort: float | None, cap: int | None = None, bins: int | None = None
) -> Sampler:
    """Return the sampler that the options of `sordino epsilon` name."""
    from sordino.parts import samplers

    if sampler == "full":
        return samplers.Everyone(population)
    if sampler in ("allocation", "kept_bins"):
        kind = samplers.RandomAllocation if sampler == "allocation" else samplers.KeptBins
        return kind(population, bins or 0)
    if cohort is None:
        needed = "the number of clients in a round (for poisson: on average)"
        raise ConfigError("no --cohort", needed, "add --cohort 100")
    if sampler == "poisson":
        return samplers.Poisson(population, cohort / population, cap)
    if not float(cohort).is_integer():
        raise ConfigError(f"--cohort {cohort}", f"a whole number for --sampler {sampler}", "round --cohort")
    return (samplers.FixedSize if sampler == "fixed" else samplers.RoundRobin)(population, int(cohort))


def banded(noise_multiplier: float, bands: int, clients: Sampler, rounds: int) -> Release:
    """Return correlated noise whose bands are optimised for the mean of the models of all rounds."""
    from sordino.accounting.sensitivity import Patterns
    from sordino.parts.correlated_noise import CorrelatedNoise
    from sordino.parts.mechanisms import Gaussian
    from sordino.parts.strategies import Banded

    allowed = Patterns(rounds, clients.max_participations(rounds), clients.min_separation or 1, clients.periodic)
    return CorrelatedNoise(Gaussian(noise_multiplier), Banded(bands)).fitted(lambda: allowed, lambda: np.ones(rounds))


def epsilon_text(found: dict[str, Any]) -> str:
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
    values: Changes = None, seed: Seed = None, own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Calibrate the noise multiplier, rounds or cohort to an epsilon, or each silo's noise to its own budget."""
    load_own_parts(own)
    from sordino.certificate.build import headline
    from sordino.config import overridden, parse, read_table
    from sordino.tuning.calibrated_file import calibrated_file, multipliers

    if free not in FREE:
        raise ConfigError(f"--free {free}", "noise_multiplier, rounds or cohort", codec.nearest(free, list(FREE)))
    if out is not None and out.exists():
        raise ConfigError(f"{out}, which exists", "a new file", "choose another --out")
    if out is not None and not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        needed = "an --out in a writable folder that exists"
        raise ConfigError(f"no writable folder {out.parent}", needed, "create the folder, or choose another --out")
    if out is not None:
        with open(out, "xb"):  # fails before the calibration where only the operating system refuses, as in /proc
            out.unlink()
    table = overridden(read_table(file), dict(map(codec.parse_setting, changed(values, seed))))
    config = parse(table)
    accountant.check_delta(
        config.delta if delta is None else delta, config.plan.units, config.privacy.allow_large_delta
    )
    written = calibrated_file(file.read_text("utf-8"), table, epsilon=epsilon, delta=delta, free=free)
    if out is not None:
        out.write_text(written.text, encoding="utf-8")
    plan, solved = written.config.plan, written.config
    each = multipliers(plan) if free == "noise_multiplier" else ()
    cost = headline(plan.cost().of("messages" if each else "models"), solved.delta, solved.deltas)
    number: dict[str, Any] = {"values": list(each), "names": list(solved.task.silos)}
    if not each:
        release = codec.dump(plan.local if plan.release.kind == "forward" else plan.release)
        solutions = {"rounds": plan.rounds, "cohort": plan.clients.expected}
        noise = release.get("noise_multiplier") or release.get("mechanism", {}).get("noise_multiplier")
        number = {"value": solutions.get(free, noise)}
    where = str(out) if out else None
    found = {"free": free, **number, **cost, "recipe_kept": written.recipe_kept, "out": where}
    output(as_json, found, calibrated_text(found))


def calibrated_text(found: dict[str, Any]) -> str:
    """Return the result of a calibration as one line, or as one line per silo if silos have their own noise."""
    where = f"; written to {found['out']}" if found["out"] else ""
    written_out = "" if found.get("recipe_kept", True) else "; the recipe has no such key, so the plan is written out"
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
    private: Annotated[bool, typer.Option("--private", help="Tune on private data; release the best run.")] = False,
    over: Annotated[list[str] | None, typer.Option(help="--private: values, as in 'recipe.lr=[0.1, 0.3]'.")] = None,
    trials: Annotated[float, typer.Option(help="--private: mean number of trials.")] = 10.0,
    law: Annotated[str, typer.Option(help="--private: negative_binomial | poisson trials.")] = "negative_binomial",
    shape: Annotated[float, typer.Option(help="--private: eta of the negative binomial; 1 is geometric.")] = 1.0,
    metric: Annotated[str, typer.Option(help="--private: the metric that chooses the best run.")] = "",
    values: Changes = None, seed: Seed = None, own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Search local steps, rounds, batch and step size for a budget: on public data, or privately with a certificate."""
    load_own_parts(own)
    import torch

    from sordino.cli import tune_output
    from sordino.tuning import private_selection

    torch.set_num_threads(1)
    changes = changed(values, seed)
    if private:
        number = {"mean": trials, "law": law, "shape": shape}
        asked = tune_output.private_tuning(file, changes, over or [], number, epsilon or [], metric)
        if out is None:
            raise ConfigError("--private without --out", "a new folder for the best run", "add --out runs/best")
        print_line = (lambda line: None) if as_json else (lambda line: output(False, {}, line))
        found = private_selection.tune_private(asked, out, print_line)
        return output(as_json, found, private_selection.text(found))
    if over:
        fix = "add --private, or compare settings on public data with sordino sweep"
        raise ConfigError("--over without --private", "both options", fix)
    options: dict[str, Any] = {"source": data, "seeds": seeds, "changes": changes, "quiet": as_json}
    found = tune_output.tune_config(file, epsilons=epsilon or [], out=out, resume=resume, **options)
    output(as_json, found, tune_output.text(found))
    return None


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file with [sweep]: grid, random, recipe, epsilon.")],
    out: Annotated[Path | None, typer.Option(help="A new folder for all runs.")] = None,
    workers: Annotated[int, typer.Option(help="Runs at a time, each in its own process.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in --out.")] = False,
    forecast: Annotated[bool, typer.Option("--plan", help="Print the runs and their cost, without running.")] = False,
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Run many settings (a grid, random ones, or several recipes); write one table with its privacy cost."""
    load_own_parts(own)
    from sordino.tuning import sweep as sweeping
    from sordino.tuning.search_space import Sweep

    asked = Sweep.read(file)
    if forecast:
        planned, text = sweeping.forecast(asked)
        return output(as_json, planned, text)
    if out is None:
        raise ConfigError("a sweep without --out", "a new folder for its runs", "add --out sweeps/a")
    with working("sweep", quiet=as_json) as progress:
        found = sweeping.sweep(asked, out, workers=workers, resume=resume, own=own or [], progress=progress)
    output(as_json, found, (out / "table.txt").read_text("utf-8").rstrip("\n"))
    return None
