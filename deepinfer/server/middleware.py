"""What happens to every request before and after its route: request ID, API key, counting."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer.server.errors import ApiError, error_response
from deepinfer.server.metrics import Metrics

logger = logging.getLogger("deepinfer.server.requests")
OPEN_PATHS = ("/health", "/ping", "/ready", "/metrics")  # answered without an API key
_REQUEST_ID = re.compile(rb"[\w.:/=+-]{1,128}", re.ASCII)


def on_start(send: Send, act: Callable[[Message], None]) -> Send:
    """`send`, with a look at the message that starts the answer."""

    async def watch(message: Message) -> None:
        if message["type"] == "http.response.start":
            act(message)
        await send(message)

    return watch


class StripRootPath:
    """A proxy in front puts `root_path` before every path, and may leave it there."""

    def __init__(self, app: ASGIApp, root_path: str):
        self.app, self.root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self.root_path + "/"):
            scope["path"] = scope["path"].removeprefix(self.root_path)
        await self.app(scope, receive, send)


class GiveRequestId:
    """`request.state.request_id`, and the header X-Request-Id: the client's own if it is sensible, else a new one."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        def add_header(message: Message) -> None:
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = request_id
            if scope["path"].startswith("/v1/messages"):
                headers["request-id"] = request_id  # where Anthropic's clients look

        await self.app(scope, receive, on_start(send, add_header))


class RequireKey:
    """401 without the key, as `Authorization: Bearer KEY` or `x-api-key: KEY`, on every path but `open_paths`.

    No keys means no check.  `request.state.owner` tells keys apart.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: tuple[str, ...] = OPEN_PATHS):
        self.app, self.keys, self.open_paths = app, [key.encode() for key in keys], frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.keys or scope["path"] in self.open_paths:
            await self.app(scope, receive, send)
            return
        number = self._key_number(scope)
        if number is None:
            message = "missing or wrong API key; send `Authorization: Bearer KEY` (or `x-api-key: KEY`)"
            await error_response(scope, ApiError(message, 401, code="invalid_api_key"))(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = str(number)
        await self.app(scope, receive, send)

    def _key_number(self, scope: Scope) -> int | None:
        headers = dict(scope["headers"])
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer.strip() if kind.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
        # Every key is compared, each in constant time, so that the answer's timing tells nothing.
        matches = [[hmac.compare_digest(key, known) for key in given] for known in self.keys]
        return next((number for number, found in enumerate(matches) if any(found)), None)


class CountRequests:
    """http_requests_total by route template (never by raw path: clients could make up endless ones)."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status: dict[str, Any] = {"code": 500}
        began = time.monotonic()
        try:
            await self.app(scope, receive, on_start(send, lambda message: status.update(code=message["status"])))
        finally:
            handler = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "POST", "DELETE") else "other"
            self.metrics.http_requests.labels(handler, method, str(status["code"])).inc()
            self.metrics.http_seconds.labels(handler, method).observe(time.monotonic() - began)


class LogRequests:
    """One line a request: how it was answered, and how many tokens it had; never what they said.

    Those that machines ask all the time (OPEN_PATHS) are logged at level debug, those of `quiet_paths` not at all.
    """

    def __init__(self, app: ASGIApp, quiet_paths: frozenset[str] = frozenset()):
        self.app, self.quiet_paths = app, quiet_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.quiet_paths:
            await self.app(scope, receive, send)
            return
        status: dict[str, Any] = {"code": 500}
        began = time.monotonic()
        try:
            await self.app(scope, receive, on_start(send, lambda message: status.update(code=message["status"])))
        finally:
            self._log(scope, status["code"], time.monotonic() - began)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
        if not logger.isEnabledFor(level):
            return
        # The route's template: a path may hold anything that a client made up.
        route = getattr(scope.get("route"), "path", "unknown route")
        fields = {
            "request_id": scope["state"]["request_id"],
            "method": scope["method"],
            "route": route,
            "status": status,
            "duration_s": round(seconds, 6),
        }
        facts = scope["state"].get("facts")
        told = ""
        if facts is not None:
            fields |= {"prompt_tokens": facts.prompt_tokens, "completion_tokens": facts.completion_tokens}
            fields["ttft_s"] = None if facts.ttft is None else round(facts.ttft, 6)
            told = f", {facts.prompt_tokens} prompt and {facts.completion_tokens} generated tokens"
            told += "" if facts.ttft is None else f", TTFT {facts.ttft:.3f} s"
        text = f"{fields['request_id']} {scope['method']} {route} {status}{told}, {seconds:.3f} s"
        logger.log(level, "%s", text, extra={"fields": fields})
