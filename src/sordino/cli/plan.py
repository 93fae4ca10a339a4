"""`sordino plan`: parts, bound chain and forecast epsilon per adversary; touches no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sordino import codec
from sordino.cli.app import Changes, ConfigFile, JsonFlag, Own, Seed, app, bring, changed, say

if TYPE_CHECKING:
    from sordino.config import Config
    from sordino.parts.bounds import Bound, Spent
    from sordino.plan import Plan


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
    from sordino.privacy.certificate import certificate
    from sordino.privacy.facts import Facts

    plan = config.plan
    notes = (*config.look(), *_of_few(config))
    config.check_budget()
    facts = Facts(config.delta, config.privacy.noise, plan.rounds, **config.facts, own_code=config.own_code())
    promised = certificate(plan, facts)
    names = [plan.local.kind, *(step.kind for step in plan.encode)]
    chain = [{"after": name, "bound": _bound(bound)} for name, bound in zip(names, plan.bounds, strict=True)]
    keys = (
        "epsilon",
        "delta",
        "unit",
        "relation",
        "own_code",
        "adversaries",
        "sampler",
        "trust",
        "silos",
        "clip",
        "denominator",
        "plan_sha256",
    )
    return {
        **{key: promised[key] for key in keys},
        "rounds": plan.rounds,
        "bounds": chain,
        "noise_of_models": _noise(plan),
        "plan": codec.dump(plan),
        **({"notes": list(notes)} if notes else {}),
    }


def _of_few(config: Config) -> tuple[str, ...]:
    """What delta means, where it is large or there are few units: to the smallest silo, if each has its own."""
    from sordino.privacy.delta import LARGEST_DEFAULT, few, meaning_of_delta

    plan, reads = config.plan, config.plan.local.reads
    sizes = (plan.units,) if reads is None else reads.sizes
    deltas = config.deltas or (config.delta,) * len(sizes)
    delta, size = max(zip(deltas, sizes, strict=False), key=lambda pair: (pair[0], -pair[1]))
    if plan.release.kind == "no_noise" or (delta <= LARGEST_DEFAULT and not few(size)):
        return ()
    return (meaning_of_delta(delta, size, plan.unit),)


def _noise(plan: Plan) -> dict[str, float] | None:
    """Of noise that rounds share: what is left of it in the models, in units of the clip, beside independent noise."""
    from sordino.parts.correlated import CorrelatedNoise, noise_of_models

    if not isinstance(plan.release, CorrelatedNoise):
        return None
    work, alone = plan.server.workload(plan.rounds), plan.release.independent(plan.clients, plan.patterns)
    found = (noise_of_models(release, work) or 0.0 for release in (plan.release, alone))
    return dict(zip(("correlated", "independent"), (each / plan.clients.expected for each in found), strict=True))


def _noise_lines(found: dict[str, float] | None) -> list[str]:
    if found is None:
        return []
    line = f"  {found['correlated']:.4g} clips; {found['independent']:.4g} with independent noise at equal privacy"
    return ["noise of one coordinate of the models, root mean square over rounds", line]


def _bound(bound: Bound | Spent) -> str:
    from sordino.parts.bounds import Spent

    if isinstance(bound, Spent):
        return f"private already, per {bound.unit}"
    return (
        f"L{bound.norm} norm of one {bound.unit}'s message at most 1, in units of the radius"
        if bound.finite
        else "none"
    )


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
    from sordino.privacy.participations import in_words

    told = line.get("by_participations")
    first = f"  {_epsilon(line)}  {line['relation']:<12} to one who {line['description']}"
    return [first, *([f"    {in_words(told)}"] if told else [])]


def _epsilon(line: dict[str, Any]) -> str:
    if line["epsilon"] is None:
        return f"{'no guarantee':<32}"
    from sordino.privacy.rounding import upto

    return f"epsilon {upto(line['epsilon'], 4):<9} delta {upto(line['delta']):<8}"
