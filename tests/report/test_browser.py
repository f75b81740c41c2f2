"""The page in a real headless Chromium: it draws, switches, zooms, prints, offers its data, and asks nobody."""

import csv
import io
import json
import time

import pytest

from equipoise.report import build_page, write_page
from equipoise.report.render import GROUND, INK, as_csv
from tests.browser import PATIENCE_MS
from tests.report.conftest import open_in
from tests.report.documents import POLICIES, metrics, rank_replay, simulation, small_analysis, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="without playwright the page is not tested in a browser")

READ_CHART = """name => {
    const chart = document.getElementById(name);
    const shown = chart.data.filter(trace => trace.visible !== false);
    const count = selector => chart.querySelectorAll(selector).length;
    return {
        x: chart.data.map(trace => [...trace.x]),
        z: chart.data.map(trace => trace.z ?? null),
        visible: chart.data.map(trace => trace.visible),
        bars: count(".barlayer .point path"),
        lines: count(".scatterlayer .js-line"),
        cells: count(".heatmaplayer image"),
        shownBars: shown.filter(t => t.type === "bar").reduce((n, t) => n + t.x.length, 0),
        shownLines: shown.filter(t => t.type === "scatter").length,
        shownCells: shown.filter(t => t.type === "heatmap").length,
        ink: chart.layout.template.layout.font.color,
    };
}"""

READ_COLOURS = """names => [
    getComputedStyle(document.body).backgroundColor,
    names.map(name => document.getElementById(name).layout.template.layout.font.color),
]"""


@pytest.fixture(scope="module")
def page():
    return build_page(simulation(), title="a step")


@pytest.fixture(scope="module")
def file(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(page, path)
    return path


@pytest.fixture(scope="module")
def opened(browser, file):
    """The page in a wide window, shared by tests that leave it as they found it."""
    return open_in(browser, file)


def test_every_chart_is_drawn_with_its_points_without_error_or_request(opened, page, file):
    assert len(page.charts) >= 11
    for chart in page.charts:
        found = opened.page.evaluate(READ_CHART, chart.name)
        assert found["x"] == [list(trace["x"]) for trace in chart.traces], chart.name
        assert found["z"] == [trace.get("z") for trace in chart.traces], chart.name
        assert found["bars"] == found["shownBars"], chart.name
        assert found["lines"] == found["shownLines"], chart.name
        assert found["cells"] == found["shownCells"], chart.name
        assert found["bars"] + found["lines"] + found["cells"] > 0, chart.name
    # A chart can be saved as a picture, which the page's content policy must allow.
    assert opened.page.evaluate("Plotly.toImage('cost-parts', {format: 'png'})").startswith("data:image/png")
    assert opened.complaints == []
    asked = [url for url in opened.requests if not url.startswith(("blob:", "data:"))]
    assert asked == [file.as_uri()]


def test_switches_show_one_view_after_the_other(opened, page):
    opened = opened.page
    switched = [chart for chart in page.charts if chart.views]
    assert len(switched) >= 6
    for chart in switched:
        for place, view in reversed(list(enumerate(chart.views))):
            button = opened.locator(f"[data-chart={chart.name}][data-view='{place}']")
            button.click()
            assert opened.evaluate(READ_CHART, chart.name)["visible"] == list(view.visible)
            pressed = opened.locator(f"#section-{chart.name} .switch [aria-pressed=true]")
            assert pressed.all_inner_texts() == [view.label]
            shown = {trace["name"] for trace, visible in zip(chart.traces, view.visible, strict=True) if visible}
            listed = opened.locator(f"#section-{chart.name} .legend li:visible").all_inner_texts()
            assert listed == [name for name, _, _ in chart.legend if name in shown]
            if chart.name == "cost-parts":
                beside = opened.locator("#cost-parts .ytick text").evaluate_all("all => all.map(t => t.textContent)")
                words = view.layout["yaxis.ticktext"]
                assert sorted(" ".join(text.split()) for text in beside) == sorted(" ".join(w.split()) for w in words)


def is_soon(page, expression, *, wait_s=PATIENCE_MS / 1000):
    """Whether an expression becomes true in time.

    Asked from here: the page allows no `eval`, by which the browser would ask itself again.
    """
    end = time.monotonic() + wait_s
    while not page.evaluate(expression):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_the_timeline_zooms_by_dragging_and_goes_back_by_a_double_click(opened):
    opened = opened.page
    plot = opened.locator("#timeline .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    read_range = "document.getElementById('timeline').layout.xaxis.range"
    whole = opened.evaluate(read_range)
    middle = box["y"] + box["height"] / 2
    opened.mouse.move(box["x"] + 0.25 * box["width"], middle)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 0.5 * box["width"], middle + 2, steps=5)
    opened.mouse.up()
    assert is_soon(opened, f"{read_range}[1] < {0.9 * whole[1]}")
    left, right = opened.evaluate(read_range)
    assert left == pytest.approx(0.25 * whole[1], rel=0.05)
    assert right == pytest.approx(0.5 * whole[1], rel=0.05)
    # On a busy machine the second click may come too late to make a double click of both: then click again.
    for tries_left in reversed(range(10)):
        opened.mouse.dblclick(box["x"] + 0.4 * box["width"], middle)
        if is_soon(opened, f"{read_range}[1] > {0.9 * whole[1]}", wait_s=8):
            break
        assert tries_left, "the timeline does not go back"


def test_both_colour_schemes_follow_the_system_until_the_reader_chooses(open_page, page, file):
    opened = open_page(file, scheme="dark").page
    heard = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"

    def system_turns(scheme):
        """The page hears of it in its own time, at the latest after the next frame."""
        opened.emulate_media(color_scheme=scheme)
        assert is_soon(opened, f"matchMedia('(prefers-color-scheme: {scheme})').matches")
        opened.evaluate(heard)

    def shown():
        ground, inks = opened.evaluate(READ_COLOURS, [chart.name for chart in page.charts])
        assert len(set(inks)) == 1, "charts of different colour schemes"
        return ground, inks[0]

    dark, light = ((rgb(GROUND[scheme]), INK[scheme]) for scheme in ("dark", "light"))
    assert shown() == dark
    system_turns("light")
    assert shown() == light
    opened.click("#theme")
    assert shown() == dark
    # What the reader chose stays when the system changes its mind.
    system_turns("dark")
    system_turns("light")
    assert shown() == dark


def rgb(colour):
    """A colour as browsers write it."""
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_a_narrow_window_does_not_scroll_sideways(open_page, page, file):
    opened = open_page(file, width=420)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 420
    for chart in page.charts:
        width = opened.page.evaluate("name => document.querySelector(`#${name} .main-svg`).clientWidth", chart.name)
        assert 300 < width <= 420, chart.name
    assert opened.complaints == []


def test_all_data_can_be_downloaded_from_the_page(opened, page):
    assert json.loads(download(opened.page, "result.json")) == json.loads(json.dumps(page.document))
    for section in page.sections:
        text = download(opened.page, f"{section.name}.csv")
        assert text == as_csv(section.data)
        assert len(list(csv.reader(io.StringIO(text)))) == 1 + len(section.data.rows)


def download(page, name, *, clicks=6):
    """Click and read what was saved; on a busy machine Chromium loses one download in some dozens, so click again."""
    try:
        # By its name: one that was thought lost may come in the end.
        with page.expect_download(lambda found: found.suggested_filename == name, timeout=8_000) as waiting:
            page.locator(f"[data-download='{name}']").click()
    except playwright.TimeoutError:
        if clicks == 1:
            raise
        return download(page, name, clicks=clicks - 1)
    return waiting.value.path().read_text()


def test_definitions_are_one_click_away(opened):
    section = opened.page.locator("#section-skew-over-micro-steps")
    words = section.locator("dd", has_text="Rows of the busiest rank / rows of the mean rank")
    assert not words.is_visible()
    section.locator("summary").click()
    assert words.is_visible()


def test_on_paper_it_is_light_and_fits(open_page, page, file):
    opened = open_page(file, width=760, scheme="dark").page
    opened.click("details.more > summary")
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.locator("#section-traffic").is_visible()
    opened.emulate_media(media="print")
    assert is_soon(opened, "matchMedia('print').matches")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert {opened.evaluate(READ_CHART, chart.name)["ink"] for chart in page.charts} == {INK["light"]}
    assert opened.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth))") <= 680
    assert opened.locator("#theme").is_hidden()
    assert opened.locator("#definitions dd").first.is_visible()
    assert opened.locator(".answer details li").first.is_visible()
    assert opened.pdf()[:5] == b"%PDF-"
    opened.emulate_media(media="screen")
    assert is_soon(opened, "matchMedia('screen').matches")
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.evaluate(READ_CHART, "timeline")["ink"] != INK["light"]
    assert opened.locator("details[open]").count() == 0, "what the reader had closed is closed again"


def test_on_paper_the_view_that_is_pressed_stands_beside_the_title(open_page, page, file):
    opened = open_page(file, width=760).page
    switched = [chart for chart in page.charts if chart.views]
    labels = {chart.name: chart.views[0].label for chart in switched}
    labels["traffic"] = "After"
    opened.click("[data-chart=traffic][data-view='1']")
    assert opened.locator(".view:visible").count() == 0, "on the screen the switch says it"
    opened.emulate_media(media="print")
    assert is_soon(opened, "matchMedia('print').matches")
    for name, label in labels.items():
        assert opened.locator(f"#section-{name} .view").inner_text() == f"Shown: {label}"


READ_TICKS = """name => [...document.querySelectorAll(`#${name} .xtick text`)]
    .filter(tick => tick.checkVisibility({opacityProperty: true})).map(tick => tick.textContent)"""


def test_no_tick_of_the_break_even_is_dropped_in_a_narrow_window(open_page, tmp_path):
    document = simulation().to_dict()
    sizes = [128 * 2**i for i in range(9)]
    for curve in document["sweep"]["break_even"]["curves"]:
        curve["points"] = [{"tokens": size, "saved_share": 0.01} for size in sizes]
    write_page(build_page(document, title="x"), tmp_path / "ticks.html")
    ticks = open_page(tmp_path / "ticks.html", width=380).page.evaluate(READ_TICKS, "break-even")
    assert ticks == [f"{size:,}" for size in sizes]


@pytest.mark.parametrize("width", [420, 1400])
def test_micro_steps_have_whole_ticks_and_neighbours_write_sizes_alike(open_page, tmp_path, width):
    document = simulation(steps={"recompute": 2, "update": 3}).to_dict()
    for place, point in enumerate(document["sweep"]["points"]):
        point["tokens"] = 512 * 2 ** (place % 3)
    document["sweep"]["axes"] = {"tokens": [512, 1024, 2048]}
    write_page(build_page(document, title="x"), tmp_path / "ticks.html")
    page = open_page(tmp_path / "ticks.html", width=width).page
    assert page.evaluate(READ_TICKS, "skew-over-micro-steps") == ["0", "1", "2", "3", "4"]
    assert page.evaluate(READ_TICKS, "sweep") == ["512", "1,024", "2,048"]
    assert page.evaluate(READ_TICKS, "break-even") == ["256", "1,024", "4,096"]


READ_OUTLINE = """() => {
    const style = getComputedStyle(document.querySelector("#timeline .barlayer .point path"));
    return [style.stroke, style.strokeWidth];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_bars_of_a_timeline_that_touch_are_seen_apart(open_page, file, scheme):
    stroke, width = open_page(file, scheme=scheme).page.evaluate(READ_OUTLINE)
    assert (stroke, width) == (rgb(GROUND[scheme]), "0.5px")


def test_the_largest_page_is_small_and_drawn(open_page, tmp_path):
    policies = [("static", 0, 1.5), ("eplb-history", 1, 1.3), *POLICIES[1:2], ("lplb", 1, 1.2), *POLICIES[2:]]
    large = simulation(layers=94, ranks=64, experts=128, policies=policies, steps={"recompute": 64, "update": 64})
    page = build_page(large, title="94 layers, 64 ranks")
    size = write_page(page, tmp_path / "large.html")
    assert size < 8_000_000
    assert "Cut to keep the page small" in {c.name: c.note for c in page.charts}["timeline"]
    opened = open_page(tmp_path / "large.html")
    assert opened.complaints == []
    assert opened.page.evaluate(READ_CHART, "timeline")["bars"] == 4000


def test_pages_of_every_other_kind_are_drawn_without_error_or_request(open_page, tmp_path):
    run = write_run(tmp_path / "run", [metrics(step) for step in range(4)])
    for name, result in {"analysis": small_analysis(), "run": run, "replay": rank_replay()}.items():
        path = tmp_path / f"{name}.html"
        page = build_page(result, title=name)
        write_page(page, path)
        opened = open_page(path)
        for chart in page.charts:
            found = opened.page.evaluate(READ_CHART, chart.name)
            assert found["bars"] + found["lines"] > 0, chart.name
            assert (found["bars"], found["lines"]) == (found["shownBars"], found["shownLines"]), chart.name
        assert opened.complaints == []
        assert opened.requests == [path.as_uri()]


def test_a_browser_that_cannot_unpack_the_page_is_told_so(browser, file):
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.add_init_script("delete window.DecompressionStream")
    page.goto(file.as_uri())
    page.locator("#too-old").wait_for(state="visible")
    assert page.locator("h1").is_visible()
