"""A check never passes by looking away: the audit compares with what a part states, or says "not examined"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.special import bdtrc
from tests.commands import sordino, spelt_out

from sordino import codec
from sordino.accounting.composition import Line
from sordino.accounting.events import Event, GaussianNoise, LaplaceNoise, PoissonSampled, Relation
from sordino.audit import summary
from sordino.audit.attacks import prove
from sordino.audit.mechanism import Pipeline, audit_mechanism
from sordino.audit.noise_test import QUESTIONS, Finding, failures, finding, unexamined
from sordino.audit.sampling_and_sensitivity import Draws, cohort_tests, sampling_tests, sensitivity_tests
from sordino.audit.summary import audit_behaviour
from sordino.audit.training_attacks import lower_bounds as canary_bounds
from sordino.errors import DataError
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Distribution, Gaussian, Laplace, Mechanism, laplace_sum_tail
from sordino.parts.record_samplers import FixedRecords, PoissonRecords, RecordSampler, SamplingLaw, poisson_law
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import CentralNoise, LocalNoise, NoNoise, Release, ShuffledNoise
from sordino.parts.samplers import Cohort, CyclicPoisson, Everyone, Poisson, RoundRobin, Sampler
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan

Array = NDArray[np.float64]
ROUNDS, DELTA = 48, 1e-5


def plan(release: Release, clients: Sampler | None = None, local: Any = None, norm: Any = 2) -> Plan:
    local = local or LocalSgd(lr=0.1, steps=1)
    steps = () if local.reads else (Clip(0.7, norm),)
    clients = clients or RoundRobin(20, 5)
    return Plan(rounds=8, clients=clients, local=local, encode=steps, release=release, server=Sgd(lr=1.0))


def asked(planned: Plan) -> tuple[set[str], set[str]]:
    """The questions that failed, and those that were not examined."""
    found = audit_behaviour(planned, rounds=ROUNDS)
    return {one.question for one in failures(found)}, {one.question for one in unexamined(found)}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What a test registers is gone after it."""
    families = [family for family in codec.Part.__subclasses__() if family.__module__.startswith("sordino.")]
    before = [(family.members, dict(family.members)) for family in families]
    yield
    for members, kept in before:
        for name in members.keys() - kept.keys():
            del members[name]
    codec.load_plugins.cache_clear()


# ---- a mechanism from elsewhere --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Foreign(Mechanism):
    """Noise N(0, noise multiplier^2) by a class of its own; subclasses lie in `draw`."""

    noise_multiplier: float
    stated: ClassVar[bool] = True

    @property
    def norm(self) -> Any:
        return 2

    @property
    def std(self) -> float:
        return self.noise_multiplier

    def event(self) -> Event:
        return GaussianNoise(self.noise_multiplier)

    def distribution(self) -> Distribution | None:
        return stats.norm(scale=self.noise_multiplier) if self.stated else None

    def draw(self, size: int, rng: np.random.Generator) -> Array:
        return rng.standard_normal(size)

    def sample(self, size: int, rng: np.random.Generator) -> Array:
        return self.draw(size, rng) * self.noise_multiplier


def two_silent(self: Any, size: int, rng: np.random.Generator) -> Array:
    z = rng.standard_normal(size)
    z[[3, 7]] = 0.0
    return z


def five_percent_less(self: Any, size: int, rng: np.random.Generator) -> Array:
    return 0.95 * rng.standard_normal(size)


def uneven(self: Any, size: int, rng: np.random.Generator) -> Array:
    return rng.standard_normal(size) * np.where(np.arange(size) < size // 4, math.sqrt(2.5), math.sqrt(0.5))


def no_tails(self: Any, size: int, rng: np.random.Generator) -> Array:
    return np.clip(rng.standard_normal(size), -3.0, 3.0)


def another_law(self: Any, size: int, rng: np.random.Generator) -> Array:
    return rng.laplace(scale=math.sqrt(0.5), size=size)


LIES: dict[str, tuple[Callable[..., Array], set[str]]] = {
    "zero noise in two coordinates": (two_silent, {"noise of each coordinate"}),
    "five percent less": (five_percent_less, {"noise of all coordinates"}),
    "more here, less there": (uneven, {"noise of each coordinate", "noise of each block of coordinates"}),
    "tails cut at three sigma": (no_tails, {"tails of the noise"}),
    "another law of the same deviation": (another_law, {"shape of the noise", "tails of the noise"}),
}


def foreign(lie: Callable[..., Array] | None = None, *, stated: bool = True) -> Mechanism:
    members: dict[str, Any] = {"stated": stated, "__module__": "elsewhere"}
    if lie is not None:
        members["draw"] = lie
    made: Any = dataclass(frozen=True)(type("Own", (Foreign,), members, kind="own noise of a test"))
    return cast(Mechanism, made(1.0))


@pytest.mark.parametrize("name", LIES)
def test_a_lie_of_a_foreign_mechanism_that_states_its_distribution_is_found(name: str) -> None:
    lie, questions = LIES[name]
    failed, silent = asked(plan(CentralNoise(foreign(lie))))
    assert questions <= failed
    assert silent == set()


def test_a_foreign_mechanism_that_states_nothing_is_not_examined() -> None:
    assert asked(plan(CentralNoise(foreign(two_silent, stated=False)))) == (set(), {"noise of the sums"})


def test_an_honest_foreign_mechanism_passes() -> None:
    assert asked(plan(CentralNoise(foreign()))) == (set(), set())


def test_under_local_noise_the_messages_of_a_foreign_mechanism_are_examined_and_its_sums_are_not() -> None:
    """One draw has the distribution that is stated; a sum of five draws has one that is not."""
    assert asked(plan(LocalNoise(foreign()))) == (set(), {"noise of the sums"})
    failed, silent = asked(plan(LocalNoise(foreign(two_silent))))
    assert "message: noise of each coordinate" in failed
    assert silent == {"noise of the sums"}


@dataclass(frozen=True)
class Discrete(Mechanism, kind="discrete laplace of a test"):
    """P[k] ~ exp(-|k| grid / noise multiplier) at k * grid."""

    noise_multiplier: float
    grid: float = 0.5
    lie: bool = False

    @property
    def norm(self) -> Any:
        return 1

    @property
    def std(self) -> float:
        return float(stats.dlaplace(self.grid / self.noise_multiplier).std() * self.grid)

    def event(self) -> Event:
        return LaplaceNoise(self.noise_multiplier)

    def distribution(self) -> Distribution:
        return Scaled(stats.dlaplace(self.grid / self.noise_multiplier), self.grid)

    def sample(self, size: int, rng: np.random.Generator) -> Array:
        p = -math.expm1(-self.grid / (self.noise_multiplier * (0.9 if self.lie else 1.0)))
        return self.grid * (rng.geometric(p, size) - rng.geometric(p, size)).astype(np.float64)


@dataclass(frozen=True)
class Scaled:
    inner: Any
    grid: float

    def cdf(self, x: Array, /) -> Array:
        return np.asarray(self.inner.cdf(x / self.grid))

    def sf(self, x: Array, /) -> Array:
        return np.asarray(self.inner.sf(x / self.grid))


@pytest.mark.parametrize("grid", [0.02, 2.0])
def test_a_discrete_distribution_is_examined(grid: float) -> None:
    assert asked(plan(CentralNoise(Discrete(1.0, grid)), norm=1)) == (set(), set())
    failed, _ = asked(plan(CentralNoise(Discrete(1.0, grid, lie=True)), norm=1))
    assert "noise of all coordinates" in failed


def test_laplace_noise_of_unlike_clients_is_examined() -> None:
    unlike = LocalNoise(Laplace(2.0), (1.0, 2.0, 3.0, 1.5))
    assert asked(plan(unlike, Everyone(4), norm=1)) == (set(), set())


@pytest.mark.parametrize("scales", [(1.0, 2.5, 0.3, 1.01), (1.0, 1.0, 1.0), (4.0,), (1.0, 1.0 + 1e-9)])
def test_the_tail_of_a_sum_of_laplace_draws(scales: tuple[float, ...]) -> None:
    """By the partial fractions of its characteristic function, in 60 digits."""
    import mpmath

    mpmath.mp.dps = 60
    own = [mpmath.mpf(b) * (1 + mpmath.mpf(10) ** -12 * i) for i, b in enumerate(scales)]  # all different
    for x in (0.0, 0.5, 3.0, 12.0):
        parts = [mpmath.exp(-x / b) / 2 * mpmath.fprod(b**2 / (b**2 - c**2) for c in own if c is not b) for b in own]
        assert laplace_sum_tail(np.array([x]), scales)[0] == pytest.approx(float(mpmath.fsum(parts)), rel=1e-6)
    wide = np.linspace(0.0, 12.0, 10_001)
    assert laplace_sum_tail(wide, scales)[2500] == pytest.approx(laplace_sum_tail(wide[2500:2501], scales)[0], rel=1e-4)


# ---- a release and a solver from elsewhere ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Quiet(Release, kind="quiet release of a test"):
    """Says that it adds noise, and adds none."""

    sees: ClassVar[frozenset[str]] = frozenset({"mean"})

    def event(self) -> Event:
        return GaussianNoise(1.0)

    def message_event(self) -> Event:
        return GaussianNoise(1.0)

    def noise_std(self, *_: Any) -> float:
        return 1.0

    def check(self, bound: Any, clients: Any, records: Any) -> None: ...


def test_a_foreign_release_that_states_no_noise_is_not_examined_and_is_beaten_by_the_attack() -> None:
    found = summary.mechanism_layer(plan(Quiet()), DELTA)
    assert not found["passed"]
    assert any("'quiet release of a test' does not state its noise" in one for one in found["not_examined"])
    assert not any(one["passed"] for one in found["mechanism"])


# ---- a sampler from elsewhere ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoLevels(Sampler, kind="two levels of a test"):
    """`picked` of `regions` at random, then each of their clients (i mod regions) with probability `rate`.

    Guarantee: whoever knows the others' data may see which regions were picked, so `rate` alone amplifies.
    """

    population: int
    regions: int
    picked: int
    rate: float
    says: str = "all"  # what it states: all, nothing, or no size
    lie: str = ""
    relation: ClassVar[Relation] = "add_remove"
    amplifies: ClassVar[bool] = True

    @property
    def inclusion(self) -> float:
        return self.picked / self.regions * self.rate

    @property
    def expected(self) -> float:
        return self.inclusion * self.population

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        rng = np.random.default_rng(t) if self.lie == "foreseen" else rng
        regions = rng.permutation(self.regions)[: self.picked + (self.lie == "one region more")]
        regions = np.arange(self.picked) if self.lie == "the same regions" else regions
        inside = np.flatnonzero(np.isin(np.arange(self.population) % self.regions, regions))
        chosen = inside[rng.random(len(inside)) < self.rate]
        return chosen if self.lie != "all or nobody" else (inside if rng.random() < self.rate else inside[:0])

    def amplify(self, event: Event) -> Event:
        return PoissonSampled(self.rate / (4 if self.lie == "accounted at a quarter" else 1), event)

    def law(self) -> SamplingLaw | None:
        if self.says == "nothing":
            return None
        group = self.population // self.regions * self.picked
        law = SamplingLaw(self.population, self.inclusion, independent=False)
        return law if self.says == "no size" else replace(law, size_sf=lambda t, k: float(bdtrc(k, group, self.rate)))

    def max_participations(self, rounds: int) -> int:
        return rounds


def levels(**changes: Any) -> TwoLevels:
    return TwoLevels(**{"population": 40, "regions": 4, "picked": 2, "rate": 0.5, **changes})


def test_a_correct_sampler_from_elsewhere_that_states_its_law_passes() -> None:
    assert asked(plan(CentralNoise(Gaussian(1.0)), levels())) == (set(), set())


def test_a_correct_sampler_never_fails_over_many_seeds() -> None:
    planned = plan(CentralNoise(Gaussian(1.0)), levels())
    assert [one for seed in range(5) for one in cohort_tests(planned, seed) if not one.passed] == []


@pytest.mark.parametrize(
    ("says", "question"), [("nothing", "cohort: sampling"), ("no size", "cohort: spread of sizes")]
)
def test_what_a_sampler_does_not_state_is_not_examined(says: str, question: str) -> None:
    failed, silent = asked(plan(CentralNoise(Gaussian(1.0)), levels(says=says)))
    assert failed == set()
    assert question in silent
    assert silent <= {question, f"trial rounds, {question}"}


SAMPLING_LIES = {
    "one region more": "cohort: spread of sizes",
    "the same regions": "cohort: rate of each",
    "foreseen": "cohort: secrecy",
    "all or nobody": "cohort: spread of sizes",
    "accounted at a quarter": "cohort: rate that is accounted for",
}


@pytest.mark.parametrize("lie", SAMPLING_LIES)
def test_a_lie_of_a_sampler_that_states_its_law_is_found(lie: str) -> None:
    found = cohort_tests(plan(CentralNoise(Gaussian(1.0)), levels(lie=lie)))
    assert SAMPLING_LIES[lie] in {one.question for one in failures(found)}


@pytest.mark.parametrize(
    "sampler", [Poisson(8, 0.9), Poisson(8, 0.9, cap=7), CyclicPoisson(9, 3, 0.9)], ids=["all", "cap", "turns"]
)
def test_a_high_rate_among_few_is_examined(sampler: Sampler) -> None:
    """More than the mean and its root are more than there are: probability 0, and no NaN."""
    assert [one for one in cohort_tests(plan(CentralNoise(Gaussian(1.0)), sampler)) if not one.passed] == []


def test_clients_that_do_not_exist_fail_the_audit_and_do_not_end_it() -> None:
    for wrong in ([-1, 2], [2, 2], [7, 40]):
        draws = Draws("cohort", poisson_law(40, 0.1), [[np.array(wrong)]] * 2)
        assert [(one.question, one.passed) for one in sampling_tests(draws)] == [("cohort: sizes and members", False)]


@dataclass(frozen=True)
class Pairwise(RecordSampler, kind="pairs of records of a test"):
    """Neighbouring records come together, each pair with probability 1/4; nothing is amplified."""

    sizes: tuple[int, ...]
    stated: bool = True
    relation: ClassVar[Relation] = "add_remove"
    fixed: ClassVar[bool] = False

    @property
    def count(self) -> float:
        return self.sizes[0] / 4

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.flatnonzero(np.repeat(rng.random(size // 2) < 0.25, 2))

    def law(self, silo: int) -> SamplingLaw | None:
        half = self.size(silo) // 2
        law = SamplingLaw(2 * half, 0.25, independent=False, size_sf=lambda t, k: float(bdtrc(k // 2, half, 0.25)))
        return law if self.stated else None


def test_a_record_sampler_from_elsewhere_passes_if_it_states_its_law_and_is_not_examined_if_not() -> None:
    for stated, silent in ((True, set()), (False, {"batch: sampling"})):
        local = BatchGradient(Pairwise((16,), stated), 0.7)
        assert asked(plan(CentralNoise(Gaussian(1.5)), Everyone(2), local)) == (set(), silent)


# ---- ways of passing by looking away ---------------------------------------------------------------------------------


def test_no_statistics_and_no_number_do_not_pass() -> None:
    assert not finding("nothing", np.zeros(0), lambda i: "").passed
    assert not finding("nothing to go by", np.ones(3), lambda i: "", np.zeros(3, dtype=bool)).passed
    assert not finding("no number", np.array([1.0, math.nan]), lambda i: "").passed
    assert not Finding("no number", 1, math.nan, "").passed
    assert not Finding("not examined", 5, 1.0, "", examined=False).passed


def test_a_plan_that_promises_nothing_is_not_examined() -> None:
    found = summary.mechanism_layer(plan(NoNoise()), DELTA)
    assert not found["passed"]
    assert "the plan has no guarantee" in summary.text(found)


def test_noise_that_is_no_number_fails_every_layer() -> None:
    class Broken(Pipeline):
        def released(self, messages: Any, cohort: Any, copies: int, streams: Any) -> Any:
            return torch.full((copies, messages.shape[1]), math.nan)

    planned = plan(CentralNoise(Gaussian(1.0)))
    assert not any(one.passed for one in audit_mechanism(planned, delta=DELTA, trials=2000, pipeline=Broken(planned)))
    line = Line("models", "zero_out", ((GaussianNoise(1.0), 1),))
    assert prove(np.full(100, math.nan), np.zeros(100), line, DELTA, 1e-3, "shift").lower_mu == math.inf
    with pytest.raises(DataError, match="NaN or infinity"):
        canary_bounds(np.full(10, math.nan), np.zeros(10, dtype=bool), line, DELTA, "client", 1)


def test_a_sampler_that_seldom_draws_anybody_has_its_movement_measured_all_the_same() -> None:
    rare = plan(CentralNoise(Gaussian(1.0)), Poisson(10, 0.01))
    found = sensitivity_tests(rare)
    assert all(one.passed and one.statistics > 0 for one in found)


def test_batches_are_examined_where_silos_differ_or_sit_out() -> None:
    unequal = BatchGradient(FixedRecords(4, (16, 24)), 0.7)
    for clients in (Everyone(2), RoundRobin(2, 1)):
        found = audit_behaviour(plan(LocalNoise(Gaussian(1.5)), clients, unequal), rounds=ROUNDS)
        assert "trial rounds, batch: rate" in {one.question for one in found}
        assert [one for one in found if not one.passed] == []


def test_one_record_of_a_shuffled_round_is_attacked() -> None:
    silos = BatchGradient(FixedRecords(1, (20,)), 0.7)
    found = audit_mechanism(
        plan(ShuffledNoise(Gaussian(2.0), at_least=6), Everyone(6), silos), delta=DELTA, trials=4000
    )
    assert {one.adversary for one in found} == {"messages", "models"}
    assert all(one.passed for one in found)


@pytest.mark.parametrize(
    "planned",
    [
        plan(CentralNoise(Gaussian(1.0)), Poisson(50, 0.2)),
        plan(LocalNoise(Gaussian(1.5)), Everyone(2), BatchGradient(PoissonRecords(8.0, (64,)), 0.7)),
    ],
    ids=["client", "record"],
)
def test_an_audit_asks_no_more_questions_than_its_false_alarms_are_shared_by(planned: Plan) -> None:
    assert len(audit_behaviour(planned, rounds=32)) <= QUESTIONS


# ---- on the command line ---------------------------------------------------------------------------------------------

OWN = '''
from dataclasses import dataclass
from sordino.parts import Mechanism
from sordino.accounting.events import GaussianNoise

@dataclass(frozen=True)
class Soft(Mechanism, kind="soft"):
    """Noise of my own."""
    noise_multiplier: float
    @property
    def norm(self): return 2
    @property
    def std(self): return self.noise_multiplier
    def event(self): return GaussianNoise(self.noise_multiplier)
    def sample(self, size, rng):
        drawn = rng.standard_normal(size) * self.noise_multiplier
        drawn[SILENT] = 0.0
        return drawn
'''
STATED = """    def distribution(self):
        from scipy import stats
        return stats.norm(scale=self.noise_multiplier)
"""


def test_the_command_fails_a_mechanism_without_noise_in_two_coordinates_and_does_not_pass_one_that_states_nothing(
    tmp_path: Path,
) -> None:
    file, own = spelt_out(tmp_path, ('kind = "gaussian"', 'kind = "soft"')), tmp_path / "my_parts.py"
    for text, code, words in (
        (OWN.replace("SILENT", "[3, 5]") + STATED, 1, ("noise of each coordinate", "FAILED: what runs is not what")),
        (OWN.replace("SILENT", "[3, 5]"), 1, ("mechanism 'soft' does not state its distribution: NOT EXAMINED",)),
    ):
        own.write_text(text)
        Mechanism.members.pop("soft", None)
        said = sordino("audit", file, "--mechanism", "--with", own)
        assert said.code == code, said.out
        assert [word for word in words if word not in said.out] == []
        assert not said.out.rstrip().endswith("passed")
