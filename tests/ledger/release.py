"""A release in the order that silos follow: charge, make the message, store it."""

from __future__ import annotations

from collections.abc import Callable

from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Item


def release(ledger: Ledger, run: str, job: str, items: tuple[Item, ...], make: Callable[[], bytes]) -> bytes:
    """Return the bytes to send for a job: new ones that were charged and stored, or those stored before."""
    receipt = ledger.charge(run, job, items)
    return ledger.store(receipt, make()) if receipt.message is None else receipt.message
