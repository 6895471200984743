"""What the model writes becomes text on the page, whatever it is."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By  # noqa: E402

from tests.server.browser.page import HOSTILE, Page  # noqa: E402

pytestmark = pytest.mark.web
TAGS = {
    "p", "br", "a", "code", "strong", "em", "del", "h3", "h4", "h5", "h6", "hr", "blockquote", "ul", "ol", "li", "div",
    "span", "pre", "button", "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip


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
