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
LARGEST = 64 << 20  # bytes of a certificate
CHECKED = "every field is there, and every epsilon follows from the events, relation and delta beside it"
NOT_EXAMINED = (
    "whether these events are those of the run, its charges, its model and its versions: that needs the run's folder "
    "(sordino certify FOLDER), or the word of those who signed (--key)"
)
LOOP = "computed from plan and step counts in the file; a DP-SGD loop has no hash chain of charges to check"


@app.command()
def certify(
    target: Certified,
    key: Annotated[
        list[Path] | None, typer.Option(help="Also check a signature, with this public key (PEM); may be repeated.")
    ] = None,
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
    public = [certificate_file.public_key(one) for one in key or []]
    private = None if sign is None else certificate_file.private_key(sign)
    known = _read_about(about)
    alone = certificate_alone(target)
    if alone is not None and private is not None:
        needed = "the run's folder, from which the certificate is recomputed before it is signed"
        raise ConfigError("--sign with a certificate file alone", needed, "run `sordino certify FOLDER --sign KEY`")
    certificate = certified_with_plan(target)[0] if alone is None else alone
    text = f"certified: {guarantee(certificate)}" + ("" if certificate["loop"] is None else f"; {LOOP}")
    if alone is not None:
        text = f"consistent: {guarantee(certificate)}\nchecked: {CHECKED}\nnot examined: {NOT_EXAMINED}"
    if registry is not None:
        from sordino.report.cards import registry_entry, to_yaml

        if not re.fullmatch(r"[a-z0-9_]+\.yaml", registry.name):
            needed = "a file name of lower-case letters, digits and _, then .yaml, as the registry requires"
            raise ConfigError(f"--registry {registry.name}", needed, "choose a name such as my_model.yaml")
        durable_files.write(registry, to_yaml(registry_entry(certificate, known)).encode())
        text += f"\nregistry entry: {registry}{_fields_to_write(known)}"
    if private is not None:
        certificate_file.sign(target, private)
    for one in public:
        count = certificate_file.check_signature(target, one)
        signed = "this key" if count == len(public) == 1 else f"{len(public)} of {count} keys checked"
        text = re.sub(r"^(certified|consistent)[^:]*:", rf"\1, and signed with {signed}:", text)
    facts = ({} if certificate["loop"] is None else {"proved": LOOP}) | ({"signed": True} if public else {})
    facts |= {} if alone is None else {"checked": CHECKED, "not_examined": NOT_EXAMINED}
    output(as_json, {"certified": alone is None, **facts, **certificate}, text)
    return None


def certificate_alone(target: Path) -> dict[str, Any] | None:
    """Read a run's certificate from a file without the run's folder, and check its numbers; None for other files.

    Every epsilon is computed again from the events, relation and delta in the certificate.
    """
    if not target.is_file() or target.stat().st_size > LARGEST:
        return None
    from sordino.certificate import build, certificate_file
    from sordino.codec import durable_files
    from sordino.errors import CertificateError, UserError

    try:
        found = certificate_file.parse(durable_files.read(target), target.name)
        if not isinstance(found, dict) or "adversaries" not in found or "plan" in found:
            return None
        for name in sorted({*certificate_file.schema()["required"]} - set(found)):
            raise CertificateError(name, f"{name} is missing from {target.name}; ask the issuer for the whole file")
        build.check_epsilons(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as error:
        if isinstance(error, CertificateError):
            raise
        wrong = f"{target.name} is no certificate of this version ({error}); check it with the version that wrote it"
        raise CertificateError(target.name, wrong) from None
    return found


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
    """Return a certificate's guarantee in one line: epsilon, delta, unit and relation."""
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
    _, words = _explained(target)
    return output(as_json, words, explaining.page(words))


def _explained(target: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Certify a run; return its certificate, and the certificate in sentences by topic."""
    from sordino.certificate import explain as explaining

    certificate, plan, facts = certified_with_plan(target)
    return certificate, explaining.explain(certificate, explaining.ceilings(plan, facts))


def certified_with_plan(target: Path) -> tuple[dict[str, Any], Plan, Facts]:
    """Certify a run's folder or a DP-SGD loop's file; return certificate, plan and facts."""
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


@app.command("export")
def export_model(
    model: Annotated[Path, typer.Argument(help="The folder of a run on a table, or the model that a silo received.")],
    out: Annotated[Path, typer.Option(help="The model, a .onnx; an existing file is replaced.")],
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Write a certified model as ONNX: encoded rows to scores, with encoding and certificate as metadata."""
    load_own_parts(own)
    from sordino.runs import bundle

    if out.suffix != ".onnx":
        raise ConfigError(f"--out {out}", "a file whose name ends in .onnx", f"choose --out {out.with_suffix('.onnx')}")
    bundle.export_onnx(model, out)
    output(as_json, {"model": str(out)}, f"exported: {out}")


@app.command("dpia")
def dpia_page(
    target: Certified,
    out: Annotated[Path, typer.Option(help="The page, Markdown.")],
    policy: Annotated[list[Path] | None, typer.Option(help="A silo's policy.toml; may be repeated.")] = None,
    own: Own = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Draft a data protection impact assessment: facts of the run, and marked blanks for everything else."""
    load_own_parts(own)
    from sordino import codec
    from sordino.codec import durable_files
    from sordino.ledger import policy as policies
    from sordino.report import cards
    from sordino.runs.folder import RunFolder

    certificate, words = _explained(target)
    encoding = None if target.is_file() else RunFolder.open(target).config().task.encoding
    tables = {one.dataset: codec.dump(one) for one in map(policies.load, policy or [])}
    text = cards.dpia(certificate, words, [] if encoding is None else list(encoding.names), tables)
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
    from sordino.codec import durable_files
    from sordino.report import cards
    from sordino.runs.folder import RunFolder

    facts = _read_about(about)
    certificate, words = _explained(target)
    dataset = "a loop's own" if target.is_file() else RunFolder.open(target).config().task.dataset
    durable_files.write(out, cards.model_card(certificate, words, facts, dataset).encode())
    output(as_json, {"card": str(out), "to_be_written": facts.open}, f"model card: {out}{_fields_to_write(facts)}")


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
            needed = "at least two settings that have an epsilon and the same metric"
            fix = "name more runs, or remove --plot"
            raise ConfigError(f"--plot of {len(found['comparison']['rows'])} settings", needed, fix)
        try:
            figures.save_figure(figures.chart_figure(chart), plot)
        except (OSError, ValueError) as error:
            wrong, needed = f"--plot {plot}, which cannot be written ({error})", "a .png, .svg or .pdf file"
            raise ConfigError(wrong, needed, "choose another file") from None
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
        """Return a command group whose only action is an error that names the missing package."""
        made = typer.Typer(help=about, invoke_without_command=True)

        @made.callback()
        def _no_package() -> None:
            fix = "pip install ./benchmarks/papers in a checkout of Sordino"
            raise ConfigError("no package sordino_papers", "the experiments of the checkout", fix)

        return made

    papers, board = _absent("The papers' tables, ours beside theirs."), _absent("Accuracy at equal epsilon.")


app.add_typer(papers, name="papers")
app.add_typer(board, name="board")
