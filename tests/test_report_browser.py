"""The report in a real browser: headless Chromium, driven through its debugging pipe with nothing but the
library."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from prompted_rows import all_suites, by_depth, row, write_rows
from run_directories import WINNING, make_run

from pe_lab.page.export import shown, slug
from pe_lab.report import main
from pe_lab.results.figures import HeatMaps, Line, LineCharts, layer_names
from pe_lab.results.findings import Findings, write_findings

pytestmark = pytest.mark.slow

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
]


class Browser:
    """Chromium over its debugging pipe: commands go in on descriptor 3, answers and events come out on 4."""

    def __init__(self, profile: Path) -> None:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
        if found is None:
            pytest.fail("Chromium is not installed. Install it (Debian: `apt-get install -y chromium`) and run again.")
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()

        def as_3_and_4() -> None:
            # out of the way first: either may be 3 or 4 already
            a, b = os.dup(to_browser), os.dup(from_browser)
            high_a, high_b = os.dup2(a, 30), os.dup2(b, 31)
            os.dup2(high_a, 3)
            os.dup2(high_b, 4)

        self.process = subprocess.Popen(
            [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=as_3_and_4,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self.read_end, False)
        self.buffer, self.events, self.counter = b"", [], 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    session: str | None = None

    def call(self, method: str, **parameters):
        """Sends one command and returns its result; events that come meanwhile are kept."""
        self.counter += 1
        message = {"id": self.counter, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.counter:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def receive(self, seconds: float = 300.0) -> dict:
        """The next message."""
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            try:
                self.buffer += os.read(self.read_end, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > end or self.process.poll() is not None:
                    pytest.fail("Chromium did not answer.")
                time.sleep(0.02)
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Shows a file at a width of so many CSS pixels."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def value(self, expression: str):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list:
        """Errors and warnings on the console, and exceptions."""
        bad = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
        return [event for event in self.events if event.get("method") in bad]

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.write_end)
        os.close(self.read_end)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run, of a run with every suite, of a run with wide tables, and of three runs.

    The three are a whole one, one of another kind with an awkward name, and one that is still going.
    """
    root = tmp_path_factory.mktemp("runs")
    whole = make_run(root, "demo")
    nope = {("NoPE", "as trained", "NoPE"): WINNING["DroPE", "beta", "DroPE, β"]}
    make_run(
        root,
        f"<b>nope</b> {'very_' * 20}long",
        directory="nope",
        phases=(("pretrain", "nope", 200),),
        methods=nope,
    )
    make_run(root, "going", evaluated=False, status="running", phases=(("pretrain", "rope(base=10000)", 90),))
    assert main([str(whole)]) == 0
    assert main([str(path) for path in sorted(root.iterdir())]) == 0
    asked = make_run(tmp_path_factory.mktemp("asked"), "asked")
    all_suites(asked)
    # A label of two thousand characters, eight lengths, and perplexities whose intervals are long.
    long = f"RoPE ({', '.join(f'layer {n}: rope(base=10000) / window 256' for n in range(60))})"
    wide, lengths = make_run(tmp_path_factory.mktemp("wide"), "wide"), [1024 * 2**n for n in range(8)]
    rows = [row("niah", "standard", long, 0.5, n, factor=n // 1024, by_depth=by_depth([1, 0.5, 0])) for n in lengths]
    write_rows(wide, "niah", rows)
    losses = [row("perplexity", "essays", long, None, n, factor=n // 1024, nll=12.0, stderr=0.1) for n in lengths]
    write_rows(wide, "perplexity", [{k: v for k, v in one.items() if k not in ("metric", "score")} for one in losses])
    found = {"one": whole, "several": root, "asked": asked, "wide": wide}
    for run in (asked, wide):
        assert main([str(run)]) == 0
    return {name: directory / "report.html" for name, directory in found.items()}


@pytest.mark.parametrize("page", ["one", "several", "asked"])
@pytest.mark.parametrize("width", [360, 390, 760, 1000, 1280, 1440])
def test_nothing_is_requested_nothing_complains_nothing_sticks_out(browser, pages, page, width):
    browser.open(pages[page], width)
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []
    assert set(browser.requests()) - {"data:,"} == {pages[page].as_uri()}


@pytest.mark.parametrize(("width", "shown", "hidden"), [(390, "narrow", "wide"), (1280, "wide", "narrow")])
def test_each_chart_is_drawn_once_for_the_screen_with_text_of_readable_size(browser, pages, width, shown, hidden):
    browser.open(pages["one"], width)
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    count = "[...document.querySelectorAll('figure:not(.third) svg.%s')].filter(s => s.clientWidth > 0).length"
    charts = browser.value("document.querySelectorAll('figure.chart:not(.third)').length")
    assert browser.value(count % shown) == charts >= 6 and browser.value(count % hidden) == 0
    smallest = browser.value(
        "Math.min(...[...document.querySelectorAll('figure svg text')].map(t => "
        "t.getBoundingClientRect().height)"
        ".filter(h => h > 0))"
    )
    assert smallest >= 11  # the box of a line of 9.5 px and more


def test_the_point_is_on_the_page_and_a_pointer_tells_the_values(browser, pages):
    browser.open(pages["one"], 1280)
    text = browser.value("document.body.innerText")
    for words in (
        "at 8× DroPE, β finds 51% of the needles",
        "Needle accuracy",
        "Perplexity",
        "training length",
        "YaRN",
    ):
        assert words in text
    x, y = browser.value(
        "(() => { const s = document.querySelector('figure.half svg.wide'); s.scrollIntoView({block: "
        "'center', behavior: 'instant'});"
        "const b = s.getBoundingClientRect(); return [b.left + b.width * 0.66, b.top + b.height / 2] })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = browser.value("document.querySelector('figure.half .tip').innerText")
    assert "8×" in tip and "DroPE, β" in tip and "51%" in tip and "RoPE + YaRN" in tip


def test_dark_mode_changes_the_colours_and_stays_readable(browser, pages):
    colours = []
    for dark in (False, True):
        browser.open(pages["one"], 1280, dark)
        colours.append(
            browser.value("(() => {const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]})()")
        )
    (light_ink, light_paper), (dark_ink, dark_paper) = [[brightness(c) for c in pair] for pair in colours]
    assert light_paper - light_ink > 180 and dark_ink - dark_paper > 180


@pytest.mark.parametrize("dark", [False, True])
def test_heat_maps_deepen_with_the_score_in_light_and_in_dark(browser, pages, dark):
    browser.open(pages["asked"], 1280, dark)
    cells = browser.value(
        "[...document.querySelectorAll('.heat tbody td')].filter(d => d.className[0] == 'h').map(d => {"
        "const s = getComputedStyle(d); return [+d.className.match(/h(\\d+)/)[1], s.backgroundColor, s.color]})"
    )
    bright = dict(sorted((step, brightness(background)) for step, background, _ in cells))
    values = list(bright.values())
    assert len(values) > 5 and values == sorted(values, reverse=not dark)
    assert min(abs(brightness(background) - brightness(ink)) for _, background, ink in cells) > 60
    hatched = browser.value("getComputedStyle(document.querySelector('.heat td.none')).backgroundImage")
    assert hatched.startswith("repeating-linear-gradient")


def test_maps_are_side_by_side_on_a_laptop_and_below_one_another_on_a_phone(browser, pages):
    for width, rows in ((1280, 1), (360, 3)):
        browser.open(pages["asked"], width)
        tops = browser.value(
            "[...document.querySelector('.maps').children].map(f => Math.round(f.getBoundingClientRect().top))"
        )
        assert len(tops) == 3 and len(set(tops)) == rows
        cell = browser.value("document.querySelector('.heat tbody td').getBoundingClientRect().toJSON()")
        assert cell["width"] > 24 and cell["height"] > 16


UNREACHABLE = """
(() => {
  document.querySelectorAll('details').forEach(d => d.open = true);
  const unreachable = [];
  document.querySelectorAll('table').forEach(table => {
    // The header and one row of each table: columns are what may lie outside the screen.
    [...table.tHead.rows[0].cells, ...table.tBodies[0].rows[0].cells].forEach(cell => {
      cell.scrollIntoView({block: 'center', inline: 'end', behavior: 'instant'});
      if (cell.scrollWidth > cell.clientWidth + 1)
        unreachable.push([table.getAttribute('aria-label'), cell.innerText, 'sticks out of its cell']);
      const box = cell.getBoundingClientRect();
      const y = box.top + Math.min(box.height, 40) / 2;
      for (const x of [box.left + 3, box.right - 3]) {
        const at = x > 0 && x < innerWidth && document.elementFromPoint(x, y);
        if (!at || !cell.contains(at)) {
          unreachable.push([table.getAttribute('aria-label'), cell.innerText, x, at && at.outerHTML.slice(0, 60)]);
        }
      }
    });
  });
  return unreachable;
})()
"""


@pytest.mark.parametrize("page", ["one", "several", "asked", "wide"])
def test_every_column_can_be_reached_on_a_phone(browser, pages, page):
    browser.open(pages[page], 400)
    assert browser.value(UNREACHABLE) == []


VALUES = np.arange(12 * 3 * 8).reshape(12, 3, 8) / 7


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """The page of three seeds of one method and two of another."""
    root, made = tmp_path_factory.mktemp("grouped"), []
    for name, count in (("a_method_with_a_long_name", 3), ("b", 2)):
        for seed in range(count):
            run = make_run(root, name, directory=f"{name}-{seed}")
            known = json.loads((run / "run.json").read_text())
            known["config"] |= {"seed": seed, "model": known["config"]["model"] | {"layers": count}}
            (run / "run.json").write_text(json.dumps(known))
            made.append(str(run))
    assert main(made) == 0
    return root / "report.html"


@pytest.mark.parametrize("width", [400, 1200])
def test_groups_stick_out_nowhere_and_their_runs_are_reached_by_links(browser, grouped, width):
    """2 s."""
    browser.open(grouped, width)
    assert browser.value("document.documentElement.scrollWidth") <= width and browser.complaints() == []
    link = "[...document.links].find(a => a.hash == '#run-0-1')"
    browser.value(f"{link}.click()")
    end = time.monotonic() + 300
    while not browser.value("document.getElementById('run-0-1').getBoundingClientRect().height > 0"):
        assert time.monotonic() < end
    assert browser.value("document.getElementById('run-0-1').closest('details').open")
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= width


SAVE = "[...document.querySelectorAll('.files button')].filter(b => b.getAttribute('aria-label') == %s)[0].%s()"


def saved(browser, folder: Path, label: str, name: str) -> bytes:
    """The file that a button makes, pressed by the keyboard."""
    browser.value(SAVE % (json.dumps(label), "focus"))
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **key)
    end = time.monotonic() + 300
    while not (folder / name).exists():
        assert time.monotonic() < end, [path.name for path in folder.iterdir()]
        time.sleep(0.05)
    time.sleep(0.1)
    return (folder / name).read_bytes()


def test_buttons_save_what_the_command_exports(browser, grouped, analyzed, tmp_path):
    """4 s. The page's script and `--export` make the same tables and the same pictures."""
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.open(grouped, 1200, dark=True)
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    exported = {one.title: one for one in reversed(list(shown(grouped.read_text())))}
    offered = browser.value("[...document.querySelectorAll('.files')].length")
    assert offered == sum(bool(one.rows) for one in shown(grouped.read_text()))
    for title in (
        "Runs",
        "Needle accuracy",
        "Differences, b − a_method_with_a_long_name",
        "Training loss (running mean)",
    ):
        one = exported[title]
        found = list(csv.reader(io.StringIO(saved(browser, tmp_path, f"CSV of {title}", f"{one.name}.csv").decode())))
        assert [[as_number(x) for x in row] for row in found] == [[as_number(x) for x in row] for row in one.rows]
    one = exported["Validation loss"]
    svg = saved(browser, tmp_path, "SVG of Validation loss", f"{one.name}.svg").decode()
    theirs, ours = (ElementTree.fromstring(text) for text in (svg, one.svg))
    assert [node.tag for node in theirs.iter()] == [n.tag for n in ours.iter() if not n.tag.endswith("title")]
    assert "var(" not in svg and 'fill="#fff"' in svg and theirs.get("viewBox") == ours.get("viewBox")
    picture = Image.open(io.BytesIO(saved(browser, tmp_path, "PNG of Validation loss", f"{one.name}.png")))
    assert picture.size == tuple(2 * float(side) for side in one.svg.split('viewBox="')[1].split('"')[0].split()[2:])
    assert np.asarray(picture.convert("L"))[0, 0] == 255  # light, on a dark page too
    browser.open(analyzed, 400)
    for title, name, count in (("M", "m", 12 * 3 * 8), ("L", "l", 12 * 8)):
        label = f"CSV of {title}"
        file = f"{slug(analyzed.parent.name)}-{name}.csv"
        assert len(saved(browser, tmp_path, label, file).decode().splitlines()) == 1 + count
        picture = saved(browser, tmp_path, f"SVG of {title}", file.replace(".csv", ".svg")).decode()
        assert ElementTree.fromstring(picture).tag.endswith("}svg") and picture.count("layer 11") == 1
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.value("getComputedStyle(document.querySelector('.files')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")


def as_number(text: str) -> object:
    try:
        return pytest.approx(float(text), rel=1e-9)
    except ValueError:
        return text


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory):
    """The page of a run with one analysis: heat maps of 12 layers, and lines of 12 layers."""
    run = tmp_path_factory.mktemp("analyzed")
    heads, pairs = tuple(f"head {n}" for n in range(3)), tuple(f"{n} ({2**n} tokens)" for n in range(8))
    names = layer_names(range(12)), heads, pairs, "layer", "head", "pair of channels, from fast to slow", "mean norm"
    lines = (Line("RoPE", np.arange(1.0, 9), np.arange(8.0), np.arange(8.0) - 1, np.arange(8.0) + 1),)
    charts = LineCharts("l", "L", "C", tuple((name, lines) for name in names[0]), "tokens", "loss", log_x=True)
    write_findings(
        run / "analysis" / "a", "a", Findings(("One.",), (), (HeatMaps("m", "M", "C", VALUES, *names), charts)), {}
    )
    assert main([str(run)]) == 0
    return run / "report.html"


def pointed(browser, selector: str, across: float, down: float) -> None:
    """Moves the pointer to a place of an element, in shares of its width and height."""
    x, y = browser.value(
        f"(() => {{ const e = document.querySelector('{selector}'); e.scrollIntoView({{block: 'center', behavior: "
        f"'instant'}}); const b = e.getBoundingClientRect(); return [b.left + b.width * {across}, b.top + b.height * "
        f"{down}] }})()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@pytest.mark.parametrize("width", [400, 1200])
def test_a_slider_chooses_the_layer_and_a_pointer_or_the_keys_a_cell(browser, analyzed, width):
    browser.open(analyzed, width)
    assert browser.value("document.documentElement.scrollWidth") <= width and browser.complaints() == []
    pictures = browser.value("[...document.querySelectorAll('.panel img')].map(i => [i.src, i.naturalWidth])")
    assert len(pictures) == 12 and {size for _, size in pictures} == {8}
    browser.value("document.querySelector('.slider input').focus({preventScroll: true})")
    for _ in range(5):
        for kind in ("keyDown", "keyUp"):
            browser.call(
                "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
            )
    assert browser.value("document.querySelector('.slider output').innerText") == "layer 5"
    assert browser.value("document.querySelector('.large img').src") == pictures[5][0]
    pointed(browser, ".large .cells", 6.5 / 8, 1.5 / 3)  # head 1, pair 6
    tip = browser.value("document.querySelector('.analysis-maps .tip').innerText")
    value = f"{(5 * 24 + 8 + 6) / 7:.4f}"
    assert "layer 5" in tip and "head 1" in tip and "6 (64 tokens)" in tip and value in tip
    box = browser.value("document.querySelector('.analysis-maps .tip').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0 and box["right"] <= width
    browser.value("document.querySelector('.large .cells').focus({preventScroll: true})")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown", code="ArrowDown", windowsVirtualKeyCode=40)
    shown = browser.value("document.querySelector('.large .value').innerText")
    assert shown.startswith("layer 5, head 2, pair of channels 6 (64 tokens): " + f"{(5 * 24 + 16 + 6) / 7:.4f}")
    pointed(browser, ".panel:nth-child(12) .cells", 0.5 / 8, 0.5 / 3)
    tip = browser.value("document.querySelector('.analysis-maps .tip').innerText")
    assert "layer 11" in tip and "head 0" in tip and f"{11 * 24 / 7:.4f}" in tip
    pointed(browser, ".chart.small:nth-child(2) svg", 0.98, 0.5)
    tip = browser.value("document.querySelector('.chart.small:nth-child(2) .tip').innerText")
    assert "RoPE" in tip and "7 (6 to 8)" in tip
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_without_javascript_the_page_shows_all_panels_of_an_analysis(browser, analyzed):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(analyzed, 1200)
        heights = browser.value("[...document.querySelectorAll('.panel .cells, .large')].map(e => e.offsetHeight)")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert heights[0] == 0 and len(heights) == 13 and min(heights[1:]) >= 40


def brightness(colour: str) -> float:
    """Mean of the channels of `rgb(r, g, b)`."""
    channels = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(channels) / 3


@pytest.mark.parametrize("width", [400, 700, 1200])
def test_the_last_length_is_seen_and_five_lines_are_drawn_until_all_are_asked_for(browser, tmp_path, width):
    """Seven variants up to 32×: no table is wider than its box on a phone, and a box shows the other lines. 2 s."""
    page = tmp_path / "page.html"
    main([str(make_run(tmp_path, training_length=2048)), f"--out={page}"])
    browser.open(page, width)
    table = "document.querySelector('table.scores')"
    assert browser.value(f"{table}.parentNode.scrollWidth - {table}.parentNode.clientWidth") <= 1
    figure = "document.querySelector('figure.chart')"
    lines = f"[...{figure}.querySelectorAll('svg.{'wide' if width > 820 else 'narrow'} path[stroke-width]')]"
    seen = f"{lines}.filter(one => one.getClientRects().length).length"
    assert browser.value(seen) == 5
    browser.value(f"{figure}.querySelector('.all input').click()")
    assert browser.value(seen) == 7
