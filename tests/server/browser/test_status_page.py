"""The page of live graphs in a real browser, over a real server on nano."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import prometheus_client
import pytest

from tests.server.process import KEY, Server, start_server

pytest.importorskip("selenium")
from selenium.webdriver.common.keys import Keys  # noqa: E402

from tests.server.browser.page import STORY, WEATHER, Page, reference  # noqa: E402

pytestmark = pytest.mark.web


def test_the_status_page_asks_for_the_key_too(page: Page, server: Server) -> None:
    page.driver.get(server.url + "/status")
    page.until(lambda: page.one("#key-form").is_displayed() and page.text("#health") == "ready")
    page.type("wrong" + Keys.ENTER, "#key")
    page.until(lambda: "wrong API key" in page.one("#key-error").text)
    page.one("#key").clear()
    page.type(KEY + Keys.ENTER, "#key")
    page.until(lambda: page.all("#info tr"))
    assert not page.one("#key-form").is_displayed()


def test_metrics_and_percentiles_are_read_as_prometheus_means_them(page: Page) -> None:
    registry = prometheus_client.CollectorRegistry()
    bounds = (0.1, 0.5, 1.0, 5.0)
    histogram = prometheus_client.Histogram("a:lat", "x", ("l",), registry=registry, buckets=bounds)
    counter = prometheus_client.Counter("a:c", 'odd "text"', ("l",), registry=registry)
    for label in ("plain", 'odd "} le="7", 5'):
        counter.labels(label).inc(2.5)
    values = np.random.default_rng(0).exponential(1.0, 400)
    for value in values[:100]:
        histogram.labels("plain").observe(value)
    before = prometheus_client.generate_latest(registry).decode()
    for value in values[100:]:
        histogram.labels("plain").observe(value)
    after = prometheus_client.generate_latest(registry).decode()
    total, missing, quantiles = page.open("/status").module(
        """const p = await import("/web/prometheus.js");
        const [before, after] = args[0].map(p.parseMetrics);
        const recent = p.bucketsBetween(p.buckets(before, "a:lat"), p.buckets(after, "a:lat"));
        return [p.total(after, "a:c_total"), p.total(after, "none"), args[1].map((q) => p.quantile(q, recent))];""",
        [before, after],
        [0.0, 0.25, 0.5, 0.9, 0.999],
    )
    assert (total, missing) == (5.0, None)
    edges = [0.0, *bounds]
    cumulative = [0, *(int((values[100:] <= bound).sum()) for bound in bounds)]
    for q, found in zip((0.25, 0.5, 0.9), quantiles[1:4], strict=True):
        assert found == pytest.approx(np.interp(q * 300, cumulative, edges), abs=1e-9)
    assert (quantiles[0], quantiles[4]) == (0.0, 5.0)


def test_the_status_page_moves(page: Page) -> None:
    page.open("/status")
    tile = lambda number: page.all("#tiles dd")[number].text  # noqa: E731
    page.until(lambda: tile(0).startswith("0") and page.text("#health") == "ready")
    messages = [{"role": "user", "content": STORY}]
    options = {"max_tokens": 150, "extra_body": {"ignore_eos": True}}
    threads = [threading.Thread(target=reference, args=(page.server, messages), kwargs=options) for _ in range(2)]
    for thread in threads:
        thread.start()
    page.until(lambda: float(tile(0).split()[0].replace(",", "")) > 0 and tile(1).split()[0] == "2")
    page.until(lambda: re.fullmatch(r"[\d.]+ m?s", tile(4)) and re.fullmatch(r"[\d.]+ m?s", tile(5)))
    for thread in threads:
        thread.join()
    page.until(lambda: tile(1).split()[0] == "0" and tile(0).split()[0] == "0")
    drawn = [graph.get_attribute("d") for graph in page.all(".graph:first-child path")]
    assert len(set(re.findall(r",([\d.]+)", drawn[-1]))) > 2, "the line must have moved"
    labels = [graph.get_attribute("aria-label") for graph in page.all(".graph svg")]
    assert len(labels) == 8 and "running 0" in labels[2]
    info = page.driver.execute_script(
        "return [...document.querySelectorAll('#info tr')].map((r) => [r.cells[0].textContent, r.cells[1].textContent])"
    )
    served = page.server.http.get("/server_info").json()
    assert dict(info)["model"] == "nano" and int(dict(info)["max_model_len"]) == served["max_model_len"]
    assert page.complaints() == []


def test_a_server_that_is_gone_is_said_to_be(page: Page, checkpoint: Path) -> None:
    other = start_server(checkpoint)
    page.driver.get(other.url + "/status")
    page.until(lambda: page.text("#health") == "ready")
    status = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.driver.get(other.url)
    page.until(lambda: page.all("#model option"))
    other.process.terminate()
    other.process.wait(timeout=30)
    page.ask("Hello")
    assert page.text(".error") == "the server does not answer"
    page.driver.switch_to.window(status)
    page.until(lambda: page.text("#health") == "the server does not answer")


@pytest.mark.parametrize("path", ["/", "/status"])
def test_controls_have_names_and_pages_fit_a_phone(page: Page, path: str) -> None:
    page.open(path)
    if path == "/":
        page.set(max_tokens="2", tools=json.dumps([WEATHER])).ask("Hello")
        page.one(".tools-setting summary").click()
    controls = [
        control for control in page.all("button, input, select, textarea, a, summary") if control.is_displayed()
    ]
    assert len(controls) > 2 and all(control.accessible_name for control in controls)
    if path == "/":
        page.one("#toggle-settings").click()
    for width in (360, 768):
        metrics = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": True}
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        page.until(lambda width=width: page.driver.execute_script("return innerWidth") == width)
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
