"""The calculator of `sordino epsilon`: cost of a sampler, a mechanism and a number of rounds, without torch or data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.accountant import check_delta, default_delta
from sordino.accounting.composition import Line, Participation, client_cost
from sordino.accounting.events import Approximate, Event, Shuffled
from sordino.accounting.profiles import participations_in_words
from sordino.accounting.rounding import upto
from sordino.certificate.build import line_entry
from sordino.errors import ConfigError
from sordino.parts.mechanisms import Gaussian, Laplace, Mechanism
from sordino.parts.releases import CentralNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin, Sampler

if TYPE_CHECKING:
    pass


SAMPLERS = ("poisson", "fixed", "full", "roundrobin", "shuffle")
MECHANISMS = {"gaussian": Gaussian, "laplace": Laplace}


@dataclass(frozen=True)
class Question:
    """The options of the command."""

    sampler: str
    population: int
    cohort: float | None
    rounds: int
    noise_multiplier: float | None
    delta: float | None = None  # None: population ** -1.1, at most 1e-3
    mechanism: str = "gaussian"
    epsilon0: float | None = None
    cap: int | None = None


def answer(question: Question) -> dict[str, Any]:
    """Epsilon against one who sees the released models, and against one who also sees the cohort."""
    if question.population < 1:
        raise ConfigError(f"--population {question.population}", "at least 1")
    delta = default_delta(question.population) if question.delta is None else question.delta
    check_delta(delta, question.population, override=True)
    if question.rounds < 1:
        raise ConfigError(f"--rounds {question.rounds}", "at least 1")
    if question.sampler not in SAMPLERS:
        hint = codec.nearest(question.sampler, list(SAMPLERS))
        raise ConfigError(f"--sampler {question.sampler}", "a known sampler", hint)
    lines = _shuffled(question) if question.sampler == "shuffle" else _central(question)
    shown = [{"adversary": line.adversary, **line_entry(line, delta)} for line in lines]
    return {**shown[0], "unit": "client", "accountant": accountant.VERSION, "adversaries": shown}


def _central(question: Question) -> list[Line]:
    if question.noise_multiplier is None:
        raise ConfigError("no --noise-multiplier", "the noise's scale over the clip norm")
    release = CentralNoise(_noise(question.mechanism, question.noise_multiplier))
    clients = sampler(question)
    cost = client_cost(clients, release, Participation.planned(clients, question.rounds))
    return [cost.line("models"), cost.line("cohort")]


def _noise(name: str, noise_multiplier: float) -> Mechanism:
    if name not in MECHANISMS:
        raise ConfigError(f"--mechanism {name}", "gaussian or laplace", codec.nearest(name, list(MECHANISMS)))
    return MECHANISMS[name](noise_multiplier)


def sampler(question: Question) -> Sampler:
    """The sampler that the options name."""
    n, m = question.population, question.cohort
    if question.sampler == "full":
        return Everyone(n)
    if m is None:
        raise ConfigError("no --cohort", "how many clients a round has (for poisson: on average)")
    if question.sampler == "poisson":
        return Poisson(n, m / max(n, 1), question.cap)
    if not float(m).is_integer():
        raise ConfigError(f"--cohort {m}", f"a whole number for --sampler {question.sampler}")
    return FixedSize(n, int(m)) if question.sampler == "fixed" else RoundRobin(n, int(m))


def _shuffled(question: Question) -> list[Line]:
    """Local randomisers behind a shuffler: pure epsilon0, or a mechanism's noise on each message."""
    local: Event
    if question.epsilon0 is not None:
        local = Approximate(question.epsilon0)
    elif question.noise_multiplier is not None:
        local = _noise(question.mechanism, question.noise_multiplier).event()
    else:
        raise ConfigError("neither --epsilon0 nor --noise-multiplier", "how private one message is before the shuffler")
    return [Line("models", "replace_one", ((Shuffled(question.population, local), question.rounds),))]


def text(found: dict[str, Any]) -> str:
    """The answer in words."""
    who = {"models": "sees the released models", "cohort": "also sees who took part"}
    lines = [
        f"epsilon {_or_dash(line['epsilon'])} (RDP {_or_dash(line['epsilon_rdp'])}), delta {upto(line['delta'])}, "
        f"{line['relation']}: to one who {who[line['adversary']]}" + _by_coins(line)
        for line in found["adversaries"]
    ]
    grid = "none" if found["grid"] is None else f"{found['grid']:.3g}"
    return "\n".join([*lines, f"unit {found['unit']}; {found['accountant']}, {found['method']}, grid {grid}"])


def _by_coins(line: dict[str, Any]) -> str:
    told = line.get("by_participations")
    return f"\n  {participations_in_words(told)}" if told else ""


def _or_dash(value: float | None) -> str:
    return "-" if value is None else upto(value, 4)


__all__ = ["Question", "answer", "default_delta", "text"]
