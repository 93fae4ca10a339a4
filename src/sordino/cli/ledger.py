"""`sordino ledger`: what data sets have spent over all runs, and what they may; needs no torch and no data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli.app import JsonFlag, Own, app, bring, say

if TYPE_CHECKING:
    from sordino.privacy.entries import Entry
    from sordino.privacy.ledger import Statement

ledger_app = typer.Typer(no_args_is_help=True, help="The budget of a data set over all runs.", rich_markup_mode=None)
app.add_typer(ledger_app, name="ledger")
LedgerFile = Annotated[Path, typer.Argument(help="The file of the ledger.")]
Dataset = Annotated[str, typer.Argument(help="The name that its operator gave the data set.")]


@ledger_app.command("show")
def ledger_show(
    file: LedgerFile,
    dataset: Annotated[str | None, typer.Argument(help="One data set; default: all.")] = None,
    own: Own = None,
    as_json: JsonFlag = False,
) -> None:
    """What data sets have spent in all, and what they may spend."""
    bring(own)
    from sordino.privacy.ledger import Ledger

    with Ledger.open(file) as ledger:
        found = [ledger.spent(name) for name in ([dataset] if dataset is not None else ledger.names)]
    text = "\n".join(map(_line, found)) or "no data set has a limit yet"
    say(as_json, {"ledger": str(file), "datasets": [_entry(one) for one in found]}, text)


@ledger_app.command("limit")
def ledger_limit(
    file: LedgerFile,
    dataset: Dataset,
    epsilon: Annotated[float, typer.Option(help="The most that all runs together may spend.")],
    delta: Annotated[float, typer.Option(help="At this delta.")],
    unit: Annotated[str, typer.Option(help="What one neighbour may change: client | record")],
    relation: Annotated[str, typer.Option(help="replace_one | add_remove | zero_out")] = "replace_one",
    as_json: JsonFlag = False,
) -> None:
    """Set, raise or lower what a data set may spend; makes the ledger if there is none."""
    from sordino import codec
    from sordino.privacy.ledger import Ledger
    from sordino.privacy.spending import Limit

    asked = {"epsilon": epsilon, "delta": delta, "unit": unit, "relation": relation}
    limit: Limit = codec.read(Limit, asked, "--")
    with Ledger.open(file, create=True) as ledger:
        ledger.limit(dataset, limit)
        found = ledger.spent(dataset)
    say(as_json, {"ledger": str(file), **_entry(found)}, _line(found))


@ledger_app.command("history")
def ledger_history(file: LedgerFile, dataset: Dataset, own: Own = None, as_json: JsonFlag = False) -> None:
    """Every line of one data set: limits, runs and jobs, with the events that were charged."""
    bring(own)
    from sordino import codec
    from sordino.privacy.entries import name_of
    from sordino.privacy.ledger import Ledger

    with Ledger.open(file) as ledger:
        found = ledger.history(dataset)
    lines = [{"line": name_of(entry), **codec.dump(entry)} for entry in found]
    say(as_json, {"ledger": str(file), "dataset": dataset, "lines": lines}, "\n".join(map(_told, found)))


@ledger_app.command("backup")
def ledger_backup(
    file: LedgerFile,
    to: Annotated[Path, typer.Argument(help="A new file for the backup.")],
    as_json: JsonFlag = False,
) -> None:
    """Copy a ledger, also while silos are served from it; nothing is charged to a backup."""
    from sordino.privacy.ledger import Ledger
    from sordino.privacy.ledger_backup import backup

    with Ledger.open(file) as ledger:
        head = backup(ledger, to)
    told = {"ledger": str(file), "backup": str(to), "lines": head.lines, "sha256": head.digest}
    say(as_json, told, f"{to}: {head.lines} lines of {file}, the last with sha256 {head.digest}")


@ledger_app.command("restore")
def ledger_restore(
    backup: Annotated[Path, typer.Argument(help="A file of 'sordino ledger backup', or another copy of the ledger.")],
    file: Annotated[Path, typer.Argument(help="The ledger that is missing, damaged or old.")],
    as_json: JsonFlag = False,
) -> None:
    """Put a backup in the place of a ledger; if it lacks charges, every limit must be lowered before the next."""
    from sordino.privacy.ledger_backup import restore

    lost = restore(backup, file)
    words = "nothing is missing" if lost == 0 else f"lost: {'nobody knows how many' if lost is None else lost} lines"
    after = "" if lost == 0 else "; nothing is charged before each limit is lowered (sordino ledger limit)"
    say(as_json, {"ledger": str(file), "backup": str(backup), "lines_lost": lost}, f"{file}: restored, {words}{after}")


def _entry(found: Statement) -> dict[str, Any]:
    from sordino import codec
    from sordino.privacy.summary import upward

    limit = codec.dump(found.limit)
    events = [codec.dump(item) for item in found.items]
    counts: dict[str, Any] = {"runs": found.runs, "charges": found.charges}
    if found.restored is not None:
        counts["restored"] = codec.dump(found.restored)
    return {"dataset": found.dataset, "spent": upward(found.epsilon), "limit": limit, **counts, "events": events}


def _line(found: Statement) -> str:
    from sordino.privacy.rounding import upto

    limit, spent = found.limit, upto(found.epsilon, 4)
    lost = "" if found.restored is None else "; restored without its last lines: lower the limit"
    return (
        f"{found.dataset}: epsilon {spent} of {upto(limit.epsilon, 6)} spent, delta {upto(limit.delta, 6)}, "
        f"unit {limit.unit}, relation {limit.relation}; runs {found.runs}, jobs charged {found.charges}{lost}"
    )


def _told(entry: Entry) -> str:
    """One line of history: when, what, and what it cost."""
    from sordino.privacy.entries import Admitted, Limited, Released, Restored
    from sordino.privacy.rounding import upto

    if isinstance(entry, Limited):
        limit, most = entry.limit, f"epsilon {upto(entry.limit.epsilon, 6)}, delta {upto(entry.limit.delta, 6)}"
        return f"{entry.at}  limit  {most}, unit {limit.unit}, relation {limit.relation}"
    if isinstance(entry, Restored):
        return f"{entry.at}  restored from a backup without {'unknown' if entry.lost is None else entry.lost} lines"
    if isinstance(entry, Released):
        return f"{entry.at}  round  {entry.round} of {entry.run}, chain {entry.head[:12]}"
    cost = ", ".join(f"{item.count} x {item.event}" for item in entry.items) or "nothing"
    what = f"run    {entry.run}" if isinstance(entry, Admitted) else f"job    {entry.job} of {entry.run}"
    return f"{entry.at}  {what}: {cost}"
