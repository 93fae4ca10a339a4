"""Commands on finished runs: `sordino certify`, `explain`, `model-card`, `compare`, `report`, `audit`; and `papers`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli.console import Certified, Changes, JsonFlag, Own, RunPaths, Seed, app, bring, changed, finite, say
from sordino.errors import ConfigError

if TYPE_CHECKING:
    from sordino.certificate.facts import Facts
    from sordino.plan import Plan
    from sordino.report.cards import About

AboutFile = Annotated[
    Path | None, typer.Option("--about", help="A TOML file: name, curators, description, intended_use, region, ...")
]
LOOP = "this follows from the plan and the counts in the file; a loop keeps no chain of charges that would show more"


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
    public = None if key is None else certificate_file.public_key(key)
    private = None if sign is None else certificate_file.private_key(sign)
    known = _read_about(about)
    certificate = certified_with_plan(target)[0]
    text = f"certified: {guarantee(certificate)}" + ("" if certificate["loop"] is None else f"; {LOOP}")
    if registry is not None:
        from sordino.report.cards import registry_entry, to_yaml

        if not re.fullmatch(r"[a-z0-9_]+\.yaml", registry.name):
            needed = "small letters, digits and _, then .yaml, as the registry asks"
            raise ConfigError(f"--registry {registry.name}", needed)
        _write(registry, to_yaml(registry_entry(certificate, known)))
        text += f"\nregistry entry: {registry}{_missing(known)}"
    if private is not None:
        certificate_file.sign(target, private)
    if public is not None:
        certificate_file.check_signature(target, public)
        text = text.replace("certified:", "certified, and signed with this key:", 1)
    facts = ({} if certificate["loop"] is None else {"proved": LOOP}) | ({} if public is None else {"signed": True})
    say(as_json, {"certified": True, **facts, **certificate}, text)
    return None


def _read_about(file: Path | None) -> About:
    """Read what the user writes about a deployment with --about."""
    from sordino import codec
    from sordino.report.cards import About

    example = "keys: name, curators, description, intended_use, region, ..."
    table = {} if file is None else codec.read_toml(file, example)
    found: About = codec.read(About, table, "about")
    return found


def _missing(about: About) -> str:
    return f"; to be written: {', '.join(about.open)} (--about)" if about.open else ""


def _write(file: Path, text: str) -> None:
    from sordino.codec import durable_files

    durable_files.write(file, text.encode())


def guarantee(made: dict[str, Any]) -> str:
    """Return the guarantee of a certificate in one line."""
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
    words = explaining.explain(certificate, explaining.ceilings(plan, facts))
    return say(as_json, words, explaining.page(words))


def certified_with_plan(target: Path) -> tuple[dict[str, Any], Plan, Facts]:
    """Certify a run's folder or a DP-SGD loop's file; return its certificate and the plan and facts it follows from."""
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
    from sordino.runs.folder import RunFolder

    known = _read_about(about)
    certificate, plan, facts = certified_with_plan(target)
    words = explaining.explain(certificate, explaining.ceilings(plan, facts))
    dataset = "a loop's own" if target.is_file() else RunFolder.open(target).config().task.dataset
    _write(out, cards.model_card(certificate, words, known, dataset))
    say(as_json, {"card": str(out), "to_be_written": known.open}, f"model card: {out}{_missing(known)}")


@app.command()
def compare(
    targets: RunPaths,
    latex: Annotated[bool, typer.Option("--latex", help="The table for LaTeX (booktabs).")] = False,
    bibtex: Annotated[bool, typer.Option("--bibtex", help="How to cite what ran, for BibTeX.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the metric against epsilon: .png, .svg or .pdf.")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Settings beside each other: metrics with intervals over seeds, paired differences, epsilons, what differs."""
    bring(own)
    from sordino.report import comparison
    from sordino.report.text_table import bibtex as cite
    from sordino.runs.folder import subjects
    from sordino.tuning.sweep import with_runs

    runs, notes = with_runs(targets)
    found = {**comparison.compare(subjects(runs)), "notes": notes}
    tables = [comparison.comparison_table(found), comparison.differences_table(found)][: 2 if found["settings"] else 1]
    if plot is not None:
        _plot(found, plot)
    forms = [one.latex(f"tab:sordino-{place}") for place, one in enumerate(tables)] * latex
    forms += [cite([run["sordino"] for run in found["runs"]])] * bibtex
    say(as_json, found, "\n\n".join(forms or [*(one.text() for one in tables), *notes]))


def _plot(found: dict[str, Any], file: Path) -> None:
    from sordino.report import charts
    from sordino.report.figures import chart_figure, save_figure

    chart = charts.utility(found)
    if chart is None:
        needed = "two settings or more that have an epsilon and the same metric"
        raise ConfigError(f"--plot of {len(found['comparison']['rows'])} settings", needed)
    try:
        save_figure(chart_figure(chart), file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file}, which cannot be written ({error})", "a .png, .svg or .pdf") from None


@app.command()
def report(
    targets: RunPaths,
    out: Annotated[Path | None, typer.Option(help="The page; a file that is there is replaced.")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """One self-contained HTML page of runs, or of a sweep: the guarantee, curves, certificate in words, audits."""
    bring(own)
    from sordino.report.data import report_data
    from sordino.report.page import write_page
    from sordino.runs.folder import subjects
    from sordino.tuning.sweep import with_runs

    runs, notes = with_runs(targets)
    found = report_data(subjects(runs), notes)
    file = out if out is not None or as_json else Path("report.html")
    if file is not None:
        write_page(file, found)
    say(as_json, found, f"written: {file}")


@app.command()
def audit(
    target: Annotated[Path, typer.Argument(help="The folder of a run, or (--mechanism, --canaries) a TOML file.")],
    mechanism: Annotated[bool, typer.Option("--mechanism", help="Attack a round; test noise and sampling.")] = False,
    canaries: Annotated[bool, typer.Option("--canaries", help="Train once with planted canaries.")] = False,
    values: Changes = None,
    seed: Seed = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """Lower bounds by attack beside the certified upper bound; exit 1 if one exceeds it; kept beside a run."""
    bring(own)
    import torch

    from sordino.audit import summary
    from sordino.runs.folder import keep_audit

    torch.set_num_threads(1)  # two that fight over a core are slower than one
    layer: summary.Layer = "mechanism" if mechanism else "canaries" if canaries else "membership"
    found = summary.audit_target(target, layer, changed(values, seed))
    say(as_json, found, summary.text(found))
    if target.is_dir():
        keep_audit(target, layer, finite(found))
    if not found["passed"]:
        raise typer.Exit(1)


try:
    from sordino_papers.command import app as papers  # a package of its own: benchmarks/papers
except ModuleNotFoundError:
    papers = typer.Typer(help="The papers' tables, ours beside theirs.", invoke_without_command=True)

    @papers.callback()
    def _no_papers() -> None:
        fix = "pip install ./benchmarks/papers in a checkout of Sordino"
        raise ConfigError("no package sordino_papers", "the papers' experiments", fix)


app.add_typer(papers, name="papers")
