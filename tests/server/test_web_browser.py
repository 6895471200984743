"""The web page in a real browser, over a real server on nano.  Skipped without Chromium: `make test-web`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import prometheus_client
import pytest

from tests.server.process import KEY, Server, start_server

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.web,
    pytest.mark.skipif(not CHROMIUM or not shutil.which("chromedriver"), reason="no Chromium or no chromedriver"),
]
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,860"
)
STORY = "Tell me a short story about a lighthouse keeper."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HOSTILE = [
    "<img src=x onerror=\"window.hit=1\">",
    "<script>window.hit=1</script>",
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt:window.hit=1 \"t\")",
    "[click](data:text/html,<script>window.hit=1</script>)",
    "![x](https://example.com/secret.png)",
    "[a](https://example.com/\"onmouseover=\"window.hit=1)",
    "`<svg onload=window.hit=1>`",
    "```<b>\n<iframe srcdoc='<script>parent.hit=1</script>'></iframe>\n```",
    "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <details open ontoggle=window.hit=1> | d |",
    "# <a href=javascript:window.hit=1>x</a>\n> <form action=x>\n- <style>*{display:none}</style>",
    "**<b>*<i>~~<u>[<a>](https://e.com/<x>)~~***",
]  # fmt: skip
TAGS = {
    "p", "br", "a", "code", "strong", "em", "del", "h3", "h4", "h5", "h6", "hr", "blockquote", "ul", "ol", "li", "div",
    "span", "pre", "button", "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip


@pytest.fixture(scope="module")
def nano() -> Iterator[Server]:
    running = start_server(Path("nano"))
    yield running
    running.process.terminate()
    running.process.wait(timeout=60)


class Page:
    """A browser on one of the server's pages."""

    def __init__(self, driver: Any, server: Server):
        self.driver, self.server = driver, server

    def open(self, path: str = "/") -> Page:
        self.driver.get(self.server.url + path)
        if path == "/":
            self.until(lambda: self.all("#model option"))
        return self

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Of the last element that matches, also if it is not shown."""
        return self.all(selector)[-1].get_property("textContent")

    def until(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < deadline, self.one("body").text
            time.sleep(0.05)
        return result

    def set(self, **settings: str) -> Page:
        for name, value in settings.items():
            self.driver.execute_script(
                "const f = document.getElementById(arguments[0]); f.value = arguments[1];"
                "f.dispatchEvent(new Event('input', {bubbles: true}));",
                name,
                value,
            )
        return self

    def type(self, text: str, selector: str = "#prompt") -> None:
        self.one(selector).send_keys(text)

    @property
    def busy(self) -> bool:
        return self.one("#stop").is_displayed()

    def answered(self) -> None:
        self.until(lambda: not self.busy)

    def ask(self, text: str) -> None:
        self.type(text + Keys.ENTER)
        self.answered()

    def module(self, code: str, *arguments: Any) -> Any:
        """Run code that may import the page's modules and returns a value."""
        self.driver.set_script_timeout(60)
        script = f"const done = arguments[arguments.length - 1]; (async (...args) => {{ {code} }})(...arguments)"
        result = self.driver.execute_async_script(script + ".then(done, (e) => done({failed: String(e)}))", *arguments)
        assert not (isinstance(result, dict) and "failed" in result), result
        return result

    def complaints(self) -> list[str]:
        """What the browser's console was told: errors, and anything the Content-Security-Policy blocked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def page(nano: Server, tmp_path: Path) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS.split(), f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Page(driver, nano)
    finally:
        driver.quit()


def reference(server: Server, messages: list[dict], **options: Any) -> Any:
    return server.client.chat.completions.create(model="nano", messages=messages, **options)  # type: ignore[call-overload]


def test_an_answer_streams_in_and_equals_the_api(page: Page) -> None:
    page.open().set(temperature="0", max_tokens="60")
    page.type(STORY + Keys.ENTER)
    lengths = set()
    while page.busy:
        lengths.add(len(page.text(".markdown")))
    assert len(lengths - {0}) >= 4, "the text must grow while it is generated"
    answer = reference(page.server, [{"role": "user", "content": STORY}], temperature=0, max_tokens=60)
    shown = page.text(".markdown")
    assert shown.split() == answer.choices[0].message.content.split()
    figures = page.text(".figures")
    assert re.match(r"TTFT \d+\.\d\d? s · \d+\.\d tokens/s · ", figures), figures
    assert f"{answer.usage.prompt_tokens} in, {answer.usage.completion_tokens} out" in figures
    assert page.one("#announce").text == "Answer complete" and page.text(".user .plain") == STORY
    assert page.complaints() == []


def test_settings_and_earlier_turns_reach_the_model(page: Page) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 24}
    page.open().set(system="You are a pirate.", top_k="20", **{name: str(value) for name, value in options.items()})
    told: list[dict] = [{"role": "system", "content": "You are a pirate."}]
    for question in ("Who are you?", STORY):
        page.ask(question)
        told.append({"role": "user", "content": question})
        answer = reference(page.server, told, extra_body={"top_k": 20}, **options)
        told.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert page.text(".markdown").split() == answer.choices[0].message.content.split()
        assert f"{answer.usage.prompt_tokens} in, {answer.usage.completion_tokens} out" in page.text(".figures")
    page.open()
    assert page.one("#system").get_property("value") == "You are a pirate."
    page.one("#reset").click()
    page.open()
    assert page.one("#system").get_property("value") == page.one("#seed").get_property("value") == ""


@pytest.mark.parametrize("choice", ["off", "on", "max"])
def test_thinking_is_folded(page: Page, choice: str) -> None:
    page.open().set(temperature="0", max_tokens="60", thinking=choice)
    page.ask(STORY)
    extra = {"thinking": {"type": "disabled" if choice == "off" else "enabled"}}
    extra |= {"reasoning_effort": choice} if choice == "max" else {}
    answer = reference(
        page.server, [{"role": "user", "content": STORY}], temperature=0, max_tokens=60, seed=1, extra_body=extra
    )
    (details,) = page.all("details.thinking")
    if choice == "off":
        assert not details.is_displayed() and page.text(".thinking .plain") == ""
        return
    # Thinking is sampled at temperature 1, whatever was asked: only the prompts can be compared.
    assert f"{answer.usage.prompt_tokens} in" in page.text(".figures")
    assert details.is_displayed() and not details.get_property("open")
    assert page.text(".thinking .plain") and not page.one(".thinking .plain").is_displayed()
    assert re.fullmatch(r"Thought for \d+\.\d+ s", page.text(".thinking summary"))
    page.one(".thinking summary").click()
    assert page.one(".thinking .plain").is_displayed()


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_ends_the_request(page: Page, by: str) -> None:
    aborted = page.server.metric("deepinfer:request_success_total", finished_reason="abort")
    page.open().set(seed="5")
    page.type("Tell me a very long story about the sea, the wind and the old town." + Keys.ENTER)
    page.until(lambda: len(page.text(".markdown")) > 10)
    if by == "button":
        page.one("#stop").click()
    else:
        page.type(Keys.ESCAPE)
    page.answered()
    text = page.text(".markdown")
    page.server.wait_for("deepinfer:num_requests_running", 0)
    page.server.wait_for("deepinfer:request_success_total", aborted + 1, finished_reason="abort")
    assert page.text(".markdown") == text and page.text(".figures").endswith("stopped")
    assert page.one("#announce").text == "Stopped" and not page.one(".error").is_displayed()
    assert page.driver.switch_to.active_element.get_attribute("id") == "prompt"
    page.set(max_tokens="4").ask("And then?")  # the conversation goes on
    assert len(page.all(".message")) == 4 and page.text(".markdown")


def test_regenerate_and_edit(page: Page) -> None:
    page.open().set(seed="1", max_tokens="12")
    page.ask("What is a lighthouse?")
    page.ask("And a ship?")
    first, second = (element.get_property("textContent") for element in page.all(".markdown"))
    page.set(seed="2")
    (regenerate,) = (element for element in page.all(".regenerate") if element.is_displayed())
    regenerate.click()
    page.answered()
    assert len(page.all(".message")) == 4 and page.all(".markdown")[0].get_property("textContent") == first
    assert page.text(".markdown") != second
    page.type(Keys.ARROW_UP)
    assert page.one("#editing").is_displayed() and page.one("#prompt").get_property("value") == "And a ship?"
    page.type(Keys.ESCAPE)
    assert not page.one("#editing").is_displayed() and page.one("#prompt").get_property("value") == ""
    page.type(Keys.ARROW_UP)
    page.set(seed="1")
    page.one("#prompt").clear()
    page.ask("And a ship?")
    assert [element.get_property("textContent") for element in page.all(".markdown")] == [first, second]
    assert len(page.all(".message")) == 4


def test_a_tool_call_is_a_card_that_takes_the_result(page: Page) -> None:
    page.open().set(temperature="0", max_tokens="100", tools=json.dumps([WEATHER]))
    question = "What is the weather in Paris?"
    page.ask(question)
    answer = reference(
        page.server, [{"role": "user", "content": question}], temperature=0, max_tokens=100, tools=[WEATHER]
    )
    (call,) = answer.choices[0].message.tool_calls
    assert page.text(".call .name") == call.function.name == "get_weather"
    assert json.loads(page.text(".call .arguments")) == json.loads(call.function.arguments)
    page.type('{"degrees": 18, "sky": "<b>clear</b>"}', ".call textarea")
    page.one(".send-results").click()
    page.until(lambda: len(page.all(".message")) == 3)
    page.answered()
    assert page.text(".call .result pre") == '{"degrees": 18, "sky": "<b>clear</b>"}'
    assert not page.all(".send-results") and page.text(".message:last-child .markdown")
    page.set(tools="[{").ask("Again?")
    assert "not JSON" in page.text(".error")


def test_errors_are_shown_in_the_servers_words(page: Page) -> None:
    page.open().set(temperature="9")
    page.ask("Hello")
    with pytest.raises(openai.BadRequestError) as refused:
        reference(page.server, [{"role": "user", "content": "Hello"}], temperature=9)
    assert page.text(".error") == f"{refused.value.body['message']} (400)"  # type: ignore[index]
    page.set(temperature="0", max_tokens="4")
    page.one(".message.last .regenerate").click()
    page.until(lambda: page.text(".markdown"))
    assert not page.one(".error").is_displayed()


def test_the_api_key_is_asked_for_and_kept_in_the_tab(page: Page, server: Server) -> None:
    page.driver.get(server.url)
    page.until(lambda: "API key" in page.one("#served").text)
    assert page.driver.switch_to.active_element.get_attribute("id") == "key"
    page.type(KEY + Keys.ENTER, "#key")
    page.until(lambda: page.all("#model option"))
    stores = page.driver.execute_script("return [{...sessionStorage}, {...localStorage}]")
    assert KEY in stores[0].values() and KEY not in json.dumps(stores[1])
    page.set(max_tokens="3").ask("Hello")
    assert ", 3 out" in page.text(".figures")
    page.driver.get(server.url + "/status")  # the same tab: the key is there
    page.until(lambda: page.all("#info tr"))


def test_the_status_page_asks_for_the_key_too(page: Page, server: Server) -> None:
    page.driver.get(server.url + "/status")
    page.until(lambda: page.one("#key-form").is_displayed() and page.text("#health") == "ready")
    page.type("wrong" + Keys.ENTER, "#key")
    page.until(lambda: "wrong API key" in page.one("#key-error").text)
    page.one("#key").clear()
    page.type(KEY + Keys.ENTER, "#key")
    page.until(lambda: page.all("#info tr"))
    assert not page.one("#key-form").is_displayed()


def test_export(page: Page, tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.open().set(max_tokens="8", seed="4").ask("Hello")
    page.one("#export").click()
    path = tmp_path / "chat.json"
    page.until(path.exists)
    saved = json.loads(path.read_text())
    user, answer = saved["messages"]
    assert (user["role"], user["content"]) == ("user", "Hello") and saved["settings"]["seed"] == "4"
    assert answer["content"].split() == page.text(".markdown").split()
    assert answer["statistics"]["tokens"] == answer["usage"]["completion_tokens"]
    page.one("#new-chat").click()
    assert page.all(".message") == [] and page.one("#welcome").is_displayed()


def test_copy(page: Page) -> None:
    grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": page.server.url}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", grant)
    page.open().set(max_tokens="8", temperature="0").ask("Hello")
    (copy,) = (item for item in page.all(".assistant .actions button") if item.text == "Copy")
    copy.click()
    page.until(lambda: copy.text == "Copied")
    assert page.module("return navigator.clipboard.readText()").split() == page.text(".markdown").split()


def test_hostile_text_is_inert_everywhere(page: Page) -> None:
    page.open().set(max_tokens="1")
    for text in HOSTILE[:2]:
        page.ask(text)
        assert page.text(".user .plain") == text
    page.module(
        """const {answerView} = await import("/web/view.js"); const {newAnswer} = await import("/web/conversation.js");
        for (const text of args[0]) {
            const call = {id: text, type: "function", function: {name: text, arguments: text}};
            const answer = {...newAnswer(), content: text, reasoning: text, error: text, tool_calls: [call]};
            const view = answerView(answer, (id) => id, {});
            view.update(false);
            view.element.querySelectorAll("details").forEach((details) => { details.open = true; });
            document.getElementById("messages").append(view.element);
        }""",
        HOSTILE,
    )
    time.sleep(0.3)
    assert page.driver.execute_script("return window.hit") is None
    for text, element in zip(HOSTILE, page.all(".message")[4:], strict=True):
        for selector in (".thinking .plain", ".error", ".name", ".arguments", ".result pre"):
            assert element.find_element(By.CSS_SELECTOR, selector).get_property("textContent") == text
    found = page.driver.execute_script(
        "return [...document.querySelectorAll('.markdown *')].map("
        "(e) => [e.localName, e.getAttributeNames(), e.getAttribute('href')])"
    )
    assert {tag for tag, _, _ in found} <= TAGS
    assert {name for _, names, _ in found for name in names} <= {"class", "type", "href", "target", "rel", "tabindex"}
    links = [link for _, _, link in found if link]
    assert links and all(link.startswith(("https://", "http://", "mailto:")) for link in links)
    assert page.driver.execute_script(
        "try { document.body.innerHTML = 'x'; return 'set' } catch { return 'refused' }"
    ) == ("refused")


def test_markdown(page: Page) -> None:
    cases = {
        "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
        "# A *b*\n## C ##": "<h3>A <em>b</em></h3><h4>C</h4>",
        "- a\n  - b\n    c\n\n- d": "<ul><li>a<ul><li>b<br>c</li></ul></li><li>d</li></ul>",
        "- a\n- b\n\n1. x": "<ul><li>a</li><li>b</li></ul><ol><li>x</li></ol>",
        "1. x\n   - y\n2. z": "<ol><li>x<ul><li>y</li></ul></li><li>z</li></ol>",
        "a | b\n--|--\n`c` | d": '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td><code>c</code></td><td>d</td></tr></tbody></table></div>",
        "3. x": '<ol start="3"><li>x</li></ol>',
        "> a\n> b": "<blockquote><p>a<br>b</p></blockquote>",
        "**a** `b*c*` ~~d~~ 2 * 3 * 4": "<p><strong>a</strong> <code>b*c*</code> <del>d</del> 2 * 3 * 4</p>",
        "snake_case_name < & >": "<p>snake_case_name &lt; &amp; &gt;</p>",
        "---": "<hr>",
        "a | b": "<p>a | b</p>",
    }
    render = """const {renderMarkdown} = await import("/web/markdown.js");
        return args[0].map((text) => { const e = document.createElement("div"); renderMarkdown(e, text);
            return e.innerHTML.replaceAll(' start="1"', ""); });"""
    shown = dict(zip(cases, page.open().module(render, list(cases)), strict=True))
    assert shown == cases
    link = page.module(render, ["see https://example.com/a_(b)."])[0]
    assert 'href="https://example.com/a_(b)"' in link and link.endswith("</a>.</p>")


def test_markdown_that_streams_ends_as_if_it_came_at_once(page: Page) -> None:
    texts = [*HOSTILE, "# T\n\n- a\n  1. b\n\n\n```py\nx = 1\n\n```\nend | x\n|-|-|\n| 1 | **2** |\n\n> q\n"]
    equal = page.open().module(
        """const {renderMarkdown} = await import("/web/markdown.js");
        return args[0].map((text) => {
            const [whole, grown] = [document.createElement("div"), document.createElement("div")];
            renderMarkdown(whole, text);
            for (let end = 1; end <= text.length; end += 1) renderMarkdown(grown, text.slice(0, end));
            return whole.innerHTML === grown.innerHTML;
        });""",
        texts,
    )
    assert equal == [True] * len(texts)


def test_markdown_of_hostile_length_is_drawn_in_time(page: Page) -> None:
    texts = [
        piece * (20_000 // len(piece)) for piece in ("*", "**a ", "[", "`", "> ", "- ", "|", "# ", " ", "![](", "~~")
    ]
    seconds = page.open().module(
        """const {renderMarkdown} = await import("/web/markdown.js");
        return args[0].map((text) => { const start = performance.now();
            renderMarkdown(document.createElement("div"), text); return (performance.now() - start) / 1000; });""",
        texts,
    )
    assert max(seconds) < 5, dict(zip((text[:4] for text in texts), seconds, strict=True))


def test_events_are_read_however_they_are_cut(page: Page) -> None:
    stream = 'data: {"a": "é✓"}\r\n\r\n: note\nevent: x\ndata:1\ndata: 2\n\nid: 3\n\ndata: [DONE]\r\r'
    read = page.open().module(
        """const {readEvents} = await import("/web/api.js");
        const bytes = new TextEncoder().encode(args[0]);
        const results = [];
        for (let cut = 0; cut <= bytes.length; cut += 1) for (const step of [bytes.length, 1]) {
            const stream = new ReadableStream({ start(controller) {
                for (let at = 0; at < cut; at += step) controller.enqueue(bytes.slice(at, Math.min(cut, at + step)));
                controller.enqueue(bytes.slice(cut)); controller.close();
            } });
            const found = [];
            for await (const data of readEvents(stream)) found.push(data);
            results.push(found);
        }
        return results;""",
        stream,
    )
    # The final "\r" might be half of "\r\n": the event it would end is not complete.
    assert len(read) > 100 and all(found[:2] == ['{"a": "é✓"}', "1\n2"] for found in read)


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


def test_images_wait_for_a_model_that_sees(page: Page, tmp_path: Path) -> None:
    picture = tmp_path / "dot.png"
    picture.write_bytes(bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100"
        "18dd8db00000000049454e44ae426082"
    ))  # fmt: skip
    page.open()
    assert not page.one("#add-image").is_displayed()
    flag = """const real = fetch; window.fetch = async (path, options) => {
        const answer = await real(path, options);
        return path === "/server_info" ? Response.json({...await answer.json(), vision: true}) : answer; };"""
    page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": flag})
    page.open()
    page.until(lambda: page.one("#add-image").is_displayed())
    page.type(str(picture), "#image-file")
    page.until(lambda: page.all("#images img"))
    page.ask("What is this?")
    assert page.all(".user .bubble img") and not page.one("#images").is_displayed()
    url = page.one(".user .bubble img").get_attribute("src")
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(openai.APIStatusError) as refused:
        reference(page.server, [{"role": "user", "content": parts}])
    assert refused.value.body["message"] in page.text(".error")  # type: ignore[index]


def test_the_driver_is_of_the_browser() -> None:
    """A mismatch shows here, rather than as a failure of every test."""
    versions = [
        subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        for program in (CHROMIUM, "chromedriver")
    ]
    assert len({re.search(r"(\d+)\.", version)[1] for version in versions}) == 1, versions  # type: ignore[index]
