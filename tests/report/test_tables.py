"""Tables: text survives LaTeX, the citation is the project's."""

from __future__ import annotations

import re
from pathlib import Path

from sordino.report.comparison import differing_settings
from sordino.report.text_table import Table, bibtex, cell_text, escape_latex, flatten

ROOT = Path(__file__).parents[2]


def test_latex_prints_every_character_of_a_name() -> None:
    said = escape_latex(r"a_b & 50% {x} #1 $ ~ ^ \ <y>")
    assert re.sub(
        r"\\(textbackslash|textasciitilde|textasciicircum|textless|textgreater)\{\}|\\[&%$#_{}]", "", said
    ) == ("ab  50 x 1     y")


def test_a_table_for_latex_has_a_cell_for_every_cell() -> None:
    made = Table(("run", "accuracy"), (("a_1", "0.9"), ("b", "0.8")), "50% noise").latex()
    assert made.count(r" \\") == 3
    assert r"\begin{tabular}{lr}" in made
    assert r"a\_1 & 0.9 \\" in made
    assert r"\caption{50\% noise}" in made
    assert made.count(r"\begin") == made.count(r"\end") == 2


def test_columns_stand_under_each_other_and_turn() -> None:
    made = Table(("run", "loss"), (("long name", "1"), ("b", "22")))
    assert made.text().splitlines() == ["run        loss", "long name  1", "b          22"]
    assert made.transposed.head == ("run", "long name", "b")
    assert made.transposed.transposed == made


def test_the_citation_says_what_the_citation_file_says() -> None:
    said, cited = (ROOT / "CITATION.cff").read_text("utf-8"), bibtex()
    for key in ("title", "version"):
        value = re.search(rf'^{key}: "?(.+?)"?$', said, re.MULTILINE)
        assert value is not None
        assert value[1] in cited
    assert re.search(r"name: (.+)", said)[1] in cited  # type: ignore[index]
    assert cited.count("{") == cited.count("}")
    assert bibtex(["1", "2", "1"]).count("@software") == 2


def test_settings_that_differ_are_found_wherever_they_stand() -> None:
    one = {"plan": {"rounds": 4, "encode": [{"kind": "clip", "clip_norm": 1.0}], "post": []}, "run": {"seed": 0}}
    two = {"plan": {"rounds": 4, "encode": [{"kind": "clip", "clip_norm": 2.0}]}, "run": {"seed": 0, "every": 2}}
    assert differing_settings([one, two]) == [
        {"setting": "plan.encode.0.clip_norm", "values": [1.0, 2.0]},
        {"setting": "run.every", "values": [None, 2]},
    ]
    assert differing_settings([one, one]) == []
    assert dict(flatten(one))["plan.encode.0.kind"] == "clip"


def test_values_are_short_in_a_cell() -> None:
    found = [cell_text(value) for value in (None, True, 0.1234567891, list(range(20)), "x")]
    assert found == ["-", "true", "0.123457", "[0, 1, 2, 3, 4, 5, 6, 7, ...]", "x"]
