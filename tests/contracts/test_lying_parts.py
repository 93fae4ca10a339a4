"""What runs is what is written: a part that would be hashed and accounted as another one never enters a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiny import plan

from sordino import codec
from sordino.accounting.composition import Cost, Participation
from sordino.accounting.events import GaussianNoise
from sordino.certificate.build import certificate
from sordino.certificate.facts import Facts
from sordino.errors import PlanError
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares
from sordino.parts.schedules import Constant, Scaled
from sordino.parts.server_optimizers import Average, Sgd
from sordino.plan import Plan


class Silent(Gaussian):
    """Draws zeros, and has the hash of Gaussian noise."""

    def sample(self, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return np.zeros(size)


class Blind(NoiseShares, kind=""):
    """Adds nothing."""

    def in_sum(self, total: Any, cohort: Any, rng: Any) -> Any:
        return total


class Wide(Clip):
    def encode(self, rows: Any, public: Any, slopes: Any = None) -> Any:
        return 100 * super().encode(rows, public, slopes)


class Drifting(Constant):
    def at(self, t: int) -> float:
        return 1.0 + t


@dataclass(frozen=True)
class Hoarding(Average):
    """Not a part, but written into a plan all the same."""


class Generous(Plan):
    def cost(self, participation: Participation | None = None, only: int | None = None) -> Cost:
        return replace(super().cost(participation, only), lines=())


LIES: dict[str, Callable[[], Plan]] = {
    "plan.release.mechanism": lambda: plan(release=CentralNoise(Silent(1.0))),
    "plan.release": lambda: plan(release=Blind(1.0, 1)),
    "plan.encode[0]": lambda: plan(encode=(Wide(1.0),)),
    "plan.encode[0].clip_norm.schedule": lambda: plan(encode=(Clip(Scaled(Drifting(1.0), 1.0)),)),
    "plan.server.average": lambda: plan(server=Sgd(average=Hoarding())),
    "plan, a Generous": lambda: Generous(**{name: getattr(plan(), name) for name in Plan.__dataclass_fields__}),
}


@pytest.mark.parametrize("where", LIES)
def test_a_subclass_that_is_written_as_its_parent_is_refused_however_deep_it_sits(where: str) -> None:
    with pytest.raises(PlanError) as caught:
        LIES[where]()
    assert caught.value.rule == "parts"
    assert where in str(caught.value)


def test_a_lie_has_no_hash_and_no_file() -> None:
    writers: tuple[Callable[[Any], str], ...] = (codec.digest, codec.to_json, codec.to_toml)
    for write in writers:
        with pytest.raises(PlanError, match="declare its kind"):
            write(Silent(1.0))
    assert codec.digest(Gaussian(1.0)) != codec.digest(Gaussian(2.0))


def test_a_method_that_was_set_on_an_instance_is_refused() -> None:
    noise = Gaussian(1.0)
    object.__setattr__(noise, "sample", lambda size, rng: np.zeros(size))
    for release in (CentralNoise(noise), LocalNoise(noise)):
        with pytest.raises(PlanError, match="'sample' was set after construction"):
            plan(release=release)


def test_a_number_that_is_more_than_a_number_is_refused() -> None:
    class Elastic(float):
        def __rmul__(self, other: Any) -> Any:
            return other * 0

    with pytest.raises(PlanError, match="parts"):
        plan(release=CentralNoise(Gaussian(Elastic(1.0))))
    assert plan(release=CentralNoise(Gaussian(np.float64(2.0)))).hash == plan(release=CentralNoise(Gaussian(2.0))).hash


@dataclass(frozen=True)
class Soft(Gaussian, kind="soft noise of a test"):
    """A stranger's own noise: honest about being another part."""

    def event(self) -> GaussianNoise:
        return GaussianNoise(self.noise_multiplier)


def test_a_part_of_another_package_is_named_on_the_certificate_and_changes_the_hash() -> None:
    own, other = plan(), plan(release=CentralNoise(Soft(1.0)))
    assert own.hash != other.hash
    made, plain = (certificate(each, Facts(1e-3, "simulation", 2)) for each in (other, own))
    assert made["epsilon"] == plain["epsilon"]
    assert plain["foreign_parts"] == []
    assert made["foreign_parts"] == [
        {"package": "tests", "version": "", "family": "Mechanism", "kind": "soft noise of a test"}
    ]
    (said,) = [line for line in made["assumptions"] if line not in plain["assumptions"]]
    assert "the privacy statements that tests" in said
    assert "`soft noise of a test` (Mechanism)" in said


def test_a_part_cannot_pass_for_ours_by_its_module_s_name() -> None:
    namespace = {"__module__": "sordino.parts.mechanisms", "__doc__": "forged"}
    forged: Any = dataclass(frozen=True)(type("Gaussian", (LocalSgd,), namespace, kind="forged in a test"))
    del LocalSgd.members["forged in a test"]  # other tests read what is registered
    assert forged.__module__ == "sordino.parts.mechanisms"
    assert [part.kind for part in codec.foreign(forged(lr=0.1, epochs=1))] == ["forged in a test"]
