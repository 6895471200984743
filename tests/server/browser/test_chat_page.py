"""The chat page in a real browser, over a real server on nano."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import openai
import pytest

from tests.server.process import KEY, Server

pytest.importorskip("selenium")
from selenium.webdriver.common.keys import Keys  # noqa: E402

from tests.server.browser.page import CHROMIUM, STORY, WEATHER, Page, reference  # noqa: E402

pytestmark = pytest.mark.web


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


@pytest.mark.skipif(not CHROMIUM or not shutil.which("chromedriver"), reason="no Chromium or no chromedriver")
def test_the_driver_is_of_the_browser() -> None:
    """A mismatch shows here, rather than as a failure of every test."""
    assert CHROMIUM is not None
    versions = [
        subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        for program in (CHROMIUM, "chromedriver")
    ]
    assert len({re.search(r"(\d+)\.", version)[1] for version in versions}) == 1, versions  # type: ignore[index]
