"""Commands on finished runs: certify, explain, predict, model-card, compare, report, audit; and `papers`, `board`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import console
from sordino.cli.console import Certified, Changes, JsonFlag, Own, RunPaths, Seed, app, changed, load_own_parts, output
from sordino.errors import ConfigError

if TYPE_CHECKING:
    from sordino.certificate.facts import Facts
    from sordino.plan import Plan
    from sordino.report.cards import About

AboutFile = Annotated[
    Path | None, typer.Option("--about", help="A TOML file: name, curators, description, intended_use, region, ...")
]
LOOP = "computed from the plan and the step counts in the file; a loop has no hash chain of charges to check"


@app.command()
def certify(
    target: Certified,
    key: Annotated[Path | None, typer.Option(help="Also check the signature, with this public key (PEM).")] = None,
    sign: Annotated[Path | None, typer.Option(help="Sign what was certified with this Ed25519 key (PEM).")] = None,
    registry: Annotated[Path | None, typer.Option(help="Also write an entry for OpenDP's registry (YAML).")] = None,
    about: AboutFile = None, own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Recompute the certificate from everything in the folder, or from the loop's file; exit 1 on any mismatch."""
    load_own_parts(own)
    from sordino.certificate import certificate_file
    from sordino.codec import durable_files

    if (target / "sweep.json").is_file():
        from sordino.tuning import sweep, sweep_report

        made = sweep.certify(target)
        return output(as_json, {"certified": True, **made}, f"certified: {sweep_report.guarantee(made)}")
    public = None if key is None else certificate_file.public_key(key)
    private = None if sign is None else certificate_file.private_key(sign)
    known = _read_about(about)
    certificate = certified_with_plan(target)[0]
    text = f"certified: {guarantee(certificate)}" + ("" if certificate["loop"] is None else f"; {LOOP}")
    if registry is not None:
        from sordino.report.cards import registry_entry, to_yaml

        if not re.fullmatch(r"[a-z0-9_]+\.yaml", registry.name):
            needed = "lower-case letters, digits and _, then .yaml, as the registry requires"
            raise ConfigError(f"--registry {registry.name}", needed)
        durable_files.write(registry, to_yaml(registry_entry(certificate, known)).encode())
        text += f"\nregistry entry: {registry}{_fields_to_write(known)}"
    if private is not None:
        certificate_file.sign(target, private)
    if public is not None:
        certificate_file.check_signature(target, public)
        text = text.replace("certified:", "certified, and signed with this key:", 1)
    facts = ({} if certificate["loop"] is None else {"proved": LOOP}) | ({} if public is None else {"signed": True})
    output(as_json, {"certified": True, **facts, **certificate}, text)
    return None


def _read_about(file: Path | None) -> About:
    from sordino import codec
    from sordino.report.cards import About

    example = "keys: name, curators, description, intended_use, region, ..."
    table = {} if file is None else codec.read_toml(file, example)
    found: About = codec.read(About, table, "about")
    return found


def _fields_to_write(about: About) -> str:
    return f"; to be written: {', '.join(about.open)} (--about)" if about.open else ""


def guarantee(made: dict[str, Any]) -> str:
    """Return the guarantee of a certificate in one line."""
    if made["epsilon"] is None:
        return f"no guarantee (unit {made['unit']}, relation {made['relation']})"
    from sordino.accounting.rounding import upto

    epsilon = upto(made["epsilon"], 4)
    return f"epsilon {epsilon}, delta {upto(made['delta'])}, unit {made['unit']}, relation {made['relation']}"


@app.command()
def explain(target: Certified, own: Own = None, as_json: JsonFlag = False) -> None:
    """Print the certificate in plain sentences: what is protected, against whom, how strongly, on which assumptions."""
    load_own_parts(own)
    from sordino.certificate import explain as explaining
    from sordino.tuning import sweep, sweep_report

    if sweep.is_sweep(target):
        return output(as_json, *sweep_report.explain(sweep.certify(target)))
    certificate, plan, facts = certified_with_plan(target)
    words = explaining.explain(certificate, explaining.ceilings(plan, facts))
    return output(as_json, words, explaining.page(words))


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


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="The folder of a run on a table, or the model that a silo received.")],
    rows: Annotated[Path, typer.Argument(help="A .csv or .parquet of raw rows; the target may be missing.")],
    out: Annotated[Path, typer.Option(help="The scores, a .csv; an existing file is replaced.")],
    keep: Annotated[list[str] | None, typer.Option(help="A column to copy into the scores; may be repeated.")] = None,
    delimiter: Annotated[str | None, typer.Option(help="Between the columns of the rows' file.")] = None,
    decimal: Annotated[str | None, typer.Option(help="Of its numbers: . or ,")] = None,
    encoding: Annotated[str | None, typer.Option(help="Of its text: utf-8, latin-1, ...")] = None,
    dates: Annotated[str | None, typer.Option(help="How it writes dates: %d.%m.%Y")] = None,
    na: Annotated[list[str] | None, typer.Option(help="A word of a missing value; may be repeated.")] = None,
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Score raw rows with a certified model: prediction and probabilities for every row, in the order of the file."""
    load_own_parts(own)
    from dataclasses import replace

    from sordino.runs import bundle

    given = {"delimiter": delimiter, "decimal": decimal, "encoding": encoding, "dates": dates}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    changes |= {} if na is None else {"na": tuple(na)}
    written = replace(bundle.Bundle.read(model).csv, **changes)
    count = bundle.predict(model, rows, out, written, tuple(keep or ()))
    output(as_json, {"rows": count, "scores": str(out)}, f"{count} rows scored: {out}")


@app.command("dpia")
def dpia_page(
    target: Certified,
    out: Annotated[Path, typer.Option(help="The page, Markdown.")],
    policy: Annotated[list[Path] | None, typer.Option(help="A silo's policy.toml; may be repeated.")] = None,
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Draft a data protection impact assessment: what the run knows, and marked blanks for what only people know."""
    load_own_parts(own)
    from sordino import codec
    from sordino.certificate import explain as explaining
    from sordino.codec import durable_files
    from sordino.ledger import policy as policies
    from sordino.report import cards
    from sordino.runs.folder import RunFolder

    certificate, plan, facts = certified_with_plan(target)
    words = explaining.explain(certificate, explaining.ceilings(plan, facts))
    encoding = None if target.is_file() else RunFolder.open(target).config().task.encoding
    found = [policies.load(file) for file in policy or []]
    known = {one.dataset: codec.dump(one) for one in found}
    text = cards.dpia(certificate, words, [] if encoding is None else list(encoding.names), known)
    durable_files.write(out, text.encode())
    blanks = text.count("to be written")
    output(as_json, {"page": str(out), "blanks": blanks}, f"draft: {out}; {blanks} blanks to be written")


@app.command("model-card")
def model_card(
    target: Certified,
    out: Annotated[Path, typer.Option(help="The card; Hugging Face wants it as README.md beside the model.")],
    about: AboutFile = None, own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Write a model card with the certificate in it: the guarantee, whom one has to trust, and the metrics."""
    load_own_parts(own)
    from sordino.certificate import explain as explaining
    from sordino.codec import durable_files
    from sordino.report import cards
    from sordino.runs.folder import RunFolder

    known = _read_about(about)
    certificate, plan, facts = certified_with_plan(target)
    words = explaining.explain(certificate, explaining.ceilings(plan, facts))
    dataset = "a loop's own" if target.is_file() else RunFolder.open(target).config().task.dataset
    durable_files.write(out, cards.model_card(certificate, words, known, dataset).encode())
    output(as_json, {"card": str(out), "to_be_written": known.open}, f"model card: {out}{_fields_to_write(known)}")


@app.command()
def compare(
    targets: RunPaths,
    latex: Annotated[bool, typer.Option("--latex", help="The table for LaTeX (booktabs).")] = False,
    bibtex: Annotated[bool, typer.Option("--bibtex", help="A BibTeX entry for the version that ran.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the metric against epsilon: .png, .svg or .pdf.")] = None,
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Print a table of settings: metrics with intervals over seeds, paired differences, epsilons, differing keys."""
    load_own_parts(own)
    from sordino.report import charts, comparison, figures
    from sordino.report.text_table import bibtex as cite
    from sordino.runs.folder import subjects
    from sordino.tuning.sweep import with_runs

    runs, notes = with_runs(targets)
    found = {**comparison.compare(subjects(runs)), "notes": notes}
    tables = [comparison.comparison_table(found), comparison.differences_table(found)][: 2 if found["settings"] else 1]
    if plot is not None:
        chart = charts.utility(found)
        if chart is None:
            needed = "two settings or more that have an epsilon and the same metric"
            raise ConfigError(f"--plot of {len(found['comparison']['rows'])} settings", needed)
        try:
            figures.save_figure(figures.chart_figure(chart), plot)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plot {plot}, which cannot be written ({error})", "a .png, .svg or .pdf") from None
    forms = [one.latex(f"tab:sordino-{place}") for place, one in enumerate(tables)] * latex
    forms += [cite([run["sordino"] for run in found["runs"]])] * bibtex
    output(as_json, found, "\n\n".join(forms or [*(one.text() for one in tables), *notes]))


@app.command()
def report(
    targets: RunPaths,
    out: Annotated[Path | None, typer.Option(help="The HTML file; an existing file is replaced.")] = None,
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Write one self-contained HTML page of runs, or of a sweep: guarantees, curves, explained certificates, audits."""
    load_own_parts(own)
    from sordino.report.data import report_data
    from sordino.report.page import write_page
    from sordino.runs.folder import subjects
    from sordino.tuning.sweep import with_runs

    runs, notes = with_runs(targets)
    found = report_data(subjects(runs), notes)
    file = out if out is not None or as_json else Path("report.html")
    if file is not None:
        write_page(file, found)
    output(as_json, found, f"written: {file}")


@app.command()
def audit(
    target: Annotated[Path, typer.Argument(help="The folder of a run, or (--mechanism, --canaries) a TOML file.")],
    mechanism: Annotated[bool, typer.Option("--mechanism", help="Attack a round; test noise and sampling.")] = False,
    canaries: Annotated[bool, typer.Option("--canaries", help="Train once with planted canaries.")] = False,
    values: Changes = None, seed: Seed = None, own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Attack a run or a plan, and print lower bounds on epsilon with the certified bound; exit 1 if one exceeds it."""
    load_own_parts(own)
    import torch

    from sordino.audit import summary
    from sordino.runs.folder import keep_audit

    torch.set_num_threads(1)  # several threads on one core are slower than one
    layer: summary.Layer = "mechanism" if mechanism else "canaries" if canaries else "membership"
    found = summary.audit_target(target, layer, changed(values, seed))
    output(as_json, found, summary.text(found))
    if target.is_dir():
        keep_audit(target, layer, console.json_safe(found))
    if not found["passed"]:
        raise typer.Exit(1)


try:
    from sordino_papers.board_command import app as board
    from sordino_papers.command import app as papers  # a package of its own: benchmarks/papers
except ModuleNotFoundError:

    def _absent(about: str) -> typer.Typer:
        """A group of commands that says which package it needs."""
        made = typer.Typer(help=about, invoke_without_command=True)

        @made.callback()
        def _no_package() -> None:
            fix = "pip install ./benchmarks/papers in a checkout of Sordino"
            raise ConfigError("no package sordino_papers", "the experiments of the checkout", fix)

        return made

    papers, board = _absent("The papers' tables, ours beside theirs."), _absent("Accuracy at equal epsilon.")


app.add_typer(papers, name="papers")
app.add_typer(board, name="board")
