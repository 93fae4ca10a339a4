"""Commands on finished runs: `sordino certify` recomputes a certificate, `explain` says it in words, `model-card`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli.console import Certified, JsonFlag, Own, app, bring, say

if TYPE_CHECKING:
    from sordino.certificate.facts import Facts
    from sordino.plan import Plan
    from sordino.report.cards import About


AboutFile = Annotated[
    Path | None, typer.Option("--about", help="A TOML file: name, curators, description, intended_use, region, ...")
]


@app.command()
def certify(
    target: Certified,
    key: Annotated[Path | None, typer.Option(help="Also check the signature, with this public key (PEM).")] = None,
    sign: Annotated[Path | None, typer.Option(help="Sign what was certified with this Ed25519 key (PEM).")] = None,
    registry: Annotated[
        Path | None, typer.Option(help="Also write an entry for OpenDP's registry of deployments (YAML).")
    ] = None,
    about: AboutFile = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Recompute the certificate from everything in the folder, or from the loop's file; exit 1 on any mismatch."""
    bring(own)
    from sordino.certificate import certificate_file

    if (target / "sweep.json").is_file():
        from sordino.tuning import sweep, sweep_report

        made = sweep.certify(target)
        return say(as_json, {"certified": True, **made}, f"certified: {sweep_report.guarantee(made)}")
    owner = None if key is None else certificate_file.public_key(key)
    signer = None if sign is None else certificate_file.private_key(sign)
    known = described(about)
    certificate = certified(target)
    left = [] if registry is None else registered(certificate, known, registry)
    if signer is not None:
        certificate_file.sign(target, signer)
    if owner is not None:
        certificate_file.check_signature(target, owner)
    signed = {"signed": True} if owner is not None else {}
    said = "certified, and signed with this key: " if owner is not None else "certified: "
    limits = {} if certificate["loop"] is None else {"proved": LOOP}
    told = "; ".join([said + guarantee(certificate), *limits.values()])
    told += "" if registry is None else f"\nregistry entry: {registry}{to_write(left)}"
    say(as_json, {"certified": True, **limits, **signed, **certificate}, told)
    return None


LOOP = "this follows from the plan and the counts in the file; a loop keeps no chain of charges that would show more"


def described(file: Path | None) -> About:
    """What the user says of a deployment, or nothing."""
    from sordino import codec
    from sordino.report.cards import About

    example = "keys: name, curators, description, intended_use, region, ..."
    table = {} if file is None else codec.read_toml(file, example)
    found: About = codec.read(About, table, "about")
    return found


def registered(made: dict[str, Any], about: About, file: Path) -> list[str]:
    """Write the entry; what is left for its curator to write."""
    from sordino.errors import ConfigError
    from sordino.report.cards import registry_entry, to_yaml

    if not re.fullmatch(r"[a-z0-9_]+\.yaml", file.name):
        raise ConfigError(f"--registry {file.name}", "small letters, digits and _, then .yaml, as the registry asks")
    put(file, to_yaml(registry_entry(made, about)))
    return about.open


def to_write(left: list[str]) -> str:
    """Which keys of --about are missing, in words."""
    return f"; to be written: {', '.join(left)} (--about)" if left else ""


def put(file: Path, text: str) -> None:
    """A text file, whole or not at all."""
    from sordino.codec import durable_files

    durable_files.write(file, text.encode())


def certified(target: Path) -> dict[str, Any]:
    """The certificate of a run's folder or of a loop's file, if it is what the rest of it gives."""
    if target.is_file():
        from sordino.dpsgd import account

        return account.certify(target).certificate
    from sordino.runs.folder import RunFolder

    return RunFolder.open(target).certify()


def guarantee(made: dict[str, Any]) -> str:
    """The certificate's first line in words."""
    if made["epsilon"] is None:
        return f"no guarantee (unit {made['unit']}, relation {made['relation']})"
    from sordino.accounting.rounding import upto

    epsilon = upto(made["epsilon"], 4)
    return f"epsilon {epsilon}, delta {upto(made['delta'])}, unit {made['unit']}, relation {made['relation']}"


@app.command()
def explain(target: Certified, own: Own = None, as_json: JsonFlag = False) -> None:
    """The certificate in plain sentences: what is protected, against whom, how strongly, what is assumed."""
    bring(own)
    from sordino.certificate import explain as explaining
    from sordino.tuning import sweep, sweep_report

    if sweep.is_sweep(target):
        return say(as_json, *sweep_report.explain(sweep.certify(target)))
    certificate, plan, facts = certified_with_plan(target)
    said = explaining.explain(certificate, explaining.ceilings(plan, facts))
    return say(as_json, said, explaining.page(said))


def certified_with_plan(target: Path) -> tuple[dict[str, Any], Plan, Facts]:
    """The certificate, if it is what the rest of the folder or of the file gives; and what it follows from."""
    from sordino.dpsgd import account
    from sordino.runs.folder import RunFolder

    if target.is_file():
        found = account.certify(target)
        return found.certificate, found.plan, found.facts
    folder = RunFolder.open(target)
    made, held = folder.certify(), folder.contents()
    return made, held.config.plan, folder.facts(held)


@app.command("model-card")
def model_card(
    target: Certified,
    out: Annotated[Path, typer.Option(help="The card; Hugging Face wants it as README.md beside the model.")],
    about: AboutFile = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a model card with the certificate in it: the guarantee, whom one has to trust, and the figures."""
    bring(own)
    from sordino.certificate import explain as explaining
    from sordino.report import cards

    known = described(about)
    certificate, plan, facts = certified_with_plan(target)
    said = explaining.explain(certificate, explaining.ceilings(plan, facts))
    put(out, cards.model_card(certificate, said, known, _dataset(target)))
    say(as_json, {"card": str(out), "to_be_written": known.open}, f"model card: {out}{to_write(known.open)}")


def _dataset(target: Path) -> str:
    from sordino.runs.folder import RunFolder

    return "a loop's own" if target.is_file() else RunFolder.open(target).config().task.dataset
