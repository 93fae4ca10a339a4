"""The page says what the certificates say, hides nothing that is not private, and stands by itself."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.commands import contents, sordino
from tests.report.contrast import PAIRS, contrast

from sordino.accounting.rounding import upto
from sordino.certificate.build import certificate as certified
from sordino.certificate.facts import Facts
from sordino.config import parse
from sordino.outcome import DIAGNOSTIC
from sordino.recipes import RECIPES, starters
from sordino.report import charts, figures, page
from sordino.report.comparison import Subject
from sordino.report.data import report_data
from sordino.report.figures import Axis, Chart, Series, draw, tick_label

VOID = {"meta", "link", "line", "path", "circle", "rect", "br"}
BANNER = "Not private, simulation only."
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
VISION = (  # normal, protanopia, deuteranopia, tritanopia
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
)


class Page(HTMLParser):
    """Every element in order, with how it is nested; a tag that is not closed is a mistake."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.found if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


_MADE: dict[tuple[int, ...], tuple[tuple[Subject, ...], dict[str, Any], str]] = {}  # by run


def made(*subjects: Subject) -> tuple[dict[str, Any], str]:
    """The data and the page of runs, made once."""
    key = tuple(map(id, subjects))
    if key not in _MADE:
        found = report_data(subjects)
        _MADE[key] = subjects, found, page.render_page(found)
    return _MADE[key][1:]


@pytest.fixture(scope="module")
def pages(runs: dict[str, Subject]) -> dict[str, str]:
    alone = {name: made(one)[1] for name, one in runs.items()}
    return {**alone, "several": made(*(runs[name] for name in ("central", "smooth", "shares", "silos", "loop")))[1]}


# ---- what it says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["central", "smooth", "shares", "none", "secure", "local", "silos", "loop"])
def test_the_answer_is_the_certificate(runs: dict[str, Subject], pages: dict[str, str], name: str) -> None:
    said, certificate = Page(pages[name]).text, runs[name].certificate
    assert f"{upto(certificate['epsilon'])} epsilon, at most" in said
    assert f"one {certificate['unit']} is protected" in said
    for text in (*certificate["assumptions"], *certificate["not_covered"]):
        assert f"{text[0].upper()}{text[1:]}." in said
    for line in certificate["adversaries"]:
        assert upto(line["epsilon"]) in said
    assert certificate["plan_sha256"] in said


def test_a_simulation_and_a_run_without_noise_are_not_for_release(pages: dict[str, str]) -> None:
    assert "Simulation: not for release" in Page(pages["central"]).text
    assert "No guarantee: nothing here may be released" in Page(pages["none"]).text
    said = Page(pages["secure"]).text
    assert "Noise for release (secure)" in said
    assert "not for release" not in said.replace("for whoever runs the simulation, not for release", "")


def test_diagnostics_stand_under_their_banner_and_a_run_for_release_has_none(
    runs: dict[str, Subject], pages: dict[str, str]
) -> None:
    assert BANNER in Page(pages["central"]).text
    assert pages["central"].index(BANNER) < pages["central"].index("Size of updates")
    for name in ("secure", "loop"):
        assert BANNER not in Page(pages[name]).text
        assert "Size of updates" not in pages[name]
    assert made(runs["secure"])[0]["runs"][0]["diagnostics"] is None
    assert made(runs["central"])[0]["runs"][0]["diagnostics"]["note"] == DIAGNOSTIC


def test_a_secret_cohort_is_in_no_data_and_a_seen_one_is_counted(
    runs: dict[str, Subject], folders: dict[str, Path]
) -> None:
    secret = made(runs["central"])[0]["runs"][0]["participation"]
    assert secret["rounds_of_each"] is None
    assert not secret["seen"]
    seen = made(runs["shares"])[0]["runs"][0]["participation"]
    charges = [json.loads(line)["cohort"] for line in (folders["shares"] / "charges.jsonl").read_text().splitlines()]
    assert seen["rounds_of_each"] == [sum(client in cohort for cohort in charges) for client in range(60)]


def test_runs_side_by_side_show_what_differs(pages: dict[str, str]) -> None:
    said = Page(pages["several"]).text
    assert "plan.postprocess.0.strength" in said
    assert "Privacy and utility" not in said  # a loop has no metric
    assert "Settings that differ" not in Page(pages["central"]).text


def test_several_runs_are_said_to_cost_more_than_each(pages: dict[str, str]) -> None:
    assert "Each epsilon is of one run alone." in Page(pages["several"]).text
    assert "Each epsilon is of one run alone." not in Page(pages["central"]).text


def test_utility_is_drawn_against_privacy_where_runs_share_a_metric(runs: dict[str, Subject]) -> None:
    found = Page(made(runs["central"], runs["smooth"])[1])
    assert "Privacy and utility" in found.text
    assert any("utility-t" in attributes.get("aria-labelledby", "") for attributes in found.of("svg"))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_can_be_shown_and_ends_at_its_certificate(name: str) -> None:
    config = parse(tomllib.loads(starters.example(name)))
    facts = Facts(config.delta, config.privacy.noise, config.plan.rounds, **config.facts)
    certificate = certified(config.plan, facts)
    found, text = made(Subject(name, certificate, config.plan, facts))
    ends = {who: one["epsilon"] for one in found["runs"][0]["epsilon_by_round"] for who in one["adversaries"]}
    for line in certificate["adversaries"]:
        assert (None if ends[line["adversary"]] is None else ends[line["adversary"]][-1]) == line["epsilon"]
    assert f"{upto(certificate['epsilon'])} epsilon, at most" in Page(text).text


def test_groups_have_a_figure_of_their_own(runs: dict[str, Subject]) -> None:
    one = runs["central"]
    names = [f"g {k}" for k in range(9)]
    history = [
        {"round": t, "accuracy": 0.5, **{f"accuracy/{name}": k / 10 for k, name in enumerate(names)}} for t in (1, 2)
    ]
    said = Page(made(Subject("a", one.certificate, one.plan, one.facts, history=history))[1]).text
    assert "The 7 lowest of 9 groups." in said
    assert "lowest at the end: g 0." in said
    assert "Accuracy by group: a" in said


def test_runs_that_are_too_many_for_a_figure_are_said_to_be_left_out(runs: dict[str, Subject]) -> None:
    one = runs["central"]
    many = [Subject(f"run {k}", one.certificate, one.plan, one.facts, history=one.history) for k in range(8)]
    found = charts.metrics(report_data(many))[0]
    assert "The first 7 of 8 settings." in found.says
    assert len(found.series) == 7


# ---- how it is built ------------------------------------------------------------------------------------------------


def test_every_page_is_well_formed_with_landmarks_and_headings_in_order(pages: dict[str, str]) -> None:
    for text in pages.values():
        found = Page(text)
        assert all(len(found.of(tag)) == 1 for tag in ("header", "nav", "main", "footer", "h1"))
        levels = [int(tag[1]) for tag, _ in found.found if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        ids = [attributes["id"] for _, attributes in found.found if "id" in attributes]
        assert len(ids) == len(set(ids))
        wanted = {one["href"][1:] for one in found.of("a")}
        wanted |= {word for _, a in found.found for word in a.get("aria-labelledby", "").split()}
        assert wanted <= set(ids)
        assert found.of("html")[0]["lang"] == "en"
        assert text.startswith("<!doctype html>\n<html")


def test_every_figure_has_a_name_a_sentence_and_its_numbers(pages: dict[str, str]) -> None:
    for text in pages.values():
        for figure in re.findall(r"<figure>.*?</figure>", text, re.DOTALL):
            assert re.search(r"<h3>.+?</h3><p>.+?</p>", figure)
            assert re.search(r'role="img".*?<title id=".+?">.+?</title><desc id=".+?">.+?</desc>', figure)
            assert "<caption>" in figure
            assert figure.count("<tr>") >= 2
    for text in pages.values():
        assert text.count("<table>") == text.count("<caption>") == text.count("<thead>")


def test_a_page_needs_nothing_from_anywhere(pages: dict[str, str]) -> None:
    for text in pages.values():
        assert "default-src 'none'" in text
        assert not re.search(r"""(src|href|action|xlink:href)\s*=\s*["'](?!#|data:)""", text)
        assert not re.search(r"url\((?!#)|@import|https?://|fetch\(|XMLHttpRequest|WebSocket", text)


def test_names_from_outside_are_text(runs: dict[str, Subject]) -> None:
    bad = '<script>alert("1")</script>&'
    one = runs["central"]
    text = made(Subject(bad, one.certificate, one.plan, one.facts, history=one.history))[1]
    assert "<script>alert" not in text
    assert bad in Page(text).text


def test_the_same_runs_make_the_same_page(runs: dict[str, Subject]) -> None:
    found, text = made(runs["central"])
    assert report_data([runs["central"]]) == found
    assert page.render_page(found) == text


# ---- colours --------------------------------------------------------------------------------------------------------


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)
    assert contrast("#123456", "#123456") == 1


@pytest.mark.parametrize("theme", [figures.LIGHT, figures.DARK], ids=["light", "dark"])
def test_every_text_can_be_read_on_its_ground(theme: dict[str, str]) -> None:
    assert {pair: ratio for pair in PAIRS if (ratio := contrast(*map(theme.get, pair))) < 4.5} == {}  # type: ignore[arg-type]


def test_colours_come_from_the_themes_alone() -> None:
    style = Path(page.__file__).with_name("page.css").read_text("utf-8")
    assert set(re.findall(r"#[0-9a-f]{3,8}\b", style)) == {"#ffffff"}  # paper
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", style)) <= {*figures.LIGHT, "tone"}
    assert figures.LIGHT.keys() == figures.DARK.keys()
    assert {name for pair in PAIRS for name in pair} | {"rule"} == set(figures.LIGHT)


# ---- drawing --------------------------------------------------------------------------------------------------------


def test_a_point_lands_where_the_axes_say() -> None:
    line = Series("a", (0.0, 5.0, 10.0), (1.0, 10.0, 100.0))
    drawn = str(draw(Chart("k", "t", "s", Axis("x", low=0.0, high=10.0), Axis("y", log=True), (line,))))
    spots = [tuple(map(float, one)) for one in re.findall(r'cx="([0-9.]+)" cy="([0-9.]+)"', drawn)]
    assert spots[1] == pytest.approx([(a + b) / 2 for a, b in zip(spots[0], spots[2], strict=True)], abs=0.1)
    assert spots[0][0] < spots[2][0]
    assert spots[0][1] > spots[2][1]


def test_text_of_a_figure_is_text_and_its_colours_are_the_page_s() -> None:
    line = Series("the <name> of $a line$", (0.0, 1.0), (0.0, 1e-5))
    drawn = str(draw(Chart("k", "t", "s", Axis("rounds of it"), Axis("y"), (line,))))
    assert "the &lt;name&gt; of $a line$" in drawn
    assert ">rounds of it</text>" in drawn
    assert "var(--s0)" in drawn
    assert not re.search(r"#[0-9a-f]{6}\b", drawn)
    assert [tick_label(value) for value in (0, 1e-5, 0.25, 12000)] == ["0", "10⁻⁵", "0.25", "12,000"]


@pytest.mark.parametrize("theme", [figures.LIGHT, figures.DARK], ids=["light", "dark"])
def test_seven_series_differ_for_colour_blind_readers_too(theme: dict[str, str]) -> None:
    """As Machado, Oliveira and Fernandes 2009 simulate them; distances in CIELAB."""
    assert len(figures.SERIES) == 7
    hexes = [theme[name] for name in figures.SERIES]
    channels = np.array([[int(one[i : i + 2], 16) / 255 for i in (1, 3, 5)] for one in hexes])
    light = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    for seen in VISION:
        xyz = np.clip(light @ np.array(seen).T, 0, 1) @ XYZ.T / XYZ.sum(1)
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)
        apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
        assert apart[~np.eye(7, dtype=bool)].min() >= 25


def test_a_chart_survives_nothing_much_to_show() -> None:
    for ys in ((1.0,), (1.0, 1.0), (0.0, 0.0), (float("nan"), 2.0), (1e-30, 1e30)):
        line = Series("a", tuple(map(float, range(len(ys)))), ys)
        for log in (False, True):
            drawn = draw(Chart("k", "t", "s", Axis("x"), Axis("y", log=log), (line,)))
            assert "nan" not in drawn
            Page(str(drawn))


# ---- the commands ---------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_touches_no_run(folders: dict[str, Path], tmp_path: Path) -> None:
    before = contents(folders["central"])
    said = sordino("report", folders["central"], folders["loop"], "--out", tmp_path / "r.html")
    assert (said.code, said.out) == (0, f"written: {tmp_path / 'r.html'}\n")
    assert "central" in Page((tmp_path / "r.html").read_text("utf-8")).text
    assert contents(folders["central"]) == before


def test_the_data_of_the_page_is_one_json_object(folders: dict[str, Path], tmp_path: Path) -> None:
    found = sordino("report", folders["central"], folders["none"], "--json").json
    assert [run["name"] for run in found["runs"]] == ["central", "none"]
    assert found["runs"][0]["certificate"] == json.loads((folders["central"] / "certificate.json").read_text())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_mistake_is_one_sentence(folders: dict[str, Path], tmp_path: Path, command: str) -> None:
    out = ["--out", tmp_path / "r.html"] if command == "report" else []
    assert "which does not exist" in sordino(command, tmp_path / "gone", *out).sentence
    assert "no plan.toml" in sordino(command, tmp_path, *out).sentence
    assert "each run once" in sordino(command, folders["central"], folders["central"], *out).sentence
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    assert "cannot be written" in sordino("report", folders["central"], "--out", tmp_path / "no" / "r.html").sentence


def test_a_folder_that_was_changed_is_not_shown(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["central"], tmp_path / "copy")
    file = tmp_path / "copy" / "certificate.json"
    file.write_text(file.read_text().replace('"epsilon": 1.', '"epsilon": 0.', 1))
    assert sordino("report", tmp_path / "copy", "--out", tmp_path / "r.html").code == 1
    assert not (tmp_path / "r.html").exists()


def test_runs_of_one_name_are_told_apart_by_their_folders(folders: dict[str, Path], tmp_path: Path) -> None:
    for place in "ab":
        shutil.copytree(folders["central"], tmp_path / place / "run")
    found = sordino("compare", tmp_path / "a" / "run", tmp_path / "b" / "run", "--json").json
    assert [run["name"] for run in found["runs"]] == ["a/run", "b/run"]
    assert found["settings"] == []


def test_compare_puts_runs_beside_each_other(folders: dict[str, Path]) -> None:
    said = sordino("compare", folders["central"], folders["smooth"])
    lines = said.out.splitlines()
    assert lines[0].split()[:2] == ["run", "accuracy"]
    assert [line.split()[0] for line in lines[1:3]] == ["central", "smooth"]
    assert re.search(r"plan\.postprocess\.0\.strength +- +1\.5", said.out)
    latex = sordino("compare", folders["central"], folders["smooth"], "--latex", "--bibtex").out
    assert r"\begin{tabular}" in latex
    assert "@software" in latex


# ---- audits ---------------------------------------------------------------------------------------------------------


def test_an_audit_stands_beside_the_run_and_in_its_next_report(folders: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folders["central"], run)
    before = contents(run)
    assert sordino("audit", run).code == 0
    assert contents(run).keys() - before.keys() == {"audit.json"}
    assert {name: data for name, data in contents(run).items() if name != "audit.json"} == before
    assert (run / "audit.json").stat().st_mode & 0o077 == 0  # it comes of private records
    assert sordino("certify", run).code == 0
    assert sordino("report", run, "--out", tmp_path / "r.html").code == 0
    said = Page((tmp_path / "r.html").read_text("utf-8")).text
    assert "Membership by a loss threshold" in said
    assert "An audit trains or attacks with the private records" in said


def test_an_audit_of_another_run_is_not_shown_and_a_damaged_one_is_one_sentence(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folders["central"], run)
    other = {"run": "0" * 32, "layers": {"canaries": {"canaries": {"lower_epsilon": 99.0}}}}
    (run / "audit.json").write_text(json.dumps(other))
    assert sordino("report", run, "--json").json["runs"][0]["audit"] == {}
    (run / "audit.json").write_text("[")
    assert "audit again" in sordino("report", run, "--json").sentence


def test_layers_are_kept_beside_each_other(folders: dict[str, Path], tmp_path: Path) -> None:
    from sordino.runs.folder import audits, keep_audit

    run = tmp_path / "run"
    shutil.copytree(folders["central"], run)
    name = json.loads((run / "run.json").read_text())["run"]
    bounds = {"unit": "client", "canaries": 9, "lower_epsilon": 0.5, "gaussian_epsilon": 0.7, "upper_epsilon": 1.0314}
    keep_audit(run, "canaries", {"passed": True, "canaries": bounds})
    attack = {"adversary": "models", "attack": "shift", "lower_epsilon": 0.2, "upper_epsilon": 0.9}
    keep_audit(run, "mechanism", {"passed": True, "mechanism": [attack]})
    assert audits(run, name).keys() == {"canaries", "mechanism"}
    assert sordino("report", run, "--out", tmp_path / "r.html").code == 0
    said = Page((tmp_path / "r.html").read_text("utf-8")).text
    assert "≥ 0.5, ≤ 1.04" in said
    assert "≥ 0.2, ≤ 0.9" in said
