"""The pages in a real browser: the report from disk without network, one spike in a million points, the live page.

Needs selenium, chromium and chromedriver; skips without them.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.core.record.goodput import CATEGORIES
from holdfast.diagnosis import rundiff
from holdfast.diagnosis.model.table import Table
from holdfast.reports.diff_page import build_diff_page
from holdfast.reports.page import render_page
from holdfast.reports.plots import build_plots
from holdfast.reports.recorded_run import open_run
from holdfast.reports.report_page import PageVerdict, ReportPage, build_page
from holdfast.reports.serve import RunServer
from shown_run import append, make_run, metrics_row, spike_events

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium and chromedriver are not installed")
EVIL = "</script><img src=x onerror=\"window.evil=1\"><svg onload='window.evil=1'>\u2028\u202e"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
)
WAIT = 60.0


class Browser:
    """One browser for all tests, with what it logged and asked for."""

    def __init__(self) -> None:
        options = Options()
        options.binary_location = BROWSER
        for flag in FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_page_load_timeout(WAIT)
        self.driver.set_script_timeout(WAIT)

    def open(self, url: str, width: int = 1200, height: int = 900, *, offline: bool = False) -> None:
        self.driver.get("about:blank")
        self.logs()
        conditions = {"offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(url)
        self.wait(lambda: self.run("return document.body.dataset.ready"))
        # After the curves are drawn.
        script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self.driver.execute_async_script(script)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, holds: Callable[[], Any]) -> Any:
        ends = time.monotonic() + WAIT
        while not (answer := holds()):
            assert time.monotonic() < ends, self.driver.get_log("browser")
            time.sleep(0.05)
        return answer

    def logs(self) -> tuple[list[str], list[str]]:
        """Return the console messages and the requested addresses since the last call."""
        console = [entry["message"] for entry in self.driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return console, asked

    def text(self) -> str:
        return str(self.driver.find_element(By.TAG_NAME, "main").text)

    def readout(self, title: str) -> str:
        figures = self.driver.find_elements(By.CSS_SELECTOR, "figure")
        return next(
            f.find_element(By.TAG_NAME, "output").text
            for f in figures
            if f.find_element(By.TAG_NAME, "b").text == title
        )

    def show_steps(self, first: int, last: int) -> None:
        for name, value in (("from", first), ("to", last)):
            self.run("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))
        before = self.run("return [...document.querySelectorAll('#curves output')][0].textContent")
        self.driver.find_element(By.CSS_SELECTOR, ".tools button:not([type=button])").click()
        self.wait(lambda: self.run("return [...document.querySelectorAll('#curves output')][0].textContent") != before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    started = Browser()
    yield started
    started.driver.quit()


def write(page: ReportPage, path: Path) -> str:
    path.write_text(render_page(page, title=page.title, note=page.verdict.text))
    return path.as_uri()


def is_painted(browser: Browser) -> bool:
    """Return whether the first canvas holds pixels of more than one colour."""
    script = """
        const canvas = document.querySelector("canvas"), seen = new Set();
        const p = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < p.length; i += 4) seen.add(p[i] << 16 | p[i + 1] << 8 | p[i + 2]);
        return seen.size > 3;
    """
    return bool(browser.run(script))


@pytest.mark.slow
def test_a_part_of_the_time_has_one_colour_on_all_pages_and_no_two_phases_share_one(browser, tmp_path):
    table = Table("x", "rundir", np.arange(50.0))
    for k in range(9):
        table.columns[f"phases.p{k}"], table.present[f"phases.p{k}"] = np.arange(50.0) * (k + 1), np.ones(50, bool)
    seen = []
    for costs in ([("rollback", 9.0), ("start", 1.0)], [("productive", 8.0), ("start", 2.0), ("rollback", 1.0)]):
        page = ReportPage(
            title="a", subtitle="", verdict=PageVerdict(status="clean", tone="good", label="Clean", text=""),
            cards=[], costs=costs, plots=build_plots(table), marks=[], incidents=[], sections=[],
        )  # fmt: skip
        browser.open(write(page, tmp_path / "a.html"))
        look = "return [...document.querySelectorAll(arguments[0])].map((n) => n.style.background + n.className)"
        seen.append(dict(zip([name for name, _ in costs], browser.run(look, ".key .swatch"), strict=True)))
        assert len(set(browser.run(look, "figcaption .swatch"))) == 9
    assert seen[0]["rollback"] == seen[1]["rollback"] and seen[0]["start"] == seen[1]["start"]
    assert len(set(seen[1].values())) == 3


@pytest.mark.slow
def test_report_opens_from_disk_without_network_and_an_incident_shows_its_evidence(browser, tmp_path):
    url = write(build_page(open_run(make_run(tmp_path / "<b>run", evil=EVIL))), tmp_path / "a.html")
    browser.open(url, offline=True)
    driver = browser.driver
    assert driver.find_element(By.TAG_NAME, "h1").text == "<b>run"
    assert "Ended by an error" in driver.find_element(By.CSS_SELECTOR, ".verdict").text
    assert is_painted(browser)
    incident = next(i for i in driver.find_elements(By.CSS_SELECTOR, ".incident") if "loss spike" in i.text)
    assert not incident.find_elements(By.TAG_NAME, "canvas")
    incident.find_element(By.TAG_NAME, "summary").click()
    browser.wait(lambda: incident.find_elements(By.TAG_NAME, "canvas"))
    story = incident.text
    assert "far above the baseline" in story and "it did not come back" in story and "from step 100 to 95" in story
    assert "replay.json" in story and "Evidence" in story
    for details in driver.find_elements(By.CSS_SELECTOR, "details"):  # every text of the run is on the page
        if not details.get_attribute("open"):
            browser.run("arguments[0].querySelector('summary').click()", details)
    browser.wait(lambda: "bad row</script><img" in browser.run("return document.body.textContent"))
    assert browser.run("return [window.evil, document.querySelectorAll('img, main svg, main script').length]") == [
        None,
        0,
    ]
    console, asked = browser.logs()
    assert console == []
    assert [address for address in asked if not address.startswith(("file:", "data:", "about:"))] == []


def test_a_curve_is_logarithmic_only_if_most_of_it_is_small_and_marks_before_the_first_step_are_in_view(
    browser, tmp_path
):
    steps = np.arange(1, 1001, dtype=float)
    table = Table("t", "rundir", steps)
    table.columns["loss"] = 10 * np.exp(-steps / 50) + 0.01
    table.columns["lr"] = 1e-3 * (0.5001 + 0.5 * np.cos(np.pi * steps / 1000))
    table.present |= {name: np.ones(1000, bool) for name in table.columns}
    verdict = PageVerdict(status="clean", tone="good", label="Clean", text="")
    marks = [("good", 0, "step_00000000", None)]
    costs = [(name.replace("_", " "), 1.0) for name in CATEGORIES]
    page = ReportPage(
        title="t", subtitle="", verdict=verdict, cards=[], plots=build_plots(table), marks=marks, costs=costs
    )
    browser.open(write(page, tmp_path / "a.html"))
    pressed = "return [...document.querySelectorAll('figcaption button')].map(b => b.getAttribute('aria-pressed'))"
    assert browser.run(pressed) == ["true", "false"]
    assert browser.run("return document.getElementById('from').value") == "0"
    assert "lowest 1e-7 at step 1,000" in browser.readout("Learning rate")
    look = "return [...document.querySelectorAll('.bar div')].map((n) => n.style.background + n.className)"
    assert len(set(browser.run(look))) == len(CATEGORIES)
    written = """
        const seen = [], pen = CanvasRenderingContext2D.prototype, fill = pen.fillText;
        pen.fillText = function (text, ...rest) { seen.push(text); fill.call(this, text, ...rest); };
        window.dispatchEvent(new Event("resize")); const done = arguments[0];
        requestAnimationFrame(() => requestAnimationFrame(() => done(seen)));
    """
    browser.show_steps(1, 4)
    texts = browser.driver.execute_async_script(written)
    assert {"2", "3"} <= set(texts) and "2.5" not in texts and "good save" in texts


def test_one_spike_among_a_million_points_is_found_at_any_zoom(browser, tmp_path):
    steps, at = 1_000_000, 654_321
    table = Table("big", "rundir", np.arange(1, steps + 1, dtype=float))
    table.columns["loss"] = np.random.default_rng(0).normal(2.0, 0.05, steps)
    table.columns["loss"][at - 1] = 9.75
    table.columns["loss"][499_999] = np.nan
    table.present["loss"] = np.ones(steps, bool)
    verdict = PageVerdict(status="clean", tone="good", label="Clean", text="")
    page = ReportPage(title="big", subtitle="", verdict=verdict, cards=[], plots=build_plots(table))
    browser.open(write(page, tmp_path / "a.html"), offline=True)
    assert "highest 9.75 at step 654,321, 1 not finite" in browser.readout("Loss")
    for reach in (100_000, 5_000, 200, 3):
        browser.show_steps(at - reach, at + reach)
        assert "highest 9.75 at step 654,321" in browser.readout("Loss")
    browser.show_steps(at + 1, at + 1_000)
    assert "9.75" not in browser.readout("Loss")
    canvas = browser.driver.find_element(By.TAG_NAME, "canvas")
    canvas.send_keys("0")  # keys: the whole run again
    browser.wait(lambda: "highest 9.75" in browser.readout("Loss"))
    canvas.send_keys("+")
    browser.wait(
        lambda: (
            browser.run("return document.getElementById('to').value - document.getElementById('from').value") < 600_000
        )
    )


@pytest.mark.parametrize("width", [390, 1200])
def test_page_fits_a_phone_and_a_desk_in_dark_and_light(browser, tmp_path, width):
    url = write(build_page(open_run(make_run(tmp_path / "a", evil="x" * 300))), tmp_path / "a.html")
    browser.open(url, width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert is_painted(browser)
    colours = []
    for _ in range(2):
        colours.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
        browser.driver.find_element(By.CSS_SELECTOR, ".theme button").click()
    assert len(set(colours)) == 2
    summary = browser.driver.find_element(By.CSS_SELECTOR, ".incident summary")
    summary.send_keys("\ue007")  # Enter
    browser.wait(lambda: browser.driver.find_elements(By.CSS_SELECTOR, ".incident canvas"))
    assert browser.run("return document.documentElement.scrollWidth") <= width


def test_two_runs_are_drawn_in_one_picture(browser, tmp_path):
    a, b = (rundiff.load(make_run(tmp_path / name, spike=spike)) for name, spike in (("a", None), ("b", 100)))
    browser.open(write(build_diff_page(rundiff.compare(a, b), a, b), tmp_path / "d.html"), offline=True)
    legend = browser.driver.find_element(By.CSS_SELECTOR, "figcaption").text
    assert "A" in legend.split() and "B" in legend.split() and is_painted(browser)
    assert "Suspects" in browser.driver.find_element(By.TAG_NAME, "main").text
    assert browser.logs()[0] == []


@pytest.mark.slow
def test_live_page_gains_points_and_an_incident_while_it_is_open(browser, tmp_path):
    run = make_run(tmp_path / "runs" / "now", ended=False, spike=None)
    make_run(tmp_path / "runs" / "old", evil=EVIL)
    server = RunServer(tmp_path / "runs", "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        browser.open(server.url)
        rows = browser.driver.find_elements(By.CSS_SELECTOR, "tbody tr")
        assert len(rows) == 2
        browser.driver.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("training")
        browser.wait(lambda: len(browser.driver.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1)
        browser.open(f"{server.url}run?name=now")
        assert "loss spike" not in browser.text()
        append(run / "metrics.jsonl", metrics_row(201, 33.5), metrics_row(202, 1.25, fresh=5.0))
        browser.wait(lambda: "highest 33.5 at step 201" in browser.readout("Loss"))
        browser.wait(lambda: "202 recorded" in browser.driver.find_element(By.CSS_SELECTOR, ".card").text)
        assert "202 steps committed" in browser.driver.find_element(By.CSS_SELECTOR, ".verdict").text
        assert browser.readout("fresh").startswith("lowest 5 at step 202")  # a column that was not there before
        append(run / "journal.jsonl", *({**event, "time": 1.0, "n": 50} for event in spike_events(201)))
        browser.wait(lambda: "1. loss spike at step 201" in browser.text())
        append(run / "metrics.jsonl", metrics_row(197, 1.0))  # the run went back: later steps are undone
        browser.wait(lambda: "33.5" not in browser.readout("Loss").split(";")[0])
        assert "crosses: attempts that were undone" in browser.readout("Loss")
        console, asked = browser.logs()
        assert console == [] and browser.run("return window.evil") is None
        assert [address for address in asked if not address.startswith((server.url, "data:", "about:"))] == []
    finally:
        browser.driver.get("about:blank")
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_list_that_is_read_again_keeps_focus_and_scrolling_and_shows_the_status_of_runs_with_long_names(
    browser, tmp_path
):
    for name in ("a", "b", "long_name_" * 20):
        make_run(tmp_path / "runs" / name)
    server = RunServer(tmp_path / "runs", "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        browser.open(server.url, width=390)
        assert browser.run("return document.querySelector('tbody .tag').getBoundingClientRect().left") < 390
        browser.run(
            "document.querySelectorAll('tbody a')[1].focus(); document.querySelector('.scroll').scrollLeft = 60"
        )
        name = browser.run("window.old = document.querySelector('tbody tr'); return document.activeElement.textContent")
        browser.wait(lambda: browser.run("return window.old !== document.querySelector('tbody tr')"))
        assert browser.run("return document.activeElement.textContent") == name != ""
        assert browser.run("return document.querySelector('.scroll').scrollLeft") == 60
        browser.open(f"{server.url}compare?a=a&b=b")
        assert "What was done" not in browser.text()
        browser.open(f"{server.url}run?name=a")
        shutil.rmtree(tmp_path / "runs" / "a")
        browser.wait(lambda: "The server has nothing new: no such run" in browser.text())
    finally:
        browser.driver.get("about:blank")
        server.shutdown()
        server.server_close()
