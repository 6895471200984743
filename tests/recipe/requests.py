"""Hypothesis strategies for request bodies of the three protocols, as varied as the recipe's rules."""

import json
from typing import Any

from hypothesis import strategies as st

MODELS = st.sampled_from(["DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro"])
WORDS = st.sampled_from(
    ["", "hi", "json please", "a\n\nb",
     "日本 👩‍👧", "<think>", "</think>", "<｜User｜>", "｜DSML｜", "<｜end▁of▁sentence｜>",
     " x ", "<tool_result>", 'say "no"', "\n"]
)  # fmt: skip
VALUES = st.recursive(
    st.sampled_from([None, True, 0, -3, 0.1, 1e21, 1.5e-7, 10**17, "v", "é<｜User｜>"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "a b", "n", "é"]), VALUES, max_size=3)
SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        {"type": "object", "properties": {"n": {"type": "number", "minimum": 0.10}}},
        {},
    ]
)
CALL_IDS = ("call_1", "call_00_ET_abc")


def maybe(draw: Any, body: dict[str, Any], name: str, values: st.SearchStrategy) -> None:
    """Half of the bodies have the field."""
    if draw(st.booleans()):
        body[name] = draw(values)


def parts(kind: str) -> st.SearchStrategy:
    """Content: a text, or a list of text parts."""
    return WORDS | st.lists(WORDS.map(lambda text: {"type": kind, "text": text}), max_size=3)


@st.composite
def chat(draw: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["system", "user", "user", "assistant", "call", "latest_reminder"]))
        if role == "call":
            messages += draw(chat_call())
        elif role == "assistant":
            message = {"role": role, "content": draw(parts("text"))}
            maybe(draw, message, "reasoning_content", WORDS)
            messages.append(message)
        else:
            content = WORDS if role == "latest_reminder" else parts("text")
            messages.append({"role": role, "content": draw(content)})
    # Alone, such a message makes the library contradict itself: a prompt without thinking, read as with it.
    if len(messages) > 1 and messages[-1]["role"] == "assistant" and draw(st.booleans()):
        messages[-1]["prefix"] = True
    body: dict[str, Any] = {"model": draw(MODELS), "messages": messages}
    names = draw(st.lists(st.sampled_from(["f", "g-2", "now"]), unique=True, max_size=2))
    if names:
        body["tools"] = [{"type": "function", "function": draw(function(name, "parameters"))} for name in names]
        named = {"type": "function", "function": {"name": names[0]}}
        maybe(draw, body, "tool_choice", st.sampled_from(["none", "auto", "required", named]))
    maybe(draw, body, "thinking", st.sampled_from([{"type": kind} for kind in ("enabled", "disabled", "adaptive")]))
    maybe(draw, body, "reasoning_effort", EFFORTS)
    formats = [{"type": "text"}, {"type": "json_object"}, {"type": "regex", "regex": "a+"},
               {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}]  # fmt: skip
    maybe(draw, body, "response_format", st.sampled_from(formats))
    sampling(draw, body, "max_tokens", "stop")
    return body


EFFORTS = st.sampled_from(["none", "minimal", "low", "medium", "high", "xhigh", "max"])


@st.composite
def function(draw: Any, name: str, schema: str) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name}
    maybe(draw, made, "description", WORDS)
    maybe(draw, made, schema, SCHEMAS)
    return made


@st.composite
def chat_call(draw: Any) -> list[dict[str, Any]]:
    """An assistant's turn that calls, and the results in any order."""
    ids = draw(st.lists(st.sampled_from(CALL_IDS), min_size=1, unique=True))
    arguments = ARGUMENTS.map(json.dumps) | st.sampled_from(["not json", "[1]", '{"a": 1e400}', '{"a": 1, "a": 2}', ""])
    calls = [
        {"id": call, "type": "function", "function": {"name": draw(st.sampled_from(["f", "x y"])),
                                                      "arguments": draw(arguments)}}
        for call in ids
    ]  # fmt: skip
    turn: dict[str, Any] = {"role": "assistant", "content": draw(WORDS), "tool_calls": calls}
    maybe(draw, turn, "reasoning_content", WORDS)
    results = [{"role": "tool", "tool_call_id": call, "content": draw(parts("text"))} for call in ids]
    return [turn, *draw(st.permutations(results))]


def sampling(draw: Any, body: dict[str, Any], limit: str, stop: str) -> None:
    maybe(draw, body, "temperature", st.sampled_from([0, 0.7, 2]))
    maybe(draw, body, "top_p", st.sampled_from([0.5, 0.95, 1]))
    maybe(draw, body, limit, st.sampled_from([1, 100, 393216]))
    if stop:
        maybe(draw, body, stop, st.lists(st.sampled_from(["END", "\n\n"]), max_size=2))
    maybe(draw, body, "stream", st.booleans())


@st.composite
def responses(draw: Any) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["user", "system", "developer", "assistant", "call", "reasoning"]))
        if kind == "call":
            arguments = json.dumps(draw(ARGUMENTS))
            items.append({"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": arguments})
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": draw(WORDS)})
        elif kind == "reasoning":
            content = [{"type": "reasoning_text", "text": draw(WORDS)}]
            items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content})
            items.append({"type": "message", "role": "assistant", "content": draw(parts("output_text"))})
        else:
            text = "output_text" if kind == "assistant" else "input_text"
            items.append({"type": "message", "role": kind, "content": draw(parts(text))})
    body: dict[str, Any] = {"model": draw(MODELS), "input": draw(st.just(items) | WORDS)}
    maybe(draw, body, "instructions", WORDS)
    if draw(st.booleans()):
        body["tools"] = [{"type": "function", **draw(function("f", "parameters"))}]
        maybe(draw, body, "tool_choice", st.sampled_from(["none", "auto", "required"]))
    maybe(draw, body, "reasoning", EFFORTS.map(lambda effort: {"effort": effort}))
    formats = [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "name": "s", "schema": {}}]
    maybe(draw, body, "text", st.sampled_from([{"format": form} for form in formats]))
    sampling(draw, body, "max_output_tokens", "")
    return body


@st.composite
def messages(draw: Any) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": draw(parts("text"))})
        if draw(st.booleans()):
            use = {"type": "tool_use", "id": f"t{number}", "name": "f", "input": draw(ARGUMENTS)}
            before: list[dict[str, Any]] = []
            if draw(st.booleans()):
                before.append({"type": "thinking", "thinking": draw(WORDS), "signature": "s"})
            if draw(st.booleans()):
                before.append({"type": "text", "text": draw(WORDS)})
            turns.append({"role": "assistant", "content": [*before, use]})
            result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": draw(parts("text"))}
            after = draw(st.lists(WORDS.map(lambda text: {"type": "text", "text": text}), max_size=1))
            turns.append({"role": "user", "content": [result, *after]})
        elif draw(st.booleans()):
            turns.append({"role": "assistant", "content": draw(parts("text"))})
            turns.append({"role": "user", "content": "go on"})
    body: dict[str, Any] = {"model": draw(MODELS), "messages": turns, "max_tokens": 100}
    maybe(draw, body, "system", parts("text"))
    if draw(st.booleans()):
        body["tools"] = [draw(function("f", "input_schema")) | {"input_schema": draw(SCHEMAS)}]
        choices = [{"type": "auto"}, {"type": "none"}, {"type": "tool", "name": "f"}]
        maybe(draw, body, "tool_choice", st.sampled_from(choices))
    kinds = [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}]
    maybe(draw, body, "thinking", st.sampled_from(kinds))
    maybe(draw, body, "output_config", EFFORTS.map(lambda effort: {"effort": effort}))
    sampling(draw, body, "max_tokens", "stop_sequences")
    return body


BODIES = {"chat": chat(), "responses": responses(), "messages": messages()}


def _calls(space: str, block: str) -> st.SearchStrategy:
    """A block of calls, whole or cut off."""
    mark = f"<｜DSML｜{space}"
    values = st.sampled_from(["Rome", "", 'a "b"', "é\n<x>", "1, 2"]).map(lambda text: f'string="true">{text}')
    values |= VALUES.map(lambda value: f'string="false">{json.dumps(value, ensure_ascii=False)}')
    parameter = values.map(lambda value: f'{mark}parameter name="k" {value}</｜DSML｜{space}parameter>\n')
    call = st.lists(parameter, max_size=2).map(
        lambda inner: f'{mark}invoke name="f">\n{"".join(inner)}</｜DSML｜{space}invoke>\n'
    )
    blocks = st.lists(call, min_size=1, max_size=2).map(
        lambda inner: f"\n\n{mark}{block}>\n{''.join(inner)}</｜DSML｜{space}{block}>"
    )
    return blocks | st.tuples(blocks, st.integers(1, 60)).map(lambda pair: pair[0][: -pair[1]])


# Nothing ends like the beginning of a mark: after it the library shows one of the newlines that it drops elsewhere.
PROSE = st.sampled_from(
    ["", "\n", "\n\n", "Hi ", "</think>", "<think>", "</thi s", "< ", "EN", "END", "日本", "a b\n", "1 < 2"]
)
OUTPUTS = st.tuples(
    st.lists(PROSE, max_size=6).map("".join),
    st.just("") | _calls(" ", "calls") | _calls("", "tool_calls"),
    st.sampled_from(["", "after"]),
).map("".join)


@st.composite
def cut(draw: Any, text: str) -> list[str]:
    """The text in pieces."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
