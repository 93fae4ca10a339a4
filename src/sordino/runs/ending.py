"""How a run ended before its last round: a budget refused the next cohort, or else it did not end but was stopped.

refused.json is the charge that was not made: round, cohort, configuration, head of the chain. It is believed only if
the charges leave that cohort no room in the budget, which is counted again. A run that a budget has ended is over:
whoever could go on with other coins after a look at the model would choose its length by the data.
"""

from __future__ import annotations

from pathlib import Path

from sordino.config import Config
from sordino.errors import BudgetError, CertificateError
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.runs import chain, files, receipts
from sordino.runs.chain import Chain

NAME = "refused.json"


def note(path: Path, plan: Plan, refused: tuple[int, Cohort], config: str, head: str) -> None:
    """Write down which cohort was refused, after the chain's head; the cohort only where it is seen by design."""
    t, cohort = refused
    line = chain.next_charge(t, cohort if chain.shows(plan) else None, config, head).line()
    files.write(path / NAME, line + b"\n")


def refusal(path: Path, held: Chain, config: Config, digest: str) -> BudgetError | None:
    """Why the run is over, if a budget ended it; `CertificateError` if the file says so and the budget does not."""
    if not (path / NAME).exists():
        return None
    whole = b"".join(charge.line() + b"\n" for charge in held.charges) + files.read(path / NAME)
    found, budget = chain.parse(whole, held.root, digest, config.plan), config.budget
    if budget is None or found.torn or len(found.charges) != len(held.charges) + 1:
        raise CertificateError(NAME, f"{NAME} does not follow the last charge under a budget")
    t, cohort = found.rounds[-1], found.cohorts(config.plan)[-1]
    try:
        receipts.counted(path, config.plan, budget, held).check(cohort, t)
    except BudgetError as error:
        return error
    raise CertificateError(NAME, f"{NAME} names a round that every budget in it would have paid for")
