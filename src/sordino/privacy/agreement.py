"""The counts on a certificate agree with each other, and with the events of its lines; else there is no certificate.

    rounds billed >= max(rounds charged - rounds replayed, charges by any silo's receipts), and at least the planned
                     ones, unless a budget ended the run; more only by rounds that were run again
    count(line)  <= rounds billed * releases a round makes of one unit; with rounds that were drawn before a run was
                     cut beside them
    count(line)   = that, where the unit is in every round that is billed

A line counts the rounds of one unit (client, or record): fewer than are billed where it cannot have been in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.errors import CertificateError
from sordino.parts.bounds import Spent
from sordino.parts.events import PubliclySampled
from sordino.privacy.bill import ADVERSARIES, Bill, Line, Participation

if TYPE_CHECKING:
    from sordino.plan import Plan
    from sordino.privacy.facts import Facts


def check_counts(plan: Plan, facts: Facts, counts: Participation, bill: Bill) -> None:
    """Refuse a certificate whose counts of rounds charged and billed, and of events, cannot all be true."""
    _check_rounds(plan, facts, counts)
    if plan.release.joint or facts.selection is not None:  # one event stands for the whole run, or for all tries
        return
    least, most = _wanted(plan, facts, counts)
    for who in ADVERSARIES:
        found = max(_releases_of(line) for line in bill.of(who))
        if not least <= found <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise _disagree(f"the line {who!r} counts {found} releases of one {bill.unit}, where {wanted} are billed")


def _releases_of(line: Line) -> int:
    """How many releases of rounds a line counts: its first entry, and rounds by coins; then come preparations."""
    first, others = line.entries[:1], line.entries[1:]
    by_coins = ((event, count) for event, count in others if isinstance(event, PubliclySampled))
    return sum(count for _, count in (*first, *by_coins))


def _check_rounds(plan: Plan, facts: Facts, counts: Participation) -> None:
    least = facts.released if facts.stopped else max(plan.rounds, facts.released)
    most = max(plan.rounds + facts.repeats, facts.released)
    if not least <= counts.releases <= most or not 0 <= facts.replayed <= facts.charged:
        found = f"{facts.charged} rounds charged, {facts.replayed} of them replayed, {plan.rounds} planned"
        raise _disagree(f"{counts.releases} rounds are billed after {found}")


def _wanted(plan: Plan, facts: Facts, counts: Participation) -> tuple[int, int]:
    """The fewest and the most releases that a line may count for the unit that it counts most of."""
    spent = plan.local.bound()
    each = spent.count if isinstance(spent, Spent) else 1
    reads = plan.local.reads
    everyone = plan.clients.most(counts.releases) == counts.releases and not (reads is not None and reads.disjoint)
    asked = counts.releases if facts.most is None else facts.most  # silos may have refused rounds that are billed
    drawn = counts.most if counts.coins else 0  # a run that was cut: what was drawn, beside the coins of a whole run
    return (asked if everyone else 0) * each, (counts.releases + drawn) * each


def _disagree(what: str) -> CertificateError:
    return CertificateError("counts", f"the counts of this run do not agree: {what}")
