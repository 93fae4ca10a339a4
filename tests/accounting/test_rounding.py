"""Promise: a bound that is printed is never better than the one that was proved, wherever it is printed.

Two nets: every text that a command makes of a bound is fed numbers that rounding to nearest would lower, and no line of
the source formats an epsilon or a delta by itself.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.commands import federation, sordino

import sordino as package
from sordino.accounting import calibration as solving
from sordino.accounting.accountant import check_delta, largest_delta
from sordino.accounting.composition import Line
from sordino.accounting.events import GaussianNoise
from sordino.accounting.profiles import Ceiling
from sordino.accounting.rounding import atleast, upto
from sordino.audit import summary as audited
from sordino.certificate import explain
from sordino.cli import planning, results, tune_output
from sordino.errors import BudgetError, ConfigError, UnreachableError
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Item, Limit
from sordino.report import cards, comparison
from sordino.report.figures import Axis
from sordino.tuning import sweep_report

ROOT = Path(package.__file__).parent
EPSILON, DELTA = 1.00003, 1.0004e-5  # four and three digits to nearest are 1 and 1e-05: both below
HOW = {"unit": "client", "accountant": "a", "method": "m", "grid": None}
LINE = {"adversary": "models", "relation": "add_remove", "epsilon": EPSILON, "epsilon_rdp": EPSILON, "delta": DELTA}
MADE: dict[str, Any] = {**LINE, "unit": "client", "charged": True, "runs": [0]}
AUDIT = {
    "adversary": "models",
    "relation": "add_remove",
    "attack": "one",
    "examined": True,
    "passed": True,
    "lower_mu": 0.99999,
}
CANARIES = {"canaries": 9, "unit": "client", "rounds": 2, "right": 5, "guessed": 8, "gaussian_epsilon": 0.99999}
BOTH = {"lower_epsilon": 0.99999, "upper_epsilon": EPSILON, "delta": DELTA, "upper_mu": EPSILON}
COMPARED = {
    "name": "a",
    "metrics": {},
    "runs": ["a"],
    "epsilon": {"models": EPSILON},
    "relations": {"models": "add_remove"},
    **dict.fromkeys(comparison.COST_FIELDS, "x"),
    "delta": DELTA,
}
TUNED = {"proposal": {}, "rule": "x", "curves": {}, "at_edge": [], "privacy_cost": "nothing"}
TEXTS = {
    "epsilon": planning.epsilon_text(
        {"adversaries": [LINE], "unit": "client", "accountant": "a", "method": "m", "grid": None}
    ),
    "calibrate": planning.calibrated_text({"free": "rounds", "value": 3, "out": None, **LINE}),
    "certify": results.guarantee(MADE),
    "plan": planning._epsilon(LINE),
    "tune": tune_output.text({"tuned": [{**LINE, **TUNED}], "out": None}),
    "sweep": sweep_report.guarantee(MADE),
    "model card": cards._guarantee(MADE),
    "ledger of a run": explain.in_all({"runs": 1, "dataset": "d", "limit": EPSILON, **LINE}),
    "explain": explain._strength(LINE, Ceiling(1.00003e-2, 0.50003), "client"),
    "audit": audited._mechanism_line({**AUDIT, **BOTH}),
    "compare": comparison.comparison_table(
        {"runs": [COMPARED], "comparison": {"metric": None, "rows": [COMPARED]}}
    ).transposed.text(),
    "canaries": audited._canary_line({**CANARIES, **BOTH}),
}


@settings(max_examples=300)
@given(st.floats(1e-12, 1e9), st.integers(2, 6))
def test_an_upper_bound_is_never_printed_smaller_and_a_lower_one_never_larger(value: float, digits: int) -> None:
    near = 1.001 * 10.0 ** (1 - digits)
    assert value <= float(upto(value, digits)) <= value * (1 + near)
    assert value * (1 - near) <= float(atleast(value, digits)) <= value


def test_round_bounds_stay_as_they_are() -> None:
    assert [upto(v) for v in (0.0, 1.0, 8.0, 2.5, 1e-5)] == ["0", "1", "8", "2.5", "1e-05"]
    assert (upto(8.2001), atleast(8.2099), upto(None), upto(9.999)) == ("8.21", "8.2", "no guarantee", "10")
    assert upto(math.inf) == "inf"


def said(text: str, word: str) -> list[float]:
    """Every number that stands behind a word."""
    return [float(found) for found in re.findall(rf"{word}(?: \(models\))? +(\d[\d.e-]*\d|\d)", text)]


@pytest.mark.parametrize("command", sorted(TEXTS))
def test_what_a_command_says_of_a_bound_is_not_below_it(command: str) -> None:
    text = TEXTS[command]
    uppers = said(text, "epsilon") + said(text, "certified") + said(text, "RDP")
    assert uppers or "own epsilon" in text, text
    assert all(found >= EPSILON for found in uppers), text
    assert all(found >= DELTA for found in said(text, "delta")), text
    assert all(found <= 0.99999 for found in said(text, "at least")), text


def test_a_sentence_that_rounds_to_nearest_is_caught() -> None:
    assert said(f"epsilon {EPSILON:.4g}, delta {DELTA:.3g}", "epsilon") < [EPSILON]
    assert said(f"epsilon {EPSILON:.4g}, delta {DELTA:.3g}", "delta") < [DELTA]


def test_the_ledger_and_its_refusal_do_not_say_less_than_was_spent(tmp_path: Path) -> None:
    """A Gaussian release of noise multiplier z, one after another: epsilons of any digits."""
    file = tmp_path / "book.ledger"
    with Ledger.open(file, create=True) as book:
        book.limit("digits", Limit(9.0, 1e-5, "client", "add_remove"))
        for run in range(12):
            book.admit(f"run-{run}", "digits", _asked(), whole=True)
            found = book.statement("digits").epsilon
            assert found <= said(sordino("ledger", "show", file, "digits").out, "epsilon")[0] <= found * 1.001
        book.limit("digits", Limit(found, 1e-5, "client", "add_remove"))
        with pytest.raises(BudgetError, match="would have spent epsilon") as refused:
            book.admit("one-more", "digits", _asked(), whole=True)
        book.limit("digits", Limit(99.0, 1e-5, "client", "add_remove"))
        book.admit("one-more", "digits", _asked(), whole=True)
        assert said(str(refused.value), "epsilon")[0] >= book.statement("digits").epsilon


def _asked() -> Request:
    return Request("client", "add_remove", (Item(GaussianNoise(7.3), 1),), "0" * 64)


def test_a_calibration_says_no_less_than_its_file_costs(tmp_path: Path) -> None:
    file = federation(tmp_path)
    for target in (1.2345, 2.3456, 3.4567):
        words = ("calibrate", file, "--epsilon", target)
        assert said(sordino(*words).out, "epsilon")[0] >= sordino(*words, "--json").json["epsilon"]


def test_what_cannot_be_reached_is_not_said_to_be_nearer_than_it_is() -> None:
    cheapest = Line("models", "add_remove", ((GaussianNoise(0.7), 1),))
    with pytest.raises(UnreachableError) as refused:
        solving.rounds(lambda n: cheapest, 0.1, 1e-5)
    assert said(str(refused.value), "epsilon")[0] >= solving._epsilon(cheapest, 1e-5)


@pytest.mark.parametrize("population", [7, 60, 1000, 12345])
def test_the_largest_delta_that_a_refusal_names_is_let_pass(population: int) -> None:
    with pytest.raises(ConfigError) as refused:
        check_delta(0.5, population, override=False)
    named = float(re.findall(r"population\^-1.1 = ([\d.e-]+)", str(refused.value))[0])
    check_delta(named, population, override=False)
    assert named <= largest_delta(population)


def test_numbers_of_a_figure_are_on_the_side_of_their_axis() -> None:
    upper, lower, plain = Axis("epsilon", bound="upper"), Axis("strangers", bound="lower"), Axis("loss")
    assert (upper.number(1.00003), lower.number(0.99999), plain.number(1.00003)) == ("1.001", "0.9999", "1")


# ---- no line of the source rounds a bound by itself ------------------------------------------------------------------

NAMES = re.compile(r"epsilon|delta|\bmu\b|regret|at_most|upper_|lower_")
WORDS = re.compile(r"(?:epsilon|delta|mu|AUC at most)[ =]+$")
FIGURES = re.compile(r"\.?\d*[gfe%]$")


def formatted(source: Path) -> Iterator[str]:
    """Numbers in the texts of a file that are cut to some digits, and are a bound by their name or the words before."""
    tree = ast.parse(source.read_text("utf-8"))
    for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        before = ""
        for part in text.values:
            if isinstance(part, ast.Constant):
                before = str(part.value)
            elif isinstance(part, ast.FormattedValue) and part.format_spec is not None:
                found, spec = ast.unparse(part.value), ast.unparse(part.format_spec)[2:-1]
                bound = (NAMES.search(found) and "upto(" not in found) or WORDS.search(before)
                if bound and FIGURES.search(spec):
                    yield f"{source.name}:{part.lineno} {{{found}:{spec}}}"


def test_no_line_of_the_source_rounds_a_bound_by_itself() -> None:
    """Closed forms of papers refuse by numbers that bound nothing of a run: theory is left out."""
    sources = [file for file in ROOT.rglob("*.py") if file.parent.name != "theory"]
    examples = [*(ROOT.parents[1] / "examples").rglob("*.py")]
    assert len(examples) > 5
    assert [line for file in sources + examples for line in formatted(file)] == []


@pytest.mark.parametrize("line", ["f'epsilon {x:.4g}'", "f'{line[\"epsilon\"]:.3f}'", "f'at delta {d:g}'"])
def test_a_line_that_does_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(f"said = {line}\n")
    assert list(formatted(tmp_path / "made.py"))
