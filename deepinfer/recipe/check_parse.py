"""Parse vectors: output chunks to events and response, at every way of cutting the text (recipe spec, 7)."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deepinfer.recipe.chat_stream import ChatStream
from deepinfer.recipe.check_render import Vector, convert
from deepinfer.recipe.compare import first_difference
from deepinfer.recipe.known_differences import PARSE_DIFFERENCES, Difference
from deepinfer.recipe.messages_stream import MessagesStream
from deepinfer.recipe.responses_stream import ResponsesStream
from deepinfer.recipe.tokenizer import Tokenizer

CREATED = 1700000000
STREAMS: dict[str, Callable[..., Any]] = {
    "chat": ChatStream,
    "responses": ResponsesStream,
    "messages": MessagesStream,
}
_RANDOM_CUTS = 20


def check_parse(vector: Vector, tokenizer: Tokenizer | None) -> str | None:
    """The first difference between a parse vector and what we do, or None.

    Without a tokenizer reasoning tokens are unknown and not compared.
    """
    known = PARSE_DIFFERENCES.get(vector["name"], Difference(""))
    expected_error = vector.get("expected_error")
    try:
        actual = _replay(vector, tokenizer)
    except ValueError as error:
        if expected_error is None:
            return f"refused: {error}"
        return None if str(error) == expected_error["message"] else f"message {error}, expected {expected_error}"
    if expected_error is not None:
        return f"accepted, but should be refused: {expected_error}"
    expected = {key: vector[key] for key in actual}
    if tokenizer is None:
        expected, actual = _without_reasoning_counts(expected), _without_reasoning_counts(actual)
    difference = first_difference(expected, actual, known)
    if difference or not vector["final_invariant_under_chunking"]:
        return difference
    return _check_chunkings(vector, actual["expected_response"], known)


def _replay(vector: Vector, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What the chunks of a vector give, under the vector's names."""
    stream = _new_stream(vector, tokenizer)
    per_push: list[list[dict[str, Any]]] = []
    finished = False
    for chunk in vector["chunks"]:
        match chunk["kind"]:
            case "ready":
                usage = chunk.get("prompt_usage") or {}
                events = stream.start(
                    usage.get("prompt_tokens", 0), usage.get("prompt_cache_hit_tokens", 0), chunk["system_fingerprint"]
                )
            case "text":
                events = stream.push_text(chunk["content"], chunk["token_count"])
            case "tokens":
                events = stream.push_tokens(chunk["token_ids"], chunk.get("logprobs"))
            case _:
                events = stream.finish(chunk["finish_reason"])
                finished = True
        per_push.append(events)
    if not finished:
        per_push.append(stream.finish())
    return {
        "expected_events_per_push": [
            [{"event": stream.event_name(event), "data": event} for event in events] for events in per_push
        ],
        "expected_response": stream.response(),
        "done_message": stream.done_message,
    }


def _new_stream(vector: Vector, tokenizer: Tokenizer | None) -> Any:
    issued: list[str] = []

    def new_id(index: int, empty_reasoning: bool) -> str:
        issued.append(f"call_{index:02}_{'ET_' if empty_reasoning else ''}R{len(issued)}")
        return issued[-1]

    request = convert(vector)
    clock = {"now": lambda: CREATED} if vector["protocol"] == "responses" else {}
    return STREAMS[vector["protocol"]](
        request, id=vector["id"], model=vector["model"], created=CREATED, tokenizer=tokenizer, new_id=new_id, **clock
    )


def _check_chunkings(vector: Vector, response: Any, known: Difference) -> str | None:
    """The response must not depend on how the text was cut: at each place, at random ones, into characters."""
    chunks = vector["chunks"]
    text = "".join(chunk["content"] for chunk in chunks if chunk["kind"] == "text")
    before = [chunk for chunk in chunks if chunk["kind"] == "ready"]
    after = [chunk for chunk in chunks if chunk["kind"] == "finish"]
    for cuts in _cuttings(len(text)):
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        pushed = [{"kind": "text", "content": piece, "token_count": 1} for piece in pieces]
        actual = _replay({**vector, "chunks": [*before, *pushed, *after]}, None)["expected_response"]
        difference = first_difference(_without_usage(response), _without_usage(actual), known)
        if difference:
            return f"cut into {pieces}: {difference}"
    return None


def _cuttings(length: int) -> Iterator[Sequence[int]]:
    yield from ([cut] for cut in range(length + 1))
    yield list(range(1, length))
    chooser = random.Random(length)
    for _ in range(_RANDOM_CUTS):
        yield sorted(chooser.sample(range(length + 1), chooser.randint(0, min(length, 12))))


def _without_usage(response: Any) -> Any:
    return {key: value for key, value in response.items() if key != "usage"} if isinstance(response, dict) else response


def _without_reasoning_counts(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("completion_tokens_details", "output_tokens_details")
        return {key: _without_reasoning_counts(entry) for key, entry in value.items() if key not in hidden}
    return [_without_reasoning_counts(entry) for entry in value] if isinstance(value, list) else value
