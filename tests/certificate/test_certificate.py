"""Promises of the certificate: it holds what PRIVACY rule 14 asks, rounds up, and one changed leaf is named."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import plan

from sordino.accounting import accountant
from sordino.accounting.accountant import check_delta, default_delta
from sordino.accounting.rounding import upward
from sordino.certificate.build import certificate
from sordino.certificate.certificate_file import compare
from sordino.certificate.facts import Facts
from sordino.errors import CertificateError, ConfigError
from sordino.parts.encoding import Clip, LaplacianSmoothing
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import LocalNoise, NoiseShares, NoNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin
from sordino.parts.schedules import Decay
from sordino.plan import Plan
from sordino.rng import Mode

POISSON = plan(rounds=4, clients=Poisson(50, 0.2))
SHARES = plan(rounds=4, clients=FixedSize(50, 10), release=NoiseShares(2.0, 8))
LOCAL = plan(rounds=4, clients=Everyone(6), release=LocalNoise(Gaussian(2.0)), encode=(Clip(Decay(1.0, 0.5)),))
FACTS = Facts(delta=1e-3, noise="simulation", charged=4, model="ab" * 32)


issued = lru_cache(certificate)  # a pure function: made once per plan and facts


def written(of: Plan, facts: Facts = FACTS) -> dict[str, Any]:
    """As it is read back from certificate.json."""
    back: dict[str, Any] = json.loads(json.dumps(issued(of, facts), allow_nan=False))
    return back


@pytest.mark.parametrize("of", [POISSON, SHARES, LOCAL, plan(release=NoNoise())], ids=["a", "b", "c", "d"])
def test_the_certificate_holds_every_field_of_rule_14(of: Plan) -> None:
    found = written(of)
    for name in ("unit", "relation", "epsilon", "delta", "accountant", "sampler", "trust", "clip", "denominator"):
        assert name in found
    for name in ("mask", "noise", "counts", "plan_sha256", "assumptions", "adversaries", "model_sha256", "sordino"):
        assert name in found
    assert found["accountant"]["library"] == accountant.VERSION
    assert {"mode", "note"} <= set(found["noise"])
    assert {"scope", "clip_norm", "norm"} <= set(found["clip"])
    assert {"sees", "needs"} <= set(found["trust"])
    assert found["plan_sha256"] == of.hash
    assert [line["adversary"] for line in found["adversaries"]] == ["models", "cohort", "messages"]
    for line in found["adversaries"]:
        assert {"relation", "epsilon", "delta", "method", "grid", "events", "description"} <= set(line)


def test_the_numbers_at_the_top_are_those_of_one_who_sees_the_models() -> None:
    found = written(POISSON)
    first = found["adversaries"][0]
    line = POISSON.cost().line("models")
    assert (found["epsilon"], found["relation"], found["delta"]) == (first["epsilon"], first["relation"], 1e-3)
    assert first["epsilon"] == pytest.approx(accountant.epsilon(line.entries, line.relation, 1e-3).value, abs=2e-6)
    assert (found["unit"], found["relation"]) == ("client", "add_remove")
    assert first["events"] == [
        {
            "count": 4,
            "event": {"kind": "poisson_sampled", "rate": 0.2, "event": {"kind": "gaussian", "noise_multiplier": 1.0}},
        }
    ]
    assert found["sampler"] == {"kind": "poisson", "population": 50, "rate": 0.2}
    assert found["clip"]["clip_norm"] == 1.0
    assert found["denominator"] == 10.0


def test_a_release_without_noise_says_that_nothing_is_guaranteed() -> None:
    found = written(plan(release=NoNoise()))
    assert [found["epsilon"], *(line["epsilon"] for line in found["adversaries"])] == [None] * 4
    assert written(POISSON)["adversaries"][2]["epsilon"] is None  # messages under central noise


def test_a_simulation_is_not_for_release_and_says_so() -> None:
    notes: dict[Mode, str] = {
        mode: written(POISSON, Facts(1e-3, mode, 4))["noise"]["note"] for mode in ("simulation", "secure")
    }
    assert "not for release" in notes["simulation"]
    assert "not for release" not in notes["secure"]


def test_smoothing_is_free_and_only_its_name_and_the_hash_tell() -> None:
    smooth = plan(rounds=4, clients=Poisson(50, 0.2), postprocess=(LaplacianSmoothing(1.0),))
    one, other = written(POISSON), written(smooth)
    for told in ("plan_sha256", "postprocess"):
        assert one.pop(told) != other.pop(told)
    assert one == other


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, dict):
        yield from (found for key, item in data.items() for found in leaves(item, (*path, key)))
    elif isinstance(data, list):
        yield from (found for i, item in enumerate(data) for found in leaves(item, (*path, i)))
    else:
        yield path


def name_of(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def other_than(value: Any) -> list[Any]:
    """Small lies: the next float, the next integer, one more letter, another type."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1, float(value)]
        case float():
            return [math.nextafter(value, math.inf), math.nextafter(value, -1.0), str(value)]
        case str():
            return [value + " ", value[1:], None]
    return [0.0, "none"]


def lie(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    new = copy.deepcopy(data)
    holder = new
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return new


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


@pytest.mark.parametrize("of", [POISSON, SHARES, LOCAL], ids=["poisson", "shares", "local"])
def test_any_changed_leaf_is_named(of: Plan) -> None:
    facts = Facts(1e-3, "simulation", 4, 3 if of is SHARES else None, model="ab" * 32, config="cd" * 32)
    true, honest = issued(of, facts), written(of, facts)
    compare(honest, true)
    paths = list(leaves(honest))
    assert len(paths) > 40
    for path in paths:
        for value in other_than(at(honest, path)):
            with pytest.raises(CertificateError) as caught:
                compare(lie(honest, path, value), true)
            assert caught.value.field == name_of(path)
            assert name_of(path) in str(caught.value)


def test_a_missing_or_added_field_is_named() -> None:
    true = issued(POISSON, FACTS)
    for key in true:
        short = {name: value for name, value in written(POISSON).items() if name != key}
        with pytest.raises(CertificateError) as caught:
            compare(short, true)
        assert caught.value.field == key
    with pytest.raises(CertificateError, match="epsilon_really"):
        compare({**written(POISSON), "epsilon_really": 0.1}, true)
    with pytest.raises(CertificateError, match=r"noise\.extra"):
        compare(lie(written(POISSON), ("noise", "extra"), 1), true)
    with pytest.raises(CertificateError, match="adversaries"):
        compare(lie(written(POISSON), ("adversaries",), written(POISSON)["adversaries"][:2]), true)


@given(st.floats(0, 1e6))
def test_epsilon_is_rounded_up_and_never_far(value: float) -> None:
    up = upward(value)
    assert up is not None
    assert value <= up <= value + 1.001e-6


@pytest.mark.parametrize("value", [1.9602600000000001, 0.30000000000000004, 1.0, 0.0, 5e-324])
def test_epsilon_is_rounded_up_where_rounding_bites(value: float) -> None:
    up = upward(value)
    assert up is not None
    assert up >= value


def test_an_infinite_epsilon_is_no_number() -> None:
    assert upward(math.inf) is None


@pytest.mark.parametrize(("charged", "accounted"), [(0, 4), (3, 4), (4, 4), (7, 7)])
def test_rounds_billed_are_the_planned_or_the_charged_whichever_is_more(charged: int, accounted: int) -> None:
    found = written(POISSON, Facts(1e-3, "simulation", charged))
    assert found["counts"] == {"rounds_planned": 4, "rounds_charged": charged, "rounds_accounted": accounted}
    assert found["adversaries"][0]["events"][0]["count"] == accounted
    again = written(plan(rounds=4, clients=RoundRobin(8, 2)), Facts(1e-3, "simulation", charged))
    assert again["adversaries"][1]["events"][0]["count"] == 1 + (accounted - 4)  # the same people ran again


def test_a_seen_cohort_is_billed_by_its_realised_count_and_a_secret_one_never_shows() -> None:
    seen = written(SHARES, Facts(1e-3, "simulation", 4, max_participations=3))
    assert seen["counts"]["max_participations"] == 3
    assert seen["adversaries"][1]["events"][0]["count"] == 3
    assert "max_participations" not in written(POISSON)["counts"]


def test_stopping_early_never_lowers_a_bill() -> None:
    """Stopping looks at the data (PRIVACY rule 12): one round run of four is accounted as four, for every adversary."""
    full, stopped = written(SHARES), written(SHARES, Facts(1e-3, "simulation", charged=1, max_participations=1))
    for whole, part in zip(full["adversaries"], stopped["adversaries"], strict=True):
        assert part["epsilon"] >= whole["epsilon"]


def test_a_run_that_a_budget_stopped_is_billed_for_what_was_charged() -> None:
    """Who was drawn and the budget are seen or public: where it ends looks at no data. A kill may, and so a repeat."""
    stopped = Facts(1e-3, "simulation", charged=2, max_participations=2, filtered=True, stopped=True)
    found = written(SHARES, stopped)
    assert found["counts"]["rounds_accounted"] == 2
    assert found["counts"]["stopped_by"].startswith("a budget")
    assert [line["events"][0]["count"] for line in found["adversaries"]] == [2, 2, 2]
    for other, accounted in ((replace(stopped, stopped=False), 4), (replace(stopped, repeats=1), 5)):
        assert written(SHARES, other)["counts"]["rounds_accounted"] == accounted
        assert written(SHARES, other)["epsilon"] > found["epsilon"]


def test_where_a_budget_may_end_the_run_nobody_is_hidden_by_sampling() -> None:
    """That it goes on, or ends, tells who was drawn: one who sees only models is accounted as one who sees cohorts."""
    fixed = plan(rounds=4, clients=FixedSize(50, 10), release=NoiseShares(2.0, 10))
    hidden, told = (
        written(fixed, Facts(1e-3, "simulation", 4, max_participations=3, filtered=on)) for on in (False, True)
    )
    assert hidden["adversaries"][0]["events"][0]["event"]["kind"] == "fixed_sampled"
    assert told["adversaries"][0]["events"] == told["adversaries"][1]["events"] == hidden["adversaries"][1]["events"]
    assert told["epsilon"] > hidden["epsilon"]


@pytest.mark.parametrize("population", [2, 3, 5, 10, 533, 534, 1000, 10**6])
def test_the_default_delta_is_accepted_and_never_above_one_in_a_thousand(population: int) -> None:
    """By population^-1.1 alone, three clients would get .30 and five .17."""
    assert default_delta(population) == pytest.approx(min(population**-1.1, 1e-3))
    check_delta(default_delta(population), population, override=False)
    check_delta(population**-1.1, population, override=False)  # which may be stated by whoever chooses it


def test_a_single_client_has_a_default_delta_too() -> None:
    """One silo with all the data is DP-SGD: 1^-1.1 = 1 is no delta."""
    assert default_delta(1) < 1
    check_delta(default_delta(1), 1, override=False)


@pytest.mark.parametrize("delta", [-0.1, 1.0, 2.0, math.nan, math.inf])
def test_a_delta_that_is_no_probability_is_refused_even_with_an_override(delta: float) -> None:
    for override in (False, True):
        with pytest.raises(ConfigError, match="delta"):
            check_delta(delta, 100, override)


def test_a_large_delta_needs_an_override() -> None:
    with pytest.raises(ConfigError, match="allow_large_delta"):
        check_delta(0.01, 1000, override=False)
    check_delta(0.01, 1000, override=True)
    check_delta(0.0, 1000, override=False)
