"""The page in a real browser: nothing breaks, nothing is fetched, all of it can be read and reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser import Browser, browser
from tests.report.contrast import contrast

from sordino.report import page
from sordino.report.comparison import Subject
from sordino.report.data import report_data

TAB, ENTER, RIGHT = "\ue004", "\ue007", "\ue014"
LOOKS = [(1440, False), (1440, True), (400, False), (400, True)]
INKS = """
const found = {};
const flat = (c) => /rgba?\\((\\d+), (\\d+), (\\d+)(?:, ([\\d.]+))?\\)/.exec(c);
for (const one of document.querySelectorAll("body *")) {
  const said = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const style = getComputedStyle(one);
  if (!said || style.visibility === "hidden" || !one.getClientRects().length) continue;
  if (one.closest("title, desc, script, .unseen")) continue;
  let under = one;
  while (under && (!flat(getComputedStyle(under).backgroundColor)
         || flat(getComputedStyle(under).backgroundColor)[4] === "0")) under = under.parentElement;
  const ink = one instanceof SVGElement ? style.fill : style.color;
  const ground = getComputedStyle(under || document.body).backgroundColor;
  found[ink + " on " + ground] = one.tagName + " " + one.textContent.trim().slice(0, 30);
}
return found;
"""
CONTROLS = "a[href], button, summary, svg[tabindex], .scroll"


@pytest.fixture(scope="module")
def shown(runs: dict[str, Subject], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two federations, silos and a loop on one page."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    page.write_page(file, report_data([runs[name] for name in ("central", "smooth", "shares", "silos", "loop")]))
    return file


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


def hexed(colour: str) -> str:
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_no_error_no_request_no_overflow(window: Browser, shown: Path, width: int, dark: bool) -> None:
    window.open(shown, width=width, dark=dark)
    window.requests()
    window.open(shown, width=width, dark=dark)
    assert window.log("browser") == []
    assert set(window.requests()) <= {shown.as_uri(), "data:,"}
    assert window.ask("return document.documentElement.scrollWidth") == width
    assert window.ask("return document.querySelectorAll('svg').length") >= 10


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_on_the_page_has_contrast(window: Browser, shown: Path, dark: bool) -> None:
    window.open(shown, width=1440, dark=dark)
    window.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    found: dict[str, Any] = window.ask(INKS)
    assert len(found) >= 8
    weak = {pair: what for pair, what in found.items() if contrast(*map(hexed, pair.split(" on "))) < 4.5}
    assert weak == {}


def test_dark_is_dark_and_paper_is_white(window: Browser, shown: Path) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    window.open(shown, width=1440, dark=True)
    assert max(map(int, re.findall(r"\d+", window.ask(ground)))) < 60
    window.open(shown, width=1440, dark=True, media="print")
    assert window.ask(ground) == "rgb(255, 255, 255)"
    assert window.ask("return getComputedStyle(document.querySelector('nav')).display") == "none"


def test_the_keyboard_reaches_every_control_and_sees_where_it_is(window: Browser, shown: Path) -> None:
    window.open(shown, width=1440)
    window.ask("""window.reached = new Set(); window.bare = [];
      document.addEventListener("focusin", (event) => {
        window.reached.add(event.target);
        const bare = getComputedStyle(event.target).outlineStyle === "none";
        if (bare) window.bare.push(event.target.outerHTML.slice(0, 80));
      });""")
    count = window.ask(f"return document.querySelectorAll('{CONTROLS}').length")
    for _ in range(count + 5):
        window.press(TAB)
    hidden = "!one.checkVisibility()"
    missed = window.ask(
        f"return [...document.querySelectorAll('{CONTROLS}')].filter((one) => !(window.reached.has(one) || {hidden}))"
        ".map((one) => one.outerHTML.slice(0, 80))"
    )
    assert missed == []
    assert window.ask("return window.bare") == []


def test_the_first_control_skips_to_the_answer(window: Browser, shown: Path) -> None:
    window.open(shown, width=400)
    window.press(TAB)
    assert window.ask("return document.activeElement.getAttribute('href')") == "#answer"
    assert window.ask("return document.activeElement.getBoundingClientRect().left") >= 0


def test_keys_work_the_theme_the_numbers_and_the_points(window: Browser, shown: Path) -> None:
    window.open(shown, width=1440)
    window.ask("document.getElementById('theme').focus()")
    for theme in ("light", "dark", None):
        window.press(ENTER)
        assert window.ask("return document.documentElement.getAttribute('data-theme')") == theme
    window.ask("document.querySelector('summary').focus()")
    window.press(ENTER)
    assert window.ask("return document.querySelector('details').open")
    window.ask("document.querySelector('svg.chart').focus()")
    window.press(RIGHT)
    said = window.ask("return document.getElementById('tip').textContent")
    assert said == window.ask("return document.querySelector('svg.chart [data-tip]').getAttribute('data-tip')")
    assert not window.ask("return document.getElementById('tip').hidden")
