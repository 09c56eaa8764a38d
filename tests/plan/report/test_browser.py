"""The page in a browser, where Chromium and playwright are at hand: drawn, searched, sorted, compared, no errors."""

from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest

from meshdsl.layouts.layout import Layout
from meshdsl.plan.report import report_data, report_html
from meshdsl.plan.types import Array, Timing
from meshdsl.util.lazy import Lazy
from meshdsl.util.text import bytes_text, percent_text
from tests.plan.conftest import HOSTILE

CHROMIUM = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a report, whole; whatever goes wrong in it fails the test."""
    pages, wrong = [], []

    def show(html, width=1280):
        (tmp_path / "p.html").write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.add_init_script("window.hit = () => { throw new Error('a name was run') };")
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "blob:")) or wrong.append(request.url))
        page.goto((tmp_path / "p.html").as_uri())
        for name in ("source", "communication", "collectives", "parameters", "memory", "timeline", "compare"):
            page.locator(f"#{name}").scroll_into_view_if_needed()
            page.wait_for_selector(f"#{name} > :nth-child(2)")
        pages.append(page)
        return page

    yield show
    for page in pages:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
        page.close()
    assert wrong == []


def rows(page, section):
    return page.locator(f"#{section} tbody tr")


def test_collectives_are_searched_filtered_and_sorted(show, plan):
    page = show(report_html(plan))
    every = rows(page, "collectives").count()
    assert every == len({(c.kind, c.axes, c.source, c.reason, c.bytes, c.trips) for c in plan.collectives})
    kind = plan.collectives[0].kind
    page.get_by_label("kind").select_option(kind)
    assert {text.split()[0] for text in rows(page, "collectives").all_inner_texts()} == {kind}
    page.get_by_label("kind").select_option("")
    page.get_by_label("Search collectives").fill("no such reason")
    assert rows(page, "collectives").count() == 0
    page.get_by_label("Search collectives").fill("")
    largest = max(plan.collectives, key=lambda c: c.bytes * c.trips)
    page.locator("#collectives th", has_text="bytes").first.get_by_role("button").click()
    assert page.locator("#collectives th[aria-sort='descending']").inner_text().startswith("bytes")
    assert bytes_text(largest.bytes * largest.trips) in rows(page, "collectives").first.inner_text()


def test_links_lead_to_the_line_and_its_reasons(show, plan):
    page = show(report_html(plan), width=400)
    page.locator(".costliest a").first.click()
    found = page.locator("tr.found")
    assert found.count() == 1 and page.evaluate("document.activeElement.id") == found.get_attribute("id")
    button = page.locator(".lines button").first
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    assert any(c.reason in page.locator(".why").inner_text() for c in plan.collectives)


def test_replicated_inputs_are_shown_on_demand(show, plan):
    whole = [Array(path, (8,), "float32", Layout()) for path in ("params/scale", "bias", "count", "state/bias")]
    page = show(report_html(replace(plan, inputs=(*plan.inputs, *whole))))
    assert page.locator("#parameters > .tall tbody tr").count() == len(report_data(plan)["arrays"])
    page.locator("#parameters summary").click()
    page.locator("#parameters details tbody tr").nth(len(whole) - 1).wait_for()  # rows are made when it has opened
    assert page.locator("#parameters details tbody tr").count() == len(whole)
    assert "4 inputs whole on every device: 128 B" in page.locator("#parameters summary").inner_text()


def test_layouts_are_explained_and_source_is_coloured(show, plan):
    page = show(report_html(plan))
    said = page.locator("#parameters .chip", has_text="data=S(0)").first.get_attribute("title")
    assert said == "data, split: each holds one block of dim 0"
    assert "def" in page.locator("#source .keyword").all_text_contents()
    shown = page.locator("#source td.code").all_text_contents()
    known = {text.strip() for _, _, text in plan.lines} | {f"(in {function})" for _, function, _ in plan.lines}
    assert {line.strip() for line in shown} <= known


def test_tables_are_cards_on_narrow_screens(show, plan):
    page = show(report_html(plan), width=400)
    row = page.locator("#collectives tbody tr").first
    boxes = [cell.bounding_box() for cell in row.locator("td").all()]
    assert len({box["x"] for box in boxes}) == 1 and len({box["y"] for box in boxes}) == len(boxes)


def test_print_shows_every_section_and_row(browser, plan, tmp_path):
    many = [replace(c, reason=f"{c.reason} {i}") for c in plan.collectives for i in range(100)]
    (tmp_path / "p.html").write_text(report_html(replace(plan, collectives=tuple(many))), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "p.html").as_uri())
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#collectives tbody tr").count() == len(many)
    assert page.locator("#timeline svg").count() == 1
    assert all(page.locator("svg").evaluate_all("charts => charts.map((chart) => chart.childElementCount > 0)"))
    assert page.locator("details:not([open])").count() == 0
    assert page.locator("details").count() == page.locator("details table").count()
    page.close()


def test_shares_have_the_digits_of_the_text(show, plan):
    sizes = {"w": 47, "x": 260, "y": 692, "z": 1}
    held = replace(plan, held=tuple(sizes.items()), solution=replace(plan.solution, peak=1000))
    shares = show(report_html(held)).locator("#memory td[data-label='share']").all_text_contents()
    assert shares == [percent_text(size / 1000) for size in sorted(sizes.values(), reverse=True)]


def test_charts_answer_to_keys(show, plan):
    page = show(report_html(plan))
    page.locator("#memory svg").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().split(" at ")[0].endswith("B")
    page.locator("#timeline svg").focus()
    before = page.locator("#timeline svg text").all_text_contents()
    page.keyboard.press("+")
    assert page.locator("#timeline svg text").all_text_contents() != before


def test_a_plan_given_and_a_plan_chosen_are_compared_alike(show, plan, other, tmp_path):
    difference = plan.diff(other)
    page = show(report_html(plan, against=other))
    given = page.locator("#compare").inner_text()
    assert f"Layouts: {sum(not name.startswith('output') for name, *_ in difference.layouts)} difference" in given
    assert f"Collectives: {len(difference.collectives)} difference" in given
    assert difference.collectives
    assert all(
        f"{what}, at {(now if now.runs else was).lines[0]}" in given for what, was, now in difference.collectives
    )
    other.save(tmp_path / "q.json")
    page = show(report_html(plan))
    page.locator("input[type=file]").set_input_files(tmp_path / "q.json")
    page.wait_for_selector("#compare h3")
    assert page.locator("#compare").inner_text() == given
    (tmp_path / "r.json").write_text("{}")
    page.locator("input[type=file]").set_input_files(tmp_path / "r.json")
    page.get_by_text("r.json is not a plan file").wait_for(timeout=5000)


def test_pictures_are_kept(show, pipelined):
    page = show(report_html(pipelined))
    said = page.locator("#timeline svg").first.get_attribute("aria-label")
    assert said == f"{pipelined.pipeline}; in lockstep: 100 us a step"
    begins = {"SVG": b"<svg", "PNG": b"\x89PNG"}
    for name, kind in (
        ("memory", "SVG"),
        ("timeline", "PNG"),
        ("treemap", "SVG"),
        ("treemap", "PNG"),
        ("pipeline", "SVG"),
        ("asynchronous pipeline", "PNG"),
    ):
        with page.expect_download() as kept:
            page.get_by_label(f"Save the picture of the {name} as {kind}").click()
        picture = Path(kept.value.path()).read_bytes()
        assert picture.startswith(begins[kind]) and b"var(--" not in picture and len(picture) > 1000


def test_hostile_names_are_shown(show, hostile):
    page = show(report_html(hostile, against=hostile))
    assert page.locator("h1").inner_text().startswith(f"{HOSTILE[1]} ")
    for section in ("source", "parameters", "memory"):
        assert HOSTILE[0] in page.locator(f"#{section}").inner_text()


def test_fifty_thousand_operations_are_there_at_once(show, plan):
    times = 1 + 50_000 // len(plan.spans)
    spans = Lazy.known(Timing(plan.spans * times))
    page = show(report_html(replace(plan, timing=spans, collectives=plan.collectives * times)))
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 2000


def test_screen_readers_are_told_every_column_region_and_tile(show, plan):
    page = show(report_html(plan))
    assert [text for text in page.locator("thead th").all_text_contents() if not text.strip()] == []
    names = page.eval_on_selector_all("[role=region], section", "all => all.map(one => one.ariaLabel || one.id)")
    assert len(names) == len(set(names))
    tile = page.locator(".treemap a").first
    name = tile.locator("title").text_content()
    assert all(word in name for text in tile.locator("text").all_text_contents() for word in text.split())
