"""A browser on one of the server's pages."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.server.process import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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


def reference(server: Server, messages: list[dict], **options: Any) -> Any:
    return server.client.chat.completions.create(model="nano", messages=messages, **options)  # type: ignore[call-overload]
