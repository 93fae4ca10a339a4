"""The noise-to-signal ratio of our own runs, computed from their plans: z, d and S are read off them, none is typed.

    z sqrt(d) / S         z noise multiplier, d parameters, S expected cohort (of records: expected batch)
    z sqrt(d / S)         where each of S clients adds noise of its own
    z sqrt(d) / K         of one silo's message, the mean over K records

`OURS` has the least and the largest ratio of the runs of an id. Noise that a run solves for is solved for again here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch

from sordino.cli.planning import noise_ratio
from sordino.data.shakespeare import ALPHABET
from sordino.models import CharLstm, DpMnistCnn, Logistic, Mlp, SmallCnn
from sordino.models.nets import Architecture
from sordino.parts.encoding import LaplacianSmoothing
from sordino_papers import (
    paper_000,
    paper_000_attack,
    paper_000_curves,
    paper_000_lstm,
    paper_000_regime,
    paper_000_regime_lstm,
    paper_003,
    paper_003_protocol,
    paper_003_regime,
    paper_004,
    paper_004_cnn,
    paper_004_protocol,
    paper_004_regime,
)
from sordino_papers import paper_001_charges as charges
from sordino_papers import paper_001_published as digits
from sordino_papers import paper_001_silos as silos
from sordino_papers import paper_002 as loans
from sordino_papers import paper_002_femnist as femnist
from sordino_papers.paper_000_small import MULTIPLIERS, SMALL, WAYS, Channels, small_plan

Span = tuple[float, float]
WHOLE, HALF = (1, 28, 28), (1, 14, 14)  # MNIST, and averaged over 2x2 pixels
LOGISTIC = Logistic()


@cache
def size(net: Architecture, shape: tuple[int, ...], outputs: int = 10) -> int:
    """Parameters of a net; it is not built."""
    with torch.device("meta"):
        return sum(one.numel() for one in net.build(shape, outputs).parameters())


def span(found: Iterable[float]) -> Span:
    """Least and largest."""
    each = list(found)
    return min(each), max(each)


# ---- 000 -------------------------------------------------------------------------------------------------------------


def table2() -> Span:
    """000-table2: the noise of Theorems 1 and 2."""
    places = [(how, e, paper_000.theorem_multiplier(how, e)) for how in WAYS for e in paper_000.EPSILONS]
    return span(noise_ratio(paper_000.table2_plan(how, z, 0.0), size(LOGISTIC, WHOLE)) for how, _, z in places)


def digits_cnn(channels: Channels, *multipliers: float) -> Span:
    """000-small and 000-regime: the same task with nets of two widths."""
    d = size(SmallCnn(channels=channels, kernel=5), HALF)
    return span(noise_ratio(small_plan(how, z, LaplacianSmoothing(0.0)), d) for how in WAYS for z in multipliers)


def by_writer() -> Span:
    """000-cnn: z = 2.4, 500 writers, a twentieth of them a round."""
    return span([2.4 * math.sqrt(size(SmallCnn(), WHOLE)) / (500 * 0.05)])


def lstm() -> Span:
    """000-regime-lstm."""
    d = size(CharLstm(embed=8, hidden=64, layers=1), (80,), len(ALPHABET))
    own = paper_000_regime_lstm
    return span(noise_ratio(own.plan(z, 0.0, 1.0), d) for z in own.MULTIPLIERS)


def lstm_of_32(*multipliers: float) -> Span:
    """000-figure5 and 000-table-h10."""
    d = size(CharLstm(embed=8, hidden=32, layers=1), (80,), len(ALPHABET))
    return span(noise_ratio(paper_000_lstm.plan(how, z, 0.0), d) for how in WAYS for z in multipliers)


def figure3() -> Span:
    """000-figures34: logistic regression at epsilon 7."""
    made = (paper_000.table2_plan(how, paper_000.theorem_multiplier(how, 7.0), 0.0) for how in WAYS)
    return span(noise_ratio(plan, size(LOGISTIC, WHOLE)) for plan in made)


def attack() -> Span:
    """000-figure7, the noises that its claims of the paper are judged by."""
    own = paper_000_attack
    return span(noise_ratio(own.plan(z, 0.0), size(Mlp((64,)), WHOLE)) for z in own.AS_PUBLISHED)


# ---- 001 -------------------------------------------------------------------------------------------------------------


def of_silos(kind: str, *epsilons: float) -> Span:
    """001-figure3-h1: one silo's message of K records; logistic regression on 50 components and an offset."""
    solved = digits.published_multiplier if kind == "paper" else partial(digits.true_multiplier, "minibatch")
    d = silos.FEATURES + 1
    return span(solved(e) * math.sqrt(d) / digits.batch_of(e) for e in epsilons)


def of_charges(*epsilons: float) -> Span:
    """001-figure4: one silo's message, all its records of 936 in 3 or 10 silos; 12 parameters."""
    counts = [tuple(936 // n for _ in range(n)) for n in (3, 10)]
    return span(
        charges.noise_multipliers("minibatch", sizes, e)[0] * math.sqrt(12) / sizes[0]
        for sizes in counts
        for e in epsilons
    )


# ---- 002 -------------------------------------------------------------------------------------------------------------


def of_loans(population: int, cohort: int, total: int, steps: int, *epsilons: float) -> Span:
    """002-loans and 002-loans-5000 at one T and E; 11 parameters."""
    return span(noise_ratio(loans.loans_plan(e, total, steps, cohort, population), 11) for e in epsilons)


def of_writers() -> Span:
    """002-femnist-30: all of its E and epsilons."""
    d = sum(one.numel() for one in femnist.model("mlp").parameters())
    places = [(e, steps) for e in femnist.PAPER_EPSILONS if math.isfinite(e) for steps in femnist.PAPER_STEPS]
    return span(noise_ratio(femnist.femnist_plan(e, femnist.PAPER_TOTAL, steps), d) for e, steps in places)


# ---- 003, 004 --------------------------------------------------------------------------------------------------------


def sam_mnist() -> Span:
    """003-mnist."""
    return span([noise_ratio(paper_003.plan(paper_003.Setting("DP-FedAvg"), 0), size(Mlp((128,)), WHOLE))])


def sam_cifar() -> Span:
    """003-cifar10-regime."""
    made = paper_003.plan(paper_003_regime.BENCHES["cifar10"].base, 0)
    return span([noise_ratio(made, size(paper_003_regime.NET, (3, 16, 16)))])


def sam_mnist_regime() -> Span:
    """003-mnist-regime."""
    return span([noise_ratio(paper_003.plan(paper_003_regime.BENCHES["mnist"].base, 0), size(Mlp((128,)), WHOLE))])


def sam_protocol() -> Span:
    """003-protocol: cohorts of exactly S."""
    own = paper_003_protocol
    return span([own.Z * math.sqrt(size(Mlp((128,)), WHOLE)) / own.COHORT])


def lssgd_protocol(*epsilons: float) -> Span:
    """004-protocol: the published noise on the clipped mean, clip norm 1."""
    d = size(LOGISTIC, WHOLE)
    return span(paper_004_protocol.NOISE[e] / paper_004_protocol.RADIUS * math.sqrt(d) for e in epsilons)


def lssgd(net: Architecture, shape: tuple[int, ...], setting: paper_004.Setting, *epsilons: float) -> Span:
    """004-table2, 004-cnn and 004-cifar10: noise by tight accounting."""
    plans = (setting.plan(paper_004.noise_multiplier(setting, e), 0.0, 1.0) for e in epsilons)
    return span(noise_ratio(plan, size(net, shape)) for plan in plans)


def lssgd_regime() -> Span:
    """004-regime."""
    return span([noise_ratio(paper_004_regime.plan_of(0.0, 0.15), size(DpMnistCnn(), HALF))])


OURS: dict[str, Callable[[], Span]] = {
    "000-table2": table2,
    "000-regime": partial(digits_cnn, paper_000_regime.WIDE, *MULTIPLIERS),
    "000-small": partial(digits_cnn, SMALL, *MULTIPLIERS),
    "000-small, z = 2": partial(digits_cnn, SMALL, 2.0),
    "000-cnn": by_writer,
    "000-regime-lstm": lstm,
    "000-figure5": partial(lstm_of_32, *paper_000_lstm.MULTIPLIERS),
    "000-table-h10": partial(lstm_of_32, 1.0),
    "000-figures34": figure3,
    "000-figure6": partial(digits_cnn, SMALL, *paper_000_curves.NOISES),
    "000-figure7": attack,
    "001-figure3-h1": partial(of_silos, "true", *digits.EPSILONS),
    "001-figure3-h1, epsilon 12 and 18": partial(of_silos, "true", 12.0, 18.0),
    "001-figure3-h1, epsilon 18": partial(of_silos, "true", 18.0),
    "001-figure3-h1, its noise": partial(of_silos, "paper", 12.0, 18.0),
    "001-figure4, epsilon to 2": partial(of_charges, 0.25, 1.0, 2.0),
    "001-figure4, epsilon 2 and 3": partial(of_charges, 2.0, 3.0),
    "002-loans-5000": partial(of_loans, 5000, 500, 100, 1, 1.0, 3.0, 5.0),
    "002-loans-5000, Figure 7": partial(of_loans, 5000, 5000, 20, 1, 3.0),
    "002-loans": partial(of_loans, 1000, 100, 100, 1, 1.0, 3.0, 5.0),
    "002-femnist-30": of_writers,
    "003-mnist": sam_mnist,
    "003-cifar10-regime": sam_cifar,
    "003-mnist-regime": sam_mnist_regime,
    "003-cifar10-regime, 003-mnist-regime": lambda: span([*sam_cifar(), *sam_mnist_regime()]),
    "003-protocol": sam_protocol,
    "004-protocol": partial(lssgd_protocol, *paper_004_protocol.NOISE),
    "004-protocol, Figure 4": partial(lssgd_protocol, 0.1, 0.2),
    "004-regime": lssgd_regime,
    "004-table2": partial(lssgd, LOGISTIC, WHOLE, paper_004.TABLE2, *paper_004.PUBLISHED),
    "004-cnn": partial(lssgd, DpMnistCnn(), HALF, paper_004_cnn.MNIST.setting, *paper_004_cnn.MNIST.epsilons),
    "004-cifar10": partial(
        lssgd, DpMnistCnn(), (3, 16, 16), paper_004_cnn.CIFAR.setting, *paper_004_cnn.CIFAR.epsilons
    ),
}


@cache
def ours(name: str) -> Span:
    """The ratios of an id's runs."""
    return OURS[name]()
