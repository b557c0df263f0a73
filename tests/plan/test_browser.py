"""The page of a plan in headless Chromium, opened from disk with the network off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from browsing import DESKTOP, EVIL, PHONE, OpenedPage, launch
from fedentopt.plan import Plan, make_plan, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

SECTIONS = ("recommendation", "rounds", "classes", "cohorts", "noise", "sites", "all", "settings")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from launch()


class Opened(OpenedPage):
    """The plan's page."""

    def column(self, table: str, name: str) -> list[str]:
        """The cells of a column, top to bottom."""
        return self.cells(f"#{table}", name)


@pytest.fixture(scope="module")
def plan() -> Plan:
    rng = np.random.default_rng(0)
    counts = np.zeros((30, 5))
    for row in counts:
        row[rng.choice(5, 2, replace=False)] = rng.integers(5, 40, 2)
    names = [EVIL, "Köln & Bonn", *(f"a very long name of a hospital in town number {k}" for k in range(28))]
    classes = [EVIL, "b&amp;b", "a class with a name that is much too long for an axis", "d", "e"]
    return make_plan(
        counts,
        clients=names,
        classes=classes,
        cohorts=["3", "5"],
        rounds=14,
        repetitions=2,
        source="<b>our<b> counts.csv",
    )


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(plan, tmp_path_factory.mktemp("plan") / "plan.html")


@pytest.fixture(scope="module")
def opened(browser: Browser, file: Path) -> Iterator[Opened]:
    page = Opened(browser, file)
    yield page
    page.context.close()


def test_one_small_file_no_network_no_complaints(opened: Opened, file: Path) -> None:
    assert opened.complaints == []
    assert opened.requests == [file.as_uri()]
    assert file.stat().st_size < 400_000
    assert [opened.page.locator(f"section#{name} h2").count() for name in SECTIONS] == [1] * len(SECTIONS)


def test_the_recommendation_stands_first(opened: Opened, plan: Plan) -> None:
    shown = opened.page.locator("#recommendation")
    assert plan.recommendation.reason in shown.inner_text()
    assert plan.recommendation.trade in shown.inner_text()
    assert [code.inner_text() for code in shown.locator("code").all()] == [plan.command(), plan.python(), plan.flower()]
    top = opened.page.locator("#recommendation .headline").bounding_box()
    assert top is not None
    assert top["y"] < DESKTOP["height"] / 3


def test_names_of_the_user_are_text(opened: Opened) -> None:
    assert "plan for <b>our<b> counts.csv" in opened.page.locator("h1").inner_text()
    assert opened.page.locator("#classes svg.wide text", has_text=EVIL).count() == 1
    opened.page.locator("#sites summary").click()
    assert EVIL in opened.column("sites-table", "Site")
    assert opened.page.evaluate("document.scripts.length") == 1


def test_charts_show_the_figures(opened: Opened, plan: Plan) -> None:
    chosen, random = plan.recommendation.chosen, plan.recommendation.random
    names = opened.page.locator("#rounds svg.wide g[data-series]").evaluate_all("all => all.map(g => g.dataset.series)")
    assert sorted(names) == sorted(
        ["Random", f"{chosen.name} with a buffer of {chosen.choice.buffer}" if chosen.choice.buffer else chosen.name]
    )
    bars = opened.page.locator("#classes svg.wide g[data-series=Random]")
    values = sorted(float(value) for value in bars.evaluate_all("all => all.map(g => g.dataset.value)"))
    assert values == pytest.approx(sorted(random.missed.mean(axis=0)), abs=1e-5)
    sizes = opened.page.locator("#cohorts svg.wide g[data-series=Random] title").all_text_contents()
    tried = [o for o in plan.by_size if o.name == "Random"]
    assert sizes == [f"Random, cohorts of {o.choice.cohort}: {o.entropy:.3f} bits" for o in tried]
    budgets = opened.page.locator("#noise svg.wide g[data-series]:not([data-series=Random]) title").all_text_contents()
    assert budgets == [
        f"ε {o.choice.epsilon or 'none'}: {o.entropy:.3f} bits" for o in plan.noised(chosen.choice.cohort)
    ]


def test_nothing_leaves_its_chart(opened: Opened) -> None:
    outside = opened.page.evaluate("""() => [...document.querySelectorAll("svg.plot.wide")].flatMap((svg) => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("path, circle, rect, text")].filter((part) => {
            const b = part.getBoundingClientRect();
            return b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1;
        }).map((part) => part.outerHTML.slice(0, 120));
    })""")
    assert outside == []


def test_tables_sort_by_key(opened: Opened, plan: Plan) -> None:
    opened.page.locator("#all summary").click()
    rows = len((*plan.by_size, *plan.by_noise, *plan.by_absence))
    assert len(opened.column("all-table", "Selector")) == rows
    assert opened.page.locator("#all-table tr.is-chosen").count() == 1
    button = opened.page.locator("#all-table thead button", has_text="Mean entropy")
    button.focus()
    opened.page.keyboard.press("Enter")
    means = [float(text.split()[0]) for text in opened.column("all-table", "Mean entropy")]
    assert means == sorted(means, reverse=True)
    opened.page.keyboard.press("Enter")
    means = [float(text.split()[0]) for text in opened.column("all-table", "Mean entropy")]
    assert means == sorted(means)


def test_light_and_dark(browser: Browser, file: Path) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        page = Opened(browser, file, color_scheme=scheme)
        read = """() => [getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector("#rounds svg.wide .line.s0")).stroke]"""
        colours[scheme] = page.page.evaluate(read)
        page.page.keyboard.press("Tab")  # the link that skips the bar
        page.page.keyboard.press("Tab")
        page.page.keyboard.press("Enter")
        assert page.page.evaluate(read) != colours[scheme]
        assert page.complaints == []
        page.context.close()
    assert colours["light"] == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
    assert colours["dark"] == ["rgb(18, 22, 28)", "rgb(255, 255, 255)"]


def test_a_phone_scrolls_down_only(browser: Browser, file: Path) -> None:
    page = Opened(browser, file, viewport=PHONE, has_touch=True, is_mobile=True)
    assert page.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.page.locator("svg.plot.wide:visible").count() == 0
    assert page.page.locator("svg.plot.narrow:visible").count() == 5
    size = page.page.locator("#rounds svg.narrow text.tick").first.evaluate("e => e.getBoundingClientRect().height")
    assert size >= 11  # text that can be read
    assert page.complaints == []
    page.context.close()


def test_it_reads_without_scripts(browser: Browser, file: Path, plan: Plan) -> None:
    context = browser.new_context(offline=True, java_script_enabled=False, viewport=DESKTOP)
    page = context.new_page()
    page.goto(file.as_uri())
    assert plan.recommendation.reason in page.locator("#recommendation").inner_text()
    assert page.locator("svg.plot.wide:visible").count() == 5
    context.close()


def test_where_random_is_as_good_the_page_says_so(browser: Browser, tmp_path: Path) -> None:
    even = make_plan(np.full((12, 3), 20.0), cohorts=["2", "4"], rounds=10, repetitions=1)
    page = Opened(browser, write_page(even, tmp_path / "even.html"))
    assert "Random, 2 of 12 clients per round" in page.page.locator(".headline").inner_text()
    assert "take random selection" in page.page.locator("#recommendation").inner_text()
    assert page.complaints == []
    page.context.close()
