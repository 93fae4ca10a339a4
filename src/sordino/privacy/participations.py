"""What a client who was in k rounds is promised, where a line is averaged over the coins that chose its rounds.

    delta(e) = sum_k Bin(T, q)(k) delta_k(e)

is what one who sees the cohorts can learn on average over the coins. Once they are drawn that adversary knows k, and
delta_k, at k rounds for sure, is what holds for this client.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from sordino.parts.binomial import binomial_quantile
from sordino.parts.events import PubliclySampled
from sordino.privacy import accounting
from sordino.privacy.bill import Line
from sordino.privacy.rounding import upto
from sordino.privacy.summary import rounded_up, upward

TAILS = (1e-2, 1e-6)  # chances that a client is in more rounds than are told


def by_participations(line: Line, delta: float) -> list[dict[str, Any]]:
    """Epsilon of a client in k rounds, for k on average and for two that few clients exceed; [] without such coins."""
    coins = [(event, count) for event, count in line.entries if isinstance(event, PubliclySampled)]
    if len(coins) != 1:
        return []
    event, count = coins[0]
    ks = {math.ceil(count * event.rate - 1e-9), *(binomial_quantile(count, event.rate, tail) for tail in TAILS)}
    return [_known(line, event, count, k, delta) for k in sorted(ks)]


@lru_cache(maxsize=256)
def _known(line: Line, event: PubliclySampled, count: int, k: int, delta: float) -> dict[str, Any]:
    from scipy.special import bdtrc

    rest = tuple((each, n) for each, n in line.entries if each != event)
    found = accounting.epsilon(((event.event, k), *rest), line.relation, delta)
    more = rounded_up(float(bdtrc(k, count, event.rate))) if k < count else 0.0
    return {"participations": k, "chance_of_more": more, "epsilon": upward(found.value)}


def in_words(told: list[dict[str, Any]]) -> str:
    """The same as one sentence."""
    costs = [
        f"{_shown(one['epsilon'])} in {one['participations']} (chance of more {upto(one['chance_of_more'], 2)})"
        for one in told
    ]
    return f"averaged over the coins; by the number of rounds that a client is in: {', '.join(costs)}"


def _shown(epsilon: float | None) -> str:
    return "without limit" if epsilon is None else upto(epsilon, 4)
