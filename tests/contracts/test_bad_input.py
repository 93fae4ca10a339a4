"""Whatever a file says, the answer is one sentence and exit code 2, at once, with nothing charged."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import tiny
from tests.codec.test_codec import EXAMPLES, FAMILIES, KINDS, example
from tests.commands import contents, federation, lines, sordino, spelt_out

from sordino import codec, recipes
from sordino.accounting.calibration import Budget
from sordino.accounting.composition import binomial_most
from sordino.codec.serialization import LARGEST
from sordino.errors import LONGEST, DivergedError, UserError
from sordino.ledger.budget import client_filter
from sordino.loop import run
from sordino.models import Mlp, SmallCnn, build_seeded
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd, Scaffold
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllRecords, OnePass
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import CentralNoise, LocalNoise, NoNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin
from sordino.parts.schedules import Constant, Decay, Linear, Piecewise, Scaled
from sordino.parts.server_optimizers import Adam, Sgd
from sordino.plan import Plan
from sordino.rng import Seeded

# ---- files --------------------------------------------------------------------------------------------------------


def refused(file: Path, command: str = "plan") -> str:
    """One sentence, of a sane length; nothing is left."""
    before = contents(file.parent)
    out = ("--out", file.parent / "a") if command == "run" else ()
    sentence = sordino(command, file, *out).sentence
    assert len(sentence) < 3 * LONGEST + 100
    assert contents(file.parent) == before
    return sentence


@pytest.mark.parametrize(
    ("found", "instead", "words"),
    [
        ('kind = "poisson"', "kind = [1, 2]", "kind [1, 2]"),
        ('kind = "poisson"', "kind = { a = 1 }", "kind {'a': 1}"),
        ("rounds = 4", f"rounds = {'9' * 50_000}", "digits"),
        ("rounds = 4", f"rounds = 0x{'f' * 50_000}", "integer of 200000 bits"),
        ("lr = 0.5", f"lr = 0x{'f' * 300}", "integer of 1200 bits"),
        ("lr = 0.5", f"lr = 1{'0' * 400}", "integer of 1329 bits"),
        ("lr = 0.5", "lr = 1e308", "lr = 1e+308"),
        ("lr = 0.5", f"lr = {'[' * 20_000}1{']' * 20_000}", "nested"),
        ("lr = 0.5", f"lr = {'{ a = ' * 300}1{' }' * 300}", "nested"),
        ("lr = 0.5", f"lr{'.a' * 100_000} = 1", "parts"),
        ("lr = 0.5", f"lr{'.a' * 31} = 1", "nested"),
        ("lr = 0.5", f"lr = '{'long' * 50_000}'", "recipe.lr"),
        ("lr = 0.5", f"lr = 0.5\n{'x' * 100_000} = 1", "unknown key"),
        ("lr = 0.5", "lr = 2026-01-01", "recipe.lr"),
        ("{ path", "{ day = 2026-01-01, path", "task.options.day"),
        ("rounds = 4", "rounds = 1_000_000_001", "at most 1,000,000,000"),
        ("population = 60", "population = 1_000_000_000_000", "population = 1000000000000"),
        ("[run]", "epochs = 1_000_000_000\n[run]", "epochs = 1000000000"),
        ("[recipe]", "model = { kind = 'mlp', hidden = [1_000_000_000_000] }\n[recipe]", "hidden"),
        ("[recipe]", "model = { kind = 'char_lstm', layers = 1_000_000_000 }\n[recipe]", "layers"),
        ("[recipe]", "model = { kind = 'svhn_cnn', channels = [1, 2, 3] }\n[recipe]", "a list of 2"),
        ("clip_norm = 1.0", "clip_norm = 1e308", "clip_norm 1e+308"),
        ("noise_multiplier = 2.0", "noise_multiplier = 1e308", "noise multiplier 1e+308"),
        ("noise_multiplier = 2.0", "noise_multiplier = 1e-300", "noise multiplier 1e-300"),
        ("clip_norm = 1.0", "clip_norm = 1.0\nserver = { kind = 'sgd', lr = 1e308 }", "lr = 1e+308"),
        ("clip_norm = 1.0", "clip_norm = 1.0\nserver = { kind = 'sgd', lr = nan }", "lr = nan"),
        ("clip_norm = 1.0", "clip_norm = 1.0\nserver = { kind = 'sgd', lr = -inf }", "lr = -inf"),
        ("lr = 0.5", "lr = { kind = 'decay', start = 1.0, factor = 1e300 }", "recipe"),
        ("lr = 0.5", "lr = { kind = 'constant', value = nan }", "value = nan"),
    ],
)
def test_a_hostile_value_gets_one_sentence(found: str, instead: str, words: str, tmp_path: Path) -> None:
    file = federation(tmp_path, (found, instead))
    sentence = refused(file)
    assert words in sentence or words == "recipe"
    refused(file, "run")


@pytest.mark.parametrize(
    ("found", "instead", "words"),
    [
        ("population = 60", "population = 61", "a plan for 61 clients and data of 60"),
        ('"npz"', '"npy"', "unknown data set 'npy'"),
        ("{ path", "{ pth", "unknown option 'pth'"),
        ("[recipe]", "# [recipe]\n[recipe]\nmask = 'public_data'", "a mask that is computed from public records"),
    ],
)
def test_plan_refuses_what_a_run_would_before_any_data_is_read(
    found: str, instead: str, words: str, tmp_path: Path
) -> None:
    smp = [('"dp_fed_avg"', '"fed_smp"')] if "mask" in instead else []
    file = federation(tmp_path, (found, instead), *smp)
    (tmp_path / "data.npz").unlink()
    assert words in refused(file)


def test_a_file_without_an_end_is_refused_unread(tmp_path: Path) -> None:
    assert "device" in sordino("plan", "/dev/zero").sentence
    os.mkfifo(tmp_path / "fifo")
    assert "pipe" in sordino("plan", tmp_path / "fifo").sentence
    with (tmp_path / "huge.toml").open("wb") as file:
        file.truncate(100 * LARGEST)
    assert "bytes" in sordino("plan", tmp_path / "huge.toml").sentence
    assert "No such file" in sordino("plan", tmp_path / "nothing.toml").sentence


def test_parts_in_parts_without_end_are_refused() -> None:
    nested: Any = Constant(1.0)
    for _ in range(100):
        nested = Scaled(nested, 1.0)
    with pytest.raises(UserError, match="nested"):
        tiny.plan(encode=(Clip(nested),))


# ---- numbers -------------------------------------------------------------------------------------------------------

HARMLESS = {("clip", "clip_norm", math.inf), ("tuned", "shape", math.inf)}  # no clip; Poisson many tries


def _numbers(family: str, kind: str) -> Iterator[str]:
    part = example(family, kind)
    for field in dataclasses.fields(part):
        if type(getattr(part, field.name)) is float:
            yield field.name


@pytest.mark.parametrize(
    ("family", "kind", "name"),
    [(family, kind, name) for family, kind in KINDS if family != "Event" for name in _numbers(family, kind)],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_part_holds_a_number_that_is_none(family: str, kind: str, name: str, value: float) -> None:
    if (kind, name, value) in HARMLESS or kind == "masked_noise":  # which exists only to be refused
        return
    with pytest.raises(UserError):
        codec.read(FAMILIES[family], {"kind": kind, **EXAMPLES[family][kind], name: value})


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e308, math.nan])
def test_a_step_that_float32_cannot_hold_is_refused_when_built(value: float) -> None:
    for build in (lambda: LocalSgd(lr=value, epochs=1), lambda: Sgd(lr=value), lambda: Adam(lr=value)):
        with pytest.raises(UserError, match="lr ="):
            build()


@pytest.mark.parametrize(
    "schedule", [Decay(0.5, 0.9), Linear(0.5, 0.25, 7), Piecewise(2.0, 0.5, (3, 5)), Constant(3.0)]
)
@pytest.mark.parametrize("factor", [2.0, -1.0])
def test_the_span_of_a_schedule_is_that_of_its_rounds(schedule: Any, factor: float) -> None:
    for each in (schedule, Scaled(schedule, factor)):
        values = [each.at(t) for t in range(11)]
        assert each.span(11) == (min(values), max(values))


def test_a_schedule_of_a_stranger_is_asked_in_every_round() -> None:
    @dataclasses.dataclass(frozen=True)
    class Spike(Constant, kind="spike of a test"):
        monotone = False

        def at(self, t: int) -> float:
            return math.nan if t == 5 else self.value

    with pytest.raises(UserError, match="clip norm"):
        tiny.plan(rounds=10, encode=(Clip(Spike(1.0)),))
    assert tiny.plan(rounds=5, encode=(Clip(Spike(1.0)),)).rounds == 5


@pytest.mark.parametrize(
    ("population", "rounds", "rate"), [(60, 4, 0.5), (10**6, 300, 0.01), (7, 50, 1.0), (5, 1, 0.3)]
)
def test_the_most_rounds_of_a_client_are_the_smallest_that_fail_once_in_a_million(
    population: int, rounds: int, rate: float
) -> None:
    from scipy.special import bdtrc

    tails = bdtrc(np.arange(rounds), rounds, rate) * population <= 1e-6
    assert binomial_most(population, rounds, rate) == (int(np.argmax(tails)) if tails.any() else rounds)


@pytest.mark.parametrize("lr", [0.0, -0.0, -1.0, Linear(0.5, -0.5, 2)])
def test_controls_are_never_divided_by_a_step_of_zero(lr: Any) -> None:
    with pytest.raises(UserError, match="a positive lr in every round"):
        tiny.plan(local=Scaffold(lr=lr, steps=2))


# ---- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clients", [Poisson(10**9, 1e-6), FixedSize(10**9, 10), RoundRobin(10**9, 10), Everyone(10**9)]
)
def test_a_plan_of_a_billion_rounds_and_clients_costs_no_list_of_either(clients: Any) -> None:
    big = tiny.plan(
        rounds=10**9, clients=clients, encode=(Clip(Linear(1.0, 0.5, 10**9)),), server=Sgd(Decay(1.0, 0.999))
    )
    assert all(count > 0 for line in big.cost().lines for _, count in line.entries)
    local = BatchGradient(AllRecords((50,)), Linear(1.0, 0.5, 10**9))
    silos = tiny.plan(rounds=10**9, clients=clients, local=local, encode=(), release=LocalNoise(Gaussian(1.0)))
    assert len(silos.cost().lines) == 3


def test_a_filter_of_one_pass_costs_no_table_of_rounds_and_silos() -> None:
    local = BatchGradient(OnePass(1, (10**9,)), 1.0)
    plan = tiny.plan(rounds=10**9, clients=Everyone(3), local=local, encode=(), release=LocalNoise(Gaussian(90.0)))
    cohort, meter = np.arange(3), client_filter(plan, Budget(1.0, 1e-9))
    first = meter.allowed[0]
    for t in (0, 7, 7, 10**9 - 1):
        meter.charge(cohort, t)
    assert meter.spent.tolist() == [2, 2, 2]  # the first round, and the one that was run again
    assert first >= 2


def test_a_net_that_no_memory_holds_is_refused_before_it_is_built() -> None:
    for spec in (Mlp((10**6, 10**6)), SmallCnn((10**6, 10**6), kernel=999_999), Mlp((10**6,) * 1000)):
        with pytest.raises(UserError, match=r"parameters|a smaller net"):
            build_seeded(spec, (1, 28, 28), 10, seed=0)


@pytest.mark.parametrize(
    "numbers",
    [
        {"rounds": 0},
        {"rounds": -1},
        {"rounds": 2**63 - 1},
        {"window": 1e-320},
        {"window": math.nan},
        {"window": math.inf},
        {"population": 0},
        {"population": 10**15},
        {"epsilon": math.nan},
        {"epsilon": 0.0},
        {"delta": math.nan},
        {"step": 1e308},
        {"rate": 1e-300},
    ],
)
def test_the_best_recipe_refuses_numbers_that_mean_nothing(numbers: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        recipes.best(**{"population": 100, "epsilon": 4.0, **numbers})


# ---- runs ----------------------------------------------------------------------------------------------------------


def diverging(**changes: Any) -> Plan:
    return tiny.plan(rounds=4, server=Sgd(lr=Decay(1.0, 1e10)), encode=(Clip(1e11),), **changes)


def test_a_model_that_is_not_finite_stops_the_run_before_it_is_kept() -> None:
    rounds = run(diverging(), tiny.task(), streams=Seeded(1))
    kept = [next(rounds).state for _ in range(3)]
    with pytest.raises(DivergedError, match=r"round 4 .* state of round 3"):
        next(rounds)
    assert all(bool(state.memory["params"].isfinite().all()) for state in kept)


def test_a_finite_model_whose_sum_overflows_is_not_called_infinite() -> None:
    still = tiny.plan(rounds=1, release=NoNoise(), local=LocalSgd(lr=0.0, epochs=1))
    data = tiny.task()
    for parameter in data.model.parameters():
        parameter.data.fill_(2e38)
    assert len(list(run(still, data))) == 1


def test_a_run_that_diverges_keeps_its_last_good_checkpoint_and_its_charges(tmp_path: Path) -> None:
    grows = 'server = { kind = "sgd", lr = { kind = "decay", start = 1.0, factor = 1e12 } }'
    changes = ('server = { kind = "sgd" }', grows), ("clip_norm = 1.0", "clip_norm = 1e9")
    file, out = spelt_out(tmp_path, *changes), tmp_path / "a"
    said = sordino("run", file, "--out", out)
    assert said.code == 1
    assert said.err.count("\n") == 1
    assert "NaN or infinity" in said.err
    charged, kept = len(lines(out / "charges.jsonl")), lines(out / "history.jsonl")
    assert charged == len(kept) + 1
    assert not (out / "certificate.json").exists()


def test_a_plan_that_cannot_be_priced_is_refused_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sordino.accounting import accountant
    from sordino.training import train

    def refuses(*_: object, **__: object) -> None:
        raise UserError("a plan that no accountant can price")

    plan = tiny.plan(release=CentralNoise(Gaussian(1.0371)))
    file = federation(tmp_path, ("noise_multiplier = 2.0", "noise_multiplier = 2.0371"))
    monkeypatch.setattr(accountant, "bound", refuses)
    with pytest.raises(UserError, match="no accountant"):
        train(plan, tiny.task(), on_round=lambda line: pytest.fail("a round was run"))
    refused(file, "run")
