"""A model behind any server of OpenAI's Chat Completions, for `deepinfer chat --url`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from deepinfer.bench.serve_client import error_message, events
from deepinfer.commands.chat import Said
from deepinfer.params import SamplingParams

# Fields of SamplingParams that are sent if they were given.
_SENT = (
    "temperature", "top_p", "max_tokens", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "force_topk",
)  # fmt: skip


class RemoteModel:
    """The first model that the server lists.  A context manager.  Raises ValueError if the server does not answer."""

    def __init__(self, url: str, api_key: str | None, params: SamplingParams, thinking: bool):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url must start with http:// or https://, got {url!r}")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        default = SamplingParams()
        names = [name for name in _SENT if getattr(params, name) != getattr(default, name)]
        self._options: dict[str, Any] = {name: getattr(params, name) for name in names}
        if thinking:
            self._options |= {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": True}}

    def __enter__(self) -> RemoteModel:
        try:
            answer = httpx.get(f"{self._base}/models", headers=self._headers, timeout=30)
            if answer.status_code != 200:
                raise ValueError(f"--url {self._base}: HTTP {answer.status_code}: {error_message(answer.content)}")
            self.name = str(answer.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise ValueError(f"--url {self._base}: {error or repr(error)}") from None
        except (LookupError, TypeError):
            raise ValueError(f"--url {self._base}: the server lists no model") from None
        return self

    def __exit__(self, *_: object) -> None: ...

    async def answer(self, messages: list[dict[str, Any]]) -> AsyncIterator[Said]:
        """Counts tokens by what the server says in the end."""
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with (
                httpx.AsyncClient(headers=self._headers, timeout=None) as http,
                http.stream("POST", f"{self._base}/chat/completions", json=body | self._options) as answer,
            ):
                if answer.status_code != 200:
                    raise ValueError(error_message(await answer.aread()))
                async for data in events(answer):
                    if data != "[DONE]":
                        for said in _pieces(json.loads(data)):
                            yield said
        except httpx.HTTPError as error:
            raise ValueError(f"the connection was lost: {error or repr(error)}") from None


def _pieces(chunk: dict[str, Any]) -> list[Said]:
    if "error" in chunk:
        raise ValueError(chunk["error"].get("message", "the server failed"))
    said = []
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            said.append(Said(reasoning, is_reasoning=True))
        if content := delta.get("content"):
            said.append(Said(content))
    if usage := chunk.get("usage"):
        said.append(Said("", tokens=usage["completion_tokens"], prompt_tokens=usage["prompt_tokens"]))
    return said
