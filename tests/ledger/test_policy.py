"""A silo's policy: what may touch its data; every mistake and every refusal is one sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import plan as client_plan

from sordino import codec
from sordino.errors import ConfigError, UserError
from sordino.ledger import policy
from sordino.ledger.policy import Policy
from sordino.parts.mechanisms import Gaussian, Histogram
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares
from sordino.parts.samplers import Poisson
from sordino.plan import Plan
from sordino.recipes import silo

TODAY = date(2027, 1, 1)
SILOS: Plan = silo(sizes=(300, 120, 80), epsilons=(1.0, 2.0, 4.0), rounds=5)
OPEN = Policy(dataset="heart", epsilon=8.0, delta=1e-5, unit="record", releases=("local_noise",), noise=("secure",))


def refusal(changed: Policy, plan: Plan = SILOS, **known: Any) -> str | None:
    return changed.check(plan, **{"noise": "secure", "today": TODAY, **known})


def test_what_the_policy_allows_is_allowed() -> None:
    allowed = replace(OPEN, plans=(SILOS.hash,), models=("a" * 64,), expires="2027-01-01", least_cohort=3.0)
    assert refusal(allowed, model="a" * 64) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expires": "2026-12-31"}, "has expired on 2026-12-31"),
        ({"plans": ("b" * 64,)}, "is not among those allowed"),
        ({"models": ("b" * 64,)}, r"the model \(none\) is not among those allowed"),
        ({"unit": "client"}, "protects one record, and the policy requires one client"),
        ({"releases": ("noise_shares", "central_noise")}, "the release 'local_noise' is not allowed"),
        ({"noise": ("simulation",)}, "noise of mode 'secure' is not allowed"),
        ({"least_noise_multiplier": 1e6}, "the least allowed is 1e"),
        ({"least_cohort": 4.0}, "a round may have 3 clients, and the least allowed is 4"),
    ],
)
def test_each_rule_refuses_by_itself(changes: dict[str, Any], said: str) -> None:
    assert refusal(OPEN) is None
    assert re.search(said, refusal(replace(OPEN, **changes)) or "")


def test_code_that_is_trusted_is_refused_where_the_policy_does_not_name_it() -> None:
    assert refusal(OPEN, own_code="per record (vmap)") is None
    assert refusal(OPEN, own_code="own code, trusted") == "user code that is 'own code, trusted' is not allowed"
    assert refusal(replace(OPEN, own_code=("own code, trusted",)), own_code="own code, trusted") is None
    assert refusal(replace(OPEN, own_code=("by construction",)), own_code="per record (vmap)") is not None


def test_a_plan_that_releases_columns_first_is_refused_by_a_silo_over_a_network() -> None:
    """No silo knows how to do it, so none is asked what it costs."""
    asking = replace(SILOS, prepare=(Histogram("amount", 0.1, 0.0, 1.0),))
    assert "releases histograms before round 1" in str(refusal(OPEN, asking))


def test_the_multiplier_is_this_silos_own() -> None:
    release = SILOS.release
    assert isinstance(release, LocalNoise)
    least = [release.mechanism_of(silo).noise_multiplier for silo in range(3)]
    middle = replace(OPEN, least_noise_multiplier=sorted(least)[1])
    found = [refusal(middle, silo=silo) is None for silo in range(3)]
    assert found == [noise_multiplier >= middle.least_noise_multiplier for noise_multiplier in least]
    assert sorted(found) == [False, True, True]


def test_a_cohort_is_the_fewest_that_a_round_accepts() -> None:
    shares = client_plan(release=NoiseShares(2.0, at_least=4))
    own = replace(OPEN, unit="client", releases=("noise_shares",), least_cohort=5.0)
    assert "a round may have 4 clients" in str(refusal(own, shares))


def test_a_relation_that_the_limit_cannot_price_is_refused() -> None:
    removed = replace(OPEN, unit="client", relation="add_remove", releases=("central_noise",), adversary="cohort")
    assert "differ by replace_one" in str(refusal(removed, client_plan()))
    poisson = client_plan(clients=Poisson(6, 0.5), release=CentralNoise(Gaussian(1.0)))
    assert refusal(replace(removed, adversary="models"), poisson) is None


def test_a_silo_that_the_plan_does_not_have_is_refused() -> None:
    assert refusal(OPEN, silo=3) == "the plan has no silo 3"


# ---- the file -------------------------------------------------------------------------------------------------------

TABLE = codec.dump(OPEN)


def written(folder: Path, table: dict[str, Any]) -> Path:
    file = folder / "policy.toml"
    file.write_bytes(tomli_w.dumps(table).encode())
    return file


def test_a_policy_reads_back_as_it_was_written(tmp_path: Path) -> None:
    assert policy.load(written(tmp_path, TABLE)) == OPEN


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epsilom": 1.0}, "unknown key epsilom.*did you mean 'epsilon'"),
        ({"epsilon": 0.0}, "epsilon above 0"),
        ({"delta": 1.0}, "delta in"),
        ({"releases": []}, "at least one"),
        ({"releases": ["local_nose"]}, "did you mean 'local_noise'"),
        ({"noise": ["loud"]}, "noise"),
        ({"expires": "soon"}, 'write it like "2027-01-31"'),
        ({"plans": ["abc"]}, "64 lower-case hexadecimal digits"),
        ({"least_cohort": -1.0}, "0 or above"),
        ({"adversary": "everyone"}, "one of models, cohort, messages"),
    ],
)
def test_a_mistake_in_a_policy_is_one_sentence(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        policy.load(written(tmp_path, {**TABLE, **changes}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["dataset", "epsilon", "delta", "unit", "releases"])
def test_what_a_policy_must_say_is_asked_for(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"no {name}"):
        policy.load(written(tmp_path, {key: value for key, value in TABLE.items() if key != name}))


def test_a_policy_that_is_missing_or_no_toml_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        policy.load(tmp_path / "none.toml")
    (tmp_path / "x").write_text("dataset = ")
    with pytest.raises(ConfigError, match="not TOML"):
        policy.load(tmp_path / "x")


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.text(max_size=9), max_size=3),
)


@given(st.sampled_from([*TABLE, "expires", "plans", "more"]), ODD)
def test_whatever_a_policy_holds_it_is_read_or_refused_in_one_sentence(name: str, value: Any) -> None:
    table = {**TABLE, name: value}
    try:
        found: Policy = codec.read(Policy, {key: held for key, held in table.items() if held is not None})
        found.check(SILOS, noise="secure", today=TODAY)
    except UserError as error:
        said = str(error)
        assert "\n" not in said, said
