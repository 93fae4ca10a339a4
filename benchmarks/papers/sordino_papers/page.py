"""docs/papers.md and docs/papers/: what became of the papers, every verdict, every stored result beside theirs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from sordino_papers import coverage, paper_claims
from sordino_papers.cells import Results
from sordino_papers.claims import settled
from sordino_papers.introductions import INTRODUCTIONS
from sordino_papers.sections import (
    as_csv,
    cells_csv,
    claims_table,
    digits_table,
    grid,
    headlines_table,
    is_long,
    paper_claims_table,
    study_text,
    table_text,
)
from sordino_papers.studies import Study
from sordino_papers.tables import STUDIES, TABLES

Row = dict[str, Any]
PARTS = {  # start of an id: title of its page
    "000": "Paper 000, DP-Fed-LS",
    "001": "Paper 001, silos without a trusted server",
    "002": "Paper 002, local and global iterations",
    "003": "Paper 003, DP-FedSAM",
    "004": "Paper 004, DP-LSSGD",
    "theory": "Convergence theorems of papers 000 and 004",
    "beyond": "Beyond the papers",
}
HEAD = """# The papers' tables, ours beside theirs

Which headlines of the five papers hold here. Ratio: noise to signal of an update, z sqrt(d) / S (batches: z sqrt(d) /
b), the paper's / ours. Outside a factor of two of the paper's ratio a claim is "not tested here", never "no"; "-":
nothing is noised. The regime is this ratio alone; other differences are in brackets. A verdict needs paired seeds and a
95% interval; a positive difference favours the headline. Yes: every comparison does; no: some are against it and none
for it; in part: some are for it, others open or against it.
""".strip()
AFTER = """
Made by `sordino papers run ID` and `sordino papers page`; raw results: `benchmarks/papers/results`. The page of a paper
has its idea, its recipe in code, its errata, and every claim. `sordino papers run all --quick` computes one figure of
each again.
""".strip()
WORDS = """
Accuracy in percent: mean and standard deviation over seeds, of the LAST round on the WHOLE test set.
"epsilon" is what our certificate says of the run; "claimed" is what the paper says of the same noise; "s" is seconds
per seed. "Paper's protocol", where a table has it, is the authors' way to report: the first 1,010 test images, at the
round with the best accuracy on 10,000 validation images, which no epsilon pays for.
""".strip()
CLAIMS = """
"A beats B" is decided by the differences of paired seeds (same data split, start and noise stream) with a 95% interval
of Student's t. Ratio: noise to signal, the paper's / ours; outside a factor of two the claim is not tested here.
""".strip()
OWN = 6  # claims of our own that a page shows
DIGITS = """
[All papers](../papers.md). With one thread per process the same code on the same instruction set gives the same model
to the last bit: run twice, in other processes, with or without compiled kernels, whatever `OMP_NUM_THREADS` says. Two
threads move a CNN's weights by 4e-7 in two rounds.

What moved the cells of 000-small from one machine to the next, by up to 1.3 points, is the instruction set: a processor
with AVX-512 adds in another order than one with AVX2 (shown for one cell; whether it is all of the 0.3 points by which
000-cnn moved was not tried, its code has changed too). Seed 0 of
000-small-poisson-z2.2-sigma0 is 52.70 where torch and oneDNN are held to AVX2, as it was kept on a machine that has
no more, and 52.96 with AVX-512; its net is trained on public digits first (plain SGD, momentum 0.9), and after that the
two nets are no longer near each other (the sums of their weights are -192.4 and -198.9). So `sordino papers` now holds
its processes to AVX2 (`ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA`; values set already stay), every result names
its code and its instructions, and the cells of 000-small and 000-table5 were run anew.
""".strip()
# ---- the pages -------------------------------------------------------------------------------------------------------


def pages(results: Results, reproduced: list[Row] | None = None) -> dict[str, str]:
    """Every page by its path beside the front page; a paper without results has none."""
    claims, again = judged(results), reproduced or []
    found = {"papers.md": front(claims, again, beside_coverage(results))}
    for part, title in PARTS.items():
        pieces = _pieces(part, results)
        if pieces:
            head = [f"# {title}", "[All papers](../papers.md)."]
            head += [INTRODUCTIONS[part].text] if part in INTRODUCTIONS else []
            text = [*head, *_verdicts(part, claims[part]), f"## Tables and studies\n\n{WORDS}", *pieces]
            found[f"papers/{part}.md"] = "\n\n".join(text) + "\n"
    if again:
        parts = ["# The same digits again", DIGITS, _elsewhere(results), digits_table(again)]
        found["papers/digits.md"] = "\n\n".join(piece for piece in parts if piece) + "\n"
    return found


def _verdicts(part: str, rows: list[Row]) -> list[str]:
    """The paper's claims, each once; how many of our own hold. The slices of both are in a file."""
    theirs, own = paper_claims.of_paper(part, rows)
    if not rows:
        return []
    file = f"Every comparison, with its interval and who chose: [claims-{part}.csv](rows/claims-{part}.csv)."
    said = [f"## The paper's claims, each once\n\n{CLAIMS}\n\n{paper_claims_table(theirs)}\n\n{file}"] if theirs else []
    if theirs:
        return [*said, f"## Claims of our own\n\n{_own(own)}"] if own else said
    return [f"## Claims\n\n{claims_table(own)}\n\n{file}"]


def _own(rows: list[Row]) -> str:
    """Yes and no by count, with the first that are decided in a list."""
    count = Counter(row["verdict"] for row in rows)
    counted = ", ".join(f"{count[one]} {one}" for one in ("yes", "no", "undecided") if count[one])
    shown = [row for row in rows if row["verdict"] != "undecided"][:OWN]
    return f"{counted} (the first {len(shown)} that are decided).\n\n{claims_table(shown)}" if shown else f"{counted}."


def front(claims: dict[str, list[Row]], again: list[Row], beside: dict[str, str]) -> str:
    """The front page: the headlines in one table, then counts, coverage, and how far digits come out again."""
    table = headlines_table(paper_claims.headlines(claims))
    return "\n\n".join([HEAD, table, AFTER, _counts(claims), coverage.text(beside), _digits(again)]) + "\n"


def beside_coverage(results: Results) -> dict[str, str]:
    """Of a table of full size the command, and the time as an estimate; of others how many cells are still to run."""
    run = "`sordino papers run {0.id} --full --device cuda` (about {0.hours}, an estimate)"
    found = {table.id: run.format(table) for table in TABLES if table.full}
    for table in [one for one in TABLES if not one.full]:
        there = sum(cell.id in results for cell in table.cells)
        if there < len(table.cells):
            found[table.id] = f"{there} of {len(table.cells)} cells of {table.id} run so far"
    return found


def _counts(claims: dict[str, list[Row]]) -> str:
    """Per paper: what became of its items, and of its claims."""
    rows = []
    for part, title in PARTS.items():
        items = Counter(item.status for item in coverage.COVERAGE.get(title, ()))
        theirs, own = paper_claims.of_paper(part, claims[part])
        answers, ours = (Counter(row["verdict"] for row in rows_of) for rows_of in (theirs, own))
        became = ", ".join(f"{items[status]} {status}" for status in coverage.STATUSES if items[status]) or "-"
        held, mine = (", ".join(f"{n} {one}" for one, n in counted.most_common()) or "-" for counted in (answers, ours))
        rows.append((f"[{title}](papers/{part}.md)", became, held, mine))
    return "## In short\n\n" + grid(("page", "items of the paper", "its claims, each once", "our own claims"), rows)


def _digits(again: list[Row]) -> str:
    same = sum(row["answer"] == "same" for row in again)
    seen = f"`sordino papers check`: {same} of {len(again)} runs gave every digit that is kept"
    return "## The same digits again\n\n" + (f"{seen}; [which, and why](papers/digits.md)." if again else "No run yet.")


def _elsewhere(results: Results) -> str:
    """Tables and studies with a run that was not held to AVX2, or does not say."""
    cells = {cell.id: table.id for table in TABLES for cell in table.cells}
    others = [cells.get(name, name) for name, result in results.items() if not _held(result)]
    named = ", ".join(dict.fromkeys(others))
    told = "Results with runs that name other instructions or none; a net's may be off by that much"
    return f"{told}: {named}." if named else ""


def _held(result: Row) -> bool:
    """All runs by AVX2; of a study put together from runs that name their code, also all by the study's own code."""
    made = result.get("code") or ""
    names = [str(one) for one in (made if isinstance(made, list) else [made])]
    rows = [row["figures"] for row in result.get("rows", []) if isinstance(row.get("figures"), dict)]
    own = all(one == names[0].partition(", ")[0] for figures in rows for one in figures.get("code", []))
    return own and all(name.endswith("AVX2") for name in names)


def _pieces(part: str, results: Results) -> list[str]:
    """Tables and studies of a page, those that have been run."""
    tables = [one for one in TABLES if part_of(one.id) == part and any(cell.id in results for cell in one.cells)]
    studies = [one for one in STUDIES if part_of(one.id) == part and one.id in results]
    return [*(table_text(one, results) for one in tables), *(study_text(one, results[one.id]) for one in studies)]


# ---- claims ----------------------------------------------------------------------------------------------------------


def judged(results: Results) -> dict[str, list[Row]]:
    """The claims of all tables and studies by page, made from their kept results, whichever way they went."""
    found: dict[str, list[Row]] = {part: [] for part in PARTS}
    for table in TABLES:
        found[part_of(table.id)] += settled(table.claims, results)
    for study in STUDIES:
        if study.id in results:
            found[part_of(study.id)] += study_claims(study, results[study.id])
    return found


def part_of(name: str) -> str:
    """The page of an id."""
    return next((part for part in PARTS if name.startswith(part)), "beyond")


def study_claims(study: Study, found: Row) -> list[Row]:
    """The claims of a study; rows kept without the values of their seeds decide nothing."""
    try:
        return list(study.claims(found["rows"]))
    except KeyError as missing:
        lacks = f"the kept rows have no {missing}: run it anew"
        return [{"text": study.title, "measured": lacks, "verdict": "undecided", "seeds": None, "chosen": "-"}]


# ---- on disk ---------------------------------------------------------------------------------------------------------


def write(results: Results, path: Path, reproduced: list[Row] | None = None) -> None:
    """Write the front page at `path`, the others, the long tables and the figures beside it."""
    home = path.parent
    for name, text in pages(results, reproduced).items():
        file = path if name == "papers.md" else home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for part, rows in judged(results).items():
        if rows:
            _csv(rows, home / "papers" / "rows" / f"claims-{part}.csv")
    for table in TABLES:
        if (cells := cells_csv(table, results)) is not None:
            (home / "papers" / "rows" / f"{table.id}.csv").write_text(cells, encoding="utf-8")
        if table.draw is not None:
            table.draw(results, home / "figures" / f"{table.id}.png")
    for study in [one for one in STUDIES if one.id in results]:
        study.draw(results[study.id]["rows"], home / "figures" / f"{study.id}.png")
        if is_long(results[study.id]):
            _csv(results[study.id]["rows"], home / "papers" / "rows" / f"{study.id}.csv")


def _csv(rows: list[Row], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_csv(rows), encoding="utf-8")
